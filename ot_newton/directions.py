"""Blocks of directions, their layouts and counters: what the Hessian formula is written with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ot_newton.schur import SchurSolve

__all__ = [
    "Direction",
    "HessianStats",
    "dot_size",
    "flatten_columns",
    "rowdot",
    "total_of",
    "unflatten_block",
]


@dataclass(frozen=True, eq=False)
class Direction:
    """A block of K directions or of K products; None where a part is absent.

    Attributes:
        x: (B,K,n,d).
        y: (B,K,m,d).
        a: (B,K,n).
        b: (B,K,m).
    """

    x: Tensor | None = None
    y: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None

    @property
    def swapped(self) -> Direction:
        """X and y, a and b exchanged."""
        return Direction(self.y, self.x, self.b, self.a)


@dataclass
class HessianStats:
    """Counters of one Hessian; a block product counts once in ``n_block`` and K times in ``n_hvp``.

    Attributes:
        n_hvp: products with a single vector.
        n_block: calls.
        cg_iterations: CG steps, all calls together.
        plan_passes: passes of these calls.
        residual: worst relative residual of the last call's Schur solve.
        worst_residual: worst of all calls.
        converged: whether every Schur solve so far met its tolerance.
        reasons: exits of the last call's CG.
    """

    n_hvp: int = 0
    n_block: int = 0
    cg_iterations: int = 0
    plan_passes: int = 0
    residual: float = 0.0
    worst_residual: float = 0.0
    converged: bool = True
    reasons: tuple[str, ...] = field(default=())

    def record(self, columns: int, passes: int, solve: SchurSolve) -> None:
        """Add one call."""
        self.n_hvp += columns
        self.n_block += 1
        self.cg_iterations += solve.iterations
        self.plan_passes += passes
        self.residual = float(solve.residual.max()) if solve.residual.numel() else 0.0
        self.worst_residual = max(self.worst_residual, self.residual)
        self.converged = self.converged and solve.converged
        self.reasons = solve.reasons


def rowdot(u: Tensor, v: Tensor) -> Tensor:
    """Inner products over the last axis."""
    return (u * v).sum(-1)


def flatten_columns(v: Tensor) -> Tensor:
    """(B,K,n[,d]) -> (B,n,K[*d]): columns of one transport."""
    if v.dim() == 3:
        return v.mT
    return v.permute(0, 2, 1, 3).reshape(v.shape[0], v.shape[2], -1)


def unflatten_block(columns: Tensor, k: int) -> Tensor:
    """(B,n,K*d) -> (B,K,n,d)."""
    return columns.reshape(columns.shape[0], columns.shape[1], k, -1).permute(0, 2, 1, 3)


def dot_size(cloud: Tensor, v: Tensor) -> Tensor:
    """`sum_k |cloud_ik v_ik|`: the scale of a row dot product."""
    return (cloud[:, None].abs() * v.abs().amax(-2, keepdim=True)).sum(-1)


def total_of(terms: list[Tensor], shape: tuple[Tensor, int]) -> Tensor:
    """Sum of broadcast terms; zeros (B,K,n) of the given (cloud, K) when there is none."""
    if terms:
        return sum(terms[1:], start=terms[0])
    cloud, k = shape
    return torch.zeros(cloud.shape[0], k, cloud.shape[1], dtype=cloud.dtype, device=cloud.device)
