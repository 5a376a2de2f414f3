"""Our backends, called as a user calls them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ot_newton.experiments.bench.harness import Job
from ot_newton.experiments.bench.tasks import MAX_ITER, Rule, Task
from ot_newton.losses import SinkhornLoss
from ot_newton.problem import OTProblem
from ot_newton.result import SinkhornResult
from ot_newton.solve import sinkhorn

__all__ = ["backward", "forward", "hvp", "loss"]

Answer = dict[str, Any]


def _options(rule: Rule) -> dict[str, Any]:
    """Of `sinkhorn`."""
    if rule.iterations:
        return {"tol": 0.0, "max_iter": rule.iterations, "anneal": False}
    return {"tol": rule.tol, "max_iter": MAX_ITER}


def _placed(task: Task, backend: str) -> Task:
    """On the GPU for the Triton backend."""
    return task.on("cuda") if backend.startswith("triton") else task


def _wait(task: Task) -> None:
    if task.problem.device.type == "cuda":
        torch.cuda.synchronize()


def _numbers(tensor: Tensor) -> Any:
    return tensor.detach().cpu().double().numpy()


def _solved(result: SinkhornResult) -> Answer:
    return {
        "f": _numbers(result.f),
        "g": _numbers(result.g),
        "value": float(result.value),
        "iterations": result.n_iter,
        "plan_passes": result.plan_passes,
    }


def forward(task: Task, backend: str, update: str = "alternating") -> Job:
    """`sinkhorn` and the value."""
    placed = _placed(task, backend)

    def run() -> SinkhornResult:
        result = sinkhorn(placed.problem, backend=backend, update=update, **_options(task.rule))
        _ = result.value
        _wait(placed)
        return result

    return Job(run, _solved)


def backward(task: Task, backend: str) -> Job:
    """`SinkhornLoss` and the gradient of its value in x, by autograd."""
    placed = _placed(task, backend)
    p = placed.problem
    loss = SinkhornLoss(
        p.eps, cost_scale=p.cost_scale, rho_x=p.rho_x, rho_y=p.rho_y, warm_start=False, backend=backend,
        **_options(task.rule),
    )  # fmt: skip

    def run() -> Tensor:
        x = p.x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(p.a, x, p.b, p.y), x)
        _wait(placed)
        return gradient

    def answer(gradient: Tensor) -> Answer:
        assert loss.last_result is not None
        return _solved(loss.last_result) | {"gradient": _numbers(gradient)}

    return Job(run, answer)


def hvp(task: Task, backend: str) -> Job:
    """`sinkhorn` and `hessian("x") @ v`."""
    placed = _placed(task, backend)

    def run() -> tuple[SinkhornResult, Tensor]:
        result = sinkhorn(placed.problem, backend=backend, **_options(task.rule))
        product = result.hessian("x") @ placed.vectors[0]
        _wait(placed)
        return result, product

    def answer(output: tuple[SinkhornResult, Tensor]) -> Answer:
        result, product = output
        solved = _solved(result)
        rest = [result.hessian("x") @ v for v in placed.vectors[1:]]
        return solved | {"products": _numbers(torch.stack([product, *rest]))}

    return Job(run, answer)


def loss(problem: OTProblem, rule: Rule, *, debias: bool) -> Answer:
    """Value, gradient in x and potentials, for the parity table.

    Args:
        problem: float64.
        rule: when to stop.
        debias: the divergence in place of OT.
    """
    p = problem
    module = SinkhornLoss(
        p.eps, debias, p.cost_scale, rho_x=p.rho_x, rho_y=p.rho_y, warm_start=False, backend="cpu",
        **_options(rule),
    )  # fmt: skip
    x = p.x.clone().requires_grad_()
    value = module(p.a, x, p.b, p.y)
    (gradient,) = torch.autograd.grad(value, x)
    assert module.last_result is not None
    return _solved(module.last_result) | {"value": float(value), "gradient": _numbers(gradient)}
