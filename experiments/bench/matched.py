"""Tables `forward`, `backward`, `hvp`: every library on one task, at a count of iterations and converged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ot_newton.experiments.bench.adapters import ADAPTERS, SELF_ADAPTERS, Adapter, present
from ot_newton.experiments.bench.cases import Judge
from ot_newton.experiments.bench.harness import Pace, race
from ot_newton.experiments.bench.settings import Settings, Size
from ot_newton.experiments.bench.tasks import Rule, Task, make_task

__all__ = ["backward", "forward", "hvp", "timed"]

Row = dict[str, Any]
LARGE = 1 << 26
"""Pairs from which on a contestant gets one turn at least, not three."""


def timed(
    operation: str, task: Task, adapters: Sequence[Adapter], settings: Settings, judge: Judge | None = None
) -> Iterator[Row]:
    """The rows of one race.

    Args:
        operation: "forward", "backward" or "hvp".
        task: what is solved.
        adapters: who takes part.
        settings: the pace.
        judge: of the answers.

    Yields:
        One row per contestant.
    """
    p = task.problem
    large = p.n * p.m >= LARGE
    pace = Pace(seconds=settings.peer_seconds, rounds=settings.rounds, least=1 if large else 3)
    contestants = [adapter.contestant(operation, task) for adapter in adapters]
    entries = race(contestants, (judge or Judge(task)).check(operation), pace)
    head: Row = {
        "n": p.n,
        "m": p.m,
        "d": p.d,
        "eps": p.eps,
        "rule": task.rule.name,
        "threads": torch.get_num_threads(),
    }
    head |= {"problem": task.name} if task.name else {}
    for entry, adapter in zip(entries, adapters, strict=True):
        yield head | entry.row() | {"streams": adapter.streams}


def _rows(operation: str, sizes: Sequence[Size], settings: Settings) -> Iterator[Row]:
    for size in sizes:
        task = make_task(size.n, size.m, size.d, Rule(size.iterations), same=size.same)
        table = SELF_ADAPTERS if size.same else ADAPTERS
        yield from timed(operation, task, present(operation, table, size.n * size.m), settings)


def forward(settings: Settings) -> Iterator[Row]:
    """Solve and value; the self problem y = x by symmetric and alternating updates too."""
    yield from _rows("forward", settings.forward_sizes, settings)


def backward(settings: Settings) -> Iterator[Row]:
    """Solve and gradient in x."""
    yield from _rows("backward", settings.backward_sizes, settings)


def hvp(settings: Settings) -> Iterator[Row]:
    """Solve and one Hessian-vector product in x."""
    yield from _rows("hvp", settings.hvp_sizes, settings)
