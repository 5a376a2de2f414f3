"""Small bridges between the test problems in float64 numpy and the public API."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import ot_newton as otn
from ot_newton.stage import noise_floor
from tests.generators import Case

__all__ = ["BACKENDS", "dense_hessian", "problem_of", "rounded", "solve", "tight"]

BACKENDS = ("dense", "torch_tiles", "cpu")


def problem_of(case: Case, dtype: torch.dtype = torch.float64) -> otn.OTProblem:
    """The case as a validated problem in a dtype."""
    arrays = [None if t is None else torch.tensor(t, dtype=dtype) for t in case.arrays]
    return otn.OTProblem(*arrays, **case.options)


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """The case as the dtype sees it, back in float64: the weights scaled to one mass again."""
    x, y, a, b = (None if t is None else torch.tensor(t, dtype=dtype).double().numpy() for t in case.arrays)
    if a is not None and b is not None and case.rho_x is None and case.rho_y is None:
        b = b * (a.sum() / b.sum())
    return case.with_(x=x, y=y, a=a, b=b)


def tight(problem: otn.OTProblem) -> float:
    """The rounding floor itself, the smallest tolerance there is."""
    return noise_floor(problem)


def solve(case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Solve near the rounding floor and insist on convergence."""
    problem = problem_of(case, dtype)
    options.setdefault("tol", tight(problem))
    options.setdefault("max_iter", 200_000)
    result = otn.sinkhorn(problem, **options)
    assert result.converged, f"{case}: {result.status}, marginal error {result.marginal_error}"
    return result


def dense_hessian(result: Any, wrt: str = "x", **options: Any) -> np.ndarray:
    """The Hessian as a matrix, from one block product with the identity."""
    h = result.hessian(wrt, **options)
    identity = torch.eye(h.shape[-1], dtype=h.dtype)
    product: Tensor = h @ identity
    return product.double().numpy()
