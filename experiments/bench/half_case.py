"""The task of the half-iteration table: one update of f, from potentials a few iterations old."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.backends.select import get_backend
from ot_newton.experiments.bench.harness import Job, Verdict
from ot_newton.potentials import Biases, biases_to_potentials, operands
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter
from ot_newton.solve import sinkhorn

__all__ = ["HalfCase", "backend_job", "make_case"]

EPS = 0.25
WARM_ITERATIONS = 3
NOISE_FACTOR = 20.0


@dataclass(frozen=True, eq=False)
class HalfCase:
    """Gaussian clouds of unit total variance, and potentials after three iterations.

    Attributes:
        problem: float32, uniform weights.
        f: stabilizer, a potential one update behind.
        g: the potential the update is made from.
        row: f as a base-2 bias.
        col: g as a base-2 bias.
        truth: (n,) the new f in float64.
        tolerance: rounding floor of a float32 exponent times 20, as an error of f over eps.
    """

    problem: OTProblem
    f: Tensor
    g: Tensor
    row: Tensor
    col: Tensor
    truth: Any
    tolerance: float

    @property
    def log_weight(self) -> float:
        """`log b_j`."""
        return -math.log(self.problem.m)

    def check(self, f: Any) -> Verdict:
        """Largest error of the new potential over eps: the relative error of a row of the plan."""
        found = np.asarray(f, dtype=np.float64).reshape(-1)
        return Verdict(float(np.abs(found - self.truth).max()) / self.problem.eps, self.tolerance)


def make_case(n: int, d: int, seed: int = 0) -> HalfCase:
    """Clouds of n points each in dimension d."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, d, generator=generator) / math.sqrt(d) for _ in range(2))
    problem = OTProblem(x, y, eps=EPS)
    start = sinkhorn(problem, tol=0, max_iter=WARM_ITERATIONS, anneal=False, backend="torch_tiles")
    truth = _update(x.double(), y.double(), start.g.double(), EPS)
    floor = float(torch.finfo(torch.float32).eps) * max(1.0, problem.centred.max_cost / EPS)
    return HalfCase(
        problem,
        start.f,
        start.g,
        start.biases.row,
        start.biases.col,
        truth.numpy(),
        NOISE_FACTOR * floor,
    )


def _update(x: Tensor, y: Tensor, g: Tensor, eps: float) -> Tensor:
    """`-eps LSE_j[(g_j - |x_i - y_j|^2)/eps + log b_j]` by differences and torch, block by block."""
    parts = [
        torch.logsumexp((g - torch.cdist(block, y).square()) / eps - math.log(len(y)), dim=1)
        for block in torch.split(x, 512)
    ]
    return -eps * torch.cat(parts)


def backend_job(case: HalfCase, backend: str) -> Job:
    """One stabilized pass of one of our backends, as the solver calls it."""
    problem = case.problem
    q, k = operands(problem, problem.eps)
    tiles = get_backend(backend).bind(q, k, PassCounter())
    b = problem.centred.b

    def answer(output: tuple[Tensor, Tensor | None]) -> Tensor:
        lse, total = output
        if total is None:
            raise RuntimeError("the guard tripped: the stabilized pass was not the one timed")
        return biases_to_potentials(problem, Biases(-lse, case.col)).f

    return Job(lambda: tiles.lse(case.col, b, 1, case.row), answer)
