"""Cases O18 and O20 to O23 through the losses; their state, statuses and limits."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ot_newton as otn
from ot_newton.errors import ConvergenceWarning, Status
from tests.generators import case_S, pitchfork, seeded
from tests.helpers import BACKENDS, solve
from tests.loss_cases import leaves, loss_of
from tests.tolerances import assert_close, relative_error, to_numpy

ROOT = Path(__file__).parents[1]
CASE = case_S(5, 7, 2, 0.5)
KINDS = pytest.mark.parametrize("debias", [False, True], ids=["ot", "divergence"])


def hvp(function: Any, x: Tensor, v: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad(gradient, x, v)[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_O18_upstream_factors_are_kept(backend: str) -> None:
    """The Hessian of OT^2 has its 2 g g^T: printed matrix, through autograd and through torch.func."""
    printed = np.array([[1.08371913, 0.54871921], [0.54871921, 1.08371913]])
    case = pitchfork(0.5, 1.0)
    loss, (x, y, a, b) = loss_of(case, backend=backend), [t.detach() for t in leaves(case)]
    square = lambda z: loss(a, z, b, y).square()  # noqa: E731
    columns = [hvp(square, x, e.reshape(2, 1)).flatten() for e in torch.eye(2, dtype=torch.float64)]
    assert np.abs(to_numpy(torch.stack(columns)) - printed).max() <= 5e-9
    assert np.abs(to_numpy(torch.func.hessian(square)(x)).reshape(2, 2) - printed).max() <= 5e-9


def test_O18_factors_that_depend_on_the_input() -> None:
    """Chain and product rules around both kinds of loss, against finite differences of the gradient."""
    y = torch.tensor(CASE.y)
    ot, divergence = loss_of(CASE), loss_of(CASE, True)

    def function(z: Tensor) -> Tensor:
        return (1 + z.square().sum()) * ot(z, y).exp() - divergence(z, y) * ot(z, y)

    x, v = torch.tensor(CASE.x), torch.randn(5, 2, dtype=torch.float64)
    step = 1e-4
    gradient = torch.func.grad(function)
    coarse, fine = ((gradient(x + h * v) - gradient(x - h * v)) / (2 * h) for h in (step, step / 2))
    assert relative_error(hvp(function, x, v), (4 * fine - coarse) / 3) <= 1e-9


def test_O20_torch_compile_gives_the_eager_answer() -> None:
    """One graph break around the loss; what is compiled sees the same value, gradient and products."""
    case = case_S(3, 4, 2, 1.0)
    loss, (x, y, a, b) = loss_of(case), [t.detach() for t in leaves(case)]
    v = torch.randn_like(x)

    def function(z: Tensor) -> Tensor:
        return (2 * loss(a, z.sin(), b, y)).square()

    compiled = torch.compile(function, backend="eager")
    assert torch.equal(compiled(x), function(x))
    assert torch.equal(hvp(compiled, x, v), hvp(function, x, v))
    through = torch.compile(lambda z: otn.ot_cost(z, y, eps=1.0), backend="eager")
    assert torch.equal(through(x), otn.ot_cost(x, y, eps=1.0))


def test_O20_fullgraph_is_refused_in_words() -> None:
    x = torch.tensor(CASE.x)
    compiled = torch.compile(lambda z: otn.ot_cost(z, z + 1, eps=1.0), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="an OT loss .* cannot be traced"):
        compiled(x)


def test_O20_dynamo_is_not_imported_for_it() -> None:
    code = (
        "import sys, torch, ot_newton as otn\n"
        "x = torch.rand(3, 2, requires_grad=True)\n"
        "otn.ot_cost(x, x.detach() + 1, eps=1.0).backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@KINDS
def test_O21_jvp_of_the_gradient_is_the_hvp(debias: bool) -> None:
    loss, (x, y, a, b) = loss_of(CASE, debias), [t.detach() for t in leaves(CASE)]
    f, v = (lambda z: loss(a, z, b, y)), torch.randn_like(x)
    moved = torch.func.jvp(torch.func.grad(f), (x,), (v,))[1]
    assert_close(moved, hvp(f, x, v), "hvp")
    stacked = torch.stack([x, x + 0.1])
    lanes = torch.func.vmap(f)(stacked)
    for lane, value in zip(stacked, lanes, strict=True):
        assert_close(value, f(lane), "value")


def test_O21_a_batched_backward_is_the_block() -> None:
    """`is_grads_batched` and `vectorize=True` run the older vmap, which asks no rules: handled by hand."""
    loss, (x, y, a, b) = loss_of(CASE), leaves(CASE)
    (gradient,) = torch.autograd.grad(loss(a, x, b, y), x, create_graph=True)
    block = torch.randn(3, 5, 2, dtype=torch.float64)
    found = torch.autograd.grad(gradient, x, block, is_grads_batched=True, retain_graph=True)[0]
    each = [torch.autograd.grad(gradient, x, v, retain_graph=True)[0] for v in block]
    assert_close(found, torch.stack(each), "hvp")
    f = lambda z: loss(a.detach(), z, b.detach(), y.detach())  # noqa: E731
    plain = torch.autograd.functional.hessian(f, x.detach())
    assert_close(torch.autograd.functional.hessian(f, x.detach(), vectorize=True), plain, "hvp")


@KINDS
@pytest.mark.parametrize("letter", ["x", "y", "a", "b"])
def test_O22_a_change_in_place_raises(letter: str, debias: bool) -> None:
    """Between forward and backward, and between backward and double backward."""
    loss, points = loss_of(CASE, debias), dict(zip("xyab", leaves(CASE), strict=True))
    call = lambda: loss(points["a"], points["x"], points["b"], points["y"])  # noqa: E731
    value = call()
    with torch.no_grad():
        points[letter].mul_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, points["x"])
    (gradient,) = torch.autograd.grad(call(), points["x"], create_graph=True)
    with torch.no_grad():
        points[letter].mul_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(gradient.sum(), points["x"])


@KINDS
def test_O22_backward_twice(debias: bool) -> None:
    """With retain_graph every backward gives the same bits; without, torch's own error."""
    loss, (x, y, a, b) = loss_of(CASE, debias), leaves(CASE)
    value = loss(a, x, b, y)
    first = torch.autograd.grad(value, (x, y, a, b), retain_graph=True, create_graph=True)
    again = torch.autograd.grad(value, (x, y, a, b), retain_graph=True)
    assert all(torch.equal(p, q) for p, q in zip(first, again, strict=True))
    v = [torch.randn_like(g) for g in first]
    products = [torch.autograd.grad(first, (x, y, a, b), v, retain_graph=True) for _ in range(2)]
    assert all(torch.equal(p, q) for p, q in zip(*products, strict=True))
    value = loss(a, x, b, y)
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_O23_gradient_in_the_weights_keeps_the_factor(backend: str) -> None:
    """d(-3 OT)/da = -3 (f - mean f), has a graph, and matches differences along zero-sum changes."""
    loss, (x, y, a, b) = loss_of(CASE, backend=backend), leaves(CASE)
    (gradient,) = torch.autograd.grad(-3 * loss(a, x, b, y), a, create_graph=True)
    f = to_numpy(solve(CASE, backend=backend).f)
    assert np.abs(to_numpy(gradient) + 3 * (f - f.mean())).max() <= 1e-12
    delta = torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0], dtype=torch.float64)
    ahead, behind = (-3 * loss(a + k * 1e-6 * delta, x, b, y) for k in (1, -1))
    assert abs(float(((ahead - behind) / 2e-6 - (gradient * delta).sum()).detach())) <= 1e-8
    mixed = torch.autograd.grad((gradient * delta).sum(), (x, a))
    moved = [torch.autograd.grad(-3 * loss(a + k * 1e-5 * delta, x, b, y), (x, a)) for k in (1, -1)]
    for product, one, other in zip(mixed, *moved, strict=True):
        assert relative_error(product, (one - other) / 2e-5) <= 1e-6


@KINDS
def test_third_derivative_raises(debias: bool) -> None:
    loss, (x, y, a, b) = loss_of(CASE, debias), [t.detach() for t in leaves(CASE)]
    f = lambda z: loss(a, z, b, y)  # noqa: E731
    point = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(point), point, create_graph=True)
    (product,) = torch.autograd.grad(gradient.square().sum(), point, create_graph=True)
    with pytest.raises(NotImplementedError, match="third derivative"):
        torch.autograd.grad(product.sum(), point)
    third = torch.func.grad(lambda z: torch.func.hessian(f)(z).sum())
    with pytest.raises(NotImplementedError, match="third derivative"):
        third(x)


# ---- status ------------------------------------------------------------------------------------------


@KINDS
def test_inner_status_is_a_warning_and_kept(debias: bool) -> None:
    x, y, a, b = leaves(CASE)
    loss = otn.SinkhornLoss(0.02, debias, max_iter=7, method="sinkhorn")
    assert loss.last_result is None
    with pytest.warns(ConvergenceWarning, match="MAX_ITER"):
        loss(a, x, b, y)
    assert loss.last_result is not None
    assert loss.last_result.status is Status.MAX_ITER
    assert not loss.last_result.converged


@KINDS
def test_capped_inner_solve_warns(debias: bool) -> None:
    case = seeded(60, 50, 2, 0.02)
    x = torch.tensor(case.x).requires_grad_()
    y = torch.tensor(case.y)
    value = otn.SinkhornLoss(0.02, debias, backend="cpu", max_cg=1)(x, y)
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    with pytest.warns(ConvergenceWarning, match=r"double backward .* residual"):
        torch.autograd.grad(gradient, x, torch.randn_like(x))


# ---- warm starts -------------------------------------------------------------------------------------


@KINDS
def test_warm_start_saves_iterations_and_changes_no_answer(debias: bool) -> None:
    x, y, a, b = leaves(CASE)
    warm, cold = (
        loss_of(CASE, debias, warm_start=flag, tol=1e-11, method="sinkhorn") for flag in (True, False)
    )
    for loss in (warm, cold):
        loss(a, x, b, y)
    near = x.detach() + 1e-6
    assert_close(warm(a, near, b, y), cold(a, near, b, y), "value")
    assert warm.last_result is not None
    assert cold.last_result is not None
    assert warm.last_result.n_iter < 0.75 * cold.last_result.n_iter


def test_warm_state_is_the_whole_state() -> None:
    """A loss with another's state repeats its next call bit for bit; a frozen one stays where it is."""
    x, y, a, b = [t.detach() for t in leaves(CASE)]
    loss, other = (otn.SinkhornLoss(0.5, tol=1e-6) for _ in range(2))
    assert loss.warm_state() == {}
    loss(a, x, b, y)
    saved = loss.warm_state()
    with loss.freeze():
        frozen = loss(a, x + 0.1, b, y)
        loss(a, x - 0.3, b, y)
        assert torch.equal(loss(a, x + 0.1, b, y), frozen)
    kept = loss.warm_state()
    assert saved["xy"].keys() == kept["xy"].keys()
    assert all(torch.equal(part, kept["xy"][name]) for name, part in saved["xy"].items())
    after = loss(a, x + 0.1, b, y)
    assert torch.equal(after, frozen)
    assert not torch.equal(loss.warm_state()["xy"]["f"], saved["xy"]["f"])
    other.load_warm_state(saved)
    assert torch.equal(other(a, x + 0.1, b, y), after)
    assert torch.equal(saved["xy"]["f"], kept["xy"]["f"])


def test_warm_start_survives_other_sizes_and_dtypes() -> None:
    x, y, a, b = [t.detach() for t in leaves(CASE)]
    loss = otn.SinkhornLoss(0.5)
    loss(a, x, b, y)
    assert_close(loss(x[:3], y), otn.ot_cost(x[:3], y, eps=0.5), "value")
    assert loss(x[:3].float(), y.float()).dtype == torch.float32
    stacked = torch.stack([x, x + 0.1])
    assert_close(loss(stacked, y), otn.ot_cost(stacked, y, eps=0.5), "value")
    bad = torch.full_like(x, 1e200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(bad, y)
    assert_close(loss(x, y), otn.ot_cost(x, y, eps=0.5), "value")


def test_passes_of_everything_are_counted() -> None:
    x, y, a, b = leaves(CASE)
    loss = otn.SinkhornLoss(0.5, True, backend="cpu")
    counts = [loss.plan_passes]
    value = loss(a, x, b, y)
    counts.append(loss.plan_passes)
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    counts.append(loss.plan_passes)
    torch.autograd.grad(gradient.sum(), x, retain_graph=True)
    counts.append(loss.plan_passes)
    assert counts[0] == 0
    assert counts[0] < counts[1] <= counts[2] < counts[3]
    assert counts[3] == sum(term.result.plan_passes for term in loss.last_terms.values())
