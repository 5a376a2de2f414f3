"""Numba drivers of the `cpu` backend: blocks of rows shared out over threads.

Layout (made by `pack_rows` and `pack_cols`): the cloud that is kept lies in rows `(B, n4, d4)`, the one
summed over in blocks of columns `(B, blocks, d4, BLOCK)`; n4 and d4 are n and d rounded up to 4, the
padding is zero. Padded columns have bias `NEVER` and weight 0.

A unit of work is `ROWS` rows of one lane against all columns. The units depend on the shapes only and
each is summed in a fixed order, so that results are the same bits for any number of threads, and for a
lane alone or in a batch. With one worker nothing parallel is launched. Beyond the packed operands, memory
is one tile of ROWS x BLOCK and one strip of 4 x BLOCK per worker.

Each driver is compiled at its first call for the dtype at hand, and kept in numba's cache on disk.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numba
import numpy as np

from ot_newton.backends import cpu_micro, cpu_strips
from ot_newton.backends.cpu_strips import (
    BLOCK,
    EXACT,
    GROUP,
    add_products,
    add_sums,
    aligned,
    exp2,
    exp2_strip,
    exp2_sums,
    fill,
    multiply,
    njit,
    peak,
    row_sums,
    subtract,
    weighted_sums,
)

__all__ = [
    "contract",
    "finish_lse",
    "log_sums",
    "pack_bias",
    "pack_cols",
    "pack_rows",
    "products",
    "sums",
]

prange: Any = numba.prange

ROWS = 32
"""Rows of a unit of work."""

NEVER = -1e30
SERIAL = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}, "cache": True}
PARALLEL = {"parallel": True, "error_model": "numpy", "cache": True}

STAMP = zlib.crc32(b"".join(Path(str(m.__file__)).read_bytes() for m in (cpu_strips, cpu_micro)))
"""Default of an argument of all cached code, hence part of numba's key: an edit of the primitives, which
numba does not see, must not bring back old code."""


@njit(**SERIAL)
def pack_rows(cloud: Any, rows: Any, stamp: int = STAMP) -> None:
    """Copy `(L, n, d)` into zeroed, padded rows `(L, n4, d4)`."""
    for lane in range(cloud.shape[0]):
        for i in range(cloud.shape[1]):
            for c in range(cloud.shape[2]):
                rows[lane, i, c] = cloud[lane, i, c]


@njit(**SERIAL)
def pack_cols(cloud: Any, weight: Any, cols: Any, stamp: int = STAMP) -> None:
    """Copy `weight_j cloud_j` of `(L, m, d)` into zeroed blocks; weight (B, m) serves L/B items each.

    Atoms of zero weight stay exactly 0, whatever their entries.
    """
    share = cloud.shape[0] // weight.shape[0]
    for lane in range(cloud.shape[0]):
        for j in range(cloud.shape[1]):
            block, at = j // BLOCK, j % BLOCK
            factor = weight[lane // share, j]
            if factor != 0.0:
                for c in range(cloud.shape[2]):
                    cols[lane, block, c, at] = cloud[lane, j, c] * factor


@njit(**SERIAL)
def pack_bias(bias: Any, weight: Any, logarithm: bool, u: Any, g: Any, stamp: int = STAMP) -> None:
    """Padded bias and weight; atoms of zero weight get a bias that flushes them.

    With `logarithm` the weight goes into the bias, -inf for none, and g is 1.
    """
    none = -np.inf if logarithm else NEVER
    for lane in range(u.shape[0]):
        for j in range(u.shape[1]):
            u[lane, j], g[lane, j] = none, 0.0
        for j in range(bias.shape[1]):
            if not weight[lane, j] <= 0.0:
                u[lane, j], g[lane, j] = bias[lane, j], weight[lane, j]
                if logarithm:
                    u[lane, j], g[lane, j] = bias[lane, j] + np.log2(weight[lane, j]), 1.0


@njit(**SERIAL)
def finish_lse(
    total: Any, stabilizer: Any, low: float, high: float, lse: Any, good: Any, stamp: int = STAMP
) -> bool:
    """`log2(total) - stabilizer`, and for each lane whether all its sums lie in [low, high]."""
    every = True
    for lane in range(total.shape[0]):
        good[lane] = True
        for i in range(total.shape[1]):
            value = total[lane, i]
            if not (low <= value <= high):
                good[lane] = False
            lse[lane, i] = np.log2(value) - stabilizer[lane, i]
        every = every and good[lane]
    return every


@njit(**SERIAL)
def contract(factor: Any, moved: Any, out: Any, stamp: int = STAMP) -> None:
    """`out_kic += sum_p factor_kip moved_ikpc` lane by lane; blocks of one member serve every k.

    A torch product here would let a lane's last bits depend on the size of the batch.
    """
    for lane in range(out.shape[0]):
        for i in range(out.shape[2]):
            for k in range(out.shape[1]):
                row = factor[lane, min(k, factor.shape[1] - 1), i]
                block, target = moved[lane, i, min(k, moved.shape[2] - 1)], out[lane, k, i]
                for p in range(row.shape[0]):
                    for c in range(target.shape[0]):
                        target[c] += row[p] * block[p, c]


@njit(**EXACT)
def _columns(block: int, count: int) -> int:
    """Groups of columns in a block."""
    return (min(BLOCK, count - block * BLOCK) + GROUP - 1) // GROUP


@njit(**EXACT)
def _clear(array: Any) -> None:
    """Set a matrix to 0; explicit loops compile much faster than slice assignments."""
    for i in range(array.shape[0]):
        for j in range(array.shape[1]):
            array[i, j] = 0.0


@njit(**EXACT)
def _copy(source: Any, out: Any, first: int, count: int) -> None:
    """Copy the first rows of a unit's sums to their place."""
    for i in range(count):
        for j in range(source.shape[1]):
            out[first + i, j] = source[i, j]


@njit(**EXACT)
def _row_bias(bias: Any, first: int, scratch: Any) -> int:
    """Copy the biases of a unit's rows, zeros beyond the last; returns the number of strips."""
    count: int = min(ROWS, bias.shape[0] - first)
    for r in range(ROWS):
        scratch[r] = bias[first + r] if r < count else 0.0
    return (count + 3) // 4


@njit(**SERIAL)
def _sums(
    worker: int, workers: int, dims: Any, clouds: Any, biases: Any, out: Any, stamp: int = STAMP
) -> None:
    rows, cols, count = clouds
    w, u, g = biases
    units = (w.shape[1] + ROWS - 1) // ROWS
    bias, total = np.empty(ROWS, w.dtype), np.empty(ROWS, w.dtype)
    strip = aligned(4 * BLOCK, w).reshape(4, BLOCK)
    for unit in range(worker, units * w.shape[0], workers):
        lane, first = unit // units, unit % units * ROWS
        strips = _row_bias(w[lane], first, bias)
        for r in range(ROWS):
            total[r] = 0.0
        for block in range(cols.shape[1]):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            groups = _columns(block, count)
            for r in range(0, 4 * strips, 4):
                piece, columns = rows[lane, first + r : first + r + 4], cols[lane, block]
                w4, u_part, g_part = bias[r : r + 4], u[lane, part], g[lane, part]
                s = row_sums(dims, strip, piece, w4, columns, u_part, g_part, groups)
                total[r] += s[0]
                total[r + 1] += s[1]
                total[r + 2] += s[2]
                total[r + 3] += s[3]
        for r in range(min(ROWS, w.shape[1] - first)):
            out[lane, first + r] = total[r]


@njit(**PARALLEL)
def _sums_parallel(workers: int, dims: Any, clouds: Any, biases: Any, out: Any, stamp: int = STAMP) -> None:
    for worker in prange(workers):
        _sums(np.int64(worker), workers, dims, clouds, biases, out)


@njit(**EXACT)
def _renew(strip: Any, top: Any, total: Any, lanes: Any, groups: int) -> None:
    """Raise the running maxima of four rows to those of the strip, rescale the sums, shift the strip."""
    for r in range(4):
        fresh = max(top[r], peak(strip[r], lanes, groups))
        shift = fresh if fresh > -np.inf else lanes.dtype.type(0)
        if top[r] > -np.inf:
            total[r] *= exp2(top[r] - shift)
        subtract(strip[r], shift, groups)
        top[r] = fresh


@njit(**SERIAL)
def _log_sums(
    worker: int, workers: int, clouds: Any, biases: Any, lanes: Any, out: Any, stamp: int = STAMP
) -> None:
    rows, cols, count = clouds
    u, g = biases
    units = (out.shape[1] + ROWS - 1) // ROWS
    top, total, zeros = np.empty(ROWS, u.dtype), np.empty(ROWS, u.dtype), np.zeros(4, u.dtype)
    scratch = np.empty(GROUP, u.dtype)
    strip = aligned(4 * BLOCK, u).reshape(4, BLOCK)
    for unit in range(worker, units * lanes.shape[0], workers):
        lane, first = lanes[unit // units], unit % units * ROWS
        last = min(ROWS, out.shape[1] - first)
        for r in range(ROWS):
            top[r], total[r] = -np.inf, 0.0
        for block in range(cols.shape[1]):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            groups = _columns(block, count)
            for r in range(0, last, 4):
                piece, four = rows[lane, first + r : first + r + 4], slice(r, r + 4)
                fill(strip, piece, zeros, cols[lane, block], u[lane, part], groups)
                _renew(strip, top[four], total[four], scratch, groups)
                s = exp2_sums(strip, g[lane, part], groups)
                total[r] += s[0]
                total[r + 1] += s[1]
                total[r + 2] += s[2]
                total[r + 3] += s[3]
        for r in range(last):
            out[lane, first + r] = np.log2(total[r]) + (top[r] if top[r] > -np.inf else 0.0)


@njit(**PARALLEL)
def _log_sums_parallel(
    workers: int, clouds: Any, biases: Any, lanes: Any, out: Any, stamp: int = STAMP
) -> None:
    for worker in prange(workers):
        _log_sums(np.int64(worker), workers, clouds, biases, lanes, out)


@njit(**EXACT)
def _reduce(tile: Any, cols: Any, out: Any, strips: int, groups: int) -> None:
    """`out += tile @ cols^T`, sixteen columns at a time so that they stay in L1."""
    width = cols.shape[0]
    for start in range(0, width, 16):
        for r in range(0, 4 * strips, 4):
            for c in range(start, min(start + 16, width), 4):
                add_sums(tile[r : r + 4], cols[c : c + 4], out[r : r + 4, c : c + 4], groups)


@njit(**EXACT)
def _hadamard(
    tile: Any, strip: Any, left: Any, right: Any, cols: Any, out: Any, strips: int, groups: int
) -> None:
    """`out += (tile . (left @ right)) @ cols^T`."""
    for r in range(0, 4 * strips, 4):
        if right.shape[0] == 4:
            for c in range(0, cols.shape[0], 4):
                piece = out[r : r + 4, c : c + 4]
                weighted_sums(tile[r : r + 4], left[r : r + 4], right, cols[c : c + 4], piece, groups)
            continue
        _clear(strip)
        add_products(strip, left[r : r + 4], right, groups)
        multiply(strip, tile[r : r + 4], groups)
        for c in range(0, cols.shape[0], 4):
            add_sums(strip, cols[c : c + 4], out[r : r + 4, c : c + 4], groups)


@njit(**SERIAL)
def _products(
    worker: int,
    workers: int,
    clouds: Any,
    biases: Any,
    moved: Any,
    weighted: Any,
    outs: Any,
    stamp: int = STAMP,
) -> None:
    rows, cols, count = clouds
    w, u = biases
    left, right, values = weighted
    out, out_weighted = outs
    units, blocks = (w.shape[1] + ROWS - 1) // ROWS, out_weighted.shape[1]
    bias = np.empty(ROWS, w.dtype)
    tile = aligned(ROWS * BLOCK, w).reshape(ROWS, BLOCK)
    strip = aligned(4 * BLOCK, w).reshape(4, BLOCK)
    acc = np.empty((ROWS, out.shape[2]), w.dtype)
    acc_weighted = np.empty((blocks * ROWS, out_weighted.shape[3]), w.dtype)
    for unit in range(worker, units * w.shape[0], workers):
        lane, first = unit // units, unit % units * ROWS
        last, strips = min(ROWS, w.shape[1] - first), _row_bias(w[lane], first, bias)
        _clear(acc)
        _clear(acc_weighted)
        for block in range(cols.shape[1]):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            groups = _columns(block, count)
            for r in range(0, 4 * strips, 4):
                piece, four = rows[lane, first + r : first + r + 4], slice(r, r + 4)
                fill(tile[four], piece, bias[four], cols[lane, block], u[lane, part], groups)
                exp2_strip(tile[four], groups)
            _reduce(tile, moved[lane, block], acc, strips, groups)
            for k in range(blocks):
                lefts = left[lane, min(k, left.shape[1] - 1), first : first + 4 * strips]
                rights = right[lane, min(k, right.shape[1] - 1), block]
                columns = values[lane, min(k, values.shape[1] - 1), block]
                sums_k = acc_weighted[k * ROWS : (k + 1) * ROWS]
                _hadamard(tile, strip, lefts, rights, columns, sums_k, strips, groups)
        _copy(acc, out[lane], first, last)
        for k in range(blocks):
            _copy(acc_weighted[k * ROWS : (k + 1) * ROWS], out_weighted[lane, k], first, last)


@njit(**PARALLEL)
def _products_parallel(
    workers: int, clouds: Any, biases: Any, moved: Any, weighted: Any, outs: Any, stamp: int = STAMP
) -> None:
    for worker in prange(workers):
        _products(np.int64(worker), workers, clouds, biases, moved, weighted, outs)


def sums(workers: int, dims: Any, clouds: Any, biases: Any, out: Any) -> None:
    """Row sums `sum_j g_j 2^(w_i + u_j + q_i.k_j)`.

    Args:
        workers: threads.
        dims: a tuple of length d for d <= 4 (everything in registers), else an empty one.
        clouds: rows, blocks of columns, number of columns before padding.
        biases: w (B, n), padded u and g.
        out: (B, n).
    """
    if workers == 1:
        _sums(0, 1, dims, clouds, biases, out)
    else:
        _sums_parallel(workers, dims, clouds, biases, out)


def log_sums(workers: int, clouds: Any, biases: Any, lanes: Any, out: Any) -> None:
    """`log2 sum_j 2^(u_j + q_i.k_j)` of the lanes listed, stabilized by a running maximum.

    Args:
        workers: threads.
        clouds: rows, blocks of columns, number of columns before padding.
        biases: padded u with the weights inside, and g (1, or 0 for padding).
        lanes: indices of the lanes to do.
        out: (B, n).
    """
    if workers == 1:
        _log_sums(0, 1, clouds, biases, lanes, out)
    else:
        _log_sums_parallel(workers, clouds, biases, lanes, out)


def products(workers: int, clouds: Any, biases: Any, moved: Any, weighted: Any, outs: Any) -> None:
    """Kernel products sharing one sweep: a transport and a block of Hadamard-weighted transports.

    Args:
        workers: threads.
        clouds: rows, blocks of columns, number of columns before padding.
        biases: w (B, n) and padded u.
        moved: columns (B, blocks, t4, BLOCK) to transport, t4 possibly 0.
        weighted: left rows (B, K or 1, n4, p4), right columns (B, K or 1, blocks, p4, BLOCK) and values
            (B, K or 1, blocks, w4, BLOCK).
        outs: (B, n, t4), and (B, K, n, w4) with K possibly 0.
    """
    if workers == 1:
        _products(0, 1, clouds, biases, moved, weighted, outs)
    else:
        _products_parallel(workers, clouds, biases, moved, weighted, outs)
