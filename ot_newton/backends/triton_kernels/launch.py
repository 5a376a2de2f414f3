"""The only border between torch and the kernels: packing, launching, guards, pass counts.

Everything runs on the current stream of the clouds' device and nothing waits for it: the guard of the
one-pass log-sum-exp is judged by the kernel itself, row block by row block, and a block that trips it
sweeps again on the device. Outputs come from torch's caching allocator, so that calls can be captured in
a CUDA graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from ot_newton.backends.triton_kernels.configs import (
    INTERPRETER,
    PRECISIONS,
    KernelKey,
    TileConfig,
    candidates,
    default_config,
    device_class,
    rank_block,
    width_block,
)
from ot_newton.backends.triton_kernels.hadamard import hadamard_kernel
from ot_newton.backends.triton_kernels.loads import running
from ot_newton.backends.triton_kernels.lse import lse_kernel
from ot_newton.backends.triton_kernels.packing import HALF, Operands, pack
from ot_newton.backends.triton_kernels.transport import transport_kernel
from ot_newton.errors import check_choice
from ot_newton.protocols import PassCounter

__all__ = ["INTERPRETED", "TritonBackend", "TritonPlan", "TritonTiles", "check_device"]

INTERPRETED = not isinstance(lse_kernel, triton.runtime.JITFunction)
"""Whether the kernels were imported under TRITON_INTERPRET=1 and run on the CPU, slowly, for tests."""


def check_device(device: torch.device) -> int:
    """The device class kernels are configured for.

    Raises:
        ValueError: a device the kernels cannot run on, with what to use instead.
    """
    if device.type == "cpu":
        if INTERPRETED:
            return INTERPRETER
        raise ValueError(
            "backend 'triton' needs CUDA tensors, got device cpu; move the clouds to a GPU, or use "
            "backend='cpu' (TRITON_INTERPRET=1 interprets the kernels on the CPU, for tests)"
        )
    if device.type != "cuda" or torch.version.hip is not None:
        raise ValueError(
            f"backend 'triton' runs on NVIDIA GPUs, got device {device}; use backend='torch_tiles'"
        )
    return device_class(torch.cuda.get_device_capability(device))


def _guard(device: torch.device) -> AbstractContextManager[Any]:
    """The device made current while a kernel is launched; its current stream is the one used."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


_tuned: dict[tuple[KernelKey, int], TileConfig] = {}


@dataclass(frozen=True)
class _Launcher:
    """Launches kernels on one device, with fixed or tuned tiles."""

    device: torch.device
    kind: int
    autotune: bool

    def config(self, key: KernelKey, launch: Callable[[TileConfig], None]) -> TileConfig:
        """The tile of a key; the first call per key times all candidates when autotuning."""
        if not self.autotune:
            return default_config(key, self.kind)
        known = _tuned.get((key, self.kind))
        if known is None:
            known = _tuned[key, self.kind] = tune(candidates(key, self.kind), launch)
        return known

    def __call__(
        self,
        kernel: Any,
        key: KernelKey,
        args: tuple[Any, ...],
        *,
        rows: int,
        lanes: int,
        rest: tuple[int, ...] = (),
        meta: dict[str, Any],
    ) -> int:
        """Launch over (lanes * row blocks, *rest); returns the size of the first axis."""

        def launch(config: TileConfig) -> None:
            running(key.kernel)
            kernel[(lanes * triton.cdiv(rows, config.block_m), *rest)](
                *args,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                BLOCK_D=config.block_d,
                DIM=key.dim,
                PRECISION="tf32" if key.precision in HALF else key.precision,
                **meta,
                **config.options,
            )

        with _guard(self.device):
            config = self.config(key, launch)
            launch(config)
        return lanes * int(triton.cdiv(rows, config.block_m))


def tune(choices: tuple[TileConfig, ...], launch: Callable[[TileConfig], None]) -> TileConfig:
    """The fastest tile of some, timed on the data at hand (about 30 ms each, plus its compilation).

    A tile whose launch fails for want of resources is passed over; the first is the default.
    """
    best, best_time = choices[0], float("inf")
    for config in choices:
        try:
            elapsed = float(triton.testing.do_bench(lambda c=config: launch(c), warmup=5, rep=20))
        except triton.runtime.errors.OutOfResources:
            continue
        if elapsed < best_time:
            best, best_time = config, elapsed
    return best


class TritonPlan:
    """Streamed products with one plan."""

    def __init__(self, tiles: TritonTiles, row_bias: Tensor, col_bias: Tensor, a: Tensor, b: Tensor) -> None:
        self.tiles, self.counter = tiles, tiles.counter
        self.operands = tiles.plan_operands
        self.row = torch.stack([row_bias, a], dim=1)
        self.col = torch.stack([col_bias, b], dim=1)
        self.dtype, self.lanes = row_bias.dtype, row_bias.shape[0]

    def _key(self, kernel: str, width: int, **extra: int) -> KernelKey:
        bucket = self.operands.bucket
        precision = self.tiles.backend.plan_precision
        return KernelKey(kernel, bucket.dim, bucket.by_coordinate, precision, self.dtype, width, **extra)

    def _sides(self, axis: int) -> tuple[Tensor, Tensor]:
        return (self.row, self.col) if axis == 1 else (self.col, self.row)

    def apply(self, v: Tensor, axis: int) -> Tensor:
        """See `Plan.apply`."""
        self.counter.add()
        return self._transport(v, axis)

    def _transport(self, v: Tensor, axis: int) -> Tensor:
        q, k, n, m = self.operands.side(axis)
        p = v.shape[-1]
        out = torch.empty((self.lanes, n, p), dtype=self.dtype, device=v.device)
        if p == 0:
            return out
        width = width_block(p, self.dtype)
        args = (q, k, *self._sides(axis), v.contiguous(), out, n, m, self.operands.bucket.stored, p)
        key, rest = self._key("transport", width), (triton.cdiv(p, width),)
        meta = {"BLOCK_P": width}
        self.tiles.launch(transport_kernel, key, args, rows=n, lanes=self.lanes, rest=rest, meta=meta)
        return out

    def apply_hadamard(
        self, left: Tensor, right: Tensor, v: Tensor, axis: int, transport: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Plan.apply_hadamard`; the blocks are an axis of the grid, each with its own exponentials.

        ``transport`` shares them when there is one block and both products fit one block of columns,
        and is a second launch otherwise.
        """
        self.counter.add()
        p, blocks = v.shape[-1], max(left.shape[1], right.shape[1], v.shape[1])
        width = width_block(p, self.dtype)
        beside = 0 if transport is None else width_block(transport.shape[-1], self.dtype)
        fused = transport is not None and blocks == 1 and p <= width and transport.shape[-1] <= beside
        if transport is None or not fused:
            out, _ = self._hadamard(left, right, v, axis, None, 0)
            return out, None if transport is None else self._transport(transport, axis)
        return self._hadamard(left, right, v, axis, transport, beside)

    def _hadamard(
        self, left: Tensor, right: Tensor, v: Tensor, axis: int, transport: Tensor | None, beside: int
    ) -> tuple[Tensor, Tensor | None]:
        q, k, n, m = self.operands.side(axis)
        near, far = (left, right) if axis == 1 else (right, left)
        p, rank, blocks = v.shape[-1], left.shape[-1], max(left.shape[1], right.shape[1], v.shape[1])
        width, depth = width_block(p, self.dtype), rank_block(rank, self.dtype)
        out = torch.empty((self.lanes, blocks, n, p), dtype=self.dtype, device=v.device)
        t = 0 if transport is None else transport.shape[-1]
        moved = (
            out if transport is None else torch.empty((self.lanes, n, t), dtype=self.dtype, device=v.device)
        )
        v, near, far = v.contiguous(), near.contiguous(), far.contiguous()
        tensors = (near, far, v, out, v if transport is None else transport.contiguous(), moved)
        sizes = (n, m, self.operands.bucket.stored, rank, p, t, blocks)
        args = (q, k, *self._sides(axis), *tensors, *sizes, near.shape[1], far.shape[1], v.shape[1])
        key = self._key("hadamard", width, rank=depth, transport=beside)
        rest = (triton.cdiv(p, width), blocks)
        meta = {"BLOCK_P": width, "BLOCK_R": depth, "BLOCK_T": beside}
        self.tiles.launch(hadamard_kernel, key, args, rows=n, lanes=self.lanes, rest=rest, meta=meta)
        return out, None if transport is None else moved

    def to_dense(self) -> Tensor:
        """See `Plan.to_dense`: the plan applied to the identity, not counted as a pass."""
        identity = torch.eye(self.operands.m, dtype=self.dtype, device=self.row.device)
        return self._transport(identity.expand(self.lanes, -1, -1), 1)


class _Trips:
    """Second sweeps of one tiles object, counted by the kernels and read when somebody may wait."""

    def __init__(self, device: torch.device, counter: PassCounter) -> None:
        self.count = torch.zeros(2, dtype=torch.int32, device=device)
        self.row_blocks = [1, 1]
        self.counter = counter

    def settle(self) -> None:
        """Count them: a pass per full set of row blocks, rounded up. Waits for the device."""
        for blocks, tripped in zip(self.row_blocks, self.count.tolist(), strict=True):
            self.counter.add(-(-tripped // blocks))
        self.count.zero_()


class TritonTiles:
    """Clouds packed for the kernels.

    Args:
        backend: precision and autotuning.
        q: clouds as bound, kept for plan products of another precision.
        k: likewise.
        counter: of passes.
        operands: the packed clouds if there are any yet.
    """

    def __init__(
        self,
        backend: TritonBackend,
        q: Tensor,
        k: Tensor,
        counter: PassCounter,
        operands: Operands | None = None,
    ) -> None:
        self.backend, self.counter = backend, counter
        self.launch = _Launcher(q.device, check_device(q.device), backend.autotune)
        self.operands = pack(q, k, backend.precision, widen=INTERPRETED) if operands is None else operands
        self.host_guard = q.device.type == "cpu" if backend.host_guard is None else backend.host_guard
        self.trips = _Trips(q.device, counter)
        backend.unsettled.append(self.trips)
        self._source = (q, k)
        self._plan_operands: Operands | None = None

    @property
    def plan_operands(self) -> Operands:
        """The clouds for plan products, packed anew only where their precision differs."""
        if self._plan_operands is None:
            backend, (q, k) = self.backend, self._source
            same = HALF.get(backend.precision) == HALF.get(backend.plan_precision)
            self._plan_operands = (
                self.operands if same else pack(q, k, backend.plan_precision, widen=INTERPRETED)
            )
        return self._plan_operands

    def lse(
        self, bias: Tensor, weight: Tensor, axis: int, stabilizer: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Tiles.lse`; one pass with or without a stabilizer, a second one for the blocks that trip.

        On CUDA the sums are returned without looking at them: rows of a block that tripped the guard are
        NaN there, and their log-sum-exp is the max-stabilized one. (On the CPU: None, as documented.)
        """
        q, k, n, m = self.operands.side(axis)
        warm = stabilizer is not None
        lse = torch.empty((bias.shape[0], n), dtype=bias.dtype, device=bias.device)
        sums = torch.empty_like(lse) if warm else lse
        shift = stabilizer.contiguous() if stabilizer is not None else lse
        bucket = self.operands.bucket
        key = KernelKey("lse", bucket.dim, bucket.by_coordinate, self.backend.precision, bias.dtype)
        tensors = (q, k, bias.contiguous(), weight.contiguous(), shift, lse, sums, self.trips.count[axis])
        args = (*tensors, n, m, bucket.stored)
        blocks = self.launch(lse_kernel, key, args, rows=n, lanes=bias.shape[0], meta={"WARM": warm})
        self.trips.row_blocks[axis] = blocks
        self.counter.add()
        if not warm:
            return lse, None
        if self.host_guard and bool(torch.isnan(sums).any()):
            self.trips.settle()
            return lse, None
        return lse, sums

    def take(self, lanes: Tensor) -> TritonTiles:
        """See `Tiles.take`."""
        operands = replace(self.operands, q=self.operands.q[lanes], k=self.operands.k[lanes])
        q, k = self._source
        return TritonTiles(self.backend, q[lanes], k[lanes], self.counter, operands)

    def plan(self, row_bias: Tensor, col_bias: Tensor, a: Tensor, b: Tensor) -> TritonPlan:
        """See `Tiles.plan`."""
        self.backend.settle()
        return TritonPlan(self, row_bias, col_bias, a, b)


class TritonBackend:
    """Streaming kernels for NVIDIA GPUs (compute capability 8.0 and newer); the maths of MATH 2 and 5.

    Args:
        precision: of `q.k` in the log-sum-exp: "ieee", "tf32x3", "tf32", "fp16" or "bf16" (float32 sums).
        plan_precision: of plan products; by default "tf32x3" if ``precision`` is, else "ieee": TF32 would
            ruin a Schur solve (MATH 11), so it has to be asked for here by name.
        autotune: time tiles at the first call per kernel, d bucket and precision; by default the
            environment variable OT_NEWTON_AUTOTUNE=1 decides.
        host_guard: return None for sums that tripped the guard, which waits for the device; by default on
            the CPU only.

    Raises:
        ValueError: unknown precision.
    """

    def __init__(
        self,
        precision: str = "ieee",
        *,
        plan_precision: str | None = None,
        autotune: bool | None = None,
        host_guard: bool | None = None,
    ) -> None:
        self.precision = check_choice("precision", precision, PRECISIONS)
        chosen = plan_precision or ("tf32x3" if precision == "tf32x3" else "ieee")
        self.plan_precision = check_choice("plan_precision", chosen, PRECISIONS[:3])
        self.autotune = os.environ.get("OT_NEWTON_AUTOTUNE") == "1" if autotune is None else autotune
        self.host_guard = host_guard
        self.unsettled: list[_Trips] = []

    @property
    def name(self) -> str:
        """The name with its precision: "triton" for ieee, else "triton:tf32" and so on."""
        return "triton" if self.precision == "ieee" else f"triton:{self.precision}"

    def bind(self, q: Tensor, k: Tensor, counter: PassCounter) -> TritonTiles:
        """See `PlanBackend.bind`; packs both clouds once (one copy each).

        Raises:
            ValueError: a device the kernels do not run on, or a float32 precision for float64 clouds.
        """
        if q.dtype == torch.float64 and (self.precision != "ieee" or self.plan_precision != "ieee"):
            raise ValueError(
                f"precision must be 'ieee' for float64 clouds, got {self.precision!r}; or use float32 clouds"
            )
        return TritonTiles(self, q, k, counter)

    def settle(self) -> None:
        """Add the second sweeps of all tiles bound so far to their counters; waits for the device."""
        for trips in self.unsettled:
            trips.settle()
