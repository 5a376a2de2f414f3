"""Several extreme eigenpairs: thick-restart Lanczos, locking, and fresh starts for multiplicities."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import ConvergenceWarning, PrecisionWarning, check_choice, check_integer, check_number
from ot_newton.solvers.lanczos_process import BREAKDOWN_FACTOR, null_basis, project_out
from ot_newton.solvers.linear_map import LinearMap, as_linear_map, random_start

__all__ = ["EigenPairs", "ThickRestart", "extreme_eigenpairs"]


@dataclass(frozen=True, eq=False)
class EigenPairs:
    """k extreme eigenpairs.

    Attributes:
        values: (k,) ascending for "smallest", descending for "largest"; float64.
        vectors: (N, k) orthonormal.
        residuals: (k,) `|H v - value v|`, recomputed from fresh products.
        converged: (k,) residual within the tolerance.
        tol: the absolute tolerance used, after raising it to the rounding floor.
        n_hvp: products made.
        n_restarts: thick restarts.
        n_starts: independent starts; the last one found nothing more extreme.
        seed: seed of the starts.
    """

    values: Tensor
    vectors: Tensor = field(repr=False)
    residuals: Tensor
    converged: Tensor
    tol: float
    n_hvp: int
    n_restarts: int
    n_starts: int
    seed: int


class ThickRestart:
    """Thick-restart Lanczos for the smallest pairs, orthogonal to ``locked`` rows.

    Attributes:
        rows: (j, N) the current orthonormal basis.
        n_restarts: restarts so far.
        norm: estimate of |H|.
    """

    def __init__(self, op: LinearMap, capacity: int, locked: Tensor | None, seed: int, stream: int) -> None:
        self.op, self.locked, self.seed, self.stream = op, locked, seed, stream
        self.eps = torch.finfo(op.dtype).eps
        self.free = op.n - (0 if locked is None else locked.shape[0])
        self.capacity = min(capacity, self.free)
        self.rows = torch.empty((0, op.n), dtype=op.dtype, device=op.device)
        self.small = torch.zeros((0, 0), dtype=torch.float64)
        self.norm = 0.0
        self.n_restarts = 0
        self.beta = 0.0
        self.pending: Tensor | None = self._fresh()

    def _fresh(self) -> Tensor | None:
        """A random unit vector orthogonal to everything so far; None when the space is full."""
        if self.rows.shape[0] >= self.free:
            return None
        for _ in range(3):
            self.stream += 1
            v = random_start(self.op.n, self.seed, self.stream, dtype=self.op.dtype, device=self.op.device)
            v = self._orthogonal(v)
            length = float(v.norm())
            if length > 0.0:
                v = self._orthogonal(v / length)
                v /= v.norm()
                return v
        return None

    def _orthogonal(self, v: Tensor) -> Tensor:
        return project_out(project_out(v, self.locked), self.rows if self.rows.shape[0] else None)

    def expand(self) -> None:
        """Fill the basis up to its capacity; one product per new vector."""
        while self.pending is not None and self.rows.shape[0] < self.capacity:
            q = self.pending
            self.rows = torch.cat([self.rows, q[None]])
            w = project_out(self.op @ q, self.locked)
            size = float(w.norm())
            if not size < float("inf"):
                raise FloatingPointError("op returned a value that is not finite")
            self.norm = max(self.norm, size)
            first = self.rows @ w
            w = w - first @ self.rows
            second = self.rows @ w
            w = project_out(w - second @ self.rows, self.locked)
            column = (first + second).to(torch.float64).cpu()
            j = self.rows.shape[0]
            grown = torch.zeros((j, j), dtype=torch.float64)
            grown[: j - 1, : j - 1] = self.small
            grown[:, -1], grown[-1, :] = column, column
            self.small = grown
            self.beta = float(w.norm())
            if self.beta <= BREAKDOWN_FACTOR * self.eps * self.norm:
                self.beta, self.pending = 0.0, self._fresh()
            else:
                self.pending = w / self.beta

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values (ascending), coordinates, and residual norms."""
        values, s = torch.linalg.eigh(self.small)
        return values, s, self.beta * s[-1].abs()

    def restart(self, keep: int) -> None:
        """Shrink the basis to the ``keep`` smallest Ritz vectors."""
        values, s, _ = self.ritz()
        keep = min(keep, values.numel())
        rows = s[:, :keep].T.to(dtype=self.op.dtype, device=self.op.device) @ self.rows
        # One QR: rounding in the rotation must not accumulate over restarts.
        q, r = torch.linalg.qr(rows.T)
        self.rows = (q * torch.sign(torch.diagonal(r))).T.contiguous()
        self.small = torch.diag(values[:keep])
        if self.pending is not None:
            v = self._orthogonal(self.pending)
            self.pending = v / v.norm()
        self.n_restarts += 1


@dataclass
class _Search:
    op: LinearMap
    k: int
    tol: float
    max_hvp: int
    capacity: int
    seed: int
    gauge: Tensor | None
    restarts: int = 0
    starts: int = 0
    norm: float = 0.0

    def floor(self) -> float:
        """Absolute tolerance: the relative one, or rounding."""
        return max(self.tol, 8.0 * torch.finfo(self.op.dtype).eps) * self.norm

    def run(self, locked: Tensor | None, wanted: int, budget_end: int) -> tuple[Tensor, Tensor, bool]:
        """Smallest ``wanted`` pairs orthogonal to ``locked``; also whether all have converged."""
        process = ThickRestart(self.op, self.capacity, locked, self.seed, 10_000 * (self.starts + 1))
        self.starts += 1
        while True:
            process.expand()
            self.norm = max(self.norm, process.norm)
            values, s, bounds = process.ritz()
            have = min(wanted, values.numel())
            done = bool((bounds[:have] <= self.floor()).all()) or process.pending is None
            if done or self.op.n_products >= budget_end:
                rows = s[:, :have].T.to(dtype=self.op.dtype, device=self.op.device) @ process.rows
                return values[:have], rows, done
            process.restart(min(have + (process.capacity - have) // 2, process.capacity - 1))
            self.restarts += 1


def extreme_eigenpairs(
    op: Any | Callable[[Tensor], Tensor],
    k: int = 1,
    *,
    which: str = "smallest",
    n: int | None = None,
    tol: float | None = None,
    max_hvp: int | None = None,
    basis: int | None = None,
    seed: int = 0,
    nullspace: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> EigenPairs:
    """The k smallest or largest eigenpairs, with multiplicities.

    Thick-restart Lanczos (Wu and Simon, 2000). One Krylov space holds one copy of a repeated
    eigenvalue, so converged pairs are locked and fresh random starts, orthogonal to them, go on until
    one finds nothing more extreme.

    Args:
        op: anything with `.shape` and `@`, or a function with ``n``.
        k: number of pairs, at most the dimension.
        which: "smallest" or "largest" (algebraically).
        n: dimension, for a function.
        tol: tolerance on residuals, relative to |H|; 1e-8 (float32: 1e-5) if None; a smaller one than
            8 eps_mach is raised to that, with a warning.
        max_hvp: cap on the products; 40 times the basis if None.
        basis: vectors kept at most; max(2k + 20, 30) if None.
        seed: chooses the starts.
        nullspace: (N, m) directions projected out.
        dtype: dtype of vectors, for a function.

    Returns:
        An `EigenPairs`; a pair that has not converged is flagged and warned about.

    Raises:
        ValueError: a bad argument; FloatingPointError: the operator returned nan or inf.

    Example:
        >>> import torch
        >>> h = torch.diag(torch.tensor([-1.0, -1.0, 0.5, 3.0], dtype=torch.float64))
        >>> pairs = extreme_eigenpairs(h, 3)
        >>> [round(value, 9) for value in pairs.values.tolist()], bool(pairs.converged.all())
        ([-1.0, -1.0, 0.5], True)
    """
    check_choice("which", which, ("smallest", "largest"))
    view = as_linear_map(op, n=n, dtype=dtype)
    gauge = null_basis(nullspace, view)
    free = view.n - (0 if gauge is None else int(gauge.shape[0]))
    count = check_integer("k", k, low=1)
    if count > free:
        raise ValueError(f"k must be at most the free dimension {free}, got {count}")
    if tol is None:
        tol = 1e-8 if view.dtype is torch.float64 else 1e-5
    tol = check_number("tol", tol, strict=False)
    if tol < 8.0 * torch.finfo(view.dtype).eps:
        warnings.warn(
            f"tol {tol:g} is below the rounding floor and was raised to 8 eps_mach",
            PrecisionWarning,
            stacklevel=2,
        )
    size = max(2 * count + 20, 30) if basis is None else check_integer("basis", basis, low=count + 2)
    cap = 40 * size if max_hvp is None else check_integer("max_hvp", max_hvp, low=1)
    before = view.n_products
    signed = view if which == "smallest" else view.negated()
    search = _Search(signed, count, tol, cap, size, check_integer("seed", seed), gauge)
    values, rows = _locked_search(search)
    return _checked(search, view, values, rows, which, before)


def _locked_search(search: _Search) -> tuple[Tensor, Tensor]:
    """Lock pairs from independent starts until a start finds nothing smaller."""
    end = search.op.n_products + search.max_hvp
    values, rows, done = search.run(search.gauge, search.k, end)
    while done and search.op.n_products < end:
        locked = rows if search.gauge is None else torch.cat([search.gauge, rows])
        if locked.shape[0] >= search.op.n:
            break
        more, extra, done = search.run(locked, 1, end)
        full = values.numel() >= search.k
        if full and float(more[0]) >= float(values[search.k - 1]) - search.floor():
            break
        values, rows = torch.cat([values, more]), torch.cat([rows, extra])
        order = torch.argsort(values)
        values, rows = values[order], rows[order.to(rows.device)]
    return values[: search.k], rows[: search.k]


def _checked(
    search: _Search, view: LinearMap, values: Tensor, rows: Tensor, which: str, before: int
) -> EigenPairs:
    """Recompute values and residuals from fresh products; warn where they miss the tolerance."""
    vectors, _ = torch.linalg.qr(rows.T)
    block = project_out(view @ vectors, search.gauge)
    inner = (vectors.T @ block).to(torch.float64).cpu()
    exact, turn = torch.linalg.eigh(0.5 * (inner + inner.T))
    if which == "largest":
        exact, turn = exact.flip(0), turn.flip(1)
    mixed = turn.to(dtype=view.dtype, device=view.device)
    vectors, block = vectors @ mixed, block @ mixed
    residuals = (block - vectors * exact.to(dtype=view.dtype, device=view.device)).norm(dim=0)
    residuals = residuals.to(torch.float64).cpu()
    # The recheck has rounding of its own: a product and a rotation.
    limit = 2.0 * search.floor()
    if not bool((residuals <= limit).all()):
        warnings.warn(
            f"{int((residuals > limit).sum())} of {search.k} eigenpairs missed tol: largest residual "
            f"{float(residuals.max()):.1e}, tolerance {limit:.1e}; raise max_hvp or basis",
            ConvergenceWarning,
            stacklevel=3,
        )
    return EigenPairs(
        values=exact,
        vectors=vectors,
        residuals=residuals,
        converged=residuals <= limit,
        tol=limit,
        n_hvp=view.n_products - before,
        n_restarts=search.restarts,
        n_starts=search.starts,
        seed=search.seed,
    )
