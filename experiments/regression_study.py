"""Shuffled regression on many seeds by three strategies to one tolerance: SaddleEscape, Newton-CG, Adam.

    escape       Adam (all seeds as one batch) until lambda_min > threshold lambda_max, then SaddleEscape
                 per seed from there: Newton-CG, back to Adam where CG meets negative curvature
    newton       Newton-CG from the start
    adam         Adam alone, cosine decay, each step size of ``adam_lrs``
    sensitivity  escape again at other levels of the switch
    packing      lane-iterations of one batch of plans, packed against fixed
    trajectory   Newton-CG from W = 0 of mirrored clouds past several saddles, lambda_min at every step

All share the inner tolerance of `RegressionLoss` (gradient error at most 1% of the gradient) and the outer
one, `|g_k| <= gtol max_{j<=k} |g_j|` with a smallest curvature certified positive.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ot_newton.errors import check_choice, check_integer, check_number
from ot_newton.experiments.data import RegressionData, mixture
from ot_newton.experiments.regression_phases import adam_rows, first_order_rows
from ot_newton.experiments.regression_report import describe, plot, tables
from ot_newton.experiments.regression_strategies import STRATEGIES, run_one
from ot_newton.experiments.runs import Row, RowFile, Task, check_folder, run_tasks

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Config", "Levels", "plot", "problems", "run", "tables"]

NAME = "shuffled-regression"
ROWS = "strategies"
PHASE = "first-order"
PRESETS: dict[str, dict[str, Any]] = {
    "default": {"seeds": 72, "n": 500, "spread": 1.0, "eps": 0.1, "lr": 0.1, "strategies": STRATEGIES},
    # A step moves the points by lr times the spread: each plan would be far from the last one.
    "wide": {"seeds": 72, "n": 500, "spread": 10.0, "eps": 0.05, "lr": 0.01, "strategies": STRATEGIES},
    # Adam alone and cold batches of plans would take days at this size.
    "large": {
        "seeds": 4,
        "n": 20_000,
        "spread": 1.0,
        "eps": 0.1,
        "lr": 0.1,
        "strategies": ("escape", "newton"),
    },
}
SMOKE = {
    "seeds": 2, "n": 40, "eps": 0.3, "adam_steps": 12, "adam_lrs": (0.03, 0.1), "sensitivity_seeds": 1,
    "thresholds": (0.0,), "max_first_order": 30,
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """What to run; None takes the preset's value.

    Attributes:
        preset: "default" (the main job's mixture), "wide" (centres in [-10,10], low eps), "large".
        strategies: which of the strategies of this module.
        seeds: problems, seeds 0 to seeds - 1.
        n: rows of a problem.
        spread: factor on the centres of the mixture.
        eps: entropic regularization.
        lr: step size of Adam before the switch.
        probe_every: its steps between two probes.
        threshold: the switch, relative to lambda_max.
        gtol: gradient test relative to the largest gradient seen.
        max_steps: cap on the steps of SaddleEscape and Newton-CG.
        max_first_order: steps of an Adam phase after which Newton takes over anyway.
        adam_steps: of Adam alone.
        adam_lrs: its step sizes; the table takes each seed's best.
        sensitivity_seeds: seeds of "sensitivity".
        thresholds: its relative levels.
        absolute_threshold: its absolute level.
        packing_tol: marginal error asked for in "packing".
    """

    preset: str = "default"
    strategies: tuple[str, ...] | None = None
    seeds: int | None = None
    n: int | None = None
    spread: float | None = None
    eps: float | None = None
    lr: float | None = None
    probe_every: int = 10
    threshold: float = 1e-3
    gtol: float = 1e-8
    max_steps: int = 2000
    max_first_order: int = 10
    adam_steps: int = 2000
    adam_lrs: tuple[float, ...] = (0.01, 0.03, 0.1)
    sensitivity_seeds: int = 24
    thresholds: tuple[float, ...] = (0.0, 1e-4, 1e-2)
    absolute_threshold: float = 1e-3
    packing_tol: float = 1e-3

    def __post_init__(self) -> None:
        """Fill in the preset and validate before any work.

        Raises:
            ValueError: a value out of range, naming it; TypeError: of the wrong kind.
        """
        for name, value in PRESETS[check_choice("preset", self.preset, tuple(PRESETS))].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for strategy in self.chosen:
            check_choice("strategies", strategy, STRATEGIES)
        names = ("seeds", "probe_every", "max_steps", "max_first_order", "adam_steps", "sensitivity_seeds")
        for name in names:
            check_integer(name, getattr(self, name), low=1)
        check_integer("n", self.n, low=3)
        for name in ("spread", "eps", "lr", "gtol", "absolute_threshold", "packing_tol"):
            check_number(name, getattr(self, name))
        for name in ("threshold", "thresholds", "adam_lrs"):
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                check_number(name, one, strict=name == "adam_lrs")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The strategies, the preset's if none were given."""
        assert self.strategies is not None
        return self.strategies

    @property
    def levels(self) -> list[Levels]:
        """Levels of the switch that the first-order phase looks for, the main one first."""
        found = [Levels("escape", self.threshold, False)]
        if "sensitivity" in self.chosen:
            found += [
                Levels(f"escape at {value:g} lambda_max", value, False)
                for value in self.thresholds
                if value != self.threshold
            ]
            found.append(
                Levels(f"escape at {self.absolute_threshold:g}, absolute", self.absolute_threshold, True)
            )
        return found


@dataclass(frozen=True)
class Levels:
    """A level of the switch: lambda_min above ``value`` (absolute) or ``value * lambda_max``."""

    name: str
    value: float
    absolute: bool


def problems(config: Config) -> list[RegressionData]:
    """The seeds' problems."""
    assert config.seeds is not None and config.n is not None and config.spread is not None
    return [mixture(seed, config.n, spread=config.spread) for seed in range(config.seeds)]


def _shared(config: Config, data: RegressionData, names: Sequence[str]) -> Row:
    """Settings of a run: what decides its outcome and nothing else, so that resuming finds it."""
    known = {field.name for field in fields(config)}
    assert set(names) <= known
    return {
        "experiment": NAME,
        "preset": config.preset,
        "data": data.name,
        "digest": data.digest,
        "n": config.n,
        "eps": config.eps,
        **{name: getattr(config, name) for name in names},
    }


def _phase_tasks(config: Config, data: Sequence[RegressionData]) -> list[Task]:
    """The first-order phase, one task per seed (run as one batch)."""
    names = ("lr", "probe_every", "gtol", "max_first_order")
    tasks = []
    for k, problem in enumerate(data):
        levels = config.levels if k < config.sensitivity_seeds else config.levels[:1]
        settings = _shared(config, problem, names) | {
            "strategy": PHASE,
            "levels": [[level.name, level.value, level.absolute] for level in levels],
        }
        tasks.append(Task(problem.name, settings, problem))
    return tasks


def _seed_tasks(config: Config, data: Sequence[RegressionData], phase: Sequence[Row]) -> list[Task]:
    """Everything that runs one seed at a time: Newton-CG, SaddleEscape from each release, the rest."""
    tasks = []
    for k, problem in enumerate(data):
        newton = _shared(config, problem, ("gtol", "max_steps"))
        if "newton" in config.chosen:
            tasks.append(Task(f"{problem.name}, newton", newton | {"strategy": "newton"}, problem))
        if phase and "releases" in phase[k]:
            names = ("lr", "probe_every", "gtol", "max_steps", "max_first_order")
            for name, release in phase[k]["releases"].items():
                if name == "escape" and "escape" not in config.chosen:
                    continue
                settings = _shared(config, problem, names) | {
                    "strategy": "escape" if name == "escape" else "sensitivity",
                    "level": name,
                    "threshold": release["threshold"],
                    "phase": phase[k]["key"],
                }
                tasks.append(Task(f"{problem.name}, {name}", settings, (problem, phase[k], name)))
    if "trajectory" in config.chosen:
        settings = _shared(config, data[0], ("gtol", "max_steps"))
        settings |= {"strategy": "trajectory", "clouds": "mirrored"}
        tasks.append(Task(f"{data[0].name} mirrored, trajectory", settings, data[0]))
    if "packing" in config.chosen:
        settings = _shared(config, data[0], ("packing_tol",)) | {"strategy": "packing", "seeds": len(data)}
        tasks.append(Task("packing", settings, list(data)))
    return sorted(tasks, key=lambda task: task.settings["strategy"] == "sensitivity")


def _adam_tasks(config: Config, data: Sequence[RegressionData], lr: float) -> list[Task]:
    names = ("gtol", "adam_steps")
    return [
        Task(
            f"{problem.name}, adam {lr:g}",
            _shared(config, problem, names) | {"strategy": "adam", "lr": lr},
            problem,
        )
        for problem in data
    ]


def run(
    config: Config,
    out: str | Path = "results",
    *,
    jobs: int | str | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Run what is missing in ``out``; returns the rows of this configuration.

    The batched phases run in this process and write a row per lane (Adam alone also a checkpoint every few
    steps); the rest runs one seed a task.

    Args:
        config: what to run.
        out: folder of ``strategies.jsonl`` and ``first-order.jsonl``.
        jobs: see `run_tasks`.
        console: for the progress bar.

    Raises:
        ValueError: bad settings, folder or file of rows, before any run.
    """
    folder = check_folder("out", out)
    file, phase_file = RowFile(folder / f"{ROWS}.jsonl"), RowFile(folder / f"{PHASE}.jsonl")
    data = problems(config)
    phase: list[Row] = []
    if {"escape", "sensitivity"} & set(config.chosen):
        phase = _batched(_phase_tasks(config, data), phase_file, first_order_rows, console)
    tasks = _seed_tasks(config, data, phase)
    rows = run_tasks(tasks, run_one, file, jobs=jobs, console=console, describe=describe)
    for lr in config.adam_lrs if "adam" in config.chosen else ():
        everything = _adam_tasks(config, data, lr)
        worker = functools.partial(
            adam_rows, everything=everything, checkpoint=folder / f"adam-{lr:g}.checkpoint"
        )
        rows += _batched(everything, file, worker, console)
    return rows


def _batched(
    tasks: list[Task], file: RowFile, worker: Callable[[list[Task]], Iterable[Row]], console: Console | None
) -> list[Row]:
    """Rows of tasks that run as one batch in this process; only those missing run."""
    known = {row.get("key"): row for row in file.read() if row.get("status") != "ERROR"}
    missing = [task for task in tasks if task.key not in known]
    began = time.perf_counter()
    for row in worker(missing) if missing else ():
        file.append(row)
        known[row["key"]] = row
        if console is not None:
            console.print(
                f"{row['label']}: {row['status']} after {time.perf_counter() - began:.0f} s of the batch",
                highlight=False,
            )
    return [known[task.key] for task in tasks]
