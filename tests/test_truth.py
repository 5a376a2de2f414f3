"""The truth against printed values, closed forms, strong duality and finite differences of itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests import truth
from tests.exact_cases import EXACT_ROWS, OT_ROWS, PITCHFORK_ROWS, Row
from tests.generators import (
    Case,
    case_S,
    cases,
    duplicates,
    far_zero_atoms,
    one_target,
    permutation,
    pitchfork,
    pitchfork_exact,
    single_source,
)
from tests.tolerances import assert_printed, relative_error

Rho = tuple[float | None, float | None]
RELAXED: list[Rho] = [(0.7, None), (None, 1.3), (0.7, 1.3)]


def check_row(row: Row, solved: truth.Truth) -> None:
    """Compare everything a row prints, to half a unit of the last digit."""
    assert_printed(solved.value, row.value, "value")
    if row.cost is not None:
        assert_printed(solved.cost, row.cost, "cost")
    for found, printed in zip(solved.gradient("x")[0], row.gradient, strict=False):
        if printed is not None:
            assert_printed(found, printed, "gradient")
    spectrum = solved.spectrum("x")
    for found, printed, what in [
        (spectrum[0], row.lambda_min, "lambda_min"),
        (spectrum[-1], row.lambda_max, "lambda_max"),
        (spectrum.sum(), row.trace, "trace"),
    ]:
        if printed is not None:
            assert_printed(found, printed, what)


@pytest.mark.parametrize("row", [*EXACT_ROWS, *OT_ROWS.values()], ids=repr)
def test_printed_rows(row: Row) -> None:
    check_row(row, row.case.truth())


@pytest.mark.parametrize("row", PITCHFORK_ROWS, ids=repr)
def test_pitchfork_rows_and_closed_form(row: Row) -> None:
    case = row.case
    solved = case.truth()
    exact = pitchfork_exact(float(case.x[1, 0]), case.eps, case.cost_scale)
    assert abs(solved.value - exact["value"]) <= 1e-14
    assert np.abs(solved.gradient("x") - exact["gradient"]).max() <= 1e-14
    assert np.abs(solved.hessian("x") - exact["hessian"]).max() <= 1e-13
    assert abs(solved.plan[0, 0] - exact["plan"]) <= 1e-15
    assert abs(np.linalg.eigvalsh(solved.schur("y"))[1] - exact["schur"]) <= 1e-15
    assert abs(solved.value - float(row.value)) <= 5e-13
    low = exact["lambda_minus"]
    assert_printed(low, str(row.lambda_min), "lambda_minus")
    assert np.abs(solved.spectrum("x") - np.sort([case.cost_scale, low])).max() <= 1e-13
    printed = row.gradient[0]
    assert printed is not None
    assert abs(solved.gradient("x")[0, 0] - float(printed)) <= 1e-12


def test_equal_eigenvalues_at_small_eps() -> None:
    """S(5,7,2) at eps = .02: H is 2 diag(a) (x) I up to the plan's leak."""
    case = case_S(5, 7, 2, 0.02)
    expected = np.sort(np.repeat(2 * np.asarray(case.a), 2))
    assert np.abs(case.truth().spectrum("x") - expected).max() <= 1e-10


def test_flash_schur_eigenvalue() -> None:
    """The printed 4.1e-9 of the pitchfork at u = .5, eps = .1."""
    found = np.linalg.eigvalsh(pitchfork(0.5, 0.1).truth().schur("x"))[1]
    assert abs(found - 4.1e-9) <= 0.05e-9


@pytest.mark.parametrize("dims", [(5, 7, 2), (6, 6, 2)], ids=str)
def test_small_eps_converges_to_rounding(dims: tuple[int, int, int]) -> None:
    solved = case_S(*dims, 0.02).truth()
    assert solved.marginal_error <= 2e-14
    assert abs(solved.primal() - solved.value) <= 1e-14


def test_nearly_disconnected_plan() -> None:
    """O1: off-diagonal entries underflow and the system has two null vectors."""
    solved = pitchfork(0.5, 1e-4).truth()
    assert np.abs(solved.plan - np.diag([0.5, 0.5])).max() <= 1e-12
    assert solved.plan[0, 1] == solved.plan[1, 0] == 0.0
    assert abs(solved.value - (0.25 + 1e-4 * np.log(2))) <= 1e-15
    assert np.abs(solved.hessian("x") - np.eye(2)).max() <= 1e-12


def test_closed_forms() -> None:
    one, target, matched = single_source(), one_target(), permutation()
    solved = one.truth()
    assert abs(solved.value - float((solved.plan * truth.cost_matrix(one.x, one.y, 1.0)).sum())) <= 1e-14
    assert np.abs(solved.hessian("x") - 2 * np.eye(2)).max() <= 1e-13
    for case in (target, matched):
        expected = np.kron(np.diag(2 * np.asarray(case.a)), np.eye(2))
        assert np.abs(case.truth().hessian("x") - expected).max() <= 1e-12


def test_zero_weights_equal_the_reduced_problem() -> None:
    case = OT_ROWS["O3"].case
    keep = [0, 2, 3]
    full, reduced = case.truth(), case.with_(x=case.x[keep], a=np.asarray(case.a)[keep]).truth()
    assert abs(full.value - reduced.value) <= 1e-14
    assert np.array_equal(full.gradient("x")[[1, 4]], np.zeros((2, 2)))
    index = [0, 1, 4, 5, 6, 7]
    h = full.hessian("x")
    assert np.abs(h[np.ix_(index, index)] - reduced.hessian("x")).max() <= 1e-14
    assert np.array_equal(np.delete(h, index, axis=0), np.zeros((4, 10)))
    assert_printed(reduced.spectrum("x")[0], ".1718125237", "lambda_min")


@pytest.mark.parametrize("wrt", ["x", "y", "xy"])
def test_spectrum_with_more_dimensions_than_points(wrt: str) -> None:
    solved = case_S(3, 2, 9, 2.0).truth()
    assert np.abs(solved.spectrum(wrt) - np.linalg.eigvalsh(solved.hessian(wrt))).max() <= 1e-13


def test_duplicates_closed_form() -> None:
    """O6: the antisymmetric direction has the covariance of one conditional plan."""
    case = duplicates()
    product = case.truth().hessian("x") @ np.array([10, 0, -1 / 0.3, 0, 0, 0, 0, 0])
    assert_printed(product[0], ".199317150721", "Hv")
    assert_printed(product[1], ".746442951646", "Hv")
    assert np.abs(product[2:4] + product[:2]).max() <= 1e-13


def _along(case: Case, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(case.x.size + case.y.size)


def _moved(case: Case, z: np.ndarray) -> Case:
    size = case.x.size
    return case.with_(x=z[:size].reshape(case.x.shape), y=z[size:].reshape(case.y.shape))


@pytest.mark.parametrize("rho", [(None, None), *RELAXED], ids=str)
@pytest.mark.parametrize("base", [case_S(4, 5, 2, 0.5), far_zero_atoms()], ids=repr)
def test_derivatives_in_points_by_finite_differences(base: Case, rho: Rho) -> None:
    case = base.with_(rho_x=rho[0], rho_y=rho[1])
    solved, v = case.truth(), _along(case, 1)
    z = np.concatenate([case.x.ravel(), case.y.ravel()])

    def gradient(at: np.ndarray) -> np.ndarray:
        moved = _moved(case, at).truth()
        return np.concatenate([moved.gradient("x").ravel(), moved.gradient("y").ravel()])

    slope = truth.directional_difference(lambda at: _moved(case, at).truth().value, z, v, 4e-3)
    assert relative_error(slope, gradient(z) @ v) <= 2e-10
    product = truth.directional_difference(gradient, z, v, 4e-3)
    h = solved.hessian("xy")
    assert relative_error(h @ v, product) <= 2e-9
    assert np.abs(solved.product("xy", v) - h @ v).max() <= 1e-12
    size = case.x.size
    assert np.abs(h[:size, :size] - solved.hessian("x")).max() <= 1e-12
    assert np.abs(h[size:, size:] - solved.hessian("y")).max() <= 1e-12


@pytest.mark.parametrize("rho", [(None, None), *RELAXED], ids=str)
def test_derivatives_in_weights_by_finite_differences(rho: Rho) -> None:
    case = case_S(4, 5, 2, 0.5).with_(rho_x=rho[0], rho_y=rho[1])
    solved = case.truth()
    for wrt, weight in (("a", case.a), ("b", case.b)):
        weight = np.asarray(weight)
        along = weight * np.cos(np.arange(weight.size))
        if solved.balanced:
            along -= along.sum() * weight

        def value(at: np.ndarray, name: str = wrt) -> float:
            return case.with_(**{name: at}).truth().value

        slope = truth.directional_difference(value, weight, along, 0.1)
        assert relative_error(solved.gradient(wrt) @ along, slope, 1.0) <= 2e-10


def test_weight_gradient_at_a_zero_weight_is_one_sided() -> None:
    case = OT_ROWS["O3"].case.with_(rho_x=0.7, rho_y=1.3)
    step = 1e-5
    along = np.array([0.0, 1.0, 0.0, 0.0, 0.0])
    values = [case.with_(a=np.asarray(case.a) + k * step * along).truth().value for k in range(3)]
    slope = (-3 * values[0] + 4 * values[1] - values[2]) / (2 * step)
    assert abs(case.truth().gradient("a")[1] - slope) <= 1e-6


@pytest.mark.parametrize("rho", [(None, None), (0.7, 1.3)], ids=str)
def test_divergence_by_finite_differences(rho: Rho) -> None:
    case = case_S(4, 5, 2, 0.5).with_(rho_x=rho[0], rho_y=rho[1])

    def at(z: np.ndarray) -> truth.Divergence:
        moved = _moved(case, z)
        return truth.divergence(*moved.arrays, **moved.options)

    def gradient(z: np.ndarray) -> np.ndarray:
        moved = at(z)
        return np.concatenate([moved.gradient("x").ravel(), moved.gradient("y").ravel()])

    z, v = np.concatenate([case.x.ravel(), case.y.ravel()]), _along(case, 2)
    slope = truth.directional_difference(lambda w: at(w).value, z, v, 4e-3)
    assert relative_error(slope, gradient(z) @ v) <= 2e-10
    product = truth.directional_difference(gradient, z, v, 4e-3)
    assert relative_error(at(z).hessian("xy") @ v, product) <= 2e-9
    size = case.x.size
    assert np.abs(at(z).hessian("xy")[:size, :size] - at(z).hessian("x")).max() <= 1e-12


def test_divergence_printed() -> None:
    """O8: pitchfork, u = .5, eps = 1."""
    case = pitchfork(0.5, 1.0)
    found = truth.divergence(*case.arrays, **case.options)
    assert_printed(found.self_x.value, ".379885493042")
    assert_printed(found.self_y.value, ".674997252642")
    assert_printed(found.value, ".288777796675")


@settings(max_examples=40)
@given(cases(relaxed=True))
def test_strong_duality_and_primal_feasibility(case: Case) -> None:
    """Primal equals dual at the optimum for any mix of hard and relaxed sides."""
    solved = case.truth()
    assert solved.marginal_error <= 1e-13
    assert abs(solved.primal() - solved.value) <= 1e-12 * max(1.0, abs(solved.value))
