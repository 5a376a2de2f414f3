"""Inputs of the regression experiments: CSV files, the diabetes table, the synthetic mixture."""

from __future__ import annotations

import csv
import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ot_newton.errors import check_integer, check_number

__all__ = ["RegressionData", "from_csv", "load_diabetes", "mixture", "read_csv", "standardized", "start"]

DIABETES_X = ("age", "sex", "bmi", "bp")
DIABETES_Y = ("s5", "s6")
MIXTURE_STDS = (0.3, 0.05, 0.6)
MIXTURE_DX, MIXTURE_DY = 5, 2
SPREADSHEET_TRACES = {";": "semicolons", "\t": "tabs"}


@dataclass(frozen=True, eq=False)
class RegressionData:
    """An unlinked regression: rows of ``y`` belong to rows of ``x`` in an unknown order.

    Attributes:
        name: for tables.
        x: (n, dX) float64.
        y: (m, dY) float64.
        truth: (dX, dY) the W* that made y, where there is one.
        reference: (dX, dY) W whose loss the answer is compared with: W*, or the linked least-squares W.
    """

    name: str
    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)
    truth: Tensor | None = field(default=None, repr=False)
    reference: Tensor | None = field(default=None, repr=False)

    @property
    def digest(self) -> str:
        """Hash of the numbers, so that a rerun knows whether the data changed."""
        value = hashlib.sha256()
        for cloud in (self.x, self.y):
            value.update(repr(tuple(cloud.shape)).encode())
            value.update(cloud.numpy().tobytes())
        return value.hexdigest()[:16]


def read_csv(path: str | os.PathLike[str]) -> Tensor:
    """Read a table of numbers, with or without a header row; blank lines are skipped.

    Args:
        path: comma-separated values, UTF-8.

    Returns:
        (rows, columns) float64.

    Raises:
        ValueError: no file, no rows, a ragged row or a cell that is not a finite number; the message
            names file and line.
    """
    name = os.fspath(path)
    try:
        rows = list(_rows(name))
    except OSError as error:
        raise ValueError(f"{name}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise ValueError(f"{name}: not a CSV file: {error}") from error
    if not rows:
        raise ValueError(f"{name}: no rows of numbers found")
    return torch.tensor(rows, dtype=torch.float64)


def _rows(name: str) -> Iterator[list[float]]:
    width = 0
    with open(name, encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream)
        for cells in reader:
            line = reader.line_num
            if not any(cell.strip() for cell in cells):
                continue
            if width == 0:
                width = len(cells)
                if not any(_is_number(cell) for cell in cells):
                    _check_header(name, line, cells)
                    continue
            if len(cells) != width:
                raise ValueError(f"{name}, line {line}: expected {width} values, got {len(cells)}")
            yield [_cell(name, line, column, cell) for column, cell in enumerate(cells, 1)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_header(name: str, line: int, cells: list[str]) -> None:
    """One wide cell with another separator in it is no header."""
    for mark, word in SPREADSHEET_TRACES.items():
        if len(cells) == 1 and mark in cells[0]:
            raise ValueError(f"{name}, line {line}: values must be separated by commas, found {word}")


def _cell(name: str, line: int, column: int, text: str) -> float:
    number = float(text) if _is_number(text) else math.nan
    if not math.isfinite(number):
        found = "an empty cell" if not text.strip() else repr(text)
        raise ValueError(f"{name}, line {line}, column {column}: expected a finite number, got {found}")
    return number


def standardized(cloud: Tensor) -> Tensor:
    """Columns of mean 0 and standard deviation 1; a constant column becomes 0."""
    centred = cloud - cloud.mean(0)
    spread = centred.square().mean(0).sqrt()
    return centred / torch.where(spread > 0, spread, torch.ones_like(spread))


def from_csv(
    x_path: str | os.PathLike[str], y_path: str | os.PathLike[str], *, standardize: bool = False
) -> RegressionData:
    """Unlinked X and Y from two files; they may differ in rows and columns.

    Raises:
        ValueError: a bad file, see `read_csv`.
    """
    x, y = read_csv(x_path), read_csv(y_path)
    for path, cloud in ((x_path, x), (y_path, y)):
        if cloud.shape[0] < 2:
            raise ValueError(
                f"{os.fspath(path)}: at least 2 rows of numbers are needed, got {cloud.shape[0]}"
            )
    if standardize:
        x, y = standardized(x), standardized(y)
    return RegressionData(f"{Path(x_path).name}, {Path(y_path).name}", x, y)


def load_diabetes(seed: int = 0) -> RegressionData:
    """scikit-learn's bundled table: X = age, sex, bmi, bp; Y = s5, s6; standardized, rows of Y shuffled.

    The reference is the least-squares W of the rows still linked.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_diabetes as bundled
    except ImportError as error:
        raise ImportError(
            "the diabetes table needs scikit-learn: pip install 'ot-newton[experiments]'"
        ) from error
    table = bundled(scaled=False)
    column = {name: k for k, name in enumerate(table.feature_names)}
    values = torch.as_tensor(table.data, dtype=torch.float64)
    x, y = (
        standardized(values[:, [column[name] for name in names]].clone())
        for names in (DIABETES_X, DIABETES_Y)
    )
    linked = torch.linalg.lstsq(x, y).solution
    order = torch.randperm(len(y), generator=_generator(seed))
    return RegressionData("diabetes", x, y[order], reference=linked)


def mixture(seed: int, n: int = 500, noise: float = 0.2, spread: float = 1.0) -> RegressionData:
    """Three equal clusters, centres uniform in [-1,1]^5, stds .3, .05, .6; `Y = X W* + noise`, shuffled.

    Args:
        seed: of everything drawn.
        n: rows.
        noise: standard deviation of the Gaussian noise in Y.
        spread: factor on the centres.

    Raises:
        ValueError: a bad argument.
    """
    check_integer("n", n, low=3)
    check_number("noise", noise, strict=False)
    check_number("spread", spread)
    generator = _generator(check_integer("seed", seed))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    centres = spread * (2 * torch.rand(3, MIXTURE_DX, generator=generator, dtype=torch.float64) - 1)
    label = torch.arange(n) % 3
    stds = torch.tensor(MIXTURE_STDS, dtype=torch.float64)
    x = centres[label] + stds[label, None] * normal(n, MIXTURE_DX)
    truth = normal(MIXTURE_DX, MIXTURE_DY)
    y = x @ truth + noise * normal(n, MIXTURE_DY)
    order = torch.randperm(n, generator=generator)
    return RegressionData(f"mixture {seed}", x, y[order], truth=truth, reference=truth)


def start(data: RegressionData, seed: int) -> Tensor:
    """`W* + N(0,1)` where there is a W*, else `N(0,1) std(Y)`; its own draw for every problem and seed."""
    shape = (data.x.shape[1], data.y.shape[1])
    own = int(hashlib.sha256(f"{data.digest} {seed}".encode()).hexdigest()[:15], 16)
    draw = torch.randn(*shape, generator=_generator(own), dtype=torch.float64)
    if data.truth is not None:
        return data.truth + draw
    return draw * data.y.std(0, correction=0)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
