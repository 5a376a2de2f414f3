"""The semi-dual at the biases of one side: value, gradient, Newton steps and their line search (MATH 8).

With w the best for u, what is left of the dual is a concave function of u alone, with gradient `b~ - c`
(`b~ = b exp(-g/rho)`, b for a hard side) and Hessian -S/eps, S the Schur complement. A Newton step is

    u' = u + S^+ (b~ - c) = u + D^-1/2 S^^+ D^-1/2 (b~ - c),    D = D_c k_y.

Sinkhorn's own increment of u is `D^-1 (b~ - c)` to first order: one Jacobi step on the same system. S^^+ is

    kept      the inverse at hand, for as long as it does: where plans are stored, the factor of an earlier
              one (`KeptInverse`); else the slow modes U with Ritz values T of earlier solves, whose part of
              Sinkhorn's increment j is made a Newton step, `j + D^-1/2 U (T^-1 - I) U^T D^1/2 j`
    solved    a factorization of the plan at hand, else deflated CG

Every step is taken only as far as the dual value does not decrease.

Source: truncated Newton for EOT duals (arXiv 2504.02067), here on the semi-dual with recycled inverses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ot_newton.deflation import Deflation
from ot_newton.kept import KeptInverse
from ot_newton.potentials import LOG2E, Biases
from ot_newton.schur import SchurSystem
from ot_newton.stage import Stage

__all__ = ["Inverse", "SemiDual", "SemiDualState"]

Inverse = Deflation | KeptInverse
"""What knows an approximate inverse of the Schur complement from one plan to the next."""

MAX_BACKTRACKS = 6
CG_CAP = 400
LARGEST_MOVE = 32.0
LEAST = 1e-30


@dataclass(frozen=True, eq=False)
class SemiDualState:
    """Biases with w the best for u, and the sums of both sides there.

    Attributes:
        biases: `w (1,n)`, `u (1,m)`.
        row: `L (1,n)`, of which w is the update: the row marginal is exact.
        col: `M (1,m)`.
        c: column marginal (1,m).
        error: L1 error of the column marginal relative to the mass.
        rise: of the dual value in the last step.
    """

    biases: Biases
    row: Tensor
    col: Tensor
    c: Tensor
    error: float
    rise: float = math.inf


class SemiDual:
    """Value, gradient and Newton step of the semi-dual at u; one lane."""

    def __init__(self, stage: Stage, inverse: Inverse | None) -> None:
        self.stage, self.inverse = stage, inverse
        self.balanced = stage.x.exponent is None and stage.y.exponent is None
        self.scale = stage.eps * float(stage.x.mass.max())

    def best_rows(self, u: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """`L` at u, from one pass stabilized by biases of x nearby, and the best w for it."""
        row = self.stage.lse_x(near, u)
        return row, self.stage.x.update(row)

    def at(self, u: Tensor, row: Tensor) -> SemiDualState:
        """The state at u, whose row sums are known. One pass."""
        w = self.stage.x.update(row)
        col = self.stage.lse_y(w, u)
        c = self.stage.y.marginal(u, col)
        return SemiDualState(Biases(w, u), row, col, c, float(self.stage.y.distance(u, c)[0]))

    def start(self, u: Tensor, near: Tensor) -> SemiDualState:
        """The state at u. Two passes."""
        return self.at(u, self.best_rows(u, near)[0])

    def sweep(self, state: SemiDualState) -> SemiDualState:
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

    def diagonals(self, state: SemiDualState) -> tuple[Tensor, Tensor]:
        """`D_r k_x` and `D_c k_y`, where k adds what the relaxed side's own curvature does."""
        x, y, c = self.stage.x, self.stage.y, state.c
        r = x.asked(state.biases.row)
        r = r if x.exponent is None else (1 + x.exponent) * r
        return r, c if y.exponent is None else c + y.exponent * y.asked(state.biases.col)

    def system(self, state: SemiDualState, dr: Tensor, dc: Tensor) -> SchurSystem:
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

    def gap(self, state: SemiDualState) -> Tensor:
        """`b~ - c`, the gradient in u, in units of biases."""
        return (self.stage.y.asked(state.biases.col) - state.c) * LOG2E

    def jacobi(self, state: SemiDualState) -> Tensor:
        """Sinkhorn's increment of u, 0 where there is no mass."""
        y, u = self.stage.y, state.biases.col
        increment = torch.where(y.weight > 0, y.update(state.col) - u, torch.zeros_like(u))
        if not self.balanced:
            return increment
        # A constant moves nothing: it is w's.
        mean = (state.c * increment).sum() / state.c.sum()
        return torch.where(y.weight > 0, increment - mean, increment)

    def kept(self, state: SemiDualState) -> Tensor:
        """The step by the inverse at hand; no pass. With slow modes only, the rest of it is Sinkhorn's."""
        assert self.inverse is not None
        start, (_, dc) = self.jacobi(state), self.diagonals(state)
        if isinstance(self.inverse, KeptInverse):
            start = torch.where(dc > LEAST, self.gap(state) / dc.clamp_min(LEAST), start)
        half = dc.sqrt()
        slow = self.inverse.amplify((half * start)[:, :, None])[:, :, 0]
        return start + torch.where(dc > LEAST, slow / half.clamp_min(LEAST), torch.zeros_like(start))

    def solved(self, state: SemiDualState, forcing: float) -> Tensor:
        """The step by a solve with the plan at hand."""
        dr, dc = self.diagonals(state)
        system = self.system(state, dr, dc)
        if isinstance(self.inverse, KeptInverse) and self.inverse.factorize(system):
            return self.kept(state)
        rhs = self.gap(state)[:, :, None]
        solve = system.solve(rhs, torch.zeros_like(rhs), forcing, CG_CAP)
        return torch.where(dc > 0, solve.w[:, :, 0], self.jacobi(state))

    def search(
        self, state: SemiDualState, du: Tensor, *, trials: int = MAX_BACKTRACKS
    ) -> SemiDualState | None:
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
