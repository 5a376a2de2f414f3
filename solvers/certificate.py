"""What a point that meets the gradient test is: minimum, degenerate, saddle, flat or undetermined."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import Status
from ot_newton.solvers.linear_map import random_start
from ot_newton.solvers.objective import Point
from ot_newton.solvers.spectra import BAND, EigenEstimate, lambda_min

__all__ = ["Certificate", "certify", "classify", "gradient_noise"]

WIDE_FLOOR = 1e-4
DENSE_AT_MOST = 1000
LANCZOS_CAP = 500


@dataclass(frozen=True, eq=False)
class Certificate:
    """A status with the estimate behind it; ``note`` adds to the status's message."""

    status: Status
    estimate: EigenEstimate | None
    note: str = ""


def classify(estimate: EigenEstimate, confidence: float) -> tuple[Status, str]:
    """The verdict on an estimate; pure.

    With `slack = max(noise_floor, 1e-6 lambda_max)`: below -slack SADDLE (proved), above slack and
    certified MINIMUM, between DEGENERATE; UNDETERMINED where the noise floor exceeds 1e-4 lambda_max,
    where noise alone decides whether the value is below -slack (float32), or where the confidence was
    not reached; FLAT where the Hessian is zero.

    Args:
        estimate: of the smallest eigenvalue at a point that meets the gradient test.
        confidence: what is asked of it.

    Returns:
        Status and a note, "" if the status says it all.
    """
    value, floor = estimate.value, estimate.noise_floor
    if estimate.norm == 0.0:
        return Status.FLAT, ""
    scale = max(estimate.lambda_max, abs(value))
    slack = max(floor, BAND * scale)
    if value < -slack:
        return Status.SADDLE, ""
    if floor > WIDE_FLOOR * scale and value <= floor:
        return Status.UNDETERMINED, f"noise floor {floor:.1e}, largest curvature {scale:.1e}"
    if floor < slack and value < floor - slack:
        return (
            Status.UNDETERMINED,
            f"lambda_min = {value:.1e}, band {slack:.1e}, noise floor {floor:.1e}",
        )
    if estimate.confidence < confidence:
        return (
            Status.UNDETERMINED,
            f"confidence {estimate.confidence:.3f} of {confidence:g} after {estimate.steps} Lanczos steps",
        )
    return (Status.DEGENERATE, "") if value <= slack else (Status.MINIMUM, "")


def certify(
    point: Point,
    *,
    confidence: float,
    seed: int,
    nullspace: Tensor | None = None,
    max_steps: int | None = None,
    dense_below: int = 200,
) -> Certificate:
    """Estimate lambda_min at ``point`` and classify it.

    Cost, at most 2N + 1 products: N up to ``dense_below``; else two independent Lanczos runs of at most
    500 steps (N/4 up to N = 1000, and where those leave the sign open, N more for a factorization: a
    near-null eigenvalue is out of reach of a probabilistic bound).

    Args:
        point: where the gradient test is met.
        confidence: asked of the estimate.
        seed: of the Lanczos starts.
        nullspace: (N, m) directions projected out.
        max_steps: cap on the steps of each start, without the factorization; None for the rule above.
        dense_below: largest N that is factorized straight away.
    """
    objective = point.objective
    n = objective.n
    floor = objective.floor("hvp_noise_floor", point.x)
    if not (math.isfinite(floor) and math.isfinite(point.noise_floor)):
        note = f"the loss reports no finite noise floor, got {max(floor, point.noise_floor):g}"
        return Certificate(Status.UNDETERMINED, None, note)
    rescue = max_steps is None and dense_below < n <= DENSE_AT_MOST
    if max_steps is None:
        max_steps = max(n // 4, 1) if rescue else min(n, LANCZOS_CAP)
    options: dict[str, Any] = {
        "confidence": confidence,
        "tol": 1e-2,
        "seed": seed,
        "nullspace": nullspace,
        "noise_floor": floor,
        "relative_noise": objective.relative_noise,
        "max_steps": max_steps,
    }
    try:
        estimate = lambda_min(point.hessian, dense_below=dense_below, **options)
        if rescue and estimate.value >= estimate.level and estimate.confidence < confidence:
            spent = estimate.n_hvp
            estimate = lambda_min(point.hessian, dense_below=n, **options)
            estimate = replace(estimate, n_hvp=estimate.n_hvp + spent)
    except FloatingPointError as error:
        return Certificate(Status.NAN, None, str(error))
    status, note = classify(estimate, confidence)
    return Certificate(status, estimate, note)


def gradient_noise(point: Point) -> float:
    """Measured noise of the gradient: `|g(x + d) - g(x) - H d|` for a d of a few units of rounding of x.

    Cost: one gradient and one product.
    """
    objective = point.objective
    eps = torch.finfo(objective.dtype).eps
    size = point.x.abs().clamp_min(float(point.x.abs().mean()))
    signs = random_start(objective.n, 0, 7, dtype=objective.dtype, device=objective.device).sign()
    moved = point.x + 4.0 * eps * size * signs
    with objective.frozen():
        change = point.moved(moved).grad - point.grad
    return float((change - point.hessian @ (moved - point.x)).norm())
