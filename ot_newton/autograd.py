"""Twice differentiable OT losses: the gradient by the envelope theorem, the Hessian streamed.

`ot_cost` is an autograd Function whose backward is another one, so that a double backward is one
joint Hessian-vector product in (x, y, a, b) (MATH 4, 5, 7) and upstream factors are kept by the chain
rule itself.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import ConvergenceWarning
from ot_newton.hessian import Direction, HessianStats
from ot_newton.problem import OTProblem, as_tensor
from ot_newton.result import SinkhornResult, default_rtol
from ot_newton.solve import sinkhorn

__all__ = ["LossTerm", "ot_cost"]


@dataclass(eq=False)
class LossTerm:
    """One solved problem behind a loss value: what backward and double backward read.

    Attributes:
        result: the fixed point.
        rtol: tolerance of the Schur solve of the double backward.
        max_cg: cap on its CG steps.
        stats: counters of the double backwards so far.
    """

    result: SinkhornResult
    rtol: float
    max_cg: int | None = None
    stats: HessianStats = field(default_factory=HessianStats)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients in x, y, a, b, in the shapes of the problem with its batch expanded."""
        return tuple(self.result.gradient(wrt) for wrt in "xyab")  # type: ignore[return-value]

    def second(self, v: tuple[Tensor | None, ...], need: tuple[bool, ...]) -> list[Tensor | None]:
        """Joint Hessian-vector product; parts not needed are None."""
        problem = self.result.problem
        lanes = problem.lanes
        parts: list[Tensor | None] = []
        for letter, part in zip("xyab", v, strict=True):
            if part is None or not bool(part.any()):
                parts.append(None)
                continue
            own = part.shape[-2:] if letter in "xy" else part.shape[-1:]
            parts.append(part.detach().to(problem.dtype).reshape(lanes, 1, *own))
        want = "".join(letter for letter, flag in zip("xyab", need, strict=True) if flag)
        if not want or all(part is None for part in parts):
            return [None] * 4
        out, solve = self.result.linearized.product(
            Direction(*parts), want, rtol=self.rtol, max_cg=self.max_cg, stats=self.stats
        )
        if not solve.converged:
            warnings.warn(
                f"double backward of ot_cost: Schur solve at relative residual {self.stats.residual:.1e}, "
                f"tolerance {self.rtol:.0e}",
                ConvergenceWarning,
                stacklevel=2,
            )
        shape = problem.batch_shape
        return [
            None if part is None else part[:, 0].reshape(*shape, *part.shape[2:])
            for part in (out.x, out.y, out.a, out.b)
        ]


class _Value(torch.autograd.Function):
    """OT value of a solved problem; backward is `_Gradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor, term: LossTerm) -> Tensor:
        ctx.save_for_backward(x, y, a, b)
        ctx.term = term
        return term.result.value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y, a, b = ctx.saved_tensors  # raises if one was changed in place
        gradients = _Gradient.apply(x, y, a, b, ctx.term, ctx.needs_input_grad[:4])  # type: ignore[no-untyped-call]
        out: list[Tensor | None] = []
        for letter, gradient, needed in zip("xyab", gradients, ctx.needs_input_grad, strict=False):
            upstream = grads[0].reshape(*grads[0].shape, *([1, 1] if letter in "xy" else [1]))
            out.append(upstream * gradient if needed else None)
        return (*out, None)


class _Gradient(torch.autograd.Function):
    """Gradients in x, y, a, b; backward is the joint Hessian-vector product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor, term: LossTerm, need: tuple[bool, ...]
    ) -> tuple[Tensor, ...]:
        ctx.term, ctx.need = term, need
        ctx.shapes = [t.shape for t in (x, y, a, b)]
        out = []
        for letter, point, flag in zip("xyab", (x, y, a, b), need, strict=True):
            out.append(term.result.gradient(letter).clone() if flag else torch.zeros_like(point))
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Tensor | None, ...]:
        need = ctx.needs_input_grad[:4]
        used = tuple(part if flag else None for part, flag in zip(v, ctx.need, strict=True))
        products = _Second.apply(ctx.term, tuple(need), *used)  # type: ignore[no-untyped-call]
        return (*(p if flag else None for p, flag in zip(products, need, strict=True)), None, None)


class _Second(torch.autograd.Function):
    """The Hessian-vector product; a third derivative raises instead of being silently wrong."""

    @staticmethod
    def forward(ctx: Any, term: LossTerm, need: tuple[bool, ...], *v: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.term, ctx.need = term, need
        shapes = [part for part in term.result.problem.expanded()]
        out = term.second(v, need)
        return tuple(
            torch.zeros_like(shape) if part is None else part for part, shape in zip(out, shapes, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "ot_cost has two derivatives: a third one (create_graph=True through a Hessian-vector product) is "
            "not implemented"
        )


def ot_cost(
    x: Any,
    y: Any,
    a: Any = None,
    b: Any = None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    rtol: float | None = None,
    max_cg: int | None = None,
    **options: Any,
) -> Tensor:
    """Entropic OT value between two clouds, twice differentiable in x, y, a and b.

    The first backward costs at most two plan passes; a double backward is one streamed joint
    Hessian-vector product (2 to 4 passes and 2 per CG step). The gradient in the weights is the one
    along the simplex (balanced: mean removed), see `SinkhornResult.gradient`.

    Args:
        x: (..., n, d).
        y: (..., m, d).
        a: (..., n) or None for uniform.
        b: (..., m) or None.
        eps: regularization, in units of the cost.
        cost_scale: s of `C = s |x - y|^2`.
        rtol: tolerance of the double backward's inner solve; 1e-10 in float64, 1e-5 in float32.
        max_cg: cap on its CG steps.
        **options: of `sinkhorn` (tol, max_iter, init, backend, ...) and rho_x, rho_y.

    Returns:
        (...) the value in the compute dtype (half inputs: float32).

    Raises:
        TypeError, ValueError: as `OTProblem` and `sinkhorn`.
        RuntimeError: an input was changed in place before backward; a third derivative.

    Example:
        >>> import torch
        >>> x = torch.tensor([[-0.5], [0.5]], dtype=torch.float64, requires_grad=True)
        >>> y = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
        >>> (g,) = torch.autograd.grad(ot_cost(x, y, eps=1.0), x, create_graph=True)
        >>> round(float(g[0]), 6)
        0.261594
    """
    rho = {key: options.pop(key) for key in ("rho_x", "rho_y") if key in options}
    problem = OTProblem(x, y, a, b, eps=eps, cost_scale=cost_scale, **rho)
    with torch.no_grad():
        result = sinkhorn(problem, **options)
    term = LossTerm(result, default_rtol(problem.dtype) if rtol is None else rtol, max_cg)
    return attach(term, x, y, a, b)


def attach(term: LossTerm, x: Any, y: Any, a: Any, b: Any) -> Tensor:
    """The value of a solved term as a differentiable function of the user's tensors."""
    problem = term.result.problem
    inputs = []
    for name, given, own in zip("xyab", (x, y, a, b), problem.expanded(), strict=True):
        tensor = given if isinstance(given, Tensor) else (own if given is None else as_tensor(name, given))
        inputs.append(tensor.to(problem.dtype).expand(own.shape))
    value: Tensor = _Value.apply(*inputs, term)  # type: ignore[no-untyped-call]
    return value
