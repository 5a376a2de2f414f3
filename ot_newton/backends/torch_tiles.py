"""Streaming in plain torch: any device, any dtype, O(tile) memory; the portable fallback."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ot_newton.backends.common import exp2_flushed_, guard_ok, log2_weight, mask_bias
from ot_newton.protocols import PassCounter

__all__ = ["TorchTiles", "TorchTilesBackend", "TorchTilesPlan"]

TILE_ELEMENTS = 1 << 19


def _blocks(size: int, other: int, lanes: int) -> Iterator[slice]:
    """Row blocks so that a (lanes, block, other) tile stays within `TILE_ELEMENTS`."""
    step = max(1, TILE_ELEMENTS // max(1, other * lanes))
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


class _Side:
    """Both clouds seen along one axis: `out` is kept, `summed` is summed over."""

    def __init__(self, q: Tensor, k: Tensor, axis: int) -> None:
        self.out, self.summed = (q, k) if axis == 1 else (k, q)

    def tiles(self, lanes: int) -> Iterator[tuple[slice, Tensor]]:
        """Pairs (block, `q.k` tile of that block)."""
        for block in _blocks(self.out.shape[1], self.summed.shape[1], lanes):
            yield block, self.out[:, block] @ self.summed.mT


class TorchTilesPlan:
    """Streamed products with one plan."""

    def __init__(self, tiles: TorchTiles, row_bias: Tensor, col_bias: Tensor, a: Tensor, b: Tensor) -> None:
        self.tiles, self.counter = tiles, tiles.counter
        self.bias = (mask_bias(row_bias, a), mask_bias(col_bias, b))
        self.weight = (a, b)

    def _kernel_tiles(self, axis: int) -> Iterator[tuple[slice, Tensor]]:
        out_bias, summed_bias = (self.bias[0], self.bias[1]) if axis == 1 else (self.bias[1], self.bias[0])
        side = _Side(self.tiles.q, self.tiles.k, axis)
        for block, tile in side.tiles(out_bias.shape[0]):
            tile += out_bias[:, block, None] + summed_bias[:, None, :]
            yield block, exp2_flushed_(tile)

    def _weights(self, axis: int) -> tuple[Tensor, Tensor]:
        return (self.weight[0], self.weight[1]) if axis == 1 else (self.weight[1], self.weight[0])

    def apply(self, v: Tensor, axis: int) -> Tensor:
        """See `Plan.apply`."""
        self.counter.add()
        out_weight, summed_weight = self._weights(axis)
        weighted = v * summed_weight[:, :, None]
        parts = [tile @ weighted for _, tile in self._kernel_tiles(axis)]
        return torch.cat(parts, dim=1) * out_weight[:, :, None]

    def apply_hadamard(
        self, left: Tensor, right: Tensor, v: Tensor, axis: int, transport: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Plan.apply_hadamard`."""
        self.counter.add()
        out_weight, summed_weight = self._weights(axis)
        out_factor, summed_factor = (left, right) if axis == 1 else (right, left)
        weighted = v * summed_weight[:, None, :, None]
        moved = None if transport is None else transport * summed_weight[:, :, None]
        parts, moved_parts = [], []
        for block, tile in self._kernel_tiles(axis):
            columns = []
            for k in range(max(left.shape[1], right.shape[1], v.shape[1])):
                of, sf, w = (t[:, min(k, t.shape[1] - 1)] for t in (out_factor, summed_factor, weighted))
                columns.append((of[:, block] @ sf.mT).mul_(tile) @ w)
            parts.append(torch.stack(columns, dim=1))
            if moved is not None:
                moved_parts.append(tile @ moved)
        out = torch.cat(parts, dim=2) * out_weight[:, None, :, None]
        return out, torch.cat(moved_parts, dim=1) * out_weight[:, :, None] if moved is not None else None

    def to_dense(self) -> Tensor:
        """See `Plan.to_dense`."""
        kernel = torch.cat([tile for _, tile in self._kernel_tiles(1)], dim=1)
        return kernel.mul_(self.weight[0][:, :, None]).mul_(self.weight[1][:, None, :])


class TorchTiles:
    """Clouds bound for streaming."""

    def __init__(self, q: Tensor, k: Tensor, counter: PassCounter) -> None:
        self.q, self.k, self.counter = q, k, counter

    def lse(
        self, bias: Tensor, weight: Tensor, axis: int, stabilizer: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Tiles.lse`."""
        side = _Side(self.q, self.k, axis)
        lanes = bias.shape[0]
        if stabilizer is not None:
            self.counter.add()
            parts = []
            for block, tile in side.tiles(lanes):
                tile += stabilizer[:, block, None] + bias[:, None, :]
                parts.append((exp2_flushed_(tile) @ weight[:, :, None]).squeeze(-1))
            total = torch.cat(parts, dim=1)
            if guard_ok(total):
                return total.log2() - stabilizer, total
        self.counter.add(2)
        shifted = bias + log2_weight(weight)
        out = []
        for _, tile in side.tiles(lanes):
            tile += shifted[:, None, :]
            top = tile.amax(-1, keepdim=True)
            top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
            out.append(tile.sub_(top).exp2_().sum(-1).log2() + top.squeeze(-1))
        return torch.cat(out, dim=1), None

    def take(self, lanes: Tensor) -> TorchTiles:
        """See `Tiles.take`."""
        return TorchTiles(self.q[lanes], self.k[lanes], self.counter)

    def plan(self, row_bias: Tensor, col_bias: Tensor, a: Tensor, b: Tensor) -> TorchTilesPlan:
        """See `Tiles.plan`."""
        return TorchTilesPlan(self, row_bias, col_bias, a, b)


class TorchTilesBackend:
    """Row blocks of at most half a million entries, one after another."""

    name = "torch_tiles"

    def bind(self, q: Tensor, k: Tensor, counter: PassCounter) -> TorchTiles:
        """See `PlanBackend.bind`."""
        return TorchTiles(q, k, counter)
