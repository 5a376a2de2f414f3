"""The `cpu` backend: vectorized numba kernels over packed operands (the kernels: `cpu_kernels`).

One half-iteration reads each pair once and keeps it in vector registers (d <= 4) or in a 4 x 512 strip in
L1 cache, filled in register tiles at the speed of a BLAS product; so no BLAS library and none of its
threads are involved. Nothing of size (n, m) is stored. Results do not depend on the number of threads
(`torch.get_num_threads()`) nor on the other lanes of a batch, to the last bit. With one thread nothing
parallel is launched, which keeps the backend safe in forked processes.

numba is imported, and each kernel compiled, at first use (about 2 s for a first `lse`, 5 s for the plan
products, per dtype); later processes load the compiled code from numba's cache, beside this file or
in `NUMBA_CACHE_DIR`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.backends.common import GUARD_BITS, exp2_flushed_, mask_bias
from ot_newton.protocols import PassCounter

__all__ = ["CpuBackend", "CpuPlan", "CpuTiles"]

FUSED_DIM = 4
"""Largest d that is computed wholly in registers."""

CONTRACT = 1.25
"""How much more arithmetic a plain transport may take and still be as fast as a Hadamard-weighted one."""

SERIAL_WORK = 1 << 21
"""Multiply-adds (about 16 for an exponential) below which a second thread costs more than it gains."""


def _kernels() -> ModuleType:
    """The compiled code; numba is imported here and not before."""
    from ot_newton.backends import cpu_kernels

    return cpu_kernels


def _array(t: Tensor, dtype: torch.dtype) -> Any:
    """A contiguous array of the values, copied only if needed."""
    return t.detach().to(dtype).contiguous().numpy()


def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros that start on a cache line."""
    size = int(np.prod(shape))
    raw = np.zeros(size + 16, dtype)
    start = -raw.ctypes.data % 64 // raw.itemsize
    return raw[start : start + size].reshape(shape)


def _up(size: int) -> int:
    """The next multiple of 4."""
    return -(-size // 4) * 4


def _rows(cloud: Any) -> Any:
    """Padded rows of (L, n, d)."""
    lanes, n, d = cloud.shape
    rows = _zeros((lanes, _up(n), _up(d)), cloud.dtype)
    _kernels().pack_rows(cloud, rows)
    return rows


def _cols(cloud: Any, weight: Any) -> Any:
    """Padded blocks of columns of `weight_j cloud_j`, (L, m, d) and (B, m) with L a multiple of B."""
    lanes, m, d = cloud.shape
    block = _kernels().BLOCK
    cols = _zeros((lanes, -(-m // block), _up(d), block), cloud.dtype)
    _kernels().pack_cols(cloud, weight, cols)
    return cols


def _bias(bias: Any, weight: Any, logarithm: bool = False) -> tuple[Any, Any]:
    """Padded biases and weights of the columns."""
    block = _kernels().BLOCK
    shape = (bias.shape[0], -(-bias.shape[1] // block) * block)
    u, g = np.empty(shape, bias.dtype), np.empty(shape, bias.dtype)
    _kernels().pack_bias(bias, weight, logarithm, u, g)
    return u, g


def _workers(pairs: int, operations: int) -> int:
    """How many threads to use: torch's number, at most numba's, one for a small job."""
    if pairs * (16 + operations) <= SERIAL_WORK:
        return 1
    import numba

    workers = min(torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    if workers > 1 and numba.get_num_threads() != workers:
        numba.set_num_threads(workers)
    return workers


class CpuTiles:
    """Clouds bound to the `cpu` backend; packed operands are made once per axis and kept."""

    def __init__(self, q: Tensor, k: Tensor, counter: PassCounter) -> None:
        self.counter = counter
        self.q, self.k = q.detach(), k.detach()
        self.dtype = q.dtype
        self.lanes, self.n, self.d = q.shape
        self.m = k.shape[1]
        # two compiled variants serve d <= 4: operands are padded with zeros anyway
        self.dims = () if self.d > FUSED_DIM else (0,) * (2 if self.d <= 2 else FUSED_DIM)
        self._packed: dict[int, tuple[Any, Any, int]] = {}

    def clouds(self, axis: int) -> tuple[Any, Any, int]:
        """Packed rows of the kept cloud, columns of the one summed over, and their number."""
        if axis not in self._packed:
            kept, summed = (self.q, self.k) if axis == 1 else (self.k, self.q)
            columns = _array(summed, self.dtype)
            ones = np.ones((1, columns.shape[1]), columns.dtype)
            rows = _rows(_array(kept, self.dtype))
            self._packed[axis] = rows, _cols(columns, ones), columns.shape[1]
        return self._packed[axis]

    def sizes(self, axis: int) -> tuple[int, int]:
        """Atoms kept and summed over."""
        return (self.n, self.m) if axis == 1 else (self.m, self.n)

    def sums(self, biases: tuple[Any, Any, Any], axis: int) -> Any:
        """Weighted row sums (B, kept) for biases w, padded u and padded weights."""
        kept, summed = self.sizes(axis)
        out = np.empty((self.lanes, kept), biases[0].dtype)
        workers = _workers(self.lanes * kept * summed, self.d)
        _kernels().sums(workers, self.dims, self.clouds(axis), biases, out)
        return out

    def lse(
        self, bias: Tensor, weight: Tensor, axis: int, stabilizer: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Tiles.lse`. A lane whose sums pass the guard keeps its one-pass result."""
        kernels = _kernels()
        kept, summed = self.sizes(axis)
        values, mass = _array(bias, self.dtype), _array(weight, self.dtype)
        out = np.empty((self.lanes, kept), values.dtype)
        good = np.zeros(self.lanes, np.bool_)
        if stabilizer is not None:
            self.counter.add()
            w = _array(stabilizer, self.dtype)
            total = self.sums((w, *_bias(values, mass)), axis)
            if kernels.finish_lse(total, w, 2.0**-GUARD_BITS, 2.0**GUARD_BITS, out, good):
                return torch.from_numpy(out), torch.from_numpy(total)
        self.counter.add(2)
        lanes = np.flatnonzero(~good)
        workers = _workers(lanes.size * kept * summed, self.d)
        kernels.log_sums(workers, self.clouds(axis), _bias(values, mass, logarithm=True), lanes, out)
        return torch.from_numpy(out), None

    def take(self, lanes: Tensor) -> CpuTiles:
        """See `Tiles.take`; the packed operands are gathered, not packed again."""
        out = CpuTiles(self.q[lanes], self.k[lanes], self.counter)
        index = lanes.numpy()
        out._packed = {a: (rows[index], cols[index], m) for a, (rows, cols, m) in self._packed.items()}
        return out

    def plan(self, row_bias: Tensor, col_bias: Tensor, a: Tensor, b: Tensor) -> CpuPlan:
        """See `Tiles.plan`."""
        return CpuPlan(self, (row_bias, col_bias), (a, b))


class CpuPlan:
    """Streamed products with one plan; exact zeros on atoms of zero weight."""

    def __init__(
        self, tiles: CpuTiles, biases: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor]
    ) -> None:
        self.tiles, self.counter = tiles, tiles.counter
        self.weights = tuple(weight.detach().to(tiles.dtype) for weight in weights)
        self.biases = tuple(
            mask_bias(bias.detach().to(tiles.dtype), weight)
            for bias, weight in zip(biases, self.weights, strict=True)
        )
        self._columns: dict[int, Any] = {}

    def _side(self, axis: int) -> tuple[Any, Any, Any, Tensor]:
        """Bias w of the kept side, padded u and weight of the summed side, weight of the kept side."""
        kept = 1 - axis
        dtype = self.tiles.dtype
        weight = _array(self.weights[axis], dtype)
        if axis not in self._columns:
            self._columns[axis] = _bias(_array(self.biases[axis], dtype), weight)[0]
        return _array(self.biases[kept], dtype), self._columns[axis], weight, self.weights[kept]

    def apply(self, v: Tensor, axis: int) -> Tensor:
        """See `Plan.apply`."""
        self.counter.add()
        w, u, weight, kept_weight = self._side(axis)
        cols = _cols(_array(v, self.tiles.dtype), weight)
        if v.shape[2] == 1:
            column = np.ascontiguousarray(cols[:, :, 0]).reshape(u.shape)
            total = self.tiles.sums((w, u, column), axis)[:, :, None]
        else:
            total = self._products((w, u), cols, None, axis)[0]
        return torch.from_numpy(total)[:, :, : v.shape[2]] * kept_weight[:, :, None]

    def _products(self, biases: tuple[Any, Any], moved: Any, weighted: Any, axis: int) -> tuple[Any, Any]:
        """The two outputs of the kernel, before the weights of the kept side."""
        tiles = self.tiles
        kept, summed = tiles.sizes(axis)
        lanes, blocks, width, dtype = tiles.lanes, moved.shape[1], moved.shape[2], moved.dtype
        count, columns = 0, 0
        if weighted is None:
            none = np.empty((lanes, 1, blocks, 0, moved.shape[3]), dtype)
            weighted = (np.empty((lanes, 1, 0, 0), dtype), none, none)
        else:
            count = max(part.shape[1] for part in weighted)
            columns = weighted[2].shape[3]
        outs = np.empty((lanes, kept, width), dtype), np.empty((lanes, count, kept, columns), dtype)
        inner = weighted[1].shape[3]
        workers = _workers(lanes * kept * summed, tiles.d + width + count * (inner + columns))
        _kernels().products(workers, tiles.clouds(axis), biases, moved, weighted, outs)
        return outs

    def apply_hadamard(
        self, left: Tensor, right: Tensor, v: Tensor, axis: int, transport: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Plan.apply_hadamard`.

        `sum_j P_ij <l_i, r_j> v_j = <l_i, (P (r (x) v))_i>`: where few of the products of a column of
        `r` and one of `v` differ between the members of the block, they are transported plainly and
        contracted with `l` afterwards, at a cost that grows slowly with K. Otherwise the weights
        `<l_i, r_j>` are formed tile by tile.
        """
        self.counter.add()
        dtype = self.tiles.dtype
        left, right, v = (t.detach().to(dtype) for t in (left, right, v))
        kept, summed = (left, right) if axis == 1 else (right, left)
        count = max(left.shape[1], right.shape[1], v.shape[1])
        inner, width = summed.shape[3], v.shape[3]
        common = torch.ones(inner, dtype=torch.bool)
        if summed.shape[1] > 1:
            common = (summed == summed[:, :1]).all(dim=2).flatten(0, 1).all(dim=0)
        alike = int(common.sum())
        products = alike * v.shape[1] + (inner - alike) * max(summed.shape[1], v.shape[1])
        if products * width <= CONTRACT * count * (inner + width + 1):
            return self._contracted(kept, summed, v, axis, transport, common)
        return self._streamed(kept, summed, v, axis, transport)

    def _contracted(
        self, kept: Tensor, summed: Tensor, v: Tensor, axis: int, transport: Tensor | None, common: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """One transport of the products `summed (x) v`, then the sum over the inner index.

        `common` marks the columns of `summed` that are the same for the whole block.
        """
        w, u, weight, kept_weight = self._side(axis)
        count, width = max(kept.shape[1], summed.shape[1], v.shape[1]), v.shape[3]
        pieces, groups = [], []
        for block, chosen in ((summed[:, :1], common), (summed, ~common)):
            if bool(chosen.any()):
                pairs = block[..., chosen, None] * v[..., None, :]
                groups.append((pairs.shape[1], chosen))
                pieces.append(pairs.permute(0, 2, 1, 3, 4).flatten(2))
        if transport is not None:
            pieces.append(transport.detach().to(v.dtype))
        sizes = [piece.shape[2] for piece in pieces]
        columns = _cols(_array(torch.cat(pieces, dim=2), v.dtype), weight)
        total = torch.from_numpy(self._products((w, u), columns, None, axis)[0])
        parts = (total[:, :, : sum(sizes)] * kept_weight[:, :, None]).split_with_sizes(sizes, dim=2)
        out = np.zeros((kept.shape[0], count, kept.shape[2], width), columns.dtype)
        for part, (members, chosen) in zip(parts, groups, strict=False):
            moved = part.reshape(*part.shape[:2], members, -1, width)
            _kernels().contract(_array(kept[..., chosen], v.dtype), _array(moved, v.dtype), out)
        return torch.from_numpy(out), parts[-1] if transport is not None else None

    def _streamed(
        self, kept: Tensor, summed: Tensor, v: Tensor, axis: int, transport: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Every block's weights formed tile by tile from the same exponentials."""
        w, u, weight, kept_weight = self._side(axis)
        dtype = self.tiles.dtype
        ones = np.ones((1, summed.shape[2]), weight.dtype)
        left, right, values = (_array(t.flatten(0, 1), dtype) for t in (kept, summed, v))
        packed = (_rows(left), _cols(right, ones), _cols(values, weight))
        blocks = [t.shape[1] for t in (kept, summed, v)]
        weighted = tuple(
            part.reshape(-1, count, *part.shape[1:]) for part, count in zip(packed, blocks, strict=True)
        )
        extra = v.new_empty(v.shape[0], v.shape[2], 0) if transport is None else transport
        moved = _cols(_array(extra, dtype), weight)
        total, out = self._products((w, u), moved, weighted, axis)
        product = torch.from_numpy(out)[..., : v.shape[3]] * kept_weight[:, None, :, None]
        if transport is None:
            return product, None
        return product, torch.from_numpy(total)[:, :, : transport.shape[2]] * kept_weight[:, :, None]

    def to_dense(self) -> Tensor:
        """See `Plan.to_dense`; stores (n, m), for tests and small problems."""
        exponent = self.biases[0][:, :, None] + self.biases[1][:, None, :]
        exponent = exponent + self.tiles.q @ self.tiles.k.mT
        return exp2_flushed_(exponent).mul_(self.weights[0][:, :, None]).mul_(self.weights[1][:, None, :])


class CpuBackend:
    """Streaming kernels for CPU tensors in float32 and float64."""

    name = "cpu"

    def bind(self, q: Tensor, k: Tensor, counter: PassCounter) -> CpuTiles:
        """See `PlanBackend.bind`."""
        return CpuTiles(q, k, counter)
