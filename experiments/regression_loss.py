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
from ot_newton.warm import Tangents, WarmStart

__all__ = ["RegressionLoss", "WeightHessian"]

GRADIENT_ACCURACY = 1e-2
HESSIAN_TOL = 1e-6
FIRST_TOL = 1e-3
ROUNDS = 8
MARGIN = 0.7
EXTRAPOLATE = (-1.0, 2.0)


class WeightHessian:
    """`Hess = X^T H_Z X` as an operator on flat W (row-major), assembled at the first product.

    Attributes:
        shape: (N, N), N = dX dY.
        noise_floor: absolute uncertainty of an eigenvalue.
    """

    def __init__(self, x: Tensor, result: SinkhornResult, spectral_square: float) -> None:
        self.x, self.result = x, result
        self.inner = result.hessian("x")
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
class _Known:
    """Potentials at one W, and the responses to moves that a Hessian there has left."""

    w: Tensor
    f: Tensor
    g: Tensor
    blocks: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass(frozen=True, eq=False)
class _Memory:
    """What earlier solves know of the next one.

    Attributes:
        known: potentials at the last two W.
        bent: those at the last Hessian, with its responses.
        factor: `WarmStart.factor`.
        space: `WarmStart.space`.
    """

    known: tuple[_Known, ...] = ()
    bent: _Known | None = None
    factor: Tensor | None = None
    space: tuple[Tensor, Tensor, Tensor] | None = None

    def solved(self, result: SinkhornResult) -> _Memory:
        """With the inverses that a solve has left."""
        space = None if result.deflation is None else result.deflation.state
        return replace(self, factor=result.factor, space=space)

    def moved_to(self, w: Tensor, result: SinkhornResult) -> _Memory:
        """With the potentials found at ``w``; better ones at the same W replace those at hand."""
        again = bool(self.known) and torch.equal(w, self.known[0].w)
        earlier = self.known[1:] if again else self.known[:1]
        return replace(self, known=(_Known(w, result.f, result.g), *earlier))

    def extrapolated(self, w: Tensor) -> Potentials | None:
        """Potentials at ``w`` along the difference of the last two; None without a last one."""
        if not self.known:
            return None
        last, before = self.known[0], self.known[-1]
        move = last.w - before.w
        length = float((move * move).sum())
        along = float((move * (w - last.w)).sum()) / length if length > 0 else 0.0
        t = min(max(along, EXTRAPOLATE[0]), EXTRAPOLATE[1])
        return Potentials(last.f + t * (last.f - before.f), last.g + t * (last.g - before.g))

    def start(self, w: Tensor, x: Tensor, y: Tensor) -> WarmStart | None:
        """Start of the solve at ``w``: by the responses of the last Hessian if as near as the last W."""
        bent, potentials = self.bent, self.extrapolated(w)
        if potentials is None:
            return None
        if bent is not None and (w - bent.w).norm() <= (w - self.known[0].w).norm():
            tangents = Tangents(bent.blocks)
            return WarmStart(
                Potentials(bent.f, bent.g), x @ bent.w, y, True, self.factor, self.space, tangents
            )
        return WarmStart(potentials, x @ w, y, True, self.factor, self.space)


class RegressionLoss:
    """`W -> OT_eps(X W, Y)` with controlled inexactness.

    The fixed point is solved until the gradient's error, estimated by `2 rms|x| rms|y| * marginal error`,
    is at most 1% of the gradient itself, or ``tol`` is reached: far from a stationary point a rough plan
    is enough, near one it is not. The Hessian is taken at marginal error 1e-9. The solver is Newton on the
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
                bent = _Known(w.detach().clone(), result.f, result.g, tangents.blocks)
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

    def warm_state(self) -> dict[str, Any]:
        """What the next solve starts from: potentials, responses of the last Hessian, inverses kept."""
        memory = self._memory
        bent = memory.bent
        return {
            "points": [(known.w, known.f, known.g) for known in memory.known],
            "bent": None if bent is None else (bent.w, bent.f, bent.g, bent.blocks),
            "inverses": (memory.factor, memory.space),
            "wanted": self._wanted,
        }

    def load_warm_state(self, state: dict[str, Any]) -> None:
        """Inverse of `warm_state`; what the state does not name stays."""
        memory = replace(self._memory, known=tuple(_Known(*point) for point in state["points"]))
        if "bent" in state:
            memory = replace(memory, bent=None if state["bent"] is None else _Known(*state["bent"]))
        if "inverses" in state:
            memory = replace(memory, factor=state["inverses"][0], space=state["inverses"][1])
        self._memory, self._wanted = memory, state.get("wanted", self._wanted)
        self.release()

    @contextlib.contextmanager
    def freeze(self) -> Iterator[None]:
        """What warm starts begin from does not move inside."""
        before, self._frozen = (self._frozen, self._memory, self._wanted), True
        try:
            yield
        finally:
            self._frozen, self._memory, self._wanted = before

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
        result = known or self._sinkhorn(problem, first, self._memory.start(w, self.x, self.y))
        gradient = self._gradient(result)
        for _ in range(ROUNDS):
            error = self._typical * float(result.marginal_error)
            wanted = accuracy * float(gradient.norm())
            if float(result.marginal_error) <= floor or (accuracy > 0 and error <= wanted):
                break
            before = float(result.marginal_error)
            result = self._sinkhorn(problem, max(floor, 0.3 * before * wanted / error), self._again(result))
            gradient = self._gradient(result)
            if float(result.marginal_error) > 0.9 * before:
                break
        if result is not known:
            self._at, self._result, self._hessian = w.clone(), result, None
            self._memory = self._memory.moved_to(self._at, result)
        # The next gradient is probably about as large.
        self._wanted = min(FIRST_TOL, MARGIN * self.error_wanted(gradient))
        self._count(result)
        return result, gradient

    def _again(self, result: SinkhornResult) -> WarmStart:
        """A start at the same W."""
        clouds, memory = (result.problem.x, result.problem.y), self._memory
        return WarmStart(result.potentials, *clouds, True, memory.factor, memory.space)

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
        self._memory = self._memory.solved(result)
        self._count(result)
        return result
