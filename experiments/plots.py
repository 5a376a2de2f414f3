"""Figures from rows alone; colours that stay apart for colour-blind readers (Okabe and Ito)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_errors", "plot_lines", "plot_passes", "plot_trajectory", "plot_values"]

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
Row = Mapping[str, Any]


def _figure(rows: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(rows, 1, k + 1) for k in range(rows)]


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path


def plot_trajectory(row: Row, path: Path) -> Path:
    """Loss and lambda_min against the step of one run, with switches of method and certified saddles marked.

    Args:
        row: with ``trace``: lists ``step``, ``loss``; ``probe_step``, ``lambda_min``; ``switches``: step,
            action and reason of each. ``saddles``, if any: ``step``, ``value`` and ``lambda_min`` of each.
        path: of the image.
    """
    trace = row["trace"]
    figure, (top, bottom) = _figure(2, 6.0)
    top.plot(trace["step"], trace["loss"], color=BLUE, lw=1.5)
    if row.get("value_reference") is not None:
        top.axhline(row["value_reference"], color=GREY, ls=":", lw=1.2, label=f"loss at {row['reference']}")
    top.set_yscale("log")
    top.set_ylabel("loss OT_eps(XW, Y)")
    bottom.plot(trace["probe_step"], trace["lambda_min"], color=GREEN, marker="o", ms=3, lw=1.2)
    bottom.axhline(0.0, color=GREY, lw=0.8)
    bottom.set_ylabel("lambda_min of the Hessian")
    bottom.set_xlabel("step")
    scale = max((abs(v) for v in trace["lambda_min"]), default=1.0)
    bottom.set_yscale("symlog", linthresh=max(scale, 1e-12) * 1e-2)
    saddles = row.get("saddles", ())
    for axes, name in ((top, "value"), (bottom, "lambda_min")):
        at = [saddle["step"] for saddle in saddles], [saddle[name] for saddle in saddles]
        axes.plot(*at, "D", color=ORANGE, ms=6, label="certified saddle" if saddles else None)
    styles = {"newton": ("--", ORANGE), "first-order": ("-.", BLUE)}
    for axes in (top, bottom):
        seen: set[str] = set()
        for step, phase, _ in trace["switches"]:
            style, colour = styles.get(phase, (":", GREY))
            axes.axvline(
                step, color=colour, ls=style, lw=1.0, label=None if phase in seen else f"switch to {phase}"
            )
            seen.add(phase)
    if top.get_legend_handles_labels()[0]:
        top.legend(loc="upper right", fontsize=8)
    top.set_title(f"{row['label']}: {row['status']}", fontsize=10)
    return _save(figure, path)


def plot_errors(rows: Sequence[Row], radius: float, path: Path) -> Path:
    """`|W - W*|_F` per run, with the radius that counts as recovery."""
    figure, (axes,) = _figure(1, 3.6)
    heights = [row["w_error"] for row in rows]
    colours = [GREEN if row["recovery"] else ORANGE for row in rows]
    axes.bar(range(len(rows)), heights, color=colours)
    axes.axhline(radius, color=GREY, ls="--", lw=1.2, label=f"recovery: at most {radius:g}")
    axes.set_yscale("log")
    axes.set_ylabel("|W - W*|_F")
    return _label_runs(figure, axes, rows, path)


def plot_values(rows: Sequence[Row], path: Path) -> Path:
    """Final value per run beside the value at the reference."""
    figure, (axes,) = _figure(1, 3.6)
    axes.plot(range(len(rows)), [row["value"] for row in rows], "o", color=BLUE, label="certified minimum")
    reference = [row["value_reference"] for row in rows]
    if all(value is not None for value in reference) and rows:
        axes.plot(range(len(rows)), reference, "_", ms=14, color=ORANGE, label=f"at {rows[0]['reference']}")
    axes.set_ylabel("loss OT_eps(XW, Y)")
    return _label_runs(figure, axes, rows, path)


def plot_passes(series: Mapping[str, Mapping[str, float]], path: Path) -> Path:
    """Plan passes of each strategy, sorted over the problems it ran.

    Args:
        series: by strategy, then by problem.
        path: of the image.
    """
    figure, (axes,) = _figure(1, 3.6)
    for (name, values), colour in zip(series.items(), (BLUE, ORANGE, GREEN, GREY), strict=False):
        axes.plot(range(1, len(values) + 1), sorted(values.values()), color=colour, lw=1.5, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("problems, sorted by passes")
    axes.set_ylabel("plan passes")
    axes.legend(fontsize=8)
    return _save(figure, path)


def plot_lines(
    series: Mapping[str, Sequence[tuple[float, float]]], path: Path, *, x: str, y: str, title: str = ""
) -> Path:
    """Lines with markers on doubly logarithmic axes; points that are not positive are left out.

    Args:
        series: by name, (x, y) pairs.
        path: of the image.
        x: label.
        y: label.
        title: above the axes.
    """
    figure, (axes,) = _figure(1, 4.0)
    styles = ("-", "--", ":", "-.")
    for number, (name, points) in enumerate(series.items()):
        kept = sorted((u, v) for u, v in points if u > 0 and v > 0)
        colour = (BLUE, ORANGE, GREEN, GREY)[number % 4]
        xs, ys = [u for u, _ in kept], [v for _, v in kept]
        axes.plot(xs, ys, color=colour, ls=styles[number // 4 % 4], marker="o", ms=3, lw=1.3, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    return _save(figure, path)


def _label_runs(figure: Figure, axes: Axes, rows: Sequence[Row], path: Path) -> Path:
    if len(rows) <= 40:
        axes.set_xticks(range(len(rows)), [row["label"] for row in rows], rotation=60, ha="right", fontsize=7)
    axes.set_xlabel("run")
    axes.legend(fontsize=8)
    return _save(figure, path)
