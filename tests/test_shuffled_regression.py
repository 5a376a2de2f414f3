"""The main job: its data, its loss against dense truth, one run checked independently, rows and figures."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from ot_newton.errors import Status
from ot_newton.experiments import shuffled_regression as experiment
from ot_newton.experiments.data import from_csv, load_diabetes, mixture, read_csv, standardized, start
from ot_newton.experiments.regression_loss import RegressionLoss
from ot_newton.experiments.runs import RowFile, Task, run_tasks, settings_key
from ot_newton.experiments.shuffled_regression import Config, build, marginal_recheck, run_one, summary
from tests import truth
from tests.tolerances import assert_close

EPS = 0.3


def small_loss(n: int = 24, seed: int = 3) -> tuple[RegressionLoss, torch.Tensor]:
    data = mixture(seed, n)
    return RegressionLoss(data.x, data.y, eps=EPS), start(data, 0)


def dense(loss: RegressionLoss, w: torch.Tensor) -> truth.Truth:
    return truth.solve((loss.x @ w).numpy(), loss.y.numpy(), eps=loss.eps)


# ---- data ----------------------------------------------------------------------------------------------


def test_mixture_is_a_shuffled_linear_image_of_three_equal_clusters():
    data = mixture(5, 300, noise=0.0)
    assert data.x.shape == (300, 5)
    assert data.y.shape == (300, 2)
    linked = data.x @ data.truth
    assert not torch.equal(linked, data.y)
    order = [torch.argsort(cloud[:, 0]) for cloud in (linked, data.y)]
    torch.testing.assert_close(linked[order[0]], data.y[order[1]])
    spreads = [float(data.x[k::3].std(0).mean()) for k in range(3)]
    np.testing.assert_allclose(spreads, (0.3, 0.05, 0.6), rtol=0.1)


def test_mixture_noise_has_the_standard_deviation_asked_for():
    quiet, noisy = mixture(2, 3000, noise=0.0), mixture(2, 3000, noise=0.2)
    gain = noisy.y.var(0) - quiet.y.var(0)
    np.testing.assert_allclose(gain, 0.04, atol=0.012)


def test_draws_repeat_by_seed_and_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    first, again, other = mixture(1, 30), mixture(1, 30), mixture(2, 30)
    starts = [start(first, k) for k in (0, 1)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.y, again.y)
    assert first.digest == again.digest != other.digest
    assert not torch.equal(*starts)
    assert not torch.allclose(start(first, 0) - first.truth, start(other, 0) - other.truth)
    draws = torch.stack([start(first, k) - first.truth for k in range(400)])
    assert abs(float(draws.mean())) < 0.05
    assert abs(float(draws.std()) - 1.0) < 0.05


def test_diabetes_is_the_bundled_table_standardized_and_shuffled():
    data = load_diabetes()
    assert data.x.shape == (442, 4)
    assert data.y.shape == (442, 2)
    for cloud in (data.x, data.y):
        torch.testing.assert_close(cloud.mean(0), torch.zeros(cloud.shape[1]).double(), atol=1e-12, rtol=0)
        torch.testing.assert_close(cloud.square().mean(0), torch.ones(cloud.shape[1]).double())
    assert data.truth is None
    # The linked fit explains part of y; fitting the shuffled rows explains almost nothing.
    shuffled = torch.linalg.lstsq(data.x, data.y).solution
    assert float(data.reference.norm()) > 3 * float(shuffled.norm())
    spread = torch.stack([start(data, k) for k in range(300)]).std()
    assert abs(float(spread) - 1.0) < 0.06


def test_csv_with_and_without_header(tmp_path):
    plain, header = tmp_path / "a.csv", tmp_path / "b.csv"
    plain.write_text("1,2\n\n3,-4e-1\n")
    header.write_text('\ufeff"height, cm",weight\n1,2\n3,-0.4\n')
    expected = torch.tensor([[1.0, 2.0], [3.0, -0.4]], dtype=torch.float64)
    assert torch.equal(read_csv(plain), expected)
    assert torch.equal(read_csv(header), expected)
    both = from_csv(plain, header, standardize=True)
    torch.testing.assert_close(both.x, torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    assert both.reference is None


BAD_CSV = {
    "1,2\n3\n": "line 2: expected 2 values, got 1",
    "1,2\n3,x\n": "line 2, column 2: expected a finite number, got 'x'",
    "1,x\n": "line 1, column 2: expected a finite number, got 'x'",
    "a,b\n1,2\n3,\n": "line 3, column 2: expected a finite number, got an empty cell",
    "1,nan\n": "line 1, column 2: expected a finite number, got 'nan'",
    "1,2\n\n\n1,inf\n": "line 4, column 2: expected a finite number, got 'inf'",
    "1;2\n3;4\n": "line 1: values must be separated by commas, found semicolons",
    "a,b\n": "no rows of numbers found",
    "": "no rows of numbers found",
}


@pytest.mark.parametrize("text", BAD_CSV, ids=range(len(BAD_CSV)))
def test_bad_csv_names_file_and_line(tmp_path, text):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_csv(path)
    assert str(path) in str(caught.value)
    assert BAD_CSV[text] in str(caught.value)


def test_binary_or_missing_csv_is_one_error(tmp_path):
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("binary.csv", "not UTF-8"), ("none.csv", "cannot be read"), ("", "cannot be read")):
        with pytest.raises(ValueError, match=reason):
            read_csv(tmp_path / name)


def test_constant_column_is_standardized_to_zero():
    assert torch.equal(standardized(torch.full((4, 1), 7.0)), torch.zeros(4, 1))


# ---- loss ----------------------------------------------------------------------------------------------


def test_value_gradient_and_hessian_against_dense_truth():
    loss, w = small_loss()
    exact = dense(loss, w)
    n, d = loss.x.shape[0], w.shape[1]
    gradient = loss.x.numpy().T @ exact.gradient("x")
    jacobian = np.kron(loss.x.numpy(), np.eye(d))
    assert jacobian.shape == (n * d, w.numel())
    assert_close(loss.value(w), exact.value, "value", torch.float64)  # and refines the plan
    hessian = loss.hessian(w)
    assert_close(loss.value_and_grad(w)[1], gradient, "gradient", torch.float64)
    assert_close(hessian.to_dense(), jacobian.T @ exact.hessian("x") @ jacobian, "hvp", torch.float64)
    block = torch.eye(w.numel(), dtype=torch.float64)[:, :3]
    assert torch.equal(hessian @ block, hessian.to_dense()[:, :3])
    assert loss.n_hessian == 1


def test_rough_gradient_is_within_the_accuracy_promised_and_cheaper():
    rough, w = small_loss(120, 1)
    tight = RegressionLoss(rough.x, rough.y, eps=EPS)
    tight.value(w)
    exact = tight.value_and_grad(w)[1]
    found = rough.value_and_grad(w)[1]
    error = float((found - exact).norm())
    assert 0 < error <= 0.01 * float(exact.norm())
    assert error <= rough.noise_floor(w)
    assert rough.plan_passes < tight.plan_passes


def test_a_start_carried_from_far_away_gives_the_same_answer():
    loss, w = small_loss()
    loss.value_and_grad(w)
    far = w + 40.0
    assert math.isclose(loss.value(far), RegressionLoss(loss.x, loss.y, eps=EPS).value(far), rel_tol=1e-10)
    assert loss.missed == 0


def test_freeze_and_warm_state_repeat_an_evaluation_bitwise():
    loss, w = small_loss(60)
    loss.value_and_grad(w)
    state = loss.warm_state()
    with loss.freeze():
        first = loss.value_and_grad(w + 0.1)
        loss.value_and_grad(w + 0.3)
        assert torch.equal(loss.warm_state()["last"]["f"], state["last"]["f"])
    loss.load_warm_state(state)
    again = loss.value_and_grad(w + 0.1)
    assert first[0] == again[0]
    assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("option", [{"eps": 0.0}, {"eps": 1.0, "tol": -1.0}, {"eps": 1.0, "max_iter": 0}])
def test_bad_option_of_the_loss_is_named(option):
    data = mixture(0, 6)
    with pytest.raises(ValueError, match=list(option)[-1]):
        RegressionLoss(data.x, data.y, **option)


# ---- one run -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished() -> dict[str, object]:
    (task,) = build(Config(seeds=1, n=60, starts=1, eps=EPS))
    return {**run_one(task), "key": task.key, "label": task.label, "settings": dict(task.settings)}


def test_run_ends_at_a_minimum_by_an_independent_check(finished):
    data = mixture(0, 60)
    assert finished["status"] == Status.MINIMUM.name
    w = torch.tensor(finished["w"], dtype=torch.float64)
    exact = truth.solve((data.x @ w).numpy(), data.y.numpy(), eps=EPS)
    gradient = data.x.numpy().T @ exact.gradient("x")
    jacobian = np.kron(data.x.numpy(), np.eye(2))
    curvature = np.linalg.eigvalsh(jacobian.T @ exact.hessian("x") @ jacobian)
    assert np.linalg.norm(gradient) < 1e-7
    assert curvature[0] > 0
    np.testing.assert_allclose(finished["lambda_min_end"], curvature[0], rtol=1e-6)
    np.testing.assert_allclose(finished["value"], exact.value, rtol=1e-11)
    np.testing.assert_allclose(finished["value_recheck"], exact.value, rtol=1e-11)
    assert finished["marginal_recheck"] < 1e-9


def test_noise_floor_refines_the_plan_where_the_gradient_drowns(finished):
    data = mixture(0, 60)
    w = torch.tensor(finished["w"], dtype=torch.float64)
    loss = RegressionLoss(data.x, data.y, eps=EPS)
    slope = float(loss.value_and_grad(w)[1].norm())
    assert loss.noise_floor(w) < 1e-9
    assert float(loss.value_and_grad(w)[1].norm()) < 1e-7
    assert loss.value_noise(w) < 1e-11
    away = RegressionLoss(data.x, data.y, eps=EPS)
    assert away.noise_floor(w + 0.5) > 1e-6  # far from a minimum the plan stays rough
    assert slope < 1e-2


def test_row_is_plain_json_with_the_schema(finished):
    row = json.loads(json.dumps(finished))
    names = {
        *("precision", "stopping_rule", "status", "success", "n_iter", "n_hvp", "plan_passes", "seconds"),
        *("value", "value_reference", "lambda_min_start", "lambda_min_end", "w_error", "escape", "recovery"),
        *("marginal_recheck", "settings", "trace", "w"),
    }
    assert names <= set(row)
    trace = row["trace"]
    steps = sum(row["n_iter"].values())
    assert len(trace["loss"]) == len(trace["step"]) >= steps + 1  # no step is missing, nor the start
    assert len(trace["probe_step"]) == len(trace["lambda_min"]) >= row["n_probes"]
    assert trace["switches"]
    data = mixture(0, 60)
    error = float((torch.tensor(row["w"], dtype=torch.float64) - data.truth).norm())
    assert row["w_error"] == pytest.approx(error)
    assert row["recovery"] == (error <= 0.3)
    assert row["escape"] == (row["lambda_min_start"] < 0)


def test_marginal_recheck_sees_a_wrong_potential():
    loss, w = small_loss()
    f, g = loss.potentials(w)
    z = loss.x @ w
    error, value = marginal_recheck(z, loss.y, f, g, eps=EPS)
    assert error < 1e-11
    assert value == pytest.approx(loss.value(w), rel=1e-12)
    bent = f.clone()
    bent[3] += EPS * math.log(1.5)
    assert marginal_recheck(z, loss.y, bent, g, eps=EPS)[0] == pytest.approx(0.5 / len(f), rel=1e-6)


def test_figures_are_written_from_the_rows(finished, tmp_path):
    paths = experiment.plot([finished], tmp_path)
    assert {path.name for path in paths} == {"trajectory.png", "values.png", "w_error.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in paths)
    assert experiment.plot([{"status": "ERROR"}], tmp_path) == []


def test_summary_counts_what_the_rows_say(finished):
    other = {**finished, "value": finished["value"] - 1.0, "escape": False, "recovery": False}
    failed = {"status": "ERROR", "success": False, "message": "x", "settings": {"data": "b"}, "label": "b"}
    found = summary([finished, other, failed])
    assert (found["runs"], found["minimum"], found["problems"], found["compared"]) == (3, 2, 2, 1)
    assert found["with_truth"] == 2
    assert [row["value"] for row in found["best"]] == [other["value"]]
    above = {**finished, "value": finished["value_reference"] + 1e-3}
    assert summary([above])["not_above"] == 0
    assert summary([{**above, "value": above["value_reference"]}])["not_above"] == 1
    assert len(experiment.tables([finished, failed])) == 2


def test_a_saddle_start_that_ends_certified_is_an_escape(finished):
    data = mixture(0, 6)

    class Result:
        status, x = Status.MINIMUM, data.truth

    assert experiment._comparison(data, Result(), EPS, True)["escape"] is True
    assert experiment._comparison(data, Result(), EPS, False)["escape"] is False
    Result.status = Status.MAX_ITER
    assert experiment._comparison(data, Result(), EPS, True)["escape"] is False
    assert experiment._comparison(data, Result(), EPS, True)["recovery"] is True


BAD_CONFIG = [
    ({"data": "csv"}, "x must be a CSV file"),
    ({"data": "nonsense"}, "data must be one of"),
    ({"seeds": 0}, "seeds must be at least 1, got 0"),
    ({"starts": 0}, "starts must be at least 1, got 0"),
    ({"n": 2}, "n must be at least 3, got 2"),
    ({"eps": -1.0}, "eps must be"),
    ({"lr": math.nan}, "lr must be"),
    ({"max_steps": 0}, "max_steps must be at least 1"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CONFIG)
def test_bad_configuration_is_one_error(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)


# ---- rows ----------------------------------------------------------------------------------------------


def square(task: Task) -> dict[str, object]:
    if task.payload == "bad":
        raise RuntimeError("broken")
    return {"status": "MINIMUM", "success": True, "square": task.payload**2}


def tasks(*payloads: object) -> list[Task]:
    return [Task(str(p), {"payload": str(p)}, p) for p in payloads]


def test_rerun_does_only_what_is_missing(tmp_path):
    file = RowFile(tmp_path / "rows.jsonl")
    run_tasks(tasks(1, 2), square, file, jobs=1)
    rows = run_tasks(tasks(3, 2, 1), square, file, jobs=1)
    assert [row["square"] for row in rows] == [9, 4, 1]
    assert [row["square"] for row in file.read()] == [1, 4, 9]
    assert rows[0]["versions"]["torch"] == torch.__version__ or rows[0]["versions"]["torch"]


def test_rows_of_parallel_runs_come_in_the_order_of_the_tasks(tmp_path):
    rows = run_tasks(tasks(1, 2, 3), square, RowFile(tmp_path / "rows.jsonl"), jobs=2)
    assert [row["square"] for row in rows] == [1, 4, 9]


def test_an_exception_is_a_row_and_is_tried_again(tmp_path):
    file = RowFile(tmp_path / "rows.jsonl")
    rows = run_tasks(tasks("bad", 2), square, file, jobs=1)
    assert [row["status"] for row in rows] == ["ERROR", "MINIMUM"]
    assert rows[0]["message"] == "RuntimeError: broken"
    run_tasks(tasks("bad", 2), square, file, jobs=1)
    assert len(file.read()) == 3


def test_a_line_cut_off_in_writing_is_dropped_and_the_file_goes_on(tmp_path):
    file = RowFile(tmp_path / "rows.jsonl")
    file.append({"key": "a"})
    with open(file.path, "a") as stream:
        stream.write('{"key": "b", "val')
    assert file.read() == [{"key": "a"}]
    file.append({"key": "c"})
    assert file.read() == [{"key": "a"}, {"key": "c"}]


@pytest.mark.parametrize("damage", ["nonsense\n", "[1]\n", '{"key": \n'])
def test_a_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "a"}\n' + damage + '{"key": "b"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2"):
        RowFile(path).read()


def test_key_depends_on_every_setting_and_not_on_their_order():
    assert settings_key({"a": 1, "b": 2.5}) == settings_key({"b": 2.5, "a": 1})
    assert settings_key({"a": 1, "b": 2.5}) != settings_key({"a": 1, "b": 2.6})
