"""What linear_operator's base class lacks for indefinite operators: signs, honest solves, no silent gradient.

`linear_operator` 0.6 assumes covariance matrices: it clamps eigenvalues at 0, solves by a Cholesky factor
with jitter or by a CG that stops at a relative residual of 1 without a word, and detaches what it cannot
differentiate. `IndefiniteOperator` replaces those parts. It also covers the sums and the slices that an
operator of ours makes (`H + A`, `H[:3, :3]`). What a *plain* linear_operator object makes of ours stays
plain and clamps its eigenvalues: `A + H` with `A` on the left, `H.sum(0)` over a batch, Kronecker products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from linear_operator import LinearOperator, settings
from linear_operator.operators import (
    DenseLinearOperator,
    DiagLinearOperator,
    InterpolatedLinearOperator,
    SumLinearOperator,
    ZeroLinearOperator,
)
from torch import Tensor

from ot_newton.errors import LinearSolveError
from ot_newton.solvers.cg import CGReason, conjugate_gradient

__all__ = ["IndefiniteOperator", "IndefiniteSum", "SlicedOperator", "broadcast", "constant"]

DENSE_SOLVE = 2000
"""Largest N that is solved by a dense eigenvalue or singular value decomposition."""

SOLVE_RTOL = {torch.float32: 1e-4, torch.float64: 1e-8}
ASYMMETRY = {torch.float32: 1e-3, torch.float64: 1e-6}
CUTOFF = 8.0
MAX_CG = 5000

CONSTANT = (
    "the operator is a constant: derivatives in the tensors it was made of (points, weights, potentials) "
    "are not available here, those in the right-hand side are exact; differentiate ot_newton.ot_cost instead"
)


def broadcast(*shapes: torch.Size) -> torch.Size:
    """The broadcast shape; RuntimeError where there is none, as in torch."""
    return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


class _Constant(torch.autograd.Function):
    """A value made of an operator's tensors, whose derivative in them raises."""

    @staticmethod
    def forward(ctx: Any, build: Callable[[], Tensor], *tensors: Tensor) -> Tensor:
        """The value."""
        return build()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        """Never silent."""
        raise NotImplementedError(CONSTANT)


def constant(build: Callable[[], Tensor], *tensors: Tensor) -> Tensor:
    """``build()``, with a derivative in ``tensors`` that raises instead of being silently absent."""
    out: Tensor = _Constant.apply(build, *tensors)  # type: ignore[no-untyped-call]
    return out


class _Solve(torch.autograd.Function):
    """`A^-1 b` with its exact derivative in b, of any order."""

    @staticmethod
    def forward(ctx: Any, rhs: Tensor, operator: IndefiniteOperator, *tensors: Tensor) -> Tensor:
        """The checked solution."""
        ctx.operator = operator
        return operator._solve_checked(rhs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """A solve with the transpose."""
        if any(ctx.needs_input_grad[2:]):
            raise NotImplementedError(CONSTANT)
        flipped = ctx.operator.mT
        out = _Solve.apply(grads[0], flipped, *flipped.representation())  # type: ignore[no-untyped-call]
        return (out, *(None for _ in ctx.needs_input_grad[1:]))


def _refused(name: str, instead: str) -> Callable[..., Any]:
    """A method that raises: linear_operator's needs a positive definite matrix and fails silently else."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__}.{name} needs a positive definite matrix, which this operator "
            f"need not be; use {instead}"
        )

    method.__name__ = name
    method.__doc__ = f"Raises NotImplementedError; use {instead}."
    return method


class IndefiniteOperator(LinearOperator):  # type: ignore[misc]
    """A `LinearOperator` that may be indefinite or singular.

    Eigenvalues keep their sign (`torch.linalg.eigvalsh`, `eigh`, `diagonalization`). `solve` meets its
    tolerance or raises `LinearSolveError`. What needs positive definiteness raises NotImplementedError.
    """

    _symmetric = False

    def __repr__(self) -> str:
        """Class, shape, dtype, device."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({'x'.join(map(str, self.shape))}, {kind}, {self.device})"

    # Dtype and device -----------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> IndefiniteOperator:
        """As `torch.Tensor.to`: dtype, device (a string too) or another tensor.

        Raises:
            TypeError: a dtype other than float32 and float64.
        """
        given = {name: value for name, value in kwargs.items() if value is not None}
        probe = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **given)
        if probe.dtype not in SOLVE_RTOL:
            raise TypeError(f"dtype must be torch.float32 or torch.float64, got {probe.dtype}")
        return self._moved(probe.dtype, probe.device)

    def type(self, dtype: torch.dtype) -> IndefiniteOperator:
        """As ``to(dtype)``."""
        return self.to(dtype=dtype)

    def _moved(self, dtype: torch.dtype, device: torch.device) -> IndefiniteOperator:
        whole: list[Any] = []
        for arg in self._args:
            floating = not isinstance(arg, Tensor) or arg.is_floating_point()
            whole.append(arg.to(dtype=dtype, device=device) if floating else arg.to(device=device))
        out: IndefiniteOperator = self.__class__(*whole, **self._kwargs)
        return out

    # Sums, products, slices -----------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        """A sum that keeps the signs of its eigenvalues."""
        if isinstance(other, ZeroLinearOperator) or (isinstance(other, (int, float)) and other == 0):
            return self
        if isinstance(other, Tensor):
            shape = broadcast(self.shape, other.shape)
            other = DenseLinearOperator(other.expand(*shape[:-2], *self.matrix_shape))
        if not isinstance(other, LinearOperator):
            raise TypeError(f"other must be a tensor or a LinearOperator, got {type(other).__name__}")
        terms = [t for side in (self, other) for t in getattr(side, "linear_ops", (side,))]
        return IndefiniteSum(*terms)

    def __neg__(self) -> Any:
        return self.mul(-1.0)

    def add_diagonal(self, diag: Tensor) -> Any:
        """`A + diag(d)`, d of shape (..., N), (..., 1) or ()."""
        if not self.is_square:
            raise ValueError(f"add_diagonal needs a square operator, got shape {tuple(self.shape)}")
        return self + DiagLinearOperator(diag.expand(self.shape[:-1]))

    def _mul_matrix(self, other: Any) -> Any:
        return DenseLinearOperator(self.to_dense() * other.to_dense())

    def _prod_batch(self, dim: int) -> Any:
        return DenseLinearOperator(self.to_dense().prod(dim))

    def _approx_diagonal(self) -> Tensor:
        out: Tensor = self._diagonal()
        return out

    # Spectra --------------------------------------------------------------------------------------

    def _symmetric_dense(self) -> Tensor:
        """The matrix, symmetrized; raises if it is not symmetric."""
        if not self.is_square:
            raise ValueError(f"eigenvalues need a square operator, got shape {tuple(self.shape)}")
        dense: Tensor = self.to_dense()
        if not self._symmetric:
            off = float((dense - dense.mT).detach().abs().max())
            limit = ASYMMETRY[dense.dtype] + CUTOFF * self._relative_noise
            if not off <= limit * float(dense.detach().abs().max()):
                raise ValueError(f"eigenvalues need a symmetric operator, got an asymmetry of {off:.1e}")
        return (dense + dense.mT) / 2

    def _symeig(
        self, eigenvectors: bool = False, return_evals_as_lazy: bool | None = False
    ) -> tuple[Any, Any]:
        """Ascending eigenvalues with their signs, and eigenvectors; a dense O(N^3) decomposition."""
        work = self._symmetric_dense().to(settings._linalg_dtype_symeig.value())
        if not eigenvectors:
            return torch.linalg.eigvalsh(work).to(self.dtype), None
        values, vectors = torch.linalg.eigh(work)
        return values.to(self.dtype), DenseLinearOperator(vectors.to(self.dtype))

    def _svd(self) -> tuple[Any, Tensor, Any]:
        left, values, right = torch.linalg.svd(self.to_dense(), full_matrices=False)
        return DenseLinearOperator(left), values, DenseLinearOperator(right.mT)

    def diagonalization(self, method: str | None = None) -> tuple[Any, Any]:
        """All eigenpairs. linear_operator's Lanczos drops negative ones: see `ot_newton.lanczos` for that.

        Raises:
            NotImplementedError: another ``method`` than None or "symeig".
        """
        if method not in (None, "symeig"):
            raise NotImplementedError(f"method must be 'symeig', got {method!r}; use ot_newton.lanczos")
        return self._symeig(eigenvectors=True)

    # Solves ---------------------------------------------------------------------------------------

    @property
    def _solve_rtol(self) -> float:
        return SOLVE_RTOL[self.dtype]

    @property
    def _relative_noise(self) -> float:
        """Error of a product; eigenvalues below it times the largest are zero to a pseudo-inverse."""
        rounding = CUTOFF * math.sqrt(self.shape[-1]) * torch.finfo(self.dtype).eps
        parts = [arg._relative_noise for arg in self._args if isinstance(arg, IndefiniteOperator)]
        return max([rounding, *parts])

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        """`A^-1 R` or `L A^-1 R`, to a checked relative residual of 1e-8 (float64) or 1e-4 (float32).

        Up to N = 2000 by a dense pseudo-inverse, indefinite or singular alike (a singular operator gives
        the solution of least norm, if there is one); above by CG, which needs a positive definite one.
        Derivatives in R and L are exact, of any order.

        Raises:
            ValueError: not square, or shapes that do not match.
            TypeError: another dtype than the operator's.
            LinearSolveError: the tolerance was not met.
        """
        if not self.is_square:
            raise ValueError(f"solve needs a square operator, got shape {tuple(self.shape)}")
        vector = right_tensor.dim() == 1
        rhs = right_tensor[:, None] if vector else right_tensor
        if rhs.shape[-2] != self.shape[-1]:
            raise ValueError(
                f"right_tensor must have {self.shape[-1]} rows for an operator of shape {tuple(self.shape)}, "
                f"got shape {tuple(right_tensor.shape)}"
            )
        if rhs.dtype != self.dtype:
            raise TypeError(f"right_tensor must have dtype {self.dtype}, got {rhs.dtype}")
        lead = broadcast(self.batch_shape, rhs.shape[:-2])
        rhs = rhs.expand(*lead, *rhs.shape[-2:])
        out: Tensor = _Solve.apply(rhs, self, *self.representation())  # type: ignore[no-untyped-call]
        out = out.squeeze(-1) if vector else out
        return out if left_tensor is None else left_tensor @ out

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Tensor:
        if num_tridiag:
            raise NotImplementedError("stochastic Lanczos quadrature needs a positive definite operator")
        return self.solve(rhs)

    def _solve_checked(self, rhs: Tensor) -> Tensor:
        """Solve for columns of size one; judge by the true residual."""
        peak = rhs.abs().amax(-2, keepdim=True)
        safe = torch.where(peak > 0, peak, torch.ones_like(peak))
        unit = rhs / safe
        dense = self.shape[-1] <= DENSE_SOLVE
        out, how = self._solve_dense(unit) if dense else self._solve_cg(unit)
        size = unit.square().sum(-2).sqrt()
        left = (unit - self._matmul(out)).square().sum(-2).sqrt()
        residual = torch.where(size > 0, left / torch.where(size > 0, size, torch.ones_like(size)), left)
        if not bool((residual <= self._solve_rtol).all()):
            worst = float(residual.nan_to_num(nan=math.inf).max())
            raise LinearSolveError(
                f"{type(self).__name__}.solve ended at relative residual {worst:.1e}, tolerance "
                f"{self._solve_rtol:.0e} ({how}); a singular operator has no solution for a right-hand side "
                f"outside of its range, and above N = {DENSE_SOLVE} only positive definite ones are solved"
            )
        return out * safe

    def _pseudo_inverse(self) -> tuple[Tensor, Tensor, Tensor]:
        """`(U, 1/s, V)` with `A^+ = U diag(1/s) V^T`, in float64; kept on the object."""
        held = self.__dict__.get("_pseudo_inverse_held")
        if held is None:
            with torch.no_grad():
                if self._symmetric:
                    values, right = torch.linalg.eigh(self._symmetric_dense().double())
                    left = right
                else:
                    left, values, right = torch.linalg.svd(self.to_dense().double())
                    right = right.mT
                size = values.abs()
                keep = size > self._relative_noise * size.amax(-1, keepdim=True)
                inverse = torch.where(keep, 1.0 / torch.where(keep, values, 1.0), 0.0)
            held = self.__dict__["_pseudo_inverse_held"] = (right, inverse, left)
        return held

    def _solve_dense(self, rhs: Tensor) -> tuple[Tensor, str]:
        right, inverse, left = self._pseudo_inverse()
        out = torch.zeros_like(rhs)
        for _ in range(2):
            error = (rhs - self._matmul(out)).double()
            out = out + (right @ (inverse[..., None] * (left.mT @ error))).to(rhs.dtype)
        return out, "dense pseudo-inverse, one refinement"

    def _solve_cg(self, rhs: Tensor) -> tuple[Tensor, str]:
        if not self._symmetric:
            return torch.full_like(rhs, math.nan), "not symmetric and too large for a dense solve"
        result = conjugate_gradient(self._matmul, rhs, rtol=self._solve_rtol / 2, max_iter=MAX_CG)
        names = "/".join(sorted({CGReason(int(k)).name for k in result.reason.flatten()}))
        return result.x, f"CG: {names} after {result.n_matmul} products"

    # What needs a positive definite matrix --------------------------------------------------------

    cholesky = _refused("cholesky", "torch.linalg.eigh or solve")
    _cholesky = _refused("_cholesky", "torch.linalg.eigh or solve")
    logdet = _refused("logdet", "torch.linalg.eigvalsh")
    inv_quad = _refused("inv_quad", "solve(R, R.mT)")
    inv_quad_logdet = _refused("inv_quad_logdet", "solve and torch.linalg.eigvalsh")
    root_decomposition = _refused("root_decomposition", "torch.linalg.eigh")
    root_inv_decomposition = _refused("root_inv_decomposition", "torch.linalg.eigh")
    sqrt_inv_matmul = _refused("sqrt_inv_matmul", "torch.linalg.eigh")
    pivoted_cholesky = _refused("pivoted_cholesky", "torch.linalg.eigh")
    zero_mean_mvn_samples = _refused("zero_mean_mvn_samples", "torch.linalg.eigh")


class IndefiniteSum(IndefiniteOperator, SumLinearOperator):  # type: ignore[misc]
    """A sum with one of our operators in it."""

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Any:
        return IndefiniteSum(*(t._getitem(row_index, col_index, *batch_indices) for t in self.linear_ops))


class SlicedOperator(IndefiniteOperator, InterpolatedLinearOperator):  # type: ignore[misc]
    """Rows and columns of one of our operators."""
