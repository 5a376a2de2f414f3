"""Which backend runs: a pure table of device, dtype and size; an explicit name is never overridden."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from ot_newton.backends.triton_kernels.configs import PRECISIONS
from ot_newton.errors import check_choice
from ot_newton.protocols import PlanBackend

__all__ = ["BACKENDS", "DENSE_ENTRIES", "NAMES", "choose_backend", "get_backend"]

BACKENDS = {
    "dense": ("ot_newton.backends.dense", "DenseBackend"),
    "torch_tiles": ("ot_newton.backends.torch_tiles", "TorchTilesBackend"),
    "cpu": ("ot_newton.backends.cpu", "CpuBackend"),
    "triton": ("ot_newton.backends.triton_kernels.launch", "TritonBackend"),
}

NAMES = (*BACKENDS, *(f"triton:{precision}" for precision in PRECISIONS[1:]))
"""What a caller may ask for: a backend, or the triton one with a precision of the forward solve."""

DENSE_ENTRIES = 1 << 20
"""Largest n*m that "auto" stores: 8 MB in float64, where a stored kernel also allows a direct solve."""


def get_backend(name: str) -> PlanBackend:
    """The backend of that name; its module is imported now, not before.

    Raises:
        ValueError: unknown name, or a package that backend needs is missing.
    """
    base, _, precision = check_choice("backend", name, NAMES).partition(":")
    module, attribute = BACKENDS[base]
    if base == "triton" and importlib.util.find_spec("triton") is None:
        raise ValueError("backend 'triton' needs the package triton (Linux): install it or use 'torch_tiles'")
    make = getattr(importlib.import_module(module), attribute)
    backend: PlanBackend = make(precision) if precision else make()
    return backend


def _triton_runs(device: torch.device) -> bool:
    """Whether the kernels run there: an NVIDIA GPU of compute capability 8.0 or newer, triton installed."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    new_enough = torch.cuda.get_device_capability(device) >= (8, 0)
    return new_enough and importlib.util.find_spec("triton") is not None


def choose_backend(name: str, device: torch.device, n: int, m: int, lanes: int = 1) -> str:
    """Resolve "auto": dense for small problems, `cpu` on a CPU, `triton` on a GPU, `torch_tiles` elsewhere.

    Args:
        name: "auto" or a backend's name, returned as it is.
        device: where the clouds live.
        n: points in x.
        m: points in y.
        lanes: batch size.

    Raises:
        ValueError: unknown name, or a backend that does not run on that device.
    """
    check_choice("backend", name, ("auto", *NAMES))
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"backend 'cpu' runs on CPU tensors, got device {device}; use 'auto'")
    if name != "auto":
        return name
    if n * m * lanes <= DENSE_ENTRIES:
        return "dense"
    if device.type == "cpu":
        return "cpu"
    return "triton" if _triton_runs(device) else "torch_tiles"
