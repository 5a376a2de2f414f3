"""When to leave the first-order phase, and when to go back: one pure function of what was found."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ot_newton.errors import Status

__all__ = ["CurvatureReport", "Decision", "EscapeState", "decide"]

FIRST_ORDER, NEWTON = "first-order", "newton"
STAY, ESCAPE, STOP = "stay", "escape", "stop"


@dataclass(frozen=True)
class CurvatureReport:
    """What one step or probe found.

    Attributes:
        step: index of the step.
        gradient_met: the gradient test is met.
        lambda_min: smallest curvature, None if not probed.
        lambda_max: largest.
        sign: verdict of the estimate, "" if not probed.
        confidence: that lambda_min is at least the level asked.
        negative_curvature: CG met a direction of nonpositive curvature.
        status: how Newton ended, None while it runs.
    """

    step: int
    gradient_met: bool = False
    lambda_min: float | None = None
    lambda_max: float = math.nan
    sign: str = ""
    confidence: float = 0.0
    negative_curvature: bool = False
    status: Status | None = None


@dataclass(frozen=True)
class EscapeState:
    """What the decision depends on besides the report.

    Attributes:
        phase: "first-order" or "newton".
        threshold: lambda_min above ``threshold lambda_max`` lets Newton take over.
        confidence: asked of that.
        n_switches: switches and escapes so far.
        max_switches: after these Newton is never left again.
        first_order_steps: first-order steps since the last switch.
        max_first_order: cap on them.
        on_negative: "first-order" or "step": what to do when Newton's CG meets negative curvature.
    """

    phase: str
    threshold: float = 1e-3
    confidence: float = 0.99
    n_switches: int = 0
    max_switches: int = 20
    first_order_steps: int = 0
    max_first_order: int = 2000
    on_negative: str = FIRST_ORDER


@dataclass(frozen=True)
class Decision:
    """``action``: "stay", "newton", "first-order", "escape" (a step of negative curvature) or "stop"."""

    action: str
    reason: str


def decide(report: CurvatureReport, state: EscapeState) -> Decision:
    """What to do after a step; pure.

    First-order: to Newton when `lambda_min > threshold lambda_max` at the confidence asked, when the
    gradient test is met without proved negative curvature, or when the first-order cap is reached; an
    escape step when the gradient test is met at proved negative curvature. Newton: stop at its final
    status, except at a saddle, which is left; back to first-order when CG meets negative curvature.

    Example:
        >>> found = {"lambda_min": 0.1, "lambda_max": 1.0, "sign": "nonnegative", "confidence": 1.0}
        >>> report = CurvatureReport(step=10, **found)
        >>> decide(report, EscapeState(phase="first-order")).action
        'newton'
    """
    left = state.n_switches < state.max_switches
    if state.phase == NEWTON:
        return _decide_newton(report, state, left)
    if report.lambda_min is not None:
        found = f"lambda_min = {report.lambda_min:.3e}, lambda_max = {report.lambda_max:.3e}"
        if report.gradient_met and report.sign == "negative":
            action = ESCAPE if left else NEWTON
            return Decision(action, f"gradient test met at negative curvature: {found}")
        above = report.lambda_min > state.threshold * report.lambda_max and report.sign == "nonnegative"
        if above and report.confidence >= state.confidence:
            return Decision(NEWTON, f"{found}: above {state.threshold:g} lambda_max")
        if report.gradient_met:
            return Decision(NEWTON, f"gradient test met, no negative curvature proved: {found}")
    if state.first_order_steps >= state.max_first_order:
        return Decision(NEWTON, f"{state.first_order_steps} first-order steps without safe curvature")
    return Decision(STAY, "curvature not safely positive" if report.lambda_min is not None else "not probed")


def _decide_newton(report: CurvatureReport, state: EscapeState, left: bool) -> Decision:
    if report.status is Status.SADDLE and left:
        return Decision(ESCAPE, f"Newton met the gradient test at a saddle, lambda_min = {report.lambda_min}")
    if report.status is not None:
        return Decision(STOP, report.status.name)
    if report.negative_curvature and state.on_negative == FIRST_ORDER and left:
        return Decision(FIRST_ORDER, "CG met negative curvature")
    if report.negative_curvature:
        return Decision(STAY, "CG met negative curvature: its step follows it to the boundary")
    return Decision(STAY, "Newton goes on")
