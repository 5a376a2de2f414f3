"""Where runs are executed: this process, joblib's loky processes, or a Dask or Ray cluster through joblib.

When a process dies (killed by the system, out of memory) the pool is made anew for what is missing; a run
whose process dies again when it has one to itself is a row of status ERROR. Finished runs are never lost.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ot_newton.errors import check_integer
from ot_newton.experiments.row_file import Row, Task, row_head

__all__ = ["check_jobs", "in_processes"]

POOLS = 2
CLUSTERS = ("dask", "ray")


def check_jobs(jobs: Any, cores: int) -> int | str:
    """A number of processes, or the name of a cluster.

    Args:
        jobs: None (one per core), an integer of at least 1 (also as text), "dask" (a local cluster),
            "dask:ADDRESS" (a running one) or "ray".
        cores: cores of this machine.

    Raises:
        ValueError: something else.
    """
    if jobs is None:
        return cores
    if not isinstance(jobs, str):
        return check_integer("jobs", jobs, low=1)
    if jobs.lstrip("-").isdigit():
        return check_integer("jobs", int(jobs), low=1)
    name, _, address = jobs.partition(":")
    if name not in CLUSTERS or (address and name != "dask"):
        raise ValueError(f"jobs must be an integer, 'dask', 'dask:ADDRESS' or 'ray', got {jobs!r}")
    return jobs


@contextlib.contextmanager
def _backend(jobs: int | str, cores: int) -> Iterator[int]:
    """Joblib's backend inside, with the number of jobs to ask for.

    Raises:
        ValueError: the cluster's package is not installed.
    """
    from joblib import parallel_config

    if isinstance(jobs, int):
        with parallel_config(backend="loky", inner_max_num_threads=1):
            yield jobs
        return
    name, _, address = jobs.partition(":")
    try:
        opened: AbstractContextManager[Any] = _dask(address, cores) if name == "dask" else _ray()
    except ImportError as error:
        package = "dask[distributed]" if name == "dask" else "ray"
        raise ValueError(f"jobs {jobs!r} needs the package {package}: {error}") from error
    with opened, parallel_config(backend=name):
        yield -1


def _dask(address: str, cores: int) -> AbstractContextManager[Any]:
    distributed: Any = importlib.import_module("distributed")
    if address:
        client: AbstractContextManager[Any] = distributed.Client(address)
    else:
        client = distributed.Client(n_workers=cores, threads_per_worker=1, dashboard_address=None)
    return client


def _ray() -> AbstractContextManager[Any]:
    ray: Any = importlib.import_module("ray.util.joblib")
    ray.register_ray()
    return contextlib.nullcontext()


def in_processes(
    tasks: Sequence[Task], call: Callable[[Task], Row], jobs: int | str, cores: int
) -> Iterator[Row]:
    """Rows of tasks run in other processes, as they end.

    Args:
        tasks: the runs.
        call: a picklable function of a task that returns its row and lets no exception out.
        jobs: from `check_jobs`.
        cores: processes of a local cluster.
    """
    left = {task.key: task for task in tasks}
    for _ in range(POOLS):
        try:
            for row in _pool(list(left.values()), call, jobs, cores):
                left.pop(row["key"])
                yield row
        except Exception as error:
            if not _died(error):
                raise
        if not left:
            return
    for task in left.values():
        yield _alone(task, call)


def _pool(tasks: Sequence[Task], call: Callable[[Task], Row], jobs: int | str, cores: int) -> Iterator[Row]:
    from joblib import Parallel, delayed

    with _backend(jobs, cores) as count:
        # One run a message: what a dead process takes with it is one run.
        if jobs != "ray":
            parallel = Parallel(n_jobs=count, return_as="generator_unordered", batch_size=1)
            yield from parallel(delayed(call)(task) for task in tasks)
            return
        # Ray's backend returns lists only: rows come in rounds of one run a core.
        parallel = Parallel(n_jobs=count, batch_size=1)
        for first in range(0, len(tasks), cores):
            yield from parallel(delayed(call)(task) for task in tasks[first : first + cores])


def _died(error: Exception) -> bool:
    """Whether a worker process died, rather than something raised."""
    return any(
        kind.__name__ in ("BrokenProcessPool", "TerminatedWorkerError", "KilledWorker", "BrokenExecutor")
        for kind in type(error).__mro__
    )


def _alone(task: Task, call: Callable[[Task], Row]) -> Row:
    """One run in a process of its own; its death is an ERROR row."""
    from joblib.externals.loky import ProcessPoolExecutor

    with ProcessPoolExecutor(max_workers=1) as pool:
        try:
            row: Row = pool.submit(call, task).result()
        except Exception as error:
            if not _died(error):
                raise
            reason = (str(error).splitlines() or [""])[0]
            return row_head(task) | {
                "status": "ERROR",
                "success": False,
                "message": f"its process died {POOLS + 1} times: {reason}",
            }
    return row
