"""Table `block-hvp`: many Hessian-vector products as one block against one product, `cpu` backend."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ot_newton.directions import Direction, HessianStats
from ot_newton.experiments.bench.harness import Contestant, Entry, Job, Pace, Verdict, claim, race
from ot_newton.experiments.bench.settings import Settings
from ot_newton.hessian import LinearizedPlan
from ot_newton.operators.hessian_operator import default_rtol
from ot_newton.operators.plan import linearize
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter
from ot_newton.result import SinkhornResult
from ot_newton.solve import sinkhorn

__all__ = ["rows"]

Row = dict[str, Any]
EPS, DIM, TOL = 0.05, 3, 1e-4
AGREEMENT = 1e-4
TIME_FACTOR, PASS_FACTOR = 3.0, 1.2


def _plan(result: SinkhornResult) -> LinearizedPlan:
    """The plan with its marginals and transports made, which all products share; no deflation.

    A deflation space would make products of the same plan differ in cost.
    """
    plan = linearize(result.problem, result.biases, result.backend, PassCounter())
    plan.deflation = None
    plan.rows(), plan.columns()
    return plan


def _product(plan: LinearizedPlan, vectors: Tensor) -> tuple[Tensor, int]:
    """Products (k,n,d) and the plan passes they took."""
    before = plan.counter.passes
    rtol = default_rtol(plan.problem.dtype)
    out, solve = plan.product(Direction(x=vectors[None]), "x", rtol=rtol, max_cg=None, stats=HessianStats())
    if not solve.converged or out.x is None:
        raise RuntimeError(f"the inner solve ended {solve.reasons} after {solve.iterations} steps")
    return out.x[0], plan.counter.passes - before


def _names(block: int) -> tuple[str, str]:
    return "one product", f"{block} products as one block"


def _claims(entries: list[Entry]) -> Iterator[Row]:
    one, block = entries
    yield claim(block, one, target=TIME_FACTOR, at_least=False, what="take the time of")
    row: Row = {
        "kind": "claim",
        "claim": f"{block.contestant.name} take the plan passes of {one.contestant.name}",
        "target": f"<= {PASS_FACTOR:g}x",
    }
    if one.verdict is None or block.verdict is None:
        yield row | {"status": "NO CLAIM", "message": one.message or block.message}
        return
    ratio = block.verdict.facts["plan_passes"] / one.verdict.facts["plan_passes"]
    met = "MET" if ratio <= PASS_FACTOR else "MISSED"
    yield row | {"status": met, "ratio_median": ratio, "ratio_min": ratio}


def rows(settings: Settings) -> Iterator[Row]:
    """Both contestants, then the claims; each column is checked against its own single product.

    Args:
        settings: size, block and pace.

    Yields:
        The rows.
    """
    n, block = settings.hvp_size, settings.block
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(n, DIM, generator=generator) for _ in range(2))
    vectors = torch.randn(block, n, DIM, generator=generator)
    result = sinkhorn(OTProblem(x, y, eps=EPS), tol=TOL, backend="cpu")
    plan = _plan(result)
    single = [_product(plan, vector[None])[0][0] for vector in vectors]

    def check(answer: tuple[Tensor, int]) -> Verdict:
        products, passes = answer
        pairs = zip(products, single, strict=False)
        error = max(float((found - own).norm() / own.norm()) for found, own in pairs)
        return Verdict(error, AGREEMENT, {"plan_passes": passes})

    note = f"plain CG to a residual of {default_rtol(torch.float32):g} of each right-hand side"
    contestants = [
        Contestant(name, partial(_job, plan, vectors[:count]), stopping=note)
        for name, count in zip(_names(block), (1, block), strict=True)
    ]
    pace = Pace(seconds=settings.race_seconds, rounds=settings.rounds)
    entries = race(contestants, check, pace)
    head = {"n": n, "m": n, "d": DIM, "eps": EPS, "threads": torch.get_num_threads()}
    for row in [*(entry.row() for entry in entries), *_claims(entries)]:
        yield head | row


def _job(plan: LinearizedPlan, vectors: Tensor) -> Job:
    return Job(lambda: _product(plan, vectors))
