"""The notebooks run as plain scripts, and each stored notebook holds its script's cells and their outputs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9][0-9]_*.py"))
LARGEST = 400_000
CALM = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"}


def sources(book: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """Kind and source of every cell."""
    return [(cell.cell_type, cell.source) for cell in book.cells]


def test_all_six_are_there():
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05", "06"]


@pytest.mark.parametrize("name", NAMES)
def test_script_runs_and_its_assertions_hold(name):
    done = subprocess.run(
        [sys.executable, f"{name}.py"],
        cwd=FOLDER,
        env={**os.environ, **CALM},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("all assertions hold")


@pytest.mark.parametrize("name", NAMES)
def test_notebook_and_script_hold_the_same_cells(name):
    script, stored = (jupytext.read(FOLDER / f"{name}{ending}") for ending in (".py", ".ipynb"))
    assert sources(stored) == sources(script), "run `make notebooks`"


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_stored_with_outputs_and_figures(name):
    path = FOLDER / f"{name}.ipynb"
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "executed in order"
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output.output_type != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    assert "all assertions hold" in outputs[-1].text
    assert path.stat().st_size < LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_notebook_uses_public_names_and_asserts(name):
    text = (FOLDER / f"{name}.py").read_text()
    imports = [line for line in text.splitlines() if "ot_newton" in line and "import" in line]
    assert imports
    allowed = ("import ot_newton as otn", "from ot_newton.attention import ")
    assert all(line.startswith(allowed) for line in imports)
    assert not re.search(r"\._[a-z]", text)
    last = text.split("# %%")[-1]
    assert last.count("\nassert ") + last.count("\n    assert ") >= 4
