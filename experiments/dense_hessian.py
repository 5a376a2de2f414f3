"""The dense Moore-Penrose Hessian of OT in x, float64 numpy; uses no operator of the package (MATH 5).

    H = diag(2s r_i I) - (1/eps) sum_j P_ij c_ij c_ij^T + (1/eps) R^T (H*)^+ R,     c_ij = 2s (x_i - y_j)

with `R` the derivatives of both marginals' cost moments and `H* = [[D_r, P], [P^T, D_c]]`. The pseudo-inverse
is taken in the normalized variables, where `H*` is `I + [[0, K], [K^T, 0]]`, by the singular values of
`K = D_r^-1/2 P D_c^-1/2`: the pair of the null vector, sigma = 1, is left out by name, not by a cutoff.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["DenseHessian", "dense_hessian"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DenseHessian:
    """A Hessian with the conditioning of the system behind it.

    Attributes:
        matrix: (n d, n d), row-major in the points.
        gap: `1 - sigma_2^2`, smallest nonzero eigenvalue of the normalized Schur complement.
        marginal_error: L1 error of the plan it was made of.
    """

    matrix: Array
    gap: float
    marginal_error: float


def dense_hessian(x: Any, y: Any, f: Any, g: Any, *, eps: float, cost_scale: float = 1.0) -> DenseHessian:
    """Assemble it from clouds and potentials, uniform weights.

    Args:
        x: (n, d).
        y: (m, d).
        f: (n,) potential.
        g: (m,) potential.
        eps: regularization.
        cost_scale: s.

    Returns:
        The matrix of the plan `exp((f_i + g_j - C_ij)/eps)/(n m)`, as it is.
    """
    xs, ys, fs, gs = (np.asarray(part, dtype=np.float64) for part in (x, y, f, g))
    (n, d), m = xs.shape, len(ys)
    moved = 2 * cost_scale * (xs[:, None, :] - ys[None, :, :])
    cost = cost_scale * ((xs[:, None, :] - ys[None, :, :]) ** 2).sum(-1)
    plan = np.exp((fs[:, None] + gs[None, :] - cost) / eps) / (n * m)
    r, c = plan.sum(1), plan.sum(0)
    error = max(float(np.abs(r - 1 / n).sum()), float(np.abs(c - 1 / m).sum()))
    weighted = plan[:, :, None] * moved
    blocks = -np.einsum("ijd,ije->ide", weighted, moved) / eps + (2 * cost_scale * r)[:, None, None] * np.eye(
        d
    )
    out = np.zeros((n, d, n, d))
    out[np.arange(n), :, np.arange(n), :] = blocks
    top = np.zeros((n, n, d))
    top[np.arange(n), np.arange(n)] = weighted.sum(1)
    right = np.concatenate([top, weighted.transpose(1, 0, 2)]).reshape(n + m, n * d)
    scaled = right / np.sqrt(np.concatenate([r, c]))[:, None]
    solved, gap = _pseudo_solve(plan / np.sqrt(r[:, None] * c[None, :]), scaled)
    matrix = out.reshape(n * d, n * d) + scaled.T @ solved / eps
    return DenseHessian(0.5 * (matrix + matrix.T), gap, error)


def _pseudo_solve(k: Array, right: Array) -> tuple[Array, float]:
    """`(I + [[0, K], [K^T, 0]])^+ right` and the spectral gap `1 - sigma_2^2`."""
    n, m = k.shape
    u, sigma, vt = np.linalg.svd(k, full_matrices=True)
    top, bottom = u.T @ right[:n], vt @ right[n:]
    q = len(sigma)
    plus, minus = top[:q] + bottom[:q], top[:q] - bottom[:q]
    divisor = 1 - sigma
    minus[0] = 0.0
    divisor[0] = 1.0
    plus, minus = plus / (1 + sigma)[:, None], minus / divisor[:, None]
    top[:q], bottom[:q] = 0.5 * (plus + minus), 0.5 * (plus - minus)
    gap = float((1 - sigma[1]) * (1 + sigma[1])) if q > 1 else 1.0
    return np.concatenate([u @ top, vt.T @ bottom]), gap
