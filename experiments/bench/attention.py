"""Cost of the attention on the CPU: `python -m ot_newton.experiments.bench.attention`.

One head, d = 64, W = 64, T = 15, R = 2, float32, the `banded` backend, median of 5 calls after a warm-up
call; each timing is of a compiled program. Three questions: is the time per token flat in L; from which
length on is the band cheaper than the same attention on a dense matrix (`reference`) and than plain softmax
attention; what does the backward cost beside the forward. `banded` and `reference` are compared first.
Processor time stands beside the wall time, which other work on the machine stretches.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

WIDTH, DIM, REPEATS = 64, 64, 5
LENGTHS = (1024, 2048, 4096, 8192, 16384)
DENSE_LENGTHS = (256, 512, 1024, 2048, 4096)


def median_seconds(
    function: Callable[..., Any], *args: Any, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median time of a compiled function over `REPEATS` calls: wall time, or of another clock."""
    import jax

    jax.block_until_ready(function(*args))
    times = []
    for _ in range(REPEATS):
        begin = clock()
        jax.block_until_ready(function(*args))
        times.append(clock() - begin)
    return statistics.median(times)


def inputs(length: int) -> list[Any]:
    """q, k, v and an output cotangent of one head."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(1, length, DIM)), jnp.float32) for _ in range(4)]


def forward(backend: str) -> Callable[..., Any]:
    """The compiled forward on a backend."""
    import jax

    from ot_newton.attention import sinkhorn_attention

    return jax.jit(lambda q, k, v: sinkhorn_attention(q, k, v, bandwidth=WIDTH, backend=backend))  # type: ignore[no-any-return]


def forward_and_pullback() -> Callable[..., Any]:
    """The compiled forward, and the compiled pullback from its saved residuals."""
    import jax

    from ot_newton.attention import sinkhorn_attention

    def run(q: Any, k: Any, v: Any) -> Any:
        return jax.vjp(lambda *x: sinkhorn_attention(*x, bandwidth=WIDTH, backend="banded"), q, k, v)

    return jax.jit(run)  # type: ignore[no-any-return]


def softmax_attention(q: Any, k: Any, v: Any) -> Any:
    """Plain dense attention, for scale."""
    import jax

    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) * DIM**-0.5, axis=-1)
    return weights @ v


def rows() -> list[dict[str, float]]:
    """One row per length and question."""
    import jax
    import numpy as np

    banded, dense, plain = forward("banded"), forward("reference"), jax.jit(softmax_attention)
    q, k, v, bar = inputs(512)
    np.testing.assert_allclose(banded(q, k, v), dense(q, k, v), rtol=1e-4, atol=1e-5)
    out: list[dict[str, float]] = []
    for length in sorted({*LENGTHS, *DENSE_LENGTHS}):
        q, k, v, bar = inputs(length)
        row: dict[str, float] = {"L": length, "forward_s": median_seconds(banded, q, k, v)}
        row["us_per_token"] = 1e6 * row["forward_s"] / length
        cpu = median_seconds(banded, q, k, v, clock=time.process_time)
        row["cpu_us_per_token"] = 1e6 * cpu / length
        _, pull = forward_and_pullback()(q, k, v)
        apply = jax.jit(lambda pull, bar: pull(bar))
        row["backward/forward"] = median_seconds(apply, pull, bar) / row["forward_s"]
        row["cpu_backward/forward"] = median_seconds(apply, pull, bar, clock=time.process_time) / cpu
        if length in DENSE_LENGTHS:
            row["dense/banded"] = median_seconds(dense, q, k, v) / row["forward_s"]
            row["softmax/banded"] = median_seconds(plain, q, k, v) / row["forward_s"]
        out.append(row)
    return out


def main() -> int:
    """Print the rows and the three answers."""
    import jax

    write = sys.stdout.write
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib"))
    write(f"{versions}, {jax.devices()[0]}, float32, W={WIDTH}, d={DIM}\n")
    found = rows()
    for row in found:
        write("  ".join(f"{name}={value:.4g}" for name, value in row.items()) + "\n")
    for name in ("us_per_token", "cpu_us_per_token"):
        flat = [row[name] for row in found if row["L"] >= LENGTHS[0]]
        write(f"{name}, L = 1k to 16k: largest / smallest = {max(flat) / min(flat):.3f} (aim 1.2)\n")
    faster = [row["L"] for row in found if row.get("dense/banded", 0) > 1]
    write(f"banded beats dense from L = {min(faster, default=float('nan')):g}\n")
    for name in ("backward/forward", "cpu_backward/forward"):
        write(f"{name} at most {max(row[name] for row in found):.3f} (aim 0.5)\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
