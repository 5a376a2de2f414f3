"""Rows as JSON lines and as tables on a terminal; versions of everything that took part."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ot_newton.experiments.runs import versions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["TABLES_OF_COLUMNS", "Column", "environment", "show", "tables_of"]

Row = Mapping[str, Any]
PEERS = ("jax", "jaxlib", "ott-jax", "POT", "pykeops", "geomloss", "flash-sinkhorn", "numba")


def environment(threads: int) -> dict[str, Any]:
    """Versions, processor and threads, for every row.

    Args:
        threads: that every contestant may use.
    """
    found: dict[str, Any] = dict(versions())
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {"versions": found, "processor": _processor(), "threads": threads}


def _processor() -> str:
    """The processor's name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: above it.
        text: of a row.
    """

    title: str
    text: Callable[[Row], str]


def _number(key: str, form: str, factor: float = 1.0) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value = row.get(key)
        return "" if value is None else format(factor * value, form)

    return text


def _plain(key: str) -> Callable[[Row], str]:
    return lambda row: str(row.get(key, ""))


def _case(row: Row) -> str:
    if "n" not in row:
        return ""
    sizes = f"n = m = {row['n']}" if row["n"] == row["m"] else f"n = {row['n']}, m = {row['m']}"
    more = [str(row[key]) for key in ("problem", "rule") if key in row]
    return ", ".join([sizes, f"d = {row['d']}", f"eps = {row['eps']:g}", *more])


def _outcome(row: Row) -> str:
    text = str(row["status"])
    return f"{text}: {row['message']}" if row.get("message") else text


WHO = Column("contestant", _plain("contestant"))
OUTCOME = Column("outcome", _outcome)
ERROR = Column("error", _number("error", ".1e"))
MARGINAL = Column("marginal error", _number("marginal_error", ".1e"))
TIMES = (
    Column("median ms", _number("seconds_median", ".3f", 1e3)),
    Column("min ms", _number("seconds_min", ".3f", 1e3)),
)

TABLES_OF_COLUMNS: dict[str, tuple[Column, ...]] = {
    "time": (
        WHO,
        Column("precision", _plain("precision")),
        *TIMES,
        Column("ns/pair", _number("ns_per_pair", ".3f")),
        Column("turns", _plain("turns")),
        ERROR,
        MARGINAL,
        Column("I1", _number("translation_error", ".1e")),
        Column("its", _plain("iterations")),
        Column("passes", _plain("plan_passes")),
        OUTCOME,
    ),
    "claim": (
        Column("claim", _plain("claim")),
        Column("target", _plain("target")),
        Column("of medians", _number("ratio_median", ".2f")),
        Column("of minima", _number("ratio_min", ".2f")),
        OUTCOME,
    ),
    "hessian": (
        Column("u", _plain("u")),
        Column("cost", lambda row: f"{row['cost_scale']:g} |x-y|^2"),
        WHO,
        Column("precision", _plain("precision")),
        Column("lambda_min", _number("lambda_min", ".6f")),
        Column("exact", _number("lambda_min_exact", ".6f")),
        Column("error of the matrix", _number("error", ".1e")),
        OUTCOME,
    ),
    "memory": (
        Column("operation", _plain("operation")),
        WHO,
        Column("grows with", _plain("grows_with")),
        Column("B/point", _number("bytes_per_point", ".0f")),
        Column("B/pair", _number("bytes_per_pair", ".2f")),
        Column("intercept MB", _number("intercept", ".0f", 1e-6)),
        Column("largest peak MB", lambda row: f"{max(row['peaks']) / 1e6:.0f}" if "peaks" in row else ""),
        OUTCOME,
    ),
    "parity": (
        Column("problem", _plain("problem")),
        Column("rule", _plain("rule")),
        WHO,
        Column("value", _number("value", ".9f")),
        Column("error of value", _number("value_error", ".1e")),
        Column("bound", _number("value_bound", ".0e")),
        Column("of gradient", _number("gradient_error", ".1e")),
        Column("bound", _number("gradient_bound", ".0e")),
        MARGINAL,
        OUTCOME,
    ),
    "run": (
        WHO,
        Column("solve s", _number("seconds_solve", ".1f")),
        Column("HVP s", _number("seconds_hvp", ".1f")),
        Column("its", _plain("iterations")),
        Column("passes", lambda row: f"{row.get('passes_solve', '')}+{row.get('passes_hvp', '')}"),
        MARGINAL,
        Column("I1", _number("translation_error", ".1e")),
        Column("peak MB", _number("peak_rss", ".0f", 1e-6)),
        Column("B/point", _number("bytes_per_point", ".0f")),
        OUTCOME,
    ),
}


def _stopping(rows: Sequence[Row]) -> str:
    """Who stopped when, each rule once."""
    rules: dict[str, list[str]] = {}
    for row in rows:
        if row.get("stopping"):
            names = rules.setdefault(str(row["stopping"]), [])
            names += [] if row["contestant"] in names else [str(row["contestant"])]
    return "\n".join(f"  {rule}: {', '.join(names)}" for rule, names in rules.items())


def _table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    """One table; columns without content are left out."""
    from rich.table import Table

    texts = [[column.text(row) for row in rows] for column in columns]
    kept = [k for k, cells in enumerate(texts) if any(cells)]
    table = Table(title=title, title_justify="left")
    for k in kept:
        table.add_column(columns[k].title, overflow="fold", no_wrap=columns[k] is WHO)
    for line in zip(*(texts[k] for k in kept), strict=True):
        table.add_row(*line)
    return table


def tables_of(title: str, rows: Iterable[Row]) -> list[Table]:
    """One table per case and kind of row.

    Args:
        title: name of the table of the bench.
        rows: its rows.
    """
    found, made = list(rows), []
    for case in dict.fromkeys(_case(row) for row in found):
        for kind, columns in TABLES_OF_COLUMNS.items():
            chosen = [row for row in found if row["kind"] == kind and _case(row) == case]
            if chosen:
                heading = ", ".join(part for part in (title, case) if part)
                made.append(_table(heading, columns, chosen))
    return made


def show(console: Console, title: str, rows: Iterable[Row]) -> None:
    """Print the tables of the rows, then who stopped when.

    Args:
        console: where.
        title: name of the table of the bench.
        rows: its rows.
    """
    found = list(rows)
    for table in tables_of(title, found):
        console.print(table)
    console.print(f"stopping rules\n{_stopping(found)}", highlight=False, markup=False)
