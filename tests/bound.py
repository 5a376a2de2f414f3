"""Problems in the backends' base-2 convention, with the same numbers in float64 numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.protocols import PassCounter, Plan, Tiles

__all__ = ["SHAPES", "Bound", "draw", "problems", "wide"]

# Every size of 1, 15, 17, 127, 129 on each side and every dimension, without the full product of them.
SHAPES = [
    (1, 1, 1),
    (1, 17, 3),
    (17, 1, 16),
    (15, 15, 17),
    (15, 127, 64),
    (17, 129, 65),
    (127, 15, 700),
    (129, 17, 3),
    (129, 127, 1),
    (127, 129, 16),
    (17, 17, 64),
    (15, 17, 2),
]


@dataclass(frozen=True, eq=False)
class Bound:
    """One bound problem: torch inputs of the dtype under test, and the same numbers in float64 numpy."""

    backend: Any
    dtype: torch.dtype
    q: Tensor
    k: Tensor
    w: Tensor
    u: Tensor
    a: Tensor
    b: Tensor

    def tiles(self, counter: PassCounter | None = None) -> Tiles:
        """The clouds bound to the backend."""
        tiles: Tiles = self.backend.bind(self.q, self.k, PassCounter() if counter is None else counter)
        return tiles

    def plan(self, counter: PassCounter | None = None) -> Plan:
        """The plan bound to the backend."""
        return self.tiles(counter).plan(self.w, self.u, self.a, self.b)

    @property
    def exponents(self) -> np.ndarray:
        """`q.k + w + u` in float64."""
        dots = wide(self.q) @ wide(self.k).swapaxes(1, 2)
        return np.asarray(dots + wide(self.w)[:, :, None] + wide(self.u)[:, None, :])

    @property
    def dense(self) -> np.ndarray:
        """The plan in float64; zero weights give exact zeros even where the kernel overflows."""
        weights = wide(self.a)[:, :, None] * wide(self.b)[:, None, :]
        with np.errstate(over="ignore"):
            return np.where(weights > 0, np.exp2(np.where(weights > 0, self.exponents, 0.0)), 0.0) * weights

    @property
    def rounding(self) -> float:
        """Bound of the error of one exponent, in bits: the terms of `q.k + w + u` round separately."""
        dots = np.abs(wide(self.q)) @ np.abs(wide(self.k)).swapaxes(1, 2)
        live_w = np.where(wide(self.a) > 0, np.abs(wide(self.w)), 0.0)
        live_u = np.where(wide(self.b) > 0, np.abs(wide(self.u)), 0.0)
        return float(torch.finfo(self.dtype).eps * (8 + 4 * (dots.max() + live_w.max() + live_u.max())))


def wide(t: Tensor) -> np.ndarray:
    """Float64 numpy copy."""
    return np.asarray(t.detach().cpu().double().numpy())


def draw(
    backend: Any,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    *,
    batch: int = 1,
    seed: int = 0,
    zeros: bool = False,
    offset: float = 0.0,
    device: str = "cpu",
) -> Bound:
    """A problem near its fixed point: clouds of unit size, biases that make each row sum near 1.

    ``offset`` moves both clouds, as a common mean would: the biases then cancel large products.
    """
    n, m, d = shape
    rng = np.random.default_rng([seed, n, m, d, batch])
    q = rng.standard_normal((batch, n, d)) / d**0.25 + offset
    k = 2 * rng.standard_normal((batch, m, d)) / d**0.25 + offset
    a, b = rng.uniform(0.2, 1, (batch, n)), rng.uniform(0.2, 1, (batch, m))
    if zeros:
        a[:, 1::3] = 0
        b[:, 1::3] = 0
    a, b = a / a.sum(1, keepdims=True), b / b.sum(1, keepdims=True)

    def cast(t: np.ndarray) -> Tensor:
        return torch.tensor(t, dtype=dtype, device=device)

    q, k, a, b = cast(q), cast(k), cast(a), cast(b)
    dots = wide(q) @ wide(k).swapaxes(1, 2)
    u = -0.5 * np.einsum("bjd,bjd->bj", wide(k), wide(k)) + rng.uniform(-1, 1, (batch, m))
    top = (dots + u[:, None, :]).max(2)
    w = -np.log2((wide(b)[:, None, :] * np.exp2(dots + u[:, None, :] - top[:, :, None])).sum(2)) - top
    return Bound(backend, dtype, q, k, cast(w), cast(u), a, b)


def problems(backend: Any, dtype: torch.dtype, device: str = "cpu") -> Iterator[Bound]:
    """Every shape, with and without zero weights."""
    for index, shape in enumerate(SHAPES):
        for zeros in (False, True):
            yield draw(backend, dtype, shape, batch=1 + index % 2, seed=index, zeros=zeros, device=device)
