"""The Sinkhorn recursion of one lane: the stopped base, and the tail whose potentials are all kept.

One step is `u = log a - LSE_j(S + v)`, then `v = log b - LSE_i(S + u)`; eps is absorbed in the scores. The
base starts from v = 0. Nothing is centred: a centred tail would break `P(u_r, v_(r-1))` being row-stochastic.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ot_newton.attention.sweeps import Array, Lane, Sweeps


class Duals(NamedTuple):
    """Potentials of consecutive steps: `rows[r] = u_r` (R + 1, n), `cols[r] = v_r` (R + 1, m)."""

    rows: Array
    cols: Array


def log_mass(mass: Array) -> Array:
    """Log of a target, `-inf` where it is zero, with a finite derivative there."""
    active = mass > 0
    return jnp.where(active, jnp.log(jnp.where(active, mass, 1.0)), -jnp.inf)


def start(mass: Array) -> Array:
    """The starting potential: 0 on active tokens, `-inf` elsewhere."""
    return jnp.where(mass > 0, jnp.zeros_like(mass), -jnp.inf)


def sinkhorn_step(sweeps: Sweeps, log_a: Array, log_b: Array, v: Array) -> tuple[Array, Array]:
    """One step from v: two sweeps."""
    u = jnp.where(log_a > -jnp.inf, log_a - sweeps.row_lse(v), -jnp.inf)
    v = jnp.where(log_b > -jnp.inf, log_b - sweeps.col_lse(u), -jnp.inf)
    return u, v


def base_duals(sweeps: Sweeps, lane: Lane, steps: int) -> tuple[Array, Array]:
    """(u_T, v_T) after `steps` steps from v = 0: 2T sweeps, nothing stored, no gradient."""
    log_a, log_b = log_mass(lane.a), log_mass(lane.b)

    def body(_: int, pair: tuple[Array, Array]) -> tuple[Array, Array]:
        return sinkhorn_step(sweeps, log_a, log_b, pair[1])

    pair = jax.lax.fori_loop(0, steps, body, (start(lane.a), start(lane.b)))
    return jax.lax.stop_gradient(pair)  # type: ignore[no-any-return]


def base_history(sweeps: Sweeps, lane: Lane, steps: int) -> Duals:
    """All base potentials, u_0 (0 on active tokens) and v_0 = 0 first: O((n + m) T) memory."""
    log_a, log_b = log_mass(lane.a), log_mass(lane.b)

    def body(v: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        u, v = sinkhorn_step(sweeps, log_a, log_b, v)
        return v, (u, v)

    first = (start(lane.a), start(lane.b))
    _, (rows, cols) = jax.lax.scan(body, first[1], None, length=steps)
    return Duals(jnp.concatenate([first[0][None], rows]), jnp.concatenate([first[1][None], cols]))


def tail_duals(sweeps: Sweeps, lane: Lane, u: Array, v: Array, steps: int) -> Duals:
    """The base's (u, v) and the R further steps, stacked: 2R sweeps."""
    log_a, log_b = log_mass(lane.a), log_mass(lane.b)
    rows, cols = [u], [v]
    for _ in range(steps):
        u, v = sinkhorn_step(sweeps, log_a, log_b, v)
        rows.append(u)
        cols.append(v)
    return Duals(jnp.stack(rows), jnp.stack(cols))
