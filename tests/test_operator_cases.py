"""Operators: the conformance check on all three, and the public cases N42 to N48, a test each."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg as sla
import torch

import ot_newton as otn
from tests.conformance import check_operator, check_scipy
from tests.exact_cases import OT_ROWS
from tests.generators import Case, case_S, far_zero_atoms, pitchfork
from tests.helpers import BACKENDS, problem_of, rounded, solve
from tests.tolerances import relative_error, rtol, to_numpy

EVERYWHERE = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
CASES = [
    case_S(5, 7, 2, 0.5),
    case_S(7, 5, 3, 0.3),
    far_zero_atoms(),
    case_S(5, 7, 2, 0.5).with_(rho_x=0.7),
    case_S(4, 3, 2, 0.5).with_(rho_x=0.7, rho_y=1.3),
]


def operators(result: Any, case: Case) -> list[tuple[Any, np.ndarray, bool, tuple[tuple[int, int], ...]]]:
    """(operator, dense truth, symmetric, cloud shapes) of everything a result offers."""
    exact = case.truth()
    x, y = case.x.shape, case.y.shape
    return [
        (result.hessian("x"), exact.hessian("x"), True, (x,)),
        (result.hessian("y"), exact.hessian("y"), True, (y,)),
        (result.hessian("xy"), exact.hessian("xy"), True, (x, y)),
        (result.schur(), exact.schur(), True, ()),
        (result.schur(side="x"), exact.schur("x"), True, ()),
        (result.schur(normalized=True), exact.schur(normalized=True), True, ()),
        (result.plan, exact.plan, False, ()),
        (result.plan.mT, exact.plan.T, False, ()),
    ]


@EVERYWHERE
@DTYPES
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_conformance(case: Case, dtype: torch.dtype, backend: str) -> None:
    case = rounded(case, dtype)
    result = solve(case, dtype, backend=backend)
    for op, dense, symmetric, clouds in operators(result, case):
        limit = max(rtol("hvp", dtype), 8 * result.noise_floor)
        check_operator(op, dense, rtol=limit, dtype=dtype, symmetric=symmetric, clouds=clouds)


@EVERYWHERE
def test_conformance_of_a_batch(backend: str) -> None:
    lanes = [case_S(5, 7, 2, 0.5), case_S(5, 7, 2, 0.5).with_(x=case_S(5, 7, 2, 0.5).x[::-1] * 0.7)]
    stacked = [torch.tensor(np.stack(t)) for t in zip(*(c.arrays for c in lanes), strict=True)]
    result = otn.sinkhorn(otn.OTProblem(*stacked, eps=0.5), tol=1e-13, max_iter=100_000, backend=backend)
    exact = [case.truth() for case in lanes]
    for op, dense, symmetric, clouds in (
        (result.hessian("x"), [t.hessian("x") for t in exact], True, ((5, 2),)),
        (result.hessian("xy"), [t.hessian("xy") for t in exact], True, ((5, 2), (7, 2))),
        (result.schur(), [t.schur() for t in exact], True, ()),
        (result.plan, [t.plan for t in exact], False, ()),
    ):
        check_operator(op, np.stack(dense), rtol=1e-9, symmetric=symmetric, clouds=clouds)


def test_counters() -> None:
    """What H.stats and plan_passes count: a block costs the passes of one vector."""
    result = solve(case_S(9, 7, 2, 0.5), backend="torch_tiles")
    h = result.hessian("x")
    h @ torch.rand(18, dtype=torch.float64)
    before, start = copy.copy(h.stats), result.plan_passes
    h @ torch.rand(18, 16, dtype=torch.float64)
    assert h.stats.n_hvp - before.n_hvp == 16
    assert h.stats.n_block - before.n_block == 1
    spent = result.plan_passes - start
    assert h.stats.plan_passes - before.plan_passes == spent
    steps = h.stats.cg_iterations - before.cg_iterations
    assert spent <= 2 + 2 * (steps + 2), "2 + 2 n_cg passes, and the refreshed residuals"
    assert h.stats.converged is True
    assert h.stats.worst_residual <= h.rtol


def test_capped_inner_solve_warns_and_is_recorded() -> None:
    h = solve(case_S(9, 7, 2, 0.1), backend="torch_tiles").hessian("x", max_cg=1)
    with pytest.warns(otn.ConvergenceWarning, match="residual"):
        h @ torch.rand(18, dtype=torch.float64)
    assert h.stats.converged is False
    assert h.stats.worst_residual > h.rtol


@EVERYWHERE
def test_N42_empty_mass_is_masked(backend: str) -> None:
    """log-weights of -inf: finite Hessian, zero rows, in every operator and view."""
    for case in (OT_ROWS["O3"].case, far_zero_atoms()):
        result = solve(case, backend=backend)
        h = to_numpy(result.hessian("xy") @ torch.eye(24, dtype=torch.float64))
        assert np.isfinite(h).all()
        dead = np.repeat(np.concatenate([np.asarray(case.a), np.asarray(case.b)]) == 0, 2)
        assert not h[dead].any()
        assert not h[:, dead].any()
        for normalized in (False, True):
            schur = to_numpy(result.schur(normalized=normalized).to_dense())
            assert np.isfinite(schur).all()
            assert not schur[np.asarray(case.b) == 0].any()
        view = result.hessian("x").to_scipy() @ np.eye(10)
        assert np.isfinite(view).all()


@EVERYWHERE
@DTYPES
def test_N43_dtype_is_declared_and_construction_is_free(dtype: torch.dtype, backend: str) -> None:
    case = case_S(4, 5, 2, 0.5)
    result = solve(case, dtype, backend=backend)
    name = str(dtype).removeprefix("torch.")
    for op in (result.hessian("x"), result.schur(), result.plan):
        before = result.plan_passes
        view = op.to_scipy()
        assert view.dtype == np.dtype(name)
        assert op.to_linear_operator().dtype == dtype
        assert op.dtype == dtype
        assert result.plan_passes == before
    h = result.hessian("xy")
    h.to_scipy()
    assert h.stats.n_hvp == 0


@EVERYWHERE
@DTYPES
def test_N44_vectors_in_every_layout(dtype: torch.dtype, backend: str) -> None:
    """(n,), (n,1), matmat in C and F order, strided, negative stride, read-only, other dtypes, no warning."""
    case = rounded(case_S(5, 7, 2, 0.5), dtype)
    result = solve(case, dtype, backend=backend)
    for op, dense, _, _ in operators(result, case):
        check_scipy(op.to_scipy, dense, rtol=rtol("hvp", dtype), dtype=op.to_scipy().dtype)


@EVERYWHERE
@DTYPES
def test_N45_device_and_dtype_stay(dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch path never goes through numpy; results live on x.device in x.dtype."""
    result = solve(case_S(4, 5, 2, 0.5), dtype, backend=backend)
    ops = [result.hessian("x"), result.hessian("xy"), result.schur(), result.plan]
    vectors = [torch.rand(op.shape[-1], dtype=dtype) for op in ops]
    for op, v in zip(ops, vectors, strict=True):
        op @ v  # the first product may compile

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a host copy on the torch path")

    if backend != "cpu":  # its kernels share memory with numpy, without a copy
        monkeypatch.setattr(torch.Tensor, "numpy", refuse)
        monkeypatch.setattr(torch.Tensor, "cpu", refuse)
    for op, v in zip(ops, vectors, strict=True):
        product = op @ v
        assert product.dtype == dtype
        assert product.device == v.device
    monkeypatch.undo()
    for op, v in zip(ops, vectors, strict=True):
        view = op.to_scipy() @ v.numpy()
        assert view.dtype == op.to_scipy().dtype
        assert isinstance(op @ v.numpy(), np.ndarray)


@EVERYWHERE
def test_N46_buffers_are_not_aliased(backend: str) -> None:
    """scipy overwrites the vectors it passes: eigsh and cg on the adapter equal those on the matrix."""
    case = case_S(5, 7, 2, 0.1)
    h = solve(case, backend=backend).hessian("x")
    view, dense = h.to_scipy(), case.truth().hessian("x")
    start = np.cos(np.arange(10.0))
    for which in ("LA", "LM"):
        found = np.sort(sla.eigsh(view, k=3, which=which, v0=start, return_eigenvectors=False))
        expected = np.sort(sla.eigsh(dense, k=3, which=which, v0=start, return_eigenvectors=False))
        assert np.abs(found - expected).max() <= 1e-9
    found, info = sla.cg(view, start, rtol=1e-11)
    assert info == 0
    assert np.abs(found - np.linalg.solve(dense, start)).max() <= 1e-8
    v = torch.tensor(start)
    product = h @ v
    kept = product.clone()
    v.zero_()
    h @ torch.ones(10, dtype=torch.float64)
    assert torch.equal(product, kept)


@EVERYWHERE
def test_N47_linear_operator_survives_the_usual_handling(backend: str) -> None:
    """Matmul, transpose, diagonal, indexing, pickle, deepcopy, clone, `.to`, `.double`."""
    case = case_S(4, 5, 2, 0.5)
    result, exact = solve(case, backend=backend), case.truth()
    for op, dense in (
        (result.hessian("x"), exact.hessian("x")),
        (result.schur(), exact.schur()),
        (result.plan, exact.plan),
    ):
        linear = op.to_linear_operator()
        assert tuple(linear.shape) == dense.shape
        eye = torch.eye(dense.shape[1], dtype=torch.float64)
        copies = {
            "itself": linear,
            "pickle": pickle.loads(pickle.dumps(linear)),
            "deepcopy": copy.deepcopy(linear),
            "clone": linear.clone(),
            "detach": linear.detach(),
            "to": linear.to("cpu"),
            "to device": linear.to(torch.device("cpu")),
            "double": linear.double(),
        }
        for name, one in copies.items():
            assert one.dtype == torch.float64, name
            assert relative_error(one @ eye, dense) <= 1e-9, name
            assert relative_error(one @ eye[:, 0], dense[:, 0], 1.0) <= 1e-9, name
        assert relative_error(linear.mT @ torch.eye(len(dense), dtype=torch.float64), dense.T) <= 1e-9
        assert relative_error(linear.to_dense(), dense) <= 1e-9
        assert relative_error((2.0 * linear) @ eye, 2 * dense) <= 1e-9
        if dense.shape[0] == dense.shape[1]:
            assert relative_error(linear.diagonal(), np.diag(dense)) <= 1e-9
        assert relative_error(linear[1:3, :2].to_dense(), dense[1:3, :2], 1.0) <= 1e-9
    low = solve(case, torch.float32, backend=backend).hessian("x").to_linear_operator()
    assert low.dtype == torch.float32
    assert low.double().dtype == torch.float64
    assert (low.double() @ torch.ones(8, dtype=torch.float64)).dtype == torch.float64


@EVERYWHERE
def test_N47_batches(backend: str) -> None:
    x, y = torch.rand(3, 4, 2, dtype=torch.float64), torch.rand(3, 5, 2, dtype=torch.float64)
    result = otn.sinkhorn(otn.OTProblem(x, y, eps=0.5), backend=backend)
    for op in (result.hessian("x"), result.schur(), result.plan):
        linear = op.to_linear_operator()
        assert linear.batch_shape == torch.Size([3])
        v = torch.rand(3, op.shape[-1], 2, dtype=torch.float64)
        assert relative_error(linear @ v, op @ v) <= 1e-12
        assert relative_error(linear[1] @ v[1], (op @ v)[1]) <= 1e-9
        assert relative_error(copy.deepcopy(linear) @ v, op @ v) <= 1e-12


@EVERYWHERE
def test_N48_indefinite_eigenvalues_are_not_clamped(backend: str) -> None:
    """eigvalsh of an indefinite operator keeps its negative values, scaled and shifted too."""
    case = pitchfork(0.0, 1.0)
    linear = solve(case, backend=backend).hessian("x").to_linear_operator()
    assert relative_error(torch.linalg.eigvalsh(linear), np.array([-1.0, 1.0])) <= 1e-9
    assert relative_error(linear.eigvalsh(), np.array([-1.0, 1.0])) <= 1e-9
    assert relative_error((2.0 * linear).eigvalsh(), np.array([-2.0, 2.0])) <= 1e-9
    values, vectors = torch.linalg.eigh(linear)
    dense = vectors.to_dense() if hasattr(vectors, "to_dense") else vectors
    assert relative_error(dense @ torch.diag(values) @ dense.mT, np.array([[0.0, 1.0], [1.0, 0.0]])) <= 1e-9
    wide = case_S(7, 5, 3, 1.0)
    found = torch.linalg.eigvalsh(solve(wide, backend=backend).hessian("x").to_linear_operator())
    assert relative_error(found, wide.truth().spectrum("x")) <= 1e-9


@EVERYWHERE
@pytest.mark.parametrize("case", [case_S(5, 7, 2, 0.5), case_S(7, 5, 3, 1.0)], ids=repr)
def test_N48_solve_meets_its_tolerance(case: Case, backend: str) -> None:
    """Definite and indefinite: the residual is below 1e-6, not a relative tolerance of 1."""
    linear = solve(case, backend=backend).hessian("x").to_linear_operator()
    size = linear.shape[-1]
    rhs = torch.cos(torch.arange(2.0 * size, dtype=torch.float64)).reshape(size, 2)
    for b in (rhs, rhs[:, 0]):
        found = linear.solve(b)
        dense = case.truth().hessian("x")
        residual = dense @ to_numpy(found) - to_numpy(b)
        assert np.linalg.norm(residual) <= 1e-6 * np.linalg.norm(to_numpy(b))


@EVERYWHERE
def test_N48_solve_of_a_singular_operator_raises(backend: str) -> None:
    """The joint Hessian has the joint translations in its null space: an inconsistent system raises."""
    linear = solve(case_S(4, 5, 2, 0.5), backend=backend).hessian("xy").to_linear_operator()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(otn.LinearSolveError):
            linear.solve(torch.ones(18, dtype=torch.float64))


def test_N48_unsupported_factorizations_raise() -> None:
    """What would be silently wrong on an indefinite operator is refused."""
    linear = solve(pitchfork(0.0, 1.0)).hessian("x").to_linear_operator()
    for name in ("cholesky", "logdet", "root_decomposition", "root_inv_decomposition", "pivoted_cholesky"):
        with pytest.raises((NotImplementedError, otn.OTNewtonError, TypeError, RuntimeError)):
            getattr(linear, name)(*([1] if name == "pivoted_cholesky" else []))


def test_problem_without_operators_is_refused() -> None:
    result = solve(case_S(4, 5, 2, 0.5))
    with pytest.raises(ValueError, match="wrt must be one of 'x', 'y', 'xy', got 'z'"):
        result.hessian("z")
    with pytest.raises(ValueError, match="side must be one of"):
        result.schur(side="z")
    with pytest.raises(ValueError, match="rtol"):
        result.hessian("x", rtol=-1.0)
    assert problem_of(case_S(4, 5, 2, 0.5)).balanced
