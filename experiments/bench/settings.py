"""Sizes and pace of a selection."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ot_newton.errors import check_choice

__all__ = ["Settings", "Size"]


class Size(NamedTuple):
    """One race of the matched tables.

    Attributes:
        n: points in x.
        m: points in y.
        d: dimension.
        iterations: exactly so many; 0 to convergence.
        same: y = x, the self problem.
    """

    n: int
    m: int
    d: int
    iterations: int = 0
    same: bool = False


COUNT = 10


def _matrix(sizes: tuple[int, ...], large: tuple[int, ...]) -> tuple[Size, ...]:
    """The full matrix of a table, least work first.

    Args:
        sizes: n, with m = n and n/2, d = 2 and 64, and d = 1024 at the smallest n, by both rules.
        large: n = m at d = 2, by the count.
    """
    shapes = product(sizes, (1, 2), (2, 64, 1024), (COUNT, 0))
    small = [Size(n, n // k, d, count) for n, k, d, count in shapes if d < 1024 or n == min(sizes)]
    every = [*small, *(Size(n, n, 2, COUNT) for n in large)]
    return tuple(sorted(every, key=lambda size: size.n * size.m * (size.d + 30)))


@dataclass(frozen=True)
class Settings:
    """What a run of the bench covers; the defaults take about five minutes on two cores.

    Attributes:
        half_sizes: n = m of the half-iterations.
        half_dims: their dimensions.
        hvp_size: n = m of the Hessian tables.
        block: right-hand sides of the block.
        converged_size: n = m of the converged run, 0 to leave it out.
        rounds: most turns of a contestant.
        race_seconds: time of one race.
        forward_sizes: races of the table `forward`.
        backward_sizes: of `backward`.
        hvp_sizes: of `hvp`.
        peer_seconds: time of one of these races.
        memory_sizes: n = m at which the table `memory` measures the peak.
        memory_operations: of what.
    """

    half_sizes: tuple[int, ...] = (4096, 10_000)
    half_dims: tuple[int, ...] = (2, 64)
    hvp_size: int = 2000
    block: int = 16
    converged_size: int = 50_000
    rounds: int = 15
    race_seconds: float = 12.0
    forward_sizes: tuple[Size, ...] = (
        Size(1000, 1000, 2, COUNT),
        Size(1000, 1000, 2),
        Size(1000, 500, 64, COUNT),
        Size(1000, 1000, 2, 0, True),
    )
    backward_sizes: tuple[Size, ...] = (Size(1000, 500, 2, COUNT), Size(500, 500, 64))
    hvp_sizes: tuple[Size, ...] = (Size(1000, 500, 2, COUNT), Size(500, 500, 64))
    peer_seconds: float = 3.0
    memory_sizes: tuple[int, ...] = (1000, 2000, 4000)
    memory_operations: tuple[str, ...] = ("forward",)

    @classmethod
    def of(cls, preset: str) -> Settings:
        """The settings of that name.

        Raises:
            ValueError: unknown.
        """
        chosen = check_choice("preset", preset, ("default", "smoke", "full"))
        return cls() if chosen == "default" else cls.smoke() if chosen == "smoke" else cls.full()

    @classmethod
    def smoke(cls) -> Settings:
        """A run of everything in a minute, too small for its ratios to mean anything."""
        return cls(
            half_sizes=(256,),
            half_dims=(2, 64),
            hvp_size=128,
            block=4,
            converged_size=1000,
            rounds=3,
            race_seconds=1.0,
            forward_sizes=(Size(128, 96, 2, COUNT), Size(128, 96, 2), Size(96, 96, 2, COUNT, True)),
            backward_sizes=(Size(96, 64, 2, COUNT),),
            hvp_sizes=(Size(96, 64, 2),),
            peer_seconds=0.5,
            memory_sizes=(200, 400, 600),
        )

    @classmethod
    def full(cls) -> Settings:
        """The whole matrix of the matched tables: n up to 50,000 on the streaming ones; hours."""
        sizes, large = (1000, 4000), (16_000, 50_000)
        itself = tuple(Size(n, n, 2, count, True) for n in sizes for count in (COUNT, 0))
        return cls(
            forward_sizes=itself + _matrix(sizes, large),
            backward_sizes=_matrix(sizes, large),
            hvp_sizes=_matrix(sizes, large),
            peer_seconds=15.0,
            memory_operations=("forward", "backward", "hvp"),
        )
