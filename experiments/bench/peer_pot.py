"""POT: the inner line of its kernel-matrix Sinkhorn, and Hessians through its torch backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ot_newton.experiments.bench.harness import Job

if TYPE_CHECKING:
    from ot_newton.experiments.bench.half_case import HalfCase

__all__ = ["half_iteration", "hessian"]


def half_iteration(case: HalfCase) -> Job:
    """`u = 1 / (diag(1/a) K v)`, as `ot.bregman.sinkhorn_knopp` writes it, through POT's numpy backend.

    It keeps the matrix `diag(1/a) K` in float32 and is not log-stable.
    """
    import ot
    from ot.backend import get_backend

    p = case.problem
    cost = ot.dist(p.x.numpy(), p.y.numpy()).astype(np.float32)
    a = np.full(p.n, 1.0 / p.n, np.float32)
    kernel = np.exp(cost / np.float32(-p.eps))
    scaled = (1 / a).reshape(-1, 1) * kernel
    v = np.exp(case.g.numpy().astype(np.float64) / p.eps + case.log_weight).astype(np.float32)
    nx = get_backend(scaled)
    return Job(
        lambda: 1.0 / nx.dot(scaled, v),
        lambda u: p.eps * np.log(u.astype(np.float64) / a),
    )


def hessian(x: Any, y: Any, eps: float, grad: str) -> Any:
    """`torch.autograd.functional.hessian` of `ot.solve_sample(...).value`, (nd, nd), float64.

    Args:
        x: (n,d) numpy.
        y: (m,d) numpy.
        eps: POT's reg, with the KL regularizer.
        grad: POT's derivative mode, "autodiff" or "envelope".
    """
    import ot

    target = torch.tensor(y)

    def value(cloud: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ot.solve_sample(cloud, target, reg=eps, reg_type="KL", grad=grad).value
        return out

    start = torch.tensor(x)
    matrix = torch.autograd.functional.hessian(value, start)  # type: ignore[no-untyped-call]
    return matrix.reshape(start.numel(), start.numel()).numpy()
