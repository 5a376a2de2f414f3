"""Which backend runs: a pure table of device, dtype and size; an explicit name is never overridden."""

from __future__ import annotations

import importlib

import torch

from ot_newton.errors import check_choice
from ot_newton.protocols import PlanBackend

__all__ = ["BACKENDS", "DENSE_ENTRIES", "choose_backend", "get_backend"]

BACKENDS = {
    "dense": ("ot_newton.backends.dense", "DenseBackend"),
    "torch_tiles": ("ot_newton.backends.torch_tiles", "TorchTilesBackend"),
    "cpu": ("ot_newton.backends.cpu", "CpuBackend"),
}

DENSE_ENTRIES = 1 << 20
"""Largest n*m that "auto" stores: 8 MB in float64, where a stored kernel also allows a direct solve."""


def get_backend(name: str) -> PlanBackend:
    """The backend of that name; its module is imported now, not before.

    Raises:
        ValueError: unknown name.
    """
    module, attribute = BACKENDS[check_choice("backend", name, tuple(BACKENDS))]
    backend: PlanBackend = getattr(importlib.import_module(module), attribute)()
    return backend


def choose_backend(name: str, device: torch.device, n: int, m: int, lanes: int = 1) -> str:
    """Resolve "auto": dense for small problems, `cpu` on a CPU, `torch_tiles` elsewhere.

    Args:
        name: "auto" or a backend's name, returned as it is.
        device: where the clouds live.
        n: points in x.
        m: points in y.
        lanes: batch size.

    Raises:
        ValueError: unknown name, or a backend that does not run on that device.
    """
    check_choice("backend", name, ("auto", *BACKENDS))
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"backend 'cpu' runs on CPU tensors, got device {device}; use 'auto'")
    if name != "auto":
        return name
    if n * m * lanes <= DENSE_ENTRIES:
        return "dense"
    return "cpu" if device.type == "cpu" else "torch_tiles"
