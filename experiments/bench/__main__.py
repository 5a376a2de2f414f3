"""`python -m ot_newton.experiments.bench`: the selection of `make bench`.

The process keeps to two cores and two threads before any library is loaded, so that all contestants have
the same.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import click

THREADS = 2
TABLES = {
    "half-iteration": "half_iteration",
    "solve-hvp": "solve_hvp",
    "block-hvp": "block_hvp",
    "converged": "converged",
    "peer-hessians": "pitchfork",
    "forward": "matched:forward",
    "backward": "matched:backward",
    "hvp": "matched:hvp",
    "memory": "memory",
    "loss-parity": "parity",
    "solvers": "solvers",
}
"""Tables and what makes their rows: ``rows`` of a module, or the function named after the colon."""

ON_DEMAND = ("memory", "loss-parity", "solvers")
"""Tables that are made only when they are named."""

OUT = Path("results/bench")


def limit(threads: int) -> int:
    """Keep this process and its libraries to some cores; returns the number of threads.

    Args:
        threads: at most; fewer where there are fewer cores.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))[:threads]
        with contextlib.suppress(OSError):  # not allowed in some containers; the variables below remain
            os.sched_setaffinity(0, cores)
        threads = len(cores)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[variable] = str(threads)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return threads


def _names(names: tuple[str, ...]) -> list[str]:
    for name in names:
        if name not in TABLES:
            raise click.UsageError(f"table must be one of {', '.join(TABLES)}, got {name!r}")
    return list(dict.fromkeys(names)) or [name for name in TABLES if name not in ON_DEMAND]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("tables", nargs=-1)
@click.option("--smoke", is_flag=True, help="Tiny sizes: a minute, and ratios that mean nothing.")
@click.option("--full", is_flag=True, help="The whole matrix of forward, backward, hvp and memory: hours.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=OUT,
    show_default=True,
    help="Folder of the JSON lines.",
)
def main(tables: tuple[str, ...], smoke: bool, full: bool, out: Path) -> None:
    """Time ot-newton beside its peers, each checked against a reference first.

    TABLES: half-iteration, solve-hvp, block-hvp, converged, peer-hessians, forward, backward, hvp (these by
    default); memory (peaks in processes of their own, two minutes), loss-parity (value and gradient against
    each library, a minute; exit status 1 if a bound is missed or a library cannot be asked) and solvers
    (counts of products beside scipy's; 25 minutes). Rows are appended to bench.jsonl in the folder as they
    come. A peer that is not installed is a row that says so. KeOps compiles its formulas at its first run,
    with the system's C++ compiler: a minute or two.
    """
    chosen = _names(tables)
    if smoke and full:
        raise click.UsageError("--smoke and --full exclude each other: leave one out")
    preset = "smoke" if smoke else "full" if full else "default"
    threads = limit(THREADS)
    from ot_newton.experiments.bench.session import run_tables

    try:
        missed = run_tables({name: TABLES[name] for name in chosen}, threads=threads, preset=preset, out=out)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(0 if not missed else 1)


if __name__ == "__main__":
    main()
