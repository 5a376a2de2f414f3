"""What one step of a compiled sweep executes, its inner loop over coordinates weighted by its trips."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.tools.disasm import get_sass

from ot_newton.backends.triton_kernels import aot
from ot_newton.backends.triton_kernels.configs import LARGE_BLOCK, KernelKey, TileConfig

__all__ = ["Step", "compile_step", "executed"]

Code = Sequence[tuple[str, int]]
FMA = {"FFMA": 1, "FFMA2": 2}
GROUPS = {
    "exp2": ("MUFU.EX2",),
    "shared": ("LDS", "STS", "LDSM"),
    "global": ("LDG", "LDGSTS", "STG"),
}


@dataclass(frozen=True)
class Step:
    """One step of the first sweep of a kernel, per thread.

    Attributes:
        report: the whole kernel.
        executed: instructions by name, inner loops weighted.
        trips: trips of the loop over coordinates, 1 if there is none.
    """

    report: aot.Report
    executed: Counter[str]
    trips: int

    @property
    def per_pair(self) -> dict[str, float]:
        """Instructions issued per pair (i, j), by group.

        fma: multiply-adds in float32 (a packed one counts twice); tensor_core: of any shape; exp2; shared
        and global: memory instructions, copies from global to shared under global; issued: all.
        """
        pairs = self.report.pairs
        total = self.executed
        fma = sum(FMA.get(name.partition(".")[0], 0) * count for name, count in total.items())
        groups = {
            group: sum(count for name, count in total.items() if _one_of(name, prefixes))
            for group, prefixes in GROUPS.items()
        }
        counts = {"fma": fma, "tensor_core": _tensor_core(total), **groups, "issued": sum(total.values())}
        return {name: count / pairs for name, count in counts.items()}


def _one_of(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def compile_step(key: KernelKey, config: TileConfig, arch: int, d: int) -> Step:
    """Compile a kernel and count what a step of its first sweep executes.

    Args:
        key: the kernel; the log-sum-exp's first sweep is the stabilized one.
        config: its tile.
        arch: 80, 90 or 100.
        d: stored coordinates of a point, for the trips of the loop over them.

    Raises:
        RuntimeError: under Triton's interpreter, or no sweep was found.
    """
    with _cubins() as cubins:
        report = aot.compile_kernel(key, config, arch)
    if not report.sweeps or not cubins:
        raise RuntimeError(f"no sweep in the machine code of {key} for sm_{arch}")
    code = aot._instructions(get_sass(cubins[-1]))
    stored = key.dim or -(-d // LARGE_BLOCK) * LARGE_BLOCK
    trips = 1 if key.by_coordinate else stored // config.block_d
    weighted, looped = executed(code, report.sweeps[0], trips)
    return Step(report, weighted, trips if looped else 1)


@contextmanager
def _cubins() -> Iterator[list[bytes]]:
    """Machine code of what is compiled, or found in the cache, inside."""
    found: list[bytes] = []

    def listen(*, metadata_group: Mapping[str, str], **_: Any) -> None:
        found.extend(
            Path(path).read_bytes() for name, path in metadata_group.items() if name.endswith("cubin")
        )

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listen
        yield found


def executed(code: Code, sweep: aot.Loop, trips: int) -> tuple[Counter[str], bool]:
    """Instructions of one step of a sweep, and whether it has a loop over coordinates.

    Args:
        code: of the kernel, (name, target of a jump or -1).
        sweep: one of the kernel's loops.
        trips: passes over the coordinates; a loop inside that multiplies runs so often, less the copies of it
            that the compiler has peeled off. Loops that wait are counted once.
    """
    spans = sorted({(start, end) for end, (_, start) in enumerate(code) if 0 <= start < end})
    names = {span: Counter(name for name, _ in code[span[0] : span[1] + 1]) for span in spans}
    start, end = next(span for span in spans if names[span] == sweep.instructions)
    inner = [(s, e) for s, e in spans if start <= s and e <= end and (s, e) != (start, end)]
    products = [span for span in inner if any(_multiplies(name) for name in names[span])]
    innermost = [a for a in products if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in products)]
    total = Counter(sweep.instructions)
    for span in innermost:
        again = _tensor_core(names[span])
        peeled = 0 if again == 0 else _tensor_core(sweep.instructions) // again - 1
        for name, count in names[span].items():
            total[name] += (trips - 1 - peeled) * count
    return total, bool(innermost)


def _tensor_core(names: Counter[str]) -> int:
    return sum(count for name, count in names.items() if aot.TENSOR_CORE.match(name))


def _multiplies(name: str) -> bool:
    return name.partition(".")[0] in FMA or bool(aot.TENSOR_CORE.match(name))
