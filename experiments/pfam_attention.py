"""Sinkhorn attention trained on pairs of aligned protein sequences: four configurations on one family.

Reconstruction, the loss, is the cross-entropy of A's residues predicted from the attended embedding of B (see
`pfam_model` for what the readout may know). Sparse CE, the mean of `-log` of the row-normalized coupling over
aligned pairs of residues, is logged and never trained on. Both are measured on pairs of held-out sequences.
The deterministic diagonal and two other references that need no training stand in the same table.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ot_newton.errors import check_choice, check_integer, check_number
from ot_newton.experiments.pfam_data import FAMILIES, find_alignment, read_alignment
from ot_newton.experiments.pfam_pairs import Family, draw_pairs, held_out_pairs, make_family, references
from ot_newton.experiments.runs import Row, Task, check_folder, load_average

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Config", "build", "describe", "plot", "prepare", "run_one", "tables"]

NAME = ROWS = "pfam-attention"
JOBS: int | None = 1  # runs are timed and use all cores
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "balanced, R=2": {"tail_steps": 2, "dustbin": None},
    "balanced, R=4": {"tail_steps": 4, "dustbin": None},
    "unit dustbin, R=2": {"tail_steps": 2, "dustbin": "unit"},
    "capacity dustbin, R=2": {"tail_steps": 2, "dustbin": "lengths"},
}
RECONSTRUCTION_TARGET = 0.6
SMOKE = {
    "family": "LuxC", "configurations": ("balanced, R=2",), "length": 32, "bandwidth": 8, "base_steps": 4,
    "layers": 1, "width": 16, "steps": 4, "batch": 2, "eval_pairs": 4, "eval_every": 2,
}  # fmt: skip
PACKAGES = ("jax", "optax", "pyhmmer")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to run.

    Attributes:
        family: "fn3" or "Pkinase" (Debian's hmmer-doc) or "LuxC" (the pyhmmer wheel).
        alignment: path of a Stockholm file to use instead.
        cache: folder of downloaded families; `ot-newton` in the user's cache folder by default.
        fetch: whether a missing family may be downloaded by `apt-get`.
        configurations: of "balanced, R=2", "balanced, R=4", "unit dustbin, R=2", "capacity dustbin, R=2".
        length: L, residues of a crop.
        bandwidth: W.
        base_steps: T, stopped Sinkhorn steps.
        layers: Sinkhorn-attention layers, the last of which couples A with B.
        heads: of every layer.
        width: of the embedding; even, a multiple of heads.
        contrast: largest content score.
        hidden: share of A's residues that a query does not see in training.
        backend: as in `sinkhorn_attention`.
        steps: training steps.
        batch: pairs in a step.
        lr: largest step size; a cosine takes it to 0.
        held_out: share of sequences set aside.
        eval_pairs: held-out pairs that are measured.
        eval_every: steps between measurements.
        checkpoint_every: steps between checkpoints.
        seed: of split, pairs and parameters.
    """

    family: str = "fn3"
    alignment: str | None = None
    cache: str | None = None
    fetch: bool = True
    configurations: tuple[str, ...] = tuple(CONFIGURATIONS)
    length: int = 128
    bandwidth: int = 32
    base_steps: int = 15
    layers: int = 2
    heads: int = 2
    width: int = 64
    contrast: float = 2.0
    hidden: float = 0.5
    backend: str = "auto"
    steps: int = 600
    batch: int = 8
    lr: float = 3e-3
    held_out: float = 0.2
    eval_pairs: int = 64
    eval_every: int = 50
    checkpoint_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate before any work.

        Raises:
            ValueError: a value out of range, naming it; TypeError: of the wrong kind.
        """
        if self.alignment is None:
            check_choice("family", self.family, tuple(FAMILIES))
        for name in self.configurations:
            check_choice("configurations", name, tuple(CONFIGURATIONS))
        for name in (
            "length", "layers", "heads", "width", "steps", "batch", "eval_pairs", "eval_every",
            "checkpoint_every",
        ):  # fmt: skip
            check_integer(name, getattr(self, name), low=1)
        for name in ("bandwidth", "base_steps", "seed"):
            check_integer(name, getattr(self, name))
        check_number("contrast", self.contrast)
        check_number("lr", self.lr)
        check_number("hidden", self.hidden, high=1.0, strict=False)
        check_number("held_out", self.held_out, high=1.0)
        check_choice("backend", self.backend, ("auto", "reference", "banded", "pallas"))
        if self.width % self.heads or self.width % 2:
            raise ValueError(f"width must be even and a multiple of heads={self.heads}, got {self.width}")


MODEL_SETTINGS = (
    "length", "bandwidth", "base_steps", "layers", "heads", "width", "contrast", "hidden", "backend", "steps",
    "batch", "lr", "held_out", "eval_pairs", "eval_every", "checkpoint_every", "seed",
)  # fmt: skip
DATA_SETTINGS = ("length", "bandwidth", "held_out", "eval_pairs", "seed")


def build(config: Config, family: Family) -> list[Task]:
    """The references, then one run per configuration."""
    data = {"experiment": NAME, "family": family.alignment.name, "data": family.alignment.digest}
    shared = {name: getattr(config, name) for name in MODEL_SETTINGS}
    tasks = [
        Task("references", {**data, "study": "references", **{name: shared[name] for name in DATA_SETTINGS}})
    ]
    for name in config.configurations:
        settings = {**data, "study": "model", "configuration": name, **shared, **CONFIGURATIONS[name]}
        tasks.append(Task(name, settings))
    return tasks


def run_one(task: Task) -> Row:
    """The references, or one training run; the payload is the family and the folder of checkpoints."""
    family, folder = task.payload
    s = task.settings
    if s["study"] == "references":
        return _reference_row(family, task)
    from ot_newton.experiments.pfam_train import train

    checkpoint = Path(folder) / f"{NAME}-{task.key}.npz"
    found = train(family, s, checkpoint)
    curves = found["curves"]
    ratio = curves["reconstruction"][-1] / curves["reconstruction"][0]
    change = curves["sparse"][-1] - curves["sparse"][0]
    met = found["finite"] and ratio <= RECONSTRUCTION_TARGET and change <= 0
    message = (
        f"held-out reconstruction {ratio:.2f}x step 0 (target {RECONSTRUCTION_TARGET:g}), "
        f"sparse CE {change:+.2f} (target 0)"
    )
    if not found["finite"]:
        message = f"the loss was not finite at step {len(curves['train'])}: lower lr or contrast"
    return {
        "precision": "float32",
        "stopping_rule": f"{s['steps']} steps of Adam, cosine schedule from {s['lr']:g}",
        "status": "FINISHED" if found["finite"] else "NOT_FINITE",
        "success": met,
        "message": message,
        "load_average": load_average(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "ratio": ratio,
        "sparse_change": change,
        "examples_per_second": s["batch"] * found["timed_steps"] / found["step_seconds"]
        if found["timed_steps"]
        else None,
        "checkpoint": checkpoint.name,
        **found,
    }


def _reference_row(family: Family, task: Task) -> Row:
    s = task.settings
    held_out = held_out_pairs(family, s)
    found = references(family, held_out, bandwidth=s["bandwidth"], seed=s["seed"])
    return {
        "precision": "float64",
        "stopping_rule": "counted, not trained",
        "status": "FINISHED",
        "success": True,
        "message": f"{len(family.train)} training, {len(family.held_out)} held-out sequences; "
        f"aligned residues: {found['uniform']['pairs']} in the band, {found['uniform']['outside']} outside",
        "load_average": load_average(),
        "references": found,
    }


def prepare(config: Config, folder: Path) -> list[Task]:
    """The tasks, with the family; a checkpoint per run lies in the folder, from which a rerun goes on.

    Raises:
        ValueError: a missing package, no alignment or too short a one.
    """
    _check_packages()
    path = find_alignment(config.family, alignment=config.alignment, cache=config.cache, fetch=config.fetch)
    family = make_family(read_alignment(path), held_out=config.held_out, seed=config.seed)
    for pool in (family.train, family.held_out):  # too narrow a band is an error now, not in every row
        draw_pairs(family, pool, 1, length=config.length, bandwidth=config.bandwidth, seed=(config.seed,))
    return [replace(task, payload=(family, str(folder))) for task in build(config, family)]


def _check_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{NAME} needs {' and '.join(missing)}: pip install 'ot-newton[pfam]'")


def describe(row: Row) -> str:
    """A line for the progress bar."""
    return f"{row['label']}: {row['status']}, {row['message']}"


COLUMNS = (
    "run", "recon. 0", "recon.", "ratio", "own hidden", "sparse 0", "sparse", "hit", "offset", "dustbin",
    "ex/s", "s", "cpu s", "met",
)  # fmt: skip


def tables(rows: Sequence[Row]) -> list[Table]:
    """Held-out measurements of every run, and of the references, for a rich console."""
    from rich.table import Table

    made = []
    for family in dict.fromkeys(row["settings"]["family"] for row in rows):
        table = Table(
            title=f"{NAME}: {family}, held-out pairs (nats per residue)",
            title_justify="left",
            caption="own hidden: at residues that the query does not see; sparse: CE at aligned pairs",
        )
        for name in COLUMNS:
            table.add_column(name, no_wrap=True, justify="left" if name == "run" else "right")
        for row in rows:
            if row["settings"]["family"] == family:
                for cells in _cells(row):
                    table.add_row(*cells)
        made.append(table)
    return made


def _cells(row: Row) -> list[list[str]]:
    """The table's lines of one row."""
    if "references" in row:
        lines = []
        for name, found in row["references"].items():
            head = [f"reference: {name}", "", f"{found['reconstruction']:.2f}", "", "", ""]
            lines.append(
                [*head, f"{found['sparse']:.2f}", f"{found['hit']:.2f}", f"{found['offset']:.1f}", *[""] * 5]
            )
        return lines
    if "curves" not in row:
        return [[row["label"], *[""] * (len(COLUMNS) - 2), row["status"]]]
    curves, speed = row["curves"], row["examples_per_second"]
    return [
        [
            row["label"],
            f"{curves['reconstruction'][0]:.2f}",
            f"{curves['reconstruction'][-1]:.2f}",
            f"{row['ratio']:.2f}",
            f"{curves['hidden'][-1]:.2f}",
            f"{curves['sparse'][0]:.2f}",
            f"{curves['sparse'][-1]:.2f}",
            f"{curves['hit'][-1]:.2f}",
            f"{curves['offset'][-1]:.1f}",
            f"{curves['dustbin'][-1]:.2f}",
            "" if speed is None else f"{speed:.0f}",
            f"{row['seconds']:.0f}",
            f"{row['cpu_seconds']:.0f}",
            "yes" if row["success"] else "no",
        ]
    ]


def plot(rows: Sequence[Row], out: str | Path = "results") -> list[Path]:
    """Held-out curves and, per run, the coupling of one held-out pair; from rows alone."""
    from ot_newton.experiments.attention_plots import plot_couplings, plot_curves

    folder = check_folder("out", out)
    paths = []
    for family in dict.fromkeys(row["settings"]["family"] for row in rows):
        own = [row for row in rows if row["settings"]["family"] == family]
        trained = [row for row in own if "curves" in row]
        known: Row = next((row["references"] for row in own if "references" in row), {})
        if trained:
            paths.append(plot_curves(trained, known, folder / f"{NAME}-{family}-curves.png"))
            paths.append(plot_couplings(trained, folder / f"{NAME}-{family}-couplings.png"))
    return paths
