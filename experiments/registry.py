"""The studies by name: configuration files, running, and plotting from rows alone.

A study is a module with `NAME`, `ROWS` (the stem of its file of rows), `SMOKE` (settings of a quick run), a
frozen dataclass `Config`, `tables(rows)` and `plot(rows, out)`. Its rows come from a list of tasks,
`build(config)` or, where something is to be checked first, `prepare(config, folder)`, with `run_one(task)`,
`describe(row)`, `JOBS` (the processes by default, or a function that says so) and, if need be, `finish()` at
the end; or from its own `run(config, out, jobs=, console=)`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ot_newton.experiments.bench.__main__ import TABLES
from ot_newton.experiments.runs import Row, RowFile, check_folder, run_tasks

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["STUDIES", "Outcome", "Study", "find", "make_config", "read_config", "replot", "run_study"]


@dataclass(frozen=True)
class Study:
    """A study that can be run by name.

    Attributes:
        name: as on the command line.
        module: where it is; imported when it is needed.
        about: a line for the list.
    """

    name: str
    module: str
    about: str

    def load(self) -> Any:
        """Its module."""
        return importlib.import_module(self.module)


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study(
            "shuffled-regression",
            "ot_newton.experiments.regression_study",
            "72 seeds by SaddleEscape, Newton-CG and Adam to one tolerance; the switch's sensitivity",
        ),
        Study(
            "hvp-accuracy",
            "ot_newton.experiments.hvp_accuracy",
            "Hessian-vector products against the dense Moore-Penrose Hessian, CG iterations",
        ),
        Study(
            "low-eps",
            "ot_newton.experiments.low_eps",
            "time and plan passes at low eps: Sinkhorn, annealed, Newton, auto",
        ),
        Study(
            "io-model",
            "ot_newton.experiments.io_model",
            "bytes of a half-iteration, counted in Triton's interpreter, against nd + md + nm d^2 / M",
        ),
        Study(
            "ablation",
            "ot_newton.experiments.ablation",
            "launches, bytes and compiled instructions: fused or not, tensor cores or not",
        ),
        Study(
            "pfam-attention",
            "ot_newton.experiments.pfam_attention",
            "Sinkhorn attention trained on aligned protein families: R = 2, R = 4, two dustbins",
        ),
        Study(
            "tail-exactness",
            "ot_newton.experiments.tail_exactness",
            "the attention's gradient against autodiff; the bias of stopping the base by depth R",
        ),
    )
}


BENCH = Study("bench", "ot_newton.experiments.bench.drawn", "rows of the benchmarks, drawn again")
"""What `replot` makes of the rows of all benchmarks; each is run by its own name."""


@dataclass(frozen=True)
class Outcome:
    """What a study left: its rows, tables for a console and the images written."""

    study: Study
    rows: list[Row]
    tables: list[Table]
    images: list[Path]


def find(name: str) -> Study:
    """The study of that name; the benchmarks, which `find` does not return, are named in the message.

    Raises:
        ValueError: unknown; the message lists the known ones.
    """
    if name not in STUDIES:
        raise ValueError(f"NAME must be one of {', '.join(map(repr, (*STUDIES, *TABLES)))}, got {name!r}")
    return STUDIES[name]


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings of a TOML file.

    Raises:
        ValueError: it cannot be read or is no TOML; the message names the file.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ValueError(f"{name}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: not a TOML file: {error}") from error


def make_config(config_class: type, settings: Mapping[str, Any], source: str) -> Any:
    """A study's configuration from settings, checked against the types of its fields.

    Args:
        config_class: the study's `Config`.
        settings: by field name; a list stands for a tuple, an integer for a float.
        source: what the settings come from, for messages.

    Raises:
        ValueError: an unknown setting (the known ones are listed), a value of the wrong type or out of range.
    """
    hints = typing.get_type_hints(config_class)
    known = [field.name for field in dataclasses.fields(config_class)]
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"{source}: unknown setting {name!r}; known: {', '.join(known)}")
        values[name] = _typed(f"{source}: {name}", value, hints[name])
    try:
        return config_class(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{source}: {error}") from error


def _typed(name: str, value: Any, hint: Any) -> Any:
    """The value as the annotation has it: a scalar, an optional scalar or a tuple of scalars.

    Raises:
        ValueError: another type.
    """
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError(f"{name} must be a nonempty list of {inner.__name__}, got {value!r}")
        return tuple(_typed(name, one, inner) for one in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or isinstance(value, bool) is not (hint is bool):
        raise ValueError(f"{name} must be of type {hint.__name__}, got {value!r}")
    return value


def run_study(
    name: str,
    *,
    config: str | os.PathLike[str] | None = None,
    smoke: bool = False,
    out: str | Path = "results",
    jobs: int | str | None = None,
    console: Console | None = None,
) -> Outcome:
    """Run a study, resuming what ``out`` holds, and draw its figures.

    Args:
        name: of the study.
        config: TOML file of settings.
        smoke: start from the settings of a quick run; the file's win over them.
        out: folder of rows and figures.
        jobs: see `run_tasks`.
        console: for progress.

    Raises:
        ValueError: unknown study, bad settings or folder, before any run.
    """
    study = find(name)
    module = study.load()
    given = {} if config is None else read_config(config)
    base = dict(module.SMOKE) if smoke else {}
    source = "--smoke" if config is None else os.fspath(config)
    made = make_config(module.Config, base | given, source)
    rows = _rows(module, made, out, jobs, console)
    return Outcome(study, rows, module.tables(rows), module.plot(rows, out))


def _rows(
    module: Any, config: Any, out: str | Path, jobs: int | str | None, console: Console | None
) -> list[Row]:
    """Rows of a study: those of its own `run`, or of its list of tasks."""
    if hasattr(module, "run"):
        rows: list[Row] = module.run(config, out, jobs=jobs, console=console)
        return rows
    folder = check_folder("out", out)
    tasks = module.prepare(config, folder) if hasattr(module, "prepare") else module.build(config)
    own = module.JOBS() if callable(module.JOBS) else module.JOBS
    try:
        return run_tasks(
            tasks,
            module.run_one,
            RowFile(folder / f"{module.ROWS}.jsonl"),
            jobs=own if jobs is None else jobs,
            console=console,
            describe=module.describe,
        )
    finally:
        if hasattr(module, "finish"):
            module.finish()


def replot(folder: str | os.PathLike[str]) -> list[Outcome]:
    """Tables and figures of every study and of the bench whose rows are in a folder, from the rows alone.

    A row that failed and was run again counts once, by its last outcome.

    Raises:
        ValueError: no folder, no rows of a known study in it, or a damaged file.
    """
    where = Path(folder)
    if not where.is_dir():
        raise ValueError(f"DIR must be a folder with rows, got {where}")
    found = []
    known = (*STUDIES.values(), BENCH)
    for study in known:
        module = study.load()
        rows = RowFile(where / f"{module.ROWS}.jsonl").read()
        if rows:
            last = list({row.get("key", number): row for number, row in enumerate(rows)}.values())
            found.append(Outcome(study, last, module.tables(last), module.plot(last, where)))
    if not found:
        names = ", ".join(f"{study.load().ROWS}.jsonl" for study in known)
        raise ValueError(f"DIR must hold a file of rows ({names}), found none in {where}")
    return found
