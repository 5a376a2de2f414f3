"""The attention's studies: real and made families, training that resumes, exactness against torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from click.testing import CliRunner, Result

from ot_newton.cli import main
from ot_newton.experiments import pfam_attention, pfam_data, tail_exactness
from ot_newton.experiments.pfam_data import Alignment, find_alignment, read_alignment
from ot_newton.experiments.pfam_pairs import (
    HIDDEN,
    LETTERS,
    Pairs,
    alignment_metrics,
    draw_pairs,
    held_out_pairs,
    make_family,
    mean_cross_entropy,
    references,
)
from ot_newton.experiments.registry import make_config
from tests import attention_truth
from tests.attention_truth import Problem

STUDY = {"pfam-attention": pfam_attention, "tail-exactness": tail_exactness}
STOCKHOLM = """# STOCKHOLM 1.0
#=GF ID   tiny
one/1-5     AC.DEf
two/3-6     ACG.-W
three/2-7   .XGDEF
four/2-7    AXGDEF
//
"""
SMALL = {
    "length": 24, "bandwidth": 6, "base_steps": 4, "layers": 1, "heads": 2, "width": 16, "steps": 90,
    "lr": 2e-2, "batch": 8, "eval_pairs": 8, "eval_every": 45, "checkpoint_every": 30, "held_out": 0.25,
}  # fmt: skip


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def made_family(count: int = 16, columns: int = 24) -> Alignment:
    """Mutated copies of one sequence, with gaps: as related as the families are."""
    rng = np.random.default_rng(1)
    ancestor = rng.integers(0, 20, columns)
    texts = []
    for _ in range(count):
        own = np.where(rng.random(columns) < 0.5, rng.integers(0, 20, columns), ancestor)
        gaps = rng.random(columns) < 0.06
        texts.append("".join("." if gap else LETTERS[x] for x, gap in zip(own, gaps, strict=True)))
    return Alignment("made", tuple(f"s{k}" for k in range(count)), tuple(texts))


# ---- finding and reading families ----------------------------------------------------------------------


def test_a_stockholm_file_is_read_and_its_pairs_are_those_of_its_columns(tmp_path):
    (tmp_path / "tiny.sto").write_text(STOCKHOLM)
    found = read_alignment(find_alignment("fn3", alignment=str(tmp_path / "tiny.sto")))
    assert found.name == "tiny"
    assert found.names == ("one/1-5", "two/3-6", "three/2-7", "four/2-7")
    family = make_family(found, held_out=0.5, seed=0)
    assert sorted([*family.train, *family.held_out]) == [0, 1, 2, 3]
    assert ["".join((LETTERS + "X")[x] for x in one) for one in family.residues] == [
        "ACDEF", "ACGW", "XGDEF", "AXGDEF",
    ]  # fmt: skip
    assert family.columns[1].tolist() == [0, 1, 2, 5]
    pool = np.array([0, 1])
    for seed in range(4):
        pairs = draw_pairs(family, pool, 1, length=8, bandwidth=4, seed=(seed,))
        first, second = pairs.names[0]
        # columns 0, 1 and 5 hold residues of both
        assert pairs.partner[0].tolist() == (
            [0, 1, -1, -1, 3, -1, -1, -1] if first == 0 else [0, 1, -1, 4] + [-1] * 4
        )
        assert (pairs.n[0], pairs.m[0]) == (len(family.residues[first]), len(family.residues[second]))
    assert pairs.scored.sum() == pairs.n[0]


def test_another_text_or_an_empty_file_is_one_error_with_its_name(tmp_path):
    for text in ("hello\nworld\n", ""):
        (tmp_path / "bad.sto").write_text(text)
        with pytest.raises(ValueError, match="bad.sto: (not a Stockholm alignment|expected an alignment)"):
            read_alignment(tmp_path / "bad.sto")


def test_the_order_of_the_look_up(tmp_path, monkeypatch):
    monkeypatch.setattr(pfam_data, "TUTORIAL", Path("nowhere/in/particular"))
    calls = []

    def packaged(command: list[str], folder: str) -> None:
        calls.append(command[0])
        if command[0] == "apt-get":
            (Path(folder) / "hmmer-doc_1_all.deb").write_text("")
        else:
            inside = Path(folder) / "files" / pfam_data.TUTORIAL
            inside.mkdir(parents=True)
            (inside / "fn3.sto").write_text(STOCKHOLM)

    monkeypatch.setattr(pfam_data, "_run", packaged)
    monkeypatch.setattr(pfam_data.shutil, "which", lambda tool: f"/bin/{tool}")
    with pytest.raises(ValueError, match="'fn3' is not on this machine.*switched off"):
        find_alignment("fn3", cache=str(tmp_path), fetch=False)
    found = find_alignment("fn3", cache=str(tmp_path))
    assert found.read_text() == STOCKHOLM
    assert calls == ["apt-get", "dpkg-deb"]
    assert find_alignment("fn3", cache=str(tmp_path), fetch=False) == found
    with pytest.raises(ValueError, match="its folder has no Pkinase.sto"):
        find_alignment("Pkinase", cache=str(tmp_path))
    own = tmp_path / "own.sto"
    own.write_text(STOCKHOLM)
    assert find_alignment("fn3", alignment=str(own), cache=str(tmp_path)) == own


def test_what_is_missing_is_said_in_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(pfam_data, "TUTORIAL", Path("nowhere/in/particular"))
    monkeypatch.setattr(pfam_data.shutil, "which", lambda tool: None)
    with pytest.raises(ValueError, match=r"install Debian's package hmmer-doc, or set alignment.*no apt-get"):
        find_alignment("fn3", cache=str(tmp_path))
    monkeypatch.setattr(pfam_data.shutil, "which", lambda tool: f"/bin/{tool}")

    def refused(command: list[str], folder: str) -> None:
        raise subprocess.CalledProcessError(
            100, command, stderr="W: old\nE: Unable to locate package hmmer-doc\n"
        )

    monkeypatch.setattr(pfam_data, "_run", refused)
    with pytest.raises(ValueError, match="apt-get download hmmer-doc failed: E: Unable to locate package"):
        find_alignment("fn3", cache=str(tmp_path))
    monkeypatch.setattr(pfam_data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'LuxC' is not on this machine: pyhmmer is not installed"):
        find_alignment("LuxC")


BAD = {
    "family = 'globins'\n": "family must be one of 'fn3', 'Pkinase', 'LuxC', got 'globins'",
    "configurations = ['R=3']\n": "configurations must be one of 'balanced, R=2'",
    "heads = 3\n": "width must be even and a multiple of heads=3, got 64",
    "hidden = 1.5\n": "hidden must be a finite number in [0, 1], got 1.5",
    "steps = 0\n": "steps must be at least 1, got 0",
    "alignment = 'nowhere.sto'\n": "alignment must be the path of a Stockholm file, got nowhere.sto",
    "alignment = 'uneven.sto'\nbandwidth = 1\n": "lengths of pairs must differ by at most bandwidth=1",
    "alignment = 'few.sto'\n": "few: pairs on both sides of a split need 4 sequences, got 3",
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_bad_settings_are_one_error_before_any_run(tmp_path, monkeypatch, text):
    monkeypatch.setattr(pfam_attention, "run_one", lambda task: pytest.fail("a run was started"))
    monkeypatch.chdir(tmp_path)
    for name, lengths in {"uneven": (2, 5, 8, 11), "few": (5, 5, 5)}.items():
        lines = [f"s{n}{k} {'A' * n}{'.' * (11 - n)}" for k, n in enumerate(lengths)]
        (tmp_path / f"{name}.sto").write_text("\n".join(["# STOCKHOLM 1.0", *lines, "//", ""]))
    (tmp_path / "c.toml").write_text(text)
    done = call("run", "pfam-attention", "--config", tmp_path / "c.toml", "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert BAD[text] in " ".join(done.output.split())
    assert not (tmp_path / "out" / "pfam-attention.jsonl").exists()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pfam_attention, "PACKAGES", ("jax", "nonsense_package"))
    with pytest.raises(
        ValueError, match=r"pfam-attention needs nonsense_package: pip install 'ot-newton\[pfam\]'"
    ):
        pfam_attention.prepare(pfam_attention.Config(), tmp_path)


def test_listing_and_plotting_import_neither_jax_nor_pyhmmer():
    code = (
        "import sys\nfrom ot_newton.experiments.registry import STUDIES\n"
        "for name in ('pfam-attention', 'tail-exactness'): STUDIES[name].load()\n"
        "print({'jax', 'optax', 'pyhmmer', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- measurements --------------------------------------------------------------------------------------


def test_sparse_ce_is_the_mean_log_of_normalized_rows_at_partners_inside_the_band():
    rng = np.random.default_rng(0)
    plan = rng.random((2, 4, 4))
    partner = np.array([[0, 2, -1, 3], [1, -1, 0, -1]])
    codes = np.zeros((2, 4), np.int32)
    pairs = Pairs(codes, codes, np.array([4, 3]), np.array([4, 2]), partner, np.zeros((2, 2), int))
    found = alignment_metrics(plan, pairs, 1)
    # (1, 2, 0) lies outside the band of half-width 1, and B of the second pair has two residues
    places = [(0, 0, 0, 4), (0, 1, 2, 4), (0, 3, 3, 4), (1, 0, 1, 2)]
    values = [plan[k, i, j] / sum(plan[k, i, :m]) for k, i, j, m in places]
    assert found.sparse == pytest.approx(-np.mean(np.log(values)), rel=1e-12)
    assert (found.pairs, found.outside) == (4, 1)
    centres = [sum(plan[k, i, :m] * np.arange(m)) / sum(plan[k, i, :m]) - j for k, i, j, m in places]
    assert found.offset == pytest.approx(np.mean(np.abs(centres)), rel=1e-12)
    assert found.hit == np.mean([plan[k, i, :m].argmax() == j for k, i, j, m in places])
    table = np.log(np.full((2, 4, 20), 0.05))
    assert mean_cross_entropy(table, pairs) == pytest.approx(np.log(20))


def test_references_rank_as_they_must():
    family = make_family(made_family(60), held_out=0.25, seed=0)
    held_out = held_out_pairs(family, {"length": 24, "bandwidth": 6, "eval_pairs": 64, "seed": 0})
    found = references(family, held_out, bandwidth=6, seed=0)
    assert list(found) == ["uniform", "diagonal", "aligned"]
    assert 0 == found["aligned"]["sparse"] < found["diagonal"]["sparse"] < found["uniform"]["sparse"]
    assert (
        found["aligned"]["reconstruction"]
        < found["diagonal"]["reconstruction"]
        < found["uniform"]["reconstruction"]
    )
    assert found["uniform"]["reconstruction"] > 2.5
    assert not set(held_out.names.ravel()) & set(family.train)


# ---- training ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[dict, object, object, Path]:
    """A finished run on the made family, with its data."""
    from ot_newton.experiments.pfam_train import train

    folder = tmp_path_factory.mktemp("trained")
    config = make_config(pfam_attention.Config, SMALL, "test")
    family = make_family(made_family(), held_out=config.held_out, seed=config.seed)
    task = pfam_attention.build(config, family)[4]
    assert task.label == "capacity dustbin, R=2"
    return train(family, task.settings, folder / "run.npz"), family, task, folder


def test_training_learns_on_held_out_sequences(trained):
    found, *_ = trained
    curves = found["curves"]
    assert curves["step"] == [0, 45, 90]
    assert abs(curves["reconstruction"][0] - np.log(20)) < 0.3  # nothing known at step 0
    # 24 residues of B do not have every letter of A
    assert curves["reconstruction"][-1] < 0.75 * curves["reconstruction"][0]
    assert curves["sparse"][-1] < curves["sparse"][0]
    assert len(curves["train"]) == 90
    assert found["finite"]
    assert 0 < curves["dustbin"][-1] < 1


class _Stopped(Exception):
    pass


def test_an_interrupted_run_goes_on_to_the_same_numbers(trained, monkeypatch):
    from ot_newton.experiments import pfam_train

    whole, family, task, folder = trained
    real, steps = pfam_train._Run.advance, []

    def stopping(run: object, progress: object, *, timed: bool) -> float:
        steps.append(progress.step)
        if len(steps) == 50:
            raise _Stopped
        return real(run, progress, timed=timed)

    monkeypatch.setattr(pfam_train._Run, "advance", stopping)
    with pytest.raises(_Stopped):
        pfam_train.train(family, task.settings, folder / "cut.npz")
    resumed = pfam_train.train(family, task.settings, folder / "cut.npz")
    assert steps[50] == resumed["resumed_from"] == 30
    for name, values in whole["curves"].items():
        np.testing.assert_allclose(resumed["curves"][name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(resumed["plan"], whole["plan"], atol=2e-4)
    again = pfam_train.train(
        family, task.settings, folder / "cut.npz"
    )  # finished: measured again, not trained
    assert again["curves"] == resumed["curves"]
    assert len(steps) == 50 + 60


def test_a_file_that_is_no_checkpoint_is_named(trained):
    from ot_newton.experiments.pfam_train import train

    _, family, task, folder = trained
    (folder / "bad.npz").write_text("nonsense")
    with pytest.raises(ValueError, match="bad.npz: not a checkpoint of this run.*delete it"):
        train(family, task.settings, folder / "bad.npz")


def test_the_readout_sees_a_only_through_the_coupling(trained):
    """Letters of A that the query does not see change nothing; equal letters in B leave nothing to choose."""
    from ot_newton.experiments.pfam_model import _cross, initial_parameters

    _, family, task, _ = trained
    s = {**task.settings, "dustbin": None, "base_steps": 200}  # rows sum to one
    pairs = draw_pairs(family, family.train, 3, length=24, bandwidth=6, seed=(5,))
    parameters = initial_parameters(s)
    output = jax.jit(lambda pairs, hide: _cross(parameters, pairs, hide, s))

    def change(pairs: Pairs, hide: bool) -> float:
        """Largest change of the output as A's letters change."""
        other = pairs._replace(a=(pairs.a + 7) % 20)
        first, second = (output(x, np.full(pairs.a.shape, hide)) for x in (pairs, other))
        return float(np.abs(first - second)[pairs.scored].max())

    assert parameters["letters"].shape[0] == HIDDEN + 1
    assert change(pairs, hide=True) == 0
    assert change(pairs._replace(b=np.full_like(pairs.b, 3)), hide=False) < 1e-4
    assert change(pairs, hide=False) > 1e-2


def test_a_loss_that_is_not_finite_ends_the_run_and_says_so(trained, monkeypatch):
    from ot_newton.experiments import pfam_train

    _, family, task, folder = trained
    monkeypatch.setattr(pfam_train._Run, "advance", lambda run, progress, timed: float("nan"))
    row = pfam_attention.run_one(replace(task, payload=(family, str(folder))))
    assert (row["status"], row["success"]) == ("NOT_FINITE", False)
    assert "not finite at step 1: lower lr or contrast" in row["message"]


# ---- the studies from the command line -----------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[Path, dict[str, Result]]:
    folder = tmp_path_factory.mktemp("smoke")
    return folder, {name: call("run", name, "--smoke", "--jobs", 1, "--out", folder) for name in STUDY}


@pytest.mark.parametrize("name", STUDY)
def test_smoke_writes_rows_tables_and_figures_and_a_rerun_does_nothing(smoke, name, monkeypatch):
    folder, done = smoke
    assert done[name].exit_code == 0, done[name].output
    found = rows(folder / f"{name}.jsonl")
    for row in found:
        assert row["status"] in ("FINISHED", "EXACT")
        assert {"versions", "precision", "stopping_rule", "settings", "load_average", "success"} <= set(row)
    images = [line.split()[-1] for line in done[name].output.splitlines() if line.startswith("wrote")]
    assert images
    assert all(Path(image).read_bytes().startswith(b"\x89PNG") for image in images)
    monkeypatch.setattr(STUDY[name], "run_one", lambda task: pytest.fail("a finished run was redone"))
    assert call("run", name, "--smoke", "--jobs", 1, "--out", folder).exit_code == 0
    assert rows(folder / f"{name}.jsonl") == found
    assert name != "pfam-attention" or "reference: diagonal" in done[name].output


def test_plot_needs_the_rows_alone(smoke, tmp_path):
    folder, _ = smoke
    for name in STUDY:
        shutil.copy(folder / f"{name}.jsonl", tmp_path)
    done = call("plot", tmp_path)
    assert done.exit_code == 0, done.output
    for name in STUDY:
        assert (tmp_path / f"{name}-summary.txt").read_text() == (folder / f"{name}-summary.txt").read_text()
    assert {p.name for p in tmp_path.glob("*.png")} == {p.name for p in folder.glob("*.png")}


# ---- tail-exactness against torch ----------------------------------------------------------------------


def test_the_row_of_a_case_agrees_with_the_truth_of_the_tests(smoke):
    """Bias and limit by torch autograd of the recursion, stopped, whole and run to convergence."""
    from ot_newton.experiments.tail_measure import _problem

    folder, _ = smoke
    found = {row["settings"]["tail_steps"]: row for row in rows(folder / "tail-exactness.jsonl")}
    assert set(found) == {0, 2}
    s = found[2]["settings"]
    q, k, v, bar = (x[0] for x in _problem(s))
    ones, mask = np.ones(s["n"]), attention_truth.support(s["n"], s["n"], s["bandwidth"])
    scale = s["scale"] / s["d"] ** 0.5
    case = Problem(q, k, v, bar, ones, ones, mask, s["base_steps"], 2, scale)
    cut, whole = attention_truth.truth(case), attention_truth.truth(case, full=True)
    bias = np.linalg.norm((whole["scores"] - cut["scores"])[mask]) / np.linalg.norm(whole["scores"][mask])
    assert max(found[2]["bias"]) == pytest.approx(bias, rel=1e-9)
    far = attention_truth.truth(replace(case, base_steps=1500), full=True)
    gaps = [(cut[name] - far[name], far[name]) for name in ("q", "k")]
    distance = np.sqrt(sum(np.sum(x**2) for x, _ in gaps) / sum(np.sum(y**2) for _, y in gaps))
    assert found[2]["limit_error"] == pytest.approx(distance, rel=1e-6)
    for row in found.values():
        assert row["error_float64"] < 1e-12
        assert row["error_float32"] < 1e-5
        assert row["l1"][0] <= row["dobrushin_bound"][0] <= row["hilbert_bound"][0] * (1 + 1e-12)
    assert "R=2 is not enough for 0.01" in found[2]["message"]


def test_x64_is_left_as_it_was(smoke):
    assert jax.numpy.ones(1).dtype == np.float32
