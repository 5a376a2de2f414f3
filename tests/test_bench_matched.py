"""The matched tables: the reference against the truth, the judge against wrong answers, missing peers."""

from __future__ import annotations

import json
import math
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ot_newton.cli import main
from ot_newton.experiments.bench import (
    adapters,
    memory,
    ours,
    parity,
    peer_geomloss,
    peer_ott,
    peer_pot,
    reference,
)
from ot_newton.experiments.bench.__main__ import main as bench
from ot_newton.experiments.bench.adapters import ADAPTERS, SELF_ADAPTERS, find, present
from ot_newton.experiments.bench.cases import Judge
from ot_newton.experiments.bench.harness import Job
from ot_newton.experiments.bench.matched import timed
from ot_newton.experiments.bench.reference import SCHEMES, Softmins, converge, count_for, dense_terms
from ot_newton.experiments.bench.session import run_tables
from ot_newton.experiments.bench.settings import Settings, Size
from ot_newton.experiments.bench.tasks import OPERATIONS, Rule, make_task
from ot_newton.problem import OTProblem
from ot_newton.solve import sinkhorn
from tests import truth

COUNT, CONVERGED = Rule(10), Rule(tol=1e-4)
QUICK = replace(Settings.smoke(), rounds=1, peer_seconds=0.0)


def truth_of(problem: OTProblem) -> truth.Truth:
    exact = reference.double(problem)  # equal masses to rounding
    parts = (part.numpy() for part in (exact.x, exact.y, exact.a, exact.b))
    return truth.solve(
        *parts, eps=problem.eps, cost_scale=problem.cost_scale, rho_x=problem.rho_x, rho_y=problem.rho_y
    )


# ---- the reference ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", parity.KINDS)
def test_the_reference_agrees_with_the_truth(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "SIZES", (14, 11, 3))
    problem = parity.make_problem(kind)
    exact = truth_of(problem)
    softmins = Softmins(problem)
    pair = converge(softmins)
    terms = dense_terms(softmins, *pair)
    assert terms.dual == pytest.approx(exact.value, rel=1e-12)
    assert terms.primal == pytest.approx(exact.value, rel=1e-12)
    assert terms.gradient.numpy() == pytest.approx(exact.gradient("x"), abs=1e-12)
    assert terms.gradient_y.numpy() == pytest.approx(exact.gradient("y"), abs=1e-12)
    assert softmins.marginal_error(*pair) <= 1e-13
    assert softmins.marginal_error(pair[0] + 0.01, pair[1]) > 1e-3


@pytest.mark.parametrize("rho", [None, 0.5])
def test_streamed_softmins_equal_stored_ones(rho: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    p = parity.make_problem("balanced")
    problem = OTProblem(p.x + 3.0, p.y, p.a, p.b, eps=p.eps, rho_x=rho, rho_y=rho)
    stored = Softmins(problem)
    monkeypatch.setattr(reference, "STORED", 0)
    streamed = Softmins(problem)
    assert (stored.stored, streamed.stored) == (True, False)
    f, g = SCHEMES["x first"].run(stored, 3)
    for axis, h in ((1, g), (0, f)):
        assert torch.allclose(streamed.hard(h, axis), stored.hard(h, axis), rtol=0, atol=1e-12)


def test_orders_of_updates_differ_until_they_converge() -> None:
    softmins = Softmins(make_task(40, 30, 3, COUNT).problem)
    ends = {name: scheme.run(softmins, 4) for name, scheme in SCHEMES.items() if name != "self"}
    plans = {name: float((f[:, None] + g[None, :]).sum()) for name, (f, g) in ends.items()}
    assert (
        len({round(value, 9) for value in plans.values()}) == 5
    )  # uniform weights: "unweighted" changes nothing
    exact = converge(softmins)
    for name in ends:
        f, g = SCHEMES[name].run(softmins, 400)
        gap = (f[:, None] + g[None, :]) - (exact[0][:, None] + exact[1][None, :])
        assert float(gap.abs().max()) < 1e-6, name


def test_states_count_as_run_does_and_geomloss_takes_the_g_before_the_last() -> None:
    softmins = Softmins(make_task(20, 15, 2, COUNT).problem)
    for name, scheme in SCHEMES.items():
        if name == "self":
            continue
        first = 1 if scheme.last is None else 2
        for count, state in zip(range(first, first + 4), scheme.states(softmins), strict=False):
            assert all(map(torch.equal, state, scheme.run(softmins, count))), (name, count)
    f, g = SCHEMES["geomloss"].gradient_pair(softmins, 6)
    assert torch.equal(f, SCHEMES["geomloss"].run(softmins, 6)[0])
    assert torch.equal(f, softmins.x(g))
    assert not torch.equal(g, SCHEMES["geomloss"].run(softmins, 6)[1])


def test_count_for_is_the_first_ten_that_meets_the_tolerance() -> None:
    softmins = Softmins(make_task(30, 20, 2, COUNT).problem)
    count = count_for(softmins, "geomloss", 1e-4)
    assert count % 10 == 0
    assert softmins.marginal_error(*SCHEMES["geomloss"].run(softmins, count)) <= 1e-4
    assert softmins.marginal_error(*SCHEMES["geomloss"].run(softmins, count - 10)) > 1e-4


# ---- judge and adapters ------------------------------------------------------------------------------------


OURS = [adapter for adapter in ADAPTERS if adapter.name in ("cpu", "dense", "torch_tiles")]


@pytest.mark.parametrize("rule", [COUNT, CONVERGED], ids=["count", "converged"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_ours_pass_and_wrong_answers_do_not(operation: str, rule: Rule) -> None:
    task = make_task(48, 36, 3, rule)
    check = Judge(task).check(operation)
    keops = replace(find("KeOps, our formulas"), kind="torch_tiles")
    for adapter in (*OURS, keops):
        job = adapter.prepare(operation, task)
        answer = job.answer(job.run())
        verdict = check(answer)
        assert verdict.passed, (adapter.name, verdict)
        assert verdict.facts["iterations"] > 0
        key = {"forward": "g", "backward": "gradient", "hvp": "products"}[operation]
        assert not check(answer | {key: 1.1 * np.asarray(answer[key]) + 0.01}).passed
        if operation == "forward" or not task.counted:
            assert not check(answer | {"f": answer["f"] + 0.1 * np.arange(task.problem.n)}).passed


@pytest.mark.parametrize("rule", [COUNT, CONVERGED], ids=["count", "converged"])
def test_every_order_of_ours_solves_the_self_problem(rule: Rule) -> None:
    task = make_task(40, 40, 2, rule, same=True)
    check = Judge(task).check("forward")
    names = [adapter.name for adapter in SELF_ADAPTERS if adapter.module == "ours"]
    assert {find(name).scheme for name in names} == {"self", "symmetric", "x first"}
    for name in names:
        job = find(name).prepare("forward", task)
        assert check(job.answer(job.run())).passed, name


def test_a_count_in_the_wrong_order_is_wrong() -> None:
    task = make_task(40, 30, 2, COUNT)
    job = replace(find("cpu"), scheme="y first").prepare("forward", task)
    verdict = Judge(task).check("forward")(job.answer(job.run()))
    assert not verdict.passed
    assert verdict.error > 10 * verdict.tolerance


def test_who_takes_part() -> None:
    def names(*arguments: object) -> set[str]:
        return {adapter.name for adapter in present(*arguments)}

    assert "POT lazy" in names("forward", ADAPTERS, 1000)
    assert {"POT lazy", "POT log", "GeomLoss online"}.isdisjoint(names("hvp", ADAPTERS, 1000))
    assert "POT log, unrolled" in names("hvp", ADAPTERS, 1000)
    assert "POT log, unrolled" not in names("hvp", ADAPTERS, 1 << 22)
    assert names("forward", ADAPTERS, 1 << 30) >= {
        "cpu",
        "OTT online",
        "GeomLoss online",
        "flash-sinkhorn",
    }
    assert not names("forward", ADAPTERS, 1 << 30) & {
        "dense",
        "OTT dense",
        "POT log",
        "GeomLoss tensorized",
    }
    assert ("triton" in names("forward", ADAPTERS, 1000)) == torch.cuda.is_available()
    with pytest.raises(ValueError, match="contestant must be one of 'cpu', .*got 'nobody'"):
        find("nobody")


def test_missing_and_broken_peers_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jax", "geomloss", "ot", "pykeops", "flash_sinkhorn"):
        monkeypatch.setitem(sys.modules, name, None)
    table = present("forward", ADAPTERS, 1000)
    rows = {row["contestant"]: row for row in timed("forward", make_task(24, 16, 2, COUNT), table, QUICK)}
    fine = {name for name, row in rows.items() if row["status"] == "OK"}
    assert fine >= {"cpu", "dense", "torch_tiles"}
    absent = {"OTT dense", "OTT online", "GeomLoss tensorized", "KeOps, our formulas", "POT log"}
    for name in absent:
        assert rows[name]["status"] == "ERROR"
        assert rows[name]["message"].startswith(("ModuleNotFoundError", "ImportError")), rows[name]
    for row in rows.values():
        assert {"n", "m", "d", "eps", "rule", "precision", "stopping"} <= set(row)
        assert "10 iterations" in row["stopping"]
        json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("module", [peer_ott, peer_geomloss, peer_pot])
def test_a_convention_that_a_peer_lacks_is_refused(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("jax", "jax.numpy", "geomloss", "ot"):
        stub = types.ModuleType(name)
        stub.SamplesLoss = None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, stub)
    sys.modules["jax"].numpy = sys.modules["jax.numpy"]  # type: ignore[attr-defined]
    p = make_task(8, 6, 2, COUNT).problem
    odd = OTProblem(p.x, p.y, eps=1.0, cost_scale=0.7, rho_x=0.5)
    call = {
        peer_ott: lambda: peer_ott._clouds(odd),
        peer_geomloss: lambda: peer_geomloss._samples_loss(odd, "tensorized"),
        peer_pot: lambda: peer_pot._solve(odd, {}, odd.x, "detach"),
    }[module]
    with pytest.raises(ValueError, match=r"full squared distance|one reach"):
        call()


@pytest.mark.parametrize("count", [5, 10, 80])
def test_geomloss_schedule_at_constant_temperature(count: int) -> None:
    blur = 0.3
    options = peer_geomloss._constant(blur, count)
    logs = np.arange(2 * np.log(options["diameter"]), 2 * np.log(blur), 2 * np.log(options["scaling"]))
    schedule = [options["diameter"] ** 2, *np.exp(logs), blur**2]
    assert len(schedule) == count - peer_geomloss.ENDS
    assert schedule == pytest.approx([blur**2] * len(schedule), rel=1e-6)


# ---- parity ------------------------------------------------------------------------------------------------


def only(monkeypatch: pytest.MonkeyPatch, *libraries: parity.Library) -> None:
    monkeypatch.setattr(parity, "LIBRARIES", libraries)


def test_parity_of_ours_is_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, parity.LIBRARIES[0])
    rows = list(parity.rows(Settings()))
    assert [(row["problem"], row["rule"]) for row in rows] == [
        (kind, rule) for kind in parity.KINDS for rule in ("10 iterations", "converged")
    ]
    for row in rows:
        assert row["status"] == "OK"
        counted = row["rule"] == "10 iterations"
        assert row["value_error"] < 1e-13
        assert row["gradient_error"] < (1e-13 if counted else 1e-9)
        assert ("value_bound" in row) != counted


def test_parity_tells_wrong_and_missing_and_the_command_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ott = next(library for library in parity.LIBRARIES if library.name == "OTT-JAX")
    off = types.ModuleType("ot_newton.experiments.bench.off")

    def loss(problem: OTProblem, rule: Rule, *, debias: bool) -> dict[str, object]:
        answer = ours.loss(problem, rule, debias=debias)
        return answer | {"value": answer["value"] * (1 + 1e-5)}

    off.loss = loss  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, off.__name__, off)
    monkeypatch.setitem(sys.modules, "jax", None)
    only(monkeypatch, replace(parity.LIBRARIES[0], name="off", module="off"), ott)
    assert run_tables({"loss-parity": "parity"}, threads=torch.get_num_threads(), out=tmp_path) == 9
    rows = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    converged = [row for row in rows if row["contestant"] == "off" and row["rule"] != "10 iterations"]
    assert {row["status"] for row in converged} == {"WRONG"}
    assert all("value off by 1.0e-05" in row["message"] for row in converged)
    missing = [row for row in rows if row["contestant"] == "OTT-JAX"]
    assert {row["status"] for row in missing} == {"ERROR"}
    assert len(missing) == 6


# ---- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "slope"), [("points", 40.0), ("pairs", 8.0)])
def test_the_line_is_found_again(unit: str, slope: float) -> None:
    sizes = (1000, 2000, 4000)
    counts = [2 * n if unit == "points" else n * n for n in sizes]
    found = memory.fit(sizes, [int(3e8 + slope * count) for count in counts])
    assert found["grows_with"] == unit
    assert found["slope"] == pytest.approx(slope, rel=1e-6)
    assert found["intercept"] == pytest.approx(3e8, rel=1e-6)
    assert found["residual"] < 1e-6


def test_memory_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "ADAPTERS", (find("torch_tiles"), replace(find("dense"), name="nobody")))
    fine, unknown = memory.rows(replace(QUICK, memory_sizes=(50, 100, 150)))
    assert fine["status"] == "OK"
    assert fine["sizes"] == [50, 100, 150]
    assert all(peak > 1e7 for peak in fine["peaks"])
    assert math.isfinite(fine["slope"])
    assert unknown["status"] == "ERROR"
    assert "contestant must be one of" in unknown["message"]


# ---- presets, command line, figures ------------------------------------------------------------------------


def test_the_full_matrix_covers_what_it_should_and_no_more() -> None:
    full = Settings.of("full")
    for sizes in (full.forward_sizes, full.backward_sizes, full.hvp_sizes):
        assert {bool(size.iterations) for size in sizes} == {True, False}
        assert {size.n == size.m for size in sizes} == {True, False}
        assert {size.d for size in sizes} == {2, 64, 1024}
        assert max(size.n for size in sizes) == 50_000
        work = [size.n * size.m * (size.d + 30) for size in sizes if not size.same]
        assert work == sorted(work)  # an interrupted run has the most rows
    assert Settings.of("default") == Settings()
    with pytest.raises(ValueError, match="preset must be one of 'default', 'smoke', 'full'"):
        Settings.of("huge")
    done = CliRunner().invoke(bench, ["forward", "--smoke", "--full"])
    assert done.exit_code == 2
    assert "exclude each other" in done.output


def test_bench_rows_are_drawn_from_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "ADAPTERS", (find("dense"), find("torch_tiles")))
    monkeypatch.setattr("ot_newton.experiments.bench.matched.ADAPTERS", adapters.ADAPTERS)
    sizes = (Size(16, 16, 2, 10), Size(32, 32, 2, 10))
    monkeypatch.setattr(Settings, "of", classmethod(lambda cls, preset: replace(QUICK, forward_sizes=sizes)))
    threads = torch.get_num_threads()
    for _ in range(2):
        assert run_tables({"forward": "matched:forward"}, threads=threads, preset="smoke", out=tmp_path) == 0
    done = CliRunner().invoke(main, ["plot", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (image,) = tmp_path.glob("*.png")
    assert image.read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "bench-summary.txt").read_text()
    assert text.count("torch_tiles") == 2  # the last run of each size
    assert "10 iterations" in text


def test_the_reference_at_a_state_is_ours_in_float64() -> None:
    task = make_task(20, 14, 3, CONVERGED)
    exact = truth_of(task.problem)
    judge = Judge(task)
    product = exact.hessian("x") @ task.vectors[0].double().numpy().ravel()
    assert judge.product("x first").ravel() == pytest.approx(product, abs=1e-9 * np.abs(product).max())
    assert judge.truth("geomloss", gradient=True).gradient("x").numpy() == pytest.approx(
        exact.gradient("x"), abs=1e-9
    )


def test_a_bad_reference_is_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(problem: OTProblem, **options: object) -> object:
        return sinkhorn(problem, tol=0, max_iter=2)

    monkeypatch.setattr("ot_newton.experiments.bench.cases.sinkhorn", early)
    with pytest.raises(ArithmeticError, match="marginal error"):
        Judge(make_task(20, 14, 3, CONVERGED)).truth("x first")


def test_a_job_keeps_its_answer_and_names_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ours, "forward", lambda task, kind: Job(lambda: 1, lambda out: {"f": out, "kind": kind})
    )
    job = find("cpu").prepare("forward", make_task(4, 3, 2, COUNT))
    assert job.answer(job.run()) == {"scheme": "x first", "f": 1, "kind": "cpu"}
