"""The dense reference: the whole score matrix of one lane, any dtype, O(nm) memory."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from ot_newton.attention.sweeps import Array, dot, dot_t, log_sum_exp


def band_mask(n: int, m: int, bandwidth: int, q_ids: Array | None, k_ids: Array | None) -> Array:
    """The support: `|i - j| <= bandwidth` and, where given, equal segment numbers that are not negative."""
    mask = jnp.abs(jnp.arange(n)[:, None] - jnp.arange(m)[None, :]) <= bandwidth
    if q_ids is not None and k_ids is not None:
        mask = mask & (q_ids[:, None] == k_ids[None, :]) & (q_ids[:, None] >= 0)
    return mask


@dataclass(frozen=True)
class DenseSweeps:
    """`Sweeps` on a stored score matrix, `-inf` outside the support."""

    q: Array
    k: Array
    scores: Array

    @classmethod
    def make(
        cls, q: Array, k: Array, q_ids: Array | None, k_ids: Array | None, bandwidth: int
    ) -> DenseSweeps:
        """Form the scores once."""
        mask = band_mask(q.shape[0], k.shape[0], bandwidth, q_ids, k_ids)
        return cls(q, k, jnp.where(mask, dot_t(q, k), -jnp.inf))

    def plan(self, u: Array, v: Array) -> Array:
        """The matrix `P(u, v)`."""
        return jnp.exp(self.scores + u[:, None] + v[None, :])

    def row_lse(self, v: Array) -> Array:
        """See `Sweeps`."""
        return log_sum_exp(self.scores + v[None, :], axis=1)

    def col_lse(self, u: Array) -> Array:
        """See `Sweeps`."""
        return log_sum_exp(self.scores + u[:, None], axis=0)

    def row_apply(self, u: Array, v: Array, x: Array) -> Array:
        """See `Sweeps`."""
        return dot(self.plan(u, v), x)

    def col_apply(self, u: Array, v: Array, x: Array) -> Array:
        """See `Sweeps`."""
        return dot(self.plan(u, v).T, x)

    def score_gradients(self, u: Array, v: Array, left: Array, right: Array) -> tuple[Array, Array]:
        """See `Sweeps`."""
        z = self.plan(u, v) * dot_t(left, right)
        return dot(z, self.k), dot(z.T, self.q)

    def moments(self, u: Array, v: Array, left: Array, right: Array) -> tuple[Array, Array]:
        """See `Sweeps`."""
        z = self.plan(u, v) * dot_t(left, right)
        return jnp.sum(jnp.abs(z)), jnp.sum(z * z)
