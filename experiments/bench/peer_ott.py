"""OTT-JAX, through its own geometry and solver; jax is imported here and not before."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ot_newton.experiments.bench.harness import Job

if TYPE_CHECKING:
    from ot_newton.experiments.bench.half_case import HalfCase
    from ot_newton.problem import OTProblem

__all__ = ["GEOMETRIES", "half_iteration", "hessian_by_jax", "solve_hvp"]

GEOMETRIES = ("point cloud", "stored cost", "online")
ONLINE_BATCH = 1024


def _geometry(kind: str, x: Any, y: Any, eps: float) -> Any:
    from ott.geometry import geometry, pointcloud

    if kind == "online":
        return pointcloud.PointCloud(x, y, epsilon=eps, batch_size=min(ONLINE_BATCH, x.shape[0]))
    cloud = pointcloud.PointCloud(x, y, epsilon=eps)
    return cloud if kind == "point cloud" else geometry.Geometry(cost_matrix=cloud.cost_matrix, epsilon=eps)


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


def _cost(x: Any, y: Any, eps: float, tol: float, *, danskin: bool) -> Any:
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import implicit_differentiation, sinkhorn

    solver = sinkhorn.Sinkhorn(
        threshold=tol,
        max_iterations=10_000,
        use_danskin=danskin,
        implicit_diff=implicit_differentiation.ImplicitDiff(),
    )
    return solver(linear_problem.LinearProblem(pointcloud.PointCloud(x, y, epsilon=eps)))


def solve_hvp(problem: OTProblem, tol: float, vectors: Any) -> Job:
    """`jax.jvp` of `jax.grad` of the regularized cost with implicit differentiation, jitted.

    The answer holds the products with every vector, and the potentials in our convention.

    Args:
        problem: float32, uniform weights.
        tol: OTT's threshold, an L1 marginal error looked at every 10 iterations.
        vectors: (k,n,d) numpy; the first is the one timed.
    """
    import jax
    import jax.numpy as jnp

    x, y, eps = jnp.asarray(problem.x.numpy()), jnp.asarray(problem.y.numpy()), problem.eps
    gradient = jax.grad(lambda x: _cost(x, y, eps, tol, danskin=False).reg_ot_cost)
    product = jax.jit(lambda x, v: jax.jvp(gradient, (x,), (v,))[1])
    solve = jax.jit(lambda x: _cost(x, y, eps, tol, danskin=False))
    blocks = [jnp.asarray(v) for v in vectors]

    def answer(out: Any) -> dict[str, Any]:
        rest = [product(x, v) for v in blocks[1:]]
        end = solve(x)
        return {
            "products": np.stack([np.asarray(o, np.float64) for o in (out, *rest)]),
            "f": np.asarray(end.f, np.float64) + eps * math.log(problem.n),
            "g": np.asarray(end.g, np.float64) + eps * math.log(problem.m),
            "iterations": int(end.n_iters),
        }

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

    tol = 1e-12 if dtype == "float64" else 1e-7
    return jax.jit(jax.hessian(lambda x, y: _cost(x, y, eps, tol, danskin=danskin).reg_ot_cost))
