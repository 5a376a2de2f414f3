"""Shapes in, shapes out: what every operator of a plan shares.

An operator maps vectors (N,), blocks (N,k) or, where a vector is a cloud, (n,d); a batch of operators
takes the batch dimensions in front. Torch tensors stay on their device and numpy arrays come back as
numpy arrays. Inputs are never written or kept. Derivatives in the vector are exact (the operator is
linear); the operator itself is constant.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from linear_operator import LinearOperator as TorchLinearOperator
    from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator

__all__ = ["PlanOperator", "to_tensor"]

DENSE_BLOCK = 64


class _Apply(torch.autograd.Function):
    """`op @ v` with its exact derivative in v."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, op: PlanOperator) -> Tensor:
        """Product with (B,N,k)."""
        ctx.op = op
        return op._matmat(v.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Product with the transpose."""
        return _Apply.apply(grads[0], ctx.op.mT), None  # type: ignore[no-untyped-call]


def to_tensor(v: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a numpy array of any order, stride, dtype and writability; a copy, never a view."""
    if isinstance(v, Tensor):
        if v.device != device:
            raise ValueError(f"vector is on device {v.device}, the operator on {device}: move one of them")
        if v.is_complex():
            raise TypeError(f"vector must be real, got {v.dtype}")
        return v.to(dtype)
    array = np.asarray(v)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"vector must be real numbers, got dtype {array.dtype}")
    array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.from_numpy(array).to(dtype=dtype, device=device)


class PlanOperator:
    """Base of TransportPlan, SchurComplement and HessianOperator.

    Subclasses set ``shape``, ``batch_shape``, ``dtype``, ``device`` and implement `_matmat` on
    (B,N,k) and `mT`; those whose vectors are clouds set ``_cloud``.
    """

    __array_ufunc__ = None  # so that ndarray @ op reaches __rmatmul__

    batch_shape: torch.Size
    rows: int
    cols: int
    dtype: torch.dtype
    device: torch.device
    _cloud: tuple[int, int] | None = None

    def _matmat(self, v: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def mT(self) -> PlanOperator:  # noqa: N802
        """The transpose (of every lane)."""
        raise NotImplementedError

    @property
    def T(self) -> PlanOperator:  # noqa: N802
        """The transpose; for a batch, that of every lane, as ``mT``."""
        return self.mT

    @property
    def shape(self) -> torch.Size:
        """(*batch, rows, cols)."""
        return torch.Size((*self.batch_shape, self.rows, self.cols))

    def size(self, dim: int | None = None) -> int | torch.Size:
        """As a tensor's ``size``."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        """First dimension, as of a tensor."""
        return int(self.shape[0])

    def __repr__(self) -> str:
        """Class, shape, dtype."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({'x'.join(map(str, self.shape))}, {kind}, {self.device})"

    def _shape_error(self, shape: tuple[int, ...]) -> ValueError:
        lead = "".join(f"{k}, " for k in self.batch_shape)
        allowed = [f"({lead}{self.cols})", f"({lead}{self.cols}, k)"]
        if self._cloud is not None:
            allowed.append(f"({lead}{self._cloud[0]}, {self._cloud[1]})")
        return ValueError(f"vector must have shape {' or '.join(allowed)}, got {tuple(shape)}")

    def _to_block(self, v: Tensor) -> tuple[Tensor, str]:
        """(B,N,k) of an accepted shape, and which it was: vector, block or cloud."""
        lead = len(self.batch_shape)
        if v.shape[:lead] != self.batch_shape or v.dim() - lead not in (1, 2):
            raise self._shape_error(tuple(v.shape))
        own = tuple(v.shape[lead:])
        lanes = self.batch_shape.numel()
        if own == (self.cols,):
            return v.reshape(lanes, self.cols, 1), "vector"
        if len(own) == 2 and own[0] == self.cols:
            return v.reshape(lanes, *own), "block"
        if self._cloud is not None and own == self._cloud:
            return v.reshape(lanes, self.cols, 1), "cloud"
        raise self._shape_error(tuple(v.shape))

    def _from_block(self, out: Tensor, kind: str) -> Tensor:
        if kind == "cloud" and self._cloud is not None:
            return out.reshape(*self.batch_shape, *self._cloud)
        if kind == "vector":
            return out.reshape(*self.batch_shape, self.rows)
        return out.reshape(*self.batch_shape, self.rows, out.shape[-1])

    def __matmul__(self, v: Any) -> Any:
        """Product with a vector, a block or a cloud; numpy in, numpy out.

        Raises:
            TypeError: not real numbers.
            ValueError: wrong shape or device.
        """
        numpy = isinstance(v, np.ndarray)
        block, kind = self._to_block(to_tensor(v, self.dtype, self.device))
        if block.shape[-1] == 0:
            out = block.new_zeros(block.shape[0], self.rows, 0)
        elif block.requires_grad and torch.is_grad_enabled():
            out = _Apply.apply(block, self)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                out = self._matmat(block.detach())
        result = self._from_block(out, kind)
        return result.cpu().numpy() if numpy else result

    def __rmatmul__(self, v: Any) -> Any:
        """`v @ op` for a vector (N,) or rows (k,N)."""
        if self.batch_shape:
            raise TypeError("v @ op is defined for a single operator: use op.mT @ v for a batch")
        if not hasattr(v, "ndim"):
            return NotImplemented
        if v.ndim == 1:
            return self.mT @ v
        out = self.mT @ v.T
        return out.T

    def matvec(self, v: Any) -> Any:
        """Alias of ``@``."""
        return self @ v

    def matmat(self, v: Any) -> Any:
        """Alias of ``@``."""
        return self @ v

    def to_dense(self) -> Tensor:
        """The matrix, by block products of the identity; for tests and small problems."""
        eye = torch.eye(self.cols, dtype=self.dtype, device=self.device)
        shape = (*self.batch_shape, self.cols)
        parts = [
            self @ eye[:, k : k + DENSE_BLOCK].expand(*shape, -1) for k in range(0, self.cols, DENSE_BLOCK)
        ]
        return torch.cat(parts, dim=-1)

    @property
    def matrix(self) -> Tensor:
        """Alias of ``to_dense()``."""
        return self.to_dense()

    def to_scipy(self) -> ScipyLinearOperator:
        """This operator as a `scipy.sparse.linalg.LinearOperator`; no product is made here.

        Its dtype is the compute dtype; on a GPU each product copies the vector once each way.

        Raises:
            TypeError: a batch; take one lane, ``result[i]``.
        """
        if self.batch_shape:
            raise TypeError("scipy has no batched operators: take one lane, result[i], first")
        from ot_newton.operators.scipy_adapter import ScipyPlanOperator

        return ScipyPlanOperator(self)

    def to_linear_operator(self) -> TorchLinearOperator:
        """This operator as a `linear_operator.LinearOperator`; no copy and no product is made here."""
        from ot_newton.operators.linop_adapter import wrap

        return wrap(self)


def warn_unconverged(what: str, residual: float, rtol: float, steps: int) -> None:
    """One warning for an inner solve that did not meet its tolerance."""
    from ot_newton.errors import ConvergenceWarning

    warnings.warn(
        f"{what}: inner Schur solve ended at relative residual {residual:.1e} after {steps} CG steps, "
        f"tolerance {rtol:.0e}; raise max_cg, loosen rtol or use float64",
        ConvergenceWarning,
        stacklevel=4,
    )
