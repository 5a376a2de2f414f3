"""Twice differentiable OT terms: the gradient by the envelope theorem, the Hessian streamed.

`_Value` is an autograd Function whose derivative is `_Gradient`, whose derivative is `_Second`, one joint
Hessian-vector product in points and weights (MATH 4 to 7). Upstream factors are kept by the chain rule
itself. Each has the rules that torch.func asks for; a vmap over directions becomes one block product, a
vmap over clouds one batched solve.

Tensors arrive with their full batch shape and compute dtype (`prepare`), so every rule works on equal
shapes. A `Recipe` solves once, inside of the forward, and keeps the solved term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ot_newton.directions import Direction
from ot_newton.problem import HALF, OTProblem, as_tensor
from ot_newton.terms import Term

__all__ = ["Recipe", "differentiable", "prepare"]


@dataclass(eq=False)
class Recipe:
    """How to solve a term from its tensors; keeps the term once solved.

    Attributes:
        letters: the tensors it takes, a subset of "xyab".
        solve: tensors to term.
        term: the solved term, None before the forward has run.
    """

    letters: str
    solve: Callable[..., Term]
    term: Term | None = None

    @property
    def solved(self) -> Term:
        """The term, after the forward."""
        if self.term is None:
            raise RuntimeError("derivative of an OT term that was never evaluated")
        return self.term


def _moved(tensors: Sequence[Tensor], dims: Sequence[int | None], size: int, at: int = 0) -> list[Tensor]:
    """The vmap dimension of every tensor at position ``at``, expanded where a tensor lacks it."""
    out = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if dim is None:
            tensor = tensor.unsqueeze(at)
            shape = list(tensor.shape)
            shape[at] = size
            out.append(tensor.expand(shape))
        else:
            out.append(tensor.movedim(dim, at))
    return out


def _upstream(grad: Tensor, letter: str) -> Tensor:
    """A factor of the value, broadcast over one tensor's own dimensions."""
    return grad[..., None, None] if letter in "xy" else grad[..., None]


class _Value(torch.autograd.Function):
    """Value of a term; solves it."""

    @staticmethod
    def forward(recipe: Recipe, *points: Tensor) -> Tensor:
        recipe.term = recipe.solve(*points)
        return recipe.term.value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        recipe, *points = inputs
        ctx.recipe = recipe
        ctx.need = tuple(ctx.needs_input_grad[1:])
        ctx.save_for_backward(*points)
        ctx.save_for_forward(*points)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _Gradient.apply(ctx.recipe, ctx.need, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        letters = ctx.recipe.letters
        parts = zip(letters, gradients, ctx.need, strict=True)
        return (None, *(_upstream(grads[0], k) * g if flag else None for k, g, flag in parts))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        letters, moves = ctx.recipe.letters, tangents[1:]
        need = tuple(move is not None for move in moves)
        gradients = _Gradient.apply(ctx.recipe, need, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        parts = [
            (g * move).sum((-2, -1) if letter in "xy" else -1)
            for letter, g, move in zip(letters, gradients, moves, strict=True)
            if move is not None
        ]
        total: Tensor = sum(parts[1:], start=parts[0])
        return total

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], recipe: Recipe, *points: Tensor) -> tuple[Tensor, int]:
        moved = _moved(points, in_dims[1:], info.batch_size)
        return _Value.apply(recipe, *moved), 0  # type: ignore[no-untyped-call]


class _Gradient(torch.autograd.Function):
    """Gradients of a term; zeros where not needed."""

    @staticmethod
    def forward(recipe: Recipe, need: tuple[bool, ...], *points: Tensor) -> tuple[Tensor, ...]:
        term = recipe.solved
        return tuple(
            term.gradient(letter).clone() if flag else torch.zeros_like(point)
            for letter, flag, point in zip(recipe.letters, need, points, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        recipe, need, *points = inputs
        ctx.recipe, ctx.have = recipe, need
        ctx.need = tuple(ctx.needs_input_grad[2:])
        ctx.save_for_backward(*points)
        ctx.save_for_forward(*points)

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Tensor | None, ...]:
        products = _second(ctx.recipe, ctx.have, ctx.need, v, ctx.saved_tensors)
        return (None, None, *(p if flag else None for p, flag in zip(products, ctx.need, strict=True)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        points = ctx.saved_tensors
        moves = [torch.zeros_like(p) if t is None else t for p, t in zip(points, tangents[2:], strict=True)]
        given = tuple(t is not None for t in tangents[2:])
        return tuple(_second(ctx.recipe, given, ctx.have, moves, points))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], recipe: Recipe, need: tuple[bool, ...], *points: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        moved = _moved(points, in_dims[2:], info.batch_size)
        out = _Gradient.apply(recipe, need, *moved)  # type: ignore[no-untyped-call]
        return out, (0,) * len(points)


class _Guard(torch.autograd.Function):
    """Identity in front of a product's points: a third derivative raises instead of being wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*points: Tensor) -> tuple[Tensor, ...]:
        return tuple(point.clone() for point in points)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            "a third derivative of an OT loss is not implemented: differentiate at most twice"
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError(
            "a third derivative of an OT loss is not implemented: differentiate at most twice"
        )


def _second(
    recipe: Recipe,
    have: tuple[bool, ...],
    want: tuple[bool, ...],
    v: Sequence[Tensor],
    points: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    guarded = _Guard.apply(*points)  # type: ignore[no-untyped-call]
    v, level = _opened(v)
    blocks = 0 if level is None else 1
    out: tuple[Tensor, ...] = _Second.apply(recipe, have, want, blocks, *v, *guarded)  # type: ignore[no-untyped-call]
    return out if level is None else tuple(torch._add_batch_dim(part, 0, level) for part in out)


def _opened(v: Sequence[Tensor]) -> tuple[Sequence[Tensor], int | None]:
    """The block behind directions that `is_grads_batched` hides, and what hides it again.

    That option (as `vectorize=True` of torch.autograd.functional) runs the older vmap, which asks no rules.
    """
    hidden = [torch._C._functorch.is_legacy_batchedtensor(part) for part in v]
    if not any(hidden):
        return v, None
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    size = next(_block_size(part, level) for part, flag in zip(v, hidden, strict=True) if flag)
    return [torch._remove_batch_dim(part, level, size, 0) for part in v], level


def _block_size(part: Tensor, level: int) -> int:
    """Size of the hidden dimension; what is asked of a hidden tensor does not count."""
    return int(torch._remove_batch_dim(part, level, 0, 0).shape[0])


class _Second(torch.autograd.Function):
    """Hessian-vector products; linear in the directions, its derivative in them is itself transposed.

    Directions have shape (*blocks, *batch, ...): ``blocks`` leading dimensions share every plan pass.
    """

    @staticmethod
    def forward(
        recipe: Recipe, have: tuple[bool, ...], want: tuple[bool, ...], blocks: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        term, letters = recipe.solved, recipe.letters
        v = tensors[: len(letters)]
        parts: dict[str, Tensor | None] = {}
        for letter, part, flag in zip(letters, v, have, strict=True):
            parts[letter] = _to_lanes(part, letter, blocks) if flag and bool(part.any()) else None
        wanted = "".join(letter for letter, flag in zip(letters, want, strict=True) if flag)
        if not wanted or all(part is None for part in parts.values()):
            return tuple(torch.zeros_like(part) for part in v)
        out = term.second(Direction(**parts), wanted)
        return tuple(
            _from_lanes(product, part) if product is not None else torch.zeros_like(part)
            for product, part in (
                (getattr(out, letter), part) for letter, part in zip(letters, v, strict=True)
            )
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.recipe, ctx.have, ctx.want, ctx.blocks, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.recipe.letters)
        points = ctx.saved_tensors[count:]
        moved = _Second.apply(ctx.recipe, ctx.want, ctx.have, ctx.blocks, *grads, *points)  # type: ignore[no-untyped-call]
        return (None, None, None, None, *moved, *(torch.zeros_like(p) for p in points))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        count = len(ctx.recipe.letters)
        moves, points = tangents[4 : 4 + count], ctx.saved_tensors[count:]
        v = [torch.zeros_like(p) if t is None else t for p, t in zip(ctx.saved_tensors, moves, strict=False)]
        out: tuple[Tensor, ...] = _Second.apply(  # type: ignore[no-untyped-call]
            ctx.recipe, ctx.have, ctx.want, ctx.blocks, *v, *points
        )
        return out

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        recipe: Recipe,
        have: tuple[bool, ...],
        want: tuple[bool, ...],
        blocks: int,
        *tensors: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        count = len(recipe.letters)
        v, points = tensors[:count], tensors[count:]
        v_dims, point_dims = in_dims[4 : 4 + count], in_dims[4 + count :]
        if all(dim is None for dim in point_dims):
            moved = _moved(v, v_dims, info.batch_size)
            out = _Second.apply(recipe, have, want, blocks + 1, *moved, *points)  # type: ignore[no-untyped-call]
            return out, (0,) * count
        moved = _moved(v, v_dims, info.batch_size, blocks)
        batched = _moved(points, point_dims, info.batch_size)
        out = _Second.apply(recipe, have, want, blocks, *moved, *batched)  # type: ignore[no-untyped-call]
        return out, (blocks,) * count


def _to_lanes(part: Tensor, letter: str, blocks: int) -> Tensor:
    """(*blocks, *batch, ...) -> (lanes, K, ...)."""
    own = part.shape[-2:] if letter in "xy" else part.shape[-1:]
    k = int(part.shape[:blocks].numel())
    return part.reshape(k, -1, *own).transpose(0, 1).contiguous()


def _from_lanes(product: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_to_lanes`."""
    return product.transpose(0, 1).reshape(like.shape).to(like.dtype)


def prepare(x: Any, y: Any, a: Any, b: Any) -> tuple[Tensor, ...]:
    """The four tensors, differentiable, in one dtype and with their full batch shape.

    Only shapes are looked at here (values may be traced); the rest is validated inside the solve.

    Raises:
        TypeError, ValueError: as `OTProblem`.
    """
    x, y = (v if isinstance(v, Tensor) else as_tensor(name, v) for name, v in (("x", x), ("y", y)))
    good = x.dim() >= 2 and y.dim() >= 2 and x.shape[-1] == y.shape[-1] and 0 not in (*x.shape, *y.shape)
    dtype = torch.promote_types(x.dtype, y.dtype)
    if dtype in HALF or not dtype.is_floating_point:
        dtype = torch.float32 if dtype in HALF else torch.get_default_dtype()
    weights = []
    for name, weight, cloud in (("a", a, x), ("b", b, y)):
        if weight is None and good:
            count = cloud.shape[-2]
            weight = torch.full((count,), 1.0 / count, dtype=dtype, device=cloud.device)
        elif weight is not None and not isinstance(weight, Tensor):
            weight = as_tensor(name, weight)
        good = good and weight.dim() >= 1 and weight.shape[-1] == cloud.shape[-2]
        weights.append(weight)
    devices = {t.device for t in (x, y, *weights) if t is not None}
    real = all(t is None or not t.is_complex() for t in (x, y, *weights))
    if not good or not real or len(devices) > 1:
        OTProblem(x, y, a, b, eps=1.0)
        raise ValueError("x, y, a, b do not form a problem")
    try:
        lead = (x.shape[:-2], y.shape[:-2], *(w.shape[:-1] for w in weights))
        shape = torch.broadcast_shapes(*lead)  # type: ignore[no-untyped-call]
    except RuntimeError:
        OTProblem(x, y, a, b, eps=1.0)
        raise
    clouds = [c.to(dtype).expand(*shape, *c.shape[-2:]) for c in (x, y)]
    return (*clouds, *(w.to(dtype).expand(*shape, w.shape[-1]) for w in weights))


def differentiable(recipe: Recipe, *points: Tensor) -> Tensor:
    """The value of a term as a function of prepared tensors."""
    value: Tensor = _Value.apply(recipe, *points)  # type: ignore[no-untyped-call]
    return value
