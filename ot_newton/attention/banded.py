"""The band in plain JAX: O(L W) time, O(L) memory beyond one tile, any platform and dtype.

Rows go in blocks; a block of B rows meets the B + 2W columns of its window, sliced from a padded copy. The
band is symmetric, so a sweep over columns is the same code with queries and keys exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ot_newton.attention.sweeps import Array, dot, dot_t, log_sum_exp

# A tile of rows x (rows + 2 W) wastes its two corner triangles: few rows waste less, but each block costs
# a fixed time, so the block grows with the band.
_BLOCK_LOW, _BLOCK_HIGH = 64, 256


def block_rows(n: int, bandwidth: int) -> int:
    """Rows of one tile: a power of two near the bandwidth, within limits and n rounded up to 8."""
    block = _BLOCK_LOW
    while block < min(bandwidth, _BLOCK_HIGH):
        block *= 2
    return min(block, -(-n // 8) * 8)


@dataclass(frozen=True)
class _Half:
    """One orientation of the band: rows in blocks, columns padded for the windows."""

    n: int
    bandwidth: int
    block: int
    rows: Array
    cols: Array
    row_ids: Array | None = None
    col_ids: Array | None = None

    @classmethod
    def make(
        cls, rows: Array, cols: Array, row_ids: Array | None, col_ids: Array | None, bandwidth: int
    ) -> _Half:
        n = rows.shape[0]
        half = cls(n, bandwidth, block_rows(n, bandwidth), rows, cols)
        ids = None if row_ids is None else half.split(jnp.where(row_ids < 0, -1, row_ids), -1)
        other = None if col_ids is None else half.pad(jnp.where(col_ids < 0, -2, col_ids), -2)
        return replace(half, rows=half.split(rows, 0), cols=half.pad(cols, 0), row_ids=ids, col_ids=other)

    @property
    def blocks(self) -> int:
        """Number of row blocks."""
        return -(-self.n // self.block)

    def split(self, x: Array, fill: float) -> Array:
        """Row data as (blocks, block, ...), padded by `fill`."""
        padding = [(0, self.blocks * self.block - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding, constant_values=fill).reshape(self.blocks, self.block, *x.shape[1:])

    def pad(self, x: Array, fill: float) -> Array:
        """Column data with W entries of `fill` before, and as many after as the last window reaches."""
        reach = self.blocks * self.block + self.bandwidth
        padding = [(self.bandwidth, max(0, reach - x.shape[0]))] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding, constant_values=fill)

    def window(self, padded: Array, start: Array) -> Array:
        """The columns that the block of rows from `start` meets."""
        return jax.lax.dynamic_slice_in_dim(padded, start, self.block + 2 * self.bandwidth)

    def scores(self, rows: Array, row_ids: Array | None, cols: Array, start: Array) -> Array:
        """One tile of scores, `-inf` outside the support."""
        scores = dot_t(rows, cols)
        offset = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) - jax.lax.broadcasted_iota(
            jnp.int32, scores.shape, 0
        )
        mask = (offset >= 0) & (offset <= 2 * self.bandwidth)
        if row_ids is not None and self.col_ids is not None:
            mask = mask & (row_ids[:, None] == self.window(self.col_ids, start)[None, :])
        return jnp.where(mask, scores, -jnp.inf)

    def scan(self, body: Callable[..., Any], init: Any, row_data: tuple[Array, ...]) -> tuple[Any, Any]:
        """Run `body(carry, start, rows, cols, scores, *row_data)` over the blocks; outputs are joined."""

        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            start, rows, ids, data = x
            cols = self.window(self.cols, start)
            return body(carry, start, rows, cols, self.scores(rows, ids, cols, start), *data)  # type: ignore[no-any-return]

        starts = jnp.arange(self.blocks, dtype=jnp.int32) * self.block
        carry, out = jax.lax.scan(step, init, (starts, self.rows, self.row_ids, row_data))
        if out is not None:
            out = out.reshape(-1, *out.shape[2:])[: self.n]
        return carry, out

    def lse(self, v: Array) -> Array:
        """`log sum_j exp(S_ij + v_j)` of each row."""
        padded = self.pad(v, -jnp.inf)

        def body(_: None, start: Array, _rows: Array, _cols: Array, scores: Array) -> tuple[None, Array]:
            return None, log_sum_exp(scores + self.window(padded, start)[None, :], axis=1)

        return self.scan(body, None, ())[1]

    def apply(self, u: Array, v: Array, x: Array) -> Array:
        """`P x` by rows."""
        v_padded, x_padded = self.pad(v, -jnp.inf), self.pad(x, 0)

        def body(
            _: None, start: Array, _rows: Array, _cols: Array, scores: Array, u_block: Array
        ) -> tuple[None, Array]:
            plan = jnp.exp(scores + u_block[:, None] + self.window(v_padded, start)[None, :])
            return None, dot(plan, self.window(x_padded, start))

        return self.scan(body, None, (self.split(u, -jnp.inf),))[1]


@dataclass(frozen=True)
class BandedSweeps:
    """`Sweeps` over the band by scans in plain JAX."""

    by_row: _Half
    by_col: _Half

    @classmethod
    def make(
        cls, q: Array, k: Array, q_ids: Array | None, k_ids: Array | None, bandwidth: int
    ) -> BandedSweeps:
        """Pad both sides once."""
        return cls(_Half.make(q, k, q_ids, k_ids, bandwidth), _Half.make(k, q, k_ids, q_ids, bandwidth))

    def row_lse(self, v: Array) -> Array:
        """See `Sweeps`."""
        return self.by_row.lse(v)

    def col_lse(self, u: Array) -> Array:
        """See `Sweeps`."""
        return self.by_col.lse(u)

    def row_apply(self, u: Array, v: Array, x: Array) -> Array:
        """See `Sweeps`."""
        return self.by_row.apply(u, v, x)

    def col_apply(self, u: Array, v: Array, x: Array) -> Array:
        """See `Sweeps`."""
        return self.by_col.apply(v, u, x)

    def score_gradients(self, u: Array, v: Array, left: Array, right: Array) -> tuple[Array, Array]:
        """See `Sweeps`: both gradients from one tile, that of the keys carried along the scan."""
        half = self.by_row
        v_padded, right_padded = half.pad(v, -jnp.inf), half.pad(right, 0)

        def body(
            dk: Array, start: Array, rows: Array, cols: Array, scores: Array, u_block: Array, l_block: Array
        ) -> tuple[Array, Array]:
            plan = jnp.exp(scores + u_block[:, None] + half.window(v_padded, start)[None, :])
            z = plan * dot_t(l_block, half.window(right_padded, start))
            updated = half.window(dk, start) + dot(z.T, rows)
            return jax.lax.dynamic_update_slice_in_dim(dk, updated, start, 0), dot(z, cols)

        rows = (half.split(u, -jnp.inf), half.split(left, 0))
        dk, dq = half.scan(body, jnp.zeros_like(half.cols), rows)
        m = self.by_col.n
        return dq, dk[half.bandwidth : half.bandwidth + m]

    def moments(self, u: Array, v: Array, left: Array, right: Array) -> tuple[Array, Array]:
        """See `Sweeps`."""
        half = self.by_row
        v_padded, right_padded = half.pad(v, -jnp.inf), half.pad(right, 0)

        def body(
            sums: Array,
            start: Array,
            _rows: Array,
            _cols: Array,
            scores: Array,
            u_block: Array,
            l_block: Array,
        ) -> tuple[Array, None]:
            plan = jnp.exp(scores + u_block[:, None] + half.window(v_padded, start)[None, :])
            z = plan * dot_t(l_block, half.window(right_padded, start))
            return sums + jnp.stack([jnp.sum(jnp.abs(z)), jnp.sum(z * z)]), None

        rows = (half.split(u, -jnp.inf), half.split(left, 0))
        sums, _ = half.scan(body, jnp.zeros((2,), u.dtype), rows)
        return sums[0], sums[1]
