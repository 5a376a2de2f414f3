"""The factor of a stored plan's Schur complement, kept from plan to plan (chord method).

Where plans are stored, a factorization of `S^` costs as much as dozens of passes. The inverse of an earlier
plan does for as long as the dual Newton's steps with it do, within a solve and from one solve to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ot_newton.schur import SchurSystem

__all__ = ["KeptInverse"]

RIDGE = 1e4


class KeptInverse:
    """An inverse of `S^` that goes on being used on nearby plans; one lane, empty until one is factorized.

    Attributes:
        factor: Cholesky factor (1,m,m) of an earlier `S^`, off 0 by a ridge at rounding level and with its
            null vector filled in.
        lenient: whether the dual Newton may try it: it has just been made, or no try has failed.
        factorizations: made so far.
    """

    def __init__(self, factor: Tensor | None = None) -> None:
        self.factor = factor
        self.lenient = factor is not None
        self.factorizations = 0

    @property
    def state(self) -> tuple[Tensor] | None:
        """The factor, never changed in place; None while empty."""
        return None if self.factor is None else (self.factor,)

    def matches(self, like: Tensor) -> bool:
        """Whether the factor is of the size and dtype of (1,m)."""
        if self.factor is None:
            return False
        return self.factor.shape[-1] == like.shape[-1] and self.factor.dtype == like.dtype

    def amplify(self, v: Tensor) -> Tensor:
        """`(S^^-1 - I) v` (1,m,k): what turns a Jacobi step into a Newton step."""
        assert self.factor is not None
        return torch.cholesky_solve(v, self.factor) - v

    def factorize(self, system: SchurSystem) -> bool:
        """Take the factor of this system; False, and empty, where that is singular beyond the ridge."""
        factor = system.cholesky(RIDGE * torch.finfo(system.diag.dtype).eps)
        self.factor, self.lenient = factor, factor is not None
        self.factorizations += 1
        return factor is not None
