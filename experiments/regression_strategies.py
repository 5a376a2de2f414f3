"""The workers of the regression study: one row per seed and strategy, with what each cost."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ot_newton.batch import sinkhorn_batch
from ot_newton.experiments import shuffled_regression as main_job
from ot_newton.experiments.data import RegressionData, start
from ot_newton.experiments.regression_loss import ON_REJECT, RegressionLoss
from ot_newton.experiments.runs import Row, Task, load_average
from ot_newton.problem import OTProblem
from ot_newton.solvers.callbacks import StepInfo
from ot_newton.solvers.escape import SaddleEscape
from ot_newton.solvers.monitor import LanczosMonitor
from ot_newton.solvers.newton import NewtonCG, NewtonResult
from ot_newton.solvers.switching import FIRST_ORDER, NEWTON

__all__ = ["CONFIDENCE", "ROUGH", "STRATEGIES", "curvature_at", "run_one", "stopping_rule"]

STRATEGIES = ("escape", "newton", "adam", "sensitivity", "packing", "trajectory")
ROUGH = 1e-4
CONFIDENCE = 0.99
PACKING_ITERATIONS = 4000
SAME_POINT = 1e-6


def run_one(task: Task) -> Row:
    """A strategy that runs one seed at a time."""
    workers: dict[str, Callable[[Task], Row]] = {
        "newton": _newton,
        "escape": _escape,
        "sensitivity": _escape,
        "trajectory": _trajectory,
        "packing": _packing,
    }
    return {"load_average": load_average()} | workers[task.settings["strategy"]](task)


def stopping_rule(settings: Any) -> str:
    """In words, for the rows."""
    return f"|g| <= {settings['gtol']:g} max |g|, lambda_min certified at confidence {CONFIDENCE:g}"


def _newton(task: Task) -> Row:
    data, s = task.payload, task.settings
    loss = RegressionLoss(data.x, data.y, eps=s["eps"])
    solver = NewtonCG(
        loss,
        gtol=s["gtol"],
        max_iter=s["max_steps"],
        max_escapes=s["max_steps"],
        on_reject=ON_REJECT,
    )
    w0 = start(data, 0)
    return _solved(task, data, loss, lambda: solver.minimize(w0), curvature_at(loss, w0))


class _MirroredLoss(RegressionLoss):
    """The loss of clouds that are their own mirror images, each in its second axis.

    It is the same for W with the signs of its second row, of its second column or of both changed. Where such
    a change leaves W as it is, gradient and Hessian have the same symmetry, and the mean over these changes
    takes out what errors of the inner solve add to it: off the set of such W they would grow along a
    direction of negative curvature.
    """

    def __init__(self, x: Tensor, y: Tensor, *, eps: float) -> None:
        super().__init__(x, y, eps=eps)
        row, column = (torch.ones(cloud.shape[1], dtype=cloud.dtype) for cloud in (x, y))
        row[1], column[1] = -1.0, -1.0
        whole = torch.ones(len(row), len(column), dtype=x.dtype)
        self._signs = torch.stack([whole, row[:, None] * whole, whole * column, torch.outer(row, column)])

    def value_and_grad(self, w: Tensor) -> tuple[float, Tensor]:
        """OT and its gradient, with the symmetry of ``w``."""
        value, gradient = super().value_and_grad(w)
        return value, (self._kept(w) * gradient).mean(0)

    def symmetric_hessian(self, w: Tensor) -> Tensor:
        """The Hessian (N, N) with the symmetry of ``w``."""
        signs = self._kept(w).reshape(-1, w.numel())
        return self.hessian(w).to_dense() * (signs.T @ signs) / len(signs)

    def _kept(self, w: Tensor) -> Tensor:
        """The changes of signs (k, dX, dY) that leave ``w`` as it is."""
        moved = (self._signs * w - w).abs().amax((1, 2))
        return self._signs[moved <= SAME_POINT * float(w.abs().max())]


def _mirrored(cloud: Tensor) -> Tensor:
    """The first half of a cloud in its principal axes, followed by its mirror image in the second of them."""
    half = cloud[: (len(cloud) + 1) // 2]
    half = half - half.mean(0)
    half = half @ torch.linalg.svd(half, full_matrices=False)[2].T
    image = half.clone()
    image[:, 1] *= -1.0
    return torch.cat([half, image])


def _trajectory(task: Task) -> Row:
    """Down a staircase of saddles, each a point that meets the gradient test, to a certified minimum.

    Both clouds are made symmetric (`_mirrored`). A set of W that a reflection leaves alone (second column 0;
    second row 0) is then invariant: at a point of it gradient and Newton step stay in it, and what is a
    minimum within it may be a saddle among all W. The start W = 0 is in all these sets, and a saddle. At each
    saddle the certificate finds the negative curvature, the run leaves along its eigenvector, which ends one
    of the symmetries or more, and Newton-CG goes on to the next.

    ``trace`` has lambda_min at every step. ``saddles`` lists those that were left, evaluated again by a loss
    of its own, which knows nothing of the symmetry; ``saddle_regions`` counts the stretches of steps with
    lambda_min < 0.
    """
    given, s = task.payload, task.settings
    data = RegressionData(given.name, _mirrored(given.x), _mirrored(given.y))
    loss = _MirroredLoss(data.x, data.y, eps=s["eps"])
    solver = NewtonCG(
        loss,
        gtol=s["gtol"],
        max_iter=s["max_steps"],
        max_escapes=s["max_steps"],
        hess=loss.symmetric_hessian,
        on_reject=ON_REJECT,
        confidence=CONFIDENCE,
    )
    w0 = torch.zeros(data.x.shape[1], data.y.shape[1], dtype=data.x.dtype)
    watch, path = LanczosMonitor(every=1, confidence=CONFIDENCE), [w0]

    def follow(info: StepInfo) -> None:
        watch.probe(info.record.step, info.hessian)
        path.append(info.x)

    watch.probe(0, loss, w0)
    row = _solved(task, data, loss, lambda: solver.minimize(w0, callback=follow), curvature_at(loss, w0))
    row["trace"] |= {
        "probe_step": [probe.step for probe in watch.history],
        "lambda_min": [probe.lambda_min for probe in watch.history],
        "lambda_max": [probe.lambda_max for probe in watch.history],
    }
    signs = [value < 0 for value in row["trace"]["lambda_min"]]
    row["saddle_regions"] = sum(
        now and not before for before, now in zip([False, *signs], signs, strict=False)
    )
    left = [
        k - 1 for k, kind in zip(row["trace"]["step"], row["trace"]["kind"], strict=True) if kind == "escape"
    ]
    row["saddles"] = [{"step": k} | _stationary(data, path[k], s["eps"]) for k in left]
    return row


def _stationary(data: RegressionData, w: Tensor, eps: float) -> Row:
    """Value, gradient and extreme curvatures at ``w``, from a loss of its own."""
    loss = RegressionLoss(data.x, data.y, eps=eps)
    low, high = curvature_at(loss, w)
    value = loss.value(w)
    gradient = loss.value_and_grad(w)[1]
    return {"value": value, "grad_norm": float(gradient.norm()), "lambda_min": low, "lambda_max": high}


def _escape(task: Task) -> Row:
    """SaddleEscape from where the batched first-order phase released the lane."""
    data, phase, name = task.payload
    s, release = task.settings, phase["releases"][name]
    loss = RegressionLoss(data.x, data.y, eps=s["eps"])
    w0 = torch.tensor(release["w"], dtype=data.x.dtype)
    f, g = (torch.tensor(values, dtype=data.x.dtype) for values in release["potentials"])
    loss.start_from(w0, f, g)
    solver = SaddleEscape(
        loss,
        lr=s["lr"],
        probe_every=s["probe_every"],
        threshold=s["threshold"],
        gtol=s["gtol"],
        max_iter=s["max_steps"],
        max_first_order=s["max_first_order"],
        confidence=CONFIDENCE,
        on_reject=ON_REJECT,
    )
    row = _solved(task, data, loss, lambda: solver.minimize(w0), phase["curvature_start"])
    return _joined(row, phase, release)


def _joined(row: Row, phase: Row, release: Row) -> Row:
    """The counts of both phases together; ``phase`` keeps those of the batched one."""
    early = release["passes_1e4"]
    later = row["passes_1e4"]
    row["n_iter"] = {**row["n_iter"], FIRST_ORDER: row["n_iter"][FIRST_ORDER] + release["step"]}
    row["phase"] = {
        "first_order_steps": release["step"],
        "plan_passes": release["plan_passes"],
        "n_hvp": release["n_hvp"],
        "seconds": release["seconds"],
        "reason": release["reason"],
        "released_by_level": release["fired"],
    }
    row["passes_1e4"] = early if early is not None else _plus(later, release["plan_passes"])
    for key in ("plan_passes", "n_hvp", "seconds"):
        row[key] += release[key]
    shown = release["step"]
    trace = row["trace"]
    row["trace"] = {
        **trace,
        "step": [*range(shown), *(k + shown for k in trace["step"])],
        "loss": phase["values"][:shown] + trace["loss"],
        "kind": [FIRST_ORDER] * shown + trace["kind"],
        "probe_step": [p[0] for p in phase["probes"] if p[0] < shown]
        + [k + shown for k in trace["probe_step"]],
        "lambda_min": [p[1] for p in phase["probes"] if p[0] < shown] + trace["lambda_min"],
        "lambda_max": [p[2] for p in phase["probes"] if p[0] < shown] + trace["lambda_max"],
        "switches": [[k + shown, action, why] for k, action, why in trace["switches"]],
    }
    return row


def _plus(value: int | None, more: int) -> int | None:
    return None if value is None else value + more


def curvature_at(loss: RegressionLoss, w: Tensor) -> tuple[float, float]:
    """Smallest and largest eigenvalue at ``w``, from a loss of its own: not counted."""
    own = RegressionLoss(loss.x, loss.y, eps=loss.eps)
    values = torch.linalg.eigvalsh(own.hessian(w).to_dense())
    return float(values[0]), float(values[-1])


def _solved(
    task: Task,
    data: RegressionData,
    loss: RegressionLoss,
    solve: Callable[[], NewtonResult],
    curvature: Sequence[float],
) -> Row:
    """Run a solver and write down how it ended and what it cost."""
    began, began_cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = solve()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    passes = loss.plan_passes
    recheck, _ = main_job.marginal_recheck(
        data.x @ result.x, data.y, *loss.potentials(result.x), eps=task.settings["eps"]
    )
    kinds = [record.kind for record in result.history if record.accepted]
    return {
        "strategy": task.settings["strategy"],
        "precision": str(data.x.dtype).removeprefix("torch."),
        "stopping_rule": stopping_rule(task.settings),
        "status": result.status.name,
        "success": result.success,
        "message": result.message,
        "warnings": sorted({f"{w.category.__name__}: {w.message}" for w in caught}),
        "n_iter": {kind: kinds.count(kind) for kind in (FIRST_ORDER, NEWTON, "escape")},
        "n_hvp": result.n_hvp,
        "n_sinkhorn": loss.n_sinkhorn,
        "n_sinkhorn_missed": loss.missed,
        "plan_passes": passes,
        "passes_1e4": _passes_to(result, ROUGH),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "value": result.fun,
        "grad_norm": float(result.grad.norm()),
        "marginal_recheck": recheck,
        "lambda_min_start": curvature[0],
        "lambda_max_start": curvature[1],
        **main_job._end_curvature(result),  # type: ignore[arg-type]
        **main_job._comparison(data, result, task.settings["eps"], curvature[0] < 0),  # type: ignore[arg-type]
        "w": result.x.tolist(),
        "trace": {"switches": []} | _trace(result),
    }


def _trace(result: NewtonResult) -> Row:
    moves = [record for record in result.history if record.kind not in ("probe", "switch", "certificate")]
    probes = [record for record in result.history if record.lambda_min is not None]
    switches = getattr(result, "switches", ())
    return {
        "step": [record.step for record in moves],
        "loss": [record.fun for record in moves],
        "kind": [record.kind for record in moves],
        "probe_step": [record.step for record in probes],
        "lambda_min": [record.lambda_min for record in probes],
        "lambda_max": [record.lambda_max for record in probes],
        "switches": [[switch.step, switch.action, switch.reason] for switch in switches],
    }


def _passes_to(result: NewtonResult, relative: float) -> int | None:
    """Plan passes at the first record with `|g_k| <= relative max_{j<=k} |g_j|`."""
    largest = 0.0
    for record in result.history:
        largest = max(largest, record.grad_norm)
        if record.grad_norm <= relative * largest:
            return record.plan_passes
    return None


def _packing(task: Task) -> Row:
    """One batch of plans at the starts of all seeds, cold, packed against fixed."""
    s = task.settings
    made = [OTProblem(data.x @ start(data, 0), data.y, eps=s["eps"]) for data in task.payload]
    row: Row = {
        "strategy": "packing",
        "precision": "float64",
        "stopping_rule": f"marginal {s['packing_tol']:g}",
    }
    for mode in ("packed", "fixed"):
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = sinkhorn_batch(
                made, mode, tol=s["packing_tol"], max_iter=PACKING_ITERATIONS, backend="cpu"
            )
        row[mode] = {
            "lane_iterations": batch.lane_iterations,
            "verifications": batch.verifications,
            "unconverged": list(batch.unconverged),
            "depth": batch.depth.tolist(),
            "seconds": time.perf_counter() - began,
        }
    ratio = row["packed"]["lane_iterations"] / row["fixed"]["lane_iterations"]
    missed = row["packed"]["unconverged"]
    return row | {
        "status": "CONVERGED" if not missed else "MAX_ITER",
        "success": not missed,
        "message": f"packed takes {ratio:.2f} of the lane-iterations of fixed",
        "ratio": ratio,
    }
