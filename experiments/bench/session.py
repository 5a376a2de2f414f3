"""One run of the bench: tables in turn, rows to the file as they come, a summary of the targets."""

from __future__ import annotations

import datetime
import importlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ot_newton.experiments.bench.report import environment, show
from ot_newton.experiments.bench.settings import Settings
from ot_newton.experiments.runs import RowFile, check_folder

__all__ = ["BUSY", "rows_of", "run_tables"]

Row = dict[str, Any]
BUSY = 0.5
"""Load average per core from which on the ratios carry a warning."""

FILE = "bench.jsonl"
TABLE_WIDTH = 140


def _load() -> float:
    """Load average of the last minute per core, 0 where the system does not tell."""
    if not hasattr(os, "getloadavg"):
        return 0.0
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def rows_of(maker: str) -> Callable[[Settings], Iterable[Row]]:
    """The function that makes a table's rows, imported now.

    Args:
        maker: "module" of `ot_newton.experiments.bench`, for its ``rows``, or "module:function".
    """
    module, _, function = maker.partition(":")
    found: Callable[[Settings], Iterable[Row]] = getattr(
        importlib.import_module(f"ot_newton.experiments.bench.{module}"), function or "rows"
    )
    return found


def _table_rows(
    name: str, maker: str, settings: Settings, file: RowFile, head: Row
) -> tuple[list[Row], float]:
    """Rows of one table and its seconds; each row written when it is there, an exception is one more row."""
    found: list[Row] = []
    begin = time.perf_counter()
    try:
        for row in rows_of(maker)(settings):
            found.append(head | {"table": name} | row)
            file.append(found[-1])
    except Exception as error:  # noqa: BLE001  a failed table is a row, not the end of the bench
        message = f"{type(error).__name__}: {error}"
        found.append(head | {"table": name, "kind": "failure", "status": "ERROR", "message": message})
        file.append(found[-1])
    return found, time.perf_counter() - begin


def run_tables(tables: Mapping[str, str], *, threads: int, preset: str = "default", out: Path) -> int:
    """Run some tables and print them.

    Args:
        tables: names and what makes their rows, see `rows_of`.
        threads: for torch; the environment is the caller's business.
        preset: of `Settings`: "default", "smoke" or "full".
        out: folder of `bench.jsonl`.

    Returns:
        The number of tables that raised and of parity rows that are not OK. A missed target of a time is
        reported, not counted: it may be the machine's.

    Raises:
        ValueError: an unknown preset; the folder cannot be made or written.
    """
    from rich.console import Console

    settings = Settings.of(preset)
    file = RowFile(check_folder("out", out) / FILE)
    torch.set_num_threads(threads)
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    load = _load()
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    head: Row = {"run": stamp, "preset": preset, "load_per_core": load} | environment(threads)
    found = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    console.print(f"{head['processor']}, {threads} threads\n{found}", highlight=False, soft_wrap=True)
    if load > BUSY:
        console.print(
            f"the machine is busy (load {load:.1f} per core): these times mean little", style="bold"
        )
    claims: list[Row] = []
    failures = 0
    for name, module in tables.items():
        rows, seconds = _table_rows(name, module, settings, file, head)
        show(console, f"{name} ({seconds:.0f} s)", rows)
        for row in rows:
            if row["kind"] == "failure":
                failures += 1
                console.print(f"{name}: {row['message']}", highlight=False, markup=False, style="bold")
        failures += sum(row["kind"] == "parity" and row["status"] != "OK" for row in rows)
        claims += [row for row in rows if row["kind"] == "claim"]
    met = sum(row["status"] == "MET" for row in claims)
    targets = f"{met} of {len(claims)} targets met; " if claims else ""
    console.print(f"{targets}rows in {file.path}", highlight=False)
    return failures
