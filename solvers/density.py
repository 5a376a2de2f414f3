"""Spectral density by stochastic Lanczos quadrature, with error bars over the probes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import check_integer, check_number
from ot_newton.solvers.lanczos_process import LanczosProcess, null_basis
from ot_newton.solvers.linear_map import as_linear_map, random_start

__all__ = ["SpectralDensity", "spectral_density"]


@dataclass(frozen=True, eq=False)
class SpectralDensity:
    """Density of eigenvalues on a grid; it integrates to 1.

    Attributes:
        grid: (G,) points, float64.
        density: (G,) mean over the probes, smoothed by a Gaussian of standard deviation ``width``.
        error: (G,) standard error of that mean.
        width: the smoothing.
        nodes: (probes, k) Ritz values, padded with nan.
        weights: (probes, k) their quadrature weights, each row sums to 1.
        n_hvp: products made.
        seed: seed of the probes.
    """

    grid: Tensor = field(repr=False)
    density: Tensor = field(repr=False)
    error: Tensor = field(repr=False)
    width: float
    nodes: Tensor = field(repr=False)
    weights: Tensor = field(repr=False)
    n_hvp: int
    seed: int

    def mean(self, function: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """Estimate `trace(function(H)) / N` and its standard error over the probes."""
        values = torch.where(self.weights > 0, function(self.nodes.nan_to_num()), torch.zeros(()))
        samples = (self.weights * values).sum(1)
        return float(samples.mean()), _standard_error(samples, 0).item()

    def mass_below(self, level: float) -> tuple[float, float]:
        """Fraction of eigenvalues below ``level`` and its standard error."""
        return self.mean(lambda nodes: (nodes < level).to(nodes.dtype))


def _standard_error(samples: Tensor, axis: int) -> Tensor:
    count = samples.shape[axis]
    if count < 2:
        return torch.full_like(samples.select(axis, 0), math.nan)
    return samples.std(axis, unbiased=True) / math.sqrt(count)


def spectral_density(
    op: Any | Callable[[Tensor], Tensor],
    *,
    n: int | None = None,
    n_probes: int = 10,
    k: int = 60,
    n_grid: int = 400,
    width: float | None = None,
    seed: int = 0,
    nullspace: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> SpectralDensity:
    """Spectral density of a symmetric operator by stochastic Lanczos quadrature.

    Each probe is a random unit vector; the eigenvalues of its T are nodes, the squared first components
    of its eigenvectors are weights (Golub and Welsch; Ubaru, Chen and Saad, 2017).

    Args:
        op: anything with `.shape` and `@`, or a function with ``n``.
        n: dimension, for a function.
        n_probes: independent probes; the error bars come from their scatter.
        k: Lanczos steps per probe.
        n_grid: points of the grid.
        width: smoothing; 2% of the spread if None.
        seed: chooses the probes; the global generator is not touched.
        nullspace: (N, m) directions projected out.
        dtype: dtype of vectors, for a function.

    Returns:
        A `SpectralDensity`. Cost: `n_probes k` products at most.

    Raises:
        ValueError: a bad argument.
        FloatingPointError: the operator returned nan or inf.

    Example:
        >>> import torch
        >>> h = torch.diag(torch.tensor([-1.0] * 30 + [2.0] * 70, dtype=torch.float64))
        >>> share, error = spectral_density(h, n_probes=20, k=5).mass_below(0.0)
        >>> abs(share - 0.3) < 4 * error
        True
    """
    probes = check_integer("n_probes", n_probes, low=1)
    steps = check_integer("k", k, low=1)
    check_integer("seed", seed)
    points = check_integer("n_grid", n_grid, low=2)
    view = as_linear_map(op, n=n, dtype=dtype)
    rows = null_basis(nullspace, view)
    before = view.n_products
    nodes = torch.full((probes, min(steps, view.n)), math.nan, dtype=torch.float64)
    weights = torch.zeros_like(nodes)
    for p in range(probes):
        start = random_start(
            view.n, check_integer("seed", seed), 100 + p, dtype=view.dtype, device=view.device
        )
        process = LanczosProcess(view, start, deflate=rows)
        process.run(steps)
        if not process.finite:
            raise FloatingPointError(f"op returned a value that is not finite at Lanczos step {process.k}")
        values, s = torch.linalg.eigh(torch.from_numpy(process.tridiagonal()))
        nodes[p, : process.k], weights[p, : process.k] = values, s[0].square()
    low, high = float(nodes.nan_to_num(math.inf).min()), float(nodes.nan_to_num(-math.inf).max())
    spread = max(high - low, 1e-6 * max(abs(low), abs(high)), torch.finfo(torch.float64).tiny)
    sigma = 0.02 * spread if width is None else check_number("width", width)
    grid = torch.linspace(low - 4 * sigma, high + 4 * sigma, points, dtype=torch.float64)
    offsets = (grid[:, None, None] - nodes.nan_to_num()[None]) / sigma
    bumps = torch.exp(-0.5 * offsets.square()) / (sigma * math.sqrt(2 * math.pi))
    samples = (bumps * weights).sum(-1)
    return SpectralDensity(
        grid=grid,
        density=samples.mean(1),
        error=_standard_error(samples, 1),
        width=sigma,
        nodes=nodes,
        weights=weights,
        n_hvp=view.n_products - before,
        seed=seed,
    )
