"""Table `converged`: a full solve and one Hessian-vector product at large n, time and memory.

Memory is the peak resident set in a fresh process, less that of the same run at a tenth of the size; it
grows with n + m, not with n m. Run as a module it makes one such measurement and prints it as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from ot_newton.experiments.bench.resident import peak, restart_peak, run_module
from ot_newton.experiments.bench.settings import Settings

__all__ = ["rows"]

Row = dict[str, Any]
EPS, DIM = 0.05, 3
TIMEOUT = 900.0


def _run(n: int) -> Row:
    """Solve to the default tolerance, then one product with a Gaussian vector."""
    import torch

    from ot_newton.problem import OTProblem
    from ot_newton.solve import sinkhorn

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(n, DIM, generator=generator) for _ in range(2))
    v = torch.randn(n, DIM, generator=generator)
    begin = time.perf_counter()
    result = sinkhorn(OTProblem(x, y, eps=EPS), backend="cpu")
    solved = time.perf_counter()
    passes = result.plan_passes
    hessian = result.hessian("x")
    product = hessian @ v
    end = time.perf_counter()
    moved = hessian @ torch.ones(n, DIM)
    r = result.plan.row_sums()
    exact = 2.0 * r[:, None].expand(-1, DIM)
    return {
        "status": "OK" if bool(torch.isfinite(product).all()) and result.converged else "WRONG",
        "solve_status": result.statuses[0].name,
        "marginal_error": result.marginal_error,
        "tolerance": result.tol,
        "iterations": result.n_iter,
        "passes_solve": passes,
        "passes_hvp": hessian.stats.plan_passes,
        "seconds_solve": solved - begin,
        "seconds_hvp": end - solved,
        "translation_error": float((moved - exact).norm() / exact.norm()),
    }


def measure(n: int, threads: int) -> Row:
    """A warm-up at a tenth of the size, then the run; peak memory after each."""
    import torch

    torch.set_num_threads(threads)
    small = max(2, n // 10)
    _run(small)  # imports, compilation
    peaks = []
    for size in (small, n):
        restart_peak()
        row = _run(size)
        peaks.append(peak())
    grown = peaks[1] - peaks[0]
    return row | {"peak_rss": peaks[1], "rss_growth": grown, "bytes_per_point": grown / (2 * (n - small))}


def rows(settings: Settings) -> Iterator[Row]:
    """One row, measured in a process of its own.

    Args:
        settings: the size; 0 gives no row.

    Yields:
        The row, an error one if the process failed.
    """
    n = settings.converged_size
    if n == 0:
        return
    import torch

    threads = torch.get_num_threads()
    head: Row = {"kind": "run", "contestant": "cpu", "precision": "float32", "n": n, "m": n, "d": DIM}
    head |= {"eps": EPS, "threads": threads, "stopping": "default tolerance, inner residual 1e-5"}
    yield head | run_module("converged", str(n), str(threads), timeout=TIMEOUT)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))) + "\n")
