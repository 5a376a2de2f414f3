"""Operators of a plan as `scipy.sparse.linalg.LinearOperator`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator

if TYPE_CHECKING:
    from ot_newton.operators.base import PlanOperator

__all__ = ["ScipyPlanOperator"]


class ScipyPlanOperator(LinearOperator):
    """One unbatched operator behind scipy's interface.

    Vectors of any real dtype, order and stride are copied to the compute dtype, which is also the
    declared one; the buffer handed in is neither kept nor written. Blocks are one block product.

    Args:
        operator: the operator; kept in the attribute ``operator``.
    """

    def __init__(self, operator: PlanOperator) -> None:
        self.operator = operator
        name = str(operator.dtype).removeprefix("torch.")
        super().__init__(np.dtype(name), (operator.rows, operator.cols))  # type: ignore[call-arg]

    def _product(self, operator: PlanOperator, v: NDArray[np.generic]) -> NDArray[np.generic]:
        array = np.array(v, order="C", copy=True)
        out = operator @ (array if operator.device.type == "cpu" else _to_device(array, operator))
        return out if isinstance(out, np.ndarray) else out.cpu().numpy()

    def _matvec(self, v: NDArray[np.generic]) -> NDArray[np.generic]:
        return self._product(self.operator, np.ravel(v))

    def _matmat(self, v: NDArray[np.generic]) -> NDArray[np.generic]:
        return self._product(self.operator, v)

    def _rmatvec(self, v: NDArray[np.generic]) -> NDArray[np.generic]:
        return self._product(self.operator.mT, np.ravel(v))

    def _rmatmat(self, v: NDArray[np.generic]) -> NDArray[np.generic]:
        return self._product(self.operator.mT, v)

    def _adjoint(self) -> ScipyPlanOperator:
        transposed = self.operator.mT
        return self if transposed is self.operator else ScipyPlanOperator(transposed)

    def _transpose(self) -> ScipyPlanOperator:
        return self._adjoint()


def _to_device(array: NDArray[np.generic], operator: PlanOperator) -> torch.Tensor:
    """One copy to the operator's device."""
    return torch.from_numpy(array).to(device=operator.device, dtype=operator.dtype)
