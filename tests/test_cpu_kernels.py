"""What is special to the `cpu` backend: exponential, guard per lane, bits that never change, memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from ot_newton.backends import cpu
from ot_newton.backends.cpu import CpuBackend, CpuTiles
from ot_newton.protocols import PassCounter

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
Problem = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def problem(lanes: int, n: int, m: int, d: int, dtype: torch.dtype, seed: int = 0) -> Problem:
    """q, k, w, u, a, b of a Gaussian kernel of moderate width; one zero weight on each side."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(lanes, size, d, generator=generator, dtype=torch.float64) / d**0.5 for size in (n, m))
    a, b = (torch.rand(lanes, size, generator=generator, dtype=torch.float64) + 0.1 for size in (n, m))
    a[:, n // 2], b[:, 0] = 0.0, 0.0
    w, u = -(q**2).sum(-1), -(k**2).sum(-1)
    parts = (q, 2 * k, w, u, a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True))
    return tuple(t.to(dtype) for t in parts)  # type: ignore[return-value]


def bind(q: Tensor, k: Tensor) -> CpuTiles:
    return CpuBackend().bind(q, k, PassCounter())


def everything(p: Problem) -> list[Tensor]:
    """Every kind of product of a problem, both axes."""
    q, k, w, u, a, b = p
    tiles = bind(q, k)
    plan = tiles.plan(w, u, a, b)
    left, right = (torch.stack([t, t * t, t + 1], dim=1).repeat(1, 1, 1, 2) for t in (q, k))
    out: list[Tensor] = []
    for axis, bias, weight, other, v in ((1, u, b, w, right), (0, w, a, u, left)):
        lse, rowsum = tiles.lse(bias, weight, axis, other)
        assert rowsum is not None
        out += [lse, rowsum, tiles.lse(bias, weight, axis)[0]]
        out += [plan.apply(v[:, 0, :, :1], axis), plan.apply(v[:, 0], axis)]
        hadamard, moved = plan.apply_hadamard(left, right, v[..., :2], axis, v[:, 1])
        assert moved is not None
        out += [hadamard, moved, plan.apply_hadamard(left, right[:, :1], v[:, :1, :, :1], axis)[0]]
    return out


def same_bits(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right)


@pytest.fixture(scope="module")
def exp2() -> Callable[[np.ndarray], np.ndarray]:
    """The kernels' exponential, elementwise."""
    from numba import njit

    from ot_newton.backends.cpu_strips import exp2_strip

    @njit
    def run(strip):  # type: ignore[no-untyped-def]
        exp2_strip(strip, strip.shape[1] // 32)

    def elementwise(x: np.ndarray) -> np.ndarray:
        strip = np.zeros((4, -(-x.size // 128) * 32), x.dtype)
        strip.reshape(-1)[: x.size] = x
        run(strip)
        return strip.reshape(-1)[: x.size]

    return elementwise


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, with parallel launches even for small work."""
    monkeypatch.setattr(cpu, "SERIAL_WORK", 0)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "limit"),
    [(np.float32, -100.0, 119.9, 2.2e-7), (np.float64, -1000.0, 999.9, 3.4e-16)],
    ids=["float32", "float64"],
)
def test_exp2_accuracy(exp2: Callable, dtype: type, low: float, high: float, limit: float) -> None:
    rng = np.random.default_rng(0)
    ends = np.concatenate([np.arange(-40, 40) / 2, np.arange(-40, 40) / 2 + 1e-6, [low, high]])
    x = np.concatenate([rng.uniform(low, high, 40_000), rng.uniform(-1.5, 1.5, 40_000), ends]).astype(dtype)
    true = np.exp2(x.astype(np.longdouble))
    error = np.abs(exp2(x).astype(np.longdouble) / true - 1)
    assert float(error.max()) <= limit
    whole = np.arange(int(low), int(high)).astype(dtype)
    assert np.array_equal(exp2(whole), np.exp2(whole)), "integers are exact"


@pytest.mark.parametrize(
    ("dtype", "floor"), [(np.float32, -100.0), (np.float64, -1000.0)], ids=["float32", "float64"]
)
def test_exp2_ends(exp2: Callable, dtype: type, floor: float) -> None:
    below = np.array([np.nextafter(dtype(floor), dtype(-np.inf)), -1e4, -1e30, -np.inf], dtype)
    assert np.array_equal(exp2(below), np.zeros(4, dtype)), "exactly zero below the floor"
    above = exp2(np.array([-1.3 * floor, 1e4, 1e30, np.inf], dtype))
    assert np.isfinite(above).all() and (above > 2.0 ** (-0.9 * floor)).all(), "finite and huge at the top"
    assert np.isnan(exp2(np.array([np.nan, -np.nan], dtype))).all(), "NaN is not swallowed"


@DTYPES
def test_nan_reaches_the_result(dtype: torch.dtype) -> None:
    for d in (2, 9):
        q, k, w, u, a, b = problem(1, 20, 40, d, dtype)
        tiles = bind(q, k)
        broken = u.clone()
        broken[0, 7] = float("nan")
        lse, rowsum = tiles.lse(broken, b, 1, w)
        assert rowsum is None and bool(lse.isnan().all())
        assert bool(tiles.plan(w, broken, a, b).apply(b[..., None], 1)[a > 0].isnan().all())
        broken[0, 7], broken[0, 0] = u[0, 7], float("nan")  # an atom of zero weight counts for nothing
        assert torch.equal(tiles.lse(broken, b, 1)[0], tiles.lse(u, b, 1)[0])


@DTYPES
def test_guard_is_per_lane(dtype: torch.dtype) -> None:
    q, k, w, u, _, b = problem(3, 33, 70, 2, dtype)
    tiles = bind(q, k)
    good, rowsum = tiles.lse(u, b, 1, w)
    assert rowsum is not None and tiles.counter.passes == 1
    bad = w.clone()
    bad[1, 32] += 200.0
    mixed, none = tiles.lse(u, b, 1, bad)
    assert none is None and tiles.counter.passes == 4
    stable, _ = tiles.lse(u, b, 1)
    assert tiles.counter.passes == 6
    assert torch.equal(mixed[[0, 2]], good[[0, 2]])
    assert torch.equal(mixed[1], stable[1])
    torch.testing.assert_close(mixed[1], good[1], rtol=1e-5, atol=1e-5)


@DTYPES
def test_no_mass_gives_minus_infinity(dtype: torch.dtype) -> None:
    q, k, w, u, _, b = problem(2, 9, 40, 5, dtype)
    b[1] = 0.0
    lse, rowsum = bind(q, k).lse(u, b, 1, w)
    assert rowsum is None
    assert bool(lse[0].isfinite().all()) and bool((lse[1] == float("-inf")).all())


@pytest.mark.parametrize(("dtype", "d"), [(torch.float32, 2), (torch.float64, 9)], ids=["d2", "d9"])
def test_bits_do_not_depend_on_threads(threads: Callable[[int], None], dtype: torch.dtype, d: int) -> None:
    p = problem(2, 150, 530, d, dtype)
    threads(1)
    serial = everything(p)
    same_bits(serial, everything(p))
    threads(2)
    same_bits(serial, everything(p))


@DTYPES
def test_lane_alone_equals_lane_in_batch(dtype: torch.dtype) -> None:
    p = problem(3, 65, 97, 2, dtype)
    together = everything(p)
    for lane in range(3):
        alone = everything(tuple(t[lane : lane + 1] for t in p))  # type: ignore[arg-type]
        same_bits([t[lane : lane + 1] for t in together], alone)


@DTYPES
@pytest.mark.parametrize("d", [1, 2, 4, 5, 21])
def test_both_axes_see_the_same_kernel(dtype: torch.dtype, d: int) -> None:
    q, k, w, u, _, _ = problem(1, 34, 45, d, dtype)
    ones = [torch.ones(1, size, dtype=dtype) for size in (34, 45)]
    plan = bind(q, k).plan(w, u, *ones)
    rows = plan.apply(torch.eye(45, dtype=dtype)[None], 1)
    cols = plan.apply(torch.eye(34, dtype=dtype)[None], 0)
    assert torch.equal(rows, cols.mT)
    one = torch.cat([plan.apply(torch.eye(45, dtype=dtype)[None, :, j : j + 1], 1) for j in range(45)], dim=2)
    assert torch.equal(one, rows), "the fused and the tiled routine form the same exponentials"
    torch.testing.assert_close(plan.to_dense(), rows)


@DTYPES
def test_strided_input(dtype: torch.dtype) -> None:
    p = problem(2, 40, 50, 6, dtype)
    strided = []
    for t in p:
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"), dtype=dtype)
        wide[..., ::2] = t
        strided.append(wide[..., ::2])
    assert not any(t.is_contiguous() for t in strided)
    same_bits(everything(p), everything(tuple(strided)))  # type: ignore[arg-type]
    swapped = tuple(t.transpose(0, -1).contiguous().transpose(0, -1) for t in p)
    same_bits(everything(p), everything(swapped))  # type: ignore[arg-type]


MEMORY = """
import resource, sys
import torch
from ot_newton.backends.cpu import CpuBackend
from ot_newton.protocols import PassCounter
assert "numba" not in sys.modules, "numba must wait for the first use"

def run(n):
    torch.manual_seed(0)
    x, y = torch.randn(1, n, 2), torch.randn(1, n, 2)
    w, u, a = -(x**2).sum(-1), -(y**2).sum(-1), torch.full((1, n), 1.0 / n)
    tiles = CpuBackend().bind(x, 2 * y, PassCounter())
    tiles.lse(u, a, 1, w)
    tiles.lse(u, a, 0)
    plan = tiles.plan(w, u, a, a)
    plan.apply(y, 1)
    plan.apply_hadamard(x[:, None], y[:, None], x[:, None], 0)

run(300)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(9000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_and_lazy_import() -> None:
    """Growth of the resident set (kB) at n = m = 9000, where one (n, m) array takes 324 MB."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 40_000
