"""The loss as the solvers see it: value, gradient and Hessian products at a point, all counted.

A loss is one of

- a callable `x -> scalar tensor`; gradients by backward, products by double backward of one graph per
  point (an HVP does not run the forward pass again);
- an object with `value_and_grad(x) -> (value, gradient)` and `hvp(x, v)` or `hessian(x) -> operator`.

Optional attributes of either (a number, or a function of x):

    noise_floor        gradient norms below this are noise
    value_noise        differences of values below this are noise
    hvp_noise_floor    absolute noise of Hessian eigenvalues
    plan_passes        cumulative cost counter
    warm_state(), load_warm_state(state)     what a resumed run needs to repeat itself
    freeze()           context manager: warm starts do not move inside
    hessian(x)         operator `(N, N)` that takes blocks
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.errors import OTNewtonError, check_choice
from ot_newton.solvers.graphs import gradient, graph_names
from ot_newton.solvers.linear_map import LinearMap, as_linear_map

__all__ = ["Objective", "Point", "as_start"]

HVP_CHOICES = ("autograd", "finite-difference")
BLOCK = 64


def as_start(x0: Any) -> Tensor:
    """A detached copy of ``x0`` in the dtype of the computation (half precision computes in float32).

    Raises:
        TypeError: not a real floating tensor or array.
        ValueError: empty.
    """
    if isinstance(x0, (np.ndarray, list, tuple, float)):
        x0 = torch.from_numpy(np.array(x0)) if not isinstance(x0, float) else torch.tensor(x0).double()
    if not isinstance(x0, Tensor) or not x0.is_floating_point():
        kind = x0.dtype if isinstance(x0, Tensor) else type(x0).__name__
        raise TypeError(f"x0 must be a floating point tensor or array, got {kind}")
    if x0.numel() == 0:
        raise ValueError("x0 must have at least one element, got an empty tensor")
    start = x0.detach().clone(memory_format=torch.contiguous_format)
    return start.float() if start.dtype in (torch.float16, torch.bfloat16) else start


class Objective:
    """A loss bound to the shape, dtype and device of its argument.

    Attributes:
        n_fun: evaluations of the value.
        n_grad: evaluations of the gradient.
        n_hvp: Hessian-vector products; a block of k counts k.
        latest: the point evaluated last, which the loss's warm start speaks of.
    """

    def __init__(
        self,
        loss: Any,
        like: Tensor,
        *,
        hvp: str | Callable[[Tensor, Tensor], Any] = "autograd",
        hess: Callable[[Tensor], Any] | None = None,
        surrogate: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> None:
        if surrogate is not None and not callable(surrogate):
            raise TypeError(f"surrogate must be a function (x, v), got {type(surrogate).__name__}")
        self.surrogate = surrogate
        if not callable(hvp):
            check_choice("hvp", hvp, HVP_CHOICES)
        if not callable(loss) and not hasattr(loss, "value_and_grad"):
            raise TypeError(f"loss must be callable or have value_and_grad, got {type(loss).__name__}")
        self.loss, self.hvp, self.hess = loss, hvp, hess
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.n = like.numel()
        self.has_pair = hasattr(loss, "value_and_grad")
        self.n_fun = self.n_grad = self.n_hvp = 0
        self.latest: Point | None = None
        self.vmap_works = True
        self.all_products_zero = True
        self.linear_checked = False
        if self.has_pair and hvp == "autograd" and hess is None:
            self.hess = getattr(loss, "hessian", None)
            if self.hess is None and not hasattr(loss, "hvp"):
                raise TypeError(
                    "loss with value_and_grad must have hvp or hessian too, or hvp='finite-difference'"
                )
        elif hasattr(loss, "hessian") and hvp == "autograd" and hess is None:
            self.hess = loss.hessian

    def at(self, x: Tensor) -> Point:
        """The point `x` `(N,)`; nothing is evaluated yet."""
        return Point(self, x.detach())

    @property
    def plan_passes(self) -> int:
        """Plan passes the loss has counted so far; 0 if it counts none."""
        return int(getattr(self.loss, "plan_passes", 0))

    def floor(self, name: str, x: Tensor) -> float:
        """A floor of the loss by name, such as ``noise_floor``: 0 without one; nan counts as inf."""
        given = getattr(self.loss, name, None)
        number = given(x.reshape(self.shape)) if callable(given) else given
        found = 0.0 if number is None else float(number)
        return math.inf if math.isnan(found) else found

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Warm starts of the loss do not move inside."""
        freeze = getattr(self.loss, "freeze", None)
        with freeze() if callable(freeze) else contextlib.nullcontext():
            yield

    def warm_state(self) -> Any:
        """The loss's warm-start state, None if it has none."""
        save = getattr(self.loss, "warm_state", None)
        return save() if callable(save) else None

    def load_warm_state(self, state: Any) -> None:
        """Put a warm-start state back."""
        load = getattr(self.loss, "load_warm_state", None)
        if state is not None and callable(load):
            load(state)

    @property
    def relative_noise(self) -> float:
        """Noise of a product relative to |H|: that of finite differences, else 0."""
        return 10.0 * torch.finfo(self.dtype).eps ** (2 / 3) if self.hvp == "finite-difference" else 0.0

    def counters(self) -> dict[str, int]:
        """Evaluation counts, for results and saved state."""
        return {"n_fun": self.n_fun, "n_grad": self.n_grad, "n_hvp": self.n_hvp}

    def count_product(self, v: Tensor, product: Tensor) -> None:
        """Count the products of a vector or block."""
        self.n_hvp += 1 if v.ndim == 1 else v.shape[1]
        if self.all_products_zero and bool((product != 0).any()):
            self.all_products_zero = False


class Point:
    """Value, gradient and Hessian at one x, each evaluated once, when first asked for.

    Attributes:
        x: (N,) the point.
        warm: the loss's warm-start state before it was evaluated here: what a resumed run starts from.
        settled: the state after it, from which points reached from here start (a rejected trial far
            away must not spoil the next one).
        noise_floor: the loss's floor of gradient norms, as it stood after this evaluation.
        value_noise: its floor of differences of values, likewise.
    """

    def __init__(self, objective: Objective, x: Tensor, start: Any = None) -> None:
        self.objective, self.x = objective, x
        self.warm: Any = start
        self.settled: Any = None
        self.noise_floor = self.value_noise = 0.0
        self._shaped = x.reshape(objective.shape)

    def moved(self, x: Tensor) -> Point:
        """The point `x` `(N,)`, whose evaluation starts warm from here."""
        return Point(self.objective, x.detach(), self.settled)

    def settle(self, state: Any) -> None:
        """Put back what products here had added to the loss's warm-start state; None leaves it."""
        if state is not None:
            self.settled = state
            self.objective.load_warm_state(state)

    def _begin(self) -> None:
        """Count an evaluation and put the warm start in place."""
        self.objective.n_fun += 1
        self.objective.load_warm_state(self.warm)
        if self.warm is None:
            self.warm = self.objective.warm_state()

    def _end(self) -> None:
        """Keep what the loss says about this evaluation: after the next one it speaks of another."""
        self.settled = self.objective.warm_state()
        self.objective.latest = self
        self.noise_floor = self.objective.floor("noise_floor", self._shaped)
        self.value_noise = self.objective.floor("value_noise", self._shaped)

    @cached_property
    def _pair(self) -> tuple[float, Tensor]:
        self._begin()
        self.objective.n_grad += 1
        value, grad = self.objective.loss.value_and_grad(self._shaped)
        self._end()
        grad = torch.as_tensor(grad).detach().to(dtype=self.objective.dtype, device=self.objective.device)
        if grad.numel() != self.objective.n:
            raise ValueError(f"value_and_grad must return a gradient like x, got shape {tuple(grad.shape)}")
        return float(value), grad.reshape(-1)

    @cached_property
    def _graph(self) -> tuple[Tensor, Tensor]:
        """(leaf, scalar) with the graph of the forward pass."""
        leaf = self._shaped.detach().clone().requires_grad_(True)
        self._begin()
        with torch.enable_grad():
            out = self.objective.loss(leaf)
            self._end()
            scalar = out.reshape(()) if isinstance(out, Tensor) and out.numel() == 1 else None
        if scalar is None:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise TypeError(f"loss must return a scalar tensor, got {got}")
        return leaf, scalar

    @cached_property
    def value(self) -> float:
        """f(x)."""
        return self._pair[0] if self.objective.has_pair else float(self._graph[1].detach())

    @cached_property
    def _graph_grad(self) -> Tensor:
        """Gradient, like x, with its graph where it has one."""
        leaf, out = self._graph
        self.objective.n_grad += 1
        if not out.requires_grad:
            return torch.zeros_like(leaf)
        with torch.enable_grad():
            return gradient(out, leaf, None, leaf.shape, create_graph=True)

    @cached_property
    def grad(self) -> Tensor:
        """(N,) gradient."""
        if self.objective.has_pair:
            return self._pair[1]
        return self._graph_grad.detach().reshape(-1)

    @cached_property
    def grad_norm(self) -> float:
        """|grad|, in float64."""
        return float(self.grad.to(torch.float64).norm())

    @property
    def finite(self) -> bool:
        """Whether value and gradient are finite."""
        return math.isfinite(self.value) and math.isfinite(self.grad_norm)

    @cached_property
    def hessian(self) -> LinearMap:
        """The Hessian as an operator on `(N,)` and `(N, k)`; products are counted."""
        return self._counted(self._inner_product())

    def _counted(self, inner: Callable[[Tensor], Tensor]) -> LinearMap:
        objective = self.objective

        def counted(v: Tensor) -> Tensor:
            product = inner(v)
            objective.count_product(v, product)
            if objective.latest is self:
                # The loss may have learned from the product where to start the next evaluation.
                self.settled = objective.warm_state()
            return product

        return LinearMap(
            objective.n, counted, dtype=objective.dtype, device=objective.device, takes_blocks=True
        )

    @property
    def step_hessian(self) -> LinearMap:
        """What steps are made of: the surrogate if there is one, else the Hessian."""
        return self.hessian if self.objective.surrogate is None else self._surrogate

    @cached_property
    def _surrogate(self) -> LinearMap:
        function = self.objective.surrogate
        assert function is not None
        return self._counted(self._by_columns(lambda v: function(self._shaped, v)))

    def _inner_product(self) -> Callable[[Tensor], Tensor]:
        objective = self.objective
        if callable(objective.hvp):
            function = objective.hvp
            return self._by_columns(lambda v: function(self._shaped, v))
        if objective.hvp == "finite-difference":
            return self._by_columns(self._difference)
        if objective.hess is not None:
            view = as_linear_map(
                objective.hess(self._shaped), n=objective.n, dtype=objective.dtype, device=objective.device
            )
            return lambda v: view @ v
        if objective.has_pair:
            return self._by_columns(lambda v: objective.loss.hvp(self._shaped, v))
        return self._double_backward

    def _by_columns(self, product: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
        """Products of a function of x-shaped vectors, column by column."""
        objective = self.objective

        def one(v: Tensor) -> Tensor:
            out = torch.as_tensor(product(v.reshape(objective.shape))).detach().reshape(-1)
            return out.to(dtype=objective.dtype, device=objective.device)

        def apply(v: Tensor) -> Tensor:
            return one(v) if v.ndim == 1 else torch.stack([one(v[:, j]) for j in range(v.shape[1])], 1)

        return apply

    def _difference(self, v: Tensor) -> Tensor:
        """Central difference of gradients: error of order `eps_mach^(2/3)`, relative."""
        v = v.reshape(-1)
        length = float(v.norm())
        if length == 0.0:
            return torch.zeros_like(v)
        scale = float(self.x.norm()) or 1.0
        step = torch.finfo(v.dtype).eps ** (1 / 3) * scale / length
        with self.objective.frozen():
            ahead, behind = self.moved(self.x + step * v), self.moved(self.x - step * v)
            change = ahead.grad - behind.grad
        change /= 2 * step
        return change

    def _double_backward(self, v: Tensor) -> Tensor:
        leaf, grad = self._graph[0], self._graph_grad
        if not grad.requires_grad:
            self._check_linear()
            return torch.zeros_like(v)
        block = v[:, None] if v.ndim == 1 else v
        rows = block.T
        parts = [self._rows(leaf, grad, rows[i : i + BLOCK]) for i in range(0, rows.shape[0], BLOCK)]
        out = torch.cat(parts).T if parts else block.clone()
        return out[:, 0] if v.ndim == 1 else out

    def _rows(self, leaf: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
        """`H rows^T` as rows, by one vectorized double backward where every operation allows it."""
        shaped = rows.reshape(rows.shape[0], *leaf.shape)
        try:
            if rows.shape[0] > 1 and self.objective.vmap_works:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)
                        out = gradient(grad, leaf, shaped, shaped.shape, is_grads_batched=True)
                    return out.detach().reshape(rows.shape)
                except (RuntimeError, NotImplementedError):
                    self.objective.vmap_works = False
            each = [gradient(grad, leaf, row, leaf.shape).detach().reshape(-1) for row in shaped]
            return torch.stack(each)
        except RuntimeError as error:
            raise OTNewtonError(
                f"the loss cannot be differentiated twice ({self._suspects()}): {error}; "
                "use hvp='finite-difference' or pass hvp="
            ) from error

    def _check_linear(self) -> None:
        """A gradient without a graph is right for a linear loss only: compare two gradients.

        Raises:
            OTNewtonError: the gradient changes with x, so a backward pass in the loss is detached.
        """
        if self.objective.linear_checked:
            return
        self.objective.linear_checked = True
        step = torch.finfo(self.x.dtype).eps ** (1 / 3) * (float(self.x.abs().max()) or 1.0)
        signs = torch.ones_like(self.x)
        signs[1::2] = -0.5
        with self.objective.frozen():
            other = self.moved(self.x + step * signs).grad
        change = float((other - self.grad).norm())
        if change > 1e3 * torch.finfo(self.x.dtype).eps * max(self.grad_norm, float(other.norm())):
            raise OTNewtonError(
                f"the gradient of the loss changes with x but carries no graph: a backward pass is detached "
                f"({self._suspects()}); use hvp='finite-difference' or pass hvp="
            )

    def _suspects(self) -> str:
        """Names of the custom autograd Functions in the graph, else of its last operation."""
        custom, operations = graph_names(self._graph[1])
        if custom:
            return "custom Function: " + ", ".join(custom)
        return f"last operation: {operations[0] if operations else 'none'}"

    def objective_cause(self) -> str:
        """The usual cause of a wrong double backward, from the operations in the graph."""
        custom, operations = graph_names(self._graph[1])
        if any(name.startswith("linear_operator") for name in custom):
            return (
                "linear_operator matmul is once differentiable: its backward is detached from its arguments"
            )
        if custom:
            return (
                f"the backward of {', '.join(custom)} is not differentiable: it saves an intermediate on "
                "ctx, or works on detached tensors; save inputs only, or use hvp='finite-difference'"
            )
        if any("Cdist" in name or "EuclideanDist" in name for name in operations):
            return "cdist has no second derivative at coincident points: write out the squared differences"
        return "a backward pass in the loss is not twice differentiable; use hvp='finite-difference'"
