"""How an answer to a matched task is judged: against float64, in the contestant's own order of updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.experiments.bench.harness import Verdict
from ot_newton.experiments.bench.reference import SCHEMES, Softmins, double
from ot_newton.experiments.bench.tasks import Task
from ot_newton.result import SinkhornResult
from ot_newton.solve import sinkhorn

__all__ = ["Judge", "relative"]

NOISE_FACTOR = 20.0
MARGINAL_SLACK = 1.5
"""Rounding of float32 potentials in the float64 marginals that are checked."""

WORST = 0.01
"""Largest relative error of a derivative that is timed: what a marginal error of 1e-4 explains, and the inner
tolerances of the peers."""

REFERENCE_TOL = 1e-10


class Judge:
    """The checks of one task; references are made when they are first needed.

    Args:
        task: what the contestants solve.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._states: dict[tuple[str, bool], tuple[Tensor, Tensor]] = {}
        self._truths: dict[int, SinkhornResult] = {}
        self._products: dict[int, Any] = {}

    @cached_property
    def softmins(self) -> Softmins:
        """Of the problem, in float64."""
        return Softmins(self.task.problem)

    @cached_property
    def rounding(self) -> float:
        """Relative error of a plan entry that float32 exponents explain, times 20."""
        p = self.task.problem
        largest = p.cost_scale * p.centred.max_cost
        return NOISE_FACTOR * float(torch.finfo(torch.float32).eps) * max(1.0, largest / p.eps)

    def state(self, scheme: str, *, gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Potentials that float64 has at the end: after the count in this order, or at the fixed point.

        Args:
            scheme: the order of updates.
            gradient: those whose plan the library's gradient is made of.
        """
        if not self.task.counted:
            return self._fixed_point
        key = (scheme, gradient)
        if key not in self._states:
            order = SCHEMES[scheme]
            run = order.gradient_pair if gradient else order.run
            self._states[key] = run(self.softmins, self.task.rule.iterations)
        return self._states[key]

    @cached_property
    def _fixed_point(self) -> tuple[Tensor, Tensor]:
        """Ours in float64, its marginals seen by the reference's own softmins.

        Raises:
            ArithmeticError: they are off.
        """
        solved = sinkhorn(self.softmins.problem, tol=REFERENCE_TOL)
        pair = solved.f, solved.g
        error = self.softmins.marginal_error(*pair)
        if not error <= 10 * REFERENCE_TOL:
            raise ArithmeticError(f"the float64 reference has a marginal error of {error:.1e}")
        return pair

    def truth(self, scheme: str, *, gradient: bool = False) -> SinkhornResult:
        """Our float64 result at that state, for its derivatives."""
        pair = self.state(scheme, gradient=gradient)
        if id(pair) not in self._truths:
            backend = "dense" if self.softmins.stored else "cpu"
            problem = double(self.task.problem)
            result = sinkhorn(problem, init=pair, tol=0.0, max_iter=0, backend=backend)
            self._truths[id(pair)] = result
        return self._truths[id(pair)]

    def product(self, scheme: str) -> Any:
        """The first direction's Hessian-vector product at that state, (n,d)."""
        result = self.truth(scheme)
        if id(result) not in self._products:
            v = self.task.vectors[0].cpu().double()
            self._products[id(result)] = (result.hessian("x", rtol=1e-11) @ v).numpy()
        return self._products[id(result)]

    def check(self, operation: str) -> Callable[[Any], Verdict]:
        """The judge of an operation's answers."""
        judges = {"forward": self._forward, "backward": self._backward, "hvp": self._hvp}

        def verdict(answer: dict[str, Any]) -> Verdict:
            f, g = (torch.as_tensor(np.array(answer[key], np.float64)).reshape(-1) for key in "fg")
            own = self.softmins.marginal_error(f, g)
            facts: dict[str, Any] = {"marginal_error": own}
            facts |= {
                key: answer[key] for key in ("iterations", "plan_passes") if answer.get(key) is not None
            }
            error, tolerance, more = judges[operation](answer, f, g, own)
            limit = MARGINAL_SLACK * self.task.rule.tol
            if not self.task.counted and not own <= limit:
                reason = f"marginal error {own:.1e} above {self.task.rule.tol:g}"
                return Verdict(float("inf"), tolerance, facts | more, reason)
            return Verdict(error, tolerance, facts | more)

        return verdict

    def _forward(self, answer: dict[str, Any], f: Tensor, g: Tensor, own: float) -> tuple[float, float, Any]:
        """A count: the largest relative error of a plan entry. To convergence: the marginal error."""
        if not self.task.counted:
            return own, MARGINAL_SLACK * self.task.rule.tol, {}
        exact_f, exact_g = self.state(answer["scheme"])
        df, dg = f - exact_f, g - exact_g
        gauge = df.mean()
        worst = float((df - gauge).abs().max() + (dg + gauge).abs().max()) / self.task.problem.eps
        return worst, self.rounding, {}

    def _backward(self, answer: dict[str, Any], f: Tensor, g: Tensor, own: float) -> tuple[float, float, Any]:
        """Relative error of the gradient in x."""
        exact = self.truth(answer["scheme"], gradient=True).gradient("x").numpy()
        return relative(answer["gradient"], exact), 10 * self.rounding if self.task.counted else WORST, {}

    def _hvp(self, answer: dict[str, Any], f: Tensor, g: Tensor, own: float) -> tuple[float, float, Any]:
        """Relative error of the first product or of the translation law I1 in the last, whichever is larger.

        In high dimensions the first alone says little: H is then nearly `2s diag(r)`, whatever P is.

        `|H (1 (x) u) - 2s r (x) u| / |2s r (x) u|` with the row marginal r of the contestant's own
        potentials.
        """
        p = self.task.problem
        products = np.asarray(answer["products"], np.float64)
        r = (p.a.cpu().double() * torch.exp((f - self.softmins.hard(g, 1)) / p.eps)).numpy()
        exact = 2.0 * p.cost_scale * r[:, None] * self.task.vectors[-1].cpu().double().numpy()
        law = relative(products[-1], exact)
        error = max(relative(products[0], self.product(answer["scheme"])), law)
        return error, WORST, {"translation_error": law}


def relative(found: Any, exact: Any) -> float:
    """`|found - exact| / |exact|`."""
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))
