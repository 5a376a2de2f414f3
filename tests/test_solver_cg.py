"""The truncated CG: the cases N4 to N14 and N19, at every scale and in both precisions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ot_newton.solvers.cg import CGReason, conjugate_gradient
from ot_newton.solvers.objective import Objective
from ot_newton.solvers.trust_region import Model

SCALES = (1e-8, 1e-4, 1.0, 1e8)
DTYPES = (torch.float64, torch.float32)
scaled = pytest.mark.parametrize("scale", SCALES)
typed = pytest.mark.parametrize("dtype", DTYPES)


def vec(values, dtype=torch.float64, scale=1.0):
    return (torch.as_tensor(np.asarray(values, dtype=float)) * scale).to(dtype)


def solve(d, b, **options):
    """CG with the diagonal matrix d."""
    given = {"rtol": 1e-10 if b.dtype is torch.float64 else 1e-5, "max_iter": 200, **options}
    block = b[:, None] if b.ndim == 1 else b
    return conjugate_gradient(lambda v: d[:, None] * v, block, **given)


def reason(result, column=0):
    return CGReason(int(result.reason[column]))


@scaled
@typed
def test_N4_singular_inconsistent(scale, dtype):
    d, b = vec([1, 0], dtype, scale), vec([1, -1], dtype)
    r = solve(d, b)
    assert reason(r) is CGReason.NEGATIVE_CURVATURE
    direction = r.direction[:, 0]
    assert abs(float(direction[1])) > 1 - 1e-5 and abs(float(direction @ b)) > 0.9
    assert abs(float(r.curvature)) <= 1e-6 * scale
    projected = solve(d, b, project=lambda v: v * torch.tensor([[1.0], [0.0]], dtype=dtype))
    assert reason(projected) is not CGReason.NAN
    x = projected.x[:, 0]
    assert torch.allclose(x * scale, vec([1, 0], dtype), atol=1e-6)
    assert float((d * x - b).norm()) == pytest.approx(1.0, rel=1e-6)


@scaled
@typed
def test_N5_inconsistent_three_by_three(scale, dtype):
    d, b = vec([2, 1, 0], dtype, scale), vec([2, 1, 1], dtype)
    r = solve(d, b)
    assert reason(r) is CGReason.NEGATIVE_CURVATURE
    assert abs(float(r.direction[2, 0])) > 0.99 and float(r.x.abs().max()) * scale < 10
    assert abs(float(r.direction[:, 0] @ b)) > 0.5
    x = solve(d, b, project=lambda v: v * vec([1, 1, 0], dtype)[:, None]).x[:, 0]
    assert torch.allclose(x * scale, vec([1, 1, 0], dtype), atol=1e-5)
    assert float((d * x - b).norm()) == pytest.approx(1.0, rel=1e-5)


@scaled
@typed
def test_N6_indefinite_is_not_converged(scale, dtype):
    r = solve(vec([2, -1], dtype, scale), vec([1, 1], dtype))
    assert reason(r) is CGReason.NEGATIVE_CURVATURE and int(r.iterations) == 2
    v = r.direction[:, 0].double()
    assert 2 * float(v[0]) ** 2 - float(v[1]) ** 2 < 0 and float(r.curvature) < 0
    r = solve(vec([1, -1], dtype, scale), vec([1, 1], dtype))
    assert reason(r) is CGReason.NEGATIVE_CURVATURE and int(r.iterations) == 1
    assert bool(torch.isfinite(r.x).all())


@scaled
@typed
def test_N7_zero_right_hand_sides(scale, dtype):
    d = vec([1, 2, 3], dtype, scale)
    for x0 in (None, torch.ones(3, 1, dtype=dtype)):
        r = solve(d, torch.zeros(3, dtype=dtype), rtol=0.0, x0=x0)
        assert bool(r.converged.all()) and float(r.x.abs().max()) == 0.0
        assert int(r.iterations) == 0
    assert solve(d, torch.zeros(3, dtype=dtype)).n_matmul == 0
    block = torch.stack([torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)], 1)
    r = solve(d, block)
    assert reason(r, 0) is CGReason.ZERO_RHS and reason(r, 1) is CGReason.CONVERGED
    assert torch.allclose(r.x[:, 1], 1 / d) and float(r.x[:, 0].abs().max()) == 0.0


@scaled
@typed
def test_N8_converged_at_the_last_iteration(scale, dtype):
    r = solve(vec([2, 2], dtype, scale), vec([1, 1], dtype), max_iter=1)
    assert bool(r.converged.all()) and torch.allclose(r.x[:, 0] * scale, vec([0.5, 0.5], dtype))
    r = solve(vec([1, 2, 3], dtype, scale), vec([1, 1, 1], dtype), max_iter=3)
    assert bool(r.converged.all())


@scaled
def test_N9_achieved_residual_is_returned(scale):
    d, b = vec(np.logspace(-6, 0, 900), scale=scale), torch.ones(900, dtype=torch.float64)
    r = solve(d, b, rtol=1e-6, max_iter=30)
    true = float((d * r.x[:, 0] - b).norm() / b.norm())
    assert reason(r) is CGReason.MAX_ITER and not bool(r.converged.any())
    assert float(r.residual) == pytest.approx(true, rel=1e-6) and true > 0.1


def test_N10_tiny_numbers():
    for dtype, size in ((torch.float32, 1e-30), (torch.float64, 1e-300)):
        b = torch.full((3,), size, dtype=dtype)
        r = solve(torch.ones(3, dtype=dtype), b)
        assert bool(r.converged.all()) and torch.allclose(r.x[:, 0] / size, torch.ones(3, dtype=dtype))
    r = solve(torch.full((3,), 1e-12, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    assert torch.allclose(r.x[:, 0] * 1e-12, torch.ones(3, dtype=torch.float64))


@scaled
@typed
def test_N11_one_negative_eigenvalue_among_900(scale, dtype):
    d = vec(np.r_[-1, np.ones(899)], dtype, scale)
    r = solve(d, torch.ones(900, dtype=dtype))
    assert reason(r) is CGReason.NEGATIVE_CURVATURE
    v = r.direction[:, 0].double()
    assert float(v @ (d.double() * v)) < -0.5 * scale and float(r.curvature) < -0.5 * scale


@scaled
def test_N12_float32_stagnation_is_noticed(scale):
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(500, 500, generator=generator, dtype=torch.float64))
    h = ((q * torch.logspace(-6, 0, 500, dtype=torch.float64)) @ q.T * scale).float()
    b = torch.ones(500, 1)
    r = conjugate_gradient(lambda v: h @ v, b, rtol=1e-6, max_iter=3000)
    true = float((h.double() @ r.x.double() - b).norm() / b.norm())
    assert reason(r) is CGReason.STAGNATION and r.n_matmul < 3000
    assert float(r.residual) == pytest.approx(true, rel=0.5)


@scaled
def test_N13_radius_is_measured_in_the_preconditioner_norm(scale):
    d, b, m = vec([1, -1], scale=scale), vec([1, 1], scale=scale), vec([1, 100])
    for radius in (1e-3, 1.0, 1e4):
        r = solve(d, b, radius=radius, preconditioner=lambda v: v / m[:, None])
        p = r.x[:, 0]
        assert float((p * m * p).sum().sqrt()) == pytest.approx(radius, rel=1e-12)


@scaled
def test_N13_replayed_steps_keep_the_norm(scale):
    """A rejected step is cut from the recorded path: same norm, same step as a fresh solve."""
    d, m = vec([1.0, 3.0, -0.5, 7.0], scale=scale), vec([1, 100, 3, 0.2])
    c = vec([1.0, -2.0, 0.3, 1.0], scale=scale)
    point = Objective(lambda x: 0.5 * (d * x * x).sum() + c @ x, torch.zeros(4, dtype=torch.float64)).at(
        torch.zeros(4, dtype=torch.float64)
    )
    model = Model(point, rtol=1e-10, max_iter=20, radius=None, preconditioner=lambda v: v / m[:, None])
    products = point.objective.n_hvp
    for radius in (10.0, 1.0, 0.1, 1e-3):
        step = model.step(radius)
        assert float((step.p * m * step.p).sum().sqrt()) == pytest.approx(radius, rel=1e-9)
        fresh = Model(point, rtol=1e-10, max_iter=20, radius=radius, preconditioner=lambda v: v / m[:, None])
        assert torch.allclose(step.p, fresh.result.x[:, 0], rtol=1e-8, atol=0)
        value = float(c @ step.p + 0.5 * (d * step.p**2).sum())
        assert step.decrease == pytest.approx(-value, rel=1e-9)
    assert products == int(model.result.n_matmul)


@scaled
@typed
def test_N14_exact_start_takes_no_iteration(scale, dtype):
    b = vec([-1, -1], dtype, scale)
    r = solve(torch.ones(2, dtype=dtype), b, x0=b[:, None])
    assert int(r.iterations) == 0 and bool(r.converged.all()) and torch.allclose(r.x[:, 0], b)
    d = vec(np.linspace(1, 2, 50), dtype)
    far = solve(d, torch.ones(50, dtype=dtype) * scale, x0=torch.full((50, 1), 1e3 * scale, dtype=dtype))
    true = float((d * far.x[:, 0] - scale).norm() / (scale * math.sqrt(50)))
    assert bool(far.converged.all()) and true < (1e-9 if dtype is torch.float64 else 1e-3)


@scaled
@typed
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
def test_N19_no_false_negative_curvature(scale, dtype, size):
    d = vec(np.linspace(0.1, 1, 50), dtype, scale)
    g = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype) * size
    tol = 1e-10 if dtype is torch.float64 else 1e-5
    r = solve(d, -g, radius=1e6 * size / scale, rtol=tol)
    assert reason(r) is CGReason.CONVERGED
    assert float((d * r.x[:, 0] + g).norm() / g.norm()) <= 3 * tol
