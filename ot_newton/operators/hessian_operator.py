"""The Hessian of OT in the points as an operator: one product is a streamed HVP (MATH 5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ot_newton.directions import Direction, HessianStats
from ot_newton.hessian import LinearizedPlan
from ot_newton.operators.base import PlanOperator, warn_unconverged
from ot_newton.potentials import asked_marginal, biases_to_potentials
from ot_newton.schur import safe_inverse

__all__ = ["HessianOperator", "default_rtol"]

STOP_FACTOR = 8.0


def default_rtol(dtype: torch.dtype) -> float:
    """Tolerance of the Schur solve: 1e-10 in float64, 1e-5 in float32."""
    return 1e-10 if dtype == torch.float64 else 1e-5


def _conditional_variance(plan: LinearizedPlan) -> float:
    """`max_i sum_j P_ij |y_j - m_i|^2 / r_i`, m_i the row's mean; one pass."""
    r, py = plan.rows()
    moment = plan.plan.apply(plan.y.square().sum(-1, keepdim=True), 1).squeeze(-1)
    inverse = safe_inverse(r)
    variance = inverse * moment - (inverse[:, :, None] * py).square().sum(-1)
    return max(0.0, float(variance.max()))


def _stop_error(plan: LinearizedPlan) -> float:
    """Largest deviation of a marginal from the one asked for, relative to the largest one asked for."""
    p, worst = plan.problem, 0.0
    potentials: tuple[Tensor | None, Tensor | None] = (None, None)
    if plan.source is not None and not p.balanced:
        f, g = biases_to_potentials(p, plan.source[1])
        potentials = f.reshape(-1, p.n), g.reshape(-1, p.m)
    sides = ((plan.a, plan.rows()[0], p.rho_x), (plan.b, plan.columns()[0], p.rho_y))
    for (weight, marginal, rho), potential in zip(sides, potentials, strict=True):
        asked = weight.double() if potential is None else asked_marginal(weight, potential, rho)
        gap = (marginal.double() - asked).abs().amax(-1)
        worst = max(worst, float((gap / asked.amax(-1)).max()))
    return worst


class HessianOperator(PlanOperator):
    """Hessian of OT in "x" (N = n d), "y" (N = m d) or "xy" (N = (n+m) d, x first), row-major.

    ``H @ v`` for (N,), (N,k) or a cloud-shaped v ((n,d); for "xy" the tuple (vx, vy), which gives a
    tuple). One product costs 2 + 2 n_cg plan passes for a whole block of columns ("xy": 4 + 2 n_cg); on
    the dense backend the Schur complement is factorized once instead. An inner solve that misses its
    tolerance warns (`ConvergenceWarning`) and is recorded in ``stats``.

    Attributes:
        wrt: "x", "y" or "xy".
        stats: counters, see `HessianStats`.
        rtol: tolerance of the inner solve, relative to its right-hand side.
        relative_floor: relative uncertainty of the plan's rows by rounding and inner tolerance.
        noise_floor: absolute uncertainty of a curvature (and of `|H v|` for unit v), see there.
        norm_bound: upper bound of the largest eigenvalue (I3), `2 s max(r)`; twice that for "xy".

    Example:
        >>> import torch, ot_newton as otn
        >>> x, y = torch.tensor([[-0.5], [0.5]]).double(), torch.tensor([[-1.0], [1.0]]).double()
        >>> H = otn.sinkhorn(otn.OTProblem(x, y, eps=1.0)).hessian("x")
        >>> H
        HessianOperator(2x2, float64, cpu)
        >>> (H @ torch.ones(2, dtype=torch.float64)).numpy().round(12)  # translation law: 2 s a
        array([1., 1.])
        >>> H.stats.n_hvp, H.stats.converged
        (1, True)
    """

    def __init__(
        self,
        linearized: LinearizedPlan,
        wrt: str,
        *,
        rtol: float,
        max_cg: int | None,
        relative_floor: float,
        curvature_bound: float,
    ) -> None:
        problem = linearized.problem
        self.linearized, self.wrt, self.rtol, self.max_cg = linearized, wrt, rtol, max_cg
        self.stats = HessianStats()
        self.batch_shape = problem.batch_shape
        self.dtype, self.device = problem.dtype, problem.device
        self.d, self.n, self.m = problem.d, problem.n, problem.m
        points = {"x": problem.n, "y": problem.m, "xy": problem.n + problem.m}[wrt]
        self.rows = self.cols = points * problem.d
        self._cloud = (points, problem.d)
        self.relative_floor, self._curvature_bound = relative_floor, curvature_bound
        self._noise: float | None = None

    @property
    def mT(self) -> HessianOperator:  # noqa: N802
        """Itself: symmetric."""
        return self

    @property
    def norm_bound(self) -> float:
        """`2 s max` of the marginals of the points moved; twice that for "xy"."""
        rows = float(self.linearized.rows()[0].max()) if "x" in self.wrt else 0.0
        cols = float(self.linearized.columns()[0].max()) if "y" in self.wrt else 0.0
        return self._curvature_bound * (rows + cols if self.wrt == "xy" else max(rows, cols))

    @property
    def noise_floor(self) -> float:
        """Distance of this operator from the exact Hessian, in the spectral norm.

        `norm_bound (1 + 2 s V / eps) (relative_floor + 8 stop)`, V the largest conditional variance
        `sum_j P_ij |y_j - m_i|^2 / r_i` of a row, since a relative error of the plan enters through
        `(4 s^2 / eps) Cov_i`; ``stop`` is the largest deviation of a marginal from the one asked for,
        relative to the largest one asked for. A bound on every problem tried (a test holds it against
        float64), not a theorem. Cost: one plan pass a side, cached.
        """
        sides = [self.linearized] if "x" in self.wrt else []
        sides += [self.linearized.swap] if "y" in self.wrt else []
        if self._noise is None:
            variance = max(_conditional_variance(side) for side in sides)
            spread = self._curvature_bound * variance / self.linearized.eps
            relative = self.relative_floor + STOP_FACTOR * _stop_error(self.linearized)
            self._noise = self.norm_bound * (1.0 + spread) * relative
        return self._noise

    def __matmul__(self, v: Any) -> Any:
        """See the class; tuples of clouds for "xy"."""
        if not isinstance(v, tuple):
            return super().__matmul__(v)
        if self.wrt != "xy" or len(v) != 2:
            raise TypeError(f'a tuple (vx, vy) is for hessian("xy"), got {len(v)} parts for {self.wrt!r}')
        if isinstance(v[0], Tensor):
            out = super().__matmul__(torch.cat([v[0], v[1]], dim=-2))
        else:
            import numpy as np

            out = super().__matmul__(np.concatenate([v[0], v[1]], axis=-2))
        return out[..., : self.n, :], out[..., self.n :, :]

    def _clouds(self, block: Tensor) -> Direction:
        """(B,N,k) columns as (B,k,n,d) clouds."""
        clouds = block.mT.reshape(block.shape[0], block.shape[2], -1, self.d)
        if self.wrt == "x":
            return Direction(x=clouds)
        if self.wrt == "y":
            return Direction(y=clouds)
        return Direction(x=clouds[:, :, : self.n], y=clouds[:, :, self.n :])

    def _matmat(self, v: Tensor) -> Tensor:
        out, solve = self.linearized.product(
            self._clouds(v), self.wrt, rtol=self.rtol, max_cg=self.max_cg, stats=self.stats
        )
        if not solve.converged:
            warn_unconverged("Hessian product", self.stats.residual, self.rtol, solve.iterations)
        parts = [part for part in (out.x, out.y) if part is not None]
        return torch.cat(parts, dim=2).flatten(2).mT

    def diagonal(self) -> Tensor:
        """(*batch, N), by block products with the identity."""
        return self.to_dense().diagonal(dim1=-2, dim2=-1)
