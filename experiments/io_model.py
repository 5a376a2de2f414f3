"""Bytes of a half-iteration against tile, n, m and d, counted load by load in Triton's interpreter.

The published model of a streamed log-sum-exp is `nd + md + nm d^2 / M` numbers, with M numbers of fast
memory: M / d rows stay resident, and the other cloud is read again for each such block.

    resident  block_d = d: M holds block_m = M / d rows; expected exponents of n, m, d, M: 1, 1, 2, -1
    blocked   coordinates in blocks, d/block_d passes over a tile whose sums stay in registers:
              both clouds are read again, `nm d (1/block_m + 1/block_n)`; M counts the sums, block_m block_n,
              and the exponents are 1, 1, 1, -1/2
    shipped   the tiles of a device class, beside the least any pipeline reads

Fitted is the dominating term: what is loaded again for every tile or block of rows. The counts are also
compared, to the byte, with what the tiling implies. Masked-out elements count nothing; caches and the size
of a memory transaction are not modelled. Half inputs are not counted: the interpreter keeps them in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ot_newton.backends.triton_kernels.configs import (
    DEVICE_CLASSES,
    FMA_DIM,
    KernelKey,
    TileConfig,
    d_bucket,
    default_config,
)
from ot_newton.errors import check_choice, check_integer
from ot_newton.experiments.bench.child import child, close_children, need_triton
from ot_newton.experiments.runs import Row, Task, check_folder, load_average, new_table, versions

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "Config", "Fit", "build", "describe", "finish", "fit", "implied", "plot", "prepare", "run_one", "tables",
]  # fmt: skip

NAME = ROWS = "io-model"
JOBS = None
finish = close_children
COUNTER = "ot_newton.experiments.bench.launches"
FLOAT = 4
STREAM = 256
"""Rows of the other cloud per step, where that does not change the traffic; large, to interpret fast."""

EXPECTED = {
    "resident": {"n": 1.0, "m": 1.0, "d": 2.0, "M": -1.0},
    "blocked": {"n": 1.0, "m": 1.0, "d": 1.0, "M": -0.5},
}
TOLERANCE = 0.05
WRONG_BITS = 1e-4
SMOKE = {
    "sizes": (125, 250), "dims": (16, 64), "memory": (4096, 8192), "tiles": (64, 128),
    "blocked_dims": (32, 64), "shipped_dims": (3, 64), "shipped_size": 125,
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """What to count.

    Attributes:
        sizes: n and m, all pairs of them.
        dims: d of the resident design, among 16, 32, 64, 128.
        memory: M in bytes; M / 4d rows must be a power of 2, and pairs beyond [16, 256] rows are left out.
        tiles: block_m = block_n of the blocked design; its n and m are the first two sizes.
        blocked_dims: its d, among 32, 64, 128.
        shipped_dims: d of the rows with the tiles of a device class.
        shipped_size: their n = m.
        arch: the device class, 80, 90 or 100.
    """

    sizes: tuple[int, ...] = (500, 1000, 2000)
    dims: tuple[int, ...] = (16, 32, 64, 128)
    memory: tuple[int, ...] = (8192, 16384, 32768, 65536)
    tiles: tuple[int, ...] = (64, 128, 256)
    blocked_dims: tuple[int, ...] = (32, 64, 128)
    shipped_dims: tuple[int, ...] = (2, 3, 8, 16, 64, 128, 256)
    shipped_size: int = 1000
    arch: int = 90

    def __post_init__(self) -> None:
        """Validate before any work.

        Raises:
            ValueError: a value out of range, naming it; TypeError: of the wrong kind.
        """
        for name in ("sizes", "shipped_dims"):
            for value in getattr(self, name):
                check_integer(name, value, low=1)
        check_integer("shipped_size", self.shipped_size, low=1)
        choices: dict[str, Any] = {
            "dims": (16, 32, 64, 128),
            "blocked_dims": (32, 64, 128),
            "tiles": (16, 32, 64, 128, 256),
            "arch": tuple(DEVICE_CLASSES),
        }
        for name, allowed in choices.items():
            found = getattr(self, name)
            for value in found if isinstance(found, tuple) else (found,):
                check_choice(name, value, allowed)
        for value in self.memory:
            check_integer("memory", value, low=1)
            if value < FLOAT or value & (value - 1):
                raise ValueError(f"memory must be powers of 2 of at least {FLOAT} bytes, got {value}")


def build(config: Config) -> list[Task]:
    """One count per design, size, dimension and tile."""
    tasks = []
    for d in config.dims:
        for memory in config.memory:
            rows = memory // (FLOAT * d)
            if 16 <= rows <= 256:
                for n in config.sizes:
                    for m in config.sizes:
                        tasks.append(_task("resident", n, m, d, TileConfig(rows, STREAM, d)))
    for d in config.blocked_dims:
        for side in config.tiles:
            for n in config.sizes[:2]:
                for m in config.sizes[:2]:
                    tasks.append(_task("blocked", n, m, d, TileConfig(side, side, 16)))
    for d in config.shipped_dims:
        for precision in ("ieee",) if d <= FMA_DIM else ("ieee", "tf32x3", "tf32"):
            bucket = d_bucket(d, torch.float32)
            key = KernelKey("lse", bucket.dim, bucket.by_coordinate, precision)
            size, tile = config.shipped_size, default_config(key, config.arch)
            tasks.append(_task("shipped", size, size, d, tile, precision))
    return tasks


def _task(design: str, n: int, m: int, d: int, tile: TileConfig, precision: str = "ieee") -> Task:
    shape = {"block_m": tile.block_m, "block_n": tile.block_n, "block_d": tile.block_d}
    settings = {
        "experiment": NAME, "design": design, "n": n, "m": m, "d": d, "precision": precision, "tile": shape,
    }  # fmt: skip
    blocks = f"{tile.block_m} x {tile.block_n} x {tile.block_d}"
    return Task(f"{design}, n {n}, m {m}, d {d}, {precision}, tile {blocks}", settings)


def implied(settings: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that the tiling implies, exactly.

    Returns:
        loaded and stored; ``once``: what is loaded once per program, which the dominating term leaves out
        (a bias per row, and resident rows); ``M``: bytes of fast memory that the model means, resident rows
        or sums of a tile; ``compulsory``: one read of everything and one write of the result.
    """
    n, m, tile = settings["n"], settings["m"], settings["tile"]
    bucket = d_bucket(settings["d"], torch.float32)
    d, resident = bucket.stored, bucket.dim == tile["block_d"] and not bucket.by_coordinate
    row_blocks, column_blocks = -(-n // tile["block_m"]), -(-m // tile["block_n"])
    once = n + (n * d if resident else 0)
    again = 0 if resident else column_blocks * n * d
    streamed = row_blocks * m * (d + 2)
    return {
        "loaded": FLOAT * (once + again + streamed),
        "stored": FLOAT * 2 * n,
        "once": FLOAT * once,
        "M": FLOAT * tile["block_m"] * (d if resident else tile["block_n"]),
        "compulsory": FLOAT * (n * (d + 1) + m * (d + 2) + 2 * n),
    }


def model(row: Mapping[str, Any]) -> float:
    """`nd + md + nm d^2 / M` of a resident row, in bytes, with every constant 1."""
    s = row["settings"]
    n, m, d = (float(s[name]) for name in ("n", "m", "d"))
    memory = float(row["M"]) / FLOAT
    return FLOAT * (n * d + m * d + n * m * d * d / memory)


def run_one(task: Task) -> Row:
    """Count one half-iteration in a child process that interprets."""
    s = task.settings
    found = child(COUNTER, interpret=True).ask({"what": "half-iteration", **s})
    expected = implied(s)
    right = found["error_bits"] <= WRONG_BITS
    return {
        "versions": versions() | {"triton": found["triton"]},
        "precision": s["precision"],
        "stopping_rule": "one half-iteration",
        "status": "COUNTED" if right else "WRONG",
        "success": right,
        "message": "" if right else f"the result is off by {found['error_bits']:.1e} bits",
        "load_average": load_average(),
        "n": s["n"],
        "m": s["m"],
        "d": s["d"],
        "M": expected["M"],
        "loaded": found["loaded"],
        "stored": found["stored"],
        "launches": found["launches"],
        "error_bits": found["error_bits"],
        "dominating": found["loaded"] - expected["once"],
        "moved": found["loaded"] + found["stored"],
        "implied": expected["loaded"] + expected["stored"],
        "compulsory": expected["compulsory"],
    }


def prepare(config: Config, folder: Path) -> list[Task]:
    """The tasks of `build`.

    Raises:
        ValueError: Triton is missing.
    """
    need_triton(NAME)
    return build(config)


def describe(row: Row) -> str:
    """One line for a finished row."""
    if "moved" not in row:
        return f"{row['label']}: {row['status']}, {row['message']}"
    return f"{row['label']}: {row['moved']} bytes, implied {row['implied']}"


@dataclass(frozen=True)
class Fit:
    """Exponents of one quantity in one design.

    Attributes:
        exponents: by name of the factor.
        constant: the factor in front.
        residual: largest relative deviation of a row from the fit.
        rows: how many.
    """

    exponents: dict[str, float]
    constant: float
    residual: float
    rows: int


def fit(rows: Sequence[Mapping[str, Any]], quantity: str, factors: Sequence[str]) -> Fit:
    """Least squares of `log quantity` in the logs of the factors.

    Args:
        rows: with all of them as positive numbers.
        quantity: name of the fitted one.
        factors: names.

    Raises:
        ValueError: too few different rows to tell the exponents apart.
    """
    logs = np.log([[float(row[name]) for name in factors] for row in rows]).reshape(len(rows), len(factors))
    design = np.column_stack([logs, np.ones(len(rows))])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        raise ValueError(f"{len(rows)} rows do not determine the exponents of {', '.join(factors)}")
    target = np.log([float(row[quantity]) for row in rows])
    found = np.linalg.lstsq(design, target, rcond=None)[0]
    residual = float(np.expm1(np.abs(design @ found - target)).max())
    exponents = dict(zip(factors, found[:-1].tolist(), strict=True))
    return Fit(exponents, float(np.exp(found[-1])), residual, len(rows))


def terms(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Coefficients of `nd`, `md` and `nm d^2 / M` in all bytes moved, by least relative squares.

    Args:
        rows: resident ones, of several n, m, d and M.
    """
    numbers = np.array([[float(row[name]) for name in ("n", "m", "d", "M", "moved")] for row in rows])
    n, m, d, memory, moved = numbers.T
    columns = np.stack([n * d, m * d, n * m * d * d / (memory / FLOAT)], axis=1) * FLOAT
    found = np.linalg.lstsq(columns / moved[:, None], np.ones(len(moved)), rcond=None)[0]
    return dict(zip(("nd", "md", "nm d^2 / M"), found.tolist(), strict=True))


def deviation(found: Fit, design: str) -> float:
    """Largest relative deviation of the exponents from the expected ones."""
    expected = EXPECTED[design]
    return max(abs(found.exponents[name] - value) / abs(value) for name, value in expected.items())


def _counted(rows: Sequence[Row], design: str) -> list[Row]:
    return [row for row in rows if row.get("status") == "COUNTED" and row["settings"]["design"] == design]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Exponents, absolute counts and the shipped tiles, for a rich console."""
    made = [_exponents(rows), _absolute(rows), _shipped(rows)]
    return [table for table in made if table.row_count]


def _exponents(rows: Sequence[Row]) -> Table:
    names = ("design", "quantity", "rows", "n", "m", "d", "M", "residual", "deviation", "within 5%")
    table = new_table(f"{NAME}: exponents by least squares in logs (expected)", names, 2)
    for design, expected in EXPECTED.items():
        chosen = _counted(rows, design)
        for quantity, label in (("dominating", "dominating term"), ("moved", "all bytes")):
            try:
                found = fit(chosen, quantity, tuple(expected))
            except ValueError:
                continue
            off = deviation(found, design)
            cells = [f"{found.exponents[k]:.3f} ({v:g})" for k, v in expected.items()]
            verdict = "yes" if off <= TOLERANCE else "no"
            spread = (f"{found.residual:.1%}", f"{off:.1%}", verdict)
            table.add_row(design, label, str(found.rows), *cells, *spread)
    return table


def _absolute(rows: Sequence[Row]) -> Table:
    names = ("design", "d", "rows", "counted = implied", "counted / model", "counted / compulsory")
    title = f"{NAME}: bytes counted, against the tiling and nd + md + nm d^2 / M"
    if resident := _counted(rows, "resident"):
        fitted = ", ".join(f"{value:.2f} {name}" for name, value in terms(resident).items())
        title += f" (least squares: {fitted})"
    table = new_table(title, names, 1)
    for design in EXPECTED:
        chosen = _counted(rows, design)
        for d in sorted({row["d"] for row in chosen}):
            some = [row for row in chosen if row["d"] == d]
            equal = sum(row["moved"] == row["implied"] for row in some)
            ratio = [row["moved"] / model(row) for row in some] if design == "resident" else []
            table.add_row(
                design, str(d), str(len(some)), f"{equal} of {len(some)}", _range(ratio),
                _range([row["moved"] / row["compulsory"] for row in some]),
            )  # fmt: skip
    return table


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else ""


def _shipped(rows: Sequence[Row]) -> Table:
    names = ("d", "precision", "tile", "n = m", "bytes", "bytes per pair", "over compulsory", "= implied")
    table = new_table(f"{NAME}: the shipped tiles", names, 3)
    for row in _counted(rows, "shipped"):
        tile = row["settings"]["tile"]
        table.add_row(
            str(row["d"]),
            row["precision"],
            f"{tile['block_m']} x {tile['block_n']} x {tile['block_d']}",
            str(row["n"]),
            str(row["moved"]),
            f"{row['moved'] / (row['n'] * row['m']):.2f}",
            f"{row['moved'] / row['compulsory']:.1f}",
            "yes" if row["moved"] == row["implied"] else "no",
        )
    return table


def plot(rows: Sequence[Row], out: str | Path = "results") -> list[Path]:
    """Bytes against M, and against n, beside the model; from rows alone."""
    from ot_newton.experiments.plots import plot_lines

    folder, paths = check_folder("out", out), []
    chosen = _counted(rows, "resident")
    if not chosen:
        return []
    n, m = (max(row[name] for row in chosen) for name in ("n", "m"))
    for factor, label in (("M", "M, bytes of resident rows"), ("n", "n")):
        smallest = min(row["M"] for row in chosen)
        kept = [row for row in chosen if row["m"] == m and (factor == "n" or row["n"] == n)]
        kept = [row for row in kept if factor == "M" or row["M"] == smallest]
        series: dict[str, list[tuple[float, float]]] = {}
        for row in sorted(kept, key=lambda row: (row["d"], row[factor])):
            series.setdefault(f"d {row['d']}", []).append((row[factor], row["moved"]))
        for row in kept:
            series.setdefault(f"d {row['d']}, model", []).append((row[factor], model(row)))
        fixed = f"n = {n}, m = {m}" if factor == "M" else f"m = {m}, M = {smallest} bytes"
        path = folder / f"io-model-bytes-{factor}.png"
        paths.append(plot_lines(series, path, x=label, y="bytes of a half-iteration", title=fixed))
    return paths
