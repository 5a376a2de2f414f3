"""The whole pipeline through interpreted kernels, NewtonCG included; run by `test_triton_interpreted`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ot_newton as otn
from tests.conformance import check_operator, check_scipy
from tests.generators import case_S, far_zero_atoms, pitchfork, pitchfork_exact
from tests.helpers import problem_of, rounded
from tests.tolerances import assert_close
from tests.triton_interpreter import patch_once

patch_once()


def _solve(case, dtype, **options):
    options.setdefault("backend", "triton")
    result = otn.sinkhorn(problem_of(case, dtype), **options)
    assert result.converged
    assert result.backend == options["backend"]
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "case",
    [case_S(4, 6, 2, 0.5), case_S(5, 4, 9, 8.0), case_S(4, 5, 2, 0.5).with_(rho_x=0.7), far_zero_atoms()],
    ids=["S(4,6,2)", "S(5,4,9)", "semi-unbalanced", "zero weights"],
)
def test_solution_gradient_hessian(case, dtype: torch.dtype) -> None:
    true = rounded(case, dtype).truth()
    result = _solve(case, dtype, tol=1e-11 if dtype == torch.float64 else None)
    floor = result.noise_floor + float(result.marginal_error)
    assert_close(result.value, true.value, "value", dtype, floor=floor)
    assert_close(result.gradient("x"), true.gradient("x"), "gradient", dtype, floor=floor)
    assert_close(result.plan.to_dense(), true.plan, "plan", dtype, floor=floor)
    h = result.hessian("x")
    dense = h @ torch.eye(h.shape[-1], dtype=dtype)
    assert_close(dense, true.hessian("x"), "hvp", dtype, floor=10 * floor)


def test_translation_law() -> None:
    """I1: H (1 (x) u) = 2 s r (x) u at any stop, to rounding, in float32."""
    result = otn.sinkhorn(
        problem_of(case_S(6, 5, 3, 0.3), torch.float32), backend="triton", max_iter=3, tol=0
    )
    u = torch.tensor([0.5, -1.0, 2.0])
    product = result.hessian("x") @ u.expand(6, 3)
    assert_close(product, 2 * result.plan.row_sums()[:, None] * u, "translation", torch.float32)


def test_operators_through_both_adapters() -> None:
    """P, P^T, Schur and Hessian of this backend, torch first, then scipy and linear_operator."""
    case = case_S(4, 5, 2, 0.6)
    result = _solve(case, torch.float64, tol=1e-12)
    reference = otn.sinkhorn(problem_of(case), backend="dense", tol=1e-12)
    for op, like in (
        (result.plan, reference.plan.to_dense()),
        (result.schur(), reference.schur() @ torch.eye(5, dtype=torch.float64)),
        (result.hessian("x"), reference.hessian("x") @ torch.eye(8, dtype=torch.float64)),
    ):
        check_operator(op, like.numpy(), rtol=1e-7, symmetric=op is not result.plan)
        check_scipy(op.to_scipy, like.numpy(), rtol=1e-7)
        linear = op.to_linear_operator()
        v = torch.randn(like.shape[1], 3, dtype=torch.float64)
        assert_close(linear @ v, like @ v, "hvp")
        u = torch.randn(like.shape[0], 1, dtype=torch.float64)
        assert_close(linear.mT @ u, like.T @ u, "hvp")


def test_batch_is_loop() -> None:
    x, y = torch.randn(3, 7, 2, dtype=torch.float64), torch.randn(3, 9, 2, dtype=torch.float64)
    together = otn.sinkhorn(otn.OTProblem(x, y, eps=0.7), backend="triton", tol=1e-10)
    for lane in range(3):
        alone = otn.sinkhorn(otn.OTProblem(x[lane], y[lane], eps=0.7), backend="triton", tol=1e-10)
        assert_close(together.value[lane], alone.value, "batch")
        assert_close(together.gradient("x")[lane], alone.gradient("x"), "gradient")


@pytest.mark.parametrize("precision", ["tf32x3", "tf32", "fp16", "bf16"])
def test_precision_is_in_the_result(precision: str) -> None:
    """A rounded forward solve still ends at a true fixed point of its own; its name is kept."""
    case = pitchfork(0.5, 1.0)
    result = _solve(case, torch.float32, backend=f"triton:{precision}", tol=1e-4)
    assert result.backend == f"triton:{precision}"
    assert abs(float(result.value) - pitchfork_exact(0.5, 1.0)["value"]) <= 1e-3


def test_newton_on_the_pitchfork() -> None:
    """NewtonCG streams every product through the kernels and ends at the minimum |u| of the pitchfork."""
    y = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return otn.ot_cost(x, y, eps=1.0, backend="triton", tol=1e-11)

    result = otn.NewtonCG(loss).minimize(torch.tensor([[-0.5], [0.9]], dtype=torch.float64))
    assert result.success, result.message
    low, high = (float(v) for v in result.x.flatten())
    exact = next(u for u in np.linspace(0.5, 1.0, 500001) if u >= np.tanh(2 * u))
    assert abs(low + exact) <= 1e-5
    assert abs(high - exact) <= 1e-5
