"""Low eps: time and plan passes to marginal error 1e-6 by Sinkhorn, annealed Sinkhorn, Newton and auto.

eps is a fraction of the mean cost of two clouds uniform in the unit cube. A tolerance below the rounding
floor of float32 is raised to it by the solver; such rows say which tolerance they met.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ot_newton.errors import check_choice, check_integer, check_number
from ot_newton.experiments.runs import Row, Task, check_folder, load_average
from ot_newton.experiments.shuffled_regression import marginal_recheck
from ot_newton.problem import OTProblem
from ot_newton.solve import sinkhorn

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Config", "build", "describe", "plot", "run_one", "tables"]

NAME = ROWS = "low-eps"
JOBS: int | None = 1  # rows are timed
DTYPES = {"float64": torch.float64, "float32": torch.float32}
METHODS: dict[str, dict[str, Any]] = {
    "sinkhorn": {"method": "sinkhorn", "anneal": False},
    "annealed": {"method": "sinkhorn", "anneal": "auto"},
    "newton": {"method": "newton"},
    "auto": {"method": "auto"},
}
SMOKE = {"n": 24, "fractions": (0.1, 0.02), "max_iter": 400}


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        n: points of both clouds.
        d: dimension.
        fractions: eps as fractions of the mean cost.
        methods: of "sinkhorn" (from zero, no annealing), "annealed", "newton", "auto".
        dtypes: "float64", "float32".
        tol: marginal error to reach.
        max_iter: cap on iterations.
        backend: as in `sinkhorn`.
        seed: of the clouds.
    """

    n: int = 400
    d: int = 2
    fractions: tuple[float, ...] = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
    methods: tuple[str, ...] = tuple(METHODS)
    dtypes: tuple[str, ...] = ("float64", "float32")
    tol: float = 1e-6
    max_iter: int = 20_000
    backend: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate before any work.

        Raises:
            ValueError: a value out of range, naming it; TypeError: of the wrong kind.
        """
        for name, low in (("n", 2), ("d", 1), ("max_iter", 1), ("seed", 0)):
            check_integer(name, getattr(self, name), low=low)
        for value in self.fractions:
            check_number("fractions", value)
        check_number("tol", self.tol)
        for method in self.methods:
            check_choice("methods", method, tuple(METHODS))
        for dtype in self.dtypes:
            check_choice("dtypes", dtype, tuple(DTYPES))
        check_choice("backend", self.backend, ("auto", "cpu", "torch_tiles", "dense"))


def build(config: Config) -> list[Task]:
    """One run per method, precision and eps."""
    names = ("n", "d", "tol", "max_iter", "backend", "seed")
    shared = {"experiment": NAME, **{name: getattr(config, name) for name in names}}
    return [
        Task(
            f"eps {fraction:g} of the mean cost, {method}, {dtype}",
            {**shared, "fraction": fraction, "method": method, "dtype": dtype},
        )
        for fraction in config.fractions
        for dtype in config.dtypes
        for method in config.methods
    ]


def clouds(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor, float]:
    """x, y (n, d) in the row's dtype and their mean cost."""
    generator = torch.Generator().manual_seed(settings["seed"])
    shape = (settings["n"], settings["d"])
    x, y = (torch.rand(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    mean = float((x.square().sum(1).mean() + y.square().sum(1).mean()) - 2 * x.mean(0) @ y.mean(0))
    dtype = DTYPES[settings["dtype"]]
    return x.to(dtype), y.to(dtype), mean


def run_one(task: Task) -> Row:
    """One solve."""
    s = task.settings
    x, y, mean = clouds(s)
    eps = s["fraction"] * mean
    problem = OTProblem(x, y, eps=eps)
    # Compilation and first touch are not part of the time.
    sinkhorn(problem, tol=0, max_iter=2, method="sinkhorn", backend=s["backend"])
    began, began_cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = sinkhorn(
            problem, tol=s["tol"], max_iter=s["max_iter"], backend=s["backend"], **METHODS[s["method"]]
        )
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    error, value = marginal_recheck(x, y, result.f, result.g, eps=eps)
    return {
        "precision": s["dtype"],
        "stopping_rule": f"marginal error {result.tol:.1e}, asked {s['tol']:g}; cap {s['max_iter']}",
        "status": result.statuses[0].name,
        "success": bool(result.converged),
        "message": result.statuses[0].message,
        "warnings": sorted({f"{w.category.__name__}: {w.message}" for w in caught}),
        "load_average": load_average(),
        "eps": eps,
        "mean_cost": mean,
        "tol_used": result.tol,
        "noise_floor": result.noise_floor,
        "n_iter": int(result.n_iter),
        "plan_passes": result.plan_passes,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "marginal_error": float(result.marginal_error),
        "marginal_recheck": error,
        "value": value,
    }


def describe(row: Row) -> str:
    """A line for the progress bar."""
    if "plan_passes" not in row:
        return f"{row['label']}: {row['status']}, {row['message']}"
    return f"{row['label']}: {row['status']}, {row['plan_passes']} passes, {row['seconds']:.2f} s"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Passes and seconds of every run, for a rich console."""
    from rich.table import Table

    table = Table(title=f"{NAME}: to the marginal error asked for", title_justify="left")
    for name in ("run", "status", "iterations", "passes", "s", "cpu s", "tolerance", "recheck"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("run", "status") else "right")
    for row in rows:
        if "plan_passes" not in row:
            table.add_row(row["label"], row["status"])
            continue
        table.add_row(
            row["label"],
            row["status"],
            str(row["n_iter"]),
            str(row["plan_passes"]),
            f"{row['seconds']:.2f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['tol_used']:.1e}",
            f"{row['marginal_recheck']:.1e}",
        )
    return [table] if table.row_count else []


def plot(rows: Sequence[Row], out: str | Path = "results") -> list[Path]:
    """Passes and seconds against eps, converged runs only; from rows alone."""
    from ot_newton.experiments.plots import plot_lines

    folder = check_folder("out", out)
    paths = []
    for key, label in (("plan_passes", "plan passes"), ("seconds", "seconds")):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["success"]:
                s = row["settings"]
                series.setdefault(f"{s['method']}, {s['dtype']}", []).append((s["fraction"], row[key]))
        if series:
            name = f"low-eps-{key.replace('_', '-')}.png"
            paths.append(
                plot_lines(series, folder / name, x="eps over mean cost", y=f"{label} to the tolerance")
            )
    return paths
