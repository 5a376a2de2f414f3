"""Device code of the Pallas TPU kernels: one tile of the band at a time.

Grid: (row block, offset). Row block `i` meets the column blocks `i + offset - reach`, `offset = 0 .. 2
reach`; the index maps clip at the ends, so every kernel guards `0 <= column block < count`: a clipped block
would be counted twice. Row vectors are (B, 1) blocks, column vectors (1, B) blocks; B is a multiple of 128, a
legal tile on every axis. Products of float32 ask for full precision: the default rounds operands to bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ot_newton.attention.sweeps import HIGHEST, Array

Ref = Any


@dataclass(frozen=True)
class BandGrid:
    """The static band: its half-width, the tile side and the number of blocks on each side."""

    bandwidth: int
    block: int
    row_blocks: int
    col_blocks: int

    @property
    def reach(self) -> int:
        """Blocks that the band reaches to each side of the diagonal block."""
        return -(-self.bandwidth // self.block)

    @property
    def offsets(self) -> int:
        """Column blocks that one row block meets."""
        return 2 * self.reach + 1


def _dot(x: Array, y: Array, contract: tuple[int, int]) -> Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision=HIGHEST, preferred_element_type=x.dtype)


def _tile_scores(refs: tuple[Ref, Ref, Ref, Ref], i: Array, j: Array, grid: BandGrid) -> Array:
    """Scores of tile (i, j), (B, B), `-inf` outside the band and across segments."""
    q_ref, k_ref, q_ids_ref, k_ids_ref = refs
    scores = _dot(q_ref[...], k_ref[...], (1, 1))
    rows = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    cols = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    distance = jnp.abs((i - j) * grid.block + rows - cols)
    mask = (distance <= grid.bandwidth) & (q_ids_ref[...] == k_ids_ref[...])
    return jnp.where(mask, scores, -jnp.inf)


def _position(grid: BandGrid) -> tuple[Array, Array, Array, Array]:
    """(row block, offset, column block, whether that column block exists)."""
    i, offset = pl.program_id(0), pl.program_id(1)
    j = i + offset - grid.reach
    return i, offset, j, (j >= 0) & (j < grid.col_blocks)


def lse_kernel(
    q_ref: Ref, k_ref: Ref, q_ids_ref: Ref, k_ids_ref: Ref, v_ref: Ref,
    out_ref: Ref, top_ref: Ref, sum_ref: Ref, *, grid: BandGrid,
) -> None:  # fmt: skip
    """Online `log sum_j exp(S_ij + v_j)`: a running maximum and a rescaled sum in scratch."""
    i, offset, j, inside = _position(grid)

    @pl.when(offset == 0)
    def _start() -> None:
        top_ref[...] = jnp.full_like(top_ref, -jnp.inf)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(inside)
    def _add() -> None:
        scores = _tile_scores((q_ref, k_ref, q_ids_ref, k_ids_ref), i, j, grid) + v_ref[...]
        before = top_ref[...]
        top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        finite = jnp.where(top == -jnp.inf, 0.0, top)
        tile_sum = jnp.sum(jnp.exp(scores - finite), axis=1, keepdims=True)
        sum_ref[...] = sum_ref[...] * jnp.exp(before - finite) + tile_sum
        top_ref[...] = top

    @pl.when(offset == grid.offsets - 1)
    def _finish() -> None:
        top = top_ref[...]
        out_ref[...] = jnp.where(top == -jnp.inf, 0.0, top) + jnp.log(sum_ref[...])


def matvec_kernel(
    q_ref: Ref, k_ref: Ref, q_ids_ref: Ref, k_ids_ref: Ref, u_ref: Ref, v_ref: Ref, x_ref: Ref,
    out_ref: Ref, *, grid: BandGrid,
) -> None:  # fmt: skip
    """`P x` for one vector: multiply and reduce over lanes, no matrix unit."""
    i, offset, j, inside = _position(grid)

    @pl.when(offset == 0)
    def _start() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(inside)
    def _add() -> None:
        scores = _tile_scores((q_ref, k_ref, q_ids_ref, k_ids_ref), i, j, grid)
        plan = jnp.exp(scores + u_ref[...] + v_ref[...])
        out_ref[...] += jnp.sum(plan * x_ref[...], axis=1, keepdims=True)


def matmul_kernel(
    q_ref: Ref, k_ref: Ref, q_ids_ref: Ref, k_ids_ref: Ref, u_ref: Ref, v_ref: Ref, x_ref: Ref,
    out_ref: Ref, *, grid: BandGrid,
) -> None:  # fmt: skip
    """`P x` for the columns of x (B, p): the output, and dV with the sides exchanged."""
    i, offset, j, inside = _position(grid)

    @pl.when(offset == 0)
    def _start() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(inside)
    def _add() -> None:
        scores = _tile_scores((q_ref, k_ref, q_ids_ref, k_ids_ref), i, j, grid)
        plan = jnp.exp(scores + u_ref[...] + v_ref[...])
        out_ref[...] += _dot(plan, x_ref[...], (1, 0))


def gradients_kernel(*refs: Ref, grid: BandGrid) -> None:
    """Both score gradients from one visit of each tile `Z = P * (left right')`.

    dQ accumulates over the offsets of its row block. A column block collects from the row blocks
    `j - reach .. j + reach`, so its sum lives in a ring of `2 reach + 1` scratch slots, opened at its first
    row block and written out at offset 0 of its last one, `i = j + reach`. The grid has `reach` row blocks
    more than there are column blocks, which only empty the ring.

    Args:
        *refs: q, k, q_ids, k_ids, u, v, left (B, r), right (B, r); outputs dq, dk (B, d); the ring.
        grid: the static band.
    """
    q_ref, k_ref, q_ids_ref, k_ids_ref, u_ref, v_ref, left_ref, right_ref, dq_ref, dk_ref, ring_ref = refs
    i, offset, j, inside = _position(grid)
    slot = jax.lax.rem(jnp.maximum(j, 0), jnp.int32(grid.offsets))
    present = i < grid.row_blocks

    @pl.when(inside & ((offset == grid.offsets - 1) | (i == 0)))
    def _open() -> None:
        ring_ref[slot] = jnp.zeros(ring_ref.shape[1:], ring_ref.dtype)

    @pl.when(present & (offset == 0))
    def _start() -> None:
        dq_ref[...] = jnp.zeros_like(dq_ref)

    @pl.when(inside & present)
    def _add() -> None:
        scores = _tile_scores((q_ref, k_ref, q_ids_ref, k_ids_ref), i, j, grid)
        plan = jnp.exp(scores + u_ref[...] + v_ref[...])
        z = plan * _dot(left_ref[...], right_ref[...], (1, 1))
        dq_ref[...] += _dot(z, k_ref[...], (1, 0))
        ring_ref[slot] += _dot(z, q_ref[...], (0, 0))

    @pl.when(inside & (offset == 0))
    def _close() -> None:
        dk_ref[...] = ring_ref[slot]
