"""NewtonCG: the cases N1 to N3, N15 to N18, N20, N21, and random models at every scale."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from ot_newton.errors import ConvergenceWarning, DegenerateWarning, Status
from ot_newton.solvers.certificate import classify
from ot_newton.solvers.newton import NewtonCG, NewtonResult
from ot_newton.solvers.spectra import EigenEstimate

SCALES = (1e-8, 1e-4, 1.0, 1e8)
DTYPES = (torch.float64, torch.float32)
METHODS = ("trust-region", "line-search")
scaled = pytest.mark.parametrize("scale", SCALES)
typed = pytest.mark.parametrize("dtype", DTYPES)
both = pytest.mark.parametrize("method", METHODS)
quiet = pytest.mark.filterwarnings("ignore::ot_newton.errors.ConvergenceWarning")


def saddle(x):
    return x[0] ** 2 - x[1] ** 2 + x[1] ** 4 / 4


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def tensor(values, dtype=torch.float64):
    return torch.as_tensor(np.asarray(values, dtype=float)).to(dtype)


def rotation(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]


@both
@scaled
@typed
@pytest.mark.parametrize("start", [(0.0, 0.0), (1.0, 0.0), (1.0, 1e-9)])
def test_N1_saddles_are_left(method, scale, dtype, start):
    r = NewtonCG(lambda x: scale * saddle(x), method=method).minimize(tensor(start, dtype))
    assert r.status is Status.MINIMUM and r.success
    assert abs(float(r.x[1])) == pytest.approx(math.sqrt(2), rel=1e-5 if dtype is torch.float32 else 1e-7)
    assert r.fun == pytest.approx(-scale, rel=1e-5) and r.lambda_min.value == pytest.approx(
        2 * scale, rel=1e-3
    )
    assert any(row.kind == "escape" for row in r.history) or start[1] != 0.0


@both
@scaled
def test_N1_saddle_is_named_when_escapes_are_forbidden(method, scale):
    solver = NewtonCG(lambda x: scale * saddle(x), method=method, max_escapes=0)
    with pytest.warns(ConvergenceWarning, match="SADDLE"):
        r = solver.minimize(tensor([0, 0]))
    assert r.status is Status.SADDLE and not r.success and r.n_iter == 0
    assert r.lambda_min.value == pytest.approx(-2 * scale) and r.lambda_min.sign == "negative"
    assert abs(float(r.lambda_min.vector[1])) == pytest.approx(1.0)


@both
@quiet
def test_N2_nan_and_indefinite_return_at_once(method):
    r = NewtonCG(lambda x: (x * math.nan).sum(), method=method).minimize(tensor([1, 2]))
    assert r.status is Status.NAN and r.n_iter == 0
    r = NewtonCG(lambda x: (x**2).sum(), hvp=lambda x, v: v * math.nan, method=method).minimize(
        tensor([1, 2])
    )
    assert r.status is Status.NAN and r.n_iter <= 1
    r = NewtonCG(saddle, max_escapes=0, method=method).minimize(tensor([0, 0]))
    assert r.status is Status.SADDLE and r.n_iter <= 1
    r = NewtonCG(lambda x: (x**2).sum(), hvp=lambda x, v: v * math.nan, method=method).minimize(
        tensor([0, 0])
    )
    assert r.status is Status.NAN
    r = NewtonCG(lambda x: torch.where(x > 0.5, x**2, x * math.nan).sum(), method=method).minimize(
        tensor([3.0])
    )
    assert r.status in (Status.NAN, Status.LINE_SEARCH, Status.STAGNATION) and float(r.x) > 0.5
    assert math.isfinite(r.fun)


@both
@scaled
@typed
@quiet
def test_N3_result_is_whole_when_cg_hits_its_cap(method, scale, dtype):
    d = (scale * torch.logspace(-6, 0, 30, dtype=torch.float64)).to(dtype)
    r = NewtonCG(lambda x: 0.5 * (d * x * x).sum(), max_cg=1, max_iter=20, method=method).minimize(
        torch.ones(30, dtype=dtype)
    )
    assert isinstance(r, NewtonResult) and r.status is Status.MAX_ITER and r.n_iter == 20
    assert r.jac is r.grad and (r.nit, r.nfev, r.njev, r.nhev) == (r.n_iter, r.n_fun, r.n_grad, r.n_hvp)
    assert torch.allclose(r.grad / scale, d * r.x / scale) and len(r.history) >= 21
    assert {row.cg_reason for row in r.history if row.kind == "newton"} <= {"MAX_ITER", "CONVERGED"}


@both
@scaled
def test_N15_best_point_is_returned(method, scale):
    seen = []

    def loss(x):
        seen.append(scale * abs(float(x.detach())))
        return scale * x.abs().sum()

    with pytest.warns(ConvergenceWarning, match="LINE_SEARCH"):
        r = NewtonCG(loss, method=method).minimize(tensor([1.1]))
    assert r.status is Status.LINE_SEARCH and not r.success
    assert r.fun <= min(seen) and r.fun < 1e-9 * scale


@both
@scaled
def test_N16_float32_rounding_is_accepted_by_the_gradient(method, scale):
    start = torch.full((5,), 1 + 1e-4, dtype=torch.float32)
    r = NewtonCG(lambda x: scale * (((x - 1) ** 2).sum() + 1e4), method=method).minimize(start)
    assert r.success and float((r.x - 1).abs().max()) < 1e-6


@scaled
@typed
def test_N17_every_kind_of_hessian_gives_the_same_iterates(scale, dtype):
    import scipy.sparse as sp
    from linear_operator.operators import DenseLinearOperator
    from scipy.sparse.linalg import aslinearoperator

    def loss(x):
        return scale * rosenbrock(x)

    def dense(x):
        return torch.func.hessian(loss)(x)

    kinds = [
        dense,
        lambda x: dense(x).numpy(),
        lambda x: sp.csr_array(dense(x).numpy()),
        lambda x: aslinearoperator(dense(x).numpy()),
        lambda x: DenseLinearOperator(dense(x)),
        None,
    ]
    runs = [NewtonCG(loss, hess=h).minimize(tensor([-1.2, 1], dtype)) for h in kinds]
    double = dtype is torch.float64
    first = [row.fun / scale for row in runs[0].history]
    for run in runs:
        assert run.success
        assert torch.allclose(run.x, runs[0].x, atol=1e-7 if double else 1e-3)
        assert run.n_iter == runs[0].n_iter or not double
        same = [row.fun / scale for row in run.history][:6]
        assert np.allclose(same, first[:6], rtol=1e-7 if double else 1e-2)


@both
@scaled
@typed
def test_N18_unbounded_below(method, scale, dtype):
    with pytest.warns(ConvergenceWarning, match="UNBOUNDED"):
        r = NewtonCG(lambda x: -scale * (x**2).sum(), method=method).minimize(torch.ones(3, dtype=dtype))
    assert r.status is Status.UNBOUNDED and not r.success and r.n_iter < 100


@scaled
@typed
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_N20_witness_is_found_whatever_the_axes(scale, dtype, swap, turned):
    q = rotation(2, 3) if turned else torch.eye(2, dtype=torch.float64)
    q = q.flip(0) if swap else q
    d, q = (tensor([1.0, -1.05]) * scale).to(dtype), q.to(dtype)
    with pytest.warns(ConvergenceWarning, match="SADDLE"):
        r = NewtonCG(lambda x: 0.5 * (d * (q @ x) ** 2).sum(), max_escapes=0).minimize(tensor([0, 0], dtype))
    assert r.status is Status.SADDLE and r.lambda_min.value == pytest.approx(-1.05 * scale)


@quiet
@pytest.mark.parametrize("turned", [False, True])
def test_N20_random_indefinite_models_are_never_certified(turned):
    """300 models, 150 of them rotated, n = 2 to 6, |lambda_min| down to 1e-6 lambda_max, all scales.

    At 1e-6 float32 (floor 5e-7) can be left without a verdict, but never with a success.
    """
    draw = np.random.default_rng(0)
    for trial in range(150):
        n = int(draw.integers(2, 7))
        dtype = torch.float32 if trial % 3 == 0 else torch.float64
        scale = float(draw.choice(SCALES))
        d = 10.0 ** draw.uniform(-3, 0, n)
        d[0], d[1] = 1.0, -(10.0 ** draw.uniform(math.log10(1.01e-6), 0))
        draw.shuffle(d)
        q = rotation(n, trial) if turned else torch.eye(n, dtype=torch.float64)
        h = ((q * torch.as_tensor(d)) @ q.T * scale).to(dtype)
        method = METHODS[trial % 2]
        # Bounded below far away, so that leaving the saddle can end in a minimum too.
        quartic = 1e-3 * scale
        start = torch.zeros(n, dtype=dtype)
        if trial % 4 == 0:
            start = (q @ (torch.as_tensor((d > 0) * draw.normal(size=n)))).to(dtype)

        def loss(x, h=h, quartic=quartic):
            return 0.5 * x @ (h @ x) + quartic * (x @ x) ** 2

        r = NewtonCG(loss, method=method, max_escapes=trial % 2 * 10).minimize(start)
        if r.status is Status.SADDLE:
            v = r.lambda_min.vector.double()
            assert float(v @ (h.double() @ v)) < 0 and not r.success
        else:
            unsure = dtype is torch.float32 and r.status in (Status.UNDETERMINED, Status.STAGNATION)
            assert r.fun < 0 or r.fun < float(loss(start)) or unsure, (trial, r)
            at = torch.linalg.eigvalsh(torch.func.hessian(loss)(r.x).double())
            assert not r.success or float(at[0]) > -1e-6 * float(at[-1]), (trial, r)


def test_random_positive_definite_models_are_minima():
    """200 models, condition up to 1e6, any scale: at least 198 MINIMUM, none called indefinite."""
    draw = np.random.default_rng(1)
    found = []
    for trial in range(200):
        n = int(draw.integers(2, 13))
        scale = 10.0 ** draw.uniform(-8, 8)
        d = torch.as_tensor(10.0 ** draw.uniform(-6, 0, n) * 0.99 + 1e-6 * 1.01) * scale
        q, c = rotation(n, trial), torch.as_tensor(draw.normal(size=n))
        h = (q * d) @ q.T
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            r = NewtonCG(
                lambda x, h=h, c=c: 0.5 * (x - c) @ (h @ (x - c)), method=METHODS[trial % 2]
            ).minimize(torch.as_tensor(draw.normal(size=n)))
        found.append(r.status)
    assert found.count(Status.MINIMUM) >= 198 and Status.SADDLE not in found


@scaled
@typed
def test_N21_gauss_newton_steps_end_with_a_true_hessian_check(scale, dtype):
    """Residuals (x0, x1^2 - 1): Gauss-Newton sees no negative curvature at (0, 0)."""

    def residual(x):
        return torch.stack([x[0], x[1] ** 2 - 1])

    def gauss_newton(x, v):
        jv = torch.func.jvp(residual, (x,), (v,))[1]
        return scale * torch.func.vjp(residual, x)[1](jv)[0]

    def loss(x):
        return 0.5 * scale * (residual(x) ** 2).sum()

    solver = NewtonCG(loss, surrogate=gauss_newton, max_escapes=0)
    with pytest.warns(ConvergenceWarning, match="SADDLE"):
        r = solver.minimize(tensor([1, 0], dtype))
    assert r.status is Status.SADDLE and r.lambda_min.value == pytest.approx(-2 * scale, rel=1e-5)
    r = NewtonCG(loss, surrogate=gauss_newton).minimize(tensor([1, 0], dtype))
    assert r.status is Status.MINIMUM and abs(float(r.x[1])) == pytest.approx(1.0, rel=1e-5)


@scaled
@typed
@pytest.mark.parametrize("value", [-2e-6, -1.4e-6, -0.9e-6, -0.6e-6, -1e-8, 0.9e-6, 2e-6])
def test_N20_float32_says_no_more_than_it_knows(scale, dtype, value):
    """Around the band of 1e-6 lambda_max: success only where the true value cannot lie below it."""
    d = (tensor([1.0, value, 0.3]) * scale).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        r = NewtonCG(lambda x: 0.5 * (d * x * x).sum(), max_escapes=0).minimize(torch.zeros(3, dtype=dtype))
    floor = r.lambda_min.noise_floor / scale
    if value < -1e-6:
        assert r.status in (Status.SADDLE, Status.UNDETERMINED) and not r.success
    elif value > 1e-6:
        assert r.status is Status.MINIMUM
    elif value < floor - 1e-6:
        assert r.status is Status.UNDETERMINED and "noise" in r.message
    else:
        assert r.status is Status.DEGENERATE


# ---- beyond the cases ------------------------------------------------------------------------------


@both
@typed
def test_rosenbrock(method, dtype):
    r = NewtonCG(rosenbrock, method=method).minimize(torch.full((20,), -1.0, dtype=dtype))
    assert r.success and r.x.dtype is dtype and r.grad.dtype is dtype
    assert float(r.grad.norm()) < (1e-4 if dtype is torch.float64 else 5e-2)


@both
def test_logistic_regression_and_mlp(method):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).double()

    def logistic(w):
        return torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y) + 1e-3 * (w @ w)

    assert NewtonCG(logistic, method=method).minimize(torch.zeros(4, dtype=torch.float64)).success

    def mlp(w):
        hidden = torch.tanh(x @ w[:20].reshape(4, 5) + w[20:25])
        return ((hidden @ w[25:30] - y) ** 2).mean() + 1e-3 * (w @ w)

    w0 = 0.5 * torch.randn(30, generator=generator, dtype=torch.float64)
    r = NewtonCG(mlp, method=method).minimize(w0)
    assert r.status is Status.MINIMUM
    assert float(torch.linalg.eigvalsh(torch.func.hessian(mlp)(r.x))[0]) > 0


@pytest.mark.parametrize("shape", [(), (1,), (5, 5), (2, 1, 3)])
def test_shapes_are_kept(shape):
    start = torch.full(shape, 0.5, dtype=torch.float64)
    kept = start.clone()
    r = NewtonCG(lambda x: ((x - 2) ** 2).sum() + (x**4).sum()).minimize(start)
    assert r.success and r.x.shape == shape and r.grad.shape == shape and torch.equal(start, kept)


def test_half_precision_computes_in_single():
    seen = []

    def loss(x):
        seen.append(x.dtype)
        return ((x - 2) ** 2).sum()

    r = NewtonCG(loss).minimize(torch.zeros(3, dtype=torch.float16))
    assert r.x.dtype is torch.float16 and set(seen) == {torch.float32} and r.success


def test_float32_start_stays_float32_and_numpy_is_accepted():
    r = NewtonCG(rosenbrock).minimize(np.array([-1.2, 1.0]))
    assert r.x.dtype is torch.float64 and torch.allclose(r.x, torch.ones(2, dtype=torch.float64))


def test_degenerate_minimum_warns_and_gauge_directions_can_be_named():
    def loss(x):
        return (x[0] - x[1]) ** 2 + (x[1] - x[2] - 1) ** 2

    with pytest.warns(DegenerateWarning):
        r = NewtonCG(loss).minimize(tensor([1, 2, 4]))
    assert r.status is Status.DEGENERATE and r.success and abs(r.lambda_min.value) < 1e-12
    null = torch.ones(3, 1, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        r = NewtonCG(loss, nullspace=null).minimize(tensor([1, 2, 4]))
    assert r.status is Status.MINIMUM and float(r.x.sum()) == pytest.approx(7.0)


@quiet
def test_flat_and_linear_losses():
    r = NewtonCG(lambda x: 0 * x.sum() + 3).minimize(tensor([1, 2]))
    assert r.status is Status.FLAT and not r.success
    assert "gradient and curvature are zero" in r.message
    r = NewtonCG(lambda x: x.detach().sum() * 0 + 1).minimize(tensor([1, 2]))
    assert r.status is Status.FLAT
    r = NewtonCG(lambda x: 2 * x.sum()).minimize(tensor([1, 2]))
    assert r.status is Status.FLAT and not r.success and r.fun < -1e15
    assert "linear" in r.message and "gradient and curvature are zero" not in r.message


@quiet
def test_budgets():
    r = NewtonCG(rosenbrock, max_hvp=40).minimize(torch.full((10,), -1.0, dtype=torch.float64))
    assert r.status is Status.BUDGET and 40 <= r.n_hvp <= 41 and "40" in r.message

    class Counted:
        plan_passes = 0

        def __call__(self, x):
            Counted.plan_passes += 3
            return rosenbrock(x)

    r = NewtonCG(Counted(), max_passes=30).minimize(torch.full((10,), -1.0, dtype=torch.float64))
    assert r.status is Status.BUDGET and 30 <= r.history[-1].plan_passes <= 36


@quiet
def test_wide_noise_floor_is_undetermined():
    class Noisy:
        hvp_noise_floor = 5.0

        def __call__(self, x):
            return (x**2).sum()

    r = NewtonCG(Noisy()).minimize(tensor([1, 1]))
    assert r.status is Status.UNDETERMINED and not r.success and "noise floor" in r.message


def test_own_gradient_noise_floor_meets_the_gradient_test():
    class Noisy:
        noise_floor = 1e-3
        value_noise = 1e-6

        def __call__(self, x):
            return ((x - 1) ** 4).sum() + ((x - 1) ** 2).sum()

    r = NewtonCG(Noisy(), gtol=0.0).minimize(tensor([3, 4]))
    assert r.success and float(r.grad.norm()) <= 1e-3


def test_object_with_value_and_grad_and_hvp():
    class Quadratic:
        calls = 0

        def value_and_grad(self, x):
            self.calls += 1
            return float((x**2).sum()), 2 * x

        def hvp(self, x, v):
            return 2 * v

    loss = Quadratic()
    r = NewtonCG(loss).minimize(torch.ones(2, 3, dtype=torch.float64))
    assert r.status is Status.MINIMUM and r.n_fun == r.n_grad == loss.calls
    assert r.lambda_min.value == pytest.approx(2.0)


def test_finite_difference_products():
    r = NewtonCG(rosenbrock, hvp="finite-difference").minimize(tensor([-1.2, 1, 1]))
    assert r.status is Status.MINIMUM and r.lambda_min.noise_floor > 1e-12


def test_rejected_steps_cost_no_product():
    r = NewtonCG(rosenbrock).minimize(torch.full((30,), -1.5, dtype=torch.float64))
    rejected = [i for i, row in enumerate(r.history) if not row.accepted]
    assert rejected
    for i in rejected:
        assert r.history[i + 1].hvps == 0
    assert sum(row.hvps for row in r.history) == r.n_hvp


def test_preconditioner_saves_products():
    d = torch.logspace(-4, 0, 60, dtype=torch.float64)

    def loss(x):
        return 0.5 * (d * x * x).sum() + 1e-5 * (x**4).sum()

    start = torch.ones(60, dtype=torch.float64)
    plain = NewtonCG(loss).minimize(start)
    fast = NewtonCG(loss, preconditioner=torch.diag(1 / d)).minimize(start)
    varying = NewtonCG(loss, preconditioner=lambda x: torch.diag(1 / (d + 1.2e-4 * x**2))).minimize(start)
    certificate = 60
    assert plain.success and fast.success and varying.success
    assert fast.n_hvp - certificate < 0.3 * (plain.n_hvp - certificate)


def test_large_problem_is_certified_by_two_starts():
    d = torch.linspace(0.1, 1, 1000, dtype=torch.float64)
    r = NewtonCG(lambda x: 0.5 * (d * x * x).sum() + x.sum()).minimize(torch.zeros(1000, dtype=torch.float64))
    assert r.status is Status.MINIMUM and len(r.lambda_min.steps) == 2 and r.lambda_min.confidence >= 0.99
    assert sum(row.hvps for row in r.history if row.kind == "certificate") < 200


def test_large_saddle_is_left():
    d = torch.linspace(0.1, 1, 500, dtype=torch.float64)
    d[7] = -0.05
    r = NewtonCG(lambda x: 0.5 * (d * x * x).sum() + 0.1 * x[7] ** 4).minimize(
        torch.zeros(500, dtype=torch.float64)
    )
    assert r.status is Status.MINIMUM and abs(float(r.x[7])) == pytest.approx(math.sqrt(0.125), rel=1e-5)


@pytest.mark.parametrize("n", [250, 1000])
def test_near_null_continuum_is_decided_within_twice_the_dimension(n):
    """No probabilistic bound reaches 1e-6 lambda_max here: the spectrum is factorized, at N products more."""
    d = torch.linspace(0, 1, n, dtype=torch.float64) ** 6
    with pytest.warns(DegenerateWarning):
        r = NewtonCG(lambda x: 0.5 * (d * x * x).sum() + x[-1]).minimize(torch.zeros(n, dtype=torch.float64))
    assert r.status is Status.DEGENERATE and r.lambda_min.method == "dense"
    spent = [row.hvps for row in r.history if row.kind == "certificate"]
    assert spent == [r.lambda_min.n_hvp] and spent[0] <= 2 * n + 1


@scaled
@pytest.mark.parametrize("low", [0.0, -1e-9, 1e-9])
def test_isolated_near_null_curvature_costs_two_short_starts(scale, low):
    d = torch.linspace(0.1, 1, 1000, dtype=torch.float64)
    d[3] = low

    def loss(x):
        return scale * (0.5 * (d * x * x).sum() + x[5])

    with pytest.warns(DegenerateWarning):
        r = NewtonCG(loss).minimize(torch.zeros(1000, dtype=torch.float64))
    assert r.status is Status.DEGENERATE and len(r.lambda_min.steps) == 2 and r.lambda_min.n_hvp < 200


def test_cap_on_certificate_steps_is_kept():
    d = torch.linspace(0.1, 1, 300, dtype=torch.float64)
    d[:3] = 0.0
    solver = NewtonCG(lambda x: 0.5 * (d * x * x).sum(), certificate_steps=9)
    with pytest.warns(ConvergenceWarning, match="UNDETERMINED"):
        r = solver.minimize(torch.zeros(300, dtype=torch.float64))
    assert r.status is Status.UNDETERMINED and r.lambda_min.n_hvp <= 19 and "Lanczos steps" in r.message


@both
@scaled
@typed
def test_rounding_of_a_long_step_is_corrected(method, scale, dtype):
    """float32: one step from -1 lands at rounding from 0, a second one at 0."""
    r = NewtonCG(lambda x: scale * (x**2).sum(), method=method).minimize(torch.full((8,), -1.0, dtype=dtype))
    assert r.status is Status.MINIMUM and float(r.x.norm()) < 1e-7


def estimate(value, **changes):
    base = {
        "value": value, "vector": torch.ones(1), "residual": 0.0, "sign": "", "confidence": 1.0,
        "noise_floor": 1e-15, "n_hvp": 1, "seed": 0, "lambda_max": 1.0, "norm": 1.0, "level": -1e-6,
    }  # fmt: skip
    return EigenEstimate(**{**base, **changes})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (estimate(0.5), Status.MINIMUM),
        (estimate(2e-6), Status.MINIMUM),
        (estimate(5e-7), Status.DEGENERATE),
        (estimate(-5e-7), Status.DEGENERATE),
        (estimate(-2e-6), Status.SADDLE),
        (estimate(-9e-7, noise_floor=5e-7), Status.UNDETERMINED),
        (estimate(-4e-7, noise_floor=5e-7), Status.DEGENERATE),
        (estimate(-2e-6, noise_floor=5e-7), Status.SADDLE),
        (estimate(-2e-6, noise_floor=1e-5), Status.DEGENERATE),
        (estimate(-2e-4, noise_floor=1e-3), Status.UNDETERMINED),
        (estimate(0.5, noise_floor=1e-3), Status.MINIMUM),
        (estimate(-0.5, noise_floor=1e-3), Status.SADDLE),
        (estimate(0.5, confidence=0.9), Status.UNDETERMINED),
        (estimate(0.0, norm=0.0, lambda_max=0.0), Status.FLAT),
        (estimate(-1.0, lambda_max=-0.5), Status.SADDLE),
    ],
)
def test_classification(given, expected):
    assert classify(given, 0.99)[0] is expected


def test_repr_is_short_and_result_is_frozen():
    r = NewtonCG(saddle).minimize(tensor([1, 1]))
    assert len(repr(r)) < 200 and "tensor" not in repr(r)
    with pytest.raises(AttributeError):
        r.x = None
    with pytest.raises(AttributeError):
        r.nit = 3


def test_verbose_prints_a_row_per_step(capsys):
    r = NewtonCG(saddle, verbose=True).minimize(tensor([1, 0.5]))
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == len(r.history) + 1 and "certificate" in lines[-1]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"gtol": -1.0}, ValueError, "gtol"),
        ({"max_iter": -1}, ValueError, "max_iter"),
        ({"method": "newton"}, ValueError, "method must be one of"),
        ({"hvp": "exact"}, ValueError, "hvp must be one of"),
        ({"hess": 3}, TypeError, "hess must be a function"),
        ({"surrogate": 3}, TypeError, "surrogate must be a function"),
        ({"confidence": 1.5}, ValueError, "confidence"),
        ({"radius": 0.0}, ValueError, "radius"),
        ({"max_cg": 0}, ValueError, "max_cg"),
        ({"seed": "a"}, TypeError, "seed"),
    ],
)
def test_bad_options(options, error, match):
    with pytest.raises(error, match=match):
        NewtonCG(saddle, **options)


@pytest.mark.parametrize(
    ("start", "error", "match"),
    [
        (torch.zeros(2, dtype=torch.int64), TypeError, "x0 must be a floating"),
        (torch.zeros(2, dtype=torch.complex64), TypeError, "x0 must be a floating"),
        (torch.zeros(0), ValueError, "at least one element"),
        ("abc", TypeError, "x0 must be a floating"),
        (None, ValueError, "x0 must be given"),
    ],
)
def test_bad_starts(start, error, match):
    with pytest.raises(error, match=match):
        NewtonCG(saddle).minimize(start)


def test_bad_losses():
    with pytest.raises(TypeError, match="loss must be callable"):
        NewtonCG(3.0)
    with pytest.raises(TypeError, match="scalar"):
        NewtonCG(lambda x: x**2).minimize(tensor([1, 2]))

    class NoProduct:
        def value_and_grad(self, x):
            return 0.0, x

    with pytest.raises(TypeError, match="hvp or hessian"):
        NewtonCG(NoProduct())


def test_a_rejected_step_is_interpolated_or_halved() -> None:
    """A steep wall: the parabola finds the scale in one go, halving takes its way there."""

    def wall(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(20.0 * x[0]) - x[0] + x[1] ** 2

    start = torch.tensor([-1.5, 1.0], dtype=torch.float64)
    trials = {}
    for rule in ("halve", "interpolate"):
        found = NewtonCG(wall, radius=3.0, on_reject=rule).minimize(start)
        assert found.success
        assert abs(float(found.x[0]) + math.log(20.0) / 20.0) <= 1e-8
        trials[rule] = sum(record.kind == "newton" and not record.accepted for record in found.history)
    assert trials["interpolate"] < trials["halve"]
    with pytest.raises(ValueError, match="on_reject must be one of"):
        NewtonCG(wall, on_reject="quarter")
