"""Cases from public reports, O19 to O38: derivatives, convergence, conventions. One test (or more) per id."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse.linalg as sla
import torch

import ot_newton as otn
from ot_newton.errors import ConvergenceWarning, PrecisionWarning, Status
from tests import truth
from tests.conformance import check_scipy
from tests.generators import Case, case_S, pitchfork, seeded
from tests.helpers import BACKENDS, dense_hessian, problem_of, solve
from tests.tolerances import assert_close, assert_printed, relative_error, to_numpy

ROOT = Path(__file__).parents[1]
EVERYWHERE = pytest.mark.parametrize("backend", BACKENDS)


@EVERYWHERE
@pytest.mark.parametrize("eps", [1.0, 0.1])
def test_O19_schur_complement_is_singular_without_a_ridge(eps: float, backend: str) -> None:
    case = case_S(5, 7, 2, eps)
    result = solve(case, backend=backend)
    p = to_numpy(result.plan.to_dense())
    for side, plan in (("y", p), ("x", p.T)):
        schur = result.schur(side=side)
        ones = torch.ones(schur.shape[0], dtype=torch.float64)
        assert float((schur @ ones).abs().max()) <= 1e-15
        dense = np.diag(plan.sum(0)) - plan.T @ np.diag(1 / plan.sum(1)) @ plan
        assert np.abs(to_numpy(schur @ torch.eye(len(ones), dtype=torch.float64)) - dense).max() <= 1e-15


@EVERYWHERE
@pytest.mark.parametrize("eps", [1.0, 0.1, 0.02])
def test_O19_translation(eps: float, backend: str) -> None:
    """I1 in x, in y, and jointly: no ridge, no residue of the null space."""
    case = case_S(5, 7, 2, eps)
    result = solve(case, backend=backend)
    u = torch.tensor([0.7, -1.3], dtype=torch.float64)
    r, c = result.plan.row_sums(), result.plan.col_sums()
    moved = result.hessian("x") @ u.expand(5, 2)
    assert float((moved - 2 * r[:, None] * u).abs().max()) <= 1e-12
    moved = result.hessian("y") @ u.expand(7, 2)
    assert float((moved - 2 * c[:, None] * u).abs().max()) <= 1e-12
    both = result.hessian("xy") @ (u.expand(5, 2), u.expand(7, 2))
    assert max(float(part.abs().max()) for part in both) <= 1e-12


@EVERYWHERE
def test_O23_gradient_in_the_weights(backend: str) -> None:
    """On the simplex it is f - mean f; finite differences along a zero-sum change of a."""
    case = case_S(5, 7, 2, 0.5)
    result = solve(case, backend=backend)
    gradient = to_numpy(result.gradient("a"))
    f = to_numpy(result.f)
    assert np.abs(gradient - (f - f.mean())).max() <= 1e-12
    delta = np.array([1.0, -2.0, 0.5, 1.5, -1.0])
    values = [
        float(solve(case.with_(a=np.asarray(case.a) + k * 1e-6 * delta), backend=backend).value)
        for k in (1, -1)
    ]
    assert abs((values[0] - values[1]) / 2e-6 - gradient @ delta) <= 1e-8
    g, gradient = to_numpy(result.g), to_numpy(result.gradient("b"))
    assert np.abs(gradient - (g - g.mean())).max() <= 1e-12


@EVERYWHERE
@pytest.mark.parametrize("dims", [(5, 7, 2), (6, 6, 2), (7, 5, 3)], ids=str)
def test_O24_sum_of_the_gradient(dims: tuple[int, int, int], backend: str) -> None:
    """I2 at eps = .05 with the default tolerance, and with the plan's own marginals at any stop."""
    case = case_S(*dims, 0.05)
    if dims != (6, 6, 2):  # plain iterations would need millions there
        result = otn.sinkhorn(problem_of(case), max_iter=200_000, backend=backend)
        assert result.converged
        expected = 2 * (np.asarray(case.a) @ case.x - np.asarray(case.b) @ case.y)
        assert np.abs(to_numpy(result.gradient("x").sum(0)) - expected).max() <= 1e-8
    stopped = otn.sinkhorn(problem_of(case), max_iter=3, tol=0, backend=backend)
    r, c = to_numpy(stopped.plan.row_sums()), to_numpy(stopped.plan.col_sums())
    total = to_numpy(stopped.gradient("x").sum(0))
    assert np.abs(total - 2 * (r @ case.x - c @ case.y)).max() <= 1e-13


@EVERYWHERE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_O25_rows_that_underflow(dtype: torch.dtype, backend: str) -> None:
    """Points so far away that exp(-C/eps) is 0 for every pair: values and derivatives are finite."""
    x = torch.tensor([[0.0], [1e3], [2e3]], dtype=dtype)
    y = torch.tensor([[1.0], [3e3], [-1e3], [1e3]], dtype=dtype)
    result = otn.sinkhorn(otn.OTProblem(x, y, eps=1.0), backend=backend, max_iter=500, tol=0)
    for tensor in (result.f, result.g, result.value, result.gradient("x"), result.plan.to_dense()):
        assert torch.isfinite(tensor).all()


@EVERYWHERE
@pytest.mark.parametrize("side", ["a", "b"])
def test_O25_rows_without_mass(side: str, backend: str) -> None:
    """All but one weight zero: one-to-all transport, nothing NaN; all of them zero is refused."""
    case = case_S(4, 5, 2, 0.5)
    weight = np.zeros_like(getattr(case, side))
    weight[2] = 1.0
    only = case.with_(**{side: weight})
    result, exact = solve(only, backend=backend), only.truth()
    assert_close(result.value, exact.value, "value")
    assert_close(dense_hessian(result, "xy"), exact.hessian("xy"), "hvp")
    with pytest.raises(ValueError, match=rf"^{side} must have positive total mass"):
        problem_of(case.with_(**{side: 0 * weight}))


_O26 = """
import torch, ot_newton as otn
def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
torch.manual_seed(0)
x, y = torch.rand({n}, 3), torch.rand({n}, 3)
import warnings
warnings.simplefilter("ignore")
zero = torch.zeros({n})  # as good a start as any: a pass over 1e10 pairs is what costs here
result = otn.sinkhorn(otn.OTProblem(x, y, eps=1.0), max_iter=0, tol=0, init=(zero, zero), backend="cpu")
h, v = result.hessian("x", max_cg=1), torch.rand({n}, 3)
result.gradient("x")
small = otn.sinkhorn(otn.OTProblem(x[:999], y[:999], eps=1.0), max_iter=1, tol=0, backend="cpu")
small.hessian("x", max_cg=1) @ v[:999]
before = status("VmRSS")
product = h @ v
assert torch.isfinite(product).all()
print(status("VmHWM") - before)
"""


def test_O26_memory_of_a_product() -> None:
    """n = m = 1e5, d = 3: the extra memory of one HVP stays below 50 (n+m) d 8 bytes."""
    n = 100_000
    run = subprocess.run(
        [sys.executable, "-c", _O26.format(n=n)],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) <= 50 * (2 * n) * 3 * 8


@EVERYWHERE
@pytest.mark.parametrize("factor", [1e-12, 1e-4, 1.0, 1e8])
def test_O28_products_are_homogeneous(factor: float, backend: str) -> None:
    result = solve(case_S(7, 5, 3, 0.3), backend=backend)
    v = torch.randn(21, dtype=torch.float64)
    for wrt, size in (("x", 21), ("y", 15), ("xy", 36)):
        h, v = result.hessian(wrt), torch.randn(size, dtype=torch.float64)
        assert relative_error((h @ (factor * v)) / factor, h @ v) <= 1e-8


@EVERYWHERE
def test_O28_zero_needs_no_iteration(backend: str) -> None:
    h = solve(case_S(7, 5, 3, 0.3), backend=backend).hessian("x")
    assert torch.count_nonzero(h @ torch.zeros(21, dtype=torch.float64)) == 0
    assert h.stats.cg_iterations == 0
    both = solve(case_S(7, 5, 3, 0.3), backend=backend).hessian("xy")
    u = torch.tensor([1.0, -2.0, 0.3], dtype=torch.float64)
    both @ (u.expand(7, 3), u.expand(5, 3))
    assert both.stats.cg_iterations == 0, "a joint translation is rounding noise, not a right-hand side"


@EVERYWHERE
def test_O29_one_iteration_is_not_convergence(backend: str) -> None:
    with pytest.warns(ConvergenceWarning):
        result = otn.sinkhorn(problem_of(case_S(6, 6, 2, 0.1)), max_iter=1, backend=backend)
    assert result.converged is False
    assert result.status is Status.MAX_ITER
    assert result.n_iter == 1
    assert float(result.marginal_error) > 1e-9


@EVERYWHERE
def test_O29_large_max_iter_converges(backend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = otn.sinkhorn(problem_of(case_S(6, 6, 2, 0.1)), max_iter=100_000, backend=backend)
    assert result.converged is True
    assert result.status is Status.CONVERGED
    plan = to_numpy(result.plan.to_dense())
    case = case_S(6, 6, 2, 0.1)
    assert max(np.abs(plan.sum(1) - case.a).sum(), np.abs(plan.sum(0) - case.b).sum()) <= 1.001e-9


def test_O29_slow_problems_say_so() -> None:
    """S(6,6,2) at eps = .02 is far from converged by plain iterations: no optimistic flag."""
    case = case_S(6, 6, 2, 0.02)
    with pytest.warns(ConvergenceWarning):
        result = otn.sinkhorn(problem_of(case), method="sinkhorn", max_iter=2000, backend="dense")
    assert result.converged is False
    plan = to_numpy(result.plan.to_dense())
    error = max(np.abs(plan.sum(1) - case.a).sum(), np.abs(plan.sum(0) - case.b).sum())
    assert abs(float(result.marginal_error) - error) <= 1e-12
    assert error > 1e-7


def test_O29_fixed_iterations_are_silent_and_not_converged() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = otn.sinkhorn(problem_of(case_S(6, 6, 2, 1.0)), max_iter=37, tol=0)
    assert (result.n_iter, result.status, result.converged) == (37, Status.MAX_ITER, False)


@EVERYWHERE
def test_O29_nan_is_not_converged(backend: str) -> None:
    """A start that is not finite is refused; costs that overflow end NAN; neither is ever converged."""
    problem = problem_of(case_S(5, 7, 2, 0.5))
    bad = (torch.full((5,), float("nan"), dtype=torch.float64), torch.zeros(7, dtype=torch.float64))
    with pytest.raises(ValueError, match="init"):
        otn.sinkhorn(problem, init=bad, backend=backend)
    huge = otn.OTProblem(torch.tensor([[0.0], [1e30]]), torch.tensor([[1.0], [-1e30]]), eps=1e-3)
    with pytest.warns(ConvergenceWarning):
        result = otn.sinkhorn(huge, max_iter=20, backend=backend)
    assert (result.converged, result.status) == (False, Status.NAN)


@EVERYWHERE
def test_O30_stopping_does_not_depend_on_n(backend: str) -> None:
    """The same cloud replicated 10 times stops at the same iteration."""
    case = case_S(5, 7, 2, 0.1)
    tenfold = Case(
        np.tile(case.x, (10, 1)),
        np.tile(case.y, (10, 1)),
        np.tile(np.asarray(case.a) / 10, 10),
        np.tile(np.asarray(case.b) / 10, 10),
        eps=0.1,
    )
    one, ten = (otn.sinkhorn(problem_of(c), backend=backend) for c in (case, tenfold))
    assert one.converged
    assert one.n_iter == ten.n_iter
    assert abs(float(one.value) - float(ten.value)) <= 1e-12


@EVERYWHERE
def test_O31_tolerance_below_the_floor_warns_once_and_stops(backend: str) -> None:
    problem = problem_of(case_S(5, 7, 2, 0.1), torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = otn.sinkhorn(problem, tol=1e-12, max_iter=100_000, backend=backend)
    precision = [w for w in caught if issubclass(w.category, PrecisionWarning)]
    assert len(precision) == 1
    assert "1.0e-12" in str(precision[0].message)
    assert result.tol >= result.noise_floor > 1e-12
    assert result.status in (Status.CONVERGED, Status.STAGNATION)
    assert result.n_iter < 2000


def test_O31_tolerance_is_obeyed() -> None:
    previous = 0
    for tol in (1e-2, 1e-5, 1e-8, 1e-11):
        result = otn.sinkhorn(problem_of(case_S(5, 7, 2, 0.1)), tol=tol, method="sinkhorn")
        assert result.converged
        assert float(result.marginal_error) <= tol
        assert result.n_iter > previous
        previous = result.n_iter


def test_O31_default_tolerance_is_reached_in_float32() -> None:
    for eps in (1.0, 0.3, 0.1):
        result = otn.sinkhorn(problem_of(case_S(5, 7, 2, eps), torch.float32))
        assert result.converged
        assert result.tol == pytest.approx(10 * result.noise_floor)


@EVERYWHERE
def test_O32_marginals_of_unequal_weights(backend: str) -> None:
    case = case_S(9, 14, 3, 0.3)
    result = otn.sinkhorn(problem_of(case), tol=1e-10, backend=backend)
    ones_n, ones_m = torch.ones(9, dtype=torch.float64), torch.ones(14, dtype=torch.float64)
    view = result.plan.to_scipy()
    for rows in (result.plan @ ones_m, result.plan.row_sums(), view.matvec(np.ones(14))):
        assert np.abs(to_numpy(rows) - case.a).sum() <= 1e-10
    for columns in (result.plan.T @ ones_n, result.plan.col_sums(), view.rmatvec(np.ones(9))):
        assert np.abs(to_numpy(columns) - case.b).sum() <= 1e-10


@EVERYWHERE
def test_O33_default_weights(backend: str) -> None:
    case = seeded(150, 100, 2, 0.3)
    result = otn.sinkhorn(problem_of(case), backend=backend)
    assert result.converged
    explicit = case.with_(a=truth.uniform(150), b=truth.uniform(100))
    assert_close(result.value, otn.sinkhorn(problem_of(explicit), backend="dense").value, "value")
    assert np.abs(to_numpy(result.plan.col_sums()) - 1 / 100).sum() <= 2e-9
    assert np.abs(to_numpy(result.plan.row_sums()) - 1 / 150).sum() <= 2e-9


@pytest.mark.parametrize(("name", "length"), [("a", 4), ("a", 6), ("b", 5), ("b", 0), ("a", 1)])
def test_O33_length_of_weights(name: str, length: int) -> None:
    case = case_S(5, 7, 2, 0.5)
    points, count = ("x", 5) if name == "a" else ("y", 7)
    with pytest.raises(ValueError, match=rf"^{name} must have shape.*{count}.*{points}.*\({length},\)"):
        otn.OTProblem(case.x, case.y, **{name: np.full(length, 1 / max(length, 1))}, eps=0.5)


@EVERYWHERE
def test_O34_scaling(backend: str) -> None:
    """I5: OT_{t^2 eps}(t x, t y) = t^2 OT with the same Hessian; eps and the cost scale together."""
    case = case_S(5, 7, 2, 0.1)
    result = solve(case, backend=backend)
    scaled = solve(case.with_(x=7 * case.x, y=7 * case.y, eps=4.9), backend=backend)
    assert_printed(result.value, ".828681593065")
    assert_printed(scaled.value, "40.605398060180")
    assert np.abs(dense_hessian(scaled) - dense_hessian(result)).max() <= 2e-14
    half = solve(case.with_(cost_scale=0.5, eps=0.05), backend=backend)
    assert abs(float(half.value) - float(result.value) / 2) <= 1e-13
    assert np.abs(2 * dense_hessian(half) - dense_hessian(result)).max() <= 1e-12


@EVERYWHERE
def test_O35_every_view_of_the_plan_agrees(backend: str) -> None:
    case = case_S(5, 7, 2, 0.1)
    result = solve(case, backend=backend)
    f, g = to_numpy(result.f), to_numpy(result.g)
    cost = truth.cost_matrix(case.x, case.y, 1.0)
    by_hand = np.outer(case.a, case.b) * np.exp((f[:, None] + g[None, :] - cost) / case.eps)  # type: ignore[arg-type]
    eye = torch.eye(7, dtype=torch.float64)
    views = {
        "to_dense": result.plan.to_dense(),
        "matrix": result.plan.matrix,
        "@": result.plan @ eye,
        "apply": result.plan.apply(eye),
        "transpose": (result.plan.T @ torch.eye(5, dtype=torch.float64)).T,
        "scipy": result.plan.to_scipy() @ np.eye(7),
        "linear_operator": result.plan.to_linear_operator() @ eye,
        "linear_operator.to_dense": result.plan.to_linear_operator().to_dense(),
    }
    for name, view in views.items():
        assert np.abs(to_numpy(view) - by_hand).max() <= 1e-12, name
    assert np.abs(to_numpy(result.plan.row_sums()) - by_hand.sum(1)).max() <= 1e-12


def test_O37_saddle_is_left() -> None:
    """Pitchfork from its saddle: escape to u*, certified."""
    y = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = otn.ot_cost(x, y, eps=1.0)
        return value

    start = torch.zeros(2, 1, dtype=torch.float64)
    h = solve(pitchfork(0.0, 1.0)).hessian("x")
    estimate = otn.lambda_min(h)
    assert estimate.sign == "negative"
    assert abs(float(estimate.value) + 1) <= 1e-8
    result = otn.NewtonCG(loss).minimize(start)
    assert result.success is True
    assert result.status is Status.MINIMUM
    assert abs(abs(float(result.x[1, 0])) - 0.957504024077) <= 1e-9
    assert abs(float(result.x.sum())) <= 1e-9
    assert_printed(result.fun, ".673476112573")
    assert abs(float(result.lambda_min.value) - 0.833627912248) <= 1e-8
    assert float(result.grad.abs().max()) <= 1e-8


def test_O37_scipy_stops_at_the_saddle() -> None:
    """What the case is about: scipy's own methods report success there; our estimate tells."""
    case = pitchfork(0.0, 1.0)
    h = solve(case).hessian("x").to_scipy()
    assert np.linalg.eigvalsh(h @ np.eye(2))[0] == pytest.approx(-1, abs=1e-9)


@EVERYWHERE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_O38_scipy_operator_declares_its_dtype(dtype: torch.dtype, backend: str) -> None:
    case = case_S(4, 5, 2, 0.5)
    result = solve(case, dtype, backend=backend)
    name = str(dtype).removeprefix("torch.")
    rtol = 1e-9 if dtype == torch.float64 else 1e-4
    for op, exact in (
        (result.hessian("x"), case.truth().hessian("x")),
        (result.schur(), case.truth().schur()),
        (result.plan, case.truth().plan),
    ):
        check_scipy(op.to_scipy, exact, rtol=rtol, dtype=np.dtype(name), passes=lambda: result.plan_passes)
    with pytest.raises(TypeError, match=r"result\[i\]"):
        otn.sinkhorn(otn.OTProblem(torch.rand(2, 3, 1), torch.rand(2, 4, 1), eps=1.0)).plan.to_scipy()
    assert isinstance(result.plan.to_scipy(), sla.LinearOperator)
