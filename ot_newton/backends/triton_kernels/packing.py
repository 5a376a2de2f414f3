"""Clouds in the layouts the kernels read, made once per bind: padded, transposed or rounded copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.backends.triton_kernels.configs import Bucket, d_bucket

__all__ = ["HALF", "Operands", "pack"]

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Operands:
    """Both packed clouds.

    Attributes:
        q: (B, d, n), or (B, n, d) padded, see `Bucket`.
        k: likewise.
        bucket: how they are stored.
        n: rows of q.
        m: rows of k.
    """

    q: Tensor
    k: Tensor
    bucket: Bucket
    n: int
    m: int

    def side(self, axis: int) -> tuple[Tensor, Tensor, int, int]:
        """(cloud whose rows are kept, cloud summed over, their sizes)."""
        return (self.q, self.k, self.n, self.m) if axis == 1 else (self.k, self.q, self.m, self.n)


def pack(q: Tensor, k: Tensor, precision: str, *, widen: bool = False) -> Operands:
    """Pack two clouds (B, n, d) and (B, m, d).

    Args:
        q: rows.
        k: columns; holds 1/eps, so that "fp16" first shifts a power of two between the clouds, exactly.
        precision: "fp16" and "bf16" round the clouds where `tl.dot` multiplies them; others keep them.
        widen: store rounded clouds in float32 (numpy, under the interpreter, has no bfloat16).

    Returns:
        Copies of both.
    """
    bucket = d_bucket(q.shape[-1], q.dtype)
    half = None if bucket.by_coordinate else HALF.get(precision)
    if half is torch.float16:
        size_q, size_k = (t.abs().amax().clamp_min(1e-30) for t in (q, k))
        shift = torch.exp2(torch.round(0.5 * torch.log2(size_k / size_q)))
        q, k = q * shift, k / shift
    return Operands(
        _store(q, bucket, half, widen), _store(k, bucket, half, widen), bucket, q.shape[1], k.shape[1]
    )


def _store(cloud: Tensor, bucket: Bucket, half: torch.dtype | None, widen: bool) -> Tensor:
    if bucket.by_coordinate:
        return cloud.mT.contiguous()
    if half is not None:
        cloud = cloud.to(half).to(cloud.dtype if widen else half)
    return torch.nn.functional.pad(cloud, (0, bucket.stored - cloud.shape[-1])).contiguous()
