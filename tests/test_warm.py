"""Warm starts: tangents of products, deflated Sinkhorn iterations, state that is the whole state."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import ot_newton as otn
from ot_newton import dual_newton, semi_dual
from ot_newton.directions import Direction
from ot_newton.errors import Status
from ot_newton.potentials import Potentials
from ot_newton.warm import MAX_TANGENTS, Tangents, WarmStart
from tests.generators import seeded

EPS = 0.1


def clouds(n: int, m: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    case = seeded(n, m, d, EPS, seed=seed)
    return torch.tensor(case.x), torch.tensor(case.y) + 0.5


def direction(like: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def seen(loss: otn.SinkhornLoss, tensors: dict[str, Tensor], moves: dict[str, Tensor]) -> WarmStart:
    """The start after one product along ``moves``."""
    leaves = {name: t.clone().requires_grad_(name in moves) for name, t in tensors.items()}
    wanted = [leaves[name] for name in moves]
    gradient = torch.autograd.grad(loss(leaves["x"], leaves["y"]), wanted, create_graph=True)
    torch.autograd.grad(gradient, wanted, list(moves.values()))
    return loss._start("xy")


def plan_error(found: Potentials, exact: otn.SinkhornResult) -> float:
    """Largest difference of f + g, which no gauge changes."""
    gap = (found.f[:, None] + found.g[None]) - (exact.f[:, None] + exact.g[None])
    return float(gap.abs().max())


@pytest.mark.parametrize("backend", ["dense", "cpu"])
@pytest.mark.parametrize("rho", [None, 0.5])
@pytest.mark.parametrize("moved", ["x", "y", "xy"])
def test_potentials_follow_to_first_order(moved: str, rho: float | None, backend: str) -> None:
    """A tenth of the step leaves a hundredth of the error, and a tenth of it where nothing is predicted."""
    x, y = clouds(14, 11, 3)
    moves = {
        name: direction(part, k) for k, (name, part) in enumerate({"x": x, "y": y}.items()) if name in moved
    }
    loss = otn.SinkhornLoss(EPS, tol=1e-13, rtol=1e-12, rho_x=rho, backend=backend)
    start = seen(loss, {"x": x, "y": y}, moves)
    errors, plain = [], []
    for h in (1e-2, 1e-3):
        near = otn.OTProblem(x + h * moves.get("x", 0 * x), y + h * moves.get("y", 0 * y), eps=EPS, rho_x=rho)
        exact = otn.sinkhorn(near, tol=1e-13, backend=backend)
        predicted = start.predict(near)
        assert predicted is not None
        errors.append(plan_error(predicted, exact))
        plain.append(plan_error(start.potentials, exact))
    assert 80 <= errors[0] / errors[1] <= 125
    assert 8 <= plain[0] / plain[1] <= 12.5
    assert errors[1] <= 0.05 * plain[1]


def test_a_part_of_the_move_is_predicted_and_nothing_else() -> None:
    tangents = Tangents()
    x, y = clouds(6, 5, 2)
    v, w = direction(x), direction(x, 2)
    df, dg = direction(x[:, 0], 3)[None, None], direction(y[:, 0], 4)[None, None]
    tangents.record(Direction(x=v[None, None]), df, dg)
    move = torch.cat([(2 * v).reshape(-1), y.new_zeros(y.numel())])
    response = torch.cat([df[0, 0], dg[0, 0]])
    found = tangents.predict(move)
    assert found is not None
    torch.testing.assert_close(found, 2 * response, rtol=1e-12, atol=0.0)
    off = w - v * (v * w).sum() / (v * v).sum()
    mixed = tangents.predict(move + torch.cat([off.reshape(-1), y.new_zeros(y.numel())]))
    assert mixed is not None
    torch.testing.assert_close(mixed, 2 * response, rtol=1e-9, atol=0.0)
    assert Tangents().predict(move) is None
    assert tangents.predict(move[:-1]) is None
    start = WarmStart(Potentials(df[0, 0], dg[0, 0]), x, y, tangents=tangents)
    assert start.predict(otn.OTProblem(x, y, eps=EPS)) is None  # nothing has moved


@pytest.mark.parametrize("rho", [None, 0.5], ids=str)
def test_without_products_potentials_follow_the_last_displacement(rho: float | None) -> None:
    """On a straight path the extrapolated start is wrong by the square of the step."""
    x, y = clouds(14, 11, 3)
    v = direction(x)
    errors, plain = [], []
    for h in (1e-2, 1e-3):
        loss = otn.SinkhornLoss(EPS, tol=1e-13, rho_x=rho)
        loss(x, y)
        loss(x + h * v, y)
        start = loss._start("xy")
        near = otn.OTProblem(x + 2 * h * v, y, eps=EPS, rho_x=rho)
        exact = otn.sinkhorn(near, tol=1e-13)
        predicted = start.predict(near)
        assert predicted is not None
        errors.append(plan_error(predicted, exact))
        plain.append(plan_error(start.potentials, exact))
    assert 70 <= errors[0] / errors[1] <= 140
    assert errors[1] <= 0.05 * plain[1]


def test_extrapolation_stops_at_twice_the_last_displacement() -> None:
    x, y = clouds(6, 5, 2)
    v = direction(x)
    loss = otn.SinkhornLoss(EPS)
    loss(x, y)
    loss(x + 1e-3 * v, y)
    start = loss._start("xy")
    twice, far, back = (
        start.predict(otn.OTProblem(x + 1e-3 * (1 + t) * v, y, eps=EPS)) for t in (2.0, 50.0, -50.0)
    )
    assert twice is not None
    assert far is not None
    assert back is not None
    torch.testing.assert_close(far.f, twice.f, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        back.f - start.potentials.f, start.potentials.f - twice.f, rtol=1e-6, atol=1e-12
    )
    sideways = direction(x, 7)
    sideways = sideways - v * (v * sideways).sum() / (v * v).sum()
    across = start.predict(otn.OTProblem(x + 1e-3 * v + sideways, y, eps=EPS))
    assert across is not None
    torch.testing.assert_close(across.f, start.potentials.f, rtol=1e-9, atol=1e-9)


def test_a_first_order_run_takes_fewer_passes_and_ends_at_the_same_loss() -> None:
    """Adam on positions: extrapolated starts, and Newton once warm solves stay slow, against cold ones."""
    case = seeded(150, 150, 2, 0.05)
    ends, passes = [], []
    for warm in (True, False):
        loss = otn.SinkhornLoss(0.05, tol=1e-8, backend="cpu", warm_start=warm)
        x = torch.tensor(case.x).requires_grad_()
        optimizer = torch.optim.Adam([x], lr=0.01)
        for _ in range(25):
            optimizer.zero_grad()
            value = loss(x, torch.tensor(case.y))
            value.backward()
            optimizer.step()
        ends.append(float(value.detach()))
        passes.append(loss.plan_passes)
    assert abs(ends[0] - ends[1]) <= 1e-6
    assert passes[0] <= 0.4 * passes[1]


def test_the_oldest_tangents_make_room() -> None:
    tangents = Tangents()
    for k in range(MAX_TANGENTS + 3):
        v = torch.full((1, 1, 2, 1), float(k + 1))
        tangents.record(Direction(x=v), torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
    held = torch.cat([moves for moves, _ in tangents.blocks])
    assert len(held) == MAX_TANGENTS
    assert float(held[0, 0]) == 4.0


@pytest.mark.parametrize("rho", [None, 0.5], ids=str)
def test_deflated_iterations_never_lower_the_dual_and_save_passes(
    rho: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without CG from a warm start, in place of Newton steps; the dual is taken from the potentials."""
    x, y = (torch.tensor(part) for part in (seeded(200, 190, 2, 0.02).x, seeded(200, 190, 2, 0.02).y))
    options: dict[str, Any] = {"method": "newton", "backend": "cpu", "tol": 1e-9, "rho_y": rho}
    loss = otn.SinkhornLoss(0.02, **options)
    start = seen(loss, {"x": x, "y": y}, {"x": direction(x)})
    assert start.newton
    assert start.space is not None
    moved = x + 2e-3 * direction(x, 5)
    kinds: list[str] = []
    values: list[float] = []
    kept, solved, judge = (
        semi_dual.SemiDual.kept,
        semi_dual.SemiDual.solved,
        dual_newton._Newton.terminate,
    )

    def count(kind: str, inner: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            kinds.append(kind)
            return inner(self, *args)

        return call

    def watch(self: Any, state: Any) -> Any:
        problem = otn.OTProblem(moved, y, eps=0.02, rho_y=rho)
        result = otn.SinkhornResult(
            problem=problem,
            biases=state.biases,
            statuses=(Status.MAX_ITER,),
            iterations=torch.tensor([0]),
            errors=torch.tensor([state.error]),
            noise_floor=0.0,
            tol=0.0,
            counter=self.counter,
            history=(),
            backend="dense",
        )
        values.append(float(result.value))
        return judge(self, state)

    monkeypatch.setattr(semi_dual.SemiDual, "kept", count("kept", kept))
    monkeypatch.setattr(semi_dual.SemiDual, "solved", count("solved", solved))
    monkeypatch.setattr(dual_newton._Newton, "terminate", watch)
    before = loss.plan_passes
    loss(moved, y)
    spent = loss.plan_passes - before
    result = loss.last_result
    assert result is not None
    assert result.converged
    assert kinds.count("kept") >= 2
    assert kinds.count("kept") > kinds.count("solved")
    rises = torch.tensor(values, dtype=torch.float64).diff()
    assert len(rises) >= 2
    assert float(rises.min()) >= -1e-14
    cold = otn.sinkhorn(
        otn.OTProblem(moved, y, eps=0.02, rho_y=rho), method="newton", tol=1e-9, backend="cpu"
    )
    assert spent <= 0.5 * (cold.plan_passes + 2)
    assert abs(float(result.value) - float(cold.value)) <= 1e-9


def test_a_start_from_far_away_falls_back() -> None:
    """A prediction that is worse than none is dropped; the answer is that of a fresh solve."""
    x, y = clouds(150, 140, 2)
    loss = otn.SinkhornLoss(0.02, method="newton", backend="cpu", tol=1e-9)
    seen(loss, {"x": x, "y": y}, {"x": direction(x)})
    far = x + 0.5 * direction(x)
    fresh = otn.sinkhorn(otn.OTProblem(far, y, eps=0.02), tol=1e-9, backend="cpu")
    value = loss(far, y)
    assert loss.last_result is not None
    assert loss.last_result.converged
    assert abs(float(value) - float(fresh.value)) <= 1e-9


def test_a_saved_state_is_the_whole_state(tmp_path: Any) -> None:
    """Through a file that executes nothing, and bit for bit, slow modes and tangents included."""
    x, y = clouds(150, 140, 2)
    options: dict[str, Any] = {"method": "newton", "backend": "cpu", "tol": 1e-9}
    loss, other = (otn.SinkhornLoss(0.02, **options) for _ in range(2))
    v = direction(x)
    seen(loss, {"x": x, "y": y}, {"x": v})
    torch.save(loss.warm_state(), tmp_path / "warm.pt")
    other.load_warm_state(torch.load(tmp_path / "warm.pt", weights_only=True))
    assert {"modes", "ritz", "moves0", "responses0"} <= set(other.warm_state()["xy"])
    near = x + 1e-3 * v
    assert torch.equal(loss(near, y), other(near, y))
    other.load_warm_state(loss.warm_state())
    assert {"secant_move", "secant_response"} <= set(other.warm_state()["xy"])
    assert torch.equal(loss(near + 1e-3 * v, y), other(near + 1e-3 * v, y))


@pytest.mark.parametrize("backend", ["dense", "cpu"])
def test_a_run_resumed_after_probes_repeats_itself(backend: str) -> None:
    """2 + 3 steps of Newton-CG equal 5 bitwise where a monitor's probes leave tangents of their own."""
    x, y = clouds(20, 15, 2)

    def bound(steps: int) -> otn.NewtonCG:
        loss = otn.SinkhornLoss(0.05, backend=backend, tol=1e-10)

        class Bound:
            warm_state, load_warm_state, freeze = loss.warm_state, loss.load_warm_state, loss.freeze

            def __call__(self, p: Tensor) -> Tensor:
                return loss(p, y)

        monitor = otn.LanczosMonitor(every=1)
        return otn.NewtonCG(Bound(), max_iter=steps, gtol=1e-12, monitor=monitor)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = bound(5).minimize(x)
        part = bound(2).minimize(x)
        assert part.state.settled is not None
        rest = bound(5).minimize(resume=part.state)
    assert torch.equal(rest.x, whole.x)
    assert any(row.lambda_min is not None for row in part.history)
    assert rest.n_iter == whole.n_iter == 5
    assert rest.fun == whole.fun
