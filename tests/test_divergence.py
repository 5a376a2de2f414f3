"""The debiased divergence: sign, exact zero, truth, the mass term, and its self terms' own system."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import ot_newton as otn
from ot_newton.errors import ConvergenceWarning, Status
from tests import truth
from tests.generators import Case, case_S, pitchfork, seeded
from tests.helpers import BACKENDS
from tests.loss_cases import RELAXATIONS, autograd_hessian, leaves, loss_of
from tests.tolerances import assert_close, assert_printed

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
EVERYWHERE = pytest.mark.parametrize("backend", BACKENDS)


def exact(case: Case) -> truth.Divergence:
    return truth.divergence(*case.arrays, **case.options)


@EVERYWHERE
def test_O8_pitchfork(backend: str) -> None:
    case = pitchfork(0.5, 1.0)
    loss, (x, y, a, b) = loss_of(case, True, backend=backend), leaves(case)
    value = loss(a, x, b, y).detach()
    assert_printed(value, ".288777796675", "S")
    for name, printed in (("xx", ".379885493042"), ("yy", ".674997252642")):
        assert_printed(loss.last_terms[name].value, printed, f"OT({name})")


@pytest.mark.parametrize("backend", ["dense", "cpu"])
@DTYPES
def test_O8_many_dimensions_at_a_tiny_blur(dtype: torch.dtype, backend: str) -> None:
    """50 x 50 points of R^160 within .25 of each other, blur 1e-3: never negative beyond rounding."""
    generator = torch.Generator().manual_seed(0)
    x, y = (0.01 * torch.randn(50, 160, generator=generator, dtype=torch.float64) for _ in range(2))
    assert float(torch.cdist(x, y).max()) <= 0.25
    x, y = x.to(dtype), y.to(dtype)
    loss = otn.SinkhornLoss.from_geomloss(blur=1e-3, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # eps is 1e-5 of the cost: float32 says it stalls
        value = float(loss(x, y))
    assert loss.last_result is not None
    if dtype == torch.float64:
        assert loss.last_result.status is Status.CONVERGED
    else:
        assert loss.last_result.status in (Status.CONVERGED, Status.STAGNATION)
        assert float(loss.last_result.marginal_error) <= 2 * loss.last_result.tol
    reach = float(loss.last_result.problem.centred.max_cost)
    assert value >= -4 * torch.finfo(dtype).eps * reach
    near = x + 1e-3 * y  # from the last call's potentials, which overflow here
    assert float(loss(x, near)) >= -4 * torch.finfo(dtype).eps * reach
    assert loss.last_result.converged


@EVERYWHERE
@DTYPES
@pytest.mark.parametrize("rho", RELAXATIONS, ids=str)
def test_O8_identical_inputs_give_exactly_zero(
    rho: tuple[Any, Any], dtype: torch.dtype, backend: str
) -> None:
    case = case_S(6, 5, 3, 0.1).with_(rho_x=rho[0], rho_y=rho[1])
    x, _, a, _ = leaves(case, dtype)
    loss = otn.SinkhornLoss(0.1, True, rho_x=rho[0], rho_y=rho[1], backend=backend)
    value = loss(a, x, a.clone(), x.clone())
    if rho[0] != rho[1]:  # S(x, x) of unlike penalties is no divergence: three different problems
        assert (
            abs(
                float(value.detach())
                - truth.divergence(*(t.detach().double().numpy() for t in (x, x, a, a)), **case.options).value
            )
            <= 1e-5
        )
        return
    assert float(value.detach()) == 0.0
    (gradient,) = torch.autograd.grad(value, x)
    assert float(gradient.abs().max()) == 0.0


@DTYPES
@pytest.mark.parametrize("n", [1, 7, 40])
def test_O8_zero_for_any_cloud(n: int, dtype: torch.dtype) -> None:
    """Also far from the origin, with duplicates and zero weights, and from a warm loss."""
    generator = torch.Generator().manual_seed(n)
    x = (torch.randn(n, 3, generator=generator) + 100).to(dtype)
    x[-1] = x[0]
    a = torch.rand(n, generator=generator).to(dtype)
    a[n // 2 + 1 :: 3] = 0
    loss = otn.SinkhornLoss(0.05, True)
    loss(a, x + 1, a, x)
    assert float(loss(a, x, a, x.clone())) == 0.0
    assert float(otn.sinkhorn_divergence(x, x.clone(), eps=0.05)) == 0.0


@EVERYWHERE
@pytest.mark.parametrize("rho", RELAXATIONS, ids=str)
def test_against_truth(rho: tuple[Any, Any], backend: str) -> None:
    """Value with the mass term, gradient, joint Hessian; masses differ where they may."""
    case = case_S(5, 7, 2, 0.3).with_(rho_x=rho[0], rho_y=rho[1])
    if rho != (None, None):
        case = case.with_(a=1.3 * np.asarray(case.a))
    loss, (x, y, a, b) = loss_of(case, True, backend=backend), leaves(case)
    expected = exact(case)
    value = loss(a, x, b, y)
    assert_close(value, expected.value, "value", scale=abs(expected.cross.value))
    for letter, found in zip("xy", torch.autograd.grad(value, (x, y)), strict=True):
        assert_close(found, expected.gradient(letter), "gradient")
    assert_close(autograd_hessian(loss, x, y, a, b), expected.hessian("xy"), "hvp")


def test_mass_term() -> None:
    """Without (eps/2)(sum a - sum b)^2 unequal masses of one cloud would not be told apart."""
    case = case_S(5, 5, 2, 0.3).with_(rho_x=0.7, rho_y=0.7)
    x, _, a, _ = leaves(case)
    loss = loss_of(case, True)
    value = float(loss(1.5 * a.detach(), x.detach(), a.detach(), x.detach()))
    expected = truth.divergence(case.x, case.x, 1.5 * np.asarray(case.a), case.a, **case.options)
    assert value > 1e-3
    assert abs(value - expected.value) <= 1e-11
    raw = sum(k * float(loss.last_terms[n].value) for k, n in ((1, "xy"), (-0.5, "xx"), (-0.5, "yy")))
    assert value - raw == pytest.approx(0.15 * 0.25, rel=1e-9)


@pytest.mark.parametrize("rho", [None, 0.7])
def test_weights_against_differences(rho: float | None) -> None:
    """Gradient and products in the weights, at masses that may move on relaxed sides."""
    case = case_S(4, 5, 2, 0.4).with_(rho_x=rho, rho_y=rho)
    loss, (x, y, a, b) = loss_of(case, True), leaves(case)
    gradients = torch.autograd.grad(loss(a, x, b, y), (x, a, b), create_graph=True)
    move = torch.tensor([1.0, -2.0, 0.5, 0.5 if rho is None else 1.5], dtype=torch.float64)
    products = torch.autograd.grad((gradients[1] * move).sum(), (x, b, a))
    step = 1e-5
    values, sides = [], []
    for k in (step, -step):
        value = loss(a + k * move, x, b, y)
        values.append(value.detach())
        sides.append(torch.autograd.grad(value, (x, b, a)))
    slope = (values[0] - values[1]) / (2 * step)
    assert_close((gradients[1] * move).sum(), slope, "homogeneity")
    for k, (ahead, behind) in enumerate(zip(*sides, strict=True)):
        assert_close(
            products[k], (ahead - behind) / (2 * step), "hvp", scale=float(products[k].abs().max()) * 300
        )


@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_self_term_stays_well_conditioned(backend: str) -> None:
    """One pass per CG step and a condition number of at most 2: few passes at any eps."""
    counts = {}
    for eps in (0.1, 0.01, 0.001):
        case = seeded(150, 150, 2, eps)
        x = torch.tensor(case.x).requires_grad_()
        loss = otn.SinkhornLoss(eps, True, backend=backend, rtol=1e-10)
        (gradient,) = torch.autograd.grad(loss(x, torch.tensor(case.y)), x, create_graph=True)
        term = loss.last_terms["xx"]
        before = term.result.plan_passes
        torch.autograd.grad(gradient, x, torch.randn_like(x))
        counts[eps] = term.result.plan_passes - before
        assert term.stats.converged
        assert term.stats.residual <= 1e-10
    assert max(counts.values()) <= 24, counts


@pytest.mark.parametrize("eps", [0.1, 0.01])
def test_self_term_costs_one_pass_per_iteration(eps: float) -> None:
    """The symmetric update of f = g: a pass an iteration, and far fewer of them than alternating ones."""
    case = seeded(150, 150, 2, eps)
    x = torch.tensor(case.x)
    problem = otn.OTProblem(x, x, eps=eps)
    own = otn.sinkhorn(problem, update="self", backend="cpu")
    assert own.converged
    assert own.plan_passes <= own.n_iter + 3
    assert own.n_iter <= 60
    assert torch.equal(own.f, own.g)
    other = otn.sinkhorn(problem, backend="cpu", tol=1e-10)
    assert_close(own.value, other.value, "value")


def test_self_update_is_refused_for_two_clouds() -> None:
    case = case_S(5, 5, 2, 0.3)
    with pytest.raises(ValueError, match='update="self"'):
        otn.sinkhorn(otn.OTProblem(case.x, case.y, eps=0.3), update="self")
