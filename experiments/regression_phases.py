"""The phases of the regression study that run all seeds as one batch: before the switch, and Adam alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ot_newton.errors import Status
from ot_newton.experiments.data import start
from ot_newton.experiments.regression_batch import AdamBatch, Lane
from ot_newton.experiments.regression_strategies import CONFIDENCE, ROUGH, curvature_at, stopping_rule
from ot_newton.experiments.runs import Row, Task, load_average, row_head
from ot_newton.experiments.shuffled_regression import RECOVERY_RADIUS
from ot_newton.solvers.spectra import EigenEstimate, lambda_min
from ot_newton.solvers.switching import FIRST_ORDER, NEWTON, STAY, CurvatureReport, EscapeState, decide

__all__ = ["adam_rows", "first_order_rows"]

CHECKPOINT_EVERY = 100


def _lane_curvature(lane: Lane, w: Tensor, *, threshold: float, seed: int) -> EigenEstimate:
    """The probe that SaddleEscape makes: all columns at once, for such small N."""
    hessian = lane.loss.hessian(w)
    return lambda_min(
        hessian, threshold=threshold, confidence=CONFIDENCE, seed=seed, noise_floor=hessian.noise_floor
    )


def first_order_rows(tasks: Sequence[Task]) -> Iterator[Row]:
    """Adam on all lanes as one batch; a lane's row holds the point at which each level released it.

    Yields:
        The rows as lanes are released at their last level.
    """
    s = tasks[0].settings
    data = [task.payload for task in tasks]
    batch = AdamBatch(data, torch.stack([start(one, 0) for one in data]), eps=s["eps"], lr=s["lr"])
    releases: list[dict[str, Row]] = [{} for _ in tasks]
    hvps, starts = [0] * len(tasks), [(0.0, 0.0)] * len(tasks)
    while batch.live:
        gradient = batch.evaluate()
        for k in list(batch.live):
            lane, w = batch.lanes[k], batch.w(k)
            last = batch.step >= s["max_first_order"]
            met = lane.norms[-1] <= s["gtol"] * lane.largest
            if not (last or met or batch.step % s["probe_every"] == 0):
                continue
            began = time.perf_counter()
            estimate = _lane_curvature(lane, w, threshold=0.0, seed=batch.step)
            batch.seconds += time.perf_counter() - began
            hvps[k] += estimate.n_hvp
            lane.probes.append((batch.step, estimate.value, estimate.lambda_max))
            if batch.step == 0:
                starts[k] = (estimate.value, estimate.lambda_max)
            for name, value, absolute in tasks[k].settings["levels"]:
                level = value / estimate.lambda_max if absolute else value
                reason = _fires(batch.step, estimate, level, met=met, last=last)
                if name not in releases[k] and reason:
                    releases[k][name] = _release(batch, k, hvps[k], level, reason)
            if len(releases[k]) == len(tasks[k].settings["levels"]):
                batch.live.remove(k)
                yield _phase_row(tasks[k], lane, releases[k], starts[k])
        if batch.live:
            batch.advance(gradient)


def _fires(step: int, estimate: EigenEstimate, level: float, *, met: bool, last: bool) -> str:
    """Why the lane is released at this level, "" if it is not."""
    report = CurvatureReport(
        step=step,
        gradient_met=met,
        lambda_min=estimate.value,
        lambda_max=estimate.lambda_max,
        sign=estimate.sign,
        confidence=estimate.confidence,
    )
    decision = decide(report, EscapeState(FIRST_ORDER, threshold=level, confidence=CONFIDENCE))
    if decision.action != STAY:
        return decision.reason
    return f"{step} first-order steps without safe curvature" if last else ""


def _release(batch: AdamBatch, k: int, n_hvp: int, threshold: float, reason: str) -> Row:
    lane = batch.lanes[k]
    last = lane.loss.warm_state(inverses=False)["last"]
    return {
        "step": batch.step,
        "threshold": threshold,
        "reason": reason,
        "fired": "above" in reason,
        "plan_passes": lane.loss.plan_passes,
        "passes_1e4": lane.passes_to(ROUGH),
        "n_hvp": n_hvp,
        "seconds": batch.seconds / len(batch.lanes),
        "w": batch.w(k).tolist(),
        "potentials": [last["f"].tolist(), last["g"].tolist()],
    }


def _phase_row(task: Task, lane: Lane, releases: dict[str, Row], curvature: tuple[float, float]) -> Row:
    return row_head(task) | {
        "status": "RELEASED",
        "success": True,
        "message": releases[task.settings["levels"][0][0]]["reason"],
        "load_average": load_average(),
        "releases": releases,
        "curvature_start": list(curvature),
        "values": lane.values,
        "norms": lane.norms,
        "passes": lane.passes,
        "probes": [list(probe) for probe in lane.probes],
    }


def adam_rows(tasks: Sequence[Task], everything: Sequence[Task], checkpoint: Path) -> Iterator[Row]:
    """Adam alone on all lanes as one batch, until its steps or the gradient test.

    Args:
        tasks: those missing, of one step size.
        everything: these and the finished ones, of which a checkpoint may hold some.
        checkpoint: written every few steps; one left by an interrupted run is taken up.

    Yields:
        The rows of ``tasks`` as lanes meet the gradient test or the steps are used up.
    """
    wanted = {task.key for task in tasks}
    saved = AdamBatch.saved_tag(checkpoint)
    known = {task.key: task for task in everything}
    resumed = wanted <= set(saved) <= set(known)
    members = [known[key] for key in saved] if resumed else list(tasks)
    s, data = members[0].settings, [task.payload for task in members]
    starts = torch.stack([start(one, 0) for one in data])
    batch = AdamBatch(data, starts, eps=s["eps"], lr=s["lr"], decay_steps=s["adam_steps"])
    if resumed:
        batch.load(checkpoint)
    while batch.live:
        gradient = batch.evaluate()
        for k in list(batch.live):
            lane = batch.lanes[k]
            met = lane.norms[-1] <= s["gtol"] * lane.largest
            if met or batch.step >= s["adam_steps"]:
                batch.live.remove(k)
                if members[k].key in wanted:
                    yield _adam_row(members[k], lane, batch.w(k), batch, met)
        if batch.live:
            batch.advance(gradient)
            if batch.step % CHECKPOINT_EVERY == 0:
                batch.save(checkpoint, [task.key for task in members])
    checkpoint.unlink(missing_ok=True)


def _adam_row(task: Task, lane: Lane, w: Tensor, batch: AdamBatch, met: bool) -> Row:
    """The end of one lane; the curvature there is not counted as a cost of Adam."""
    passes = lane.loss.plan_passes
    estimate = _lane_curvature(lane, w, threshold=0.0, seed=0)
    certified = met and estimate.sign == "nonnegative" and estimate.value > 0
    status = Status.MINIMUM if certified else (Status.SADDLE if met else Status.MAX_ITER)
    first = curvature_at(lane.loss, start(lane.data, 0))
    row = row_head(task) | {
        "strategy": "adam",
        "precision": str(w.dtype).removeprefix("torch."),
        "stopping_rule": stopping_rule(task.settings),
        "status": status.name,
        "success": certified,
        "message": status.message,
        "load_average": load_average(),
        "n_iter": {FIRST_ORDER: len(lane.norms) - 1, NEWTON: 0, "escape": 0},
        "n_hvp": 0,
        "n_sinkhorn": lane.loss.n_sinkhorn,
        "n_sinkhorn_missed": lane.loss.missed,
        "plan_passes": passes,
        "passes_1e4": lane.passes_to(ROUGH),
        "gradient_met": met,
        "relative_gradient": lane.norms[-1] / lane.largest if lane.largest else 0.0,
        "seconds": batch.seconds / len(batch.lanes),
        "value": lane.values[-1],
        "grad_norm": lane.norms[-1],
        "lambda_min_start": first[0],
        "lambda_min_end": estimate.value,
        "lambda_max_end": estimate.lambda_max,
        "w": w.tolist(),
    }
    truth = lane.data.truth
    error = None if truth is None else float((w - truth).norm())
    return row | {
        "escape": first[0] < 0 and certified,
        "w_error": error,
        "recovery": None if error is None else error <= RECOVERY_RADIUS,
        "losses": lane.values[:: max(1, len(lane.values) // 200)],
    }
