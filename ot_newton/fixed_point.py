"""Sinkhorn's fixed point on any backend: updates, annealing, stopping (MATH 2).

One iteration is one f and one g update (`Stage`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ot_newton.errors import Status
from ot_newton.potentials import Biases, squared_norms
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter, PlanBackend
from ot_newton.stage import Stage, noise_floor

__all__ = ["FixedPoint", "IterationInfo", "SinkhornOptions", "run_sinkhorn"]

STALL_WINDOW = 50
RATE_WINDOW = 5
STALL_RATIO = 0.999
STALL_FLOOR_FACTOR = 1e3
ANNEAL_RATIO = 0.5
ANNEAL_FROM = 1024.0


@dataclass(frozen=True)
class IterationInfo:
    """One row of the history, and what a callback receives.

    Attributes:
        n_iter: iterations done.
        eps: the eps of this iteration (larger than the problem's while annealing).
        marginal_error: largest L1 marginal error over the lanes, relative to the mass; nan while annealing.
        plan_passes: cumulative.
        seconds: since the start.
    """

    n_iter: int
    eps: float
    marginal_error: float
    plan_passes: int
    seconds: float


@dataclass(frozen=True)
class SinkhornOptions:
    """Validated options of one solve.

    Attributes:
        tol: marginal error to reach, 0 for exactly ``max_iter`` iterations.
        max_iter: cap on the iterations.
        update: "alternating", "symmetric", or "self" for OT(x, x): one averaged update of f = g, one pass.
        anneal: whether annealing may be used.
        check_every: iterations between two looks at the error.
        patience: a lane whose rate foretells more iterations than this is given up as slow.
        callback: see `sinkhorn`.
    """

    tol: float
    max_iter: int
    update: str = "alternating"
    anneal: bool = True
    check_every: int = 1
    patience: float = float("inf")
    callback: Callable[[IterationInfo], object] | None = None


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """Biases at the end of the iteration, per-lane diagnoses.

    Attributes:
        biases: final `w (B,n)`, `u (B,m)` at the problem's eps.
        stage: the clouds bound at the problem's eps.
        statuses: one per lane.
        n_iter: (B,) iterations.
        marginal_error: (B,) larger of both sides' L1 errors, relative to the mass.
        history: one row per check.
        slow: (B,) lanes given up because their rate foretells more than ``patience`` iterations.
        lse: `L (B,n)` and `M (B,m)` at the final biases, from the audit (M None for "self").
    """

    biases: Biases
    stage: Stage
    statuses: tuple[Status, ...]
    n_iter: Tensor
    marginal_error: Tensor
    history: tuple[IterationInfo, ...] = field(repr=False)
    slow: Tensor
    lse: tuple[Tensor, Tensor | None] = field(repr=False)

    def lane(self, k: int) -> FixedPoint:
        """One lane."""
        if len(self.statuses) == 1:
            return self
        one = torch.tensor([k], device=self.slow.device)
        row, col = self.lse
        return replace(
            self,
            biases=Biases(self.biases.row[one], self.biases.col[one]),
            stage=self.stage.take(one),
            statuses=(self.statuses[k],),
            n_iter=self.n_iter[one],
            marginal_error=self.marginal_error[one],
            slow=self.slow[one],
            lse=(row[one], None if col is None else col[one]),
        )

    def with_lane(self, k: int, other: FixedPoint) -> FixedPoint:
        """This one with a lane that went on by itself; its history follows."""
        if len(self.statuses) == 1:
            return replace(other, history=self.history + other.history)
        row, col = self.biases.row.clone(), self.biases.col.clone()
        n_iter, error = self.n_iter.clone(), self.marginal_error.clone()
        row[k], col[k] = other.biases.row[0], other.biases.col[0]
        n_iter[k], error[k] = other.n_iter[0], other.marginal_error[0]
        statuses = (*self.statuses[:k], other.statuses[0], *self.statuses[k + 1 :])
        return replace(
            self,
            biases=Biases(row, col),
            n_iter=n_iter,
            marginal_error=error,
            statuses=statuses,
            history=self.history + other.history,
        )


def _schedule(problem: OTProblem, options: SinkhornOptions) -> list[float]:
    """Decreasing eps of the annealing iterations, empty when eps is not small against the cost."""
    largest = problem.cost_scale * problem.centred.max_cost
    if not options.anneal or problem.eps * ANNEAL_FROM >= largest:
        return []
    steps = min(options.max_iter // 2, math.ceil(math.log2(min(largest / problem.eps, 2.0**60))))
    ratio = ANNEAL_RATIO if steps == 0 else (problem.eps / largest) ** (1.0 / steps)
    return [largest * ratio**k for k in range(steps)]


class _Stall:
    """Mean error of the last window against the one before, near the rounding floor only."""

    def __init__(self, floor: float) -> None:
        self.limit = STALL_FLOOR_FACTOR * floor
        self.errors: list[float] = []

    def stalled(self, error: float) -> bool:
        self.errors.append(error)
        if len(self.errors) < 2 * STALL_WINDOW or error > self.limit:
            return False
        last = sum(self.errors[-STALL_WINDOW:])
        return last >= STALL_RATIO * sum(self.errors[-2 * STALL_WINDOW : -STALL_WINDOW])

    def foretold(self, tol: float) -> float:
        """Checks still needed at the rate of the last `RATE_WINDOW` ones; 0 while there are too few."""
        if len(self.errors) <= 2 * RATE_WINDOW:
            return 0.0
        now, then = self.errors[-1], self.errors[-1 - RATE_WINDOW]
        if not 0.0 < now < then:
            return float("inf")
        return RATE_WINDOW * math.log(now / tol) / math.log(then / now)


class _Run:
    """The loop over iterations of all lanes; `terminate` judges, `step` moves."""

    def __init__(
        self, problem: OTProblem, backend: PlanBackend, options: SinkhornOptions, counter: PassCounter
    ) -> None:
        self.problem, self.backend, self.options, self.counter = problem, backend, options, counter
        lanes, device = problem.lanes, problem.device
        self.status: list[Status | None] = [None] * lanes
        self.active = torch.ones(lanes, dtype=torch.bool, device=device)
        self.n_iter = [0] * lanes
        self.errors = [math.nan] * lanes
        self.slow = [False] * lanes
        self.stalls = [_Stall(noise_floor(problem)) for _ in range(lanes)]
        self.history: list[IterationInfo] = []
        self.start = time.perf_counter()
        self.w: Tensor | None = None
        self.u = torch.empty(0)
        self.row: Tensor | None = None

    def _finish(self, ended: dict[int, Status]) -> None:
        """End some running lanes; they stop changing."""
        if ended:
            for lane, status in ended.items():
                self.status[lane] = status
            running = [status is None for status in self.status]
            self.active = torch.tensor(running, device=self.active.device)

    def running(self) -> list[int]:
        """Lanes without a status yet."""
        return [lane for lane, status in enumerate(self.status) if status is None]

    def record(self, iteration: int, eps: float) -> None:
        """Append a history row and ask the callback."""
        passes, seconds = self.counter.passes, time.perf_counter() - self.start
        row = IterationInfo(iteration, eps, max(self.errors), passes, seconds)
        self.history.append(row)
        if self.options.callback is None:
            return
        try:
            stop = bool(self.options.callback(row))
        except StopIteration:
            stop = True
        if stop:
            self._finish(dict.fromkeys(self.running(), Status.CALLBACK))

    def terminate(self, iteration: int, error: Tensor) -> None:
        """Judge every running lane on its marginal error; the one look at device values per check."""
        ended: dict[int, Status] = {}
        values = error.tolist()
        for lane in self.running():
            self.errors[lane], self.n_iter[lane] = values[lane], iteration
            # A start from far away may overflow here and be healed by the first update.
            healing = iteration == 0 and not math.isfinite(values[lane])
            status = None if healing else self._judge(lane, values[lane])
            if status is not None:
                ended[lane] = status
        self._finish(ended)

    def _judge(self, lane: int, error: float) -> Status | None:
        """Status of a lane at this error, None to go on."""
        tol, patience = self.options.tol, self.options.patience
        if not math.isfinite(error):
            return Status.NAN
        if tol == 0:
            return None
        if error <= tol:
            return Status.CONVERGED
        if self.stalls[lane].stalled(error):
            return Status.STAGNATION
        if self.stalls[lane].foretold(tol) * self.options.check_every > patience:
            self.slow[lane] = True
            return Status.MAX_ITER
        return None

    def _keep(self, new: Tensor, old: Tensor | None) -> Tensor:
        """Finished lanes stop changing."""
        return new if old is None else torch.where(self.active[:, None], new, old)

    def rescale(self, factor: float) -> None:
        """Carry the biases to another eps: a bias is a potential over eps."""
        self.w = None if self.w is None else self.w * factor
        self.u = self.u * factor

    def iterate(self, stage: Stage, iteration: int, *, judge: bool) -> bool:
        """One check and one iteration at this stage; False when nothing is left to do."""
        symmetric = self.options.update == "symmetric"
        lse = stage.lse_x(self.w, self.u)
        # Columns are exact after a g update, but not at a start that was handed in.
        two_sided = self.w is not None and (symmetric or (judge and iteration == 0))
        lse_y = stage.lse_y(self.w, self.u) if two_sided and self.w is not None else None
        if judge and self.w is not None and self._due(iteration):
            error = stage.x.error(self.w, lse)
            if lse_y is not None:
                error = torch.maximum(error, stage.y.error(self.u, lse_y))
            self.terminate(iteration, error)
            self.record(iteration, stage.eps)
        if iteration >= self.options.max_iter or None not in self.status:
            self.row = lse
            return False
        new_w = stage.x.update(lse)
        if self.options.update == "self":
            average = new_w if self.w is None else (self.w + new_w) / 2
            self.w = self._keep(average, self.w)
            self.u = self.w
            return True
        if not symmetric or lse_y is None:
            self.w = self._keep(new_w, self.w)
            self.u = self._keep(stage.y.update(stage.lse_y(self.w, self.u)), self.u)
            return True
        assert self.w is not None
        self.u = self._keep((self.u + stage.y.update(lse_y)) / 2, self.u)
        self.w = self._keep((self.w + new_w) / 2, self.w)
        return True

    def _due(self, iteration: int) -> bool:
        return iteration % self.options.check_every == 0 or iteration >= self.options.max_iter

    def audit(self, stage: Stage) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
        """(B,) larger L1 error of both sides at the final biases, and the sums it was made of."""
        assert self.w is not None
        row = stage.lse_x(self.w, self.u) if self.row is None else self.row
        error = stage.x.error(self.w, row)
        if self.options.update == "self":
            return error, (row, None)
        col = stage.lse_y(self.w, self.u)
        return torch.maximum(error, stage.y.error(self.u, col)), (row, col)

    def run(self, init: Biases | None) -> FixedPoint:
        """Anneal, iterate, audit."""
        problem, final = self.problem, self.problem.eps
        schedule = _schedule(problem, self.options) if init is None else []
        first = schedule[0] if schedule else final
        if init is None:
            self.u = -squared_norms(problem, first)[1]
        else:
            self.w, self.u = init.row.clone(), init.col.clone()
        for step, eps in enumerate(schedule):
            stage = Stage.bind(problem, self.backend, self.counter, eps)
            self.iterate(stage, step, judge=False)
            self.rescale(eps / (schedule[step + 1] if step + 1 < len(schedule) else final))
        stage = Stage.bind(problem, self.backend, self.counter, final)
        iteration = len(schedule)
        while self.iterate(stage, iteration, judge=True):
            iteration += 1
        if self.w is None:  # max_iter = 0 without a start
            self.w = stage.x.update(stage.lse_x(None, self.u))
        self._finish(dict.fromkeys(self.running(), Status.MAX_ITER))
        error, lse = self.audit(stage)
        self._demote(error.tolist())
        return FixedPoint(
            Biases(self.w, self.u),
            stage,
            tuple(status or Status.NAN for status in self.status),
            torch.tensor(self.n_iter, device=problem.device),
            error,
            tuple(self.history),
            torch.tensor(self.slow, device=problem.device),
            lse,
        )

    def _demote(self, errors: list[float]) -> None:
        """The two-sided audit has the last word: a lane it contradicts has stagnated."""
        for lane, error in enumerate(errors):
            if math.isnan(error):
                self.status[lane] = Status.NAN
            elif self.status[lane] is Status.CONVERGED and error > self.options.tol:
                self.status[lane] = Status.STAGNATION


def run_sinkhorn(
    problem: OTProblem,
    backend: PlanBackend,
    options: SinkhornOptions,
    counter: PassCounter,
    init: Biases | None = None,
) -> FixedPoint:
    """Iterate to the fixed point.

    Args:
        problem: validated problem.
        backend: how to stream.
        options: tolerance, caps, update rule.
        counter: counts plan passes.
        init: biases to start from; a start skips annealing.

    Returns:
        Biases and diagnoses. Cost: 2 passes per iteration, 2 for the last check and the two-sided audit.
    """
    return _Run(problem, backend, options, counter).run(init)
