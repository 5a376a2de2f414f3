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

    Costs are those of the loss: an evaluation per new x, and one product per call of the object itself.

    Attributes:
        objective: the counted loss: n_fun, n_grad, n_hvp; None until the first call where no shape was given.
    """

    def __init__(self, bind: Callable[[Tensor], Objective], like: Tensor | None) -> None:
        self._bind = bind
        self.objective: Objective | None = None if like is None else bind(like)
        self._key: bytes | None = None
        self._point: Point | None = None

    def _at(self, x: Vector) -> Point:
        # A copy: scipy reuses the buffers it passes.
        flat = np.array(x, dtype=np.float64).reshape(-1)
        key = flat.tobytes()
        if self.objective is None:
            self.objective = self._bind(torch.from_numpy(flat))
        if flat.size != self.objective.n:
            raise ValueError(f"x must have {self.objective.n} numbers, got {flat.size}")
        if self._point is None or key != self._key:
            self._key, self._point = key, self.objective.at(_tensor(flat, self.objective))
        return self._point

    def fun(self, x: Vector) -> float:
        """f(x)."""
        return self._at(x).value

    def jac(self, x: Vector) -> Vector:
        """Gradient (N,)."""
        return np.asarray(self._at(x).grad.to("cpu", torch.float64)).copy()

    def __call__(self, x: Vector, p: Vector) -> Vector:
        """`H(x) p`, (N,)."""
        point = self._at(x)
        product = point.hessian @ _tensor(p, point.objective)
        return np.asarray(product.to("cpu", torch.float64)).copy()


def _tensor(x: Vector, objective: Objective) -> Tensor:
    flat = torch.from_numpy(np.array(x, dtype=np.float64).reshape(-1))
    return flat.to(dtype=objective.dtype, device=objective.device)


def scipy_hessp(
    loss: Any,
    like: Any = None,
    *,
    hvp: str | Callable[[Tensor, Tensor], Any] = "autograd",
    hess: Callable[[Tensor], Any] | None = None,
) -> ScipyProblem:
    """Wrap a loss for `scipy.optimize.minimize`; the result is `hessp`, its `fun` and `jac` the rest.

    Args:
        loss: as for `NewtonCG`.
        like: a tensor or array with the shape, dtype and device the loss expects; a flat float64 vector
            of scipy's length if None.
        hvp: as for `NewtonCG`.
        hess: as for `NewtonCG`.

    Returns:
        A `ScipyProblem`. A Hessian given as an operator is refused by trust-ncg and trust-krylov
        (scipy 1.17); products are what all of its Newton methods take.

    Raises:
        TypeError: a bad loss; ValueError: another length of x than that of ``like``.

    Example:
        >>> from scipy.optimize import minimize
        >>> problem = scipy_hessp(lambda x: (x**4).sum() + ((x - 1) ** 2).sum())
        >>> found = minimize(problem.fun, [2.0, -1.0], jac=problem.jac, hessp=problem, method="trust-krylov")
        >>> bool(found.success), problem.objective.n_hvp > 0
        (True, True)
    """

    def bind(at: Tensor) -> Objective:
        return Objective(loss, at, hvp=hvp, hess=hess)

    # Validates loss and hvp now rather than in scipy's first call.
    bind(torch.zeros(1, dtype=torch.float64))
    return ScipyProblem(bind, None if like is None else as_start(like))
