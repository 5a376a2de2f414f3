"""The linear_operator adapter: signs, solves, derivatives, round trips, and what its copies share."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from linear_operator.operators import DiagLinearOperator
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import ot_newton as otn
from ot_newton.errors import LinearSolveError
from ot_newton.operators import linop_base
from ot_newton.operators.linop_adapter import wrap
from tests.generators import Case, case_S, pitchfork
from tests.helpers import BACKENDS, solve
from tests.tolerances import assert_close, assert_printed

KINDS = ("plan", "plan.T", "schur", "schur x", "hessian x", "hessian y", "hessian xy")
S753 = case_S(7, 5, 3, 1.0)
DTYPES = (torch.float64, torch.float32)


def operator_of(result: Any, kind: str) -> Any:
    name, _, wrt = kind.partition(" ")
    if name.startswith("plan"):
        return result.plan.T if name == "plan.T" else result.plan
    return result.schur(wrt or "y") if name == "schur" else result.hessian(wrt)


def hessian(case: Case, wrt: str = "x", **options: Any) -> Any:
    return solve(case, **options).hessian(wrt).to_linear_operator()


def batch(dtype: torch.dtype = torch.float64, backend: str = "dense") -> Any:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(3, n, 2, generator=generator, dtype=torch.float64).to(dtype) for n in (4, 5))
    return otn.sinkhorn(otn.OTProblem(x, y, eps=0.7), backend=backend)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# N45, N47: types and round trips ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["dense", "torch_tiles"])
def test_N45_products_stay_on_device_and_in_dtype(
    dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = solve(S753, dtype, backend=backend)
    operators = [operator_of(result, kind) for kind in KINDS]
    wrapped = [op.to_linear_operator() for op in operators]

    def leak(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a copy to the host")

    for name in ("cpu", "numpy", "tolist", "__array__"):
        monkeypatch.setattr(Tensor, name, leak)
    for op in wrapped:
        out = op @ torch.ones(op.shape[-1], 2, dtype=dtype)
        assert op.dtype == out.dtype == dtype
        assert op.device == out.device == result.problem.device
        assert not out.requires_grad
        with pytest.raises(TypeError, match="dtype"):
            op @ torch.ones(op.shape[-1], dtype=torch.float64 if dtype == torch.float32 else torch.float32)
    monkeypatch.undo()
    for op in operators:
        scipy_op = op.to_scipy()
        for given in (torch.float64, torch.float32, torch.int64):
            assert str((scipy_op @ torch.ones(op.shape[-1], dtype=given).numpy()).dtype) in str(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_N47_round_trips(kind: str, backend: str) -> None:
    op = operator_of(solve(S753, backend=backend), kind)
    dense, wrapped = op.to_dense(), op.to_linear_operator()
    wrapped.to_dense(), wrapped @ torch.ones(op.shape[-1], dtype=op.dtype)  # caches filled
    copies = {
        "pickle": pickle.loads(pickle.dumps(wrapped)),
        "deepcopy": copy.deepcopy(wrapped),
        "copy": copy.copy(wrapped),
        "clone": wrapped.clone(),
        "detach": wrapped.detach(),
        "to string": wrapped.to("cpu"),
        "to device": wrapped.to(device=torch.device("cpu"), dtype=torch.float64),
        "to tensor": wrapped.to(torch.zeros(1, dtype=torch.float64)),
        "cpu": wrapped.cpu(),
        "double": wrapped.double(),
        "transposed twice": wrapped.mT.mT,
        "scaled": wrapped * 2 / 2,
    }
    v = torch.randn(op.shape[-1], 3, dtype=op.dtype)
    for name, made in copies.items():
        assert type(made) is type(wrapped), name
        assert made.dtype == torch.float64, name
        assert_close(made.to_dense(), dense, "hvp")
        assert_close(made @ v, dense @ v, "hvp")
    assert wrapped.float().dtype == torch.float32
    assert_close(wrapped.float().to_dense(), dense, "hvp", torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_N47_batches_and_slices(kind: str) -> None:
    op = operator_of(batch(), kind)
    dense, wrapped = op.to_dense(), op.to_linear_operator()
    assert wrapped.shape == dense.shape
    assert_close(wrapped.mT.to_dense(), dense.mT, "hvp")
    for index in (1, slice(0, 2), torch.tensor([2, 0, 0]), (slice(None), slice(1, 4)), (2, slice(None), 1)):
        found = wrapped[index]
        assert_close(found if isinstance(found, Tensor) else found.to_dense(), dense[index], "hvp")
    assert_close(wrapped[0, [0, 3, 3], [2, 1, 1]], dense[0, [0, 3, 3], [2, 1, 1]], "hvp")
    twice = dense.expand(2, *dense.shape)
    assert_close(wrapped.unsqueeze(0).expand(twice.shape).to_dense(), twice, "hvp")
    assert_close(wrapped.repeat(2, 1, 1).to_dense(), dense.repeat(2, 1, 1), "hvp")
    for lead in ((), (1,), (3,), (4, 3), (4, 1)):
        v = torch.randn(*lead, dense.shape[-1], 2, dtype=torch.float64)
        assert_close(wrapped @ v, dense @ v, "hvp")


@pytest.mark.parametrize("backend", BACKENDS)
def test_double_makes_the_caches_anew_from_the_same_biases(backend: str) -> None:
    """I1 `H (1 (x) u) = 2 s r (x) u` holds to float64 rounding of the float32 plan."""
    result = solve(S753, torch.float32, backend=backend)
    h = result.hessian("x").to_linear_operator().double()
    r = result.plan.to_linear_operator().double() @ torch.ones(5, dtype=torch.float64)
    u = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    expected = 2 * torch.outer(r, u).flatten()
    assert_close(h @ u.repeat(7), expected, "translation")
    assert_close(r, result.plan.row_sums(), "plan", torch.float32)
    assert h.core.rtol == 1e-10 and h.float().core.rtol == 1e-5


# N48: signs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_N48_eigenvalues_keep_their_signs(backend: str) -> None:
    h = hessian(pitchfork(0.0, 1.0), backend=backend)
    assert_close(torch.linalg.eigvalsh(h), torch.tensor([-1.0, 1.0]), "hvp")
    h = hessian(S753, backend=backend)
    values = torch.linalg.eigvalsh(h)
    assert_printed(float(values.min()), "-.1306804536")
    for made, expected in (
        (2 * h, 2 * values),
        (-h, -values.flip(-1)),
        (h / 4, values / 4),
        (3 * (2 * h).add_jitter(0.05), 6 * values + 0.15),
        (h.add_jitter(0.05), values + 0.05),
        (h.add_diagonal(torch.tensor([0.05], dtype=torch.float64)), values + 0.05),
        (h + DiagLinearOperator(torch.full((21,), 0.05, dtype=torch.float64)), values + 0.05),
        (h + h, 2 * values),
        (h + 0 * torch.eye(21, dtype=torch.float64) - 3 * h, -2 * values.flip(-1)),
        (h.expand(2, 21, 21), values.expand(2, 21)),
        (h[:, :].repeat(2, 1, 1), values.expand(2, 21)),
        (h[:6, :6], torch.linalg.eigvalsh(h.to_dense()[:6, :6])),
        ((h + h)[:6, :6], 2 * torch.linalg.eigvalsh(h.to_dense()[:6, :6])),
    ):
        assert_close(torch.linalg.eigvalsh(made), expected, "hvp")
        vectors = torch.linalg.eigh(made)[1].to_dense()
        assert_close(made.to_dense() @ vectors, vectors * expected[..., None, :], "hvp")


def test_N48_diagonal_operator() -> None:
    """diag(2, -1, .5) literally, as `0 H + diag`, and what must hold of it."""
    case = Case(torch.randn(3, 1).double().numpy(), torch.randn(4, 1).double().numpy())
    diag = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    op = (0 * hessian(case)).add_diagonal(diag)
    assert torch.equal(op.to_dense(), torch.diag(diag))
    assert torch.equal(op.diagonal(), diag)
    assert_close(torch.linalg.eigvalsh(op), torch.tensor([-1.0, 0.5, 2.0]), "hvp")
    rhs = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    assert relative(op @ op.solve(rhs), rhs) <= 1e-6
    assert_close(torch.linalg.svd(op)[1], torch.tensor([2.0, 1.0, 0.5]), "hvp")
    assert_close(op.diagonalization()[0], torch.tensor([-1.0, 0.5, 2.0]), "hvp")
    with pytest.raises(NotImplementedError, match="lanczos"):
        op.diagonalization(method="lanczos")


def test_eigenvalues_of_a_plan_are_refused_unless_symmetric() -> None:
    x = 0.5 * torch.randn(4, 2, dtype=torch.float64)
    same = otn.sinkhorn(otn.OTProblem(x, x, eps=1.0), update="symmetric", tol=1e-12).plan
    wrapped = same.to_linear_operator()
    assert_close(torch.linalg.eigvalsh(wrapped), torch.linalg.eigvalsh(same.to_dense()), "hvp")
    with pytest.raises(ValueError, match="symmetric"):
        torch.linalg.eigvalsh(solve(case_S(4, 4, 2, 1.0)).plan.to_linear_operator())
    with pytest.raises(ValueError, match="square"):
        torch.linalg.eigvalsh(solve(S753).plan.to_linear_operator())


# Solves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_solve_meets_its_tolerance(backend: str, dtype: torch.dtype) -> None:
    op = solve(S753, dtype, backend=backend).hessian("x").to_linear_operator()
    rhs = torch.randn(21, 3, dtype=dtype) * torch.tensor([1e-12, 1.0, 1e8], dtype=dtype)
    rhs = torch.cat([rhs, torch.zeros(21, 1, dtype=dtype)], dim=1)
    out = op.solve(rhs)
    residual = (op @ out - rhs).norm(dim=0)
    assert bool((residual <= (1e-4 if dtype == torch.float32 else 1e-8) * rhs.norm(dim=0)).all())
    for made in (op, 2 * op, op + op, op[:5, :5]):
        one = rhs[: made.shape[-1], 1]
        assert relative(made @ torch.linalg.solve(made, one), one) <= 1e-4
    left = torch.randn(2, 21, dtype=dtype)
    assert_close(op.solve(rhs[:, 1:2], left), left @ out[:, 1:2], "hvp", dtype)


@pytest.mark.parametrize("kind", ["schur", "hessian xy"])
def test_solve_of_a_singular_operator(kind: str) -> None:
    """In the range: the solution of least norm. Outside of it: an error, never a wrong vector."""
    result = solve(case_S(4, 4, 2, 1.0))
    op = operator_of(result, kind).to_linear_operator()
    dense = op.to_dense()
    rhs = op @ torch.randn(op.shape[-1], dtype=torch.float64)
    assert relative(op.solve(rhs), torch.linalg.pinv(dense, hermitian=True, rtol=1e-11) @ rhs) <= 1e-6
    with pytest.raises(LinearSolveError, match="relative residual"):
        op.solve(rhs + 1.0)


def test_solve_of_a_plan() -> None:
    op = solve(case_S(5, 5, 2, 0.1)).plan.to_linear_operator()
    rhs = torch.randn(5, dtype=torch.float64)
    for made in (op, op.mT):
        assert relative(made @ made.solve(rhs), rhs) <= 1e-8
    with pytest.raises(ValueError, match="square"):
        solve(S753).plan.to_linear_operator().solve(rhs)


def test_solve_above_the_dense_limit_is_cg_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linop_base, "DENSE_SOLVE", 1)
    rhs = torch.randn(14, 2, dtype=torch.float64)
    definite = hessian(case_S(7, 5, 2, 0.02))
    assert relative(definite @ definite.solve(rhs), rhs) <= 1e-8
    indefinite = hessian(case_S(7, 5, 2, 1.0)).add_jitter(-0.2)
    with pytest.raises(LinearSolveError, match="NEGATIVE_CURVATURE"):
        indefinite.solve(rhs)
    with pytest.raises(LinearSolveError, match="not symmetric"):
        solve(case_S(5, 5, 2, 0.1)).plan.to_linear_operator().solve(torch.ones(5, dtype=torch.float64))


def test_solve_rtol_is_the_callers() -> None:
    op = solve(S753, torch.float32).hessian("x")
    rhs = torch.ones(21)
    with pytest.raises(LinearSolveError, match="1e-12"):
        wrap(op, solve_rtol=1e-12).solve(rhs)
    assert wrap(op, solve_rtol=1e-2).solve(rhs).isfinite().all()
    with pytest.raises(ValueError, match="solve_rtol"):
        wrap(op, solve_rtol=-1.0)


# Derivatives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["plan", "plan.T", "schur", "hessian x", "hessian xy"])
def test_derivatives_in_the_vector(kind: str, backend: str) -> None:
    op = operator_of(solve(case_S(3, 4, 2, 1.0), backend=backend), kind).to_linear_operator()
    v = torch.randn(op.shape[-1], 2, dtype=torch.float64, requires_grad=True)
    square = lambda u: (op @ (u * u)).sin()  # noqa: E731
    assert gradcheck(square, v, fast_mode=kind == "hessian xy")
    assert gradgradcheck(square, v, fast_mode=True)


@pytest.mark.parametrize("kind", ["schur", "hessian x"])
def test_derivatives_of_a_solve_in_the_vector(kind: str) -> None:
    case = case_S(3, 4, 2, 1.0).with_(rho_x=1.0)
    op = operator_of(solve(case), kind).to_linear_operator()
    v = torch.randn(op.shape[-1], 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda u: op.solve(u * u), v)
    assert gradgradcheck(lambda u: op.solve(u * u), v, fast_mode=True)


@pytest.mark.parametrize("batched", [False, True])
def test_derivatives_in_factor_and_diagonal(batched: bool) -> None:
    op = (batch() if batched else solve(case_S(3, 4, 2, 1.0))).hessian("x").to_linear_operator()
    v = torch.randn(op.shape[-1], 2, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(3, 1, 1, dtype=torch.float64) if batched else torch.rand((), dtype=torch.float64)
    diag = torch.randn(op.shape[-1], dtype=torch.float64, requires_grad=True)
    scale.requires_grad_(True)
    inputs = (v, scale, diag)
    assert gradcheck(lambda u, c, d: ((op * c).add_diagonal(d)) @ u, inputs)
    assert gradcheck(lambda u, c, d: ((op * c).add_diagonal(d)).to_dense() @ u, inputs)
    assert gradcheck(lambda u, c, d: ((op * c).add_diagonal(d)).diagonal() + 0 * u.sum(), inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_in_the_operator_raise(kind: str) -> None:
    """No silently wrong double backward: neither None nor a part of the derivative."""
    result = solve(case_S(4, 4, 2, 1.0))
    v = torch.randn(16, 2, dtype=torch.float64, requires_grad=True)
    uses = [
        lambda op, u: op @ u,
        lambda op, u: op.to_dense(),
        lambda op, u: op.diagonal(),
        lambda op, u: op[0, 1],
        lambda op, u: op[:2, :2].to_dense(),
        lambda op, u: (2 * op + torch.eye(op.shape[-1], dtype=torch.float64)) @ u,
        lambda op, u: op.clone() @ u,
        lambda op, u: op.unsqueeze(0).to_dense(),
    ]
    if kind in ("hessian x", "hessian y"):
        uses += [lambda op, u: torch.linalg.eigvalsh(op), lambda op, u: op.solve(u)]
    for use in uses:
        op = operator_of(result, kind).to_linear_operator().requires_grad_(True)
        with pytest.raises(NotImplementedError, match="operator is a constant"):
            use(op, v[: op.shape[-1]]).sum().backward()


# What copies share --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_wrapping_makes_no_pass_and_copies_share_the_work(kind: str) -> None:
    result = solve(S753, backend="torch_tiles")
    op = operator_of(result, kind)
    before = result.plan_passes
    wrapped = op.to_linear_operator()
    assert result.plan_passes == before
    assert wrapped.core is op or kind == "plan.T"
    v = torch.randn(op.shape[-1], 4, dtype=torch.float64)
    op @ v
    once = result.plan_passes
    op @ v
    alone = result.plan_passes - once
    for made in (wrapped, 2 * wrapped, wrapped.mT.mT):
        start = result.plan_passes
        made @ v
        assert result.plan_passes - start <= alone


def test_a_copy_builds_once() -> None:
    wrapped = pickle.loads(pickle.dumps(hessian(S753)))
    assert wrapped.core is wrapped.core
    assert (2 * wrapped).core is wrapped.core
    stats = wrapped.core.stats
    wrapped @ torch.ones(21, dtype=torch.float64)
    assert stats.n_hvp == 1


def test_a_change_in_place_is_seen() -> None:
    """The plan doubles with one bit more of bias; nothing old is used."""
    wrapped = solve(S753).plan.to_linear_operator().clone()
    v = torch.randn(5, dtype=torch.float64)
    before = wrapped @ v
    wrapped._args[2].add_(1.0)
    assert_close(wrapped @ v, 2 * before, "plan")


def test_entries_of_a_plan_cost_no_pass() -> None:
    result = solve(case_S(6, 6, 2, 1.0), backend="torch_tiles", tol=1e-9)
    dense, wrapped = result.plan.to_dense(), result.plan.to_linear_operator()
    before = result.plan_passes
    assert_close(wrapped.diagonal(), dense.diagonal(), "plan")
    assert_close(wrapped[[0, 5], [4, 1]], dense[[0, 5], [4, 1]], "plan")
    assert result.plan_passes == before
    with pytest.raises(RuntimeError, match="square"):
        solve(S753).plan.to_linear_operator().diagonal()


def test_zero_weights_have_zero_entries() -> None:
    case = case_S(4, 4, 2, 1.0)
    a = case.a.copy()
    a[1] = 0.0
    wrapped = solve(case.with_(a=a / a.sum())).plan.to_linear_operator()
    assert float(wrapped.diagonal()[1]) == 0.0
    assert torch.equal(wrapped[1], torch.zeros(4, dtype=torch.float64))


def test_bad_input() -> None:
    result = solve(S753)
    with pytest.raises(TypeError, match="operator must be"):
        wrap(torch.eye(3))  # type: ignore[arg-type]
    wrapped = result.hessian("x").to_linear_operator()
    for dtype in (torch.float16, torch.bfloat16, torch.int64):
        with pytest.raises(TypeError, match="dtype must be"):
            wrapped.to(dtype)
    with pytest.raises(ValueError, match="21 rows"):
        wrapped.solve(torch.ones(20, dtype=torch.float64))
    with pytest.raises(TypeError, match="right_tensor must have dtype"):
        wrapped.solve(torch.ones(21))
    with pytest.raises(TypeError, match="other must be"):
        wrapped + "one"
    with pytest.raises(ValueError, match="sizes"):
        wrapped.repeat(2, 2)
    assert len(repr(wrapped)) < 100
