"""What a backend of the attention is: streamed sweeps over the pairs of one lane (one head of one sample).

Everything above (the fixed point, the tail adjoint, the certificates) is written once, against `Sweeps`.
A sweep visits each pair of the support once and keeps at most one tile of scores; none returns a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

Array = Any  # jax.Array; the type checker does not follow JAX

HIGHEST = jax.lax.Precision.HIGHEST  # a float32 product must not round its operands to bfloat16 or TF32


@dataclass(frozen=True)
class Config:
    """The static part of a call: hashable, so that one compilation serves equal calls.

    Attributes:
        bandwidth: pairs with `|i - j| <= bandwidth` belong to the support.
        base_steps: Sinkhorn steps without gradient.
        tail_steps: further steps, differentiated.
        slots: dustbin tokens at the end of both sides, outside the band (each meets every token).
        backend: `reference`, `banded` or `pallas`.
        interpret: how Pallas kernels run: False (compiled), True, or `pltpu.InterpretParams`.
    """

    bandwidth: int
    base_steps: int
    tail_steps: int
    slots: int
    backend: str
    interpret: Any


class Lane(NamedTuple):
    """The arrays of one head of one sample; dustbin tokens stand last.

    `q (n, d)` is scaled already, `k (m, d)`, `v (m, p)`, targets `a (n,)`, `b (m,)`; `q_ids`, `k_ids` are
    int32 segment numbers of the tokens inside the band (without dustbin slots), or None.
    """

    q: Array
    k: Array
    v: Array
    a: Array
    b: Array
    q_ids: Array | None
    k_ids: Array | None


class Sweeps(Protocol):
    """Streamed products with `P(u, v) = exp(S + u 1' + 1 v')` on the support, `S = q k'`.

    Potentials are `-inf` where a target is zero; then the row or column of P is zero.
    """

    def row_lse(self, v: Array) -> Array:
        """`log sum_j exp(S_ij + v_j)`, shape (n,); `-inf` for an empty row."""
        ...

    def col_lse(self, u: Array) -> Array:
        """`log sum_i exp(S_ij + u_i)`, shape (m,)."""
        ...

    def row_apply(self, u: Array, v: Array, x: Array) -> Array:
        """`P x` for x of shape (m,) or (m, p)."""
        ...

    def col_apply(self, u: Array, v: Array, x: Array) -> Array:
        """`P' x` for x of shape (n,) or (n, p)."""
        ...

    def score_gradients(self, u: Array, v: Array, left: Array, right: Array) -> tuple[Array, Array]:
        """`(Z k, Z' q)` with `Z = P * (left right')`, from one tile per pair; left (n, r), right (m, r)."""
        ...

    def moments(self, u: Array, v: Array, left: Array, right: Array) -> tuple[Array, Array]:
        """`(sum |Z|, sum Z^2)` of the same Z, two scalars."""
        ...


def dot(x: Array, y: Array) -> Array:
    """`x @ y` in full precision of its dtype on every platform."""
    return jnp.dot(x, y, precision=HIGHEST, preferred_element_type=x.dtype)


def dot_t(x: Array, y: Array) -> Array:
    """`x @ y.T` in full precision, without a transposed copy of y."""
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision=HIGHEST, preferred_element_type=x.dtype)


def log_sum_exp(scores: Array, axis: int) -> Array:
    """Log of a sum of exponentials that returns `-inf`, not NaN, where every entry is `-inf`."""
    top = jax.lax.stop_gradient(jnp.max(scores, axis=axis, keepdims=True))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    return jnp.squeeze(top, axis) + jnp.log(jnp.sum(jnp.exp(scores - top), axis=axis))


def make_sweeps(config: Config, lane: Lane) -> Sweeps:
    """The sweeps of one lane on the backend that `config` names, bordered by its dustbin slots."""
    from ot_newton.attention.banded import BandedSweeps
    from ot_newton.attention.bordered import BorderedSweeps
    from ot_newton.attention.pallas_launch import PallasSweeps
    from ot_newton.attention.reference import DenseSweeps

    n, m = lane.q.shape[0] - config.slots, lane.k.shape[0] - config.slots
    q, k = lane.q[:n], lane.k[:m]
    width = min(config.bandwidth, max(n, m) - 1)
    inner: Sweeps
    if config.backend == "reference":
        inner = DenseSweeps.make(q, k, lane.q_ids, lane.k_ids, width)
    elif config.backend == "banded":
        inner = BandedSweeps.make(q, k, lane.q_ids, lane.k_ids, width)
    else:
        inner = PallasSweeps.make(q, k, lane.q_ids, lane.k_ids, width, config.interpret)
    return inner if config.slots == 0 else BorderedSweeps(inner, q, k, lane.q[n:], lane.k[m:])
