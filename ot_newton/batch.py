"""The public `sinkhorn_batch`: many independent problems, solved side by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ot_newton.backends.select import choose_backend, get_backend
from ot_newton.errors import ConvergenceWarning, PrecisionWarning, Status, check_choice, check_integer
from ot_newton.fixed_point import IterationInfo
from ot_newton.packing import BatchOptions, run_batch
from ot_newton.potentials import Biases
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter
from ot_newton.result import SinkhornResult
from ot_newton.solve import start_biases, tolerance
from ot_newton.stage import noise_floor

__all__ = ["BatchResult", "sinkhorn_batch"]

MODES = ("packed", "masked", "fixed")


@dataclass(frozen=True, eq=False, repr=False)
class BatchResult:
    """Results in the order of the problems, and what the batch cost.

    Attributes:
        results: one `SinkhornResult` per problem; index, iterate or take ``len`` of this object.
        depth: (B,) iterations of each problem at its release.
        lane_iterations: lanes iterated, summed over the iterations: `B max depth` for "fixed" and
            "masked", the sum of the depths for "packed".
        verifications: independent two-sided checks made.
        recrossings: (B,) how often a problem's screened error rose above the tolerance again.
        profile: (iteration, (B,) screened errors) at every audit; nan once a lane has left the batch.
        plan_passes: passes over the batch, whatever its width.
        unconverged: ids of the problems that missed the tolerance.

    Example:
        >>> import torch, ot_newton as otn
        >>> x = torch.rand(3, 6, 2, dtype=torch.float64)
        >>> batch = otn.sinkhorn_batch(otn.OTProblem(x, x + 1, eps=0.5))
        >>> len(batch), batch.unconverged, batch[0].converged
        (3, (), True)
    """

    results: tuple[SinkhornResult, ...]
    depth: Tensor
    lane_iterations: int
    verifications: int
    recrossings: Tensor
    profile: tuple[tuple[int, Tensor], ...] = field(repr=False)
    plan_passes: int
    unconverged: tuple[int, ...]

    def __repr__(self) -> str:
        """Sizes and counts."""
        good = len(self.results) - len(self.unconverged)
        return (
            f"BatchResult({good} of {len(self.results)} converged, lane_iterations={self.lane_iterations}, "
            f"plan_passes={self.plan_passes}, max depth={int(self.depth.max())})"
        )

    def __len__(self) -> int:
        """Number of problems."""
        return len(self.results)

    def __getitem__(self, index: int) -> SinkhornResult:
        """Result of one problem."""
        return self.results[index]

    def __iter__(self) -> Iterator[SinkhornResult]:
        """Results in order."""
        return iter(self.results)


def _single(problems: Any) -> list[OTProblem]:
    """The unbatched problems of a sequence or of one batched problem.

    Raises:
        TypeError: something else than problems.
        ValueError: none, batched ones in a sequence, or problems that cannot share a batch.
    """
    if isinstance(problems, OTProblem):
        return [problems.lane(k) for k in range(problems.lanes)]
    if not isinstance(problems, Sequence) or not all(isinstance(p, OTProblem) for p in problems):
        raise TypeError(
            "problems must be a sequence of OTProblem or one batched OTProblem, "
            f"got {type(problems).__name__}"
        )
    if not problems:
        raise ValueError("problems must hold at least one OTProblem, got an empty sequence")
    first = problems[0]
    for k, problem in enumerate(problems):
        if problem.batch_shape:
            raise ValueError(
                f"problems[{k}] must be a single problem, got batch {tuple(problem.batch_shape)}"
            )
        for name in ("eps", "cost_scale", "rho_x", "rho_y", "d", "dtype", "device"):
            own, other = getattr(problem, name), getattr(first, name)
            if own != other:
                raise ValueError(
                    f"problems[{k}].{name} must equal problems[0].{name} to share a batch, "
                    f"got {own} and {other}"
                )
    return list(problems)


def _padded(clouds: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One batch of clouds and weights; a short cloud repeats its last point with weight zero."""
    width = max(int(c.shape[0]) for c in clouds)
    full = [torch.cat([c, c[-1:].expand(width - c.shape[0], -1)]) for c in clouds]
    mass = [torch.cat([w, w.new_zeros(width - w.shape[0])]) for w in weights]
    return torch.stack(full), torch.stack(mass)


def _batched(problems: list[OTProblem]) -> OTProblem:
    """The problems as one batch, ragged sizes as zero-weight padding."""
    x, a = _padded([p.x for p in problems], [p.a for p in problems])
    y, b = _padded([p.y for p in problems], [p.b for p in problems])
    first = problems[0]
    return OTProblem(
        x, y, a, b, eps=first.eps, cost_scale=first.cost_scale, rho_x=first.rho_x, rho_y=first.rho_y
    )


def _tolerances(problems: list[OTProblem], tol: float | None) -> list[tuple[float, float]]:
    """(tolerance, noise floor) of every problem; at most one warning, of the worst."""
    tolerance(max(problems, key=noise_floor), tol)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        return [tolerance(problem, tol) for problem in problems]


def _starts(batch: OTProblem, problems: list[OTProblem], init: Any) -> Biases | None:
    """Biases of per-problem starts (results, potentials or pairs), padded with zeros."""
    if init is None:
        return None
    if not isinstance(init, (Sequence, BatchResult)) or len(init) != len(problems):
        raise ValueError(f"init must be a sequence of one start per problem ({len(problems)}) or None")
    row, col = torch.zeros_like(batch.centred.a), torch.zeros_like(batch.centred.b)
    for k, (problem, one) in enumerate(zip(problems, init, strict=True)):
        biases = start_biases(problem, one)
        if biases is None:
            raise ValueError(f"init[{k}] must be a start, got None")
        row[k, : problem.n], col[k, : problem.m] = biases.row[0], biases.col[0]
    return Biases(row, col)


def sinkhorn_batch(
    problems: Sequence[OTProblem] | OTProblem,
    mode: str = "packed",
    *,
    tol: float | None = None,
    max_iter: int = 10_000,
    check_every: int = 4,
    init: Any = None,
    backend: str = "auto",
    callback: Callable[[IterationInfo], object] | None = None,
) -> BatchResult:
    """Solve many independent problems of one eps side by side.

    Every problem runs the plain alternating iteration from its own start, without annealing, so its
    answer does not depend on its neighbours: alone, masked and packed runs of equal sizes agree bit for
    bit on the `dense` and `cpu` backends.

    Args:
        problems: single problems that share eps, cost, penalties, d, dtype and device; sizes may differ
            (padded with atoms of zero weight). Or one batched problem.
        mode: "packed" takes finished problems out of the batch; "masked" freezes them; "fixed" iterates
            all until all pass the same audit.
        tol: as in `sinkhorn`; floors are those of the single problems.
        max_iter: cap.
        check_every: iterations between two audits.
        init: one start per problem, or None.
        backend: as in `sinkhorn`; "auto" counts the pairs of one problem.
        callback: called at every audit; a true return or StopIteration stops.

    Returns:
        A `BatchResult`. Problems that miss the tolerance are named, by id, in one warning.
        Cost: 2 passes per lane-iteration, 2 per verification.

    Raises:
        TypeError, ValueError: bad arguments, named, before any work.

    Source: active packing after DrainSinkhorn (arXiv 2607.24741).

    Example:
        >>> import torch
        >>> clouds = [torch.rand(k, 2, dtype=torch.float64) for k in (5, 8)]
        >>> batch = sinkhorn_batch([OTProblem(c, c + 1, eps=0.5) for c in clouds])
        >>> len(batch), batch.unconverged
        (2, ())
    """
    check_choice("mode", mode, MODES)
    cap = check_integer("max_iter", max_iter, low=0)
    every = check_integer("check_every", check_every, low=1)
    single = _single(problems)
    batch = _batched(single)
    name = choose_backend(backend, batch.device, batch.n, batch.m)
    limits = _tolerances(single, tol)
    start = _starts(batch, single, init)
    counter = PassCounter()
    targets = torch.tensor([limit for limit, _ in limits], dtype=torch.float64)
    options = BatchOptions(targets, cap, mode, every, callback)
    run = run_batch(batch, get_backend(name), options, counter, start)
    results = []
    for k, problem in enumerate(single):
        biases = Biases(run.biases.row[k : k + 1, : problem.n], run.biases.col[k : k + 1, : problem.m])
        results.append(
            SinkhornResult(
                problem=problem,
                biases=biases,
                statuses=(run.statuses[k],),
                iterations=run.depth[k : k + 1],
                errors=run.error[k : k + 1],
                noise_floor=limits[k][1],
                tol=limits[k][0],
                counter=PassCounter(2 * int(run.depth[k])),
                history=run.history,
                backend=name,
            )
        )
    missed = tuple(k for k, s in enumerate(run.statuses) if s is not Status.CONVERGED)
    stopped = all(run.statuses[k] is Status.CALLBACK for k in missed)
    if missed and tol != 0 and not stopped:
        shown = ", ".join(map(str, missed[:10])) + (", ..." if len(missed) > 10 else "")
        warnings.warn(
            f"sinkhorn_batch: {len(missed)} of {len(single)} problems missed their tolerance "
            f"({max(limit for limit, _ in limits):.1e}) within {cap} iterations: ids {shown}",
            ConvergenceWarning,
            stacklevel=2,
        )
    return BatchResult(
        tuple(results),
        run.depth,
        run.lane_iterations,
        run.verifications,
        run.recrossings,
        run.profile,
        counter.passes,
        missed,
    )
