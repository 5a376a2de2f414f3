"""The lanes of a problem bound at one eps: half-iterations and marginals of both sides (MATH 2).

In base 2, with `L_i = log2 sum_j b_j 2^(q_i.k_j + u_j)` and `X_i = log2(e) s |x~_i|^2 / eps`, the update
of the x side is

    w_i = -t_x L_i + (t_x - 1) X_i,    t_x = 1 (hard) or rho_x/(rho_x + eps),

and `r_i = a_i 2^(w_i + L_i)`: the row marginal comes for free with the next update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from ot_newton.potentials import operands, squared_norms
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter, Plan, PlanBackend, Tiles

__all__ = ["Side", "Stage", "TransposedPlan", "noise_floor"]

LARGEST_BITS = 100.0


def noise_floor(problem: OTProblem, eps: float | None = None) -> float:
    """`eps_mach max|C| / eps`: relative rounding error of a plan entry, `max|C|` of the centred clouds."""
    largest = problem.cost_scale * problem.centred.max_cost
    return float(torch.finfo(problem.dtype).eps * max(1.0, largest / (eps or problem.eps)))


class Side:
    """One marginal: its weights, its damping and the marginal its potential asks for."""

    def __init__(self, weight: Tensor, norms: Tensor, rho: float | None, eps: float, mass: Tensor) -> None:
        self.weight, self.norms, self.mass = weight, norms, mass
        self.damping = 1.0 if rho is None else rho / (rho + eps)
        self.exponent = None if rho is None else eps / rho

    def stabilizer(self, bias: Tensor) -> Tensor:
        """Bias at which the streamed sum is 1 at the fixed point."""
        if self.exponent is None:
            return bias
        return (bias + self.norms) / self.damping - self.norms

    def update(self, lse: Tensor) -> Tensor:
        """The bias that is best for the other side's."""
        if self.exponent is None:
            return -lse
        return -self.damping * lse + (self.damping - 1.0) * self.norms

    def error(self, bias: Tensor, lse: Tensor) -> Tensor:
        """(B,) L1 distance of the plan's marginal from the one asked for, relative to the mass."""
        return self.distance(bias, self.marginal(bias, lse))

    def marginal(self, bias: Tensor, lse: Tensor) -> Tensor:
        """The plan's marginal `a 2^(w + L)`; 0 where the weight is, whatever the potential there."""
        # A start may be far off: its marginal is large, but no NaN.
        ratio = torch.exp2((bias + lse).clamp(max=LARGEST_BITS))
        return torch.where(self.weight > 0, ratio * self.weight, torch.zeros_like(bias))

    def asked(self, bias: Tensor) -> Tensor:
        """The marginal asked for."""
        return torch.where(self.weight > 0, self.weight * self.target(bias), torch.zeros_like(bias))

    def target(self, bias: Tensor) -> Tensor | float:
        """Marginal asked for, over the weight: 1, or `exp(-f/rho)` on a relaxed side."""
        return 1.0 if self.exponent is None else torch.exp2(-(bias + self.norms) * self.exponent)

    def distance(self, bias: Tensor, marginal: Tensor) -> Tensor:
        """(B,) L1 distance of a marginal at hand from the one asked for, relative to the mass."""
        return (marginal - self.asked(bias)).abs().double().sum(-1) / self.mass

    def take(self, lanes: Tensor) -> Side:
        """Some of the lanes."""
        out = copy.copy(self)
        out.weight, out.norms, out.mass = self.weight[lanes], self.norms[lanes], self.mass[lanes]
        return out


class Stage:
    """The lanes of a problem bound at one eps: their tiles and both marginals."""

    def __init__(self, tiles: Tiles, x: Side, y: Side, eps: float, squared: Callable[[], Tiles]) -> None:
        self.tiles, self.x, self.y, self.eps, self.squared = tiles, x, y, eps, squared

    @classmethod
    def bind(cls, problem: OTProblem, backend: PlanBackend, counter: PassCounter, eps: float) -> Stage:
        """Everything of a problem at one eps."""
        c = problem.centred
        q, k = operands(problem, eps)
        norm_x, norm_y = squared_norms(problem, eps)
        x = Side(c.a, norm_x, problem.rho_x, eps, c.a.double().sum(-1))
        y = Side(c.b, norm_y, problem.rho_y, eps, c.b.double().sum(-1))
        return cls(backend.bind(q, k, counter), x, y, eps, lambda: backend.bind(q, 2 * k, counter))

    def take(self, lanes: Tensor) -> Stage:
        """Some of the lanes, nothing computed again."""
        x, y = self.x.take(lanes), self.y.take(lanes)
        return Stage(self.tiles.take(lanes), x, y, self.eps, lambda: self.squared().take(lanes))

    def squared_plan(self, w: Tensor, u: Tensor) -> Plan:
        """The plan with its entries squared: doubled exponents and squared weights."""
        a, b = self.x.weight, self.y.weight
        return self.squared().plan(2 * w, 2 * u, a * a, b * b)

    def two_sided(self, w: Tensor, u: Tensor) -> Tensor:
        """(B,) larger L1 error of both marginals, from products with the plan: two passes."""
        plan = self.tiles.plan(w, u, self.x.weight, self.y.weight)
        r = plan.apply(torch.ones_like(self.y.weight)[:, :, None], 1)[:, :, 0]
        c = plan.apply(torch.ones_like(self.x.weight)[:, :, None], 0)[:, :, 0]
        return torch.maximum(self.x.distance(w, r), self.y.distance(u, c))

    def lse_x(self, w: Tensor | None, u: Tensor) -> Tensor:
        """`L (B,n)`, stabilized by the current w if there is one."""
        return self.tiles.lse(u, self.y.weight, 1, None if w is None else self.x.stabilizer(w))[0]

    def lse_y(self, w: Tensor, u: Tensor | None) -> Tensor:
        """`M (B,m)`."""
        return self.tiles.lse(w, self.x.weight, 0, None if u is None else self.y.stabilizer(u))[0]

    def transposed(self) -> Stage:
        """The same with the two sides in each other's place."""
        tiles, squared = _TransposedTiles(self.tiles), self.squared
        return Stage(tiles, self.y, self.x, self.eps, lambda: _TransposedTiles(squared()))


class _TransposedTiles:
    """Tiles with the two clouds in each other's place."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self.counter = tiles, tiles.counter

    def lse(
        self, bias: Tensor, weight: Tensor, axis: int, stabilizer: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Tiles.lse`."""
        return self.tiles.lse(bias, weight, 1 - axis, stabilizer)

    def take(self, lanes: Tensor) -> Tiles:
        """See `Tiles.take`."""
        return _TransposedTiles(self.tiles.take(lanes))

    def plan(self, row_bias: Tensor, col_bias: Tensor, a: Tensor, b: Tensor) -> Plan:
        """See `Tiles.plan`."""
        return TransposedPlan(self.tiles.plan(col_bias, row_bias, b, a))


class TransposedPlan:
    """`P^T` as a plan: the two sides change roles."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def apply(self, v: Tensor, axis: int) -> Tensor:
        """See `Plan.apply`."""
        return self.plan.apply(v, 1 - axis)

    def apply_hadamard(
        self, left: Tensor, right: Tensor, v: Tensor, axis: int, transport: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Plan.apply_hadamard`."""
        return self.plan.apply_hadamard(right, left, v, 1 - axis, transport)

    def to_dense(self) -> Tensor:
        """See `Plan.to_dense`."""
        return self.plan.to_dense().mT
