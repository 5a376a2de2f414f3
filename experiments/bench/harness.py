"""Timing of contestants that solve the same task: answers checked first, turns interleaved.

Each contestant is prepared and run once (compilation and first-touch costs fall here and are reported
apart), its answer is checked against a reference that shares no code with it, and only those that pass
are timed. They take turns, A B C A B C ..., so that a busy machine slows all of them; before each turn the
clock stands still long enough for the worker threads of the one before to go to sleep. A contestant that
cannot be imported, raises or answers wrongly is an entry with its reason, and no ratio is made of it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Contestant", "Entry", "Job", "Pace", "Verdict", "best_of", "claim", "race", "reason_of"]

Row = dict[str, Any]


def reason_of(error: Exception) -> str:
    """An exception as the message of a row: its type and first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _same(output: Any) -> Any:
    return output


@dataclass(frozen=True)
class Job:
    """A prepared task.

    Attributes:
        run: the timed call; it returns only once the result is there.
        answer: turns its output into what the check takes; not timed.
    """

    run: Callable[[], Any]
    answer: Callable[[Any], Any] = _same


@dataclass(frozen=True)
class Contestant:
    """A way of doing the task.

    Attributes:
        name: as it appears in the rows.
        prepare: imports what is needed and returns the job; not timed.
        scale: factor on its times, for a piece that stands for a larger job.
        precision: of its arithmetic.
        stopping: its stopping rule.
    """

    name: str
    prepare: Callable[[], Job]
    scale: float = 1.0
    precision: str = "float32"
    stopping: str = "one call"


@dataclass(frozen=True)
class Verdict:
    """Outcome of a check.

    Attributes:
        error: of the answer, in the units of the tolerance; nan counts as wrong.
        tolerance: largest error accepted.
        facts: further figures for the row.
        reason: why the error is what it is, where the figure alone would not tell.
    """

    error: float
    tolerance: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the answer may be timed."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Pace:
    """How long a race lasts.

    Attributes:
        rounds: most turns of a contestant.
        least: turns everybody gets, however slow.
        seconds: time for the whole race; a contestant stops taking turns when its share is used up.
        pause: seconds of quiet before each turn.
        turn: seconds a turn lasts at least, by repeating the call.
    """

    rounds: int = 15
    least: int = 3
    seconds: float = 20.0
    pause: float = 0.03
    turn: float = 0.01


@dataclass
class Entry:
    """What became of a contestant.

    Attributes:
        contestant: who.
        status: "OK", "WRONG" (check not passed, hence not timed) or "ERROR".
        message: the reason of a failure.
        verdict: of the check.
        first: seconds of the first call, compilation included.
        times: seconds per call, one per turn, scaled.
    """

    contestant: Contestant
    status: str = "OK"
    message: str = ""
    verdict: Verdict | None = None
    first: float = math.nan
    times: list[float] = field(default_factory=list)

    @property
    def minimum(self) -> float:
        """Fastest turn."""
        return min(self.times)

    @property
    def median(self) -> float:
        """Median turn."""
        return statistics.median(self.times)

    def row(self) -> Row:
        """As JSON values."""
        out: Row = {
            "kind": "time",
            "contestant": self.contestant.name,
            "status": self.status,
            "precision": self.contestant.precision,
            "stopping": self.contestant.stopping,
        }
        if self.message:
            out["message"] = self.message
        if self.verdict is not None:
            error = self.verdict.error
            out |= {"error": error if math.isfinite(error) else None, "tolerance": self.verdict.tolerance}
            out |= self.verdict.facts
        if self.times:
            out |= {
                "seconds_min": self.minimum,
                "seconds_median": self.median,
                "turns": len(self.times),
                "first_call": self.first,
            }
        return out


class _Runner:
    """A contestant under way."""

    def __init__(self, contestant: Contestant, clock: Callable[[], float]) -> None:
        self.entry, self.clock = Entry(contestant), clock
        self.job: Job | None = None
        self.inner, self.spent = 1, 0.0

    @property
    def alive(self) -> bool:
        return self.entry.status == "OK"

    def _fail(self, status: str, message: str) -> None:
        self.entry.status, self.entry.message, self.job = status, message, None

    def guarded(self, step: Callable[[], None]) -> None:
        """An exception is an outcome."""
        try:
            step()
        except Exception as error:  # noqa: BLE001  a broken peer is a row, not the end of the bench
            self._fail("ERROR", reason_of(error))

    def start(self, check: Callable[[Any], Verdict]) -> None:
        """Prepare, call once, check the answer."""
        self.job = self.entry.contestant.prepare()
        begin = self.clock()
        output = self.job.run()
        self.entry.first = self.clock() - begin
        verdict = check(self.job.answer(output))
        self.entry.verdict = verdict
        if not verdict.passed:
            figures = f"error {verdict.error:.1e} above the tolerance {verdict.tolerance:.1e}"
            self._fail("WRONG", verdict.reason or figures)

    def calibrate(self, turn: float, *, keep: bool) -> None:
        """How many calls make a turn; a call that makes one is the first if one is enough."""
        assert self.job is not None
        begin = self.clock()
        self.job.run()
        once = self.clock() - begin
        self.inner = max(1, math.ceil(turn / once)) if once > 0 else 1
        if keep and self.inner == 1:
            self._record(once)

    def turn(self) -> None:
        """One timed turn."""
        assert self.job is not None
        begin = self.clock()
        for _ in range(self.inner):
            self.job.run()
        self._record(self.clock() - begin)

    def _record(self, spent: float) -> None:
        self.spent += spent
        self.entry.times.append(self.entry.contestant.scale * spent / self.inner)


def race(
    contestants: Sequence[Contestant],
    check: Callable[[Any], Verdict],
    pace: Pace | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Entry]:
    """Check everybody, then let those who passed take turns.

    Args:
        contestants: in the order of their turns.
        check: judges an answer.
        pace: how long.
        clock: seconds; replaced in tests.
        sleep: waits; replaced in tests.

    Returns:
        An entry for every contestant, failed ones included.
    """
    pace = pace or Pace()
    runners = [_Runner(contestant, clock) for contestant in contestants]
    for runner in runners:
        runner.guarded(lambda r=runner: r.start(check))  # type: ignore[misc]
    ready = [runner for runner in runners if runner.alive]
    for runner in ready:
        runner.guarded(lambda r=runner: r.calibrate(pace.turn, keep=pace.least == 1))  # type: ignore[misc]
    share = pace.seconds / max(1, len(ready))
    for _ in range(pace.rounds):
        for runner in ready:
            turns = len(runner.entry.times)
            if runner.alive and turns < pace.rounds and (turns < pace.least or runner.spent < share):
                sleep(pace.pause)
                runner.guarded(runner.turn)
    return [runner.entry for runner in runners]


def best_of(entries: Sequence[Entry], names: Sequence[str]) -> Entry:
    """The fastest of some contestants that were timed; the first of them if none was.

    Raises:
        ValueError: a name that did not take part.
    """
    chosen = [entry for name in names for entry in entries if entry.contestant.name == name]
    if len(chosen) != len(names):
        raise ValueError(f"names must be contestants, got {names!r}")
    timed = [entry for entry in chosen if entry.status == "OK" and entry.times]
    return min(timed, key=lambda entry: entry.median) if timed else chosen[0]


def claim(
    entry: Entry, other: Entry, *, target: float, at_least: bool = True, what: str = "faster than"
) -> Row:
    """The ratio of two entries beside its target; no ratio where one of them failed.

    Args:
        entry: ours.
        other: whom we compare with.
        target: for the ratio of times, theirs over ours if ``at_least``, else ours over theirs.
        at_least: the target is a lower bound.
        what: for the text.

    Returns:
        A row with the ratio of the medians, that of the minima, and whether the medians meet the target.
    """
    row: Row = {
        "kind": "claim",
        "claim": f"{entry.contestant.name} {what} {other.contestant.name}",
        "target": f"{'>=' if at_least else '<='} {target:g}x",
    }
    for side in (entry, other):
        if side.status != "OK" or not side.times:
            reason = f"{side.contestant.name}: {side.message or 'not timed'}"
            return row | {"status": "NO CLAIM", "message": reason}
    top, bottom = (other, entry) if at_least else (entry, other)
    medians, minima = top.median / bottom.median, top.minimum / bottom.minimum

    def met(ratio: float) -> bool:
        return ratio >= target if at_least else ratio <= target

    return row | {
        "status": "MET" if met(medians) else "MISSED",
        "ratio_median": medians,
        "ratio_min": minima,
        "met_by_minima": met(minima),
    }
