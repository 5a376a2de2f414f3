"""Noise-safe decrease tests, the Armijo search, and the step out of a saddle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.solvers.objective import Point

__all__ = ["Decrease", "SearchOutcome", "armijo_search", "compare", "leave_saddle", "value_noise"]

VALUE_ULPS = 20.0
ARMIJO = 1e-4
REFINEMENTS = 3


def value_noise(point: Point, trial: Point | None = None) -> float:
    """Differences of values (between ``point`` and a finite ``trial``) below this are rounding or noise."""
    both = [point] if trial is None else [point, trial]
    size = max(abs(p.value) for p in both)
    rounding = VALUE_ULPS * torch.finfo(point.x.dtype).eps * size
    return max(rounding, *(p.value_noise for p in both))


@dataclass(frozen=True)
class Decrease:
    """Verdict on one trial point.

    Attributes:
        accepted: whether to move there.
        ratio: regularized actual over predicted decrease.
        noisy: the predicted decrease is below the noise of values: judged by gradients.
        finite: value (and gradient, where it was needed) are finite.
    """

    accepted: bool
    ratio: float
    noisy: bool
    finite: bool


def compare(point: Point, trial: Point, predicted: float, least_ratio: float = ARMIJO) -> Decrease:
    """Judge ``trial`` by `(f - f_trial + noise) / (predicted + noise)`.

    Where the predicted decrease drowns in the noise of values, the value must fall by more than the noise
    or the gradient norm must fall.
    """
    if trial.value == -math.inf:
        return Decrease(accepted=True, ratio=math.inf, noisy=False, finite=False)
    if not math.isfinite(trial.value):
        return Decrease(accepted=False, ratio=-math.inf, noisy=False, finite=False)
    noise = value_noise(point, trial)
    actual = point.value - trial.value
    noisy = predicted <= noise and actual >= -noise
    ratio = (actual + noise) / (predicted + noise) if predicted + noise > 0 else -math.inf
    if not (noisy or ratio > least_ratio):
        return Decrease(accepted=False, ratio=ratio, noisy=False, finite=True)
    if not math.isfinite(trial.grad_norm):
        return Decrease(accepted=False, ratio=-math.inf, noisy=noisy, finite=False)
    if noisy and actual <= noise and not trial.grad_norm < point.grad_norm:
        return Decrease(accepted=False, ratio=0.0, noisy=True, finite=True)
    return Decrease(accepted=True, ratio=ratio, noisy=noisy, finite=True)


@dataclass(frozen=True, eq=False)
class SearchOutcome:
    """End of a line search: the new point (None if none was good enough), its length and its verdict."""

    point: Point | None
    length: float
    ratio: float
    noisy: bool
    finite: bool


def armijo_search(
    point: Point,
    direction: Tensor,
    *,
    slope: float,
    curvature: float = 0.0,
    length: float = 1.0,
    expand: bool = False,
    x_scale: float = 0.0,
) -> SearchOutcome:
    """Backtrack along ``direction``, then refine the length (or, with ``expand``, go on doubling).

    The decrease asked is 1e-4 of the model's `-(t slope + t^2 curvature / 2)`.

    Args:
        point: start.
        direction: (N,) a descent direction.
        slope: `g^T d`, not positive.
        curvature: `d^T H d` if it is negative (its decrease is asked for too), else 0.
        length: first trial.
        expand: double while the value falls at the rate asked.
        x_scale: size of x along the run; steps below its rounding are not tried.
    """
    tiny = torch.finfo(point.x.dtype).eps * max(float(point.x.norm()), x_scale)
    size = float(direction.norm())
    drowned = -length * slope <= value_noise(point)
    verdict = Decrease(accepted=False, ratio=-math.inf, noisy=drowned, finite=True)
    t = length
    while t * size > tiny:
        trial, verdict = _try(point, direction, t, slope, curvature)
        if verdict.accepted:
            if verdict.finite and not verdict.noisy:
                improve = _expand if expand else _refine
                trial, t, verdict = improve(point, direction, slope, curvature, (trial, t, verdict))
            return SearchOutcome(trial, t, verdict.ratio, verdict.noisy, verdict.finite)
        if verdict.noisy:
            break
        t = _quadratic(point, trial, t, slope, 0.1 * t, 0.5 * t) if verdict.finite else 0.1 * t
    return SearchOutcome(None, t, verdict.ratio, verdict.noisy, verdict.finite)


def _try(point: Point, direction: Tensor, t: float, slope: float, curvature: float) -> tuple[Point, Decrease]:
    trial = point.moved(point.x + t * direction)
    predicted = -(t * slope + 0.5 * t * t * min(curvature, 0.0))
    return trial, compare(point, trial, predicted)


def _quadratic(point: Point, trial: Point, t: float, slope: float, low: float, high: float) -> float:
    """Minimum, within [low, high], of the quadratic through f, its slope and the value at t."""
    rise = trial.value - point.value - t * slope
    return min(max(-0.5 * slope * t * t / rise if rise > 0.0 else high, low), high)


def _expand(
    point: Point, direction: Tensor, slope: float, curvature: float, found: tuple[Point, float, Decrease]
) -> tuple[Point, float, Decrease]:
    for _ in range(60):
        trial, verdict = _try(point, direction, 2.0 * found[1], slope, curvature)
        if not (verdict.accepted and verdict.finite and trial.value < found[0].value):
            break
        found = (trial, 2.0 * found[1], verdict)
    return found


def _refine(
    point: Point, direction: Tensor, slope: float, curvature: float, found: tuple[Point, float, Decrease]
) -> tuple[Point, float, Decrease]:
    """Towards the minimum along the direction: evaluations are cheap beside the products of a step."""
    for _ in range(REFINEMENTS):
        t = found[1]
        better = _quadratic(point, found[0], t, slope, 0.1 * t, 2.0 * t)
        if abs(better - t) < 0.1 * t:
            break
        trial, verdict = _try(point, direction, better, slope, curvature)
        if not (verdict.accepted and verdict.finite and trial.value < found[0].value):
            break
        found = (trial, better, verdict)
    return found


def leave_saddle(point: Point, vector: Tensor, curvature: float, length: float) -> SearchOutcome:
    """Step along a direction of negative curvature: both signs, lengths doubled or halved from ``length``.

    A step counts when the value falls by at least a tenth of `|curvature| t^2 / 2`, beyond the noise of
    values: a direction whose decrease cannot be seen is no escape.

    Args:
        point: the saddle.
        vector: (N,) unit direction with `v^T H v = curvature < 0`.
        curvature: negative.
        length: first trial length.
    """
    noise = value_noise(point)
    sign = -1.0 if float(vector @ point.grad) > 0 else 1.0

    def best_of_both(t: float) -> tuple[Point, float, bool]:
        trials = [(point.moved(point.x + s * t * vector), s * t) for s in (sign, -sign)]
        finite = [pair for pair in trials if not math.isnan(pair[0].value)]
        if not finite:
            return trials[0][0], trials[0][1], False
        trial, signed = min(finite, key=lambda pair: pair[0].value)
        fall = point.value - trial.value
        good = fall > max(2.0 * noise, 0.1 * 0.5 * abs(curvature) * t * t)
        return trial, signed, good and (trial.value == -math.inf or math.isfinite(trial.grad_norm))

    t, smallest = length, torch.finfo(point.x.dtype).eps * max(float(point.x.norm()), length)
    while t > smallest:
        trial, signed, good = best_of_both(t)
        if good:
            for _ in range(60):
                further, wider, better = best_of_both(2.0 * t)
                if not (better and further.value < trial.value) or not math.isfinite(further.value):
                    break
                trial, signed, t = further, wider, 2.0 * t
            return SearchOutcome(trial, signed, 1.0, False, math.isfinite(trial.value))
        if 0.5 * abs(curvature) * t * t < noise:
            break
        t *= 0.25
    return SearchOutcome(None, 0.0, 0.0, True, True)
