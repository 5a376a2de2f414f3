"""What all backends agree on: exponent floor, guard, treatment of zero weights (MATH 2)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["NEVER", "exp2_flushed_", "exponent_floor", "guard_ok", "log2_weight", "mask_bias"]

NEVER = -1e30
"""Bias of an atom of zero weight: finite, so that no inf - inf arises, and flushed to exactly 0."""

GUARD_BITS = 60


def exponent_floor(dtype: torch.dtype) -> float:
    """Exponents at or below this give exactly 0: -100 in float32 (subnormals are slow), else -1000."""
    return -100.0 if dtype == torch.float32 else -1000.0


def exp2_flushed_(t: Tensor) -> Tensor:
    """In-place `2^t`, exactly 0 below the floor and finite at the top (no inf * 0 later); NaN stays."""
    floor = exponent_floor(t.dtype)
    t.clamp_(max=126.0 if t.dtype == torch.float32 else 1022.0)
    t.masked_fill_(t < floor, float("-inf"))
    return t.exp2_()


def guard_ok(rowsum: Tensor) -> bool:
    """Whether every sum lies in [2^-60, 2^60]; false for NaN and inf too."""
    return bool(((rowsum >= 2.0**-GUARD_BITS) & (rowsum <= 2.0**GUARD_BITS)).all())


def log2_weight(weight: Tensor) -> Tensor:
    """`log2 weight`, -inf for zero weights."""
    return (
        torch.where(weight > 0, weight, torch.ones_like(weight))
        .log2()
        .masked_fill(weight <= 0, float("-inf"))
    )


def mask_bias(bias: Tensor, weight: Tensor) -> Tensor:
    """The bias with zero-weight atoms set to `NEVER`, so that their kernel entries are exactly 0."""
    return torch.where(weight > 0, bias, torch.full_like(bias, NEVER))
