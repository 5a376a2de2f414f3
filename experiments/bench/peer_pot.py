"""POT: the inner line of its kernel-matrix Sinkhorn, and its log-domain and lazy solvers on torch tensors."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.experiments.bench.harness import Job
from ot_newton.experiments.bench.tasks import MAX_ITER, Rule, Task, quiet

if TYPE_CHECKING:
    from ot_newton.experiments.bench.half_case import HalfCase
    from ot_newton.problem import OTProblem

__all__ = ["backward", "forward", "half_iteration", "hessian", "hvp", "loss"]

BATCH = 1024
"""Rows of a block of its lazy solver, which takes 100 by default."""


def half_iteration(case: HalfCase) -> Job:
    """`u = 1 / (diag(1/a) K v)`, as `ot.bregman.sinkhorn_knopp` writes it, through POT's numpy backend.

    It keeps the matrix `diag(1/a) K` in float32 and is not log-stable.
    """
    import ot
    from ot.backend import get_backend

    p = case.problem
    cost = ot.dist(p.x.numpy(), p.y.numpy()).astype(np.float32)
    a = np.full(p.n, 1.0 / p.n, np.float32)
    kernel = np.exp(cost / np.float32(-p.eps))
    scaled = (1 / a).reshape(-1, 1) * kernel
    v = np.exp(case.g.numpy().astype(np.float64) / p.eps + case.log_weight).astype(np.float32)
    nx = get_backend(scaled)
    return Job(
        lambda: 1.0 / nx.dot(scaled, v),
        lambda u: p.eps * np.log(u.astype(np.float64) / a),
    )


def _options(problem: OTProblem, rule: Rule, *, lazy: bool) -> dict[str, Any]:
    """Of `ot.solve_sample`, whose test is the L2 error of the column sums, the lazy one's the L1 of the rows.

    An L2 error of `tol / sqrt(m)` is an L1 error of at most tol.
    """
    if rule.iterations:
        out: dict[str, Any] = {"max_iter": rule.iterations, "tol": 0.0}
    else:
        out = {"max_iter": MAX_ITER, "tol": rule.tol if lazy else rule.tol / problem.m**0.5}
    return out | ({"lazy": True, "batch_size": BATCH} if lazy else {})


def _solve(problem: OTProblem, options: dict[str, Any], x: Tensor, grad: str) -> Any:
    import ot

    p = problem
    if p.cost_scale != 1.0 or p.rho_x != p.rho_y:
        raise ValueError("POT is run at the full squared distance with equal penalties")
    relaxed = {} if p.balanced else {"unbalanced": p.rho_x}
    return ot.solve_sample(x, p.y, p.a, p.b, reg=p.eps, reg_type="KL", grad=grad, **options, **relaxed)


def _solved(problem: OTProblem, out: Any) -> dict[str, Any]:
    """Its log-scalings, `log u = f/eps + log a`, as potentials; with relaxed sides they hold no weights."""
    logs = (problem.a.double().log(), problem.b.double().log())
    f, g = (
        problem.eps * (part.detach().double() - (log if problem.balanced else 0.0)).numpy()
        for part, log in zip(out.potentials, logs, strict=True)
    )
    return {"f": f, "g": g}


def forward(task: Task, kind: str, update: str = "alternating") -> Job:
    """`ot.solve_sample`, by the stored cost ("log") or in blocks ("lazy", which gives no value)."""
    options = _options(task.problem, task.rule, lazy=kind == "lazy")
    p = task.problem
    return quiet(lambda: _solve(p, options, p.x, "detach"), lambda out: _solved(p, out))


def backward(task: Task, kind: str) -> Job:
    """`grad="envelope"` and torch's backward."""
    p, options = task.problem, _options(task.problem, task.rule, lazy=kind == "lazy")

    def run() -> tuple[Any, Tensor]:
        x = p.x.clone().requires_grad_()
        out = _solve(p, options, x, "envelope")
        return out, torch.autograd.grad(out.value, x)[0]

    return quiet(run, lambda pair: _solved(p, pair[0]) | {"gradient": pair[1].double().numpy()})


def hvp(task: Task, kind: str) -> Job:
    """`grad="autodiff"`, the unrolled iterations, and a double backward."""
    p, options = task.problem, _options(task.problem, task.rule, lazy=kind == "lazy")

    def product(v: Tensor) -> tuple[Any, Tensor]:
        x = p.x.clone().requires_grad_()
        out = _solve(p, options, x, "autodiff")
        (gradient,) = torch.autograd.grad(out.value, x, create_graph=True)
        return out, torch.autograd.grad(gradient, x, v)[0]

    def answer(pair: tuple[Any, Tensor]) -> dict[str, Any]:
        rest = [product(v)[1] for v in task.vectors[1:]]
        return _solved(p, pair[0]) | {"products": torch.stack([pair[1], *rest]).double().numpy()}

    return quiet(lambda: product(task.vectors[0]), answer)


def hessian(x: Any, y: Any, eps: float, grad: str) -> Any:
    """`torch.autograd.functional.hessian` of `ot.solve_sample(...).value`, (nd, nd), float64.

    Args:
        x: (n,d) numpy.
        y: (m,d) numpy.
        eps: POT's reg, with the KL regularizer.
        grad: POT's derivative mode, "autodiff" or "envelope".
    """
    import ot

    target = torch.tensor(y)

    def value(cloud: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ot.solve_sample(cloud, target, reg=eps, reg_type="KL", grad=grad).value
        return out

    start = torch.tensor(x)
    matrix = torch.autograd.functional.hessian(value, start)  # type: ignore[no-untyped-call]
    return matrix.reshape(start.numel(), start.numel()).numpy()


def loss(problem: OTProblem, rule: Rule, *, debias: bool) -> dict[str, Any]:
    """Value, gradient in x and potentials; hard sides by `grad="envelope"`.

    The KL terms of its relaxed value leave out the masses (the value is then 0 at every optimum): they are
    put back, and the sum is differentiated through the iterations, since POT has no envelope gradient
    there.

    Args:
        problem: float64.
        rule: when to stop.
        debias: its divergence, which has no term of the masses.
    """
    p = problem
    options = _options(p, rule, lazy=False) | ({"debias": True} if debias else {})
    x = p.x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a count is asked for
        out = _solve(p, options, x, "envelope" if p.balanced else "autodiff")
        solved = _solved(p, out)
    value = out.value
    if p.rho_x is not None:
        a, b, mass = p.a.sum(), p.b.sum(), out.plan.sum()
        value = value + p.eps * (a * b - mass) + p.rho_x * (a + b - 2 * mass)
    (gradient,) = torch.autograd.grad(value, x)
    solved |= {"value": float(value), "gradient": gradient.numpy(), "iterations": rule.iterations or None}
    return solved if p.balanced else solved | {"value_own": float(out.value)}
