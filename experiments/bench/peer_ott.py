"""OTT-JAX, through its own geometry and solver; jax is imported here and not before.

Its potentials hold the log-weights. With relaxed marginals OTT regularizes against the counting measure,
`eps <P, log P>`, where we have `eps KL(P|ab)`: the cost `C - eps log a - eps log b` makes both the same
problem, and its potentials are then ours. Its `reg_ot_cost` takes `eps log a` off them all the same, so the
value of a relaxed problem is made of the potentials by OTT's own `phi_star`.

OTT 0.6.0's online geometry uses `jax.interpreters.batching.is_vmappable`, which jax 0.10 no longer has in
public; it is put back there, so that OTT is compared and not its pin.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ot_newton.experiments.bench.harness import Job
from ot_newton.experiments.bench.tasks import MAX_ITER, Rule, Task

if TYPE_CHECKING:
    from ot_newton.experiments.bench.half_case import HalfCase
    from ot_newton.problem import OTProblem

__all__ = ["GEOMETRIES", "backward", "forward", "half_iteration", "hessian_by_jax", "hvp", "loss"]

GEOMETRIES = ("point cloud", "stored cost", "online")
ONLINE_BATCH = 1024
EVERY = 10
"""Iterations between two looks of OTT at its error."""


def _geometry(kind: str, x: Any, y: Any, eps: float) -> Any:
    from ott.geometry import geometry, pointcloud

    if kind == "online":
        _restore_vmappable()
        return pointcloud.PointCloud(x, y, epsilon=eps, batch_size=min(ONLINE_BATCH, x.shape[0]))
    cloud = pointcloud.PointCloud(x, y, epsilon=eps)
    return cloud if kind == "point cloud" else geometry.Geometry(cost_matrix=cloud.cost_matrix, epsilon=eps)


def _restore_vmappable() -> None:
    """Give jax the name back that OTT's online geometry looks for."""
    public = importlib.import_module("jax.interpreters.batching")
    if not hasattr(public, "is_vmappable"):
        vars(public)["is_vmappable"] = importlib.import_module("jax._src.interpreters.batching").is_vmappable


def half_iteration(case: HalfCase, kind: str) -> Job:
    """`Geometry.update_potential`, jitted: one log-sum-exp over the columns.

    Args:
        case: the task.
        kind: "point cloud" (costs are formed within the update), "stored cost" (their matrix is kept) or
            "online" (row blocks).
    """
    import jax
    import jax.numpy as jnp

    p = case.problem
    geometry = _geometry(kind, jnp.asarray(p.x.numpy()), jnp.asarray(p.y.numpy()), p.eps)
    log_a = jnp.full((p.n,), -math.log(p.n), jnp.float32)
    log_b = jnp.full((p.m,), case.log_weight, jnp.float32)
    # OTT's potentials hold the log-weights
    f, g = jnp.asarray(case.f.numpy()) + p.eps * log_a, jnp.asarray(case.g.numpy()) + p.eps * log_b
    update = jax.jit(lambda geom, f, g: geom.update_potential(f, g, log_a, axis=1))
    return Job(
        lambda: update(geometry, f, g).block_until_ready(),
        lambda out: np.asarray(out, np.float64) + p.eps * math.log(p.n),
    )


def _solve(
    geometry: Any, rule: Rule, *, danskin: bool = True, update: str = "alternating", **more: Any
) -> Any:
    """OTT's solver; ``more`` goes to its `LinearProblem`."""
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import acceleration, implicit_differentiation, sinkhorn

    counted = rule.iterations > 0
    solver = sinkhorn.Sinkhorn(
        threshold=rule.tol,
        min_iterations=rule.iterations,
        max_iterations=rule.iterations if counted else MAX_ITER,
        inner_iterations=rule.iterations if counted else EVERY,
        use_danskin=danskin,
        implicit_diff=implicit_differentiation.ImplicitDiff(),
        parallel_dual_updates=update == "parallel",
        momentum=acceleration.Momentum(value=0.5) if update == "parallel" else None,
    )
    return solver(linear_problem.LinearProblem(geometry, **more))


def _clouds(problem: OTProblem) -> tuple[Any, Any, float]:
    """Both clouds as jax arrays, and eps.

    Raises:
        ValueError: a cost other than the full squared distance.
    """
    import jax.numpy as jnp

    if problem.cost_scale != 1.0:
        raise ValueError(f"OTT's cost is the full squared distance, got cost_scale {problem.cost_scale:g}")
    return jnp.asarray(problem.x.numpy()), jnp.asarray(problem.y.numpy()), problem.eps


def _solved(problem: OTProblem, out: Any) -> dict[str, Any]:
    """Potentials in our convention, and the iterations."""
    logs = (problem.a.double().log().numpy(), problem.b.double().log().numpy())
    f, g = (
        np.asarray(own, np.float64) - problem.eps * log for own, log in zip((out.f, out.g), logs, strict=True)
    )
    return {"f": f, "g": g, "iterations": int(out.n_iters)}


def forward(task: Task, kind: str, update: str = "alternating") -> Job:
    """A jitted solve with its `reg_ot_cost`; ``update`` "parallel" with momentum 1/2, as in its `sinkdiv`."""
    import jax

    x, y, eps = _clouds(task.problem)
    solve = jax.jit(lambda x, y: _solve(_geometry(kind, x, y, eps), task.rule, update=update))

    def run() -> Any:
        return jax.block_until_ready(solve(x, y))

    return Job(run, lambda out: _solved(task.problem, out) | {"value": float(out.reg_ot_cost)})


def backward(task: Task, kind: str) -> Job:
    """A jitted `jax.value_and_grad` of `reg_ot_cost` by Danskin's theorem, OTT's default."""
    import jax

    x, y, eps = _clouds(task.problem)

    def cost(x: Any, y: Any) -> tuple[Any, Any]:
        out = _solve(_geometry(kind, x, y, eps), task.rule)
        return out.reg_ot_cost, out

    solve = jax.jit(jax.value_and_grad(cost, has_aux=True))

    def answer(output: Any) -> dict[str, Any]:
        (_, out), gradient = output
        return _solved(task.problem, out) | {"gradient": np.asarray(gradient, np.float64)}

    return Job(lambda: jax.block_until_ready(solve(x, y)), answer)


def hvp(task: Task, kind: str = "point cloud") -> Job:
    """`jax.jvp` of `jax.grad` of the regularized cost with implicit differentiation, jitted."""
    import jax
    import jax.numpy as jnp

    x, y, eps = _clouds(task.problem)

    def cost(x: Any) -> Any:
        return _solve(_geometry(kind, x, y, eps), task.rule, danskin=False)

    gradient = jax.grad(lambda x: cost(x).reg_ot_cost)
    product = jax.jit(lambda x, v: jax.jvp(gradient, (x,), (v,))[1])
    solve = jax.jit(cost)
    blocks = [jnp.asarray(v) for v in task.vectors.numpy()]

    def answer(out: Any) -> dict[str, Any]:
        products = [out, *(product(x, v) for v in blocks[1:])]
        found = np.stack([np.asarray(one, np.float64) for one in products])
        return _solved(task.problem, solve(x)) | {"products": found}

    return Job(lambda: product(x, blocks[0]).block_until_ready(), answer)


def hessian_by_jax(x: Any, y: Any, eps: float, *, danskin: bool, dtype: str) -> Any:
    """`jax.hessian` of the regularized cost in x, as a (nd, nd) matrix; threshold 1e-7, in float64 1e-12."""
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(dtype == "float64"):
        u, v = jnp.asarray(x, dtype), jnp.asarray(y, dtype)
        out = _jitted_hessian(eps, danskin, dtype)(u, v)
        return np.asarray(out, np.float64).reshape(u.size, u.size)


@lru_cache
def _jitted_hessian(eps: float, danskin: bool, dtype: str) -> Any:
    """Compiled once for all positions of the points."""
    import jax

    rule = Rule(tol=1e-12 if dtype == "float64" else 1e-7)
    return jax.jit(
        jax.hessian(
            lambda x, y: _solve(_geometry("point cloud", x, y, eps), rule, danskin=danskin).reg_ot_cost
        )
    )


def loss(problem: OTProblem, rule: Rule, *, debias: bool) -> dict[str, Any]:
    """Value, gradient in x and potentials in float64: OT, relaxed OT or the divergence (`sinkdiv`).

    Args:
        problem: float64.
        rule: when to stop.
        debias: the divergence; both sides hard.
    """
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(True):
        x, y, _ = _clouds(problem)
        a, b = jnp.asarray(problem.a.numpy()), jnp.asarray(problem.b.numpy())
        cost = _divergence if debias else (_balanced if problem.balanced else _relaxed)
        value_of: Callable[..., Any] = jax.jit(
            jax.value_and_grad(lambda x: cost(problem, rule, x, y, a, b), has_aux=True)
        )
        (value, out), gradient = value_of(x)
        own = float(out.reg_ot_cost)
        found = {"value": float(value), "gradient": np.asarray(gradient, np.float64)}
        if problem.balanced:
            return _solved(problem, out) | found
        potentials = {"f": np.asarray(out.f, np.float64), "g": np.asarray(out.g, np.float64)}
        return potentials | {"iterations": int(out.n_iters)} | found | {"value_own": own}


def _balanced(problem: OTProblem, rule: Rule, x: Any, y: Any, a: Any, b: Any) -> tuple[Any, Any]:
    out = _solve(_geometry("point cloud", x, y, problem.eps), rule, a=a, b=b)
    return out.reg_ot_cost, out


def _divergence(problem: OTProblem, rule: Rule, x: Any, y: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """`sinkdiv`, with the potentials of its cross term; each term stops by the rule."""
    from ott.tools import sinkhorn_divergence

    counted = rule.iterations > 0
    options = {
        "threshold": rule.tol,
        "min_iterations": rule.iterations,
        "max_iterations": rule.iterations if counted else MAX_ITER,
        "inner_iterations": rule.iterations if counted else EVERY,
    }
    value, _ = sinkhorn_divergence.sinkdiv(x, y, epsilon=problem.eps, a=a, b=b, solve_kwargs=options)
    return value, _solve(_geometry("point cloud", x, y, problem.eps), rule, a=a, b=b)


def _relaxed(problem: OTProblem, rule: Rule, x: Any, y: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """The cost that holds the log-weights, and the dual value of the potentials, which are held fixed."""
    import jax
    import jax.numpy as jnp
    from ott.geometry import geometry, pointcloud
    from ott.math import unbalanced_functions

    eps, rhos = problem.eps, (problem.rho_x, problem.rho_y)
    shift = eps * (jnp.log(a)[:, None] + jnp.log(b)[None, :])
    cost = pointcloud.PointCloud(x, y, epsilon=eps).cost_matrix - shift
    taus = [1.0 if rho is None else rho / (rho + eps) for rho in rhos]
    geom = geometry.Geometry(cost_matrix=cost, epsilon=eps)
    out = _solve(geom, rule, a=a, b=b, tau_a=taus[0], tau_b=taus[1])
    f, g = jax.lax.stop_gradient(out.f), jax.lax.stop_gradient(out.g)
    value = -eps * (geom.marginal_from_potentials(f, g, axis=1).sum() - a.sum() * b.sum())
    for potential, weight, rho in ((f, a, rhos[0]), (g, b, rhos[1])):
        if rho is None:
            value = value + (weight * potential).sum()
        else:
            value = value - (weight * unbalanced_functions.phi_star(-potential, rho)).sum()
    return value, out
