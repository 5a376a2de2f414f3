"""Rows of an experiment: what a run is called, and the file that keeps one JSON line of each."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Row", "RowFile", "Task", "check_folder", "load_average", "row_head", "settings_key", "versions"]

Row = dict[str, Any]
REPORTED = ("ot-newton", "torch", "numpy", "scipy")


@dataclass(frozen=True)
class Task:
    """One run.

    Attributes:
        label: for the progress bar.
        settings: everything that decides the outcome, as JSON values; their hash names the run.
        payload: what the worker gets beside the settings; must be picklable.
    """

    label: str
    settings: Mapping[str, Any]
    payload: Any = field(default=None, repr=False)

    @property
    def key(self) -> str:
        """Hash of the settings."""
        return settings_key(self.settings)


def settings_key(settings: Mapping[str, Any]) -> str:
    """Hash of JSON-like settings that does not depend on their order."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for name in REPORTED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def load_average() -> float | None:
    """Runnable processes over the last minute, where the system tells: timings depend on it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def check_folder(name: str, path: str | os.PathLike[str]) -> Path:
    """Make the folder, or raise naming the argument before any work.

    Raises:
        ValueError: it exists as a file, or cannot be made or written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{name} must be a folder that can be written, got {folder}: {error.strerror}"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{name} must be a folder that can be written, got {folder}")
    return folder


def row_head(task: Task) -> Row:
    """What every row starts with."""
    return {
        "key": task.key,
        "label": task.label,
        "settings": dict(task.settings),
        "versions": versions(),
    }


class RowFile:
    """A file of JSON rows that survives being interrupted.

    Args:
        path: made with the first row.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def read(self) -> list[Row]:
        """All complete rows; a last line cut off in writing is left out.

        Raises:
            ValueError: a line that is no JSON row; the message names file and line.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        rows: list[Row] = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                if number == len(lines) and not line.endswith("\n"):
                    break
                raise ValueError(f"{self.path}, line {number}: not a JSON row: {error.msg}") from error
            if not isinstance(row, dict):
                raise ValueError(
                    f"{self.path}, line {number}: expected a JSON object, got {type(row).__name__}"
                )
            rows.append(row)
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row and wait until it is on disk."""
        self._mend()
        with open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _mend(self) -> None:
        """Drop what an interrupted write left after the last line end."""
        if not self.path.exists():
            return
        with open(self.path, "r+b") as stream:
            content = stream.read()
            if content and not content.endswith(b"\n"):
                stream.truncate(content.rfind(b"\n") + 1)
