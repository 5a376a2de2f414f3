"""A band with a border: dustbin slots whose row and column meet every token, around any backend's band.

`P = [[band, n x F], [F x m, F x F]]`. The border costs O(L F) time and memory; the sweeps over the band are
those of the backend, so their number does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from ot_newton.attention.sweeps import Array, Sweeps, dot, dot_t, log_sum_exp


@dataclass(frozen=True)
class BorderedSweeps:
    """`Sweeps` of the augmented problem; the F slots stand last in every vector.

    Attributes:
        inner: the sweeps over the band.
        q: band queries (n, d).
        k: band keys (m, d).
        q_slots: slot queries (F, d).
        k_slots: slot keys (F, d).
    """

    inner: Sweeps
    q: Array
    k: Array
    q_slots: Array
    k_slots: Array

    def _split(self, rows: Array, cols: Array) -> tuple[Array, Array, Array, Array]:
        n, m = self.q.shape[0], self.k.shape[0]
        return rows[:n], rows[n:], cols[:m], cols[m:]

    def _right(self) -> Array:
        return dot_t(self.q, self.k_slots)

    def _bottom(self) -> Array:
        return dot_t(self.q_slots, self.k)

    def _corner(self) -> Array:
        return dot_t(self.q_slots, self.k_slots)

    def row_lse(self, v: Array) -> Array:
        """See `Sweeps`."""
        m = self.k.shape[0]
        border = log_sum_exp(self._right() + v[None, m:], axis=1)
        band = log_sum_exp(jnp.stack([self.inner.row_lse(v[:m]), border]), axis=0)
        slots = jnp.concatenate([self._bottom() + v[None, :m], self._corner() + v[None, m:]], axis=1)
        return jnp.concatenate([band, log_sum_exp(slots, axis=1)])

    def col_lse(self, u: Array) -> Array:
        """See `Sweeps`."""
        n = self.q.shape[0]
        border = log_sum_exp(self._bottom() + u[n:, None], axis=0)
        band = log_sum_exp(jnp.stack([self.inner.col_lse(u[:n]), border]), axis=0)
        slots = jnp.concatenate([self._right() + u[:n, None], self._corner() + u[n:, None]], axis=0)
        return jnp.concatenate([band, log_sum_exp(slots, axis=0)])

    def _border(self, u: Array, v: Array) -> tuple[Array, Array, Array]:
        """The three border parts of P: right (n, F), bottom (F, m), corner (F, F)."""
        u_band, u_slot, v_band, v_slot = self._split(u, v)
        right = jnp.exp(self._right() + u_band[:, None] + v_slot[None, :])
        bottom = jnp.exp(self._bottom() + u_slot[:, None] + v_band[None, :])
        return right, bottom, jnp.exp(self._corner() + u_slot[:, None] + v_slot[None, :])

    def row_apply(self, u: Array, v: Array, x: Array) -> Array:
        """See `Sweeps`."""
        n, m = self.q.shape[0], self.k.shape[0]
        right, bottom, corner = self._border(u, v)
        band = self.inner.row_apply(u[:n], v[:m], x[:m]) + dot(right, x[m:])
        return jnp.concatenate([band, dot(bottom, x[:m]) + dot(corner, x[m:])])

    def col_apply(self, u: Array, v: Array, x: Array) -> Array:
        """See `Sweeps`."""
        n, m = self.q.shape[0], self.k.shape[0]
        right, bottom, corner = self._border(u, v)
        band = self.inner.col_apply(u[:n], v[:m], x[:n]) + dot(bottom.T, x[n:])
        return jnp.concatenate([band, dot(right.T, x[:n]) + dot(corner.T, x[n:])])

    def _weighted_border(self, u: Array, v: Array, left: Array, right: Array) -> tuple[Array, Array, Array]:
        """The border of `Z = P * (left right')`."""
        l_band, l_slot, r_band, r_slot = self._split(left, right)
        p_right, p_bottom, p_corner = self._border(u, v)
        return (
            p_right * dot_t(l_band, r_slot),
            p_bottom * dot_t(l_slot, r_band),
            p_corner * dot_t(l_slot, r_slot),
        )

    def score_gradients(self, u: Array, v: Array, left: Array, right: Array) -> tuple[Array, Array]:
        """See `Sweeps`."""
        n, m = self.q.shape[0], self.k.shape[0]
        dq, dk = self.inner.score_gradients(u[:n], v[:m], left[:n], right[:m])
        z_right, z_bottom, z_corner = self._weighted_border(u, v, left, right)
        dq_slots = dot(z_bottom, self.k) + dot(z_corner, self.k_slots)
        dk_slots = dot(z_right.T, self.q) + dot(z_corner.T, self.q_slots)
        rows = jnp.concatenate([dq + dot(z_right, self.k_slots), dq_slots])
        return rows, jnp.concatenate([dk + dot(z_bottom.T, self.q_slots), dk_slots])

    def moments(self, u: Array, v: Array, left: Array, right: Array) -> tuple[Array, Array]:
        """See `Sweeps`."""
        n, m = self.q.shape[0], self.k.shape[0]
        total, squares = self.inner.moments(u[:n], v[:m], left[:n], right[:m])
        for part in self._weighted_border(u, v, left, right):
            total, squares = total + jnp.sum(jnp.abs(part)), squares + jnp.sum(part * part)
        return total, squares
