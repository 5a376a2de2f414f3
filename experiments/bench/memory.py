"""Table `memory`: peak resident memory of every contestant, as slope and intercept.

Each is run in a process of its own at growing n = m, twice at each size so that compilation is over, and
the peak of the second run is kept. A least-squares line over n + m gives bytes per point, one over n m
bytes per pair; the row says which of the two fits. Run as a module it makes one such series and prints it
as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ot_newton.experiments.bench.resident import peak, restart_peak, run_module
from ot_newton.experiments.bench.settings import Settings

__all__ = ["fit", "measure", "rows"]

Row = dict[str, Any]
DIM, COUNT = 3, 10
TIMEOUT = 300.0


def fit(sizes: Sequence[int], peaks: Sequence[int]) -> Row:
    """Slope, intercept and largest relative residual of the better of two lines.

    Args:
        sizes: n = m.
        peaks: bytes.
    """
    found = []
    for unit, counts in (("point", [2 * n for n in sizes]), ("pair", [n * n for n in sizes])):
        slope, intercept = np.polyfit(np.array(counts, float), np.array(peaks, float), 1)
        errors = np.abs(slope * np.array(counts) + intercept - np.array(peaks))
        found.append((float(errors.max()), unit, float(slope), float(intercept)))
    worst, unit, slope, intercept = min(found)
    slopes = {f"bytes_per_{name}": value for _, name, value, _ in found}
    return slopes | {
        "grows_with": f"{unit}s",
        "slope": slope,
        "intercept": intercept,
        "residual": worst / max(peaks),
    }


def measure(name: str, operation: str, sizes: Sequence[int], threads: int) -> Row:
    """Peaks of one contestant in this process, and their line.

    Args:
        name: of its adapter.
        operation: "forward", "backward" or "hvp".
        sizes: n = m, growing.
        threads: for torch.
    """
    import torch

    from ot_newton.experiments.bench.adapters import find
    from ot_newton.experiments.bench.tasks import Rule, make_task

    torch.set_num_threads(threads)
    adapter, peaks = find(name), []
    for n in sizes:
        job = adapter.prepare(operation, make_task(n, n, DIM, Rule(COUNT)))
        job.run()
        restart_peak()
        job.run()
        peaks.append(peak())
        del job
    return {"status": "OK", "sizes": list(sizes), "peaks": peaks} | fit(sizes, peaks)


def rows(settings: Settings) -> Iterator[Row]:
    """One row per contestant and operation.

    Args:
        settings: sizes and operations.

    Yields:
        The rows; an error one where the process failed.
    """
    import torch

    from ot_newton.experiments.bench.adapters import ADAPTERS, present

    threads = torch.get_num_threads()
    sizes = ",".join(map(str, settings.memory_sizes))
    for operation in settings.memory_operations:
        for adapter in present(operation, ADAPTERS, max(settings.memory_sizes) ** 2):
            head: Row = {"kind": "memory", "contestant": adapter.name, "operation": operation, "d": DIM}
            head |= {"precision": "float32", "stopping": f"{COUNT} iterations", "threads": threads}
            yield head | run_module("memory", adapter.name, operation, sizes, str(threads), timeout=TIMEOUT)


if __name__ == "__main__":
    chosen = [int(size) for size in sys.argv[3].split(",")]
    found = measure(sys.argv[1], sys.argv[2], chosen, int(sys.argv[4]))
    sys.stdout.write("\n" + json.dumps(found) + "\n")
