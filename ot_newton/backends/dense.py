"""The materialized plan: the reference, and the fast path for small problems.

The kernel matrix is stored once with the biases of that moment absorbed (Schmitzer's absorption), so
that a half-iteration is one matrix-vector product while the biases stay within `ABSORB_BITS` of them,
and is as log-stable as the streaming backends: a lane that moves farther is absorbed again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ot_newton.backends.common import exp2_flushed_, guard_ok, log2_weight, mask_bias
from ot_newton.protocols import PassCounter

__all__ = ["DenseBackend", "DensePlan", "DenseTiles"]

ABSORB_BITS = 16.0


class DensePlan:
    """Products with a stored plan matrix."""

    def __init__(self, matrix: Tensor, counter: PassCounter) -> None:
        self.matrix = matrix
        self.counter = counter

    def _along(self, axis: int) -> Tensor:
        return self.matrix if axis == 1 else self.matrix.mT

    def apply(self, v: Tensor, axis: int) -> Tensor:
        """See `Plan.apply`."""
        self.counter.add()
        return self._along(axis) @ v

    def apply_hadamard(
        self, left: Tensor, right: Tensor, v: Tensor, axis: int, transport: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Plan.apply_hadamard`; one (n,m) product per column of the block."""
        self.counter.add()
        count = max(left.shape[1], right.shape[1], v.shape[1])
        out = []
        for k in range(count):
            one = [t[:, min(k, t.shape[1] - 1)] for t in (left, right, v)]
            weighted = torch.einsum("bip,bjp->bij", one[0], one[1]) * self.matrix
            out.append((weighted if axis == 1 else weighted.mT) @ one[2])
        moved = None if transport is None else self._along(axis) @ transport
        return torch.stack(out, dim=1), moved

    def to_dense(self) -> Tensor:
        """See `Plan.to_dense`."""
        return self.matrix


class DenseTiles:
    """`q.k` stored, plus one absorbed kernel per lane."""

    def __init__(self, q: Tensor, k: Tensor, counter: PassCounter) -> None:
        self.counter = counter
        self.dots = q @ k.mT
        self.kernel: Tensor | None = None
        self.row0 = torch.empty(0)
        self.col0 = torch.empty(0)

    def _kernel(self, row_bias: Tensor, col_bias: Tensor) -> Tensor:
        """The absorbed kernel, renewed in the lanes whose biases have moved too far."""
        if self.kernel is None:
            self.row0, self.col0 = row_bias.clone(), col_bias.clone()
            self.kernel = exp2_flushed_(self.dots + (row_bias[:, :, None] + col_bias[:, None, :]))
            return self.kernel
        moved = torch.maximum(
            (row_bias - self.row0).abs().amax(-1), (col_bias - self.col0).abs().amax(-1)
        )
        stale = ~(moved <= ABSORB_BITS)
        for lane in stale.nonzero()[:, 0].tolist():
            self.row0[lane], self.col0[lane] = row_bias[lane], col_bias[lane]
            fresh = self.dots[lane] + (row_bias[lane][:, None] + col_bias[lane][None, :])
            self.kernel[lane] = exp2_flushed_(fresh)
        return self.kernel

    def lse(
        self, bias: Tensor, weight: Tensor, axis: int, stabilizer: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Tiles.lse`."""
        if stabilizer is not None:
            self.counter.add()
            row_bias, col_bias = (stabilizer, bias) if axis == 1 else (bias, stabilizer)
            kernel = self._kernel(row_bias, col_bias)
            kernel = kernel if axis == 1 else kernel.mT
            bias0, stabilizer0 = (self.col0, self.row0) if axis == 1 else (self.row0, self.col0)
            total = _matvec(kernel, weight * (bias - bias0).exp2())
            total = total * (stabilizer - stabilizer0).exp2()
            if guard_ok(total):
                return total.log2() - stabilizer, total
        self.counter.add(2)
        dots = self.dots if axis == 1 else self.dots.mT
        terms = dots + (bias + log2_weight(weight))[:, None, :]
        top = terms.amax(-1, keepdim=True)
        top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
        return (terms - top).exp2_().sum(-1).log2() + top.squeeze(-1), None

    def plan(self, row_bias: Tensor, col_bias: Tensor, a: Tensor, b: Tensor) -> DensePlan:
        """See `Tiles.plan`."""
        exponent = self.dots + (mask_bias(row_bias, a)[:, :, None] + mask_bias(col_bias, b)[:, None, :])
        matrix = exp2_flushed_(exponent).mul_(a[:, :, None]).mul_(b[:, None, :])
        return DensePlan(matrix, self.counter)


def _matvec(matrix: Tensor, v: Tensor) -> Tensor:
    """Lane-wise product; a lane's bits do not depend on its neighbours."""
    return torch.stack([m @ w for m, w in zip(matrix, v, strict=True)])


class DenseBackend:
    """Materialized kernel and plan: O(nm) memory, any device and dtype."""

    name = "dense"

    def bind(self, q: Tensor, k: Tensor, counter: PassCounter) -> DenseTiles:
        """See `PlanBackend.bind`."""
        return DenseTiles(q, k, counter)
