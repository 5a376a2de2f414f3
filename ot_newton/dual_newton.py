"""Truncated Newton on the dual, for low eps and for warm starts (MATH 8).

With `a~ = a exp(-f/rho_x)` and `b~` alike (a, b for hard sides), the dual has gradient `[a~ - r; b~ - c]`
and Hessian `-H*/eps` (at its optimum). A step solves the Schur system with right-hand side eps times the
gradient, deflated and as inexactly as the progress allows, and is taken only as far as the dual value
does not decrease; a Sinkhorn iteration, whose sums the next step needs anyway, follows it, and some replace
a step that fails.

Where slow modes U with Ritz values T are at hand, a step without CG may do. With w the best for u, the
increment of Sinkhorn's u is `D^-1` times the gradient of the semi-dual (D = D_c k_y), whose Hessian is the
Schur complement: one Jacobi step. Its slow part is made a Newton step,

    u' = u + du + D^-1/2 U (T^-1 - I) U^T D^1/2 du,

for no pass beyond Sinkhorn's two. Such deflated iterations go on while each at least halves the error and
the dual does not decrease.

Cost of a Newton step: 2 passes and 2 per CG step for the direction, 1 for its length, 2 for the iteration
(1 for the last step, whose two-sided error is the audit); of a deflated iteration 2.

Source: truncated Newton for EOT duals (arXiv 2504.02067), here with recycled deflation.
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
from ot_newton.potentials import LOG2E, Biases
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter, PlanBackend
from ot_newton.schur import SchurSystem, safe_inverse
from ot_newton.stage import Stage, noise_floor

__all__ = ["continue_newton", "run_dual_newton"]

WARM_ITERATIONS = 30
NEAR = 0.1
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
LEAST = 1e-150


@dataclass(frozen=True, eq=False)
class _State:
    """Biases with the sums that tell their marginals; None for a side just updated: it is exact."""

    biases: Biases
    row: Tensor | None
    col: Tensor | None
    error: float


class _Dual:
    """Dual value, gradient and Newton step at biases (w, u); one lane."""

    def __init__(
        self, problem: OTProblem, stage: Stage, deflation: Deflation | None, *, direct: bool
    ) -> None:
        self.problem, self.stage, self.deflation, self.direct = problem, stage, deflation, direct

    def at(self, biases: Biases, row: Tensor | None = None, col: Tensor | None = None) -> _State:
        """The state at biases, from sums at hand or made here: one pass each."""
        stage = self.stage
        row = stage.lse_x(biases.row, biases.col) if row is None else row
        col = stage.lse_y(biases.row, biases.col) if col is None else col
        error = torch.maximum(stage.x.error(biases.row, row), stage.y.error(biases.col, col))
        return _State(biases, row, col, float(error[0]))

    def sweep(self, state: _State) -> _State:
        """One Sinkhorn iteration; it never decreases the dual. Two passes, or one where ``col`` is known."""
        stage, w, col = self.stage, state.biases.row, state.col
        if col is None:
            assert state.row is not None
            w = stage.x.update(state.row)
            col = stage.lse_y(w, state.biases.col)
        u = stage.y.update(col)
        row = stage.lse_x(w, u)
        return _State(Biases(w, u), row, None, float(stage.x.error(w, row)[0]))

    def best_rows(self, biases: Biases, row: Tensor | None = None) -> _State:
        """The state at u with the best w for it. Two passes, one where the row sums are known."""
        stage, w, u = self.stage, biases.row, biases.col
        w = stage.x.update(stage.lse_x(w, u) if row is None else row)
        col = stage.lse_y(w, u)
        return _State(Biases(w, u), None, col, float(stage.y.error(u, col)[0]))

    def deflated(self, state: _State) -> _State | None:
        """A deflated iteration from a state of `best_rows`, two passes; None where the dual falls (one)."""
        stage, w, u, col = self.stage, state.biases.row, state.biases.col, state.col
        assert self.deflation is not None
        assert col is not None
        jacobi = stage.y.update(col) - u
        c, wanted = stage.y.marginal(u, col), stage.y.asked(u)
        diag = c if self.problem.rho_y is None else c + (self.problem.eps / self.problem.rho_y) * wanted
        half = diag.sqrt()
        slow = self.deflation.amplify((half * jacobi)[:, :, None])[:, :, 0]
        moved = u + jacobi + torch.where(half > 0, slow / half.clamp_min(LEAST), torch.zeros_like(u))
        best = stage.x.update(stage.lse_x(w, moved))
        new = Biases(best, moved)
        mass, new_mass = (stage.x.asked(bias).double().sum(-1) for bias in (w, best))
        if not float(self.rise(state.biases, new, mass, new_mass).sum()) >= -self.noise(mass):
            return None
        col = stage.lse_y(best, moved)
        return _State(new, None, col, float(stage.y.error(moved, col)[0]))

    def noise(self, mass: Tensor) -> float:
        """Falls of the dual value below this are rounding."""
        return 8 * torch.finfo(self.stage.x.weight.dtype).eps * float(mass.max()) * self.problem.eps

    def gaps(self, state: _State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Marginals r, c and the gradient `a~ - r`, `b~ - c`."""
        x, y, biases = self.stage.x, self.stage.y, state.biases
        wanted_r, wanted_c = x.asked(biases.row), y.asked(biases.col)
        r = wanted_r if state.row is None else x.marginal(biases.row, state.row)
        c = wanted_c if state.col is None else y.marginal(biases.col, state.col)
        return r, c, wanted_r - r, wanted_c - c

    def rise(self, old: Biases, new: Biases, mass: Tensor, moved_mass: Tensor) -> Tensor:
        """Dual value at the new biases minus that at the old ones, in float64, from differences only.

        Args:
            old: biases.
            new: biases.
            mass: (1,) mass of the plan at the old ones.
            moved_mass: (1,) mass at the new ones.
        """
        eps = self.problem.eps
        total = -eps * (moved_mass.double() - mass.double())
        for side, rho, bias, moved in (
            (self.stage.x, self.problem.rho_x, old.row, new.row),
            (self.stage.y, self.problem.rho_y, old.col, new.col),
        ):
            scaled = (moved - bias).double() * (eps / LOG2E)
            if rho is None:
                gain = side.weight.double() * scaled
            else:
                start = torch.exp2(-(bias + side.norms).double() * (eps / rho))
                gain = -rho * side.weight.double() * start * torch.expm1(-scaled / rho)
            total = total + torch.where(side.weight > 0, gain, torch.zeros_like(gain)).sum(-1)
        return total

    def direction(self, state: _State, forcing: float) -> tuple[Tensor, Tensor]:
        """Newton direction in bias units, `(dw (1,n), du (1,m))`."""
        problem, biases, stage = self.problem, state.biases, self.stage
        r, c, gap_x, gap_y = self.gaps(state)
        relaxed = [0.0 if rho is None else problem.eps / rho for rho in (problem.rho_x, problem.rho_y)]
        dr = r + relaxed[0] * (r + gap_x)
        dc = c + relaxed[1] * (c + gap_y)
        plan = stage.tiles.plan(biases.row, biases.col, stage.x.weight, stage.y.weight)
        system = SchurSystem(
            plan,
            dr,
            dc,
            (1.0, 1.0),
            balanced=problem.balanced,
            direct=self.direct,
            deflation=self.deflation,
            squared=lambda: stage.squared_plan(biases.row, biases.col),
        )
        inverse = safe_inverse(dr)
        rhs = gap_y - plan.apply((inverse * gap_x)[:, :, None], 0)[:, :, 0]
        solve = system.solve(rhs[:, :, None], 0 * rhs[:, :, None], forcing, CG_CAP)
        du = solve.w[:, :, 0]
        dw = inverse * (gap_x - plan.apply(du[:, :, None], 1)[:, :, 0])
        return dw * LOG2E, du * LOG2E

    def search(self, state: _State, dw: Tensor, du: Tensor) -> tuple[Biases, Tensor] | None:
        """Backtracking on the dual value: biases and their row sums.

        None when no length keeps the value from decreasing. One pass per trial.
        """
        if not bool(torch.isfinite(dw).all() and torch.isfinite(du).all()):
            return None
        stage, old = self.stage, state.biases
        mass = self.gaps(state)[0].double().sum(-1)
        largest = float(torch.maximum(dw.abs().max(), du.abs().max()))
        length = min(1.0, LARGEST_MOVE / largest) if largest > 0 else 1.0
        for _ in range(MAX_BACKTRACKS):
            new = Biases(old.row + length * dw, old.col + length * du)
            row = stage.lse_x(new.row, new.col)
            moved = stage.x.marginal(new.row, row).double().sum(-1)
            if float(self.rise(old, new, mass, moved).sum()) >= -self.noise(mass):
                return new, row
            length *= 0.3
        return None


class _Newton:
    """The outer loop of one lane."""

    def __init__(
        self,
        dual: _Dual,
        options: SinkhornOptions,
        counter: PassCounter,
        *,
        iteration: int = 0,
        history: tuple[IterationInfo, ...] = (),
    ) -> None:
        self.dual, self.options, self.counter = dual, options, counter
        self.floor = noise_floor(dual.problem)
        self.iteration, self.history = iteration, list(history)
        self.best = float("inf")
        self.idle = 0
        self.whole = True
        self.began = time.perf_counter()

    def terminate(self, state: _State) -> Status | None:
        """Judge a state on its marginal error."""
        error = state.error
        eps, seconds = self.dual.problem.eps, time.perf_counter() - self.began
        row = IterationInfo(self.iteration, eps, error, self.counter.passes, seconds)
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
        # A deflated iteration that does little is followed by a Newton step: only these can stagnate.
        self.idle = 0 if error < 0.7 * self.best else self.idle + self.whole
        self.best = min(self.best, error)
        if self.idle >= STALLED_STEPS and error <= 1e3 * self.floor:
            return Status.STAGNATION
        return Status.MAX_ITER if self.iteration >= self.options.max_iter else None

    def approach(self, state: _State) -> _State:
        """Sinkhorn iterations until a start is near enough for Newton."""
        for _ in range(WARM_ITERATIONS):
            if state.error <= NEAR or self.iteration >= self.options.max_iter:
                break
            state = self.dual.sweep(state)
            self.iteration += 1
        return state

    def step(self, state: _State) -> _State:
        """A deflated iteration where those do, else a Newton step."""
        space = self.dual.deflation
        self.whole = space is None or not space.lenient or not space.matches(state.biases.col)
        if space is None or self.whole:
            return self._newton(state)
        self.iteration += 1
        if state.row is not None:
            started = self.dual.best_rows(state.biases, state.row)
            return self._audited(started)
        following = self.dual.deflated(state)
        if following is None:
            space.lenient = False
            return state
        space.lenient = following.error <= WORTHWHILE * state.error
        return self._audited(following)

    def _newton(self, state: _State) -> _State:
        """A truncated Newton step with its line search, then a Sinkhorn iteration if it is not the last."""
        dual, tol = self.dual, self.options.tol
        found = dual.search(state, *dual.direction(state, self._forcing(state.error)))
        self.iteration += 1
        if found is None:
            for _ in range(FALLBACK_ITERATIONS):
                state = dual.sweep(state)
            return self._audited(state)
        moved = dual.at(found[0], found[1])
        return moved if moved.error <= tol else self._audited(dual.sweep(moved))

    def _forcing(self, error: float) -> float:
        """Relative residual of the Schur solve: the error squared is what the step leaves anyway.

        Where that meets the tolerance, the solve is made exact enough for it too: another step costs more.
        """
        forcing = max(FORCING_FLOOR, min(FORCING, error))
        if error * error > self.options.tol:
            return forcing
        return min(forcing, max(LAST_FORCING_FLOOR, 0.1 * self.options.tol / error))

    def _audited(self, state: _State) -> _State:
        """A state about to be called converged has both marginals measured: one pass more."""
        if state.error > self.options.tol or (state.row is not None and state.col is not None):
            return state
        return self.dual.at(state.biases, state.row, state.col)

    def run(self, state: _State) -> FixedPoint:
        """Judge and step until a status comes up."""
        status = self.terminate(state)
        while status is None:
            state = self.step(state)
            status = self.terminate(state)
        if status is Status.CONVERGED and self.options.tol <= self.floor:
            state = self._polish(state)
        if state.row is None or state.col is None:
            state = self.dual.at(state.biases, state.row, state.col)
        assert state.row is not None
        assert state.col is not None
        device = state.row.device
        return FixedPoint(
            self._conjugate(state.biases, state.row, state.col),
            self.dual.stage,
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
            further = self._audited(self._newton(state))
            if not further.error < state.error:
                break
            state = further
            self.terminate(state)  # a row of the history; the verdict stands
        return state

    def _conjugate(self, biases: Biases, row: Tensor, col: Tensor) -> Biases:
        """Potentials of atoms without mass, which no step moves: the best for the other side."""
        x, y = self.dual.stage.x, self.dual.stage.y
        return Biases(
            torch.where(x.weight > 0, biases.row, x.update(row)),
            torch.where(y.weight > 0, biases.col, y.update(col)),
        )


def continue_newton(
    problem: OTProblem,
    start: FixedPoint,
    options: SinkhornOptions,
    counter: PassCounter,
    *,
    direct: bool,
    deflation: Deflation | None,
) -> FixedPoint:
    """Truncated Newton on the dual from where Sinkhorn ended. One lane; as `run_dual_newton`."""
    dual = _Dual(problem, start.stage, deflation, direct=direct)
    iteration = int(start.n_iter[0])
    run = _Newton(dual, options, counter, iteration=iteration, history=start.history)
    return run.run(dual.at(start.biases, *start.lse))


def run_dual_newton(
    problem: OTProblem,
    backend: PlanBackend,
    options: SinkhornOptions,
    counter: PassCounter,
    init: Biases | None = None,
    *,
    deflation: Deflation | None = None,
    fallback: Biases | None = None,
) -> FixedPoint:
    """Anneal (unless started), then truncated Newton on the dual with Sinkhorn as the safeguard. One lane.

    Args:
        problem: validated, unbatched problem.
        backend: how to stream.
        options: tolerance and caps; a Newton step counts as one iteration.
        counter: counts plan passes.
        init: biases to start from in place of annealing; Sinkhorn brings them near where they are not.
        deflation: space of the Schur solves, used and fed; None for none, as factorizing backends have it.
        fallback: biases to start from where ``init`` turns out far off.

    Returns:
        Biases and diagnoses, as `run_sinkhorn`.
    """
    direct = backend.name == "dense"
    if init is None:
        warm = replace(options, max_iter=min(options.max_iter, WARM_ITERATIONS), patience=float("inf"))
        start = run_sinkhorn(problem, backend, warm, counter)
        if start.statuses[0] in (Status.CONVERGED, Status.NAN, Status.CALLBACK):
            return start
        return continue_newton(problem, start, options, counter, direct=direct, deflation=deflation)
    dual = _Dual(problem, Stage.bind(problem, backend, counter, problem.eps), deflation, direct=direct)
    state = dual.best_rows(init)
    if fallback is not None and not state.error <= NEAR:
        other = dual.best_rows(fallback)
        state = state if state.error < other.error else other
    run = _Newton(dual, options, counter)
    return run.run(run.approach(state))
