"""Plans of small problems close to ones solved before: Newton on the log of the column marginal.

With the rows kept exact by their own update, what is left is `l_j = log(b_j / c_j)` as a function of the
column potential, with derivative `-D_c^-1 S` (MATH 5, S the Schur complement). One step is

    g <- g + eps (D_c^-1 S)^+ l

at two plan passes; a Sinkhorn step is `g + eps l`. In the logarithm an outlying atom, whose marginal is off
by a large factor, costs no more steps than any other. The inverse is kept from step to step and from plan to
plan for as long as it takes 30% off the error (the chord method), so that a plan near the last one costs
two or three steps and no factorization. The dual value may not fall: a step that makes it fall is halved,
then replaced by Sinkhorn's.

The kernel of the start is stored, O(n m) memory; later steps are products with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.backends.dense import DensePlan
from ot_newton.potentials import LOG2E, Biases, operands
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter
from ot_newton.schur import SchurSystem

__all__ = ["Bound", "LogNewton", "Solved", "bound"]

CAP = 40
LONG = 200
PATIENCE = 8
FAR = 0.3
KEEP_RATE = 0.7
HALVINGS = 3
LARGEST_MOVE = 12.0
ABSORB = 60.0
FAR_BITS = 300.0
RIDGE = 1e-11
LEAST_BITS = -700.0
NEGLIGIBLE = 1e-40


@dataclass(frozen=True, eq=False)
class Bound:
    """One lane: operands `q (n,d)`, `k (m,d)`, weights (positive) and the biases to start from."""

    q: Tensor
    k: Tensor
    a: Tensor
    b: Tensor
    row: Tensor
    col: Tensor


def bound(problem: OTProblem, start: Biases) -> list[Bound]:
    """The lanes of a problem with hard sides and positive weights, at their starts."""
    q, k = operands(problem, problem.eps)
    c = problem.centred
    return [Bound(*lane) for lane in zip(q, k, c.a, c.b, start.row, start.col, strict=True)]


@dataclass(frozen=True, eq=False)
class Solved:
    """Where a solve ended.

    Attributes:
        row: biases of x; the row marginal is exact there.
        col: biases of y.
        error: L1 error of the column marginal, relative to the mass.
        converged: whether it met the tolerance.
        iterations: steps, two plan passes each.
        passes: plan passes.
    """

    row: Tensor
    col: Tensor
    error: float
    converged: bool
    iterations: int
    passes: int


class LogNewton:
    """The solver of one lane, with the inverse that it keeps.

    Args:
        room: memory for the kernel, shared by lanes that are solved in turn; its own if None.

    Attributes:
        factorizations: inverses made so far.
    """

    def __init__(self, room: Tensor | None = None) -> None:
        self.room = room
        self.inverse: Tensor | None = None
        self.factorizations = 0
        self._left = self._right = torch.empty(0)
        self._kernel = self._sinkhorn = torch.empty(0)

    def solve(self, at: Bound, tol: float, *, stubborn: bool = False) -> Solved:
        """Steps from the start until the marginal error is at most ``tol``, or it seems too far away.

        Args:
            at: where to start.
            tol: marginal error asked for.
            stubborn: go on for long before giving up.
        """
        row, col = self._absorb(at, at.row, at.col)
        passes, count = 0, 0
        move = torch.zeros_like(at.b)
        before, error, last, value, halved = move, math.inf, math.inf, -math.inf, 0
        mass = float(at.a.sum())
        for count in range(1, (LONG if stubborn else CAP) + 1):
            passes += 2
            self._right = at.b * move.exp()
            rows = self._kernel @ self._right
            self._left = at.a / rows
            columns = self._right * (self._left @ self._kernel)
            error = float((at.b - columns).abs().sum()) / mass
            now = float(at.b @ move - at.a @ rows.log())
            if not (math.isfinite(error) and math.isfinite(now)):
                error = math.inf
                break
            if error <= tol:
                break
            if count == PATIENCE and error > FAR and not stubborn:
                break
            if now < value and error > last and halved <= HALVINGS:
                halved += 1
                move = (move + before) / 2 if halved < HALVINGS else before + self._sinkhorn
                continue
            stale = self.inverse is None or error > KEEP_RATE * last or halved > 0
            if stale and not self._factorize(at):
                break
            value, last, halved, before = now, error, 0, move
            self._sinkhorn = (at.b / columns).log()
            move = move + self._step(self._sinkhorn)
            if float(move.abs().max()) > ABSORB:
                row, col = self._absorb(at, row + (self._left / at.a).log2(), col + move * LOG2E)
                before = before - move
                move = torch.zeros_like(move)
                value = -math.inf
        done = error <= tol
        if not done:
            self.inverse = None
        return Solved(row + (self._left / at.a).log2(), col + move * LOG2E, error, done, count, passes)

    def transport(self, v: Tensor) -> Tensor:
        """`P v` for the plan last solved, v (m,k): one plan pass."""
        return self._left[:, None] * (self._kernel @ (self._right[:, None] * v))

    def _absorb(self, at: Bound, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
        """Store `2^(q.k + row + col)`; rows far from any mass are first moved to their largest entry."""
        ones = torch.ones_like(at.q[:, :1]), torch.ones_like(at.k[:, :1])
        left = torch.cat([at.q, row[:, None], ones[0]], 1)
        right = torch.cat([at.k, ones[1], col[:, None]], 1)
        if self.room is None:
            self.room = left.new_empty(len(left), len(right))
        kernel = torch.mm(left, right.T, out=self.room)
        top = kernel.amax(1)
        if float(top.abs().max()) > FAR_BITS:
            row = row - top
            kernel.sub_(top[:, None])
        # Entries that no product can tell from 0 would be subnormal, and those are slow.
        self._kernel = kernel.clamp_(min=LEAST_BITS).exp2_()
        return row, col

    def _factorize(self, at: Bound) -> bool:
        """`(D_c^-1 S)^+` of the plan at hand; False where that is singular."""
        matrix = (self._left[:, None] * self._kernel).mul_(self._right)[None]
        matrix = torch.threshold_(matrix, NEGLIGIBLE, 0.0)
        plan = DensePlan(matrix, PassCounter())
        system = SchurSystem(plan, at.a[None], matrix.sum(1), (1.0, 1.0), balanced=True, direct=True)
        full = system.normalized_matmat(torch.eye(len(at.b), dtype=matrix.dtype)[None])
        full = full[0] + system.null[0] * system.null[0].T
        full.diagonal().add_(RIDGE)
        factor, info = torch.linalg.cholesky_ex(full)
        if int(info):
            return False
        half = system.half_inverse[0]
        self.inverse = torch.cholesky_inverse(factor).mul_(half).div_(half.T)
        self.factorizations += 1
        return True

    def _step(self, residual: Tensor) -> Tensor:
        """The Newton step in log potentials, no longer than `LARGEST_MOVE`."""
        assert self.inverse is not None
        step = self.inverse @ residual
        step = step - step.mean()
        largest = float(step.abs().max())
        return step * (LARGEST_MOVE / largest) if largest > LARGEST_MOVE else step
