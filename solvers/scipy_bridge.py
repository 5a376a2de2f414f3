"""scipy.optimize on our counted losses: `minimize(p.fun, x0, jac=p.jac, hessp=p, method="trust-krylov")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ot_newton.solvers.objective import Objective, Point, as_start

__all__ = ["ScipyProblem", "scipy_hessp"]

Vector = NDArray[np.float64]


class ScipyProblem:
    """A loss as scipy's `fun`, `jac` and `hessp` on flat float64 arrays; each point is evaluated once.

    Attributes:
        objective: the counted loss: n_fun, n_grad, n_hvp.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._key: bytes | None = None
        self._point: Point | None = None

    def _at(self, x: Vector) -> Point:
        # A copy: scipy reuses the buffers it passes.
        flat = np.array(x, dtype=np.float64).reshape(-1)
        key = flat.tobytes()
        if self._point is None or key != self._key:
            self._key, self._point = key, self.objective.at(self._tensor(flat))
        return self._point

    def _tensor(self, x: Vector) -> Tensor:
        flat = torch.from_numpy(np.array(x, dtype=np.float64).reshape(-1))
        return flat.to(dtype=self.objective.dtype, device=self.objective.device)

    def fun(self, x: Vector) -> float:
        """f(x)."""
        return self._at(x).value

    def jac(self, x: Vector) -> Vector:
        """Gradient (N,)."""
        return np.asarray(self._at(x).grad.to("cpu", torch.float64)).copy()

    def __call__(self, x: Vector, p: Vector) -> Vector:
        """`H(x) p`, (N,)."""
        return np.asarray((self._at(x).hessian @ self._tensor(p)).to("cpu", torch.float64)).copy()


def scipy_hessp(
    loss: Any,
    like: Any,
    *,
    hvp: str | Callable[[Tensor, Tensor], Any] = "autograd",
    hess: Callable[[Tensor], Any] | None = None,
) -> ScipyProblem:
    """Wrap a loss for `scipy.optimize.minimize`; the result is `hessp`, its `fun` and `jac` the rest.

    Args:
        loss: as for `NewtonCG`.
        like: a tensor or array with the shape, dtype and device the loss expects.
        hvp: as for `NewtonCG`.
        hess: as for `NewtonCG`.

    Raises:
        TypeError: a bad loss.
    """
    return ScipyProblem(Objective(loss, as_start(like), hvp=hvp, hess=hess))
