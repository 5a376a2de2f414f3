"""A plan with its cached marginals and transports: what gradient, Hessian and operators share."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Self, cast

import torch
from torch import Tensor

from ot_newton.deflation import Deflation
from ot_newton.potentials import Biases
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter, Plan
from ot_newton.schur import SchurSystem, SelfSystem
from ot_newton.stage import TransposedPlan
from ot_newton.warm import Tangents, WarmStart

__all__ = ["PlanCaches", "gradient_x"]


def gradient_x(s: float, x: Tensor, marginal: Tensor, transported: Tensor, shift: Tensor) -> Tensor:
    """`2s (r_i x_i - (P y)_i)` for the centred clouds, with the shift put back (MATH 2, 4), (B,n,d)."""
    at_zero = marginal[:, :, None] * (x + shift[:, None, :].to(x.dtype)) - transported
    return 2.0 * s * at_zero


class PlanCaches:
    """A plan with cached marginals and transports, its Schur complement and what products leave behind.

    Args:
        problem: for x, y, eps, cost_scale and the relaxations.
        plan: its plan at the biases at hand.
        counter: pass counter of that plan.
        direct: factorize the Schur complement instead of CG.
        swapped: internal; see `swap`.
        symmetric: x = y and f = g, so that `swap` is this object itself.

    Attributes:
        deflation: space of the Schur solve's slow modes; set to None before the first product for none.
        preconditioner: of the Schur solve's CG, for its normalized system; set before the first product.
        centre_weights: remove the mean of derivatives in the weights (hard sides: the simplex's tangent).
        tangents: where products leave the responses of the potentials, None to forget them.
        squared: makes the plan with its entries squared, for the diagonal of the Schur complement.
        source: name of the backend and biases the plan was made of, where it may have to be made again.
    """

    def __init__(
        self,
        problem: OTProblem,
        plan: Plan,
        counter: PassCounter,
        *,
        direct: bool,
        swapped: bool = False,
        symmetric: bool = False,
    ) -> None:
        c = problem.centred
        self.problem, self.plan, self.counter, self.direct = problem, plan, counter, direct
        self.x, self.y, self.shift = (c.y, c.x, -c.shift) if swapped else (c.x, c.y, c.shift)
        self.a, self.b = (c.b, c.a) if swapped else (c.a, c.b)
        self.s, self.eps, self.balanced = problem.cost_scale, problem.eps, problem.balanced
        rho = (problem.rho_y, problem.rho_x) if swapped else (problem.rho_x, problem.rho_y)
        self.relax = tuple(1.0 if p is None else 1.0 + problem.eps / p for p in rho)
        self.deflation: Deflation | None = None if direct else Deflation()
        self.preconditioner: Callable[[Tensor], Tensor] | None = None
        self.tangents: Tangents | None = None
        self.squared: Callable[[], Plan] | None = None
        self.source: tuple[str, Biases] | None = None
        self.swapped = swapped
        self.centre_weights = problem.balanced
        self.symmetric = symmetric
        self._swap: PlanCaches | None = None
        # Weak: a circle would keep the plan's matrices until the garbage collector comes by.
        self._origin: weakref.ref[PlanCaches] | None = None
        self._system: SchurSystem | None = None
        self._self_system: SelfSystem | None = None
        self._rows: tuple[Tensor, Tensor] | None = None

    @property
    def swap(self) -> Self:
        """The same problem with x and y exchanged; marginals are shared."""
        if self.symmetric:
            return self
        origin = None if self._origin is None else self._origin()
        if origin is not None:
            return cast("Self", origin)
        if self._swap is None:
            other, turned = TransposedPlan(self.plan), not self.swapped
            self._swap = type(self)(self.problem, other, self.counter, direct=self.direct, swapped=turned)
            self._swap._origin = weakref.ref(self)
            if self.squared is not None:
                self._swap.squared = functools.partial(_transposed, self.squared)
        return cast("Self", self._swap)

    def preconditioned(self, preconditioner: Callable[[Tensor], Tensor]) -> Self:
        """This plan, caches shared, with a preconditioner for the CG of its Schur solves on the y side."""
        out = copy.copy(self)
        out.preconditioner, out._system, out._swap = preconditioner, None, self.swap
        return out

    def resume(self, start: WarmStart) -> None:
        """Take the tangents and slow modes that products with this very plan had left in a warm start."""
        self.tangents = start.tangents or Tangents()
        held = None if self.deflation is None else self.deflation.basis
        if self.deflation is not None and start.space is not None and held is not start.space[0]:
            self.deflation = Deflation.carried(start.space)

    def rows(self) -> tuple[Tensor, Tensor]:
        """`r = P1 (B,n)` and `P y (B,n,d)`, one pass, cached."""
        if self._rows is None:
            ones = torch.ones_like(self.y[:, :, :1])
            out = self.plan.apply(torch.cat([ones, self.y], dim=-1), 1)
            self._rows = (out[:, :, 0].contiguous(), out[:, :, 1:].contiguous())
        return self._rows

    def columns(self) -> tuple[Tensor, Tensor]:
        """`c = P^T 1 (B,m)` and `P^T x (B,m,d)`, one pass, cached."""
        return self.swap.rows()

    def system(self) -> SchurSystem:
        """The Schur complement on the y side, cached."""
        if self._system is None:
            r, c = self.rows()[0], self.columns()[0]
            self._system = SchurSystem(
                self.plan,
                r,
                c,
                (self.relax[0], self.relax[1]),
                balanced=self.balanced,
                direct=self.direct,
                deflation=self.deflation,
                preconditioner=self.preconditioner,
                squared=self.squared,
            )
        return self._system

    def gradient(self) -> Tensor:
        """`dOT/dx (B,n,d)`; that in y is ``swap.gradient()``."""
        r, py = self.rows()
        return gradient_x(self.s, self.x, r, py, self.shift)

    def self_system(self) -> SelfSystem:
        """`D_r k + P` of a self-transport plan, cached."""
        if self._self_system is None:
            self._self_system = SelfSystem(self.plan, self.rows()[0], self.relax[0])
        return self._self_system


def _transposed(plan: Callable[[], Plan]) -> Plan:
    return TransposedPlan(plan())
