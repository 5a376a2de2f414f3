"""Dual potentials in one convention, and its conversions (MATH 1, 2).

Ours: `P_ij = a_i b_j exp((f_i + g_j - C_ij)/eps)`. Inside, a side's potential is a base-2 *bias* of the
centred cloud, which is what a streamed log-sum-exp adds to `q.k`:

    w_i = log2(e) (f~_i - s |x~_i|^2) / eps,        q = x~,  k = (2 s log2(e) / eps) y~
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.problem import OTProblem

__all__ = [
    "Biases",
    "Potentials",
    "asked_marginal",
    "biases_to_potentials",
    "from_ott",
    "from_pot",
    "from_shifted",
    "operands",
    "potentials_to_biases",
    "squared_norms",
    "to_ott",
    "to_pot",
    "to_shifted",
]

LOG2E = math.log2(math.e)


@dataclass(frozen=True, eq=False)
class Potentials:
    """Dual potentials `f (..., n)`, `g (..., m)`, in units of the cost, defined up to (f + t, g - t).

    Example:
        >>> import torch, ot_newton as otn
        >>> x, y = torch.tensor([[-0.5], [0.5]]).double(), torch.tensor([[-1.0], [1.0]]).double()
        >>> f, g = otn.sinkhorn(otn.OTProblem(x, y, eps=1.0)).potentials
        >>> potentials = Potentials(f, g)
        >>> potentials, round(float(f.mean() + g.mean()), 6)
        (Potentials(f=(2,), g=(2,)), 0.816219)
    """

    f: Tensor
    g: Tensor

    def __repr__(self) -> str:
        """Shapes only."""
        return f"Potentials(f={tuple(self.f.shape)}, g={tuple(self.g.shape)})"

    def __iter__(self) -> Iterator[Tensor]:
        """Unpack as `f, g`."""
        return iter((self.f, self.g))


@dataclass(frozen=True, eq=False)
class Biases:
    """Base-2 biases of the centred clouds: `row (B,n)`, `col (B,m)`, at the eps they were made for."""

    row: Tensor
    col: Tensor


def squared_norms(problem: OTProblem, eps: float) -> tuple[Tensor, Tensor]:
    """`log2(e) s |x~|^2 / eps` (B,n) and the same for y (B,m): bias of a zero potential, negated."""
    factor = LOG2E * problem.cost_scale / eps
    c = problem.centred
    return factor * c.x.square().sum(-1), factor * c.y.square().sum(-1)


def operands(problem: OTProblem, eps: float) -> tuple[Tensor, Tensor]:
    """`q = x~ (B,n,d)` and `k = (2 s log2(e)/eps) y~ (B,m,d)`: the operands of both axes."""
    c = problem.centred
    return c.x, (2.0 * problem.cost_scale * LOG2E / eps) * c.y


def _shift_terms(problem: OTProblem) -> tuple[Tensor, Tensor, Tensor]:
    """What centring takes out of f and g (both in float64): `2s<x~,D> + s|D|^2` and `-2s<y~,D>`."""
    c, s = problem.centred, problem.cost_scale
    along_x = 2 * s * torch.einsum("bnd,bd->bn", c.x.double(), c.shift)
    along_y = 2 * s * torch.einsum("bmd,bd->bm", c.y.double(), c.shift)
    return along_x, along_y, s * c.shift.square().sum(-1)


def biases_to_potentials(problem: OTProblem, biases: Biases) -> Potentials:
    """Potentials of the user's clouds, shapes (*batch, n) and (*batch, m), in the compute dtype."""
    scale = problem.eps / LOG2E
    norm_x, norm_y = squared_norms(problem, problem.eps)
    along_x, along_y, square = _shift_terms(problem)
    f = scale * (biases.row + norm_x).double() + along_x + square[:, None]
    g = scale * (biases.col + norm_y).double() - along_y
    shape = problem.batch_shape
    return Potentials(
        f.to(problem.dtype).reshape(*shape, problem.n), g.to(problem.dtype).reshape(*shape, problem.m)
    )


def potentials_to_biases(problem: OTProblem, potentials: Potentials) -> Biases:
    """The inverse of `biases_to_potentials`."""
    lanes, scale = problem.lanes, LOG2E / problem.eps
    norm_x, norm_y = squared_norms(problem, problem.eps)
    along_x, along_y, square = _shift_terms(problem)
    f = potentials.f.double().expand(*problem.batch_shape, problem.n).reshape(lanes, problem.n)
    g = potentials.g.double().expand(*problem.batch_shape, problem.m).reshape(lanes, problem.m)
    row = scale * (f - along_x - square[:, None]) - norm_x.double()
    col = scale * (g + along_y) - norm_y.double()
    return Biases(row.to(problem.dtype), col.to(problem.dtype))


def asked_marginal(weight: Tensor, potential: Tensor, rho: float | None) -> Tensor:
    """The marginal that a potential asks for, in float64: a, or `a exp(-f/rho)` if relaxed (MATH 8)."""
    if rho is None:
        return weight.double()
    asked = weight.double() * torch.exp(-potential.double() / rho)
    return torch.where(weight > 0, asked, torch.zeros_like(asked))


def _log(weight: Tensor) -> Tensor:
    return torch.where(weight > 0, weight, torch.ones_like(weight)).log().masked_fill(weight <= 0, -math.inf)


def to_ott(potentials: Potentials, a: Tensor, b: Tensor, eps: float) -> Potentials:
    """OTT absorbs the log-weights: `f + eps log a`, -inf at zero weights.

    Example:
        >>> import torch
        >>> weight = torch.tensor([0.5, 0.5])
        >>> zero = Potentials(torch.zeros(2), torch.zeros(2))
        >>> to_ott(zero, weight, weight, 1.0).f
        tensor([-0.6931, -0.6931])
    """
    return Potentials(potentials.f + eps * _log(a), potentials.g + eps * _log(b))


def from_ott(potentials: Potentials, a: Tensor, b: Tensor, eps: float) -> Potentials:
    """Inverse of `to_ott`; at zero weights, where OTT holds -inf, the potential is -inf too."""
    f = torch.where(a > 0, potentials.f - eps * _log(a), potentials.f)
    return Potentials(f, torch.where(b > 0, potentials.g - eps * _log(b), potentials.g))


def to_pot(potentials: Potentials, a: Tensor, b: Tensor, eps: float) -> Potentials:
    """POT's log-scalings `log u = f/eps + log a`, not multiplied by reg.

    Example:
        >>> import torch
        >>> weight = torch.tensor([0.5, 0.5])
        >>> to_pot(Potentials(torch.ones(2), torch.zeros(2)), weight, weight, 2.0).f
        tensor([-0.1931, -0.1931])
    """
    ott = to_ott(potentials, a, b, eps)
    return Potentials(ott.f / eps, ott.g / eps)


def from_pot(potentials: Potentials, a: Tensor, b: Tensor, eps: float) -> Potentials:
    """Inverse of `to_pot`."""
    return from_ott(Potentials(potentials.f * eps, potentials.g * eps), a, b, eps)


def to_shifted(potentials: Potentials, x: Tensor, y: Tensor, cost_scale: float = 1.0) -> Potentials:
    """flash-sinkhorn's shifted potentials `f - s|x|^2`. GeomLoss's are ours as they are (s = 0.5)."""
    return Potentials(
        potentials.f - cost_scale * x.square().sum(-1), potentials.g - cost_scale * y.square().sum(-1)
    )


def from_shifted(potentials: Potentials, x: Tensor, y: Tensor, cost_scale: float = 1.0) -> Potentials:
    """Inverse of `to_shifted`."""
    return to_shifted(potentials, x, y, -cost_scale)
