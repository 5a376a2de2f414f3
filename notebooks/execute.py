"""Execute the notebooks in place and keep each `.ipynb` in step with its paired script.

    python notebooks/execute.py [NAME ...]        # 01_quickstart ...; all by default

Where the cells of a pair differ, the newer file wins and the other is rewritten. Outputs are stored without
timings, random ids or versions, so that a second run of the same code leaves a small diff.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
TIMEOUT = 300
FORMAT = "py:percent"


def names() -> list[str]:
    """The notebooks, by number."""
    return sorted(path.stem for path in FOLDER.glob("[0-9][0-9]_*.py"))


def cells(book: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """Kind and source of every cell: what a pair has in common."""
    return [(cell.cell_type, cell.source) for cell in book.cells]


def newest(name: str) -> nbformat.NotebookNode:
    """The pair's cells; the other file is brought up to date."""
    script, stored = FOLDER / f"{name}.py", FOLDER / f"{name}.ipynb"
    book = jupytext.read(script)
    if stored.exists() and stored.stat().st_mtime > script.stat().st_mtime:
        other = jupytext.read(stored)
        if cells(other) != cells(book):
            print(f"{name}: the notebook is newer, its script is rewritten")
            jupytext.write(other, script, fmt=FORMAT)
            book = jupytext.read(script)
    return book


def execute(name: str) -> None:
    """Run one notebook in a fresh kernel and store it with its outputs."""
    book = newest(name)
    NotebookClient(
        book, timeout=TIMEOUT, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number:02d}"
    book.metadata.pop("language_info", None)
    nbformat.write(book, FOLDER / f"{name}.ipynb")


def main(wanted: list[str]) -> None:
    """Execute all notebooks, or those named."""
    known = names()
    for name in wanted or known:
        if name not in known:
            raise SystemExit(f"no notebook {name!r}: there are {', '.join(known)}")
        print(name, flush=True)
        execute(name)


if __name__ == "__main__":
    main(sys.argv[1:])
