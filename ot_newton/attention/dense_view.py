"""Host-side dense view of lanes for certificates: scores, support, active tokens, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ot_newton.attention.arguments import Call
from ot_newton.attention.feasibility import concrete


@dataclass(frozen=True, eq=False)
class DenseLane:
    """One lane restricted to its active tokens; `scores` is `-inf` outside the support.

    Attributes:
        scores: (n', m'), float64.
        rows: indices of the active queries.
        cols: indices of the active keys.
        row_groups: segment of each active query, dustbin slots and unsegmented tokens 0.
        col_groups: the same for keys.
    """

    scores: np.ndarray
    rows: np.ndarray
    cols: np.ndarray
    row_groups: np.ndarray
    col_groups: np.ndarray

    @property
    def strictly_positive(self) -> bool:
        """Whether every active query meets every active key of its segment."""
        same = self.row_groups[:, None] == self.col_groups[None, :]
        return bool(np.all(np.isfinite(self.scores) | ~same))


def need_concrete(name: str, value: Any) -> np.ndarray:
    """The values of an array, or an error that says to leave the trace.

    Raises:
        TypeError: the array is traced.
    """
    found = concrete(value)
    if found is None:
        raise TypeError(
            f"{name} must be a concrete array, got a traced one: certificates run outside jit and vmap"
        )
    return found


def dense_lane(call: Call, index: tuple[int, ...]) -> DenseLane:
    """The dense view of one lane: O(n m) memory on the host."""
    lane, slots = call.lane, call.config.slots
    q, k = (need_concrete(name, x)[index].astype(np.float64) for name, x in (("q", lane.q), ("k", lane.k)))
    a, b = need_concrete("a", lane.a)[index], need_concrete("b", lane.b)[index]
    n, m = call.n, call.m
    inside = np.abs(np.arange(n)[:, None] - np.arange(m)[None, :]) <= call.config.bandwidth
    groups = [np.zeros(n + slots, int), np.zeros(m + slots, int)]
    if lane.q_ids is not None and lane.k_ids is not None:
        q_ids, k_ids = np.asarray(lane.q_ids)[index], np.asarray(lane.k_ids)[index]
        inside &= q_ids[:, None] == k_ids[None, :]
        if not slots:  # a dustbin joins the segments into one problem
            groups = [q_ids.astype(int), k_ids.astype(int)]
    support = np.pad(inside, ((0, slots), (0, slots)), constant_values=True)
    rows, cols = np.flatnonzero(a > 0), np.flatnonzero(b > 0)
    scores = np.where(support, q @ k.T, -np.inf)[np.ix_(rows, cols)]
    return DenseLane(scores, rows, cols, groups[0][rows], groups[1][cols])


def lane_indices(call: Call) -> Iterator[tuple[int, ...]]:
    """Indices of all lanes."""
    return iter(np.ndindex(*call.lane.q.shape[:-2]))
