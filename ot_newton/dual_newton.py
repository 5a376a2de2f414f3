"""Truncated Newton on the semi-dual, for low eps and for warm starts (MATH 8).

With w the best for u, what is left of the dual is a concave function of u alone, with gradient `b~ - c`
(`b~ = b exp(-g/rho)`, b for a hard side) and Hessian -S/eps, S the Schur complement. A Newton step is

    u' = u + S^+ (b~ - c) = u + D^-1/2 S^^+ D^-1/2 (b~ - c),    D = D_c k_y.

Sinkhorn's own increment of u is `D^-1 (b~ - c)` to first order: one Jacobi step on the same system. S^^+ is

    kept      the inverse at hand, for as long as it does: where plans are stored, the factor of an earlier
              one (`KeptInverse`); else the slow modes U with Ritz values T of earlier solves, whose part of
              Sinkhorn's increment j is made a Newton step, `j + D^-1/2 U (T^-1 - I) U^T D^1/2 j`
    solved    a factorization of the plan at hand; else deflated CG, as exact as the progress allows, and a
              Sinkhorn iteration for the fast modes that CG leaves

Every step is taken only as far as the dual value does not decrease, and Sinkhorn iterations replace one
that fails. Cost of a step: 1 pass for every length tried and 1 at the end; a solve by CG 2 more for every CG
step and 2 for the iteration.

Source: truncated Newton for EOT duals (arXiv 2504.02067), here on the semi-dual with recycled inverses.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ot_newton.deflation import Deflation
from ot_newton.errors import Status
from ot_newton.fixed_point import FixedPoint, IterationInfo, SinkhornOptions, run_sinkhorn
from ot_newton.kept import KeptInverse
from ot_newton.potentials import LOG2E, Biases
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter, PlanBackend
from ot_newton.schur import SchurSystem
from ot_newton.stage import Stage, noise_floor

__all__ = ["Inverse", "continue_newton", "run_dual_newton"]

Inverse = Deflation | KeptInverse
"""What knows an approximate inverse of the Schur complement from one plan to the next."""

WARM_ITERATIONS = 30
APPROACH_RATE = 0.7
NEAR = 0.1
FAR = 0.3
MAX_BACKTRACKS = 6
FORCING = 0.1
FORCING_FLOOR = 1e-3
LAST_FORCING_FLOOR = 1e-5
CG_CAP = 400
STALLED_STEPS = 6
FALLBACK_ITERATIONS = 8
POLISH_STEPS = 3
LARGEST_MOVE = 32.0
WORTHWHILE = 0.5
LEAST = 1e-30


@dataclass(frozen=True, eq=False)
class _State:
    """Biases with w the best for u, and the sums of both sides there.

    Attributes:
        biases: `w (1,n)`, `u (1,m)`.
        row: `L (1,n)`, of which w is the update: the row marginal is exact.
        col: `M (1,m)`.
        error: L1 error of the column marginal relative to the mass.
        rise: of the dual value in the last step.
    """

    biases: Biases
    row: Tensor
    col: Tensor
    error: float
    rise: float = math.inf


class _SemiDual:
    """Value, gradient and Newton step of the semi-dual at u; one lane."""

    def __init__(self, stage: Stage, inverse: Inverse | None) -> None:
        self.stage, self.inverse = stage, inverse
        self.balanced = stage.x.exponent is None and stage.y.exponent is None
        self.scale = stage.eps * float(stage.x.mass.max())

    def best_rows(self, u: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """`L` at u, from one pass stabilized by biases of x nearby, and the best w for it."""
        row = self.stage.lse_x(near, u)
        return row, self.stage.x.update(row)

    def at(self, u: Tensor, row: Tensor) -> _State:
        """The state at u, whose row sums are known. One pass."""
        w = self.stage.x.update(row)
        col = self.stage.lse_y(w, u)
        return _State(Biases(w, u), row, col, float(self.stage.y.error(u, col)[0]))

    def start(self, u: Tensor, near: Tensor) -> _State:
        """The state at u. Two passes."""
        return self.at(u, self.best_rows(u, near)[0])

    def sweep(self, state: _State) -> _State:
        """One Sinkhorn iteration; it never decreases the dual. Two passes."""
        return self.start(self.stage.y.update(state.col), state.biases.row)

    def noise(self) -> float:
        """Falls of the dual value below this are rounding."""
        return 8 * torch.finfo(self.stage.x.weight.dtype).eps * self.scale

    def rise(self, old: Biases, new: Biases) -> float:
        """Dual value at the new biases minus that at the old ones, in float64, from differences only."""
        stage = self.stage
        start, end = (stage.x.asked(biases.row).double().sum() for biases in (old, new))
        total = start - end
        for side, bias, moved in ((stage.x, old.row, new.row), (stage.y, old.col, new.col)):
            move, weight, k = (moved - bias).double() / LOG2E, side.weight.double(), side.exponent
            if k is None:
                gain = weight * move
            else:
                asked = torch.exp2(-(bias + side.norms).double() * k)
                gain = -weight * asked * torch.expm1(-k * move) / k
            total = total + torch.where(side.weight > 0, gain, torch.zeros_like(gain)).sum()
        return stage.eps * float(total)

    def diagonals(self, state: _State) -> tuple[Tensor, Tensor]:
        """`D_r k_x` and `D_c k_y`, where k adds what the relaxed side's own curvature does."""
        x, y, (w, u) = self.stage.x, self.stage.y, (state.biases.row, state.biases.col)
        r, c = x.asked(w), y.marginal(u, state.col)
        r = r if x.exponent is None else (1 + x.exponent) * r
        return r, c if y.exponent is None else c + y.exponent * y.asked(u)

    def system(self, state: _State, dr: Tensor, dc: Tensor) -> SchurSystem:
        """The Schur complement at a state."""
        stage, (w, u) = self.stage, (state.biases.row, state.biases.col)
        return SchurSystem(
            stage.tiles.plan(w, u, stage.x.weight, stage.y.weight),
            dr,
            dc,
            (1.0, 1.0),
            balanced=self.balanced,
            direct=isinstance(self.inverse, KeptInverse),
            deflation=self.inverse if isinstance(self.inverse, Deflation) else None,
            squared=lambda: stage.squared_plan(w, u),
        )

    def gap(self, state: _State) -> Tensor:
        """`b~ - c`, the gradient in u, in units of biases."""
        y, u = self.stage.y, state.biases.col
        return (y.asked(u) - y.marginal(u, state.col)) * LOG2E

    def jacobi(self, state: _State) -> Tensor:
        """Sinkhorn's increment of u, 0 where there is no mass."""
        y, u = self.stage.y, state.biases.col
        increment = torch.where(y.weight > 0, y.update(state.col) - u, torch.zeros_like(u))
        if not self.balanced:
            return increment
        # A constant moves nothing: it is w's.
        c = y.marginal(u, state.col)
        return torch.where(y.weight > 0, increment - (c * increment).sum() / c.sum(), increment)

    def kept(self, state: _State) -> Tensor:
        """The step by the inverse at hand; no pass. With slow modes only, the rest of it is Sinkhorn's."""
        assert self.inverse is not None
        dc = self.diagonals(state)[1]
        start = self.jacobi(state)
        if isinstance(self.inverse, KeptInverse):
            start = torch.where(dc > LEAST, self.gap(state) / dc.clamp_min(LEAST), start)
        half = dc.sqrt()
        slow = self.inverse.amplify((half * start)[:, :, None])[:, :, 0]
        return start + torch.where(dc > LEAST, slow / half.clamp_min(LEAST), torch.zeros_like(start))

    def solved(self, state: _State, forcing: float) -> Tensor:
        """The step by a solve with the plan at hand."""
        dr, dc = self.diagonals(state)
        system = self.system(state, dr, dc)
        if isinstance(self.inverse, KeptInverse) and self.inverse.factorize(system):
            return self.kept(state)
        rhs = self.gap(state)[:, :, None]
        solve = system.solve(rhs, torch.zeros_like(rhs), forcing, CG_CAP)
        return torch.where(dc > 0, solve.w[:, :, 0], self.jacobi(state))

    def search(self, state: _State, du: Tensor, *, trials: int = MAX_BACKTRACKS) -> _State | None:
        """Backtracking on the dual value; None where no length keeps it from falling. A pass per trial."""
        if not bool(torch.isfinite(du).all()):
            return None
        old, largest = state.biases, float(du.abs().max())
        length = min(1.0, LARGEST_MOVE / largest) if largest > 0 else 1.0
        for _ in range(trials):
            u = old.col + length * du
            row, w = self.best_rows(u, old.row)
            rise = self.rise(old, Biases(w, u))
            if rise >= -self.noise():
                return replace(self.at(u, row), rise=rise)
            length *= 0.3
        return None


class _Newton:
    """The outer loop of one lane."""

    def __init__(
        self,
        dual: _SemiDual,
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

    def terminate(self, state: _State) -> Status | None:
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

    def approach(self, state: _State) -> _State:
        """Sinkhorn iterations until a start is near enough for Newton, or they do little."""
        for _ in range(WARM_ITERATIONS):
            if state.error <= NEAR or self.iteration >= self.options.max_iter:
                break
            before, state = state.error, self.dual.sweep(state)
            self.iteration += 1
            if state.error > APPROACH_RATE * before:
                break
        return state

    def step(self, state: _State) -> _State:
        """By the inverse at hand where that does, else by a solve."""
        inverse = self.dual.inverse
        self.iteration += 1
        self.whole = inverse is None or not inverse.lenient or not inverse.matches(state.col)
        if inverse is not None and not self.whole:
            following = self.dual.search(state, self.dual.kept(state), trials=1)
            if following is not None and following.error < state.error:
                inverse.lenient = following.error <= WORTHWHILE * state.error
                return following
            self.whole, inverse.lenient = True, False
        return self._solve(state)

    def _solve(self, state: _State) -> _State:
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
        return found

    def _forcing(self, error: float) -> float:
        """Relative residual of the Schur solve: the error squared is what the step leaves anyway.

        Where that meets the tolerance, the solve is made exact enough for it too: another step costs more.
        """
        forcing = max(FORCING_FLOOR, min(FORCING, error))
        if error * error > self.options.tol:
            return forcing
        return min(forcing, max(LAST_FORCING_FLOOR, 0.1 * self.options.tol / error))

    def run(self, state: _State) -> FixedPoint:
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

    def _polish(self, state: _State) -> _State:
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
        self.dual = _SemiDual(stage.transposed() if self.turned else stage, inverse)

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
        init: biases to start from in place of annealing; Sinkhorn brings them near where they are not, and
            annealing starts over where that does little.
        inverse: used and fed: a deflation space, or a `KeptInverse` where plans are stored; None for none.
        fallback: biases to start from where ``init`` turns out far off.

    Returns:
        Biases and diagnoses, as `run_sinkhorn`.
    """
    if init is None:
        return _annealed(problem, backend, options, counter, inverse)
    turn = _Turned(Stage.bind(problem, backend, counter, problem.eps), inverse)
    dual = turn.dual

    def start(biases: Biases) -> _State:
        near, u = turn.pair(biases.row, biases.col)
        return dual.start(u, near)

    state = start(init)
    if fallback is not None and not state.error <= NEAR:
        other = start(fallback)
        state = state if state.error < other.error else other
    run = _Newton(dual, noise_floor(problem), options, counter)
    state = run.approach(state)
    if not state.error <= FAR and run.iteration < options.max_iter:
        return _annealed(problem, backend, options, counter, inverse, done=run.iteration)
    return turn.back(run.run(state))


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
