"""Lanczos, extreme eigenvalues, spectra: the cases N22 to N34 and drawn spectra against eigh."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ot_newton.errors import ConvergenceWarning, PrecisionWarning
from ot_newton.solvers.confidence import combined_failure, kuczynski_wozniakowski, posterior_failure
from ot_newton.solvers.eigenpairs import ThickRestart
from ot_newton.solvers.linear_map import as_linear_map
from ot_newton.solvers.spectra import (
    extreme_eigenpairs,
    lambda_max,
    lambda_min,
    lanczos,
    spectral_density,
)

SCALES = (1e-8, 1e-4, 1.0, 1e8)
DTYPES = (torch.float64, torch.float32)
scaled = pytest.mark.parametrize("scale", SCALES)
typed = pytest.mark.parametrize("dtype", DTYPES)


def diag(values, dtype=torch.float64, scale=1.0):
    return torch.diag(torch.as_tensor(np.asarray(values, dtype=float) * scale).to(dtype))


def rotated(values, seed=0, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    h = (q * torch.as_tensor(np.asarray(values, dtype=float) * scale)) @ q.T
    return (0.5 * (h + h.T)).to(dtype)


def relation_error(h, t):
    gap = h @ t.Q - t.Q @ t.T
    gap[:, -1] -= t.residual
    return float(gap.norm() / h.norm())


@scaled
@typed
def test_lanczos_relation_and_orthogonality(scale, dtype):
    h = rotated(np.linspace(-1, 3, 60), dtype=dtype, scale=scale)
    t = lanczos(h, 25, seed=3)
    eps = torch.finfo(dtype).eps
    assert t.k == 25 and t.breakdown is None and t.n_hvp == 25
    assert relation_error(h, t) < 50 * eps
    assert float((t.Q.T @ t.Q - torch.eye(25, dtype=dtype)).abs().max()) < 20 * eps
    assert float((t.Q.T @ t.residual).abs().max()) < 50 * eps * scale * 3


@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=24),
    seed=st.integers(0, 10**6),
    exponent=st.integers(-8, 8),
)
def test_drawn_spectra_against_eigh(values, seed, exponent):
    h = rotated(values, seed=seed, scale=10.0**exponent)
    exact = torch.linalg.eigvalsh(h)
    size = max(float(exact.abs().max()), 1e-300)
    low = lambda_min(h, dense_below=0, tol=1e-9, seed=seed)
    high = lambda_max(h, dense_below=0, tol=1e-9, seed=seed)
    assert abs(low.value - float(exact[0])) <= 1e-8 * size
    assert abs(high.value - float(exact[-1])) <= 1e-8 * size
    assert abs(lambda_min(h).value - float(exact[0])) <= 1e-8 * size
    k = min(3, len(values))
    pairs = extreme_eigenpairs(h, k, seed=seed, tol=1e-10, max_hvp=2000)
    assert float((pairs.values - exact[:k]).abs().max()) <= 1e-8 * size
    assert bool(pairs.converged.all())


@scaled
@typed
def test_N22_no_ghosts(scale, dtype):
    h = diag(np.r_[-100, np.linspace(0, 1, 199)], dtype, scale)
    size, exact = 100 * scale, np.array([-100.0, 0.0, 1 / 198]) * scale
    t = lanczos(h, 60)
    values, bounds = t.ritz()
    double = dtype is torch.float64
    assert int((values + size < (1e-8 if double else 1e-4) * size).sum()) == 1
    for theta, bound, value in zip(values[:3], bounds[:3], exact, strict=True):
        assert abs(float(theta) - value) <= float(bound) + (1e-12 if double else 1e-5) * size
    pairs = extreme_eigenpairs(h, 3, tol=1e-9 if double else 1e-6)
    assert np.allclose(pairs.values, exact, rtol=0, atol=(1e-9 if double else 2e-6) * size)


@scaled
@typed
def test_N23_two_valued_spectrum_breaks_down(scale, dtype):
    h = rotated([-1.0] * 100 + [1.0] * 100, seed=5, dtype=dtype, scale=scale)
    t = lanczos(h, 40)
    assert t.breakdown == 2 and t.k == 2 and bool(torch.isfinite(t.T).all())
    e = lambda_min(h, dense_below=0)
    assert math.isclose(e.value, -scale, rel_tol=1e-5) and e.sign == "negative"


@scaled
@typed
def test_N24_orthogonal_after_every_restart(scale, dtype):
    h = as_linear_map(diag(np.r_[-1e-3, np.linspace(0, 1, 399)], dtype, scale))
    limit = 1e-10 if dtype is torch.float64 else 1e-5
    process = ThickRestart(h, 30, None, 0, 1)
    for _ in range(15):
        process.expand()
        process.restart(12)
        gram = process.rows @ process.rows.T
        assert float((gram - torch.eye(12, dtype=dtype)).abs().max()) <= limit
        assert float((process.rows @ process.pending).abs().max()) <= limit
    values, _, _ = process.ritz()
    assert process.n_restarts == 15 and float(values[0]) < 0


@scaled
@typed
def test_N25_more_steps_than_the_grade(scale, dtype):
    rel = 1e-10 if dtype is torch.float64 else 1e-5
    t = lanczos(scale * torch.eye(6, dtype=dtype), 3)
    assert t.k == 1 and t.breakdown == 1 and float(t.T) == pytest.approx(scale, rel=rel)
    t = lanczos(diag([1.0, 2.0, 5.0], dtype, scale), 10)
    assert t.k <= 3 and np.allclose(t.ritz()[0], np.array([1.0, 2.0, 5.0]) * scale, rtol=rel, atol=0)
    u = torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    t = lanczos((scale * torch.outer(u, u)).to(dtype), 10)
    assert t.k <= 2 and bool(torch.isfinite(t.T).all())
    assert float(t.ritz()[0][-1]) == pytest.approx(float(scale * u @ u), rel=rel)


@scaled
def test_N26_null_eigenvalue_and_zero_matrix(scale):
    e = lambda_min(diag(np.r_[0, np.linspace(1, 2, 49)], scale=scale), dense_below=0)
    assert abs(e.value) <= 1e-10 * scale and e.sign == "undetermined" and e.confidence >= 0.99
    t = lanczos(torch.zeros(10, 10, dtype=torch.float64), 5)
    assert t.breakdown == 1 and t.k == 1 and float(t.T) == 0.0
    assert lambda_min(torch.zeros(10, 10, dtype=torch.float64), dense_below=0).value == 0.0
    upper = np.zeros((5, 5))
    upper[1:, 1:][np.triu_indices(4, 1)] = [510, 493, 510, 513, 540, 513]
    h = torch.from_numpy((upper + upper.T) * scale)
    pairs = extreme_eigenpairs(h, 5)
    assert float(pairs.values.abs().min()) <= 1e-9 * scale
    assert float(pairs.values[-1]) == pytest.approx(1539.77 * scale, rel=1e-5)


@scaled
@typed
def test_N27_multiplicity(scale, dtype):
    h = diag(np.r_[-1, -1, -1, np.linspace(0.1, 1, 97)], dtype, scale)
    start = torch.ones(100, dtype=dtype)
    assert float(lanczos(h, 80, start=start).ritz()[0][0]) == pytest.approx(-scale, rel=1e-5)
    pairs = extreme_eigenpairs(h, 4)
    assert np.allclose(pairs.values, np.array([-1, -1, -1, 0.1]) * scale, rtol=1e-4, atol=1e-8 * scale)
    assert bool(pairs.converged.all())
    assert pairs.n_starts >= 2


@scaled
@typed
def test_N28_exactly_six_null_modes(scale, dtype):
    h = rotated(np.r_[np.zeros(6), np.linspace(0.1, 1, 94)], seed=2, dtype=dtype, scale=scale)
    tol = 1e-8 if dtype is torch.float64 else 1e-5
    pairs = extreme_eigenpairs(h, 8, tol=tol, max_hvp=2000)
    assert int((pairs.values.abs() <= 1e-4 * scale).sum()) == 6
    assert float(pairs.values[6]) == pytest.approx(0.1 * scale, rel=1e-4)


@scaled
@typed
def test_N29_deterministic_and_global_generator_untouched(scale, dtype):
    h = rotated(np.linspace(-1, 1, 250), seed=4, dtype=dtype, scale=scale)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second = lambda_min(h, seed=11), lambda_min(h, seed=11)
    assert torch.equal(before, torch.get_rng_state())
    assert first.value == second.value and torch.equal(first.vector, second.vector)
    flat = diag(np.r_[0.0, np.linspace(0.5, 1, 299)], dtype, scale)
    verdicts = {lambda_min(flat, seed=s, tol=1e-3).sign for s in range(20)}
    assert verdicts == {"undetermined"}
    assert {lambda_min(flat, seed=s, tol=1e-3, dense_below=400).sign for s in range(3)} == verdicts


@scaled
@typed
@pytest.mark.parametrize("dense_below", [0, 200])
def test_N30_sign_symmetric_spectrum(scale, dtype, dense_below):
    h = diag([1.0, -1.0, 0.3], dtype, scale)
    low, high = lambda_min(h, dense_below=dense_below), lambda_max(h, dense_below=dense_below)
    assert low.value == pytest.approx(-scale, rel=1e-5) and low.sign == "negative"
    assert high.value == pytest.approx(scale, rel=1e-5) and high.sign == "positive"
    assert low.lambda_max == pytest.approx(scale, rel=1e-5)


def test_N31_no_absolute_normalization():
    steps = set()
    for scale in SCALES:
        e = lambda_max(diag([1, 0.5, 0.2], scale=scale), dense_below=0)
        assert e.value == pytest.approx(scale, rel=1e-6)
        steps.add(e.steps)
    assert len(steps) == 1


@scaled
@typed
def test_N32_residuals_are_recomputed_and_flagged(scale, dtype):
    h = diag(np.r_[0.0, np.linspace(55, 1e4, 299)], dtype, scale)
    with pytest.warns(ConvergenceWarning, match="missed tol"):
        pairs = extreme_eigenpairs(h, 1, max_hvp=12, basis=6)
    assert not bool(pairs.converged.any())
    vectors = pairs.vectors.double()
    true = (h.double() @ vectors - vectors * pairs.values).norm(dim=0)
    assert torch.allclose(true, pairs.residuals, rtol=1e-6 if dtype is torch.float64 else 1e-2, atol=0)


@scaled
@typed
def test_N33_tolerance_below_the_floor_is_reported(scale, dtype):
    h = rotated(np.linspace(1, 2, 80), dtype=dtype, scale=scale)
    eps = torch.finfo(dtype).eps
    with pytest.warns(PrecisionWarning, match="raised"):
        pairs = extreme_eigenpairs(h, 2, tol=1e-3 * eps)
    assert pairs.tol > 8 * eps * scale and bool(pairs.converged.all())
    assert float(pairs.residuals.max()) <= pairs.tol
    assert lanczos(h, 500).k <= 80


@scaled
@typed
def test_N34_null_is_found_without_shift_invert(scale, dtype):
    """What sigma = 0 is asked for: the eigenvalue nearest to zero of a semidefinite operator."""
    h = rotated(np.r_[0.0, np.linspace(0.5, 1, 39)], dtype=dtype, scale=scale)
    pairs = extreme_eigenpairs(h, 2)
    assert abs(float(pairs.values[0])) <= 1e-6 * scale
    assert float(pairs.values[1]) == pytest.approx(0.5 * scale, rel=1e-5)


def test_N34_shift_invert_is_not_offered():
    with pytest.raises(TypeError, match="sigma"):
        extreme_eigenpairs(diag([1.0, 2.0]), 1, sigma=0.0)
    with pytest.raises(TypeError, match="sigma"):
        lambda_min(diag([1.0, 2.0]), sigma=0.0)


@scaled
@typed
def test_O39_no_ghosts_no_nan_at_breakdown_right_weights(scale, dtype):
    """Full reorthogonalization twice, breakdown at 64 eps |H|, Gauss weights that integrate a density."""
    rel = 1e-8 if dtype is torch.float64 else 1e-5
    values = np.r_[-100.0, np.linspace(0, 1, 99), np.full(20, 3.0)]
    h = rotated(values, seed=8, dtype=dtype, scale=scale)
    exact = torch.linalg.eigvalsh(h.double())
    size = float(exact.abs().max())
    t = lanczos(h, 120)
    assert bool(torch.isfinite(t.T).all()) and int((t.ritz()[0] < -99 * scale).sum()) == 1
    assert float((t.Q.T @ t.Q - torch.eye(t.k, dtype=dtype)).abs().max()) < 100 * torch.finfo(dtype).eps
    for dense_below in (0, 200):
        low, high = lambda_min(h, dense_below=dense_below), lambda_max(h, dense_below=dense_below)
        assert abs(low.value - float(exact[0])) <= rel * size
        assert abs(high.value - float(exact[-1])) <= rel * size
    s = spectral_density(h, n_probes=30, k=40, seed=3)
    assert float(s.weights.nan_to_num().sum(1).max()) == pytest.approx(1.0, abs=1e-5)
    mean, error = s.mean(lambda z: z / scale)
    assert abs(mean - values.mean()) <= 4 * error
    assert abs(s.mass_below(2.0 * scale)[0] - 100 / 120) <= 4 * s.mass_below(2.0 * scale)[1]


@scaled
def test_O39_start_orthogonal_to_the_answer(scale):
    d = torch.as_tensor(np.r_[-0.5, np.linspace(0.1, 1, 119)] * scale)
    start = torch.ones(120, dtype=torch.float64)
    start[0] = 0.0
    assert float(lanczos(torch.diag(d), 100, start=start).ritz()[0][0]) > 0.09 * scale
    e = lambda_min(torch.diag(d), dense_below=0)
    assert e.value == pytest.approx(-0.5 * scale) and e.sign == "negative"


def test_reference_run_small_negative_eigenvalue():
    """Too few steps must not certify; enough steps must prove the negative value."""
    d = torch.as_tensor(np.r_[-1e-3, np.linspace(0, 1, 999)])
    short = lambda_min(lambda v: d * v, n=1000, max_steps=20)
    assert short.sign != "nonnegative"
    long = lambda_min(lambda v: d * v, n=1000)
    assert long.sign == "negative" and long.value == pytest.approx(-1e-3, rel=1e-5)
    assert float(long.vector @ (d * long.vector)) == pytest.approx(long.value)


def test_start_orthogonal_to_the_answer_needs_the_second_start():
    d = torch.as_tensor(np.r_[-0.5, np.linspace(0.1, 1, 299)])
    start = torch.ones(300, dtype=torch.float64)
    start[0] = 0.0
    assert float(lanczos(torch.diag(d), 250, start=start).ritz()[0][0]) > 0.09
    assert lambda_min(torch.diag(d)).value == pytest.approx(-0.5)


def test_certified_positive_costs_few_products_and_two_starts():
    d = torch.linspace(0.2, 1.0, 5000, dtype=torch.float64)
    e = lambda_min(lambda v: d * v, n=5000, tol=1e-2)
    assert e.sign == "nonnegative" and e.confidence >= 0.99 and len(e.steps) == 2
    assert e.n_hvp == sum(e.steps) + 1 < 120


def test_false_certificates_are_rarer_than_promised():
    """One eigenvalue hides below a continuum; 200 seeds at confidence .9 may miss 20, in truth far fewer."""
    d = torch.as_tensor(np.r_[-0.02, np.linspace(0.02, 1, 499)])
    wrong = sum(
        lambda_min(lambda v: d * v, n=500, seed=s, confidence=0.9, tol=0.3, max_steps=60).sign
        == "nonnegative"
        for s in range(200)
    )
    assert wrong <= 20


def test_confidence_bounds():
    assert kuczynski_wozniakowski(1000, 10, 0.1) == pytest.approx(0.128, abs=1e-3)
    assert kuczynski_wozniakowski(1000, 40, 0.01) == pytest.approx(0.0193, abs=1e-4)
    assert posterior_failure(10, [1.0], [0.5], 2.0) == 1.0
    assert combined_failure(1.0, 1.0) == 1.0 and combined_failure(0.0, 0.5) == 0.0
    assert 0.01 < combined_failure(0.1, 0.1) < 0.06


def test_float32_stored_matrix_is_undetermined():
    h = rotated(np.r_[-1e-3, np.linspace(1, 1e4, 39)], dtype=torch.float32)
    for dense_below in (0, 200):
        assert lambda_min(h, dense_below=dense_below).sign == "undetermined"


def test_measured_asymmetry_raises_the_noise_floor():
    h = rotated(np.linspace(0.5, 1, 40))
    noise = torch.randn(40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for dense_below in (0, 200):
        e = lambda_min(h + 1e-3 * (noise - noise.T), dense_below=dense_below)
        assert 1e-3 < e.noise_floor < 0.1


def test_nullspace_is_projected_out():
    h = rotated(np.r_[0.0, 0.0, np.linspace(0.5, 1, 58)])
    null = torch.linalg.eigh(h)[1][:, :2]
    for dense_below in (0, 200):
        e = lambda_min(h, nullspace=null * 3.0, dense_below=dense_below)
        assert e.value == pytest.approx(0.5) and e.sign == "nonnegative" and e.n_deflated == 2
        assert float((null.T @ e.vector).norm()) < 1e-10


@pytest.mark.parametrize("dense_below", [0, 200])
def test_dimension_one_two_and_multiples_of_identity(dense_below):
    assert lambda_min(diag([-3.0]), dense_below=dense_below).value == -3.0
    assert lambda_min(diag([4.0, -2.0]), dense_below=dense_below).value == pytest.approx(-2.0)
    e = lambda_min(2.5 * torch.eye(70, dtype=torch.float64), dense_below=dense_below)
    assert e.value == pytest.approx(2.5) and e.sign == "nonnegative" and e.lambda_max == pytest.approx(2.5)


def test_operators_of_every_kind_agree():
    import scipy.sparse as sp
    from linear_operator.operators import DenseLinearOperator
    from scipy.sparse.linalg import aslinearoperator

    h = rotated(np.linspace(-1, 1, 12))
    array = h.numpy()
    kinds = [h, array, sp.csr_array(array), aslinearoperator(array), DenseLinearOperator(h), h.to_sparse()]
    values = [lambda_min(op, dense_below=0).value for op in kinds]
    values.append(lambda_min(lambda v: h @ v, n=12, dense_below=0).value)
    assert np.allclose(values, -1.0, atol=1e-9)


def test_spectral_density_against_the_histogram():
    d = np.r_[np.full(100, -1.0), np.linspace(0, 2, 300)]
    s = spectral_density(diag(d), n_probes=20, k=80, seed=1)
    assert float(torch.trapezoid(s.density, s.grid)) == pytest.approx(1.0, abs=1e-3)
    fraction, error = s.mass_below(-0.5)
    assert abs(fraction - 0.25) <= 4 * error + 1e-12 and 0 < error < 0.05
    mean, spread = s.mean(lambda z: z)
    assert abs(mean - d.mean()) <= 4 * spread
    assert bool((s.error >= 0).all()) and s.n_hvp <= 20 * 80
    again = spectral_density(diag(d), n_probes=20, k=80, seed=1)
    assert torch.equal(s.density, again.density)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: lanczos(torch.ones(2, 3), 1), "square"),
        (lambda: lanczos(torch.ones(2, 2, 2), 1), "square"),
        (lambda: lanczos(torch.eye(3), 0), "k must be at least 1"),
        (lambda: lanczos(lambda v: v, 1), "n must be given"),
        (lambda: lanczos(torch.eye(3), 1, start=torch.zeros(3)), "start must not vanish"),
        (lambda: lanczos(torch.eye(3), 1, start=torch.ones(4)), "start must be 3"),
        (lambda: lambda_min(torch.eye(3), confidence=1.5), "confidence"),
        (lambda: lambda_min(torch.eye(3), nullspace=torch.eye(3)), "nullspace must leave"),
        (lambda: lambda_min(torch.eye(3), nullspace=torch.ones(2, 1)), "nullspace must have shape"),
        (lambda: extreme_eigenpairs(torch.eye(3), 4), "k must be at most"),
        (lambda: extreme_eigenpairs(torch.eye(3), 1, which="SM"), "which must be one of"),
        (lambda: spectral_density(torch.eye(3), n_probes=0), "n_probes"),
    ],
)
def test_bad_arguments(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_bad_operators():
    with pytest.raises(TypeError, match="op must have"):
        lanczos(3.0, 1)
    with pytest.raises(TypeError, match="float32 or torch.float64"):
        lanczos(torch.eye(3, dtype=torch.float16), 1)
    nan = torch.full((3, 3), math.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        lanczos(nan, 1)
    for dense_below in (0, 200):
        with pytest.raises(FloatingPointError, match="not finite"):
            lambda_min(nan, dense_below=dense_below)
    with warnings.catch_warnings(), pytest.raises(FloatingPointError, match="not finite"):
        extreme_eigenpairs(nan, 1)
