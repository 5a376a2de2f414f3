"""The public attention and the adjoint of its tail."""

from __future__ import annotations

from typing import Any, Unpack

import jax.numpy as jnp

from ot_newton.attention.adjoint import TailAdjoint, ratio
from ot_newton.attention.arguments import Call, Options, check_call
from ot_newton.attention.core import compiled_adjoint, compiled_attend
from ot_newton.attention.dustbins import Dustbin, token_cotangents
from ot_newton.attention.sweeps import Array


def sinkhorn_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    bandwidth: int,
    base_steps: int = 15,
    tail_steps: int = 2,
    a: Any = None,
    b: Any = None,
    dustbin: Dustbin | None = None,
    scale: Any = None,
    segment_ids: Any = None,
    backend: str = "auto",
    interpret: Any = None,
) -> Array:
    r"""Balanced optimal-transport attention inside the band `|i - j| <= bandwidth`.

    With scores `S = scale * q k'` (eps absorbed), T stopped Sinkhorn steps from v = 0 and R differentiated
    ones, the result is `P v`, `P = exp(S + u 1' + 1 v')`, whose columns sum to b exactly and whose rows sum
    to a as far as T + R steps converged. Its gradient is that of the surrogate whose base is constant,
    exactly; `bias_certificate` measures the rest. A small R is not always enough on a band:
    `select_tail_depth` measures.

    Cost: 2T + 2R + 1 sweeps of O(L W d) forward, 2R + 1 backward; memory O(L) (`reference`: O(L^2)). Reverse
    mode only (`jax.grad`, `jax.vjp`; `reference` and `banded` also twice); `jit`, `vmap` and `shard_map` over
    leading axes work. Half precision computes in float32. Source: Forde, arXiv 2605.08123; general targets
    and any R are ours.

    Args:
        q: queries, (..., heads, n, d).
        k: keys, (..., heads, m, d).
        v: values, (..., heads, m, p).
        bandwidth: half-width W of the support.
        base_steps: T.
        tail_steps: R; 0 stops all potentials.
        a: row targets, (n,), (..., n) or (..., heads, n); ones by default. Zero excludes a query.
        b: column targets, like a, with m.
        dustbin: learned tokens that take what has no partner, or None.
        scale: factor of the scores, `d ** -0.5` by default; may be a traced scalar.
        segment_ids: integers, (L,), (..., L) or (..., heads, L), or a pair for queries and keys. Tokens of
            different segments do not meet; a negative number is padding: zero mass, outside the support.
        backend: `auto`, `reference` (dense), `banded` (plain JAX) or `pallas` (TPU kernels).
        interpret: how `pallas` runs: False compiled, True or a `pltpu.InterpretParams` interpreted;
            interpreted unless on a TPU by default.

    Returns:
        (..., heads, n, p), in the promoted dtype of q, k and v; zero rows for excluded queries.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a wrong shape or value; or targets, known before tracing, that no coupling in the band
            meets (such as unit targets with unequal lengths). For traced targets see `check_band`.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> q, k, v, bar = (jnp.sin(jnp.arange(24.0) * c).reshape(1, 8, 3) for c in (1, 2, 3, 4))
        >>> out = sinkhorn_attention(q, k, v, bandwidth=3)
        >>> out.shape
        (1, 8, 3)
        >>> ones = jnp.ones((1, 8, 1))  # rows of the plan sum to their targets, 1
        >>> bool(jnp.allclose(sinkhorn_attention(q, k, ones, bandwidth=3, base_steps=100), 1, atol=1e-4))
        True
    """
    call = check_call(
        q,
        k,
        v,
        {
            "bandwidth": bandwidth,
            "base_steps": base_steps,
            "tail_steps": tail_steps,
            "a": a,
            "b": b,
            "dustbin": dustbin,
            "scale": scale,
            "segment_ids": segment_ids,
            "backend": backend,
            "interpret": interpret,
        },
    )
    return compiled_attend(call.config, call.lane)[..., : call.n, :].astype(call.dtype)


def check_cotangent(call: Call, cotangent: Any) -> Array:
    """The output's cotangent with zero rows for dustbin slots, or one error."""
    bar = jnp.asarray(cotangent)
    shape = (*call.lane.q.shape[:-2], call.n, call.lane.v.shape[-1])
    if bar.shape != shape:
        raise ValueError(f"cotangent must have the output's shape {shape}, got {bar.shape}")
    padding = [(0, 0)] * (bar.ndim - 2) + [(0, call.config.slots), (0, 0)]
    return jnp.pad(bar.astype(call.lane.q.dtype), padding)


def token_gradients(call: Call, score_q: Array, score_k: Array, dv: Array) -> tuple[Array, Array, Array, Any]:
    """(dq, dk, dv, dustbin cotangents) in the caller's shapes from those of the lanes."""
    dq, slots = score_q * jnp.asarray(call.scale, score_q.dtype), call.config.slots
    tokens = None
    if call.dustbin is not None:
        full = {"q": dq, "k": score_k, "v": dv}
        parts = {name: token_cotangents(x, slots, getattr(call.dustbin, name)) for name, x in full.items()}
        tokens = Dustbin(**parts, capacity=call.dustbin.capacity)
    cut = (dq[..., : call.n, :], score_k[..., : call.m, :], dv[..., : call.m, :])
    dq, dk, dv = (x.astype(call.dtype) for x in cut)
    return dq, dk, dv, tokens


def target_gradients(call: Call, da: Array, db: Array) -> tuple[Array, Array]:
    """Cotangents of the targets without slots; a capacity dustbin's targets are sums of the other side."""
    rows, cols = da[..., : call.n], db[..., : call.m]
    if call.dustbin is not None and call.dustbin.capacity == "lengths":
        return rows + db[..., call.m, None], cols + da[..., call.n, None]
    return rows, cols


def tail_adjoint(q: Any, k: Any, v: Any, cotangent: Any, **options: Unpack[Options]) -> TailAdjoint:
    """Cotangents of the tail, with the factors of the staircase they come from.

    The same numbers as `jax.vjp` of `sinkhorn_attention`, plus what autodiff hides: the cotangents of every
    potential (among them vbar_0, which stopping the base drops) and the diagonal scalings that turn the one
    resident tile P(R, R) into every factor.

    Args:
        q: queries, (..., heads, n, d).
        k: keys, (..., heads, m, d).
        v: values, (..., heads, m, p).
        cotangent: of the output, (..., heads, n, p).
        **options: as for `sinkhorn_attention`; `bandwidth` is required.

    Returns:
        A `TailAdjoint`. Cost: the forward's sweeps and 2R + 2 more (six for R = 2).

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a wrong shape or value.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> q, k, v, bar = (jnp.sin(jnp.arange(24.0) * c).reshape(1, 8, 3) for c in (1, 2, 3, 4))
        >>> adjoint = tail_adjoint(q, k, v, bar, bandwidth=3, tail_steps=2)
        >>> adjoint.dq.shape, adjoint.column_cotangents.shape
        ((1, 8, 3), (1, 3, 8))
    """
    call = check_call(q, k, v, options)
    adjoint = compiled_adjoint(call.config, call.lane, check_cotangent(call, cotangent))
    pull, duals = adjoint.pull, adjoint.duals
    dq, dk, dv, tokens = token_gradients(call, pull.score_q, pull.score_k, pull.dv)
    da, db = target_gradients(call, pull.da, pull.db)
    return TailAdjoint(
        dq,
        dk,
        dv,
        da,
        db,
        tokens,
        pull.rows,
        jnp.concatenate([pull.base_col[..., None, :], pull.cols], axis=-2),
        ratio(duals.rows[..., 1:, :], duals.rows[..., -1:, :]),
        ratio(duals.cols, duals.cols[..., -1:, :]),
    )
