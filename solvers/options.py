"""Validated options of the Newton loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ot_newton.solvers.monitor import LanczosMonitor

__all__ = ["NewtonOptions"]


@dataclass(frozen=True)
class NewtonOptions:
    """Validated options; `NewtonCG` says what they mean."""

    gtol: float
    max_iter: int
    method: str
    preconditioner: Any
    nullspace: Tensor | None
    radius: float | None
    on_reject: str
    max_cg: int | None
    max_hvp: int | None
    max_passes: int | None
    max_escapes: int
    confidence: float
    certificate_steps: int | None
    monitor: LanczosMonitor | None
    seed: int
    verbose: bool
