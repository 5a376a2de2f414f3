"""Tables and figures of the regression study, from its rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ot_newton.experiments.runs import check_folder

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["best_adam", "describe", "plot", "summary", "tables"]

Row = Mapping[str, Any]
MEDIAN_PASSES = 15_000
LEAST_RATIO = 5.0
PACKED_SHARE = 0.6


def describe(row: Row) -> str:
    """A line about a finished row."""
    if "plan_passes" not in row:
        return f"{row['label']}: {row['status']}, {row['message']}"
    return f"{row['label']}: {row['status']}, {row['plan_passes']} passes, {row['seconds']:.1f} s"


def _of(rows: Iterable[Row], strategy: str) -> list[Row]:
    return [row for row in rows if row.get("strategy") == strategy and "plan_passes" in row]


def best_adam(rows: Iterable[Row]) -> dict[str, Row]:
    """By problem: the step size that got furthest, fewest passes first, then smallest gradient."""
    best: dict[str, Row] = {}

    def rank(row: Row) -> tuple[bool, float]:
        return (not row["success"], row["plan_passes"] if row["success"] else row["relative_gradient"])

    for row in _of(rows, "adam"):
        name = row["settings"]["data"]
        if name not in best or rank(row) < rank(best[name]):
            best[name] = row
    return best


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _totals(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "runs": len(rows),
        "minimum": sum(row["status"] == "MINIMUM" for row in rows),
        "saddle_starts": sum(row["lambda_min_start"] < 0 for row in rows),
        "escape": sum(bool(row["escape"]) for row in rows),
        "recovery": sum(bool(row["recovery"]) for row in rows),
        "first_order": sum(row["n_iter"]["first-order"] for row in rows),
        "newton": sum(row["n_iter"]["newton"] for row in rows),
        "median_newton": _median(row["n_iter"]["newton"] for row in rows),
        "n_hvp": sum(row["n_hvp"] for row in rows),
        "plan_passes": sum(row["plan_passes"] for row in rows),
        "median_passes": _median(row["plan_passes"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
        "cpu_seconds": sum(row.get("cpu_seconds", row["seconds"]) for row in rows),
        "value": _median(row["value"] for row in rows),
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Totals of each strategy, ratios of plan passes, and what a target says of them.

    The first ratio is over all seeds that both ran, Adam's budget standing for the seeds where it did not
    get to the tolerance; the second is to relative gradient 1e-4, over the seeds where Adam got there.
    """
    groups = {name: _of(rows, name) for name in ("escape", "newton")}
    best = best_adam(rows)
    groups["adam"] = list(best.values())
    out: dict[str, Any] = {name: _totals(group) for name, group in groups.items() if group}
    pairs = [(row, best[name]) for row in groups["escape"] if (name := row["settings"]["data"]) in best]
    if pairs:
        ours, theirs = (sum(pair[k]["plan_passes"] for pair in pairs) for k in (0, 1))
        rough = [pair for pair in pairs if pair[0]["passes_1e4"] and pair[1]["passes_1e4"]]
        out["ratio"] = {
            "seeds": len(pairs),
            "adam_missed": sum(not pair[1]["success"] for pair in pairs),
            "to_tolerance": theirs / ours,
            "rough_seeds": len(rough),
            "to_1e-4": _ratio(rough),
        }
    levels: dict[str, list[Row]] = {}
    for row in [*groups["escape"], *_of(rows, "sensitivity")]:
        levels.setdefault(row["settings"]["level"], []).append(row)
    shared = {row["settings"]["data"] for row in _of(rows, "sensitivity")}
    out["levels"] = {
        name: _totals([row for row in group if row["settings"]["data"] in shared])
        | {
            "fired": sum(
                row["phase"]["released_by_level"] for row in group if row["settings"]["data"] in shared
            )
        }
        for name, group in levels.items()
        if shared
    }
    return out


def _ratio(pairs: Sequence[tuple[Row, Row]]) -> float | None:
    if not pairs:
        return None
    return float(sum(pair[1]["passes_1e4"] for pair in pairs) / sum(pair[0]["passes_1e4"] for pair in pairs))


def tables(rows: Sequence[Row]) -> list[Table]:
    """Totals, sensitivity of the switch, the path past several saddles and targets, for a rich console."""
    from rich.table import Table

    found = summary(rows)
    made = []
    totals = Table(title="shuffled regression: strategies", title_justify="left")
    names = ("minima", "escapes", "recoveries", "Adam steps", "Newton steps", "HVPs", "passes", "median", "s")
    for name in ("strategy", *names):
        totals.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for name in ("escape", "newton", "adam"):
        if name in found:
            totals.add_row("adam, best lr" if name == "adam" else name, *_cells(found[name]))
    if totals.row_count:
        made.append(totals)
    if found["levels"]:
        levels = Table(title="sensitivity of the switch", title_justify="left")
        for name in ("level", "released by it", "minima", "escapes", "median Newton steps", "median passes"):
            levels.add_column(name, justify="left" if name == "level" else "right", no_wrap=True)
        for name, one in found["levels"].items():
            levels.add_row(
                name,
                f"{one['fired']} of {one['runs']}",
                f"{one['minimum']} of {one['runs']}",
                f"{one['escape']} of {one['saddle_starts']}",
                f"{one['median_newton']:g}",
                f"{one['median_passes']:.0f}",
            )
        made.append(levels)
    made += [_staircase(row) for row in _of(rows, "trajectory") if "saddles" in row]
    targets = _targets(rows, found)
    if targets.row_count:
        made.append(targets)
    return made


def _cells(one: Mapping[str, Any]) -> list[str]:
    return [
        f"{one['minimum']} of {one['runs']}",
        f"{one['escape']} of {one['saddle_starts']}",
        str(one["recovery"]),
        str(one["first_order"]),
        str(one["newton"]),
        str(one["n_hvp"]),
        str(one["plan_passes"]),
        f"{one['median_passes']:.0f}",
        f"{one['seconds']:.0f}",
    ]


def _staircase(row: Row) -> Table:
    """The certified saddles of one path, and its end."""
    from rich.table import Table

    table = Table(title=f"{row['label']}: saddles passed", title_justify="left")
    for name in ("step", "value", "|g|", "lambda_min", "lambda_max", "certified"):
        table.add_column(name, justify="left" if name == "certified" else "right", no_wrap=True)
    end = {name: row[f"{name}_end"] for name in ("lambda_min", "lambda_max")}
    end |= {"step": row["trace"]["step"][-1], "value": row["value"], "grad_norm": row["grad_norm"]}
    for point, status in [*((saddle, "SADDLE") for saddle in row["saddles"]), (end, row["status"])]:
        curvatures = (point[name] for name in ("lambda_min", "lambda_max"))
        table.add_row(
            str(point["step"]),
            f"{point['value']:.6f}",
            f"{point['grad_norm']:.1e}",
            *("" if value is None else f"{value:.3e}" for value in curvatures),
            status,
        )
    return table


def _targets(rows: Sequence[Row], found: Mapping[str, Any]) -> Table:
    """What was to be reached beside what was."""
    from rich.table import Table

    table = Table(title="targets", title_justify="left")
    for name in ("what", "target", "found", "met"):
        table.add_column(name)

    def add(what: str, target: str, value: str, met: bool) -> None:
        table.add_row(what, target, value, "yes" if met else "no")

    for name in ("escape", "newton"):
        if name in found:
            one = found[name]
            runs = one["runs"]
            add(f"{name}: certified minima", f"{runs}", f"{one['minimum']}", one["minimum"] == runs)
            median = one["median_passes"]
            add(f"{name}: median passes", f"<= {MEDIAN_PASSES}", f"{median:.0f}", median <= MEDIAN_PASSES)
    if "ratio" in found:
        one = found["ratio"]
        what = f"passes of Adam over escape, {one['seeds']} seeds, Adam missed {one['adam_missed']}"
        add(what, f">= {LEAST_RATIO:g}", f"{one['to_tolerance']:.1f}", one["to_tolerance"] >= LEAST_RATIO)
        if one["to_1e-4"] is not None:
            what = f"the same to relative gradient 1e-4, {one['rough_seeds']} seeds"
            table.add_row(what, "reported", f"{one['to_1e-4']:.1f}", "")
    for row in rows:
        if row.get("strategy") == "packing" and "ratio" in row:
            add(
                "packed over fixed lane-iterations",
                f"<= {PACKED_SHARE:g}",
                f"{row['ratio']:.2f}",
                row["ratio"] <= PACKED_SHARE,
            )
    return table


def plot(rows: Sequence[Row], out: str | Path = "results") -> list[Path]:
    """Figures from rows alone: passes per seed, the multi-saddle trajectory, one escape.

    Args:
        rows: of the study.
        out: folder.

    Returns:
        The images written.
    """
    from ot_newton.experiments.plots import plot_passes, plot_trajectory

    folder = check_folder("out", out)
    paths = []
    for row in rows:
        if row.get("strategy") == "trajectory" and "trace" in row:
            paths.append(plot_trajectory(row, folder / "multi-saddle.png"))
    escapes = _of(rows, "escape")
    if escapes:
        shown = max(escapes, key=lambda row: (bool(row["escape"]), len(row["trace"]["step"])))
        paths.append(plot_trajectory(shown, folder / "escape.png"))
    series: dict[str, dict[str, float]] = {}
    for name, group in (("SaddleEscape", escapes), ("Newton-CG", _of(rows, "newton"))):
        series[name] = {row["settings"]["data"]: row["plan_passes"] for row in group}
    series["Adam, best lr"] = {name: row["plan_passes"] for name, row in best_adam(rows).items()}
    series = {name: values for name, values in series.items() if values}
    if series:
        paths.append(plot_passes(series, folder / "passes.png"))
    return paths
