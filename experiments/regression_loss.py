"""The loss `W -> OT_eps(X W, Y)` as the solvers like it: value and gradient, Hessian, floors, warm starts.

With `Z = X W` (MATH 7), `Z` is linear in W, so that

    grad = X^T grad_Z OT,      Hess v = X^T H_Z (X v),

and the whole Hessian (N = dX dY) costs one block Hessian-vector product of N columns.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import ConvergenceWarning, Status, check_integer, check_number
from ot_newton.potentials import Potentials
from ot_newton.problem import OTProblem
from ot_newton.result import SinkhornResult
from ot_newton.solve import sinkhorn
from ot_newton.stage import noise_floor
from ot_newton.warm import Tangents, WarmStart, displacement

__all__ = ["ON_REJECT", "RegressionLoss", "WeightHessian"]

ON_REJECT = "interpolate"
"""What the solvers do after a rejected step: values far away cost the most here, products next to nothing."""

GRADIENT_ACCURACY = 1e-2
HESSIAN_TOL = 1e-6
HESSIAN_RTOL = 1e-8
FIRST_TOL = 1e-3
ROUNDS = 8
MARGIN = 0.7


class WeightHessian:
    """`Hess = X^T H_Z X` as an operator on flat W (row-major), assembled at the first product.

    Attributes:
        shape: (N, N), N = dX dY.
        noise_floor: absolute uncertainty of an eigenvalue.
    """

    def __init__(self, x: Tensor, result: SinkhornResult, spectral_square: float) -> None:
        self.x, self.result = x, result
        self.inner = result.hessian("x", rtol=HESSIAN_RTOL)
        n = x.shape[1] * result.problem.d
        self.shape = (n, n)
        self.dtype, self.device = x.dtype, x.device
        self.noise_floor = spectral_square * self.inner.noise_floor
        self._matrix: Tensor | None = None

    def to_dense(self) -> Tensor:
        """The (N, N) matrix: one block product of N columns, cached."""
        if self._matrix is None:
            n, d = self.x.shape[0], self.result.problem.d
            # Column (k, l) moves every point by x_ik along axis l.
            eye = torch.eye(d, dtype=self.dtype, device=self.device)
            moves = torch.einsum("nk,dl->ndkl", self.x, eye).reshape(n * d, -1)
            product = (self.inner @ moves).reshape(n, d, -1)
            matrix = torch.einsum("nk,ndc->kdc", self.x, product).reshape(self.shape)
            self._matrix = (matrix + matrix.T) / 2
        return self._matrix

    def __matmul__(self, v: Tensor) -> Tensor:
        return self.to_dense() @ v


@dataclass(frozen=True, eq=False)
class _Memory:
    """What earlier solves know of the next one.

    Attributes:
        last: the last solve.
        bent: that of the last Hessian, with its responses.
    """

    last: WarmStart | None = None
    bent: WarmStart | None = None

    def start(self, problem: OTProblem) -> WarmStart | None:
        """Where a solve starts: from the last Hessian's plan if that is as near as the last one."""
        last, bent = self.last, self.bent
        if last is None or bent is None:
            return last
        far, near = (displacement(start, problem.x, problem.y).norm() for start in (last, bent))
        return last if far < near else replace(bent, factor=last.factor, space=last.space)


class RegressionLoss:
    """`W -> OT_eps(X W, Y)` with controlled inexactness.

    The fixed point is solved until the gradient's error, estimated by `2 rms|x| rms|y| * marginal error`,
    is at most 1% of the gradient itself, or ``tol`` is reached: far from a stationary point a rough plan
    is enough, near one it is not. The Hessian is taken at marginal error 1e-6. The solver is Newton on the
    dual (outlying points make Sinkhorn's own rate hopeless here), started from potentials that follow W: by
    the responses of the last Hessian, or extrapolated from the last two W.

    Args:
        x: (n, dX).
        y: (m, dY).
        eps: regularization, in units of squared y.
        tol: smallest marginal error ever asked for.
        max_iter: cap of one Sinkhorn or dual Newton solve.

    Attributes:
        plan_passes: streamed sweeps so far.
        n_sinkhorn: Sinkhorn and Newton iterations so far.
        n_hessian: Hessians assembled, each a block of dX dY products.
        missed: solves that ended above the tolerance they were asked for.
    """

    def __init__(self, x: Tensor, y: Tensor, *, eps: float, tol: float = 1e-12, max_iter: int = 2000) -> None:
        self.x, self.y = x, y
        self.eps = check_number("eps", eps)
        self.tol = check_number("tol", tol)
        self.max_iter = check_integer("max_iter", max_iter, low=1)
        self.plan_passes = self.n_sinkhorn = self.n_hessian = self.missed = 0
        self._typical = 2.0 * float(x.square().sum(1).mean().sqrt() * y.square().sum(1).mean().sqrt())
        self._spectral_square = float(torch.linalg.matrix_norm(x, ord=2) ** 2)
        self._memory = _Memory()
        self._wanted = FIRST_TOL
        self._frozen = False
        self._at: Tensor | None = None
        self._result: SinkhornResult | None = None
        self._passes_seen = 0
        self._hessian: WeightHessian | None = None

    def value_and_grad(self, w: Tensor) -> tuple[float, Tensor]:
        """OT and its gradient in W (dX, dY)."""
        result, gradient = self._solve(w, self.tol, GRADIENT_ACCURACY)
        return float(result.value), gradient

    def hessian(self, w: Tensor) -> WeightHessian:
        """The Hessian in W as an operator on flat vectors and blocks."""
        if self._hessian is None or not self._is_at(w):
            result, _ = self._solve(w, min(HESSIAN_TOL, self._last_error(w)), 0.0)
            tangents = result.linearized.tangents = Tangents()
            self._hessian = WeightHessian(self.x, result, self._spectral_square)
            self.n_hessian += 1
            self._hessian.to_dense()
            self._count(result)
            if not self._frozen:
                bent = replace(self._start_of(result), tangents=Tangents(tangents.blocks))
                self._memory = replace(self._memory, bent=bent)
        return self._hessian

    def value(self, w: Tensor) -> float:
        """OT at ``w`` from a plan solved to ``tol``."""
        return float(self._solve(w, self.tol, 0.0)[0].value)

    def potentials(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """(f, g) at ``w``, solved to ``tol``."""
        result, _ = self._solve(w, self.tol, 0.0)
        return result.f, result.g

    def noise_floor(self, w: Tensor) -> float:
        """Bound `2 max|x| (max|z| + max|y|) * marginal error` of the gradient's error at ``w``.

        Where the plan at hand is too rough to tell the gradient from 0, it is refined first.
        """
        result, gradient = self._solve(w, self.tol, GRADIENT_ACCURACY)
        bound = self._gradient_bound(result)
        if bound > 0.5 * float(gradient.norm()):
            bound = self._gradient_bound(self._solve(w, self.tol, 0.0)[0])
        return bound

    def value_noise(self, w: Tensor) -> float:
        """Bound on the error of the value at ``w``, first order in the marginal error."""
        return self._solve(w, self.tol, GRADIENT_ACCURACY)[0].value_noise

    def hvp_noise_floor(self, w: Tensor) -> float:
        """Absolute uncertainty of an eigenvalue of the Hessian at ``w``."""
        return self.hessian(w).noise_floor

    def error_wanted(self, gradient: Tensor) -> float:
        """Marginal error at which a gradient of that size is accurate to 1%, never below ``tol``."""
        return max(self.tol, GRADIENT_ACCURACY * float(gradient.norm()) / self._typical)

    def release(self) -> None:
        """Let go of the plan and the Hessian at hand, not of what the next solve starts from."""
        self._at = self._result = self._hessian = None

    def warm_state(self, *, inverses: bool = True) -> dict[str, Any]:
        """What the next solve starts from.

        Args:
            inverses: with the factor and slow modes that are kept; large, and they only save time.
        """
        pair = {"last": self._memory.last, "bent": self._memory.bent}
        if not inverses:
            pair = {k: start and replace(start, factor=None, space=None) for k, start in pair.items()}
        return {k: start and start.as_dict() for k, start in pair.items()} | {"wanted": self._wanted}

    def load_warm_state(self, state: dict[str, Any]) -> None:
        """Inverse of `warm_state`."""
        last, bent = (state[k] and WarmStart.from_dict(state[k]) for k in ("last", "bent"))
        self._memory, self._wanted = _Memory(last, bent), state["wanted"]
        self.release()

    def start_from(self, w: Tensor, f: Tensor, g: Tensor) -> None:
        """Take potentials known at ``w`` for the next solve."""
        self._memory = _Memory(WarmStart(Potentials(f, g), self.x @ w, self.y, newton=True))
        self.release()

    @contextlib.contextmanager
    def freeze(self) -> Iterator[None]:
        """What warm starts begin from does not move inside."""
        before, self._frozen = self._frozen, True
        try:
            yield
        finally:
            self._frozen = before

    def _is_at(self, w: Tensor) -> bool:
        return self._at is not None and torch.equal(self._at, w)

    def _last_error(self, w: Tensor) -> float:
        """Marginal error already reached at ``w``, never less than ``tol``."""
        if self._result is None or not self._is_at(w):
            return HESSIAN_TOL
        return max(self.tol, float(self._result.marginal_error))

    def _count(self, result: SinkhornResult) -> None:
        self.plan_passes += result.plan_passes - self._passes_seen
        self._passes_seen = result.plan_passes

    def _gradient_bound(self, result: SinkhornResult) -> float:
        reach = sum(float(cloud.norm(dim=1).max()) for cloud in (result.problem.x, self.y))
        error = max(float(result.marginal_error), result.noise_floor)
        return 2.0 * float(self.x.norm(dim=1).max()) * reach * error

    def _gradient(self, result: SinkhornResult) -> Tensor:
        return self.x.T @ result.gradient("x")

    def _solve(self, w: Tensor, tol: float, accuracy: float) -> tuple[SinkhornResult, Tensor]:
        """Refine the plan at ``w`` until the gradient is relatively accurate, or to ``tol``."""
        w = w.detach()
        problem = OTProblem(self.x @ w, self.y, eps=self.eps)
        floor = max(tol, 4 * noise_floor(problem))
        known = self._result if self._is_at(w) else None
        first = max(floor, self._wanted if accuracy else 0.0)
        result = known or self._sinkhorn(problem, first, self._memory.start(problem))
        gradient = self._gradient(result)
        for _ in range(ROUNDS):
            error = self._typical * float(result.marginal_error)
            wanted = accuracy * float(gradient.norm())
            if float(result.marginal_error) <= floor or (accuracy > 0 and error <= wanted):
                break
            before = float(result.marginal_error)
            result = self._sinkhorn(
                problem, max(floor, 0.3 * before * wanted / error), self._start_of(result)
            )
            gradient = self._gradient(result)
            if float(result.marginal_error) > 0.9 * before:
                break
        if result is not known:
            self._at, self._result, self._hessian = w.clone(), result, None
            if not self._frozen:
                self._memory = replace(self._memory, last=self._followed(result))
        if not self._frozen:
            # The next gradient is probably about as large.
            self._wanted = min(FIRST_TOL, MARGIN * self.error_wanted(gradient))
        self._count(result)
        return result, gradient

    @staticmethod
    def _start_of(result: SinkhornResult) -> WarmStart:
        """A start at a solved plan."""
        space = None if result.deflation is None else result.deflation.state
        return WarmStart(result.potentials, result.problem.x, result.problem.y, True, result.factor, space)

    def _followed(self, result: SinkhornResult) -> WarmStart:
        """The same with the secant from the last W; a better plan at the same W keeps that one's."""
        before, x = self._memory.last, result.problem.x
        tangents = Tangents()
        if before is not None and torch.equal(before.x, x):
            tangents = before.tangents or tangents
        elif before is not None:
            tangents.along(before, x, result.problem.y, result.potentials)
        return replace(self._start_of(result), tangents=tangents)

    def _sinkhorn(self, problem: OTProblem, tol: float, init: WarmStart | None) -> SinkhornResult:
        """One solve; a missed tolerance is counted, and the gradient's floor tells the solver by how much."""
        self._passes_seen = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            result = sinkhorn(problem, tol=tol, max_iter=self.max_iter, init=init, method="newton")
            if result.status is Status.NAN and init is not None:
                result = sinkhorn(problem, tol=tol, max_iter=self.max_iter, method="newton")
        self.missed += not bool(result.converged)
        self.n_sinkhorn += int(result.n_iter)
        self._count(result)
        return result
