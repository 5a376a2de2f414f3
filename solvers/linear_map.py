"""One view of every symmetric operator a solver may be given: flat torch vectors in and out.

Accepted: a torch matrix (dense or sparse), a numpy or scipy matrix, a scipy `LinearOperator`, any object
with `.shape` and `@`, or a function of one vector together with ``n=``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.errors import check_integer

__all__ = ["LinearMap", "as_linear_map", "random_start"]


class LinearMap:
    """A symmetric operator on vectors `(N,)` and blocks `(N, k)`; it counts its products.

    Attributes:
        n: the dimension N.
        dtype: dtype of vectors in and out.
        device: where vectors live.
        n_products: products so far; a block of k columns counts k.
    """

    def __init__(
        self,
        n: int,
        matmul: Callable[[Tensor], Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        takes_blocks: bool,
    ) -> None:
        self.n, self.dtype, self.device = n, dtype, device
        self._matmul, self._takes_blocks = matmul, takes_blocks
        self.n_products = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(N, N)."""
        return (self.n, self.n)

    def __matmul__(self, v: Tensor) -> Tensor:
        if v.ndim not in (1, 2) or v.shape[0] != self.n:
            raise ValueError(f"v must have shape ({self.n},) or ({self.n}, k), got {tuple(v.shape)}")
        self.n_products += 1 if v.ndim == 1 else v.shape[1]
        with torch.no_grad():
            if v.ndim == 1 or self._takes_blocks:
                out = self._matmul(v)
            else:
                columns = [self._matmul(v[:, j]).reshape(-1) for j in range(v.shape[1])]
                out = torch.stack(columns, 1) if columns else v.clone()
        if out.numel() != v.numel():
            raise ValueError(f"op must map {tuple(v.shape)} to the same shape, got {tuple(out.shape)}")
        return out.reshape(v.shape).to(dtype=self.dtype, device=self.device)

    def negated(self) -> LinearMap:
        """The map `-H`; its products count here too."""
        return LinearMap(
            self.n, lambda v: -(self @ v), dtype=self.dtype, device=self.device, takes_blocks=True
        )


def as_linear_map(
    op: Any,
    *,
    n: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> LinearMap:
    """Wrap ``op`` as a `LinearMap`; makes no product.

    Args:
        op: see the module's docstring.
        n: dimension, needed for a function and checked otherwise.
        dtype: dtype of vectors; the operator's own, else float64.
        device: device of vectors; the operator's own, else the CPU.

    Raises:
        TypeError: not an operator, or not real floating point.
        ValueError: not square, batched, empty, or a dimension that differs from ``n``.

    Example:
        >>> import torch
        >>> view = as_linear_map(lambda v: 2 * v, n=3)
        >>> (view @ torch.ones(3, 4, dtype=torch.float64)).shape, view.n_products
        (torch.Size([3, 4]), 4)
    """
    if isinstance(op, LinearMap):
        return op
    shape = getattr(op, "shape", None)
    if shape is None and not callable(op):
        raise TypeError(f"op must have .shape and @, or be a function with n=, got {type(op).__name__}")
    size = check_integer("n", n, low=1) if n is not None else None
    if shape is not None and hasattr(type(op), "__matmul__"):
        found = tuple(int(s) for s in shape)
        if len(found) != 2 or found[0] != found[1] or found[0] < 1:
            raise ValueError(f"op must be one square operator (N, N), N >= 1, got shape {found}")
        if size is not None and size != found[0]:
            raise ValueError(f"n must equal the operator's dimension {found[0]}, got {size}")
        return _from_matrix(op, found[0], dtype, device)
    if size is None:
        raise ValueError("n must be given with a function: as_linear_map(op, n=N)")
    return LinearMap(
        size,
        lambda v: torch.as_tensor(op(v)),
        dtype=_floating(dtype or torch.float64),
        device=torch.device(device or "cpu"),
        takes_blocks=False,
    )


def _from_matrix(op: Any, n: int, dtype: torch.dtype | None, device: torch.device | str | None) -> LinearMap:
    own = getattr(op, "dtype", None)
    if own is not None and not isinstance(own, torch.dtype):
        number = np.dtype(own)
        if number.kind not in "fiu":
            raise TypeError(f"op must be real, got dtype {number}")
        kind = torch.float32 if number == np.float32 else torch.float64

        def through_numpy(v: Tensor) -> Tensor:
            # A copy: numpy operators may keep or overwrite what they are given.
            return torch.from_numpy(np.array(op @ v.detach().cpu().numpy().copy(), dtype=number, copy=True))

        return LinearMap(
            n, through_numpy, dtype=dtype or kind, device=torch.device(device or "cpu"), takes_blocks=True
        )
    where = torch.device(device) if device is not None else torch.device(getattr(op, "device", None) or "cpu")
    if isinstance(op, Tensor) and not op.is_floating_point() and not op.is_complex():
        op = op.to(torch.float64)
        own = torch.float64
    kind = _floating(dtype or own or torch.float64)
    inner = own if isinstance(own, torch.dtype) else kind
    return LinearMap(n, lambda v: op @ v.to(inner), dtype=kind, device=where, takes_blocks=True)


def _floating(dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    return dtype


def random_start(n: int, seed: int, stream: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A unit Gaussian start `(N,)`, from a generator of its own.

    ``seed`` and ``stream`` together choose the generator, so that two streams are independent and the
    global generator is never touched. Drawn on the CPU: the same on every device.
    """
    generator = torch.Generator(device="cpu")
    generator.manual_seed((seed * 1_000_003 + stream * 7_919 + 12_345) % (2**63 - 1))
    start = torch.randn(n, generator=generator, dtype=torch.float64)
    start /= start.norm()
    return start.to(dtype=dtype, device=device)
