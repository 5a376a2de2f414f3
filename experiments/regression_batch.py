"""Adam on many regression problems at once: one stacked parameter, lanes released one by one.

Every lane's loss is solved by itself, by Newton from potentials that follow its W and with the inverse it
keeps: packed Sinkhorn iterations would go at Sinkhorn's rate, which outlying points ruin here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import check_integer, check_number
from ot_newton.experiments.data import RegressionData
from ot_newton.experiments.regression_loss import RegressionLoss

__all__ = ["AdamBatch", "Lane"]


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
        for k in self.live:
            value, gradient[k] = self.lanes[k].loss.value_and_grad(self.parameter.detach()[k])
            self.lanes[k].record(value, gradient[k])
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
        for lane in self.lanes:
            lane.loss.release()
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
        state: dict[str, Any] = {
            "tag": list(tag),
            "parameter": self.parameter.detach(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "live": self.live,
            "step": self.step,
            "seconds": self.seconds,
            "lanes": [self._lane_state(lane) for lane in self.lanes],
        }
        for lane, saved in zip(self.lanes, state["lanes"], strict=True):
            lane.loss.load_warm_state(saved["warm"])
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
        for lane, saved in zip(self.lanes, state["lanes"], strict=True):
            lane.values, lane.norms = list(saved["values"]), list(saved["norms"])
            lane.passes, lane.probes = list(saved["passes"]), list(saved["probes"])
            lane.loss.load_warm_state(saved["warm"])
            lane.loss.plan_passes, lane.loss.n_sinkhorn, lane.loss.n_hessian = saved["counts"]

    @staticmethod
    def _lane_state(lane: Lane) -> dict[str, Any]:
        return {
            "values": lane.values,
            "norms": lane.norms,
            "passes": lane.passes,
            "probes": lane.probes,
            "warm": lane.loss.warm_state(inverses=False),
            "counts": (lane.loss.plan_passes, lane.loss.n_sinkhorn, lane.loss.n_hessian),
        }
