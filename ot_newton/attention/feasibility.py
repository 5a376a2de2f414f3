"""Whether targets can be met inside a band.

The band is monotone, so the north-west-corner coupling decides: targets are feasible exactly when, for every
query i, the mass of the queries up to i fits into the keys up to i + W, and the same with the sides
exchanged. With segments this holds within each segment, in the order of its tokens. Equal totals follow from
the last i.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ot_newton.attention.sweeps import Array
from ot_newton.errors import check_integer, check_number


def concrete(x: Any) -> np.ndarray | None:
    """The values of an array, or None while JAX traces it."""
    try:
        return np.asarray(x)
    except jax.errors.TracerArrayConversionError:
        return None


def _excess(xp: Any, a: Any, b: Any, bandwidth: int, a_ids: Any, b_ids: Any) -> Any:
    """Largest `A(i) - B(i + W)` over the queries, prefix sums within segments. One sort of n + m events."""
    n, m = a.shape[0], b.shape[0]
    ids = xp.concatenate([a_ids, b_ids])
    place = xp.concatenate([xp.arange(n) + bandwidth, xp.arange(m)])
    is_row = xp.concatenate([xp.ones(n, bool), xp.zeros(m, bool)])
    order = xp.lexsort((is_row, place, ids))
    ids, is_row = ids[order], is_row[order]
    zeros = xp.zeros_like
    row_mass = xp.concatenate([a, zeros(b)])[order]
    col_mass = xp.concatenate([zeros(a), b])[order]
    first = xp.concatenate([xp.ones(1, bool), ids[1:] != ids[:-1]])

    def within(mass: Any) -> Any:
        total = xp.cumsum(mass)
        before = xp.where(first, total - mass, -xp.inf)
        opened = np.maximum.accumulate(before) if xp is np else jax.lax.cummax(before)
        return total - opened

    return xp.max(xp.where(is_row, within(row_mass) - within(col_mass), -xp.inf))


def _violation(xp: Any, a: Any, b: Any, bandwidth: int, a_ids: Any, b_ids: Any) -> Any:
    """Mass that does not fit, in units of the total; inf for targets that are not masses."""
    rows, cols = xp.where(a_ids >= 0, a, 0), xp.where(b_ids >= 0, b, 0)
    worst = xp.maximum(
        _excess(xp, rows, cols, bandwidth, a_ids, b_ids), _excess(xp, cols, rows, bandwidth, b_ids, a_ids)
    )
    total = xp.maximum(xp.sum(rows), xp.sum(cols))
    valid = xp.all(rows >= 0) & xp.all(cols >= 0) & (total > 0) & xp.isfinite(total)
    return xp.where(valid, worst / xp.where(valid, total, 1), xp.inf)


def _pair(segment_ids: Any, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> tuple[Array, Array]:
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if segment_ids is None:
        return jnp.zeros(a_shape, jnp.int32), jnp.zeros(b_shape, jnp.int32)
    return jnp.broadcast_to(pair[0], a_shape), jnp.broadcast_to(pair[1], b_shape)


def check_band(a: Any, b: Any, bandwidth: int, *, segment_ids: Any = None, rtol: float = 1e-6) -> Array:
    """Whether targets can be met inside the band; works on traced targets, under `jit` and `vmap`.

    Args:
        a: row targets, (..., n).
        b: column targets, (..., m), with the leading axes of a.
        bandwidth: half-width W of the band `|i - j| <= W`.
        segment_ids: integer segment numbers (..., L), or a pair of them for queries and keys; negative
            numbers are padding, whose mass counts as zero.
        rtol: mass, relative to the total, that may be left over.

    Returns:
        A boolean array of the leading shape. A capacity dustbin makes any targets feasible; do not check
        then.

    Raises:
        ValueError: leading axes of a and b differ, or a bad bandwidth or rtol.

    Example:
        >>> import jax.numpy as jnp
        >>> even, skewed = jnp.ones(4), jnp.array([4.0, 0.0, 0.0, 0.0])
        >>> bool(check_band(even, even, 1))
        True
        >>> bool(check_band(skewed, even, 1)), bool(check_band(skewed, even, 3))
        (False, True)
    """
    bandwidth, rtol = check_integer("bandwidth", bandwidth), check_number("rtol", rtol)
    a, b = jnp.asarray(a), jnp.asarray(b)
    if a.ndim < 1 or b.ndim < 1 or a.shape[:-1] != b.shape[:-1]:
        raise ValueError(f"a and b must have equal leading axes, got shapes {a.shape} and {b.shape}")
    a_ids, b_ids = _pair(segment_ids, a.shape, b.shape)

    def one(a: Array, b: Array, a_ids: Array, b_ids: Array) -> Array:
        return _violation(jnp, a, b, bandwidth, a_ids, b_ids) <= rtol

    function = one
    for _ in a.shape[:-1]:
        function = jax.vmap(function)
    return function(a, b, a_ids, b_ids)


def _first_lane(a: np.ndarray, b: np.ndarray, a_ids: np.ndarray, b_ids: np.ndarray) -> Any:
    """Distinct lanes as rows (heads usually repeat one)."""
    flat = [x.reshape(-1, x.shape[-1]) for x in (a, b, a_ids, b_ids)]
    seen: set[bytes] = set()
    for row in zip(*flat, strict=True):
        key = b"|".join(x.tobytes() for x in row)
        if key not in seen:
            seen.add(key)
            yield row


def unmatched(a: np.ndarray, b: np.ndarray, bandwidth: int, a_ids: np.ndarray, b_ids: np.ndarray) -> float:
    """Row mass that no coupling inside the band can place: each query fills the earliest keys it reaches."""
    left_over = 0.0
    for segment in np.unique(a_ids[a_ids >= 0]):
        rows, cols = np.flatnonzero(a_ids == segment), np.flatnonzero(b_ids == segment)
        room, pointer = b[cols].astype(float), 0
        for i in rows:
            need = float(a[i])
            while need > 0 and pointer < len(cols) and cols[pointer] <= i + bandwidth:
                if cols[pointer] < i - bandwidth or room[pointer] <= 0:
                    pointer += 1
                    continue
                moved = min(need, room[pointer])
                need, room[pointer] = need - moved, room[pointer] - moved
            left_over += need
    return left_over


def _least_bandwidth(a: np.ndarray, b: np.ndarray, a_ids: np.ndarray, b_ids: np.ndarray, rtol: float) -> int:
    low, high = 0, max(len(a), len(b)) - 1
    if _violation(np, a, b, high, a_ids, b_ids) > rtol:
        return -1
    while low < high:
        middle = (low + high) // 2
        fits = _violation(np, a, b, middle, a_ids, b_ids) <= rtol
        low, high = (low, middle) if fits else (middle + 1, high)
    return low


def require_feasible(
    a: Any, b: Any, ids: tuple[Any, Any], bandwidth: int, unit_dustbin: bool, unit_targets: bool
) -> None:
    """Raise for targets that are known now and cannot be met; traced ones are left to `check_band`.

    Raises:
        ValueError: naming the argument to change and to what.
    """
    values = [concrete(x) for x in (a, b, *ids)]
    known = [x for x in values if x is not None]
    if len(known) < len(values):
        return
    rtol = 1e-6
    capacity = "dustbin=Dustbin(..., capacity='lengths')"
    for rows, cols, a_ids, b_ids in _first_lane(*known):
        rows, cols = rows.astype(float), cols.astype(float)
        _check_masses(rows, cols)
        total = max(rows.sum(), cols.sum())
        if abs(rows.sum() - cols.sum()) > rtol * total:
            what = (
                "unit targets need as many active queries as keys" if unit_targets else "a and b must balance"
            )
            raise ValueError(
                f"{what}, found sums {rows.sum():g} and {cols.sum():g}: "
                f"pass a= and b= of equal sums, or {capacity}"
            )
        if unit_dustbin:
            excess = unmatched(rows, cols, bandwidth, a_ids, b_ids)
            if excess > 1 + rtol * total:
                raise ValueError(
                    f"bandwidth={bandwidth} leaves {excess:g} of the mass unmatched, a unit dustbin takes 1: "
                    f"raise bandwidth, or use {capacity}"
                )
        elif _violation(np, rows, cols, bandwidth, a_ids, b_ids) > rtol:
            least = _least_bandwidth(rows, cols, a_ids, b_ids, rtol)
            fix = f"raise bandwidth to at least {least}" if least >= 0 else "balance a and b in each segment"
            raise ValueError(f"targets cannot be met inside bandwidth={bandwidth}: {fix}, or use {capacity}")


def _check_masses(rows: np.ndarray, cols: np.ndarray) -> None:
    for name, x in (("a", rows), ("b", cols)):
        if not np.all(np.isfinite(x)) or np.any(x < 0) or x.sum() <= 0:
            raise ValueError(
                f"{name} must be finite, not negative and not all zero, "
                f"got values in [{x.min():g}, {x.max():g}]"
            )
