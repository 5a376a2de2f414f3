"""Deflation, warm starts and low eps in plan passes: `python -m ot_newton.experiments.bench.deflation`.

Four tables, uniform cube, float64, `cpu` backend (streaming):

    hvp      mean Schur passes per Hessian-vector product over 20 products with one plan, with and without
             deflation, at the same true residual
    newton   a Newton-CG run on positions: plan passes with deflation, warm starts and block products
             ("on"), with none of them ("off"), and with none of them on plain annealed Sinkhorn ("plain")
    adam     Adam on positions: plan passes with warm starts ("on") and from scratch every time ("off")
    low-eps  plan passes of the dual Newton to marginal error 1e-8

Every row names what was asked and what was reached; passes do not depend on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ot_newton.losses import SinkhornLoss
from ot_newton.operators.hessian_operator import HessianOperator
from ot_newton.operators.plan import linearize
from ot_newton.problem import OTProblem
from ot_newton.result import SinkhornResult
from ot_newton.solve import sinkhorn
from ot_newton.solvers.cg import CGResult, conjugate_gradient
from ot_newton.solvers.newton import NewtonCG

__all__ = ["PositionLoss", "adam_row", "cube", "hvp_row", "low_eps_row", "main", "newton_row"]

Row = dict[str, Any]
PRODUCTS = 20
HVP_TARGETS = {0.02: 3.0, 0.01: 5.0}
ADAM_CASES = ((2, 0.1), (2, 0.02), (8, 0.05))
LOW_EPS_CAPS = {(2, 0.002): 300, (8, 0.01): 2_500, (8, 0.005): 10_000}


def cube(n: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two uniform clouds of n points in the unit cube, float64."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.rand(n, d, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def _operator(result: SinkhornResult, rtol: float, *, deflated: bool) -> tuple[HessianOperator, Tensor]:
    """A fresh plan's Hessian and `PRODUCTS` directions (N,k)."""
    plan = linearize(result.problem, result.biases, "cpu", result.counter)
    if not deflated:
        plan.deflation = None
    h = HessianOperator(plan, "x", rtol=rtol, max_cg=None, relative_floor=rtol, curvature_bound=2.0)
    return h, torch.zeros(h.shape[0], PRODUCTS, dtype=torch.float64)


def _directions(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.stack([torch.randn(len(like), generator=generator, dtype=like.dtype) for _ in like[0]], 1)


def _deflated(result: SinkhornResult, rtol: float, seed: int) -> tuple[float, float, int]:
    """Mean Schur passes, worst true residual and vectors held, over products made one by one."""
    h, block = _operator(result, rtol, deflated=True)
    worst = 0.0
    for v in _directions(block, seed).T:
        h @ v
        worst = max(worst, h.stats.residual)
    held = 0 if h.linearized.deflation is None else h.linearized.deflation.size
    return h.stats.plan_passes / PRODUCTS - 2, worst, held


def _plain(result: SinkhornResult, rtol: float, seed: int) -> tuple[float, float]:
    """The same without deflation: a block, whose columns CG solves apart, counted one by one."""
    h, block = _operator(result, rtol, deflated=False)
    steps: list[Tensor] = []

    def watched(*args: Any, **options: Any) -> CGResult:
        out = conjugate_gradient(*args, **options)
        # One product more for every true residual it makes on the way.
        steps.append(out.iterations + out.iterations // options["refresh"])
        return out

    with mock.patch("ot_newton.schur.conjugate_gradient", watched):
        h @ _directions(block, seed)
    return 2.0 * float(torch.cat(steps, -1).double().mean()), h.stats.residual


def hvp_row(n: int, d: int, eps: float, seed: int, *, rtol: float = 1e-6) -> Row:
    """Item: Schur passes per product, deflated against not.

    Args:
        n: points of both clouds.
        d: dimension.
        eps: regularization.
        seed: of the clouds and directions.
        rtol: true residual of every Schur solve, relative to its right-hand side.
    """
    x, y = cube(n, d, seed)
    result = sinkhorn(OTProblem(x, y, eps=eps), tol=1e-8, backend="cpu")
    row: Row = {"n": n, "d": d, "eps": eps, "seed": seed, "rtol": rtol, "status": result.statuses[0].name}
    row["plain"], row["plain_residual"] = _plain(result, rtol, seed)
    row["deflated"], row["deflated_residual"], row["vectors"] = _deflated(result, rtol, seed)
    row["ratio"] = row["plain"] / row["deflated"]
    return row


class PositionLoss:
    """OT of moving positions x against a fixed cloud, as `NewtonCG` takes a loss.

    Args:
        y: (m, d) the fixed cloud.
        full: deflation, warm starts and block products, or none of them.
        eps: regularization.
        **options: of `SinkhornLoss`.
    """

    def __init__(self, y: Tensor, full: bool, eps: float, **options: Any) -> None:
        self.inner = SinkhornLoss(eps, warm_start=full, backend="cpu", **options)
        self.y, self.full = y, full

    def __call__(self, x: Tensor) -> Tensor:
        """OT(x, y)."""
        value: Tensor = self.inner(x, self.y)
        result = self.inner.last_result
        if not self.full and result is not None:
            result.linearized.deflation = None
        return value

    @property
    def plan_passes(self) -> int:
        """All passes so far."""
        return self.inner.plan_passes

    def noise_floor(self, x: Tensor) -> float:
        """See `SinkhornLoss`."""
        return self.inner.noise_floor(x)

    def value_noise(self, x: Tensor) -> float:
        """See `SinkhornLoss`."""
        return self.inner.value_noise(x)


def newton_row(n: int, d: int, eps: float, seed: int, *, steps: int = 10) -> Row:
    """Item: a Newton-CG run on positions with everything on, against none of it; same tolerances."""
    x, y = cube(n, d, seed)
    row: Row = {"n": n, "d": d, "eps": eps, "seed": seed, "steps": steps}
    for name, full, method in (("plain", False, "sinkhorn"), ("off", False, "auto"), ("on", True, "auto")):
        loss = PositionLoss(y, full, eps, method=method, tol=1e-8, rtol=1e-6)
        start = time.perf_counter()
        # Deflation is on by default in the dual Newton too: there is no public switch.
        undeflated = mock.patch("ot_newton.solve.Deflation.carried", lambda state: None)
        with warnings.catch_warnings(), contextlib.nullcontext() if full else undeflated:
            warnings.simplefilter("ignore")
            solver = NewtonCG(loss, max_iter=steps, gtol=1e-8)
            result = solver.minimize(x)
        row |= {
            name: loss.plan_passes,
            f"{name}_fun": result.fun,
            f"{name}_grad": float(result.grad.norm()),
            f"{name}_hvp": result.n_hvp,
            f"{name}_seconds": time.perf_counter() - start,
        }
    row["ratio"] = row["off"] / row["on"]
    row["ratio_plain"] = row["plain"] / row["on"]
    return row


def adam_row(n: int, d: int, eps: float, seed: int, *, steps: int = 60, lr: float = 0.01) -> Row:
    """Item: Adam on positions against a cloud shifted by .3, marginals to 1e-6, warm starts on and off."""
    x, y = cube(n, d, seed)
    row: Row = {"n": n, "d": d, "eps": eps, "seed": seed, "steps": steps, "lr": lr}
    for name in ("off", "on"):
        loss = SinkhornLoss(eps, tol=1e-6, backend="cpu", warm_start=name == "on")
        moving = x.clone().requires_grad_()
        optimizer = torch.optim.Adam([moving], lr=lr)
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            value = loss(moving, y + 0.3)
            value.backward()
            optimizer.step()
        row |= {
            name: loss.plan_passes,
            f"{name}_fun": float(value.detach()),
            f"{name}_seconds": time.perf_counter() - start,
        }
    row["ratio"] = row["off"] / row["on"]
    return row


def low_eps_row(n: int, d: int, eps: float, seed: int, *, method: str = "newton") -> Row:
    """Item: plan passes to marginal error 1e-8."""
    x, y = cube(n, d, seed)
    result = sinkhorn(OTProblem(x, y, eps=eps), tol=1e-8, method=method, backend="cpu")
    return {
        "n": n,
        "d": d,
        "eps": eps,
        "seed": seed,
        "method": method,
        "status": result.statuses[0].name,
        "marginal_error": float(result.errors.max()),
        "passes": result.plan_passes,
        "cap": LOW_EPS_CAPS.get((d, eps), 0),
    }


def geometric_mean(values: list[float]) -> float:
    """Geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _rows(table: str, sizes: list[int], seeds: int) -> Iterator[Row]:
    if table == "hvp":
        yield from (hvp_row(n, 8, eps, k) for n in sizes for eps in HVP_TARGETS for k in range(seeds))
    elif table == "adam":
        yield from (adam_row(n, d, eps, k) for n in sizes for d, eps in ADAM_CASES for k in range(seeds))
    elif table == "newton":
        yield from (newton_row(n, 2, 0.02, k) for n in sizes for k in range(seeds))
    else:
        yield from (low_eps_row(n, d, eps, k) for n in sizes for d, eps in LOW_EPS_CAPS for k in range(seeds))


def _line(row: Row) -> str:
    cells = (
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in row.items()
    )
    return "  ".join(cells)


def main(arguments: list[str] | None = None) -> int:
    """Print the rows of a table, and the geometric means of its ratios."""
    parser = argparse.ArgumentParser(prog="deflation", description="Deflation and low eps in plan passes.")
    parser.add_argument("table", nargs="?", default="hvp", choices=("hvp", "newton", "adam", "low-eps"))
    parser.add_argument("-n", type=int, nargs="+", default=[300], help="points of both clouds")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args(arguments)
    ratios: dict[tuple[int, float], list[float]] = {}
    for row in _rows(given.table, given.n, given.seeds):
        sys.stdout.write(_line(row) + "\n")
        sys.stdout.flush()
        if "ratio" in row:
            ratios.setdefault((row["n"], row["eps"]), []).append(row["ratio"])
    for (n, eps), values in ratios.items():
        sys.stdout.write(
            f"n={n} eps={eps:g}: geometric mean ratio {geometric_mean(values):.2f} of {len(values)}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
