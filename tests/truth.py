"""Dense float64 truth for entropic optimal transport; shares no solver and no code with the package.

Only numpy is used. The potentials come from a dense Newton ascent on the dual in the log domain, with
annealing, a Sinkhorn sweep after each step as safeguard, and a line search on the dual value. The
derivatives come from the implicit function theorem applied to the dual `F(f, g; x, y)`,

    d2 OT = F_zz - F_zp (F_pp)^+ F_pz,        p = (f, g),  z = (x, y),

with the explicit tensor `dC_ij/dz` (n, m, N) and a Moore-Penrose inverse by `eigh`; no streaming form,
no Schur complement and no low-rank factorization of dC are involved.

Convention: `C = s |x - y|^2`, `P_ij = a_i b_j exp((f_i + g_j - C_ij)/eps)`; `rho` None is a hard marginal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.truth_dual import Array, Dual, cost_matrix, lse, potentials, pseudo_solve

__all__ = [
    "Divergence",
    "Truth",
    "cost_matrix",
    "directional_difference",
    "divergence",
    "solve",
    "uniform",
]


def uniform(n: int) -> Array:
    """Uniform probability weights."""
    return np.full(n, 1.0 / n)


@dataclass(frozen=True, eq=False)
class Truth:
    """The solved problem; potentials of zero-weight atoms are their Sinkhorn extension."""

    x: Array
    y: Array
    a: Array
    b: Array
    eps: float
    cost_scale: float
    rho_x: float | None
    rho_y: float | None
    f: Array
    g: Array
    plan: Array
    value: float
    cost: float

    @property
    def balanced(self) -> bool:
        """Whether both marginals are hard."""
        return self.rho_x is None and self.rho_y is None

    @property
    def marginal_error(self) -> float:
        """L1 distance of the plan's marginals to `a exp(-f/rho)`, `b exp(-g/rho)`."""
        top = self.a if self.rho_x is None else self.a * np.exp(-self.f / self.rho_x)
        bottom = self.b if self.rho_y is None else self.b * np.exp(-self.g / self.rho_y)
        return float(np.abs(self.plan.sum(1) - top).sum() + np.abs(self.plan.sum(0) - bottom).sum())

    def primal(self) -> float:
        """`<P,C> + eps KL(P|ab) + rho KL terms`; equals `value` by strong duality."""
        total = self.cost + self.eps * _kl(self.plan, np.outer(self.a, self.b))
        if self.rho_x is not None:
            total += self.rho_x * _kl(self.plan.sum(1), self.a)
        if self.rho_y is not None:
            total += self.rho_y * _kl(self.plan.sum(0), self.b)
        return float(total)

    def gradient(self, wrt: str) -> Array:
        """Gradient in "x", "y", "a" or "b"; in the weights it is tangent when both sides are hard."""
        if wrt in ("x", "y"):
            size = self.x.size
            full = np.einsum("ij,ijp->p", self.plan, _cost_jacobian(self, "xy"))
            part = full[:size] if wrt == "x" else full[size:]
            return np.asarray(part.reshape(self.x.shape if wrt == "x" else self.y.shape))
        exponent = (
            self.f[:, None] + self.g[None, :] - cost_matrix(self.x, self.y, self.cost_scale)
        ) / self.eps
        rows, cols = self.a > 0, self.b > 0
        if wrt == "a":
            ratio = np.exp(exponent[:, cols]) @ self.b[cols]
            return self._weight_gradient(self.f, self.a, self.b, self.rho_x, ratio)
        ratio = np.exp(exponent[rows].T) @ self.a[rows]
        return self._weight_gradient(self.g, self.b, self.a, self.rho_y, ratio)

    def _weight_gradient(
        self, h: Array, weight: Array, other: Array, rho: float | None, ratio: Array
    ) -> Array:
        phi = h if rho is None else -rho * np.expm1(-h / rho)
        out = phi - self.eps * ratio + self.eps * other.sum()
        return np.asarray(out - out[weight > 0].mean() if self.balanced else out)

    def hessian(self, wrt: str) -> Array:
        """Dense Hessian of the value in "x", "y" or "xy" (row-major, x then y).

        The implicit part is written as the weighted least-squares residual of dC on functions `w1 + w2`,
        `-(1/eps) sum P (dC - w1 - w2)^2 - sum r w1^2/rho_x - sum c w2^2/rho_y`, which is stationary in w:
        errors of the pseudo-inverse enter squared, and nothing of size dC^2/eps cancels.
        """
        factor, weight = self._curvature(wrt)
        second = np.kron(self._second_cost_derivative(wrt), np.eye(self.x.shape[1]))
        out = second - (factor.T * weight) @ factor
        return np.asarray(0.5 * (out + out.T))

    def product(self, wrt: str, v: Array) -> Array:
        """`H v` for (N,) without the (N, N) matrix: for large d."""
        factor, weight = self._curvature(wrt)
        explicit = self._second_cost_derivative(wrt) @ v.reshape(-1, self.x.shape[1])
        return np.asarray(explicit.ravel() - factor.T @ (weight * (factor @ v)))

    def _curvature(self, wrt: str) -> tuple[Array, Array]:
        """The implicit part as `F^T diag(w) F`, to be subtracted."""
        jac = _cost_jacobian(self, wrt)
        rows, cols = self.a > 0, self.b > 0
        p = self.plan[np.ix_(rows, cols)]
        jac = jac[np.ix_(rows, cols)]
        coupled = np.concatenate([np.einsum("ij,ijp->ip", p, jac), np.einsum("ij,ijp->jp", p, jac)])
        slack = [0.0 if rho is None else 1.0 / rho for rho in (self.rho_x, self.rho_y)]
        diagonal = [p.sum(1) * (1 + self.eps * slack[0]), p.sum(0) * (1 + self.eps * slack[1])]
        w = pseudo_solve(np.concatenate(diagonal), p, coupled)
        n = p.shape[0]
        rest = jac - w[:n, None, :] - w[None, n:, :]
        factor = np.concatenate([rest.reshape(-1, rest.shape[-1]), w])
        weight = np.concatenate([p.ravel() / self.eps, slack[0] * p.sum(1), slack[1] * p.sum(0)])
        return factor, weight

    def _second_cost_derivative(self, wrt: str) -> Array:
        """`sum_ij P_ij d2 C_ij` on points (times the identity in coordinates), block by block."""
        r, c = self.plan.sum(1), self.plan.sum(0)
        blocks = {
            "x": np.diag(r),
            "y": np.diag(c),
            "xy": np.block([[np.diag(r), -self.plan], [-self.plan.T, np.diag(c)]]),
        }
        return np.asarray(2 * self.cost_scale * blocks[wrt])

    def schur(self, side: str = "y", *, normalized: bool = False) -> Array:
        """Schur complement of `H*` on a side, zero rows for zero weights."""
        p = self.plan if side == "y" else self.plan.T
        rho_own, rho_other = (self.rho_y, self.rho_x) if side == "y" else (self.rho_x, self.rho_y)
        own = p.sum(0) * (1 + (0.0 if rho_own is None else self.eps / rho_own))
        other = p.sum(1) * (1 + (0.0 if rho_other is None else self.eps / rho_other))
        inverse = np.divide(1.0, other, out=np.zeros_like(other), where=other > 0)
        out = np.diag(own) - p.T @ (inverse[:, None] * p)
        if not normalized:
            return np.asarray(out)
        scale = np.divide(1.0, np.sqrt(own), out=np.zeros_like(own), where=own > 0)
        return np.asarray(scale[:, None] * out * scale[None, :])

    def spectrum(self, wrt: str) -> Array:
        """Eigenvalues of the Hessian, ascending.

        Orthogonally to the span of both clouds H is `sum P d2C` alone: a large d is rotated away first.
        """
        both = np.concatenate([self.x, self.y])
        spare = self.x.shape[1] - both.shape[0]
        if spare <= 0:
            return np.asarray(np.linalg.eigvalsh(self.hessian(wrt)))
        basis = np.linalg.qr(both.T)[0]
        small = replace(self, x=self.x @ basis, y=self.y @ basis).spectrum(wrt)
        rest = np.repeat(np.linalg.eigvalsh(self._second_cost_derivative(wrt)), spare)
        return np.sort(np.concatenate([small, rest]))


def _kl(p: Array, q: Array) -> float:
    inside = p > 0
    log_part = float(np.sum(p[inside] * np.log(p[inside] / q[inside])))
    return log_part - float(p.sum()) + float(q.sum())


def _cost_jacobian(truth: Truth, wrt: str) -> Array:
    """`dC_ij/dz_p` as an (n, m, N) tensor, entry by entry."""
    n, m, d = truth.x.shape[0], truth.y.shape[0], truth.x.shape[1]
    pull = 2 * truth.cost_scale * (truth.x[:, None, :] - truth.y[None, :, :])
    in_x = np.zeros((n, m, n, d))
    in_y = np.zeros((n, m, m, d))
    if "x" in wrt:
        in_x[np.arange(n), :, np.arange(n), :] = pull
    if "y" in wrt:
        in_y[:, np.arange(m), np.arange(m), :] = -pull
    parts = {"x": [in_x], "y": [in_y], "xy": [in_x, in_y]}[wrt]
    return np.concatenate([part.reshape(n, m, -1) for part in parts], axis=2)


def solve(
    x: Any,
    y: Any,
    a: Any = None,
    b: Any = None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    rho_x: float | None = None,
    rho_y: float | None = None,
) -> Truth:
    """Solve one problem to rounding.

    Raises:
        ArithmeticError: the ascent did not reach a marginal error of 1e-11 relative to the mass.
    """
    x, y = np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)
    a = uniform(len(x)) if a is None else np.array(a, dtype=np.float64)
    b = uniform(len(y)) if b is None else np.array(b, dtype=np.float64)
    rows, cols = a > 0, b > 0
    cost = cost_matrix(x, y, cost_scale)
    dual = Dual(cost[np.ix_(rows, cols)], a[rows], b[cols], eps, rho_x, rho_y)
    f_kept, g_kept = potentials(dual)
    f = _extend(cost[:, cols], g_kept, b[cols], eps, rho_x)
    g = _extend(cost[rows].T, f_kept, a[rows], eps, rho_y)
    f[rows], g[cols] = f_kept, g_kept
    plan = np.zeros_like(cost)
    plan[np.ix_(rows, cols)] = dual.plan(f_kept, g_kept)
    out = Truth(
        x,
        y,
        a,
        b,
        eps,
        cost_scale,
        rho_x,
        rho_y,
        f,
        g,
        plan,
        dual.value(f_kept, g_kept),
        dual.transport_cost(f_kept, g_kept),
    )
    if not out.marginal_error < 1e-11 * (a.sum() + b.sum()):
        raise ArithmeticError(f"truth did not converge: marginal error {out.marginal_error:.3e}")
    return out


def _extend(cost: Array, h: Array, weight: Array, eps: float, rho: float | None) -> Array:
    """Potential of every row from the other side's, by the Sinkhorn update."""
    t = 1.0 if rho is None else rho / (rho + eps)
    return -t * eps * lse((h[None, :] - cost) / eps + np.log(weight)[None, :], 1)


@dataclass(frozen=True, eq=False)
class Divergence:
    """Debiased divergence `OT(x,y) - OT(x,x)/2 - OT(y,y)/2 + eps/2 (mass difference)^2`."""

    cross: Truth
    self_x: Truth
    self_y: Truth

    @property
    def value(self) -> float:
        """The divergence."""
        mass = self.cross.a.sum() - self.cross.b.sum()
        own = 0.5 * (self.self_x.value + self.self_y.value)
        return float(self.cross.value - own + 0.5 * self.cross.eps * mass**2)

    def gradient(self, wrt: str) -> Array:
        """Gradient in "x" or "y"; both arguments of the self term move."""
        own = self.self_x if wrt == "x" else self.self_y
        return self.cross.gradient(wrt) - 0.5 * (own.gradient("x") + own.gradient("y"))

    def hessian(self, wrt: str) -> Array:
        """Dense Hessian in "x", "y" or "xy"."""
        out = self.cross.hessian(wrt)
        size = self.cross.x.size
        if "x" in wrt:
            out[:size, :size] -= 0.5 * _self_hessian(self.self_x)
        if "y" in wrt:
            start = size if wrt == "xy" else 0
            out[start:, start:] -= 0.5 * _self_hessian(self.self_y)
        return out


def _self_hessian(own: Truth) -> Array:
    joint = own.hessian("xy")
    size = own.x.size
    return np.asarray(joint[:size, :size] + joint[:size, size:] + joint[size:, :size] + joint[size:, size:])


def divergence(
    x: Any,
    y: Any,
    a: Any = None,
    b: Any = None,
    *,
    eps: float,
    cost_scale: float = 1.0,
    rho_x: float | None = None,
    rho_y: float | None = None,
) -> Divergence:
    """Solve the three problems of the debiased divergence."""

    def same(z: Any, w: Any, rho: float | None) -> Truth:
        return solve(z, z, w, w, eps=eps, cost_scale=cost_scale, rho_x=rho, rho_y=rho)

    cross = solve(x, y, a, b, eps=eps, cost_scale=cost_scale, rho_x=rho_x, rho_y=rho_y)
    return Divergence(cross, same(x, a, rho_x), same(y, b, rho_y))


def directional_difference(fun: Callable[[Array], Any], at: Array, along: Array, step: float = 1e-3) -> Any:
    """Directional derivative by a central difference extrapolated twice: error of order step^6."""

    def central(h: float) -> Any:
        return (np.asarray(fun(at + h * along)) - np.asarray(fun(at - h * along))) / (2 * h)

    coarse, middle, fine = central(step), central(step / 2), central(step / 4)
    first, second = (4 * middle - coarse) / 3, (4 * fine - middle) / 3
    return (16 * second - first) / 15
