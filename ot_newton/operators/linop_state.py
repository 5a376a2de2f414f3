"""State behind the linear_operator adapter: options, the operators already made, a problem without checks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ot_newton.operators.base import PlanOperator
from ot_newton.problem import CentredProblem, OTProblem

__all__ = ["CentredOnly", "Memo", "Options"]

KEPT = 4
"""Operators a memo keeps: a few lanes or clones may be used in turn."""


class CentredOnly(OTProblem):
    """A problem given by its centred clouds, validated long ago: nothing is checked or moved again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "b_factor", torch.ones(self.a.shape[:-1]))

    @cached_property
    def centred(self) -> CentredProblem:
        """The clouds as they are; D, which no product here needs, is 0."""
        x, y, a, b = (t.contiguous() for t in self._flat())
        shift = torch.zeros(x.shape[0], x.shape[2], dtype=torch.float64, device=x.device)
        return CentredProblem(x, y, a, b, shift, self.balanced)


@dataclass(frozen=True)
class Options:
    """Everything about an operator that is not a tensor; picklable."""

    eps: float
    cost_scale: float
    rho_x: float | None
    rho_y: float | None
    backend: str
    transposed: bool = False
    wrt: str = "x"
    rtol: float = 0.0
    max_cg: int | None = None
    relative_floor: float = 0.0
    side: str = "y"
    normalized: bool = False
    solve_rtol: float | None = None


class Memo:
    """The operators last made of given tensors, shared by the copies that linear_operator makes.

    Tensors are told apart by their memory, layout and version, so an in-place change is seen. Copies
    and pickles of a memo are empty.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[Any, tuple[tuple[Tensor, ...], PlanOperator]] = OrderedDict()

    @staticmethod
    def _mark(tensors: tuple[Tensor, ...]) -> Any:
        return tuple(
            (t.data_ptr(), 0 if t.is_inference() else t._version, t.shape, t.stride(), t.dtype, t.device)
            for t in tensors
        )

    def get(self, tensors: tuple[Tensor, ...], build: Callable[[], PlanOperator]) -> PlanOperator:
        """The operator of these tensors; the tensors are held too, so that no address is used twice."""
        mark = self._mark(tensors)
        if mark not in self._held:
            self._held[mark] = (tuple(t.detach() for t in tensors), build())
            while len(self._held) > KEPT:
                self._held.popitem(last=False)
        self._held.move_to_end(mark)
        return self._held[mark][1]

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()

    def __deepcopy__(self, memo: Any) -> Memo:
        return Memo()
