"""The materialized plan: the reference, and the fast path for small problems.

The kernel matrix is stored once with the biases of that moment absorbed (Schmitzer's absorption), so
that a half-iteration is one matrix-vector product while the biases stay within `ABSORB_BITS` of them,
and is as log-stable as the streaming backends: a lane that moves farther is absorbed again.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ot_newton.backends.common import GUARD_BITS, exp2_flushed_, log2_weight
from ot_newton.protocols import PassCounter

__all__ = ["DenseBackend", "DensePlan", "DenseTiles"]

ABSORB_BITS = 16.0


def _room(like: Tensor) -> Tensor:
    """Memory for a matrix; on a CPU numpy's, who asks Linux for huge pages: 6 to 9% off a product with it."""
    if like.device.type != "cpu":
        return torch.empty_like(like)
    return torch.from_numpy(np.empty(like.shape, like.new_empty(0).numpy().dtype))


def _within(t: Tensor, low: float, high: float) -> bool:
    """Whether every entry lies in [low, high], false with a NaN; few operations, for they count here."""
    least, most = torch.aminmax(t)
    return bool(least >= low) and bool(most <= high)


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


class _Lane:
    """One lane: `q.k` stored, and a kernel with the biases of some moment absorbed."""

    def __init__(self, dots: Tensor) -> None:
        self.dots = dots
        self.kernel: Tensor | None = None
        self.row0 = self.col0 = dots

    def _shifts(self, row_bias: Tensor, col_bias: Tensor) -> tuple[Tensor, Tensor]:
        """How far the biases have moved from the absorbed ones; too far, and they are absorbed anew."""
        if self.kernel is not None:
            row, col = row_bias - self.row0, col_bias - self.col0
            if _within(row, -ABSORB_BITS, ABSORB_BITS) and _within(col, -ABSORB_BITS, ABSORB_BITS):
                return row, col
        self.row0, self.col0 = row_bias.clone(), col_bias.clone()
        shift = row_bias[:, None] + col_bias[None, :]
        self.kernel = exp2_flushed_(torch.add(self.dots, shift, out=_room(self.dots)))
        return row_bias - self.row0, col_bias - self.col0

    def sums(self, bias: Tensor, weight: Tensor, axis: int, stabilizer: Tensor) -> Tensor:
        """`sum weight 2^(q.k + bias + stabilizer)` along an axis: one matrix-vector product."""
        if axis == 1:
            outer, inner = self._shifts(stabilizer, bias)
        else:
            inner, outer = self._shifts(bias, stabilizer)
        assert self.kernel is not None
        kernel = self.kernel if axis == 1 else self.kernel.mT
        return (kernel @ inner.exp2_().mul_(weight)).mul_(outer.exp2_())

    def entries(self, row_bias: Tensor, col_bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """`a 2^(q.k + row + col) b` (n,m): the absorbed kernel, scaled."""
        known = self.kernel is not None
        # Biases of atoms without mass may be anything; those absorbed are near.
        row_bias = torch.where(a > 0, row_bias, self.row0 if known else torch.zeros_like(a))
        col_bias = torch.where(b > 0, col_bias, self.col0 if known else torch.zeros_like(b))
        row, col = self._shifts(row_bias, col_bias)
        assert self.kernel is not None
        out = torch.mul(self.kernel, row.exp2_().mul_(a)[:, None], out=_room(self.dots))
        return out.mul_(col.exp2_().mul_(b))

    def log_sums(self, bias: Tensor, weight: Tensor, axis: int) -> Tensor:
        """The max-stabilized log-sum-exp of the same."""
        dots = self.dots if axis == 1 else self.dots.mT
        terms = dots + (bias + log2_weight(weight))[None, :]
        top = terms.amax(-1, keepdim=True)
        top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
        return (terms - top).exp2_().sum(-1).log2() + top.squeeze(-1)


class DenseTiles:
    """Lanes one by one, so that no bit of a lane depends on its neighbours."""

    def __init__(self, lanes: list[_Lane], counter: PassCounter) -> None:
        self.lanes, self.counter = lanes, counter

    def take(self, lanes: Tensor) -> DenseTiles:
        """See `Tiles.take`."""
        return DenseTiles([self.lanes[k] for k in lanes.tolist()], self.counter)

    def lse(
        self, bias: Tensor, weight: Tensor, axis: int, stabilizer: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Tiles.lse`. A lane whose sums pass the guard keeps its one-pass result."""
        out: list[Tensor | None] = [None] * len(self.lanes)
        totals: list[Tensor] = []
        if stabilizer is not None:
            self.counter.add()
            for k, lane in enumerate(self.lanes):
                total = lane.sums(bias[k], weight[k], axis, stabilizer[k])
                if _within(total, 2.0**-GUARD_BITS, 2.0**GUARD_BITS):
                    out[k] = total.log2() - stabilizer[k]
                    totals.append(total)
        if len(totals) < len(self.lanes):
            self.counter.add(2)
        rows = [
            lane.log_sums(bias[k], weight[k], axis) if done is None else done
            for k, (lane, done) in enumerate(zip(self.lanes, out, strict=True))
        ]
        if len(rows) == 1:
            return rows[0][None], totals[0][None] if totals else None
        return torch.stack(rows), torch.stack(totals) if len(totals) == len(rows) else None

    def plan(self, row_bias: Tensor, col_bias: Tensor, a: Tensor, b: Tensor) -> DensePlan:
        """See `Tiles.plan`."""
        parts = [
            lane.entries(row_bias[k], col_bias[k], a[k], b[k])[None] for k, lane in enumerate(self.lanes)
        ]
        return DensePlan(parts[0] if len(parts) == 1 else torch.cat(parts), self.counter)


class DenseBackend:
    """Materialized kernel and plan: O(nm) memory, any device and dtype."""

    name = "dense"

    def bind(self, q: Tensor, k: Tensor, counter: PassCounter) -> DenseTiles:
        """See `PlanBackend.bind`."""
        return DenseTiles([_Lane(one @ other.mT) for one, other in zip(q, k, strict=True)], counter)
