"""The attention and its tail adjoint against dense autodiff: every R, backend, mask, target and dustbin."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ot_newton.attention import Dustbin, sinkhorn_attention, tail_adjoint
from tests.attention_truth import Problem, augment, gaussian, support, truth

N, D = 24, 4
PAD = np.where(np.arange(N) < 20, np.arange(N) // 12, -1)  # two segments, four padding tokens


def relative(found: Any, expected: np.ndarray) -> float:
    """Largest error over the largest expected entry (absolute where all are zero)."""
    found = np.asarray(found, np.float64)
    size = float(np.max(np.abs(expected), initial=0.0)) or 1.0
    return float(np.max(np.abs(found - expected), initial=0.0)) / size


def lane(x: np.ndarray, dtype: Any = jnp.float64) -> Any:
    """One lane with a head axis."""
    return jnp.asarray(x, dtype)[None]


def case(name: str, steps: int) -> tuple[Problem, dict[str, Any], tuple[np.ndarray, ...] | None]:
    """A named problem, its call options, and its dustbin tokens; `gap` has 20 queries and 26 keys."""
    rng = np.random.default_rng(7)
    tokens = tuple(rng.normal(size=D) for _ in range(3))
    if name == "dense":
        a = rng.uniform(0.5, 1.5, N)
        b = a[::-1].copy()
        return (
            gaussian(N, N, D, N, seed=1, tail_steps=steps, a=a, b=b),
            {"bandwidth": N, "a": a, "b": b},
            None,
        )
    if name == "band":
        return gaussian(N, N, D, 5, seed=2, tail_steps=steps), {"bandwidth": 5}, None
    if name == "padded":
        mass = (PAD >= 0).astype(float)
        mask = support(N, N, 5, PAD, PAD)
        p = gaussian(N, N, D, 5, seed=3, tail_steps=steps, a=mass, b=mass)
        return Problem(**{**p.__dict__, "mask": mask}), {"bandwidth": 5, "segment_ids": PAD}, None
    if name == "unit":
        p = augment(gaussian(N, N, D, 5, seed=4, tail_steps=steps), tokens, (1.0, 1.0))
        return p, {"bandwidth": 5}, tokens
    if name == "lengths":  # 20 of 24 queries are active: equal shapes, unequal lengths
        a = (np.arange(N) < 20).astype(float)
        p = augment(gaussian(N, N, D, 5, seed=5, tail_steps=steps, a=a), tokens, (float(N), 20.0))
        return p, {"bandwidth": 5, "a": a}, tokens
    p = augment(gaussian(20, 26, D, 5, seed=5, tail_steps=steps), tokens, (26.0, 20.0))
    return p, {"bandwidth": 5}, tokens


def split(problem: Problem, tokens: Any) -> tuple[np.ndarray, ...]:
    """q, k, v, cotangent without dustbin rows."""
    cut = None if tokens is None else -1
    return problem.q[:cut], problem.k[:cut], problem.v[:cut], problem.bar[:cut]


def bin_of(tokens: Any, name: str, dtype: Any = jnp.float64) -> Any:
    if tokens is None:
        return None
    return Dustbin(*(lane(t, dtype) for t in tokens), capacity="unit" if name == "unit" else "lengths")


CASES = ["dense", "band", "padded", "unit", "lengths"]


COMBINATIONS = [("reference", name, steps) for name in CASES for steps in (0, 1, 2, 3, 4)]
COMBINATIONS += [("banded", name, 2) for name in CASES] + [
    ("banded", "band", steps) for steps in (0, 1, 3, 4)
]


@pytest.mark.parametrize(("backend", "name", "steps"), COMBINATIONS)
def test_tail_adjoint_matches_autodiff(backend: str, name: str, steps: int) -> None:
    problem, options, tokens = case(name, steps)
    expected = truth(problem)
    q, k, v, bar = split(problem, tokens)
    with jax.enable_x64(True), jax.disable_jit():
        arrays = [lane(x) for x in (q, k, v, bar)]
        found = tail_adjoint(
            *arrays,
            base_steps=problem.base_steps,
            tail_steps=steps,
            scale=problem.scale,
            backend=backend,
            dustbin=bin_of(tokens, name),
            **options,
        )
    n, m = len(q), len(k)
    for side, rows in (("q", n), ("k", m), ("v", m)):
        assert relative(getattr(found, "d" + side)[0], expected[side][:rows]) <= 1e-12, side
        if tokens is not None:
            assert relative(getattr(found.dustbin, side)[0], expected[side][-1]) <= 1e-12, f"dustbin {side}"


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_staircase_factors_scale_one_tile_to_stochastic_matrices(steps: int) -> None:
    problem, options, _ = case("dense", steps)
    plan = truth(problem)["plan"]
    with jax.enable_x64(True), jax.disable_jit():
        arrays = [lane(x) for x in (problem.q, problem.k, problem.v, problem.bar)]
        found = tail_adjoint(
            *arrays, base_steps=4, tail_steps=steps, scale=0.6, backend="reference", **options
        )
    r, y = np.asarray(found.row_factors)[0], np.asarray(found.column_factors)[0]
    assert r.shape == (steps, N) and y.shape == (steps + 1, N)
    for step in range(steps):
        row_stochastic = plan * r[step][:, None] * y[step][None, :]
        column_stochastic = plan * r[step][:, None] * y[step + 1][None, :]
        np.testing.assert_allclose(row_stochastic.sum(1), problem.a, rtol=1e-12)
        np.testing.assert_allclose(column_stochastic.sum(0), problem.b, rtol=1e-12)
    dropped = np.asarray(found.column_cotangents)[0, 0]
    assert abs(dropped.sum()) <= 1e-12 * np.abs(dropped).sum()  # every cotangent is in the zero-sum space


def test_gradients_of_targets_match_autodiff() -> None:
    problem, options, _ = case("dense", 3)
    expected = truth(problem)
    with jax.enable_x64(True), jax.disable_jit():
        arrays = [lane(x) for x in (problem.q, problem.k, problem.v, problem.bar)]
        found = tail_adjoint(*arrays, base_steps=4, tail_steps=3, scale=0.6, backend="reference", **options)
    assert relative(found.da[0], expected["a"]) <= 1e-12
    assert relative(found.db[0], expected["b"]) <= 1e-12


def test_without_base_the_tail_is_the_whole_unrolled_gradient() -> None:
    problem, options, _ = case("band", 5)
    whole = Problem(**{**problem.__dict__, "base_steps": 0})
    expected = truth(whole, full=True)
    with jax.enable_x64(True), jax.disable_jit():
        arrays = [lane(x) for x in (whole.q, whole.k, whole.v, whole.bar)]
        found = tail_adjoint(*arrays, base_steps=0, tail_steps=5, scale=0.6, backend="banded", **options)
    assert relative(found.dq[0], expected["q"]) <= 1e-12
    assert relative(found.dk[0], expected["k"]) <= 1e-12


def test_filler_tokens_of_the_dustbin_are_inert() -> None:
    problem, options, tokens = case("unit", 2)
    expected = truth(problem)
    with jax.enable_x64(True), jax.disable_jit():
        filled = Dustbin(*(jnp.stack([t[0], 50 * t[0], -t[0]])[None] for t in map(lane, tokens)))
        arrays = [lane(x) for x in split(problem, tokens)]
        found = tail_adjoint(*arrays, base_steps=4, scale=0.6, backend="reference", dustbin=filled, **options)
    for side in "qkv":
        assert relative(getattr(found, "d" + side)[0], expected[side][:-1]) <= 1e-12
        assert relative(getattr(found.dustbin, side)[0, 0], expected[side][-1]) <= 1e-12
        assert not np.any(np.asarray(getattr(found.dustbin, side))[0, 1:])


def test_second_derivatives_are_those_of_the_surrogate() -> None:
    """Reverse over reverse: the base stays constant in the second derivative too."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(9)
        q, k, v, bar, direction = (jnp.asarray(rng.normal(size=(1, 8, 3))) for _ in range(5))
        log_sum_exp = jax.scipy.special.logsumexp

        def surrogate(q: Any) -> Any:
            scores, right = 0.5 * q[0] @ k[0].T, jnp.zeros(8)
            for step in range(5):
                right = jax.lax.stop_gradient(right) if step == 3 else right
                left = -log_sum_exp(scores + right, axis=1)
                right = -log_sum_exp(scores + left[:, None], axis=0)
            return jnp.sum(bar[0] * (jnp.exp(scores + left[:, None] + right) @ v[0]))

        def attention(q: Any) -> Any:
            options = {"bandwidth": 8, "base_steps": 3, "scale": 0.5, "backend": "reference"}
            return jnp.sum(bar * sinkhorn_attention(q, k, v, **options))

        def product(loss: Any) -> Any:
            return jax.jit(jax.grad(lambda q: jnp.vdot(jax.grad(loss)(q), direction)))(q)

        assert relative(product(attention), np.asarray(product(surrogate))) <= 1e-12
