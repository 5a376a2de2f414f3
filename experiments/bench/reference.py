"""What a contestant is checked against: float64 iterations written out, in each library's own order.

One softmin is `-t eps LSE_j[(h_j - C_ij)/eps + log w_j]`, `t = rho/(rho + eps)` on a relaxed side. After a
fixed count of iterations two libraries differ by the order of their updates, so a `Scheme` names the order;
after convergence all agree up to the gauge. Up to `STORED` pairs the cost matrix is stored and nothing of
the package takes part; above it the softmins are streamed by our float64 backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ot_newton.backends.select import get_backend
from ot_newton.potentials import Biases, Potentials, biases_to_potentials, operands, potentials_to_biases
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter

__all__ = [
    "SCHEMES",
    "STORED",
    "Pair",
    "Scheme",
    "Softmins",
    "Terms",
    "converge",
    "count_for",
    "dense_terms",
    "double",
]

STORED = 1 << 24
"""Largest n m whose cost matrix is stored, 128 MB."""

EVERY = 10
MOST = 20_000


class Softmins:
    """Both softmins of a problem, in float64.

    Args:
        problem: one lane, any dtype.
    """

    def __init__(self, problem: OTProblem) -> None:
        self.problem = double(problem)
        self.stored = problem.n * problem.m <= STORED
        self.zero_x = torch.zeros(problem.n, dtype=torch.float64)
        self.zero_y = torch.zeros(problem.m, dtype=torch.float64)

    @cached_property
    def cost(self) -> Tensor:
        """`s |x_i - y_j|^2` by differences."""
        p = self.problem
        return p.cost_scale * torch.cdist(p.x, p.y, compute_mode="donot_use_mm_for_euclid_dist").square()

    def hard(self, h: Tensor, axis: int) -> Tensor:
        """Undamped softmin: over y of `h (m)` for axis 1, over x of `h (n)` for axis 0."""
        p = self.problem
        if not self.stored:
            return self._streamed(h, axis)
        weight = (p.b if axis == 1 else p.a).log()
        cost = self.cost if axis == 1 else self.cost.mT
        return -p.eps * torch.logsumexp((h - cost) / p.eps + weight, dim=1)

    def _streamed(self, h: Tensor, axis: int) -> Tensor:
        p = self.problem
        pair = Potentials(self.zero_x, h) if axis == 1 else Potentials(h, self.zero_y)
        start = potentials_to_biases(p, pair)
        tiles = get_backend("cpu").bind(*operands(p, p.eps), PassCounter())
        weight, bias = (p.centred.b, start.col) if axis == 1 else (p.centred.a, start.row)
        lse = tiles.lse(bias, weight, axis)[0]
        new = Biases(-lse, start.col) if axis == 1 else Biases(start.row, -lse)
        out = biases_to_potentials(p, new)
        return out.f if axis == 1 else out.g

    def x(self, g: Tensor) -> Tensor:
        """The update of f."""
        return _damping(self.problem.rho_x, self.problem.eps) * self.hard(g, 1)

    def y(self, f: Tensor) -> Tensor:
        """The update of g."""
        return _damping(self.problem.rho_y, self.problem.eps) * self.hard(f, 0)

    def marginal_error(self, f: Tensor, g: Tensor) -> float:
        """Larger L1 distance of both marginals from those asked for (`a`, relaxed `a exp(-f/rho)`)."""
        p = self.problem
        errors = []
        for own, other, axis, weight, rho in ((f, g, 1, p.a, p.rho_x), (g, f, 0, p.b, p.rho_y)):
            found = torch.exp((own - self.hard(other, axis)) / p.eps)
            asked = torch.ones_like(found) if rho is None else torch.exp(-own / rho)
            errors.append(float((weight * (found - asked).abs()).sum()))
        return max(errors)


def double(problem: OTProblem) -> OTProblem:
    """The same problem in float64, on the CPU, its batch dimensions gone."""
    parts = (part.detach().cpu().double() for part in (problem.x, problem.y, problem.a, problem.b))
    x, y, a, b = parts
    return OTProblem(
        x, y, a, b, eps=problem.eps, cost_scale=problem.cost_scale, rho_x=problem.rho_x, rho_y=problem.rho_y
    )


def _damping(rho: float | None, eps: float) -> float:
    return 1.0 if rho is None else rho / (rho + eps)


Pair = tuple[Tensor, Tensor]
Move = Callable[[Softmins, Tensor, Tensor], Pair]


def _x_then_y(s: Softmins, f: Tensor, g: Tensor) -> Pair:
    f = s.x(g)
    return f, s.y(f)


def _y_then_x(s: Softmins, f: Tensor, g: Tensor) -> Pair:
    g = s.y(f)
    return s.x(g), g


def _both(s: Softmins, f: Tensor, g: Tensor) -> Pair:
    return s.x(g), s.y(f)


def _averaged(s: Softmins, f: Tensor, g: Tensor) -> Pair:
    new_f, new_g = _both(s, f, g)
    return (f + new_f) / 2, (g + new_g) / 2


def _stay(s: Softmins, f: Tensor, g: Tensor) -> Pair:
    return f, g


def _zero(s: Softmins) -> Pair:
    return s.zero_x, s.zero_y


def _unweighted(s: Softmins) -> Pair:
    """The zero start of libraries whose potentials hold the log-weights."""
    p = s.problem
    return -p.eps * p.a.log(), -p.eps * p.b.log()


@dataclass(frozen=True)
class Scheme:
    """An order of updates, from a zero start in the library's own convention.

    Attributes:
        about: in words.
        step: one iteration.
        first: replaces the first iteration, None where it is like the others.
        last: replaces the last one.
        start: potentials before the first one.
    """

    about: str
    step: Move
    first: Move | None = None
    last: Move | None = None
    start: Callable[[Softmins], Pair] = _zero

    def states(self, s: Softmins) -> Iterator[Pair]:
        """Potentials after 1, 2, 3 ... iterations; with a ``last`` the count begins at 2."""
        f, g = (self.first or self.step)(s, *self.start(s))
        while True:
            yield (self.last or _stay)(s, f, g)
            f, g = self.step(s, f, g)

    def run(self, s: Softmins, count: int) -> Pair:
        """Potentials after ``count`` iterations, at least 1, with a ``last`` at least 2."""
        f, g = (self.first or self.step)(s, *self.start(s))
        for _ in range(count - 1 - (self.last is not None)):
            f, g = self.step(s, f, g)
        return (self.last or _stay)(s, f, g)

    def gradient_pair(self, s: Softmins, count: int) -> Pair:
        """The potentials whose plan a library's gradient is made of.

        GeomLoss differentiates the last update of f, which is made from the g before it.
        """
        if self.last is None:
            return self.run(s, count)
        f, g = replace(self, last=None).run(s, count - 1)
        return self.last(s, f, g)[0], g


SCHEMES: dict[str, Scheme] = {
    "x first": Scheme("alternating, f first", _x_then_y),
    "x first, unweighted": Scheme("alternating, f first", _x_then_y, start=_unweighted),
    "y first": Scheme("alternating, g first", _y_then_x),
    "y first, unweighted": Scheme("alternating, g first", _y_then_x, start=_unweighted),
    "geomloss": Scheme("symmetric, averaged, the first and the last not", _averaged, first=_both, last=_both),
    "symmetric": Scheme("symmetric, averaged, the first not", _averaged, first=_x_then_y),
    "self": Scheme("one averaged update of f = g, the first not", _averaged, first=_both),
    "parallel": Scheme("symmetric, averaged", _averaged, start=_unweighted),
}
"""Orders of updates."""


def count_for(softmins: Softmins, scheme: str, tol: float) -> int:
    """The first multiple of 10 iterations whose marginal error is at most ``tol``.

    Raises:
        ArithmeticError: more than 20,000 would be needed.
    """
    first = 1 if SCHEMES[scheme].last is None else 2
    states = itertools.islice(SCHEMES[scheme].states(softmins), MOST)
    for count, (f, g) in enumerate(states, first):
        if count % EVERY == 0 and softmins.marginal_error(f, g) <= tol:
            return count
    raise ArithmeticError(f"{scheme}: marginal error {tol:g} not reached within {MOST} iterations")


def converge(softmins: Softmins, tol: float = 1e-13) -> Pair:
    """The fixed point by alternating updates, to a marginal error of ``tol``.

    Raises:
        ArithmeticError: not reached within 20,000 iterations.
    """
    for count, (f, g) in enumerate(itertools.islice(SCHEMES["x first"].states(softmins), MOST)):
        if count % EVERY == 0 and softmins.marginal_error(f, g) <= tol:
            return f, g
    raise ArithmeticError(f"marginal error {tol:g} not reached within {MOST} iterations")


@dataclass(frozen=True, eq=False)
class Terms:
    """Value and gradient at given potentials, from the dense plan (MATH 3, 4).

    Attributes:
        dual: `<a,f> + <b,g> - eps (sum P - sum a sum b)`, relaxed sides as MATH 3.
        primal: `<P,C> + eps KL(P|ab) + rho KL` terms of relaxed sides.
        gradient: in x, `2s (r_i x_i - (P y)_i)`.
        gradient_y: in y, `2s (c_j y_j - (P^T x)_j)`.
    """

    dual: float
    primal: float
    gradient: Tensor
    gradient_y: Tensor


def dense_terms(softmins: Softmins, f: Tensor, g: Tensor) -> Terms:
    """See `Terms`; weights positive."""
    p = softmins.problem
    product = p.a[:, None] * p.b[None, :]
    plan = product * torch.exp((f[:, None] + g[None, :] - softmins.cost) / p.eps)
    r, c = plan.sum(1), plan.sum(0)
    dual = -p.eps * (plan.sum() - product.sum())
    primal = (plan * softmins.cost).sum() + p.eps * _kl(plan, product)
    for potential, weight, marginal, rho in ((f, p.a, r, p.rho_x), (g, p.b, c, p.rho_y)):
        if rho is None:
            dual = dual + (weight * potential).sum()
        else:
            dual = dual - rho * (weight * torch.expm1(-potential / rho)).sum()
            primal = primal + rho * _kl(marginal, weight)
    gradient = 2 * p.cost_scale * (r[:, None] * p.x - plan @ p.y)
    gradient_y = 2 * p.cost_scale * (c[:, None] * p.y - plan.mT @ p.x)
    return Terms(float(dual), float(primal), gradient, gradient_y)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (torch.xlogy(p, p / q) - p + q).sum()
