"""Numba primitives of the `cpu` backend: four rows against one block of columns, in L1 cache.

A strip is a (4, BLOCK) piece of the kernel matrix. It is filled with exponents tile by tile in registers
(`cpu_micro`), turned into `2^x` in place, and reduced against columns; a row of operands is read once
for four rows of output. For d <= 4 the three steps are one loop and no strip is stored. The loops run
over whole groups of `GROUP` columns (operands are padded), so that no scalar remainder is left.

The exponent of a pair is always the chain `((w_i + u_j) + q_i1 k_j1) + q_i2 k_j2 ...`, on both axes and
in every routine, so that P and P^T agree bitwise. Only sums over j may be reassociated (into vector
lanes); the order is fixed by the compiled code, never by the threads.

`2^x`: rounding to an integer by adding 1.5 * 2^23 (2^52), a polynomial on [-1/2, 1/2] that is exactly 1
at 0 (relative error 9.2e-8 of degree 5, 1e-17 of degree 11, before rounding), and the integer added to
the exponent bits. Exactly 0 below `exponent_floor`, constant above its negative times 1.2 (float32) or 1
(float64); NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import extending, types

from ot_newton.backends.cpu_micro import NARROW_BYTES, TILE_BYTES, update_narrow, update_wide

__all__ = [
    "BLOCK",
    "GROUP",
    "add_products",
    "add_sums",
    "aligned",
    "exp2",
    "exp2_strip",
    "exp2_sums",
    "fill",
    "multiply",
    "peak",
    "row_sums",
    "subtract",
    "weighted_sums",
]

# numba's own annotations differ between releases
njit: Any = numba.njit
intrinsic: Any = extending.intrinsic
overload: Any = extending.overload

BLOCK = 512
"""Columns of a block: with 32 rows of float64 a tile takes 128 kB, inside any L2 cache."""

GROUP = 32
"""Columns are padded to whole groups of this many."""

_INNER = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
EXACT = {"fastmath": {"contract"}, **_INNER}
SUMS = {"fastmath": {"contract", "reassoc"}, **_INNER}

_MAGIC32, _TOP32, _FLOOR32 = np.float32(1.5 * 2**23), np.float32(120.0), np.float32(-100.0)
_MAGIC64, _TOP64, _FLOOR64 = 1.5 * 2.0**52, 1000.0, -1000.0


@intrinsic
def _as_int(_context: Any, value: Any) -> Any:
    """The bits of a float as a signed integer of the same width."""
    bits = value.bitwidth
    kind = types.int32 if bits == 32 else types.int64
    return kind(value), lambda _c, builder, _s, args: builder.bitcast(args[0], ir.IntType(bits))


@intrinsic
def _as_float(_context: Any, value: Any) -> Any:
    """The float with the bits of an integer."""
    kind = types.float32 if value.bitwidth == 32 else types.float64
    target = ir.FloatType() if value.bitwidth == 32 else ir.DoubleType()
    return kind(value), lambda _c, builder, _s, args: builder.bitcast(args[0], target)


@intrinsic
def _widest_vectors(_context: Any) -> Any:
    """Let the calling function use the machine's widest vectors; LLVM prefers 256 bits on many CPUs.

    The function is kept out of line too, else the attribute would be lost with it.
    """

    def code(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        # llvmlite checks names against a list that lacks string attributes, hence `set.add`
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), code


def exp2(x: Any) -> Any:
    """`2^x` as described above; only inside compiled code."""
    raise NotImplementedError("compiled code only")


_C32 = tuple(np.float32(c) for c in (1.0, 0.69314698, 0.24022242, 0.05550734, 0.00967151, 0.00132647))
_C64 = (
    1.0,
    0.69314718055994569679,
    0.24022650695910098007,
    0.055504108664790389252,
    0.0096181291076070019986,
    0.0013333558153441334774,
    0.00015403530441572599042,
    0.000015252727383872462884,
    1.3215442675115585098e-6,
    1.0180648196555812362e-7,
    7.0725704454692940707e-9,
    4.0779938562463538038e-10,
)


@overload(exp2, jit_options={"fastmath": {"contract"}}, inline="never")
def _exp2(x: Any) -> Any:
    if x == types.float32:

        def single(x: Any) -> Any:
            x = _TOP32 if x > _TOP32 else x
            t = x + _MAGIC32
            f = x - (t - _MAGIC32)
            p = _C32[0] + f * (_C32[1] + f * (_C32[2] + f * (_C32[3] + f * (_C32[4] + f * _C32[5]))))
            value = _as_float(np.int32(_as_int(p) + np.int32(_as_int(t) << np.int32(23))))
            return np.float32(0.0) if x < _FLOOR32 else value

        return single

    def double(x: Any) -> Any:
        x = _TOP64 if x > _TOP64 else x
        t = x + _MAGIC64
        f = x - (t - _MAGIC64)
        p = _C64[11]
        for degree in range(10, -1, -1):
            p = p * f + _C64[degree]
        value = _as_float(_as_int(p) + (_as_int(t) << 52))
        return 0.0 if x < _FLOOR64 else value

    return double


@njit(**SUMS)
def _fused_sums(dims: Any, rows: Any, bias: Any, cols: Any, u: Any, weight: Any, groups: int) -> Any:
    """Weighted row sums with nothing stored; the loop over `dims` is unrolled."""
    _widest_vectors()
    w0, w1, w2, w3 = bias[0], bias[1], bias[2], bias[3]
    zero = weight.dtype.type(0)
    s0, s1, s2, s3 = zero, zero, zero, zero
    for j in range(groups * GROUP):
        uj, gj = u[j], weight[j]
        x0, x1, x2, x3 = w0 + uj, w1 + uj, w2 + uj, w3 + uj
        for c in range(len(dims)):
            k = cols[c, j]
            x0 += rows[0, c] * k
            x1 += rows[1, c] * k
            x2 += rows[2, c] * k
            x3 += rows[3, c] * k
        s0 += exp2(x0) * gj
        s1 += exp2(x1) * gj
        s2 += exp2(x2) * gj
        s3 += exp2(x3) * gj
    return s0, s1, s2, s3


@njit(**EXACT)
def _four(row: Any, c: int) -> Any:
    return row[c], row[c + 1], row[c + 2], row[c + 3]


@njit(**EXACT)
def _chain(x: Any, a: Any, k: Any) -> Any:
    """`x + a_1 k_1 + a_2 k_2 + ...`, in that order."""
    for p in range(len(a)):
        x += a[p] * k[p]
    return x


@njit(**EXACT)
def add_products(strip: Any, rows: Any, cols: Any, groups: int) -> None:
    """`strip += rows @ cols`, one register tile after another (`cpu_micro`)."""
    _widest_vectors()
    inner, size = rows.shape[1], strip.itemsize
    wide, narrow = TILE_BYTES // size, NARROW_BYTES // size
    columns = groups * GROUP
    done = columns // wide * wide
    for at in range(0, done, wide):
        update_wide(strip, rows, cols, inner, at)
    for at in range(done, columns, narrow):
        update_narrow(strip, rows, cols, inner, at)


@njit(**EXACT)
def fill(strip: Any, rows: Any, bias: Any, cols: Any, u: Any, groups: int) -> None:
    """Exponents `(bias_i + u_j) + rows_i . cols_j` of four rows."""
    _widest_vectors()
    for r in range(4):
        row, w = strip[r], bias[r]
        for j in range(groups * GROUP):
            row[j] = w + u[j]
    add_products(strip, rows, cols, groups)


@njit(**EXACT)
def exp2_strip(strip: Any, groups: int) -> None:
    """`2^x` in place."""
    _widest_vectors()
    for r in range(4):
        row = strip[r]
        for j in range(groups * GROUP):
            row[j] = exp2(row[j])


@njit(**SUMS)
def exp2_sums(strip: Any, weight: Any, groups: int) -> Any:
    """`sum_j 2^x_rj weight_j` of four rows."""
    _widest_vectors()
    t0, t1, t2, t3 = strip[0], strip[1], strip[2], strip[3]
    zero = weight.dtype.type(0)
    s0, s1, s2, s3 = zero, zero, zero, zero
    for j in range(groups * GROUP):
        gj = weight[j]
        s0 += exp2(t0[j]) * gj
        s1 += exp2(t1[j]) * gj
        s2 += exp2(t2[j]) * gj
        s3 += exp2(t3[j]) * gj
    return s0, s1, s2, s3


@njit(**EXACT)
def subtract(row: Any, value: Any, groups: int) -> None:
    """`row -= value`."""
    _widest_vectors()
    for j in range(groups * GROUP):
        row[j] -= value


@njit(**EXACT)
def peak(row: Any, lanes: Any, groups: int) -> Any:
    """Largest entry of one row, NaN skipped (it reappears in the sum); `lanes` is scratch of GROUP."""
    _widest_vectors()
    for lane in range(GROUP):
        lanes[lane] = -np.inf
    for group in range(groups):
        piece = row[group * GROUP : (group + 1) * GROUP]
        for lane in range(GROUP):
            lanes[lane] = piece[lane] if piece[lane] > lanes[lane] else lanes[lane]
    top = lanes[0]
    for lane in range(1, GROUP):
        top = max(top, lanes[lane])
    return top


@njit(**EXACT)
def multiply(strip: Any, factor: Any, groups: int) -> None:
    """`strip *= factor`, four rows."""
    _widest_vectors()
    for r in range(4):
        row, other = strip[r], factor[r]
        for j in range(groups * GROUP):
            row[j] *= other[j]


@njit(**SUMS)
def add_sums(strip: Any, cols: Any, out: Any, groups: int) -> None:
    """`out_rc += sum_j strip_rj cols_cj` for four rows and four columns, sixteen sums in registers."""
    _widest_vectors()
    t0, t1, t2, t3 = strip[0], strip[1], strip[2], strip[3]
    v0, v1, v2, v3 = cols[0], cols[1], cols[2], cols[3]
    zero = out.dtype.type(0)
    a0, a1, a2, a3 = zero, zero, zero, zero
    b0, b1, b2, b3 = zero, zero, zero, zero
    c0, c1, c2, c3 = zero, zero, zero, zero
    d0, d1, d2, d3 = zero, zero, zero, zero
    for j in range(groups * GROUP):
        va, vb, vc, vd = v0[j], v1[j], v2[j], v3[j]
        e = t0[j]
        a0 += e * va
        a1 += e * vb
        a2 += e * vc
        a3 += e * vd
        e = t1[j]
        b0 += e * va
        b1 += e * vb
        b2 += e * vc
        b3 += e * vd
        e = t2[j]
        c0 += e * va
        c1 += e * vb
        c2 += e * vc
        c3 += e * vd
        e = t3[j]
        d0 += e * va
        d1 += e * vb
        d2 += e * vc
        d3 += e * vd
    for c, value in enumerate((a0, a1, a2, a3)):
        out[0, c] += value
    for c, value in enumerate((b0, b1, b2, b3)):
        out[1, c] += value
    for c, value in enumerate((c0, c1, c2, c3)):
        out[2, c] += value
    for c, value in enumerate((d0, d1, d2, d3)):
        out[3, c] += value


@njit(**SUMS)
def weighted_sums(strip: Any, left: Any, right: Any, cols: Any, out: Any, groups: int) -> None:
    """`out_rc += sum_j strip_rj (left_r . right_j) cols_cj` for inner size 4, four rows and columns."""
    _widest_vectors()
    k0, k1, k2, k3 = right[0], right[1], right[2], right[3]
    v0, v1, v2, v3 = cols[0], cols[1], cols[2], cols[3]
    zero = out.dtype.type(0)
    for half in range(0, 4, 2):
        t0, t1 = strip[half], strip[half + 1]
        a, b = _four(left[half], 0), _four(left[half + 1], 0)
        a0, a1, a2, a3 = zero, zero, zero, zero
        b0, b1, b2, b3 = zero, zero, zero, zero
        for j in range(groups * GROUP):
            k = (k0[j], k1[j], k2[j], k3[j])
            va, vb, vc, vd = v0[j], v1[j], v2[j], v3[j]
            e = t0[j] * _chain(zero, a, k)
            a0 += e * va
            a1 += e * vb
            a2 += e * vc
            a3 += e * vd
            e = t1[j] * _chain(zero, b, k)
            b0 += e * va
            b1 += e * vb
            b2 += e * vc
            b3 += e * vd
        for c, value in enumerate((a0, a1, a2, a3)):
            out[half, c] += value
        for c, value in enumerate((b0, b1, b2, b3)):
            out[half + 1, c] += value


@njit(**EXACT)
def aligned(size: int, like: Any) -> Any:
    """Scratch of the dtype of `like` that starts on a cache line."""
    raw = np.empty(size + 16, like.dtype)
    start = ((64 - raw.ctypes.data % 64) % 64) // raw.itemsize
    return raw[start : start + size]


def row_sums(dims: Any, strip: Any, rows: Any, bias: Any, cols: Any, u: Any, weight: Any, groups: int) -> Any:
    """`sum_j 2^((bias_i + u_j) + rows_i . cols_j) weight_j` of four rows; only inside compiled code.

    `dims`, a tuple, picks the routine by its type: of length d > 0, everything stays in registers; empty,
    the exponents pass through `strip`.
    """
    raise NotImplementedError("compiled code only")


@overload(row_sums, jit_options={"error_model": "numpy"}, inline="never")
def _row_sums(
    dims: Any, strip: Any, rows: Any, bias: Any, cols: Any, u: Any, weight: Any, groups: int
) -> Any:
    if len(dims) > 0:

        def small(
            dims: Any, strip: Any, rows: Any, bias: Any, cols: Any, u: Any, weight: Any, groups: int
        ) -> Any:
            return _fused_sums(dims, rows, bias, cols, u, weight, groups)

        return small

    def general(
        dims: Any, strip: Any, rows: Any, bias: Any, cols: Any, u: Any, weight: Any, groups: int
    ) -> Any:
        fill(strip, rows, bias, cols, u, groups)
        return exp2_sums(strip, weight, groups)

    return general
