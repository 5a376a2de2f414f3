"""The trust-region subproblem: truncated CG once per point, replayed after a rejected step.

A smaller radius cuts the same CG path earlier, so a rejection costs no Hessian-vector product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ot_newton.solvers.cg import CGReason, CGResult, boundary_step, conjugate_gradient
from ot_newton.solvers.lanczos_process import null_basis, project_out
from ot_newton.solvers.linear_map import as_linear_map
from ot_newton.solvers.objective import Point

__all__ = ["Model", "TrustStep", "as_preconditioner", "as_projector", "interpolated", "next_radius"]


@dataclass(frozen=True, eq=False)
class TrustStep:
    """A step of the quadratic model.

    Attributes:
        p: (N,) the step.
        decrease: the model's decrease `-(g^T p + p^T H p / 2)`, in float64.
        length: `|p|`, in the M-norm when preconditioned.
        on_boundary: the radius cut it.
        iterations: CG steps it used.
        reason: why CG ended.
        curvature: Rayleigh quotient of a direction of nonpositive curvature, else nan.
    """

    p: Tensor
    decrease: float
    length: float
    on_boundary: bool
    iterations: int
    reason: CGReason
    curvature: float


def _inner(u: Tensor, v: Tensor) -> float:
    return (
        float((u.to(torch.float64) * v.to(torch.float64)).sum()) if u.device.type != "mps" else float(u @ v)
    )


class Model:
    """`m(p) = g^T p + p^T H p / 2` at one point, with its CG path.

    Args:
        point: where.
        rtol: tolerance of CG, relative to the gradient.
        max_iter: cap on CG steps.
        radius: trust-region radius; None lets the path run free (`first_radius` then proposes one).
        preconditioner: product with an approximation of the inverse Hessian on (N, 1) blocks.
        project: projector out of a null space, on (N, 1) blocks.
    """

    def __init__(
        self,
        point: Point,
        *,
        rtol: float,
        max_iter: int,
        radius: float | None,
        preconditioner: Callable[[Tensor], Tensor] | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.point, self.preconditioned = point, preconditioner is not None
        hessian = point.step_hessian
        self.result: CGResult = conjugate_gradient(
            lambda v: hessian @ v,
            -point.grad[:, None],
            rtol=rtol,
            max_iter=max_iter,
            radius=radius,
            preconditioner=preconditioner,
            project=project,
            record=True,
        )
        self.radius = radius
        self.reason = CGReason(int(self.result.reason[0]))
        self.curvature = float(self.result.curvature[0])
        self.norm = float(self.result.norm_estimate[0])

    def first_radius(self) -> float:
        """Ten times the length of the steepest-descent minimizer; the size of x where there is none."""
        size = float(self.point.x.norm())
        fallback = 0.37 * size if size > 0 else 1.0
        if not self.result.path:
            return fallback
        first = self.result.path[0]
        p, hp = first.p[:, 0], first.hp[:, 0]
        curvature, squared = _inner(p, hp), _inner(p, p)
        if abs(curvature) <= 10 * torch.finfo(p.dtype).eps * self.norm * squared or squared == 0.0:
            return fallback
        slope = abs(_inner(self.point.grad, p))
        length = slope / abs(curvature) * math.sqrt(slope if self.preconditioned else squared)
        return 10.0 * length if curvature > 0 else length

    def step(self, radius: float) -> TrustStep:
        """The step for this radius; makes no product."""
        free = self.radius is None and self.reason is CGReason.NEGATIVE_CURVATURE
        if not free:
            whole = self._from_result()
            if whole.length <= radius * (1 + 1e-12):
                return whole
        return self._replay(radius)

    @property
    def cut(self) -> bool:
        """Whether CG was ended by the radius or by nonpositive curvature."""
        return self.reason in (CGReason.BOUNDARY, CGReason.NEGATIVE_CURVATURE)

    def length(self) -> float:
        """Length of the CG solution, in the norm of the radius."""
        if self.cut and self.radius is not None:
            return self.radius
        p = self.result.x[:, 0]
        return self._length() if self.preconditioned else math.sqrt(_inner(p, p))

    def _from_result(self) -> TrustStep:
        p, hp = self.result.x[:, 0], self.result.hx[:, 0]
        return self._finish(p, hp, self.length(), self.cut, int(self.result.iterations[0]))

    def _finish(self, p: Tensor, hp: Tensor, length: float, cut: bool, iterations: int) -> TrustStep:
        decrease = -(_inner(self.point.grad, p) + 0.5 * _inner(p, hp))
        return TrustStep(p, decrease, length, cut, iterations, self.reason, self.curvature)

    def _length(self) -> float:
        """M-norm of the CG solution, by the recurrence of the path."""
        xx = 0.0
        for _, xx, xp, pp, alpha in self._walk():
            xx = xx + alpha * (2 * xp + alpha * pp)
        return math.sqrt(max(xx, 0.0))

    def _walk(self) -> list[tuple[int, float, float, float, float]]:
        """(j, |x|^2, x.p, |p|^2, alpha) before each recorded step, in the norm of the radius."""
        rows: list[tuple[int, float, float, float, float]] = []
        x = torch.zeros_like(self.point.grad)
        r = -self.point.grad
        xx = xp = pp = before = 0.0
        for j, part in enumerate(self.result.path):
            p, alpha = part.p[:, 0], float(part.alpha)
            if self.preconditioned:
                rz = _inner(r, p)
                beta = rz / before if j and before != 0.0 else 0.0
                xp, pp, before = (beta * (xp + rows[-1][4] * pp) if j else 0.0), rz + beta * beta * pp, rz
                r = r - alpha * part.hp[:, 0]
            else:
                xx, xp, pp = _inner(x, x), _inner(x, p), _inner(p, p)
                x = x + alpha * p
            rows.append((j, xx, xp, pp, alpha))
            if self.preconditioned:
                xx = xx + alpha * (2 * xp + alpha * pp)
        return rows

    def _replay(self, radius: float) -> TrustStep:
        p = torch.zeros_like(self.point.grad)
        hp = torch.zeros_like(p)
        last = len(self.result.path) - 1
        goes_on = self.reason is CGReason.NEGATIVE_CURVATURE
        for j, xx, xp, pp, alpha in self._walk():
            part = self.result.path[j]
            ahead = xx + alpha * (2 * xp + alpha * pp)
            if ahead >= radius * radius or (j == last and goes_on):
                numbers = torch.tensor([radius, xx, xp, pp], dtype=torch.float64)
                alpha = float(boundary_step(numbers[0], numbers[1], numbers[2], numbers[3]))
                p, hp = p + alpha * part.p[:, 0], hp + alpha * part.hp[:, 0]
                return self._finish(p, hp, radius, True, j + 1)
            p, hp = p + alpha * part.p[:, 0], hp + alpha * part.hp[:, 0]
        return self._finish(p, hp, radius, False, last + 1)


def next_radius(radius: float, step: TrustStep, ratio: float, *, noisy: bool, finite: bool) -> float:
    """Radius after a trial: half of the step when it was poor, doubled when good and on the boundary.

    Half, not the usual quarter: a shorter try is cut from the recorded path and costs no product.
    """
    if not finite:
        return 0.1 * step.length
    if ratio < 0.25:
        return 0.5 * step.length
    if ratio > 0.75 and step.on_boundary and not noisy:
        return max(radius, 2.0 * step.length)
    return radius


def interpolated(point: Point, trial: Point, step: TrustStep) -> float:
    """Radius after a rejected step, where the parabola through both values and the slope has its minimum.

    Within [.1, .5] of the step. Fewer trials than halving, at the price of shorter steps.
    """
    slope, rise = _inner(point.grad, step.p), trial.value - point.value
    bend = rise - slope
    return min(0.5, max(0.1, -slope / (2.0 * bend) if bend > 0 else 0.5)) * step.length


def as_preconditioner(given: Any, point: Point) -> Callable[[Tensor], Tensor] | None:
    """Block product of an operator, or of the operator a function of x returns; None for none."""
    if given is None:
        return None
    if not hasattr(given, "shape"):
        given = given(point.x.reshape(point.objective.shape))
    like = point.hessian
    view = as_linear_map(given, n=like.n, dtype=like.dtype, device=like.device)
    return lambda v: view @ v


def as_projector(nullspace: Tensor | None, point: Point) -> Callable[[Tensor], Tensor] | None:
    """Projector out of a null space `(N, m)`; None for none."""
    if nullspace is None:
        return None
    rows = null_basis(nullspace, point.hessian)
    return lambda v: project_out(v, rows)
