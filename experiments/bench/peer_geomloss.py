"""GeomLoss: the Hessian that its double backward gives."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["hessian"]


def hessian(x: Any, y: Any, eps: float) -> Any:
    """`torch.autograd.functional.hessian` of `SamplesLoss("sinkhorn", p=2)`, (nd, nd), float64.

    Args:
        x: (n,d) numpy.
        y: (m,d) numpy.
        eps: blur squared; the cost is half the squared distance.
    """
    from geomloss import SamplesLoss

    loss = SamplesLoss("sinkhorn", p=2, blur=eps**0.5, scaling=0.99, debias=False, backend="tensorized")
    target = torch.tensor(y)
    start = torch.tensor(x)
    matrix = torch.autograd.functional.hessian(lambda cloud: loss(cloud, target), start)  # type: ignore[no-untyped-call]
    return matrix.reshape(start.numel(), start.numel()).numpy()
