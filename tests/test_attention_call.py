"""The public call: transformations, sweep counts, memory, padding, fillers, dtypes, imports and errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ot_newton.attention import Dustbin, sinkhorn_attention, tail_adjoint
from tests.attention_truth import gaussian, truth

B, H, L, D, W = 2, 2, 24, 4, 5


def arrays(dtype: Any, length: int = L) -> list[Any]:
    """q, k, v and an output cotangent, (B, H, length, D)."""
    rng = np.random.default_rng(11)
    return [jnp.asarray(rng.normal(size=(B, H, length, D)), dtype) for _ in range(4)]


def expected(inputs: list[Any], **values: Any) -> dict[str, np.ndarray]:
    """Stacked truth of every lane."""
    out: dict[str, list[np.ndarray]] = {}
    length = inputs[0].shape[-2]
    for batch in range(B):
        for head in range(H):
            q, k, v, bar = (np.asarray(x[batch, head], np.float64) for x in inputs)
            problem = gaussian(length, length, D, W, seed=0, base_steps=3, scale=0.5, **values)
            fields = {**problem.__dict__, "q": q, "k": k, "v": v, "bar": bar}
            for name, x in truth(type(problem)(**fields)).items():
                out.setdefault(name, []).append(x)
    return {name: np.stack(x).reshape(B, H, *x[0].shape) for name, x in out.items()}


def output_and_gradients(backend: str, **options: Any) -> Any:
    """A function of (q, k, v, bar) that yields the output and its pullback."""

    def run(q: Any, k: Any, v: Any, bar: Any) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            settings = {"bandwidth": W, "base_steps": 3, "scale": 0.5, **options}
            return sinkhorn_attention(q, k, v, backend=backend, **settings)

        out, pull = jax.vjp(call, q, k, v)
        return (out, *pull(bar))

    return run


@pytest.mark.parametrize("backend", ["reference", "banded", "pallas"])
def test_jit_of_vjp_matches_truth_in_float64(backend: str) -> None:
    with jax.enable_x64(True):
        inputs = arrays(jnp.float64)
        found = jax.jit(output_and_gradients(backend))(*inputs)
    want = expected(inputs)
    for x, name in zip(found, ("out", "q", "k", "v"), strict=True):
        assert x.dtype == jnp.float64
        assert np.max(np.abs(np.asarray(x) - want[name])) <= 1e-12 * np.max(np.abs(want[name])), name


@pytest.mark.parametrize("backend", ["banded", "pallas"])
def test_float32_matches_truth(backend: str) -> None:
    inputs = arrays(jnp.float32)
    found = jax.jit(output_and_gradients(backend))(*inputs)
    want = expected(inputs)
    for x, name in zip(found, ("out", "q", "k", "v"), strict=True):
        assert x.dtype == jnp.float32
        assert np.max(np.abs(np.asarray(x, np.float64) - want[name])) <= 1e-5 * np.max(np.abs(want[name])), (
            name
        )


@pytest.mark.parametrize("backend", ["banded", "pallas"])
def test_shard_map_and_vmap_leave_the_values(backend: str) -> None:
    inputs = arrays(jnp.float32)
    run = output_and_gradients(backend, tail_steps=1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = jax.sharding.PartitionSpec("data")
    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(*inputs)
    mapped = jax.jit(jax.vmap(run))(*inputs)
    want = expected(inputs, tail_steps=1)
    for x, y, name in zip(sharded, mapped, ("out", "q", "k", "v"), strict=True):
        size = np.max(np.abs(want[name]))
        assert np.max(np.abs(np.asarray(x) - want[name])) <= 1e-5 * size, name
        assert np.max(np.abs(np.asarray(y) - want[name])) <= 1e-5 * size, name


def test_replicated_dustbin_in_shard_map_sums_its_gradient() -> None:
    q, k, v, bar = arrays(jnp.float32)
    tokens = Dustbin(q[0, :, 0], k[0, :, 1], v[0, :, 2])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    spec, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def loss(tokens: Any, q: Any, k: Any, v: Any, bar: Any) -> Any:
        out = sinkhorn_attention(
            q, k, v, bandwidth=W, base_steps=2, tail_steps=1, dustbin=tokens, backend="banded"
        )
        return jnp.sum(out * bar)

    def gradient(*args: Any) -> Any:
        return jax.grad(loss)(*args)

    specs = (whole, spec, spec, spec, spec)
    sharded = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=whole))(
        tokens, q, k, v, bar
    )
    plain = jax.jit(gradient)(tokens, q, k, v, bar)
    for x, y in zip(jax.tree.leaves(sharded), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """All equations of a jaxpr and of those inside it, with how often each runs; kernels stay closed."""
    for equation in jaxpr.eqns:
        yield equation, times
        if equation.primitive.name == "pallas_call":
            continue
        inner = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    yield from equations(part, inner)


def sweeps(function: Any, *args: Any) -> int:
    """Kernel launches of a function on the pallas backend."""
    found = equations(jax.make_jaxpr(function)(*args).jaxpr)
    return sum(times for equation, times in found if equation.primitive.name == "pallas_call")


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_sweep_counts_in_the_jaxpr(steps: int) -> None:
    inputs = arrays(jnp.float32)
    options = {"bandwidth": W, "base_steps": 7, "tail_steps": steps, "backend": "pallas"}
    call = lambda q, k, v: sinkhorn_attention(q, k, v, **options)  # noqa: E731
    forward = sweeps(call, *inputs[:3])
    assert forward == 2 * 7 + 2 * steps + 1
    with_gradient = sweeps(lambda *x: jax.vjp(call, *x[:3])[1](x[3]), *inputs)
    assert with_gradient - forward == 2 + max(2 * steps - 1, 0)  # two for R = 0, five for R = 2
    adjoint = sweeps(lambda *x: tail_adjoint(*x, **options), *inputs)
    assert adjoint - forward == 2 + 2 * steps  # with the cotangent that the base drops: six for R = 2


@pytest.mark.parametrize("backend", ["banded", "pallas"])
def test_nothing_of_size_length_times_band_leaves_a_kernel(backend: str) -> None:
    length, width = 4096, 64
    x = jax.ShapeDtypeStruct((1, 1, length, 16), jnp.float32)
    jaxpr = jax.make_jaxpr(output_and_gradients(backend, bandwidth=width))(x, x, x, x)
    largest = max(
        int(np.prod(out.aval.shape)) for equation, _ in equations(jaxpr.jaxpr) for out in equation.outvars
    )
    assert largest < length * width / 2


def test_memory_grows_linearly() -> None:
    def temporary(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, 1, length, 16), jnp.float32)
        program = (
            jax.jit(output_and_gradients("banded", tail_steps=1, bandwidth=32)).lower(x, x, x, x).compile()
        )
        return int(program.memory_analysis().temp_size_in_bytes)

    assert temporary(8192) <= 2.3 * temporary(4096)


def test_values_on_padding_do_not_matter() -> None:
    q, k, v, bar = arrays(jnp.float32)
    ids = jnp.asarray(np.where(np.arange(L) < 17, 0, -1))
    run = jax.jit(output_and_gradients("banded", segment_ids=ids, tail_steps=1))
    clean = run(q, k, v, bar)
    dirty = run(
        *(x.at[:, :, 17:].set(bad) for x, bad in zip((q, k, v), (1e9, jnp.nan, jnp.inf), strict=True)), bar
    )
    for x, y in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(x, y)
        assert not np.any(np.asarray(y)[:, :, 17:])


def test_half_precision_computes_in_float32() -> None:
    q, k, v, _ = arrays(jnp.bfloat16)
    options = {"bandwidth": W, "base_steps": 2, "tail_steps": 1, "backend": "reference"}
    half = sinkhorn_attention(q, k, v, **options)
    full = sinkhorn_attention(*(x.astype(jnp.float32) for x in (q, k, v)), **options)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, full.astype(jnp.bfloat16))


def test_importing_the_package_leaves_jax_alone_and_a_missing_jax_names_the_extra() -> None:
    code = (
        "import sys, ot_newton.attention as at\n"
        "assert 'jax' not in sys.modules\n"
        "sys.modules['jax'] = None\n"
        "try:\n    at.sinkhorn_attention\n"
        "except ImportError as error:\n    assert 'pip install ot-newton[jax]' in str(error), error\n"
        "else:\n    raise AssertionError('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def x(*shape: int) -> Any:
    return jnp.ones(shape)


BAD = [
    ((x(1, 5, 4), x(1, 5, 4), x(1, 6, 4)), {}, ValueError, "k and v equal lengths"),
    ((x(1, 5, 4), x(2, 5, 4), x(2, 5, 4)), {}, ValueError, "equal leading axes"),
    ((x(5, 4), x(5, 4), x(5, 4)), {}, ValueError, r"q must have shape \(..., heads, L, d\)"),
    ((x(1, 5, 4).astype(int),) * 3, {}, TypeError, "q must be an array of floats"),
    ((x(1, 5, 4),) * 3, {"bandwidth": -1}, ValueError, "bandwidth must be at least 0"),
    ((x(1, 5, 4),) * 3, {"tail_steps": 1.5}, TypeError, "tail_steps must be an integer"),
    ((x(1, 5, 4),) * 3, {"tail_steps": 0, "base_steps": 0}, ValueError, "must not both be 0"),
    ((x(1, 5, 4),) * 3, {"backend": "cuda"}, ValueError, "backend must be one of"),
    ((x(1, 5, 4),) * 3, {"a": x(4)}, ValueError, r"a must have shape \(5,\)"),
    ((x(1, 5, 4),) * 3, {"a": -x(5)}, ValueError, "a must be finite, not negative"),
    ((x(1, 5, 4),) * 3, {"segment_ids": x(5)}, TypeError, "segment_ids must be integers"),
    ((x(1, 5, 4),) * 3, {"dustbin": {"q": 1}}, TypeError, "dustbin must be a Dustbin"),
    (
        (x(1, 5, 4),) * 3,
        {"dustbin": Dustbin(x(1, 3), x(1, 4), x(1, 4))},
        ValueError,
        "dustbin.q must have shape",
    ),
    ((x(1, 5, 4),) * 3, {"interpret": "yes"}, TypeError, "interpret must be None, a bool or"),
    ((x(1, 5, 4),) * 3, {"scale": "big"}, TypeError, "scale must be a real number"),
    (
        (x(1, 5, 4), x(1, 7, 4), x(1, 7, 4)),
        {},
        ValueError,
        "as many active queries as keys.*capacity='lengths'",
    ),
]


@pytest.mark.parametrize(("args", "options", "error", "message"), BAD)
def test_bad_input_is_one_error(args: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sinkhorn_attention(*args, **{"bandwidth": 2, **options})
