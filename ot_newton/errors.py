"""Exceptions, warnings and statuses of the whole package.

Every solver ends with a [`Status`][ot_newton.errors.Status]: an enum whose value is the message a
user reads, with the next step to take. A failure of an inner solver climbs into the status of the
outer one; nothing that did not converge is ever silent.
"""

from __future__ import annotations

import enum
from typing import Any

__all__ = [
    "ConvergenceWarning",
    "DegenerateWarning",
    "LinearSolveError",
    "OTNewtonError",
    "PrecisionWarning",
    "Status",
    "check_choice",
    "check_integer",
    "check_number",
]


class OTNewtonError(Exception):
    """Base class of the errors that are not plain bad arguments.

    Example:
        >>> issubclass(LinearSolveError, OTNewtonError), issubclass(OTNewtonError, ValueError)
        (True, False)
    """


class LinearSolveError(OTNewtonError, RuntimeError):
    """A linear solve asked for through an adapter did not meet its tolerance.

    Example:
        >>> try:
        ...     raise LinearSolveError("residual 1e-2, tolerance 1e-8")
        ... except RuntimeError as error:
        ...     print(error)
        residual 1e-2, tolerance 1e-8
    """


class ConvergenceWarning(UserWarning):
    """An iteration ended before it met its tolerance; the result says by how much.

    Example:
        >>> import warnings, torch, ot_newton as otn
        >>> problem = otn.OTProblem(torch.rand(5, 2), torch.rand(5, 2), eps=1e-3)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     result = otn.sinkhorn(problem, max_iter=1, anneal=False)
        >>> caught[0].category.__name__, result.status
        ('ConvergenceWarning', Status.MAX_ITER)
    """


class PrecisionWarning(UserWarning):
    """A tolerance below the rounding floor was raised to that floor.

    Example:
        >>> import warnings, torch, ot_newton as otn
        >>> problem = otn.OTProblem(torch.rand(5, 2), torch.rand(5, 2), eps=1.0)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     result = otn.sinkhorn(problem, tol=1e-12)
        >>> caught[0].category.__name__, result.tol > 1e-12
        ('PrecisionWarning', True)
    """


class DegenerateWarning(UserWarning):
    """A minimum was certified only up to a near-null curvature direction.

    Example:
        >>> import warnings, torch, ot_newton as otn
        >>> start = torch.tensor([1.0, 1.0]).double()
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     found = otn.NewtonCG(lambda x: x[0] ** 2 + 0 * x[1]).minimize(start)
        >>> caught[0].category.__name__, found.status, found.success
        ('DegenerateWarning', Status.DEGENERATE, True)
    """


@enum.unique
class Status(enum.Enum):
    """How a solver ended; the value is the message and the next step.

    Example:
        >>> Status.CONVERGED, Status.CONVERGED.message
        (Status.CONVERGED, 'fixed point reached: marginal error within the tolerance')
    """

    MINIMUM = "certified local minimum: gradient test met and smallest curvature positive"
    DEGENERATE = (
        "gradient test met, smallest curvature zero within the noise floor: the minimum may be flat "
        "along `lambda_min.vector`; tighten the inner tolerance or use float64 to tell"
    )
    UNDETERMINED = (
        "gradient test met, but the noise floor is too wide to tell the sign of the smallest "
        "curvature: use float64, a tighter inner tolerance or more Lanczos steps"
    )
    SADDLE = (
        "gradient test met at a saddle point: negative curvature along `lambda_min.vector`; "
        "allow escapes or step along it"
    )
    FLAT = "the loss is flat here: gradient and curvature are zero; nothing to minimize"
    CONVERGED = "fixed point reached: marginal error within the tolerance"
    MAX_ITER = "iteration limit reached before the tolerance: raise max_iter or start closer"
    BUDGET = "budget of Hessian-vector products or plan passes spent: raise it and resume"
    STAGNATION = "no further progress at this precision: use float64, or accept the tolerance reached"
    LINE_SEARCH = "no step length decreased the loss: check its gradient with check_hvp"
    UNBOUNDED = "the loss decreases without bound: add a regularizer or constrain the problem"
    NAN = "a value that is not finite appeared: look at the input scale, eps and the start"
    CALLBACK = "stopped by the callback"

    @property
    def message(self) -> str:
        """The sentence a user reads."""
        return str(self.value)

    def __repr__(self) -> str:
        """Short form, such as ``Status.MINIMUM``."""
        return f"Status.{self.name}"


def check_number(
    name: str,
    value: Any,
    *,
    low: float = 0.0,
    high: float = float("inf"),
    strict: bool = True,
) -> float:
    """Return ``value`` as a finite float within ``(low, high)``, or raise naming the argument.

    Args:
        name: the argument's name, for the message.
        value: what the caller passed.
        low: lower end, excluded when ``strict``.
        high: upper end, always allowed unless infinite.
        strict: whether ``low`` itself is excluded.

    Raises:
        TypeError: not a real number.
        ValueError: not finite or out of range.
    """
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a single real number, got {value!r}") from error
    bad = number <= low if strict else number < low
    if bad or number > high or number != number or number in (float("inf"), float("-inf")):
        bracket, end = "(" if strict else "[", ")" if high == float("inf") else "]"
        raise ValueError(f"{name} must be a finite number in {bracket}{low:g}, {high:g}{end}, got {number!r}")
    return number


def check_integer(name: str, value: Any, *, low: int = 0) -> int:
    """Return ``value`` as an int of at least ``low``, or raise naming the argument.

    Raises:
        TypeError: not an integer.
        ValueError: below ``low``.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
    number = int(value.__index__())
    if number < low:
        raise ValueError(f"{name} must be at least {low}, got {number}")
    return number


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``choices``, or raise naming the argument.

    Raises:
        ValueError: not one of the choices.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return str(value)
