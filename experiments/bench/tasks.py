"""The matched task that every library gets: one problem, one stopping rule, one convention."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ot_newton.experiments.bench.harness import Job
from ot_newton.problem import OTProblem

__all__ = ["EPS", "MAX_ITER", "OPERATIONS", "Rule", "Task", "cloud_pair", "make_task", "quiet"]

OPERATIONS = ("forward", "backward", "hvp")
"""Solve and value; the same and the gradient in x; solve and one Hessian-vector product in x."""

EPS = 0.25
"""At d = 2; it falls as `d^(-1/4)`, since the distances of unit clouds concentrate as d grows."""

TOL = 1e-4
MAX_ITER = 10_000


@dataclass(frozen=True)
class Rule:
    """When a solver stops.

    Attributes:
        iterations: exactly so many from a zero start, without annealing; 0: to convergence.
        tol: marginal error of a converged one, the L1 distance of the worse side.
    """

    iterations: int = 0
    tol: float = TOL

    @property
    def text(self) -> str:
        """For the rows."""
        if self.iterations:
            return f"{self.iterations} iterations from zero, no annealing"
        return f"L1 marginal error <= {self.tol:g} on both sides"

    @property
    def name(self) -> str:
        """Short, for headings."""
        return f"{self.iterations} iterations" if self.iterations else f"to {self.tol:g}"


@dataclass(frozen=True, eq=False)
class Task:
    """What a contestant gets.

    Attributes:
        problem: full squared cost unless its ``cost_scale`` says otherwise; centred clouds, so that every
            library's zero start is the same one.
        rule: when to stop.
        vectors: (k,n,d) directions of Hessian-vector products; the first is the one timed.
        name: for headings, where the clouds are not the usual ones.
    """

    problem: OTProblem
    rule: Rule
    vectors: Tensor
    name: str = ""

    @property
    def counted(self) -> bool:
        """Whether the rule is a count of iterations."""
        return self.rule.iterations > 0

    def on(self, device: str) -> Task:
        """The same task with its tensors there."""
        p = self.problem
        x, y, a, b = (part.to(device) for part in (p.x, p.y, p.a, p.b))
        moved = OTProblem(x, y, a, b, eps=p.eps, cost_scale=p.cost_scale, rho_x=p.rho_x, rho_y=p.rho_y)
        return replace(self, problem=moved, vectors=self.vectors.to(device))


def cloud_pair(n: int, m: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gaussian clouds of unit total variance and zero mean, float32."""
    generator = torch.Generator().manual_seed(seed)
    clouds = (torch.randn(size, d, generator=generator, dtype=torch.float64) for size in (n, m))
    x, y = ((cloud - cloud.mean(0)) / math.sqrt(d) for cloud in clouds)
    return x.float(), y.float()


def make_task(n: int, m: int, d: int, rule: Rule, *, same: bool = False, seed: int = 0) -> Task:
    """A task of the matched tables: `cloud_pair`, uniform weights, float32, `eps = .25 (2/d)^(1/4)`.

    Args:
        n: points in x.
        m: points in y.
        d: dimension.
        rule: when to stop.
        same: y = x, the self problem; m is not used.
        seed: of clouds and directions.
    """
    x, y = cloud_pair(n, m, d, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    vectors = torch.randn(2, n, d, generator=generator)
    vectors[1] = vectors[1, :1]
    return Task(
        OTProblem(x, x if same else y, eps=EPS * (2 / d) ** 0.25), rule, vectors, "y = x" if same else ""
    )


def quiet(run: Callable[[], Any], answer: Callable[[Any], Any]) -> Job:
    """A job that keeps warnings of non-convergence to itself: a count is asked for, and rows say the rest."""

    def silent() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return run()

    return Job(silent, answer)
