"""Accuracy of streamed Hessian-vector products against the dense Moore-Penrose Hessian, and their CG cost.

    accuracy   relative error and CG iterations for each eps, dimension and precision
    tolerance  error against the marginal error of the plan, at one eps

The harness of the inner solve is part of every row. Clouds are uniform in the unit cube, weights uniform; the
float32 rows are compared with the float64 Hessian of the same (rounded) points.
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
from ot_newton.experiments.dense_hessian import DenseHessian, dense_hessian
from ot_newton.experiments.runs import Row, Task, check_folder, load_average
from ot_newton.problem import OTProblem
from ot_newton.result import SinkhornResult
from ot_newton.solve import sinkhorn

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Config", "build", "describe", "plot", "run_one", "tables"]

NAME = ROWS = "hvp-accuracy"
JOBS: int | None = None  # one per core
DTYPES = {"float64": torch.float64, "float32": torch.float32}
TARGETS = {"float64": 1e-9, "float32": 1e-4}
TIGHT = 1e-13
MAX_ITER = 50_000
SMOKE = {"n": 20, "dims": (2,), "eps": (0.5, 0.05), "tolerances": (1e-2, 1e-6), "directions": 2}
PUBLISHED = "published reference: error under 1%, 78 to 195 CG iterations; a replication of it: 35/70/110"


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        n: points of both clouds.
        dims: dimensions; the targets are stated for 2 and 3.
        eps: regularizations, in units of the squared side of the cube.
        dtypes: "float64", "float32".
        directions: random directions of each row; the worst error counts.
        backend: a streaming one, so that the Schur system is solved by CG ("dense" would factorize it).
        tolerances: marginal errors of the rows at fixed eps.
        tolerance_eps: that eps.
        seed: of clouds and directions.
    """

    n: int = 200
    dims: tuple[int, ...] = (2, 3, 8)
    eps: tuple[float, ...] = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
    dtypes: tuple[str, ...] = ("float64", "float32")
    directions: int = 4
    backend: str = "cpu"
    tolerances: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10)
    tolerance_eps: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate before any work.

        Raises:
            ValueError: a value out of range, naming it; TypeError: of the wrong kind.
        """
        check_integer("n", self.n, low=2)
        check_integer("directions", self.directions, low=1)
        check_integer("seed", self.seed)
        for d in self.dims:
            check_integer("dims", d, low=1)
        for name in ("eps", "tolerances"):
            for value in getattr(self, name):
                check_number(name, value)
        check_number("tolerance_eps", self.tolerance_eps)
        for dtype in self.dtypes:
            check_choice("dtypes", dtype, tuple(DTYPES))
        check_choice("backend", self.backend, ("cpu", "torch_tiles", "dense"))


def build(config: Config) -> list[Task]:
    """The rows to make; each is cheap."""
    shared = {
        "experiment": NAME,
        "n": config.n,
        "directions": config.directions,
        "backend": config.backend,
        "seed": config.seed,
    }
    tasks = []
    for d in config.dims:
        for dtype in config.dtypes:
            for eps in config.eps:
                settings = {**shared, "study": "accuracy", "d": d, "dtype": dtype, "eps": eps, "tol": None}
                tasks.append(Task(f"d {d}, eps {eps:g}, {dtype}", settings))
    for tol in config.tolerances:
        settings = {
            **shared, "study": "tolerance", "d": config.dims[0], "dtype": "float64",
            "eps": config.tolerance_eps, "tol": tol,
        }  # fmt: skip
        tasks.append(
            Task(f"d {config.dims[0]}, eps {config.tolerance_eps:g}, marginal error {tol:g}", settings)
        )
    return tasks


def clouds(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """x, y (n, d) and the directions (n d, K), in float64 but representable in the row's dtype."""
    generator = torch.Generator().manual_seed(settings["seed"])
    n, d = settings["n"], settings["d"]
    x, y = (torch.rand(n, d, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(n * d, settings["directions"], generator=generator, dtype=torch.float64)
    dtype = DTYPES[settings["dtype"]]
    return x.to(dtype).double(), y.to(dtype).double(), v.to(dtype).double()


def run_one(task: Task) -> Row:
    """One row: solve, multiply, compare."""
    s = task.settings
    x, y, v = clouds(s)
    dtype = DTYPES[s["dtype"]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exact = _exact(x, y, s["eps"])
        problem = OTProblem(x.to(dtype), y.to(dtype), eps=s["eps"])
        method = "auto" if s["tol"] is None else "sinkhorn"
        # The product is linear in the plan's error: as tight as the precision allows (the floor, if above).
        tol = s["tol"] if s["tol"] is not None else 1e-12
        solved = sinkhorn(problem, tol=tol, max_iter=MAX_ITER, method=method, backend=s["backend"])
        hessian = solved.hessian("x")
        began, passes = time.perf_counter(), solved.plan_passes
        product = hessian @ v.to(dtype)
        seconds = time.perf_counter() - began
        singles = [_cg_iterations(solved, v[:, k].to(dtype)) for k in range(v.shape[1])]
    own = dense_hessian(x, y, solved.f.double(), solved.g.double(), eps=s["eps"])
    met = bool(solved.converged) and hessian.stats.converged
    return {
        "precision": s["dtype"],
        "stopping_rule": f"marginal error {solved.tol:.1e}; Schur residual {hessian.rtol:.0e} |rhs|",
        "status": "CONVERGED" if met else "MAX_ITER",
        "success": met,
        "message": "solve and products met their tolerances" if met else "a tolerance was missed",
        "warnings": sorted({f"{w.category.__name__}: {w.message}" for w in caught}),
        "load_average": load_average(),
        "harness": {
            "system": "Schur complement on y, D_c^-1/2 S D_c^-1/2 = I - K^T K",
            "preconditioner": "none beyond that scaling",
            "deflation": "null vector sqrt(c) projected; slow modes of the plan's earlier products",
            "cg_tolerance": f"{hessian.rtol:.0e} of the right-hand side, never below its rounding",
            "start": "zero",
            "precision": s["dtype"],
            "backend": solved.backend,
            "iterations": "cg_iterations_single: first product of a fresh plan, so nothing harvested helps",
        },
        "error": _relative(product, exact.matrix, v),
        "error_of_own_plan": _relative(product, own.matrix, v),
        "reference_marginal_error": exact.marginal_error,
        "spectral_gap": exact.gap,
        "marginal_error": float(solved.marginal_error),
        "cg_iterations_block": hessian.stats.cg_iterations,
        "cg_iterations_single": singles,
        "worst_residual": hessian.stats.worst_residual,
        "n_iter": int(solved.n_iter),
        "plan_passes_product": solved.plan_passes - passes,
        "seconds_product": seconds,
    }


def _exact(x: Tensor, y: Tensor, eps: float) -> DenseHessian:
    """The reference: float64 potentials as tight as rounding allows, then everything dense."""
    result = sinkhorn(
        OTProblem(x, y, eps=eps), tol=TIGHT, max_iter=MAX_ITER, method="newton", backend="dense"
    )
    return dense_hessian(x, y, result.f, result.g, eps=eps)


def _cg_iterations(solved: SinkhornResult, v: Tensor) -> int:
    """CG iterations of one product with one vector, nothing recycled from other products."""
    fresh = sinkhorn(
        solved.problem, tol=1.0, max_iter=1, method="sinkhorn", init=solved, backend=solved.backend
    )
    hessian = fresh.hessian("x")
    _ = hessian @ v
    return int(hessian.stats.cg_iterations)


def _relative(product: Tensor, matrix: np.ndarray[Any, Any], v: Tensor) -> float:
    """Worst relative error over the directions."""
    exact = torch.as_tensor(matrix) @ v
    return float(((product.double() - exact).norm(dim=0) / exact.norm(dim=0)).max())


def describe(row: Row) -> str:
    """A line for the progress bar."""
    if "error" not in row:
        return f"{row['label']}: {row['status']}, {row['message']}"
    return f"{row['label']}: error {row['error']:.1e}, CG {max(row['cg_iterations_single'])}"


def _target(row: Row) -> float | None:
    """The largest error allowed, None where it is only reported."""
    s = row["settings"]
    return TARGETS[s["dtype"]] if s["study"] == "accuracy" and s["d"] in (2, 3) else None


def tables(rows: Sequence[Row]) -> list[Table]:
    """Both studies, for a rich console."""
    from rich.table import Table

    made = []
    for study, title in (("accuracy", NAME), ("tolerance", f"{NAME}: error against marginal error")):
        table = Table(title=title, title_justify="left", caption=PUBLISHED if study == "accuracy" else None)
        for name in ("row", "error", "target", "met", "own plan", "marginal", "CG", "gap", "status"):
            table.add_column(name, no_wrap=True, justify="left" if name in ("row", "status") else "right")
        for row in rows:
            if row["settings"]["study"] == study:
                table.add_row(*_cells(row))
        if table.row_count:
            made.append(table)
    return made


def _cells(row: Row) -> list[str]:
    if "error" not in row:
        return [row["label"], *[""] * 7, row["status"]]
    target = _target(row)
    singles = row["cg_iterations_single"]
    return [
        row["label"],
        f"{row['error']:.1e}",
        "reported" if target is None else f"{target:.0e}",
        "" if target is None else ("yes" if row["error"] <= target else "no"),
        f"{row['error_of_own_plan']:.1e}",
        f"{row['marginal_error']:.1e}",
        f"{min(singles)}-{max(singles)}",
        f"{row['spectral_gap']:.1e}",
        row["status"],
    ]


def plot(rows: Sequence[Row], out: str | Path = "results") -> list[Path]:
    """Error and CG iterations against eps, error against marginal error; from rows alone."""
    from ot_newton.experiments.plots import plot_lines

    done = [row for row in rows if "error" in row]
    folder = check_folder("out", out)
    errors: dict[str, list[tuple[float, float]]] = {}
    iterations: dict[str, list[tuple[float, float]]] = {}
    for row in done:
        s = row["settings"]
        if s["study"] == "accuracy":
            name = f"d = {s['d']}, {s['dtype']}"
            errors.setdefault(name, []).append((s["eps"], row["error"]))
            iterations.setdefault(name, []).append((s["eps"], max(row["cg_iterations_single"])))
    by_tol = {
        label: [(row["marginal_error"], row[key]) for row in done if row["settings"]["study"] == "tolerance"]
        for label, key in (
            ("against the converged Hessian", "error"),
            ("against that of its own plan", "error_of_own_plan"),
        )
    }
    wanted = (
        (errors, "hvp-error.png", "eps", "relative error of a product"),
        (iterations, "hvp-cg.png", "eps", "CG iterations of a product"),
        (by_tol, "hvp-tolerance.png", "marginal error of the plan", "relative error of a product"),
    )
    return [
        plot_lines(series, folder / name, x=x, y=y) for series, name, x, y in wanted if any(series.values())
    ]
