"""The command line: bad input is one error that names it, runs resume, an interrupt keeps what is done."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from ot_newton.cli import main
from ot_newton.experiments import shuffled_regression as experiment

SMALL = ("--seeds", "2", "--n", "30", "--eps", "0.3", "--jobs", "1")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["shuffled-regression", *map(str, arguments)])


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "shuffled-regression.jsonl").read_text().splitlines()]


def test_version_and_help():
    assert "0.1.0" in CliRunner().invoke(main, ["--version"]).output
    assert "shuffled-regression" in CliRunner().invoke(main, ["--help"]).output
    assert "--starts" in call("--help").output


BAD = [
    (("--eps", "-1"), "eps must be a finite number in (0, inf), got -1.0"),
    (("--eps", "abc"), "'abc' is not a valid float"),
    (("--eps", "nan"), "eps must be a finite number"),
    (("--seeds", "0"), "seeds must be at least 1, got 0"),
    (("--starts", "-2"), "starts must be at least 1, got -2"),
    (("--jobs", "0"), "jobs must be at least 1, got 0"),
    (("--n", "2"), "n must be at least 3, got 2"),
    (("--data", "cars"), "data must be one of 'synthetic', 'diabetes', 'csv', got 'cars'"),
    (("--data", "csv"), "CSV files are given by --x and --y"),
    (("--data", "diabetes", "--seeds", "3"), "--seeds is for synthetic data only"),
    (("--x", "nowhere.csv"), "--x needs --y too"),
    (("--y", "nowhere.csv"), "--y needs --x too"),
    (("--x", "nowhere.csv", "--y", "nowhere.csv"), "nowhere.csv: cannot be read"),
    (("--x", "a.csv", "--y", "b.csv", "--data", "diabetes"), "--data is not for CSV files"),
    (("--standardize",), "--standardize is for CSV files"),
    (("--nonsense",), "--nonsense"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_error_before_any_run(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(experiment, "run_one", lambda task: pytest.fail("a run was started"))
    done = call(*arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2
    errors = [line for line in done.output.splitlines() if line.startswith("Error:")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "out" / "shuffled-regression.jsonl").exists()


def test_csv_error_names_file_and_line(tmp_path):
    good, bad = tmp_path / "x.csv", tmp_path / "y.csv"
    good.write_text("1,2\n3,4\n5,6\n")
    bad.write_text("u\n1\noops\n")
    done = call("--x", good, "--y", bad, "--out", tmp_path)
    assert done.exit_code == 2
    assert f"{bad}, line 3, column 1: expected a finite number, got 'oops'" in done.output


def test_out_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    done = call(*SMALL, "--out", tmp_path / "file")
    assert done.exit_code == 2
    assert "out must be a folder" in done.output


def test_damaged_rows_are_named_before_any_run(tmp_path):
    (tmp_path / "shuffled-regression.jsonl").write_text("nonsense\n{}\n")
    done = call(*SMALL, "--out", tmp_path)
    assert done.exit_code == 2
    assert "shuffled-regression.jsonl, line 1" in done.output


def test_small_run_writes_rows_summary_and_figures_and_resumes(tmp_path, monkeypatch):
    done = call(*SMALL, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    first = rows(tmp_path)
    assert [row["status"] for row in first] == ["MINIMUM", "MINIMUM"]
    assert "2 of 2 runs" in done.output
    assert "2 of 2 runs" in (tmp_path / "summary.txt").read_text()
    assert (tmp_path / "trajectory.png").exists()
    assert (tmp_path / "w_error.png").exists()
    monkeypatch.setattr(experiment, "run_one", lambda task: pytest.fail("a finished run was redone"))
    again = call(*SMALL, "--out", tmp_path)
    assert again.exit_code == 0
    assert "2 of 2 runs are there already" in again.output
    assert rows(tmp_path) == first


def test_changed_settings_are_new_runs(tmp_path, monkeypatch):
    ran = []

    def note(task):
        ran.append(task.settings["eps"])
        return {"status": "MAX_ITER", "success": False, "message": "made up"}

    monkeypatch.setattr(experiment, "run_one", note)
    call(*SMALL, "--out", tmp_path)
    call(*SMALL, "--eps", "0.4", "--out", tmp_path)
    assert ran == [0.3, 0.3, 0.4, 0.4]


def test_interrupt_keeps_finished_runs_and_the_rerun_does_the_rest(tmp_path, monkeypatch):
    real, calls = experiment.run_one, []

    def stopped(task):
        calls.append(task.label)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(task)

    monkeypatch.setattr(experiment, "run_one", stopped)
    done = call(*SMALL, "--out", tmp_path)
    assert done.exit_code == 130
    assert "interrupted" in done.output
    (kept,) = rows(tmp_path)
    monkeypatch.setattr(experiment, "run_one", real)
    assert call(*SMALL, "--out", tmp_path).exit_code == 0
    assert rows(tmp_path)[0] == kept
    assert len(rows(tmp_path)) == 2


def test_a_run_without_a_minimum_makes_the_exit_status_1(tmp_path):
    done = call(*SMALL, "--max-steps", "1", "--out", tmp_path)
    assert done.exit_code == 1
    assert {row["status"] for row in rows(tmp_path)} == {"MAX_ITER"}
    assert any("MAX_ITER" in line for row in rows(tmp_path) for line in row["warnings"])
    assert "MAX_ITER: iteration limit reached" in done.output


def test_csv_input_of_a_known_answer(tmp_path):
    """Y is X doubled and shuffled: the minimum in W is near 2, shrunk a little by eps."""
    grid = [-2.0, -1.1, -0.3, 0.2, 0.9, 1.7]
    x, y = tmp_path / "x.csv", tmp_path / "y.csv"
    x.write_text("height\n" + "\n".join(map(str, grid)))
    y.write_text("\n".join(str(2 * v) for v in reversed(grid)))
    done = call("--x", x, "--y", y, "--starts", "4", "--eps", "0.01", "--jobs", "1", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    best = min(rows(tmp_path), key=lambda row: row["value"])
    assert best["w"][0][0] == pytest.approx(2.0, abs=0.02)
    assert best["reference"] is None
    assert best["w_error"] is None
