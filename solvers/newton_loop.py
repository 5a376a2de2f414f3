"""The loop behind `NewtonCG`: `judge` decides whether to end, `advance` moves."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import Status
from ot_newton.solvers.callbacks import CallbackDispatch, StepInfo
from ot_newton.solvers.certificate import certify, gradient_noise
from ot_newton.solvers.cg import CGReason
from ot_newton.solvers.history import Recorder, StepRecord
from ot_newton.solvers.line_search import armijo_search, compare, leave_saddle
from ot_newton.solvers.objective import Objective, Point
from ot_newton.solvers.options import NewtonOptions
from ot_newton.solvers.spectra import EigenEstimate
from ot_newton.solvers.state import NewtonState
from ot_newton.solvers.trust_region import (
    Model,
    TrustStep,
    as_preconditioner,
    as_projector,
    interpolated,
    next_radius,
)

__all__ = ["NewtonLoop", "NewtonOptions"]

DOUBLE_EPS = 2.0**-52
LEAST_RATIO = 1e-4
NOISY_TRIALS = 4
LINE_SEARCH_REACH = 2.0
RESTORED = ("radius", "grad_max", "fun_start", "x_scale", "norm", "n_iter", "n_escapes", "n_certificates")


class NewtonLoop:
    """One run, step by step.

    Attributes:
        point: where it is; never worse than any point it has been at.
        history: rows so far.
        estimate: last `EigenEstimate`.
        note: particulars of the last status.
        message: replaces the status's own sentence where that does not fit.
        n_iter: outer steps.
    """

    def __init__(
        self,
        objective: Objective,
        options: NewtonOptions,
        x: Tensor,
        *,
        resume: NewtonState | None = None,
    ) -> None:
        self.objective, self.options = objective, options
        self.recorder = Recorder(objective, verbose=options.verbose)
        self.estimate: EigenEstimate | None = None
        self.note = self.message = ""
        self.n_iter = self.n_escapes = self.n_certificates = 0
        self.radius = options.radius
        self.grad_max = self.x_scale = self.norm = 0.0
        self.fun_start = math.nan
        self.noise = 0.0
        if resume is not None:
            objective.load_warm_state(resume.warm)
        self.point = objective.at(x)
        if resume is None:
            self.fun_start = self.point.value
            self._record("start", self.point)
        else:
            self._restore(resume)

    # ---- state -------------------------------------------------------------------------------------

    def _restore(self, state: NewtonState) -> None:
        _ = self.point.value, self.point.grad
        self.point.settle(state.settled)
        for name, count in state.counters.items():
            setattr(self.objective, name, count)
        for name in RESTORED:
            setattr(self, name, getattr(state, name))
        self.recorder.restore(state.history, plan_passes=state.plan_passes, seconds=state.seconds)
        self.objective.all_products_zero = state.linear
        self.estimate = None if state.estimate is None else EigenEstimate(**state.estimate)
        if self.options.monitor is not None and state.monitor is not None:
            self.options.monitor.load_state_dict(state.monitor)

    def state(self) -> NewtonState:
        """Snapshot between two steps."""
        monitor = self.options.monitor
        return NewtonState(
            x=self.point.x.reshape(self.objective.shape).clone(),
            **{name: getattr(self, name) for name in RESTORED},
            seed=self.options.seed,
            counters=self.objective.counters(),
            plan_passes=self.recorder.plan_passes,
            seconds=self.recorder.seconds,
            linear=self.objective.all_products_zero,
            history=[record.as_dict() for record in self.history],
            warm=self.point.warm,
            settled=self.point.settled,
            monitor=None if monitor is None else monitor.state_dict(),
            estimate=None if self.estimate is None else self.estimate.as_dict(vector=True),
        )

    @property
    def history(self) -> list[StepRecord]:
        """Rows so far."""
        return self.recorder.rows

    # ---- the loop ----------------------------------------------------------------------------------

    def run(self, callback: CallbackDispatch) -> Status:
        """Judge and advance until a status comes up."""
        while True:
            status = self.step()
            if status is not None:
                return status
            if callback and callback(self.info()):
                return Status.CALLBACK

    def step(self) -> Status | None:
        """One judgement and, unless it ends the run, one step."""
        before = self.n_iter
        status = self.judge()
        if status is None and self.n_iter == before:
            status = self.advance()
        return status

    def info(self) -> StepInfo:
        """What a callback sees."""
        shape = self.objective.shape
        probed = self.history[-1].lambda_min is not None
        return StepInfo(
            x=self.point.x.reshape(shape).clone(),
            grad=self.point.grad.reshape(shape).clone(),
            record=self.history[-1],
            hessian=self.point.hessian,
            lambda_min=self.estimate if probed else None,
        )

    def gradient_tolerance(self) -> float:
        """Gradient norms at or below this meet the gradient test."""
        rounding = torch.finfo(self.objective.dtype).eps * self.norm * float(self.point.x.norm())
        own = max(self.point.noise_floor, self.noise)
        return max(self.options.gtol * self.grad_max, own, rounding)

    def limits(self) -> Status | None:
        """Ends that need no curvature: values that are not finite, no lower bound, budgets."""
        point = self.point
        if point.value == -math.inf:
            return self._unbounded()
        if not point.finite:
            self.note = f"f = {point.value:g}, |g| = {point.grad_norm:g}"
            return Status.NAN
        self.grad_max = max(self.grad_max, point.grad_norm)
        self.x_scale = max(self.x_scale, float(point.x.norm()))
        if point.value < min(-1.0, self.fun_start) / DOUBLE_EPS:
            return self._unbounded()
        return self._over_budget()

    def gradient_met(self) -> bool:
        """Whether the gradient test is met here (after `limits`)."""
        return self.point.grad_norm <= self.gradient_tolerance()

    def judge(self) -> Status | None:
        """End of the run, or None to go on; leaves a saddle when it may."""
        status = self.limits()
        if status is not None:
            return status
        if self.gradient_met():
            return self._certify()
        return Status.MAX_ITER if self.n_iter >= self.options.max_iter else None

    def move(self, point: Point, kind: str, **values: Any) -> None:
        """Take a step that something else made, and record it."""
        self.point = point
        self.n_iter += 1
        self._record(kind, point, **values)

    def escape_length(self) -> float:
        """First length tried along an eigenvector off a saddle."""
        return max(self.radius or 0.1 * (self.x_scale or 1.0), 1e-3 * self.x_scale)

    def add_record(self, kind: str, **values: Any) -> None:
        """Record a probe or a switch at the current point."""
        self._record(kind, self.point, **values)

    def restart(self) -> None:
        """Forget the radius: the next model proposes one."""
        self.radius = self.options.radius

    def _over_budget(self) -> Status | None:
        options = self.options
        if options.max_hvp is not None and self.objective.n_hvp >= options.max_hvp:
            self.note = f"{self.objective.n_hvp} products of {options.max_hvp}"
            return Status.BUDGET
        if options.max_passes is not None and self.recorder.plan_passes >= options.max_passes:
            self.note = f"{self.recorder.plan_passes} plan passes of {options.max_passes}"
            return Status.BUDGET
        return None

    def _unbounded(self) -> Status:
        if self.objective.all_products_zero and self.objective.n_hvp > 0:
            self.message = (
                "the loss is linear along the path and falls without bound: its curvature is zero everywhere "
                "it was asked for; add a regularizer or constrain the problem"
            )
            return Status.FLAT
        self.note = f"f = {self.point.value:.3e}"
        return Status.UNBOUNDED

    def _certify(self) -> Status | None:
        options = self.options
        self.n_certificates += 1
        result = certify(
            self.point,
            confidence=options.confidence,
            seed=options.seed + 1009 * self.n_certificates,
            nullspace=options.nullspace,
            max_steps=options.certificate_steps,
        )
        self.estimate, self.note = result.estimate or self.estimate, result.note
        self._record("certificate", self.point, estimate=result.estimate, reason=result.status.name)
        if result.status is not Status.SADDLE or result.estimate is None:
            return result.status
        if self.n_escapes >= options.max_escapes:
            self.note = f"{self.n_escapes} of {options.max_escapes} escapes spent"
            return Status.SADDLE
        if self.n_iter >= options.max_iter:
            self.note = "and the iteration limit is reached"
            return Status.SADDLE
        return self._escape(result.estimate)

    def _escape(self, estimate: EigenEstimate) -> Status | None:
        found = leave_saddle(self.point, estimate.vector, estimate.value, self.escape_length())
        if found.point is None:
            self.note = "no step along the eigenvector lowers the loss beyond its noise"
            return Status.SADDLE
        self.n_escapes += 1
        self.n_iter += 1
        self.radius = abs(found.length)
        self.point = found.point
        reason = f"left a saddle, lambda_min = {estimate.value:.3e}"
        self._record("escape", found.point, step_norm=abs(found.length), reason=reason)
        return None

    # ---- steps -------------------------------------------------------------------------------------

    def advance(self) -> Status | None:
        """One outer step from a point that does not meet the gradient test."""
        model = self._model()
        if model.reason is CGReason.NAN:
            self.note = "a Hessian-vector product is not finite"
            return Status.NAN
        self.norm = max(self.norm, model.norm)
        if self.options.method == "line-search":
            return self._line_search(model)
        return self._trust_region(model)

    def _model(self) -> Model:
        options, norm = self.options, self.point.grad_norm
        relative = norm / self.grad_max if self.grad_max > 0 else 1.0
        # No tighter than what meets the gradient test.
        rtol = max(min(0.5, math.sqrt(relative)), 0.3 * self.gradient_tolerance() / norm)
        cap = options.max_cg if options.max_cg is not None else max(2 * self.objective.n, 50)
        if options.max_hvp is not None:
            cap = min(cap, max(1, options.max_hvp - self.objective.n_hvp))
        return Model(
            self.point,
            rtol=min(rtol, 0.5),
            max_iter=cap,
            radius=self._reach(),
            preconditioner=as_preconditioner(options.preconditioner, self.point),
            project=as_projector(options.nullspace, self.point),
        )

    def _reach(self) -> float | None:
        """Length CG may go to; None without a bound.

        A line search lets CG go twice as far as the last step went: beyond, where the model is not
        trusted anyway, products are wasted (the search itself may go further, at no product).
        """
        if self.radius is None or self.options.method == "trust-region":
            return self.radius
        return LINE_SEARCH_REACH * self.radius

    def _travelled(self, model: Model) -> float:
        """Size of x whose rounding bounds steps from below.

        That of the whole run; for a full Newton step, which may still correct the rounding of a long step
        before it, that of the point alone.
        """
        return float(self.point.x.norm()) if model.reason is CGReason.CONVERGED else self.x_scale

    def _trust_region(self, model: Model) -> Status | None:
        radius = self.radius if self.radius is not None else model.first_radius()
        noisy_trials, largest = 0, math.inf
        while True:
            step = model.step(radius)
            trial = self.point.moved(self.point.x + step.p)
            least = torch.finfo(trial.x.dtype).eps * self._travelled(model)
            if step.length <= least or torch.equal(trial.x, self.point.x):
                return self._stuck(noisy_trials > 0 or step.reason is CGReason.CONVERGED)
            verdict = compare(self.point, trial, step.decrease, LEAST_RATIO)
            before = radius
            radius = next_radius(before, step, verdict.ratio, noisy=verdict.noisy, finite=verdict.finite)
            if verdict.accepted:
                # A radius that has just proved too large is not tried again at the next point.
                return self._accept(trial, step, min(radius, largest), verdict.ratio)
            if self.options.on_reject == "interpolate" and verdict.finite and not verdict.noisy:
                radius = interpolated(self.point, trial, step)
            radius = largest = min(radius, 0.5 * before)
            self._record_step(self.point, step, radius, verdict.ratio, accepted=False)
            noisy_trials += verdict.noisy
            if noisy_trials >= NOISY_TRIALS:
                return self._stuck(True)

    def _accept(self, trial: Point, step: TrustStep, radius: float, ratio: float) -> Status | None:
        self.point, self.radius = trial, radius
        self.n_iter += 1
        self._record_step(trial, step, radius, ratio, accepted=True)
        return None

    def _stuck(self, noisy: bool) -> Status | None:
        """No step helps: the gradient is at its noise (judge again), or the run has stagnated."""
        if not noisy:
            self.note = f"|g| = {self.point.grad_norm:.2e}, steps down to the rounding of x"
            return Status.LINE_SEARCH
        floor = 4.0 * gradient_noise(self.point)
        if math.isfinite(floor) and self.noise < self.point.grad_norm <= floor:
            self.noise = floor
            status = self.judge()
            self.noise = 0.0
            if status is not None:
                self.note = f"{self.note}; gradient at its measured noise {floor:.1e}".removeprefix("; ")
            return status
        self.note = f"|g| = {self.point.grad_norm:.2e}, gradient test {self.gradient_tolerance():.2e}"
        return Status.STAGNATION

    def _line_search(self, model: Model) -> Status | None:
        direction, curvature = model.result.x[:, 0], 0.0
        length, expand, size = 1.0, model.cut and model.radius is not None, model.length()
        if model.reason is CGReason.NEGATIVE_CURVATURE and not bool(direction.any()):
            direction, curvature = model.result.direction[:, 0], model.curvature
            direction = -direction if float(direction @ self.point.grad) > 0 else direction
            length, expand, size = model.first_radius(), True, 1.0
        slope = float(direction @ self.point.grad)
        found = armijo_search(
            self.point,
            direction,
            slope=slope,
            curvature=curvature,
            length=length,
            expand=expand,
            x_scale=self._travelled(model),
        )
        moved = found.length * size
        step = TrustStep(
            found.length * direction,
            math.nan,
            moved,
            False,
            int(model.result.iterations[0]),
            model.reason,
            model.curvature,
        )
        if found.point is None:
            self._record_step(self.point, step, moved, found.ratio, accepted=False)
            return self._stuck(found.noisy)
        return self._accept(found.point, step, moved, found.ratio)

    # ---- records -----------------------------------------------------------------------------------

    def _record_step(
        self, at: Point, step: TrustStep, radius: float, ratio: float, *, accepted: bool
    ) -> None:
        estimate = self._probe(at) if accepted else None
        self._record(
            "newton",
            at,
            estimate=estimate,
            accepted=accepted,
            cg_iterations=step.iterations,
            cg_reason=step.reason.name,
            curvature=step.curvature,
            step_norm=step.length,
            radius=radius,
            ratio=ratio,
        )

    def _probe(self, at: Point) -> EigenEstimate | None:
        monitor = self.options.monitor
        if monitor is None or not monitor.due(self.n_iter, at.grad_norm) or not at.finite:
            return None
        record = monitor.probe(
            self.n_iter,
            at.hessian,
            noise_floor=self.objective.floor("hvp_noise_floor", at.x),
            relative_noise=self.objective.relative_noise,
        )
        if record is None:
            return None
        self.estimate = monitor.last
        return self.estimate

    def _record(self, kind: str, at: Point, **values: Any) -> None:
        values.setdefault("radius", math.nan if self.radius is None else self.radius)
        self.recorder.add(self.n_iter, kind, at, **values)
