"""Aligned protein families as Stockholm files that other packages ship: where they are, and reading them.

Nothing is vendored. A family is looked up in this order: a file that the caller names; a package that is
installed (Debian's hmmer-doc, or pyhmmer, whose wheel carries LuxC); a cache folder; and hmmer-doc
downloaded into that folder by the system's own `apt-get`, where there is one.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ot_newton.errors import check_choice

__all__ = ["FAMILIES", "Alignment", "default_cache", "find_alignment", "read_alignment"]

PACKAGE = "hmmer-doc"
TUTORIAL = Path("usr/share/doc/hmmer/tutorial")
PYHMMER_FOLDER = Path("tests/data/msa")
FAMILIES = {"fn3": PACKAGE, "Pkinase": PACKAGE, "LuxC": "pyhmmer"}
"""The families with a name, and the package that has each."""
FETCH_SECONDS = 120.0


@dataclass(frozen=True)
class Alignment:
    """A multiple alignment as text.

    Attributes:
        name: of the family.
        names: of the sequences.
        rows: aligned sequences of one length; letters are residues, everything else is a gap.
        digest: hash of names and rows.
    """

    name: str
    names: tuple[str, ...] = field(repr=False)
    rows: tuple[str, ...] = field(repr=False)

    @property
    def digest(self) -> str:
        """Hash of names and rows, so that a rerun knows whether the data changed."""
        text = "\n".join((*self.names, *self.rows))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def default_cache() -> Path:
    """`ot-newton` in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "ot-newton"


def find_alignment(
    family: str, *, alignment: str | None = None, cache: str | None = None, fetch: bool = True
) -> Path:
    """The Stockholm file of a family.

    Args:
        family: one of `FAMILIES`; not used where ``alignment`` is given.
        alignment: path of a Stockholm file to use instead.
        cache: folder of downloaded files; `default_cache` by default.
        fetch: whether hmmer-doc may be downloaded into the cache.

    Raises:
        ValueError: an unknown family, no such file, or the family is nowhere; the message says what to do.
    """
    if alignment is not None:
        path = Path(alignment).expanduser()
        if not path.is_file():
            raise ValueError(f"alignment must be the path of a Stockholm file, got {alignment}: no such file")
        return path
    check_choice("family", family, tuple(FAMILIES))
    folder = default_cache() if cache is None else Path(cache).expanduser()
    if FAMILIES[family] == "pyhmmer":
        return _of_pyhmmer(family)
    known = (Path("/") / TUTORIAL, folder / PACKAGE / TUTORIAL)
    reason = "downloading was switched off (fetch = false)"
    for attempt in range(2):
        for place in known:
            if (place / f"{family}.sto").is_file():
                return place / f"{family}.sto"
        if attempt == 0 and fetch:
            reason = _download(folder) or f"its folder has no {family}.sto"
    raise ValueError(
        f"family {family!r} is not on this machine: install Debian's package {PACKAGE}, or set alignment to "
        f"the path of a Stockholm file, or family to 'LuxC', which pyhmmer carries. Looked in "
        f"{', '.join(map(str, known))}; {reason}"
    )


def _of_pyhmmer(family: str) -> Path:
    found = importlib.util.find_spec("pyhmmer")
    for root in () if found is None else found.submodule_search_locations or ():
        path = Path(root) / PYHMMER_FOLDER / f"{family}.sto"
        if path.is_file():
            return path
    missing = "pyhmmer is not installed" if found is None else "this pyhmmer was installed without its files"
    raise ValueError(
        f"family {family!r} is not on this machine: {missing}; pip install pyhmmer, or set alignment to the "
        "path of a Stockholm file"
    )


def _download(folder: Path) -> str:
    """Download hmmer-doc and unpack it into the cache, without installing it; returns why not, or ""."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            return f"it cannot be downloaded here: no {tool}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            _run(["apt-get", "download", PACKAGE], work)
            packages = [str(path) for path in Path(work).glob(f"{PACKAGE}*.deb")]
            _run(["dpkg-deb", "-x", *packages[:1], "files"], work)
            if not (folder / PACKAGE).exists():
                os.replace(Path(work) / "files", folder / PACKAGE)
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or "").splitlines() if line.startswith("E:")]
        return f"{' '.join(error.cmd[:3])} failed: {(lines or ['no message'])[-1]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"downloading {PACKAGE} into {folder} failed: {error}"
    return ""


def _run(command: list[str], folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=FETCH_SECONDS)


def read_alignment(path: str | os.PathLike[str]) -> Alignment:
    """The first alignment of a Stockholm file.

    Raises:
        ValueError: pyhmmer is missing, or the file is not a Stockholm alignment of at least two sequences.
    """
    try:
        easel = importlib.import_module("pyhmmer.easel")
    except ImportError as error:
        raise ValueError("reading a Stockholm file needs pyhmmer: pip install 'ot-newton[pfam]'") from error
    name = os.fspath(path)
    try:
        with easel.MSAFile(name, format="stockholm") as stream:
            found = stream.read()
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: not a Stockholm alignment: {error}") from error
    if found is None or len(found.names) < 2:
        raise ValueError(f"{name}: expected an alignment of at least 2 sequences, found fewer")
    names = tuple(_text(one) for one in found.names)
    title = _text(found.name) if found.name else Path(name).stem
    return Alignment(title, names, tuple(str(row) for row in found.alignment))


def _text(value: str | bytes) -> str:
    """Names are bytes in older releases of pyhmmer."""
    return value.decode() if isinstance(value, bytes) else value
