"""Losses a user writes: `ot_cost`, `sinkhorn_divergence` and the module `SinkhornLoss`.

OT_eps(x, y)                                                             (debias=False)
S(x, y) = OT(x,y) - OT(x,x)/2 - OT(y,y)/2 + (eps/2)(sum a - sum b)^2     (debias=True; MATH 6)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ot_newton.autograd import Recipe, differentiable, prepare
from ot_newton.errors import check_integer, check_number
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter
from ot_newton.result import SinkhornResult, default_rtol
from ot_newton.solve import sinkhorn
from ot_newton.terms import CrossTerm, SelfTerm, Term
from ot_newton.warm import Tangents, WarmStart

__all__ = ["SinkhornLoss", "ot_cost", "sinkhorn_divergence"]

SLOW_ITERATIONS = 12
WORTHLESS = 0.5
SOLVE_OPTIONS = ("tol", "max_iter", "method", "anneal", "backend", "callback", "progress")


class SinkhornLoss(torch.nn.Module):
    """Entropic OT or Sinkhorn divergence between two clouds, twice differentiable in x, y, a and b.

    Call it as ``loss(x, y)`` or, with weights, ``loss(a, x, b, y)`` (GeomLoss's order). Batch dimensions
    go in front, (B, n, d). The derivatives are those of MATH 4 to 7: a backward costs one plan pass
    each for y, a and b, none for x, a double backward one streamed joint Hessian-vector product;
    `torch.func` transforms and `torch.autograd.functional` work on it, a third derivative raises.

    Successive calls on clouds of the same sizes start from the last potentials, moved along with the clouds
    as the Hessian products made since foretell, or the last displacement (``warm_start``); that is the
    loss's state, see `warm_state`, `load_warm_state` and `freeze`.

    Args:
        eps: regularization in units of the cost; no default.
        debias: the divergence S in place of OT.
        cost_scale: s of `C = s |x - y|^2`.
        rho_x: marginal penalty of the x side, None for a hard marginal.
        rho_y: the same for y.
        warm_start: start from the last call's potentials.
        rtol: tolerance of the double backward's inner solve; 1e-10 in float64, 1e-5 in float32.
        max_cg: cap on its CG steps.
        **options: of `sinkhorn`: tol, max_iter, method, anneal, backend, callback, progress.

    Attributes:
        last_result: the fixed point of the last call's OT(x, y).
        last_terms: all solved terms of the last call, by name: "xy", and "xx", "yy" when debiased.
        plan_passes: plan passes of all calls so far, derivatives included.

    Raises:
        TypeError, ValueError: a bad option, named, before any work.

    Example:
        >>> import torch
        >>> x = torch.tensor([[-0.5], [0.5]], dtype=torch.float64)
        >>> y = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
        >>> round(float(SinkhornLoss(eps=1.0, debias=True)(x, y)), 9)
        0.288777797
    """

    def __init__(
        self,
        eps: float,
        debias: bool = False,
        cost_scale: float = 1.0,
        *,
        rho_x: float | None = None,
        rho_y: float | None = None,
        warm_start: bool = True,
        rtol: float | None = None,
        max_cg: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.eps = check_number("eps", eps)
        self.cost_scale = check_number("cost_scale", cost_scale)
        self.rho_x = None if rho_x is None else check_number("rho_x", rho_x)
        self.rho_y = None if rho_y is None else check_number("rho_y", rho_y)
        self.rtol = None if rtol is None else check_number("rtol", rtol, high=1.0)
        self.max_cg = None if max_cg is None else check_integer("max_cg", max_cg, low=1)
        unknown = set(options) - set(SOLVE_OPTIONS)
        if unknown:
            raise TypeError(
                f"unknown option {sorted(unknown)[0]!r}: SinkhornLoss takes {', '.join(SOLVE_OPTIONS)}"
            )
        self.debias, self.warm_start, self.options = bool(debias), bool(warm_start), options
        self.last_terms: dict[str, CrossTerm | SelfTerm] = {}
        self._total = PassCounter()
        self._starts: dict[str, WarmStart] = {}
        self._live: dict[str, SinkhornResult] = {}
        self._frozen = False

    @classmethod
    def from_geomloss(
        cls, blur: float = 0.05, reach: float | None = None, debias: bool = True, **options: Any
    ) -> SinkhornLoss:
        """The loss that `geomloss.SamplesLoss("sinkhorn", p=2, blur=blur, reach=reach)` approximates.

        `cost_scale = 1/2`, `eps = blur^2`, `rho = reach^2`. GeomLoss's unbalanced OT value is ours minus
        `eps (m_a m_b - (m_a + m_b)/2)`; the debiased ones agree up to the mass term.

        Example:
            >>> SinkhornLoss.from_geomloss(blur=0.5, reach=2.0)
            SinkhornLoss(eps=0.25, debias=True, cost_scale=0.5, rho_x=4, rho_y=4)
        """
        rho = None if reach is None else check_number("reach", reach) ** 2
        eps = check_number("blur", blur) ** 2
        return cls(eps, debias, 0.5, rho_x=rho, rho_y=rho, **options)

    def extra_repr(self) -> str:
        """Parameters, for `print(loss)`."""
        rho = "".join(
            f", {k}={v:g}" for k, v in (("rho_x", self.rho_x), ("rho_y", self.rho_y)) if v is not None
        )
        return f"eps={self.eps:g}, debias={self.debias}, cost_scale={self.cost_scale:g}{rho}"

    @property
    def last_result(self) -> SinkhornResult | None:
        """Fixed point of the last call's OT(x, y), None before the first."""
        term = self.last_terms.get("xy")
        return term.result if isinstance(term, CrossTerm) else None

    @property
    def plan_passes(self) -> int:
        """Plan passes of all calls so far, derivatives included."""
        return self._total.passes

    def noise_floor(self, x: Tensor | None = None) -> float:
        """Gradient norms (in x) below this are rounding and early stop; 0 before the first call.

        The terms' `SinkhornResult.gradient_noise`, added up.
        """
        return sum(result.gradient_noise for result in self._moved())

    def value_noise(self, x: Tensor | None = None) -> float:
        """Differences of values below this are rounding and early stop; 0 before the first call."""
        return sum(term.result.value_noise for term in self.last_terms.values())

    def hvp_noise_floor(self, x: Tensor | None = None) -> float:
        """Curvatures (in x) below this are rounding, inner tolerance and early stop; 0 before the first call.

        The terms' `HessianOperator.noise_floor`, added up. Cost: one plan pass a term.
        """
        return sum(result.hessian("x", rtol=self.rtol).noise_floor for result in self._moved())

    def _moved(self) -> list[SinkhornResult]:
        """Results of the terms that x enters."""
        return [term.result for name, term in self.last_terms.items() if name != "yy"]

    def warm_state(self) -> dict[str, dict[str, Tensor]]:
        """What the next call starts from, by term: potentials, clouds, slow modes, tangents of products made.

        Example:
            >>> import torch
            >>> loss = SinkhornLoss(eps=0.5)
            >>> value = loss(torch.rand(6, 2), torch.rand(7, 2))
            >>> {name: tuple(part.shape) for name, part in loss.warm_state()["xy"].items()}
            {'f': (6,), 'g': (7,), 'x': (6, 2), 'y': (7, 2), 'newton': ()}
        """
        return {name: self._start(name).as_dict() for name in self._starts}

    def load_warm_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Put a `warm_state` back; its tensors are shared, and never changed.

        A state of the last call's own clouds also restores what products with its plan had added.
        """
        self._starts = {name: WarmStart.from_dict(part) for name, part in state.items()}
        self._live = {k: result for k, result in self._live.items() if self._is_start(k, result)}
        for name, result in self._live.items():
            result.linearized.resume(self._starts[name])

    def _is_start(self, name: str, result: SinkhornResult) -> bool:
        """Whether a result is what the start was made of: products with it go on adding to it."""
        start = self._starts.get(name)
        if start is None or not start.fits(result.problem) or start.x.shape != result.problem.x.shape:
            return False
        return torch.equal(start.potentials.f, result.f) and torch.equal(start.x, result.problem.x)

    def _start(self, name: str) -> WarmStart:
        """The start of the next call: the last one's, with what its products have found since."""
        start, result = self._starts[name], self._live.get(name)
        if result is None:
            return start
        plan = result.linearized
        space = start.space if plan.deflation is None else plan.deflation.state
        seen = plan.tangents
        tangents = None if seen is None else Tangents(seen.blocks, seen.secant)
        return replace(start, space=space, tangents=tangents)

    @contextlib.contextmanager
    def freeze(self) -> Iterator[None]:
        """Warm starts do not move inside: every call starts alike, as finite differences need.

        Example:
            >>> import torch
            >>> loss = SinkhornLoss(eps=0.5)
            >>> x, y = torch.rand(6, 2), torch.rand(6, 2)
            >>> with loss.freeze():
            ...     bool(loss(x, y) == loss(x, y)), loss.warm_state()
            (True, {})
        """
        before, live = self._frozen, self._live
        self._starts = {name: self._start(name) for name in self._starts}
        self._frozen, self._live = True, {}
        try:
            yield
        finally:
            self._frozen, self._live = before, live

    def forward(self, *args: Any) -> Tensor:
        """``loss(x, y)`` or ``loss(a, x, b, y)``; (*batch) values.

        Raises:
            TypeError, ValueError: as `OTProblem`; a wrong number of arguments.
        """
        if len(args) not in (2, 4):
            raise TypeError(f"call as loss(x, y) or loss(a, x, b, y), got {len(args)} arguments")
        x, y, a, b = (
            (args[0], args[1], None, None) if len(args) == 2 else (args[1], args[3], args[0], args[2])
        )
        return _untraced(self._evaluate)(x, y, a, b)

    def _evaluate(self, x: Any, y: Any, a: Any, b: Any) -> Tensor:
        x, y, a, b = prepare(x, y, a, b)
        value: Tensor = differentiable(Recipe("xyab", lambda *p: self._cross(*p)), x, y, a, b)
        if not self.debias:
            return value
        own_x = differentiable(Recipe("xa", lambda *p: self._self("xx", self.rho_x, *p)), x, a)
        own_y = differentiable(Recipe("xa", lambda *p: self._self("yy", self.rho_y, *p)), y, b)
        value = value - own_x / 2 - own_y / 2
        if self.rho_x is None and self.rho_y is None:
            return value
        mass: Tensor = a.sum(-1) - b.sum(-1)
        return value + (self.eps / 2) * mass**2

    def _cross(self, x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Term:
        problem = self._problem(x, y, a, b, self.rho_x, self.rho_y)
        same = problem.n == problem.m and self.rho_x == self.rho_y
        same = same and torch.equal(problem.x, problem.y) and torch.equal(problem.a, problem.b)
        update = "self" if same and self.debias else "alternating"
        return self._keep("xy", CrossTerm(self._solve("xy", problem, update), *self._inner(problem)))

    def _self(self, name: str, rho: float | None, x: Tensor, a: Tensor) -> Term:
        problem = self._problem(x, x, a, a, rho, rho)
        centre = self.rho_x is None and self.rho_y is None
        result = self._solve(name, problem, "self")
        return self._keep(name, SelfTerm(result, *self._inner(problem), centre=centre))

    def _problem(
        self, x: Tensor, y: Tensor, a: Tensor, b: Tensor, rho_x: float | None, rho_y: float | None
    ) -> OTProblem:
        return OTProblem(x, y, a, b, eps=self.eps, cost_scale=self.cost_scale, rho_x=rho_x, rho_y=rho_y)

    def _inner(self, problem: OTProblem) -> tuple[float, int | None]:
        return default_rtol(problem.dtype) if self.rtol is None else self.rtol, self.max_cg

    def _keep(self, name: str, term: CrossTerm | SelfTerm) -> Term:
        self.last_terms[name] = term
        return term

    def _solve(self, name: str, problem: OTProblem, update: str) -> SinkhornResult:
        """Solve from the last potentials of the same sizes, and keep the new ones."""
        keeps = self.warm_start and update != "self"
        init = self._start(name) if keeps and name in self._starts else None
        if init is not None and not init.fits(problem):
            init = None
        with torch.no_grad():
            result = sinkhorn(problem, init=init, update=update, **self.options)
        self._total.add(result.counter.passes)
        result.counter.parent = self._total
        usable = float(result.errors.max()) < WORTHLESS
        if keeps and usable and not self._frozen:
            x, y = problem.x.detach().clone(), problem.y.detach().clone()
            slow = result.newton or (init is not None and int(result.iterations.max()) > SLOW_ITERATIONS)
            self._starts[name] = WarmStart(result.potentials, x, y, newton=slow, factor=result.factor)
            self._live[name] = result
            result.linearized.tangents = Tangents()
            if init is not None and not problem.batch_shape and init.x.shape == x.shape:
                result.linearized.tangents.along(init, x, y, result.potentials)
        return result


def _untraced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function as torch.compile is to call it: eagerly, after one graph break; fullgraph raises.

    An iteration with a data-dependent end has no graph. Dynamo is not imported for this: who compiles has.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    reason = "an OT loss iterates until it has converged and cannot be traced: call it outside of fullgraph"
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=reason)
    untraced: Callable[..., Tensor] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return untraced


def ot_cost(
    x: Any, y: Any, a: Any = None, b: Any = None, *, eps: float, cost_scale: float = 1.0, **options: Any
) -> Tensor:
    """Entropic OT value, twice differentiable in x, y, a and b; `SinkhornLoss` as a function.

    The gradient in the weights is the one along the simplex (hard marginals: mean removed), see
    `SinkhornResult.gradient`.

    Args:
        x: (..., n, d).
        y: (..., m, d).
        a: (..., n) or None for uniform.
        b: (..., m) or None.
        eps: regularization, in units of the cost.
        cost_scale: s of `C = s |x - y|^2`.
        **options: rho_x, rho_y, rtol, max_cg and those of `sinkhorn`.

    Returns:
        (...) the value in the compute dtype (half inputs: float32). Cost: `sinkhorn`'s and one plan
        pass; one more each for gradients in y, a and b; 2 to 4 and 2 per CG step for a double backward.

    Raises:
        TypeError, ValueError: as `OTProblem` and `sinkhorn`.
        RuntimeError: an input changed in place before backward. Under torch.compile it runs eagerly, after a
            graph break.
        NotImplementedError: a third derivative.

    Example:
        >>> import torch
        >>> x = torch.tensor([[-0.5], [0.5]], dtype=torch.float64, requires_grad=True)
        >>> y = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
        >>> (g,) = torch.autograd.grad(ot_cost(x, y, eps=1.0), x, create_graph=True)
        >>> round(float(g[0].detach()), 6)
        0.261594
    """
    loss = SinkhornLoss(eps, cost_scale=cost_scale, warm_start=False, **options)
    value: Tensor = loss(a, x, b, y)
    return value


def sinkhorn_divergence(
    x: Any, y: Any, a: Any = None, b: Any = None, *, eps: float, cost_scale: float = 1.0, **options: Any
) -> Tensor:
    """Debiased divergence `S(x, y)` (MATH 6), twice differentiable; exactly 0 for identical inputs.

    The self terms run one averaged update of f = g, one plan pass an iteration, and their Hessians their
    own well-conditioned system. Arguments, returns and errors as `ot_cost`.

    Example:
        >>> import torch
        >>> x = torch.rand(5, 2)
        >>> float(sinkhorn_divergence(x, x.clone(), eps=0.1))
        0.0
    """
    loss = SinkhornLoss(eps, True, cost_scale, warm_start=False, **options)
    value: Tensor = loss(a, x, b, y)
    return value
