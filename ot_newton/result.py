"""What `sinkhorn` returns: potentials, values, gradients, and the operators of the plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ot_newton.backends.select import get_backend
from ot_newton.deflation import Deflation
from ot_newton.errors import Status, check_choice, check_integer, check_number
from ot_newton.fixed_point import IterationInfo
from ot_newton.hessian import LinearizedPlan
from ot_newton.operators.hessian_operator import HessianOperator, default_rtol
from ot_newton.operators.plan import TransportPlan, diagonal_preconditioner, linearize
from ot_newton.operators.schur_operator import SchurComplement
from ot_newton.potentials import Biases, Potentials, asked_marginal, biases_to_potentials
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter
from ot_newton.stage import Stage

__all__ = ["SinkhornResult", "default_rtol"]


@dataclass(frozen=True, eq=False, repr=False)
class SinkhornResult:
    """The fixed point of one problem (or of a batch of them).

    Derivatives are those of the plan at hand. Stopped early, it has marginals `r = P1`, `c = P^T 1`
    that differ from a, b by ``marginal_error``: gradient and Hessian are then exact for the
    marginal-perturbed problem, the one whose marginals are (r, c) (MATH 3).

    Attributes:
        problem: the problem solved.
        potentials: `f, g` with `P_ij = a_i b_j exp((f_i + g_j - C_ij)/eps)`.
        status: `Status`, a tuple of them for a batch.
        n_iter: iterations, annealing included.
        marginal_error: L1 error of both marginals (the larger), relative to the mass.
        noise_floor: `eps_mach max|C|/eps`, the relative rounding error of a plan entry.
        tol: tolerance asked for (after clamping to the floor).
        plan_passes: streamed sweeps over all pairs so far, later products of this result included.
        history: one `IterationInfo` per check.
        backend: name of the backend.
        symmetric: solved as OT(x, x), with f = g.
        newton: Newton on the dual finished it (some lane of it): Sinkhorn is slow here.
        factor: of the last Schur complement that Newton factorized, for the next solve; None without one.
        stage: the clouds as the solve had bound them; None binds them anew when needed.
        deflation: slow modes of the dual system that the solve found, where it had to; the Hessian's too.

    Example:
        >>> import torch, ot_newton as otn
        >>> x, y = torch.tensor([[-0.5], [0.5]]).double(), torch.tensor([[-1.0], [1.0]]).double()
        >>> result = otn.sinkhorn(otn.OTProblem(x, y, eps=1.0))
        >>> result.status, round(float(result.value), 6), round(float(result.cost), 6)
        (Status.CONVERGED, 0.816219, 0.488406)
        >>> result.gradient("x").squeeze().numpy().round(6)
        array([ 0.261594, -0.261594])
        >>> result.hessian("x").to_dense().numpy().round(6)
        array([[0.580026, 0.419974],
               [0.419974, 0.580026]])
    """

    problem: OTProblem
    biases: Biases = field(repr=False)
    statuses: tuple[Status, ...]
    iterations: Tensor = field(repr=False)
    errors: Tensor = field(repr=False)
    noise_floor: float
    tol: float
    counter: PassCounter = field(repr=False)
    history: tuple[IterationInfo, ...] = field(repr=False)
    backend: str
    symmetric: bool = False
    newton: bool = False
    deflation: Deflation | None = field(default=None, repr=False)
    factor: Tensor | None = field(default=None, repr=False)
    stage: Stage | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        """Status and the figures a user looks at first."""
        names = sorted({s.name for s in self.statuses})
        worst, most = float(self.errors.max()), int(self.iterations.max())
        return (
            f"SinkhornResult({'/'.join(names)}, n_iter={most}, marginal_error={worst:.2e}, "
            f"plan_passes={self.plan_passes}, backend={self.backend!r}, {self.problem!r})"
        )

    def __getitem__(self, index: int) -> SinkhornResult:
        """One lane of a batch, as an unbatched result that shares the pass counter.

        Raises:
            TypeError: not a batch, or not an integer.
            IndexError: out of range of the flattened batch.
        """
        if not self.problem.batch_shape:
            raise TypeError("this result is not a batch: index a batched one")
        lane = check_integer("index", index, low=-self.problem.lanes)
        if not -self.problem.lanes <= lane < self.problem.lanes:
            raise IndexError(f"index must be below {self.problem.lanes} lanes, got {lane}")
        return SinkhornResult(
            problem=self.problem.lane(lane),
            biases=Biases(self.biases.row[lane][None], self.biases.col[lane][None]),
            statuses=(self.statuses[lane],),
            iterations=self.iterations[lane][None],
            errors=self.errors[lane][None],
            noise_floor=self.noise_floor,
            tol=self.tol,
            counter=self.counter,
            history=self.history,
            backend=self.backend,
            symmetric=self.symmetric,
        )

    @property
    def status(self) -> Status | tuple[Status, ...]:
        """How the iteration ended; a tuple for a batch."""
        return self.statuses if self.problem.batch_shape else self.statuses[0]

    @property
    def converged(self) -> bool | Tensor:
        """Whether the marginal error met the tolerance; (batch) bools for a batch."""
        flags = [s is Status.CONVERGED for s in self.statuses]
        if self.problem.batch_shape:
            return torch.tensor(flags).reshape(self.problem.batch_shape)
        return flags[0]

    @property
    def n_iter(self) -> int | Tensor:
        """Iterations; one is an f and a g update."""
        if self.problem.batch_shape:
            return self.iterations.reshape(self.problem.batch_shape)
        return int(self.iterations[0])

    @property
    def marginal_error(self) -> float | Tensor:
        """Larger L1 error of the two marginals, relative to the mass."""
        if self.problem.batch_shape:
            return self.errors.reshape(self.problem.batch_shape)
        return float(self.errors[0])

    @property
    def plan_passes(self) -> int:
        """Plan passes spent so far."""
        return self.counter.passes

    @cached_property
    def potentials(self) -> Potentials:
        """`f (..., n)`, `g (..., m)` of the user's clouds."""
        return biases_to_potentials(self.problem, self.biases)

    @property
    def f(self) -> Tensor:
        """Potential of the x side, in units of the cost."""
        return self.potentials.f

    @property
    def g(self) -> Tensor:
        """Potential of the y side."""
        return self.potentials.g

    @cached_property
    def bound(self) -> Stage:
        """The clouds bound to the backend at the problem's eps."""
        if self.stage is not None:
            return self.stage
        return Stage.bind(self.problem, get_backend(self.backend), self.counter, self.problem.eps)

    @cached_property
    def linearized(self) -> LinearizedPlan:
        """The plan with cached marginals and its second derivative; what the operators share."""
        plan = linearize(
            self.problem,
            self.biases,
            self.backend,
            self.counter,
            symmetric=self.symmetric,
            stage=self.bound,
        )
        if self.deflation is not None and plan.deflation is not None:
            plan.deflation = self.deflation
        return plan

    @cached_property
    def plan(self) -> TransportPlan:
        """The transport plan as an operator of shape (..., n, m)."""
        return TransportPlan(self.linearized)

    def hessian(
        self,
        wrt: str = "x",
        *,
        rtol: float | None = None,
        max_cg: int | None = None,
        preconditioner: str | Callable[[Tensor], Tensor] | None = None,
    ) -> HessianOperator:
        """Hessian of OT in the points.

        Args:
            wrt: "x" (N = n d), "y" (N = m d) or "xy" (N = (n+m) d; x first).
            rtol: tolerance of the inner Schur solve relative to its right-hand side; 1e-10 in float64,
                1e-5 in float32.
            max_cg: cap on its CG steps; reaching it warns.
            preconditioner: None, deflation alone; "diagonal", by the diagonal of the normalized Schur
                complement (one plan pass), for eps so low that most rows of the plan have one entry; or a
                block product (B,m,K) -> (B,m,K) with a positive definite approximation of the inverse of
                `result.schur("y", normalized=True)`. "dense" factorizes and needs none.

        Raises:
            ValueError: a bad argument.
            TypeError: a preconditioner of another kind.

        Example:
            >>> import torch, ot_newton as otn
            >>> x, y = torch.tensor([[-0.5], [0.5]]).double(), torch.tensor([[-1.0], [1.0]]).double()
            >>> result = otn.sinkhorn(otn.OTProblem(x, y, eps=1.0))
            >>> result.hessian("x").shape, result.hessian("xy").shape
            (torch.Size([2, 2]), torch.Size([4, 4]))
        """
        check_choice("wrt", wrt, ("x", "y", "xy"))
        tolerance = default_rtol(self.problem.dtype) if rtol is None else check_number("rtol", rtol, high=1.0)
        cap = None if max_cg is None else check_integer("max_cg", max_cg, low=1)
        spread = 2.0 * self.problem.cost_scale
        plan = self.linearized
        if isinstance(preconditioner, str):
            check_choice("preconditioner", preconditioner, ("diagonal",))
            plan = plan.preconditioned(diagonal_preconditioner(plan))
        elif preconditioner is not None:
            if not callable(preconditioner):
                raise TypeError(
                    f'preconditioner must be "diagonal" or callable, got {type(preconditioner).__name__}'
                )
            plan = plan.preconditioned(preconditioner)
        return HessianOperator(
            plan,
            wrt,
            rtol=tolerance,
            max_cg=cap,
            relative_floor=4 * tolerance + 10 * self.noise_floor,
            curvature_bound=spread,
        )

    @property
    def gradient_noise(self) -> float:
        """Bound on the error of the gradient in the points, in the Euclidean norm over all of them.

        `2 s (R + |D|) mass (marginal_error + noise_floor)`, R the reach of the centred clouds, D their
        distance: a bound on every problem tried (a test holds it against float64), not a theorem.
        """
        c, s = self.problem.centred, self.problem.cost_scale
        reach = math.sqrt(c.max_cost) + float(c.shift.square().sum(-1).max().sqrt())
        mass = float(c.a.double().sum(-1).max())
        return 2 * s * reach * mass * (float(self.errors.max()) + self.noise_floor)

    @property
    def value_noise(self) -> float:
        """Bound on the error of the value, `4 eps mass (marginal_error + noise_floor) + eps_mach |value|`.

        In truth second order in the marginal error, with a factor that eps alone does not tell.
        """
        mass = float(self.problem.centred.a.double().sum(-1).max())
        rounding = torch.finfo(self.problem.dtype).eps * float(self.value.abs().max())
        return 4 * self.problem.eps * mass * (float(self.errors.max()) + self.noise_floor) + rounding

    def schur(self, side: str = "y", *, normalized: bool = False) -> SchurComplement:
        """Schur complement of the dual Hessian on one side (MATH 5).

        Args:
            side: "y" (m x m) or "x" (n x n); the shape never depends on the sizes.
            normalized: `I - K^T K` with `K = D_r^-1/2 P D_c^-1/2`.

        Raises:
            ValueError: unknown side.

        Example:
            >>> import torch, ot_newton as otn
            >>> x, y = torch.tensor([[-0.5], [0.5]]).double(), torch.tensor([[-1.0], [1.0]]).double()
            >>> S = otn.sinkhorn(otn.OTProblem(x, y, eps=1.0)).schur(normalized=True)
            >>> (torch.linalg.eigvalsh(S.to_dense()).numpy().round(6) + 0).tolist()  # 0, sech^2(2 s u/eps)
            [0.0, 0.419974]
        """
        check_choice("side", side, ("x", "y"))
        source = self.linearized if side == "y" else self.linearized.swap
        return SchurComplement(source, side=side, normalized=normalized)

    def _out(self, values: Tensor) -> Tensor:
        return values.to(self.problem.dtype).reshape((*self.problem.batch_shape, *values.shape[1:]))

    @cached_property
    def _lanes(self) -> tuple[Tensor, Tensor]:
        """Potentials in float64, (B,n) and (B,m)."""
        n, m = self.problem.n, self.problem.m
        return self.f.double().reshape(-1, n), self.g.double().reshape(-1, m)

    @cached_property
    def value(self) -> Tensor:
        """Dual value `<a,f> + <b,g> - eps (sum P - sum a sum b)`, relaxed sides as in MATH 3. (batch).

        Cost: one plan pass, shared with the gradient in x.
        """
        p, c = self.problem, self.problem.centred
        (f, g), r = self._lanes, self.linearized.rows()[0].double()
        a, b = c.a.double(), c.b.double()
        total = -p.eps * (r.sum(-1) - a.sum(-1) * b.sum(-1))
        for potential, weight, rho in ((f, a, p.rho_x), (g, b, p.rho_y)):
            if rho is None:
                total = total + _weighted(weight, potential)
            else:
                total = total + rho * _weighted(weight, -torch.expm1(-potential / rho))
        return self._out(total)

    @cached_property
    def cost(self) -> Tensor:
        """Transport cost `<P, C>` (the "sharp" value). (batch)."""
        c, s = self.problem.centred, self.problem.cost_scale
        x, y = c.x.double(), c.y.double()
        r, py = (t.double() for t in self.linearized.rows())
        col = self.linearized.columns()[0].double()
        inner = (
            (r * x.square().sum(-1)).sum(-1) + (col * y.square().sum(-1)).sum(-1) - 2 * (x * py).sum((-1, -2))
        )
        mean = torch.einsum("bn,bnd->bd", r, x) - torch.einsum("bm,bmd->bd", col, y)
        shift = c.shift.square().sum(-1) * r.sum(-1) + 2 * (c.shift * mean).sum(-1)
        return self._out(s * (inner + shift))

    @cached_property
    def gap(self) -> Tensor:
        """`<r - a, f> + <c - b, g>`: primal minus dual value of this plan.

        Signed, zero at convergence, and no bound: an early-stopped plan is not primal feasible (MATH 3).
        A relaxed side uses the marginal its potential asks for in place of a. (batch).
        """
        (f, g), plan = self._lanes, self.linearized
        r, col = plan.rows()[0].double(), plan.columns()[0].double()
        p, c = self.problem, self.problem.centred
        total = torch.zeros_like(r[:, 0])
        for potential, weight, marginal, rho in ((f, c.a, r, p.rho_x), (g, c.b, col, p.rho_y)):
            total = total + _weighted(marginal - asked_marginal(weight, potential, rho), potential)
        return self._out(total)

    def gradient(self, wrt: str = "x") -> Tensor:
        """Gradient of OT by the envelope theorem (MATH 4).

        Args:
            wrt: "x" (..., n, d) `2s (r_i x_i - (P y)_i)`; "y" (..., m, d); "a" (..., n), "b" (..., m):
                `phi - eps r/a + eps sum b`, both sides hard minus its plain mean over the atoms of
                positive mass, i.e. projected on the tangent of the simplex.

        Returns:
            The gradient in the compute dtype. Cost: one pass, cached.

        Raises:
            ValueError: unknown ``wrt``.

        Example:
            >>> import torch, ot_newton as otn
            >>> x, y = torch.tensor([[-0.5], [0.5]]).double(), torch.tensor([[-1.0], [1.0]]).double()
            >>> result = otn.sinkhorn(otn.OTProblem(x, y, eps=1.0))
            >>> result.gradient("x").squeeze().numpy().round(6)
            array([ 0.261594, -0.261594])
            >>> result.gradient("a").shape
            torch.Size([2])
        """
        check_choice("wrt", wrt, ("x", "y", "a", "b"))
        source = self.linearized if wrt in "xa" else self.linearized.swap
        if wrt in "xy":
            return self._out(source.gradient())
        return self.weight_gradient(wrt, centre=self.problem.balanced)

    def weight_gradient(self, wrt: str, *, centre: bool) -> Tensor:
        """`phi - eps r/a + eps sum b` in "a" or "b", its mean over positive masses removed or not.

        Uncentred it is right where the gauge is fixed: relaxed sides, and OT(x, x) whose mass may change.
        """
        p, c = self.problem, self.problem.centred
        tiles, row, col = self.bound.tiles, self.biases.row, self.biases.col
        if wrt == "a":
            lse, own, weight, other, rho = tiles.lse(col, c.b, 1, row)[0], row, c.a, c.b, p.rho_x
        else:
            lse, own, weight, other, rho = tiles.lse(row, c.a, 0, col)[0], col, c.b, c.a, p.rho_y
        potential = (self.f if wrt == "a" else self.g).double().reshape(own.shape)
        phi = potential if rho is None else -rho * torch.expm1(-potential / rho)
        ratio = torch.exp2((own + lse).double())
        out = phi - p.eps * ratio + p.eps * other.double().sum(-1, keepdim=True)
        if centre:
            positive = weight > 0
            out = out - (_weighted(positive.double(), out) / positive.sum(-1))[:, None]
        return self._out(out)


def _weighted(weight: Tensor, values: Tensor) -> Tensor:
    """`sum w v` over the last axis, entries of weight zero skipped whatever their value."""
    return torch.where(weight != 0, weight * values, torch.zeros_like(values)).sum(-1)
