"""The dual of one dense problem and its ascent: Newton with a Sinkhorn sweep as safeguard, annealed.

Only numpy; used by `tests.truth` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

__all__ = ["Array", "Dual", "cost_matrix", "lse", "potentials", "pseudo_solve"]

RANK_CUT = 1e-14  # eigenvalues of the normalized system lie in [0, 2]; below this they are null modes


def cost_matrix(x: Array, y: Array, cost_scale: float) -> Array:
    """Squared Euclidean cost by explicit differences: no expansion, no cancellation."""
    difference = x[:, None, :] - y[None, :, :]
    return cost_scale * np.einsum("ijk,ijk->ij", difference, difference)


def lse(z: Array, axis: int) -> Array:
    top = np.max(z, axis=axis, keepdims=True)
    return np.squeeze(top, axis) + np.log(np.sum(np.exp(z - top), axis=axis))


@dataclass(frozen=True, eq=False)
class Dual:
    """The dual at one eps on atoms of positive mass."""

    cost: Array
    a: Array
    b: Array
    eps: float
    rho_x: float | None
    rho_y: float | None

    def plan(self, f: Array, g: Array) -> Array:
        with np.errstate(over="ignore", under="ignore"):
            kernel = np.exp((f[:, None] + g[None, :] - self.cost) / self.eps)
            return np.asarray(self.a[:, None] * self.b[None, :] * kernel)

    def conjugate(self, h: Array, weight: Array, rho: float | None) -> float:
        if rho is None:
            return float(weight @ h)
        with np.errstate(over="ignore"):
            return float(rho * (weight @ -np.expm1(-h / rho)))

    def target(self, h: Array, weight: Array, rho: float | None) -> Array:
        return weight if rho is None else weight * np.exp(-h / rho)

    def value(self, f: Array, g: Array) -> float:
        total = self.conjugate(f, self.a, self.rho_x) + self.conjugate(g, self.b, self.rho_y)
        return float(total - self.eps * (self.plan(f, g).sum() - self.a.sum() * self.b.sum()))

    def residual(self, f: Array, g: Array) -> Array:
        p = self.plan(f, g)
        top = self.target(f, self.a, self.rho_x) - p.sum(1)
        return np.concatenate([top, self.target(g, self.b, self.rho_y) - p.sum(0)])

    def transport_cost(self, f: Array, g: Array) -> float:
        """`<P,C>` as `<P, C - f - g> + <r,f> + <c,g>` with exact marginals: second order in their error."""
        inner = np.sum(self.plan(f, g) * (self.cost - f[:, None] - g[None, :]))
        return float(inner + self.target(f, self.a, self.rho_x) @ f + self.target(g, self.b, self.rho_y) @ g)

    def sweep(self, f: Array, g: Array) -> tuple[Array, Array]:
        """One Sinkhorn update of each side."""
        t_x = 1.0 if self.rho_x is None else self.rho_x / (self.rho_x + self.eps)
        t_y = 1.0 if self.rho_y is None else self.rho_y / (self.rho_y + self.eps)
        g = -t_y * self.eps * lse((f[:, None] - self.cost) / self.eps + np.log(self.a)[:, None], 0)
        f = -t_x * self.eps * lse((g[None, :] - self.cost) / self.eps + np.log(self.b)[None, :], 1)
        return f, g

    def newton_step(self, f: Array, g: Array) -> tuple[Array, Array]:
        extra_x = 0.0 if self.rho_x is None else self.eps / self.rho_x
        extra_y = 0.0 if self.rho_y is None else self.eps / self.rho_y
        p = self.plan(f, g)
        diagonal = np.concatenate(
            [
                p.sum(1) + extra_x * self.target(f, self.a, self.rho_x),
                p.sum(0) + extra_y * self.target(g, self.b, self.rho_y),
            ]
        )
        step = pseudo_solve(diagonal, p, self.eps * self.residual(f, g)[:, None])[:, 0]
        return step[: f.size], step[f.size :]


def pseudo_solve(diagonal: Array, p: Array, rhs: Array) -> Array:
    """`[D1 P; P^T D2]^+ rhs` through the eigenvectors of the symmetrically normalized matrix."""
    n = p.shape[0]
    root = np.sqrt(diagonal)
    matrix = np.eye(diagonal.size)
    matrix[:n, n:] = p / np.outer(root[:n], root[n:])
    matrix[n:, :n] = matrix[:n, n:].T
    values, vectors = np.linalg.eigh(matrix)
    keep = values > RANK_CUT
    basis = vectors[:, keep]
    return np.asarray((basis @ ((basis.T @ (rhs / root[:, None])) / values[keep, None])) / root[:, None])


def _ascend(dual: Dual, f: Array, g: Array, max_steps: int = 200) -> tuple[Array, Array]:
    """Newton steps, each followed by a sweep, until the marginal residual stops falling at rounding."""
    f, g = dual.sweep(f, g)
    best = (np.abs(dual.residual(f, g)).sum(), f, g)
    stalled = 0
    for _ in range(max_steps):
        base = dual.value(f, g)
        df, dg = dual.newton_step(f, g)
        step = 1.0
        while step > 1e-6:
            f_new, g_new = dual.sweep(f + step * df, g + step * dg)
            value = dual.value(f_new, g_new)
            if np.isfinite(value) and value >= base - 1e-14 * (1.0 + abs(base)):
                break
            step *= 0.5
        else:
            f_new, g_new = dual.sweep(f, g)
        f, g = f_new, g_new
        error = np.abs(dual.residual(f, g)).sum()
        stalled = 0 if error < 0.5 * best[0] else stalled + 1
        if error < best[0]:
            best = (error, f, g)
        if best[0] < 1e-17 or (stalled >= 4 and best[0] < 1e-12):
            break
    return best[1], best[2]


def potentials(dual: Dual) -> tuple[Array, Array]:
    """Annealed ascent: eps halves from the size of the cost down to the one asked for."""
    ladder = [dual.eps]
    while ladder[-1] < float(np.max(dual.cost)) and len(ladder) < 60:
        ladder.append(2.0 * ladder[-1])
    f, g = np.zeros(dual.a.size), np.zeros(dual.b.size)
    for eps in reversed(ladder):
        level = Dual(dual.cost, dual.a, dual.b, eps, dual.rho_x, dual.rho_y)
        f, g = _ascend(level, f, g)
    return f, g
