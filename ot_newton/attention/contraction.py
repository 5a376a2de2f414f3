"""Projective contraction of the Sinkhorn recursion, where it can be certified.

For a strictly positive matrix K = exp(S), one full step contracts Hilbert's metric by `rho = tanh(D/4)^2`,
with the projective diameter `D = max_(i,k) osc_j (S_i - S_k)`; D is the same for K' and for every diagonal
scaling of K (Birkhoff). A band with two rows of different support has D = inf: no rate can be certified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from ot_newton.attention.arguments import Options, check_call
from ot_newton.attention.dense_view import DenseLane, dense_lane, lane_indices
from ot_newton.errors import check_integer


@dataclass(frozen=True, eq=False)
class ContractionCertificate:
    """Certified contraction of one Sinkhorn step, per lane (and per diagonal block if asked).

    tanh rounds to 1 beyond a diameter of 76, so `1 - tanh(D/4) = 2 / (1 + e^(D/2))` is stored, and its
    logarithm, which stays finite where even that is 0 in float64.

    Attributes:
        diameter: D, inf where nothing is certified.
        gap: 1 - tanh(D/4) (0 where nothing is certified).
        log_gap: log of `gap`, `-inf` where nothing is certified.
        reason: why some lanes are not certified, or None.

    Example:
        >>> import jax.numpy as jnp
        >>> from ot_newton.attention import contraction_certificate
        >>> q = jnp.ones((1, 6, 2))
        >>> band = contraction_certificate(q, q, bandwidth=2)
        >>> band.reason is None, band.rate
        (False, None)
    """

    diameter: np.ndarray
    gap: np.ndarray
    log_gap: np.ndarray
    reason: str | None

    @property
    def rate_gap(self) -> np.ndarray | None:
        """1 - rho of a full step, `gap (2 - gap)`; None if no lane is certified."""
        return None if np.all(np.isinf(self.diameter)) else self.gap * (2 - self.gap)

    @property
    def rate(self) -> np.ndarray | None:
        """Rho = tanh(D/4)^2 rounded to float64, NaN where not certified; None if no lane is."""
        gap = self.rate_gap
        return None if gap is None else np.where(np.isinf(self.diameter), np.nan, 1 - gap)

    def __repr__(self) -> str:
        """Largest diameter and the reason."""
        return f"ContractionCertificate(diameter<={np.max(self.diameter):.4g}, reason={self.reason!r})"


def gap_of(diameter: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(1 - tanh(D/4), its logarithm), accurate for every D."""
    log_gap = np.log(2.0) - np.logaddexp(0.0, np.asarray(diameter, float) / 2)
    return np.exp(log_gap), log_gap


def projective_diameter(lane: DenseLane) -> float:
    """D of a strictly positive lane: the largest over its segments; O(n^2 m) time, O(n m) memory."""
    worst = 0.0
    for segment in np.unique(lane.row_groups):
        scores = lane.scores[np.ix_(lane.row_groups == segment, lane.col_groups == segment)]
        if scores.size:
            largest = np.stack([np.max(scores - row, axis=1) for row in scores])
            worst = max(worst, float(np.max(largest + largest.T)))
    return worst


def contraction_certificate(
    q: Any, k: Any, *, block_size: int | None = None, **options: Unpack[Options]
) -> ContractionCertificate:
    """Certify the contraction of a Sinkhorn step where the support is strictly positive.

    Masked pairs and tokens without mass are left out of the matrix. A lane is certified if every active query
    meets every active key of its segment. With `block_size`, the diagonal blocks of that many consecutive
    tokens are certified each as a problem of its own, which says nothing of the whole band.

    Args:
        q: queries, (..., heads, n, d).
        k: keys, (..., heads, m, d).
        block_size: side of diagonal blocks, or None for whole lanes.
        **options: as for `sinkhorn_attention`; step counts and backend are not used.

    Returns:
        Arrays of shape (..., heads), or (..., heads, blocks). Host computation, float64.

    Raises:
        TypeError: traced arrays, or an argument of the wrong type.
        ValueError: a wrong shape or value.

    Example:
        >>> import jax.numpy as jnp
        >>> q = jnp.sin(jnp.arange(12.0)).reshape(1, 6, 2)
        >>> dense = contraction_certificate(q, q, bandwidth=6)
        >>> dense.reason is None, bool(0 < dense.rate[0] < 1)
        (True, True)
    """
    dustbin = options.get("dustbin")
    if dustbin is not None:
        options["dustbin"] = type(dustbin)(dustbin.q, dustbin.k, dustbin.k, dustbin.capacity)
    call = check_call(q, k, k, options, feasible=False)
    size = max(call.n, call.m) if block_size is None else check_integer("block_size", block_size, low=1)
    blocks = -(-max(call.n, call.m) // size)
    diameter = np.full((*call.lane.q.shape[:-2], blocks), np.inf)
    refused: list[tuple[int, ...]] = []
    for index in lane_indices(call):
        lane = dense_lane(call, index)
        for block in range(blocks):
            part = lane if block_size is None else _diagonal_block(lane, block * size, (block + 1) * size)
            if part.scores.size and part.strictly_positive:
                diameter[(*index, block)] = projective_diameter(part)
            else:
                refused.append((*index, block) if block_size else index)
    if block_size is None:
        diameter = diameter[..., 0]
    gap, log_gap = gap_of(diameter)
    reason = None
    if refused:
        reason = (
            f"{len(refused)} of {diameter.size} blocks (first: {refused[0]}) are not strictly positive in "
            f"bandwidth={call.config.bandwidth}: their projective diameter is infinite"
        )
    return ContractionCertificate(diameter, gap, log_gap, reason)


def _diagonal_block(lane: DenseLane, low: int, high: int) -> DenseLane:
    rows, cols = (lane.rows >= low) & (lane.rows < high), (lane.cols >= low) & (lane.cols < high)
    return DenseLane(
        lane.scores[np.ix_(rows, cols)],
        lane.rows[rows],
        lane.cols[cols],
        lane.row_groups[rows],
        lane.col_groups[cols],
    )
