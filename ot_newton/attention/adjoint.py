r"""The exact adjoint of the refinement tail, from one resident tile per pair.

With `P(p, q) = exp(S + u_p 1' + 1 v_q')`, the output `O = P(R, R) V`, its cotangent `Obar`, `G = Obar V'`:

    vbar_R = colsum(P * G) = <V_j, dV_j>            (free once dV = P' Obar is known)
    ubar_r = [r = R] <Obar_i, O_i> - P(r, r) (vbar_r / b)
    vbar_(r-1) = - P(r, r-1)' (ubar_r / a)
    Sbar = P(R, R) * G - sum_r P(r, r) * 1 (vbar_r / b)' - sum_r P(r, r-1) * (ubar_r / a) 1'

`P(r, r) / b` is column-stochastic and `P(r, r-1) / a` row-stochastic whether or not the recursion has
converged. Every factor of this staircase is a diagonal scaling of the one tile `P = P(R, R)`,
`P(p, q) = diag(e^(u_p - u_R)) P diag(e^(v_q - v_R))`, so `Sbar = P * (left right')` has rank p + 2R.
Sweeps: dV, R products with P, R - 1 with P', one for dQ and dK together: 2R + 1, and one more for vbar_0, the
cotangent that stopping the base drops (R = 2: five and six). Derivation: ATTENTION anchor 1.3, after Forde
(arXiv 2605.08123), for general targets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ot_newton.attention.duals import Duals
from ot_newton.attention.sweeps import Array, Lane, Sweeps


class TailAdjoint(NamedTuple):
    """Cotangents of the tail and the factors of its staircase.

    Leading axes of all arrays are those of the call, then heads. With dustbin slots, vectors over queries
    (keys) have the slots last.

    Attributes:
        dq: cotangent of q, (..., n, d).
        dk: cotangent of k, (..., m, d).
        dv: cotangent of v, (..., m, p).
        da: cotangent of the row targets per head, (..., n); zero where the target is zero.
        db: cotangent of the column targets per head, (..., m).
        dustbin: cotangents of the dustbin's tokens (a `Dustbin`), or None.
        row_cotangents: ubar_1 .. ubar_R, (..., R, n).
        column_cotangents: vbar_0 .. vbar_R, (..., R + 1, m); the first is what stopping the base drops.
        row_factors: e^(u_r - u_R), r = 1 .. R, (..., R, n); 0 where the target is zero.
        column_factors: e^(v_r - v_R), r = 0 .. R, (..., R + 1, m).

    Example:
        >>> import jax.numpy as jnp
        >>> from ot_newton.attention import tail_adjoint
        >>> q = jnp.ones((1, 4, 2))
        >>> adjoint = tail_adjoint(q, q, q, q, bandwidth=3, tail_steps=1)
        >>> adjoint.dv.shape, bool(jnp.allclose(adjoint.dv, 1)), adjoint.dustbin is None
        ((1, 4, 2), True, True)
    """

    dq: Array
    dk: Array
    dv: Array
    da: Array
    db: Array
    dustbin: Any
    row_cotangents: Array
    column_cotangents: Array
    row_factors: Array
    column_factors: Array


class Pullback(NamedTuple):
    """What the tail's pullback yields for one lane; `base_row`, `base_col` are cotangents of (u_T, v_T)."""

    score_q: Array
    score_k: Array
    dv: Array
    da: Array
    db: Array
    rows: Array
    cols: Array
    base_row: Array
    base_col: Array | None


def divide(x: Array, mass: Array) -> Array:
    """`x / mass`, 0 where the mass is zero."""
    return jnp.where(mass > 0, x / jnp.where(mass > 0, mass, 1.0), 0.0)


def ratio(log_top: Array, log_bottom: Array, shift: Array | float = 0.0) -> Array:
    """`exp(log_top - log_bottom + shift)`, 0 where both are `-inf`."""
    active = log_bottom > -jnp.inf
    return jnp.where(active, jnp.exp(jnp.where(active, log_top - log_bottom, 0.0) + shift), 0.0)


def step_back(sweeps: Sweeps, lane: Lane, u: Array, v: Array, col: Array, direct: Array | float) -> Array:
    """Ubar of one step from its vbar: `direct - P(u, v) (vbar / b)`. One sweep."""
    return direct - sweeps.row_apply(u, v, divide(col, lane.b))


def step_back_previous(sweeps: Sweeps, lane: Lane, u: Array, v_previous: Array, row: Array) -> Array:
    """Vbar of the previous step: `- P(u, v_previous)' (ubar / a)`. One sweep."""
    return -sweeps.col_apply(u, v_previous, divide(row, lane.a))


def staircase(
    lane: Lane, duals: Duals, rows: Array, cols: Array, u_ref: Array, v_ref: Array
) -> tuple[Array, Array]:
    """(left, right) of `- sum_r P(r, r) * 1 (vbar_r / b)' + P(r, r-1) * (ubar_r / a) 1'` on one tile.

    Args:
        lane: targets.
        duals: u_0 .. u_R and v_0 .. v_R (K + 1 steps).
        rows: ubar_1 .. ubar_K, (K, n).
        cols: vbar_1 .. vbar_K, (K, m).
        u_ref: row potential of the tile P(u_ref, v_ref).
        v_ref: its column potential.

    Returns:
        left (n, 2K) and right (m, 2K). A step's gauge against the tile's (u + c, v - c is the same plan) is
        moved from the row to the column factor, so that neither overflows.
    """
    active = u_ref > -jnp.inf
    drift = jnp.where(active, duals.rows[1:] - jnp.where(active, u_ref, 0.0), 0.0)
    gauge = (jnp.sum(drift, axis=1) / jnp.maximum(jnp.sum(active), 1))[:, None]
    row_scale = ratio(duals.rows[1:], u_ref, -gauge)
    same = ratio(duals.cols[1:], v_ref, gauge) * divide(cols, lane.b)
    before = ratio(duals.cols[:-1], v_ref, gauge)
    left = jnp.concatenate([-row_scale, -row_scale * divide(rows, lane.a)])
    return left.T, jnp.concatenate([same, before]).T


def tail_pullback(
    sweeps: Sweeps, lane: Lane, duals: Duals, output: Array, cotangent: Array, base: bool
) -> Pullback:
    """Pull the output's cotangent back through the tail; see the module's head.

    Args:
        sweeps: the lane's sweeps.
        lane: the lane.
        duals: u_0 .. u_R, v_0 .. v_R of the tail.
        output: O (n, p).
        cotangent: Obar (n, p).
        base: whether to spend one sweep on vbar_0.

    Returns:
        The cotangents, `rows` (R, n), `cols` (R, m) for r = 1 .. R, and those of the base's potentials.
    """
    steps = duals.rows.shape[0] - 1
    u_last, v_last = duals.rows[-1], duals.cols[-1]
    dv = sweeps.col_apply(u_last, v_last, cotangent)
    col: Array | None = jnp.sum(lane.v * dv, axis=1)
    direct = jnp.sum(cotangent * output, axis=1)
    rows: list[Array] = []
    cols: list[Array] = []
    for r in range(steps, 0, -1):
        row = step_back(sweeps, lane, duals.rows[r], duals.cols[r], col, direct if r == steps else 0.0)
        rows.insert(0, row)
        cols.insert(0, col)
        wanted = r > 1 or base
        col = step_back_previous(sweeps, lane, duals.rows[r], duals.cols[r - 1], row) if wanted else None
    row_stack = jnp.stack(rows) if rows else jnp.zeros((0, *direct.shape), direct.dtype)
    col_stack = jnp.stack(cols) if cols else jnp.zeros((0, *lane.b.shape), direct.dtype)
    left, right = staircase(lane, duals, row_stack, col_stack, u_last, v_last)
    left, right = jnp.concatenate([cotangent, left], axis=1), jnp.concatenate([lane.v, right], axis=1)
    score_q, score_k = sweeps.score_gradients(u_last, v_last, left, right)
    return Pullback(
        score_q,
        score_k,
        dv,
        divide(jnp.sum(row_stack, axis=0), lane.a),
        divide(jnp.sum(col_stack, axis=0), lane.b),
        row_stack,
        col_stack,
        direct if steps == 0 else jnp.zeros_like(direct),
        col,
    )


class BasePullback(NamedTuple):
    """What stopping the base drops, for one lane: rows (T, n), cols (T, m) and the cotangents of a and b."""

    rows: Array
    cols: Array
    da: Array
    db: Array


def base_pullback(sweeps: Sweeps, lane: Lane, history: Duals, row: Array, col: Array) -> BasePullback:
    """Pull cotangents of (u_T, v_T) back through the T base steps: 2T sweeps, no stored tile.

    Args:
        sweeps: the lane's sweeps.
        lane: the lane.
        history: u_0 .. u_T, v_0 .. v_T.
        row: cotangent of u_T (zero unless R = 0).
        col: cotangent of v_T.
    """

    def body(carry: tuple[Array, Array], x: tuple[Array, Array, Array]) -> tuple[Any, tuple[Array, Array]]:
        direct, col = carry
        u, v, v_previous = x
        row = step_back(sweeps, lane, u, v, col, direct)
        previous = step_back_previous(sweeps, lane, u, v_previous, row)
        return (jnp.zeros_like(direct), previous), (row, col)

    steps = (history.rows[1:], history.cols[1:], history.cols[:-1])
    _, (rows, cols) = jax.lax.scan(body, (row, col), steps, reverse=True)
    da, db = divide(jnp.sum(rows, axis=0), lane.a), divide(jnp.sum(cols, axis=0), lane.b)
    return BasePullback(rows, cols, da, db)
