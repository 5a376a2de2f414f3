"""The studies `io-model` and `ablation`: counts by hand, fits, machine code, Nsight Compute's driver."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from ot_newton.backends.triton_kernels.aot import Loop
from ot_newton.backends.triton_kernels.steps import executed
from ot_newton.cli import main
from ot_newton.experiments import ablation, io_model
from ot_newton.experiments.bench import nsight
from ot_newton.experiments.bench.child import Child, child, close_children
from ot_newton.experiments.bench.launches import OperationCounter
from ot_newton.experiments.io_model import Config, fit, implied

STUDY = {"io-model": io_model, "ablation": ablation}


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Iterator[tuple[Path, dict[str, Result]]]:
    """Both studies; their child processes are kept for the other tests: importing Triton takes seconds."""
    folder = tmp_path_factory.mktemp("smoke")
    with pytest.MonkeyPatch.context() as patch:
        for module in STUDY.values():
            patch.setattr(module, "finish", lambda: None)
        done = {name: call("run", name, "--smoke", "--jobs", 1, "--out", folder) for name in STUDY}
    yield folder, done
    close_children()


@pytest.fixture(scope="module")
def counted(smoke) -> list[dict]:
    return rows(smoke[0] / "io-model.jsonl")


@pytest.fixture(scope="module")
def ablated(smoke) -> list[dict]:
    return rows(smoke[0] / "ablation.jsonl")


# ---- both studies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUDY)
def test_smoke_from_a_plain_shell(smoke, name):
    folder, done = smoke
    assert done[name].exit_code == 0, done[name].output
    found = rows(folder / f"{name}.jsonl")
    for row in found:
        assert row["status"] in ("COUNTED", "SKIPPED")
        assert {"versions", "precision", "stopping_rule", "settings", "load_average", "success"} <= set(row)
        assert row["status"] == "SKIPPED" or row["versions"]["triton"][0].isdigit()
    assert list(folder.glob(f"{name}-*.png"))
    assert (folder / f"{name}-summary.txt").stat().st_size > 200


@pytest.mark.parametrize("name", STUDY)
def test_a_rerun_counts_nothing_again_and_plot_needs_rows_alone(smoke, name, monkeypatch, tmp_path):
    folder, _ = smoke
    before = (folder / f"{name}.jsonl").read_bytes()
    monkeypatch.setattr(STUDY[name], "run_one", lambda task: pytest.fail("counted again"))
    monkeypatch.setattr(STUDY[name], "finish", lambda: None)
    assert call("run", name, "--smoke", "--jobs", 1, "--out", folder).exit_code == 0
    assert (folder / f"{name}.jsonl").read_bytes() == before
    shutil.copy(folder / f"{name}.jsonl", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)  # a machine without triton
    assert call("plot", tmp_path).exit_code == 0
    assert {p.name for p in tmp_path.glob("*.png")} == {p.name for p in folder.glob(f"{name}-*.png")}


@pytest.mark.parametrize("name", STUDY)
def test_without_triton_there_is_one_message(name, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    done = call("run", name, "--smoke", "--out", tmp_path)
    assert done.exit_code == 2
    (line,) = [line for line in done.output.splitlines() if line.startswith("Error:")]
    assert f"{name} needs the package triton, which exists for Linux only" in line
    assert not (tmp_path / f"{name}.jsonl").exists()


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Config, {"dims": (24,)}, "dims must be one of 16, 32, 64, 128, got 24"),
        (Config, {"memory": (6000,)}, "memory must be powers of 2 of at least 4 bytes, got 6000"),
        (Config, {"sizes": (0,)}, "sizes must be at least 1, got 0"),
        (Config, {"arch": 70}, "arch must be one of 80, 90, 100, got 70"),
        (ablation.Config, {"precisions": ("fp8",)}, "precisions must be one of .* got 'fp8'"),
        (ablation.Config, {"tiles": ("best",)}, "tiles must be one of .* got 'best'"),
    ],
)
def test_bad_settings_are_named(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


# ---- the fit -------------------------------------------------------------------------------------------


def made(exponents: dict[str, float], noise: float = 0.0) -> list[dict[str, float]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for n in (100, 300):
        for m in (100, 700):
            for d in (16, 64, 128):
                for memory in (4096, 65536):
                    row = {"n": n, "m": m, "d": d, "M": memory}
                    value = 7.0 * math.prod(row[name] ** power for name, power in exponents.items())
                    factor = 1.0 + noise * (2.0 * float(torch.rand((), generator=generator)) - 1.0)
                    found.append(row | {"bytes": value * factor})
    return found


def test_the_fit_recovers_known_exponents():
    known = {"n": 1.0, "m": 1.25, "d": 2.0, "M": -0.75}
    exact = fit(made(known), "bytes", ("n", "m", "d", "M"))
    assert exact.exponents == pytest.approx(known, abs=1e-10)
    assert exact.constant == pytest.approx(7.0)
    assert exact.residual < 1e-10
    noisy = fit(made(known, noise=0.1), "bytes", ("n", "m", "d", "M"))
    assert noisy.exponents == pytest.approx(known, abs=0.05)
    assert 0.01 < noisy.residual < 0.3


def test_a_fit_without_variation_is_refused():
    same = [row for row in made({"n": 1.0}) if row["m"] == 100]
    with pytest.raises(ValueError, match="12 rows do not determine the exponents of n, m"):
        fit(same, "bytes", ("n", "m"))


def test_an_exponent_off_by_more_than_5_percent_is_not_passed():
    off = fit(made({"n": 1.0, "m": 1.0, "d": 1.8, "M": -1.0}), "bytes", ("n", "m", "d", "M"))
    assert io_model.deviation(off, "resident") == pytest.approx(0.1)


# ---- counts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "m", "d", "tile", "loaded", "stored"),
    [
        # q 3 x 16, its bias 3; one block of rows: k 5 x 16, biases and weights 5 x 2
        (3, 5, 16, (16, 16, 16), 4 * (48 + 3 + 80 + 10), 4 * 6),
        # two blocks of rows read k, biases and weights; q is read for each of three blocks of columns
        (17, 33, 2, (16, 16, 1), 4 * (3 * 34 + 17 + 2 * (66 + 66)), 4 * 34),
        # 20 coordinates are stored as 32, in two blocks
        (17, 33, 20, (16, 32, 16), 4 * (2 * 17 * 32 + 17 + 2 * (33 * 32 + 66)), 4 * 34),
    ],
)
def test_counts_equal_a_hand_count(smoke, n, m, d, tile, loaded, stored):
    shape = dict(zip(("block_m", "block_n", "block_d"), tile, strict=True))
    request = {"what": "half-iteration", "n": n, "m": m, "d": d, "precision": "ieee", "tile": shape}
    found = child(io_model.COUNTER, interpret=True).ask(request)
    assert (found["loaded"], found["stored"], found["launches"]) == (loaded, stored, 1)
    assert found["error_bits"] < 1e-5
    law = implied({"n": n, "m": m, "d": d, "tile": shape})
    assert (law["loaded"], law["stored"]) == (loaded, stored)


def test_every_count_is_what_the_tiling_implies(counted):
    assert {row["settings"]["design"] for row in counted} == {"resident", "blocked", "shipped"}
    for row in counted:
        assert row["moved"] == row["implied"], row["label"]
        assert row["compulsory"] <= row["moved"]


@pytest.mark.parametrize("design", io_model.EXPECTED)
def test_exponents_are_within_5_percent_of_the_model(counted, design):
    chosen = [row for row in counted if row["settings"]["design"] == design]
    found = fit(chosen, "dominating", ("n", "m", "d", "M"))
    assert io_model.deviation(found, design) <= 0.05
    assert found.residual <= 0.05


def test_a_wrong_result_is_no_count(monkeypatch):
    class Liar:
        def ask(self, request: dict) -> dict:
            return {"loaded": 1, "stored": 1, "launches": 1, "error_bits": 0.5, "triton": "0"}

    monkeypatch.setattr(io_model, "child", lambda *a, **k: Liar())
    row = io_model.run_one(io_model.build(Config(**io_model.SMOKE))[0])
    assert (row["status"], row["success"]) == ("WRONG", False)
    assert "off by 5.0e-01 bits" in row["message"]
    assert io_model.tables([row | {"settings": {"design": "resident"}}]) == []


# ---- launches ------------------------------------------------------------------------------------------


def test_operations_are_counted_with_their_bytes():
    a, b = torch.ones(10, 10), torch.ones(10)
    with OperationCounter() as counter:
        torch.empty(1000)
        c = a.mT + b[None, :].expand(10, 10)
        c.exp_()
        float(c.sum())
    assert counter.launches == {"add": 1, "exp_": 1, "sum": 1}
    assert counter.moved == 4 * ((100 + 10 + 100) + (100 + 100) + (100 + 1))
    assert counter.syncs == 1


def test_a_fused_half_iteration_is_one_kernel(ablated):
    found = {(row["settings"]["pipeline"], row["settings"]["n"]): row for row in ablated if "syncs" in row}
    ours = found["triton", 64]
    assert ours["triton_launches"] == 1
    assert ours["operations"] == {"neg": 1, "where": 1}
    assert ours["syncs"] == 0
    law = implied(ours["settings"] | {"m": 64})
    elementwise = 4 * 2 * 64 + (1 + 4 * 3 * 64)
    assert ours["bytes"] == law["loaded"] + law["stored"] + elementwise
    for (pipeline, n), row in found.items():
        if n == 64:
            assert row["potential"] == pytest.approx(ours["potential"], abs=2e-5), pipeline
        if pipeline.startswith("unfused"):
            assert row["other_launches"] == 10
            assert row["bytes"] >= 7 * 4 * n * n
    assert found["torch_tiles", 64]["other_launches"] > 10


# ---- machine code --------------------------------------------------------------------------------------


def test_plain_products_are_d_multiply_adds_and_tensor_cores_do_the_same_work(ablated):
    found = [row for row in ablated if "per_pair" in row]
    assert {row["precision"] for row in found} == {"ieee", "tf32"}
    for row in found:
        per_pair, d = row["per_pair"], row["settings"]["d"]
        assert per_pair["exp2"] == 1
        assert row["spills"] == 0
        if row["precision"] == "ieee":
            assert per_pair["fma"] == d + 1  # and the weight
            assert per_pair["tensor_core"] == 0
        else:
            assert per_pair["fma"] == 1
            # one HMMA of a warp: 16 x 8 pairs, 8 coordinates
            assert per_pair["tensor_core"] == pytest.approx(d * 32 / (16 * 8 * 8))
    issued = {
        (r["precision"], r["settings"]["tile"], r["settings"]["d"]): r["per_pair"]["issued"] for r in found
    }
    assert issued["tf32", "common", 16] < issued["ieee", "common", 16] / 2


@pytest.mark.parametrize(("peeled", "products"), [(0, 4 * 2), (1, 2 + 3 * 2)])
def test_an_inner_loop_counts_by_its_trips_less_what_was_peeled_off(peeled, products):
    wait = [("SYNCS", -1), ("BRA", 0)]
    inner = [("HMMA.1688", -1), ("HMMA.1688", -1), ("BRA", 0)]
    code = [("MOV", -1), ("MUFU.EX2", -1), *[("HMMA.1688", -1)] * (2 * peeled)]
    for block in (wait, inner):
        start = len(code)
        code += [(name, start if name == "BRA" else -1) for name, _ in block]
    code += [("FFMA", -1), ("BRA", 1), ("EXIT", -1)]
    sweep = Loop(Counter(name for name, _ in code[1:-1]))
    total, looped = executed(code, sweep, 4)
    assert looped
    assert total["HMMA.1688"] == products
    assert (total["MUFU.EX2"], total["FFMA"], total["SYNCS"]) == (1, 1, 1)
    assert total["BRA"] == 1 + 1 + (4 - peeled)


def test_a_sweep_without_an_inner_loop_counts_as_it_stands():
    code = [("MUFU.EX2", -1), ("FFMA", -1), ("BRA", 0)]
    total, looped = executed(code, Loop(Counter(name for name, _ in code)), 4)
    assert not looped
    assert total == {"MUFU.EX2": 1, "FFMA": 1, "BRA": 1}


# ---- child processes -----------------------------------------------------------------------------------


def test_a_child_that_dies_is_named_and_replaced(tmp_path, monkeypatch):
    (tmp_path / "brittle.py").write_text(
        "import os, sys\n"
        "from ot_newton.experiments.bench.child import serve\n"
        "def answer(request):\n"
        "    if request['what'] == 'die': sys.exit('no memory')\n"
        "    print('noise')\n"
        "    return {'sum': request['a'] + 1, 'interpret': os.environ['TRITON_INTERPRET']}\n"
        "serve(answer)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    try:
        assert child("brittle", interpret=False).ask({"what": "add", "a": 1}) == {"sum": 2, "interpret": "0"}
        with pytest.raises(RuntimeError, match="TypeError"):
            child("brittle", interpret=False).ask({"what": "add", "a": "1"})
        with pytest.raises(RuntimeError, match="the child process brittle ended: no memory"):
            child("brittle", interpret=False).ask({"what": "die"})
        assert child("brittle", interpret=False).ask({"what": "add", "a": 2})["sum"] == 3
    finally:
        close_children()


def test_a_study_ends_its_children(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(io_model, "finish", lambda: ended.append(True))
    monkeypatch.setattr(io_model, "run_one", lambda task: {"status": "COUNTED", "message": ""})
    call("run", "io-model", "--smoke", "--jobs", 1, "--out", tmp_path)
    assert rows(tmp_path / "io-model.jsonl")
    assert ended == [True]


def test_a_module_that_does_not_start_is_an_error():
    broken = Child("ot_newton.nowhere", interpret=True)
    with pytest.raises(RuntimeError, match="No module named"):
        broken.ask({})
    broken.close()


# ---- Nsight Compute ------------------------------------------------------------------------------------

DETAILS = """==PROF== Connected
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name"
"0","lse_kernel","Command line profiler metrics","dram__bytes.sum","byte","1,234",""
"0","lse_kernel","LaunchStats","Registers Per Thread","register/thread","128",""
"0","lse_kernel","LaunchStats","","","","SomeRule"
"""
CALL = {"n": 1024, "d": 64, "precision": "tf32"}


def test_the_command_line_profiles_one_launch_with_every_section(tmp_path):
    line = nsight.command(**CALL, report=tmp_path / "r")
    assert line[0] == "ncu"
    sections = [line[k + 1] for k, part in enumerate(line) if part == "--section"]
    assert tuple(sections) == nsight.SECTIONS
    assert line[line.index("--launch-count") + 1] == "1"
    assert line[line.index("--kernel-name") + 1] == "regex:lse_kernel"
    target = line[line.index(sys.executable) :]
    assert target[1:4] == ["-m", nsight.MODULE, "--target"]
    assert target[4:] == ["--n", "1024", "--d", "64", "--precision", "tf32"]
    with pytest.raises(ValueError, match="precision must be one of"):
        nsight.command(n=8, d=2, precision="fp8", report=tmp_path)


def test_nothing_to_profile_with_is_said_and_is_no_error(ablated, tmp_path, monkeypatch):
    skipped = [row for row in ablated if row["settings"]["study"] == "nsight"]
    assert [row["status"] for row in skipped] == ["SKIPPED", "SKIPPED"]
    assert all("no CUDA device" in row["message"] and row["command"][0] == "ncu" for row in skipped)
    done = CliRunner().invoke(nsight.main, ["--out", str(tmp_path)])
    assert done.exit_code == 0
    assert "not profiled: no CUDA device" in done.output
    assert "--section SpeedOfLight" in done.output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nsight.unavailable().startswith("ncu is not on PATH")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert nsight.unavailable() == "triton is not installed"


def fake_ncu(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = folder / "ncu"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_with_a_gpu_and_ncu_the_metrics_are_in_the_row(tmp_path, monkeypatch):
    (tmp_path / "details.csv").write_text(DETAILS)
    body = f'echo "$@" >> {tmp_path}/calls\n[ "$1" = --import ] && cat {tmp_path}/details.csv\nexit 0'
    fake_ncu(tmp_path, body, monkeypatch)
    row = nsight.profile(**CALL, out=tmp_path)
    assert row["status"] == "PROFILED"
    assert [one["metric"] for one in row["metrics"]] == ["dram__bytes.sum", "Registers Per Thread"]
    assert nsight.summary(row) == "dram__bytes.sum 1,234 byte"
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first == " ".join(row["command"][1:])
    assert second.startswith(f"--import {row['report']}")


def test_a_refusal_of_ncu_is_reported(tmp_path, monkeypatch):
    fake_ncu(tmp_path, "echo '==ERROR== ERR_NVGPUCTRPERM - no permission'\nexit 1", monkeypatch)
    with pytest.raises(RuntimeError, match="status 1: ==ERROR== ERR_NVGPUCTRPERM"):
        nsight.profile(**CALL, out=tmp_path)
    done = CliRunner().invoke(nsight.main, ["--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "ERR_NVGPUCTRPERM" in done.output
