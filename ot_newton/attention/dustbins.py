"""Learned dustbin tokens: the augmented support that absorbs what has no partner in the band.

The attention problem gets `slots` more queries and keys, outside the band: each meets every token of its own
sample and each other. Only the first slot carries mass; the others are inert fillers (zero mass, zero
gradient), for a layout that wants a whole block. The same recursion and the same adjoint then hold on the
augmented support. This is algebra on a balanced problem: it is not a KL-unbalanced model, and the mass that
the dustbin takes is not priced by a divergence.

- `capacity="unit"`: the slot has target 1 on both sides (the published single-active-dustbin path). It can
  take one unit of each side, so active lengths must agree.
- `capacity="lengths"`: `a = [a, sum b]`, `b = [b, sum a]` (SuperGlue's form): any token may go unmatched, so
  any lengths and any band are feasible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ot_newton.attention.sweeps import Array
from ot_newton.errors import check_choice


@dataclass(frozen=True, eq=False)
class Dustbin:
    """Query, key and value tokens of the dustbin, a pytree whose leaves are learned.

    Attributes:
        q: (heads, d), or (heads, slots, d) with inert fillers after the first slot.
        k: the same shape as q.
        v: (heads, p), or (heads, slots, p).
        capacity: `unit` or `lengths`; see the module.

    Example:
        >>> import jax.numpy as jnp
        >>> from ot_newton.attention import sinkhorn_attention
        >>> token = jnp.zeros((1, 2))
        >>> q, k = jnp.ones((1, 4, 2)), jnp.ones((1, 5, 2))  # unequal lengths need a place for the rest
        >>> bin = Dustbin(token, token, token, capacity="lengths")
        >>> sinkhorn_attention(q, k, k, bandwidth=2, dustbin=bin).shape
        (1, 4, 2)
    """

    q: Any
    k: Any
    v: Any
    capacity: str = "unit"


jax.tree_util.register_dataclass(Dustbin, data_fields=["q", "k", "v"], meta_fields=["capacity"])


def check_dustbin(dustbin: Any, heads: int, d: int, p: int) -> Dustbin:
    """The dustbin with tokens of shape (heads, slots, ·), or one error.

    Raises:
        TypeError: not a `Dustbin`.
        ValueError: a token's shape or the capacity.
    """
    if not isinstance(dustbin, Dustbin):
        raise TypeError(f"dustbin must be a Dustbin or None, got {type(dustbin).__name__}")
    check_choice("dustbin.capacity", dustbin.capacity, ("unit", "lengths"))
    arrays = {}
    for name, width in (("q", d), ("k", d), ("v", p)):
        x = jnp.asarray(getattr(dustbin, name))
        x = x[:, None] if x.ndim == 2 else x
        if x.ndim != 3 or x.shape[0] != heads or x.shape[1] < 1 or x.shape[2] != width:
            raise ValueError(
                f"dustbin.{name} must have shape ({heads}, {width}) or ({heads}, slots, {width}), "
                f"got {getattr(dustbin, name).shape}"
            )
        arrays[name] = x
    slots = {x.shape[1] for x in arrays.values()}
    if len(slots) > 1:
        raise ValueError(f"dustbin.q, .k and .v must have equally many slots, got {sorted(slots)}")
    return Dustbin(**arrays, capacity=dustbin.capacity)


def append_tokens(x: Array, tokens: Array) -> Array:
    """`x (..., heads, L, d)` with the tokens `(heads, slots, d)` after its L rows."""
    shape = (*x.shape[:-2], *tokens.shape[1:])
    return jnp.concatenate([x, jnp.broadcast_to(tokens, shape).astype(x.dtype)], axis=-2)


def append_masses(a: Array, b: Array, slots: int, capacity: str) -> tuple[Array, Array]:
    """Targets (..., L) with those of the slots after them: the first one active, the others zero."""
    one = jnp.ones((*a.shape[:-1], 1), a.dtype)
    unit = capacity == "unit"
    a_slot = one if unit else jnp.sum(b, axis=-1, keepdims=True)
    b_slot = one if unit else jnp.sum(a, axis=-1, keepdims=True)
    fill = jnp.zeros((*a.shape[:-1], slots - 1), a.dtype)
    return jnp.concatenate([a, a_slot, fill], axis=-1), jnp.concatenate([b, b_slot, fill], axis=-1)


def token_cotangents(x: Array, slots: int, like: Array) -> Array:
    """Cotangent of the tokens from that of the appended array: the last rows, summed over the batch axes."""
    tail = x[..., x.shape[-2] - slots :, :]
    return jnp.sum(tail.reshape(-1, *tail.shape[-3:]), axis=0).reshape(like.shape).astype(like.dtype)
