"""What a point that meets the gradient test is: minimum, degenerate, saddle, flat or undetermined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import Status
from ot_newton.solvers.linear_map import random_start
from ot_newton.solvers.objective import Point
from ot_newton.solvers.spectra import BAND, EigenEstimate, lambda_min

__all__ = ["Certificate", "certify", "classify", "gradient_noise"]

WIDE_FLOOR = 1e-4


@dataclass(frozen=True, eq=False)
class Certificate:
    """A status with the estimate behind it; ``note`` adds to the status's message."""

    status: Status
    estimate: EigenEstimate | None
    note: str = ""


def classify(estimate: EigenEstimate, confidence: float) -> tuple[Status, str]:
    """The verdict on an estimate; pure.

    With `slack = max(noise_floor, 1e-6 lambda_max)`: below -slack SADDLE (proved), above slack and
    certified MINIMUM, between DEGENERATE; UNDETERMINED where the noise floor exceeds 1e-4 lambda_max or
    the confidence was not reached; FLAT where the Hessian is zero.

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

    Cost: N products up to ``dense_below``; else two independent Lanczos runs.
    """
    objective = point.objective
    options: dict[str, Any] = {
        "confidence": confidence,
        "tol": 1e-2,
        "seed": seed,
        "nullspace": nullspace,
        "noise_floor": objective.floor("hvp_noise_floor", point.x),
        "relative_noise": objective.relative_noise,
        "dense_below": dense_below,
        "max_steps": min(objective.n, 500) if max_steps is None else max_steps,
    }
    try:
        estimate = lambda_min(point.hessian, **options)
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
