"""Truncated Newton on the dual, for low eps and for warm starts: the loop over steps (MATH 8).

A step is one on the semi-dual (`SemiDual`): by the inverse at hand where the last one did, else by a solve as
exact as the progress allows, which a Sinkhorn iteration follows for the fast modes that CG leaves. Sinkhorn
iterations replace a step that fails.

Cost of a step: 1 pass for every length tried and 1 at the end; a solve by CG 2 more for every CG step and 2
for the iteration.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch
from torch import Tensor

from ot_newton.errors import Status
from ot_newton.fixed_point import FixedPoint, IterationInfo, SinkhornOptions, run_sinkhorn
from ot_newton.kept import KeptInverse
from ot_newton.potentials import Biases
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter, PlanBackend
from ot_newton.semi_dual import Inverse, SemiDual, SemiDualState
from ot_newton.stage import Stage, noise_floor

__all__ = ["continue_newton", "run_dual_newton"]

WARM_ITERATIONS = 30
APPROACH_RATE = 0.7
NEAR = 0.1
FAR = 0.3
COOLING_STEPS = 4
FORCING = 0.1
FORCING_FLOOR = 1e-3
LAST_FORCING_FLOOR = 1e-5
STALLED_STEPS = 6
FALLBACK_ITERATIONS = 8
POLISH_STEPS = 3
WORTHWHILE = 0.5
CHORD_REACH = 0.01


class _Newton:
    """The outer loop of one lane."""

    def __init__(
        self,
        dual: SemiDual,
        floor: float,
        options: SinkhornOptions,
        counter: PassCounter,
        *,
        iteration: int = 0,
        history: tuple[IterationInfo, ...] = (),
    ) -> None:
        self.dual, self.floor, self.options, self.counter = dual, floor, options, counter
        self.iteration, self.history = iteration, list(history)
        self.best = float("inf")
        self.idle = 0
        self.whole = True
        self.began = time.perf_counter()

    def terminate(self, state: SemiDualState) -> Status | None:
        """Judge a state on its marginal error."""
        error, seconds = state.error, time.perf_counter() - self.began
        row = IterationInfo(self.iteration, self.dual.stage.eps, error, self.counter.passes, seconds)
        self.history.append(row)
        if math.isnan(error):
            return Status.NAN
        if self.options.tol > 0 and error <= self.options.tol:
            return Status.CONVERGED
        if self.options.callback is not None:
            try:
                if self.options.callback(row):
                    return Status.CALLBACK
            except StopIteration:
                return Status.CALLBACK
        # A kept inverse that does little is followed by a solve: only these can stagnate.
        moving = error < 0.7 * self.best or state.rise > self.floor * self.dual.scale
        self.idle = 0 if moving else self.idle + self.whole
        self.best = min(self.best, error)
        if self.idle >= STALLED_STEPS and error <= 1e3 * self.floor:
            return Status.STAGNATION
        return Status.MAX_ITER if self.iteration >= self.options.max_iter else None

    def approach(self, state: SemiDualState) -> SemiDualState:
        """Sinkhorn iterations until a start is near enough for Newton, or they do little.

        None where plans are stored: a factorization costs no pass.
        """
        for _ in range(0 if isinstance(self.dual.inverse, KeptInverse) else WARM_ITERATIONS):
            if state.error <= NEAR or self.iteration >= self.options.max_iter:
                break
            before, state = state.error, self.dual.sweep(state)
            self.iteration += 1
            if state.error > APPROACH_RATE * before:
                break
        return state

    def step(self, state: SemiDualState) -> SemiDualState:
        """By the inverse at hand where that does, else by a solve."""
        inverse = self.dual.inverse
        self.iteration += 1
        self.whole = inverse is None or not inverse.lenient or not inverse.matches(state.col)
        self.whole = self.whole or (isinstance(inverse, KeptInverse) and state.error > CHORD_REACH)
        if inverse is not None and not self.whole:
            following = self.dual.search(state, self.dual.kept(state), trials=1)
            if following is not None and following.error < state.error:
                inverse.lenient = following.error <= WORTHWHILE * state.error
                return following
            self.whole, inverse.lenient = True, False
        return self._solve(state)

    def _solve(self, state: SemiDualState) -> SemiDualState:
        """A truncated Newton step with its line search, Sinkhorn iterations where that fails."""
        dual = self.dual
        found = dual.search(state, dual.solved(state, self._forcing(state.error)))
        if found is None:
            found = state
            for _ in range(FALLBACK_ITERATIONS):
                found = dual.sweep(found)
            found = replace(found, rise=dual.rise(state.biases, found.biases))
        elif found.error > self.options.tol and not isinstance(dual.inverse, KeptInverse):
            # What CG leaves is mostly fast modes.
            found = replace(dual.sweep(found), rise=found.rise)
        if dual.inverse is not None:
            # Where the inverse of this very plan did little, it will not do on the next one.
            dual.inverse.lenient = found.error <= WORTHWHILE * state.error
        return found

    def _forcing(self, error: float) -> float:
        """Relative residual of the Schur solve: the error squared is what the step leaves anyway.

        Where that meets the tolerance, the solve is made exact enough for it too: another step costs more.
        """
        forcing = max(FORCING_FLOOR, min(FORCING, error))
        if error * error > self.options.tol:
            return forcing
        return min(forcing, max(LAST_FORCING_FLOOR, 0.1 * self.options.tol / error))

    def run(self, state: SemiDualState) -> FixedPoint:
        """Judge and step until a status comes up."""
        status = self.terminate(state)
        while status is None:
            state = self.step(state)
            status = self.terminate(state)
        if status is Status.CONVERGED and self.options.tol <= self.floor:
            state = self._polish(state)
        device, stage = state.col.device, self.dual.stage
        # Potentials of atoms without mass, which no step moves: the best for the other side.
        u = torch.where(stage.y.weight > 0, state.biases.col, stage.y.update(state.col))
        return FixedPoint(
            Biases(state.biases.row, u),
            stage,
            (status,),
            torch.tensor([self.iteration], device=device),
            torch.tensor([state.error], dtype=torch.float64, device=device),
            tuple(self.history),
            torch.ones(1, dtype=torch.bool, device=device),
            (state.row, state.col),
        )

    def _polish(self, state: SemiDualState) -> SemiDualState:
        """Steps beyond a tolerance at the rounding floor, as long as they help: slow modes end later."""
        for _ in range(POLISH_STEPS):
            further = self._solve(state)
            if not further.error < state.error:
                break
            state = further
            self.terminate(state)  # a row of the history; the verdict stands
        return state


class _Turned:
    """Newton solves on the y side: where it is to factorize, the smaller of the two is made that one."""

    def __init__(self, stage: Stage, inverse: Inverse | None) -> None:
        smaller = stage.x.weight.shape[-1] < stage.y.weight.shape[-1]
        self.original, self.turned = stage, isinstance(inverse, KeptInverse) and smaller
        self.dual = SemiDual(stage.transposed() if self.turned else stage, inverse)

    def pair(self, of_x: Tensor, of_y: Tensor) -> tuple[Tensor, Tensor]:
        """What belongs to the x side and the y side of the turned stage."""
        return (of_y, of_x) if self.turned else (of_x, of_y)

    def back(self, end: FixedPoint) -> FixedPoint:
        """An end on the turned stage, as one on the original."""
        if not self.turned:
            return end
        (col, row), (w, u) = end.lse, (end.biases.row, end.biases.col)
        assert row is not None
        return replace(end, biases=Biases(u, w), lse=(row, col), stage=self.original)


def continue_newton(
    problem: OTProblem,
    start: FixedPoint,
    options: SinkhornOptions,
    counter: PassCounter,
    *,
    inverse: Inverse | None,
) -> FixedPoint:
    """Truncated Newton on the dual from where Sinkhorn ended. One lane; as `run_dual_newton`."""
    turn = _Turned(start.stage, inverse)
    _, u = turn.pair(start.biases.row, start.biases.col)
    assert start.lse[1] is not None
    row, _ = turn.pair(*start.lse)  # type: ignore[arg-type]
    state = turn.dual.at(u, row)
    run = _Newton(
        turn.dual,
        noise_floor(problem),
        options,
        counter,
        iteration=int(start.n_iter[0]),
        history=start.history,
    )
    return turn.back(run.run(state))


def run_dual_newton(
    problem: OTProblem,
    backend: PlanBackend,
    options: SinkhornOptions,
    counter: PassCounter,
    init: Biases | None = None,
    *,
    inverse: Inverse | None = None,
    fallback: Biases | None = None,
) -> FixedPoint:
    """Anneal (unless started), then truncated Newton on the dual with Sinkhorn as the safeguard. One lane.

    Args:
        problem: validated, unbatched problem.
        backend: how to stream.
        options: tolerance and caps; a Newton step counts as one iteration.
        counter: counts plan passes.
        init: biases to start from in place of annealing; where they are far off, a few iterations at larger
            eps bring them near, and where these do little, annealing starts over.
        inverse: used and fed: a deflation space, or a `KeptInverse` where plans are stored; None for none.
        fallback: biases to start from where ``init`` turns out far off.

    Returns:
        Biases and diagnoses, as `run_sinkhorn`.
    """
    if init is None:
        return _annealed(problem, backend, options, counter, inverse)
    turn = _Turned(Stage.bind(problem, backend, counter, problem.eps), inverse)
    dual = turn.dual

    def start(biases: Biases) -> SemiDualState:
        near, u = turn.pair(biases.row, biases.col)
        return dual.start(u, near)

    state = start(init)
    if fallback is not None and not state.error <= NEAR:
        other = start(fallback)
        state = state if state.error < other.error else other
    run = _Newton(dual, noise_floor(problem), options, counter)
    if not state.error <= FAR and options.anneal and options.max_iter > COOLING_STEPS:
        cooled = _cooled(problem, backend, counter, Biases(*turn.pair(state.biases.row, state.biases.col)))
        state, run.iteration = start(cooled), COOLING_STEPS
    state = run.approach(state)
    if not state.error <= FAR and run.iteration < options.max_iter:
        return _annealed(problem, backend, options, counter, inverse, done=run.iteration)
    return turn.back(run.run(state))


def _cooled(problem: OTProblem, backend: PlanBackend, counter: PassCounter, start: Biases) -> Biases:
    """Biases far from the solution after an iteration at each of a few larger eps, the largest first."""
    w, u, eps = start.row, start.col, problem.eps
    for k in range(COOLING_STEPS, 0, -1):
        warmer = problem.eps * 2.0**k
        stage = Stage.bind(problem, backend, counter, warmer)
        w, u, eps = w * (eps / warmer), u * (eps / warmer), warmer
        w = stage.x.update(stage.lse_x(w, u))
        u = stage.y.update(stage.lse_y(w, u))
    return Biases(w * (eps / problem.eps), u * (eps / problem.eps))


def _annealed(
    problem: OTProblem,
    backend: PlanBackend,
    options: SinkhornOptions,
    counter: PassCounter,
    inverse: Inverse | None,
    done: int = 0,
) -> FixedPoint:
    """Newton from annealed Sinkhorn iterations, after so many others."""
    cap = min(options.max_iter - done, WARM_ITERATIONS)
    start = run_sinkhorn(problem, backend, replace(options, max_iter=cap, patience=float("inf")), counter)
    start = replace(start, n_iter=start.n_iter + done)
    if start.statuses[0] in (Status.CONVERGED, Status.NAN, Status.CALLBACK):
        return start
    return continue_newton(problem, start, options, counter, inverse=inverse)
