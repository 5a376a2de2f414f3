"""The losses as differentiable functions: autograd, torch.func, reference values, batches, dtypes, cost."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import ot_newton as otn
from tests.exact_cases import EXACT_ROWS, PITCHFORK_ROWS, Row
from tests.generators import Case, case_S, pitchfork_exact, seeded
from tests.helpers import BACKENDS, problem_of, rounded, solve
from tests.loss_cases import RELAXATIONS, autograd_hessian, leaves, log_weights, loss_of, reweighted
from tests.tolerances import assert_close, assert_printed, to_numpy

SMALL = case_S(2, 3, 2, 1.0)
KINDS = pytest.mark.parametrize("debias", [False, True], ids=["ot", "divergence"])


def second(loss: Any, point: Tensor, v: Tensor) -> Tensor:
    """`H v` by double backward."""
    point = point.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(point), point, create_graph=True)
    return torch.autograd.grad((gradient * v).sum(), point)[0]


# ---- against reference values and truth --------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", EXACT_ROWS, ids=repr)
def test_printed_rows_through_the_loss(row: Row, backend: str) -> None:
    loss, (x, y, a, b) = loss_of(row.case, backend=backend), leaves(row.case)
    value = loss(a, x, b, y)
    assert_printed(value, row.value, "value")
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    for found, printed in zip(gradient[0], row.gradient, strict=False):
        if printed is not None:
            assert_printed(found, printed, "gradient")
    full = autograd_hessian(loss, x, y, a, b)
    spectrum = np.linalg.eigvalsh(full[: x.numel(), : x.numel()])
    assert_printed(spectrum[0], str(row.lambda_min), "lambda_min")
    assert_printed(spectrum[-1], str(row.lambda_max), "lambda_max")
    assert_printed(spectrum.sum(), str(row.trace), "trace")
    assert_close(full, row.case.truth().hessian("xy"), "hvp")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", PITCHFORK_ROWS, ids=repr)
def test_pitchfork_through_the_loss(row: Row, backend: str) -> None:
    exact = pitchfork_exact(float(row.case.x[1, 0]), row.case.eps, row.case.cost_scale)
    loss, (x, y, a, b) = loss_of(row.case, backend=backend), leaves(row.case)
    value = loss(a, x, b, y)
    assert abs(float(value) - exact["value"]) <= 1e-12
    (gradient,) = torch.autograd.grad(value, x)
    assert np.abs(to_numpy(gradient) - exact["gradient"]).max() <= 1e-12
    assert np.abs(autograd_hessian(loss, x, y, a, b)[:2, :2] - exact["hessian"]).max() <= 1e-11


@KINDS
@pytest.mark.parametrize("rho", RELAXATIONS, ids=str)
def test_gradcheck_and_gradgradcheck(rho: tuple[Any, Any], debias: bool) -> None:
    """Jointly in x, y, a, b: softmax keeps the mass of hard sides, exp lets it move on relaxed ones."""
    case = SMALL.with_(rho_x=rho[0], rho_y=rho[1])
    loss = loss_of(case, debias, rtol=1e-12)
    x, y, _, _ = leaves(case)
    arguments = (x, y, *log_weights(case))
    function = reweighted(loss, case)
    fast = debias and rho != (None, None)  # random projections of the same Jacobians
    assert gradcheck(function, arguments, atol=1e-8, rtol=1e-6, fast_mode=fast)
    assert gradgradcheck(function, arguments, atol=1e-7, rtol=1e-6, fast_mode=fast)


@KINDS
def test_gradgradcheck_of_the_streaming_backend(debias: bool) -> None:
    loss = loss_of(SMALL, debias, rtol=1e-12, backend="cpu")
    x, y, _, _ = leaves(SMALL)
    arguments = (x, y, *log_weights(SMALL))
    assert gradgradcheck(reweighted(loss, SMALL), arguments, atol=1e-7, rtol=1e-6, fast_mode=True)


@pytest.mark.parametrize("rho", RELAXATIONS, ids=str)
def test_gradients_equal_those_of_the_result(rho: tuple[Any, Any]) -> None:
    case = case_S(5, 7, 2, 0.3).with_(rho_x=rho[0], rho_y=rho[1])
    x, y, a, b = leaves(case)
    found = torch.autograd.grad(loss_of(case)(a, x, b, y), (x, y, a, b))
    result, exact = solve(case), case.truth()
    for letter, gradient in zip("xyab", found, strict=True):
        assert_close(gradient, result.gradient(letter), "batch")
        assert_close(gradient, exact.gradient(letter), "gradient")


# ---- torch.func and torch.autograd.functional --------------------------------------------------------


@KINDS
def test_torch_func(debias: bool) -> None:
    """grad, vjp, jvp, jvp of grad, hessian: all the double backward's numbers."""
    case = case_S(4, 5, 2, 0.5)
    loss, (x, y, a, b) = loss_of(case, debias), [t.detach() for t in leaves(case)]
    f = lambda z: loss(a, z, b, y)  # noqa: E731
    v = torch.randn_like(x)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(leaf), leaf)
    product = second(f, x, v)
    assert_close(torch.func.grad(f)(x), gradient, "batch")
    value, pull = torch.func.vjp(f, x)
    assert_close(pull(torch.full_like(value, -2.0))[0], -2 * gradient, "batch")
    assert_close(torch.func.jvp(f, (x,), (v,))[1], (gradient * v).sum(), "batch")
    assert_close(torch.func.jvp(torch.func.grad(f), (x,), (v,))[1], product, "hvp")
    hessian = torch.func.hessian(f)(x).reshape(8, 8)
    assert_close(
        hessian, autograd_hessian(loss, x.requires_grad_(), y.clone().requires_grad_(), a, b)[:8, :8], "hvp"
    )
    assert_close(hessian @ v.flatten(), product.flatten(), "hvp")


def test_torch_func_jointly_in_points_and_weights() -> None:
    case = SMALL.with_(rho_x=0.7, rho_y=1.3)
    loss, arguments = loss_of(case), tuple(t.detach() for t in leaves(case))
    f = lambda x, y, a, b: loss(a, x, b, y)  # noqa: E731
    v = tuple(torch.randn_like(t) for t in arguments)
    forward = torch.func.jvp(torch.func.grad(f, argnums=(0, 1, 2, 3)), arguments, v)[1]
    points = [t.clone().requires_grad_() for t in arguments]
    gradients = torch.autograd.grad(f(*points), points, create_graph=True)
    backward = torch.autograd.grad(gradients, points, v)
    for one, other in zip(forward, backward, strict=True):
        assert_close(one, other, "hvp")


@KINDS
def test_vmap_over_clouds_is_a_loop(debias: bool) -> None:
    case = case_S(4, 5, 2, 0.5)
    loss, (_, y, a, b) = loss_of(case, debias), [t.detach() for t in leaves(case)]
    clouds, v = torch.randn(3, 4, 2, dtype=torch.float64), torch.randn(3, 4, 2, dtype=torch.float64)
    f = lambda z: loss(a, z, b, y)  # noqa: E731
    product = lambda z, u: torch.func.jvp(torch.func.grad(f), (z,), (u,))[1]  # noqa: E731
    found = torch.func.vmap(f)(clouds), torch.func.vmap(torch.func.grad(f))(clouds)
    products = torch.func.vmap(product)(clouds, v)
    for k in range(3):
        leaf = clouds[k].clone().requires_grad_()
        value = f(leaf)
        assert_close(found[0][k], value, "value")
        assert_close(found[1][k], torch.autograd.grad(value, leaf)[0], "gradient")
        assert_close(products[k], second(f, clouds[k], v[k]), "hvp")


def test_vmap_over_directions_is_one_block_product() -> None:
    case = case_S(5, 7, 2, 0.5)
    loss, (x, y, a, b) = loss_of(case, backend="cpu"), leaves(case)
    (gradient,) = torch.autograd.grad(loss(a, x, b, y), x, create_graph=True)
    block = torch.randn(6, 5, 2, dtype=torch.float64)
    before = loss.plan_passes
    (found,) = torch.autograd.grad(gradient, x, block, is_grads_batched=True, retain_graph=True)
    together = loss.plan_passes - before
    each = torch.stack([torch.autograd.grad(gradient, x, v, retain_graph=True)[0] for v in block])
    assert_close(found, each, "hvp")
    assert together <= 1.5 * (loss.plan_passes - before - together) / 6


@KINDS
def test_autograd_functional(debias: bool) -> None:
    case = case_S(4, 5, 2, 0.5)
    loss, (x, y, a, b) = loss_of(case, debias), [t.detach() for t in leaves(case)]
    f, v = (lambda z: loss(a, z, b, y)), torch.randn_like(x)
    product = second(f, x, v)
    assert_close(torch.autograd.functional.hvp(f, x, v)[1], product, "hvp")
    assert_close(torch.autograd.functional.vhp(f, x, v)[1], product, "hvp")
    both = torch.autograd.functional.hvp(lambda z, w: loss(a, z, b, w), (x, y), (v, torch.zeros_like(y)))[1]
    assert_close(both[0], product, "hvp")


# ---- calls, batches, dtypes ---------------------------------------------------------------------------


@KINDS
def test_batch_is_a_loop(debias: bool) -> None:
    """Three clouds against one: values per lane; the shared cloud collects the gradients of all."""
    case = case_S(4, 5, 2, 0.5)
    loss, (_, y, a, b) = loss_of(case, debias), leaves(case)
    x = torch.randn(3, 4, 2, dtype=torch.float64).requires_grad_()
    factor = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    values = loss(a, x, b, y)
    assert values.shape == (3,)
    gradients = torch.autograd.grad((factor * values).sum(), (x, y, a, b), create_graph=True)
    v = [torch.randn_like(g) for g in gradients]
    products = torch.autograd.grad(gradients, (x, y, a, b), v)
    expected = [torch.zeros_like(t) for t in (*gradients, *products)]
    for k in range(3):
        leaf = x[k].detach().requires_grad_()
        value = loss(a, leaf, b, y)
        assert_close(values[k], value, "value")
        own = torch.autograd.grad(factor[k] * value, (leaf, y, a, b), create_graph=True)
        other = torch.autograd.grad(own, (leaf, y, a, b), [v[0][k], *v[1:]])
        for at, parts in ((0, own), (4, other)):
            expected[at][k] = parts[0].detach()
            for j in range(1, 4):
                expected[at + j] = expected[at + j] + parts[j].detach()
    for found, wanted in zip((*gradients, *products), expected, strict=True):
        assert_close(found, wanted, "hvp")


def test_functions_are_the_module() -> None:
    case = case_S(5, 7, 2, 0.3)
    x, y, a, b = leaves(case)
    options = {"tol": 1e-12, "max_iter": 100_000}
    for debias, function in ((False, otn.ot_cost), (True, otn.sinkhorn_divergence)):
        loss = otn.SinkhornLoss(0.3, debias, **options)
        assert torch.equal(function(x, y, a, b, eps=0.3, **options), loss(a, x, b, y))
        assert torch.equal(function(x, y, eps=0.3, **options), loss_of(case, debias, **options)(x, y))


@KINDS
def test_float32_against_truth(debias: bool) -> None:
    case = rounded(case_S(5, 7, 2, 0.5), torch.float32)
    x, y, a, b = leaves(case, torch.float32)
    loss = loss_of(case, debias, torch.float32)
    value = loss(a, x, b, y)
    gradients = torch.autograd.grad(value, (x, y), create_graph=True)
    assert {t.dtype for t in (value, *gradients)} == {torch.float32}
    if debias:
        from tests import truth

        exact: Any = truth.divergence(*case.arrays, eps=case.eps)
    else:
        exact = case.truth()
    scale = float(case.truth().value)
    assert_close(value, exact.value, "value", torch.float32, scale=scale)
    for letter, gradient in zip("xy", gradients, strict=True):
        assert_close(gradient, exact.gradient(letter), "gradient", torch.float32, scale=1.0)
    assert_close(autograd_hessian(loss, x, y, a, b), exact.hessian("xy"), "hvp", torch.float32)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_computes_in_float32(half: torch.dtype) -> None:
    x, y, a, b = leaves(case_S(5, 7, 2, 0.5), half)
    value = otn.ot_cost(x, y, eps=0.5)
    assert value.dtype == torch.float32
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    assert gradient.dtype == half
    wide = x.detach().float().requires_grad_()
    reference = otn.ot_cost(wide, y.detach().float(), eps=0.5)
    assert torch.equal(value, reference)
    (expected,) = torch.autograd.grad(reference, wide)
    assert torch.equal(gradient, expected.to(half))


def test_from_geomloss() -> None:
    """blur and reach become eps = blur^2 and rho = reach^2 of the half cost, debiased by default."""
    loss = otn.SinkhornLoss.from_geomloss(blur=0.5, reach=1.2)
    assert (loss.eps, loss.cost_scale, loss.debias) == (0.25, 0.5, True)
    assert loss.rho_x == loss.rho_y == pytest.approx(1.44)
    assert otn.SinkhornLoss.from_geomloss(0.1, debias=False).rho_x is None
    with pytest.raises(ValueError, match="blur"):
        otn.SinkhornLoss.from_geomloss(blur=-1.0)
    with pytest.raises(ValueError, match="reach"):
        otn.SinkhornLoss.from_geomloss(reach=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": -1.0}, "eps"),
        ({"eps": 1.0, "cost_scale": 0.0}, "cost_scale"),
        ({"eps": 1.0, "rho_x": 0.0}, "rho_x"),
        ({"eps": 1.0, "rtol": 2.0}, "rtol"),
        ({"eps": 1.0, "max_cg": 0}, "max_cg"),
        ({"eps": 1.0, "iterations": 5}, "iterations"),
    ],
    ids=lambda v: str(v),
)
def test_bad_options_are_named_before_any_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        otn.SinkhornLoss(**options)


def test_bad_calls_are_named() -> None:
    loss, (x, y, a, b) = otn.SinkhornLoss(1.0), leaves(SMALL)
    with pytest.raises(TypeError, match="3 arguments"):
        loss(a, x, y)
    with pytest.raises(ValueError, match="a must have shape"):
        loss(b, x, a, y)
    with pytest.raises(ValueError, match="last dimension"):
        loss(x, y[:, :1])
    with pytest.raises(ValueError, match="x must be finite"):
        loss(x * float("nan"), y)
    with pytest.raises(ValueError, match="equal mass"):
        loss(2 * a, x, b, y)


# ---- cost ---------------------------------------------------------------------------------------------


def test_double_backward_costs_what_the_operator_does() -> None:
    """At most 1.2 times the plan passes of `hessian("x") @ v`, marginals included."""
    case: Case = seeded(150, 140, 3, 0.05)
    x, y = (torch.tensor(t) for t in (case.x, case.y))
    loss = otn.SinkhornLoss(case.eps, backend="cpu", warm_start=False)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf, y), leaf, create_graph=True)
    result = otn.sinkhorn(problem_of(case), backend="cpu")
    h = result.hessian("x")
    result.gradient("x")
    for k in range(3):
        v = torch.randn(150, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        before, own = loss.plan_passes, result.plan_passes
        (found,) = torch.autograd.grad(gradient, leaf, v, retain_graph=True)
        expected = h @ v
        assert_close(found, expected, "hvp")
        assert loss.plan_passes - before <= 1.2 * (result.plan_passes - own)


def test_first_derivatives_are_cheap() -> None:
    """The value's pass serves the gradient in x; those in y, a and b are one more each."""
    case = case_S(5, 7, 2, 0.5)
    for backend in BACKENDS:
        loss, (x, y, a, b) = loss_of(case, backend=backend), leaves(case)
        fixed = [part.detach() for part in (y, a, b)]
        for given, cost in (((x, *fixed), 0), ((x, y, *fixed[1:]), 1), ((x, y, a, b), 3)):
            wanted = [part for part in given if part.requires_grad]
            value = loss(given[2], given[0], given[3], given[1])
            before = loss.plan_passes
            torch.autograd.grad(value, wanted)
            assert loss.plan_passes - before == cost


def test_converged_derivatives_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y, a, b = leaves(SMALL)
        g = torch.autograd.grad(otn.ot_cost(x, y, a, b, eps=1.0), (x, a), create_graph=True)
        second = torch.autograd.grad(g[0].square().sum() + g[1].square().sum(), (x, y, a, b))
    assert all(bool(torch.isfinite(part).all()) for part in second)
