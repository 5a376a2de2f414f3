"""The contracts that backends, operators and solvers share; nothing here computes.

Base-2 conventions (MATH 2). A backend sees two clouds `q (B,n,d)` and `k (B,m,d)`, already centred
and scaled, and biases `w (B,n)`, `u (B,m)`; its kernel matrix is never stored (except by `dense`):

    E_ij = 2^(q_i.k_j + w_i + u_j),       P_ij = a_i E_ij b_j

Weights stay outside of the exponent, so that both axes see the same E and zero weights give exact
zeros. Exponents below the dtype's floor give exactly 0. Every tensor carries one batch dimension B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["PassCounter", "Plan", "PlanBackend", "SymmetricOperator", "Tiles"]


@dataclass
class PassCounter:
    """Counts plan passes: streamed sweeps over all n x m pairs, the unit of cost.

    Attributes:
        passes: sweeps so far.
        parent: a counter that counts along (of the loss that made many solves).
    """

    passes: int = 0
    parent: PassCounter | None = None

    def add(self, count: int = 1) -> None:
        """Count ``count`` more sweeps."""
        self.passes += count
        if self.parent is not None:
            self.parent.add(count)


class Plan(Protocol):
    """Products with one transport plan `P_ij = a_i 2^(q_i.k_j + w_i + u_j) b_j`.

    ``axis`` is the axis summed over: 1 sums over j (products with P), 0 over i (with P^T).
    """

    def apply(self, v: Tensor, axis: int) -> Tensor:
        """`P V` for ``axis=1``, V (B,m,p) -> (B,n,p); `P^T V` for ``axis=0``, V (B,n,p) -> (B,m,p)."""
        ...

    def apply_hadamard(
        self, left: Tensor, right: Tensor, v: Tensor, axis: int, transport: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hadamard-weighted transport, with a plain transport in the same pass.

        ``axis=1``: `out[b,k,i,:] = sum_j P_ij <left_kip, right_kjp> v_kj:`
        ``axis=0``: `out[b,k,j,:] = sum_i P_ij <left_kip, right_kjp> v_ki:`

        Args:
            left: (B, K or 1, n, p).
            right: (B, K or 1, m, p).
            v: (B, K or 1, m, w) for axis 1, (B, K or 1, n, w) for axis 0.
            axis: the axis summed over.
            transport: optional (B, m, t) or (B, n, t), transported with the same exponentials.

        Returns:
            The (B, K, n or m, w) product, and ``apply(transport, axis)`` or None. K is the largest of
            the three block sizes.
        """
        ...

    def to_dense(self) -> Tensor:
        """The (B,n,m) matrix; for tests and small problems only."""
        ...


class Tiles(Protocol):
    """One pair of clouds bound to a backend; every call is one or more counted plan passes."""

    counter: PassCounter

    def lse(
        self, bias: Tensor, weight: Tensor, axis: int, stabilizer: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Base-2 log-sum-exp of one axis.

        ``axis=1``: `lse_i = log2 sum_j weight_j 2^(q_i.k_j + bias_j)`, bias and weight (B,m), out (B,n).
        ``axis=0``: the same with the roles of i and j swapped.

        With ``stabilizer`` (the other side's bias): a single pass that also returns
        `sum_j weight_j 2^(q_i.k_j + bias_j + stabilizer_i)`, near 1 at a fixed point. If any of these
        sums fails `2^-60 <= sum <= 2^60` (written so that NaN fails too) the max-stabilized path is
        run instead and the second value returned is None.

        Returns:
            (lse, rowsum), rowsum None when the max-stabilized path was used (on a GPU, where looking would
            wait for the device, NaN in the rows that tripped).
        """
        ...

    def take(self, lanes: Tensor) -> Tiles:
        """Some of the lanes (indices), sharing the counter; nothing is computed again."""
        ...

    def plan(self, row_bias: Tensor, col_bias: Tensor, a: Tensor, b: Tensor) -> Plan:
        """The plan with biases w = ``row_bias`` (B,n), u = ``col_bias`` (B,m) and weights a, b."""
        ...


class PlanBackend(Protocol):
    """A way of streaming: dense, torch_tiles, cpu or triton."""

    name: str

    def bind(self, q: Tensor, k: Tensor, counter: PassCounter) -> Tiles:
        """Bind the scaled clouds `q (B,n,d)`, `k (B,m,d)` (same dtype, float32 or float64)."""
        ...


@runtime_checkable
class SymmetricOperator(Protocol):
    """What the solvers see of a Hessian: a shape, a dtype, a device and `@`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, N), with batch dimensions in front when batched."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def __matmul__(self, v: Tensor, /) -> Tensor:
        """Product with (N,) or (N,k)."""
        ...
