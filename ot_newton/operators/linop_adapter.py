"""Operators of a plan as `linear_operator.LinearOperator` objects.

linear_operator rebuilds an object through its constructor at every product, indexes and expands its
tensors, and moves them to other dtypes. Hence: every tensor is positional and has the full batch shape
(centred clouds, base-2 biases, weights, a factor, a diagonal), the rest is one frozen `Options`, and what
is expensive (a stored plan, marginals, a factorized Schur complement) is kept in a `Memo` that the copies
share; it is made anew where the tensors are others (another dtype, one lane of a batch, after pickling).

An operator is a constant: `H.to_linear_operator()` does not follow the points it was made of. Derivatives
in the right-hand side, in the factor of `c * H` and in the diagonal of `H + diag(d)` are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from linear_operator.operators import DiagLinearOperator, InterpolatedLinearOperator
from linear_operator.utils.getitem import _is_noop_index
from torch import Tensor

from ot_newton.backends.common import exp2_flushed_, mask_bias
from ot_newton.backends.select import choose_backend
from ot_newton.errors import check_number
from ot_newton.hessian import LinearizedPlan
from ot_newton.operators.base import DENSE_BLOCK, PlanOperator
from ot_newton.operators.hessian_operator import HessianOperator, default_rtol
from ot_newton.operators.linop_base import CONSTANT, IndefiniteOperator, SlicedOperator, broadcast, constant
from ot_newton.operators.linop_state import CentredOnly, Memo, Options
from ot_newton.operators.plan import TransportPlan, linearize
from ot_newton.operators.schur_operator import SchurComplement
from ot_newton.potentials import Biases, operands
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter

__all__ = ["HessianLinearOperator", "PlanLinearOperator", "SchurLinearOperator", "wrap"]

CORE = 6


class _TransportOperator(IndefiniteOperator):
    """`scale * A (+ diag(d))` with A one of our operators.

    Args:
        tensors: centred x (*batch,n,d) and y (*batch,m,d), biases (*batch,n) and (*batch,m), weights
            (*batch,n) and (*batch,m), scale (*batch) and, when symmetric, d (*batch,N).
        options: the rest.
        memo: operators already made, shared between copies.
    """

    def __init__(self, *tensors: Tensor, options: Options, memo: Memo | None = None) -> None:
        self._options, self._memo = options, Memo() if memo is None else memo
        super().__init__(*tensors, options=self._options, memo=self._memo)

    # The operator behind it -----------------------------------------------------------------------

    def _make(self, linearized: LinearizedPlan) -> PlanOperator:
        raise NotImplementedError

    def _problem(self) -> OTProblem:
        x, y, _, _, a, b = (t.detach() for t in self._args[:CORE])
        o = self._options
        return CentredOnly(x, y, a, b, eps=o.eps, cost_scale=o.cost_scale, rho_x=o.rho_x, rho_y=o.rho_y)

    def _build(self) -> PlanOperator:
        row, col = (t.detach().reshape(-1, t.shape[-1]).contiguous() for t in self._args[2:4])
        problem = self._problem()
        return self._make(linearize(problem, Biases(row, col), self._options.backend, PassCounter()))

    @property
    def core(self) -> PlanOperator:
        """A: the operator of the package that does the products."""
        core = self._memo.get(self._args[:CORE], self._build)
        return core.mT if self._options.transposed else core

    def _with(self, tensors: Any, **changes: Any) -> Any:
        options = replace(self._options, **changes) if changes else self._options
        return self.__class__(*tensors, options=options, memo=self._memo)

    @property
    def _scale(self) -> Tensor:
        out: Tensor = self._args[CORE]
        return out

    @property
    def _diag(self) -> Tensor | None:
        return self._args[CORE + 1] if len(self._args) > CORE + 1 else None

    # Shapes ---------------------------------------------------------------------------------------

    def _transpose_nonbatch(self) -> Any:
        return self if self._symmetric else self._with(self._args, transposed=not self._options.transposed)

    def _expand_batch(self, batch_shape: Any) -> Any:
        lead = len(self.batch_shape)
        return self._with([t.expand((*batch_shape, *t.shape[lead:])) for t in self._args])

    def repeat(self, *sizes: Any) -> Any:
        """As `torch.Tensor.repeat` over batch dimensions; the last two sizes must be 1.

        Raises:
            ValueError: a repeat of rows or columns.
        """
        counts = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        if len(counts) < self.dim() or tuple(counts[-2:]) != (1, 1):
            raise ValueError(f"sizes must be batch repeats followed by 1, 1, got {counts}")
        lead = len(self.batch_shape)
        return self._with([t.repeat((*counts[:-2], *(1 for _ in t.shape[lead:]))) for t in self._args])

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Any:
        if _is_noop_index(row_index) and _is_noop_index(col_index):
            return self._with([t[batch_indices] for t in self._args]) if batch_indices else self
        out = super()._getitem(row_index, col_index, *batch_indices)
        return SlicedOperator(*out._args) if type(out) is InterpolatedLinearOperator else out

    # Dtype ----------------------------------------------------------------------------------------

    def _moved(self, dtype: torch.dtype, device: torch.device) -> Any:
        """Caches are made anew from the same biases in the new dtype."""
        tensors = [t.to(dtype=dtype, device=device) for t in self._args]
        if dtype == self.dtype and device == self.device:
            return self._with(tensors)
        o, floor = self._options, default_rtol(dtype)
        backend = o.backend
        if device.type != self.device.type and backend != "dense":
            n, m = tensors[0].shape[-2], tensors[1].shape[-2]
            backend = choose_backend("auto", device, n, m, self.batch_shape.numel())
        rtol = floor if o.rtol == default_rtol(self.dtype) else max(o.rtol, floor)
        return self.__class__(*tensors, options=replace(o, backend=backend, rtol=rtol), memo=Memo())

    # Products -------------------------------------------------------------------------------------

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dtype != self.dtype:
            raise TypeError(f"the right-hand side must have dtype {self.dtype}, got {rhs.dtype}")
        if rhs.dim() == 1:
            return self._matmul(rhs[:, None]).squeeze(-1)
        return self._folded(rhs, self._product)

    def _product(self, block: Tensor) -> Tensor:
        out: Tensor = self._scale[..., None, None] * (self.core @ block)
        return out if self._diag is None else out + self._diag[..., None] * block

    def _folded(self, rhs: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """``product`` of (*batch, N, K), with every batch dimension that is not ours moved to columns."""
        lead = broadcast(self.batch_shape, rhs.shape[:-2])
        rhs = rhs.expand(*lead, *rhs.shape[-2:])
        own = (1,) * (len(lead) - len(self.batch_shape)) + tuple(self.batch_shape)
        fold = [k for k, size in enumerate(own) if size == 1]
        order = [*(k for k, size in enumerate(own) if size != 1), len(lead), *fold, len(lead) + 1]
        moved = rhs.permute(order)
        block = moved.reshape(*self.batch_shape, rhs.shape[-2], -1)
        out = product(block)
        kept = len(lead) - len(fold)
        out = out.reshape(*moved.shape[:kept], out.shape[-2], *moved.shape[kept + 1 :])
        return out.permute([order.index(k) for k in range(len(order))])

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        """Exact in the factor and in the diagonal; raises for the tensors the operator was made of."""
        wanted = [arg.requires_grad for arg in self._args]
        if any(wanted[:CORE]):
            raise NotImplementedError(CONSTANT)
        grads: list[Tensor | None] = [None] * len(wanted)
        if wanted[CORE]:
            along = (left_vecs * self._folded(right_vecs, self.core.__matmul__)).sum((-1, -2))
            grads[CORE] = along.sum_to_size(self._scale.shape)
        if self._diag is not None and wanted[CORE + 1]:
            grads[CORE + 1] = (left_vecs * right_vecs).sum(-1).sum_to_size(self._diag.shape)
        return tuple(grads)

    def _mul_constant(self, other: Any) -> Any:
        factor = torch.as_tensor(other, device=self.device).to(self.dtype)
        scaled = [self._scale * factor]
        if self._diag is not None:
            scaled.append(self._diag * factor[..., None])
        return self._with([*self._args[:CORE], *scaled])

    # Entries --------------------------------------------------------------------------------------

    def to_dense(self) -> Tensor:
        """The (*batch, rows, cols) matrix, by block products with the identity."""
        dense = self._scale[..., None, None] * constant(lambda: self.core.to_dense(), *self._args[:CORE])
        return dense if self._diag is None else dense + torch.diag_embed(self._diag)

    @property
    def _solve_rtol(self) -> float:
        own = self._options.solve_rtol
        return float(super()._solve_rtol) if own is None else own

    @property
    def _relative_noise(self) -> float:
        return float(super()._relative_noise) + self._options.rtol


class PlanLinearOperator(_TransportOperator):
    """`scale * P`; its entries cost O(d) each, without a pass."""

    def _make(self, linearized: LinearizedPlan) -> PlanOperator:
        return TransportPlan(linearized)

    def _size(self) -> torch.Size:
        x, y = self._args[:2]
        ends = (x.shape[-2], y.shape[-2])
        return torch.Size((*x.shape[:-2], *(ends[::-1] if self._options.transposed else ends)))

    def _entries(self, i: Any, j: Any, batch: Any) -> Tensor:
        """`a_i 2^(q_i.k_j + w_i + u_j) b_j` at indices of x and y."""
        _, _, row, col, a, b = (t.detach() for t in self._args[:CORE])
        q, k = operands(self._problem(), self._options.eps)
        q, k = q.reshape(self._args[0].shape), k.reshape(self._args[1].shape)
        at, to = (*batch, i), (*batch, j)
        exponent = (q[at] * k[to]).sum(-1) + (mask_bias(row, a)[at] + mask_bias(col, b)[to])
        out: Tensor = exp2_flushed_(exponent) * a[at] * b[to]
        return out

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        i, j = (col_index, row_index) if self._options.transposed else (row_index, col_index)
        values = constant(lambda: self._entries(i, j, batch_indices), *self._args[:CORE])
        return self._scale[batch_indices] * values

    def _diagonal(self) -> Tensor:
        every = slice(None)
        values = constant(lambda: self._entries(every, every, (...,)), *self._args[:CORE])
        return self._scale[..., None] * values


class _SymmetricTransportOperator(_TransportOperator):
    """`scale * A + diag(d)` with A a Hessian or a Schur complement."""

    _symmetric = True

    def add_diagonal(self, diag: Tensor) -> Any:
        """`A + diag(d)`, d of shape (..., N), (..., 1) or ()."""
        return self._with([*self._args[:-1], self._args[-1] + diag.to(self.dtype).expand(self.shape[:-1])])

    def __add__(self, other: Any) -> Any:
        """A sum; a diagonal is taken into the operator."""
        if not isinstance(other, DiagLinearOperator):
            return super().__add__(other)
        batch = broadcast(self.batch_shape, other.batch_shape)
        own = self if batch == self.batch_shape else self._expand_batch(batch)
        return own.add_diagonal(other._diagonal())

    def _columns(self, columns: Tensor) -> Tensor:
        """(*batch, N, k) columns of A."""
        unit = torch.zeros(self.shape[-1], len(columns), dtype=self.dtype, device=self.device)
        unit[columns, torch.arange(len(columns), device=self.device)] = 1
        out: Tensor = self.core @ unit.expand(*self.batch_shape, *unit.shape)
        return out

    def _core_diagonal(self) -> Tensor:
        every = torch.arange(self.shape[-1], device=self.device)
        blocks = [every[k : k + DENSE_BLOCK] for k in range(0, len(every), DENSE_BLOCK)]
        parts = [self._columns(block)[..., block, :].diagonal(dim1=-2, dim2=-1) for block in blocks]
        return torch.cat(parts, dim=-1)

    def _diagonal(self) -> Tensor:
        own = constant(self._core_diagonal, *self._args[:CORE])
        out: Tensor = self._args[-1] + self._scale[..., None] * own
        return out

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        columns, where = torch.unique(col_index, return_inverse=True)
        at = (*batch_indices, row_index, where)
        entries = constant(lambda: self._columns(columns)[at], *self._args[:CORE])
        out: Tensor = self._args[-1][(*batch_indices, row_index)] * (row_index == col_index)
        return out + self._scale[batch_indices] * entries


class SchurLinearOperator(_SymmetricTransportOperator):
    """`scale * S + diag(d)`, on either side, normalized or not."""

    def _make(self, linearized: LinearizedPlan) -> PlanOperator:
        o = self._options
        source = linearized if o.side == "y" else linearized.swap
        return SchurComplement(source, side=o.side, normalized=o.normalized)

    def _size(self) -> torch.Size:
        x, y = self._args[:2]
        count = (y if self._options.side == "y" else x).shape[-2]
        return torch.Size((*x.shape[:-2], count, count))


class HessianLinearOperator(_SymmetricTransportOperator):
    """`scale * H + diag(d)` for H the Hessian in "x", "y" or "xy"."""

    def _make(self, linearized: LinearizedPlan) -> PlanOperator:
        o = self._options
        return HessianOperator(
            linearized,
            o.wrt,
            rtol=o.rtol,
            max_cg=o.max_cg,
            relative_floor=o.relative_floor,
            curvature_bound=2.0 * o.cost_scale,
        )

    def _size(self) -> torch.Size:
        x, y = self._args[:2]
        points = {"x": x.shape[-2], "y": y.shape[-2], "xy": x.shape[-2] + y.shape[-2]}[self._options.wrt]
        return torch.Size((*x.shape[:-2], points * x.shape[-1], points * x.shape[-1]))


def _kind(operator: PlanOperator) -> tuple[type[_TransportOperator], dict[str, Any], LinearizedPlan]:
    """Class, options and plan of an operator."""
    if isinstance(operator, HessianOperator):
        own = {name: getattr(operator, name) for name in ("wrt", "rtol", "max_cg")}
        own["relative_floor"] = operator.relative_floor
        return HessianLinearOperator, own, operator.linearized
    if isinstance(operator, SchurComplement):
        own = {"side": operator.side, "normalized": operator.normalized}
        return SchurLinearOperator, own, operator.linearized
    if isinstance(operator, TransportPlan):
        return PlanLinearOperator, {"transposed": operator.linearized.source is None}, operator.linearized
    raise TypeError(
        f"operator must be a TransportPlan, SchurComplement or HessianOperator, got {type(operator).__name__}"
    )


def wrap(operator: PlanOperator, *, solve_rtol: float | None = None) -> IndefiniteOperator:
    """An operator of a plan as a `linear_operator.LinearOperator`; no product is made and nothing is copied.

    Products, transposes, slices, batches, pickling, dtype and device moves work as linear_operator has
    them. Eigenvalues keep their signs, also of `2 * H`, `H + diag(d)`, `H + A` and `H[:3, :3]`; a sum with
    one of linear_operator's own objects on the left clamps them at 0. `solve` is checked.

    Args:
        operator: a `TransportPlan`, `SchurComplement` or `HessianOperator`.
        solve_rtol: relative residual that `solve` must reach; 1e-8 in float64, 1e-4 in float32.

    Raises:
        TypeError: another kind of operator.
        ValueError: a bad ``solve_rtol``.
    """
    tolerance = None if solve_rtol is None else check_number("solve_rtol", solve_rtol, high=1.0)
    kind, own, linearized = _kind(operator)
    base = linearized if linearized.source is not None else linearized.swap
    if base.source is None:
        raise TypeError("operator must come from a SinkhornResult, got one of a plan without its biases")
    backend, biases = base.source
    problem, c = base.problem, base.problem.centred
    batch = tuple(problem.batch_shape)
    flat = (c.x, c.y, biases.row, biases.col, c.a, c.b)
    tensors = tuple(t.detach().reshape(*batch, *t.shape[1:]) for t in flat)
    options = Options(
        eps=problem.eps,
        cost_scale=problem.cost_scale,
        rho_x=problem.rho_x,
        rho_y=problem.rho_y,
        backend=backend,
        solve_rtol=tolerance,
        **own,
    )
    memo = Memo()
    memo.get(tensors, lambda: operator.mT if options.transposed else operator)
    extra = [torch.ones(batch, dtype=operator.dtype, device=operator.device)]
    if issubclass(kind, _SymmetricTransportOperator):
        extra.append(torch.zeros(*batch, operator.cols, dtype=operator.dtype, device=operator.device))
    return kind(*tensors, *extra, options=options, memo=memo)
