"""Training runs of `pfam-attention`: Adam with a cosine schedule, measured, checkpointed, resumable.

A batch is a function of the seed and the step, so that a run that goes on from a checkpoint sees what it
would have seen.
"""

from __future__ import annotations

import json
import math
import os
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ot_newton.experiments.pfam_model import Evaluation, evaluate, initial_parameters, loss
from ot_newton.experiments.pfam_pairs import (
    Family,
    Pairs,
    alignment_metrics,
    draw_pairs,
    held_out_pairs,
    mean_cross_entropy,
)

__all__ = ["Progress", "train"]

Settings = Mapping[str, Any]
TRAINING, HIDING, HELD_HIDING = range(3)
HIDDEN_SHARE = 0.15
DIGITS = 4
NUMBERS = ("step", "curves", "seconds", "cpu_seconds", "step_seconds", "timed_steps")


@dataclass
class Progress:
    """The state of a run: all that a checkpoint holds.

    Attributes:
        step: steps done.
        state: parameters and the optimizer's state.
        curves: lists by name: `step`, held-out measurements, and `train` (step and loss of every step).
        seconds: wall time of the whole run.
        cpu_seconds: its processor time.
        step_seconds: wall time of training steps, without compilation and measurements.
        timed_steps: steps that `step_seconds` covers.
    """

    step: int
    state: Any
    curves: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    step_seconds: float = 0.0
    timed_steps: int = 0

    def note(self, **values: float) -> None:
        """Append to the curves."""
        for name, value in values.items():
            self.curves.setdefault(name, []).append(float(value))

    def save(self, path: Path) -> None:
        """Write everything, replacing the file as a whole."""
        arrays: dict[str, Any] = {
            f"leaf_{k}": np.asarray(x) for k, x in enumerate(jax.tree.leaves(self.state))
        }
        arrays["progress"] = np.array(json.dumps({name: getattr(self, name) for name in NUMBERS}))
        part = path.with_name(path.name + ".part")
        with open(part, "wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Take up a checkpoint of the same settings.

        Raises:
            ValueError: the file is no checkpoint, or one of other shapes.
        """
        old, structure = jax.tree.flatten(self.state)
        try:
            with np.load(path) as held:
                leaves = [held[f"leaf_{k}"] for k in range(len(old))]
                numbers = json.loads(str(held["progress"]))
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: not a checkpoint of this run: {error}; delete it") from error
        if any(np.shape(one) != np.shape(other) for one, other in zip(leaves, old, strict=True)):
            raise ValueError(f"{path}: not a checkpoint of this run: other shapes; delete it")
        self.state = jax.tree.unflatten(structure, leaves)
        for name, value in numbers.items():
            setattr(self, name, value)


def _hidden(settings: Settings, kind: int, step: int, share: float, count: int) -> Any:
    rng = np.random.default_rng((settings["seed"], kind, step))
    return rng.random((count, settings["length"])) < share


class _Compiled(NamedTuple):
    """The functions of a run: the state of step 0, one training step, the measurement."""

    start: Any
    step: Any
    measure: Any


@lru_cache(maxsize=4)
def _compiled(settings: tuple[tuple[str, Any], ...]) -> _Compiled:
    """Runs of equal settings share compiled functions."""
    fixed = dict(settings)
    optimizer = optax.adam(optax.cosine_decay_schedule(fixed["lr"], fixed["steps"]))

    def start() -> Any:
        parameters = initial_parameters(fixed)
        return parameters, optimizer.init(parameters)

    def step(state: Any, pairs: Pairs, scored: Any, hide: Any) -> Any:
        parameters, moments = state
        value, slope = jax.value_and_grad(loss)(parameters, pairs, scored, hide, fixed)
        update, moments = optimizer.update(slope, moments, parameters)
        return (optax.apply_updates(parameters, update), moments), value

    def measure(parameters: Any, pairs: Pairs, hide: Any) -> Any:
        return evaluate(parameters, pairs, hide, fixed)

    return _Compiled(jax.jit(start), jax.jit(step), jax.jit(measure))


class _Run:
    """Compiled functions and data of one run."""

    def __init__(self, family: Family, settings: Settings) -> None:
        self.family, self.settings = family, dict(settings)
        self.compiled = _compiled(tuple(sorted(self.settings.items())))
        self.held_out = held_out_pairs(family, settings)
        self.hidden = _hidden(settings, HELD_HIDING, 0, HIDDEN_SHARE, settings["eval_pairs"])

    def advance(self, progress: Progress, *, timed: bool) -> float:
        """One training step; returns its loss."""
        s = self.settings
        pairs = draw_pairs(
            self.family,
            self.family.train,
            s["batch"],
            length=s["length"],
            bandwidth=s["bandwidth"],
            seed=(s["seed"], TRAINING, progress.step),
        )
        hide = _hidden(s, HIDING, progress.step, s["hidden"], s["batch"])
        began = time.perf_counter()
        progress.state, value = self.compiled.step(progress.state, pairs, pairs.scored, hide)
        found = float(value)
        if timed:
            progress.step_seconds += time.perf_counter() - began
            progress.timed_steps += 1
        progress.step += 1
        return found

    def measured(self, progress: Progress) -> Evaluation:
        """Predictions and couplings of the held-out pairs."""
        return Evaluation(
            *map(np.asarray, self.compiled.measure(progress.state[0], self.held_out, self.hidden))
        )

    def evaluate(self, progress: Progress) -> Evaluation:
        """Measure on the held-out pairs and append to the curves."""
        found = self.measured(progress)
        metrics = alignment_metrics(found.plan, self.held_out, self.settings["bandwidth"])
        scored = self.held_out.scored
        progress.note(
            step=progress.step,
            reconstruction=mean_cross_entropy(found.log_probability, self.held_out),
            hidden=mean_cross_entropy(found.hidden_log_probability, self.held_out, self.hidden),
            sparse=metrics.sparse,
            hit=metrics.hit,
            offset=metrics.offset,
            dustbin=float(found.dustbin[scored].mean()),
        )
        return found


def train(family: Family, settings: Settings, checkpoint: Path) -> dict[str, Any]:
    """Run to the last step, from the checkpoint if there is one; the finished state stays in it.

    Args:
        family: sequences, split.
        settings: see `pfam_model.loss`, and `steps`, `batch`, `lr`, `hidden` (share of A's residues hidden in
            training), `eval_pairs`, `eval_every`, `checkpoint_every`.
        checkpoint: file of the run's state.

    Returns:
        Curves, times and, of the first held-out pair, the coupling and the aligned positions. `finite` is
        False if a loss was not; the run then ended there.

    Raises:
        ValueError: a checkpoint that is none, or too few pairs that fit the band.
    """
    with jax.enable_x64(False):
        run = _Run(family, settings)
        progress = Progress(0, run.compiled.start())
        if checkpoint.exists():
            progress.load(checkpoint)
        resumed, finite, clock = progress.step, True, _Clock(progress)
        while finite and progress.step < settings["steps"]:
            if progress.step % settings["eval_every"] == 0:
                run.evaluate(progress)
            value = run.advance(progress, timed=progress.step > resumed)
            progress.note(train=value)
            finite = math.isfinite(value)
            clock.stop()
            if finite and progress.step % settings["checkpoint_every"] == 0:
                progress.save(checkpoint)
        measured = progress.curves.get("step", [-1])[-1] == progress.step
        last = run.measured(progress) if measured else run.evaluate(progress)
        clock.stop()
        if finite:
            progress.save(checkpoint)
        return _report(run, progress, last, finite, resumed)


class _Clock:
    """Adds the time since it was made to what a progress has."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.before = progress, (progress.seconds, progress.cpu_seconds)
        self.began = (time.perf_counter(), time.process_time())

    def stop(self) -> None:
        now = (time.perf_counter(), time.process_time())
        sums = (old + new - was for old, new, was in zip(self.before, now, self.began, strict=True))
        self.progress.seconds, self.progress.cpu_seconds = sums


def _report(run: _Run, progress: Progress, last: Evaluation, finite: bool, resumed: int) -> dict[str, Any]:
    pairs = run.held_out
    n, m = int(pairs.n[0]), int(pairs.m[0])
    rows = last.plan[0, :n, :m]
    rows = rows / rows.sum(axis=1, keepdims=True)
    names = run.family.alignment.names
    return {
        "finite": finite,
        "resumed_from": resumed,
        "curves": progress.curves,
        "seconds": progress.seconds,
        "cpu_seconds": progress.cpu_seconds,
        "step_seconds": progress.step_seconds,
        "timed_steps": progress.timed_steps,
        "pair": [names[k] for k in pairs.names[0]],
        "plan": np.round(rows.astype(float), DIGITS).tolist(),
        "partner": pairs.partner[0, :n].tolist(),
        "parameters": int(sum(np.size(leaf) for leaf in jax.tree.leaves(progress.state[0]))),
    }
