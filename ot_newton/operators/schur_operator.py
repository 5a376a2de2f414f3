"""The Schur complement of the dual Hessian as an operator (MATH 5)."""

from __future__ import annotations

from torch import Tensor

from ot_newton.hessian import LinearizedPlan
from ot_newton.operators.base import PlanOperator

__all__ = ["SchurComplement"]


class SchurComplement(PlanOperator):
    """`S = D_c k_y - P^T (D_r k_x)^-1 P` (m x m), or its mirror on the x side (n x n).

    Positive semidefinite; both sides hard: `S 1 = 0` (normalized: `S^ sqrt(c) = 0`). Two passes per
    product, whatever the number of columns.

    Args:
        linearized: the plan with its caches (swapped for the x side).
        side: "y" or "x", for the repr.
        normalized: `I - K^T K` with eigenvalues in [0, 1] (hard sides) in place of S.

    Example:
        >>> import torch, ot_newton as otn
        >>> x, y = torch.tensor([[-0.5], [0.5]]).double(), torch.tensor([[-1.0], [1.0]]).double()
        >>> S = otn.sinkhorn(otn.OTProblem(x, y, eps=1.0)).schur()
        >>> S, (torch.linalg.eigvalsh(S.to_dense()).numpy().round(6) + 0.0).tolist()
        (SchurComplement(2x2, float64, cpu), [0.0, 0.209987])
        >>> S.null_vector().numpy().round(6)
        array([0.707107, 0.707107])
    """

    def __init__(self, linearized: LinearizedPlan, *, side: str, normalized: bool) -> None:
        problem = linearized.problem
        self.linearized, self.side, self.normalized = linearized, side, normalized
        self._partner = linearized.swap  # a swap holds its origin weakly
        self.batch_shape = problem.batch_shape
        self.dtype, self.device = problem.dtype, problem.device
        self.rows = self.cols = int(linearized.y.shape[1])

    def _matmat(self, v: Tensor) -> Tensor:
        system = self.linearized.system()
        return system.normalized_matmat(v) if self.normalized else system.matmat(v)

    @property
    def mT(self) -> SchurComplement:  # noqa: N802
        """Itself: symmetric."""
        return self

    def null_vector(self) -> Tensor | None:
        """(*batch, N) exact null vector, of norm one; None when a side is relaxed."""
        system = self.linearized.system()
        if not system.balanced:
            return None
        null = system.null if self.normalized else (system.half_inverse > 0).to(self.dtype)
        null = null / null.square().sum(1, keepdim=True).sqrt()
        return null.reshape(*self.batch_shape, self.cols)

    def diagonal(self) -> Tensor:
        """(*batch, N), by products with the identity."""
        return self.to_dense().diagonal(dim1=-2, dim2=-1)
