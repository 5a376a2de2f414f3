"""Truncated Newton on the dual, for low eps (MATH 8).

With `a~ = a exp(-f/rho_x)` and `b~` alike (a, b for hard sides), the dual has gradient `[a~ - r; b~ - c]`
and Hessian `-H*/eps` (at its optimum). A step solves the Schur system with right-hand side eps times the
gradient, deflated and as inexactly as the progress allows, and is taken only as far as the dual value
does not decrease; a Sinkhorn iteration follows each step and replaces a step that fails.

Source: truncated Newton for EOT duals (arXiv 2504.02067), here with recycled deflation.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from ot_newton.deflation import Deflation
from ot_newton.errors import Status
from ot_newton.fixed_point import FixedPoint, IterationInfo, SinkhornOptions, noise_floor, run_sinkhorn
from ot_newton.potentials import LOG2E, Biases, squared_norms
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter, Plan, PlanBackend
from ot_newton.schur import SchurSystem, safe_inverse

__all__ = ["run_dual_newton"]

WARM_ITERATIONS = 30
MAX_BACKTRACKS = 6
FORCING = 0.1
FORCING_FLOOR = 1e-3
CG_CAP = 400
STALLED_STEPS = 6
POLISH_ITERATIONS = 2
LARGEST_MOVE = 32.0


class _Dual:
    """Dual value, gradient and Newton step at biases (w, u); one lane."""

    def __init__(self, problem: OTProblem, fixed: FixedPoint, counter: PassCounter, direct: bool) -> None:
        c = problem.centred
        self.problem, self.tiles, self.counter, self.direct = problem, fixed.tiles, counter, direct
        self.a, self.b = c.a, c.b
        self.norms = squared_norms(problem, problem.eps)
        self.rho = (problem.rho_x, problem.rho_y)
        self.deflation = None if direct else Deflation()

    def targets(self, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """`a~, b~`: the marginals that the potentials ask for."""
        out = []
        for weight, bias, norm, rho in zip((self.a, self.b), (w, u), self.norms, self.rho, strict=True):
            if rho is None:
                out.append(weight)
                continue
            asked = weight * torch.exp2(-(bias + norm) * (self.problem.eps / rho))
            out.append(torch.where(weight > 0, asked, torch.zeros_like(weight)))
        return out[0], out[1]

    def rise(self, w: Tensor, u: Tensor, dw: Tensor, du: Tensor, mass: Tensor, moved_mass: Tensor) -> Tensor:
        """Dual value at (w+dw, u+du) minus that at (w, u), in float64, from differences only.

        Args:
            w: (1,n) biases of x.
            u: (1,m) biases of y.
            dw: their change.
            du: their change.
            mass: (1,) mass of the plan at (w, u).
            moved_mass: (1,) mass after the move.
        """
        eps = self.problem.eps
        total = -eps * (moved_mass.double() - mass.double())
        for weight, bias, move, norm, rho in zip(
            (self.a, self.b), (w, u), (dw, du), self.norms, self.rho, strict=True
        ):
            scaled = move.double() * (eps / LOG2E)
            if rho is None:
                gain = weight.double() * scaled
            else:
                start = torch.exp2(-(bias + norm).double() * (eps / rho))
                gain = -rho * weight.double() * start * torch.expm1(-scaled / rho)
            total = total + torch.where(weight > 0, gain, torch.zeros_like(gain)).sum(-1)
        return total

    def marginals(self, w: Tensor, u: Tensor) -> tuple[Plan, Tensor, Tensor]:
        """The plan with r and c: two passes."""
        plan = self.tiles.plan(w, u, self.a, self.b)
        r = plan.apply(torch.ones_like(self.b)[:, :, None], 1)[:, :, 0]
        c = plan.apply(torch.ones_like(self.a)[:, :, None], 0)[:, :, 0]
        return plan, r, c

    def mass(self, w: Tensor, u: Tensor) -> Tensor:
        """(1,) total mass of the plan: one pass."""
        plan = self.tiles.plan(w, u, self.a, self.b)
        return plan.apply(torch.ones_like(self.b)[:, :, None], 1).double().sum((1, 2))

    def step(
        self,
        plan: Plan,
        r: Tensor,
        c: Tensor,
        gap_x: Tensor,
        gap_y: Tensor,
        forcing: float,
        targets: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Newton direction in bias units, `(dw (1,n), du (1,m))`."""
        eps = self.problem.eps
        relaxed = [0.0 if rho is None else eps / rho for rho in self.rho]
        dr = r + relaxed[0] * targets[0]
        dc = c + relaxed[1] * targets[1]
        balanced = self.problem.balanced
        system = SchurSystem(
            plan, dr, dc, (1.0, 1.0), balanced=balanced, direct=self.direct, deflation=self.deflation
        )
        inverse = safe_inverse(dr)
        rhs = gap_y - plan.apply((inverse * gap_x)[:, :, None], 0)[:, :, 0]
        scale = rhs.abs()
        solve = system.solve(rhs[:, :, None], 0 * scale[:, :, None], forcing, CG_CAP)
        du = solve.w[:, :, 0]
        dw = inverse * (gap_x - plan.apply(du[:, :, None], 1)[:, :, 0])
        return dw * LOG2E, du * LOG2E


class _Newton:
    """The outer loop of one lane."""

    def __init__(
        self,
        problem: OTProblem,
        backend: PlanBackend,
        options: SinkhornOptions,
        counter: PassCounter,
        start: FixedPoint,
    ) -> None:
        self.problem, self.backend, self.options, self.counter = problem, backend, options, counter
        self.dual = _Dual(problem, start, counter, backend.name == "dense")
        self.state = start
        self.floor = noise_floor(problem)
        self.iteration = int(start.n_iter[0])
        self.history = list(start.history)
        self.best = float("inf")
        self.idle = 0
        self.began = time.perf_counter()

    def polish(self, biases: Biases, count: int) -> FixedPoint:
        """A few plain Sinkhorn iterations: the safeguard; they never decrease the dual."""
        quiet = replace(self.options, max_iter=count, anneal=False, callback=None, patience=float("inf"))
        return run_sinkhorn(self.problem, self.backend, quiet, self.counter, biases)

    def terminate(self) -> Status | None:
        """Judge the current state on its two-sided marginal error."""
        error = float(self.state.marginal_error[0])
        row = IterationInfo(
            self.iteration, self.problem.eps, error, self.counter.passes, time.perf_counter() - self.began
        )
        self.history.append(row)
        if error != error:
            return Status.NAN
        if self.options.tol > 0 and error <= self.options.tol:
            return Status.CONVERGED
        if self.options.callback is not None:
            try:
                if self.options.callback(row):
                    return Status.CALLBACK
            except StopIteration:
                return Status.CALLBACK
        self.idle = 0 if error < 0.7 * self.best else self.idle + 1
        self.best = min(self.best, error)
        if self.idle >= STALLED_STEPS and error <= 1e3 * self.floor:
            return Status.STAGNATION
        return Status.MAX_ITER if self.iteration >= self.options.max_iter else None

    def step(self) -> None:
        """One truncated Newton step with its line search, then Sinkhorn polish."""
        w, u = self.state.biases.row, self.state.biases.col
        plan, r, c = self.dual.marginals(w, u)
        targets = self.dual.targets(w, u)
        gap_x, gap_y = targets[0] - r, targets[1] - c
        error = float((gap_x.abs().sum() + gap_y.abs().sum()) / self.dual.a.sum())
        forcing = max(FORCING_FLOOR, min(FORCING, error))
        dw, du = self.dual.step(plan, r, c, gap_x, gap_y, forcing, targets)
        moved = self._search(w, u, dw, du, r.double().sum(-1))
        self.iteration += 1
        start = Biases(w, u) if moved is None else moved
        self.state = self.polish(start, POLISH_ITERATIONS if moved is not None else 4 * POLISH_ITERATIONS)

    def _search(self, w: Tensor, u: Tensor, dw: Tensor, du: Tensor, mass: Tensor) -> Biases | None:
        """Backtracking on the dual value; None when no length keeps it from decreasing."""
        if not bool(torch.isfinite(dw).all() and torch.isfinite(du).all()):
            return None
        largest = float(torch.maximum(dw.abs().max(), du.abs().max()))
        length = min(1.0, LARGEST_MOVE / largest) if largest > 0 else 1.0
        noise = 8 * torch.finfo(w.dtype).eps * float(mass.max()) * self.problem.eps
        for _ in range(MAX_BACKTRACKS):
            new_w, new_u = w + length * dw, u + length * du
            moved = self.dual.mass(new_w, new_u)
            gain = float(self.dual.rise(w, u, new_w - w, new_u - u, mass, moved).sum())
            if gain >= -noise and gain == gain:
                return Biases(new_w, new_u)
            length *= 0.3
        return None


def run_dual_newton(
    problem: OTProblem,
    backend: PlanBackend,
    options: SinkhornOptions,
    counter: PassCounter,
    init: Biases | None = None,
) -> FixedPoint:
    """Anneal (unless started), then truncated Newton on the dual with Sinkhorn as the safeguard. One lane.

    Args:
        problem: validated, unbatched problem.
        backend: how to stream.
        options: tolerance and caps; a Newton step counts as one iteration.
        counter: counts plan passes.
        init: biases to start from; a few Sinkhorn iterations then take the place of annealing.

    Returns:
        Biases and diagnoses, as `run_sinkhorn`.
    """
    count = WARM_ITERATIONS if init is None else POLISH_ITERATIONS
    warm = replace(options, max_iter=min(options.max_iter, count), patience=float("inf"))
    start = run_sinkhorn(problem, backend, warm, counter, init)
    if start.statuses[0] in (Status.CONVERGED, Status.NAN, Status.CALLBACK):
        return start
    run = _Newton(problem, backend, options, counter, start)
    status = run.terminate()
    while status is None:
        run.step()
        status = run.terminate()
    return replace(
        run.state,
        statuses=(status,),
        n_iter=torch.tensor([run.iteration], device=problem.device),
        history=tuple(run.history),
    )
