"""Deflation of the Schur solve: the slow modes of `S^ = I - K^T K`, harvested from the solves themselves.

CG on S^ slows down as eps falls because many singular values of K approach 1. With any basis U of m x p
vectors, `SU = S^ U` and `M = U^T SU`, CG runs on the projected system (MATH 5)

    (I - SU M^-1 U^T) S^ z = (I - SU M^-1 U^T) b,      w = z - U M^-1 SU^T z + U M^-1 U^T b

whose residual is the true residual of w, however rough U is. U is a Rayleigh-Ritz space. The first solve
of a plan is a block one: random columns beside the right-hand sides share its passes, and its block Krylov
space, reorthogonalized, holds the slow modes long before that of one vector does. The Krylov bases of later
solves refine it; their products are known, so a harvest costs no plan pass. Carrying U to another plan
costs one block product (two passes). Near the plan it was made for, U with its Ritz values T gives the dual
Newton the approximate inverse `I + U (T^-1 - I) U^T` for none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ot_newton.solvers.cg import CGResult

if TYPE_CHECKING:
    from ot_newton.schur import SchurSystem

__all__ = ["Deflation"]

MAX_VECTORS = 100
LARGE_MAX_RITZ = 0.8
WELL_CONDITIONED = 1e-3
MIN_STEPS = 12
SMALL = 128
HARD_STEPS = 8
HARVEST_SOLVES = 20
BLOCK_COLUMNS = 32
LARGE = 8192
LARGE_COLUMNS = 8
MIN_BLOCK_STEPS = 4
MAX_BASIS = 640
BUDGET_BYTES = 1 << 28


class Deflation:
    """A deflation space of one lane; empty until a solve has been hard enough to harvest.

    Args:
        max_vectors: largest p.
        budget: bytes that basis and recorded steps may take.

    Attributes:
        size: vectors held now.
        values: their Ritz values (p,).
        harvests: solves harvested for the current plan.
        hard: whether a solve has taken so long that a diagonal preconditioner is worth its pass.
        lenient: whether the dual Newton may try it as an approximate inverse: it has just been made, or no
            try has failed.
    """

    def __init__(self, max_vectors: int = MAX_VECTORS, budget: int = BUDGET_BYTES) -> None:
        self.max_vectors, self.budget = max_vectors, budget
        self.harvests = 0
        self.hard = self.lenient = False
        self.basis: Tensor | None = None
        self.values: Tensor | None = None
        self.products: Tensor | None = None
        self.inverse: Tensor | None = None
        self._owner: weakref.ref[SchurSystem] | None = None

    @classmethod
    def carried(cls, space: tuple[Tensor, Tensor, Tensor] | None) -> Deflation:
        """A space that starts from another's `state`; empty for None."""
        out = cls()
        if space is not None:
            out.basis, out.values, hard = space
            out.hard = bool(hard)
            out.lenient = True
        return out

    @property
    def state(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Vectors (1,m,p), Ritz values (p,) and `hard`, never changed in place; None while empty."""
        if self.basis is None or self.values is None:
            return None
        return self.basis, self.values, torch.tensor(self.hard)

    @property
    def size(self) -> int:
        """Vectors held."""
        return 0 if self.basis is None else int(self.basis.shape[-1])

    def record_steps(self, b: Tensor) -> int:
        """CG steps of this block to record: none unless one lane, one column and early in the plan.

        Small systems are left alone: CG ends within their size, and their products stay deterministic. In
        float32 a reorthogonalized residual would no longer be that of the solution: only block solves feed.
        """
        single = b.shape[0] == 1 and b.shape[2] == 1 and b.dtype == torch.float64
        if not single or b.shape[1] <= SMALL or self.harvests >= HARVEST_SOLVES:
            return 0
        steps = self.budget // (5 * b.numel() * b.element_size())
        return int(steps) if steps >= MIN_STEPS else 0

    def explores(self, b: Tensor) -> bool:
        """Whether this solve is to be a block one: nothing held yet, one lane, a system that is not small."""
        room = self.budget // (4 * b.shape[1] * b.element_size())
        enough = room >= MIN_BLOCK_STEPS * _block_width(b)
        return b.shape[0] == 1 and b.shape[1] > SMALL and self.size == 0 and enough

    def explore(
        self, system: SchurSystem, b: Tensor, rtol: Tensor, max_steps: int
    ) -> tuple[Tensor, Tensor, int]:
        """Block Lanczos from b and random columns, fully reorthogonalized; keeps its slow Ritz vectors.

        The Galerkin solution is that of block CG; its residual comes from stored products.

        Args:
            system: of the plan, attached.
            b: (1,m,K) right-hand sides, projected.
            rtol: relative tolerance.
            max_steps: cap.

        Returns:
            Solution and residual (1,m,K), and block steps: two passes each.
        """
        count, columns = b.shape[1], _block_width(b)
        limit = min(self.budget // (4 * count * b.element_size()), count - 1, MAX_BASIS)
        generator = torch.Generator(device="cpu").manual_seed(0)
        noise = torch.randn(1, count, columns - b.shape[2], generator=generator, dtype=b.dtype)
        block = torch.cat([b, noise.to(b)], dim=-1)
        size = b.square().sum(1, keepdim=True).sqrt()
        basis, products, gram = b[:, :, :0], b[:, :, :0], b.new_zeros(1, 0, 0)
        z, left, steps = torch.zeros_like(b), b, 0
        while steps < max_steps and basis.shape[-1] + columns <= limit:
            block = _orthonormal(system.project, block, basis)
            applied = system.project(system.normalized_matmat(block))
            basis, products = torch.cat([basis, block], -1), torch.cat([products, applied], -1)
            steps += 1
            side = basis.mT @ applied
            gram = torch.cat([torch.cat([gram, side[:, :-columns].mT], 1), side], -1)
            weights = torch.linalg.solve((gram + gram.mT) / 2, basis.mT @ b)
            z, left = basis @ weights, b - products @ weights
            if bool((left.square().sum(1, keepdim=True).sqrt() <= rtol * size).all()):
                break
            block = applied
        self.judge(b, steps)
        if steps >= MIN_BLOCK_STEPS:
            metric = system.metric() if self.hard else None
            self._set(*_slowest(basis, products, metric, self.max_vectors))
        return z, left, steps

    def amplify(self, v: Tensor) -> Tensor:
        """`U (T^-1 - I) U^T v`: what turns a Jacobi step on a nearby system into one with S^^-1 on U."""
        assert self.basis is not None and self.values is not None
        return self.basis @ ((1.0 / self.values - 1.0)[None, :, None] * (self.basis.mT @ v))

    def judge(self, b: Tensor, steps: int) -> None:
        """Remember that a solve took long; small systems are left alone, see `record_steps`."""
        self.hard = self.hard or (steps > HARD_STEPS and b.shape[1] > SMALL)

    def attach(self, system: SchurSystem) -> None:
        """Make the space that of this system: after a change of plan, re-orthogonalize and re-apply."""
        if self._owner is not None and self._owner() is system:
            return
        self._owner, self.harvests = weakref.ref(system), 0
        if self.basis is None:
            return
        if not self.matches(system.diag):
            self._clear()
            return
        basis = _orthonormal(system.project, self.basis, self.basis[:, :, :0])
        self._set(basis, system.project(system.normalized_matmat(basis)))

    def matches(self, like: Tensor) -> bool:
        """Whether the vectors are of the size and dtype of (1,m)."""
        if self.basis is None:
            return False
        return self.basis.shape[1] == like.shape[-1] and self.basis.dtype == like.dtype

    def _clear(self) -> None:
        self.basis = self.values = self.products = self.inverse = None

    def _set(self, basis: Tensor, products: Tensor) -> None:
        """Rayleigh-Ritz on an orthonormal basis; keep the slowest modes."""
        gram = basis.mT @ products
        values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
        floor = 64 * torch.finfo(basis.dtype).eps
        # Vectors of large systems cost memory: only the slow ones are worth it.
        ceiling = 1.0 if basis.shape[1] <= LARGE else LARGE_MAX_RITZ
        keep = (values[0] > floor) & (values[0] < ceiling)
        order = keep.nonzero()[: self.max_vectors, 0]
        if order.numel() == 0:
            self._clear()
            return
        chosen, self.values = vectors[:, :, order], values[0, order]
        self.basis, self.products = basis @ chosen, products @ chosen
        self.lenient = True
        inner = self.basis.mT @ self.products
        self.inverse = torch.linalg.inv((inner + inner.mT) / 2)

    def remove(self, v: Tensor) -> Tensor:
        """`(I - SU M^-1 U^T) v`."""
        assert self.basis is not None and self.products is not None and self.inverse is not None
        return v - self.products @ (self.inverse @ (self.basis.mT @ v))

    def deflated(self, matmul: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The projected operator."""
        return lambda v: self.remove(matmul(v))

    def project(self, project: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Keep directions orthogonal to U to rounding, besides the null space."""

        def both(v: Tensor) -> Tensor:
            assert self.basis is not None
            v = project(v)
            return v - self.basis @ (self.basis.mT @ v)

        return both

    def complete(self, z: Tensor, b: Tensor) -> Tensor:
        """`z - U M^-1 SU^T z + U M^-1 U^T b`."""
        assert self.basis is not None and self.products is not None and self.inverse is not None
        return z + self.basis @ (self.inverse @ (self.basis.mT @ b - self.products.mT @ z))

    def harvest(self, result: CGResult, metric: Tensor | None = None) -> None:
        """Add the recorded Krylov basis, keep the slowest Ritz vectors; no plan pass.

        Args:
            result: of a CG on this space's system.
            metric: diagonal that preconditioned it.
        """
        self.harvests += 1
        if len(result.path) < MIN_STEPS:
            return
        raw = torch.cat([step.z for step in result.path], dim=-1)
        previous = [torch.zeros_like(result.path[0].hp), *[step.hp for step in result.path[:-1]]]
        applied = [step.hp - step.beta * old for step, old in zip(result.path, previous, strict=True)]
        size = raw.square().sum(1, keepdim=True).sqrt()
        good = (size > 0)[0, 0].nonzero()[:, 0]
        vectors = (raw / size)[:, :, good]
        products = (torch.cat(applied, dim=-1) / size)[:, :, good]
        if self.basis is not None and self.products is not None and self.inverse is not None:
            # What CG saw was the projected operator: put back the part that was removed.
            products = products + self.products @ (self.inverse @ (self.products.mT @ vectors))
            vectors = torch.cat([self.basis, vectors], dim=-1)
            products = torch.cat([self.products, products], dim=-1)
        # The joint basis is orthonormal to rounding only; one triangular solve makes it so.
        factor = torch.linalg.cholesky_ex(vectors.mT @ vectors)
        if int(factor.info.max()) != 0:
            return
        vectors = torch.linalg.solve_triangular(factor.L.mT, vectors, upper=True, left=False)
        products = torch.linalg.solve_triangular(factor.L.mT, products, upper=True, left=False)
        self._set(*_slowest(vectors, products, metric, self.max_vectors))


def _slowest(basis: Tensor, products: Tensor, metric: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Orthonormal basis, with its products, of the slowest modes in a space, `S^ u = t J u` for a metric J.

    CG preconditioned by J is slow where t is small; that is what deflation is to take away then.
    """
    if metric is None:
        return basis, products
    gram = basis.mT @ products
    factor = torch.linalg.cholesky(basis.mT @ (metric * basis))
    half = torch.linalg.solve_triangular(factor, (gram + gram.mT) / 2, upper=False)
    values, vectors = torch.linalg.eigh(torch.linalg.solve_triangular(factor, half.mT, upper=False))
    chosen = torch.linalg.solve_triangular(factor.mT, vectors[:, :, :count], upper=True)
    chosen = torch.linalg.qr(chosen)[0]
    return basis @ chosen, products @ chosen


def _block_width(b: Tensor) -> int:
    """Columns of a block solve: fewer for large systems, whose memory they would dominate."""
    return max(BLOCK_COLUMNS if b.shape[1] <= LARGE else LARGE_COLUMNS, int(b.shape[2]))


def _orthonormal(project: Callable[[Tensor], Tensor], block: Tensor, basis: Tensor) -> Tensor:
    """The block made orthonormal against the basis, in two sweeps (columns of zero become random ones)."""
    for _ in range(2):
        block = project(block - basis @ (basis.mT @ block))
        factor = torch.linalg.cholesky_ex(block.mT @ block)
        pivots = torch.diagonal(factor.L, dim1=-2, dim2=-1)
        # Three products in place of Householder's sweeps, where the columns are far from dependent.
        if int(factor.info.max()) == 0 and bool((pivots.amin(-1) > WELL_CONDITIONED * pivots.amax(-1)).all()):
            block = torch.linalg.solve_triangular(factor.L.mT, block, upper=True, left=False)
        else:
            block = torch.linalg.qr(block)[0]
    return block
