"""A child process in which Triton interprets its kernels, or compiles them: it decides that when imported.

The child reads one JSON request per line and answers each with one line; it ends when its input does, so
that it never outlives the process that asked. What it prints otherwise goes to its standard error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Child", "child", "close_children", "need_triton", "serve"]

Answer = dict[str, Any]


def need_triton(study: str) -> None:
    """Refuse before any work where there is no Triton.

    Args:
        study: who needs it, for the message.

    Raises:
        ValueError: it is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"{study} needs the package triton, which exists for Linux only: install it there (pip install "
            f"triton); rows made elsewhere can be drawn with `ot-newton plot DIR`"
        )


class Child:
    """One process that answers requests.

    Args:
        module: run with ``-m``; its main part calls `serve`.
        interpret: whether kernels are interpreted there, else they are compiled.
    """

    def __init__(self, module: str, *, interpret: bool) -> None:
        env = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
        self.module = module
        self._errors = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=env,
        )

    def ask(self, request: Mapping[str, Any]) -> Answer:
        """The answer to a request.

        Raises:
            RuntimeError: the child could not answer, or died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(dict(request)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the child process {self.module} ended: {self._last_words()}")
        answer: Answer = json.loads(line)
        if "failure" in answer:
            raise RuntimeError(f"in the child process {self.module}: {answer['failure']}")
        return answer

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or [f"exit status {status}, no message"])[-1]

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it and wait."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()
        self._errors.close()


_children: dict[tuple[str, bool], Child] = {}


def child(module: str, *, interpret: bool) -> Child:
    """The child of this process for a module, started when there is none: importing Triton takes seconds."""
    key = (module, interpret)
    if key in _children and not _children[key].alive:
        _children.pop(key).close()
    if key not in _children:
        _children[key] = Child(module, interpret=interpret)
    return _children[key]


def close_children() -> None:
    """End all children of this process."""
    while _children:
        _children.popitem()[1].close()


def serve(answer: Callable[[Answer], Mapping[str, Any]]) -> None:
    """The loop of a child: answer requests until the input ends.

    Args:
        answer: of a request; what it raises is reported and the loop goes on.
    """
    # Whatever a library prints must not mix with the answers.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in sys.stdin:
            try:
                text = json.dumps(dict(answer(json.loads(line))))
            except Exception as error:  # noqa: BLE001  the asking process reports it
                text = json.dumps({"failure": f"{type(error).__name__}: {error}"})
            out.write(text + "\n")
            out.flush()
