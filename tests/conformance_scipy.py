"""Conformance of the scipy adapter: input forms, dtypes, buffers, and scipy's own solvers on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse.linalg as sla

__all__ = ["SCIPY_CHECKS", "check_scipy"]


def check_scipy(
    make: Callable[[], Any],
    dense: np.ndarray,
    *,
    rtol: float,
    dtype: Any = np.float64,
    passes: Callable[[], int] | None = None,
) -> None:
    """Check the adapter that `make()` returns against its matrix.

    Args:
        make: builds the adapter; it must make no product (`passes` unchanged).
        dense: (N, M) matrix in float64.
        rtol: error allowed, relative to `|dense| |v|`.
        dtype: the compute dtype it must declare and return.
        passes: counter of plan passes to watch.
    """
    before = passes() if passes else 0
    adapter = make()
    assert not passes or passes() == before, "the constructor made a product"
    assert isinstance(adapter, sla.LinearOperator)
    assert adapter.shape == dense.shape
    assert adapter.dtype == np.dtype(dtype), f"declares {adapter.dtype}, computes in {np.dtype(dtype)}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for check in SCIPY_CHECKS:
            check(adapter, dense, rtol)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy's lsmr overflows in its own float32 bounds
        check_solvers(adapter, dense, rtol)


def _assert_close(found: Any, dense: np.ndarray, v: Any, rtol: float, what: str) -> None:
    assert isinstance(found, np.ndarray), f"{what}: {type(found).__name__}"
    wide = np.asarray(v, dtype=np.float64)
    expected = dense @ wide
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, not {expected.shape}"
    size = max(float((np.abs(dense) @ np.abs(wide)).max(initial=0.0)), 1e-300)
    error = float(np.abs(found - expected).max(initial=0.0)) / size
    assert error <= rtol, f"{what}: error {error:.3e} > {rtol:.1e}"


def _inputs(length: int, dtype: Any) -> list[tuple[str, np.ndarray]]:
    """One vector in every layout and dtype."""
    v = np.random.default_rng(0).standard_normal(length).astype(dtype)
    read_only = v.copy()
    read_only.setflags(write=False)
    spaced = np.full(2 * length, np.nan, dtype=dtype)
    spaced[::2] = v
    return [
        ("contiguous", v),
        ("strided", spaced[::2]),
        ("negative stride", v[::-1]),
        ("read-only", read_only),
        ("float32", v.astype(np.float32)),
        ("float64", v.astype(np.float64)),
        ("integers", np.arange(length) - 2),
        ("big-endian", v.astype(np.dtype(dtype).newbyteorder(">"))),
    ]


def check_vectors(adapter: Any, dense: np.ndarray, rtol: float) -> None:
    """`matvec` of (n,) and (n,1) and `rmatvec`, in every layout."""
    n, m = dense.shape
    for what, v in _inputs(m, adapter.dtype):
        for found in (adapter.matvec(v), adapter @ v, adapter * v):
            _assert_close(found, dense, v, rtol, f"matvec {what}")
            assert found.dtype == adapter.dtype, f"matvec {what} returns {found.dtype}"
        _assert_close(adapter.matvec(v[:, None]), dense, v[:, None], rtol, f"matvec (n,1) {what}")
    for what, u in _inputs(n, adapter.dtype):
        for flip in (adapter.rmatvec, adapter.H.matvec, adapter.T.matvec):
            found = flip(u)
            _assert_close(found, dense.T, u, rtol, f"rmatvec {what}")
            assert found.dtype == adapter.dtype
        _assert_close(adapter.rmatvec(u[:, None]), dense.T, u[:, None], rtol, f"rmatvec (n,1) {what}")


def check_blocks(adapter: Any, dense: np.ndarray, rtol: float) -> None:
    """`matmat` and `rmatmat` of C and F order, strided, one column and none written to."""
    block = np.random.default_rng(1).standard_normal((dense.shape[1], 4)).astype(adapter.dtype)
    for what, v in [
        ("C", block),
        ("F", np.asfortranarray(block)),
        ("strided", block[:, ::2]),
        ("negative", block[::-1, ::-1]),
        ("one", block[:, :1]),
    ]:
        kept = v.copy()
        _assert_close(adapter.matmat(v), dense, v, rtol, f"matmat {what}")
        _assert_close(adapter @ v, dense, v, rtol, f"@ {what}")
        assert np.array_equal(v, kept)
    left = np.random.default_rng(2).standard_normal((dense.shape[0], 3)).astype(adapter.dtype)
    _assert_close(adapter.rmatmat(left), dense.T, left, rtol, "rmatmat")


def check_buffers(adapter: Any, dense: np.ndarray, rtol: float) -> None:
    """A caller that overwrites its buffer changes no earlier answer, and answers share no memory."""
    rng = np.random.default_rng(3)
    buffer = rng.standard_normal(dense.shape[1]).astype(adapter.dtype)
    first_input = buffer.copy()
    first = adapter.matvec(buffer)
    kept = first.copy()
    assert not np.shares_memory(first, buffer)
    buffer[:] = rng.standard_normal(dense.shape[1])
    second = adapter.matvec(buffer)
    assert np.array_equal(first, kept)
    assert not np.shares_memory(first, second)
    _assert_close(second, dense, buffer, rtol, "a reused buffer")
    second[:] = np.nan
    _assert_close(adapter.matvec(first_input), dense, first_input, rtol, "after the answer was overwritten")


def check_solvers(adapter: Any, dense: np.ndarray, rtol: float) -> None:
    """svds and lsmr on any shape; eigsh, lobpcg, minres (and cg where definite) on symmetric ones."""
    scale = float(np.linalg.norm(dense, 2))
    limit = max(1e3 * rtol, 1e-7)
    n, m = dense.shape
    if min(n, m) > 2:
        start = np.random.default_rng(6).standard_normal(min(n, m)).astype(adapter.dtype)
        found = np.sort(sla.svds(adapter, k=2, v0=start)[1])[::-1]
        expected = np.linalg.svd(dense, compute_uv=False)[:2]
        assert np.abs(found - expected).max() <= limit * scale, "svds"
    rhs = np.random.default_rng(4).standard_normal(n).astype(adapter.dtype)
    damp = 0.3 * scale
    found = sla.lsmr(adapter, rhs, damp=damp, atol=1e-13, btol=1e-13, maxiter=10 * (n + m))[0]
    expected = np.linalg.solve(dense.T @ dense + damp**2 * np.eye(m), dense.T @ rhs)
    assert np.abs(found - expected).max() <= limit * np.abs(expected).max(), "lsmr"
    if n == m and np.abs(dense - dense.T).max() <= 1e-12 * scale:
        _check_symmetric_solvers(adapter, dense, limit)


def _check_symmetric_solvers(adapter: Any, dense: np.ndarray, limit: float) -> None:
    size = dense.shape[0]
    values, vectors = np.linalg.eigh(dense)
    scale = float(np.abs(values).max())
    rng = np.random.default_rng(5)
    start = rng.standard_normal(size).astype(adapter.dtype)
    if size > 2:
        found = np.sort(sla.eigsh(adapter, k=1, which="LA", v0=start)[0])
        assert abs(found[0] - values[-1]) <= limit * scale, "eigsh"
    if size >= 5:
        block = rng.standard_normal((size, 1)).astype(adapter.dtype)
        found, _ = sla.lobpcg(adapter, block, largest=True, tol=limit * scale / 10, maxiter=20 * size)
        assert abs(found[0] - values[-1]) <= 10 * limit * scale, "lobpcg"
    inside = vectors[:, np.abs(values) > 1e-6 * scale]
    rhs = inside @ (inside.T @ start)
    found = sla.minres(adapter, rhs.astype(adapter.dtype), rtol=limit / 100, maxiter=50 * size)[0]
    assert np.linalg.norm(dense @ found - rhs) <= 10 * limit * np.linalg.norm(rhs), "minres"
    if values[0] > 1e-6 * scale:
        found, info = sla.cg(adapter, rhs.astype(adapter.dtype), rtol=limit / 10, maxiter=50 * size)
        assert info == 0
        assert np.linalg.norm(dense @ found - rhs) <= 10 * limit * np.linalg.norm(rhs), "cg"


SCIPY_CHECKS = (check_vectors, check_blocks, check_buffers)
