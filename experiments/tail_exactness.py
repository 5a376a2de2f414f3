"""How exact the tail's gradient is, and how the bias of stopping the base decays with the depth R.

    exactness   the library's gradient against dense float64 autodiff of the same surrogate, on each backend
    bias        what stopping the base drops (`bias_certificate`), over the gradient of the whole recursion
    bounds      the remainder's l1 norm beside its Dobrushin and Hilbert bounds
    limit       the distance from the gradient of the fully converged attention

Cases differ in contraction: dense supports with flat to sharp scores, and bands, whose slow modes run along
the diagonal. Queries, keys, values and cotangents are Gaussian.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ot_newton.errors import check_choice, check_integer, check_number
from ot_newton.experiments.runs import Row, Task, check_folder, load_average, new_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Config", "build", "describe", "plot", "prepare", "run_one", "tables"]

NAME = ROWS = "tail-exactness"
JOBS: int | None = 1  # cases of one shape share compiled programs
CASES: dict[str, dict[str, Any]] = {
    "dense 24, scale 0.3": {"n": 24, "bandwidth": 24, "scale": 0.3},
    "dense 24, scale 1": {"n": 24, "bandwidth": 24, "scale": 1.0},
    "dense 24, scale 2": {"n": 24, "bandwidth": 24, "scale": 2.0},
    "band 128, W 32, scale 0.3": {"n": 128, "bandwidth": 32, "scale": 0.3},
    "band 128, W 32, scale 1": {"n": 128, "bandwidth": 32, "scale": 1.0},
    "band 128, W 32, scale 2": {"n": 128, "bandwidth": 32, "scale": 2.0},
    "band 24, W 5, scale 1": {"n": 24, "bandwidth": 5, "scale": 1.0},
    "band 128, W 32, scale 1, T 100": {"n": 128, "bandwidth": 32, "scale": 1.0, "base_steps": 100},
}
EXACT = 1e-12
SMOKE = {
    "cases": ("band 24, W 5, scale 1",), "depths": (0, 2), "backends": ("banded",), "problems": 1, "d": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """What to run.

    Attributes:
        cases: names of supports and scales; `CASES` has them.
        depths: tail depths R.
        backends: of "reference" (dense) and "banded".
        base_steps: T, where the case does not set it.
        problems: lanes of each case; the worst one counts.
        d: dimension of queries and values.
        tau: relative bias that counts as enough.
        seed: of the arrays, the same for every depth and backend.
    """

    cases: tuple[str, ...] = tuple(CASES)
    depths: tuple[int, ...] = (0, 1, 2, 4, 8)
    backends: tuple[str, ...] = ("reference", "banded")
    base_steps: int = 15
    problems: int = 3
    d: int = 16
    tau: float = 1e-2
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate before any work.

        Raises:
            ValueError: a value out of range, naming it; TypeError: of the wrong kind.
        """
        for case in self.cases:
            check_choice("cases", case, tuple(CASES))
        for backend in self.backends:
            check_choice("backends", backend, ("reference", "banded"))
        for depth in self.depths:
            check_integer("depths", depth)
        for name in ("base_steps", "problems", "d"):
            check_integer(name, getattr(self, name), low=1)
        check_integer("seed", self.seed)
        check_number("tau", self.tau)


def build(config: Config) -> list[Task]:
    """One row per case, backend and depth."""
    names = ("base_steps", "problems", "d", "tau", "seed")
    shared = {"experiment": NAME, **{name: getattr(config, name) for name in names}}
    return [
        Task(
            f"{case}, {backend}, R={depth}",
            {**shared, "case": case, **CASES[case], "backend": backend, "tail_steps": depth},
        )
        for case in config.cases
        for backend in config.backends
        for depth in config.depths
    ]


def run_one(task: Task) -> Row:
    """One row: gradients, remainder, bounds."""
    from ot_newton.experiments.tail_measure import measure

    s = task.settings
    found = measure(s)
    bounded = all(
        actual <= min(dobrushin, hilbert) * (1 + 1e-9)
        for actual, dobrushin, hilbert in zip(
            found["l1"], found["dobrushin_bound"], found["hilbert_bound"], strict=True
        )
    )
    exact = max(found["error_float64"], found["remainder_error"]) <= EXACT
    worst = max(found["bias"])
    enough = "enough" if worst <= s["tau"] else "not enough"
    return {
        "precision": "float64",
        "stopping_rule": f"T={s['base_steps']} stopped and R={s['tail_steps']} differentiated steps",
        "status": "EXACT" if exact and bounded else "INEXACT",
        "success": exact and bounded,
        "message": f"bias {worst:.1e}: R={s['tail_steps']} is {enough} for {s['tau']:g}",
        "load_average": load_average(),
        **found,
    }


def prepare(config: Config, folder: Path) -> list[Task]:
    """The tasks.

    Raises:
        ValueError: JAX is not installed.
    """
    if importlib.util.find_spec("jax") is None:
        raise ValueError(f"{NAME} needs jax: pip install 'ot-newton[jax]'")
    return build(config)


def describe(row: Row) -> str:
    """A line for the progress bar."""
    return f"{row['label']}: {row['status']}, {row['message']}"


Group = Mapping[int, Row]


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str], Group]:
    """Rows by case and backend, then by depth."""
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        s = row["settings"]
        if "bias" in row:
            found.setdefault((s["case"], s["backend"]), {})[s["tail_steps"]] = row
    return dict(found)


def _of_one_backend(groups: Mapping[tuple[str, str], Group]) -> dict[str, Group]:
    """The groups of the dense backend, or of the other one if it was not run."""
    backends = {backend for _, backend in groups}
    shown = "reference" if "reference" in backends else "banded"
    return {case: group for (case, backend), group in groups.items() if backend == shown}


def tables(rows: Sequence[Row]) -> list[Table]:
    """Exactness, bias decay and bounds, for a rich console."""
    groups = _groups(rows)
    depths = sorted({depth for group in groups.values() for depth in group})
    if not groups:
        return []
    tau = next(iter(next(iter(groups.values())).values()))["settings"]["tau"]
    heads = [f"R={depth}" for depth in depths]
    exactness = new_table(
        f"{NAME}: largest relative error against autodiff of the same surrogate",
        ("case", "backend", *heads, "float32", "with eta", "exact"),
        2,
        no_wrap=True,
    )
    decay = new_table(
        f"{NAME}: bias of stopping the base, |eta_R| / |whole gradient|; gap 1-tanh(D/4); enough: {tau:g}",
        ("case", "backend", "gap", "sigma_2", *heads, "R=2 is", "least R"),
        2,
        no_wrap=True,
    )
    heading = f"{NAME}: distance from the gradient of the converged attention"
    limit = new_table(heading, ("case", *heads), 1, no_wrap=True)
    bounds = new_table(
        f"{NAME}: l1 norm of eta_R; its Dobrushin and Hilbert bounds in units of it",
        ("case", *heads),
        1,
        no_wrap=True,
    )
    for (case, backend), group in groups.items():
        own = [group.get(depth) for depth in depths]
        exactness.add_row(case, backend, *_each(own, "error_float64"), *_exactness(group))
        decay.add_row(case, backend, *_contraction(group), *_each(own, "bias"), *_verdict(group, tau))
    for case, group in _of_one_backend(groups).items():
        own = [group.get(depth) for depth in depths]
        limit.add_row(case, *_each(own, "limit_error"))
        bounds.add_row(case, *map(_bounds, own))
    return [exactness, decay, limit, bounds]


def _each(rows: Sequence[Row | None], key: str) -> list[str]:
    values = [None if row is None else row[key] for row in rows]
    return ["" if x is None else f"{max(x) if isinstance(x, list) else x:.1e}" for x in values]


def _exactness(group: Group) -> list[str]:
    worst = [max(row[key] for row in group.values()) for key in ("error_float32", "remainder_error")]
    return [*(f"{x:.1e}" for x in worst), "yes" if all(row["success"] for row in group.values()) else "no"]


def _contraction(group: Group) -> list[str]:
    row = next(iter(group.values()))
    gaps = row["log_gap"]
    sharpest = None if None in gaps else min(gaps)
    return ["none" if sharpest is None else f"{math.exp(sharpest):.1e}", f"{max(row['sigma2']):.3f}"]


def _verdict(group: Group, tau: float) -> list[str]:
    """Whether R = 2 is enough, and the least depth that is."""
    enough = [depth for depth, row in sorted(group.items()) if max(row["bias"]) <= tau]
    second = "" if 2 not in group else ("enough" if 2 in enough else "too few")
    return [second, str(enough[0]) if enough else f"> {max(group)}"]


def _bounds(row: Row | None) -> str:
    if row is None:
        return ""
    lane = max(range(len(row["l1"])), key=lambda k: row["l1"][k])
    actual, *upper = (row[key][lane] for key in ("l1", "dobrushin_bound", "hilbert_bound"))
    return "; ".join([f"{actual:.0e}", *(f"{x / actual:.2g}x" if actual else "" for x in upper)])


def plot(rows: Sequence[Row], out: str | Path = "results") -> list[Path]:
    """Bias against R for every case on the dense backend, or the only one; from rows alone."""
    from ot_newton.experiments.attention_plots import plot_decay

    folder = check_folder("out", out)
    series = {
        case: [(depth, max(row["bias"])) for depth, row in sorted(group.items())]
        for case, group in _of_one_backend(_groups(rows)).items()
    }
    return [plot_decay(series, folder / "tail-bias.png")] if series else []
