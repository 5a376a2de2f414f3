"""Launches the Pallas kernels: padding, block specs, grids; the `pallas` backend of the sweeps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ot_newton.attention.banded import BandedSweeps
from ot_newton.attention.pallas_kernels import (
    BandGrid,
    gradients_kernel,
    lse_kernel,
    matmul_kernel,
    matvec_kernel,
)
from ot_newton.attention.sweeps import Array

BLOCK = 128  # the lane count: the least tile side that is legal on both of the last two axes


def _output(shape: tuple[int, ...], like: Array) -> Any:
    """Shape and dtype of an output; inside `shard_map` it varies over the same mesh axes as `like`."""
    axes = getattr(jax.typeof(like), "manual_axis_type", None)
    extra = {} if axes is None else {"manual_axis_type": axes}
    return jax.ShapeDtypeStruct(shape, like.dtype, **extra)


def _padded(x: Array, blocks: int, fill: float) -> Array:
    padding = [(0, blocks * BLOCK - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding, constant_values=fill)


@dataclass(frozen=True)
class _Half:
    """One orientation of the band: operands padded to whole blocks, the grid and the block specs."""

    n: int
    m: int
    grid: BandGrid
    rows: Array
    cols: Array
    row_ids: Array
    col_ids: Array
    interpret: Any

    @classmethod
    def make(
        cls, rows: Array, cols: Array, row_ids: Array, col_ids: Array, bandwidth: int, interpret: Any
    ) -> _Half:
        n, m = rows.shape[0], cols.shape[0]
        grid = BandGrid(bandwidth, BLOCK, -(-n // BLOCK), -(-m // BLOCK))
        ids = (_padded(row_ids, grid.row_blocks, -1)[:, None], _padded(col_ids, grid.col_blocks, -2)[None, :])
        operands = (_padded(rows, grid.row_blocks, 0), _padded(cols, grid.col_blocks, 0))
        return cls(n, m, grid, *operands, *ids, interpret)

    def row(self, x: Array, fill: float) -> Array:
        """Row data (n,) or (n, p) as (padded n, 1) or (padded n, p)."""
        return _padded(x[:, None] if x.ndim == 1 else x, self.grid.row_blocks, fill)

    def col(self, x: Array, fill: float) -> Array:
        """A column vector (m,) as (1, padded m)."""
        return _padded(x, self.grid.col_blocks, fill)[None, :]

    def row_spec(self, width: int) -> Any:
        """Row data; the row blocks past the end (`gradients`) keep the last block."""
        last = self.grid.row_blocks - 1
        return pl.BlockSpec((BLOCK, width), lambda i, offset: (jnp.minimum(i, last), 0))

    def _col_index(self, i: Array, offset: Array) -> Array:
        return jnp.clip(i + offset - self.grid.reach, 0, self.grid.col_blocks - 1)

    def col_spec(self, width: int | None) -> Any:
        """Column data of a given width, or a (1, padded m) vector for None."""
        if width is None:
            return pl.BlockSpec((1, BLOCK), lambda i, offset: (0, self._col_index(i, offset)))
        return pl.BlockSpec((BLOCK, width), lambda i, offset: (self._col_index(i, offset), 0))

    def call(
        self, kernel: Callable[..., None], name: str, data: list[Array], specs: list[Any], **options: Any
    ) -> Any:
        """Run a kernel on the scores' operands and `data`."""
        d = self.rows.shape[1]
        operands = [self.rows, self.cols, self.row_ids, self.col_ids]
        in_specs = [self.row_spec(d), self.col_spec(d), self.row_spec(1), self.col_spec(None)]
        semantics = options.pop("semantics", ("parallel", "arbitrary"))
        return pl.pallas_call(
            functools.partial(kernel, grid=self.grid),
            in_specs=[*in_specs, *specs],
            interpret=self.interpret,
            name=name,
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
            **{"grid": (self.grid.row_blocks, self.grid.offsets), **options},
        )(*operands, *data)

    def lse(self, v: Array) -> Array:
        """`log sum_j exp(S_ij + v_j)` of each row."""
        scratch = pltpu.VMEM((BLOCK, 1), v.dtype)
        out = self.call(
            lse_kernel,
            "ot_band_lse",
            [self.col(v, -jnp.inf)],
            [self.col_spec(None)],
            out_specs=self.row_spec(1),
            out_shape=_output((self.rows.shape[0], 1), self.rows),
            scratch_shapes=[scratch, scratch],
        )
        return out[: self.n, 0]

    def apply(self, u: Array, v: Array, x: Array) -> Array:
        """`P x` by rows."""
        vector = x.ndim == 1
        width = 1 if vector else x.shape[1]
        data = [self.row(u, -jnp.inf), self.col(v, -jnp.inf)]
        data.append(self.col(x, 0) if vector else _padded(x, self.grid.col_blocks, 0))
        out = self.call(
            matvec_kernel if vector else matmul_kernel,
            "ot_band_matvec" if vector else "ot_band_matmul",
            data,
            [self.row_spec(1), self.col_spec(None), self.col_spec(None if vector else width)],
            out_specs=self.row_spec(width),
            out_shape=_output((self.rows.shape[0], width), self.rows),
        )
        return out[: self.n, 0] if vector else out[: self.n]

    def gradients(self, u: Array, v: Array, left: Array, right: Array) -> tuple[Array, Array]:
        """Both score gradients in one pass."""
        grid, d, rank = self.grid, self.rows.shape[1], left.shape[1]
        done = pl.BlockSpec(
            (BLOCK, d), lambda i, offset: (jnp.clip(i - grid.reach, 0, grid.col_blocks - 1), 0)
        )
        dq, dk = self.call(
            gradients_kernel,
            "ot_band_gradients",
            [
                self.row(u, -jnp.inf),
                self.col(v, -jnp.inf),
                self.row(left, 0),
                _padded(right, grid.col_blocks, 0),
            ],
            [self.row_spec(1), self.col_spec(None), self.row_spec(rank), self.col_spec(rank)],
            out_specs=[self.row_spec(d), done],
            out_shape=[_output(self.rows.shape, self.rows), _output(self.cols.shape, self.rows)],
            scratch_shapes=[pltpu.VMEM((grid.offsets, BLOCK, d), u.dtype)],
            grid=(max(grid.row_blocks, grid.col_blocks + grid.reach), grid.offsets),
            semantics=("arbitrary", "arbitrary"),
        )
        return dq[: self.n], dk[: self.m]


@dataclass(frozen=True)
class PallasSweeps:
    """`Sweeps` by Pallas TPU kernels (interpreted on other platforms).

    `moments`, which only certificates use, is the sweep of the `banded` backend.
    """

    by_row: _Half
    by_col: _Half
    plain: Callable[[], BandedSweeps]

    @classmethod
    def make(
        cls,
        q: Array,
        k: Array,
        q_ids: Array | None,
        k_ids: Array | None,
        bandwidth: int,
        interpret: Any,
    ) -> PallasSweeps:
        """Pad both sides once."""
        rows = jnp.zeros(q.shape[0], jnp.int32) if q_ids is None else jnp.where(q_ids < 0, -1, q_ids)
        cols = jnp.zeros(k.shape[0], jnp.int32) if k_ids is None else jnp.where(k_ids < 0, -2, k_ids)
        return cls(
            _Half.make(q, k, rows, cols, bandwidth, interpret),
            _Half.make(k, q, cols, rows, bandwidth, interpret),
            functools.partial(BandedSweeps.make, q, k, q_ids, k_ids, bandwidth),
        )

    def row_lse(self, v: Array) -> Array:
        """See `Sweeps`."""
        return self.by_row.lse(v)

    def col_lse(self, u: Array) -> Array:
        """See `Sweeps`."""
        return self.by_col.lse(u)

    def row_apply(self, u: Array, v: Array, x: Array) -> Array:
        """See `Sweeps`."""
        return self.by_row.apply(u, v, x)

    def col_apply(self, u: Array, v: Array, x: Array) -> Array:
        """See `Sweeps`."""
        return self.by_col.apply(v, u, x)

    def score_gradients(self, u: Array, v: Array, left: Array, right: Array) -> tuple[Array, Array]:
        """See `Sweeps`."""
        return self.by_row.gradients(u, v, left, right)

    def moments(self, u: Array, v: Array, left: Array, right: Array) -> tuple[Array, Array]:
        """See `Sweeps`."""
        return self.plain().moments(u, v, left, right)
