"""Follow the smallest curvature through a run: when to probe, at what cost, and a record of each probe."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import check_choice, check_integer, check_number
from ot_newton.solvers.linear_map import LinearMap, as_linear_map
from ot_newton.solvers.objective import Objective, as_start
from ot_newton.solvers.spectra import EigenEstimate, lambda_min

__all__ = ["LanczosMonitor", "MonitorRecord", "loss_hessian"]


@dataclass(frozen=True)
class MonitorRecord:
    """One probe.

    Attributes:
        step: the caller's step.
        lambda_min: smallest curvature found (an upper bound of the true one).
        lambda_max: largest.
        sign: verdict of the estimate.
        confidence: see `EigenEstimate`.
        noise_floor: likewise.
        residual: likewise.
        n_hvp: products of this probe.
        total_hvp: products of all probes so far.
        seconds: time of this probe.
    """

    step: int
    lambda_min: float
    lambda_max: float
    sign: str
    confidence: float
    noise_floor: float
    residual: float
    n_hvp: int
    total_hvp: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and words."""
        return asdict(self)


class LanczosMonitor:
    """Estimates lambda_min every so often; call it as `monitor(step, loss_or_operator, x)`.

    Args:
        every: steps between two probes.
        trigger: "steps", or "stall": probe only while the gradient norm has fallen by less than
            ``stall`` (relative) since the last check, at most every ``every`` steps.
        stall: see ``trigger``; needs ``grad_norm`` in the call.
        max_hvp: cap on the products of all probes; None for none. A probe that could exceed it is not made.
        max_steps: cap on the Lanczos steps of each start.
        threshold: level to certify, relative to lambda_max.
        confidence: confidence of that.
        tol: residual tolerance of the Ritz pair, relative to |H|.
        seed: every probe draws fresh starts from it.
        params: parameters to differentiate for, where the loss is a scalar tensor; found in its graph
            if None.
        nullspace: (N, m) directions projected out.

    Attributes:
        history: a `MonitorRecord` per probe.
        last: the last `EigenEstimate`, None before the first.
        n_hvp: products spent.

    Example:
        >>> import torch
        >>> monitor = LanczosMonitor(every=2)
        >>> weight = torch.tensor([0.1, 0.2], dtype=torch.float64, requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> for step in range(4):
        ...     optimizer.zero_grad()
        ...     loss = weight[0] ** 2 - weight[1] ** 2
        ...     record = monitor(step, loss)
        ...     loss.backward()
        ...     optimizer.step()
        >>> [(r.step, r.lambda_min, r.sign, r.n_hvp) for r in monitor.history]
        [(0, -2.0, 'negative', 2), (2, -2.0, 'negative', 2)]
    """

    def __init__(
        self,
        *,
        every: int = 10,
        trigger: str = "steps",
        stall: float = 0.1,
        max_hvp: int | None = None,
        max_steps: int | None = None,
        threshold: float = 0.0,
        confidence: float = 0.99,
        tol: float = 1e-3,
        seed: int = 0,
        params: Iterable[Tensor] | None = None,
        nullspace: Tensor | None = None,
        dense_below: int = 200,
    ) -> None:
        self.every = check_integer("every", every, low=1)
        self.trigger = check_choice("trigger", trigger, ("steps", "stall"))
        self.stall = check_number("stall", stall)
        self.max_hvp = None if max_hvp is None else check_integer("max_hvp", max_hvp)
        self.max_steps = None if max_steps is None else check_integer("max_steps", max_steps, low=1)
        self.seed = check_integer("seed", seed)
        self.params = None if params is None else list(params)
        self.dense_below = check_integer("dense_below", dense_below)
        self.options: dict[str, Any] = {
            "threshold": check_number("threshold", threshold, low=-1.0, strict=False),
            "confidence": check_number("confidence", confidence, high=1.0),
            "tol": check_number("tol", tol, strict=False),
            "nullspace": nullspace,
        }
        self.history: list[MonitorRecord] = []
        self.last: EigenEstimate | None = None
        self.n_hvp = 0
        self._last_step: int | None = None
        self._last_norm: float | None = None

    def due(self, step: int, grad_norm: float | None = None) -> bool:
        """Whether `step` is one to probe at; keeps count of gradient norms for the "stall" trigger."""
        if self.trigger == "steps":
            return step % self.every == 0
        if grad_norm is None:
            raise ValueError('grad_norm must be given with trigger="stall", got None')
        if self._last_step is not None and step - self._last_step < self.every:
            return False
        stalled = self._last_norm is not None and grad_norm > (1.0 - self.stall) * self._last_norm
        self._last_step, self._last_norm = step, grad_norm
        return stalled

    def affordable(self, n: int) -> bool:
        """Whether a probe in dimension n fits what is left of ``max_hvp``."""
        return self.max_hvp is None or self.n_hvp + self._worst(n) <= self.max_hvp

    def _worst(self, n: int) -> int:
        return n if n <= self.dense_below else 2 * min(n, self.max_steps or 300) + 1

    def __call__(
        self, step: int, loss: Any, x: Tensor | None = None, *, grad_norm: float | None = None
    ) -> MonitorRecord | None:
        """Probe if `step` is due and the budget allows.

        Args:
            step: the caller's step index.
            loss: an operator; a scalar tensor with its graph; a function of x; or a function of nothing
                that returns the scalar tensor.
            x: the point, for a function of x or a loss object.
            grad_norm: needed by the "stall" trigger.

        Returns:
            The record, or None if nothing was probed.
        """
        if not self.due(step, grad_norm):
            return None
        return self.probe(step, loss, x)

    def probe(self, step: int, loss: Any, x: Tensor | None = None, **floors: Any) -> MonitorRecord | None:
        """Probe now, unless the budget forbids it; arguments as for a call."""
        operator = loss_hessian(loss, x, self.params)
        if not self.affordable(operator.n):
            return None
        began = time.perf_counter()
        estimate = lambda_min(
            operator,
            seed=self.seed + 101 * (len(self.history) + 1),
            max_steps=self.max_steps,
            dense_below=self.dense_below,
            **self.options,
            **floors,
        )
        self.n_hvp += estimate.n_hvp
        self.last = estimate
        record = MonitorRecord(
            step=step,
            lambda_min=estimate.value,
            lambda_max=estimate.lambda_max,
            sign=estimate.sign,
            confidence=estimate.confidence,
            noise_floor=estimate.noise_floor,
            residual=estimate.residual,
            n_hvp=estimate.n_hvp,
            total_hvp=self.n_hvp,
            seconds=time.perf_counter() - began,
        )
        self.history.append(record)
        return record

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {
            "history": [record.as_dict() for record in self.history],
            "n_hvp": self.n_hvp,
            "last_step": self._last_step,
            "last_norm": self._last_norm,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        known = {f.name for f in fields(MonitorRecord)}
        self.history = [MonitorRecord(**{k: v for k, v in r.items() if k in known}) for r in state["history"]]
        self.n_hvp = int(state["n_hvp"])
        self._last_step, self._last_norm = state["last_step"], state["last_norm"]


def loss_hessian(loss: Any, x: Tensor | None = None, params: list[Tensor] | None = None) -> LinearMap:
    """The Hessian of whatever a training loop has at hand; see `LanczosMonitor.__call__`.

    Raises:
        TypeError: none of the accepted forms.
    """
    if isinstance(loss, LinearMap):
        return loss
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return _graph_hessian(loss.reshape(()), params)
    if x is not None:
        point = as_start(x)
        return Objective(loss, point).at(point.reshape(-1)).hessian
    if len(getattr(loss, "shape", ())) >= 2 and hasattr(type(loss), "__matmul__"):
        return as_linear_map(loss)
    if callable(loss) and not isinstance(loss, Tensor):
        with torch.enable_grad():
            out = loss()
        if isinstance(out, Tensor) and out.numel() == 1 and out.requires_grad:
            return _graph_hessian(out.reshape(()), params)
    raise TypeError(
        "loss must be an operator, a scalar tensor with its graph, a function of nothing that returns one, "
        f"or a function of x given with x; got {type(loss).__name__}"
    )


def _leaves(out: Tensor) -> list[Tensor]:
    """Leaf tensors that `out` depends on, in the order of the graph."""
    found: list[Tensor] = []
    stack, seen = [out.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and not any(variable is other for other in found):
            found.append(variable)
        stack.extend(parent for parent, _ in reversed(node.next_functions))
    return found


def _graph_hessian(out: Tensor, params: list[Tensor] | None) -> LinearMap:
    leaves = [p for p in (params if params is not None else _leaves(out)) if p.requires_grad]
    if not leaves:
        raise TypeError("loss must depend on parameters that require grad, found none in its graph")
    firsts: Any = torch.autograd.grad(out, leaves, create_graph=True, allow_unused=True)
    flat = _flatten(firsts, leaves)

    def product(v: Tensor) -> Tensor:
        if not flat.requires_grad:
            return torch.zeros_like(v)
        parts: Any = torch.autograd.grad(flat, leaves, v, retain_graph=True, allow_unused=True)
        return _flatten(parts, leaves)

    return LinearMap(flat.numel(), product, dtype=flat.dtype, device=flat.device, takes_blocks=False)


def _flatten(parts: Sequence[Tensor | None], like: list[Tensor]) -> Tensor:
    """One vector of gradients; zero where the graph does not reach."""
    pairs = zip(parts, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])
