"""What a run needs to go on as if it had never stopped."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

__all__ = ["NewtonState"]

FORMAT = 3
HEAVY = ("x", "history", "warm", "settled", "monitor", "estimate", "escape")


@dataclass(frozen=True, eq=False)
class NewtonState:
    """State of a `NewtonCG` or `SaddleEscape` run between two steps.

    A run resumed from it repeats, bitwise on a CPU, what the uninterrupted run would have done; its
    counters go on. The evaluation that rebuilds the graph at ``x`` is not counted again.

    Attributes:
        x: the point, in the caller's shape.
        radius: trust-region radius or step length; None before the first step.
        grad_max: largest gradient norm so far.
        fun_start: first value of the loss.
        x_scale: largest |x| so far.
        norm: estimate of |H| so far.
        n_iter: outer steps.
        n_escapes: escapes spent.
        n_certificates: certificates and probes: each has a fresh seed.
        seed: seed of all of them.
        counters: n_fun, n_grad, n_hvp.
        plan_passes: plan passes counted by the run.
        seconds: time spent.
        linear: every product so far was zero.
        history: rows, as plain dictionaries.
        warm: the loss's warm-start state before its evaluation at ``x``.
        settled: that state now, with what products at ``x`` have added to it.
        monitor: state of the monitor.
        estimate: the last `EigenEstimate` as a dictionary, None before the first.
        escape: phase, switches and optimizer of a `SaddleEscape` run; None for `NewtonCG`.

    Example:
        >>> import os, tempfile, torch
        >>> from ot_newton.solvers.newton import NewtonCG
        >>> stop = lambda info: info.step == 2
        >>> part = NewtonCG(lambda x: (x**4 + x**2).sum()).minimize(torch.ones(3), callback=stop)
        >>> path = os.path.join(tempfile.mkdtemp(), "state.pt")
        >>> part.state.save(path)
        >>> rest = NewtonCG(lambda x: (x**4 + x**2).sum()).minimize(resume=NewtonState.load(path))
        >>> rest.success, rest.n_iter > part.n_iter
        (True, True)
    """

    x: Tensor = field(repr=False)
    radius: float | None
    grad_max: float
    fun_start: float
    x_scale: float
    norm: float
    n_iter: int
    n_escapes: int
    n_certificates: int
    seed: int
    counters: dict[str, int]
    plan_passes: int
    seconds: float
    linear: bool
    history: list[dict[str, Any]] = field(repr=False)
    warm: Any = field(default=None, repr=False)
    settled: Any = field(default=None, repr=False)
    monitor: dict[str, Any] | None = field(default=None, repr=False)
    estimate: dict[str, Any] | None = field(default=None, repr=False)
    escape: dict[str, Any] | None = field(default=None, repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to ``path``, through a temporary file so that a crash leaves the old one."""
        temporary = f"{os.fspath(path)}.tmp"
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        torch.save({"format": FORMAT, **values}, temporary)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NewtonState:
        """Read a state that `save` wrote; nothing in the file is executed.

        Raises:
            ValueError: not such a file, or of another format.
        """
        values = torch.load(path, weights_only=True)
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ValueError(f"path must be a state saved by NewtonState.save, got {os.fspath(path)}")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Numbers only, for logs."""
        kept = [f.name for f in fields(self) if f.name not in HEAVY]
        return {name: getattr(self, name) for name in kept}
