"""scipy.optimize on our counted products: `scipy_hessp`, on plain losses and on the OT oracle."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from ot_newton.errors import ConvergenceWarning
from ot_newton.losses import SinkhornLoss
from ot_newton.solvers.newton import NewtonCG
from ot_newton.solvers.scipy_bridge import scipy_hessp

METHODS = ("trust-krylov", "trust-ncg", "Newton-CG")
DTYPES = (torch.float64, torch.float32)


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("like", [None, torch.zeros(4, dtype=torch.float64)])
def test_scipy_runs_on_our_products(method, like):
    problem = scipy_hessp(rosenbrock, like)
    got = minimize(problem.fun, np.full(4, -1.0), jac=problem.jac, hessp=problem, method=method)
    assert got.success and np.allclose(got.x, 1.0, atol=1e-3)
    assert problem.objective.n_hvp > 0 and problem.objective.n_grad <= problem.objective.n_fun
    # scipy's own count is one too many or none at all, by method: ours is the true one (N51).
    if method == "trust-krylov":
        assert 0 <= got.nhev - problem.objective.n_hvp <= 1


def clouds(seed=0, n=6, m=7):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x, 1.0 + 0.5 * torch.randn(m, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("method", "debias"), [*((name, False) for name in METHODS), ("trust-krylov", True)])
def test_scipy_minimizes_the_sinkhorn_loss(method, debias):
    """Moving a cloud onto another; our own Newton, certified, ends at the same value."""
    x, y = clouds()
    oracle = SinkhornLoss(eps=1.0, debias=debias)
    problem = scipy_hessp(lambda z: oracle(z, y), x)
    options = {"jac": problem.jac, "hessp": problem, "method": method, "options": {"maxiter": 12}}
    got = minimize(problem.fun, x.reshape(-1).numpy(), **options)
    assert np.linalg.norm(got.jac) < 1e-1 and problem.objective.n_hvp > 0
    assert got.fun < problem.fun(x.reshape(-1).numpy())
    moved = torch.from_numpy(got.x).reshape(x.shape)
    fresh = SinkhornLoss(eps=1.0, debias=debias)
    assert float(fresh(moved, y)) == pytest.approx(float(got.fun), rel=1e-8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        ours = NewtonCG(lambda z: fresh(z, y), max_iter=4).minimize(moved)
    assert ours.fun <= got.fun + 1e-9


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_the_sinkhorn_loss_are_its_hessian(dtype):
    x, y = (cloud.to(dtype) for cloud in clouds(seed=3, n=4, m=5))
    oracle = SinkhornLoss(eps=0.5)
    problem = scipy_hessp(lambda z: oracle(z, y), x)
    at = x.reshape(-1).double().numpy()
    h = np.stack([problem(at, e) for e in np.eye(8)], axis=1)
    double = dtype is torch.float64
    size = np.abs(h).max()
    assert h.dtype == np.float64 and np.allclose(h, h.T, rtol=0, atol=(1e-8 if double else 1e-3) * size)
    # Translation, exact at any stop: H (1 x u) = 2 a_i u, with a = 1/4.
    for axis in np.eye(2):
        assert np.allclose(h @ np.tile(axis, 4), np.tile(0.5 * axis, 4), atol=1e-8 if double else 1e-4)
    assert problem.objective.n_hvp == 8 and problem.objective.n_fun == 1


def test_buffers_are_copied_and_lengths_checked():
    problem = scipy_hessp(rosenbrock, np.zeros(3))
    x, p = np.array([1.0, 2.0, 3.0]), np.ones(3)
    first = problem(x, p)
    kept = first.copy()
    x[:] = 0.0
    problem(x, p)
    assert np.array_equal(first, kept) and problem.objective.n_fun == 2
    with pytest.raises(ValueError, match="x must have 3 numbers, got 4"):
        problem.fun(np.zeros(4))
    with pytest.raises(TypeError, match="loss must be callable"):
        scipy_hessp(3.0)
