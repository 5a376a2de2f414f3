"""Conformance of an operator of the torch side: every promised input form against the dense matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tolerances import to_numpy

__all__ = ["check_operator"]


def check_operator(
    op: Any,
    dense: np.ndarray,
    *,
    rtol: float,
    dtype: torch.dtype = torch.float64,
    symmetric: bool = True,
    clouds: tuple[tuple[int, int], ...] = (),
) -> None:
    """Check an operator against `dense`, (N, M) or batched (B, N, M).

    Args:
        op: the operator.
        dense: its matrix in float64.
        rtol: error allowed, relative to `|dense| |v|` entry by entry at its largest.
        dtype: dtype it must declare and return.
        symmetric: whether `<u, H v> = <H u, v>` is to hold.
        clouds: shapes of the clouds a vector is made of; one for "x" or "y", two for "xy".
    """
    _check_attributes(op, dense, dtype)
    _check_vectors(op, dense, rtol, dtype)
    _check_transposed(op, dense, rtol, dtype)
    _check_algebra(op, dense, rtol, dtype)
    _check_refusals(op, dense, dtype)
    if symmetric:
        _check_symmetry(op, dense, rtol, dtype)
    if clouds:
        _check_clouds(op, dense, rtol, dtype, clouds)


def _draw(dense: np.ndarray, dtype: torch.dtype, *columns: int, seed: int = 0, rows: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    length = dense.shape[-2] if rows else dense.shape[-1]
    shape = (*dense.shape[:-2], length, *columns)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _multiply(dense: np.ndarray, v: np.ndarray) -> np.ndarray:
    """`dense @ v` for (..., M) or (..., M, k)."""
    if v.ndim == dense.ndim:
        return np.asarray(dense @ v)
    return np.asarray((dense @ v[..., None])[..., 0])


def _assert_product(found: Any, dense: np.ndarray, v: Tensor, rtol: float, what: str) -> None:
    expected = _multiply(dense, to_numpy(v))
    assert tuple(found.shape) == expected.shape, f"{what}: shape {tuple(found.shape)}, not {expected.shape}"
    size = max(float(np.abs(_multiply(np.abs(dense), np.abs(to_numpy(v)))).max(initial=0.0)), 1e-300)
    error = float(np.abs(to_numpy(found) - expected).max(initial=0.0)) / size
    assert error <= rtol, f"{what}: error {error:.3e} > {rtol:.1e}"


def _check_attributes(op: Any, dense: np.ndarray, dtype: torch.dtype) -> None:
    assert tuple(op.shape) == dense.shape
    assert op.dtype == dtype
    assert torch.device(op.device).type == "cpu"
    assert op.__array_ufunc__ is None
    assert len(repr(op)) < 300


def _check_vectors(op: Any, dense: np.ndarray, rtol: float, dtype: torch.dtype) -> None:
    for columns in ((), (1,), (2,), (5,)):
        v = _draw(dense, dtype, *columns)
        kept = v.clone()
        found = op @ v
        _assert_product(found, dense, v, rtol, f"H @ {tuple(v.shape)}")
        assert found.dtype == dtype
        assert torch.equal(v, kept), "the product changed its argument"
        _assert_product(op @ v, dense, v, rtol, "the same product again, with what the first one left behind")
    wide = _draw(dense, dtype, 6)
    _assert_product(op @ wide[..., ::2], dense, wide[..., ::2], rtol, "strided columns")
    flipped = wide.mT.contiguous().mT
    _assert_product(op @ flipped, dense, flipped, rtol, "column-major block")
    constant = wide[..., :1].expand(*wide.shape[:-1], 3)
    _assert_product(op @ constant, dense, constant, rtol, "expanded block")


def _check_transposed(op: Any, dense: np.ndarray, rtol: float, dtype: torch.dtype) -> None:
    transposed = dense.swapaxes(-1, -2)
    flips = [op.mT] if dense.ndim > 2 else [op.T, op.mT]
    for flip in flips:
        assert tuple(flip.shape) == transposed.shape
        for columns in ((), (3,)):
            u = _draw(dense, dtype, *columns, rows=True)
            _assert_product(flip @ u, transposed, u, rtol, "transpose")
    u, v = _draw(dense, dtype, rows=True, seed=1), _draw(dense, dtype, seed=2)
    left = float((u.double() * (op @ v).double()).sum())
    right = float(((flips[0] @ u).double() * v.double()).sum())
    size = float(np.sum(np.abs(to_numpy(u)) * _multiply(np.abs(dense), np.abs(to_numpy(v)))))
    assert abs(left - right) <= 2 * rtol * size, "adjoint test"
    if dense.ndim == 2:
        for given in (u, u.numpy()):
            _assert_product(torch.as_tensor(given @ op), transposed, u, rtol, f"{type(given).__name__} @ H")


def _check_symmetry(op: Any, dense: np.ndarray, rtol: float, dtype: torch.dtype) -> None:
    u, v = _draw(dense, dtype, seed=3), _draw(dense, dtype, seed=4)
    left, right = float((u * (op @ v)).sum()), float(((op @ u) * v).sum())
    size = float(np.sum(np.abs(to_numpy(u)) * _multiply(np.abs(dense), np.abs(to_numpy(v)))))
    assert abs(left - right) <= 2 * rtol * size


def _check_algebra(op: Any, dense: np.ndarray, rtol: float, dtype: torch.dtype) -> None:
    u, v = _draw(dense, dtype, seed=5), _draw(dense, dtype, seed=6)
    _assert_product(op @ (2 * u - 3 * v), dense, 2 * u - 3 * v, rtol, "a combination")
    product = op @ v
    assert torch.count_nonzero(op @ torch.zeros_like(v)) == 0, "H 0 must be exactly 0"
    for factor in (1e-12, 1e-4, 1e8):
        scaled = (op @ (factor * v)).double() / factor
        error = float((scaled - product.double()).abs().max() / product.double().abs().max())
        assert error <= max(10 * rtol, 1e-8), f"hvp(c v) = c hvp(v) off by {error:.2e} at c = {factor:g}"
    mixed = torch.stack([1e-12 * v, v, 1e8 * v, torch.zeros_like(v)], dim=-1)
    block = (op @ mixed).double()
    for column, factor in ((0, 1e-12), (1, 1.0), (2, 1e8)):
        _assert_product(block[..., column] / factor, dense, v, 2 * rtol, "a block of columns of all sizes")
    assert torch.count_nonzero(block[..., 3]) == 0


def _check_refusals(op: Any, dense: np.ndarray, dtype: torch.dtype) -> None:
    bad = torch.zeros(dense.shape[-1] + 1, dtype=dtype)
    with pytest.raises(ValueError, match=rf"{dense.shape[-1] + 1}"):
        op @ bad
    with pytest.raises((TypeError, ValueError)):
        op @ torch.zeros(dense.shape[-1], dtype=torch.complex128)
    with pytest.raises((TypeError, ValueError)):
        op @ "a string"


def _check_clouds(
    op: Any, dense: np.ndarray, rtol: float, dtype: torch.dtype, clouds: tuple[tuple[int, int], ...]
) -> None:
    """Cloud shape in, cloud shape out; for "xy" the tuple (vx, vy), row-major, x then y."""
    v = _draw(dense, dtype, seed=7)
    batch = v.shape[:-1]
    parts = torch.split(v, [n * d for n, d in clouds], dim=-1)
    shaped = tuple(p.reshape(*batch, n, d) for p, (n, d) in zip(parts, clouds, strict=True))
    found = op @ (shaped[0] if len(shaped) == 1 else shaped)
    pieces = (found,) if len(shaped) == 1 else found
    assert isinstance(pieces, tuple)
    assert [tuple(p.shape) for p in pieces] == [tuple(s.shape) for s in shaped]
    flat = torch.cat([p.reshape(*batch, -1) for p in pieces], dim=-1)
    _assert_product(flat, dense, v, rtol, "cloud-shaped vector")
