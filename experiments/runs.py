"""Runs of an experiment: one JSON line each, written as it ends; a rerun does only what is missing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ot_newton.errors import check_integer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "RowFile",
    "Task",
    "check_folder",
    "load_average",
    "row_head",
    "run_tasks",
    "settings_key",
    "usable_cores",
    "versions",
]

Row = dict[str, Any]
REPORTED = ("ot-newton", "torch", "numpy", "scipy")


@dataclass(frozen=True)
class Task:
    """One run.

    Attributes:
        label: for the progress bar.
        settings: everything that decides the outcome, as JSON values; their hash names the run.
        payload: what the worker gets beside the settings; must be picklable.
    """

    label: str
    settings: Mapping[str, Any]
    payload: Any = field(default=None, repr=False)

    @property
    def key(self) -> str:
        """Hash of the settings."""
        return settings_key(self.settings)


def settings_key(settings: Mapping[str, Any]) -> str:
    """Hash of JSON-like settings that does not depend on their order."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in REPORTED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float | None:
    """Runnable processes over the last minute, where the system tells: timings depend on it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def check_folder(name: str, path: str | os.PathLike[str]) -> Path:
    """Make the folder, or raise naming the argument before any work.

    Raises:
        ValueError: it exists as a file, or cannot be made or written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{name} must be a folder that can be written, got {folder}: {error.strerror}"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{name} must be a folder that can be written, got {folder}")
    return folder


class RowFile:
    """A file of JSON rows that survives being interrupted.

    Args:
        path: made with the first row.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def read(self) -> list[Row]:
        """All complete rows; a last line cut off in writing is left out.

        Raises:
            ValueError: a line that is no JSON row; the message names file and line.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        rows: list[Row] = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                if number == len(lines) and not line.endswith("\n"):
                    break
                raise ValueError(f"{self.path}, line {number}: not a JSON row: {error.msg}") from error
            if not isinstance(row, dict):
                raise ValueError(
                    f"{self.path}, line {number}: expected a JSON object, got {type(row).__name__}"
                )
            rows.append(row)
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and wait until it is on disk."""
        self._mend()
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _mend(self) -> None:
        """Drop what an interrupted write left after the last line end."""
        if not self.path.exists():
            return
        with open(self.path, "r+b") as stream:
            content = stream.read()
            if content and not content.endswith(b"\n"):
                stream.truncate(content.rfind(b"\n") + 1)


def run_tasks(
    tasks: Sequence[Task],
    worker: Callable[[Task], Row],
    file: RowFile,
    *,
    jobs: int | None = None,
    console: Console | None = None,
    describe: Callable[[Row], str] = str,
) -> list[Row]:
    """Run what ``file`` does not hold yet, and return the rows of all tasks in their order.

    An exception in a run becomes a row with status ERROR, and is tried again by a rerun. With more than
    one job an interrupt loses the runs in flight, one per job.

    Args:
        tasks: the runs.
        worker: a module-level function of a task.
        file: where rows go.
        jobs: processes, with one thread each; None: one per core. 1 runs in this process.
        console: where progress is shown; None for none.
        describe: a line about a finished row.

    Raises:
        ValueError: ``jobs`` below 1, or a damaged file.
    """
    known = {row.get("key"): row for row in file.read() if row.get("status") != "ERROR"}
    missing = [task for task in tasks if task.key not in known]
    count = min(usable_cores() if jobs is None else check_integer("jobs", jobs, low=1), max(1, len(missing)))
    with _Bar(console, len(tasks), len(tasks) - len(missing)) as bar:
        for row in _outcomes(missing, worker, count):
            file.append(row)
            known[row["key"]] = row
            bar.advance(describe(row))
    return [known[task.key] for task in tasks]


def _outcomes(tasks: Sequence[Task], worker: Callable[[Task], Row], jobs: int) -> Iterable[Row]:
    if jobs == 1 or len(tasks) == 1:
        return _in_turn(tasks, worker)
    from joblib import Parallel, delayed, parallel_config

    with parallel_config(backend="loky", inner_max_num_threads=1):
        outcomes: Iterable[Row] = Parallel(n_jobs=jobs, return_as="generator_unordered")(
            delayed(_guarded)(worker, task, 1) for task in tasks
        )
    return outcomes


def _in_turn(tasks: Sequence[Task], worker: Callable[[Task], Row]) -> Iterator[Row]:
    for task in tasks:
        yield _guarded(worker, task, None)


def row_head(task: Task) -> Row:
    """What every row starts with."""
    return {
        "key": task.key,
        "label": task.label,
        "settings": dict(task.settings),
        "versions": versions(),
    }


def _guarded(worker: Callable[[Task], Row], task: Task, threads: int | None) -> Row:
    """The worker's row with key and settings; an exception is a row too."""
    if threads is not None:
        torch.set_num_threads(threads)
    head = row_head(task)
    try:
        return head | worker(task)
    except Exception as error:  # noqa: BLE001  a failed run is a row, not the end of the sweep
        trail = "".join(traceback.format_exception(error)[-3:])
        return head | {
            "status": "ERROR",
            "success": False,
            "message": f"{type(error).__name__}: {error}",
            "trail": trail,
        }


class _Bar:
    """A progress bar on a console, or nothing."""

    def __init__(self, console: Console | None, total: int, done: int) -> None:
        self.console, self.total, self.done = console, total, done

    def __enter__(self) -> _Bar:
        if self.console is None:
            return self
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.progress = Progress(
            TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=self.console
        )
        self.progress.start()
        self.task = self.progress.add_task("runs", total=self.total, completed=self.done)
        if self.done:
            self.console.print(f"{self.done} of {self.total} runs are there already", highlight=False)
        return self

    def advance(self, line: str) -> None:
        """One more run has ended."""
        if self.console is not None:
            self.console.print(line, highlight=False, markup=False)
            self.progress.advance(self.task)

    def __exit__(self, *exc: object) -> None:
        if self.console is not None:
            self.progress.stop()
