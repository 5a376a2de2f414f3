"""Device code: transport of a matrix, `P V` of any width, both axes from the same operands (MATH 2, 5)."""

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

ARGUMENTS = ["row_ptr", "col_ptr", "v_ptr", "out_ptr"]


@triton.jit(do_not_specialize=["n", "m", "d", "p"], do_not_specialize_on_alignment=ARGUMENTS)
def transport_kernel(
    q_ptr, k_ptr, row_ptr, col_ptr, v_ptr, out_ptr, n, m, d, p,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out_i = a_i sum_j 2^(q_i.k_j + w_i + u_j) b_j v_j` for BLOCK_M rows and BLOCK_P columns.

    Grid: (lanes * row blocks, column blocks). ``row`` and ``col`` are (B, 2, size): biases and weights.
    """
    lane, first = program_rows(n, BLOCK_M)
    o_i, o_j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    m_i = o_i < n - first
    c = tl.program_id(1) * BLOCK_P
    dtype = out_ptr.dtype.element_ty
    q = operand_base(q_ptr, lane, n, first, d if DIM == 0 else DIM, BLOCK_D)
    b_q = load_query(q, o_i, m_i, DIM, BLOCK_D)
    b_w, b_a = load_side(row_ptr, lane, n, first, o_i, m_i)
    acc, acc1, acc2, acc3 = empty_transport(BLOCK_M, BLOCK_N, BLOCK_P, dtype)
    for start in range(0, m, BLOCK_N):
        m_j = o_j < m - start
        k = operand_base(k_ptr, lane, m, start, d if DIM == 0 else DIM, BLOCK_D)
        b_u, b_b = load_side(col_ptr, lane, m, start, o_j, m_j)
        b_s = b_w[:, None] + b_u[None, :]
        b_s = add_products(b_s, b_q, q, k, o_i, m_i, n, o_j, m_j, m, d, DIM, BLOCK_D, PRECISION)
        b_e = kernel_entries(b_s)
        v = v_ptr + row_index(lane, m, start) * p
        acc, acc1, acc2, acc3 = add_transport(
            acc, acc1, acc2, acc3, b_e, b_b, v, o_j, m_j, c, p, BLOCK_P, PRECISION
        )
    out = out_ptr + row_index(lane, n, first) * p
    store_transport(acc, acc1, acc2, acc3, b_a, out, o_i, m_i, c, p, BLOCK_P)
