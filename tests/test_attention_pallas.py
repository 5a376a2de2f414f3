"""The Pallas kernels: edges of the band grid, both interpreters, lowering for a TPU on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ot_newton.attention import Dustbin, sinkhorn_attention, tail_adjoint
from ot_newton.attention.pallas_launch import PallasSweeps
from ot_newton.attention.reference import DenseSweeps
from tests.attention_truth import Problem, gaussian, truth
from tests.test_attention_adjoint import bin_of, case, lane, relative, split

EDGES = [  # n, m, W: blocks are 128 wide
    (150, 150, 20),  # W < block, L not a multiple of it
    (130, 130, 400),  # W >= L: dense
    (300, 300, 150),  # two blocks to each side, first and last rows of blocks clipped
    (128, 400, 129),  # more keys than the rows' windows reach
    (390, 140, 10),  # more rows than the keys' windows reach
    (128, 128, 0),  # the diagonal only
]


def operands(n: int, m: int, seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    q, k, u, v = (rng.normal(size=s) for s in ((n, 3), (m, 3), (n,), (m,)))
    u[rng.random(n) < 0.1] = -np.inf  # tokens without mass
    return tuple(jnp.asarray(x) for x in (q, k, u, v, rng.normal(size=(n, 5)), rng.normal(size=(m, 5))))


@pytest.mark.parametrize(("n", "m", "width"), EDGES)
def test_every_sweep_at_the_edges_of_the_band(n: int, m: int, width: int) -> None:
    with jax.enable_x64(True):
        q, k, u, v, left, right = operands(n, m, 1)
        q_ids, k_ids = (jnp.asarray(np.arange(length) // 100, jnp.int32) for length in (n, m))

        def run(sweeps: Any) -> list[Any]:
            found = [
                sweeps.row_lse(v),
                sweeps.col_lse(u),
                sweeps.row_apply(u, v, v),
                sweeps.col_apply(u, v, left),
            ]
            return [*found, *sweeps.score_gradients(u, v, left, right)]

        found = jax.jit(lambda: run(PallasSweeps.make(q, k, q_ids, k_ids, width, True)))()
        expected = jax.jit(lambda: run(DenseSweeps.make(q, k, q_ids, k_ids, width)))()
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isneginf(x), np.isneginf(y))
        finite = np.isfinite(y)
        assert relative(np.asarray(x)[finite], np.asarray(y)[finite]) <= 1e-13


def test_interpreter_of_memory_and_races(capfd: pytest.CaptureFixture[str]) -> None:
    """Memory starts as NaN and every race is reported: unguarded blocks or early reads would show."""
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    problem = gaussian(150, 150, 3, 20, seed=3, base_steps=1, tail_steps=1)
    arrays = [jnp.asarray(x, jnp.float32)[None] for x in (problem.q, problem.k, problem.v, problem.bar)]
    options = {"bandwidth": 20, "base_steps": 1, "tail_steps": 1, "scale": problem.scale, "backend": "pallas"}
    found = tail_adjoint(*arrays, interpret=interpret, **options)
    expected = truth(problem)
    for side in "qkv":
        assert relative(getattr(found, "d" + side)[0], expected[side]) <= 1e-5
    assert "RACE" not in "".join(capfd.readouterr())


def test_capacity_dustbin_of_unequal_lengths_through_the_kernels() -> None:
    problem, options, tokens = case("gap", 2)
    with jax.enable_x64(True):
        found = tail_adjoint(
            *(lane(x) for x in split(problem, tokens)),
            base_steps=problem.base_steps,
            scale=problem.scale,
            backend="pallas",
            dustbin=bin_of(tokens, "lengths"),
            **options,
        )
    expected = truth(problem)
    for side in "qkv":
        assert relative(getattr(found, "d" + side)[0], expected[side][:-1]) <= 1e-12
        assert relative(getattr(found.dustbin, side)[0], expected[side][-1]) <= 1e-12


def test_rows_with_one_active_column() -> None:
    """Each query meets one key of its own segment: P is the identity, and scores have no gradient."""
    problem = gaussian(24, 24, 4, 5, seed=6, tail_steps=1)
    problem = replace(problem, mask=np.eye(24, dtype=bool))
    assert isinstance(problem, Problem)
    with jax.enable_x64(True):
        arrays = [lane(x) for x in (problem.q, problem.k, problem.v, problem.bar)]
        found = tail_adjoint(
            *arrays, bandwidth=5, base_steps=4, tail_steps=1, backend="pallas", segment_ids=jnp.arange(24)
        )
    assert relative(found.dv[0], problem.bar) <= 1e-14
    assert np.max(np.abs(found.dq)) <= 1e-13


@pytest.mark.parametrize("dustbin", [False, True])
def test_every_kernel_lowers_for_a_tpu(dustbin: bool) -> None:
    token = jnp.ones((2, 64))
    tokens = Dustbin(token, token, token) if dustbin else None

    def run(q: Any, k: Any, v: Any, bar: Any) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            return sinkhorn_attention(
                q, k, v, bandwidth=100, dustbin=tokens, backend="pallas", interpret=False, tail_steps=1
            )

        out, pull = jax.vjp(call, q, k, v)
        return (out, *pull(bar))

    x = jax.ShapeDtypeStruct((2, 2, 300, 64), jnp.float32)
    text = jax.export.export(jax.jit(run), platforms=["tpu"])(x, x, x, x).mlir_module()
    for kernel in ("ot_band_lse", "ot_band_matvec", "ot_band_matmul", "ot_band_gradients"):
        assert f'kernel_name = "{kernel}"' in text
