"""The studies: smoke of each, resuming, figures from rows alone, dead processes, a full disk."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from ot_newton.cli import main
from ot_newton.experiments import hvp_accuracy, low_eps, regression_strategies, regression_study
from ot_newton.experiments.bench.__main__ import TABLES
from ot_newton.experiments.data import mixture, start
from ot_newton.experiments.dense_hessian import dense_hessian
from ot_newton.experiments.registry import STUDIES, make_config, run_study
from ot_newton.experiments.regression_batch import AdamBatch
from ot_newton.experiments.regression_loss import RegressionLoss
from ot_newton.experiments.regression_phases import adam_rows
from ot_newton.experiments.regression_report import best_adam, summary
from ot_newton.experiments.runs import RowFile, Task, run_tasks
from tests import truth

EPS = 0.3
STUDY = {"hvp-accuracy": hvp_accuracy, "low-eps": low_eps, "shuffled-regression": regression_study}


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- smoke, resume, plot -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[Path, dict[str, Result]]:
    folder = tmp_path_factory.mktemp("smoke")
    return folder, {name: call("run", name, "--smoke", "--jobs", 1, "--out", folder) for name in STUDY}


def test_the_list_names_every_study():
    done = call("list")
    assert done.exit_code == 0
    assert set(STUDY) < set(STUDIES)  # the others have test files of their own
    assert [line.split()[0] for line in done.output.splitlines()] == [*STUDIES, *TABLES]


@pytest.mark.parametrize("name", STUDY)
def test_smoke_writes_rows_tables_and_figures(smoke, name):
    folder, done = smoke
    assert done[name].exit_code == 0, done[name].output
    found = rows(folder / f"{STUDY[name].ROWS}.jsonl")
    assert found
    for row in found:
        assert row["status"] != "ERROR"
        assert {"versions", "precision", "stopping_rule", "settings", "load_average", "success"} <= set(row)
    images = [line.split()[-1] for line in done[name].output.splitlines() if line.startswith("wrote")]
    assert images
    assert all(Path(image).read_bytes().startswith(b"\x89PNG") for image in images)
    assert (folder / f"{name}-summary.txt").stat().st_size > 200


@pytest.mark.parametrize("name", STUDY)
def test_a_finished_study_runs_nothing_again(smoke, name, monkeypatch):
    folder, _ = smoke
    module = STUDY[name]
    monkeypatch.setattr(module, "run_one", lambda task: pytest.fail("a finished run was redone"))
    if module is regression_study:
        for worker in ("adam_rows", "first_order_rows"):
            monkeypatch.setattr(module, worker, lambda *a, **k: pytest.fail("a finished batch was redone"))
    before = (folder / f"{module.ROWS}.jsonl").read_bytes()
    assert call("run", name, "--smoke", "--jobs", 1, "--out", folder).exit_code == 0
    assert (folder / f"{module.ROWS}.jsonl").read_bytes() == before


def test_plot_needs_the_rows_alone(smoke, tmp_path):
    folder, _ = smoke
    for module in STUDY.values():
        shutil.copy(folder / f"{module.ROWS}.jsonl", tmp_path)
    done = call("plot", tmp_path)
    assert done.exit_code == 0, done.output
    for name in STUDY:
        assert (tmp_path / f"{name}-summary.txt").read_text() == (folder / f"{name}-summary.txt").read_text()
    assert {p.name for p in tmp_path.glob("*.png")} == {p.name for p in folder.glob("*.png")}


# ---- bad input -----------------------------------------------------------------------------------------

BAD_FILES = {
    "colour = 1\n": "unknown setting 'colour'; known: n, d, fractions, methods",
    "n = 'many'\n": "n must be of type int, got 'many'",
    "n = true\n": "n must be of type int, got True",
    "n = 1\n": "n must be at least 2, got 1",
    "fractions = 0.1\n": "fractions must be a nonempty list of float",
    "fractions = []\n": "fractions must be a nonempty list of float",
    "fractions = [0.1, -1]\n": "fractions must be a finite number in (0, inf), got -1.0",
    "methods = ['magic']\n": "methods must be one of 'sinkhorn', 'annealed', 'newton', 'auto', got 'magic'",
    "n = \n": "not a TOML file",
}


@pytest.mark.parametrize("text", BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_bad_config_file_is_one_error_before_any_run(tmp_path, text):
    (tmp_path / "c.toml").write_text(text)
    done = call("run", "low-eps", "--config", tmp_path / "c.toml", "--out", tmp_path / "out")
    assert done.exit_code == 2
    (line,) = [line for line in done.output.splitlines() if line.startswith("Error:")]
    assert f"{tmp_path / 'c.toml'}: " in line
    assert BAD_FILES[text] in line
    assert not (tmp_path / "out" / "low-eps.jsonl").exists()


BAD_CALLS = [
    (
        ("run", "nonsense"),
        ", ".join(map(repr, (*STUDIES, "half-iteration"))),
    ),
    (("run", "low-eps", "--config", "nowhere.toml"), "nowhere.toml: cannot be read"),
    (("run", "low-eps", "--jobs", "0"), "jobs must be at least 1, got 0"),
    (("run", "low-eps", "--jobs", "slurm"), "jobs must be an integer, 'dask', 'dask:ADDRESS' or 'ray'"),
    (("run", "low-eps", "--jobs", "ray:address"), "got 'ray:address'"),
    (("run", "converged", "--jobs", "2"), "--jobs is not for the benchmark 'converged'"),
    (("plot", "nowhere"), "DIR must be a folder with rows"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS, ids=[" ".join(a) for a, _ in BAD_CALLS])
def test_bad_calls_name_what_is_wrong(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_a_folder_without_rows_is_an_error(tmp_path):
    assert "found none" in call("plot", tmp_path).output


def test_a_config_file_wins_over_smoke_settings(tmp_path):
    (tmp_path / "c.toml").write_text("n = 8\nfractions = [1]\nmethods = ['sinkhorn']\ndtypes = ['float64']\n")
    done = run_study("low-eps", config=tmp_path / "c.toml", smoke=True, out=tmp_path, jobs=1)
    (row,) = done.rows
    assert row["settings"]["n"] == 8
    assert row["settings"]["fraction"] == 1.0
    assert row["settings"]["max_iter"] == low_eps.SMOKE["max_iter"]


def test_presets_fill_in_only_what_is_not_given():
    wide = make_config(regression_study.Config, {"preset": "wide", "n": 60}, "test")
    assert (wide.n, wide.eps, wide.spread, wide.seeds) == (60, 0.05, 10.0, 72)
    assert [level.name for level in regression_study.Config().levels][0] == "escape"
    far, near = mixture(3, 60, spread=10.0), mixture(3, 60)
    assert float(far.x.abs().max()) > 3 * float(near.x.abs().max())


# ---- processes that die, a full disk -------------------------------------------------------------------


def deadly(task: Task) -> dict[str, object]:
    """Count the call; die in the middle of it if told to."""
    folder, number, deaths = task.payload
    marks = len(list(Path(folder).glob(f"call-{number}-*")))
    (Path(folder) / f"call-{number}-{os.getpid()}-{marks}").touch()
    if marks < deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"status": "MINIMUM", "success": True, "number": number}


def deadly_tasks(folder: Path, deaths: dict[int, int]) -> list[Task]:
    return [Task(str(k), {"k": k}, (str(folder), k, n)) for k, n in deaths.items()]


def test_a_killed_process_loses_no_finished_run(tmp_path):
    file = RowFile(tmp_path / "rows.jsonl")
    run_tasks(deadly_tasks(tmp_path, {0: 0}), deadly, file, jobs=2)
    found = run_tasks(deadly_tasks(tmp_path, {0: 0, 1: 0, 2: 1, 3: 0, 4: 0}), deadly, file, jobs=2)
    assert [row["number"] for row in found] == [0, 1, 2, 3, 4]
    assert sorted(row["number"] for row in file.read()) == [0, 1, 2, 3, 4]
    assert len(list(tmp_path.glob("call-0-*"))) == 1
    assert len(list(tmp_path.glob("call-2-*"))) == 2


def test_a_run_that_always_dies_is_an_error_row_and_the_others_finish(tmp_path):
    found = run_tasks(deadly_tasks(tmp_path, {0: 0, 1: 99, 2: 0}), deadly, RowFile(tmp_path / "r"), jobs=2)
    assert [row["status"] for row in found] == ["MINIMUM", "ERROR", "MINIMUM"]
    assert "process died" in found[1]["message"]


def wordy(task: Task) -> dict[str, object]:
    return {"status": "MINIMUM", "success": True, "text": "x" * task.payload}


def test_a_full_disk_loses_the_row_being_written_and_the_rerun_goes_on(tmp_path):
    file = RowFile(tmp_path / "rows.jsonl")
    tasks = [Task(str(k), {"k": k}, 20_000) for k in range(3)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            run_tasks(tasks, wordy, file, jobs=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [row["label"] for row in file.read()] == ["0", "1"]
    assert [row["label"] for row in run_tasks(tasks, wordy, file, jobs=1)] == ["0", "1", "2"]
    assert [row["label"] for row in file.read()] == ["0", "1", "2"]


# ---- the batched phase ---------------------------------------------------------------------------------


def batch_of(seeds: range, **options: object) -> AdamBatch:
    data = [mixture(seed, 30) for seed in seeds]
    return AdamBatch(data, torch.stack([start(d, 0) for d in data]), eps=EPS, **options)


def test_a_batched_gradient_is_within_the_tolerance_of_the_single_loss():
    batch = batch_of(range(3), lr=0.02)
    for _ in range(12):
        gradient = batch.evaluate()
        for k, lane in enumerate(batch.lanes):
            tight = RegressionLoss(lane.data.x, lane.data.y, eps=EPS)
            tight.value(batch.w(k))
            slope = tight.value_and_grad(batch.w(k))[1]
            assert float((gradient[k] - slope).norm()) <= 0.02 * float(slope.norm())
        batch.advance(gradient)


def test_released_lanes_stand_still_and_do_not_move_the_others():
    pair, alone = batch_of(range(2), lr=0.05), batch_of(range(1), lr=0.05)
    for step in range(6):
        for batch in (pair, alone):
            batch.advance(batch.evaluate())
        if step == 2:
            pair.live.remove(1)
            kept = pair.w(1)
    assert torch.equal(pair.w(1), kept)
    assert torch.equal(pair.w(0), alone.w(0))
    assert len(pair.lanes[1].norms) == 3


class _Stopped(Exception):
    pass


def test_an_interrupted_batch_goes_on_from_its_checkpoint_to_the_same_end(tmp_path, monkeypatch):
    monkeypatch.setattr("ot_newton.experiments.regression_phases.CHECKPOINT_EVERY", 3)
    config = regression_study.Config(n=30, eps=EPS, adam_steps=8)
    data = [mixture(seed, 30) for seed in range(2)]
    tasks = regression_study._adam_tasks(config, data, 0.05)
    path = tmp_path / "c"
    whole = list(adam_rows(tasks, tasks, tmp_path / "other"))
    real, steps = AdamBatch.evaluate, []

    def stopping(batch: AdamBatch) -> torch.Tensor:
        steps.append(batch.step)
        if len(steps) == 6:
            raise _Stopped
        return real(batch)

    monkeypatch.setattr(AdamBatch, "evaluate", stopping)
    with pytest.raises(_Stopped):
        list(adam_rows(tasks, tasks, path))
    assert path.exists()
    resumed = list(adam_rows(tasks, tasks, path))
    assert steps[6] == 3
    assert not path.exists()
    for one, other in zip(whole, resumed, strict=True):
        assert one["w"] == other["w"]
        assert one["plan_passes"] == other["plan_passes"]
        assert one["n_iter"]["first-order"] == 8


def test_counts_of_both_phases_add_up(smoke):
    folder, _ = smoke
    phases = {row["key"]: row for row in rows(folder / "first-order.jsonl")}
    escapes = [row for row in rows(folder / "strategies.jsonl") if row.get("strategy") == "escape"]
    assert escapes
    for row in escapes:
        phase = phases[row["settings"]["phase"]]
        release = phase["releases"]["escape"]
        assert row["status"] == "MINIMUM"
        assert row["plan_passes"] > release["plan_passes"] > 0
        assert row["n_iter"]["first-order"] >= release["step"]
        steps = row["trace"]["step"]
        assert sorted(set(steps)) == list(range(max(steps) + 1))  # no step is missing
        assert len(row["trace"]["loss"]) == len(steps)
        assert row["trace"]["loss"][0] == phase["values"][0]


def test_the_trajectory_passes_several_saddles_with_lambda_min_at_every_step(smoke):
    folder, done = smoke
    (row,) = [row for row in rows(folder / "strategies.jsonl") if row.get("strategy") == "trajectory"]
    trace, saddles = row["trace"], row["saddles"]
    assert row["status"] == "MINIMUM"
    assert row["lambda_min_start"] < 0 < row["lambda_min_end"]
    assert sorted(set(trace["step"])) == trace["probe_step"] == list(range(trace["step"][-1] + 1))
    assert len(trace["lambda_min"]) == len(trace["probe_step"])
    assert len(saddles) >= 2
    assert saddles[0]["step"] == 0
    values = [saddle["value"] for saddle in saddles] + [row["value"]]
    assert values == sorted(values, reverse=True)
    loss_at = dict(zip(trace["step"], trace["loss"], strict=True))
    for saddle in saddles:
        # From a fresh loss that does not know of the symmetry.
        assert saddle["grad_norm"] <= 1e-7
        assert saddle["lambda_min"] < -1e-4 * abs(saddle["lambda_max"])
        assert saddle["lambda_min"] == pytest.approx(trace["lambda_min"][saddle["step"]], rel=1e-4)
        assert saddle["value"] == pytest.approx(loss_at[saddle["step"]], rel=1e-8)
        assert f"{saddle['value']:.6f}" in done["shuffled-regression"].output


def test_a_mirrored_loss_is_the_loss_with_exact_symmetry():
    data = mixture(0, 30)
    x, y = (regression_strategies._mirrored(cloud) for cloud in (data.x, data.y))
    for cloud, given in ((x, data.x), (y, data.y)):
        half, image = cloud.split(15)
        assert torch.equal(half[:, 1], -image[:, 1])
        assert torch.equal(half[:, [0, *range(2, half.shape[1])]], image[:, [0, *range(2, half.shape[1])]])
        torch.testing.assert_close(torch.cdist(half, half), torch.cdist(given[:15], given[:15]))
    loss, w = regression_strategies._MirroredLoss(x, y, eps=EPS), start(data, 0)
    for _ in range(2):
        exact = truth.solve((x @ w).numpy(), y.numpy(), eps=EPS)
        moves = np.einsum("nk,dl->ndkl", x, np.eye(2)).reshape(60, 10)
        assert loss.value(w) == pytest.approx(exact.value, rel=1e-9)
        slope, curvature = loss.value_and_grad(w)[1], loss.symmetric_hessian(w)
        np.testing.assert_allclose(slope, x.numpy().T @ exact.gradient("x"), rtol=0, atol=1e-9)
        np.testing.assert_allclose(curvature, moves.T @ exact.hessian("x") @ moves, rtol=0, atol=1e-6)
        w[:, 1] = 0.0  # its own image
    assert not slope[:, 1].any()
    assert not curvature.reshape(5, 2, 5, 2)[:, 0, :, 1].any()


# ---- figures in the tables -----------------------------------------------------------------------------


def made(strategy: str, data: str, passes: int, **values: object) -> dict[str, object]:
    row: dict[str, object] = {
        "strategy": strategy, "status": "MINIMUM", "success": True, "plan_passes": passes, "seconds": 1.0,
        "settings": {"data": data, "level": "escape"}, "lambda_min_start": -1.0, "escape": True,
        "recovery": False, "n_iter": {"first-order": 1, "newton": 2, "escape": 0}, "n_hvp": 3, "value": 0.5,
        "passes_1e4": passes // 2, "relative_gradient": 1e-9, "phase": {"released_by_level": True},
    }  # fmt: skip
    return row | values


def test_ratios_count_the_budget_where_adam_did_not_get_there():
    missed = {"success": False, "status": "MAX_ITER", "passes_1e4": None}
    found = [
        made("escape", "a", 100),
        made("escape", "b", 100),
        made("adam", "a", 900),
        made("adam", "a", 700),
        made("adam", "b", 500, **missed, relative_gradient=1e-3),
        made("adam", "b", 800, **missed, relative_gradient=1e-5),
    ]
    best = best_adam(found)
    assert (best["a"]["plan_passes"], best["b"]["plan_passes"]) == (700, 800)
    ratio = summary(found)["ratio"]
    assert ratio == {
        "seeds": 2, "adam_missed": 1, "to_tolerance": 1500 / 200, "rough_seeds": 1, "to_1e-4": 350 / 50,
    }  # fmt: skip


def test_dense_hessian_agrees_with_the_truth_of_the_tests():
    generator = np.random.default_rng(0)
    x, y = generator.random((9, 2)), generator.random((7, 2))
    exact = truth.solve(x, y, eps=0.1)
    found = dense_hessian(x, y, exact.f, exact.g, eps=0.1)
    np.testing.assert_allclose(found.matrix, exact.hessian("x"), rtol=0, atol=1e-10)
    assert found.marginal_error < 1e-12
    sigma = np.linalg.svd(exact.plan * np.sqrt(9 * 7), compute_uv=False)
    np.testing.assert_allclose(found.gap, 1 - sigma[1] ** 2, rtol=1e-8)


def test_packed_lanes_are_what_the_ratio_says(smoke):
    folder, _ = smoke
    (row,) = [row for row in rows(folder / "strategies.jsonl") if row.get("strategy") == "packing"]
    depth = row["packed"]["depth"]
    assert row["packed"]["lane_iterations"] == sum(depth)
    assert row["fixed"]["lane_iterations"] == len(depth) * max(row["fixed"]["depth"])
    assert row["ratio"] == row["packed"]["lane_iterations"] / row["fixed"]["lane_iterations"]


def test_a_dask_cluster_runs_the_tasks(tmp_path):
    found = run_tasks(deadly_tasks(tmp_path, {0: 0, 1: 0}), deadly, RowFile(tmp_path / "r"), jobs="dask")
    assert [row["number"] for row in found] == [0, 1]
    assert all(str(os.getpid()) not in p.name for p in tmp_path.glob("call-*"))
