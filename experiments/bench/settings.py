"""Sizes and pace of a selection."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Settings"]


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
    """

    half_sizes: tuple[int, ...] = (4096, 10_000)
    half_dims: tuple[int, ...] = (2, 64)
    hvp_size: int = 2000
    block: int = 16
    converged_size: int = 50_000
    rounds: int = 15
    race_seconds: float = 12.0

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
        )
