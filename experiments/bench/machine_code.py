"""Instruction counts of compiled kernels, in a process in which Triton compiles; run by `child`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

from ot_newton.backends.triton_kernels.configs import KernelKey, TileConfig, d_bucket

__all__ = ["answer"]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one log-sum-exp kernel.

    Args:
        request: d, precision, arch, and config, the fields of a `TileConfig`.

    Returns:
        Registers, spills and shared memory of the kernel; instructions per pair of its first sweep by group,
        and its tensor-core and EX2 instructions as they stand in the code.
    """
    from ot_newton.backends.triton_kernels.steps import compile_step

    bucket = d_bucket(request["d"], torch.float32)
    key = KernelKey("lse", bucket.dim, bucket.by_coordinate, request["precision"])
    step = compile_step(key, TileConfig(**request["config"]), request["arch"], bucket.stored)
    report = step.report
    return {
        "triton": version("triton"),
        "registers": report.registers,
        "spills": report.stack + report.local,
        "shared": report.shared,
        "pairs": report.pairs,
        "trips": step.trips,
        "per_pair": step.per_pair,
        "tensor_core": report.tensor_core,
        "exp2": report.exp2,
    }


if __name__ == "__main__":
    from ot_newton.experiments.bench.child import serve

    serve(answer)
