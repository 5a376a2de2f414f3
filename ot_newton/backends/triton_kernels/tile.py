"""Device code shared by all kernels: addressing, `q.k` of a tile, plan entries, accumulation.

Layouts (made once by `launch.bind`): an operand of up to 8 coordinates, or in float64, is stored by
coordinate, (B, d, size), and multiplied on the FMA units (`BLOCK_D == 1`); a larger one is stored by row
with d padded by zeros to a multiple of BLOCK_D, (B, size, d), and multiplied by `tl.dot`. `DIM` is d as a
compile-time constant, 0 when d is only known at run time.

Biases and weights of a side travel together as (B, 2, size). Names: `i_` an index, `o_` offsets, `m_` a
mask, `b_` a block in registers. Sizes n and m are never compile-time constants.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, PLR0917

import triton
import triton.language as tl

NEVER = tl.constexpr(-1e30)
"""Bias of an atom outside of the cloud or of zero weight: its kernel entries are exactly 0."""


@triton.jit
def program_rows(size, BLOCK: tl.constexpr):
    """Lane (int64) and first row of this program along grid axis 0."""
    blocks = tl.cdiv(size, BLOCK)
    pid = tl.program_id(0)
    return (pid // blocks).to(tl.int64), (pid % blocks) * BLOCK


@triton.jit
def row_index(lane, size, first):
    """Row ``first`` of a lane counted over all lanes, int64: it passes 2^31 for large batches.

    Blocks are addressed from such a base by 32-bit offsets, which halves the registers of addresses.
    """
    return lane.to(tl.int64) * size + first


@triton.jit
def operand_base(ptr, lane, size, first, d, BLOCK_D: tl.constexpr):
    """Address of row ``first`` of an operand, in either layout."""
    if BLOCK_D == 1:
        return ptr + lane * d * size + first
    else:
        return ptr + row_index(lane, size, first) * d


@triton.jit
def load_side(ptr, lane, size, first, o_i, m_i):
    """Bias [BLOCK], `NEVER` where the weight is 0, and weight of a side stored as (B, 2, size)."""
    b_weight = tl.load(ptr + row_index(2 * lane + 1, size, first) + o_i, mask=m_i, other=0.0)
    b_bias = tl.load(ptr + row_index(2 * lane, size, first) + o_i, mask=m_i, other=0.0)
    return tl.where(b_weight > 0, b_bias, NEVER), b_weight


@triton.jit
def load_rows(base, o_i, m_i, d, o_d):
    """Coordinates `o_d` of rows of an operand stored by row: [rows, BLOCK_D]."""
    return tl.load(base + o_i[:, None] * d + o_d[None, :], mask=m_i[:, None], other=0.0)


@triton.jit
def load_coordinate(base, o_i, m_i, size, c, dtype: tl.constexpr):
    """One coordinate of rows of an operand stored by coordinate: [rows]."""
    return tl.load(base + c * size.to(tl.int64) + o_i, mask=m_i, other=0.0).to(dtype)


@triton.jit
def load_query(q, o_i, m_i, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The row operand of a program, kept in registers over the whole sweep if it is one block."""
    if BLOCK_D > 1 and DIM == BLOCK_D:
        return load_rows(q, o_i, m_i, DIM, tl.arange(0, BLOCK_D))
    else:
        return o_i


@triton.jit
def add_products(
    b_s, b_q, q, k, o_i, m_i, n, o_j, m_j, m, d,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`b_s + q.k^T` of one tile [BLOCK_M, BLOCK_N]; each element of k is read once per tile.

    ``q`` and ``k`` are bases of the tile's rows. The products of both axes are summed in the same order,
    so that P and P^T see the same exponents.
    """
    if BLOCK_D == 1:
        if DIM > 0:
            for c in tl.static_range(DIM):
                b_qc = load_coordinate(q, o_i, m_i, n, c, b_s.dtype)
                b_kc = load_coordinate(k, o_j, m_j, m, c, b_s.dtype)
                b_s += b_qc[:, None] * b_kc[None, :]
        else:
            for c in range(d):
                b_qc = load_coordinate(q, o_i, m_i, n, c, b_s.dtype)
                b_kc = load_coordinate(k, o_j, m_j, m, c, b_s.dtype)
                b_s += b_qc[:, None] * b_kc[None, :]
    elif DIM == BLOCK_D:
        b_k = load_rows(k, o_j, m_j, DIM, tl.arange(0, BLOCK_D))
        b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision=PRECISION)
    else:
        stride = DIM if DIM > 0 else tl.multiple_of(d, BLOCK_D)
        o_d = tl.arange(0, BLOCK_D)
        for c in range(0, stride, BLOCK_D):
            b_part = load_rows(q + c, o_i, m_i, stride, o_d)
            b_k = load_rows(k + c, o_j, m_j, stride, o_d)
            b_s = tl.dot(b_part, tl.trans(b_k), b_s, input_precision=PRECISION)
    return b_s


@triton.jit
def kernel_entries(b_s):
    """`2^s`, exactly 0 below the floor of the dtype (-100 in float32, -1000 in float64); NaN stays NaN."""
    floor: tl.constexpr = -1000.0 if b_s.dtype == tl.float64 else -100.0
    return tl.exp2(tl.where(b_s < floor, float("-inf"), b_s))


@triton.jit
def add_column(b_acc, b_e, b_weight, v, o_v, m_j, c, p):
    """`b_acc + b_e * (weight * v[:, c])`, [BLOCK_M, BLOCK_N]; past the last column, that one again.

    Summed over the tile's columns only after the sweep: a sum inside would cost more than the entries.
    """
    b_v = tl.load(v + o_v + tl.minimum(c, p - 1), mask=m_j, other=0.0) * b_weight
    return b_acc + b_e * b_v[None, :]


@triton.jit
def add_transport(
    acc, acc1, acc2, acc3, b_e, b_weight, v, o_j, m_j, c, p,
    BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns c to c + BLOCK_P of `b_e diag(weight) v` added to the accumulators.

    Up to 4 columns are vectors on the FMA units, one accumulator [BLOCK_M, BLOCK_N] each; wider blocks
    are one `tl.dot` into ``acc`` [BLOCK_M, BLOCK_P]. ``v`` is the base of the tile's rows.
    """
    o_v = o_j * p
    if BLOCK_P <= 4:
        acc = add_column(acc, b_e, b_weight, v, o_v, m_j, c, p)
        if BLOCK_P > 1:
            acc1 = add_column(acc1, b_e, b_weight, v, o_v, m_j, c + 1, p)
        if BLOCK_P > 2:
            acc2 = add_column(acc2, b_e, b_weight, v, o_v, m_j, c + 2, p)
            acc3 = add_column(acc3, b_e, b_weight, v, o_v, m_j, c + 3, p)
    else:
        o_p = c + tl.arange(0, BLOCK_P)
        b_v = tl.load(v + o_v[:, None] + o_p[None, :], mask=m_j[:, None] & (o_p < p)[None, :], other=0.0)
        acc = tl.dot(b_e, b_v * b_weight[:, None], acc, input_precision=PRECISION)
    return acc, acc1, acc2, acc3


@triton.jit
def empty_transport(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, dtype: tl.constexpr):
    """Zero accumulators for `add_transport`."""
    zero = tl.zeros([BLOCK_M, BLOCK_N], dtype)
    if BLOCK_P <= 4:
        return zero, zero, zero, zero
    else:
        return tl.zeros([BLOCK_M, BLOCK_P], dtype), zero, zero, zero


@triton.jit
def store_column(b_acc, b_weight, out, o_out, m_i, c, p):
    """Row sums of an accumulator times the rows' weights, written to column c if there is one."""
    if c < p:
        tl.store(out + o_out + c, tl.sum(b_acc, axis=1) * b_weight, mask=m_i)


@triton.jit
def store_transport(acc, acc1, acc2, acc3, b_weight, out, o_i, m_i, c, p, BLOCK_P: tl.constexpr):
    """Accumulators times the rows' weights, written to columns c to c + BLOCK_P; ``out`` is a base."""
    o_out = o_i * p
    if BLOCK_P <= 4:
        store_column(acc, b_weight, out, o_out, m_i, c, p)
        if BLOCK_P > 1:
            store_column(acc1, b_weight, out, o_out, m_i, c + 1, p)
        if BLOCK_P > 2:
            store_column(acc2, b_weight, out, o_out, m_i, c + 2, p)
            store_column(acc3, b_weight, out, o_out, m_i, c + 3, p)
    else:
        o_p = c + tl.arange(0, BLOCK_P)
        m_out = m_i[:, None] & (o_p < p)[None, :]
        tl.store(out + o_out[:, None] + o_p[None, :], acc * b_weight[:, None], mask=m_out)
