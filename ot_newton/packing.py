"""Many independent problems as one batch: fixed, masked or packed lanes.

Lanes finish at different depths. `fixed` iterates all of them until all pass at once, `masked` freezes
those that have passed, `packed` takes them out of the batch, so that the work is the sum of the depths.
A lane is screened on its row marginal (the columns are exact after a g update), and released only after
an independent two-sided check of its plan; it is released once, under its own id.

Scheme: active packing after DrainSinkhorn (arXiv 2607.24741), on any backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ot_newton.errors import Status
from ot_newton.fixed_point import IterationInfo
from ot_newton.potentials import Biases, squared_norms
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter, PlanBackend
from ot_newton.stage import Stage

__all__ = ["BatchOptions", "BatchRun", "run_batch"]


@dataclass(frozen=True)
class BatchOptions:
    """Validated options of a batch; ``tol`` (B,) is each lane's own tolerance."""

    tol: Tensor
    max_iter: int
    mode: str
    check_every: int
    callback: Callable[[IterationInfo], object] | None = None


@dataclass(frozen=True, eq=False)
class BatchRun:
    """Where every lane ended.

    Attributes:
        biases: final biases of all lanes.
        statuses: one per lane.
        depth: (B,) iterations at release (or at the end).
        error: (B,) two-sided marginal error at release.
        lane_iterations: lanes iterated, summed over iterations.
        verifications: two-sided checks made.
        recrossings: (B,) how often a lane's error went back above the tolerance after having met it.
        profile: (iteration, (B,) screened errors, nan for lanes already taken out) at every audit.
    """

    biases: Biases
    statuses: tuple[Status, ...]
    depth: Tensor
    error: Tensor
    lane_iterations: int
    verifications: int
    recrossings: Tensor
    profile: tuple[tuple[int, Tensor], ...] = field(repr=False)
    history: tuple[IterationInfo, ...] = field(default=(), repr=False)


class _Batch:
    """Live lanes `ids` with their biases; everything released is written once into the outputs."""

    def __init__(
        self,
        problem: OTProblem,
        backend: PlanBackend,
        options: BatchOptions,
        counter: PassCounter,
        start: Biases | None,
    ) -> None:
        self.options, self.counter = options, counter
        self.stage = Stage.bind(problem, backend, counter, problem.eps)
        lanes, device = problem.lanes, problem.device
        self.ids = torch.arange(lanes, device=device)
        self.tol = options.tol.to(device)
        self.w = None if start is None else start.row.clone()
        self.u = -squared_norms(problem, problem.eps)[1] if start is None else start.col.clone()
        self.live = torch.ones(lanes, dtype=torch.bool, device=device)
        self.out = Biases(torch.empty_like(problem.centred.a), torch.empty_like(problem.centred.b))
        self.statuses = [Status.MAX_ITER] * lanes
        self.depth = torch.zeros(lanes, dtype=torch.int64, device=device)
        self.error = torch.full((lanes,), float("nan"), dtype=torch.float64, device=device)
        self.met = torch.zeros(lanes, dtype=torch.bool, device=device)
        self.recrossings = torch.zeros(lanes, dtype=torch.int64, device=device)
        self.lane_iterations = self.verifications = 0
        self.profile: list[tuple[int, Tensor]] = []
        self.history: list[IterationInfo] = []
        self.start = time.perf_counter()

    def screen(self, iteration: int, lse: Tensor) -> Tensor:
        """(live width) one-sided errors, recorded with the re-crossings they reveal."""
        assert self.w is not None
        error = self.stage.x.error(self.w, lse)
        row = torch.full_like(self.error, float("nan"))
        row[self.ids] = error
        self.profile.append((iteration, row))
        met = self.met[self.ids]
        below = error <= self.tol
        self.recrossings[self.ids] += (met & ~below).to(torch.int64)
        self.met[self.ids] = below
        seconds = time.perf_counter() - self.start
        worst = float(torch.where(self.live, error, torch.zeros_like(error)).max())
        self.history.append(IterationInfo(iteration, self.stage.eps, worst, self.counter.passes, seconds))
        return error

    def verify(self, lanes: Tensor) -> Tensor:
        """(k,) two-sided errors of some live lanes, from products with their plans.

        One by one: a product of several lanes may round differently, and a verdict must not depend on
        the neighbours.
        """
        assert self.w is not None
        self.verifications += int(lanes.numel())
        each = [self.stage.take(one).two_sided(self.w[one], self.u[one]) for one in lanes[:, None]]
        return torch.cat(each)

    def release(self, lanes: Tensor, error: Tensor, iteration: int, status: Status | None = None) -> None:
        """Write live lanes into the outputs under their own ids."""
        assert self.w is not None
        ids = self.ids[lanes]
        self.out.row[ids], self.out.col[ids] = self.w[lanes], self.u[lanes]
        self.error[ids], self.depth[ids] = error, iteration
        limits = self.tol[lanes].tolist()
        for lane, value, limit in zip(ids.tolist(), error.tolist(), limits, strict=True):
            done = Status.CONVERGED if value <= limit else Status.MAX_ITER
            self.statuses[lane] = Status.NAN if value != value else (status or done)
        self.live[lanes] = False

    def audit(self, iteration: int, lse: Tensor) -> None:
        """Screen, verify, release; pack if asked for."""
        error = self.screen(iteration, lse)
        broken = (self.live & ~torch.isfinite(error)).nonzero()[:, 0]
        if broken.numel():
            self.release(broken, error[broken], iteration, Status.NAN)
        passing = self.live & (error <= self.tol)
        if self.options.mode == "fixed" and not bool((passing | ~self.live).all()):
            return
        candidates = passing.nonzero()[:, 0]
        if candidates.numel() == 0:
            return
        checked = self.verify(candidates)
        good = checked <= self.tol[candidates]
        if self.options.mode == "fixed" and not bool(good.all()):
            return
        self.release(candidates[good], checked[good], iteration)
        if self.options.mode == "packed":
            self.pack()

    def pack(self) -> None:
        """Keep the live lanes only."""
        keep = self.live.nonzero()[:, 0]
        if keep.numel() == self.live.numel() or keep.numel() == 0:
            return
        assert self.w is not None
        self.stage = self.stage.take(keep)
        self.ids, self.tol = self.ids[keep], self.tol[keep]
        self.w, self.u = self.w[keep], self.u[keep]
        self.live = self.live[keep]

    def step(self, lse: Tensor) -> None:
        """One iteration of the lanes in the batch; released ones stay frozen."""
        self.lane_iterations += int(self.live.numel())
        new = self.stage.x.update(lse)
        self.w = new if self.w is None else torch.where(self.live[:, None], new, self.w)
        moved = self.stage.y.update(self.stage.lse_y(self.w, self.u))
        self.u = torch.where(self.live[:, None], moved, self.u)

    def asked_to_stop(self) -> bool:
        """Whether the callback wants an end."""
        if self.options.callback is None or not self.history:
            return False
        try:
            return bool(self.options.callback(self.history[-1]))
        except StopIteration:
            return True

    def run(self) -> BatchRun:
        """Iterate until every lane is released or the cap is met."""
        status: Status | None = None
        iteration = 0
        while True:
            lse = self.stage.lse_x(self.w, self.u)
            last = iteration >= self.options.max_iter
            due = last or iteration % self.options.check_every == 0
            if self.w is not None and due:
                before = self.ids
                self.audit(iteration, lse)
                lse = lse[torch.isin(before, self.ids)]
                if self.asked_to_stop():
                    status = Status.CALLBACK
            if last or status is not None or not bool(self.live.any()):
                break
            self.step(lse)
            iteration += 1
        left = self.live.nonzero()[:, 0]
        if left.numel():
            if self.w is None:
                self.w = self.stage.x.update(lse)
            self.release(left, self.verify(left), iteration, status)
        return BatchRun(
            self.out,
            tuple(self.statuses),
            self.depth,
            self.error,
            self.lane_iterations,
            self.verifications,
            self.recrossings,
            tuple(self.profile),
            tuple(self.history),
        )


def run_batch(
    problem: OTProblem,
    backend: PlanBackend,
    options: BatchOptions,
    counter: PassCounter,
    start: Biases | None = None,
) -> BatchRun:
    """Iterate a batch of independent lanes; no annealing, so that no lane depends on another.

    Args:
        problem: a batched problem; zero-weight atoms as padding.
        backend: how to stream.
        options: tolerance, cap, mode, audit cadence.
        counter: counts plan passes (a pass over the batch counts once).
        start: biases of all lanes.

    Returns:
        Where every lane ended.
    """
    return _Batch(problem, backend, options, counter, start).run()
