"""What a half-iteration costs at least here: a product that stays in cache and an exponential in L1.

    roofline = (sgemm of inner size d on one 256 x 512 tile + fastest 2^x) per pair / threads

The two pieces are measured on one thread in the race of the contestants, so that they see the same
machine. The exponential is the fastest of torch's (MKL or SLEEF) and ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ot_newton.experiments.bench.harness import Contestant, Entry, Job

if TYPE_CHECKING:
    from ot_newton.experiments.bench.half_case import HalfCase

__all__ = ["PIECES", "OneThread", "combine", "pieces"]

TILE = (256, 512)
REPEATS = 64
PIECES = ("piece: sgemm tile", "piece: exp2, torch", "piece: exp2, ours")


class OneThread:
    """Torch on one thread for the duration of a call."""

    def __enter__(self) -> None:
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *exc: object) -> None:
        torch.set_num_threads(self.threads)


def _sgemm(case: HalfCase) -> Job:
    rows, cols = TILE
    left = case.problem.x[0, :].expand(rows, -1).contiguous()
    right = case.problem.y[:cols].mT.contiguous()
    if right.shape[1] < cols:
        right = right.repeat(1, cols)[:, :cols].contiguous()
    out = torch.empty(rows, cols)

    def run() -> None:
        with OneThread():
            for _ in range(REPEATS):
                torch.mm(left, right, out=out)

    return Job(run, lambda _: None)


def _torch_exp2() -> Job:
    exponents = torch.linspace(-30.0, 0.0, 4096).reshape(64, 64)
    out = torch.empty_like(exponents)

    def run() -> None:
        with OneThread():
            for _ in range(REPEATS):
                torch.exp2(exponents, out=out)

    return Job(run, lambda _: None)


def _our_exp2() -> Job:
    from ot_newton.backends.cpu_strips import BLOCK, GROUP, exp2_strip, njit

    def loop(strip: Any, groups: int, count: int) -> None:
        for _ in range(count):
            exp2_strip(strip, groups)

    repeat = njit(loop)
    strip = np.linspace(-30.0, 0.0, 4 * BLOCK, dtype=np.float32).reshape(4, BLOCK)
    return Job(lambda: repeat(strip, BLOCK // GROUP, REPEATS), lambda _: None)


def pieces(case: HalfCase) -> list[Contestant]:
    """The pieces, scaled to all pairs of the case and to torch's number of threads."""
    from ot_newton.backends.cpu_strips import BLOCK

    pairs = case.problem.n * case.problem.m / torch.get_num_threads()
    done = (TILE[0] * TILE[1] * REPEATS, 64 * 64 * REPEATS, 4 * BLOCK * REPEATS)
    jobs = (lambda: _sgemm(case), _torch_exp2, _our_exp2)
    return [
        Contestant(name, job, scale=pairs / count, stopping="one thread, in cache, scaled")
        for name, job, count in zip(PIECES, jobs, done, strict=True)
    ]


def combine(entries: Sequence[Entry]) -> Entry:
    """The roofline as an entry whose times are the sums of those of its pieces, turn by turn.

    Args:
        entries: those of the pieces.
    """
    product, *exponentials = entries
    whole = Entry(Contestant("roofline", lambda: Job(lambda: None), stopping="sgemm tile + fastest exp2"))
    timed = [entry for entry in exponentials if entry.times]
    if not product.times or not timed:
        whole.status = "ERROR"
        whole.message = "; ".join(entry.message for entry in entries if entry.message)
        return whole
    fastest = min(timed, key=lambda entry: entry.median)
    whole.times = [a + b for a, b in zip(product.times, fastest.times, strict=False)]
    whole.first = 0.0
    return whole
