"""Newton-CG that certifies where it stops."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import (
    ConvergenceWarning,
    DegenerateWarning,
    Status,
    check_choice,
    check_integer,
    check_number,
)
from ot_newton.solvers.callbacks import CallbackDispatch
from ot_newton.solvers.history import StepRecord
from ot_newton.solvers.monitor import LanczosMonitor
from ot_newton.solvers.newton_loop import NewtonLoop
from ot_newton.solvers.objective import Objective, as_start
from ot_newton.solvers.options import NewtonOptions
from ot_newton.solvers.spectra import EigenEstimate
from ot_newton.solvers.state import NewtonState

__all__ = ["NewtonCG", "NewtonResult", "finish", "resumed_or_start"]

SUCCESS = (Status.MINIMUM, Status.DEGENERATE)


@dataclass(frozen=True, eq=False)
class NewtonResult:
    """Where a run ended and what is known about the point.

    Attributes:
        x: the point, in the shape, dtype and device of the start.
        fun: the loss there.
        grad: its gradient, like x.
        status: how the run ended.
        success: gradient test met and no negative curvature: MINIMUM or DEGENERATE.
        message: the status in words, with particulars.
        n_iter: outer steps.
        n_fun: evaluations of the loss.
        n_grad: gradients.
        n_hvp: Hessian-vector products, certificates included.
        lambda_min: the last `EigenEstimate`; None where the run ended before it took one.
        history: a `StepRecord` per trial step, certificate and switch.
        state: to go on from: `minimize(resume=result.state)`.
    """

    x: Tensor = field(repr=False)
    fun: float
    grad: Tensor = field(repr=False)
    status: Status
    success: bool
    message: str = field(repr=False)
    n_iter: int
    n_fun: int
    n_grad: int
    n_hvp: int
    lambda_min: EigenEstimate | None = field(repr=False)
    history: tuple[StepRecord, ...] = field(repr=False)
    state: NewtonState = field(repr=False)

    @property
    def jac(self) -> Tensor:
        """Scipy's name of ``grad``."""
        return self.grad

    @property
    def nit(self) -> int:
        """Scipy's name of ``n_iter``."""
        return self.n_iter

    @property
    def nfev(self) -> int:
        """Scipy's name of ``n_fun``."""
        return self.n_fun

    @property
    def njev(self) -> int:
        """Scipy's name of ``n_grad``."""
        return self.n_grad

    @property
    def nhev(self) -> int:
        """Scipy's name of ``n_hvp``."""
        return self.n_hvp


class NewtonCG:
    """Truncated Newton with a trust region (or a line search) and a certified exit.

    A point that meets the gradient test is a success only if its smallest Hessian eigenvalue is, with
    the confidence asked and from two independent starts, not negative; otherwise the run leaves along
    the eigenvector of negative curvature. The cost is counted in Hessian-vector products.

    Args:
        loss: a callable `x -> scalar tensor`, or an object with `value_and_grad` and `hvp` or `hessian`
            (see `ot_newton.solvers.objective`).
        gtol: gradient test `|g_k| <= gtol max_{j<=k} |g_j|`, or below the noise floor of the loss, or
            below the rounding of x seen through the Hessian, `eps_mach |H| |x|`.
        max_iter: cap on outer steps, counted from the first start (also after a resume).
        method: "trust-region" (Steihaug; a rejected step costs no product) or "line-search".
        hvp: "autograd", "finite-difference" (of gradients), or a function `(x, v) -> H v`.
        hess: instead of ``hvp``: a function of x that returns an operator or matrix (N, N).
        surrogate: a function `(x, v)`: product with a surrogate of the Hessian (Gauss-Newton) that steps
            are made of; the certificate still uses the true Hessian.
        preconditioner: an operator approximating the inverse Hessian (symmetric positive definite), or a
            function of x that returns one; the radius is then measured in its norm.
        nullspace: (N, m) known null directions (gauge modes), kept out of steps and certificates.
        radius: first trust-region radius; taken from the first model if None.
        on_reject: what becomes of the radius of a rejected step: "halve" (it costs no product, where
            products are what costs), "interpolate" (fewer trials, where values are).
        max_cg: cap on CG steps per outer step; max(2N, 50) if None.
        max_hvp: budget of products, certificates included.
        max_passes: budget of plan passes, for losses that count them.
        max_escapes: steps out of saddles before the run ends with SADDLE.
        confidence: of the certificate.
        certificate_steps: cap on Lanczos steps of each start of a certificate; None for the rule of
            `certify`, at most 2N + 1 products in all.
        monitor: a `LanczosMonitor`, called after every accepted step.
        seed: of certificates; the global generator is never touched.
        verbose: print a table row per step.

    Raises:
        ValueError: a bad argument; TypeError: likewise.

    Example:
        >>> import torch
        >>> loss = lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4 / 4
        >>> result = NewtonCG(loss).minimize(torch.zeros(2, dtype=torch.float64))
        >>> result.status, round(result.fun, 9), round(result.lambda_min.value, 6)
        (Status.MINIMUM, -1.0, 2.0)
        >>> [row.reason for row in result.history if row.kind == "escape"]
        ['left a saddle, lambda_min = -2.000e+00']
    """

    def __init__(
        self,
        loss: Any,
        *,
        gtol: float = 1e-8,
        max_iter: int = 500,
        method: str = "trust-region",
        hvp: str | Callable[[Tensor, Tensor], Any] = "autograd",
        hess: Callable[[Tensor], Any] | None = None,
        surrogate: Callable[[Tensor, Tensor], Any] | None = None,
        preconditioner: Any = None,
        nullspace: Tensor | None = None,
        radius: float | None = None,
        on_reject: str = "halve",
        max_cg: int | None = None,
        max_hvp: int | None = None,
        max_passes: int | None = None,
        max_escapes: int = 10,
        confidence: float = 0.99,
        certificate_steps: int | None = None,
        monitor: LanczosMonitor | None = None,
        seed: int = 0,
        verbose: bool = False,
    ) -> None:
        if hess is not None and not callable(hess):
            raise TypeError(f"hess must be a function of x, got {type(hess).__name__}")
        self.loss, self.hvp, self.hess, self.surrogate = loss, hvp, hess, surrogate
        # Validates loss and hvp now rather than in the first step.
        self.bind(torch.zeros(1, dtype=torch.float64))
        self.options = NewtonOptions(
            gtol=check_number("gtol", gtol, strict=False),
            max_iter=check_integer("max_iter", max_iter),
            method=check_choice("method", method, ("trust-region", "line-search")),
            preconditioner=preconditioner,
            nullspace=nullspace,
            radius=None if radius is None else check_number("radius", radius),
            on_reject=check_choice("on_reject", on_reject, ("halve", "interpolate")),
            max_cg=None if max_cg is None else check_integer("max_cg", max_cg, low=1),
            max_hvp=None if max_hvp is None else check_integer("max_hvp", max_hvp),
            max_passes=None if max_passes is None else check_integer("max_passes", max_passes),
            max_escapes=check_integer("max_escapes", max_escapes),
            confidence=check_number("confidence", confidence, high=1.0),
            certificate_steps=None
            if certificate_steps is None
            else check_integer("certificate_steps", certificate_steps, low=1),
            monitor=monitor,
            seed=check_integer("seed", seed),
            verbose=bool(verbose),
        )

    def bind(self, like: Tensor) -> Objective:
        """The counted loss for arguments like ``like``."""
        return Objective(self.loss, like, hvp=self.hvp, hess=self.hess, surrogate=self.surrogate)

    def minimize(
        self,
        x0: Any = None,
        *,
        resume: NewtonState | None = None,
        callback: Callable[..., Any] | Iterable[Callable[..., Any]] | None = None,
    ) -> NewtonResult:
        """Minimize from ``x0``, or go on from a saved state.

        Args:
            x0: start; any shape, float32 or float64 (half precision computes in float32); not changed.
            resume: a `NewtonState`; ``x0`` is then not needed.
            callback: called after every step; see `CallbackDispatch`. Stops the run by a true return
                value or StopIteration.

        Returns:
            A `NewtonResult`. Everything but success warns: ConvergenceWarning, or DegenerateWarning for
            a minimum certified only up to flat directions. A stop by the callback does not warn.

        Raises:
            TypeError: ``x0`` is not a floating tensor or array; ValueError: neither start nor state.
        """
        given = resumed_or_start(x0, resume)
        start = as_start(given)
        objective = self.bind(start)
        loop = NewtonLoop(objective, self.options, start.reshape(-1), resume=resume)
        status = loop.run(CallbackDispatch(callback))
        final = given.dtype if isinstance(given, Tensor) else start.dtype
        return finish(loop, status, final, stacklevel=3)


def resumed_or_start(x0: Any, resume: NewtonState | None) -> Any:
    """The point to start from.

    Raises:
        ValueError: neither start nor state; TypeError: not a state.
    """
    if resume is None:
        if x0 is None:
            raise ValueError("x0 must be given unless resume is, got None")
        return x0
    if not isinstance(resume, NewtonState):
        raise TypeError(f"resume must be a NewtonState, got {type(resume).__name__}")
    return resume.x


def finish(loop: NewtonLoop, status: Status, dtype: torch.dtype, *, stacklevel: int) -> NewtonResult:
    """Build the result of a loop and warn where it is not a clean success."""
    note = f" ({loop.note})" if loop.note else ""
    message = (loop.message or status.message) + note
    if status is Status.DEGENERATE:
        warnings.warn(message, DegenerateWarning, stacklevel=stacklevel)
    elif status not in SUCCESS and status is not Status.CALLBACK:
        warnings.warn(f"{status.name}: {message}", ConvergenceWarning, stacklevel=stacklevel)
    point, objective = loop.point, loop.objective
    return NewtonResult(
        x=point.x.reshape(objective.shape).to(dtype),
        fun=point.value,
        grad=point.grad.reshape(objective.shape).to(dtype),
        status=status,
        success=status in SUCCESS,
        message=message,
        n_iter=loop.n_iter,
        n_fun=objective.n_fun,
        n_grad=objective.n_grad,
        n_hvp=objective.n_hvp,
        lambda_min=loop.estimate,
        history=tuple(loop.history),
        state=loop.state(),
    )
