"""Device code: Hadamard-weighted transport, `(P . (A B^T)) W`, with a plain transport beside it (MATH 5)."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, PLR0917

import triton
import triton.language as tl

from ot_newton.backends.triton_kernels.tile import (
    add_products,
    add_transport,
    empty_transport,
    kernel_entries,
    load_query,
    load_side,
    operand_base,
    program_rows,
    row_index,
    store_transport,
)

SIZES = ["n", "m", "d", "rank", "p", "t", "blocks", "left_blocks", "right_blocks", "v_blocks"]
ARGUMENTS = ["row_ptr", "col_ptr", "left_ptr", "right_ptr", "v_ptr", "out_ptr", "t_ptr", "moved_ptr"]


@triton.jit
def factor_products(
    left, right, o_i, m_i, o_j, m_j, rank,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """`<left_i, right_j>` of one tile; ranks up to 4 and float64 on the FMA units (BLOCK_R == 1)."""
    b_h = tl.zeros([BLOCK_M, BLOCK_N], dtype)
    o_r = tl.arange(0, BLOCK_R)
    for r in range(0, rank, BLOCK_R):
        if BLOCK_R == 1:
            b_l = tl.load(left + o_i * rank + r, mask=m_i, other=0.0)
            b_r = tl.load(right + o_j * rank + r, mask=m_j, other=0.0)
            b_h += b_l[:, None] * b_r[None, :]
        else:
            m_r = o_r < rank - r
            at_left = left + r + o_i[:, None] * rank + o_r[None, :]
            at_right = right + r + o_j[:, None] * rank + o_r[None, :]
            b_l = tl.load(at_left, mask=m_i[:, None] & m_r[None, :], other=0.0)
            b_r = tl.load(at_right, mask=m_j[:, None] & m_r[None, :], other=0.0)
            b_h = tl.dot(b_l, tl.trans(b_r), b_h, input_precision=PRECISION)
    return b_h


@triton.jit
def block_base(ptr, lane, blocks, i_k, size, first, width):
    """Address of row ``first`` of block i_k of a (B, 1 or K, size, width) tensor."""
    return ptr + row_index(lane * blocks + tl.minimum(i_k, blocks - 1), size, first) * width


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ARGUMENTS)
def hadamard_kernel(
    q_ptr, k_ptr, row_ptr, col_ptr, left_ptr, right_ptr, v_ptr, out_ptr, t_ptr, moved_ptr,
    n, m, d, rank, p, t, blocks, left_blocks, right_blocks, v_blocks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out_ki = a_i sum_j P'_ij <left_ki, right_kj> b_j v_kj`, P' the plan without weights.

    Grid: (lanes * row blocks, column blocks, K). ``left`` is (B, 1 or K, n, rank), and so on. BLOCK_T > 0
    also writes `moved_i = a_i sum_j P'_ij b_j t_j` from the same exponentials (one column block, K = 1).
    """
    lane, first = program_rows(n, BLOCK_M)
    o_i, o_j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    m_i = o_i < n - first
    c = tl.program_id(1) * BLOCK_P
    i_k = tl.program_id(2)
    dtype = out_ptr.dtype.element_ty
    q = operand_base(q_ptr, lane, n, first, d if DIM == 0 else DIM, BLOCK_D)
    b_q = load_query(q, o_i, m_i, DIM, BLOCK_D)
    b_w, b_a = load_side(row_ptr, lane, n, first, o_i, m_i)
    left = block_base(left_ptr, lane, left_blocks, i_k, n, first, rank)
    acc, acc1, acc2, acc3 = empty_transport(BLOCK_M, BLOCK_N, BLOCK_P, dtype)
    mov, mov1, mov2, mov3 = empty_transport(BLOCK_M, BLOCK_N, BLOCK_T, dtype)
    for start in range(0, m, BLOCK_N):
        m_j = o_j < m - start
        k = operand_base(k_ptr, lane, m, start, d if DIM == 0 else DIM, BLOCK_D)
        b_u, b_b = load_side(col_ptr, lane, m, start, o_j, m_j)
        b_s = b_w[:, None] + b_u[None, :]
        b_s = add_products(b_s, b_q, q, k, o_i, m_i, n, o_j, m_j, m, d, DIM, BLOCK_D, PRECISION)
        b_e = kernel_entries(b_s)
        if BLOCK_T > 0:
            beside = t_ptr + row_index(lane, m, start) * t
            mov, mov1, mov2, mov3 = add_transport(
                mov, mov1, mov2, mov3, b_e, b_b, beside, o_j, m_j, 0, t, BLOCK_T, PRECISION
            )
        right = block_base(right_ptr, lane, right_blocks, i_k, m, start, rank)
        b_e *= factor_products(
            left, right, o_i, m_i, o_j, m_j, rank, BLOCK_M, BLOCK_N, BLOCK_R, PRECISION, dtype
        )
        v = block_base(v_ptr, lane, v_blocks, i_k, m, start, p)
        acc, acc1, acc2, acc3 = add_transport(
            acc, acc1, acc2, acc3, b_e, b_b, v, o_j, m_j, c, p, BLOCK_P, PRECISION
        )
    out = block_base(out_ptr, lane, blocks, i_k, n, first, p)
    store_transport(acc, acc1, acc2, acc3, b_a, out, o_i, m_i, c, p, BLOCK_P)
    if BLOCK_T > 0:
        beside = moved_ptr + row_index(lane, n, first) * t
        store_transport(mov, mov1, mov2, mov3, b_a, beside, o_i, m_i, 0, t, BLOCK_T)
