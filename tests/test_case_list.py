"""The list of public cases that must have a test named after them; later issues add theirs here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAME = re.compile(r"test_([A-Z]{1,2})(\d+)(?:_|$)")


def _ids(letter: str, *numbers: int) -> set[str]:
    return {f"{letter}{number}" for number in numbers}


REQUIRED = {
    "Foundation, entropic OT": (
        _ids("O", *range(1, 8), *range(11, 16), 17, 19, 23, *range(24, 27), *range(28, 36), 37, 38)
    ),
    "Foundation, operators": _ids("N", *range(42, 49)),
    "Solvers": _ids("N", *range(1, 42), *range(49, 53)) | _ids("O", 37, 38, 39),
    "Foundation, invariants": _ids("I", *range(1, 9)),
    "Second order": _ids("O", 8, 18, *range(20, 24), 27, 36),
}


def functions_of(path: Path) -> list[ast.FunctionDef]:
    """Test functions of a file, those in test classes included."""
    tree = ast.parse(path.read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [node for node in found if node.name.startswith("test_")]


def named_cases() -> dict[str, list[str]]:
    """Case id -> tests that bear it."""
    cases: dict[str, list[str]] = {}
    for path in sorted(HERE.glob("test_*.py")):
        for test in functions_of(path):
            match = NAME.match(test.name)
            if match:
                cases.setdefault(f"{match[1]}{int(match[2])}", []).append(f"{path.name}::{test.name}")
    return cases


@pytest.mark.parametrize("group", REQUIRED)
def test_every_case_has_a_test(group: str) -> None:
    missing = sorted(REQUIRED[group] - named_cases().keys(), key=lambda c: (c[0], int(c[1:])))
    assert not missing, f"{group}: no test is named after {', '.join(missing)}"


def test_no_test_is_skipped_or_expected_to_fail() -> None:
    """A test that does not run proves nothing; only the attention tests may need their extra, jax."""
    banned = re.compile(r"pytest\.(skip|xfail)|importorskip\((?!.jax)|mark\.(skip|skipif|xfail|flaky)")
    for path in HERE.glob("*.py"):
        if path.name != Path(__file__).name:
            found = banned.search(path.read_text())
            assert not found, f"{path.name} skips a test: {found[0] if found else ''}"


def asserting_functions(tree: ast.Module) -> set[str]:
    """Names of the functions of a file that assert something, directly or through one another."""
    texts = {node.name: ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    direct = re.compile(r"\bassert|raises|warns|\bcheck_|_CHECKS|self\.assert|gradcheck")
    known = {name for name, text in texts.items() if direct.search(text)}
    while True:
        more = {
            name
            for name, text in texts.items()
            if name not in known and any(re.search(rf"\b{one}\(", text) for one in known)
        }
        if not more:
            return known
        known |= more


def test_every_test_asserts() -> None:
    for path in sorted(HERE.glob("test_*.py")):
        known = asserting_functions(ast.parse(path.read_text()))
        silent = [test.name for test in functions_of(path) if test.name not in known]
        assert not silent, f"{path.name}: {', '.join(silent)} cannot fail"


def test_names_are_unique_within_a_file() -> None:
    """A second function of one name would silently replace the first."""
    for path in sorted(HERE.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        doubled = {name for name in names if names.count(name) > 1}
        assert not doubled, f"{path.name}: {doubled}"
