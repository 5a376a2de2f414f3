"""Relaxed marginals: forward, gradients, joint Hessians and operators on every backend; relaxed laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ot_newton as otn
from tests import truth
from tests.conformance import check_operator
from tests.exact_cases import OT_ROWS
from tests.generators import Case, case_S
from tests.helpers import BACKENDS, dense_hessian, rounded, solve
from tests.loss_cases import RELAXATIONS, autograd_hessian, leaves, loss_of
from tests.tolerances import assert_close, to_numpy

EVERYWHERE = pytest.mark.parametrize("backend", BACKENDS)
RELAXED = pytest.mark.parametrize("rho", RELAXATIONS[1:], ids=str)


def relaxed(rho: tuple[Any, Any], eps: float = 0.3, mass: float = 1.0) -> Case:
    case = case_S(5, 7, 2, eps).with_(rho_x=rho[0], rho_y=rho[1])
    return case.with_(a=mass * np.asarray(case.a))


@EVERYWHERE
@RELAXED
@pytest.mark.parametrize("mass", [1.0, 2.5])
def test_forward_and_gradients(rho: tuple[Any, Any], mass: float, backend: str) -> None:
    """Also for masses that differ: the marginals asked for are a exp(-f/rho)."""
    case = relaxed(rho, mass=mass)
    result, exact = solve(case, backend=backend), case.truth()
    assert_close(result.value, exact.value, "value")
    assert_close(result.value, exact.primal(), "value")
    assert_close(result.cost, exact.cost, "cost")
    assert_close(result.plan.to_dense(), exact.plan, "plan")
    assert abs(float(result.gap)) <= 1e-11
    for letter in "xyab":
        assert_close(result.gradient(letter), exact.gradient(letter), "gradient")


@EVERYWHERE
@RELAXED
def test_joint_hessian_and_operators(rho: tuple[Any, Any], backend: str) -> None:
    case = relaxed(rho, mass=1.4)
    result, exact = solve(case, backend=backend), case.truth()
    for wrt, clouds in (("x", ((5, 2),)), ("y", ((7, 2),)), ("xy", ((5, 2), (7, 2)))):
        check_operator(result.hessian(wrt), exact.hessian(wrt), rtol=1e-8, clouds=clouds)
    for side in ("x", "y"):
        check_operator(result.schur(side), exact.schur(side), rtol=1e-9)
    check_operator(result.plan, exact.plan, rtol=1e-9, symmetric=False)


@EVERYWHERE
@RELAXED
def test_losses(rho: tuple[Any, Any], backend: str) -> None:
    case = relaxed(rho, mass=1.4)
    loss, (x, y, a, b), exact = loss_of(case, backend=backend), leaves(case), case.truth()
    value = loss(a, x, b, y)
    assert_close(value, exact.value, "value")
    for letter, found in zip("xyab", torch.autograd.grad(value, (x, y, a, b)), strict=True):
        assert_close(found, exact.gradient(letter), "gradient")
    assert_close(autograd_hessian(loss, x, y, a, b), exact.hessian("xy"), "hvp")


@RELAXED
def test_products_in_the_weights(rho: tuple[Any, Any]) -> None:
    """All blocks of the joint Hessian in (x, y, a, b) against differences of truth's gradient."""
    case = relaxed(rho)
    loss, points = loss_of(case), dict(zip("xyab", leaves(case), strict=True))
    value = loss(points["a"], points["x"], points["b"], points["y"])
    gradients = torch.autograd.grad(value, tuple(points.values()), create_graph=True)
    rng = np.random.default_rng(3)
    for letter in "xyab":
        at = np.asarray(getattr(case, letter))
        along = rng.uniform(-1, 1, at.shape)
        gradient = gradients["xyab".index(letter)]
        products = torch.autograd.grad(
            gradient, tuple(points.values()), torch.tensor(along), retain_graph=True
        )
        for k, other in enumerate("xyab"):
            expected = truth.directional_difference(
                lambda z, letter=letter, other=other: case.with_(**{letter: z}).truth().gradient(other),
                at,
                along,
                step=4e-3,
            )
            assert_close(products[k], expected, "homogeneity", scale=max(1.0, float(np.abs(expected).max())))


@EVERYWHERE
@RELAXED
def test_float32(rho: tuple[Any, Any], backend: str) -> None:
    case = rounded(relaxed(rho), torch.float32)
    result, exact = solve(case, torch.float32, backend=backend), case.truth()
    assert_close(result.value, exact.value, "value", torch.float32)
    for letter in "xy":
        assert_close(result.gradient(letter), exact.gradient(letter), "gradient", torch.float32, scale=1.0)
    assert_close(dense_hessian(result, "xy"), exact.hessian("xy"), "hvp", torch.float32)


@EVERYWHERE
@RELAXED
def test_laws_of_relaxed_problems(rho: tuple[Any, Any], backend: str) -> None:
    """I2 and I5 with rho scaled along; joint translation in the null space; I3 with r in place of a."""
    case = relaxed(rho, mass=1.4)
    result = solve(case, backend=backend)
    r, c = to_numpy(result.plan.row_sums()), to_numpy(result.plan.col_sums())
    total = to_numpy(result.gradient("x")).sum(0)
    assert_close(total, 2 * (r @ case.x - c @ case.y), "gradient")
    u = torch.tensor([0.3, -0.8], dtype=torch.float64)
    both = result.hessian("xy") @ (u.expand(5, 2), u.expand(7, 2))
    assert max(float(part.abs().max()) for part in both) <= 1e-11
    spectrum = np.linalg.eigvalsh(dense_hessian(result))
    assert spectrum[-1] <= 2 * r.max() * (1 + 1e-9)
    t = 3.0
    scaled = case.with_(
        x=t * case.x,
        y=t * case.y,
        eps=t * t * case.eps,
        rho_x=None if rho[0] is None else t * t * rho[0],
        rho_y=None if rho[1] is None else t * t * rho[1],
    )
    other = solve(scaled, backend=backend)
    assert_close(other.value, t * t * result.value, "value")
    assert_close(dense_hessian(other, "xy"), dense_hessian(result, "xy"), "hvp")


@EVERYWHERE
@RELAXED
def test_zero_weights_on_relaxed_sides(rho: tuple[Any, Any], backend: str) -> None:
    """Rows without mass are exactly zero; the rest is the reduced problem."""
    case = OT_ROWS["O3"].case.with_(rho_x=rho[0], rho_y=rho[1])
    keep = np.asarray(case.a) > 0
    result = solve(case, backend=backend)
    reduced = solve(case.with_(x=case.x[keep], a=np.asarray(case.a)[keep]), backend=backend)
    assert_close(result.value, reduced.value, "batch")
    gradient = to_numpy(result.gradient("x"))
    assert_close(gradient[keep], reduced.gradient("x"), "gradient")
    assert not gradient[~keep].any()
    h = dense_hessian(result).reshape(5, 2, 5, 2)
    assert not h[~keep].any()
    assert_close(h[keep][:, :, keep].reshape(6, 6), dense_hessian(reduced), "hvp")
    assert np.isfinite(to_numpy(result.gradient("a"))).all()


def test_large_penalty_is_a_hard_marginal() -> None:
    """rho -> infinity: value and Hessian tend to the balanced ones at rate 1/rho."""
    hard = solve(relaxed((None, None)))
    errors = []
    for rho in (1e3, 1e5):
        soft = solve(relaxed((rho, rho)))
        errors.append(
            (
                abs(float(soft.value - hard.value)),
                np.abs(dense_hessian(soft, "xy") - dense_hessian(hard, "xy")).max(),
            )
        )
    for coarse, fine in zip(*errors, strict=True):
        assert fine <= 2e-2 * coarse
        assert coarse <= 1e-2


def test_reach_of_geomloss() -> None:
    """`SamplesLoss`'s unbalanced value is ours minus eps (m_a m_b - (m_a + m_b)/2); reach is sqrt(rho)."""
    case = relaxed((0.49, 0.49), mass=1.3).with_(cost_scale=0.5, eps=0.25)
    loss = otn.SinkhornLoss.from_geomloss(blur=0.5, reach=0.7, debias=False, tol=1e-12)
    x, y, a, b = leaves(case)
    exact = case.truth()
    assert_close(loss(a, x, b, y), exact.value, "value")
    mass_a, mass_b = float(a.sum()), float(b.sum())
    theirs = exact.value - 0.25 * (mass_a * mass_b - (mass_a + mass_b) / 2)
    f, g = exact.f, exact.g  # <a, rho (1 - exp(-f/rho))> + <b, ...> - eps <a b, exp - 1>, as they sum it
    primal = sum(float(w.detach().numpy() @ (-0.49 * np.expm1(-h / 0.49))) for w, h in ((a, f), (b, g)))
    assert abs(theirs - (primal - 0.25 * (exact.plan.sum() - (mass_a + mass_b) / 2))) <= 1e-12


def test_newton_on_relaxed_sides_agrees_with_sinkhorn() -> None:
    for rho in RELAXATIONS[1:]:
        case = relaxed(rho, eps=0.05)
        one, other = (solve(case, method=method, tol=1e-12) for method in ("newton", "sinkhorn"))
        assert_close(one.value, other.value, "value")
        assert_close(one.gradient("x"), other.gradient("x"), "gradient")
