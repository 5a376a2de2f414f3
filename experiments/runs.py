"""Runs of an experiment: one JSON line each, written as it ends; a rerun does only what is missing."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ot_newton.experiments.pools import check_jobs, in_processes
from ot_newton.experiments.row_file import (
    Row,
    RowFile,
    Task,
    check_folder,
    load_average,
    row_head,
    settings_key,
    versions,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "Row",
    "RowFile",
    "Task",
    "check_folder",
    "load_average",
    "new_table",
    "row_head",
    "run_tasks",
    "settings_key",
    "usable_cores",
    "versions",
]


def new_table(title: str, names: Sequence[str], left: int, *, no_wrap: bool = False) -> Table:
    """An empty table: the first ``left`` columns are text, the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < left else "right", no_wrap=no_wrap)
    return table


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_tasks(
    tasks: Sequence[Task],
    worker: Callable[[Task], Row],
    file: RowFile,
    *,
    jobs: int | str | None = None,
    console: Console | None = None,
    describe: Callable[[Row], str] = str,
) -> list[Row]:
    """Run what ``file`` does not hold yet, and return the rows of all tasks in their order.

    An exception in a run becomes a row with status ERROR, and is tried again by a rerun. What a
    process that dies was running is repeated, with what its neighbours had in flight. With more than one job
    an interrupt loses the runs in flight, one per job; a full disk loses the row being written, and a rerun
    mends the file.

    Args:
        tasks: the runs.
        worker: a module-level function of a task.
        file: where rows go.
        jobs: processes, with one thread each; None: one per core; 1 runs in this process. Or "dask" (a local
            cluster), "dask:ADDRESS" (a running one), "ray".
        console: where progress is shown; None for none.
        describe: a line about a finished row.

    Raises:
        ValueError: a bad ``jobs``, or a damaged file.
        OSError: a row could not be written.
    """
    wanted = check_jobs(jobs, usable_cores())
    known = {row.get("key"): row for row in file.read() if row.get("status") != "ERROR"}
    missing = [task for task in tasks if task.key not in known]
    count = min(wanted, max(1, len(missing))) if isinstance(wanted, int) else wanted
    with _Bar(console, len(tasks), len(tasks) - len(missing)) as bar:
        for row in _outcomes(missing, worker, count):
            file.append(row)
            known[row["key"]] = row
            bar.advance(describe(row))
    return [known[task.key] for task in tasks]


def _outcomes(tasks: Sequence[Task], worker: Callable[[Task], Row], jobs: int | str) -> Iterable[Row]:
    if isinstance(jobs, int) and (jobs == 1 or len(tasks) <= 1):
        return _in_turn(tasks, worker)
    return in_processes(tasks, functools.partial(_guarded, worker, threads=1), jobs, usable_cores())


def _in_turn(tasks: Sequence[Task], worker: Callable[[Task], Row]) -> Iterator[Row]:
    for task in tasks:
        yield _guarded(worker, task)


def _guarded(worker: Callable[[Task], Row], task: Task, threads: int | None = None) -> Row:
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
