"""The contestants of the matched tables: one row of a table each.

An adapter's module has `forward(task, kind, update)`, `backward(task, kind)` and `hvp(task, kind)`, each
giving a `Job` whose answer holds ``f`` and ``g`` in our convention and, as asked, ``gradient`` or
``products``; it is imported when the contestant is prepared.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ot_newton.experiments.bench.harness import Contestant, Job
from ot_newton.experiments.bench.reference import SCHEMES, STORED
from ot_newton.experiments.bench.tasks import OPERATIONS, Task

__all__ = ["ADAPTERS", "SELF_ADAPTERS", "Adapter", "find", "present"]


@dataclass(frozen=True)
class Adapter:
    """A way of solving matched tasks.

    Attributes:
        name: in the rows.
        module: of this package.
        kind: what its functions take beside the task.
        scheme: order of its updates, a name of `SCHEMES`.
        streams: needs memory for the points only, not for all pairs.
        most: pairs up to which one that does not stream takes part.
        operations: those it has.
        converges: how it stops when it is to converge, where that is not its own test of the marginals.
        update: of its ``forward``, for the self problem.
    """

    name: str
    module: str
    kind: str = ""
    scheme: str = "x first"
    streams: bool = True
    operations: tuple[str, ...] = OPERATIONS
    converges: str = ""
    update: str = ""
    most: int = STORED

    def prepare(self, operation: str, task: Task) -> Job:
        """The job; its answer names the order of updates."""
        make = getattr(importlib.import_module(f"ot_newton.experiments.bench.{self.module}"), operation)
        job: Job = make(task, self.kind, self.update) if self.update else make(task, self.kind)

        def answer(output: Any) -> dict[str, Any]:
            return {"scheme": self.scheme, **job.answer(output)}

        return Job(job.run, answer)

    def contestant(self, operation: str, task: Task) -> Contestant:
        """For the race."""
        more = f", {self.converges}" if self.converges and not task.counted else ""
        return Contestant(
            self.name,
            partial(self.prepare, operation, task),
            stopping=f"{task.rule.text}{more}; {SCHEMES[self.scheme].about}",
        )


OTT_LOOKS = "looked at every 10 iterations"
OTT_ORDER = "y first, unweighted"
COUNTED = "by the count, in tens, that its order of updates needs"
NO_BACKWARD = ("forward",)
FIRST_ORDER = ("forward", "backward")
"""GeomLoss's double backward is the same formula, tensorized or online: one row says that it is wrong."""

UNROLLED = 1 << 20
"""Pairs up to which the iterations are kept for a double backward: gigabytes from there on."""

ADAPTERS: tuple[Adapter, ...] = (
    Adapter("cpu", "ours", "cpu"),
    Adapter("dense", "ours", "dense", streams=False),
    Adapter("torch_tiles", "ours", "torch_tiles"),
    Adapter("triton", "ours", "triton"),
    Adapter("OTT dense", "peer_ott", "point cloud", OTT_ORDER, False, converges=OTT_LOOKS),
    Adapter("OTT online", "peer_ott", "online", OTT_ORDER, converges=OTT_LOOKS),
    Adapter("GeomLoss tensorized", "peer_geomloss", "tensorized", "geomloss", False, converges=COUNTED),
    Adapter("GeomLoss online", "peer_geomloss", "online", "geomloss", True, FIRST_ORDER, COUNTED),
    Adapter("KeOps, our formulas", "peer_keops", "keops"),
    Adapter("POT log", "peer_pot", "log", OTT_ORDER, False, FIRST_ORDER, OTT_LOOKS),
    Adapter("POT log, unrolled", "peer_pot", "log", OTT_ORDER, False, ("hvp",), OTT_LOOKS, most=UNROLLED),
    Adapter(
        "POT lazy", "peer_pot", "lazy", "x first, unweighted", operations=NO_BACKWARD, converges=OTT_LOOKS
    ),
    Adapter("flash-sinkhorn", "peer_flash", converges=COUNTED),
)
"""The contestants of forward, backward and hvp."""


def _self(name: str, module: str, kind: str, scheme: str, update: str, converges: str = "") -> Adapter:
    """A contestant of the self problem."""
    streams = kind == "cpu"
    return Adapter(name, module, kind, scheme, streams, NO_BACKWARD, converges, update)


SELF_ADAPTERS: tuple[Adapter, ...] = (
    _self("cpu, self", "ours", "cpu", "self", "self"),
    _self("cpu, symmetric", "ours", "cpu", "symmetric", "symmetric"),
    _self("cpu, alternating", "ours", "cpu", "x first", "alternating"),
    _self("dense, self", "ours", "dense", "self", "self"),
    _self("OTT dense, symmetric", "peer_ott", "point cloud", "parallel", "parallel", OTT_LOOKS),
    _self("OTT dense, alternating", "peer_ott", "point cloud", OTT_ORDER, "alternating", OTT_LOOKS),
    _self("GeomLoss, symmetric", "peer_geomloss", "tensorized", "geomloss", "symmetric", COUNTED),
)
"""The contestants of the self problem y = x."""


def find(name: str) -> Adapter:
    """The adapter of that name.

    Raises:
        ValueError: unknown; the known ones are listed.
    """
    known = {adapter.name: adapter for adapter in (*ADAPTERS, *SELF_ADAPTERS)}
    if name not in known:
        raise ValueError(f"contestant must be one of {', '.join(map(repr, known))}, got {name!r}")
    return known[name]


def present(operation: str, adapters: tuple[Adapter, ...], pairs: int) -> list[Adapter]:
    """Those that have the operation; ours on a GPU only where there is one.

    Args:
        operation: "forward", "backward" or "hvp".
        adapters: to choose from.
        pairs: n m.
    """
    return [
        adapter
        for adapter in adapters
        if operation in adapter.operations
        and (adapter.streams or pairs <= adapter.most)
        and (adapter.kind != "triton" or torch.cuda.is_available())
    ]
