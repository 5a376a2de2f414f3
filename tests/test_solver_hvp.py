"""Products by double backward, and `check_hvp`: the cases N35 to N41."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.autograd.function import once_differentiable

from ot_newton.errors import OTNewtonError, Status
from ot_newton.solvers.hvp_check import check_hvp
from ot_newton.solvers.newton import NewtonCG
from ot_newton.solvers.objective import Objective
from ot_newton.solvers.spectra import lambda_min

SCALES = (1e-8, 1e-4, 1.0, 1e8)
DTYPES = (torch.float64, torch.float32)
scaled = pytest.mark.parametrize("scale", SCALES)
typed = pytest.mark.parametrize("dtype", DTYPES)


def tensor(values, dtype=torch.float64):
    return torch.as_tensor(np.asarray(values, dtype=float)).to(dtype)


def hessian_at(loss, x, **options):
    return Objective(loss, x, **options).at(x.reshape(-1)).hessian


class SavedIntermediate(torch.autograd.Function):
    """sum x^3 with y = x^2 saved on ctx: its double backward is silently wrong."""

    @staticmethod
    def forward(ctx, x):
        ctx.x, ctx.y = x, x * x
        return (ctx.y * x).sum()

    @staticmethod
    def backward(ctx, grad):
        return (2 * ctx.y + ctx.x**2) * grad


class Detached(torch.autograd.Function):
    """sum x^2 with a backward that detaches."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x**2).sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (2 * x * grad).detach()


class Once(torch.autograd.Function):
    """sum x^2, once differentiable."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x**2).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@scaled
@typed
def test_right_losses_pass(scale, dtype):
    x = tensor([0.3, -1.2, 0.7, 2.0], dtype)
    losses = (
        lambda x: scale * (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum(),
        lambda x: scale * torch.logsumexp(3 * x, 0),
        lambda x: scale * (x**2).sum(),
        lambda x: scale * x.sum(),
    )
    for loss in losses:
        report = check_hvp(loss, x)
        assert report.passed and bool(report) and report.cause == "" and report.kind == "autograd"
        report.raise_if_failed()
    smooth = check_hvp(losses[0], tensor([0.3, -1.2, 0.7, 2.0]))
    assert smooth.gradient_slope == pytest.approx(2, abs=0.2) and smooth.hvp_slope > 2.7


@scaled
@typed
def test_N35_intermediate_saved_on_ctx(scale, dtype):
    def loss(x):
        return scale * SavedIntermediate.apply(x)

    x = tensor([1, 2], dtype)
    assert torch.allclose(hessian_at(loss, x) @ torch.ones(2, dtype=dtype), scale * tensor([2, 4], dtype))
    report = check_hvp(loss, x)
    assert not report.passed and "HVP slope" in report.failures and "SavedIntermediate" in report.cause
    assert "gradient slope" not in report.failures
    with pytest.raises(OTNewtonError, match="SavedIntermediate"):
        report.raise_if_failed()
    right = hessian_at(loss, x, hvp="finite-difference") @ torch.ones(2, dtype=dtype)
    assert torch.allclose(
        right, scale * tensor([6, 12], dtype), rtol=1e-2 if dtype is torch.float32 else 1e-8
    )


@scaled
@typed
@pytest.mark.parametrize("function", [Detached, Once])
def test_N36_detached_and_once_differentiable(scale, dtype, function):
    def loss(x):
        return scale * function.apply(x)

    x = tensor([1, 2], dtype)
    with pytest.raises(OTNewtonError, match=function.__name__):
        hessian_at(loss, x) @ torch.ones(2, dtype=dtype)
    report = check_hvp(loss, x)
    assert not report.passed and function.__name__ in report.cause
    with pytest.raises(OTNewtonError, match=function.__name__):
        NewtonCG(loss).minimize(x)
    right = hessian_at(loss, x, hvp="finite-difference") @ torch.ones(2, dtype=dtype)
    assert torch.allclose(right / scale, tensor([2, 2], dtype), rtol=1e-3 if dtype is torch.float32 else 1e-8)


@scaled
@typed
@pytest.mark.parametrize("mode", ["use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"])
def test_N37_cdist_at_coincident_points(mode, scale, dtype):
    fixed = torch.zeros(2, 2, dtype=dtype)

    def by_cdist(x):
        return scale * (torch.cdist(x, fixed, compute_mode=mode) ** 2).sum()

    def explicit(x):
        return scale * ((x[:, None] - fixed[None]) ** 2).sum()

    ones = torch.ones(4, dtype=dtype)
    if mode == "use_mm_for_euclid_dist":
        assert float((hessian_at(by_cdist, fixed) @ ones).abs().max()) == 0.0
    else:
        with pytest.raises(OTNewtonError, match="cdist"):
            hessian_at(by_cdist, fixed) @ ones
    report = check_hvp(by_cdist, fixed)
    assert not report.passed and "cdist" in report.cause
    assert torch.allclose(hessian_at(explicit, fixed) @ ones, 4 * scale * ones)
    assert check_hvp(explicit, fixed).passed


COMPILED = torch.compile(lambda x, factor: factor * (x**5).sum(), backend="aot_eager")


@scaled
@typed
def test_N38_compiled_loss_raises_or_matches(scale, dtype):
    factor = torch.tensor(scale, dtype=dtype)
    x = tensor([1.0], dtype)

    def loss(x):
        return COMPILED(x, factor)

    assert float(Objective(loss, x).at(x).grad) == pytest.approx(5.0 * scale, rel=1e-6)
    try:
        product = float(hessian_at(loss, x) @ torch.ones(1, dtype=dtype))
    except OTNewtonError as error:
        assert "twice" in str(error)
        report = check_hvp(loss, x)
        assert not report.passed
    else:
        assert product == pytest.approx(20.0 * scale, rel=1e-6)
    assert float(hessian_at(lambda x: scale * (x**5).sum(), x) @ x) == pytest.approx(20.0 * scale, rel=1e-6)


@scaled
@typed
@pytest.mark.filterwarnings("ignore::ot_newton.errors.ConvergenceWarning")
def test_N39_unused_parameter_and_linear_loss(scale, dtype):
    x, v = tensor([3, 5], dtype), tensor([2, 7], dtype)
    h = hessian_at(lambda w: scale * w[0] ** 2, x)
    assert torch.allclose(h @ v, scale * tensor([4, 0], dtype))
    parts = hessian_at(lambda w: scale * w[:1].square().sum(), x) @ torch.eye(2, dtype=dtype)
    assert torch.allclose(parts, scale * torch.diag(tensor([2, 0], dtype)))

    def linear(w):
        return scale * w.sum()

    assert float((hessian_at(linear, x) @ v).abs().max()) == 0.0
    assert lambda_min(hessian_at(linear, x)).value == 0.0
    r = NewtonCG(linear).minimize(x)
    assert r.status is Status.FLAT and not r.success and "linear" in r.message


@scaled
def test_N40_linear_operator_is_once_differentiable(scale):
    from linear_operator.operators import LinearOperator

    class Diagonal(LinearOperator):
        """A user's operator with what linear_operator requires and no more."""

        def __init__(self, d):
            super().__init__(d)
            self.d = d

        def _matmul(self, rhs):
            return self.d[:, None] * rhs if rhs.ndim > 1 else self.d * rhs

        def _size(self):
            return torch.Size([self.d.shape[0], self.d.shape[0]])

        def _transpose_nonbatch(self):
            return self

    def loss(x):
        return scale * (Diagonal(x**3) @ x).sum()

    x = tensor([1.0, 2.0, -1.5])
    assert torch.allclose(Objective(loss, x).at(x).grad, 4 * scale * x**3)
    product = hessian_at(loss, x) @ torch.ones(3, dtype=torch.float64)
    assert not torch.allclose(product, 12 * scale * x**2)
    report = check_hvp(loss, x)
    assert not report.passed and "linear_operator matmul is once differentiable" in report.cause


@scaled
def test_N41_library_without_double_backward(scale):
    """A loss from a library that guarantees first derivatives only: refused, or used by differences."""

    def loss(x):
        return scale * (Once.apply(x - 1) + (x**4).sum())

    x = tensor([2, -1])
    assert not check_hvp(loss, x, hvp="autograd").passed
    report = check_hvp(loss, x, hvp="finite-difference")
    assert report.passed and report.kind == "finite-difference"
    r = NewtonCG(loss, hvp="finite-difference").minimize(x)
    assert r.status is Status.MINIMUM and float(r.grad.norm()) < 1e-6 * scale
    exact = torch.func.hessian(lambda x: scale * (((x - 1) ** 2).sum() + (x**4).sum()))(r.x)
    assert r.lambda_min.value == pytest.approx(float(torch.linalg.eigvalsh(exact)[0]), rel=1e-5)
    assert r.lambda_min.noise_floor >= 1e-11 * r.lambda_min.norm


# ---- beyond the cases ------------------------------------------------------------------------------


def test_wrong_gradient_is_told_from_a_wrong_product():
    class Wrong:
        def value_and_grad(self, x):
            return float((x**2).sum()), 1.9 * x

        def hvp(self, x, v):
            return 1.9 * v

    report = check_hvp(Wrong(), tensor([1, 2]))
    assert "gradient slope" in report.failures and "derivative of the value" in report.cause


def test_asymmetric_and_nonlinear_products_fail():
    def loss(x):
        return (x**2).sum()

    x = tensor([1, 2, 3])
    turn = torch.tensor([[2.0, 1, 0], [0, 2, 0], [0, 0, 2]], dtype=torch.float64)
    assert "symmetry" in check_hvp(loss, x, hvp=lambda x, v: turn @ v).failures
    assert "linearity" in check_hvp(loss, x, hvp=lambda x, v: 2 * v * (1 + v.norm())).failures
    # An absolute threshold, as in peers: right for unit vectors, zero for short ones.
    cut = check_hvp(loss, x, hvp=lambda x, v: 2 * v * float(v.norm() > 1e-3))
    assert "linearity" in cut.failures


def test_random_loss_is_not_deterministic():
    def loss(x):
        return (x**2).sum() * (1 + 0.1 * float(torch.rand(())))

    assert "determinism" in check_hvp(loss, tensor([1, 2])).failures


def test_warm_starts_are_frozen_during_the_check():
    class Warm:
        frozen, moves = 0, 0

        def freeze(self):
            import contextlib

            @contextlib.contextmanager
            def held():
                self.frozen += 1
                yield
                self.frozen -= 1

            return held()

        def __call__(self, x):
            self.moves += not self.frozen
            return (x**2).sum()

    loss = Warm()
    assert check_hvp(loss, tensor([1, 2])).passed
    assert loss.moves == 0 and loss.frozen == 0


def test_products_do_not_run_the_forward_again():
    calls = 0

    def loss(x):
        nonlocal calls
        calls += 1
        return (x**4).sum()

    objective = Objective(loss, tensor([1, 2, 3]))
    point = objective.at(tensor([1, 2, 3]))
    h = point.hessian
    one = h @ torch.ones(3, dtype=torch.float64)
    block = h @ torch.eye(3, dtype=torch.float64)
    assert calls == 1 and objective.n_fun == 1 and objective.n_grad == 1 and objective.n_hvp == 4
    assert torch.allclose(block.sum(1), one) and torch.allclose(block.diagonal(), 12 * tensor([1, 4, 9]))


def test_block_product_falls_back_where_vmap_is_not_supported():
    class NoVmap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return NoVmapGrad.apply(x, grad)

    class NoVmapGrad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, grad):
            ctx.save_for_backward(x, grad)
            return 3 * x**2 * grad

        @staticmethod
        def backward(ctx, upper):
            x, grad = ctx.saved_tensors
            if float(upper.abs().sum()) < 0:
                raise AssertionError
            return 6 * x * grad * upper, 3 * x**2 * upper

    x = tensor([1, 2])
    block = hessian_at(lambda x: NoVmap.apply(x).sum(), x) @ torch.eye(2, dtype=torch.float64)
    assert torch.allclose(block, torch.diag(6 * x))


def test_check_refuses_bad_arguments():
    with pytest.raises(TypeError, match="loss must be callable"):
        check_hvp(3, tensor([1]))
    with pytest.raises(TypeError, match="x0 must be"):
        check_hvp(lambda x: x.sum(), "here")
    with pytest.raises(ValueError, match="tol"):
        check_hvp(lambda x: x.sum(), tensor([1]), tol=-1.0)
    assert math.isnan(check_hvp(lambda x: Once.apply(x), tensor([1, 2])).symmetry)
