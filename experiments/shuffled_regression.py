"""Shuffled regression: given X and Y whose rows lost their order, a certified minimum of OT_eps(XW, Y) in W.

Adam first; the smallest curvature is probed every few steps; Newton-CG takes over once
`lambda_min > threshold * lambda_max`, and hands back if it meets negative curvature.

    escape     lambda_min < 0 at the start, and a certified minimum at the end
    recovery   |W - W*|_F <= .3, where the W* that made Y is known
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.errors import check_choice, check_integer, check_number
from ot_newton.experiments.data import RegressionData, from_csv, load_diabetes, mixture, start
from ot_newton.experiments.regression_loss import ON_REJECT, RegressionLoss
from ot_newton.experiments.runs import Row, RowFile, Task, check_folder, run_tasks
from ot_newton.solvers.escape import EscapeResult, SaddleEscape

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["Config", "build", "marginal_recheck", "plot", "run", "run_one", "summary", "tables"]

NAME = "shuffled-regression"
DATA = ("synthetic", "diabetes", "csv")
RECOVERY_RADIUS = 0.3
RECHECK_ROWS = 256
SAME_VALUE = 1e-9
ROWS_PRINTED = 40


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        data: "synthetic" (the mixture of `mixture`), "diabetes" or "csv".
        x: file of X, for "csv".
        y: file of Y, for "csv".
        standardize: scale the columns of both files to mean 0 and standard deviation 1.
        seeds: synthetic problems, seeds 0 to seeds - 1.
        n: rows of a synthetic problem.
        starts: starts of each problem; None: 1 for synthetic data, else 8.
        eps: entropic regularization, in units of squared y.
        lr: step size of Adam.
        probe_every: Adam steps between two probes of lambda_min.
        threshold: Newton-CG takes over above ``threshold * lambda_max``.
        gtol: gradient test relative to the largest gradient seen.
        max_steps: cap on steps of each run.
    """

    data: str = "synthetic"
    x: str | None = None
    y: str | None = None
    standardize: bool = False
    seeds: int = 8
    n: int = 500
    starts: int | None = None
    eps: float = 0.1
    lr: float = 0.05
    probe_every: int = 10
    threshold: float = 1e-3
    gtol: float = 1e-8
    max_steps: int = 2000

    def __post_init__(self) -> None:
        """Validate before any work.

        Raises:
            ValueError: a value out of range, naming it; TypeError: of the wrong kind.
        """
        check_choice("data", self.data, DATA)
        for name, low in (("seeds", 1), ("n", 3), ("probe_every", 1), ("max_steps", 1)):
            check_integer(name, getattr(self, name), low=low)
        if self.starts is not None:
            check_integer("starts", self.starts, low=1)
        for name in ("eps", "lr", "threshold", "gtol"):
            check_number(name, getattr(self, name), strict=name != "threshold")
        if self.data == "csv" and (self.x is None or self.y is None):
            missing = "x" if self.x is None else "y"
            raise ValueError(f"{missing} must be a CSV file when data is 'csv', got None")

    @property
    def solver(self) -> dict[str, Any]:
        """The settings that every run shares."""
        names = ("eps", "lr", "probe_every", "threshold", "gtol", "max_steps")
        return {name: getattr(self, name) for name in names}


def build(config: Config) -> list[Task]:
    """Read or draw the data, and list the runs.

    Raises:
        ValueError: a bad CSV file.
    """
    if config.data == "synthetic":
        problems = [mixture(seed, config.n) for seed in range(config.seeds)]
    elif config.data == "diabetes":
        problems = [load_diabetes()]
    else:
        problems = [from_csv(config.x or "", config.y or "", standardize=config.standardize)]
    starts = config.starts or (1 if config.data == "synthetic" else 8)
    tasks = []
    for problem in problems:
        shared = {"experiment": NAME, "data": problem.name, "digest": problem.digest, **config.solver}
        for k in range(starts):
            label = problem.name if starts == 1 else f"{problem.name}, start {k}"
            tasks.append(Task(label, {**shared, "start": k}, problem))
    return tasks


def run(
    config: Config, out: str | Path = "results", *, jobs: int | None = None, console: Console | None = None
) -> list[Row]:
    """Run what is missing in ``out``; returns the rows of this configuration.

    Args:
        config: what to run.
        out: folder of ``shuffled-regression.jsonl``.
        jobs: processes; None: one per core.
        console: for the progress bar.

    Raises:
        ValueError: bad data, folder or file of rows, before any run.
    """
    tasks = build(config)
    file = RowFile(check_folder("out", out) / f"{NAME}.jsonl")
    return run_tasks(tasks, run_one, file, jobs=jobs, console=console, describe=_describe)


def run_one(task: Task) -> Row:
    """One start of one problem; see `build` for the settings."""
    data: RegressionData = task.payload
    s = task.settings
    began, began_cpu = time.perf_counter(), time.process_time()
    loss = RegressionLoss(data.x, data.y, eps=s["eps"])
    w0 = start(data, s["start"])
    curvature = torch.linalg.eigvalsh(loss.hessian(w0).to_dense())
    solver = SaddleEscape(
        loss,
        lr=s["lr"],
        probe_every=s["probe_every"],
        threshold=s["threshold"],
        gtol=s["gtol"],
        max_iter=s["max_steps"],
        on_reject=ON_REJECT,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = solver.minimize(w0)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    potentials = loss.potentials(result.x)
    recheck, value = marginal_recheck(data.x @ result.x, data.y, *potentials, eps=s["eps"])
    return {
        "precision": str(data.x.dtype).removeprefix("torch."),
        "stopping_rule": f"|g| <= {s['gtol']:g} max |g|, lambda_min certified at confidence .99",
        "status": result.status.name,
        "success": result.success,
        "message": result.message,
        "warnings": sorted({f"{w.category.__name__}: {w.message}" for w in caught}),
        **_costs(result, loss),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "value": result.fun,
        "value_recheck": value,
        "marginal_recheck": recheck,
        "grad_norm": float(result.grad.norm()),
        "lambda_min_start": float(curvature[0]),
        "lambda_max_start": float(curvature[-1]),
        **_end_curvature(result),
        **_comparison(data, result, s["eps"], bool(curvature[0] < 0)),
        "w": result.x.tolist(),
        "trace": _trace(result),
    }


def _costs(result: EscapeResult, loss: RegressionLoss) -> Row:
    kinds = [record.kind for record in result.history if record.accepted]
    return {
        "n_iter": {kind: kinds.count(kind) for kind in ("first-order", "newton", "escape")},
        "n_probes": kinds.count("probe"),
        "n_hvp": result.n_hvp,
        "n_hessian": loss.n_hessian,
        "n_sinkhorn": loss.n_sinkhorn,
        "n_sinkhorn_missed": loss.missed,
        "plan_passes": loss.plan_passes,
    }


def _end_curvature(result: EscapeResult) -> Row:
    found = result.lambda_min
    return {
        "lambda_min_end": None if found is None else found.value,
        "lambda_max_end": None if found is None else found.lambda_max,
        "confidence": None if found is None else found.confidence,
    }


def _comparison(data: RegressionData, result: EscapeResult, eps: float, started_at_saddle: bool) -> Row:
    """Escape and recovery, and the value beside that at W* or at the linked least-squares W."""
    certified = result.status.name == "MINIMUM"
    row: Row = {"escape": started_at_saddle and certified, "reference": None, "value_reference": None}
    if data.reference is not None:
        row["reference"] = "W*" if data.truth is not None else "the linked least-squares W"
        row["value_reference"] = RegressionLoss(data.x, data.y, eps=eps).value(data.reference)
    row["w_error"] = None if data.truth is None else float((result.x - data.truth).norm())
    row["recovery"] = None if data.truth is None else bool(row["w_error"] <= RECOVERY_RADIUS)
    return row


def _trace(result: EscapeResult) -> Row:
    """Columns of the history that the figures need; no step is left out."""
    moves = [record for record in result.history if record.kind not in ("probe", "switch", "certificate")]
    probes = [record for record in result.history if record.lambda_min is not None]
    return {
        "step": [record.step for record in moves],
        "loss": [record.fun for record in moves],
        "kind": [record.kind for record in moves],
        "probe_step": [record.step for record in probes],
        "lambda_min": [record.lambda_min for record in probes],
        "lambda_max": [record.lambda_max for record in probes],
        "switches": [[switch.step, switch.action, switch.reason] for switch in result.switches],
    }


def marginal_recheck(z: Tensor, y: Tensor, f: Tensor, g: Tensor, *, eps: float) -> tuple[float, float]:
    """Marginals and value of the plan of (f, g), recomputed in numpy from the definition alone.

    The cost comes from explicit differences, the plan from `exp((f_i + g_j - C_ij)/eps)/(n m)`, in
    float64 and by blocks of rows.

    Returns:
        The larger L1 error of both marginals against uniform weights, and the dual value.
    """
    zs, ys, fs, gs = (t.detach().cpu().double().numpy() for t in (z, y, f, g))
    n, m = len(zs), len(ys)
    columns = np.zeros(m)
    row_error = 0.0
    for first in range(0, n, RECHECK_ROWS):
        part = slice(first, first + RECHECK_ROWS)
        cost = ((zs[part, None, :] - ys[None, :, :]) ** 2).sum(-1)
        plan = np.exp((fs[part, None] + gs[None, :] - cost) / eps) / (n * m)
        row_error += float(np.abs(plan.sum(1) - 1 / n).sum())
        columns += plan.sum(0)
    error = max(row_error, float(np.abs(columns - 1 / m).sum()))
    return error, float(fs.mean() + gs.mean() - eps * (columns.sum() - 1.0))


def summary(rows: Sequence[Row]) -> Row:
    """Counts over runs, and over problems where a problem has several starts."""
    done = [row for row in rows if "value" in row]
    problems: dict[str, Row] = {}
    for row in done:
        best = problems.get(row["settings"]["data"])
        if row["success"] and (best is None or row["value"] < best["value"]):
            problems[row["settings"]["data"]] = row
    compared = [row for row in problems.values() if row["value_reference"] is not None]
    return {
        "runs": len(rows),
        "minimum": sum(row["status"] == "MINIMUM" for row in rows),
        "saddle_starts": sum(row["lambda_min_start"] < 0 for row in done),
        "escape": sum(row["escape"] for row in done),
        "recovery": sum(bool(row["recovery"]) for row in done),
        "with_truth": sum(row["recovery"] is not None for row in done),
        "problems": len({row["settings"]["data"] for row in rows}),
        "compared": len(compared),
        "not_above": sum(_not_above(row) for row in compared),
        "worst_marginal": max((row["marginal_recheck"] for row in done), default=None),
        "best": sorted(problems.values(), key=lambda row: str(row["label"])),
    }


def _not_above(row: Mapping[str, Any]) -> bool:
    return bool(row["value"] <= row["value_reference"] + SAME_VALUE * abs(row["value_reference"]))


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table of runs (up to 40) and one of counts, for a rich console."""
    from rich.table import Table

    totals = summary(rows)
    counts = Table(title=f"{NAME}: summary", title_justify="left", show_header=False)
    counts.add_row("certified minima", f"{totals['minimum']} of {totals['runs']} runs")
    counts.add_row("escape", f"{totals['escape']} of {totals['saddle_starts']} starts with lambda_min < 0")
    if totals["with_truth"]:
        counts.add_row("recovery", f"{totals['recovery']} of {totals['with_truth']} runs")
    if totals["compared"]:
        named = totals["best"][0]["reference"]
        counts.add_row(
            f"value at most that at {named}", f"{totals['not_above']} of {totals['compared']} problems"
        )
    if totals["worst_marginal"] is not None:
        counts.add_row("largest marginal error, rechecked densely", f"{totals['worst_marginal']:.1e}")
    for best in totals["best"]:
        if totals["problems"] < totals["runs"]:
            counts.add_row(f"best of {best['settings']['data']}", f"{best['value']:.6f} ({best['label']})")
    if len(rows) > ROWS_PRINTED:
        return [counts]
    table = Table(title=f"{NAME}: runs", title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("run", "status") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return [table, counts]


_COLUMNS = (
    *("run", "status", "value", "reference", "lambda_min", "|W-W*|", "escape", "recovery"),
    *("Adam+Newton", "passes", "s"),
)


def _cells(row: Row) -> list[str]:
    if "value" not in row:
        return [row["label"], row["status"]]
    return [
        row["label"],
        row["status"],
        f"{row['value']:.6f}",
        _number(row["value_reference"], ".6f"),
        f"{_number(row['lambda_min_start'], '.1e')} to {_number(row['lambda_min_end'], '.1e')}",
        _number(row["w_error"], ".3f"),
        _yes(row["escape"]),
        _yes(row["recovery"]),
        f"{row['n_iter']['first-order']}+{row['n_iter']['newton']}",
        str(row["plan_passes"]),
        f"{row['seconds']:.1f}",
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _yes(value: bool | None) -> str:
    return "" if value is None else ("yes" if value else "no")


def _describe(row: Row) -> str:
    if "value" not in row:
        return f"{row['label']}: {row['status']}, {row['message']}"
    return f"{row['label']}: {row['status']}, value {row['value']:.6f}, {row['seconds']:.1f} s"


def plot(rows: Sequence[Row], out: str | Path = "results") -> list[Path]:
    """Figures from rows alone: one trajectory (an escaping run if there is one), values, W errors.

    Args:
        rows: of `run`.
        out: folder.

    Returns:
        The images written; none without a finished run.
    """
    from ot_newton.experiments.plots import plot_errors, plot_trajectory, plot_values

    done = [row for row in rows if "value" in row]
    if not done:
        return []
    folder = check_folder("out", out)
    shown = max(
        done, key=lambda row: (row["escape"], len(row["trace"]["switches"]), len(row["trace"]["step"]))
    )
    paths = [plot_trajectory(shown, folder / "trajectory.png"), plot_values(done, folder / "values.png")]
    known = [row for row in done if row["w_error"] is not None]
    if known:
        paths.append(plot_errors(known, RECOVERY_RADIUS, folder / "w_error.png"))
    return paths
