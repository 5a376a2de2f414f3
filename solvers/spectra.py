"""Extreme eigenvalues with an honest verdict: value, witness, residual, noise floor and confidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.errors import check_integer, check_number
from ot_newton.solvers.confidence import combined_failure, run_failure
from ot_newton.solvers.density import SpectralDensity, spectral_density
from ot_newton.solvers.eigenpairs import EigenPairs, extreme_eigenpairs
from ot_newton.solvers.lanczos_process import (
    LanczosProcess,
    Tridiagonalization,
    lanczos,
    null_basis,
    project_out,
)
from ot_newton.solvers.linear_map import LinearMap, as_linear_map, random_start

__all__ = [
    "EigenEstimate",
    "EigenPairs",
    "SpectralDensity",
    "Tridiagonalization",
    "extreme_eigenpairs",
    "lambda_max",
    "lambda_min",
    "lanczos",
    "spectral_density",
]

ROUNDING_FACTOR = 4.0
BAND = 1e-6


@dataclass(frozen=True, eq=False)
class EigenEstimate:
    """The smallest (or largest) eigenvalue of a symmetric operator, and what is known about it.

    Attributes:
        value: Rayleigh quotient of ``vector``: an upper bound of lambda_min.
        vector: (N,) unit vector; with ``sign == "negative"`` a rechecked witness of negative curvature.
        residual: `|H v - value v|`, recomputed: some eigenvalue, not always the smallest, is this close.
        sign: for lambda_min: "negative" (proved: value < -noise_floor), "nonnegative" (certified and
            clear of the band around zero) or "undetermined". For lambda_max: "positive",
            "nonpositive", "undetermined".
        confidence: probability that the true eigenvalue is not beyond ``level``; 1 for a dense
            factorization, 0 where nothing is certified.
        noise_floor: rounding (4 eps_mach |H|), the measured asymmetry of H and the caller's own floor:
            the largest.
        n_hvp: products spent.
        seed: seed of the independent starts.
        lambda_max: largest Ritz value (for `lambda_max`: the value itself).
        norm: estimate of |H|.
        level: what ``confidence`` speaks of: lambda_min >= level.
        steps: Lanczos steps of each independent start; empty for a dense factorization.
        breakdown: whether a Krylov space was exhausted.
        n_deflated: directions projected out as null space.
        method: "dense" or "lanczos".
    """

    value: float
    vector: Tensor = field(repr=False)
    residual: float
    sign: str
    confidence: float
    noise_floor: float
    n_hvp: int
    seed: int
    lambda_max: float
    norm: float
    level: float
    steps: tuple[int, ...] = ()
    breakdown: bool = False
    n_deflated: int = 0
    method: str = "lanczos"

    def __float__(self) -> float:
        return self.value

    def as_dict(self, *, vector: bool = False) -> dict[str, Any]:
        """Numbers and words, for records; with ``vector`` all that the constructor takes."""
        names = [f for f in self.__dataclass_fields__ if vector or f != "vector"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class _Target:
    """What a run has to reach."""

    dimension: int
    failure: float
    tol: float
    threshold: float
    band: float
    noise_floor: float
    relative_noise: float
    max_steps: int

    def floor(self, eps: float, norm: float, asymmetry: float) -> float:
        """Rounding, measured asymmetry and known noise: the largest."""
        return max(max(ROUNDING_FACTOR * eps, self.relative_noise) * norm, asymmetry, self.noise_floor)


@dataclass(frozen=True, eq=False)
class _Run:
    """One independent start, as far as it went."""

    theta: float
    high: float
    norm: float
    floor: float
    level: float
    failure: float
    s: np.ndarray[Any, np.dtype[np.float64]]
    process: LanczosProcess


def lambda_min(
    op: Any | Callable[[Tensor], Tensor],
    *,
    n: int | None = None,
    confidence: float = 0.99,
    tol: float = 1e-6,
    max_steps: int | None = None,
    seed: int = 0,
    nullspace: Tensor | None = None,
    noise_floor: float = 0.0,
    relative_noise: float = 0.0,
    threshold: float = 0.0,
    band: float = BAND,
    dense_below: int = 200,
    dtype: torch.dtype | None = None,
) -> EigenEstimate:
    """Estimate the smallest eigenvalue and certify its sign.

    Up to ``dense_below`` one block product of N columns and a dense factorization. Beyond: Lanczos from
    a random start until its Ritz pair has converged and either a negative value is proved or a missed
    eigenvalue is improbable; a second, independent start unless the value is proved to lie below -band.

    Args:
        op: anything with `.shape` and `@`, or a function of one vector with ``n``.
        n: dimension, for a function.
        confidence: probability asked that lambda_min >= `threshold lambda_max - max(noise, band lambda_max)`.
        tol: tolerance on the residual of the Ritz pair, relative to |H|.
        max_steps: cap on the steps of each start; min(N, 300) if None.
        seed: chooses the starts; the global generator is not touched.
        nullspace: (N, m) known null directions (gauge modes), projected out.
        noise_floor: known absolute noise of the operator's eigenvalues, beside rounding and asymmetry.
        relative_noise: the same, relative to |H| (finite differences).
        threshold: level to certify, relative to lambda_max.
        band: slack of the level, relative to lambda_max.
        dense_below: largest N for the dense factorization; 0 for always Lanczos.
        dtype: dtype of vectors, for a function.

    Returns:
        An `EigenEstimate`. Cost: N products dense; else the steps of both starts and one to recheck.

    Raises:
        ValueError: a bad argument; TypeError: not an operator.
        FloatingPointError: the operator returned nan or inf.

    Example:
        >>> import torch
        >>> diagonal = torch.linspace(-0.1, 1, 400, dtype=torch.float64)
        >>> found = lambda_min(lambda v: diagonal * v, n=400)
        >>> found.sign, round(found.value, 6), found.n_hvp < 200
        ('negative', -0.1, True)
    """
    view = as_linear_map(op, n=n, dtype=dtype)
    failure = 1.0 - check_number("confidence", confidence, high=1.0)
    noise = check_number("noise_floor", noise_floor, strict=False)
    check_integer("dense_below", dense_below)
    seed = check_integer("seed", seed)
    rows = null_basis(nullspace, view)
    dimension = view.n - (0 if rows is None else rows.shape[0])
    if dimension < 1:
        raise ValueError("nullspace must leave at least one direction, it spans everything")
    cap = min(dimension, 300) if max_steps is None else check_integer("max_steps", max_steps, low=1)
    target = _Target(
        dimension=dimension,
        failure=_single_failure(max(failure, 1e-12)),
        tol=check_number("tol", tol, strict=False),
        threshold=check_number("threshold", threshold, low=-math.inf, strict=False),
        band=check_number("band", band, strict=False),
        noise_floor=noise,
        relative_noise=check_number("relative_noise", relative_noise, strict=False),
        max_steps=cap,
    )
    if view.n <= dense_below:
        return _dense(view, rows, target, seed)
    return _two_starts(view, rows, target, seed, 1.0 - failure)


def lambda_max(op: Any | Callable[[Tensor], Tensor], **options: Any) -> EigenEstimate:
    """Estimate the largest eigenvalue: `lambda_min` of -H with the signs turned back.

    Args:
        op: as for `lambda_min`.
        **options: as for `lambda_min`; levels are then relative to -lambda_min.

    Returns:
        An `EigenEstimate` whose ``sign`` is "positive", "nonpositive" or "undetermined" and whose
        ``confidence`` is that lambda_max <= level. Cost as for `lambda_min`.

    Example:
        >>> import torch
        >>> found = lambda_max(torch.diag(torch.tensor([1.0, -3.0, 0.5])))
        >>> found.value, found.sign
        (1.0, 'positive')
    """
    view = as_linear_map(op, n=options.pop("n", None), dtype=options.pop("dtype", None))
    turned = lambda_min(view.negated(), **options)
    sign = {"negative": "positive", "nonnegative": "nonpositive"}.get(turned.sign, turned.sign)
    value = -turned.value
    return replace(turned, value=value, lambda_max=value, level=-turned.level, sign=sign)


def _single_failure(failure: float) -> float:
    """Failure allowed to each of two independent runs, so that together they reach ``failure``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if combined_failure(middle, middle) <= failure else (low, middle)
    return low


def _verdict(value: float, floor: float, slack: float, certified: bool) -> str:
    """Negative if proved; nonnegative if certified and clear of the band around zero."""
    if value < -floor:
        return "negative"
    return "nonnegative" if certified and value > slack else "undetermined"


def _dense(view: LinearMap, rows: Tensor | None, target: _Target, seed: int) -> EigenEstimate:
    """One block product with the identity (or with a basis of the null space's complement)."""
    before = view.n_products
    basis = torch.eye(view.n, dtype=view.dtype, device=view.device)
    if rows is not None:
        basis = torch.linalg.svd(rows, full_matrices=True).Vh[rows.shape[0] :].T.contiguous()
    block = (basis.T @ (view @ basis)).to(torch.float64).cpu()
    if not bool(torch.isfinite(block).all()):
        raise FloatingPointError("op returned a value that is not finite")
    values, vectors = torch.linalg.eigh(0.5 * (block + block.T))
    skew = float(torch.linalg.matrix_norm(0.5 * (block - block.T), 2)) if block.shape[0] > 1 else 0.0
    low, high = float(values[0]), float(values[-1])
    norm = max(abs(low), abs(high))
    floor = target.floor(torch.finfo(view.dtype).eps, norm, skew)
    level = target.threshold * high - max(floor, target.band * max(high, 0.0))
    vector = basis @ vectors[:, 0].to(dtype=view.dtype, device=view.device)
    residual = float((block @ vectors[:, 0] - low * vectors[:, 0]).norm())
    sure = 1.0 if low >= level else 0.0
    return EigenEstimate(
        value=low,
        vector=vector / vector.norm(),
        residual=residual,
        sign=_verdict(low, floor, max(floor, target.band * high), sure > 0.0),
        confidence=sure,
        noise_floor=floor,
        n_hvp=view.n_products - before,
        seed=seed,
        lambda_max=high,
        norm=norm,
        level=level,
        n_deflated=0 if rows is None else int(rows.shape[0]),
        method="dense",
    )


def _assess(process: LanczosProcess, target: _Target) -> tuple[_Run, bool]:
    """Ritz values so far, and whether this run has nothing more to find out."""
    values, s = np.linalg.eigh(process.tridiagonal())
    theta, high = float(values[0]), float(values[-1])
    beta = process.beta[-1]
    top = high + beta * abs(float(s[-1, -1]))
    norm = max(abs(theta), abs(high), process.norm_estimate)
    floor = target.floor(process.eps, norm, process.asymmetry())
    level = target.threshold * high - max(floor, target.band * max(high, 0.0))
    bound = beta * abs(float(s[-1, 0]))
    if process.breakdown is not None:
        # Exhausted: a miss needs a start without the eigenvector, to rounding.
        missed = max(process.exhaustion, target.noise_floor / norm if norm > 0 else 0.0)
        failure = min(1.0, target.dimension * missed) if theta >= level else 1.0
    else:
        failure = run_failure(target.dimension, process.alpha, process.beta, level, theta, top)
    converged = bound <= target.tol * norm
    settled = theta < -max(floor, target.band * high) or theta + bound < level or failure <= target.failure
    run = _Run(theta, high, norm, floor, level, failure, s[:, 0], process)
    return run, process.exhausted or (converged and settled)


def _explore(view: LinearMap, start: Tensor, rows: Tensor | None, target: _Target) -> _Run:
    process = LanczosProcess(
        view, start, deflate=rows, noise=target.noise_floor, relative_noise=target.relative_noise
    )
    check = 1
    while True:
        process.run(min(check, target.max_steps))
        if not process.finite:
            raise FloatingPointError(f"op returned a value that is not finite at Lanczos step {process.k}")
        run, done = _assess(process, target)
        if done or process.k >= target.max_steps:
            return run
        check = process.k + max(1, process.k // 10)


def _two_starts(
    view: LinearMap, rows: Tensor | None, target: _Target, seed: int, confidence: float
) -> EigenEstimate:
    before = view.n_products
    runs: list[_Run] = []
    for stream in (1, 2):
        start = random_start(view.n, seed, stream, dtype=view.dtype, device=view.device)
        runs.append(_explore(view, start, rows, target))
        # Within the band a negative value is proved too, but not that nothing lies below the band.
        if runs[-1].theta < -max(runs[-1].floor, target.band * runs[-1].high):
            break
    best = min(runs, key=lambda run: run.theta)
    vector = project_out(best.process.ritz_vector(best.s), rows)
    vector = vector / vector.norm()
    product = project_out(view @ vector, rows)
    value = float(vector @ product)
    floor = max(run.floor for run in runs)
    level = min(run.level for run in runs)
    high = max(run.high for run in runs)
    miss = combined_failure(runs[0].failure, runs[1].failure) if len(runs) == 2 else 1.0
    sure = 1.0 - miss if value >= level else 0.0
    return EigenEstimate(
        value=value,
        vector=vector,
        residual=float((product - value * vector).norm()),
        sign=_verdict(value, floor, max(floor, target.band * high), sure >= confidence),
        confidence=max(sure, 0.0),
        noise_floor=floor,
        n_hvp=view.n_products - before,
        seed=seed,
        lambda_max=high,
        norm=max(run.norm for run in runs),
        level=level,
        steps=tuple(run.process.k for run in runs),
        breakdown=any(run.process.breakdown is not None for run in runs),
        n_deflated=0 if rows is None else int(rows.shape[0]),
    )
