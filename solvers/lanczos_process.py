"""The Lanczos process with full reorthogonalization done twice; everything spectral is built on it.

H Q = Q T + r e_k^T,      Q^T Q = I,      Q^T r = 0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ot_newton.errors import check_integer, check_number
from ot_newton.solvers.linear_map import LinearMap, as_linear_map, random_start

__all__ = ["LanczosProcess", "Tridiagonalization", "lanczos", "null_basis", "project_out"]

BREAKDOWN_FACTOR = 64.0


def null_basis(nullspace: Tensor | None, op: LinearMap) -> Tensor | None:
    """Orthonormal rows `(m, N)` spanning the columns of ``nullspace`` `(N, m)`, or None.

    Raises:
        ValueError: another shape, or values that are not finite.
    """
    if nullspace is None:
        return None
    block = torch.as_tensor(nullspace)
    block = block[:, None] if block.ndim == 1 else block
    if block.ndim != 2 or block.shape[0] != op.n:
        raise ValueError(f"nullspace must have shape ({op.n}, m), got {tuple(block.shape)}")
    if not bool(torch.isfinite(block).all()):
        raise ValueError("nullspace must be finite, got nan or inf")
    if block.shape[1] == 0:
        return None
    u, s, _ = torch.linalg.svd(block.to(dtype=op.dtype, device=op.device), full_matrices=False)
    keep = s > s.max() * op.n * torch.finfo(op.dtype).eps
    return u[:, keep].T.contiguous() if bool(keep.any()) else None


def project_out(v: Tensor, rows: Tensor | None) -> Tensor:
    """`v` minus its part along the orthonormal ``rows`` `(m, N)`, removed twice (rounding)."""
    if rows is None:
        return v
    for _ in range(2):
        v = v - rows.T @ (rows @ v)
    return v


@dataclass(frozen=True, eq=False)
class Tridiagonalization:
    """`H Q = Q T + residual e_k^T`.

    Attributes:
        Q: (N, k) orthonormal basis; k may be smaller than asked when the process broke down.
        T: (k, k) symmetric tridiagonal.
        residual: (N,) the vector left over, orthogonal to Q.
        breakdown: step at which the Krylov space was exhausted (T then holds exact eigenvalues), else None.
        asymmetry: norm of the part of `Q^T H Q` that symmetry says is zero: the measured noise of `H`.
        n_hvp: products made.
        seed: seed of the start, None if it was given.
    """

    Q: Tensor = field(repr=False)
    T: Tensor = field(repr=False)
    residual: Tensor = field(repr=False)
    breakdown: int | None
    asymmetry: float
    n_hvp: int
    seed: int | None

    @property
    def k(self) -> int:
        """Steps made."""
        return int(self.T.shape[0])

    @property
    def beta(self) -> float:
        """Norm of the residual; `beta |s_k|` bounds the distance of a Ritz value to an eigenvalue."""
        return float(self.residual.norm())

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Ritz values, ascending, and the bounds `beta |s_k|` on their distance to some eigenvalue."""
        values, s = torch.linalg.eigh(self.T.to(torch.float64).cpu())
        return values, self.beta * s[-1].abs()


class LanczosProcess:
    """The process, one product per `step`; the basis is kept as rows `(k, N)`.

    Attributes:
        basis: (k, N) the Lanczos vectors so far.
        alpha: diagonal of T so far.
        beta: off-diagonals; the last one is the norm of the current residual.
        breakdown: step of the breakdown, else None.
        finite: False once a product was not finite; no step is possible after that.
    """

    def __init__(
        self,
        op: LinearMap,
        start: Tensor,
        *,
        deflate: Tensor | None = None,
        noise: float = 0.0,
        relative_noise: float = 0.0,
    ) -> None:
        self.op, self.deflate, self.noise = op, deflate, noise
        self.eps = torch.finfo(op.dtype).eps
        self.exhaustion = max(BREAKDOWN_FACTOR * self.eps, relative_noise)
        self._rows = torch.empty((min(op.n, 16), op.n), dtype=op.dtype, device=op.device)
        self.alpha: list[float] = []
        self.beta: list[float] = []
        self.breakdown: int | None = None
        self.finite = True
        self.norm_estimate = 0.0
        self._upper: list[NDArray[np.float64]] = []
        start = project_out(start.to(dtype=op.dtype, device=op.device).reshape(-1), deflate)
        length = float(start.norm())
        self.residual = start / length if length > 0 else start
        self._next = self.residual
        if not length > 0:
            self.breakdown = 0

    @property
    def k(self) -> int:
        """Steps made."""
        return len(self.alpha)

    @property
    def basis(self) -> Tensor:
        """(k, N) rows."""
        return self._rows[: self.k]

    @property
    def exhausted(self) -> bool:
        """No further step is possible."""
        return self.breakdown is not None or not self.finite

    def _append(self, q: Tensor) -> Tensor:
        k = self.k
        if k == self._rows.shape[0]:
            grown = torch.empty((min(self.op.n, 2 * k), self.op.n), dtype=q.dtype, device=q.device)
            grown[:k] = self._rows
            self._rows = grown
        self._rows[k] = q
        return self._rows[: k + 1]

    def step(self) -> None:
        """One more column of Q and T; one product."""
        rows = self._append(self._next)
        w = project_out(self.op @ rows[-1], self.deflate)
        first = rows @ w
        w = w - first @ rows
        second = rows @ w
        w = project_out(w - second @ rows, self.deflate)
        coefficients = np.asarray((first + second).to(torch.float64).cpu())
        alpha, beta = float(coefficients[-1]), float(w.norm())
        column = coefficients[:-1].copy()
        if column.size:
            column[-1] -= self.beta[-1]
        self._upper.append(column)
        self.alpha.append(alpha)
        self.beta.append(beta)
        self.residual = w
        self.finite = bool(np.isfinite(alpha) and np.isfinite(beta))
        if not self.finite:
            return
        before = self.beta[-2] if len(self.beta) > 1 else 0.0
        self.norm_estimate = max(self.norm_estimate, float(np.hypot(np.hypot(alpha, before), beta)))
        if beta <= max(self.exhaustion * self.norm_estimate, self.noise) or self.k >= self.op.n:
            self.breakdown = self.k
        else:
            self._next = w / beta

    def run(self, k: int) -> None:
        """Step until k columns or exhaustion."""
        while self.k < k and not self.exhausted:
            self.step()

    def tridiagonal(self) -> NDArray[np.float64]:
        """T (k, k) in float64."""
        t = np.diag(np.array(self.alpha, dtype=np.float64))
        off = np.array(self.beta[: max(self.k - 1, 0)], dtype=np.float64)
        return t + np.diag(off, 1) + np.diag(off, -1) if self.k > 1 else t

    def asymmetry(self) -> float:
        """Spectral norm of the part of `Q^T H Q` above T that symmetry says is zero."""
        k = self.k
        if k < 2 or not self.finite:
            return 0.0
        upper = np.zeros((k, k))
        for j, column in enumerate(self._upper):
            upper[: column.size, j] = column
        return float(np.linalg.norm(upper, 2))

    def ritz_vector(self, s: NDArray[np.float64]) -> Tensor:
        """Unit vector `Q s`."""
        weights = torch.from_numpy(np.ascontiguousarray(s)).to(dtype=self.op.dtype, device=self.op.device)
        v = weights @ self.basis
        v /= v.norm()
        return v


def lanczos(
    op: Any | Callable[[Tensor], Tensor],
    k: int,
    *,
    n: int | None = None,
    seed: int = 0,
    start: Tensor | None = None,
    nullspace: Tensor | None = None,
    noise: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tridiagonalization:
    """Tridiagonalize a symmetric operator on a Krylov space of dimension at most k.

    Full reorthogonalization twice, `max |Q^T Q - I|` at rounding level. The process ends early when the
    residual falls to `64 eps_mach |T|` (or ``noise``): the space is then invariant.

    Args:
        op: anything with `.shape` and `@`, or a function of one vector with ``n``.
        k: steps; more than N is allowed and ends at N.
        n: dimension, for a function.
        seed: chooses the Gaussian start; the global generator is not touched.
        start: (N,) a start instead of the random one.
        nullspace: (N, m) directions projected out of the start and of every product.
        noise: absolute size below which a residual is noise of the operator.
        dtype: dtype of vectors for a function.

    Returns:
        A `Tridiagonalization`. Cost: one product per step.

    Raises:
        ValueError: a bad argument, or a start that vanishes outside of the nullspace.
        FloatingPointError: the operator returned nan or inf.

    Example:
        >>> import torch
        >>> t = lanczos(torch.diag(torch.tensor([-1.0, 2.0, 2.0, 2.0])), 4)
        >>> t.breakdown, [round(float(value), 5) for value in t.ritz()[0]]
        (2, [-1.0, 2.0])
    """
    steps = check_integer("k", k, low=1)
    noise = check_number("noise", noise, strict=False)
    seed = check_integer("seed", seed)
    view = as_linear_map(op, n=n, dtype=dtype)
    if start is None:
        first = random_start(view.n, seed, 0, dtype=view.dtype, device=view.device)
    else:
        first = torch.as_tensor(start)
        if first.numel() != view.n or not bool(torch.isfinite(first).all()):
            raise ValueError(f"start must be {view.n} finite numbers, got shape {tuple(first.shape)}")
    before = view.n_products
    process = LanczosProcess(view, first, deflate=null_basis(nullspace, view), noise=noise)
    if process.breakdown == 0:
        raise ValueError("start must not vanish: it is zero or lies in the nullspace")
    process.run(steps)
    if not process.finite:
        raise FloatingPointError(f"op returned a value that is not finite at Lanczos step {process.k}")
    return Tridiagonalization(
        Q=process.basis.T.clone(),
        T=torch.from_numpy(process.tridiagonal()).to(dtype=view.dtype, device=view.device),
        residual=process.residual,
        breakdown=process.breakdown,
        asymmetry=process.asymmetry(),
        n_hvp=view.n_products - before,
        seed=seed if start is None else None,
    )
