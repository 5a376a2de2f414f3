"""The one truncated conjugate-gradient method: Schur solves, trust regions, dual Newton.

Columns are independent right-hand sides that share every product: all vectors are `(..., N, k)`, all
scalars per column. Right-hand sides are normalized first, so the result is homogeneous of degree one
in each of them; every curvature test is relative to an estimate of the operator's norm (MATH 10).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["CGReason", "CGResult", "CGStep", "conjugate_gradient"]

CURVATURE_MARGIN = 10.0
STAGNATION_FACTOR = 0.9


@enum.unique
class CGReason(enum.IntEnum):
    """Why a column stopped."""

    RUNNING = 0
    CONVERGED = 1
    ZERO_RHS = 2
    BOUNDARY = 3
    NEGATIVE_CURVATURE = 4
    MAX_ITER = 5
    STAGNATION = 6
    NAN = 7


@dataclass(frozen=True, eq=False)
class CGStep:
    """One recorded step: `x <- x + alpha p`, `p = z + beta p_previous`, `hp = H p`; in units of the rhs.

    ``z`` is the (preconditioned) residual before the step: `H z = hp - beta hp_previous` costs nothing.
    """

    p: Tensor
    hp: Tensor
    alpha: Tensor
    z: Tensor
    beta: Tensor


@dataclass(frozen=True, eq=False)
class CGResult:
    """Solution, products and diagnoses, per column.

    Attributes:
        x: (..., N, k) solution or truncated step.
        hx: (..., N, k) `H x`, carried through the recurrence: no product is spent on it.
        iterations: (..., k) steps taken.
        residual: (..., k) relative residual `|b - H x| / |b|`; recomputed where `refresh` says so.
        reason: (..., k) `CGReason` values.
        direction: (..., N, k) unit directions of nonpositive curvature, zero columns where there is none.
        curvature: (..., k) Rayleigh quotients of those directions (nan where there is none).
        n_matmul: products with a block, all columns together counting as one.
        norm_estimate: (..., k) lower estimate of the operator's norm, from the products made.
        path: recorded steps (`record=True`).
    """

    x: Tensor
    hx: Tensor
    iterations: Tensor
    residual: Tensor
    reason: Tensor
    direction: Tensor
    curvature: Tensor
    n_matmul: int
    norm_estimate: Tensor
    path: tuple[CGStep, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        """Short form: reasons and the worst residual."""
        names = sorted({CGReason(int(r)).name for r in self.reason.flatten()})
        worst = float(self.residual.max()) if self.residual.numel() else 0.0
        return f"CGResult({'/'.join(names)}, n_matmul={self.n_matmul}, residual={worst:.1e})"

    @property
    def converged(self) -> Tensor:
        """(..., k) whether the column met its tolerance (or had nothing to solve)."""
        return (self.reason == CGReason.CONVERGED) | (self.reason == CGReason.ZERO_RHS)


def _identity(v: Tensor) -> Tensor:
    return v


def _dot(u: Tensor, v: Tensor) -> Tensor:
    return (u * v).sum(-2, keepdim=True)


def boundary_step(radius: Tensor, xx: Tensor, xp: Tensor, pp: Tensor) -> Tensor:
    """Positive root tau of `|x + tau p| = radius` from the three inner products (any norm)."""
    gap = (radius * radius - xx).clamp_min(0.0)
    root = (xp * xp + pp * gap).clamp_min(0.0).sqrt()
    return torch.where(xp > 0, gap / (xp + root), (root - xp) / pp)


class _State:
    """Working vectors of one block solve, in units where every nonzero rhs has norm one."""

    def __init__(self, rhs: Tensor, radius: Tensor | float | None, record: int) -> None:
        self.eps = torch.finfo(rhs.dtype).eps
        # Two-stage norm: squares of a tiny or huge right-hand side would under- or overflow.
        peak = rhs.abs().amax(-2, keepdim=True)
        safe = torch.where(peak > 0, peak, torch.ones_like(peak))
        unit = rhs / safe
        norm = unit.square().sum(-2, keepdim=True).sqrt()
        zero = ~(peak > 0) & (peak == peak)
        self.scale_peak, self.scale_norm = safe, torch.where(zero, torch.ones_like(norm), norm)
        self.b = unit / self.scale_norm
        self.radius = None
        if radius is not None:
            given = torch.as_tensor(radius, dtype=rhs.dtype, device=rhs.device)
            self.radius = given / self.scale_peak / self.scale_norm
        self.x = torch.zeros_like(self.b)
        self.hx = torch.zeros_like(self.b)
        self.reason = torch.zeros(zero.shape, dtype=torch.int8, device=rhs.device)
        self.reason[zero] = CGReason.ZERO_RHS
        self.reason[~torch.isfinite(peak)] = CGReason.NAN
        self.iterations = torch.zeros(zero.shape, dtype=torch.int64, device=rhs.device)
        self.direction = torch.zeros_like(self.b)
        self.curvature = torch.full_like(peak, float("nan"))
        self.norm_estimate = torch.zeros_like(peak)
        self.residual = torch.where(zero, torch.zeros_like(peak), torch.ones_like(peak))
        self.n_matmul = 0
        self.path: list[CGStep] = []
        self.record = 1 << 62 if record is True else int(record)

    @property
    def active(self) -> Tensor:
        return self.reason == CGReason.RUNNING

    def stop(self, where: Tensor, reason: CGReason) -> None:
        self.reason = torch.where(where & self.active, torch.full_like(self.reason, reason), self.reason)

    def rescale(self, v: Tensor) -> Tensor:
        return v * self.scale_norm * self.scale_peak

    def result(self) -> CGResult:
        keep = [
            CGStep(self.rescale(s.p), self.rescale(s.hp), s.alpha, self.rescale(s.z), s.beta)
            for s in self.path
        ]
        return CGResult(
            x=self.rescale(self.x),
            hx=self.rescale(self.hx),
            iterations=self.iterations.squeeze(-2),
            residual=self.residual.squeeze(-2),
            reason=self.reason.squeeze(-2),
            direction=self.direction,
            curvature=self.curvature.squeeze(-2),
            n_matmul=self.n_matmul,
            norm_estimate=self.norm_estimate.squeeze(-2),
            path=tuple(keep),
        )


def conjugate_gradient(
    matmul: Callable[[Tensor], Tensor],
    rhs: Tensor,
    *,
    rtol: float | Tensor,
    max_iter: int,
    radius: Tensor | float | None = None,
    preconditioner: Callable[[Tensor], Tensor] | None = None,
    project: Callable[[Tensor], Tensor] | None = None,
    norm_estimate: float | Tensor | None = None,
    refresh: int = 50,
    x0: Tensor | None = None,
    record: int = 0,
    reorthogonalize: bool = False,
) -> CGResult:
    """Solve `H x = b` per column, or stop at the trust-region boundary or at nonpositive curvature.

    Minimizes `x^T H x / 2 - b^T x` from 0 (or ``x0``). A column ends when

        CONVERGED           |b - H x| <= rtol |b|
        ZERO_RHS            b = 0: x = 0, no product
        NEGATIVE_CURVATURE  p^T H p <= 10 eps_mach |H| |p|^2; with a radius the step goes on to the boundary
        BOUNDARY            |x| reached the radius (in the M-norm when preconditioned)
        STAGNATION          the true residual, recomputed every ``refresh`` steps, no longer falls
        MAX_ITER, NAN       as named

    Args:
        matmul: the block product `H V`, V (..., N, k).
        rhs: (..., N, k).
        rtol: relative tolerance on the residual, a number or (..., 1, k); nothing absolute.
        max_iter: cap on the steps.
        radius: trust-region radius, a number or (..., 1, k); None for none. Starts from x = 0 only.
        preconditioner: block product with a symmetric positive definite `M^-1`.
        project: projector applied to the residual and to every direction (null spaces).
        norm_estimate: a known norm of H; the largest of it and of the products seen is used.
        refresh: steps between two true residuals (one extra product each); also the number of steps
            from which convergence is confirmed by a true residual.
        x0: start; its residual counts relative to `|b|`.
        record: keep the first ``record`` steps in ``path`` (True: all).
        reorthogonalize: keep the residuals orthogonal to those of the recorded steps: fewer steps
            when ill-conditioned, and a Lanczos basis fit to be harvested.

    Returns:
        A `CGResult`. Cost: one block product per step, one more per refresh.

    Raises:
        ValueError: a radius together with a start.
    """
    if radius is not None and x0 is not None:
        raise ValueError("x0 must be None when radius is given: a trust-region step starts from 0")
    state = _State(rhs, radius, record)
    if norm_estimate is not None:
        given = torch.as_tensor(norm_estimate, dtype=rhs.dtype, device=rhs.device)
        state.norm_estimate = state.norm_estimate + given
    loop = _Loop(state, matmul, preconditioner, project or _identity, rtol, max(1, refresh))
    loop.basis = [] if reorthogonalize else None
    if x0 is not None:
        given = x0 / state.scale_peak / state.scale_norm
        state.x = torch.where(state.reason == CGReason.ZERO_RHS, torch.zeros_like(given), given)
        loop.refresh_residual()
    loop.start()
    for _ in range(max_iter):
        if not bool(state.active.any()):
            break
        loop.step()
    state.stop(state.active, CGReason.MAX_ITER)
    return state.result()


class _Loop:
    """The recurrence; `step` moves every running column by one step."""

    def __init__(
        self,
        state: _State,
        matmul: Callable[[Tensor], Tensor],
        preconditioner: Callable[[Tensor], Tensor] | None,
        project: Callable[[Tensor], Tensor],
        rtol: float | Tensor,
        refresh: int,
    ) -> None:
        self.s, self.matmul, self.preconditioner, self.project = state, matmul, preconditioner, project
        self.rtol, self.refresh = torch.as_tensor(rtol, dtype=state.b.dtype, device=state.b.device), refresh
        self.basis: list[Tensor] | None = None
        self.beta = torch.zeros_like(state.residual)
        self.r = project(state.b)
        self.since = 0
        self.energy = torch.full_like(state.residual, float("inf"))
        self.checked = torch.full_like(state.residual, float("inf"))

    def _solve_m(self, r: Tensor) -> Tensor:
        return r if self.preconditioner is None else self.preconditioner(r)

    def start(self) -> None:
        """(Re)start the directions from the current residual."""
        s = self.s
        self.z = self.project(self._solve_m(self.r))
        self.p = self.z
        self.rz = _dot(self.r, self.z)
        s.residual = _dot(self.r, self.r).sqrt()
        self._judge(confirmed=True)
        self.xx = torch.zeros_like(self.rz)
        self.xp = torch.zeros_like(self.rz)
        self.pp = self.rz

    def refresh_residual(self) -> None:
        """Replace the recursive residual by the true one (one product)."""
        s = self.s
        s.hx = self.matmul(s.x)
        s.n_matmul += 1
        self.r = self.project(s.b - s.hx)
        s.residual = torch.where(s.active, _dot(self.r, self.r).sqrt(), s.residual)

    def _judge(self, *, confirmed: bool) -> None:
        s = self.s
        finite = torch.isfinite(s.residual)
        s.stop(~finite, CGReason.NAN)
        if confirmed:
            s.stop(s.residual <= self.rtol, CGReason.CONVERGED)

    def step(self) -> None:
        """One step of every running column."""
        s, p = self.s, torch.where(self.s.active, self.p, torch.zeros_like(self.p))
        hp = self.project(self.matmul(p))
        s.n_matmul += 1
        curv, p2 = _dot(p, hp), _dot(p, p)
        grown = (_dot(hp, hp) / p2.clamp_min(torch.finfo(p.dtype).tiny)).sqrt()
        s.norm_estimate = torch.maximum(s.norm_estimate, torch.where(s.active, grown, s.norm_estimate))
        s.stop(~torch.isfinite(curv), CGReason.NAN)
        nonpositive = s.active & (curv <= CURVATURE_MARGIN * s.eps * s.norm_estimate * p2)
        if bool(nonpositive.any()):
            s.direction = torch.where(
                nonpositive, p / p2.sqrt().clamp_min(torch.finfo(p.dtype).tiny), s.direction
            )
            s.curvature = torch.where(nonpositive, curv / p2, s.curvature)
        alpha = self.rz / torch.where(curv == 0, torch.ones_like(curv), curv)
        alpha = torch.where(nonpositive, torch.zeros_like(alpha), alpha)
        alpha, outside = self._truncate(p, alpha, nonpositive)
        alpha = torch.where(s.active, alpha, torch.zeros_like(alpha))
        if len(s.path) < s.record:
            s.path.append(CGStep(p, hp, alpha, self.z, self.beta))
        before = self.r
        s.x, s.hx, self.r = s.x + alpha * p, s.hx + alpha * hp, self.r - alpha * hp
        self._reorthogonalize(before)
        s.iterations = s.iterations + s.active.to(torch.int64)
        new_residual = _dot(self.r, self.r).sqrt()
        s.residual = torch.where(s.active, new_residual, s.residual)
        s.stop(nonpositive, CGReason.NEGATIVE_CURVATURE)
        s.stop(outside, CGReason.BOUNDARY)
        self.since += 1
        self._advance(alpha)

    def _reorthogonalize(self, before: Tensor) -> None:
        """Make the new residual orthogonal to all former ones, twice."""
        if self.basis is None:
            return
        if len(self.basis) < self.s.record:
            size = _dot(before, before).sqrt()
            self.basis.append(before / torch.where(size > 0, size, torch.ones_like(size)))
        stack = torch.stack(self.basis, dim=-1)
        for _ in range(2):
            along = torch.einsum("...nkj,...nk->...kj", stack, self.r)
            self.r = self.r - torch.einsum("...nkj,...kj->...nk", stack, along)

    def _truncate(self, p: Tensor, alpha: Tensor, nonpositive: Tensor) -> tuple[Tensor, Tensor]:
        s = self.s
        if s.radius is None:
            return alpha, torch.zeros_like(nonpositive)
        if self.preconditioner is None:
            self.xx, self.xp, self.pp = _dot(s.x, s.x), _dot(s.x, p), _dot(p, p)
        ahead = self.xx + alpha * (2 * self.xp + alpha * self.pp)
        outside = s.active & (nonpositive | (ahead >= s.radius * s.radius))
        tau = boundary_step(s.radius, self.xx, self.xp, self.pp)
        return torch.where(outside, tau, alpha), outside & ~nonpositive

    def _advance(self, alpha: Tensor) -> None:
        s = self.s
        self._judge(confirmed=False)
        met = s.active & (s.residual <= self.rtol)
        if self.since >= self.refresh or (bool(met.any()) and self._must_confirm(met)):
            self._confirm(alpha)
            return
        s.stop(met, CGReason.CONVERGED)
        self._next_direction(alpha, torch.zeros_like(met))

    def _next_direction(self, alpha: Tensor, restart: Tensor) -> None:
        """`p <- z + beta p` (beta = 0 where restarted) with the M-norm products it moves."""
        s = self.s
        self.z = self.project(self._solve_m(self.r))
        rz = _dot(self.r, self.z)
        beta = rz / torch.where(self.rz == 0, torch.ones_like(rz), self.rz)
        beta = torch.where(s.active & ~restart, beta, torch.zeros_like(beta))
        if self.preconditioner is not None:
            self.xx = self.xx + alpha * (2 * self.xp + alpha * self.pp)
            self.xp = beta * (self.xp + alpha * self.pp)
            self.xp = torch.where(restart, _dot(s.x, self.r), self.xp)
            self.pp = rz + beta * beta * self.pp
        self.p = self.z + beta * self.p
        self.rz, self.beta = rz, beta

    def _must_confirm(self, met: Tensor) -> bool:
        return bool((self.s.iterations[met] >= self.refresh).any())

    def _confirm(self, alpha: Tensor) -> None:
        """Judge on the true residual; where it no longer falls the column has stagnated.

        The directions are kept: the true residual only replaces the recursive one.
        """
        s = self.s
        self.since = 0
        recursive = s.residual
        self.refresh_residual()
        self._judge(confirmed=True)
        drifted = s.residual > 2 * torch.maximum(recursive, self.rtol)
        # CG lowers its quadratic at every step: where that no longer shows, rounding has taken over.
        energy = 0.5 * _dot(s.x, s.hx) - _dot(s.x, s.b)
        risen = energy >= self.energy
        self.energy = torch.where(s.active, energy, self.energy)
        stalled = (drifted | risen) & (s.residual > STAGNATION_FACTOR * self.checked)
        s.stop(stalled, CGReason.STAGNATION)
        self.checked = torch.where(s.active, s.residual, self.checked)
        self._next_direction(alpha, drifted)
