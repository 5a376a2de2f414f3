"""What stopping the base drops from the gradient: measured exactly, bounded, and used to choose R.

`g_full = g_tail + eta_R`, `eta_R = (d v_0 / d S)' vbar_0`: one pullback through the base, whose vbar_0 the
tail's adjoint yields anyway. The l1 norm of eta_R in score space is bounded by `sum_t n_t (1 + c_t)`, with
`n_T = |vbar_0|_1`, `n_(t-1) = c_t r_t n_t`, where c_t, r_t are the Dobrushin coefficients `max_(i,k) |row_i -
row_k|_1 / 2` of the column- and row-stochastic factors of step t, or, cruder, tanh(D/4) of the scores'
projective diameter D. On a band two distant rows share no key, so both coefficients are 1 there.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from ot_newton.attention.arguments import Call, Options, check_call
from ot_newton.attention.attend import check_cotangent, target_gradients, token_gradients
from ot_newton.attention.contraction import gap_of, projective_diameter
from ot_newton.attention.core import Remainder, compiled_remainder
from ot_newton.attention.dense_view import DenseLane, dense_lane, lane_indices, need_concrete
from ot_newton.errors import ConvergenceWarning, check_integer, check_number


@dataclass(frozen=True, eq=False)
class BiasCertificate:
    """The exact remainder eta_R and bounds on it; arrays have one entry per lane (..., heads).

    Attributes:
        dq: the part of dq that the tail's gradient lacks, (..., heads, n, d); add it for the full gradient.
        dk: the same for k. The remainder in v is zero.
        da: the same for the row targets, per head.
        db: the same for the column targets, per head.
        dustbin: the same for the dustbin's tokens (its v is zero), or None.
        l1: exact entrywise l1 norm of eta_R over the scores.
        l2: exact Frobenius norm of eta_R over the scores.
        relative: l2 over the Frobenius norm of the full gradient; 0 where both are zero.
        dobrushin_bound: upper bound of `l1` by the coefficients of every step.
        hilbert_bound: upper bound of `l1` by the projective diameter; 2 T |vbar_0|_1 where that is infinite.
        tail_steps: R.

    Example:
        >>> import jax.numpy as jnp
        >>> from ot_newton.attention import bias_certificate
        >>> q = jnp.ones((1, 4, 2))
        >>> bias_certificate(q, q, q, q, bandwidth=3, base_steps=2, tail_steps=1)
        BiasCertificate(tail_steps=1, relative<=0)
    """

    dq: Any
    dk: Any
    da: Any
    db: Any
    dustbin: Any
    l1: np.ndarray
    l2: np.ndarray
    relative: np.ndarray
    dobrushin_bound: np.ndarray
    hilbert_bound: np.ndarray
    tail_steps: int

    def __repr__(self) -> str:
        """The depth and the largest relative bias."""
        return f"BiasCertificate(tail_steps={self.tail_steps}, relative<={np.max(self.relative):.3g})"


@dataclass(frozen=True, eq=False)
class TailDepth:
    """The tail depth chosen by measuring.

    Attributes:
        depth: least R whose bias meets tau in every lane, or None.
        biases: measured relative bias (largest over the lanes) for R = 0, 1, ... as far as measured.
        tau: the tolerance asked for.
        message: what was found, and what to do if nothing met tau.

    Example:
        >>> found = TailDepth(depth=2, biases=(0.5, 0.1, 0.01), tau=0.05, message="depth 2")
        >>> found.success, found.depth
        (True, 2)
    """

    depth: int | None
    biases: tuple[float, ...]
    tau: float
    message: str

    @property
    def success(self) -> bool:
        """Whether a depth met tau."""
        return self.depth is not None


def _overlap_gap(plan: np.ndarray) -> float:
    """Dobrushin coefficient of a row-stochastic matrix; 1 as soon as two rows share no column."""
    if not np.all((plan > 0).astype(np.float32) @ (plan > 0).T.astype(np.float32)):
        return 1.0
    worst = max(float(np.max(np.sum(np.abs(plan - row), axis=1))) for row in plan)
    return min(0.5 * worst, 1.0)


def _step_coefficients(lane: DenseLane, rows: np.ndarray, cols: np.ndarray) -> list[tuple[float, float]]:
    """(c_t, r_t) of t = 1 .. T from the base's potentials on the active tokens."""
    support = np.isfinite(lane.scores).astype(np.float32)
    if not (np.all(support @ support.T) and np.all(support.T @ support)):
        return [(1.0, 1.0)] * (len(rows) - 1)
    out = []
    for t in range(1, len(rows)):
        same = np.exp(lane.scores + rows[t][:, None] + cols[t][None, :])
        before = np.exp(lane.scores + rows[t][:, None] + cols[t - 1][None, :])
        col_plan, row_plan = same / same.sum(axis=0), before / before.sum(axis=1, keepdims=True)
        out.append((_overlap_gap(col_plan.T), _overlap_gap(row_plan)))
    return out


def _finite_sum(coefficients: list[tuple[float, float]], col_norm: float, row_norm: float | None) -> float:
    """`sum_t n_t (1 + c_t)`; `row_norm` replaces `c_T n_T` where ubar_T is not `-P vbar_T` (R = 0)."""
    total, norm = 0.0, col_norm
    for c, r in reversed(coefficients):
        row = c * norm if row_norm is None else row_norm
        row_norm = None
        total, norm = total + norm + row, r * row
    return total


def _bounds(call: Call, remainder: Remainder, index: tuple[int, ...]) -> tuple[float, float]:
    """(Dobrushin, Hilbert) bounds of one lane."""
    steps = call.config.base_steps
    lane = dense_lane(call, index)
    rows = np.asarray(remainder.history.rows)[index].astype(np.float64)[:, lane.rows]
    cols = np.asarray(remainder.history.cols)[index].astype(np.float64)[:, lane.cols]
    col_norm = float(np.asarray(remainder.base_col_l1)[index])
    row_norm = None if call.config.tail_steps else float(np.asarray(remainder.base_row_l1)[index])
    dobrushin = _finite_sum(_step_coefficients(lane, rows, cols), col_norm, row_norm)
    one_problem = lane.strictly_positive and len(np.unique(lane.row_groups)) == 1
    tanh = 1 - float(gap_of(np.asarray(projective_diameter(lane)))[0]) if one_problem else 1.0
    return dobrushin, _finite_sum([(tanh, tanh)] * steps, col_norm, row_norm)


def bias_certificate(q: Any, k: Any, v: Any, cotangent: Any, **options: Unpack[Options]) -> BiasCertificate:
    """Measure exactly, and bound, what stopping the base drops from the gradient.

    Args:
        q: queries, (..., heads, n, d).
        k: keys, (..., heads, m, d).
        v: values, (..., heads, m, p).
        cotangent: of the output, (..., heads, n, p); the remainder is linear in it.
        **options: as for `sinkhorn_attention`; `bandwidth` is required.

    Returns:
        A `BiasCertificate`. Cost: 2T sweeps beyond a forward and a backward, and O(T (n + m)) memory; the
        bounds, on the host in float64, form one lane's scores: O(n m) memory and O(T n^2 m) time unless two
        tokens share no partner (then the Dobrushin coefficients are 1 at no cost).

    Raises:
        TypeError: traced arrays, or an argument of the wrong type.
        ValueError: a wrong shape or value.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> q, k, v, bar = (jnp.sin(jnp.arange(24.0) * c).reshape(1, 8, 3) for c in (1, 2, 3, 4))
        >>> found = [bias_certificate(q, k, v, bar, bandwidth=7, base_steps=5, tail_steps=r) for r in (0, 2)]
        >>> bool(found[1].relative[0] < found[0].relative[0])
        True
        >>> bool(found[1].l1[0] <= found[1].dobrushin_bound[0])
        True
    """
    call = check_call(q, k, v, options)
    need_concrete("q", call.lane.q)
    remainder = _measure(call, cotangent)
    dq, dk, _, tokens = token_gradients(
        call, remainder.score_q, remainder.score_k, np.zeros(call.lane.v.shape, call.lane.v.dtype)
    )
    da, db = target_gradients(call, remainder.da, remainder.db)
    leading = call.lane.q.shape[:-2]
    bounds = np.zeros((2, *leading))
    for index in lane_indices(call):
        bounds[0][index], bounds[1][index] = _bounds(call, remainder, index)
    sizes = (np.asarray(remainder.l1), np.asarray(remainder.l2), _relative(remainder))
    return BiasCertificate(dq, dk, da, db, tokens, *sizes, bounds[0], bounds[1], call.config.tail_steps)


def _measure(call: Call, cotangent: Any) -> Remainder:
    return compiled_remainder(call.config, call.lane, check_cotangent(call, cotangent))  # type: ignore[no-any-return]


def _relative(remainder: Remainder) -> np.ndarray:
    part, full = np.asarray(remainder.l2, np.float64), np.asarray(remainder.full_l2, np.float64)
    return np.where(part == 0, 0.0, part / np.where(full > 0, full, np.finfo(float).tiny))


def select_tail_depth(
    q: Any, k: Any, v: Any, cotangent: Any, *, tau: float, max_depth: int = 8, **options: Unpack[Options]
) -> TailDepth:
    """The least tail depth whose measured relative bias is at most tau in every lane.

    R = 0, 1, ... are tried on the given problem with the given `base_steps`, so the answer holds for problems
    like it; measure again where scores sharpen in training. Bands need more than dense problems: their slow
    modes run along the diagonal.

    Args:
        q: queries, (..., heads, n, d).
        k: keys, (..., heads, m, d).
        v: values, (..., heads, m, p).
        cotangent: of the output, (..., heads, n, p).
        tau: largest relative bias, Frobenius norm over the scores.
        max_depth: largest R to try.
        **options: as for `sinkhorn_attention`, without `tail_steps`.

    Returns:
        A `TailDepth`. If no depth meets tau its `depth` is None, its message says so, and it warns.

    Raises:
        TypeError: traced arrays, an argument of the wrong type, or `tail_steps` given.
        ValueError: a wrong shape or value.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> q, k, v, bar = (jnp.sin(jnp.arange(24.0) * c).reshape(1, 8, 3) for c in (1, 2, 3, 4))
        >>> found = select_tail_depth(q, k, v, bar, tau=0.5, bandwidth=7, base_steps=5)
        >>> found.success, found.biases[found.depth] <= 0.5
        (True, True)
    """
    tau, max_depth = check_number("tau", tau), check_integer("max_depth", max_depth)
    if "tail_steps" in options:
        raise TypeError("tail_steps must not be given: select_tail_depth chooses it")
    biases: list[float] = []
    first = 0 if options.get("base_steps", 15) else 1
    for depth in range(first, max_depth + 1):
        options["tail_steps"] = depth
        call = check_call(q, k, v, options)
        need_concrete("q", call.lane.q)
        biases.append(float(np.max(_relative(_measure(call, cotangent)))))
        if biases[-1] <= tau:
            return TailDepth(
                depth, tuple(biases), tau, f"tail_steps={depth} has bias {biases[-1]:.3g} <= {tau:g}"
            )
    message = (
        f"no tail_steps up to {max_depth} meets tau={tau:g}: the bias at {max_depth} is {biases[-1]:.3g}. "
        "Raise max_depth or tau, add bias_certificate's remainder to the gradient, or set base_steps=0"
    )
    warnings.warn(message, ConvergenceWarning, stacklevel=2)
    return TailDepth(None, tuple(biases), tau, message)
