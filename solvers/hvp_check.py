"""Check the gradient and the Hessian products of a loss before trusting them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import OTNewtonError, check_integer, check_number
from ot_newton.solvers.linear_map import random_start
from ot_newton.solvers.objective import Objective, Point, as_start

__all__ = ["HVPReport", "check_hvp"]

SLOPE_SLACK = 0.4
TRIALS = 14


@dataclass(frozen=True)
class HVPReport:
    """Findings of `check_hvp`; all errors are relative.

    Attributes:
        passed: every test passed.
        cause: the usual cause of what failed, "" if nothing did.
        failures: names of the failed tests.
        symmetry: `|u.Hv - v.Hu|`.
        linearity: `|H(2u - v/2) - 2Hu + Hv/2|` and `|H(cu) - cHu|`, c = 1e-6: the larger.
        determinism: change between two identical evaluations.
        gradient_slope: order of `f(x+tv) - f - t g.v` in t; 2 when right; nan when it is all rounding.
        hvp_slope: order of `f(x+tv) - f - t g.v - t^2 v.Hv/2`; 3 when right (4 where odd terms vanish).
        hvp_error: distance of Hv from a central difference of gradients.
        kind: where the products come from: "autograd", "finite-difference", "hessian", "hvp".
        tolerance: what the relative errors were held against.
    """

    passed: bool
    cause: str
    failures: tuple[str, ...]
    symmetry: float
    linearity: float
    determinism: float
    gradient_slope: float
    hvp_slope: float
    hvp_error: float
    kind: str
    tolerance: float
    remainders: dict[str, list[float]] = field(default_factory=dict, repr=False)

    def __bool__(self) -> bool:
        return self.passed

    def raise_if_failed(self) -> None:
        """Raise OTNewtonError with the cause, if a test failed."""
        if not self.passed:
            raise OTNewtonError(f"HVP check failed ({', '.join(self.failures)}): {self.cause}")


def check_hvp(
    loss: Any,
    x: Any,
    *,
    hvp: str | Callable[[Tensor, Tensor], Any] = "autograd",
    hess: Callable[[Tensor], Any] | None = None,
    seed: int = 0,
    scale: float | None = None,
    tol: float | None = None,
) -> HVPReport:
    """Test symmetry, linearity, determinism and Taylor slopes of a loss at x.

    Args:
        loss: as for `NewtonCG`; its warm starts are frozen meanwhile.
        x: the point; a generic one says more than a symmetric one.
        hvp: as for `NewtonCG`.
        hess: as for `NewtonCG`.
        seed: of the random directions.
        scale: length of the largest Taylor step; a tenth of |x| (1 if x = 0) if None.
        tol: relative tolerance; `eps_mach^(1/3)` beside the loss's own noise if None.

    Returns:
        An `HVPReport`. Cost: about 20 evaluations of value and gradient, 7 products.

    Raises:
        TypeError: a bad loss or x; OTNewtonError is not raised but reported.

    Example:
        >>> import torch
        >>> point = torch.tensor([1.0, -2.0], dtype=torch.float64)
        >>> check_hvp(lambda x: (x**4).sum(), point).passed
        True
        >>> check_hvp(lambda x: (x**4).sum(), point, hvp=lambda x, v: 11 * x**2 * v).failures
        ('HVP slope',)
    """
    start = as_start(x)
    objective = Objective(loss, start, hvp=hvp, hess=hess)
    check_integer("seed", seed)
    eps = torch.finfo(objective.dtype).eps
    flat = start.reshape(-1)
    size = (0.1 * float(flat.norm()) or 1.0) if scale is None else check_number("scale", scale)
    tolerance = 2.0 * eps ** (1 / 3) if tol is None else check_number("tol", tol)
    draw = [
        random_start(objective.n, seed, 20 + i, dtype=objective.dtype, device=objective.device)
        for i in range(2)
    ]
    with objective.frozen():
        point = objective.at(flat)
        try:
            return _examine(point, draw[0], draw[1], size, tolerance)
        except (OTNewtonError, FloatingPointError) as error:
            nan = math.nan
            return HVPReport(
                False,
                str(error),
                ("twice differentiable",),
                nan,
                nan,
                nan,
                nan,
                nan,
                nan,
                _kind(objective),
                tolerance,
            )


def _kind(objective: Objective) -> str:
    if callable(objective.hvp):
        return "hvp"
    if objective.hvp == "finite-difference":
        return "finite-difference"
    if objective.hess is not None:
        return "hessian"
    return "hvp" if objective.has_pair else "autograd"


def _examine(point: Point, u: Tensor, v: Tensor, size: float, tolerance: float) -> HVPReport:
    objective, hessian = point.objective, point.hessian
    hu, hv = hessian @ u, hessian @ v
    norm = max(float(hu.norm()), float(hv.norm()))
    tiny = torch.finfo(objective.dtype).tiny
    symmetry = abs(float(u @ hv) - float(v @ hu)) / max(norm, tiny)
    mixed = float((hessian @ (2 * u - 0.5 * v) - 2 * hu + 0.5 * hv).norm())
    scaled = float((hessian @ (1e-6 * u) * 1e6 - hu).norm())
    linearity = max(mixed, scaled) / max(norm, tiny)
    again = objective.at(point.x)
    repeat = float((again.hessian @ u - hu).norm()) / max(norm, tiny)
    shift = float((again.grad - point.grad).norm()) / max(point.grad_norm, tiny)
    determinism = max(repeat, shift if point.grad_norm > 0 else 0.0)
    error = _difference_error(point, v, hv, size)
    first, third = _remainders(point, v, hv, size)
    floor = max(
        200 * torch.finfo(objective.dtype).eps * _value_scale(point, v, size),
        objective.floor("value_noise", point.x),
    )
    gradient_slope, hvp_slope = _slope(first, floor), _slope(third, floor)
    failures = []
    if not symmetry <= tolerance:
        failures.append("symmetry")
    if not linearity <= tolerance:
        failures.append("linearity")
    if not determinism <= tolerance:
        failures.append("determinism")
    if gradient_slope < 2 - SLOPE_SLACK:
        failures.append("gradient slope")
    if not error <= tolerance or (hvp_slope < 3 - SLOPE_SLACK and error > 0.1 * tolerance):
        failures.append("HVP slope")
    return HVPReport(
        passed=not failures,
        cause=_cause(point, failures),
        failures=tuple(failures),
        symmetry=symmetry,
        linearity=linearity,
        determinism=determinism,
        gradient_slope=gradient_slope,
        hvp_slope=hvp_slope,
        hvp_error=error,
        kind=_kind(objective),
        tolerance=tolerance,
        remainders={"gradient": first, "hvp": third},
    )


def _difference_error(point: Point, v: Tensor, hv: Tensor, size: float) -> float:
    """Smallest relative distance of Hv from central differences over a few step lengths."""
    best = math.inf
    objective = point.objective
    for power in (1.0, 1e-1, 1e-2, 1e-3, 1e-4):
        t = size * power
        change = (objective.at(point.x + t * v).grad - objective.at(point.x - t * v).grad) / (2 * t)
        scale = max(float(change.norm()), float(hv.norm()))
        gap = float((change - hv).norm())
        # A difference of gradients that is all rounding agrees with a zero product.
        noise = 10 * torch.finfo(objective.dtype).eps * point.grad_norm / t
        gap = max(gap - noise, 0.0) if math.isfinite(gap) else math.inf
        best = min(best, gap / scale if scale > 0 else gap)
    return best


def _value_scale(point: Point, v: Tensor, size: float) -> float:
    return max(abs(point.value), abs(point.objective.at(point.x + size * v).value))


def _remainders(point: Point, v: Tensor, hv: Tensor, size: float) -> tuple[list[float], list[float]]:
    """Remainders of the first- and second-order Taylor polynomials at t = size 2^-k."""
    slope = float((point.grad.to(torch.float64) * v.to(torch.float64)).sum())
    curvature = float((hv.to(torch.float64) * v.to(torch.float64)).sum())
    first, second = [], []
    for k in range(TRIALS):
        t = size * 0.5**k
        rest = point.objective.at(point.x + t * v).value - point.value - t * slope
        first.append(abs(rest))
        second.append(abs(rest - 0.5 * t * t * curvature))
    return first, second


def _slope(remainders: list[float], floor: float) -> float:
    """Order of the remainders over the shortest steps still clear of rounding; nan if there are none."""
    clear = [r for r in remainders if math.isfinite(r)]
    while clear and not clear[-1] > 10 * floor:
        clear.pop()
    clear = clear[-4:]
    if len(clear) < 3 or min(clear) <= 0.0:
        return math.nan
    return math.log2(clear[0] / clear[-1]) / (len(clear) - 1)


def _cause(point: Point, failures: list[str]) -> str:
    if not failures:
        return ""
    if "gradient slope" in failures:
        return (
            "the gradient is not the derivative of the value: a custom backward is wrong, or x is at a kink"
        )
    if "determinism" in failures:
        return (
            "two identical evaluations differ: sampling, dropout, or a warm start that freeze() does not hold"
        )
    if _kind(point.objective) != "autograd":
        return "the products disagree with differences of the gradient: look at hvp, hess or their tolerance"
    return point.objective_cause()
