"""What the interpreted kernel tests share; imported only in child processes with TRITON_INTERPRET=1.

Triton decides at import whether kernels are compiled or interpreted, so the two kinds of test live in
different processes: `run_interpreted` starts a child pytest on files whose names pytest does not collect.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

__all__ = ["patch_once", "poisoned", "run_interpreted"]


def run_interpreted(file: str) -> int:
    """Run a file of tests in a child pytest under the interpreter; all must pass; returns how many did."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    path = Path(__file__).with_name(file)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    done = subprocess.run(
        command, env=env, cwd=path.parents[1], capture_output=True, text=True, timeout=900, check=False
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert passed is not None
    return int(passed.group(1))


def patch_once() -> None:
    """Patch `triton.language` for the interpreter once instead of at every call of a device function.

    The patching itself takes most of the interpreter's time; nothing else runs in a child process.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()


@contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialized floating-point tensors hold NaN: a kernel that leaves an element unwritten shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(t: torch.Tensor) -> torch.Tensor:
        return t.fill_(float("nan")) if t.is_floating_point() else t

    with (
        mock.patch.object(torch, "empty", lambda *a, **k: fill(empty(*a, **k))),
        mock.patch.object(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k))),
    ):
        yield
