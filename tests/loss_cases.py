"""The losses as tests call them: leaves of a case, tight solves, dense derivatives by autograd."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ot_newton as otn
from ot_newton.stage import noise_floor
from tests.generators import Case
from tests.helpers import problem_of
from tests.tolerances import to_numpy

__all__ = ["RELAXATIONS", "autograd_hessian", "leaves", "log_weights", "loss_of", "reweighted"]

RELAXATIONS = [(None, None), (0.7, None), (None, 1.3), (0.7, 1.3)]


def leaves(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, y, a, b as leaves that require gradients."""
    return [torch.tensor(np.asarray(t), dtype=dtype).requires_grad_() for t in case.arrays]


def loss_of(
    case: Case, debias: bool = False, dtype: torch.dtype = torch.float64, **options: Any
) -> otn.SinkhornLoss:
    """The loss of a case, solved to near rounding, every call alone."""
    options.setdefault("tol", max(1e-13, 4 * noise_floor(problem_of(case, dtype))))
    options.setdefault("max_iter", 200_000)
    options.setdefault("warm_start", False)
    return otn.SinkhornLoss(case.eps, debias, case.cost_scale, rho_x=case.rho_x, rho_y=case.rho_y, **options)


def autograd_hessian(loss: Any, x: Tensor, y: Tensor, a: Any = None, b: Any = None) -> np.ndarray:
    """The joint Hessian in (x, y), by one double backward with a block of vectors."""
    args = (x, y) if a is None else (a, x, b, y)
    gradients = torch.autograd.grad(loss(*args), (x, y), create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in gradients])
    rows = torch.autograd.grad(flat, (x, y), torch.eye(flat.numel(), dtype=flat.dtype), is_grads_batched=True)
    return to_numpy(torch.cat([r.flatten(1) for r in rows], 1))


def log_weights(case: Case) -> list[Tensor]:
    """log a, log b as leaves."""
    return [torch.tensor(np.log(w)).requires_grad_() for w in (case.a, case.b)]  # type: ignore[call-overload]


def reweighted(loss: otn.SinkhornLoss, case: Case) -> Any:
    """The loss as a function of x, y and log-weights that keeps the masses where they have to agree."""
    balanced = case.rho_x is None and case.rho_y is None

    def weight(log: Tensor) -> Tensor:
        return log.softmax(-1) if balanced else (log + math.log(1.1)).exp()

    return lambda x, y, la, lb: loss(weight(la), x, weight(lb), y)
