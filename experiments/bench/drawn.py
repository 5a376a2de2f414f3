"""Tables and figures of a bench from its rows alone: what `ot-newton plot` makes of a `bench.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ot_newton.experiments.bench.report import tables_of
from ot_newton.experiments.runs import check_folder

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["ROWS", "plot", "tables"]

ROWS = "bench"
Row = dict[str, Any]
CASE = (
    "table",
    "kind",
    "contestant",
    "claim",
    "problem",
    "operation",
    "n",
    "m",
    "d",
    "eps",
    "rule",
    "u",
    "precision",
)


def _latest(rows: Sequence[Row]) -> list[Row]:
    """The last row of every contestant and case; counts of `solvers` have tables of their own."""
    kept = {tuple(str(row.get(key)) for key in CASE): row for row in rows if row["kind"] != "count"}
    return list(kept.values())


def tables(rows: Sequence[Row]) -> list[Table]:
    """The bench's tables, each contestant by its last run."""
    latest = _latest(rows)
    names = dict.fromkeys(row["table"] for row in latest)
    return [
        table for name in names for table in tables_of(name, [row for row in latest if row["table"] == name])
    ]


def plot(rows: Sequence[Row], out: str | Path = "results") -> list[Path]:
    """Median seconds against n, one figure per table, dimension, shape and rule that has two sizes.

    Args:
        rows: of any run.
        out: folder of the images.
    """
    from ot_newton.experiments.plots import plot_lines

    folder = check_folder("out", out)
    figures: dict[tuple[str, ...], dict[str, list[tuple[float, float]]]] = {}
    for row in _latest(rows):
        if row["kind"] == "time" and row.get("seconds_median") and "n" in row:
            shape = "n = m" if row["n"] == row["m"] else f"n = {row['n'] / row['m']:g} m"
            case = [row["table"], f"d = {row['d']}", shape, row.get("problem", ""), row.get("rule", "")]
            series = figures.setdefault(tuple(part for part in case if part), {})
            series.setdefault(row["contestant"], []).append((row["n"], row["seconds_median"]))
    made = []
    for case_, lines in figures.items():
        if len({n for points in lines.values() for n, _ in points}) > 1:
            name = "-".join("".join(c for c in part if c.isalnum() or c in ".-") for part in case_)
            path = folder / f"bench-{name}.png"
            made.append(plot_lines(lines, path, x="n", y="median seconds", title=", ".join(case_)))
    return made
