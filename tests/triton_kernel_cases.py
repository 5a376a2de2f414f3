"""Interpreted kernels against float64 truth (O10, O16) and the contract; run by `test_triton_interpreted`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from ot_newton.backends.triton_kernels import launch
from ot_newton.backends.triton_kernels.launch import TritonBackend
from ot_newton.backends.triton_kernels.loads import count_traffic
from ot_newton.backends.triton_kernels.packing import HALF
from ot_newton.backends.triton_kernels.tile import row_index
from ot_newton.protocols import PassCounter
from tests import bound as bounds
from tests.bound import Bound, draw, wide
from tests.conformance import BACKEND_CHECKS
from tests.conformance_backend import LN2, _flip, _true_lse
from tests.triton_interpreter import patch_once, poisoned

patch_once()

DIMS = (1, 3, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 128, 700, 1025)
SHAPES = {
    torch.float32: [(1, 1, 1), (1, 17, 3), (17, 129, 65), (129, 127, 1), (15, 17, 2), (127, 15, 16)],
    torch.float64: [(1, 1, 1), (1, 17, 3), (15, 17, 2), (129, 33, 3), (17, 15, 16)],
}


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    assert launch.INTERPRETED
    with poisoned():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("check", BACKEND_CHECKS)
def test_conformance(check: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SHAPES", SHAPES[dtype])
    BACKEND_CHECKS[check](TritonBackend(), dtype)


def _close(found: torch.Tensor, expected: np.ndarray, envelope: np.ndarray, rtol: float) -> None:
    error = np.abs(wide(found) - expected) / np.maximum(envelope, 1e-300)
    assert not np.isnan(error).any()
    assert float(error.max()) <= rtol, f"relative error {float(error.max()):.2e}"


def _moderate(d: int) -> Bound:
    """Clouds of a size that does not grow with d: exponents of up to about 30 bits round below 1e-5."""
    bound = draw(TritonBackend(), torch.float32, (17, 67, d), batch=2, zeros=True, seed=d)
    scale = (16 / max(16, d)) ** 0.25
    q, k, u = bound.q * scale, bound.k * scale, bound.u * scale**2
    dots = wide(q) @ wide(k).swapaxes(1, 2)
    w = torch.tensor(-_true_lse(dots, u, bound.b), dtype=torch.float32)
    return replace(bound, q=q, k=k, u=u, w=w)


@pytest.mark.parametrize("d", DIMS)
def test_every_kernel_to_1e_5(d: int) -> None:
    bound = _moderate(d)
    tiles, plan, dense = bound.tiles(), bound.plan(), bound.dense
    for axis in (0, 1):
        bias, weight, stabilizer, dots = _flip(bound, axis)
        true = _true_lse(dots, bias, weight)
        cold, none = tiles.lse(bias, weight, axis)
        warm, sums = tiles.lse(bias, weight, axis, stabilizer)
        assert none is None
        for lse in (cold, warm):
            assert float(np.abs(wide(lse) - true).max()) * LN2 <= 1e-5
        if sums is not None:
            expected = np.exp2(true + wide(stabilizer))
            _close(sums, expected, expected, 1e-5)
        matrix = dense if axis == 1 else dense.swapaxes(1, 2)
        for width in (1, 2, 3, 5, 33, 70):
            v = torch.randn(2, matrix.shape[2], width)
            _close(plan.apply(v, axis), matrix @ wide(v), matrix @ np.abs(wide(v)), 1e-5)
        _check_hadamard(plan, dense, matrix, axis)


def _check_hadamard(plan, dense: np.ndarray, matrix: np.ndarray, axis: int) -> None:
    (n, m), length = dense.shape[1:], matrix.shape[2]
    for rank, width, beside in ((4, 3, 2), (19, 20, 17), (1, 70, 1)):
        left, right = torch.randn(2, 1, n, rank), torch.randn(2, 1, m, rank)
        v, t = torch.randn(2, 1, length, width), torch.randn(2, length, beside)
        factor, size = (
            np.einsum("bkip,bkjp->bij", *pair)
            for pair in ((wide(left), wide(right)), (np.abs(wide(left)), np.abs(wide(right))))
        )
        if axis == 0:
            factor, size = factor.swapaxes(1, 2), size.swapaxes(1, 2)
        found, moved = plan.apply_hadamard(left, right, v, axis, t)
        _close(found[:, 0], (matrix * factor) @ wide(v[:, 0]), (matrix * size) @ np.abs(wide(v[:, 0])), 1e-5)
        _close(moved, matrix @ wide(t), matrix @ np.abs(wide(t)), 1e-5)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("d", [3, 17, 130])
def test_half_inputs_are_rounded_once(precision: str, d: int) -> None:
    """Half inputs, float32 sums: the exact answer of the rounded clouds (up to d = 8: of the given ones)."""
    bound = draw(TritonBackend(), torch.float32, (17, 33, d))
    half = HALF[precision] if d > 8 else torch.float32
    dots = wide(bound.q.to(half)) @ wide(bound.k.to(half)).swapaxes(1, 2)
    found, _ = TritonBackend(precision).bind(bound.q, bound.k, PassCounter()).lse(bound.u, bound.b, 1)
    error = np.abs(wide(found) - _true_lse(dots, bound.u, bound.b)).max()
    # numpy multiplies bfloat16 as float32 in the interpreter; tensor cores do not round products either
    assert float(error) <= 2e-5 * (1 + np.abs(dots).max())


def test_plan_products_never_use_tf32() -> None:
    assert TritonBackend("tf32").plan_precision == "ieee"
    assert TritonBackend("fp16").plan_precision == "ieee"
    assert TritonBackend("tf32x3").plan_precision == "tf32x3"
    bound = draw(TritonBackend("fp16"), torch.float32, (17, 33, 17))
    plan = bound.plan()
    assert plan.operands.q.dtype == torch.float32
    v = torch.randn(1, 33, 2)
    _close(plan.apply(v, 1), bound.dense @ wide(v), bound.dense @ np.abs(wide(v)), 1e-5)


def test_both_axes_see_the_same_exponents() -> None:
    """Entry by entry, P^T is the transpose of P to the last bit."""
    for d in (3, 16, 65):
        bound = draw(TritonBackend(), torch.float32, (65, 67, d), zeros=True)
        plan = bound.plan()
        rows = plan.apply(torch.eye(67)[None], 1)
        columns = plan.apply(torch.eye(65)[None], 0)
        ratio = (rows - columns.mT).abs() / rows.abs().clamp_min(1e-30)
        assert float(ratio.max()) <= 2 * torch.finfo(torch.float32).eps  # the weights' two products


def test_guard_works_on_the_device() -> None:
    """Without looking at the sums: rows of a tripped block are NaN, the others single-pass, all lse right."""
    backend = TritonBackend(host_guard=False)
    bound = draw(backend, torch.float32, (129, 33, 3), batch=2)
    counter = PassCounter()
    tiles = bound.tiles(counter)
    true = _true_lse(_flip(bound, 1)[3], bound.u, bound.b)
    stabilizer = torch.tensor(-true, dtype=torch.float32)
    stabilizer[1, 70] += 100.0
    lse, sums = tiles.lse(bound.u, bound.b, 1, stabilizer)
    assert float(np.abs(wide(lse) - true).max()) <= 1e-4
    tripped = torch.isnan(sums)
    block = launch.default_config(launch.KernelKey("lse", 3, True), launch.INTERPRETER).block_m
    assert block == 64
    assert bool(tripped[1, 64:128].all())
    assert int(tripped.sum()) == 64
    assert counter.passes == 1
    backend.settle()
    assert counter.passes == 2, "the second sweep is counted when a plan or a caller settles"
    backend.settle()
    assert counter.passes == 2


class _NoSync(TorchDispatchMode):
    """Fails on anything that would make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
        assert func.overloadpacket.__name__ not in forbidden, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("update", ["alternating", "symmetric"])
@pytest.mark.parametrize("rho", [None, 0.7])
def test_no_synchronization_inside_an_iteration(update: str, rho: float | None) -> None:
    import ot_newton as otn
    from ot_newton.fixed_point import SinkhornOptions, _Run
    from ot_newton.stage import Stage

    problem = otn.OTProblem(torch.randn(2, 9, 3), torch.randn(2, 11, 3), eps=1.0, rho_x=rho)
    options = SinkhornOptions(tol=1e-3, max_iter=50, update=update, check_every=10)
    run = _Run(problem, TritonBackend(host_guard=False), options, PassCounter())
    stage = Stage.bind(problem, run.backend, run.counter, 1.0)
    run.u = torch.zeros(2, 11)
    assert run.iterate(stage, 0, judge=True)
    with _NoSync():
        for iteration in range(1, 10):
            assert run.iterate(stage, iteration, judge=True)
    with pytest.raises(AssertionError, match="waits"), _NoSync():
        bool(run.active.any())


@triton.jit
def _address_kernel(out_ptr, lane, size, first, d, BLOCK: tl.constexpr):
    row = row_index(lane.to(tl.int64), size, first) * d
    tl.store(out_ptr + tl.arange(0, BLOCK), row + tl.arange(0, BLOCK))


def test_addresses_are_64_bit() -> None:
    """Index 319 * 7,864,320 = 2,508,718,080 (O16), and n * d beyond 2^31."""
    out = torch.zeros(16, dtype=torch.int64)
    for lane, size, first, d in ((319, 7_864_320, 0, 1), (0, 40_000_000, 39_999_990, 700), (3, 2**30, 5, 8)):
        _address_kernel[(1,)](out, lane, size, first, d, BLOCK=16)
        assert torch.equal(out, (lane * size + first) * d + torch.arange(16))


@pytest.mark.parametrize("d", [3, 64, 130])
def test_k_is_loaded_once_per_row_block_and_pass(d: int) -> None:
    bound = draw(TritonBackend(), torch.float32, (130, 70, d))
    tiles = bound.tiles()
    rows, stored = 3, tiles.operands.bucket.stored
    once = rows * 70 * stored * 4
    with count_traffic() as traffic:
        tiles.lse(bound.u, bound.b, 1, bound.w)
    # d in one block keeps q in registers; more coordinates reread it for each of the two column blocks
    again = {3: 1, 64: 1, 130: 2}[d]
    query = 130 * stored * 4 * (again if d != 3 else 2)
    assert traffic.launches == {"lse": 1}
    assert traffic.loaded["lse"] == once + query + 130 * 4 + rows * 70 * 2 * 4
    assert traffic.stored["lse"] == 2 * 130 * 4
    with count_traffic() as traffic:
        bound.plan().apply(torch.randn(1, 70, 1), 1)
    assert traffic.loaded["transport"] == once + query + 130 * 2 * 4 + rows * 70 * 3 * 4


def test_bad_arguments() -> None:
    q = torch.randn(1, 3, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="precision must be one of.*'fp8'"):
        TritonBackend("fp8")
    with pytest.raises(ValueError, match="plan_precision must be one of.*'bf16'"):
        TritonBackend(plan_precision="bf16")
    with pytest.raises(ValueError, match="precision must be 'ieee' for float64.*'tf32'"):
        TritonBackend("tf32").bind(q, q, PassCounter())
    assert TritonBackend("tf32").name == "triton:tf32"
    empty = draw(TritonBackend(), torch.float32, (3, 4, 2)).plan().apply(torch.zeros(1, 4, 0), 1)
    assert tuple(empty.shape) == (1, 3, 0)
