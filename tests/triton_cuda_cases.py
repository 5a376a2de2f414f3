"""Device checks of the compiled kernels: `pytest tests/triton_cuda_cases.py` on a machine with an NVIDIA GPU.

Not collected by default (its name is no test file's), since they need the device.
"""

from __future__ import annotations

import pytest
import torch

import ot_newton as otn
from ot_newton.backends.triton_kernels.launch import TritonBackend
from ot_newton.fixed_point import SinkhornOptions, _Run
from ot_newton.protocols import PassCounter
from ot_newton.stage import Stage
from tests.bound import draw, wide
from tests.conformance import BACKEND_CHECKS
from tests.conformance_backend import _assert_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("check", BACKEND_CHECKS)
def test_conformance(check: str, dtype: torch.dtype) -> None:
    BACKEND_CHECKS[check](TritonBackend(host_guard=True), dtype, "cuda")


@pytest.mark.parametrize("d", [3, 16, 17, 64, 65, 128, 700])
def test_tf32x3_rounds_like_float32(d: int) -> None:
    bound = draw(TritonBackend("tf32x3"), torch.float32, (129, 257, d), device="cuda")
    v = torch.randn(1, 257, 40, device="cuda")
    envelope = bound.dense @ abs(wide(v))
    _assert_product(bound, bound.plan().apply(v, 1), bound.dense @ wide(v), envelope, f"d {d}")


def test_no_synchronization_inside_an_iteration() -> None:
    problem = otn.OTProblem(torch.randn(900, 3, device="cuda"), torch.randn(1100, 3, device="cuda"), eps=0.3)
    options = SinkhornOptions(tol=1e-4, max_iter=50, check_every=10)
    run = _Run(problem, TritonBackend(), options, PassCounter())
    stage = Stage.bind(problem, run.backend, run.counter, 0.3)
    run.u = torch.zeros(1, 1100, device="cuda")
    assert run.iterate(stage, 0, judge=True)
    assert run.iterate(stage, 1, judge=True)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for iteration in range(2, 10):
            assert run.iterate(stage, iteration, judge=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_capture_in_a_graph() -> None:
    bound = draw(TritonBackend(), torch.float32, (500, 700, 3), device="cuda")
    tiles, plan = bound.tiles(), bound.plan()
    v = torch.randn(1, 700, 2, device="cuda")

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return tiles.lse(bound.u, bound.b, 1, bound.w)[0], plan.apply(v, 1)

    expected = both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for t in captured:
        t.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(one, two) for one, two in zip(captured, expected, strict=True))
