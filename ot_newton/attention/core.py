"""One lane, forward and backward: the custom derivative, and its batched and compiled form."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ot_newton.attention.adjoint import Pullback, base_pullback, staircase, tail_pullback
from ot_newton.attention.duals import Duals, base_duals, base_history, tail_duals
from ot_newton.attention.sweeps import Array, Config, Lane, make_sweeps


def lane_forward(config: Config, lane: Lane) -> tuple[Array, Duals]:
    """Output (n, p) and the tail's potentials: 2T + 2R + 1 sweeps."""
    sweeps = make_sweeps(config, lane)
    u, v = base_duals(sweeps, lane, config.base_steps)
    duals = tail_duals(sweeps, lane, u, v, config.tail_steps)
    return sweeps.row_apply(duals.rows[-1], duals.cols[-1], lane.v), duals


def _attend(config: Config, lane: Lane) -> Array:
    return lane_forward(config, lane)[0]


def _attend_fwd(config: Config, lane: Lane) -> tuple[Array, tuple[Lane, Duals, Array]]:
    output, duals = lane_forward(config, lane)
    return output, (lane, duals, output)


def _attend_bwd(config: Config, saved: tuple[Lane, Duals, Array], cotangent: Array) -> tuple[Lane]:
    lane, duals, output = saved
    pull = tail_pullback(make_sweeps(config, lane), lane, duals, output, cotangent, base=False)
    return (Lane(pull.score_q, pull.score_k, pull.dv, pull.da, pull.db, None, None),)


# Reverse mode only: JAX cannot differentiate a kernel that asks for its grid position (jax #22197), and the
# tail's adjoint is cheaper than autodiff anyway. Residuals: the inputs, the output and 2 (R + 1) vectors.
_attend_lane = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_attend_lane.defvjp(_attend_fwd, _attend_bwd)


def _spread(lane: Lane) -> Lane:
    """Add an exact zero that depends on every float input.

    Inside `shard_map` each input then varies over the union of their mesh axes, as loop carries and custom
    derivatives need; the sum over replicas of a replicated input's cotangent is the transpose of this.
    """
    floats = (lane.q, lane.k, lane.v, lane.a, lane.b)
    zero = sum(0 * jax.lax.stop_gradient(x).ravel()[0] for x in floats)
    return lane._replace(q=lane.q + zero, k=lane.k + zero, v=lane.v + zero, a=lane.a + zero, b=lane.b + zero)


def over_lanes(function: Any, lane: Lane) -> Any:
    """Map a function of one lane over the leading axes (batch, then heads) of all arrays."""
    for _ in range(lane.q.ndim - 2):
        function = jax.vmap(function)
    return function(lane)


def attend_lanes(config: Config, lane: Lane) -> Array:
    """Outputs of all lanes, differentiable in the float arrays of `lane`."""

    def one(single: Lane) -> Array:
        return _attend_lane(config, _spread(single))

    return over_lanes(one, lane)


class Adjoint(NamedTuple):
    """A lane's pullback with the factors of its staircase."""

    pull: Pullback
    duals: Duals


def adjoint_lanes(config: Config, lane: Lane, cotangent: Array) -> Adjoint:
    """The tail's pullback of all lanes, with vbar_0."""

    def one(pair: Any) -> Adjoint:
        single, bar = _spread(pair[0]), pair[1]
        output, duals = lane_forward(config, single)
        return Adjoint(
            tail_pullback(make_sweeps(config, single), single, duals, output, bar, base=True), duals
        )

    return _over_pairs(one, lane, cotangent)  # type: ignore[no-any-return]


def _over_pairs(function: Any, lane: Lane, cotangent: Array) -> Any:
    for _ in range(lane.q.ndim - 2):
        function = jax.vmap(function)
    return function((lane, cotangent))


class Remainder(NamedTuple):
    """One lane's dropped gradient and its sizes in score space."""

    score_q: Array
    score_k: Array
    da: Array
    db: Array
    l1: Array
    l2: Array
    full_l2: Array
    base_col_l1: Array
    base_row_l1: Array
    history: Duals


def lane_remainder(config: Config, lane: Lane, cotangent: Array) -> Remainder:
    """eta_R of one lane by one pullback through the base, all on the tile of the base's last step.

    Sweeps: 2T + 2R + 1 forward, 2R + 2 for the tail, 2T for the base and three for its gradient and sizes.
    """
    sweeps = make_sweeps(config, lane)
    history = base_history(sweeps, lane, config.base_steps)
    u, v = history.rows[-1], history.cols[-1]
    duals = tail_duals(sweeps, lane, u, v, config.tail_steps)
    u_last, v_last = duals.rows[-1], duals.cols[-1]
    output = sweeps.row_apply(u_last, v_last, lane.v)
    tail = tail_pullback(sweeps, lane, duals, output, cotangent, base=True)
    base = base_pullback(sweeps, lane, history, tail.base_row, tail.base_col)
    if config.base_steps:
        left, right = staircase(lane, history, base.rows, base.cols, u_last, v_last)
    else:
        left, right = jnp.zeros_like(u_last)[:, None], jnp.zeros_like(v_last)[:, None]
    score_q, score_k = sweeps.score_gradients(u_last, v_last, left, right)
    l1, squares = sweeps.moments(u_last, v_last, left, right)
    tail_left, tail_right = staircase(lane, duals, tail.rows, tail.cols, u_last, v_last)
    all_left = jnp.concatenate([cotangent, tail_left, left], axis=1)
    all_right = jnp.concatenate([lane.v, tail_right, right], axis=1)
    _, full = sweeps.moments(u_last, v_last, all_left, all_right)
    col_l1 = jnp.sum(jnp.abs(tail.base_col))
    first_row = base.rows[-1] if config.base_steps else jnp.zeros_like(lane.a)
    sizes = (l1, jnp.sqrt(squares), jnp.sqrt(full), col_l1, jnp.sum(jnp.abs(first_row)))
    return Remainder(score_q, score_k, base.da, base.db, *sizes, history)


def remainder_lanes(config: Config, lane: Lane, cotangent: Array) -> Remainder:
    """`lane_remainder` over all lanes."""
    return _over_pairs(lambda pair: lane_remainder(config, *pair), lane, cotangent)  # type: ignore[no-any-return]


# Eager calls would trace and compile their loops anew each time; a call inside a user's `jit` is inlined.
compiled_attend = jax.jit(attend_lanes, static_argnums=0)
compiled_adjoint = jax.jit(adjoint_lanes, static_argnums=0)
compiled_remainder = jax.jit(remainder_lanes, static_argnums=0)
