"""Every printed reference row through every backend and the public API, to half a unit of the last digit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ot_newton as otn
from tests.exact_cases import EXACT_ROWS, PITCHFORK_ROWS, Row
from tests.generators import case_S, one_target, pitchfork, pitchfork_exact, single_source
from tests.helpers import BACKENDS, dense_hessian, rounded, solve
from tests.tolerances import assert_close, assert_printed, rtol, to_numpy


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", EXACT_ROWS, ids=repr)
def test_printed_rows(row: Row, backend: str) -> None:
    result = solve(row.case, backend=backend)
    assert result.f.dtype == torch.float64
    assert_printed(result.value, row.value, "value")
    if row.cost is not None:
        assert_printed(result.cost, row.cost, "cost")
    for found, printed in zip(result.gradient("x")[0], row.gradient, strict=False):
        if printed is not None:
            assert_printed(found, printed, "gradient")
    spectrum = np.linalg.eigvalsh(dense_hessian(result))
    assert_printed(spectrum[0], str(row.lambda_min), "lambda_min")
    assert_printed(spectrum[-1], str(row.lambda_max), "lambda_max")
    assert_printed(spectrum.sum(), str(row.trace), "trace")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", EXACT_ROWS, ids=repr)
def test_rows_against_truth(row: Row, backend: str) -> None:
    """Value 1e-11, gradients 1e-10, products 1e-9 in float64, jointly in x and y."""
    result, exact = solve(row.case, backend=backend), row.case.truth()
    assert_close(result.value, exact.value, "value")
    assert_close(result.cost, exact.cost, "cost")
    assert_close(result.plan.to_dense(), exact.plan, "plan")
    for wrt in ("x", "y", "a", "b"):
        assert_close(result.gradient(wrt), exact.gradient(wrt), "gradient")
    for wrt in ("x", "y", "xy"):
        assert_close(dense_hessian(result, wrt), exact.hessian(wrt), "hvp")
    assert abs(float(result.gap)) <= 1e-11


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", EXACT_ROWS, ids=repr)
def test_rows_in_float32(row: Row, backend: str) -> None:
    """Against the truth of the rounded inputs; errors grow with the floor eps_mach |C| / eps."""
    case = rounded(row.case, torch.float32)
    result, exact = solve(case, torch.float32, backend=backend), case.truth()
    assert result.f.dtype == torch.float32
    assert result.gradient("x").dtype == torch.float32
    assert_close(result.value, exact.value, "value", torch.float32)
    floor = result.noise_floor
    assert_close(result.cost, exact.cost, "cost", torch.float32, floor=floor)
    assert_close(result.gradient("x"), exact.gradient("x"), "gradient", torch.float32, scale=1.0, floor=floor)
    assert_close(dense_hessian(result), exact.hessian("x"), "hvp", torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", PITCHFORK_ROWS, ids=repr)
def test_pitchfork(row: Row, backend: str) -> None:
    case = row.case
    u, result = float(case.x[1, 0]), solve(case, backend=backend)
    exact = pitchfork_exact(u, case.eps, case.cost_scale)
    assert abs(float(result.value) - float(row.value)) <= 1e-12
    assert abs(float(result.value) - exact["value"]) <= 1e-12
    assert np.abs(to_numpy(result.gradient("x")) - exact["gradient"]).max() <= 1e-12
    h = dense_hessian(result)
    assert np.abs(h - exact["hessian"]).max() <= 1e-11
    assert_printed(np.linalg.eigvalsh(h)[0], str(row.lambda_min), "lambda_minus")
    assert abs(float(result.plan.to_dense()[0, 0]) - exact["plan"]) <= 1e-13
    schur = result.schur() @ torch.eye(2, dtype=torch.float64)
    assert abs(np.linalg.eigvalsh(to_numpy(schur))[1] - exact["schur"]) <= 1e-13


@pytest.mark.parametrize("backend", BACKENDS)
def test_pitchfork_schur_at_low_eps(backend: str) -> None:
    """The printed 4.1e-9 at u = .5, eps = .1 is not drowned by a ridge, and the product stays right."""
    case = pitchfork(0.5, 0.1)
    result = solve(case, backend=backend)
    schur = to_numpy(result.schur() @ torch.eye(2, dtype=torch.float64))
    assert abs(np.linalg.eigvalsh(schur)[1] - 4.1e-9) <= 0.05e-9
    assert np.abs(dense_hessian(result) - pitchfork_exact(0.5, 0.1)["hessian"]).max() <= 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_single_points(backend: str, scale: float) -> None:
    one, target = single_source(cost_scale=scale), one_target(cost_scale=scale)
    result = solve(one, backend=backend)
    weighted = np.asarray(one.b) @ (scale * np.square(one.x - one.y).sum(1))
    assert abs(float(result.value) - weighted) <= 1e-13
    assert np.abs(dense_hessian(result) - 2 * scale * np.eye(2)).max() <= 1e-13
    expected = np.kron(np.diag(2 * scale * np.asarray(target.a)), np.eye(2))
    assert np.abs(dense_hessian(solve(target, backend=backend)) - expected).max() <= 1e-13


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rho", [(0.7, None), (None, 1.3), (0.7, 1.3)], ids=str)
@pytest.mark.parametrize("eps", [1.0, 0.2])
def test_relaxed_against_truth(eps: float, rho: tuple[Any, Any], backend: str) -> None:
    case = case_S(5, 7, 2, eps).with_(rho_x=rho[0], rho_y=rho[1])
    result, exact = solve(case, backend=backend), case.truth()
    assert_close(result.value, exact.value, "value")
    assert_close(result.cost, exact.cost, "cost")
    for wrt in ("x", "y", "a", "b"):
        assert_close(result.gradient(wrt), exact.gradient(wrt), "gradient")
    for wrt in ("x", "y", "xy"):
        assert_close(dense_hessian(result, wrt), exact.hessian(wrt), "hvp")


@pytest.mark.parametrize("side", ["x", "y"])
@pytest.mark.parametrize("normalized", [False, True], ids=["plain", "normalized"])
def test_schur_matrix(side: str, normalized: bool) -> None:
    for case in (case_S(5, 7, 2, 0.5), case_S(5, 7, 2, 0.5).with_(rho_x=0.7)):
        schur = solve(case, backend="dense").schur(side=side, normalized=normalized)
        found = schur @ torch.eye(schur.shape[0], dtype=torch.float64)
        assert_close(found, case.truth().schur(side, normalized=normalized), "hvp")


def test_value_at_default_tolerance() -> None:
    """The default tolerance (1e-9) already gives the value to 1e-11: it is second order in the error."""
    for row in EXACT_ROWS:
        result = otn.sinkhorn(otn.OTProblem(*row.case.arrays, **row.case.options), max_iter=200_000)
        assert result.converged
        assert float(result.marginal_error) <= 1e-9
        assert abs(float(result.value) - float(row.value)) <= rtol("value") * abs(float(row.value))
