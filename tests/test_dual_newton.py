"""Truncated Newton on the dual: low eps, pass budgets, monotone dual, statuses, the automatic switch."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import ot_newton as otn
from ot_newton import dual_newton
from ot_newton.errors import ConvergenceWarning, PrecisionWarning, Status
from ot_newton.kept import KeptInverse
from tests import truth
from tests.generators import Case, case_S, seeded
from tests.helpers import BACKENDS, problem_of
from tests.tolerances import assert_close

SLOW = case_S(6, 6, 2, 0.02)  # plain Sinkhorn is at 1.7e-6 after 2e5 iterations
EVERYWHERE = pytest.mark.parametrize("backend", BACKENDS)


def cube(n: int, d: int, eps: float, seed: int = 0) -> otn.OTProblem:
    return problem_of(seeded(n, n, d, eps, seed=seed))


# ---- what it reaches ---------------------------------------------------------------------------------


@EVERYWHERE
@pytest.mark.parametrize("method", ["newton", "auto"])
def test_slow_problem_to_1e12(method: str, backend: str) -> None:
    result = otn.sinkhorn(problem_of(SLOW), method=method, tol=1e-12, backend=backend)
    assert result.converged
    assert result.marginal_error <= 1e-12
    assert result.n_iter <= 100
    plan = result.plan
    for found, wanted in ((plan.row_sums(), SLOW.a), (plan.col_sums(), SLOW.b)):
        assert np.abs(found.numpy() - np.asarray(wanted)).sum() <= 1.1e-12
    exact = SLOW.truth()
    assert_close(result.value, exact.value, "value")
    assert_close(result.gradient("x"), exact.gradient("x"), "gradient")


@pytest.mark.parametrize(
    ("d", "eps", "passes"), [(2, 0.002, 300), (8, 0.02, 515), (8, 0.01, 2500)], ids=lambda v: f"{v:g}"
)
@pytest.mark.parametrize("method", ["newton", "auto"])
def test_plan_passes_at_low_eps(method: str, d: int, eps: float, passes: int) -> None:
    """n = m = 300 to 1e-8 within the budget, streaming; 515 is what undeflated CG took."""
    result = otn.sinkhorn(cube(300, d, eps), method=method, tol=1e-8, backend="cpu")
    assert result.converged
    assert result.marginal_error <= 1e-8
    assert result.plan_passes <= passes


@pytest.mark.parametrize("eps", [0.005, 0.002])
def test_small_clouds_at_very_low_eps(eps: float) -> None:
    problem = cube(30, 8, eps)
    result = otn.sinkhorn(problem, method="newton", tol=1e-9, backend="cpu")
    assert result.converged
    exact = truth.solve(problem.x.numpy(), problem.y.numpy(), eps=eps)
    assert_close(result.value, exact.value, "value")
    assert_close(result.gradient("x"), exact.gradient("x"), "homogeneity", scale=0.1)


@EVERYWHERE
@pytest.mark.parametrize("rho", [(0.5, None), (None, 0.5), (0.5, 2.0)], ids=str)
def test_relaxed_sides(rho: tuple[Any, Any], backend: str) -> None:
    case = SLOW.with_(rho_x=rho[0], rho_y=rho[1], eps=0.01)
    result = otn.sinkhorn(problem_of(case), method="newton", tol=1e-12, backend=backend)
    assert result.converged
    exact = case.truth()
    assert_close(result.value, exact.value, "value")
    assert_close(result.gradient("a"), exact.gradient("a"), "gradient")


def test_zero_weights() -> None:
    a = np.array([0.3, 0.0, 0.3, 0.4, 0.0, 0.0])
    case = SLOW.with_(a=a)
    result = otn.sinkhorn(problem_of(case), method="newton", tol=1e-11)
    assert result.converged
    assert_close(result.value, case.truth().value, "value")
    assert not result.plan.row_sums()[torch.tensor(a) == 0].any()


# ---- the dual never decreases ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [SLOW, seeded(60, 50, 8, 0.01), seeded(40, 40, 2, 0.002, rho_x=0.5)], ids=repr
)
@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_dual_value_never_decreases(case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every step, line search and polish included, from the value of the potentials themselves."""
    problem = problem_of(case)
    values: list[float] = []

    def watch(self: Any, state: Any) -> Any:
        result = otn.SinkhornResult(
            problem=problem,
            biases=state.biases,
            statuses=(Status.MAX_ITER,),
            iterations=torch.tensor([self.iteration]),
            errors=torch.tensor([state.error]),
            noise_floor=0.0,
            tol=0.0,
            counter=self.counter,
            history=(),
            backend=backend,
        )
        values.append(float(result.value))
        return judge(self, state)

    judge = dual_newton._Newton.terminate
    monkeypatch.setattr(dual_newton._Newton, "terminate", watch)
    end = otn.sinkhorn(problem, method="newton", tol=1e-11, backend=backend)
    assert end.converged
    assert len(values) >= 4
    rises = np.diff(values)
    floor = 64 * np.finfo(float).eps * max(1.0, abs(values[-1]))
    assert rises.min() >= -floor
    assert values[-1] - values[0] > 0
    assert abs(values[-1] - case.truth().value) <= 1e-10


# ---- stored plans ------------------------------------------------------------------------------------


def test_a_kept_inverse_is_the_inverse_and_says_what_it_fits() -> None:
    case = seeded(20, 15, 3, 0.1)
    result = otn.sinkhorn(problem_of(case), tol=1e-12, method="newton")
    assert result.factor is not None
    kept = KeptInverse()
    assert kept.state is None
    assert kept.factorize(result.linearized.system())
    # Independent of our own products: S^ from the plan of the truth.
    plan = case.truth().plan
    r, c = plan.sum(1), plan.sum(0)
    half = np.sqrt(c)
    s = np.eye(15) - plan.T @ (plan / r[:, None]) / half[:, None] / half[None]
    wanted = np.linalg.inv(s + np.outer(half, half) / c.sum())
    v = torch.randn(1, 15, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = kept.amplify(v) + v
    np.testing.assert_allclose(found[0].numpy(), wanted @ v[0].numpy(), rtol=1e-7, atol=1e-9)
    assert kept.matches(torch.zeros(1, 15, dtype=torch.float64))
    assert not kept.matches(torch.zeros(1, 15))
    assert not kept.matches(torch.zeros(1, 20, dtype=torch.float64))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rho", [(None, None), (0.5, None), (None, 2.0)], ids=str)
def test_the_short_side_is_factorized(rho: tuple[Any, Any], turned: bool) -> None:
    """A matrix of the long side would be 20 GB; which side is x makes no difference."""
    case = seeded(6, 50_000, 2, 0.02)
    x, y = (case.y, case.x) if turned else (case.x, case.y)
    rho_x, rho_y = rho[::-1] if turned else rho
    problem = otn.OTProblem(torch.tensor(x), torch.tensor(y), eps=0.02, rho_x=rho_x, rho_y=rho_y)
    result = otn.sinkhorn(problem, method="newton", tol=1e-11)
    assert result.backend == "dense"
    assert result.converged
    assert result.factor is not None
    assert result.factor.shape == (1, 6, 6)
    plan = result.plan
    small = plan.col_sums() if turned else plan.row_sums()
    hard = rho[0] is None
    if hard:
        assert float((small - 1 / 6).abs().sum()) <= 1e-11
    cpu = otn.sinkhorn(problem, method="newton", tol=1e-11, backend="cpu")
    assert float(abs(cpu.value - result.value)) <= 1e-11


def test_a_factor_is_carried_and_dropped_where_it_does_not_fit() -> None:
    loss = otn.SinkhornLoss(0.05, method="newton")
    x, y = (torch.tensor(part) for part in (seeded(30, 25, 2, 0.05).x, seeded(30, 25, 2, 0.05).y))
    loss(x, y)
    first = loss.last_result
    loss(x + 1e-4, y)
    assert first is not None
    assert loss.last_result is not None
    assert loss.last_result.factor is first.factor
    smaller = loss(x[:20], y[:20])
    wanted = otn.sinkhorn(otn.OTProblem(x[:20], y[:20], eps=0.05), tol=1e-12)
    assert float(abs(smaller - wanted.value)) <= 1e-9


# ---- statuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_float32_says_what_it_reached(backend: str) -> None:
    """Where the tolerance is out of reach the status is STAGNATION, with the error that was reached."""
    problem = problem_of(SLOW, torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = otn.sinkhorn(problem, method="newton", tol=1e-9, backend=backend, max_iter=500)
    assert any(w.category is PrecisionWarning and "rounding floor" in str(w.message) for w in caught)
    assert result.tol == result.noise_floor > 1e-6
    assert result.status in (Status.CONVERGED, Status.STAGNATION)
    if result.status is Status.STAGNATION:
        message = next(str(w.message) for w in caught if w.category is ConvergenceWarning)
        assert f"{result.marginal_error:.2e}" in message
    assert result.marginal_error <= 30 * result.noise_floor
    assert result.n_iter < 500


def test_float32_default_tolerance_is_reached() -> None:
    for case in (SLOW, seeded(60, 60, 8, 0.05)):
        result = otn.sinkhorn(problem_of(case, torch.float32), method="newton")
        assert result.converged, result
        assert result.marginal_error <= 10 * result.noise_floor


@pytest.mark.parametrize("method", ["newton", "auto"])
def test_float32_far_down_converges(method: str) -> None:
    """Deflated iterations that do little there are no sign of stagnation."""
    for seed in range(2):
        case = seeded(200, 200, 8, 0.005, seed=seed)
        result = otn.sinkhorn(problem_of(case, torch.float32), method=method, backend="cpu", max_iter=300)
        assert result.converged, result


@pytest.mark.parametrize("backend", ["dense", "cpu"])
@pytest.mark.parametrize(("d", "eps"), [(8, 0.005), (2, 0.002)])
def test_float32_marginals_of_both_sides_are_what_was_promised(d: int, eps: float, backend: str) -> None:
    """From float64 entries of the plan: the side that Newton keeps exact is measured too."""
    problem = problem_of(seeded(150, 150, d, eps), torch.float32)
    result = otn.sinkhorn(problem, method="newton", backend=backend)
    assert result.converged
    x, y = (cloud[0].double() for cloud in (problem.centred.x, problem.centred.y))
    scores = 2 * np.log2(np.e) / eps * (x @ y.T)
    plan = (
        torch.exp2(scores + result.biases.row[0].double()[:, None] + result.biases.col[0].double()) / 150**2
    )
    for axis in (0, 1):
        error = float((plan.sum(axis) - 1 / 150).abs().sum())
        assert error <= result.tol
        assert error <= result.marginal_error + result.noise_floor


def test_iteration_cap_warns() -> None:
    with pytest.warns(ConvergenceWarning, match="MAX_ITER"):
        result = otn.sinkhorn(problem_of(SLOW), method="newton", tol=1e-12, max_iter=33)
    assert result.status is Status.MAX_ITER
    assert not result.converged


def test_callback_sees_every_step_and_stops() -> None:
    seen: list[Any] = []
    full = otn.sinkhorn(problem_of(SLOW), method="newton", tol=1e-12, callback=seen.append)
    steps = [info.n_iter for info in seen]
    assert steps == sorted(steps)
    assert set(range(steps[0], full.n_iter)) <= set(steps)  # annealing is not judged
    assert steps[0] < 20
    passes = [info.plan_passes for info in seen]
    assert passes == sorted(passes)
    assert passes[-1] <= full.plan_passes
    cut = otn.sinkhorn(problem_of(SLOW), method="newton", callback=lambda info: info.n_iter >= 32)
    assert cut.status is Status.CALLBACK
    assert cut.n_iter == 32


# ---- the automatic switch ----------------------------------------------------------------------------


def test_auto_switches_where_sinkhorn_is_slow_and_shows_it() -> None:
    """The history goes on at the iteration Sinkhorn gave up; the error falls by decades per step there."""
    result = otn.sinkhorn(problem_of(SLOW), tol=1e-12)
    assert result.converged
    iterations = [info.n_iter for info in result.history]
    assert iterations == sorted(iterations)
    assert iterations[-1] == result.n_iter
    plain = otn.sinkhorn(problem_of(SLOW), method="sinkhorn", tol=0.0, max_iter=result.n_iter)
    assert result.marginal_error < 1e-6 * plain.marginal_error


def test_auto_is_sinkhorn_where_that_is_fast() -> None:
    for case in (case_S(5, 7, 2, 1.0), seeded(40, 40, 2, 0.5)):
        auto, plain = (otn.sinkhorn(problem_of(case), method=m) for m in ("auto", "sinkhorn"))
        assert torch.equal(auto.f, plain.f)
        assert auto.n_iter == plain.n_iter


def test_sinkhorn_by_name_never_switches() -> None:
    with pytest.warns(ConvergenceWarning, match="MAX_ITER"):
        result = otn.sinkhorn(problem_of(SLOW), method="sinkhorn", tol=1e-12, max_iter=500)
    assert result.n_iter == 500


def test_zero_tolerance_never_switches() -> None:
    result = otn.sinkhorn(problem_of(SLOW), tol=0.0, max_iter=400)
    assert result.n_iter == 400
    assert result.status is Status.MAX_ITER


@pytest.mark.parametrize("method", ["newton", "auto"])
@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_lanes_of_a_batch(method: str, backend: str) -> None:
    """Slow lanes are finished one by one, fast ones stay as they were; each with its own status."""
    fast = case_S(6, 6, 2, 0.02)
    x = np.stack([SLOW.x, 0.05 * fast.x, SLOW.x + 0.3])
    problem = otn.OTProblem(x, SLOW.y * np.array([1.0, 0.05, 1.0])[:, None, None], SLOW.a, SLOW.b, eps=0.02)
    result = otn.sinkhorn(problem, method=method, tol=1e-11, backend=backend)
    assert bool(result.converged.all())
    assert result.n_iter.shape == (3,)
    assert int(result.n_iter[1]) < int(result.n_iter[0])
    for k in range(3):
        exact = truth.solve(x[k], problem.y[k].numpy(), SLOW.a, SLOW.b, eps=0.02)
        assert_close(result.value[k], exact.value, "value")


def test_start_is_used() -> None:
    problem = cube(80, 4, 0.01)
    cold = otn.sinkhorn(problem, method="newton", tol=1e-10, backend="cpu")
    near = otn.OTProblem(problem.x + 1e-4, problem.y, eps=0.01)
    warm = otn.sinkhorn(near, method="newton", tol=1e-10, backend="cpu", init=cold)
    assert warm.converged
    assert warm.n_iter <= 10
    assert warm.plan_passes <= 0.75 * cold.plan_passes
    far = otn.sinkhorn(problem, method="newton", tol=1e-10, init=(10 * cold.f, -3 * cold.g))
    assert far.converged
    assert_close(far.value, cold.value, "value")
