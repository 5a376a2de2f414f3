"""Tile choices as data: buckets, frozen `TileConfig`s, one law `legal`, fixed defaults.

A kernel is compiled once per (kernel, device class, d bucket, precision, width bucket); n and m never
enter a key. The defaults were chosen by compiling for sm_80, sm_90 and sm_100 and reading the machine
code (no spills, shared memory, instruction mix), not by timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ot_newton.errors import check_choice

__all__ = [
    "DEVICE_CLASSES",
    "KERNELS",
    "PRECISIONS",
    "Bucket",
    "KernelKey",
    "TileConfig",
    "candidates",
    "d_bucket",
    "default_config",
    "device_class",
    "legal",
    "rank_block",
    "width_block",
]

KERNELS = ("lse", "transport", "hadamard")
PRECISIONS = ("ieee", "tf32x3", "tf32", "fp16", "bf16")
"""How `q.k` is multiplied: float32 on the FMA units, three TF32 products (about float32), one TF32 product,
or half inputs with float32 accumulation. Up to `FMA_DIM` coordinates all of them run on the FMA units."""

DEVICE_CLASSES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Compute capability of a class, and its shared memory per program (bytes; 80 includes 8.6 and 8.9)."""

INTERPRETER = 0
"""Stands for the CPU: one larger tile for every kernel, since the interpreter's time goes by tiles."""

FMA_DIM = 8
"""Clouds of up to this many coordinates are multiplied on the FMA units, coordinate by coordinate."""

DOT_DIMS = (16, 32, 64, 128)
LARGE_BLOCK = 64
MIN_DOT = 16
VECTORS = (1, 2, 4)
WIDTHS = (16, 32, 64)
FMA_RANK = 4
REGISTERS = 255


@dataclass(frozen=True)
class Bucket:
    """How clouds of some d are stored and multiplied.

    Attributes:
        dim: d as a compile-time constant of the kernels, 0 when it is a run-time value.
        stored: coordinates stored per point, padding included.
        by_coordinate: (B, d, size) on the FMA units, else (B, size, stored) for `tl.dot`.
    """

    dim: int
    stored: int
    by_coordinate: bool


@dataclass(frozen=True)
class KernelKey:
    """What a compiled kernel depends on besides its tile.

    Attributes:
        kernel: "lse", "transport" or "hadamard".
        dim: see `Bucket`.
        by_coordinate: see `Bucket`.
        precision: of the products.
        dtype: of the sums and of the results.
        width: columns per program, 0 for the lse.
        rank: rank of one product of Hadamard factors, 0 for the other kernels.
        transport: columns transported beside a Hadamard product, 0 for none.
    """

    kernel: str
    dim: int
    by_coordinate: bool
    precision: str = "ieee"
    dtype: torch.dtype = torch.float32
    width: int = 0
    rank: int = 0
    transport: int = 0

    def __post_init__(self) -> None:
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("precision", self.precision, PRECISIONS)

    @property
    def vectors(self) -> int:
        """Accumulators of a whole tile: one per column on the FMA units."""
        if self.kernel == "lse":
            return 1
        return sum(width for width in (self.width, self.transport) if width in VECTORS)

    @property
    def columns(self) -> int:
        """Columns of accumulators that a second `tl.dot` fills."""
        return sum(width for width in (self.width, self.transport) if width > max(VECTORS))


@dataclass(frozen=True)
class TileConfig:
    """One tile choice, valid in itself; `legal` judges it for a kernel and a device.

    Attributes:
        block_m: rows kept per program.
        block_n: rows of the other cloud per step.
        block_d: coordinates per product, 1 on the FMA units.
        warps: warps per program.
        stages: depth of the load pipeline.
        registers: cap of registers per thread, 0 to leave it to the assembler, which at times spills a few
            bytes to reach a higher occupancy.
    """

    block_m: int
    block_n: int
    block_d: int = 1
    warps: int = 4
    stages: int = 2
    registers: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("block_m", MIN_DOT, 256),
            ("block_n", MIN_DOT, 256),
            ("block_d", 1, 128),
            ("warps", 1, 16),
        ):
            value = getattr(self, name)
            if not (low <= value <= high and value & (value - 1) == 0):
                raise ValueError(f"{name} must be a power of 2 in [{low}, {high}], got {value}")
        if 1 < self.block_d < MIN_DOT:
            raise ValueError(f"block_d must be 1 or at least {MIN_DOT}, got {self.block_d}")
        if not 1 <= self.stages <= 5:
            raise ValueError(f"stages must be in [1, 5], got {self.stages}")
        if self.registers and not 32 <= self.registers <= REGISTERS:
            raise ValueError(f"registers must be 0 or in [32, {REGISTERS}], got {self.registers}")

    @property
    def options(self) -> dict[str, int | bool]:
        """Compiler options; fused multiply-add is asked for by name, since its default differs by release."""
        cap = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True, **cap}


def d_bucket(d: int, dtype: torch.dtype) -> Bucket:
    """The bucket of clouds with d coordinates: exact up to 8, then 16, 32, 64, 128, multiples of 64."""
    if d <= FMA_DIM:
        return Bucket(d, d, True)
    if dtype == torch.float64:
        return Bucket(0, d, True)
    for dim in DOT_DIMS:
        if d <= dim:
            return Bucket(dim, dim, False)
    return Bucket(0, -(-d // LARGE_BLOCK) * LARGE_BLOCK, False)


def width_block(p: int, dtype: torch.dtype) -> int:
    """Columns per program for a product of width p: up to 4 vectors, or a `tl.dot` of 16, 32 or 64."""
    sizes = VECTORS if dtype == torch.float64 else (*VECTORS, *WIDTHS)
    return next((size for size in sizes if p <= size), sizes[-1])


def rank_block(rank: int, dtype: torch.dtype) -> int:
    """Rank of one product of Hadamard factors; 1 means the FMA units."""
    return 1 if rank <= FMA_RANK or dtype == torch.float64 else MIN_DOT


def device_class(capability: tuple[int, int]) -> int:
    """The class of a compute capability: 80, 90 or 100.

    Raises:
        ValueError: older than 8.0.
    """
    major, minor = capability
    if major < 8:
        raise ValueError(
            f"device must have compute capability 8.0 (A100, RTX 30) or newer for backend 'triton', got "
            f"{major}.{minor}; use backend='torch_tiles'"
        )
    return {9: 90, 10: 100}.get(major, 80)


def _element(key: KernelKey) -> int:
    return 8 if key.dtype == torch.float64 else 4


def shared_bytes(key: KernelKey, config: TileConfig) -> int:
    """Upper estimate of shared memory: staged operands, and the tile on its way into a second product."""
    tile = config.block_m * config.block_n * _element(key)
    staged = 0
    if not key.by_coordinate:
        operand = 2 if key.precision in ("fp16", "bf16") else _element(key)
        copies = 2 if key.precision == "tf32x3" else 1
        staged = (config.block_m + config.stages * config.block_n) * config.block_d * operand * copies
    if key.columns:
        return staged + tile + config.stages * config.block_n * key.columns * _element(key)
    return staged + config.block_m * config.warps * _element(key)


def register_count(key: KernelKey, config: TileConfig) -> int:
    """Lower estimate of registers per thread: the tile and the accumulators."""
    threads = 32 * config.warps
    tile = config.block_m * config.block_n
    return (tile * (1 + key.vectors) + config.block_m * key.columns) * (_element(key) // 4) // threads


def legal(key: KernelKey, config: TileConfig, device: int) -> str:
    """Why a tile cannot run, or "": the one law that defaults and autotuning obey.

    Args:
        key: the kernel.
        config: the tile.
        device: device class, 80, 90 or 100.
    """
    if key.by_coordinate != (config.block_d == 1):
        return "block_d must be 1 exactly for the FMA units"
    if key.dim and not key.by_coordinate and key.dim % config.block_d:
        return f"block_d {config.block_d} does not divide d bucket {key.dim}"
    if not key.dim and not key.by_coordinate and LARGE_BLOCK % config.block_d:
        return f"block_d {config.block_d} does not divide {LARGE_BLOCK}"
    if shared_bytes(key, config) > DEVICE_CLASSES[device]:
        return f"{shared_bytes(key, config)} bytes of shared memory, {DEVICE_CLASSES[device]} available"
    if register_count(key, config) > REGISTERS // 2:
        return f"{register_count(key, config)} registers for the tile alone"
    return ""


def candidates(key: KernelKey, device: int) -> tuple[TileConfig, ...]:
    """What autotuning times: every legal tile of a small grid, the default first."""
    default = default_config(key, device)
    depths = (1,) if key.by_coordinate else (16, 32, 64)
    grid = [
        TileConfig(block_m, block_n, block_d, warps, stages)
        for block_m in (32, 64, 128)
        for block_n in (32, 64, 128)
        for block_d in depths
        for warps in (4, 8)
        for stages in (2, 3)
        if not key.by_coordinate or stages == 2
    ]
    return (default, *(c for c in grid if c != default and not legal(key, c, device)))


@cache
def default_config(key: KernelKey, device: int) -> TileConfig:
    """The fixed tile of a kernel on a device class.

    Raises:
        ValueError: no legal tile (a key outside of the buckets).
    """
    if device == INTERPRETER:
        return TileConfig(64, 64, 1 if key.by_coordinate else min(key.dim or LARGE_BLOCK, 64))
    config = _default(key)
    problem = legal(key, config, device)
    if problem:
        raise ValueError(f"no tile for {key} on device class {device}: {problem}")
    return config


def _default(key: KernelKey) -> TileConfig:
    hadamard, cap = key.kernel == "hadamard", 0 if key.kernel == "lse" else REGISTERS
    if key.dtype == torch.float64:
        return TileConfig(32, 32, warps=4 if key.kernel == "lse" else 8)
    if key.by_coordinate:
        return TileConfig(32, 64, warps=8 if hadamard or key.width > 16 else 4)
    if key.precision == "ieee":
        if key.kernel == "lse" and not key.dim:
            # 64 x 32 spills 8 bytes on sm_80 with triton 3.7
            return TileConfig(32, 64, 16, 8)
        few = key.dim > 0 and not hadamard and key.width in (0, 1, 16)
        return TileConfig(64 if key.dim or not hadamard else 32, 32, 16, 4 if few else 8, registers=cap)
    if key.precision == "tf32x3":
        return _three_products(key, cap)
    if key.kernel == "lse":
        return TileConfig(64, 64, min(key.dim or 32, 64), warps=4 if key.dim else 8)
    # two chained products in one step put all warps along the rows: 16 rows each, or they repeat pairs
    chained = key.columns > 0 and key.dim in (16, 32)
    return TileConfig(64, 32, min(key.dim or LARGE_BLOCK, 32), warps=4 if chained else 8)


def _three_products(key: KernelKey, cap: int) -> TileConfig:
    """TF32x3 chains its products: all warps along the rows, 16 rows each."""
    depth = min(key.dim or 16, 32)
    if key.kernel == "lse":
        return TileConfig(64, 64 if key.dim in (16, 32) else 32, depth)
    if key.kernel == "hadamard":
        return TileConfig(64, 32, 16, registers=cap) if key.dim else TileConfig(128, 16, 16, 8, registers=cap)
    return TileConfig(64, 16 if key.dim == 16 and key.columns > 32 else 32, depth, registers=cap)
