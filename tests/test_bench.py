"""The bench: turns are interleaved, a wrong answer gets no time and no ratio, a missing peer is a row."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ot_newton.experiments.bench import block_hvp, half_case, pitchfork, roofline, solve_hvp
from ot_newton.experiments.bench.__main__ import TABLES, main
from ot_newton.experiments.bench.adapters import find
from ot_newton.experiments.bench.cases import Judge
from ot_newton.experiments.bench.harness import (
    Contestant,
    Entry,
    Job,
    Pace,
    Verdict,
    best_of,
    claim,
    race,
)
from ot_newton.experiments.bench.report import show
from ot_newton.experiments.bench.session import run_tables
from ot_newton.experiments.bench.settings import Settings

ROOT = Path(__file__).parents[1]
PACE = Pace(rounds=5, least=2, seconds=1e9, pause=0.5, turn=0.0)


class Machine:
    """A clock that only work and sleep move, and a log of who worked."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.log.append("pause")
        self.now += seconds

    def contestant(self, name: str, cost: float, answer: float = 1.0, **more: object) -> Contestant:
        def run() -> float:
            self.log.append(name)
            self.now += cost
            return answer

        return Contestant(name, lambda: Job(run), **more)

    def race(self, *contestants: Contestant, pace: Pace = PACE) -> list[Entry]:
        return race(contestants, check, pace, clock=self.clock, sleep=self.sleep)


def check(answer: float) -> Verdict:
    return Verdict(abs(answer - 1.0), 0.1)


def missing() -> Job:
    import a_package_that_does_not_exist  # noqa: F401

    raise AssertionError


def test_turns_are_interleaved_after_the_checks() -> None:
    machine = Machine()
    machine.race(machine.contestant("A", 1.0), machine.contestant("B", 2.0))
    assert machine.log == ["A", "B", "A", "B"] + ["pause", "A", "pause", "B"] * PACE.rounds


def test_times_are_per_call_scaled_and_without_the_pause() -> None:
    machine = Machine()
    pace = replace(PACE, turn=10.0)
    (entry,) = machine.race(machine.contestant("A", 3.0, scale=0.5), pace=pace)
    assert machine.log.count("A") == 2 + 4 * PACE.rounds
    assert entry.minimum == entry.median == pytest.approx(1.5)
    assert entry.first == 3.0


def test_a_slow_contestant_stops_at_its_share_but_not_before_the_least() -> None:
    machine = Machine()
    fast, slow = machine.race(
        machine.contestant("fast", 0.001), machine.contestant("slow", 100.0), pace=replace(PACE, seconds=20.0)
    )
    assert (len(fast.times), len(slow.times)) == (PACE.rounds, PACE.least)


def test_one_turn_is_enough_where_the_pace_says_so() -> None:
    machine = Machine()
    pace = replace(PACE, least=1, seconds=10.0)
    fast, slow = machine.race(machine.contestant("fast", 0.5), machine.contestant("slow", 100.0), pace=pace)
    assert machine.log.count("slow") == 2  # the checked call and the turn
    assert slow.times == [100.0]
    assert len(fast.times) == PACE.rounds


@pytest.mark.parametrize("answer", [1.2, float("nan")])
def test_a_wrong_answer_is_not_timed_and_no_ratio_is_made(answer: float) -> None:
    machine = Machine()
    right, wrong = machine.race(machine.contestant("right", 2.0), machine.contestant("wrong", 1.0, answer))
    assert (right.status, wrong.status, wrong.times) == ("OK", "WRONG", [])
    assert machine.log.count("wrong") == 1
    assert "tolerance" in wrong.message
    assert "seconds_median" not in wrong.row()
    json.dumps(wrong.row(), allow_nan=False)
    for pair in ((right, wrong), (wrong, right)):
        row = claim(*pair, target=1.0)
        assert row["status"] == "NO CLAIM"
        assert "wrong" in row["message"]
        assert "ratio_median" not in row


def test_missing_and_broken_peers_are_rows() -> None:
    machine = Machine()

    def broken() -> float:
        raise RuntimeError("broken\nsecond line")

    absent, failing, fine = machine.race(
        Contestant("absent", missing),
        Contestant("failing", lambda: Job(broken)),
        machine.contestant("fine", 1.0),
    )
    assert [e.status for e in (absent, failing, fine)] == ["ERROR", "ERROR", "OK"]
    assert absent.message.startswith("ModuleNotFoundError: ")
    assert "a_package_that_does_not_exist" in absent.message
    assert failing.message == "RuntimeError: broken"
    assert len(fine.times) == PACE.rounds
    assert json.loads(json.dumps(absent.row()))["status"] == "ERROR"


def test_a_peer_that_breaks_on_the_way_is_no_claim() -> None:
    machine, calls = Machine(), []

    def run() -> float:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("no more")
        return 1.0

    entry, fine = machine.race(Contestant("late", lambda: Job(run)), machine.contestant("fine", 1.0))
    assert (entry.status, entry.message) == ("ERROR", "MemoryError: no more")
    assert claim(fine, entry, target=1.0)["status"] == "NO CLAIM"


@pytest.mark.parametrize(
    ("ours", "theirs", "target", "at_least", "status", "ratio"),
    [
        (1.0, 5.0, 4.0, True, "MET", 5.0),
        (1.0, 3.0, 4.0, True, "MISSED", 3.0),
        (3.0, 2.0, 1.5, False, "MET", 1.5),
        (4.0, 2.0, 1.5, False, "MISSED", 2.0),
    ],
)
def test_claims(ours: float, theirs: float, target: float, at_least: bool, status: str, ratio: float) -> None:
    machine = Machine()
    pair = machine.race(machine.contestant("ours", ours), machine.contestant("theirs", theirs))
    row = claim(*pair, target=target, at_least=at_least)
    assert (row["status"], row["ratio_median"], row["ratio_min"]) == (status, ratio, ratio)
    assert row["met_by_minima"] is (status == "MET")


def test_best_of_skips_those_without_a_time() -> None:
    machine = Machine()
    entries = machine.race(
        machine.contestant("slow", 3.0),
        machine.contestant("fast", 1.0),
        machine.contestant("wrong", 0.1, 9.0),
    )
    assert best_of(entries, ["slow", "fast", "wrong"]).contestant.name == "fast"
    assert best_of(entries, ["wrong"]).status == "WRONG"
    with pytest.raises(ValueError, match="nobody"):
        best_of(entries, ["nobody"])


def test_roofline_adds_the_product_and_the_fastest_exponential() -> None:
    machine = Machine()
    parts = machine.race(
        *(machine.contestant(n, c) for n, c in zip(roofline.PIECES, (5.0, 3.0, 2.0), strict=True))
    )
    assert roofline.combine(parts).median == 7.0
    parts[0].times.clear()
    assert roofline.combine(parts).status == "ERROR"


@pytest.mark.parametrize("backend", ["cpu", "torch_tiles", "dense"])
@pytest.mark.parametrize("d", [2, 64])
def test_half_iteration_of_ours_passes_its_check(backend: str, d: int) -> None:
    case = half_case.make_case(90, d)
    job = half_case.backend_job(case, backend)
    answer = job.answer(job.run())
    assert case.check(answer).passed
    assert not case.check(answer + 1e-2).passed


def test_solve_hvp_of_ours_passes_its_check_by_every_route() -> None:
    task = solve_hvp.uniform_task(60)
    check = Judge(task).check("hvp")
    keops = find("KeOps, our formulas")
    for adapter in (find("cpu"), find("torch_tiles"), replace(keops, kind="torch_tiles")):
        job = adapter.prepare("hvp", task)
        answer = job.answer(job.run())
        verdict = check(answer)
        assert verdict.passed
        assert verdict.facts["translation_error"] < 1e-5
        assert not check(answer | {"products": 1.1 * answer["products"]}).passed
        shifted = check(answer | {"f": answer["f"] + 0.01})
        assert not shifted.passed
        assert "marginal error" in shifted.reason


def test_block_table_counts_passes() -> None:
    settings = replace(Settings.smoke(), hvp_size=40, block=3, rounds=1, race_seconds=0.1)
    rows = list(block_hvp.rows(settings))
    assert [row["kind"] for row in rows] == ["time", "time", "claim", "claim"]
    assert all(row["status"] == "OK" and row["plan_passes"] > 0 for row in rows[:2])
    assert rows[3]["ratio_median"] == rows[1]["plan_passes"] / rows[0]["plan_passes"]


def test_pitchfork_rows_tell_right_from_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = pitchfork.exact_hessian(0.5, 1.0, 1.0)
    assert np.linalg.eigvalsh(exact) == pytest.approx([0.1600513168, 1.0], abs=1e-10)
    fakes = (
        pitchfork.CONTESTANTS[0],
        ("wrong", "float64", 1.0, lambda u: np.eye(2)),
        ("absent", "float64", 1.0, lambda u: missing()),
    )
    monkeypatch.setattr(pitchfork, "CONTESTANTS", fakes)
    ours, wrong, absent, saddle, *_ = pitchfork.rows(Settings())
    assert ours["status"] == "OK"
    assert ours["error"] < 1e-12
    assert wrong["error"] > 0.1
    assert absent["status"] == "ERROR"
    assert (saddle["u"], saddle["lambda_min"], saddle["sign_right"]) == (0.0, pytest.approx(-1.0), True)


def fake_table(name: str, monkeypatch: pytest.MonkeyPatch, rows: object) -> dict[str, str]:
    module = types.ModuleType(f"ot_newton.experiments.bench.{name}")
    module.rows = rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return {name: name}


def test_rows_reach_the_file_as_they_come_and_a_failed_table_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(settings: Settings) -> object:
        yield {
            "kind": "time",
            "contestant": "A",
            "status": "OK",
            "precision": "float32",
            "stopping": "one call",
        }
        assert len((tmp_path / "bench.jsonl").read_text().splitlines()) == 1
        raise OSError("no space left")

    def fine(settings: Settings) -> object:
        yield {"kind": "claim", "claim": "A faster than B", "target": ">= 2x", "status": "MET"}

    tables = fake_table("broken_table", monkeypatch, broken) | fake_table("fine_table", monkeypatch, fine)
    threads = torch.get_num_threads()
    assert run_tables(tables, threads=threads, preset="smoke", out=tmp_path) == 1
    lines = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert [(row["table"], row["kind"]) for row in lines] == [
        ("broken_table", "time"),
        ("broken_table", "failure"),
        ("fine_table", "claim"),
    ]
    assert all(row["versions"]["torch"] == torch.__version__ for row in lines)
    printed = capsys.readouterr().out
    assert "OSError: no space left" in printed
    assert "1 of 1 targets met" in printed
    assert torch.__version__ in printed


def test_a_failure_message_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    row = {
        "kind": "time",
        "contestant": "A",
        "status": "ERROR",
        "message": "ImportError: gone",
        "stopping": "rule",
    }
    show(Console(width=120), "table", [row | {"precision": "float32"}])
    printed = capsys.readouterr().out
    assert "ImportError: gone" in printed
    assert "rule: A" in printed


def test_every_table_has_rows_and_needs_no_peer_to_be_imported() -> None:
    script = """
import os, sys
from ot_newton.experiments.bench.__main__ import TABLES, limit
from ot_newton.experiments.bench.session import rows_of
assert limit(1) == 1 and os.environ["OMP_NUM_THREADS"] == "1"
assert all(callable(rows_of(maker)) for maker in TABLES.values())
assert not {"jax", "ott", "ot", "pykeops", "geomloss", "numba"} & set(sys.modules)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr


def test_an_unknown_table_lists_the_known_ones() -> None:
    result = CliRunner().invoke(main, ["nonsense"])
    assert result.exit_code == 2
    assert all(name in result.output for name in TABLES)


def test_a_file_in_place_of_the_folder_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="out must be a folder"):
        run_tables({}, threads=1, preset="smoke", out=tmp_path / "file")
