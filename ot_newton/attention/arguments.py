"""From a public call to lanes: one error for bad input, dtypes, targets, padding and the dustbin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from ot_newton.attention.dustbins import Dustbin, append_masses, append_tokens, check_dustbin
from ot_newton.attention.feasibility import require_feasible
from ot_newton.attention.sweeps import Array, Config, Lane
from ot_newton.errors import check_choice, check_integer, check_number

BACKENDS = ("auto", "reference", "banded", "pallas")


class Options(TypedDict, total=False):
    """The keyword arguments of `sinkhorn_attention`, which the other functions share."""

    bandwidth: int
    base_steps: int
    tail_steps: int
    a: Any
    b: Any
    dustbin: Dustbin | None
    scale: Any
    segment_ids: Any
    backend: str
    interpret: Any


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call.

    Attributes:
        config: the static part.
        lane: arrays with all leading axes, dustbin tokens last, queries scaled.
        n: queries without dustbin slots.
        m: keys without dustbin slots.
        scale: factor of the scores.
        dtype: dtype of the results.
        dustbin: as the caller passed it.
    """

    config: Config
    lane: Lane
    n: int
    m: int
    scale: Any
    dtype: Any
    dustbin: Dustbin | None


def _check_arrays(q: Any, k: Any, v: Any) -> tuple[Array, Array, Array, Any]:
    arrays = {"q": jnp.asarray(q), "k": jnp.asarray(k), "v": jnp.asarray(v)}
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be an array of floats, got dtype {x.dtype}")
        if x.ndim < 3 or min(x.shape) < 1:
            raise ValueError(f"{name} must have shape (..., heads, L, d) without empty axes, got {x.shape}")
    q, k, v = arrays.values()
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        raise ValueError(
            f"q, k and v must have equal leading axes, got shapes {q.shape}, {k.shape} and {v.shape}"
        )
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            "q and k must have equal last axes, k and v equal lengths, "
            f"got shapes {q.shape}, {k.shape} and {v.shape}"
        )
    dtype = jnp.result_type(q, k, v)
    compute = jnp.promote_types(dtype, jnp.float32)
    return q.astype(compute), k.astype(compute), v.astype(compute), dtype


def _per_head(name: str, x: Any, leading: tuple[int, ...], length: int) -> Array:
    """(..., L), (..., heads, L) or (L,) as (..., heads, L)."""
    x = jnp.asarray(x)
    per_batch = x.ndim <= len(leading)
    shaped = jnp.expand_dims(x, -2) if per_batch and x.ndim > 1 else x
    try:
        if x.ndim == 0 or x.shape[-1] != length:
            raise ValueError
        return jnp.broadcast_to(shaped, (*leading, length))
    except ValueError:
        raise ValueError(
            f"{name} must have shape ({length},), {(*leading[:-1], length)} or {(*leading, length)}, "
            f"got {x.shape}"
        ) from None


def _segments(segment_ids: Any, leading: tuple[int, ...], n: int, m: int) -> tuple[Array, Array] | None:
    if segment_ids is None:
        return None
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(f"segment_ids must be one array or a pair (queries, keys), got {len(pair)} arrays")
    out = []
    for x, length in zip(pair, (n, m), strict=True):
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"segment_ids must be integers, got dtype {x.dtype}")
        out.append(_per_head("segment_ids", x.astype(jnp.int32), leading, length))
    return out[0], out[1]


def _target(name: str, x: Any, ids: Array | None, leading: tuple[int, ...], like: Array) -> Array:
    """One target, ones by default, zero on padding."""
    length = like.shape[-2]
    mass = jnp.ones((*leading, length), like.dtype)
    if x is not None:
        mass = _per_head(name, x, leading, length).astype(like.dtype)
    return mass if ids is None else jnp.where(ids >= 0, mass, 0)


def _scale(scale: Any, d: int) -> Any:
    if scale is None:
        return 1 / math.sqrt(d)
    if isinstance(scale, jax.Array):
        if scale.ndim or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise ValueError(f"scale must be one real number, got shape {scale.shape}, dtype {scale.dtype}")
        return scale
    return check_number("scale", scale, low=-math.inf)


def choose_backend(backend: str, interpret: Any, n: int, m: int, bandwidth: int) -> tuple[str, Any]:
    """The backend's name and how its kernels run.

    `auto` is `pallas` on a TPU; elsewhere `reference` where the band fills more than half of a score matrix
    of at most 2^20 entries, else `banded`. An explicit name is never overridden.
    """
    check_choice("backend", backend, BACKENDS)
    if not (
        interpret is None or isinstance(interpret, bool) or type(interpret).__name__ == "InterpretParams"
    ):
        raise TypeError(
            f"interpret must be None, a bool or pltpu.InterpretParams, got {type(interpret).__name__}"
        )
    on_tpu = jax.default_backend() == "tpu"
    if backend == "auto":
        full = 2 * bandwidth + 1 > max(n, m) // 2 and n * m <= 2**20
        backend = "pallas" if on_tpu else "reference" if full else "banded"
    return backend, (not on_tpu) if interpret is None else interpret


def check_call(q: Any, k: Any, v: Any, options: Options, *, feasible: bool = True) -> Call:
    """Check everything and build the lanes.

    Args:
        q: queries (..., heads, n, d).
        k: keys (..., heads, m, d).
        v: values (..., heads, m, p).
        options: see `sinkhorn_attention`.
        feasible: whether targets known now must be feasible.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a wrong shape or value, or targets that the band cannot meet.
    """
    q, k, v, dtype = _check_arrays(q, k, v)
    if "bandwidth" not in options:
        raise TypeError("bandwidth must be given")
    bandwidth = check_integer("bandwidth", options["bandwidth"])
    base_steps = check_integer("base_steps", options.get("base_steps", 15))
    tail_steps = check_integer("tail_steps", options.get("tail_steps", 2))
    if base_steps + tail_steps == 0:
        raise ValueError("base_steps and tail_steps must not both be 0: the scores would not be normalized")
    leading, n, m = q.shape[:-2], q.shape[-2], k.shape[-2]
    scale = _scale(options.get("scale"), q.shape[-1])
    backend, interpret = choose_backend(
        options.get("backend", "auto"), options.get("interpret"), n, m, bandwidth
    )
    if backend == "pallas" and interpret is False and q.dtype == jnp.float64:
        raise ValueError("q, k and v must be at most float32 for compiled kernels, got float64: cast them")
    ids = _segments(options.get("segment_ids"), leading, n, m)
    q_ids, k_ids = ids if ids is not None else (None, None)
    a = _target("a", options.get("a"), q_ids, leading, q)
    b = _target("b", options.get("b"), k_ids, leading, k)
    if ids is not None or options.get("a") is not None or options.get("b") is not None:
        # what stands on tokens without mass must not matter, NaN included
        q = jnp.where(a[..., None] > 0, q, 0)
        k, v = jnp.where(b[..., None] > 0, k, 0), jnp.where(b[..., None] > 0, v, 0)
    given = options.get("dustbin")
    dustbin = None if given is None else check_dustbin(given, leading[-1], q.shape[-1], v.shape[-1])
    capacity = None if dustbin is None else dustbin.capacity
    if feasible and capacity != "lengths":
        _check_feasible(options, a, b, ids, bandwidth, capacity)
    slots = 0
    if dustbin is not None:
        slots = dustbin.q.shape[1]
        q, k, v = (append_tokens(x, t) for x, t in ((q, dustbin.q), (k, dustbin.k), (v, dustbin.v)))
        a, b = append_masses(a, b, slots, dustbin.capacity)
    config = Config(bandwidth, base_steps, tail_steps, slots, backend, interpret)
    lane = Lane(q * jnp.asarray(scale, q.dtype), k, v, a, b, q_ids, k_ids)
    return Call(config, lane, n, m, scale, dtype, given)


def _check_feasible(
    options: Options,
    a: Array,
    b: Array,
    ids: tuple[Array, Array] | None,
    bandwidth: int,
    capacity: str | None,
) -> None:
    """Test all but unit targets on equal lengths with common segments, which the diagonal meets."""
    unit = options.get("a") is None and options.get("b") is None
    common = ids is None or not isinstance(options.get("segment_ids"), tuple)
    if unit and common and a.shape == b.shape:
        return
    if ids is None:
        ids = (jnp.zeros(a.shape, jnp.int32), jnp.zeros(b.shape, jnp.int32))
    require_feasible(a, b, ids, bandwidth, capacity == "unit", unit)
