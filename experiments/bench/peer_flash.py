"""flash-sinkhorn (0.4): `SamplesLoss` with alternating updates at constant eps; CUDA only.

Its only stopping rule is a change of the potentials, so a task to convergence gets the count of iterations
that its order of updates needs. TF32 is switched off, to match the float32 of the others.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ot_newton.experiments.bench.harness import Job
from ot_newton.experiments.bench.reference import Softmins, count_for
from ot_newton.experiments.bench.tasks import Task

__all__ = ["backward", "forward", "hvp"]

SCHEME = "x first"


class _Call:
    """The loss of a task on the GPU, and its potentials.

    Raises:
        RuntimeError: no CUDA device, before the package is looked for.
    """

    def __init__(self, task: Task) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device")
        self.count = task.rule.iterations or count_for(Softmins(task.problem), SCHEME, task.rule.tol)
        self.task = task.on("cuda")
        self.loss = self._make(potentials=False)

    def _make(self, *, potentials: bool) -> Any:
        p = self.task.problem
        if p.cost_scale not in (0.5, 1.0):
            raise ValueError(f"flash-sinkhorn's cost_scale is 1 or 1/2, got {p.cost_scale:g}")
        return importlib.import_module("flash_sinkhorn").SamplesLoss(
            "sinkhorn",
            backend="alternating",
            half_cost=p.cost_scale == 0.5,
            eps=p.eps,
            blur=p.eps**0.5,
            n_iters=self.count,
            use_epsilon_scaling=False,
            allow_tf32=False,
            potentials=potentials,
        )

    def value(self, x: Tensor) -> Tensor:
        p = self.task.problem
        out: Tensor = self.loss(p.a, x, p.b, p.y)
        return out

    def gradient(self, *, create_graph: bool) -> tuple[Tensor, Tensor]:
        """The point and the gradient there."""
        x = self.task.problem.x.clone().requires_grad_()
        return x, torch.autograd.grad(self.value(x), x, create_graph=create_graph)[0]

    def solved(self) -> dict[str, Any]:
        p = self.task.problem
        f, g = self._make(potentials=True)(p.a, p.x, p.b, p.y)
        return {"f": _numbers(f), "g": _numbers(g), "iterations": self.count}


def _numbers(tensor: Tensor) -> Any:
    return tensor.detach().cpu().double().numpy()


def _waited(out: Tensor) -> Tensor:
    torch.cuda.synchronize()
    return out


def forward(task: Task, kind: str, update: str = "alternating") -> Job:
    """The value."""
    call = _Call(task)
    return Job(
        lambda: _waited(call.value(call.task.problem.x)), lambda out: call.solved() | {"value": float(out)}
    )


def backward(task: Task, kind: str) -> Job:
    """Its analytic gradient, by autograd."""
    call = _Call(task)
    return Job(
        lambda: _waited(call.gradient(create_graph=False)[1]),
        lambda out: call.solved() | {"gradient": _numbers(out)},
    )


def hvp(task: Task, kind: str) -> Job:
    """Its Hessian-vector product, by a double backward."""
    call = _Call(task)

    def product(v: Tensor) -> Tensor:
        x, gradient = call.gradient(create_graph=True)
        return _waited(torch.autograd.grad(gradient, x, v)[0])

    def answer(out: Tensor) -> dict[str, Any]:
        products = torch.stack([out, *(product(v) for v in call.task.vectors[1:])])
        return call.solved() | {"products": _numbers(products)}

    return Job(lambda: product(call.task.vectors[0]), answer)
