"""KeOps: its own log-sum-exp, and our solver and Hessian with every plan pass made by KeOps.

The second is a `PlanBackend` written in KeOps formulas: what a KeOps user gets who knows the streamed HVP.
KeOps compiles one C++ module per formula and width (about 10 s each, kept on disk), so products are padded
to few widths.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ot_newton.backends.common import mask_bias
from ot_newton.backends.select import get_backend
from ot_newton.directions import Direction, HessianStats
from ot_newton.errors import ConvergenceWarning
from ot_newton.experiments.bench.harness import Job
from ot_newton.experiments.bench.tasks import MAX_ITER, Task
from ot_newton.fixed_point import SinkhornOptions, run_sinkhorn
from ot_newton.hessian import LinearizedPlan
from ot_newton.operators.hessian_operator import default_rtol
from ot_newton.potentials import Biases, biases_to_potentials, operands
from ot_newton.protocols import PassCounter, PlanBackend

if TYPE_CHECKING:
    from ot_newton.experiments.bench.half_case import HalfCase

__all__ = ["KeopsBackend", "backward", "forward", "half_iteration", "hvp", "stream"]

LN2 = math.log(2.0)


def _genred(formula: str, variables: list[str], reduction: str) -> Any:
    import pykeops

    pykeops.set_verbose(False)
    from pykeops.torch import Genred

    return Genred(formula, variables, reduction_op=reduction, axis=1)


def half_iteration(case: HalfCase) -> Job:
    """`LogSumExp_j (g_j + eps log b_j - |x_i - y_j|^2) / eps` as one KeOps reduction."""
    p = case.problem
    names = [f"X=Vi({p.d})", f"Y=Vj({p.d})", "G=Vj(1)", "P=Pm(1)"]
    reduce = _genred("(G - SqDist(X,Y)) * P", names, "LogSumExp")
    g = (case.g + p.eps * case.log_weight)[:, None].contiguous()
    inverse = torch.tensor([1.0 / p.eps])
    return Job(lambda: reduce(p.x, p.y, g, inverse), lambda out: -p.eps * out[:, 0].double())


class KeopsPlan:
    """See `Plan`; one lane, one member per block, the cpu only."""

    def __init__(
        self,
        clouds: tuple[Tensor, Tensor],
        biases: list[Tensor],
        weights: tuple[Tensor, Tensor],
        counter: PassCounter,
    ) -> None:
        self.clouds, self.biases, self.weights, self.counter = clouds, biases, weights, counter
        self.d = clouds[0].shape[1]
        self.names = [f"X=Vi({self.d})", f"Y=Vj({self.d})", "W=Vi(1)", "U=Vj(1)", "L=Pm(1)"]
        self.log2 = torch.tensor([LN2], dtype=clouds[0].dtype)

    def _operands(self, axis: int) -> list[Tensor]:
        kept, summed = 1 - axis, axis
        bias = [self.biases[side][:, None].contiguous() for side in (kept, summed)]
        return [self.clouds[kept], self.clouds[summed], *bias]

    def apply(self, v: Tensor, axis: int) -> Tensor:
        """See `Plan.apply`."""
        self.counter.add()
        width = v.shape[2]
        padded = 1 if width == 1 else max(width, self.d + 2)
        values = torch.zeros(v.shape[1], padded, dtype=v.dtype)
        values[:, :width] = v[0] * self.weights[axis][:, None]
        formula = "Exp(L*((X|Y) + W + U)) * V"
        reduce = _genred(formula, [*self.names, f"V=Vj({padded})"], "Sum")
        out = reduce(*self._operands(axis), self.log2, values)
        product: Tensor = out[:, :width] * self.weights[1 - axis][:, None]
        return product[None]

    def apply_hadamard(
        self, left: Tensor, right: Tensor, v: Tensor, axis: int, transport: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Plan.apply_hadamard`, for blocks of one.

        Raises:
            NotImplementedError: a block of more than one member.
        """
        if max(left.shape[1], right.shape[1], v.shape[1]) > 1:
            raise NotImplementedError("the KeOps comparison does one product at a time")
        self.counter.add()
        kept, summed = (left, right) if axis == 1 else (right, left)
        mass = self.weights[axis][:, None]
        values = (v[0, 0] * mass).contiguous()
        moved = values[:, :0] if transport is None else transport[0] * mass
        names = [
            *self.names,
            f"A=Vi({kept.shape[3]})",
            f"B=Vj({kept.shape[3]})",
            f"V=Vj({values.shape[1]})",
        ]
        factors = [kept[0, 0].contiguous(), summed[0, 0].contiguous(), values]
        formula = "Exp(L*((X|Y) + W + U)) * ((A|B) * V)"
        if transport is not None:
            names.append(f"T=Vj({moved.shape[1]})")
            factors.append(moved.contiguous())
            formula = "Exp(L*((X|Y) + W + U)) * Concat((A|B) * V, T)"
        out = _genred(formula, names, "Sum")(*self._operands(axis), self.log2, *factors)
        out = out * self.weights[1 - axis][:, None]
        width = values.shape[1]
        return out[None, None, :, :width], None if transport is None else out[None, :, width:]

    def to_dense(self) -> Tensor:
        """See `Plan.to_dense`."""
        eye = torch.eye(self.clouds[1].shape[0], dtype=self.clouds[0].dtype)
        return torch.cat([self.apply(column[None], 1) for column in torch.split(eye, 1, dim=1)], dim=2)


class KeopsTiles:
    """See `Tiles`; KeOps stabilizes by a running maximum, so a stabilizer is not used."""

    def __init__(self, q: Tensor, k: Tensor, counter: PassCounter) -> None:
        self.clouds, self.counter = (q[0].contiguous(), k[0].contiguous()), counter
        d = q.shape[2]
        names = [f"X=Vi({d})", f"Y=Vj({d})", "U=Vj(1)", "L=Pm(1)"]
        self.reduce = _genred("L * ((X|Y) + U)", names, "LogSumExp")
        self.log2 = torch.tensor([LN2], dtype=q.dtype)

    def lse(
        self, bias: Tensor, weight: Tensor, axis: int, stabilizer: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Tiles.lse`."""
        self.counter.add()
        shifted = mask_bias(bias + weight.log2(), weight)[0, :, None].contiguous()
        out = self.reduce(self.clouds[1 - axis], self.clouds[axis], shifted, self.log2)
        return out.mT / LN2, None

    def take(self, lanes: Tensor) -> KeopsTiles:
        """See `Tiles.take`: there is one lane."""
        return self

    def plan(self, row_bias: Tensor, col_bias: Tensor, a: Tensor, b: Tensor) -> KeopsPlan:
        """See `Tiles.plan`."""
        biases = [mask_bias(row_bias, a)[0], mask_bias(col_bias, b)[0]]
        return KeopsPlan(self.clouds, biases, (a[0], b[0]), self.counter)


class KeopsBackend:
    """KeOps reductions on the CPU, one lane."""

    name = "keops"

    def bind(self, q: Tensor, k: Tensor, counter: PassCounter) -> KeopsTiles:
        """See `PlanBackend.bind`."""
        return KeopsTiles(q, k, counter)


@dataclass(frozen=True, eq=False)
class Streamed:
    """A solve on a backend that `sinkhorn` does not know.

    Attributes:
        task: what was solved.
        biases: at the end.
        iterations: taken.
        plan: with its derivatives.
    """

    task: Task
    biases: Biases
    iterations: int
    plan: LinearizedPlan

    def answer(self) -> dict[str, Any]:
        """Potentials and counters."""
        pair = biases_to_potentials(self.task.problem, self.biases)
        return {
            "f": pair.f.double().numpy(),
            "g": pair.g.double().numpy(),
            "iterations": self.iterations,
            "plan_passes": self.plan.counter.passes,
        }

    def product(self, v: Tensor) -> Tensor:
        """Hessian-vector product (n,d) in x."""
        direction = Direction(x=v[None, None])
        rtol = default_rtol(self.task.problem.dtype)
        out, solve = self.plan.product(direction, "x", rtol=rtol, max_cg=None, stats=HessianStats())
        if not solve.converged:
            warnings.warn("the inner solve missed its tolerance", ConvergenceWarning, stacklevel=2)
        assert out.x is not None
        return out.x[0, 0]


def stream(task: Task, backend: PlanBackend) -> Streamed:
    """Our Sinkhorn iteration with every pass made by ``backend``; annealed where the rule is no count."""
    problem, counter = task.problem, PassCounter()
    tol, cap = (0.0, task.rule.iterations) if task.counted else (task.rule.tol, MAX_ITER)
    options = SinkhornOptions(tol=tol, max_iter=cap, anneal=not task.counted)
    end = run_sinkhorn(problem, backend, options, counter)
    c = problem.centred
    tiles = backend.bind(*operands(problem, problem.eps), counter)
    plan = tiles.plan(end.biases.row, end.biases.col, c.a, c.b)
    linearized = LinearizedPlan(problem, plan, counter, direct=False)
    return Streamed(task, end.biases, int(end.n_iter[0]), linearized)


def _backend(name: str) -> PlanBackend:
    """KeOps, or one of ours by its name."""
    return KeopsBackend() if name == KeopsBackend.name else get_backend(name)


def forward(task: Task, kind: str, update: str = "alternating") -> Job:
    """The solve, and the row sums that a value takes."""

    def run() -> Streamed:
        solved = stream(task, _backend(kind))
        solved.plan.rows()
        return solved

    return Job(run, Streamed.answer)


def backward(task: Task, kind: str) -> Job:
    """The solve and the gradient by the envelope theorem."""

    def run() -> tuple[Streamed, Tensor]:
        solved = stream(task, _backend(kind))
        return solved, solved.plan.gradient()[0]

    return Job(run, lambda pair: pair[0].answer() | {"gradient": pair[1].double().numpy()})


def hvp(task: Task, kind: str) -> Job:
    """The solve and a streamed product: what a KeOps user gets who knows our formula."""

    def run() -> tuple[Streamed, Tensor]:
        solved = stream(task, _backend(kind))
        return solved, solved.product(task.vectors[0])

    def answer(pair: tuple[Streamed, Tensor]) -> dict[str, Any]:
        solved, first = pair
        found = solved.answer()
        products = torch.stack([first, *(solved.product(v) for v in task.vectors[1:])])
        return found | {"products": products.double().numpy()}

    return Job(run, answer)
