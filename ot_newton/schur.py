"""The Schur complement of the dual Hessian: products, null space, and its one solve (MATH 5).

S = D_c k_y - P^T (D_r k_x)^-1 P,   k = 1 (hard) or 1 + eps/rho;   D^-1 := 0 where the marginal is 0
normalized: S^ = D^-1/2 S D^-1/2 with D = D_c k_y; both sides hard: null vector sqrt(c), projected out
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ot_newton.deflation import Deflation
from ot_newton.protocols import Plan
from ot_newton.solvers.cg import CGReason, CGResult, conjugate_gradient

__all__ = ["SchurSolve", "SchurSystem", "SelfSystem", "safe_inverse"]

DEFAULT_MAX_CG = 2000
CG_NOISE = 1.0 / 32.0
DIRECT_CUTOFF = 32.0
CHOLESKY_MARGIN = 1e4


def safe_inverse(v: Tensor) -> Tensor:
    """1/v, and 0 where v is 0."""
    return torch.where(v > 0, 1.0 / torch.where(v > 0, v, torch.ones_like(v)), torch.zeros_like(v))


def _above_noise(b: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Right-hand sides below rounding of the terms they were made of count as zero (MATH 5).

    Args:
        b: (B,N,K).
        scale: (B,N,K) sums of the absolute values of the terms.

    Returns:
        The right-hand sides, and (B,1,K) their rounding relative to them, 0 where they are zero.
    """
    noise = 8 * torch.finfo(b.dtype).eps * scale.square().sum(1, keepdim=True).sqrt()
    size = b.square().sum(1, keepdim=True).sqrt()
    real = size > noise
    relative = torch.where(
        real, noise / torch.where(real, size, torch.ones_like(size)), torch.zeros_like(size)
    )
    return torch.where(real, b, torch.zeros_like(b)), relative


def _report(w: Tensor, result: CGResult) -> SchurSolve:
    return SchurSolve(
        w=w,
        iterations=int(result.iterations.max()) if result.iterations.numel() else 0,
        residual=result.residual,
        converged=bool(result.converged.all()),
        reasons=tuple(sorted({CGReason(int(k)).name for k in result.reason.flatten()})),
    )


@dataclass(frozen=True, eq=False)
class SchurSolve:
    """A block of solutions.

    Attributes:
        w: (B,m,K).
        iterations: CG steps of the block (0 for a direct solve).
        residual: (B,K) relative residual in the normalized norm.
        converged: whether every column met the tolerance.
        reasons: names of the CG exits seen.
    """

    w: Tensor
    iterations: int
    residual: Tensor
    converged: bool
    reasons: tuple[str, ...]


class SchurSystem:
    """`S` of one plan, on the y side (hand it the transposed plan for the x side).

    Args:
        plan: plan products.
        r: (B,n) row marginal of that plan.
        c: (B,m) column marginal.
        relax: `(k_x, k_y)`, `1 + eps/rho` or 1.
        balanced: both sides hard; the null vector is projected out.
        direct: assemble and factorize (dense plans), else CG.
        deflation: space of slow modes to remove and to feed, None for plain CG.
        preconditioner: block product with a positive definite approximation of the inverse of `S^`, for CG.
        squared: the plan with its entries squared; where solves are hard, it makes CG's preconditioner.
    """

    def __init__(
        self,
        plan: Plan,
        r: Tensor,
        c: Tensor,
        relax: tuple[float, float],
        *,
        balanced: bool,
        direct: bool,
        deflation: Deflation | None = None,
        preconditioner: Callable[[Tensor], Tensor] | None = None,
        squared: Callable[[], Plan] | None = None,
    ) -> None:
        self.squared = squared
        self.jacobi: Tensor | None = None
        self.plan, self.balanced, self.direct, self.deflation = plan, balanced, direct, deflation
        self.preconditioner = preconditioner
        self.diag = c * relax[1]
        self.row_inverse = safe_inverse(r * relax[0])[:, :, None]
        self.half_inverse = safe_inverse(self.diag).sqrt()[:, :, None]
        null = self.diag.sqrt()
        self.null = (null / null.square().sum(-1, keepdim=True).sqrt())[:, :, None]
        self._solver: Callable[[Tensor], Tensor] | None = None

    def matmat(self, v: Tensor) -> Tensor:
        """`S V`, V (B,m,K): two plan passes for the block."""
        return self.diag[:, :, None] * v - self.plan.apply(self.row_inverse * self.plan.apply(v, 1), 0)

    def normalized_matmat(self, z: Tensor) -> Tensor:
        """`S^ Z`."""
        return self.half_inverse * self.matmat(self.half_inverse * z)

    def diagonal(self, squared: Plan) -> Tensor:
        """`diag(S^)_j = 1 - sum_i P_ij^2 / (D_r k_x)_i / (D_c k_y)_j` (B,m,1), kept off 0: one plan pass.

        Args:
            squared: the plan with its entries squared.
        """
        diagonal = 1 - squared.apply(self.row_inverse, 0) * self.half_inverse.square()
        return diagonal.clamp_min(torch.finfo(diagonal.dtype).eps ** 0.5)

    def metric(self) -> Tensor | None:
        """The diagonal, made at the first call and CG's preconditioner from then on (one plan pass).

        None where there is a preconditioner of the user's or a plan that cannot be squared.
        """
        if self.jacobi is None and self.preconditioner is None and self.squared is not None:
            diagonal = self.diagonal(self.squared())
            self.jacobi, self.preconditioner = diagonal, lambda v: v / diagonal
        return self.jacobi

    def project(self, z: Tensor) -> Tensor:
        """Remove the null vector (both sides hard) and the atoms of zero weight."""
        z = torch.where(self.half_inverse > 0, z, torch.zeros_like(z))
        return z - self.null * (self.null * z).sum(1, keepdim=True) if self.balanced else z

    def solve(self, rhs: Tensor, scale: Tensor, rtol: float, max_cg: int | None = None) -> SchurSolve:
        """Minimum-norm (normalized) solution of `S W = rhs`, (B,m,K).

        Args:
            rhs: right-hand sides.
            scale: (B,m,K) sum of the absolute values of the terms rhs was made of; a right-hand side
                below rounding of it counts as zero.
            rtol: relative to the right-hand side, in the normalized norm.
            max_cg: cap on CG steps, 2000 by default.

        Returns:
            The block. Cost: 2 passes per CG step; a direct solve costs none once factorized.
        """
        b, relative = _above_noise(self.project(self.half_inverse * rhs), self.half_inverse * scale)
        if self.direct:
            return self._solve_direct(b, relative.clamp_min(rtol))
        z, result = self._solve_cg(
            b, (CG_NOISE * relative).clamp_min(rtol), DEFAULT_MAX_CG if max_cg is None else max_cg
        )
        return _report(self.half_inverse * z, result)

    def _solve_cg(self, b: Tensor, rtol: Tensor, max_cg: int) -> tuple[Tensor, CGResult]:
        """Deflated CG on the normalized system; its Krylov space feeds the deflation."""
        space = self.deflation
        size = b.square().sum(1, keepdim=True).sqrt()
        first, steps = torch.zeros_like(b), 0
        if space is not None:
            space.attach(self)
            if space.explores(b):
                first, b, steps = space.explore(self, b, rtol, max_cg)
            if space.hard:
                self.metric()
        active = space is not None and space.size > 0
        start = space.remove(b) if space is not None and active else b
        reduced = start.square().sum(1, keepdim=True).sqrt()
        relative = rtol * size / torch.where(reduced > 0, reduced, torch.ones_like(reduced))
        start = torch.where(reduced <= rtol * size, torch.zeros_like(start), start)
        # A preconditioner of the user's has a metric that is not known: its Krylov space is left alone.
        known = self.preconditioner is None or self.jacobi is not None
        record = space.record_steps(b) if space is not None and known else 0
        result = conjugate_gradient(
            space.deflated(self.normalized_matmat)
            if space is not None and active
            else self.normalized_matmat,
            start,
            rtol=relative,
            max_iter=max_cg - steps,
            preconditioner=self.preconditioner,
            project=space.project(self.project) if space is not None and active else self.project,
            norm_estimate=1.0,
            refresh=25 if b.dtype == torch.float32 else 100,
            record=record,
            reorthogonalize=record > 0 and self.preconditioner is None,
        )
        z = first + (space.complete(result.x, b) if space is not None and active else result.x)
        if space is not None and record:
            space.harvest(result, self.jacobi)
        if space is not None:
            space.judge(b, int(result.iterations.max()))
        share = (reduced / torch.where(size > 0, size, torch.ones_like(size))).squeeze(1)
        idle = result.reason == int(CGReason.ZERO_RHS)
        scaled = torch.where(idle, share, result.residual * share)
        return z, replace(result, residual=scaled, iterations=result.iterations + steps)

    def _solve_direct(self, b: Tensor, rtol: Tensor) -> SchurSolve:
        """Factorized solve with one refinement by the assembled matrix."""
        if self._solver is None:
            self._solver = self._factorize()
        z = self.project(self._solver(b))
        z = z + self.project(self._solver(b - self._assembled @ z))
        size = b.square().sum(1).sqrt()
        left = (b - self._assembled @ z).square().sum(1).sqrt()
        residual = torch.where(size > 0, left / torch.where(size > 0, size, torch.ones_like(size)), 0 * size)
        return SchurSolve(
            self.half_inverse * z, 0, residual, bool((residual <= rtol.squeeze(1)).all()), ("DIRECT",)
        )

    def cholesky(self, ridge: float) -> Tensor | None:
        """Factor (B,m,m) of `S^ + ridge I` with the null vector filled in; None where that is singular."""
        full = self._filled()
        full.diagonal(dim1=-2, dim2=-1).add_(ridge)
        factor, info = torch.linalg.cholesky_ex(full)
        return None if int(info.max()) else factor

    def _filled(self) -> Tensor:
        """`S^` (B,m,m), which is kept, plus the projector of its null vector."""
        # Columns of zero weight are zero in K, so that they keep the identity.
        k = self.row_inverse.sqrt() * self.plan.to_dense() * self.half_inverse.mT
        self._assembled = torch.diag_embed(torch.ones_like(self.diag)) - k.mT @ k
        return self._assembled + self.null * self.null.mT if self.balanced else self._assembled.clone()

    def _factorize(self) -> Callable[[Tensor], Tensor]:
        """Cholesky of `S^ + null null^T`; eigenvalues with a rounding cutoff where that is singular."""
        count, eps = self.diag.shape[-1], torch.finfo(self.diag.dtype).eps
        full = self._filled()
        factor, info = torch.linalg.cholesky_ex(full)
        pivots = torch.diagonal(factor, dim1=-2, dim2=-1).square()
        if bool((info == 0).all()) and bool((pivots > CHOLESKY_MARGIN * eps).all()):
            return lambda v: torch.cholesky_solve(v, factor)
        values, vectors = torch.linalg.eigh(full)
        keep = values > DIRECT_CUTOFF * count * eps
        inverse = torch.where(keep, 1.0 / torch.where(keep, values, torch.ones_like(values)), 0 * values)
        return lambda v: vectors @ (inverse[:, :, None] * (vectors.mT @ v))


class SelfSystem:
    """`D_r k + P` of a symmetric plan (x = y, f = g): the dual system of OT(x, x) (MATH 6).

    Normalized by `D = D_r k` its spectrum lies in (0, 2], in [1, 2] for k = 1, whatever eps.

    Args:
        plan: the plan of x with itself.
        r: (B,n) its marginal.
        relax: `k`, 1 + eps/rho or 1.
    """

    def __init__(self, plan: Plan, r: Tensor, relax: float) -> None:
        self.plan = plan
        self.diag = (r * relax)[:, :, None]
        self.half_inverse = safe_inverse(r * relax).sqrt()[:, :, None]

    def normalized_matmat(self, z: Tensor) -> Tensor:
        """`D^-1/2 (D + P) D^-1/2 Z`: one plan pass."""
        w = self.half_inverse * z
        return self.half_inverse * (self.diag * w + self.plan.apply(w, 1))

    def solve(self, rhs: Tensor, scale: Tensor, rtol: float, max_cg: int | None = None) -> SchurSolve:
        """Solution of `(D_r k + P) W = rhs` (B,n,K); arguments as `SchurSystem.solve`, one pass per step."""
        b, relative = _above_noise(self.half_inverse * rhs, self.half_inverse * scale)
        result = conjugate_gradient(
            self.normalized_matmat,
            b,
            rtol=(CG_NOISE * relative).clamp_min(rtol),
            max_iter=DEFAULT_MAX_CG if max_cg is None else max_cg,
            norm_estimate=1.0,
        )
        return _report(self.half_inverse * result.x, result)
