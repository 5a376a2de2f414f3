"""Nsight Compute on one half-iteration: sections, command line, and a driver that says why it did not run.

    python -m ot_newton.experiments.bench.nsight --n 16384 --d 64 --precision tf32 --out results

Without CUDA, Triton or `ncu` it prints the reason and the command line, and its exit status is 0. Nsight
Compute needs the right to read performance counters; a refusal is reported as it words it.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import torch

from ot_newton.backends.triton_kernels.configs import PRECISIONS
from ot_newton.errors import check_choice, check_integer

__all__ = ["METRICS", "SECTIONS", "command", "parse", "profile", "unavailable"]

SECTIONS = (
    "SpeedOfLight",
    "SpeedOfLight_RooflineChart",
    "LaunchStats",
    "Occupancy",
    "ComputeWorkloadAnalysis",
    "InstructionStats",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",
    "SchedulerStats",
    "WarpStateStats",
)
METRICS = ("dram__bytes.sum", "lts__t_bytes.sum", "l1tex__t_bytes.sum", "smsp__inst_executed.sum")
"""Bytes of memory, of L2 and of L1, to lay beside the counted ones, and warp instructions."""

MODULE = "ot_newton.experiments.bench.nsight"
KERNEL = "lse_kernel"
WARM_UP = 3
EPS = 0.25
TIMEOUT = 900.0


def unavailable() -> str:
    """Why nothing can be profiled here, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device (torch.cuda.is_available() is False)"
    if shutil.which("ncu") is None:
        return "ncu is not on PATH: install Nsight Compute (it comes with the CUDA toolkit)"
    return ""


def command(*, n: int, d: int, precision: str, report: Path) -> list[str]:
    """The command line: one launch of the log-sum-exp kernel after some warm ones.

    Args:
        n: points of both clouds.
        d: dimension.
        precision: of the products.
        report: where Nsight Compute's own file goes, without its ending.

    Raises:
        ValueError: a value out of range; TypeError: of the wrong kind.
    """
    check_integer("n", n, low=1)
    check_integer("d", d, low=1)
    check_choice("precision", precision, PRECISIONS)
    sections = [part for name in SECTIONS for part in ("--section", name)]
    target = [sys.executable, "-m", MODULE, "--target", "--n", str(n), "--d", str(d)]
    return [
        "ncu", "--target-processes", "all", "--kernel-name", f"regex:{KERNEL}",
        "--launch-skip", str(WARM_UP), "--launch-count", "1", *sections, "--metrics", ",".join(METRICS),
        "--force-overwrite", "--export", str(report), *target, "--precision", precision,
    ]  # fmt: skip


def parse(text: str) -> list[dict[str, str]]:
    """Section, metric, unit and value of every line of ``ncu --page details --csv``; the rest is noise."""
    lines = text.splitlines()
    start = next((k for k, line in enumerate(lines) if '"Metric Name"' in line), len(lines))
    table = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    names = {
        "section": "Section Name",
        "metric": "Metric Name",
        "unit": "Metric Unit",
        "value": "Metric Value",
    }
    found = [{key: line.get(name) or "" for key, name in names.items()} for line in table]
    return [one for one in found if one["metric"]]


def profile(*, n: int, d: int, precision: str, out: Path) -> dict[str, Any]:
    """Profile one half-iteration, or say why not.

    Args:
        n: points of both clouds.
        d: dimension.
        precision: of the products.
        out: folder of Nsight Compute's report.

    Returns:
        ``status``: PROFILED or SKIPPED; ``message``; ``command``; ``report``; ``metrics``, see `parse`.

    Raises:
        RuntimeError: Nsight Compute failed, with its last words.
    """
    report = out / f"nsight-lse-n{n}-d{d}-{precision}"
    line = command(n=n, d=d, precision=precision, report=report)
    row: dict[str, Any] = {"command": line, "report": f"{report}.ncu-rep", "metrics": []}
    reason = unavailable()
    if reason:
        return row | {"status": "SKIPPED", "message": f"not profiled: {reason}"}
    _call(line)
    details = _call(
        ["ncu", "--import", f"{report}.ncu-rep", "--page", "details", "--csv", "--print-units", "base"]
    )
    metrics = parse(details)
    if not metrics:
        raise RuntimeError(f"ncu reported no metrics for {KERNEL}: {details.strip()[-200:]}")
    return row | {"status": "PROFILED", "message": "", "metrics": metrics}


def _call(line: list[str]) -> str:
    """Standard output of a command.

    Raises:
        RuntimeError: it failed or took too long.
    """
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{line[0]} was not done within {TIMEOUT:g} s") from error
    if done.returncode != 0:
        # Nsight Compute words its errors on standard output.
        said = [one for one in (*done.stdout.splitlines(), *done.stderr.splitlines()) if one.strip()]
        errors = [one for one in said if "ERROR" in one] or said[-1:] or ["no message"]
        raise RuntimeError(f"{line[0]} ended with status {done.returncode}: {errors[0]}")
    return done.stdout


def launch_target(n: int, d: int, precision: str) -> None:
    """What is profiled: the last of some stabilized half-iterations; `WARM_UP` launches are before it."""
    from ot_newton.backends.triton_kernels.launch import TritonBackend
    from ot_newton.protocols import PassCounter

    device = torch.device("cuda")
    generator = torch.Generator(device=device).manual_seed(0)
    scale = (2.0 / EPS / math.log(2.0) / d) ** 0.5
    q, k = (scale * torch.randn(1, n, d, generator=generator, device=device) for _ in range(2))
    weight = torch.full((1, n), 1.0 / n, device=device)
    tiles = TritonBackend(precision).bind(q, k, PassCounter())
    bias = -0.5 * k.square().sum(-1)
    stabilizer = -tiles.lse(bias, weight, 1)[0]
    for _ in range(WARM_UP):
        tiles.lse(bias, weight, 1, stabilizer)
    torch.cuda.synchronize()


def summary(row: Mapping[str, Any]) -> str:
    """One line about a row of `profile`."""
    if row["status"] != "PROFILED":
        return str(row["message"])
    wanted = {one["metric"]: f"{one['value']} {one['unit']}".strip() for one in row["metrics"]}
    return ", ".join(f"{name} {wanted[name]}" for name in METRICS if name in wanted) or "profiled"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--n", type=click.IntRange(min=1), default=16384, show_default=True, help="Points of both clouds."
)
@click.option("--d", type=click.IntRange(min=1), default=64, show_default=True, help="Dimension.")
@click.option("--precision", type=click.Choice(PRECISIONS), default="ieee", show_default=True)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("results"), show_default=True
)
@click.option("--target", is_flag=True, help="Run the kernel alone: what ncu launches.")
def main(n: int, d: int, precision: str, out: Path, target: bool) -> None:
    """Profile one half-iteration with Nsight Compute, or say why not."""
    if target:
        launch_target(n, d, precision)
        return
    out.mkdir(parents=True, exist_ok=True)
    try:
        row = profile(n=n, d=d, precision=precision, out=out)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    click.echo(summary(row))
    click.echo(" ".join(row["command"]))


if __name__ == "__main__":
    main()
