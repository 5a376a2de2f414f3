"""Check the internal links of README and docs: files, anchors, pages of the site and its pictures. Offline.

Run as `python docs/check_links.py`, from anywhere; exit status 1 if a link leads nowhere.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|<(?:img|a)[^>]*(?:src|href)=\"([^\"]+)\"")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", flags=re.DOTALL | re.MULTILINE)
NAV = re.compile(r"^\s+- .*?:\s+(\S+\.(?:md|ipynb))$", flags=re.MULTILINE)
OUTSIDE = ("http://", "https://", "mailto:")


def pages() -> list[Path]:
    """README and the like, the pages of the site, and the notebooks."""
    top = sorted(ROOT.glob("*.md"))
    return top + sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "notebooks").glob("*.ipynb"))


def text_of(page: Path) -> str:
    """Markdown of a page, without code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return CODE.sub("", text)


def anchors(page: Path) -> set[str]:
    """Ids of a page's headings, as GitHub and MkDocs make them."""
    found = set()
    for title in re.findall(r"^#+\s+(.+?)\s*#*$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", title.lower())
        found.add(re.sub(r"\s+", "-", plain.strip()))
    return found


def broken(page: Path) -> Iterator[str]:
    """Links of one page that lead nowhere."""
    for match in LINK.finditer(text_of(page)):
        target = match[1] or match[2]
        if target.startswith(OUTSIDE):
            continue
        name, _, anchor = target.partition("#")
        goal = (page.parent / name).resolve() if name else page
        if not goal.exists():
            yield f"{page.relative_to(ROOT)}: {target}: no such file"
        elif anchor and goal.suffix == ".md" and anchor not in anchors(goal):
            yield f"{page.relative_to(ROOT)}: {target}: no such heading"


def unlisted() -> Iterator[str]:
    """Pages named in mkdocs.yml that do not exist, and pages of docs it does not name."""
    named = set(NAV.findall((ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    docs = ROOT / "docs"
    present = {str(p.relative_to(docs)) for p in docs.rglob("*.md")}
    present |= {f"notebooks/{p.name}" for p in (ROOT / "notebooks").glob("*.ipynb")}
    yield from (f"mkdocs.yml: {name}: no such page" for name in sorted(named - present))
    yield from (f"mkdocs.yml: {name} is not in nav" for name in sorted(present - named))


def main() -> int:
    """Print what is broken; 1 if anything is."""
    found = [line for page in pages() for line in broken(page)] + list(unlisted())
    sys.stdout.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
