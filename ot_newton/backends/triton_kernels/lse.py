"""Device code: row-wise base-2 log-sum-exp of a biased dot product (MATH 2)."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN201, PLR0917

import triton
import triton.language as tl

from ot_newton.backends.triton_kernels.tile import (
    NEVER,
    add_products,
    load_query,
    operand_base,
    program_rows,
    row_index,
)

GUARD_LOW = tl.constexpr(2.0**-60)
GUARD_HIGH = tl.constexpr(2.0**60)
ARGUMENTS = ["bias_ptr", "weight_ptr", "stabilizer_ptr", "lse_ptr", "sum_ptr", "trips_ptr"]
"""Pointers whose alignment is no part of a kernel's key; q and k are packed by the launcher, aligned."""


@triton.jit
def load_summed(bias_ptr, weight_ptr, row, o_j, m_j):
    """Bias, `NEVER` where the weight is 0, and weight of the side summed over: [BLOCK_N] each."""
    b_weight = tl.load(weight_ptr + row + o_j, mask=m_j, other=0.0)
    b_bias = tl.load(bias_ptr + row + o_j, mask=m_j, other=0.0)
    return tl.where(b_weight > 0, b_bias, NEVER), b_weight


@triton.jit(do_not_specialize=["n", "m", "d"], do_not_specialize_on_alignment=ARGUMENTS)
def lse_kernel(
    q_ptr, k_ptr, bias_ptr, weight_ptr, stabilizer_ptr, lse_ptr, sum_ptr, trips_ptr, n, m, d,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DIM: tl.constexpr,
    PRECISION: tl.constexpr, WARM: tl.constexpr,
):  # fmt: skip
    """`log2 sum_j weight_j 2^(q_i.k_j + bias_j)` of BLOCK_M rows.

    WARM: one sweep of `sum_j weight_j 2^(q_i.k_j + bias_j + stabilizer_i)`, without a running maximum; a
    program one of whose sums fails `2^-60 <= sum <= 2^60` (NaN fails) counts itself in ``trips``, writes
    NaN for its sums and sweeps again with the running maximum, all on the device. Else: running maximum.

    Terms below the smallest normal number of a warm sum are at most 2^-66 of it and may vanish.
    """
    lane, first = program_rows(n, BLOCK_M)
    o_i, o_j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    m_i = o_i < n - first
    row = row_index(lane, n, first)
    dtype = lse_ptr.dtype.element_ty
    q = operand_base(q_ptr, lane, n, first, d if DIM == 0 else DIM, BLOCK_D)
    b_q = load_query(q, o_i, m_i, DIM, BLOCK_D)
    b_lse = tl.zeros([BLOCK_M], dtype)
    sweep_again = True
    if WARM:
        b_w = tl.load(stabilizer_ptr + row + o_i, mask=m_i, other=0.0)
        b_part = tl.zeros([BLOCK_M, BLOCK_N], dtype)
        for start in range(0, m, BLOCK_N):
            m_j = o_j < m - start
            k = operand_base(k_ptr, lane, m, start, d if DIM == 0 else DIM, BLOCK_D)
            b_u, b_weight = load_summed(bias_ptr, weight_ptr, row_index(lane, m, start), o_j, m_j)
            b_s = b_w[:, None] + b_u[None, :]
            b_s = add_products(b_s, b_q, q, k, o_i, m_i, n, o_j, m_j, m, d, DIM, BLOCK_D, PRECISION)
            b_part += tl.exp2(b_s) * b_weight[None, :]
        b_sum = tl.sum(b_part, axis=1)
        m_ok = (b_sum >= GUARD_LOW) & (b_sum <= GUARD_HIGH)
        sweep_again = tl.sum((m_i & (m_ok == 0)).to(tl.int32), axis=0) > 0
        b_lse = tl.log2(b_sum) - b_w
        tl.store(sum_ptr + row + o_i, tl.where(sweep_again, float("nan"), b_sum), mask=m_i)
    if sweep_again:
        b_top = tl.full([BLOCK_M], NEVER, dtype)
        b_part = tl.zeros([BLOCK_M, BLOCK_N], dtype)
        for start in range(0, m, BLOCK_N):
            m_j = o_j < m - start
            k = operand_base(k_ptr, lane, m, start, d if DIM == 0 else DIM, BLOCK_D)
            b_u, b_weight = load_summed(bias_ptr, weight_ptr, row_index(lane, m, start), o_j, m_j)
            b_u += tl.log2(tl.where(b_weight > 0, b_weight, 1.0))
            b_s = tl.zeros([BLOCK_M, BLOCK_N], dtype) + b_u[None, :]
            b_s = add_products(b_s, b_q, q, k, o_i, m_i, n, o_j, m_j, m, d, DIM, BLOCK_D, PRECISION)
            b_new = tl.maximum(b_top, tl.max(b_s, axis=1))
            b_part = b_part * tl.exp2(b_top - b_new)[:, None] + tl.exp2(b_s - b_new[:, None])
            b_top = b_new
        b_lse = b_top + tl.log2(tl.sum(b_part, axis=1))
        b_lse = tl.where(b_lse < 0.5 * NEVER, float("-inf"), b_lse)
        if WARM:
            tl.atomic_add(trips_ptr, 1)
    tl.store(lse_ptr + row + o_i, b_lse, mask=m_i)
