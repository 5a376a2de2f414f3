"""Callbacks: scipy's two spellings, a truthy return or StopIteration to stop; the saddle detector."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ot_newton.errors import check_choice, check_integer, check_number
from ot_newton.solvers.history import StepRecord
from ot_newton.solvers.linear_map import LinearMap

if TYPE_CHECKING:
    from ot_newton.solvers.spectra import EigenEstimate

__all__ = ["CallbackDispatch", "SaddleDetector", "StepInfo"]

INFO_NAMES = ("intermediate_result", "info", "record", "step_info")
LOGGER = logging.getLogger("ot_newton.solvers")


@dataclass(frozen=True, eq=False)
class StepInfo:
    """What a callback sees after a step; every field of ``record`` is an attribute too.

    Attributes:
        x: the point, in the caller's shape.
        grad: the gradient, likewise.
        record: the history row.
        hessian: the Hessian at x: an operator on flat vectors; its products are counted.
        lambda_min: the estimate of the last probe, if this step was probed.
    """

    x: Tensor = field(repr=False)
    grad: Tensor = field(repr=False)
    record: StepRecord
    hessian: LinearMap = field(repr=False)
    lambda_min: EigenEstimate | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "record":
            raise AttributeError(name)
        return getattr(self.record, name)


class CallbackDispatch:
    """Calls user callbacks in the spelling each was written in.

    A callback whose parameter is named ``intermediate_result`` (also keyword-only) or ``info`` gets the
    `StepInfo`; any other gets x. It stops the run by returning a true value or raising StopIteration.

    Args:
        callbacks: None, one callable or several.

    Raises:
        TypeError: not callable.

    Example:
        >>> calls = CallbackDispatch([lambda x: None, lambda *, intermediate_result: True])
        >>> bool(calls)
        True
    """

    def __init__(self, callbacks: Callable[..., Any] | Iterable[Callable[..., Any]] | None) -> None:
        if callbacks is None:
            found: list[Callable[..., Any]] = []
        elif callable(callbacks):
            found = [callbacks]
        else:
            found = list(callbacks)
        for one in found:
            if not callable(one):
                raise TypeError(f"callback must be callable, got {type(one).__name__}")
        self._calls = [(one, *_spelling(one)) for one in found]

    def __call__(self, info: StepInfo) -> bool:
        """Run every callback; True if one asked to stop."""
        stop = False
        for function, keyword, wants_info in self._calls:
            argument: Any = info if wants_info else info.x
            try:
                answer = function(**{keyword: argument}) if keyword else function(argument)
            except StopIteration:
                answer = True
            stop = stop or (answer is not None and bool(answer))
        return stop

    def __bool__(self) -> bool:
        return bool(self._calls)


def _spelling(function: Callable[..., Any]) -> tuple[str, bool]:
    """(keyword to pass it by or "", whether it wants the info rather than x)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return "", False
    for parameter in parameters:
        if parameter.name in INFO_NAMES and parameter.kind is not parameter.POSITIONAL_ONLY:
            return parameter.name, True
    if parameters and parameters[0].name in INFO_NAMES:
        return "", True
    return "", False


class SaddleDetector:
    """A callback that watches the smallest curvature and stops, logs or triggers.

    Args:
        threshold: reports when lambda_min <= threshold * lambda_max (relative; 0: proved negative only).
        action: "stop", "log", or a function of `(info, estimate)` whose true return stops.
        every: steps between two probes.
        **options: passed to `lambda_min`.

    Attributes:
        found: (step, estimate) of every detection.

    Example:
        >>> import torch
        >>> from ot_newton.solvers.newton import NewtonCG
        >>> loss = lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4 / 4
        >>> detector = SaddleDetector(every=1)
        >>> result = NewtonCG(loss).minimize(torch.tensor([2.0, 0.1]), callback=detector)
        >>> result.status, detector.found[0][1].sign
        (Status.CALLBACK, 'negative')
    """

    def __init__(
        self,
        threshold: float = 0.0,
        action: str | Callable[[StepInfo, EigenEstimate], Any] = "stop",
        *,
        every: int = 10,
        **options: Any,
    ) -> None:
        self.threshold = check_number("threshold", threshold, low=-1.0, strict=False)
        if not callable(action):
            check_choice("action", action, ("stop", "log"))
        self.action, self.every = action, check_integer("every", every, low=1)
        self.options = options
        self.found: list[tuple[int, EigenEstimate]] = []

    def __call__(self, info: StepInfo) -> bool:
        """Probe if due; True to stop."""
        from ot_newton.solvers.spectra import lambda_min

        if info.step % self.every:
            return False
        estimate = info.lambda_min
        if estimate is None:
            estimate = lambda_min(info.hessian, **self.options)
        level = self.threshold * estimate.lambda_max
        if not (estimate.sign == "negative" if self.threshold == 0.0 else estimate.value <= level):
            return False
        self.found.append((info.step, estimate))
        if self.action == "log":
            LOGGER.warning(
                "step %d: lambda_min = %.3e, lambda_max = %.3e",
                info.step,
                estimate.value,
                estimate.lambda_max,
            )
            return False
        return True if self.action == "stop" else bool(self.action(info, estimate))  # type: ignore[operator]
