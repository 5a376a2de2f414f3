"""The transport plan as an operator: products are streamed, the matrix is never stored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ot_newton.backends.select import get_backend
from ot_newton.hessian import LinearizedPlan
from ot_newton.operators.base import PlanOperator
from ot_newton.potentials import Biases
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter
from ot_newton.schur import safe_inverse
from ot_newton.stage import Stage

__all__ = ["TransportPlan", "diagonal_preconditioner", "linearize"]


def linearize(
    problem: OTProblem,
    biases: Biases,
    backend: str,
    counter: PassCounter,
    *,
    symmetric: bool = False,
    stage: Stage | None = None,
) -> LinearizedPlan:
    """The plan at these biases on that backend, with its caches; no pass is made except by "dense".

    Args:
        problem: the problem.
        biases: of the centred clouds.
        backend: name.
        counter: counts plan passes.
        symmetric: x = y and equal biases.
        stage: the problem bound to that backend and counter at its eps, where it is at hand.
    """
    if stage is None:
        stage = Stage.bind(problem, get_backend(backend), counter, problem.eps)
    plan = stage.tiles.plan(biases.row, biases.col, stage.x.weight, stage.y.weight)
    out = LinearizedPlan(problem, plan, counter, direct=backend == "dense", symmetric=symmetric)
    out.source = (backend, biases)
    out.squared = functools.partial(stage.squared_plan, biases.row, biases.col)
    return out


def diagonal_preconditioner(linearized: LinearizedPlan) -> Callable[[Tensor], Tensor]:
    """Division by the diagonal of the normalized Schur complement, as `result.hessian` takes it.

    Its sums are a transport with doubled exponents: one plan pass. Deflated solves that take more than 8 CG
    steps use it by themselves.

    Args:
        linearized: a plan as `linearize` makes it, or its swap.

    Raises:
        ValueError: a bare plan, whose entries cannot be squared.
    """
    if linearized.squared is None:
        raise ValueError("linearized must be a plan made by linearize, got a bare one")
    diagonal = linearized.system().diagonal(linearized.squared())
    return lambda v: v / diagonal


class TransportPlan(PlanOperator):
    """`P (n,m)`, `P_ij = a_i b_j exp((f_i + g_j - C_ij)/eps)`.

    ``plan @ V`` for V (m,) or (m,k); ``plan.T @ U``; one plan pass per product, whatever k.

    Args:
        linearized: the plan with its caches; ``swap`` of it gives the transpose.

    Example:
        >>> import torch, ot_newton as otn
        >>> x, y = torch.tensor([[-0.5], [0.5]]).double(), torch.tensor([[-1.0], [1.0]]).double()
        >>> plan = otn.sinkhorn(otn.OTProblem(x, y, eps=1.0)).plan
        >>> plan, plan.row_sums().numpy().round(9)
        (TransportPlan(2x2, float64, cpu), array([0.5, 0.5]))
        >>> (plan @ y / 0.5).squeeze().numpy().round(6)  # where x is sent: tanh(2u/eps)
        array([-0.761594,  0.761594])
    """

    def __init__(self, linearized: LinearizedPlan) -> None:
        problem = linearized.problem
        self.linearized, self._partner = linearized, linearized.swap  # a swap holds its origin weakly
        self.batch_shape = problem.batch_shape
        self.dtype, self.device = problem.dtype, problem.device
        self.rows, self.cols = int(linearized.x.shape[1]), int(linearized.y.shape[1])

    def _matmat(self, v: Tensor) -> Tensor:
        return self.linearized.plan.apply(v, 1)

    @property
    def mT(self) -> TransportPlan:  # noqa: N802
        """The transposed plan."""
        return TransportPlan(self.linearized.swap)

    def apply(self, v: Any, axis: int = 1) -> Any:
        """`P v` for ``axis=1`` (summed over y), `P^T v` for ``axis=0``.

        Raises:
            ValueError: another axis.
        """
        if axis not in (0, 1):
            raise ValueError(f"axis must be 1 (sum over y) or 0 (sum over x), got {axis!r}")
        return (self if axis == 1 else self.mT) @ v

    def row_sums(self) -> Tensor:
        """`r = P 1` (*batch, n); one pass, cached."""
        return self.linearized.rows()[0].reshape(*self.batch_shape, self.rows)

    def col_sums(self) -> Tensor:
        """`c = P^T 1` (*batch, m); one pass, cached."""
        return self.linearized.columns()[0].reshape(*self.batch_shape, self.cols)

    def barycentric_map(self) -> Tensor:
        """`(P y)_i / r_i` of the clouds (*batch, n, d): the entropic map; 0 at atoms of zero mass.

        Example:
            >>> import torch, ot_newton as otn
            >>> x, y = torch.tensor([[-0.5], [0.5]]).double(), torch.tensor([[-1.0], [1.0]]).double()
            >>> otn.sinkhorn(otn.OTProblem(x, y, eps=1.0)).plan.barycentric_map().squeeze().numpy().round(6)
            array([-0.761594,  0.761594])
        """
        r, py = self.linearized.rows()
        out = py * safe_inverse(r)[:, :, None] + self._mean_y()[:, None, :] * (r > 0)[:, :, None]
        return out.reshape(*self.batch_shape, self.rows, -1)

    def _mean_y(self) -> Tensor:
        problem = self.linearized.problem
        cloud = problem.x if self.linearized.swapped else problem.y
        flat = cloud.expand(*self.batch_shape, *cloud.shape[-2:]).reshape(-1, *cloud.shape[-2:])
        return (flat - self.linearized.y)[:, 0]

    def diagonal(self) -> Tensor:
        """`P_ii` (*batch, min(n,m)); by a product with the identity's columns in blocks."""
        return self.to_dense().diagonal(dim1=-2, dim2=-1)

    def to_dense(self) -> Tensor:
        """The (*batch, n, m) matrix; O(nm) memory."""
        return self.linearized.plan.to_dense().reshape(self.shape).clone()
