"""One row per trial step: what a result, a callback, a table and a saved state see."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ot_newton.solvers.objective import Objective, Point
    from ot_newton.solvers.spectra import EigenEstimate

__all__ = ["Recorder", "StepRecord", "TablePrinter"]


@dataclass(frozen=True)
class StepRecord:
    """One trial step, probe or switch.

    Attributes:
        step: index of the outer iteration.
        kind: "start", "newton", "escape", "certificate", "first-order", "probe" or "switch".
        fun: loss after the step.
        grad_norm: gradient norm after the step (before it, if rejected).
        accepted: whether x moved.
        lambda_min: smallest curvature, where it was probed, else None.
        lambda_max: largest curvature, where probed.
        cg_iterations: CG steps of this iteration.
        cg_reason: why CG stopped (`CGReason` name), "" where none ran.
        curvature: Rayleigh quotient of a direction of nonpositive curvature CG met, else nan.
        step_norm: length of the step.
        radius: trust-region radius, or step length of a line search, after the step.
        ratio: actual over predicted decrease.
        n_fun: evaluations so far, cumulative, as the next two.
        n_grad: gradients so far.
        n_hvp: Hessian-vector products so far.
        hvps: Hessian-vector products of this row alone; they sum to ``n_hvp``.
        plan_passes: plan passes of the loss so far.
        seconds: time so far.
        reason: in words, for escapes, certificates and switches.
    """

    step: int
    kind: str
    fun: float
    grad_norm: float
    accepted: bool = True
    lambda_min: float | None = None
    lambda_max: float | None = None
    cg_iterations: int = 0
    cg_reason: str = ""
    curvature: float = math.nan
    step_norm: float = 0.0
    radius: float = math.nan
    ratio: float = math.nan
    n_fun: int = 0
    n_grad: int = 0
    n_hvp: int = 0
    hvps: int = 0
    plan_passes: int = 0
    seconds: float = 0.0
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> StepRecord:
        """Inverse of `as_dict`; unknown names are an error of the file."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(row) - known)
        if unknown:
            raise ValueError(f"history row has unknown fields {unknown}")
        return cls(**row)


class TablePrinter:
    """Prints a row per record through rich, imported when the first row is printed."""

    COLUMNS = (
        ("step", 5), ("kind", 11), ("f", 14), ("|g|", 9), ("lambda_min", 10), ("CG", 4),
        ("CG reason", 18), ("radius", 9), ("ratio", 7), ("HVPs", 6), ("passes", 7), ("s", 7),
    )  # fmt: skip

    def __init__(self, console: Any = None) -> None:
        self._console = console
        self._started = False

    def __call__(self, record: StepRecord) -> None:
        """Print one row."""
        if self._console is None:
            from rich.console import Console

            self._console = Console(highlight=False, soft_wrap=True)
        if not self._started:
            self._started = True
            self._console.print(" ".join(f"{name:>{width}}" for name, width in self.COLUMNS), markup=False)
        cells = (
            str(record.step),
            record.kind if record.accepted else f"({record.kind})",
            f"{record.fun:.7e}",
            f"{record.grad_norm:.2e}",
            "" if record.lambda_min is None else f"{record.lambda_min:.2e}",
            str(record.cg_iterations),
            record.cg_reason.lower(),
            f"{record.radius:.2e}",
            f"{record.ratio:.3f}",
            str(record.n_hvp),
            str(record.plan_passes),
            f"{record.seconds:.2f}",
        )
        line = " ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, self.COLUMNS, strict=True))
        self._console.print(f"{line} {record.reason}".rstrip(), markup=False)


class Recorder:
    """Rows of one run with its cumulative costs; goes on where a resumed run had stopped.

    Attributes:
        rows: the history so far.
    """

    def __init__(self, objective: Objective, *, verbose: bool) -> None:
        self.objective = objective
        self.rows: list[StepRecord] = []
        self._printer = TablePrinter() if verbose else None
        self._seen_hvp = objective.n_hvp
        self._seconds = 0.0
        self._passes_before = objective.plan_passes
        self._began = time.perf_counter()

    def restore(self, rows: list[dict[str, Any]], *, plan_passes: int, seconds: float) -> None:
        """Take over the rows and costs of the run that is resumed."""
        self.rows = [StepRecord.from_dict(row) for row in rows]
        self._passes_before = self.objective.plan_passes - plan_passes
        self._seconds, self._seen_hvp = seconds, self.objective.n_hvp
        self._began = time.perf_counter()

    @property
    def plan_passes(self) -> int:
        """Plan passes of this run."""
        return self.objective.plan_passes - self._passes_before

    @property
    def seconds(self) -> float:
        """Time of this run, resumed parts included."""
        return self._seconds + time.perf_counter() - self._began

    def add(
        self, step: int, kind: str, at: Point, *, estimate: EigenEstimate | None = None, **values: Any
    ) -> StepRecord:
        """One more row, printed if asked; products since the last row are its ``hvps``."""
        counters = self.objective.counters()
        record = StepRecord(
            step=step,
            kind=kind,
            fun=at.value,
            grad_norm=at.grad_norm,
            lambda_min=None if estimate is None else estimate.value,
            lambda_max=None if estimate is None else estimate.lambda_max,
            n_fun=counters["n_fun"],
            n_grad=counters["n_grad"],
            n_hvp=counters["n_hvp"],
            hvps=counters["n_hvp"] - self._seen_hvp,
            plan_passes=self.plan_passes,
            seconds=self.seconds,
            **values,
        )
        self._seen_hvp = counters["n_hvp"]
        self.rows.append(record)
        if self._printer is not None:
            self._printer(record)
        return record
