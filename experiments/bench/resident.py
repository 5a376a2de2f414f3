"""Peak resident memory of a piece of work, measured in a fresh process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["peak", "restart_peak", "run_module"]

Row = dict[str, Any]
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def restart_peak() -> None:
    """Let the peak begin anew, where Linux allows it."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")


def peak() -> int:
    """Peak resident set of this process in bytes."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def run_module(module: str, *arguments: str, timeout: float) -> Row:
    """The JSON object that a module of the bench prints last when it is run; an error row if it does not.

    Args:
        module: its name in this package.
        *arguments: for its command line.
        timeout: seconds.
    """
    command = [sys.executable, "-m", f"ot_newton.experiments.bench.{module}", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        return {"status": "ERROR", "message": f"not done within {timeout:g} s"}
    if done.returncode != 0:
        last = (done.stderr.splitlines() or ["no message"])[-1]
        return {"status": "ERROR", "message": f"exit status {done.returncode}: {last}"}
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row
