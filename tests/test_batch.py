"""`sinkhorn_batch`: bitwise equal modes, accounting, ragged sizes, release by id, refusals."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ot_newton as otn
from ot_newton.errors import ConvergenceWarning, PrecisionWarning, Status
from tests import truth
from tests.tolerances import assert_close

EXACT_BACKENDS = ["dense", "cpu"]
MODES = ["packed", "masked", "fixed"]
DEPTHS_DIFFER = [3, 11, 4, 7, 2, 9]


def cloud(n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def problems(
    sizes: Any = None, *, dtype: torch.dtype = torch.float64, eps: float = 0.1, **options: Any
) -> list[otn.OTProblem]:
    """Problems of different difficulty: the second cloud is stretched by the lane's own factor."""
    sizes = [(20, 24)] * 6 if sizes is None else sizes
    out = []
    for k, (n, m) in enumerate(sizes):
        y = cloud(m, 100 + k, dtype) * (0.4 + 0.35 * DEPTHS_DIFFER[k % 6] / 3)
        out.append(otn.OTProblem(cloud(n, k, dtype), y, eps=eps, **options))
    return out


def same(one: otn.SinkhornResult, other: otn.SinkhornResult) -> bool:
    return torch.equal(one.f, other.f) and torch.equal(one.g, other.g) and one.n_iter == other.n_iter


# ---- modes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", EXACT_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("eps", [0.5, 0.1])
def test_solo_masked_and_packed_are_bitwise_equal(eps: float, dtype: torch.dtype, backend: str) -> None:
    given = problems(dtype=dtype, eps=eps)
    options: dict[str, Any] = {"backend": backend, "check_every": 2}
    packed, masked = (otn.sinkhorn_batch(given, mode, **options) for mode in ("packed", "masked"))
    assert packed.unconverged == masked.unconverged == ()
    assert len(set(packed.depth.tolist())) > 2
    for k, problem in enumerate(given):
        solo = otn.sinkhorn_batch([problem], "packed", **options)[0]
        assert same(packed[k], masked[k]), k
        assert same(packed[k], solo), k
        assert torch.equal(packed[k].value, solo.value)
        assert packed[k].marginal_error == masked[k].marginal_error == solo.marginal_error


@pytest.mark.parametrize("backend", ["dense", "torch_tiles", "cpu"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_solves_every_problem(mode: str, backend: str) -> None:
    given = problems()
    batch = otn.sinkhorn_batch(given, mode, backend=backend, tol=1e-11)
    assert batch.unconverged == ()
    for problem, result in zip(given, batch, strict=True):
        assert result.status is Status.CONVERGED
        assert result.problem is problem
        exact = truth.solve(problem.x.numpy(), problem.y.numpy(), eps=problem.eps)
        assert_close(result.value, exact.value, "value")
        assert_close(result.gradient("x"), exact.gradient("x"), "hvp")
        assert abs(float(result.plan.row_sums().sum()) - 1) <= 1e-11


def test_work_is_the_sum_of_the_depths() -> None:
    """packed: sum of the depths; masked and fixed: width times the last depth."""
    given = problems()
    packed, masked, fixed = (otn.sinkhorn_batch(given, mode, tol=1e-7) for mode in MODES)
    assert packed.lane_iterations == int(packed.depth.sum())
    assert masked.lane_iterations == len(given) * int(masked.depth.max())
    assert fixed.lane_iterations == len(given) * int(fixed.depth.max())
    assert torch.equal(packed.depth, masked.depth)
    assert packed.lane_iterations < 0.8 * masked.lane_iterations
    assert len(set(fixed.depth.tolist())) == 1
    assert int(fixed.depth[0]) >= int(packed.depth.max())
    assert all(int(d) % 4 == 0 for d in packed.depth)
    for batch in (packed, masked):
        assert [r.n_iter for r in batch] == batch.depth.tolist()


@pytest.mark.parametrize("every", [1, 3, 5])
def test_audits_come_when_asked(every: int) -> None:
    batch = otn.sinkhorn_batch(problems(), check_every=every, tol=1e-7)
    assert all(iteration % every == 0 for iteration, _ in batch.profile)
    assert all(int(d) % every == 0 for d in batch.depth)
    assert [info.n_iter for info in batch[0].history] == [iteration for iteration, _ in batch.profile]


def test_a_lane_is_released_once_under_its_own_id() -> None:
    """After its depth a packed lane is never screened again; one passing verification each."""
    batch = otn.sinkhorn_batch(problems(), tol=1e-7)
    for iteration, errors in batch.profile:
        for k, error in enumerate(errors.tolist()):
            assert np.isnan(error) == (iteration > int(batch.depth[k]))
    failed = batch.verifications - len(batch)
    assert failed >= 0
    screened = sum(int((errors <= 1e-7).sum()) for _, errors in batch.profile)
    assert batch.verifications <= screened
    assert all(r.marginal_error <= 1e-7 for r in batch)


# ---- order and shape ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_permuted_problems_give_permuted_results(backend: str, mode: str) -> None:
    given, order = problems(), [4, 0, 5, 2, 1, 3]
    batch = otn.sinkhorn_batch(given, mode, backend=backend)
    moved = otn.sinkhorn_batch([given[k] for k in order], mode, backend=backend)
    assert moved.depth.tolist() == [int(batch.depth[k]) for k in order]
    assert moved.recrossings.tolist() == [int(batch.recrossings[k]) for k in order]
    for result, k in zip(moved, order, strict=True):
        assert same(result, batch[k])


@pytest.mark.parametrize("backend", ["dense", "torch_tiles", "cpu"])
@pytest.mark.parametrize("mode", MODES)
def test_ragged_sizes(mode: str, backend: str) -> None:
    """Padding has no mass: every result has its problem's own sizes and answer."""
    sizes = [(5, 30), (30, 5), (1, 7), (16, 16), (29, 1)]
    given = problems(sizes)
    batch = otn.sinkhorn_batch(given, mode, backend=backend, tol=1e-11)
    for problem, result in zip(given, batch, strict=True):
        assert result.f.shape == (problem.n,)
        assert result.g.shape == (problem.m,)
        alone = otn.sinkhorn(problem, backend="dense", tol=1e-11, anneal=False, method="sinkhorn")
        assert_close(result.value, alone.value, "value")
        assert_close(result.gradient("x"), alone.gradient("x"), "hvp")
        v = torch.ones_like(problem.x)
        assert_close(result.hessian("x") @ v, alone.hessian("x") @ v, "hvp")


def test_ragged_weights_and_relaxed_sides() -> None:
    a = torch.tensor([0.2, 0.0, 0.8], dtype=torch.float64)
    given = [
        otn.OTProblem(cloud(3, 0), cloud(4, 1), a, eps=0.2, rho_x=0.5),
        otn.OTProblem(cloud(6, 2), cloud(2, 3), eps=0.2, rho_x=0.5),
    ]
    batch = otn.sinkhorn_batch(given, tol=1e-12)
    for problem, result in zip(given, batch, strict=True):
        weights = (problem.a.numpy(), problem.b.numpy())
        exact = truth.solve(problem.x.numpy(), problem.y.numpy(), *weights, eps=0.2, rho_x=0.5)
        assert_close(result.value, exact.value, "value")
        assert_close(result.gradient("b"), exact.gradient("b"), "hvp")


def test_a_batched_problem_is_its_lanes() -> None:
    x, y = torch.stack([cloud(8, k) for k in range(3)]), cloud(9, 9)
    batch = otn.sinkhorn_batch(otn.OTProblem(x, y, eps=0.2), tol=1e-11)
    listed = otn.sinkhorn_batch([otn.OTProblem(x[k], y, eps=0.2) for k in range(3)], tol=1e-11)
    assert all(same(one, other) for one, other in zip(batch, listed, strict=True))


# ---- what goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_lanes_that_do_not_converge_are_named(mode: str) -> None:
    given = problems()
    depth = otn.sinkhorn_batch(given, "packed", tol=1e-7).depth
    cap = int(depth.sort().values[2])
    late = tuple(k for k, d in enumerate(depth.tolist()) if d > cap)
    if mode == "fixed":  # the batch passes as a whole or not at all, but each lane has its own verdict
        cap = int(depth.max()) - 4
        late = tuple(k for k, d in enumerate(depth.tolist()) if d > cap)
    assert late
    with pytest.warns(ConvergenceWarning, match=f"{len(late)} of 6 .* ids {', '.join(map(str, late))}$"):
        batch = otn.sinkhorn_batch(given, mode, tol=1e-7, max_iter=cap)
    assert batch.unconverged == late
    for k, result in enumerate(batch):
        assert result.status is (Status.MAX_ITER if k in late else Status.CONVERGED)
        assert (result.marginal_error > 1e-7) == (k in late)


def test_zero_tolerance_runs_to_the_cap_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = otn.sinkhorn_batch(problems(), tol=0.0, max_iter=9)
    assert batch.depth.tolist() == [9] * 6
    assert all(r.status is Status.MAX_ITER for r in batch)


def test_no_iteration_at_all() -> None:
    batch = otn.sinkhorn_batch(problems(), tol=0.0, max_iter=0)
    assert batch.depth.tolist() == [0] * 6
    assert batch.lane_iterations == 0
    assert all(bool(torch.isfinite(r.value)) for r in batch)


def test_a_lane_that_breaks_does_not_touch_the_others() -> None:
    """Coordinates whose squares overflow: that lane is given up, the rest keep their bits."""
    good = problems()
    broken = otn.OTProblem(good[0].x * 1e200, good[0].y, eps=0.1)
    with pytest.warns(ConvergenceWarning, match="ids 2"), warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        batch = otn.sinkhorn_batch([*good[:2], broken, *good[2:]], tol=1e-7, max_iter=200)
    assert batch[2].status in (Status.NAN, Status.MAX_ITER)
    alone = otn.sinkhorn_batch(good, tol=1e-7)
    for k, result in enumerate([*batch][:2] + [*batch][3:]):
        assert result.status is Status.CONVERGED
        assert same(result, alone[k])


def test_recrossings_are_counted_where_lanes_wait() -> None:
    """A fixed batch goes on with lanes that have passed; crossings of its profile are counted."""
    batch = otn.sinkhorn_batch(problems(dtype=torch.float32, eps=0.3), "fixed", check_every=1)
    tol = batch[0].tol
    counted = torch.zeros(6, dtype=torch.int64)
    before = torch.zeros(6, dtype=torch.bool)
    for _, errors in batch.profile:
        now = errors <= tol
        counted += (before & ~now).to(torch.int64)
        before = now
    assert batch.recrossings.tolist() == counted.tolist()
    assert len(batch.profile) == int(batch.depth.max())


def test_starts_are_taken_lane_by_lane() -> None:
    given = problems([(5, 9), (8, 4), (3, 3)])
    first = otn.sinkhorn_batch(given, tol=1e-10)
    again = otn.sinkhorn_batch(given, tol=1e-9, init=first)
    assert again.depth.tolist() == [0, 0, 0]
    pairs = otn.sinkhorn_batch(given, tol=1e-9, init=[(r.f, r.g) for r in first])
    assert pairs.depth.tolist() == [0, 0, 0]
    for one, other in zip(first, again, strict=True):
        assert_close(other.value, one.value, "value")


def test_callback_sees_audits_and_stops() -> None:
    seen: list[int] = []

    def stop(info: Any) -> bool:
        seen.append(info.n_iter)
        return info.n_iter >= 8

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = otn.sinkhorn_batch(problems(), tol=1e-12, callback=stop)
    assert seen == [4, 8]
    assert {r.status for r in batch} == {Status.CALLBACK}

    def leave(info: Any) -> None:
        raise StopIteration

    assert otn.sinkhorn_batch(problems(), tol=1e-12, callback=leave)[0].status is Status.CALLBACK


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([],), {}, "at least one"),
        ((3,), {}, "problems must be"),
        (([1, 2],), {}, "problems must be"),
        ((None, "wide"), {}, "mode must be"),
        ((None,), {"max_iter": -1}, "max_iter"),
        ((None,), {"check_every": 0}, "check_every"),
        ((None,), {"tol": -1.0}, "tol"),
        ((None,), {"init": 5}, "init"),
        ((None,), {"init": [None] * 6}, r"init\[0\]"),
        ((None,), {"backend": "gpu"}, "backend"),
    ],
    ids=lambda v: str(v),
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    given = [problems() if v is None else v for v in arguments]
    with pytest.raises((TypeError, ValueError), match=message):
        otn.sinkhorn_batch(*given, **options)


@pytest.mark.parametrize("name", ["eps", "cost_scale", "rho_x", "d", "dtype"])
def test_problems_that_cannot_share_a_batch_are_named(name: str) -> None:
    first = problems([(5, 6)])[0]
    if name == "d":
        other = otn.OTProblem(
            torch.rand(5, 3, dtype=torch.float64), torch.rand(6, 3, dtype=torch.float64), eps=0.1
        )
    elif name == "dtype":
        other = problems([(5, 6)], dtype=torch.float32)[0]
    else:
        other = otn.OTProblem(first.x, first.y, **{"eps": 0.1, name: 0.7})
    with pytest.raises(ValueError, match=rf"problems\[1\].{name}"):
        otn.sinkhorn_batch([first, other])
    with pytest.raises(ValueError, match=r"problems\[1\] must be a single problem"):
        otn.sinkhorn_batch([first, otn.OTProblem(torch.rand(2, 5, 2), torch.rand(6, 2), eps=0.1)])
