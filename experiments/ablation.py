"""What fusion and tensor cores buy, in counts: launches, bytes, and instructions of compiled kernels.

    launches      of one half-iteration of the solver, and its bytes: our kernel, the plain pipelines that
                  keep a matrix of scores in memory, and our other backends
    instructions  per pair (i, j) of one step of the stabilized sweep, from the machine code of the
                  log-sum-exp, the loop over coordinates weighted by its trips: float32 on the FMA units
                  (ieee, plain fused) against the tensor-core precisions, at the shipped tiles and at one
                  common tile, where the precision is all that differs
    nsight        Nsight Compute on the kernels, where there are a GPU and `ncu`; else a row that says why not

Everything but the last is compiled or interpreted: counts, no times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ot_newton.backends.triton_kernels.configs import (
    DEVICE_CLASSES,
    FMA_DIM,
    PRECISIONS,
    KernelKey,
    TileConfig,
    d_bucket,
    default_config,
    legal,
)
from ot_newton.errors import check_choice, check_integer
from ot_newton.experiments.bench import nsight
from ot_newton.experiments.bench.child import child, close_children, need_triton
from ot_newton.experiments.bench.launches import PIPELINES
from ot_newton.experiments.runs import Row, Task, check_folder, load_average, new_table, versions

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Config", "build", "describe", "finish", "plot", "prepare", "run_one", "tables"]

NAME = ROWS = "ablation"
finish = close_children
COUNTER = "ot_newton.experiments.bench.launches"
COMPILER = "ot_newton.experiments.bench.machine_code"
COMMON = TileConfig(64, 32, 16)
TILES = ("shipped", "common")
PLAIN = "ieee"
GROUPS = ("fma", "tensor_core", "exp2", "shared", "global", "issued")
SMOKE = {
    "dims": (3, 16), "precisions": ("ieee", "tf32"), "archs": (80,), "sizes": (64, 512), "interpreted": 64,
    "launch_dim": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """What to count.

    Attributes:
        dims: d of the instruction counts.
        precisions: of the products; up to 8 coordinates there is only "ieee".
        tiles: "shipped", "common" (64 x 32 x 16, 4 warps; d above 8).
        archs: compute capabilities, 80, 90, 100.
        sizes: n = m of the launch counts.
        interpreted: largest of them at which our kernel is interpreted; its launches do not depend on n.
        launch_dim: d of the launch counts.
        profile_size: n = m under Nsight Compute.
        profile_dim: d under Nsight Compute.
    """

    dims: tuple[int, ...] = (3, 16, 64, 128, 256)
    precisions: tuple[str, ...] = PRECISIONS
    tiles: tuple[str, ...] = TILES
    archs: tuple[int, ...] = (80, 90, 100)
    sizes: tuple[int, ...] = (512, 4096)
    interpreted: int = 512
    launch_dim: int = 64
    profile_size: int = 16384
    profile_dim: int = 64

    def __post_init__(self) -> None:
        """Validate before any work.

        Raises:
            ValueError: a value out of range, naming it; TypeError: of the wrong kind.
        """
        for name in ("dims", "sizes"):
            for value in getattr(self, name):
                check_integer(name, value, low=1)
        for name in ("interpreted", "launch_dim", "profile_size", "profile_dim"):
            check_integer(name, getattr(self, name), low=1)
        choices: dict[str, Any] = {"precisions": PRECISIONS, "tiles": TILES, "archs": tuple(DEVICE_CLASSES)}
        for name, allowed in choices.items():
            for value in getattr(self, name):
                check_choice(name, value, allowed)


def build(config: Config) -> list[Task]:
    """The counts to make; a profile's key changes when a GPU and `ncu` appear, so that it is run then."""
    tasks = [
        _launch_task(pipeline, n, config.launch_dim)
        for n in config.sizes
        for pipeline in PIPELINES
        if pipeline != "triton" or n <= config.interpreted
    ]
    for d in config.dims:
        for precision in config.precisions:
            for arch in config.archs:
                for tile in config.tiles:
                    if d > FMA_DIM or (precision, tile) == (PLAIN, "shipped"):
                        tasks.append(_code_task(d, precision, tile, arch))
    size = {"n": config.profile_size, "d": config.profile_dim}
    reason = nsight.unavailable()
    for precision in config.precisions:
        settings = {"experiment": NAME, "study": "nsight", **size, "precision": precision, "missing": reason}
        tasks.append(Task(f"nsight, n {size['n']}, d {size['d']}, {precision}", settings))
    return tasks


def _launch_task(pipeline: str, n: int, d: int) -> Task:
    tile = _tile(d, PLAIN, "shipped", 90)
    shape = {"block_m": tile.block_m, "block_n": tile.block_n, "block_d": tile.block_d}
    settings = {"experiment": NAME, "study": "launches", "pipeline": pipeline, "n": n, "d": d, "tile": shape}
    return Task(f"launches, {pipeline}, n {n}, d {d}", settings)


def _key(d: int, precision: str) -> KernelKey:
    bucket = d_bucket(d, torch.float32)
    return KernelKey("lse", bucket.dim, bucket.by_coordinate, precision)


def _tile(d: int, precision: str, tile: str, arch: int) -> TileConfig:
    return COMMON if tile == "common" else default_config(_key(d, precision), arch)


def _code_task(d: int, precision: str, tile: str, arch: int) -> Task:
    config = _tile(d, precision, tile, arch)
    problem = legal(_key(d, precision), config, arch)
    if problem:
        raise ValueError(f"the {tile} tile is not for d {d}, {precision}, sm_{arch}: {problem}")
    shape = {name: getattr(config, name) for name in config.__dataclass_fields__}
    settings = {
        "experiment": NAME, "study": "instructions", "d": d, "precision": precision, "tile": tile,
        "arch": arch, "config": shape,
    }  # fmt: skip
    return Task(f"instructions, d {d}, {precision}, {tile} tile, sm_{arch}", settings)


def run_one(task: Task) -> Row:
    """One count, or one profile."""
    s = task.settings
    made = {"launches": _launches, "instructions": _instructions, "nsight": _profile}[s["study"]]
    found = {"versions": versions(), "stopping_rule": "none: counts", **made(s, task.payload)}
    return found | {"load_average": load_average(), "success": found["status"] != "SKIPPED"}


def _launches(s: Mapping[str, Any], _: object) -> Row:
    found = child(COUNTER, interpret=True).ask({"what": "solver", **s})
    return {
        "versions": versions() | {"triton": found["triton"]},
        "precision": "float32",
        "status": "COUNTED",
        "message": "",
        "triton_launches": found["triton_launches"],
        "other_launches": sum(found["launches"].values()),
        "operations": found["launches"],
        "syncs": found["syncs"],
        "bytes": found["bytes"],
        "potential": found["potential"],
    }


def _instructions(s: Mapping[str, Any], _: object) -> Row:
    found = child(COMPILER, interpret=False).ask(s)
    return {
        "versions": versions() | {"triton": found.pop("triton")},
        "precision": s["precision"],
        "status": "COUNTED",
        "message": "",
        **found,
    }


def _profile(s: Mapping[str, Any], out: object) -> Row:
    found = nsight.profile(n=s["n"], d=s["d"], precision=s["precision"], out=Path(str(out)))
    return {"precision": s["precision"], "summary": nsight.summary(found), **found}


def prepare(config: Config, folder: Path) -> list[Task]:
    """Tasks that write Nsight Compute's reports beside the rows.

    Raises:
        ValueError: Triton is missing.
    """
    need_triton(NAME)
    return [Task(task.label, task.settings, str(folder)) for task in build(config)]


def JOBS() -> int | None:  # noqa: N802
    """One where Nsight Compute runs, else one per core."""
    return None if nsight.unavailable() else 1


def describe(row: Row) -> str:
    """One line for a finished row."""
    if row["status"] == "ERROR":
        return f"{row['label']}: ERROR, {row['message']}"
    if "summary" in row:
        return f"{row['label']}: {row['summary']}"
    if "per_pair" in row:
        return f"{row['label']}: {row['per_pair']['issued']:.1f} instructions per pair"
    return f"{row['label']}: {row['triton_launches'] + row['other_launches']:g} launches"


def _chosen(rows: Sequence[Row], study: str) -> list[Row]:
    return [row for row in rows if row["settings"].get("study") == study and row["status"] != "ERROR"]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Launches, instructions by precision, profiles, for a rich console."""
    made = [
        _launch_table(_chosen(rows, "launches")),
        *(_code_table(_chosen(rows, "instructions"), tile) for tile in TILES),
        _profile_table(_chosen(rows, "nsight")),
    ]
    return [table for table in made if table.row_count]


def _launch_table(rows: Sequence[Row]) -> Table:
    names = ("pipeline", "n = m", "d", "Triton", "others", "syncs", "bytes", "bytes per pair", "over ours")
    table = new_table(f"{NAME}: launches and bytes of one half-iteration of the solver", names, 1)
    ours = {row["settings"]["n"]: row["bytes"] for row in rows if row["settings"]["pipeline"] == "triton"}
    for row in rows:
        s = row["settings"]
        over = row["bytes"] / ours[s["n"]] if s["n"] in ours else None
        table.add_row(
            s["pipeline"],
            str(s["n"]),
            str(s["d"]),
            f"{row['triton_launches']:g}",
            f"{row['other_launches']:g}",
            f"{row['syncs']:g}",
            f"{row['bytes']:.0f}",
            f"{row['bytes'] / s['n'] ** 2:.2f}",
            "" if over is None else f"{over:.1f}",
        )
    return table


def _code_table(rows: Sequence[Row], tile: str) -> Table:
    names = (
        "d", "precision", "arch", "tile m x n x d", "warps", "registers", "spills", "shared", "FMA",
        "tensor core", "EX2", "LDS/STS", "LDG/STG", "all", "ieee over it",
    )  # fmt: skip
    table = new_table(f"{NAME}: instructions per pair of a stabilized step, {tile} tile", names, 2)
    some = [row for row in rows if row["settings"]["tile"] == tile]
    plain = {
        (row["settings"]["d"], row["settings"]["arch"]): row["per_pair"]["issued"]
        for row in some
        if row["settings"]["precision"] == PLAIN
    }
    for row in some:
        s, config, count = row["settings"], row["settings"]["config"], row["per_pair"]
        base = plain.get((s["d"], s["arch"]))
        table.add_row(
            str(s["d"]),
            s["precision"],
            f"sm_{s['arch']}",
            f"{config['block_m']} x {config['block_n']} x {config['block_d']}",
            str(config["warps"]),
            str(row["registers"]),
            str(row["spills"]),
            str(row["shared"]),
            *(f"{count[name]:.3g}" for name in GROUPS),
            "" if base is None else f"{base / count['issued']:.1f}",
        )
    return table


def _profile_table(rows: Sequence[Row]) -> Table:
    table = new_table(f"{NAME}: Nsight Compute", ("n = m", "d", "precision", "status", "what"), 5)
    for row in rows:
        s = row["settings"]
        table.add_row(str(s["n"]), str(s["d"]), s["precision"], row["status"], row["summary"])
    return table


def plot(rows: Sequence[Row], out: str | Path = "results") -> list[Path]:
    """Instructions per pair against d for every precision, at the shipped tiles; from rows alone."""
    from ot_newton.experiments.plots import plot_lines

    folder, paths = check_folder("out", out), []
    chosen = [row for row in _chosen(rows, "instructions") if row["settings"]["tile"] == "shipped"]
    for arch in sorted({row["settings"]["arch"] for row in chosen}):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in chosen:
            if row["settings"]["arch"] == arch:
                point = (row["settings"]["d"], row["per_pair"]["issued"])
                series.setdefault(row["precision"], []).append(point)
        path = folder / f"ablation-instructions-sm{arch}.png"
        title = f"stabilized step, shipped tiles, sm_{arch}"
        paths.append(plot_lines(series, path, x="d", y="instructions per pair", title=title))
    return paths
