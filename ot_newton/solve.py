"""The public `sinkhorn`: validate, choose a backend, iterate, report."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ot_newton.backends.select import choose_backend, get_backend
from ot_newton.deflation import Deflation
from ot_newton.dual_newton import continue_newton, run_dual_newton
from ot_newton.errors import (
    ConvergenceWarning,
    PrecisionWarning,
    Status,
    check_choice,
    check_integer,
    check_number,
)
from ot_newton.fixed_point import FixedPoint, IterationInfo, SinkhornOptions, run_sinkhorn
from ot_newton.kept import KeptInverse
from ot_newton.potentials import Biases, Potentials, potentials_to_biases
from ot_newton.problem import OTProblem, as_tensor
from ot_newton.protocols import PassCounter, PlanBackend
from ot_newton.result import SinkhornResult
from ot_newton.semi_dual import Inverse
from ot_newton.stage import noise_floor
from ot_newton.warm import WarmStart

__all__ = ["sinkhorn", "start_biases", "tolerance"]

FLOAT64_TOL = 1e-9
FLOAT32_FLOOR_FACTOR = 10.0
COARSEST_TOL = 0.5  # marginals farther off are never called converged, whatever the floor
UPDATES = ("alternating", "symmetric", "self")
METHODS = ("auto", "sinkhorn", "newton")
PATIENCE = 50.0


def tolerance(problem: OTProblem, tol: float | None) -> tuple[float, float]:
    """(tolerance, noise floor); a tolerance below the floor is raised to it, with one warning."""
    floor = noise_floor(problem)
    if tol is None:
        default = FLOAT64_TOL if problem.dtype == torch.float64 else 0.0
        own = max(default, FLOAT32_FLOOR_FACTOR * floor if default == 0.0 else floor)
        return min(own, COARSEST_TOL), floor
    tol = check_number("tol", tol, strict=False)
    if 0 < tol < floor:
        warnings.warn(
            f"tol = {tol:.1e} is below the rounding floor eps_mach max|C|/eps = {floor:.1e} of "
            f"{str(problem.dtype).removeprefix('torch.')} at eps = {problem.eps:g}: raised to the floor",
            PrecisionWarning,
            stacklevel=3,
        )
        return max(tol, min(floor, COARSEST_TOL)), floor
    return tol, floor


def start_biases(problem: OTProblem, init: Any) -> Biases | None:
    """Biases of a start: a result, `Potentials` or a pair (f, g)."""
    if init is None:
        return None
    if isinstance(init, SinkhornResult):
        init = init.potentials
    try:
        f, g = init
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"init must be a SinkhornResult, Potentials or a pair (f, g), got {type(init).__name__}"
        ) from error
    f, g = as_tensor("init[0]", f), as_tensor("init[1]", g)
    for name, potential, count in (("init[0]", f, problem.n), ("init[1]", g, problem.m)):
        lead = problem.batch_shape
        if potential.shape[-1:] != (count,) or potential.dim() > len(lead) + 1:
            raise ValueError(f"{name} must have shape {(*lead, count)}, got {tuple(potential.shape)}")
        if not bool(torch.isfinite(potential).all()):
            raise ValueError(f"{name} must be finite, got {potential[~torch.isfinite(potential)][0].item()}")
    device = problem.device
    return potentials_to_biases(problem, Potentials(f.to(device), g.to(device)))


def _check_options(max_iter: Any, method: Any, anneal: Any, update: Any, callback: Any) -> int:
    check_choice("method", method, METHODS)
    check_choice("update", update, UPDATES)
    if anneal not in ("auto", False, True):
        raise ValueError(f"anneal must be 'auto' or False, got {anneal!r}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be callable, got {type(callback).__name__}")
    return check_integer("max_iter", max_iter, low=0)


def _check_self(problem: OTProblem) -> None:
    same = problem.rho_x == problem.rho_y and problem.n == problem.m
    if not same or not (torch.equal(problem.x, problem.y) and torch.equal(problem.a, problem.b)):
        raise ValueError('update="self" is for OT(x, x): x and y, a and b, rho_x and rho_y must be equal')


def sinkhorn(
    problem: OTProblem,
    *,
    tol: float | None = None,
    max_iter: int = 10_000,
    method: str = "auto",
    update: str = "alternating",
    anneal: str | bool = "auto",
    init: Any = None,
    backend: str = "auto",
    callback: Callable[[IterationInfo], object] | None = None,
    progress: bool = False,
) -> SinkhornResult:
    """Solve entropic optimal transport: Sinkhorn's iteration, and Newton on the dual where it is slow.

    Args:
        problem: what to solve.
        tol: L1 marginal error (the larger side, relative to the mass) to reach. None: 1e-9 in float64,
            10 times the floor `eps_mach max|C|/eps` in float32. Below the floor it is raised to it, with
            one warning. 0: exactly ``max_iter`` iterations, status MAX_ITER, no warning.
        max_iter: cap; one iteration is one f and one g update at any eps, annealing included.
        method: "sinkhorn"; "newton", truncated Newton on the dual after a few Sinkhorn iterations, for low
            eps (MATH 8); "auto", Sinkhorn until its rate foretells more than 50 further iterations, then
            Newton. A Newton step counts as one iteration; lanes of a batch are finished one by one.
        update: "alternating" (f, then g with the new f) or "symmetric" (both from the old ones,
            averaged; keeps f = g for identical inputs), "self" for OT(x, x): one averaged update of f = g,
            one pass an iteration.
        anneal: "auto" starts from a larger eps, halved every iteration, when eps is small against the
            cost (below 1/1024 of the largest) and there is no ``init``; False never does.
        init: a former result, `Potentials` or (f, g) to start from.
        backend: "auto", "dense", "torch_tiles", "cpu" or "triton" (on an NVIDIA GPU; "triton:tf32x3" and the
            like name a precision other than ieee float32).
        callback: called at every check with an `IterationInfo`; a true return or StopIteration stops
            (status CALLBACK).
        progress: show a progress bar.

    Returns:
        A `SinkhornResult`, whatever the status; a run that missed its tolerance warns.
        Cost: 2 plan passes per iteration and 2 for the last check and the audit of the other side; a Newton
        step keeps one side exact, and costs 2 and those of its solve.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an argument out of range; the message names it.

    Source: Cuturi (2013); stabilization and annealing after Schmitzer (2019); MATH 2.

    Example:
        >>> import torch, ot_newton as otn
        >>> x = torch.tensor([[-0.5], [0.5]], dtype=torch.float64)
        >>> y = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
        >>> result = otn.sinkhorn(otn.OTProblem(x, y, eps=1.0))
        >>> result.converged, round(float(result.value), 6)
        (True, 0.816219)
    """
    if not isinstance(problem, OTProblem):
        raise TypeError(f"problem must be an OTProblem, got {type(problem).__name__}")
    cap = _check_options(max_iter, method, anneal, update, callback)
    if update == "self":
        _check_self(problem)
    name = choose_backend(backend, problem.device, problem.n, problem.m, problem.lanes)
    warm = init if isinstance(init, WarmStart) else None
    start = start_biases(problem, init if warm is None else warm.potentials)
    limit, floor = tolerance(problem, tol)
    counter = PassCounter()
    options = SinkhornOptions(
        tol=limit,
        max_iter=cap,
        update=update,
        anneal=anneal is not False,
        check_every=1 if problem.device.type == "cpu" else 10,
        callback=callback,
    )
    own = get_backend(name)
    inverse = _inverse(own.name == "dense", warm)
    with _progress(progress, options) as watched:
        run = _Run(problem, own, watched, counter, inverse)
        end = run.iterate(method, start) if warm is None else run.go_on(method, warm, start)
    result = SinkhornResult(
        problem=problem,
        biases=end.biases,
        statuses=end.statuses,
        iterations=end.n_iter,
        errors=end.marginal_error,
        noise_floor=floor,
        tol=limit,
        counter=counter,
        history=end.history,
        backend=name,
        symmetric=update == "self",
        newton=bool(end.slow.any()),
        stage=end.stage,
        deflation=inverse if isinstance(inverse, Deflation) and problem.lanes == 1 else None,
        factor=inverse.factor if isinstance(inverse, KeptInverse) and problem.lanes == 1 else None,
    )
    _warn(result, tol)
    return result


def _inverse(stored: bool, warm: WarmStart | None) -> Inverse:
    """What the dual Newton solves with, started from what the last solve left."""
    if stored:
        return KeptInverse(None if warm is None else warm.factor)
    return Deflation.carried(None if warm is None else warm.space)


def _warn(result: SinkhornResult, tol: float | None) -> None:
    """One warning for the lanes that did not converge, unless exactly max_iter was asked for."""
    failed = [k for k, s in enumerate(result.statuses) if s is not Status.CONVERGED]
    if not failed or tol == 0 and all(result.statuses[k] is Status.MAX_ITER for k in failed):
        return
    if all(result.statuses[k] is Status.CALLBACK for k in failed):
        return
    worst = float(result.errors.max())
    lanes = f" ({len(failed)} of {len(result.statuses)} lanes)" if len(result.statuses) > 1 else ""
    status = result.statuses[failed[0]]
    warnings.warn(
        f"sinkhorn ended {status.name}{lanes} after {int(result.iterations.max())} iterations at marginal "
        f"error {worst:.2e}, tolerance {result.tol:.1e}, eps {result.problem.eps:g}: {status.message}",
        ConvergenceWarning,
        stacklevel=3,
    )


@dataclass(frozen=True, eq=False)
class _Run:
    """One solve: Sinkhorn, and Newton lane by lane where the method asks for it."""

    problem: OTProblem
    backend: PlanBackend
    options: SinkhornOptions
    counter: PassCounter
    inverse: Inverse

    def plain(self, method: str) -> bool:
        """Whether Sinkhorn has the whole run to itself."""
        return method == "sinkhorn" or self.options.tol == 0 or self.options.update != "alternating"

    def iterate(self, method: str, start: Biases | None) -> FixedPoint:
        """From a start or from nothing."""
        if method == "newton" and not self.plain(method) and self.problem.lanes == 1:
            return self.newton(start)
        patience = math.inf if self.plain(method) else (0.0 if method == "newton" else PATIENCE)
        options = replace(self.options, patience=patience)
        end = run_sinkhorn(self.problem, self.backend, options, self.counter, start)
        for lane in end.slow.nonzero()[:, 0].tolist():
            end = self.finish(end, lane)
        return end

    def newton(self, start: Biases | None, fallback: Biases | None = None) -> FixedPoint:
        """Newton on the dual of a single problem."""
        return run_dual_newton(
            self.problem,
            self.backend,
            self.options,
            self.counter,
            start,
            inverse=self.inverse,
            fallback=fallback,
        )

    def go_on(self, method: str, warm: WarmStart, start: Biases | None) -> FixedPoint:
        """From a warm start: with its potentials moved along, and by Newton where that has been the way."""
        moved = warm.predict(self.problem)
        predicted = start if moved is None else start_biases(self.problem, moved)
        slow = method == "newton" or (method == "auto" and warm.newton)
        if slow and not self.plain(method) and self.problem.lanes == 1:
            return self.newton(predicted, None if moved is None else start)
        return self.iterate(method, predicted)

    def finish(self, end: FixedPoint, lane: int) -> FixedPoint:
        """Newton on one slow lane, from where Sinkhorn gave up."""
        single = self.problem if self.problem.lanes == 1 else self.problem.lane(lane)
        own = self.inverse if self.problem.lanes == 1 else _inverse(self.backend.name == "dense", None)
        begun = replace(end.lane(lane), history=())
        tail = continue_newton(single, begun, self.options, self.counter, inverse=own)
        return end.with_lane(lane, tail)


class _progress:  # noqa: N801
    """Context that adds a progress bar to the options' callback."""

    def __init__(self, wanted: bool, options: SinkhornOptions) -> None:
        self.wanted, self.options = wanted, options

    def __enter__(self) -> SinkhornOptions:
        if not self.wanted:
            return self.options
        from rich.progress import Progress

        self.bar = Progress(transient=True)
        self.bar.start()
        task = self.bar.add_task("sinkhorn", total=self.options.max_iter)
        own = self.options.callback

        def watch(info: IterationInfo) -> object:
            text = f"sinkhorn, marginal error {info.marginal_error:.1e}"
            self.bar.update(task, completed=info.n_iter, description=text)
            return own(info) if own is not None else None

        return replace(self.options, callback=watch)

    def __exit__(self, *exc: object) -> None:
        if self.wanted:
            self.bar.stop()
