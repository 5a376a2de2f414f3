"""GeomLoss: `SamplesLoss("sinkhorn", p=2)`, whose cost is half the squared distance and whose eps is blur^2.

Ours with `C = s |x - y|^2` at eps is `2 s` times GeomLoss's at `blur^2 = eps / (2 s)`. It has no stopping
rule, only a schedule of temperatures from ``diameter`` down to ``blur``: a count of iterations at one
temperature is asked for by a diameter and a scaling that are apart from blur and 1 by 1e-9.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ot_newton.experiments.bench.harness import Job
from ot_newton.experiments.bench.reference import Softmins, count_for
from ot_newton.experiments.bench.tasks import Rule, Task

if TYPE_CHECKING:
    from ot_newton.problem import OTProblem

__all__ = ["backward", "forward", "hessian", "hvp", "loss"]

STEP = 1e-9
SCALING = 0.9999
ENDS = 2
"""Iterations besides the temperatures': the first, unaveraged one and the last extrapolation."""


def _constant(blur: float, count: int) -> dict[str, Any]:
    """Options that make ``count`` iterations at the temperature blur^2, count >= 4.

    The schedule is the diameter, then `arange` from its logarithm to that of blur, then blur.
    """
    between = count - ENDS - 2
    return {"diameter": blur * math.exp((between - 0.5) * STEP), "scaling": math.exp(-STEP)}


def _samples_loss(problem: OTProblem, backend: str, *, debias: bool = False, **options: Any) -> Any:
    from geomloss import SamplesLoss

    if problem.rho_x != problem.rho_y:
        raise ValueError("GeomLoss has one reach for both sides")
    factor = 2 * problem.cost_scale
    reach = None if problem.rho_x is None else math.sqrt(problem.rho_x / factor)
    return SamplesLoss(
        "sinkhorn",
        p=2,
        blur=math.sqrt(problem.eps / factor),
        reach=reach,
        debias=debias,
        backend=backend,
        **options,
    )


def _count(task: Task) -> int:
    """Iterations for the task's rule; to converge, the fewest, in tens, that meet the tolerance."""
    if task.counted:
        return task.rule.iterations
    return count_for(Softmins(task.problem), "geomloss", task.rule.tol)


class _Call:
    """The loss of a task at constant temperature, and its potentials in our convention."""

    def __init__(self, task: Task, backend: str) -> None:
        self.problem, self.backend = task.problem, backend
        self.factor = 2 * task.problem.cost_scale
        self.count = _count(task)
        self.options = _constant(math.sqrt(task.problem.eps / self.factor), self.count)
        self.loss = _samples_loss(task.problem, backend, **self.options)

    def value(self, x: Tensor) -> Tensor:
        p = self.problem
        out: Tensor = self.factor * self.loss(p.a, x, p.b, p.y)
        return out

    def solved(self) -> dict[str, Any]:
        p = self.problem
        pair = _samples_loss(p, self.backend, potentials=True, **self.options)(p.a, p.x, p.b, p.y)
        f, g = (self.factor * part.detach().reshape(-1).double().numpy() for part in pair)
        return {"f": f, "g": g, "iterations": self.count}


def forward(task: Task, backend: str, update: str = "symmetric") -> Job:
    """The value; the updates are always symmetric."""
    call = _Call(task, backend)
    return Job(lambda: call.value(task.problem.x), lambda out: call.solved() | {"value": float(out)})


def backward(task: Task, backend: str) -> Job:
    """The value's gradient in x by autograd, through the last extrapolation."""
    call = _Call(task, backend)

    def run() -> Tensor:
        x = task.problem.x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(call.value(x), x)
        return gradient

    return Job(run, lambda out: call.solved() | {"gradient": out.double().numpy()})


def hvp(task: Task, backend: str) -> Job:
    """A double backward: it runs, and differentiates the last extrapolation only."""
    call = _Call(task, backend)

    def product(v: Tensor) -> Tensor:
        x = task.problem.x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(call.value(x), x, create_graph=True)
        (out,) = torch.autograd.grad(gradient, x, v)
        return out

    def answer(out: Tensor) -> dict[str, Any]:
        products = torch.stack([out, *(product(v) for v in task.vectors[1:])])
        return call.solved() | {"products": products.double().numpy()}

    return Job(lambda: product(task.vectors[0]), answer)


def hessian(x: Any, y: Any, eps: float) -> Any:
    """`torch.autograd.functional.hessian` of `SamplesLoss("sinkhorn", p=2)`, (nd, nd), float64.

    Args:
        x: (n,d) numpy.
        y: (m,d) numpy.
        eps: blur squared; the cost is half the squared distance.
    """
    from geomloss import SamplesLoss

    loss = SamplesLoss("sinkhorn", p=2, blur=eps**0.5, scaling=0.99, debias=False, backend="tensorized")
    target = torch.tensor(y)
    start = torch.tensor(x)
    matrix = torch.autograd.functional.hessian(lambda cloud: loss(cloud, target), start)  # type: ignore[no-untyped-call]
    return matrix.reshape(start.numel(), start.numel()).numpy()


def loss(problem: OTProblem, rule: Rule, *, debias: bool) -> dict[str, Any]:
    """Value, gradient in x and potentials, float64, tensorized.

    A count is at constant temperature; to convergence is its annealing with scaling .9999. Its value of a
    relaxed problem is ours minus `eps (m_a m_b - (m_a + m_b)/2)`, which is put back.

    Args:
        problem: float64.
        rule: when to stop.
        debias: the divergence.
    """
    p, factor = problem, 2 * problem.cost_scale
    blur = math.sqrt(p.eps / factor)
    options: dict[str, Any] = _constant(blur, rule.iterations) if rule.iterations else {"scaling": SCALING}
    x = p.x.clone().requires_grad_()
    value = factor * _samples_loss(p, "tensorized", debias=debias, **options)(p.a, x, p.b, p.y)
    (gradient,) = torch.autograd.grad(value, x)
    pair = _samples_loss(p, "tensorized", potentials=True, **options)(p.a, p.x, p.b, p.y)
    f, g = (factor * part.detach().reshape(-1).numpy() for part in pair)
    total = float(value)
    if not p.balanced and not debias:
        mass = float(p.a.sum()), float(p.b.sum())
        total += p.eps * (mass[0] * mass[1] - (mass[0] + mass[1]) / 2)
    return {
        "f": f,
        "g": g,
        "value": total,
        "gradient": gradient.numpy(),
        "iterations": rule.iterations or None,
    }
