"""Invariants I1 to I8 of the exact checks, on problems drawn by hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ot_newton as otn
from tests.generators import Case, case_S, cases, permutation, pitchfork, translations
from tests.helpers import BACKENDS, dense_hessian, problem_of, solve
from tests.tolerances import assert_close, relative_error, rtol, to_numpy

pytestmark = pytest.mark.filterwarnings(
    "ignore::ot_newton.errors.ConvergenceWarning", "ignore::ot_newton.errors.PrecisionWarning"
)

BACKEND = st.sampled_from(BACKENDS)
HARD = {"max_points": 5, "relaxed": False}
FEW = settings(max_examples=20)


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


@settings(max_examples=30)
@given(cases(**HARD), st.data(), st.integers(1, 40), BACKEND)
def test_I1_translation(case: Case, data: Any, stop: int, backend: str) -> None:
    """`H (1 (x) u) = 2 s r (x) u`, r = P1, at any stop; a joint translation gives 0."""
    result = otn.sinkhorn(problem_of(case), tol=0, max_iter=stop, backend=backend)
    u = tensor(data.draw(translations(case.x.shape[1])))
    s, size = case.cost_scale, float(u.abs().max())
    for wrt, marginal in (("x", result.plan.row_sums()), ("y", result.plan.col_sums())):
        points = marginal.shape[0]
        moved = result.hessian(wrt) @ u.expand(points, len(u))
        expected = 2 * s * marginal[:, None] * u
        assert float((moved - expected).abs().max()) <= rtol("translation") * 2 * s * size
    n, m = case.x.shape[0], case.y.shape[0]
    both = result.hessian("xy") @ (u.expand(n, len(u)), u.expand(m, len(u)))
    assert max(float(part.abs().max()) for part in both) <= rtol("translation") * 2 * s * size


@FEW
@given(cases(max_points=5, relaxed=True), st.integers(1, 40), BACKEND)
def test_I2_sum_of_gradients(case: Case, stop: int, backend: str) -> None:
    """`sum_i dOT/dx_i = 2 s (sum r x - sum c y)` for any marginals, and the opposite in y."""
    result = otn.sinkhorn(problem_of(case), tol=0, max_iter=stop, backend=backend)
    r, c = to_numpy(result.plan.row_sums()), to_numpy(result.plan.col_sums())
    expected = 2 * case.cost_scale * (r @ case.x - c @ case.y)
    size = 2 * case.cost_scale * (r.sum() + c.sum())
    assert np.abs(to_numpy(result.gradient("x").sum(0)) - expected).max() <= 1e-13 * size
    assert np.abs(to_numpy(result.gradient("y").sum(0)) + expected).max() <= 1e-13 * size


@FEW
@given(cases(max_points=5, relaxed=True), st.integers(2, 40), BACKEND)
def test_I3_upper_bound(case: Case, stop: int, backend: str) -> None:
    """`H <= 2 s diag(r) (x) I`: the rest is the Hessian of a concave function."""
    result = otn.sinkhorn(problem_of(case), tol=0, max_iter=stop, backend=backend)
    h = dense_hessian(result)
    r = to_numpy(result.plan.row_sums())
    rest = np.kron(np.diag(2 * case.cost_scale * r), np.eye(case.x.shape[1])) - h
    scale = 2 * case.cost_scale * r.max() * (1 + 10 * case.cost_scale / case.eps)
    assert np.linalg.eigvalsh(rest)[0] >= -1e-9 * scale
    assert np.linalg.eigvalsh(h)[-1] <= 2 * case.cost_scale * r.max() + 1e-9 * scale


@FEW
@given(cases(max_points=5, relaxed=True), BACKEND)
def test_I4_symmetry(case: Case, backend: str) -> None:
    result = otn.sinkhorn(problem_of(case), tol=0, max_iter=15, backend=backend)
    h = dense_hessian(result, "xy")
    scale = 2 * case.cost_scale * (1 + 10 * case.cost_scale / case.eps)
    assert np.abs(h - h.T).max() <= 1e-9 * scale


@FEW
@given(cases(max_points=5, relaxed=True), st.randoms(use_true_random=False), BACKEND)
def test_I4_permutation(case: Case, random: Any, backend: str) -> None:
    """Renumbering the points renumbers the gradient and the Hessian, and nothing else."""
    order = list(range(case.x.shape[0]))
    other = list(range(case.y.shape[0]))
    random.shuffle(order)
    random.shuffle(other)
    a, b = np.asarray(case.a), np.asarray(case.b)
    moved = case.with_(x=case.x[order], y=case.y[other], a=a[order], b=b[other])
    one, two = (otn.sinkhorn(problem_of(c), tol=0, max_iter=15, backend=backend) for c in (case, moved))
    assert relative_error(two.value, one.value, 1.0) <= 1e-12
    assert relative_error(two.gradient("x"), one.gradient("x")[order], 1.0) <= 1e-12
    d = case.x.shape[1]
    index = (np.array(order)[:, None] * d + np.arange(d)).ravel()
    limit = 1e-9 * 2 * case.cost_scale * (1 + 10 * case.cost_scale / case.eps)
    assert np.abs(dense_hessian(two) - dense_hessian(one)[np.ix_(index, index)]).max() <= limit


@FEW
@given(cases(max_points=5, relaxed=True), st.integers(0, 10**6), BACKEND)
def test_I4_rotation(case: Case, seed: int, backend: str) -> None:
    d = case.x.shape[1]
    turn = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0]
    turned = case.with_(x=case.x @ turn, y=case.y @ turn)
    one, two = (otn.sinkhorn(problem_of(c), tol=0, max_iter=15, backend=backend) for c in (case, turned))
    assert relative_error(two.value, one.value, 1.0) <= 1e-12
    assert relative_error(two.gradient("x"), to_numpy(one.gradient("x")) @ turn, 1.0) <= 1e-12
    whole = np.kron(np.eye(case.x.shape[0]), turn)
    limit = 1e-9 * 2 * case.cost_scale * (1 + 10 * case.cost_scale / case.eps)
    assert np.abs(dense_hessian(two) - whole.T @ dense_hessian(one) @ whole).max() <= limit


@FEW
@given(cases(max_points=5, relaxed=True), st.sampled_from([0.5, 2.0, 8.0]), BACKEND)
def test_I5_scaling(case: Case, t: float, backend: str) -> None:
    """`OT_{t^2 eps, t^2 rho}(t x, t y) = t^2 OT` with H unchanged; `(s c, eps c, rho c)` scales OT by c.

    Powers of two: the two runs do the same arithmetic, iteration by iteration.
    """
    rho = [None if p is None else t**2 * p for p in (case.rho_x, case.rho_y)]
    moved = case.with_(x=t * case.x, y=t * case.y, eps=t**2 * case.eps, rho_x=rho[0], rho_y=rho[1])
    dearer = case.with_(cost_scale=t**2 * case.cost_scale, eps=t**2 * case.eps, rho_x=rho[0], rho_y=rho[1])
    one, two, three = (
        otn.sinkhorn(problem_of(c), tol=0, max_iter=15, backend=backend) for c in (case, moved, dearer)
    )
    h = dense_hessian(one)
    limit = 2 * case.cost_scale * (1 + 10 * case.cost_scale / case.eps)
    assert relative_error(two.value / t**2, one.value, 1.0) <= rtol("scaling")
    assert relative_error(three.value / t**2, one.value, 1.0) <= rtol("scaling")
    assert np.abs(dense_hessian(two) - h).max() <= 1e-9 * limit
    assert np.abs(dense_hessian(three) / t**2 - h).max() <= 1e-9 * limit


@FEW
@given(cases(max_points=5, relaxed=True, zeros=False), st.floats(0.1, 0.9), BACKEND)
def test_I6_splitting_an_atom_of_y(case: Case, share: float, backend: str) -> None:
    b = np.asarray(case.b)
    split = case.with_(
        y=np.concatenate([case.y, case.y[:1]]),
        b=np.concatenate([[share * b[0]], b[1:], [(1 - share) * b[0]]]),
    )
    one, two = (otn.sinkhorn(problem_of(c), tol=0, max_iter=15, backend=backend) for c in (case, split))
    assert relative_error(two.value, one.value, 1.0) <= 1e-12
    assert relative_error(two.gradient("x"), one.gradient("x"), 1.0) <= 1e-12
    limit = 1e-9 * 2 * case.cost_scale * (1 + 10 * case.cost_scale / case.eps)
    assert np.abs(dense_hessian(two) - dense_hessian(one)).max() <= limit


@FEW
@given(cases(max_points=4, relaxed=True, zeros=False), st.floats(0.1, 0.9), BACKEND)
def test_I6_duplicate_points_of_x(case: Case, share: float, backend: str) -> None:
    """`H(e1 (x) u/r1 - e2 (x) u/r2) = (e1 - e2) (x) M u`, `M = 2 s I - (4 s^2/eps) Cov`, at any stop.

    A relaxed x side lets mass move along the mean displacement: Cov + (k/(1+k)) mean mean^T, k = eps/rho.
    """
    a, d = np.asarray(case.a), case.x.shape[1]
    weights = np.concatenate([[share * a[0]], a[1:], [(1 - share) * a[0]]])
    split = case.with_(x=np.concatenate([case.x, case.x[:1]]), a=weights)
    result = otn.sinkhorn(problem_of(split), tol=0, max_iter=15, backend=backend)
    plan = to_numpy(result.plan.to_dense())
    conditional = plan[0] / plan[0].sum()
    centred = case.y - conditional @ case.y
    covariance = (centred.T * conditional) @ centred
    slack = 0.0 if case.rho_x is None else case.eps / case.rho_x
    mean = case.x[0] - conditional @ case.y
    covariance += slack / (1 + slack) * np.outer(mean, mean)
    r, u = plan.sum(1), np.linspace(0.5, 1, d)
    direction = np.zeros((len(weights), d))
    direction[0], direction[-1] = u / r[0], -u / r[-1]
    s = case.cost_scale
    expected = np.zeros_like(direction)
    expected[0] = 2 * s * u - 4 * s**2 / case.eps * covariance @ u
    expected[-1] = -expected[0]
    scale = (2 * s + 16 * s**2 / case.eps) * max(1 / r[0], 1 / r[-1], 1)
    assert np.abs(to_numpy(result.hessian("x") @ tensor(direction)) - expected).max() <= 1e-9 * scale


@pytest.mark.parametrize("backend", BACKENDS)
def test_I7_both_limits(backend: str) -> None:
    """H -> 2 s diag(a) (x) I as eps -> 0 with a permutation plan, and as eps -> infinity."""
    case = permutation(eps=1e-3)
    expected = np.kron(np.diag(2 * np.asarray(case.a)), np.eye(2))
    assert np.abs(dense_hessian(solve(case, backend=backend)) - expected).max() <= 1e-9
    for eps in (1e4, 1e8):
        wide = case_S(5, 7, 2, eps)
        expected = np.kron(np.diag(2 * np.asarray(wide.a)), np.eye(2))
        assert np.abs(dense_hessian(solve(wide, backend=backend)) - expected).max() <= 20 / eps
    for eps in (1e-3, 1e8):
        low = np.linalg.eigvalsh(dense_hessian(solve(pitchfork(0.5, eps), backend=backend)))[0]
        assert abs(low - 1) <= 1e-7


@FEW
@given(cases(max_points=5, relaxed=True, zeros=False), st.integers(0, 10**6), BACKEND)
def test_I8_atoms_without_mass_change_nothing(case: Case, seed: int, backend: str) -> None:
    rng = np.random.default_rng(seed)
    d = case.x.shape[1]
    extra_x, extra_y = 10 * rng.standard_normal((2, d)), 10 * rng.standard_normal((1, d))
    more = case.with_(
        x=np.concatenate([extra_x[:1], case.x, extra_x[1:]]),
        a=np.concatenate([[0.0], np.asarray(case.a), [0.0]]),
        y=np.concatenate([case.y, extra_y]),
        b=np.concatenate([np.asarray(case.b), [0.0]]),
    )
    one, two = (otn.sinkhorn(problem_of(c), tol=0, max_iter=15, backend=backend) for c in (case, more))
    assert relative_error(two.value, one.value, 1.0) <= 1e-12
    gradient = to_numpy(two.gradient("x"))
    assert relative_error(gradient[1:-1], one.gradient("x"), 1.0) <= 1e-12
    assert not gradient[[0, -1]].any()
    h = dense_hessian(two)
    limit = 1e-9 * 2 * case.cost_scale * (1 + 10 * case.cost_scale / case.eps)
    assert np.abs(h[d:-d, d:-d] - dense_hessian(one)).max() <= limit
    assert not h[:d].any()
    assert not h[-d:].any()
    plan = to_numpy(two.plan.to_dense())
    assert not plan[[0, -1]].any()
    assert not plan[:, -1].any()


@FEW
@given(cases(max_points=5, relaxed=True), BACKEND)
def test_against_truth(case: Case, backend: str) -> None:
    """Converged problems of any kind: value 1e-11, gradients 1e-10, products 1e-9."""
    exact = case.truth()
    result = otn.sinkhorn(problem_of(case), tol=1e-12, max_iter=3000, backend=backend)
    assume(bool(result.converged))  # else too slow for plain iterations
    size = 2 * case.cost_scale * 4
    assert_close(result.value, exact.value, "value", scale=max(abs(exact.value), size))
    for wrt in ("x", "y"):
        assert_close(result.gradient(wrt), exact.gradient(wrt), "gradient", scale=size)
    for wrt in ("x", "xy"):
        scale = size * (1 + case.cost_scale / case.eps)
        assert_close(dense_hessian(result, wrt), exact.hessian(wrt), "hvp", scale=scale)


@FEW
@given(cases(max_points=5, relaxed=True), st.sampled_from(["x", "y"]), BACKEND)
def test_product_is_the_derivative_of_the_gradient(case: Case, wrt: str, backend: str) -> None:
    """A central difference of the solver's own gradient, at a step and a tolerance chosen for its error."""
    cloud = getattr(case, wrt)
    along = np.cos(np.arange(cloud.size)).reshape(cloud.shape)
    results = [
        otn.sinkhorn(problem_of(c), tol=1e-12, max_iter=3000, backend=backend)
        for c in (case.with_(**{wrt: cloud + k * 1e-4 * along}) for k in (-1, 0, 1))
    ]
    assume(all(bool(r.converged) for r in results))
    slope = (to_numpy(results[2].gradient(wrt)) - to_numpy(results[0].gradient(wrt))) / 2e-4
    product = to_numpy(results[1].hessian(wrt) @ tensor(along))
    ratio = case.cost_scale / case.eps
    assert np.abs(product - slope).max() <= 1e-8 + 1e-6 * case.cost_scale * (1 + ratio) ** 3
