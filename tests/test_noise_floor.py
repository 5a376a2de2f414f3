"""The stated noise floors are bounds: values, gradients and products against float64 truth.

They depend on the dtype, on eps and on the marginal error reached, whatever stopped the iteration.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import ot_newton as otn
from ot_newton.errors import Status
from tests import truth
from tests.generators import Case, case_S, seeded
from tests.helpers import dense_hessian, problem_of, rounded
from tests.loss_cases import autograd_hessian, leaves
from tests.tolerances import relative_error, to_numpy

CASES = [
    case_S(5, 7, 2, 1.0),
    case_S(5, 7, 2, 0.1),
    case_S(6, 6, 2, 0.05),  # smallest Schur eigenvalue 4e-6
    seeded(24, 20, 2, 0.02),
    seeded(18, 16, 8, 0.1),
    seeded(18, 16, 8, 0.02),
    seeded(20, 20, 3, 0.05, cost_scale=0.5),
    seeded(20, 20, 3, 0.05, rho_x=0.5),
    seeded(20, 20, 3, 0.05, rho_x=0.5, rho_y=2.0),
]
STOPS = [
    (torch.float64, 1e-2),
    (torch.float64, 1e-5),
    (torch.float64, 1e-9),
    (torch.float32, 1e-2),
    (torch.float32, None),
]


def weighted(case: Case, dtype: torch.dtype) -> Case:
    """The case as the dtype sees it, with its weights written out."""
    weights = [
        np.full(len(z), 1 / len(z)) if w is None else w for z, w in ((case.x, case.a), (case.y, case.b))
    ]
    return rounded(case.with_(a=weights[0], b=weights[1]), dtype)


def spectral(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected, 2))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_floors_bound_the_errors_against_truth(case: Case) -> None:
    for dtype, tol in STOPS:
        own = weighted(case, dtype)
        exact = own.truth()
        hessians = {wrt: exact.hessian(wrt) for wrt in ("x", "y", "xy")}
        for method, backend in (("sinkhorn", "cpu"), ("newton", "dense")):
            problem = problem_of(own, dtype)
            result = otn.sinkhorn(problem, tol=tol, method=method, backend=backend, max_iter=2000)
            about = f"{dtype}, tol {tol}, {method}: {result!r}"
            assert abs(float(result.value) - exact.value) <= result.value_noise, about
            for letter in "xy":
                error = np.linalg.norm(to_numpy(result.gradient(letter)) - exact.gradient(letter))
                assert error <= result.gradient_noise, f"gradient {letter}, {about}"
            for wrt, expected in hessians.items():
                h = result.hessian(wrt)
                assert spectral(dense_hessian(result, wrt), expected) <= h.noise_floor, f"{wrt}, {about}"


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_floors_are_not_idle(case: Case) -> None:
    """At convergence in float64 they are far below what is measured: they do not decide by themselves."""
    problem = problem_of(case)
    result = otn.sinkhorn(problem, tol=1e-12, method="newton", backend="dense", max_iter=20_000)
    scale = float(np.linalg.norm(to_numpy(result.gradient("x"))))
    h = result.hessian("x")
    assert result.value_noise <= 1e-8 * max(1.0, abs(float(result.value)))
    assert result.gradient_noise <= 1e-7 * max(scale, 1.0)
    assert h.noise_floor <= 1e-5 * h.norm_bound


@pytest.mark.parametrize("debias", [False, True], ids=["ot", "divergence"])
@pytest.mark.parametrize(("dtype", "tol"), STOPS[1:], ids=str)
def test_floors_of_the_losses(dtype: torch.dtype, tol: float | None, debias: bool) -> None:
    """The terms' floors added up; 0 before the first call."""
    for case in (CASES[1], CASES[3], CASES[7]):
        own = weighted(case, dtype)
        arguments: dict[str, Any] = {"cost_scale": own.cost_scale, "rho_x": own.rho_x, "rho_y": own.rho_y}
        loss = otn.SinkhornLoss(own.eps, debias, tol=tol, **arguments)
        assert loss.noise_floor() == loss.value_noise() == loss.hvp_noise_floor() == 0.0
        x, y, a, b = leaves(own, dtype)
        exact: Any = truth.divergence(*own.arrays, **own.options) if debias else own.truth()
        value = loss(a, x, b, y)
        assert abs(float(value.detach()) - exact.value) <= loss.value_noise()
        (gradient,) = torch.autograd.grad(value, x)
        assert np.linalg.norm(to_numpy(gradient) - exact.gradient("x")) <= loss.noise_floor()
        size = x.numel()
        hessian = autograd_hessian(loss, x, y, a, b)[:size, :size]
        assert spectral(hessian, exact.hessian("x")) <= loss.hvp_noise_floor()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_plan_entries_round_at_the_floor(dtype: torch.dtype) -> None:
    """`result.noise_floor` is eps_mach max|C|/eps: the relative error of a plan entry, before any stop."""
    for case in (CASES[1], CASES[3]):
        own = weighted(case, dtype)
        problem = problem_of(own, dtype)
        result = otn.sinkhorn(problem, tol=0.0, max_iter=3, anneal=False, backend="cpu")
        f, g = to_numpy(result.f), to_numpy(result.g)
        cost = own.cost_scale * ((own.x[:, None] - own.y[None]) ** 2).sum(-1)
        exact = np.outer(np.asarray(own.a), np.asarray(own.b)) * np.exp((f[:, None] + g - cost) / own.eps)
        found = to_numpy(result.plan.to_dense())
        floor = torch.finfo(dtype).eps * max(1.0, problem.centred.max_cost * own.cost_scale / own.eps)
        assert result.noise_floor == pytest.approx(floor)
        large = exact > 1e-12 * exact.max()
        assert np.abs(found / np.where(large, exact, 1.0) - 1)[large].max() <= 8 * result.noise_floor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_differences_of_the_gradient_at_the_dtypes_step(dtype: torch.dtype) -> None:
    """Central differences at h = noise^(1/3) err as predicted: noise / h + h^2 |third derivative| / 6."""
    case = case_S(5, 7, 2, 0.5)
    x, y, a, b = [t.detach() for t in leaves(case, dtype)]
    v = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    v = (v / v.norm()).to(dtype)
    tol = 1e-13 if dtype == torch.float64 else 2e-6
    loss = otn.SinkhornLoss(0.5, tol=tol, warm_start=False, max_iter=100_000)
    gradient = torch.func.grad(lambda z: loss(a, z, b, y))
    gradient(x)
    noise = loss.noise_floor()
    wide = case.with_(x=to_numpy(x), y=to_numpy(y))

    def exact(t: float) -> np.ndarray:
        return np.asarray(wide.with_(x=wide.x + t * to_numpy(v)).truth().gradient("x"))

    third = np.linalg.norm(exact(0.04) - 2 * exact(0.02) + 2 * exact(-0.02) - exact(-0.04)) / (2 * 0.02**3)
    step = noise ** (1 / 3)
    difference = (gradient(x + step * v) - gradient(x - step * v)) / (2 * step)
    product = torch.func.jvp(gradient, (x,), (v,))[1]
    predicted = noise / step + step**2 * third / 6
    assert predicted <= 10 * noise ** (2 / 3) * (1 + third)
    assert float((difference - product).norm()) <= 2 * predicted
    assert float((difference - product).norm()) > 0


def test_a_float32_solver_stops_at_its_floor() -> None:
    """Newton-CG on positions ends with a verdict once the gradient is noise, instead of stagnating."""
    case = seeded(12, 12, 2, 0.3)
    y = torch.tensor(case.y, dtype=torch.float32)
    loss = otn.SinkhornLoss(0.3)

    class Positions:
        def __call__(self, z: torch.Tensor) -> torch.Tensor:
            return loss(z, y)

        noise_floor = staticmethod(loss.noise_floor)
        value_noise = staticmethod(loss.value_noise)
        hvp_noise_floor = staticmethod(loss.hvp_noise_floor)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = otn.NewtonCG(Positions(), gtol=0.0, max_iter=60).minimize(
            torch.tensor(case.x, dtype=torch.float32)
        )
    verdicts = (Status.MINIMUM, Status.DEGENERATE, Status.UNDETERMINED, Status.SADDLE)
    assert result.status in verdicts, result.message
    assert float(result.grad.norm()) <= 4 * loss.noise_floor()


def test_relative_error_scale_of_the_floors() -> None:
    """A tighter stop means lower floors; float32's are float64's times the ratio of their eps_mach."""
    case = CASES[1]
    loose, tight = (otn.sinkhorn(problem_of(case), tol=t, method="sinkhorn") for t in (1e-4, 1e-8))
    assert tight.gradient_noise <= 1e-2 * loose.gradient_noise
    assert tight.value_noise <= 1e-2 * loose.value_noise
    single = otn.sinkhorn(problem_of(case, torch.float32))
    ratio = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
    assert relative_error(single.noise_floor / ratio, tight.noise_floor) <= 1e-3
