"""Ahead-of-time compilation without a GPU, and what the machine code of each kernel holds.

`ot-newton kernels build --arch 80 90 100` compiles every kernel of the table and prints one row each:
registers, shared memory, spills, tensor-core and EX2 instructions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ot_newton.backends.triton_kernels.configs import (
    DEVICE_CLASSES,
    KernelKey,
    TileConfig,
    default_config,
)
from ot_newton.backends.triton_kernels.hadamard import hadamard_kernel
from ot_newton.backends.triton_kernels.lse import lse_kernel
from ot_newton.backends.triton_kernels.transport import transport_kernel

__all__ = [
    "Loop",
    "Report",
    "compile_kernel",
    "constants",
    "kernels_command",
    "rows",
    "table",
]

FUNCTIONS = {"lse": lse_kernel, "transport": transport_kernel, "hadamard": hadamard_kernel}
POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64"}
OPERANDS = {"fp16": "*fp16", "bf16": "*bf16"}
RANK = {4: 1, 64: 16}
COLUMNS = (
    "kernel", "d", "precision", "dtype", "width", "arch", "tile m x n x d", "warps", "registers", "shared",
    "spills", "tensor-core", "EX2", "pairs", "EX2 per sweep step",
)  # fmt: skip
TENSOR_CORE = re.compile(r"^(HMMA|HGMMA|DMMA|QGMMA|UTC\w*MMA)")


@dataclass(frozen=True)
class Loop:
    """One loop of the machine code: instructions per thread and step, inner loops counted once."""

    instructions: Counter[str]

    def count(self, prefix: str) -> int:
        """Instructions whose name starts with ``prefix``."""
        return sum(n for name, n in self.instructions.items() if name.startswith(prefix))


@dataclass(frozen=True)
class Report:
    """What one compiled kernel uses.

    Attributes:
        key: kernel, bucket, precision, width.
        config: its tile.
        arch: compute capability, 80, 90 or 100.
        registers: per thread.
        shared: bytes of shared memory per program.
        stack: bytes of stack per thread; 0 without spills.
        local: bytes of local memory per thread; 0 without spills.
        tensor_core: tensor-core instructions.
        exp2: EX2 instructions.
        sweeps: smallest loops that hold EX2 instructions, in program order.
        ttir: the kernel in Triton's own intermediate form.
    """

    key: KernelKey
    config: TileConfig
    arch: int
    registers: int
    shared: int
    stack: int
    local: int
    tensor_core: int
    exp2: int
    sweeps: tuple[Loop, ...]
    ttir: str

    @property
    def pairs(self) -> int:
        """Pairs (i, j) of one tile per thread."""
        return self.config.block_m * self.config.block_n // (32 * self.config.warps)


def constants(key: KernelKey, config: TileConfig, *, warm: bool = True) -> dict[str, Any]:
    """Compile-time constants of a kernel."""
    half = key.precision in OPERANDS
    values: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": config.block_d,
        "DIM": key.dim,
        "PRECISION": "tf32" if half else key.precision,
    }
    if key.kernel == "lse":
        return {**values, "WARM": warm}
    values["BLOCK_P"] = key.width
    if key.kernel == "hadamard":
        values["BLOCK_R"] = key.rank
        values["BLOCK_T"] = key.transport
    return values


def compile_kernel(key: KernelKey, config: TileConfig, arch: int, **options: Any) -> Report:
    """Compile one kernel for one architecture and read its machine code.

    Args:
        key: the kernel.
        config: its tile.
        arch: 80, 90 or 100.
        **options: see `constants`.

    Raises:
        RuntimeError: the kernels were imported under Triton's interpreter.
    """
    function = FUNCTIONS[key.kernel]
    if not isinstance(function, triton.runtime.JITFunction):
        raise RuntimeError(
            "kernels are interpreted in this process (TRITON_INTERPRET=1): start one without it"
        )
    values = constants(key, config, **options)
    signature: dict[str, str] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(function.arg_names):
        signature[name] = _argument(name, key, values)
        if name in ("q_ptr", "k_ptr"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(function, signature, values, aligned),
        target=GPUTarget("cuda", arch, 32),
        options=config.options,
    )
    usage = _resources(compiled.asm["cubin"])
    code = _instructions(compiled.asm["sass"])
    names = [name for name, _ in code]
    return Report(
        key=key,
        config=config,
        arch=arch,
        registers=usage["REG"],
        shared=int(compiled.metadata.shared),
        stack=usage["STACK"],
        local=usage["LOCAL"],
        tensor_core=sum(bool(TENSOR_CORE.match(name)) for name in names),
        exp2=sum(name.startswith("MUFU.EX2") for name in names),
        sweeps=tuple(_sweeps(code)),
        ttir=compiled.asm["ttir"],
    )


def _argument(name: str, key: KernelKey, values: dict[str, Any]) -> str:
    """Type of a kernel argument in Triton's notation."""
    if name in values:
        return "constexpr"
    if name == "trips_ptr":
        return "*i32"
    if name in ("q_ptr", "k_ptr"):
        return OPERANDS.get(key.precision, POINTERS[key.dtype])
    return POINTERS[key.dtype] if name.endswith("_ptr") else "i32"


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack, static shared and local memory as cuobjdump reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def _instructions(sass: str) -> list[tuple[str, int]]:
    """(name, index of the instruction it jumps to, or -1) of every instruction, 16 bytes each."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    for line in sass.splitlines():
        if label := re.match(r"^(LBB\d+):", line.strip()):
            labels[label.group(1)] = len(found)
        elif "\t" in line:
            text = re.sub(r"^@!?U?P\w+\s+", "", line.split("\t", 1)[1].strip())
            name = re.split(r"[\s;]", text, maxsplit=1)[0]
            target = re.search(r"LBB\d+|0x[0-9a-f]+", text) if name.startswith("BRA") else None
            found.append((name, target.group(0) if target else ""))
    places = {"": -1, **labels}
    return [(name, places.get(to, -1) if to[:2] != "0x" else int(to, 16) // 16) for name, to in found]


def _sweeps(code: Sequence[tuple[str, int]]) -> Iterator[Loop]:
    """Loops (backward jumps) that hold EX2 instructions and no smaller such loop."""
    spans = sorted({(start, end) for end, (_, start) in enumerate(code) if 0 <= start < end})
    loops = {span: Counter(name for name, _ in code[span[0] : span[1] + 1]) for span in spans}
    held = [span for span in spans if Loop(loops[span]).count("MUFU.EX2")]
    for start, end in held:
        if not any((s, e) != (start, end) and start <= s and e <= end for s, e in held):
            yield Loop(loops[start, end])


def table(archs: Iterable[int] = tuple(DEVICE_CLASSES)) -> list[tuple[KernelKey, TileConfig, int]]:
    """Every kernel that ships: (key, default tile, architecture)."""
    rows = []
    for arch in archs:
        for key in _keys():
            rows.append((key, default_config(key, arch), arch))
    return rows


def _keys() -> Iterator[KernelKey]:
    for dim in (3, 16, 64, 128, 0):
        small = dim == 3
        for precision in ("ieee",) if small else ("ieee", "tf32x3", "tf32", "fp16"):
            yield KernelKey("lse", dim, small, precision)
        for precision, widths in {"ieee": (1, 4, 16, 64), "tf32x3": (1, 64), "tf32": (64,)}.items():
            if small and precision != "ieee":
                continue
            for width in widths:
                yield KernelKey("transport", dim, small, precision, width=width)
            for width in widths:
                if width in (4, 64):
                    yield KernelKey("hadamard", dim, small, precision, width=width, rank=RANK[width])
    for dim in (3, 0):
        yield KernelKey("lse", dim, True, dtype=torch.float64)
        yield KernelKey("transport", dim, True, dtype=torch.float64, width=4)
        yield KernelKey("hadamard", dim, True, dtype=torch.float64, width=4, rank=1)


def _row(report: Report) -> str:
    """One row of the table, in Markdown."""
    k, c = report.key, report.config
    cells = (
        k.kernel, k.dim or "any", k.precision, str(k.dtype).removeprefix("torch."), k.width or "",
        f"sm_{report.arch}", f"{c.block_m} x {c.block_n} x {c.block_d}", c.warps, report.registers,
        report.shared, report.stack + report.local, report.tensor_core, report.exp2, report.pairs,
        ", ".join(str(loop.count("MUFU.EX2")) for loop in report.sweeps),
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def rows(archs: Iterable[int]) -> Iterator[str]:
    """The table in Markdown, line by line, compiled while it is read (1 to 5 seconds per line)."""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|" + "---|" * len(COLUMNS)
    for key, config, arch in table(archs):
        yield _row(compile_kernel(key, config, arch))


def kernels_command(archs: Sequence[int], write: Callable[[str], object]) -> None:
    """What `ot-newton kernels build --arch ...` does: compile ahead and write the table in Markdown.

    Args:
        archs: compute capabilities, among 80, 90 and 100.
        write: receives each line.

    Raises:
        ValueError: an architecture the kernels are not built for.
    """
    unknown = [arch for arch in archs if arch not in DEVICE_CLASSES]
    if unknown or not archs:
        raise ValueError(f"arch must be among {', '.join(map(str, DEVICE_CLASSES))}, got {list(archs)}")
    for line in rows(archs):
        write(line)
