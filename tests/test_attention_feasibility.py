"""Feasibility of targets inside a band, and hypothesis over shapes, bands, targets and depths."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from ot_newton.attention import Dustbin, check_band, sinkhorn_attention, tail_adjoint
from ot_newton.attention.feasibility import unmatched
from tests.attention_truth import Problem, gaussian, support, truth
from tests.test_attention_adjoint import lane, relative

IDS = st.lists(st.sampled_from([0, 0, 0, 1, -1]), min_size=7, max_size=7)
MASS = st.lists(st.integers(0, 3), min_size=7, max_size=7)


def most_mass(a: np.ndarray, b: np.ndarray, mask: np.ndarray) -> float:
    """Largest mass that a coupling on the mask with marginals at most a and b can place (linear program)."""
    n, m = mask.shape
    rows, cols = np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))
    bounds = [(0, None if inside else 0) for inside in mask.ravel()]
    found = linprog(-np.ones(n * m), np.vstack([rows, cols]), np.concatenate([a, b]), bounds=bounds)
    return float(-found.fun)


checked = jax.jit(lambda a, b, ids: [check_band(a, b, w, segment_ids=ids) for w in range(7)])


@given(MASS, MASS, st.integers(0, 6), IDS, st.booleans())
@settings(max_examples=60)
def test_check_band_agrees_with_linear_programming(
    a: Any, b: Any, width: int, ids: Any, balance: bool
) -> None:
    a, b, ids = np.array(a, float), np.array(b, float), np.array(ids)
    if balance:
        b = np.random.default_rng(int(b.sum())).permutation(a)
    rows, cols = np.where(ids >= 0, a, 0), np.where(ids >= 0, b, 0)
    mask = support(7, 7, width, ids, ids)
    placed = most_mass(rows, cols, mask)
    feasible = bool(rows.sum() > 0 and placed >= max(rows.sum(), cols.sum()) - 1e-6)
    assert bool(checked(jnp.asarray(a), jnp.asarray(b), jnp.asarray(ids))[width]) == feasible
    assert abs(unmatched(rows, cols, width, ids, ids) - (rows.sum() - placed)) <= 1e-6


def test_infeasible_targets_raise_and_name_the_fix() -> None:
    x = jnp.ones((1, 6, 2))
    a, b = np.array([3.0, 1, 1, 1, 1, 1]), np.array([1.0, 1, 1, 1, 1, 3])
    with pytest.raises(ValueError, match="raise bandwidth to at least 1, or use dustbin"):
        sinkhorn_attention(x, x, x, bandwidth=0, a=a, b=a[[1, 0, 2, 3, 4, 5]])
    with pytest.raises(ValueError, match="raise bandwidth to at least 2"):
        sinkhorn_attention(x, x, x, bandwidth=1, a=a, b=b)
    with pytest.raises(ValueError, match="a and b must balance, found sums 8 and 9"):
        sinkhorn_attention(x, x, x, bandwidth=5, a=a, b=b + (np.arange(6) == 0))
    ids = (np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1, 1]))
    with pytest.raises(ValueError, match="balance a and b in each segment"):
        sinkhorn_attention(x, x, x, bandwidth=5, segment_ids=ids)
    token = jnp.ones((1, 2))
    with pytest.raises(ValueError, match="leaves 2 of the mass unmatched, a unit dustbin takes 1"):
        sinkhorn_attention(x, x, x, bandwidth=0, a=a, b=b, dustbin=Dustbin(token, token, token))


def test_unit_dustbin_bridges_one_unit() -> None:
    """One query without a partner in its reach is feasible with a unit dustbin, not without one."""
    x = jnp.ones((1, 4, 2))
    a, b = np.array([2.0, 1, 1, 1]), np.array([1.0, 1, 1, 2])
    token = jnp.zeros((1, 2))
    dustbin = Dustbin(token, token, token)
    out = sinkhorn_attention(x, x, x, bandwidth=0, a=a, b=b, dustbin=dustbin, backend="reference")
    assert np.all(np.isfinite(out))
    with pytest.raises(ValueError, match="raise bandwidth"):
        sinkhorn_attention(x, x, x, bandwidth=0, a=a, b=b)


@st.composite
def problems(draw: Any) -> tuple[Problem, str]:
    """Random shapes, bands, depths and feasible general targets (marginals of a random plan on the band)."""
    backend = draw(st.sampled_from(["reference", "banded"]))
    n, m = draw(st.sampled_from([(9, 7)] if backend == "banded" else [(8, 8), (9, 7)]))
    width = draw(st.sampled_from([2, 20] if backend == "banded" else [2, 3, 5, 20]))
    depth, base = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    seed = draw(st.integers(0, 10**6))
    plan = np.random.default_rng(seed).uniform(0.2, 1, (n, m)) * support(n, m, width)
    values = {"a": plan.sum(1), "b": plan.sum(0), "base_steps": base, "tail_steps": depth}
    return gaussian(n, m, 3, width, seed=seed, **values), backend


@given(problems())
@settings(max_examples=14)
def test_any_shape_band_target_and_depth(drawn: tuple[Problem, str]) -> None:
    problem, backend = drawn
    width = int(max(abs(i - j) for i, j in zip(*np.nonzero(problem.mask), strict=True)))
    expected = truth(problem)
    with jax.enable_x64(True), jax.disable_jit():
        found = tail_adjoint(
            *(lane(x) for x in (problem.q, problem.k, problem.v, problem.bar)),
            bandwidth=width,
            a=problem.a,
            b=problem.b,
            base_steps=problem.base_steps,
            tail_steps=problem.tail_steps,
            scale=problem.scale,
            backend=backend,
        )
    for side in "qkv":
        assert relative(getattr(found, "d" + side)[0], expected[side]) <= 1e-12
    if problem.tail_steps:
        assert relative(found.da[0], expected["a"]) <= 1e-12
        assert relative(found.db[0], expected["b"]) <= 1e-12
