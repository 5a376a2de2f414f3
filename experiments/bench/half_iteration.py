"""Table `half-iteration`: one update of f, ours beside the peers and beside the machine's roofline."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ot_newton.experiments.bench import peer_keops, peer_ott, peer_pot, roofline
from ot_newton.experiments.bench.half_case import HalfCase, backend_job, make_case
from ot_newton.experiments.bench.harness import Contestant, Entry, Job, Pace, Verdict, best_of, claim, race
from ot_newton.experiments.bench.settings import Settings

__all__ = ["rows"]

Row = dict[str, Any]
TILE_ROWS = 256
STORED_UP_TO = 5000
"""Points up to which the contestants that store the matrix of all pairs take part."""

SPEEDUPS = {2: {"OTT dense": 4.0, "KeOps": 15.0}, 64: {"OTT dense": 1.3, "KeOps": 10.0}}
ROOFLINE_FACTOR = 1.5
POT_FACTOR = 1.1


def _torch_tile(case: HalfCase) -> Job:
    """The half-iteration as one writes it in plain torch: product, bias, exp2, sum, tile by tile."""
    from ot_newton.potentials import Biases, biases_to_potentials, operands

    problem = case.problem
    q, k = (cloud[0] for cloud in operands(problem, problem.eps))
    b = problem.centred.b[0]

    def run() -> Tensor:
        sums = []
        for rows, bias in zip(torch.split(q, TILE_ROWS), torch.split(case.row[0], TILE_ROWS), strict=True):
            tile = rows @ k.mT
            tile.add_(case.col).add_(bias[:, None]).clamp_(-100.0, 120.0).exp2_()
            sums.append(tile @ b)
        return torch.cat(sums)

    def answer(total: Tensor) -> Tensor:
        return biases_to_potentials(problem, Biases((case.row - total.log2()[None]), case.col)).f

    return Job(run, answer)


def _contestants(case: HalfCase) -> list[Contestant]:
    names = ["cpu", "torch_tiles"] + (["dense"] if case.problem.n <= STORED_UP_TO else [])
    ours = [Contestant(name, partial(backend_job, case, name)) for name in names]
    kinds = {"OTT dense": "point cloud", "OTT dense, stored cost": "stored cost", "OTT online": "online"}
    ott = [Contestant(name, partial(peer_ott.half_iteration, case, kind)) for name, kind in kinds.items()]
    rest = [
        Contestant("KeOps", partial(peer_keops.half_iteration, case)),
        Contestant("plain torch tile", partial(_torch_tile, case)),
    ]
    if case.problem.n <= STORED_UP_TO:
        rest.append(Contestant("POT kernel matrix", partial(peer_pot.half_iteration, case)))
    return ours + ott + rest


def _claims(entries: list[Entry], roof: Entry, d: int) -> Iterator[Row]:
    named = {entry.contestant.name: entry for entry in entries}
    for peer, target in SPEEDUPS.get(d, {}).items():
        yield claim(named["cpu"], named[peer], target=target)
    yield claim(named["cpu"], roof, target=ROOFLINE_FACTOR, at_least=False, what="against the")
    if "dense" in named and "POT kernel matrix" in named:
        peer_entry = best_of(entries, ["POT kernel matrix"])
        yield claim(named["dense"], peer_entry, target=POT_FACTOR, at_least=False, what="against")


def rows(settings: Settings) -> Iterator[Row]:
    """The rows of every case, n = m and d as the settings say.

    Args:
        settings: sizes and pace.

    Yields:
        One row per contestant, then the claims.
    """
    for n in settings.half_sizes:
        for d in settings.half_dims:
            case = make_case(n, d)
            pieces = roofline.pieces(case)

            def check(answer: Any, case: HalfCase = case) -> Verdict:
                return Verdict(0.0, 0.0) if answer is None else case.check(answer)

            pace = Pace(seconds=settings.race_seconds, rounds=settings.rounds)
            entries = race(_contestants(case) + pieces, check, pace)
            timed, parts = entries[: -len(pieces)], entries[-len(pieces) :]
            whole = roofline.combine(parts)
            head = {"n": n, "m": n, "d": d, "eps": case.problem.eps, "threads": torch.get_num_threads()}
            for row in [*(e.row() for e in [*timed, *parts, whole]), *_claims(timed, whole, d)]:
                if "seconds_median" in row:
                    row["ns_per_pair"] = 1e9 * row["seconds_median"] / n**2
                yield head | row
