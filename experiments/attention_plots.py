"""Figures of `pfam-attention` and `tail-exactness` from rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ot_newton.experiments.plots import BLUE, GREEN, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_couplings", "plot_curves", "plot_decay"]

Row = Mapping[str, Any]
PANELS = (("reconstruction", "reconstruction (nats)"), ("sparse", "sparse CE (nats), not trained on"))
STYLES = (("-", BLUE), ("--", ORANGE), ("-.", GREEN), ("-", "#CC79A7"))
REFERENCE_STYLES = {"uniform": ":", "diagonal": "--", "aligned": "-"}
COLUMNS = 2


def _grid(count: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Axes]]:
    """A figure that needs no display, with `count` axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * lines), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(lines, columns, k + 1) for k in range(count)]


def plot_curves(rows: Sequence[Row], references: Mapping[str, Any], path: Path) -> Path:
    """Held-out reconstruction and sparse CE against the step, with the references as lines.

    Args:
        rows: with ``curves``.
        references: measurements by name; may be empty.
        path: of the image.
    """
    figure, panels = _grid(len(PANELS), COLUMNS, (4.6, 3.8))
    for axes, (key, label) in zip(panels, PANELS, strict=True):
        for number, row in enumerate(rows):
            line, colour = STYLES[number % len(STYLES)]
            curves = row["curves"]
            axes.plot(curves["step"], curves[key], ls=line, color=colour, lw=1.5, label=row["label"])
        for name, found in references.items():
            if not (key == "sparse" and name == "aligned"):  # 0 by definition
                line = REFERENCE_STYLES.get(name, "-.")
                axes.axhline(found[key], color=GREY, ls=line, lw=1.0, label=f"reference: {name}")
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    panels[0].legend(fontsize=8, loc="center right")
    figure.savefig(path, dpi=150)
    return path


def plot_couplings(rows: Sequence[Row], path: Path) -> Path:
    """Row-normalized coupling of one held-out pair per run, with the aligned residues as dots.

    Args:
        rows: with ``plan`` (n, m), ``partner`` and ``pair``.
        path: of the image.
    """
    figure, panels = _grid(len(rows), COLUMNS, (4.4, 4.2))
    for axes, row in zip(panels, rows, strict=True):
        plan = np.array(row["plan"])
        shown = axes.imshow(
            plan, cmap="Blues", vmin=0.0, vmax=float(np.quantile(plan, 0.999)), aspect="equal"
        )
        aligned = [(j, i) for i, j in enumerate(row["partner"]) if j >= 0]
        axes.plot(*zip(*aligned, strict=True), ".", color=ORANGE, ms=2.0)
        axes.set_title(row["label"], fontsize=9)
        axes.set_xlabel(row["pair"][1], fontsize=8)
        axes.set_ylabel(row["pair"][0], fontsize=8)
        figure.colorbar(shown, ax=axes, shrink=0.8)
    figure.savefig(path, dpi=150)
    return path


def plot_decay(series: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> Path:
    """Relative bias against the tail depth R.

    Args:
        series: by case, (R, bias) pairs; dashed where the name starts with "band".
        path: of the image.
    """
    figure, (axes,) = _grid(1, 1, (7.0, 4.4))
    markers = "osd^vP*X"
    for number, (name, points) in enumerate(series.items()):
        depth, bias = zip(*((r, x) for r, x in points if x > 0), strict=True)
        line, colour = ("--", ORANGE) if name.startswith("band") else ("-", BLUE)
        marker = markers[number % len(markers)]
        axes.plot(depth, bias, ls=line, color=colour, marker=marker, ms=5, lw=1.2, label=name)
    axes.axvline(2, color=GREY, lw=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("tail steps R")
    axes.set_ylabel("relative bias of the gradient")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    return path
