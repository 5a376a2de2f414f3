"""Warm starts: a solved problem as the start of the next one whose clouds have moved a little.

A Hessian-vector product solves for the response of the potentials to a displacement of the points (the
`w1, w2` of MATH 4). `Tangents` keeps those responses; where the next clouds differ from the last ones by a
combination of displacements seen, as after a Newton-CG step, the potentials follow to first order and the
next solve starts at an error of second order in the step, at no plan pass. Where no product was made, as with
Adam or L-BFGS, they are extrapolated along the last displacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.directions import Direction
from ot_newton.potentials import Potentials
from ot_newton.problem import OTProblem

__all__ = ["Tangents", "WarmStart", "displacement"]

MAX_TANGENTS = 256
TANGENT_BYTES = 1 << 26
RELATIVE_RANK = 1e-12
LONGEST = 2.0


class Tangents:
    """Displacements of both clouds with the responses of the potentials; one lane.

    Attributes:
        blocks: pairs of displacements (k, (n+m) d), x first, and responses (k, n+m) of (f, g). The tensors
            are never changed, so that a copy of the tuple is a snapshot.
        secant: the last displacement ((n+m) d,) and how the potentials changed with it (n+m,); what there is
            to go by while no product has been made.
    """

    def __init__(
        self, blocks: tuple[tuple[Tensor, Tensor], ...] = (), secant: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.blocks, self.secant = blocks, secant

    def along(self, before: WarmStart, x: Tensor, y: Tensor, potentials: Potentials) -> None:
        """Add the secant from another solved problem to this one's clouds and potentials."""
        (f, g), (f0, g0) = potentials, before.potentials
        self.secant = displacement(before, x, y), torch.cat([f - f0, g - g0])

    def record(self, v: Direction, df: Tensor, dg: Tensor) -> None:
        """Add a block of displacements (1,K,.) and its responses (1,K,n), (1,K,m); the oldest make room."""
        count = df.shape[1]
        given = v.x if v.x is not None else v.y
        assert given is not None
        parts = [
            df.new_zeros(count, size * given.shape[-1]) if part is None else part.reshape(count, -1)
            for part, size in ((v.x, df.shape[2]), (v.y, dg.shape[2]))
        ]
        moves, responses = torch.cat(parts, dim=-1), torch.cat([df[0], dg[0]], dim=-1)
        most = TANGENT_BYTES // ((moves.shape[1] + responses.shape[1]) * moves.element_size())
        most = min(MAX_TANGENTS, most)
        blocks = (*self.blocks, (moves, responses))
        while sum(len(block[0]) for block in blocks) > most:
            blocks = blocks[1:]
        self.blocks = blocks

    def predict(self, move: Tensor) -> Tensor | None:
        """Response (n+m,) to the part of a displacement ((n+m) d,) in the span; None without one."""
        blocks = [block for block in self.blocks if block[0].shape[1] == move.shape[0]]
        if not blocks:
            return self._extrapolated(move)
        rows = torch.cat([block[0] for block in blocks]).double()
        responses = torch.cat([block[1] for block in blocks]).double()
        size = rows.square().sum(1).sqrt()
        rows = rows / size.clamp_min(torch.finfo(rows.dtype).tiny)[:, None]
        # Conjugate directions are far from parallel: normal equations with a relative cutoff do.
        values, vectors = torch.linalg.eigh(rows @ rows.mT)
        keep = values > RELATIVE_RANK * values[-1]
        if not bool(keep.any()):
            return None
        along = vectors[:, keep].mT @ (rows @ move.double())
        weights = vectors[:, keep] @ (along / values[keep])
        weights = torch.where(size > 0, weights / size.clamp_min(torch.finfo(rows.dtype).tiny), 0 * weights)
        return (weights @ responses).to(move.dtype)

    def _extrapolated(self, move: Tensor) -> Tensor | None:
        """The part along the secant, of at most `LONGEST` times its length."""
        if self.secant is None or self.secant[0].shape != move.shape:
            return None
        along, response = self.secant
        length = float(along.double().square().sum())
        part = float((along.double() * move.double()).sum()) / length if length > 0 else 0.0
        return min(max(part, -LONGEST), LONGEST) * response


def displacement(start: WarmStart, x: Tensor, y: Tensor) -> Tensor:
    """How far the clouds are from a start's, flat, x first."""
    return torch.cat([(x - start.x).reshape(-1), (y - start.y).reshape(-1)])


@dataclass(frozen=True, eq=False)
class WarmStart:
    """What a solved problem hands to the next one.

    Attributes:
        potentials: of the solved problem.
        x: its clouds.
        y: likewise.
        newton: whether Newton on the dual finished it, or was to have: Sinkhorn is slow here.
        factor: factor of its Schur complement (`KeptInverse`), None where plans are not stored.
        space: slow modes of its Schur solves with their Ritz values (`Deflation.state`), None without them.
        tangents: responses to displacements.
    """

    potentials: Potentials
    x: Tensor
    y: Tensor
    newton: bool = False
    factor: Tensor | None = None
    space: tuple[Tensor, Tensor, Tensor] | None = None
    tangents: Tangents | None = None

    def fits(self, problem: OTProblem) -> bool:
        """Whether the problem has this start's sizes, dtype and device."""
        shapes = (*problem.batch_shape, problem.n), (*problem.batch_shape, problem.m)
        f, g = self.potentials
        return (f.shape, g.shape, f.dtype, f.device) == (*shapes, problem.dtype, problem.device)

    def predict(self, problem: OTProblem) -> Potentials | None:
        """Potentials moved along with the clouds to first order; None where nothing is known."""
        if self.tangents is None or problem.batch_shape or self.x.shape != problem.x.shape:
            return None
        if self.y.shape != problem.y.shape:
            return None
        move = displacement(self, problem.x, problem.y)
        if not bool(move.any()):
            return None
        response = self.tangents.predict(move)
        if response is None or not bool(torch.isfinite(response).all()):
            return None
        f, g = self.potentials
        return Potentials(f + response[: f.shape[0]], g + response[f.shape[0] :])

    def as_dict(self) -> dict[str, Tensor]:
        """Tensors to save."""
        out = {"f": self.potentials.f, "g": self.potentials.g, "x": self.x, "y": self.y}
        out["newton"] = torch.tensor(self.newton)
        if self.factor is not None:
            out["factor"] = self.factor
        if self.space is not None:
            out["modes"], out["ritz"], out["hard"] = self.space
        if self.tangents is not None and self.tangents.secant is not None:
            out["secant_move"], out["secant_response"] = self.tangents.secant
        for k, (moves, responses) in enumerate(() if self.tangents is None else self.tangents.blocks):
            out |= {f"moves{k}": moves, f"responses{k}": responses}
        return out

    @classmethod
    def from_dict(cls, state: Mapping[str, Tensor]) -> WarmStart:
        """Inverse of `as_dict`."""
        count = sum(name.startswith("moves") for name in state)
        known = "secant_move" in state
        secant = (state["secant_move"], state["secant_response"]) if known else None
        return cls(
            Potentials(state["f"], state["g"]),
            state["x"],
            state["y"],
            bool(state["newton"]),
            state.get("factor"),
            (state["modes"], state["ritz"], state.get("hard", torch.tensor(False)))
            if "modes" in state
            else None,
            Tangents(tuple((state[f"moves{k}"], state[f"responses{k}"]) for k in range(count)), secant),
        )
