"""Bias and contraction certificates: exact reconstruction, bounds, monotone decay, no rounding to zero."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ot_newton.attention import bias_certificate, contraction_certificate, select_tail_depth
from ot_newton.errors import ConvergenceWarning
from tests.attention_truth import Problem, gaussian, truth
from tests.test_attention_adjoint import bin_of, case, lane, relative, split


def certify(
    problem: Problem, options: dict[str, Any], tokens: Any = None, name: str = "", **more: Any
) -> Any:
    """The certificate of one lane in float64."""
    with jax.enable_x64(True), jax.disable_jit():
        return bias_certificate(
            *(lane(x) for x in split(problem, tokens)),
            base_steps=problem.base_steps,
            tail_steps=problem.tail_steps,
            scale=problem.scale,
            dustbin=bin_of(tokens, name),
            **{"backend": "reference", **options, **more},
        )


def check_reconstruction(found: Any, problem: Problem, tokens: Any) -> None:
    """g_full = g_tail + eta_R in q, k and the tokens; exact norms; bounds above the actual norm."""
    tail, full = truth(problem), truth(problem, full=True)
    cut = None if tokens is None else -1
    for side in "qk":
        eta = full[side] - tail[side]
        scale = np.max(np.abs(full[side]))
        assert np.max(np.abs(np.asarray(getattr(found, "d" + side))[0] - eta[:cut])) <= 1e-12 * scale
        if tokens is not None:
            assert np.max(np.abs(np.asarray(getattr(found.dustbin, side))[0] - eta[-1])) <= 1e-12 * scale
    eta = full["scores"] - tail["scores"]
    size = np.abs(full["scores"]).sum()
    assert abs(found.l1[0] - np.abs(eta).sum()) <= 1e-12 * size
    assert abs(found.l2[0] - np.linalg.norm(eta)) <= 1e-12 * size
    assert abs(found.relative[0] - np.linalg.norm(eta) / np.linalg.norm(full["scores"])) <= 1e-11
    assert found.l1[0] <= found.dobrushin_bound[0] * (1 + 1e-9) + 1e-12 * size
    assert found.dobrushin_bound[0] <= found.hilbert_bound[0] * (1 + 1e-9)


@pytest.mark.parametrize("name", ["dense", "band", "padded", "unit", "lengths"])
@pytest.mark.parametrize("steps", [0, 2])
def test_remainder_reconstructs_the_full_gradient(name: str, steps: int) -> None:
    problem, options, tokens = case(name, steps)
    check_reconstruction(certify(problem, options, tokens, name), problem, tokens)


def test_remainder_on_the_banded_backend_and_in_the_targets() -> None:
    problem, options, _ = case("dense", 1)
    found = certify(problem, options, backend="banded")
    check_reconstruction(found, problem, None)
    tail, full = truth(problem), truth(problem, full=True)
    for name, x in (("a", found.da), ("b", found.db)):
        assert relative(np.asarray(x)[0] + tail[name], full[name]) <= 1e-12


@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.6, 2.0]), st.integers(0, 3))
@settings(max_examples=12)
def test_bounds_are_above_the_actual_remainder(seed: int, scale: float, steps: int) -> None:
    problem = gaussian(12, 12, 4, 12, seed=seed, tail_steps=steps, scale=scale)
    check_reconstruction(certify(problem, {"bandwidth": 12}), problem, None)


def test_measured_bias_falls_with_depth_and_slower_on_a_band() -> None:
    """As in the anchor: R = 2 is enough for a dense problem with small scores, not on a band."""
    depth = {}
    with jax.enable_x64(True), jax.disable_jit():
        for name, width, scale in (("dense", 24, 0.1), ("band", 5, 0.5)):
            p = gaussian(24, 24, 4, width, seed=8, scale=scale)
            arrays = [lane(x) for x in (p.q, p.k, p.v, p.bar)]
            options = {"bandwidth": width, "scale": scale, "base_steps": 15, "backend": "reference"}
            if name == "dense":
                depth[name] = select_tail_depth(*arrays, tau=1e-3, max_depth=2, **options)
            else:
                with pytest.warns(ConvergenceWarning, match="no tail_steps up to 2 meets tau=0.001"):
                    depth[name] = select_tail_depth(*arrays, tau=1e-3, max_depth=2, **options)
    dense, band = depth["dense"], depth["band"]
    assert dense.success and dense.depth <= 2 and dense.biases[-1] <= 1e-3
    assert not band.success and band.depth is None and len(band.biases) == 3
    assert all(x > y for x, y in zip(band.biases, band.biases[1:], strict=False))
    assert band.biases[-1] > 1e-2


def test_contraction_is_certified_only_on_strictly_positive_blocks() -> None:
    rng = np.random.default_rng(5)
    q, k = (jnp.asarray(rng.normal(size=(2, 10, 4)), jnp.float32) for _ in range(2))
    dense = contraction_certificate(q, k, bandwidth=9)
    assert dense.reason is None and np.all(dense.rate < 1) and np.all(dense.rate > 0)
    banded = contraction_certificate(q, k, bandwidth=3)
    assert banded.rate is None and banded.rate_gap is None and "strictly positive" in banded.reason
    blocks = contraction_certificate(q, k, bandwidth=3, block_size=4)
    assert blocks.reason is None and blocks.rate.shape == (2, 3)
    segments = contraction_certificate(q, k, bandwidth=3, segment_ids=np.arange(10) // 4)
    np.testing.assert_allclose(segments.diameter, blocks.diameter.max(axis=1), rtol=1e-12)
    edge = contraction_certificate(q, k, bandwidth=3, a=np.arange(10) < 4, b=np.arange(10) < 4)
    np.testing.assert_allclose(edge.diameter, blocks.diameter[:, 0], rtol=1e-12)


@given(st.integers(0, 10**6), st.sampled_from([0.2, 1.0]))
@settings(max_examples=15)
def test_a_step_contracts_by_the_certified_rate(seed: int, scale: float) -> None:
    """Hilbert's metric of two column scalings falls at least by rho in one full step."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, 8, 3))
    found = contraction_certificate(lane(q, jnp.float32), lane(k, jnp.float32), bandwidth=8, scale=scale)
    scores = scale * q @ k.T
    pair = rng.normal(size=(2, 8))

    def step(v: np.ndarray) -> np.ndarray:
        u = -np.log(np.exp(scores + v).sum(1))
        return -np.log(np.exp(scores + u[:, None]).sum(0))

    before, after = pair[0] - pair[1], step(pair[0]) - step(pair[1])
    assert np.ptp(after) <= float(found.rate[0]) * np.ptp(before) * (1 + 1e-5)


def test_the_gap_does_not_round_to_zero() -> None:
    """tanh(D/4) is 1 in float64 beyond D = 76; its gap is stored instead, its log for any D."""
    for size, positive in ((60.0, True), (3000.0, False)):
        q = np.array([[[size], [0.0]]])
        k = np.array([[[1.0], [0.0]]])
        found = contraction_certificate(jnp.asarray(q), jnp.asarray(k), bandwidth=1, scale=2.0)
        expected = 2 * size
        np.testing.assert_allclose(found.diameter, [expected])
        np.testing.assert_allclose(found.log_gap, [np.log(2) - expected / 2], rtol=1e-12)
        assert np.tanh(expected / 4) == 1.0 and (found.gap[0] > 0) == positive


def test_certificates_refuse_traced_arrays() -> None:
    x = jnp.ones((1, 4, 2))
    with pytest.raises(TypeError, match="q must be a concrete array"):
        jax.jit(lambda q: contraction_certificate(q, x, bandwidth=3).gap)(x)
    with pytest.raises(TypeError, match="q must be a concrete array"):
        jax.jit(lambda q: bias_certificate(q, x, x, x, bandwidth=3).l1)(x)
    with pytest.raises(TypeError, match="tail_steps must not be given"):
        select_tail_depth(x, x, x, x, tau=0.1, bandwidth=3, tail_steps=2)
