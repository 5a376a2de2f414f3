"""Solved terms of a loss: OT(x, y), and OT(x, x) whose two arguments move together (MATH 4 to 6)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ot_newton.directions import Direction, HessianStats
from ot_newton.errors import ConvergenceWarning
from ot_newton.result import SinkhornResult

__all__ = ["CrossTerm", "SelfTerm", "Term"]


class Term(Protocol):
    """A solved value with its derivatives in the tensors named by ``letters``."""

    letters: str
    stats: HessianStats

    @property
    def value(self) -> Tensor:
        """(*batch)."""
        ...

    @property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions."""
        ...

    def gradient(self, letter: str) -> Tensor:
        """(*batch, ...) gradient in one tensor."""
        ...

    def second(self, v: Direction, want: str) -> Direction:
        """Block of Hessian-vector products, (lanes, K, ...)."""
        ...


@dataclass(eq=False)
class _Solved:
    """What both terms share: a fixed point and how its products are solved."""

    result: SinkhornResult
    rtol: float
    max_cg: int | None = None
    stats: HessianStats = field(default_factory=HessianStats)

    @property
    def value(self) -> Tensor:
        """See `Term`."""
        return self.result.value

    @property
    def batch_shape(self) -> torch.Size:
        """See `Term`."""
        return self.result.problem.batch_shape


@dataclass(eq=False)
class CrossTerm(_Solved):
    """OT(x, y) in x, y, a, b.

    Attributes:
        result: its fixed point.
        rtol: tolerance of the inner solve of a product.
        max_cg: cap on its CG steps.
        stats: counters of the products so far.
    """

    letters = "xyab"

    def gradient(self, letter: str) -> Tensor:
        """See `Term`."""
        return self.result.gradient(letter)

    def second(self, v: Direction, want: str) -> Direction:
        """See `Term`."""
        out, solve = self.result.linearized.product(
            v, want, rtol=self.rtol, max_cg=self.max_cg, stats=self.stats
        )
        _warn_unconverged(solve.converged, self.stats.residual, self.rtol)
        return out


@dataclass(eq=False)
class SelfTerm(_Solved):
    """OT(x, x) in x, a: both arguments move together, so derivatives are twice those of one side.

    Attributes: as `CrossTerm`; the result's problem has y = x and equal potentials.
        centre: remove the mean of derivatives in a, as when the whole loss has fixed masses.
    """

    centre: bool = True
    letters = "xa"

    def gradient(self, letter: str) -> Tensor:
        """See `Term`."""
        if letter == "a":
            return 2.0 * self.result.weight_gradient("a", centre=self.centre)
        return 2.0 * self.result.gradient(letter)

    def second(self, v: Direction, want: str) -> Direction:
        """See `Term`."""
        self.result.linearized.centre_weights = self.centre
        out, solve = self.result.linearized.self_product(
            v, want, rtol=self.rtol, max_cg=self.max_cg, stats=self.stats
        )
        _warn_unconverged(solve.converged, self.stats.residual, self.rtol)
        return out


def _warn_unconverged(converged: bool, residual: float, rtol: float) -> None:
    if not converged:
        warnings.warn(
            f"double backward of an OT loss: Schur solve ended at relative residual {residual:.1e}, "
            f"tolerance {rtol:.0e}; raise max_cg, loosen rtol or use float64",
            ConvergenceWarning,
            stacklevel=3,
        )
