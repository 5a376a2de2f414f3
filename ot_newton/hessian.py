"""The one place with the Hessian formula: joint in (x, y) and mixed with (a, b) (MATH 4, 5, 7).

With `dC_ij = 2s <x_i - y_j, vx_i - vy_j>` and the dual system

    H* [w1; w2] = [(P.dC)1 + eps da; (P.dC)^T 1 + eps db],     dP = P.(w1 (+) w2 - dC)/eps
    hx_i = 2s [ sum_j dP_ij (x_i - y_j) + r_i vx_i - (P vy)_i ]
    hy_j = 2s [ -sum_i dP_ij (x_i - y_j) + c_j vy_j - (P^T vx)_j ]

everything is streamed: `w1` is eliminated (Schur complement on the y side), and one Hadamard-weighted
transport of [1, y] gives both `P w2`, hence w1, and `dP [1, y]`.

Both sides hard, two separable parts of dC are taken out exactly before solving, since they move the
potentials but not the plan: the mean displacement of each cloud, which makes the translation law I1 hold
to rounding, and the shift D of the centred clouds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.directions import (
    Direction,
    HessianStats,
    dot_size,
    flatten_columns,
    rowdot,
    total_of,
    unflatten_block,
)
from ot_newton.plan_cache import PlanCaches, gradient_x
from ot_newton.schur import SchurSolve, SchurSystem, safe_inverse

__all__ = ["Direction", "HessianStats", "LinearizedPlan", "gradient_x"]


def _joined(parts: list[Tensor]) -> Tensor:
    """Factors of one rank-p weight side by side, their blocks broadcast."""
    k = max(part.shape[1] for part in parts)
    return torch.cat([part.expand(-1, k, -1, -1) for part in parts], dim=-1)


@dataclass
class _Moments:
    """Products of one direction that several terms share; all (B,K,...)."""

    vx: Tensor | None
    vy: Tensor | None
    vx_fixed: Tensor | None = None
    vy_fixed: Tensor | None = None
    p_vy: Tensor | None = None
    p_yvy: Tensor | None = None
    pt_vx: Tensor | None = None


class LinearizedPlan(PlanCaches):
    """The second derivative of OT at a plan; see `PlanCaches` for what it is made of."""

    def product(
        self,
        v: Direction,
        want: str,
        *,
        rtol: float,
        max_cg: int | None,
        stats: HessianStats,
    ) -> tuple[Direction, SchurSolve]:
        """Hessian-vector products of a block of directions.

        Args:
            v: the directions; absent parts are zero.
            want: which parts to return, a subset of the letters "xyab".
            rtol: tolerance of the Schur solve, relative to its right-hand side.
            max_cg: cap on its CG steps.
            stats: counters to add to.

        Returns:
            The products and the Schur solve's diagnosis. Cost: 2 + 2 n_cg passes for x alone (or y alone,
            on the swapped system), 4 + 2 n_cg for both.
        """
        if self._prefers_swap(v, want):
            self.swap.tangents = self.tangents
            out, solve = self.swap.product(
                v.swapped, want.translate(_SWAP), rtol=rtol, max_cg=max_cg, stats=stats
            )
            return out.swapped, solve
        before = self.counter.passes
        given = v
        v = self._effective_weights(v)
        moments = self._moments(v)
        rhs1, scale1 = self._row_rhs(moments, v)
        system = self.system()
        rhs, scale = self._schur_rhs(system, moments, v, rhs1, scale1)
        solve = system.solve(flatten_columns(rhs), flatten_columns(scale), rtol, max_cg)
        w2 = solve.w.mT
        out, row = self._assemble(moments, v, given, w2, want)
        self._note(moments, v, row, w2)
        columns = w2.shape[0] * w2.shape[1]
        stats.record(columns, self.counter.passes - before, solve)
        return out, solve

    def self_product(
        self, v: Direction, want: str, *, rtol: float, max_cg: int | None, stats: HessianStats
    ) -> tuple[Direction, SchurSolve]:
        """Products of the Hessian of OT(x, x), both arguments moving together (MATH 6).

        Then `w1 = w2 = w` with `(D_r k + P) w = (P.dC)1 + eps da`: positive definite, condition number at
        most 2 once normalized, no null vector, one pass per CG step. The part of one argument is computed
        and doubled.

        Args:
            v: directions in x and a.
            want: subset of "xa".
            rtol: tolerance of the solve, relative to its right-hand side.
            max_cg: cap on its CG steps.
            stats: counters to add to.

        Returns:
            The products and the solve's diagnosis. Cost: 2 + n_cg passes.
        """
        before = self.counter.passes
        both = self._effective_weights(Direction(v.x, v.x, v.a, v.a))
        moments = self._moments(both)
        rhs, scale = self._row_rhs(moments, both)
        solve = self.self_system().solve(flatten_columns(rhs), flatten_columns(scale), rtol, max_cg)
        w = solve.w.mT
        moments.pt_vx = moments.p_vy
        out, _ = self._assemble(moments, both, Direction(v.x, v.x, v.a, v.a), w, want)
        stats.record(w.shape[0] * w.shape[1], self.counter.passes - before, solve)
        doubled = [None if part is None else 2.0 * part for part in (out.x, out.a)]
        return Direction(x=doubled[0], a=doubled[1]), solve

    def _prefers_swap(self, v: Direction, want: str) -> bool:
        """Which side to solve on: the smaller when factorizing, the one that saves passes when streaming."""
        if self.direct:
            return self.y.shape[1] > self.x.shape[1]
        if self.preconditioner is not None:
            return False
        return v.x is None and v.y is not None and "x" not in want

    def _effective_weights(self, v: Direction) -> Direction:
        """`da (r/a) k_x` on a relaxed side: a moves the marginal asked for, `a exp(-f/rho)`."""
        da, db = v.a, v.b
        if da is not None and self.relax[0] != 1.0:
            da = da * (self.rows()[0] * safe_inverse(self.a))[:, None] * self.relax[0]
        if db is not None and self.relax[1] != 1.0:
            db = db * (self.columns()[0] * safe_inverse(self.b))[:, None] * self.relax[1]
        return Direction(v.x, v.y, da, db)

    def _fix(self, v: Tensor | None, marginal: Callable[[], Tensor]) -> Tensor | None:
        """The direction without its mean displacement, which moves no plan (both sides hard)."""
        if v is None or not self.balanced:
            return v
        weight = marginal()
        mean = torch.einsum("bn,bknd->bkd", weight, v) / weight.sum(-1)[:, None, None]
        return v - mean[:, :, None, :]

    def _moments(self, v: Direction) -> _Moments:
        """Gauge-fixed directions, and the transport of vy when there is one (one pass)."""
        m = _Moments(v.x, v.y)
        m.vx_fixed = self._fix(v.x, lambda: self.rows()[0])
        m.vy_fixed = self._fix(v.y, lambda: self.columns()[0])
        if m.vy_fixed is not None:
            k = m.vy_fixed.shape[1]
            along = rowdot(self.y[:, None], m.vy_fixed)
            out = self.plan.apply(torch.cat([flatten_columns(m.vy_fixed), flatten_columns(along)], dim=-1), 1)
            m.p_vy = unflatten_block(out[..., :-k], k)
            m.p_yvy = out[..., -k:].mT
        return m

    def _row_rhs(self, m: _Moments, v: Direction) -> tuple[Tensor, Tensor]:
        """`(P.dC)1 + eps da` (B,K,n) and the sum of the absolute values of its terms."""
        r, py = self.rows()
        terms: list[Tensor] = []
        size: list[Tensor] = []
        if m.vx_fixed is not None and m.vx is not None:
            terms += [rowdot(self.x[:, None], m.vx_fixed) * r[:, None], -rowdot(m.vx_fixed, py[:, None])]
            size += [dot_size(self.x, m.vx) * r[:, None], dot_size(py, m.vx)]
        if m.p_vy is not None and m.p_yvy is not None and m.vy is not None:
            terms += [-rowdot(self.x[:, None], m.p_vy), m.p_yvy]
            reach = m.vy.abs().amax((-2, -1))[:, :, None] * r[:, None]
            far = (self.y.abs().sum(-1) * (self.b > 0)).amax(-1)
            span = self.x.abs().sum(-1)[:, None] + far[:, None, None]
            size += [span * reach]
        out, scale = (2 * self.s * total_of(t, self._shape(v, self.x)) for t in (terms, size))
        if v.a is not None:
            out, scale = out + self.eps * v.a, scale + self.eps * v.a.abs()
        return out, scale

    def _shape(self, v: Direction, cloud: Tensor) -> tuple[Tensor, int]:
        part = next(p for p in (v.x, v.y, v.a, v.b) if p is not None)
        return cloud, int(part.shape[1])

    def _schur_rhs(
        self, system: SchurSystem, m: _Moments, v: Direction, rhs1: Tensor, scale1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`rhs2 - P^T (D_r k_x)^-1 rhs1` (B,K,m), one pass, and the scale of its terms."""
        c, ptx = self.columns()
        k = rhs1.shape[1]
        inverse = system.row_inverse.squeeze(-1)[:, None]
        eliminated = -inverse * rhs1
        parts = [flatten_columns(eliminated), flatten_columns(inverse * scale1)]
        if m.vx_fixed is not None:
            along = 2 * self.s * rowdot(self.x[:, None], m.vx_fixed)
            parts[0] = flatten_columns(eliminated + along)
            parts.append(flatten_columns(m.vx_fixed))
        moved = self.plan.apply(torch.cat(parts, dim=-1), 0)
        rhs, scale = moved[..., :k].mT, 2 * moved[..., k : 2 * k].mT
        if m.vx_fixed is not None:
            m.pt_vx = unflatten_block(moved[..., 2 * k :], k)
            rhs = rhs - 2 * self.s * rowdot(self.y[:, None], m.pt_vx)
        if m.vx is not None:
            reach = m.vx.abs().amax((-2, -1))[:, :, None]
            scale = scale + 2 * self.s * (self.y.abs().sum(-1) * c)[:, None] * reach
        if m.vy_fixed is not None and m.vy is not None:
            own = rowdot(self.y[:, None], m.vy_fixed) * c[:, None] - rowdot(m.vy_fixed, ptx[:, None])
            rhs = rhs + 2 * self.s * own
            scale = scale + 2 * self.s * (dot_size(self.y, m.vy) * c[:, None] + dot_size(ptx, m.vy))
        if v.b is not None:
            rhs, scale = rhs + self.eps * v.b, scale + self.eps * v.b.abs()
        return rhs, scale

    def _assemble(
        self, m: _Moments, v: Direction, given: Direction, w2: Tensor, want: str
    ) -> tuple[Direction, Tensor]:
        """The products from w2, with one Hadamard pass per side asked for; and w1."""
        s, r, py = self.s, self.rows()[0], self.rows()[1]
        col = w2 if m.vy_fixed is None else w2 - 2 * s * rowdot(self.y[:, None], m.vy_fixed)
        m0, m1 = self._weighted_moments(m, col, 1)
        row = -m0 if v.a is None else self.eps * v.a - m0
        if m.vx_fixed is not None and self.relax[0] != 1.0:
            row = row + 2 * s * rowdot(self.x[:, None], m.vx_fixed) * r[:, None] * (1 - self.relax[0])
        row = row * safe_inverse(r * self.relax[0])[:, None]
        hx = hy = None
        if "x" in want:
            hx = self._hx(m, v, row, m0, m1, r, py)
        if "y" in want:
            hy = self._hy(m, v, row, col)
        return Direction(hx, hy, *self._weight_parts(m, given, row, w2, want)), row

    def _weighted_moments(self, m: _Moments, own: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """Sums of the plan times `own + 2s<vx_i,y_j> + 2s<x_i,vy_j>` with [1, y] or [1, x]: one pass.

        ``axis=1``: `sum_j P_ij (own_j + ...) [1, y_j]`, own (B,K,m), out (B,K,n) and (B,K,n,d); ``axis=0``
        likewise over i. The own term is a transport that shares the exponentials.
        """
        cloud = self.y if axis == 1 else self.x
        moments = torch.cat([torch.ones_like(cloud[:, :, :1]), cloud], dim=-1)[:, None]
        k = own.shape[1]
        transport = flatten_columns(own[..., None] * moments)
        left: list[Tensor] = []
        right: list[Tensor] = []
        if m.vx_fixed is not None:
            left.append(2 * self.s * m.vx_fixed)
            right.append(self.y[:, None])
        if m.vy_fixed is not None:
            left.append(2 * self.s * self.x[:, None])
            right.append(m.vy_fixed)
        if not left:
            out = unflatten_block(self.plan.apply(transport, axis), k)
            return out[..., 0], out[..., 1:]
        out, moved = self.plan.apply_hadamard(_joined(left), _joined(right), moments, axis, transport)
        assert moved is not None
        out = out + unflatten_block(moved, k)
        return out[..., 0], out[..., 1:]

    def _hx(
        self, m: _Moments, v: Direction, row: Tensor, m0: Tensor, m1: Tensor, r: Tensor, py: Tensor
    ) -> Tensor:
        """`2s [ (dP1) x - dP y + r vx - P vy ]`, with the shift D where mass moves."""
        ones = (row * r[:, None] + m0) / self.eps
        moved = (row[..., None] * py[:, None] + m1) / self.eps
        out = ones[..., None] * self.x[:, None] - moved
        if m.vx is not None:
            out = out + r[:, None, :, None] * m.vx
        if m.p_vy is not None and m.vy is not None and m.vy_fixed is not None:
            mean = (m.vy - m.vy_fixed)[:, :, :1]
            out = out - m.p_vy - r[:, None, :, None] * mean
        if v.a is not None:
            out = out + v.a[..., None] * self.shift[:, None, None, :].to(out.dtype)
        return 2 * self.s * out

    def _hy(self, m: _Moments, v: Direction, row: Tensor, col: Tensor) -> Tensor:
        """`2s [ -(dP^T x) + (dP^T 1) y + c vy - P^T vx ]`, one Hadamard pass."""
        c, ptx = self.columns()
        n0, n1 = self._weighted_moments(m, row, 0)
        n0 = (col * c[:, None] + n0) / self.eps
        n1 = (col[..., None] * ptx[:, None] + n1) / self.eps
        hy = n0[..., None] * self.y[:, None] - n1
        if m.vy is not None:
            hy = hy + c[:, None, :, None] * m.vy
        if m.pt_vx is not None and m.vx is not None and m.vx_fixed is not None:
            mean = (m.vx - m.vx_fixed)[:, :, :1]
            hy = hy - m.pt_vx - c[:, None, :, None] * mean
        if v.b is not None:
            hy = hy - v.b[..., None] * self.shift[:, None, None, :].to(hy.dtype)
        return 2 * self.s * hy

    def _weight_parts(
        self, m: _Moments, v: Direction, row: Tensor, w2: Tensor, want: str
    ) -> tuple[Tensor | None, Tensor | None]:
        """`d(grad_a) = dF - eps da/a` and the same for b (MATH 7)."""
        if not set(want) & {"a", "b"}:
            return None, None
        w1, w2 = self._responses(m, row, w2)
        return (
            self._weight_gradient(w1, v.a, v.b, self.a, self.relax[0], self.rows()[0]),
            self._weight_gradient(w2, v.b, v.a, self.b, self.relax[1], self.columns()[0]),
        )

    def _responses(self, m: _Moments, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of the absorbed potentials along a block, gauge and shift put back (MATH 7)."""
        s = self.s
        shift = self.shift[:, None, None, :].to(self.x.dtype)
        if m.vx is not None and m.vx_fixed is not None:
            mean = (m.vx - m.vx_fixed)[:, :, :1]
            w1 = w1 + 2 * s * (rowdot(self.x[:, None], m.vx) + rowdot(shift, m.vx))
            w2 = w2 - 2 * s * rowdot(self.y[:, None], mean)
        if m.vy is not None and m.vy_fixed is not None:
            mean = (m.vy - m.vy_fixed)[:, :, :1]
            w1 = w1 - 2 * s * rowdot(self.x[:, None], mean)
            w2 = w2 + 2 * s * rowdot(self.y[:, None], mean) - 2 * s * rowdot(shift, m.vy)
        return w1, w2

    def _note(self, m: _Moments, v: Direction, w1: Tensor, w2: Tensor) -> None:
        """Leave the responses to displacements of the points where the next warm start finds them."""
        if self.tangents is None or w1.shape[0] != 1 or v.a is not None or v.b is not None:
            return
        w1, w2 = self._responses(m, w1, w2)
        w1, w2, v = (w2, w1, v.swapped) if self.swapped else (w1, w2, v)
        self.tangents.record(v, w1, w2)

    def _weight_gradient(
        self,
        w: Tensor,
        dv: Tensor | None,
        other: Tensor | None,
        weight: Tensor,
        relax: float,
        marginal: Tensor,
    ) -> Tensor:
        """Derivative of `dOT/da` from that of the absorbed potential `F = f + eps log a`."""
        positive = weight[:, None] > 0
        out = w if dv is None else w - self.eps * dv * safe_inverse(weight)[:, None]
        if not self.centre_weights:
            if relax != 1.0:
                out = out * (relax * marginal * safe_inverse(weight))[:, None]
            if other is not None:
                out = out + self.eps * other.sum(-1, keepdim=True)
            return torch.where(positive, out, torch.zeros_like(out))
        count = positive.sum(-1, keepdim=True)
        mean = torch.where(positive, out, torch.zeros_like(out)).sum(-1, keepdim=True) / count
        return torch.where(positive, out - mean, torch.zeros_like(out))


_SWAP = str.maketrans("xyab", "yxba")
