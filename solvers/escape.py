"""First-order until the curvature is safely positive, then Newton-CG; back when it is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import Status, check_choice, check_integer, check_number
from ot_newton.solvers.callbacks import CallbackDispatch
from ot_newton.solvers.line_search import leave_saddle
from ot_newton.solvers.monitor import LanczosMonitor
from ot_newton.solvers.newton import NewtonCG, NewtonResult, finish, resumed_or_start
from ot_newton.solvers.newton_loop import NewtonLoop
from ot_newton.solvers.objective import Objective, Point, as_start
from ot_newton.solvers.spectra import EigenEstimate
from ot_newton.solvers.state import NewtonState
from ot_newton.solvers.switching import (
    ESCAPE,
    FIRST_ORDER,
    NEWTON,
    STOP,
    CurvatureReport,
    Decision,
    EscapeState,
    decide,
)

__all__ = ["CurvatureReport", "Decision", "EscapeResult", "EscapeState", "SaddleEscape", "Switch", "decide"]


@dataclass(frozen=True)
class Switch:
    """A change of phase or an escape: at which step, what, and why."""

    step: int
    action: str
    reason: str


@dataclass(frozen=True, eq=False)
class EscapeResult(NewtonResult):
    """A `NewtonResult` with the switches made and the steps of each phase."""

    switches: tuple[Switch, ...] = field(default=(), repr=False)
    n_first_order: int = 0
    n_newton: int = 0


class SaddleEscape:
    """A first-order optimizer watched by Lanczos, switched to Newton-CG where that is safe.

    Args:
        loss: as for `NewtonCG`.
        optimizer: a torch.optim class, or a function of a list of parameters that returns an optimizer.
        lr: its learning rate, for a class.
        probe_every: first-order steps between two probes of lambda_min.
        threshold: Newton takes over when lambda_min > threshold * lambda_max.
        confidence: confidence of that, and of the certificate at exit.
        max_iter: cap on steps of both phases together.
        max_first_order: first-order steps in a row after which Newton takes over anyway.
        max_switches: switches and escapes after which Newton is not left again.
        on_negative: "first-order" (go back) or "step" (stay; the trust region follows the direction)
            when Newton's CG meets negative curvature.
        monitor: a `LanczosMonitor` for the probes; one is made from the arguments if None.
        optimizer_options: further options of the optimizer class.
        seed: of probes and certificates.
        verbose: print a table row per step.
        **newton: options of `NewtonCG`.

    Raises:
        ValueError: a bad argument; TypeError: likewise.

    Example:
        >>> import torch
        >>> loss = lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4 / 4
        >>> result = SaddleEscape(loss).minimize(torch.tensor([0.5, 0.1], dtype=torch.float64))
        >>> result.status, [switch.action for switch in result.switches]
        (Status.MINIMUM, ['newton'])
        >>> result.n_first_order + result.n_newton == result.n_iter
        True
    """

    def __init__(
        self,
        loss: Any,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        lr: float = 0.05,
        probe_every: int = 10,
        threshold: float = 1e-3,
        confidence: float = 0.99,
        max_iter: int = 5000,
        max_first_order: int = 2000,
        max_switches: int = 20,
        on_negative: str = FIRST_ORDER,
        monitor: LanczosMonitor | None = None,
        optimizer_options: dict[str, Any] | None = None,
        seed: int = 0,
        verbose: bool = False,
        **newton: Any,
    ) -> None:
        if not callable(optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim class or a function, got {type(optimizer).__name__}"
            )
        self.optimizer, self.lr = optimizer, check_number("lr", lr)
        self.optimizer_options = dict(optimizer_options or {})
        self.threshold = check_number("threshold", threshold, low=-1.0, strict=False)
        self.max_iter = check_integer("max_iter", max_iter)
        self.max_first_order = check_integer("max_first_order", max_first_order)
        self.max_switches = check_integer("max_switches", max_switches)
        self.on_negative = check_choice("on_negative", on_negative, (FIRST_ORDER, "step"))
        self.newton = NewtonCG(
            loss,
            **{"max_escapes": 0, **newton},
            confidence=confidence,
            seed=seed,
            max_iter=self.max_iter,
            verbose=verbose,
        )
        self.monitor = monitor
        self._monitor_options: dict[str, Any] = {
            "every": check_integer("probe_every", probe_every, low=1),
            "threshold": self.threshold,
            "confidence": confidence,
            "seed": seed,
            "nullspace": newton.get("nullspace"),
        }

    def minimize(
        self,
        x0: Any = None,
        *,
        resume: NewtonState | None = None,
        callback: Callable[..., Any] | Iterable[Callable[..., Any]] | None = None,
    ) -> EscapeResult:
        """Minimize from ``x0``, or go on from a saved state.

        Args:
            x0: start, as for `NewtonCG`.
            resume: the ``state`` of an `EscapeResult`: the optimizer's own state, the phase, the monitor
                and the switches are taken up; ``x0`` is then not needed.
            callback: called after every step of either phase.

        Returns:
            An `EscapeResult`; warns like `NewtonCG`.

        Raises:
            TypeError: ``x0`` is not a floating tensor or array; ValueError: neither start nor state, or a
                state of another solver.
        """
        given = resumed_or_start(x0, resume)
        if resume is not None and resume.escape is None:
            raise ValueError("resume must be the state of a SaddleEscape run, got that of a NewtonCG run")
        start = as_start(given)
        objective = self.newton.bind(start)
        monitor = self.monitor if self.monitor is not None else LanczosMonitor(**self._monitor_options)
        run = _Run(self, objective, monitor, start.reshape(-1), CallbackDispatch(callback), resume)
        status = run.run()
        final = given.dtype if isinstance(given, Tensor) else start.dtype
        base = finish(run.loop, status, final, stacklevel=3)
        values = {name: getattr(base, name) for name in base.__dataclass_fields__}
        values["state"] = run.saved()
        first = sum(record.kind == FIRST_ORDER for record in base.history)
        return EscapeResult(
            **values, switches=tuple(run.switches), n_first_order=first, n_newton=base.n_iter - first
        )

    def make_optimizer(self, x: Tensor) -> torch.optim.Optimizer:
        """A fresh optimizer of the parameter ``x``."""
        if isinstance(self.optimizer, type):
            made: torch.optim.Optimizer = self.optimizer([x], lr=self.lr, **self.optimizer_options)
            return made
        return self.optimizer([x])


class _Run:
    """One minimization: the Newton loop holds point, counters and history of both phases."""

    def __init__(
        self,
        config: SaddleEscape,
        objective: Objective,
        monitor: LanczosMonitor,
        x: Tensor,
        callback: CallbackDispatch,
        resume: NewtonState | None,
    ) -> None:
        self.config, self.objective, self.monitor, self.callback = config, objective, monitor, callback
        self.loop = NewtonLoop(objective, config.newton.options, x, resume=resume)
        self.switches: list[Switch] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.optimizer_state: dict[str, Any] | None = None
        self.state = EscapeState(
            phase=FIRST_ORDER,
            threshold=config.threshold,
            confidence=config.newton.options.confidence,
            max_switches=config.max_switches,
            max_first_order=config.max_first_order,
            on_negative=config.on_negative,
        )
        if resume is not None and resume.escape is not None:
            self._restore(resume, resume.escape)

    def _restore(self, state: NewtonState, escape: dict[str, Any]) -> None:
        counts = {name: escape[name] for name in ("phase", "n_switches", "first_order_steps")}
        self.state = replace(self.state, **counts)
        self.switches = [Switch(*row) for row in escape["switches"]]
        self.optimizer_state = escape["optimizer"]
        if state.monitor is not None:
            self.monitor.load_state_dict(state.monitor)

    def saved(self) -> NewtonState:
        """Snapshot between two steps."""
        escape = {
            "phase": self.state.phase,
            "n_switches": self.state.n_switches,
            "first_order_steps": self.state.first_order_steps,
            "switches": [(s.step, s.action, s.reason) for s in self.switches],
            "optimizer": None if self.optimizer is None else deepcopy(self.optimizer.state_dict()),
        }
        return replace(self.loop.state(), monitor=self.monitor.state_dict(), escape=escape)

    def run(self) -> Status:
        """Alternate phases until a status comes up."""
        while True:
            status = self._first_order() if self.state.phase == FIRST_ORDER else self._newton()
            if status is not None:
                return status

    def _switch(self, action: str, reason: str) -> None:
        phase = self.state.phase if action == ESCAPE else action
        self.state = replace(
            self.state, phase=phase, n_switches=self.state.n_switches + 1, first_order_steps=0
        )
        self.optimizer = None
        self.switches.append(Switch(self.loop.n_iter, action, reason))
        self.loop.add_record("switch", reason=f"{action}: {reason}")

    def _called_back(self) -> bool:
        return bool(self.callback) and self.callback(self.loop.info())

    # ---- first order -------------------------------------------------------------------------------

    def _first_order(self) -> Status | None:
        """First-order steps until the next switch; each starts by judging the point it is at."""
        parameter = self.loop.point.x.reshape(self.objective.shape).clone().requires_grad_(True)
        optimizer = self.optimizer = self.config.make_optimizer(parameter)
        if self.optimizer_state is not None:
            optimizer.load_state_dict(self.optimizer_state)
            self.optimizer_state = None
        while True:
            status = self.loop.limits()
            if status is not None:
                return status
            # Before the probe: a resumed run must make it once, not twice.
            if self.loop.n_iter >= self.config.max_iter and not self.loop.gradient_met():
                return Status.MAX_ITER
            decision = self._look()
            if decision.action == ESCAPE:
                return self._escape(decision.reason)
            if decision.action == NEWTON:
                self._switch(NEWTON, decision.reason)
                self.loop.restart()
                return None
            self._first_order_step(optimizer, parameter)
            if self._called_back():
                return Status.CALLBACK

    def _look(self) -> Decision:
        """Probe if due (or if the gradient test is met) and decide."""
        loop = self.loop
        met = loop.gradient_met()
        wanted = met or self.monitor.due(loop.n_iter, loop.point.grad_norm)
        estimate = self._probe() if wanted else None
        report = CurvatureReport(step=loop.n_iter, gradient_met=met, **_of(estimate))
        if met and estimate is None:
            # No budget for a probe: Newton's own certificate decides.
            return Decision(NEWTON, "gradient test met")
        return decide(report, self.state)

    def _probe(self) -> EigenEstimate | None:
        loop = self.loop
        floor = self.objective.floor("hvp_noise_floor", loop.point.x)
        if not math.isfinite(floor):
            return None  # a probe could tell nothing
        record = self.monitor.probe(
            loop.n_iter,
            loop.point.hessian,
            noise_floor=floor,
            relative_noise=self.objective.relative_noise,
        )
        if record is None:
            return None
        loop.estimate = self.monitor.last
        loop.norm = max(loop.norm, self.monitor.last.norm if self.monitor.last is not None else 0.0)
        loop.add_record("probe", estimate=self.monitor.last)
        return self.monitor.last

    def _first_order_step(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
        """One optimizer step; its first evaluation is the point already evaluated."""
        known: list[Point] = [self.loop.point]

        def closure() -> Tensor:
            point = known.pop() if known else self.loop.point.moved(parameter.detach().reshape(-1).clone())
            parameter.grad = point.grad.reshape(self.objective.shape).clone()
            return torch.tensor(point.value, dtype=self.objective.dtype, device=self.objective.device)

        before = self.loop.point.x
        optimizer.step(closure)  # type: ignore[arg-type]  # torch's stub wants a float, its code a tensor
        point = self.loop.point.moved(parameter.detach().reshape(-1).clone())
        self.state = replace(self.state, first_order_steps=self.state.first_order_steps + 1)
        self.loop.move(point, FIRST_ORDER, step_norm=float((point.x - before).norm()))

    def _escape(self, reason: str) -> Status | None:
        """Leave a saddle, or end there."""
        if self.loop.n_iter >= self.config.max_iter:
            self.loop.note = "and the iteration limit is reached"
            return Status.SADDLE
        if not self._leave(reason):
            return Status.SADDLE
        return Status.CALLBACK if self._called_back() else None

    def _leave(self, reason: str) -> bool:
        """A step of negative curvature along the last estimate's vector."""
        estimate, loop = self.loop.estimate, self.loop
        if estimate is None:
            return False
        found = leave_saddle(loop.point, estimate.vector, estimate.value, loop.escape_length())
        if found.point is None:
            loop.note = "no step along the eigenvector lowers the loss beyond its noise"
            return False
        self._switch(ESCAPE, reason)
        loop.radius = abs(found.length)
        loop.move(found.point, "escape", step_norm=abs(found.length), reason=reason)
        return True

    # ---- Newton ------------------------------------------------------------------------------------

    def _newton(self) -> Status | None:
        while True:
            status = self.loop.step()
            last = self.loop.history[-1]
            report = CurvatureReport(
                step=self.loop.n_iter,
                negative_curvature=last.kind == NEWTON and last.cg_reason == "NEGATIVE_CURVATURE",
                status=status,
                **(_of(self.loop.estimate) if status is not None else {}),
            )
            decision = decide(report, self.state)
            if decision.action == STOP and status is not None:
                return status
            if decision.action == ESCAPE:
                return self._escape(decision.reason)
            stopped = self._called_back()
            if decision.action == FIRST_ORDER:
                # Also where the callback stops: a resumed run must not miss the switch.
                self._switch(FIRST_ORDER, decision.reason)
            if stopped:
                return Status.CALLBACK
            if decision.action == FIRST_ORDER:
                return None


def _of(estimate: EigenEstimate | None) -> dict[str, Any]:
    if estimate is None:
        return {}
    return {
        "lambda_min": estimate.value,
        "lambda_max": estimate.lambda_max,
        "sign": estimate.sign,
        "confidence": estimate.confidence,
    }
