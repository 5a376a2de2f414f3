"""The command line: `ot-newton`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from rich.console import Console

    from ot_newton.experiments.registry import Outcome
    from ot_newton.experiments.shuffled_regression import Config

__all__ = ["main"]

INTERRUPTED = 130
TABLE_WIDTH = 140
FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ot-newton", prog_name="ot-newton")
def main() -> None:
    """Second-order optimization for entropic optimal transport."""


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """Bad input becomes one line and exit status 2."""
    try:
        yield
    except (ValueError, TypeError, ImportError) as error:
        raise click.UsageError(str(error)) from error


@main.command("shuffled-regression")
@click.option("--x", "x", type=FILE, help="CSV file of X, n rows and dX columns; needs --y.")
@click.option("--y", "y", type=FILE, help="CSV file of Y, m rows and dY columns, in any order.")
@click.option("--data", type=str, help="Instead of files: 'synthetic' (default) or 'diabetes'.")
@click.option(
    "--standardize", is_flag=True, help="Scale the columns of both files to mean 0 and deviation 1."
)
@click.option("--seeds", type=int, help="Number of synthetic problems  [default: 8].")
@click.option("--n", "n", type=int, help="Rows of a synthetic problem  [default: 500].")
@click.option("--starts", type=int, help="Starts of each problem  [default: 8; synthetic: 1].")
@click.option("--eps", type=float, default=0.1, show_default=True, help="Entropic regularization.")
@click.option("--lr", type=float, default=0.05, show_default=True, help="Step size of Adam.")
@click.option("--probe-every", type=int, default=10, show_default=True, help="Adam steps between probes.")
@click.option(
    "--threshold",
    type=float,
    default=1e-3,
    show_default=True,
    help="Newton-CG takes over once lambda_min exceeds this times lambda_max.",
)
@click.option("--gtol", type=float, default=1e-8, show_default=True, help="Relative gradient test.")
@click.option("--max-steps", type=int, default=2000, show_default=True, help="Cap on the steps of a run.")
@click.option("--jobs", type=int, help="Processes  [default: one per core].")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder of rows, summary and figures; runs found there are not redone.",
)
def shuffled_regression(out: Path, jobs: int | None, **options: Any) -> None:
    """Find certified local minima of OT_eps(XW, Y) in W, for X and Y whose rows lost their order.

    Writes one JSON line per run to OUT/shuffled-regression.jsonl as it ends, then a summary and figures.
    The exit status is 1 if a run did not end at a certified minimum.
    """
    with _one_error():
        config = _config(options)
    from ot_newton.experiments import shuffled_regression as experiment

    console = _console()
    try:
        with _one_error():
            rows = experiment.run(config, out, jobs=jobs, console=console)
    except KeyboardInterrupt:
        console.print(f"interrupted: finished runs are in {out}; the same command goes on from there")
        sys.exit(INTERRUPTED)
    _report(console, experiment.tables(rows), out / "summary.txt")
    for path in experiment.plot(rows, out):
        console.print(f"wrote {path}", highlight=False)
    failed = [row for row in rows if not row["success"]]
    for row in failed:
        console.print(f"{row['label']}: {row['status']}: {row['message']}", highlight=False, markup=False)
    sys.exit(1 if failed else 0)


@main.command("list")
def list_studies() -> None:
    """List the studies that `run` knows."""
    from ot_newton.experiments.bench.__main__ import TABLES
    from ot_newton.experiments.registry import STUDIES

    about = {study.name: study.about for study in STUDIES.values()}
    about |= dict.fromkeys(TABLES, "a benchmark beside the peers")
    width = max(map(len, about))
    for name, line in about.items():
        click.echo(f"{name:<{width}}  {line}")


@main.command("run")
@click.argument("name")
@click.option("--config", type=FILE, help="TOML file of settings; `list` names the studies.")
@click.option("--smoke", is_flag=True, help="A quick run at small sizes.")
@click.option("--full", is_flag=True, help="Of a benchmark: all sizes, hours.")
@click.option("--jobs", help="Processes, 'dask', 'dask:ADDRESS' or 'ray'  [default: one per core].")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder of rows, summary and figures; runs found there are not redone.",
)
def run(name: str, config: Path | None, smoke: bool, full: bool, jobs: str | None, out: Path) -> None:
    """Run the study NAME: JSON rows, tables and figures in OUT.

    The exit status is 1 if a run ended in an error.
    """
    from ot_newton.experiments import registry
    from ot_newton.experiments.bench.__main__ import TABLES
    from ot_newton.experiments.pools import check_jobs
    from ot_newton.experiments.runs import usable_cores

    if name in TABLES:
        _bench(name, config=config, flags={"--smoke": smoke, "--full": full}, jobs=jobs, out=out)
    if full:
        raise click.UsageError(f"--full is for benchmarks, got the study {name!r}: set its sizes by --config")
    console = _console()
    try:
        with _one_error():
            wanted = None if jobs is None else check_jobs(jobs, usable_cores())
            done = registry.run_study(name, config=config, smoke=smoke, out=out, jobs=wanted, console=console)
    except KeyboardInterrupt:
        console.print(f"interrupted: finished runs are in {out}; the same command goes on from there")
        sys.exit(INTERRUPTED)
    except OSError as error:
        raise click.ClickException(
            f"a row could not be written: {error}; finished runs are in {out}, and the same command goes on"
        ) from error
    _show(console, done, out)
    failed = [row for row in done.rows if row["status"] == "ERROR"]
    for row in failed:
        console.print(f"{row['label']}: {row['message']}", highlight=False, markup=False)
    sys.exit(1 if failed else 0)


def _bench(name: str, *, flags: dict[str, bool], out: Path, **unused: object) -> NoReturn:
    """A benchmark in a process of its own: its threads are limited before any library is loaded."""
    for option, value in unused.items():
        if value is not None:
            raise click.UsageError(f"--{option} is not for the benchmark {name!r}: leave it out")
    command = [sys.executable, "-m", "ot_newton.experiments.bench", name, "--out", str(out)]
    command += [flag for flag, given in flags.items() if given]
    sys.exit(subprocess.run(command, check=False).returncode)


@main.command("plot")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def replot(folder: Path) -> None:
    """Draw tables and figures again from the rows in DIR alone."""
    from ot_newton.experiments import registry

    console = _console()
    with _one_error():
        found = registry.replot(folder)
    for one in found:
        _show(console, one, folder)


def _console() -> Console:
    from rich.console import Console

    console = Console(soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)
    return console


def _show(console: Console, done: Outcome, out: Path) -> None:
    """Tables on the console and as text, and the names of the images."""
    _report(console, done.tables, out / f"{done.study.name}-summary.txt")
    for path in done.images:
        console.print(f"wrote {path}", highlight=False)


def _config(options: dict[str, Any]) -> Config:
    """The configuration; options that do not go together are an error.

    Raises:
        ValueError: naming the option.
    """
    from ot_newton.experiments.shuffled_regression import Config

    given = {name: value for name, value in options.items() if value is not None}
    files = [name for name in ("x", "y") if name in given]
    if files:
        for name in ("data", "seeds", "n"):
            if name in given:
                raise ValueError(f"--{name} is not for CSV files: leave out --{name} or --x and --y")
        if len(files) == 1:
            raise ValueError(f"--{files[0]} needs --{'y' if files == ['x'] else 'x'} too")
        return Config(**{**given, "data": "csv", "x": str(given["x"]), "y": str(given["y"])})
    if given.get("data") == "csv":
        raise ValueError(
            "data must be 'synthetic' or 'diabetes', got 'csv': CSV files are given by --x and --y"
        )
    if given.get("data") == "diabetes":
        for name in ("seeds", "n"):
            if name in given:
                raise ValueError(f"--{name} is for synthetic data only, got it with --data diabetes")
    if given["standardize"]:
        raise ValueError("--standardize is for CSV files: it needs --x and --y")
    return Config(**given)


def _report(console: Console, tables: list[Any], path: Path) -> None:
    """Print the tables and keep them as text."""
    from rich.console import Console

    with open(path, "w", encoding="utf-8") as stream:
        text = Console(file=stream, width=TABLE_WIDTH)
        for table in tables:
            console.print(table)
            text.print(table)


@main.group()
def kernels() -> None:
    """GPU kernels, compiled ahead of time; no GPU is needed."""


@kernels.command("build")
@click.option("--arch", "first", type=int, help="Compute capability; several: --arch 80 90 100, the default.")
@click.argument("more", nargs=-1, type=int)
def build(first: int | None, more: tuple[int, ...]) -> None:
    """Compile every kernel; a row each: registers, shared memory, spills, instructions."""
    with _one_error():
        from ot_newton.backends.triton_kernels.aot import kernels_command

        kernels_command([arch for arch in (first, *more) if arch] or [80, 90, 100], click.echo)
