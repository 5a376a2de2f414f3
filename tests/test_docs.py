"""Python blocks of the reference pages run, page by page; links and the site's configuration hold."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path

import pytest

import ot_newton
import ot_newton.attention

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", flags=re.DOTALL | re.MULTILINE)
PAGES = sorted(path for path in DOCS.rglob("*.md") if BLOCK.search(path.read_text()))
SPECIFICATION = importlib.util.spec_from_file_location("check_links", DOCS / "check_links.py")
check_links = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(check_links)


def dedented(match: re.Match[str]) -> str:
    """The block without the indentation of a list item."""
    return re.sub(rf"^{match[1]}", "", match[2], flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(DOCS)) for p in PAGES])
@pytest.mark.filterwarnings("error::UserWarning")
def test_blocks_of_a_page_run_in_order(page):
    code = "\n\n".join(dedented(match) for match in BLOCK.finditer(page.read_text()))
    assert code.strip(), f"{page.name} has no Python block"
    with warnings.catch_warnings():
        exec(compile(code, str(page), "exec"), {"__name__": "page"})


def test_internal_links_hold(capsys):
    assert check_links.main() == 0, capsys.readouterr().out


def test_the_link_check_sees_a_broken_link(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n[a](missing.md) [b](#title) [c](#nowhere) [d](https://example.org) `[e](code.md)`\n"
    )
    monkeypatch.setattr(check_links, "ROOT", tmp_path)
    assert list(check_links.broken(page)) == [
        "page.md: missing.md: no such file",
        "page.md: #nowhere: no such heading",
    ]


def test_every_public_name_has_its_place_in_the_reference():
    listed = re.findall(r"^::: (\S+)$", "\n".join(p.read_text() for p in (DOCS / "api").glob("*.md")), re.M)
    wanted = {f"ot_newton.{name}" for name in ot_newton.__all__}
    wanted |= {f"ot_newton.attention.{name}" for name in ot_newton.attention.__all__}
    assert sorted(listed) == sorted(wanted), "docs/api"


def test_every_status_is_explained():
    page = (DOCS / "how-to" / "read-a-status.md").read_text()
    assert set(re.findall(r"^\| ([A-Z_]+) \|", page, re.M)) == set(ot_newton.Status.__members__)
