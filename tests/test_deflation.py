"""Deflation of the Schur solve: right with any vectors, counted, carried, bounded, on by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ot_newton as otn
from ot_newton.deflation import MAX_VECTORS, SMALL, Deflation
from ot_newton.hessian import LinearizedPlan
from ot_newton.operators.hessian_operator import HessianOperator
from ot_newton.operators.plan import diagonal_preconditioner, linearize
from ot_newton.schur import SchurSystem
from tests.generators import seeded
from tests.helpers import problem_of
from tests.tolerances import assert_close, relative_error, to_numpy

N = 160
RTOL = 1e-8


def plan_of(
    eps: float = 0.02,
    *,
    seed: int = 0,
    n: int = N,
    d: int = 8,
    dtype: torch.dtype = torch.float64,
    move: float = 0.0,
    **options: Any,
) -> LinearizedPlan:
    """A hard streaming plan of the uniform cube; `move` displaces x a little."""
    case = seeded(n, n, d, eps, seed=seed, **options)
    shifted = case.x + move * np.random.default_rng(9).uniform(-1, 1, case.x.shape)
    problem = problem_of(case.with_(x=shifted), dtype)
    result = otn.sinkhorn(problem, tol=1e-9 if dtype == torch.float64 else None, backend="cpu")
    return linearize(problem, result.biases, "cpu", result.counter)


def right_hand_sides(system: SchurSystem, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rhs = torch.randn(1, system.diag.shape[-1], columns, generator=generator, dtype=torch.float64)
    return (rhs * system.diag.double()[:, :, None]).to(system.diag.dtype)


def normalized(system: SchurSystem) -> np.ndarray:
    size = system.diag.shape[-1]
    identity = torch.eye(size, dtype=system.diag.dtype)[None]
    return to_numpy(system.normalized_matmat(identity))[0]


def true_residual(system: SchurSystem, w: Tensor, rhs: Tensor) -> np.ndarray:
    """`|b - S^ z| / |b|` per column, in float64, of a solution w = D^-1/2 z."""
    half = to_numpy(system.half_inverse)[0]
    b = to_numpy(system.project(system.half_inverse * rhs))[0]
    z = to_numpy(w)[0] / half
    return np.asarray(np.linalg.norm(b - normalized(system) @ z, axis=0) / np.linalg.norm(b, axis=0))


def solve(system: SchurSystem, rhs: Tensor, rtol: float = RTOL) -> Any:
    return system.solve(rhs, 0 * rhs, rtol)


def operator(plan: LinearizedPlan, rtol: float = 1e-6) -> HessianOperator:
    return HessianOperator(plan, "x", rtol=rtol, max_cg=None, relative_floor=rtol, curvature_bound=2.0)


@pytest.fixture(scope="module")
def hard() -> LinearizedPlan:
    return plan_of()


def fresh(plan: LinearizedPlan, deflation: Deflation | None) -> SchurSystem:
    """The plan's system with a deflation space of its own."""
    own = plan.system()
    return SchurSystem(
        plan.plan,
        plan.rows()[0],
        plan.columns()[0],
        (plan.relax[0], plan.relax[1]),
        balanced=own.balanced,
        direct=False,
        deflation=deflation,
    )


# ---- right with any vectors --------------------------------------------------------------------------


def rough_basis(kind: str, system: SchurSystem) -> Tensor:
    """Vectors that are far from exact slow modes in different ways."""
    size = system.diag.shape[-1]
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(size, 12, generator=generator, dtype=torch.float64)
    if kind == "random":
        return noise
    exact = torch.tensor(np.linalg.eigh(normalized(system))[1][:, 1:13].copy())
    if kind == "perturbed":
        return exact + 0.3 / size**0.5 * noise
    if kind == "dependent":
        return torch.cat([exact[:, :6], exact[:, :6] + 1e-7 * noise[:, :6]], 1)
    return torch.cat([exact[:, :5], system.null[0], noise[:, :3]], 1)  # "with the null vector"


@pytest.mark.parametrize("kind", ["random", "perturbed", "dependent", "with the null vector"])
def test_any_vectors_give_the_right_answer(hard: LinearizedPlan, kind: str) -> None:
    """The true residual meets the tolerance and is the one reported, however rough the vectors are."""
    space = Deflation()
    system = fresh(hard, space)
    space.basis = rough_basis(kind, system)[None]
    rhs = right_hand_sides(system, 3)
    found = solve(system, rhs)
    assert 0 < space.size <= 12
    assert found.converged
    actual = true_residual(system, found.w, rhs)
    assert actual.max() <= 2 * RTOL
    plain = solve(fresh(hard, None), rhs)
    assert relative_error(found.w, plain.w) <= 1e-3  # the slowest mode amplifies a residual by 1/lambda
    assert np.all(actual <= 1.05 * to_numpy(found.residual)[0] + 1e-12)


def test_good_vectors_save_steps(hard: LinearizedPlan) -> None:
    space = Deflation()
    system = fresh(hard, space)
    space.basis = rough_basis("perturbed", system)[None]
    rhs = right_hand_sides(system, 1)
    assert solve(system, rhs).iterations < 0.8 * solve(fresh(hard, None), rhs).iterations


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("rho", [(None, None), (0.5, None), (0.5, 2.0)], ids=str)
def test_true_residual_over_many_solves(rho: tuple[Any, Any], dtype: torch.dtype) -> None:
    """Harvested spaces of hard and relaxed sides in both dtypes: what is reported is what is there."""
    plan = plan_of(0.03, dtype=dtype, d=4, rho_x=rho[0], rho_y=rho[1])
    rtol = RTOL if dtype == torch.float64 else 1e-4
    system = plan.system()
    for k in range(6):
        rhs = right_hand_sides(system, 1, seed=k)
        found = solve(system, rhs, rtol)
        assert found.converged, found.reasons
        actual = float(true_residual(system, found.w, rhs).max())
        assert actual <= 2 * rtol
        assert actual <= 1.5 * float(found.residual.max()) + 1e-5 * (dtype == torch.float32) + 1e-12
    assert system.deflation is not None
    assert system.deflation.size > 0
    assert system.deflation.harvests == (6 if dtype == torch.float64 else 0)


# ---- harvest -----------------------------------------------------------------------------------------


def test_later_solves_take_fewer_passes() -> None:
    """At the same true residual, a third of the passes or less once the space has filled."""
    plan, plain = plan_of(), plan_of()
    plain.deflation = None
    counts: dict[str, list[int]] = {"on": [], "off": []}
    for name, one in (("on", plan), ("off", plain)):
        h = operator(one)
        for k in range(12):
            before = h.stats.plan_passes
            v = torch.randn(N * 8, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
            h @ v
            counts[name].append(h.stats.plan_passes - before)
        assert h.stats.converged
        assert h.stats.worst_residual <= 1e-6
    assert counts["on"][0] <= counts["off"][0]
    assert sum(counts["on"][6:]) <= sum(counts["off"][6:]) / 3


def test_harvest_costs_no_pass_and_all_are_counted(hard: LinearizedPlan) -> None:
    space = Deflation()
    system = fresh(hard, space)
    before = hard.counter.passes
    first = solve(system, right_hand_sides(system, 1))
    spent = hard.counter.passes - before
    refreshes = first.iterations // 100 + 2
    assert 2 * first.iterations <= spent <= 2 * (first.iterations + refreshes)
    assert space.size > 0
    h = operator(plan_of())
    before = h.linearized.counter.passes
    h @ torch.ones(N * 8, dtype=torch.float64)
    h @ torch.arange(N * 8, dtype=torch.float64)
    assert h.stats.plan_passes <= h.linearized.counter.passes - before
    assert h.stats.plan_passes >= 2 * h.stats.cg_iterations


def test_vectors_and_memory_are_bounded(hard: LinearizedPlan) -> None:
    space = Deflation()
    system = fresh(hard, space)
    for k in range(25):
        solve(system, right_hand_sides(system, 1, seed=k))
    assert space.basis is not None
    assert space.products is not None
    assert space.size <= MAX_VECTORS
    held = sum(t.numel() * t.element_size() for t in (space.basis, space.products))
    assert held <= space.budget
    gram = to_numpy(space.basis.mT @ space.basis)[0]
    assert np.abs(gram - np.eye(space.size)).max() <= 1e-8
    few = Deflation(max_vectors=7)
    system = fresh(hard, few)
    solve(system, right_hand_sides(system, 1))
    assert few.size == 7


def test_budget_limits_what_is_recorded(hard: LinearizedPlan) -> None:
    """A budget for 20 CG steps records 20; one for less than a dozen turns deflation off."""
    for steps, harvested in ((20, True), (5, False)):
        space = Deflation(budget=5 * N * 8 * steps)
        system = fresh(hard, space)
        rhs = right_hand_sides(system, 1)
        assert space.record_steps(rhs) == (steps if harvested else 0)
        found = solve(system, rhs)
        assert found.converged
        assert (space.size > 0) == harvested
        assert space.size <= steps


def test_blocks_fill_the_space_once_and_use_it(hard: LinearizedPlan) -> None:
    """The first solve, of any width, is the block one; later blocks use its vectors and leave them alone."""
    space = Deflation()
    system = fresh(hard, space)
    plain = solve(fresh(hard, None), right_hand_sides(system, 4))
    solve(system, right_hand_sides(system, 4))
    held = space.basis
    assert space.size > 0
    second = solve(system, right_hand_sides(system, 4))
    assert space.basis is held
    assert second.iterations < 0.5 * plain.iterations
    assert true_residual(system, second.w, right_hand_sides(system, 4)).max() <= 2 * RTOL


def test_first_solve_is_a_block_one() -> None:
    """Random columns share the passes of the first right-hand side: fewer of them than plain CG's."""
    plan = plan_of(0.03, n=500)
    rhs = right_hand_sides(plan.system(), 1)
    plain = solve(fresh(plan, None), rhs)
    before = plan.counter.passes
    first = solve(plan.system(), rhs)
    assert plan.counter.passes - before <= 2 * (first.iterations + 2)
    assert first.iterations <= 0.6 * plain.iterations
    assert true_residual(plan.system(), first.w, rhs).max() <= 1.1 * RTOL
    assert plan.deflation is not None
    assert plan.deflation.size == MAX_VECTORS


# ---- from plan to plan -------------------------------------------------------------------------------


def test_space_is_carried_to_the_next_plan() -> None:
    """Renewing it is one block product, two passes; the first solve of the new plan is already short."""
    plan = plan_of()
    for k in range(6):
        solve(plan.system(), right_hand_sides(plan.system(), 1, seed=k))
    following, cold = plan_of(move=1e-2), plan_of(move=1e-2)
    assert plan.deflation is not None
    following.deflation = Deflation.carried(plan.deflation.state)
    rhs = right_hand_sides(following.system(), 1, seed=50)
    before = following.counter.passes
    warm = solve(following.system(), rhs)
    spent = following.counter.passes - before
    assert spent <= 2 * (warm.iterations + 1 + warm.iterations // 100 + 2)
    assert spent >= 2 * (warm.iterations + 1)
    assert warm.iterations <= 0.6 * solve(cold.system(), rhs).iterations
    assert true_residual(following.system(), warm.w, rhs).max() <= 2 * RTOL


@pytest.mark.parametrize("change", ["size", "dtype"])
def test_a_space_that_does_not_fit_is_dropped(change: str) -> None:
    plan = plan_of()
    solve(plan.system(), right_hand_sides(plan.system(), 1))
    other = plan_of(n=N + 10) if change == "size" else plan_of(dtype=torch.float32)
    rtol = RTOL if change == "size" else 1e-2
    assert plan.deflation is not None
    other.deflation = Deflation.carried(plan.deflation.state)
    rhs = right_hand_sides(other.system(), 1)
    assert true_residual(other.system(), solve(other.system(), rhs, rtol).w, rhs).max() <= 2 * rtol


def test_losses_carry_it_from_call_to_call() -> None:
    """The third of three near calls, three products each, beside a loss that starts anew."""
    case = seeded(N, N, 8, 0.02)
    x, y = torch.tensor(case.x).requires_grad_(), torch.tensor(case.y)
    v = torch.randn(N, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    passes = {}
    for warm in (True, False):
        loss = otn.SinkhornLoss(0.02, backend="cpu", tol=1e-8, rtol=1e-6, warm_start=warm)
        for step in range(3):
            before = loss.plan_passes
            (gradient,) = torch.autograd.grad(loss(x + 1e-3 * step, y), x, create_graph=True)
            for k in range(3):
                torch.autograd.grad(gradient, x, v.roll(k, 0), retain_graph=True)
            passes[warm] = loss.plan_passes - before
        assert loss.last_result is not None
        space = loss.last_result.linearized.deflation
        assert space is not None
        assert space.size > 0
    assert passes[True] <= 0.6 * passes[False]


# ---- where it does nothing ---------------------------------------------------------------------------


def test_small_systems_are_left_alone() -> None:
    """Up to 128 unknowns nothing is harvested: products stay bitwise what they are without deflation."""
    case = seeded(60, SMALL, 4, 0.02)
    result = otn.sinkhorn(problem_of(case), backend="cpu")
    on, off = (linearize(result.problem, result.biases, "cpu", result.counter) for _ in range(2))
    off.deflation = None
    for k in range(3):
        v = torch.randn(60 * 4, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        assert torch.equal(operator(on) @ v, operator(off) @ v)
    assert on.deflation is not None
    assert on.deflation.size == 0


def test_on_by_default_where_products_are_streamed() -> None:
    problem = problem_of(seeded(20, 20, 2, 0.1))
    for backend, wanted in (("dense", False), ("cpu", True), ("torch_tiles", True)):
        assert (otn.sinkhorn(problem, backend=backend).linearized.deflation is not None) == wanted


def test_easy_solves_are_not_harvested() -> None:
    """A solve of a few steps has nothing slow to find."""
    plan = plan_of(1.0, d=2)
    found = solve(plan.system(), right_hand_sides(plan.system(), 1), 1e-6)
    assert found.iterations < 12
    assert plan.deflation is not None
    assert plan.deflation.size == 0


# ---- preconditioner hook -----------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [(None, None), (0.5, 2.0)], ids=str)
@pytest.mark.parametrize("deflated", [False, True])
def test_diagonal_preconditioner(rho: tuple[Any, Any], deflated: bool) -> None:
    """The diagonal of S^ from one pass with doubled exponents; solutions and residuals stay right."""
    plan = plan_of(0.005, d=2, rho_x=rho[0], rho_y=rho[1])
    bare = fresh(plan, None)
    before = plan.counter.passes
    divide = diagonal_preconditioner(plan)
    assert plan.counter.passes - before == 1
    found = 1 / to_numpy(divide(torch.ones(1, N, 1, dtype=torch.float64)))[0, :, 0]
    assert np.abs(found - np.diag(normalized(bare))).max() <= 1e-9
    plan.preconditioner = divide
    if not deflated:
        plan.deflation = None
    rhs = right_hand_sides(bare, 3)
    for _ in range(2):
        solved = solve(plan.system(), rhs)
        assert solved.converged
        assert true_residual(bare, solved.w, rhs).max() <= 2 * RTOL
    assert relative_error(solved.w, solve(bare, rhs).w) <= 1e-4


@pytest.mark.parametrize("wrt", ["x", "y", "xy"])
def test_hessians_take_a_preconditioner(wrt: str) -> None:
    """The product is the same to the tolerance, whichever side is asked for; the result stays as it is."""
    case = seeded(150, 140, 2, 0.01)
    result = otn.sinkhorn(otn.OTProblem(case.x, case.y, eps=0.01), tol=1e-10, backend="cpu")
    plain = result.hessian(wrt, rtol=1e-10)
    v = torch.randn(plain.shape[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = plain @ v
    calls: list[int] = []

    def halved(block: torch.Tensor) -> torch.Tensor:
        calls.append(int(block.shape[-1]))
        return 0.5 * block

    for given in ("diagonal", halved):
        found = result.hessian(wrt, rtol=1e-10, preconditioner=given) @ v
        assert float((found - wanted).norm()) <= 1e-8 * float(wanted.norm())
    assert calls
    assert result.linearized.preconditioner is None
    assert torch.equal(result.hessian(wrt, rtol=1e-10).linearized.rows()[0], plain.linearized.rows()[0])
    with pytest.raises(ValueError, match="preconditioner must be one of 'diagonal', got 'jacobi'"):
        result.hessian(wrt, preconditioner="jacobi")
    with pytest.raises(TypeError, match='preconditioner must be "diagonal" or callable, got int'):
        result.hessian(wrt, preconditioner=3)  # type: ignore[arg-type]


def test_any_preconditioner_is_used() -> None:
    """An exact inverse ends CG in a few steps."""
    plan = plan_of()
    plan.deflation = None
    inverse = torch.tensor(np.linalg.pinv(normalized(plan.system()), rcond=1e-12))[None]
    plan = plan_of()
    plan.deflation, plan.preconditioner = None, lambda v: inverse @ v
    rhs = right_hand_sides(plan.system(), 2)
    found = solve(plan.system(), rhs, 1e-6)
    assert found.iterations <= 3
    assert true_residual(plan.system(), found.w, rhs).max() <= 2e-6


@pytest.mark.parametrize("rho", [(None, None), (0.5, None)], ids=str)
def test_diagonal_of_both_sides(rho: tuple[Any, Any]) -> None:
    """Against the dense matrix of each side; a plan that cannot be squared is refused."""
    case = seeded(30, 25, 2, 0.05, rho_x=rho[0], rho_y=rho[1])
    result = otn.sinkhorn(problem_of(case), backend="cpu", tol=1e-10)
    for side, plan in (("y", result.linearized), ("x", result.linearized.swap)):
        wanted = torch.diagonal(result.schur(side, normalized=True).to_dense())
        size = plan.y.shape[1]
        found = diagonal_preconditioner(plan)(torch.ones(1, size, 1, dtype=torch.float64))
        assert_close(1 / found[0, :, 0], wanted, "gradient")
    bare = LinearizedPlan(result.problem, result.linearized.plan, result.counter, direct=False)
    with pytest.raises(ValueError, match="linearized must be a plan made by linearize, got a bare one"):
        diagonal_preconditioner(bare)


def test_hard_solves_take_the_diagonal_by_themselves() -> None:
    """At low eps the second product is far shorter than the first; easy ones never pay for the diagonal."""
    case = seeded(300, 300, 8, 0.01)
    result = otn.sinkhorn(problem_of(case), backend="cpu", tol=1e-6, method="newton")
    plan = linearize(result.problem, result.biases, "cpu", result.counter)
    assert plan.deflation is not None
    solve(plan.system(), right_hand_sides(plan.system(), 1), 1e-6)
    assert plan.deflation.hard
    assert plan.system().preconditioner is not None
    rhs = right_hand_sides(plan.system(), 1, seed=9)
    found = solve(plan.system(), rhs, 1e-6)
    assert found.iterations <= 25
    assert true_residual(plan.system(), found.w, rhs).max() <= 1.1e-6
    easy = plan_of(1.0, d=2)
    solve(easy.system(), right_hand_sides(easy.system(), 1), 1e-6)
    assert easy.system().preconditioner is None
