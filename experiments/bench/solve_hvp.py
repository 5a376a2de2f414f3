"""Table `solve-hvp`: a solve to the same marginal error and one Hessian-vector product, from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ot_newton.experiments.bench.adapters import Adapter, find
from ot_newton.experiments.bench.cases import Judge
from ot_newton.experiments.bench.harness import Entry, Pace, claim, race
from ot_newton.experiments.bench.settings import Settings
from ot_newton.experiments.bench.tasks import Rule, Task
from ot_newton.problem import OTProblem

__all__ = ["contestants", "rows", "uniform_task"]

Row = dict[str, Any]
EPS, DIM, TOL = 0.05, 3, 1e-4
SPEEDUP = 5.0


def uniform_task(n: int, seed: int = 0) -> Task:
    """Uniform points in the unit cube, n a side, float32, eps = .05; a Gaussian and a translation."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.rand(n, DIM, generator=generator) for _ in range(2))
    vectors = torch.randn(2, n, DIM, generator=generator)
    vectors[1] = vectors[1, :1]
    return Task(OTProblem(x, y, eps=EPS), Rule(tol=TOL), vectors)


def contestants() -> tuple[Adapter, ...]:
    """Who takes part; OTT's product is that of its implicit differentiation."""
    ott = replace(find("OTT dense"), name="OTT implicit HVP")
    return find("cpu"), find("torch_tiles"), find("KeOps, our formulas"), ott


def _claims(entries: list[Entry]) -> Iterator[Row]:
    named = {entry.contestant.name: entry for entry in entries}
    ours, ott = named["cpu"], named["OTT implicit HVP"]
    yield claim(ours, ott, target=SPEEDUP)
    row: Row = {
        "kind": "claim",
        "claim": "translation error (I1): cpu against OTT implicit HVP",
        "target": "<= 1x",
    }
    if ours.verdict is None or ott.verdict is None:
        yield row | {"status": "NO CLAIM", "message": ours.message or ott.message}
        return
    errors = [entry.verdict.facts["translation_error"] for entry in (ours, ott) if entry.verdict]
    ratio = errors[0] / errors[1] if errors[1] > 0 else float("inf")
    yield row | {"status": "MET" if ratio <= 1 else "MISSED", "ratio_median": ratio, "ratio_min": ratio}


def rows(settings: Settings) -> Iterator[Row]:
    """One row per contestant, then the claims.

    Args:
        settings: size and pace.

    Yields:
        The rows.
    """
    task = uniform_task(settings.hvp_size)
    pace = Pace(seconds=2 * settings.race_seconds, rounds=settings.rounds)
    racers = [adapter.contestant("hvp", task) for adapter in contestants()]
    entries = race(racers, Judge(task).check("hvp"), pace)
    p = task.problem
    head = {"n": p.n, "m": p.m, "d": p.d, "eps": p.eps, "threads": torch.get_num_threads()}
    for row in [*(entry.row() for entry in entries), *_claims(entries)]:
        yield head | row
