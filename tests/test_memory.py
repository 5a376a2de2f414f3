"""Memory: resident set of one streamed product, no (n, m) array anywhere, what a dropped result leaves."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ot_newton as otn
from tests.generators import seeded
from tests.helpers import problem_of

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys, warnings
import torch
import ot_newton as otn

warnings.simplefilter("ignore")
torch.set_num_threads(2)
n = int(sys.argv[1])
generator = torch.Generator().manual_seed(0)
x, y, v = (torch.rand(n, 3, generator=generator) for _ in range(3))
result = otn.sinkhorn(otn.OTProblem(x, y, eps=0.1), max_iter=5, tol=0, backend=sys.argv[2])
product = result.hessian("x", max_cg=3) @ v
assert torch.isfinite(product).all()
with open("/proc/self/status") as lines:
    print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024)
"""


def peak(n: int, backend: str) -> int:
    """Peak resident bytes of a fresh process: 5 Sinkhorn iterations and one product of 3 CG steps."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(n), backend],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def test_resident_set_is_linear() -> None:
    """n = m = 30,000 against 3,000, d = 3, float32: at most 50 (difference of n+m) d 8 bytes."""
    large, small = 30_000, 3_000
    assert peak(large, "cpu") - peak(small, "cpu") <= 50 * 2 * (large - small) * 3 * 8


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any tensor an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.numel())
        return out


@pytest.mark.filterwarnings("ignore::ot_newton.errors.ConvergenceWarning")
@pytest.mark.parametrize("backend", ["torch_tiles", "cpu"])
def test_no_array_of_all_pairs(backend: str) -> None:
    """Every public quantity of a 3000 x 2500 problem stays far below n m elements."""
    n, m, d = 3000, 2500, 2
    x, y = torch.rand(n, d), torch.rand(m, d)
    with LargestTensor() as mode:
        result = otn.sinkhorn(otn.OTProblem(x, y, eps=0.5), max_iter=3, tol=0, backend=backend)
        for wrt in ("x", "y", "a", "b"):
            result.gradient(wrt)
        assert torch.isfinite(result.value + result.cost + result.gap)
        for wrt, size in (("x", n), ("y", m), ("xy", n + m)):
            result.hessian(wrt, max_cg=2) @ torch.rand(size * d, 2)
        result.schur() @ torch.rand(m)
        result.plan @ torch.rand(m, 3)
        result.plan.T @ torch.rand(n)
    assert mode.elements < n * m // 4, f"a tensor of {mode.elements} elements; n m = {n * m}"


def test_the_recorder_sees_a_dense_plan() -> None:
    """The dispatch mode does catch what it is for."""
    x, y = torch.rand(300, 2), torch.rand(200, 2)
    with LargestTensor() as mode:
        otn.sinkhorn(otn.OTProblem(x, y, eps=0.5), max_iter=2, tol=0, backend="dense")
    assert mode.elements >= 300 * 200


@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_a_dropped_result_leaves_nothing_to_the_garbage_collector(backend: str) -> None:
    """Plans and what products made of them go when the last name goes, not at some later collection."""
    case = seeded(150, 140, 2, 0.05)
    gc.collect()
    gc.disable()
    try:
        result = otn.sinkhorn(problem_of(case), method="newton", backend=backend)
        h = result.hessian("xy")
        h @ torch.ones(h.shape[0], dtype=torch.float64)
        result.schur("x", normalized=True) @ torch.ones(150, dtype=torch.float64)
        result.gradient("y")
        plan = result.linearized
        held = [weakref.ref(o) for o in (plan, plan.swap, plan.system(), result.bound, result)]
        del result, h, plan
        assert [ref() for ref in held] == [None] * 5
    finally:
        gc.enable()


def test_a_swap_outlives_the_plan_it_came_from() -> None:
    case = seeded(12, 9, 2, 0.3)
    schur = otn.sinkhorn(problem_of(case), tol=1e-12).schur("x")
    other = otn.sinkhorn(problem_of(case), tol=1e-12)
    torch.testing.assert_close(schur.to_dense(), other.schur("x").to_dense(), rtol=1e-12, atol=1e-15)
