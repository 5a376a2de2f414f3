"""Adam on many regression problems at once: one batch of plans per step, lanes released one by one.

Every step extrapolates the potentials of all live lanes and brings each lane to its own tolerance: plans
that can be stored one after the other by `LogNewton` (a kernel stays in the cache until its lane is done),
larger ones by packed Sinkhorn iterations (lanes that met their tolerance leave the batch). The few that are
left go to their own loss. A lane's numbers obey the same inner tolerance as a run of its own: gradient error
at most 1% of the gradient.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ot_newton.backends.select import get_backend
from ot_newton.errors import check_integer, check_number
from ot_newton.experiments.data import RegressionData
from ot_newton.experiments.regression_inner import LogNewton, bound
from ot_newton.experiments.regression_loss import FIRST_TOL, RegressionLoss
from ot_newton.hessian import gradient_x
from ot_newton.packing import BatchOptions, BatchRun, run_batch
from ot_newton.potentials import Biases, biases_to_potentials
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter
from ot_newton.result import SinkhornResult
from ot_newton.solve import start_biases
from ot_newton.stage import noise_floor

__all__ = ["AdamBatch", "BatchedLoss", "Lane"]

SWEEPS = 5
BACKEND = "cpu"
CHECK_PASSES = 3
SUMS_PASSES = 2
MARGIN = 0.7


@dataclass
class Lane:
    """One problem of a batch.

    Attributes:
        data: the problem.
        loss: its own loss, which counts its passes.
        values: loss at every step.
        norms: gradient norm at every step.
        passes: plan passes so far, at every step.
        probes: (step, lambda_min, lambda_max) of every probe.
        largest: largest gradient norm so far.
    """

    data: RegressionData
    loss: RegressionLoss
    values: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    probes: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def largest(self) -> float:
        """Largest gradient norm so far."""
        return max(self.norms, default=0.0)

    def record(self, value: float, gradient: Tensor) -> None:
        """Keep what was found at a step."""
        self.values.append(value)
        self.norms.append(float(gradient.norm()))
        self.passes.append(self.loss.plan_passes)

    def passes_to(self, relative: float) -> int | None:
        """Plan passes to `|g_k| <= relative max_{j<=k} |g_j|`, None if that was never met."""
        largest = 0.0
        for norm, passes in zip(self.norms, self.passes, strict=True):
            largest = max(largest, norm)
            if norm <= relative * largest:
                return passes
        return None


class BatchedLoss:
    """Values and gradients of several `RegressionLoss` at their own W.

    Args:
        losses: of problems with equal shapes and eps.

    Attributes:
        lane_iterations: Sinkhorn iterations, summed over lanes.
        finished_alone: evaluations that a lane's own Newton method had to finish.
    """

    def __init__(self, losses: Sequence[RegressionLoss]) -> None:
        self.losses = list(losses)
        self.x = torch.stack([loss.x for loss in losses])
        self.y = torch.stack([loss.y for loss in losses])
        self.wanted = [FIRST_TOL] * len(self.losses)
        self.lane_iterations = self.finished_alone = 0
        self.stored = all(loss.near is not None for loss in losses)
        if self.stored:
            room = self.x.new_empty(self.x.shape[1], self.y.shape[1])
            for loss in losses:
                loss.near = LogNewton(room)

    def value_and_grad(self, w: Tensor, ids: Sequence[int]) -> list[tuple[float, Tensor]]:
        """(value, gradient) of each lane of ``ids`` at its row of ``w`` (B, dX, dY)."""
        starts = {k: self.losses[k].predict(w[k]) for k in ids}
        found = {k: self._alone(w, k) for k in ids if starts[k] is None}
        swept = [k for k in ids if k not in found]
        if swept:
            finish = self._solve_stored if self.stored else self._sweep
            finish(w, swept, [starts[k] for k in swept], found)
        return [found[k] for k in ids]

    def _solve_stored(self, w: Tensor, lanes: list[int], starts: list[Any], found: dict[int, Any]) -> None:
        """`LogNewton` lane by lane; gradients and values of all lanes at once."""
        problem = OTProblem(self.x[lanes] @ w[lanes], self.y[lanes], eps=self.losses[lanes[0]].eps)
        start = start_biases(problem, tuple(torch.stack([s[side] for s in starts]) for side in (0, 1)))
        assert start is not None
        floor, c = 4 * noise_floor(problem), problem.centred
        ends, sums = [], []
        for k, lane, y in zip(lanes, bound(problem, start), c.y, strict=True):
            solver = self.losses[k].near
            assert solver is not None
            ends.append(solver.solve(lane, max(floor, MARGIN * self.wanted[k])))
            sums.append(solver.transport(torch.cat([torch.ones_like(y[:, :1]), y], 1)))
        rows = torch.stack(sums)
        cloud = gradient_x(problem.cost_scale, c.x, rows[:, :, 0], rows[:, :, 1:], c.shift)
        gradients = self.x[lanes].mT @ cloud
        biases = Biases(torch.stack([end.row for end in ends]), torch.stack([end.col for end in ends]))
        f, g = biases_to_potentials(problem, biases)
        # The dual value; the mass of a plan with exact rows is 1.
        values = (c.a * f).sum(-1) + (c.b * g).sum(-1)
        for row, (k, end) in enumerate(zip(lanes, ends, strict=True)):
            loss = self.losses[k]
            self.lane_iterations += end.iterations
            loss.plan_passes += end.passes + 1
            loss.n_sinkhorn += end.iterations
            earlier = loss.warm_state()["points"][:1]
            if not end.converged:
                found[k] = self._alone(w, k)
                continue
            loss.load_warm_state({"points": [(w[k].clone(), f[row], g[row]), *earlier]})
            found[k] = (float(values[row]), gradients[row])
            if end.error > max(loss.error_wanted(gradients[row]), floor):
                found[k] = self._alone(w, k, earlier)
            self.wanted[k] = min(FIRST_TOL, loss.error_wanted(found[k][1]))

    def _sweep(self, w: Tensor, lanes: list[int], starts: list[Any], found: dict[int, Any]) -> None:
        """Packed iterations, each lane to its own tolerance; what they leave is finished alone."""
        problem = OTProblem(self.x[lanes] @ w[lanes], self.y[lanes], eps=self.losses[lanes[0]].eps)
        init = tuple(torch.stack([start[side] for start in starts]) for side in (0, 1))
        floor = 4 * noise_floor(problem)
        limits = torch.tensor([max(floor, self.wanted[k]) for k in lanes], dtype=torch.float64)
        run = run_batch(
            problem,
            get_backend(BACKEND),
            BatchOptions(limits, SWEEPS, "packed", 1),
            PassCounter(),
            start_biases(problem, init),
        )
        self.lane_iterations += run.lane_iterations
        result = _as_result(problem, run)
        gradients = self.x[lanes].mT @ result.gradient("x")
        values, f, g = result.value, result.f, result.g
        for row, k in enumerate(lanes):
            loss = self.losses[k]
            loss.plan_passes += 2 * int(run.depth[row]) + CHECK_PASSES + SUMS_PASSES
            loss.n_sinkhorn += int(run.depth[row])
            earlier = loss.warm_state()["points"][:1]
            loss.load_warm_state({"points": [(w[k].clone(), f[row], g[row]), *earlier]})
            good = float(run.error[row]) <= max(loss.error_wanted(gradients[row]), floor)
            found[k] = (float(values[row]), gradients[row])
            if not good or not math.isfinite(found[k][0]):
                found[k] = self._alone(w, k, earlier)
            self.wanted[k] = min(FIRST_TOL, loss.error_wanted(found[k][1]))

    def _alone(self, w: Tensor, k: int, earlier: Sequence[Any] = ()) -> tuple[float, Tensor]:
        """The lane's own loss, started from what its warm state holds."""
        loss = self.losses[k]
        value, gradient = loss.value_and_grad(w[k])
        self.finished_alone += 1
        # Two potentials at one W would leave nothing to extrapolate along.
        loss.load_warm_state({"points": [loss.warm_state()["points"][0], *earlier]})
        self.wanted[k] = min(FIRST_TOL, loss.error_wanted(gradient))
        return value, gradient


def _as_result(problem: OTProblem, run: BatchRun) -> SinkhornResult:
    """The batch as one result, for gradients and values of all lanes at once."""
    return SinkhornResult(
        problem=problem,
        biases=run.biases,
        statuses=run.statuses,
        iterations=run.depth,
        errors=run.error,
        noise_floor=noise_floor(problem),
        tol=float(run.error.max()),
        counter=PassCounter(),
        history=run.history,
        backend=BACKEND,
    )


class AdamBatch:
    """Adam with one step size on several problems of equal shape.

    Args:
        problems: lanes.
        starts: (B, dX, dY).
        eps: regularization.
        lr: step size.
        decay_steps: cosine decay to 0 over so many steps; None for a constant step size.

    Attributes:
        lanes: a `Lane` per problem.
        live: lanes not released.
        step: steps taken.
        seconds: time spent so far.
    """

    def __init__(
        self,
        problems: Sequence[RegressionData],
        starts: Tensor,
        *,
        eps: float,
        lr: float,
        decay_steps: int | None = None,
    ) -> None:
        check_number("lr", lr)
        self.lanes = [Lane(data, RegressionLoss(data.x, data.y, eps=eps)) for data in problems]
        self.batch = BatchedLoss([lane.loss for lane in self.lanes])
        self.parameter = starts.clone().requires_grad_(True)
        self.optimizer = torch.optim.Adam([self.parameter], lr=lr)
        self.schedule = None
        if decay_steps is not None:
            steps = check_integer("decay_steps", decay_steps, low=1)
            self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.live = list(range(len(self.lanes)))
        self.step, self.seconds = 0, 0.0

    def w(self, k: int) -> Tensor:
        """Where lane ``k`` is."""
        return self.parameter.detach()[k].clone()

    def evaluate(self) -> Tensor:
        """Record value and gradient of all live lanes; returns gradients (B, dX, dY), 0 if released."""
        began = time.perf_counter()
        gradient = torch.zeros_like(self.parameter)
        pairs = self.batch.value_and_grad(self.parameter.detach(), self.live)
        for k, (value, own) in zip(self.live, pairs, strict=True):
            self.lanes[k].record(value, own)
            gradient[k] = own
        self.seconds += time.perf_counter() - began
        return gradient

    def advance(self, gradient: Tensor) -> None:
        """One step of Adam for all live lanes; the others stay where they are."""
        before = self.parameter.detach().clone()
        self.parameter.grad = gradient
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        gone = [k for k in range(len(self.lanes)) if k not in self.live]
        with torch.no_grad():
            self.parameter[gone] = before[gone]
        self.step += 1

    def save(self, path: Path, tag: Sequence[str]) -> None:
        """Write everything a later process needs to go on; the old file is replaced at once.

        Kept inverses are dropped, here as there, so that a resumed run takes the same steps.

        Args:
            path: of the checkpoint.
            tag: names of the lanes.
        """
        state = {
            "tag": list(tag),
            "parameter": self.parameter.detach(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "live": self.live,
            "step": self.step,
            "seconds": self.seconds,
            "wanted": self.batch.wanted,
            "counts": (self.batch.lane_iterations, self.batch.finished_alone),
            "lanes": [self._lane_state(lane) for lane in self.lanes],
        }
        for lane in self.lanes:
            if lane.loss.near is not None:
                lane.loss.near.inverse = None
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    @staticmethod
    def saved_tag(path: Path) -> list[str]:
        """Names of the lanes in a checkpoint, none without one."""
        return list(torch.load(path, weights_only=True)["tag"]) if path.exists() else []

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote, with the same lanes in the same order."""
        state = torch.load(path, weights_only=True)
        with torch.no_grad():
            self.parameter.copy_(state["parameter"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.live, self.step, self.seconds = list(state["live"]), state["step"], state["seconds"]
        self.batch.wanted = list(state["wanted"])
        self.batch.lane_iterations, self.batch.finished_alone = state["counts"]
        for lane, saved in zip(self.lanes, state["lanes"], strict=True):
            lane.values, lane.norms = list(saved["values"]), list(saved["norms"])
            lane.passes, lane.probes = list(saved["passes"]), list(saved["probes"])
            lane.loss.load_warm_state({"points": saved["points"]})
            lane.loss.plan_passes, lane.loss.n_sinkhorn, lane.loss.n_hessian = saved["counts"]

    @staticmethod
    def _lane_state(lane: Lane) -> dict[str, Any]:
        return {
            "values": lane.values,
            "norms": lane.norms,
            "passes": lane.passes,
            "probes": lane.probes,
            "points": lane.loss.warm_state()["points"],
            "counts": (lane.loss.plan_passes, lane.loss.n_sinkhorn, lane.loss.n_hessian),
        }
