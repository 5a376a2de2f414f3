"""SaddleEscape: the pure decision as a table, and whole runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ot_newton.errors import ConvergenceWarning, Status
from ot_newton.solvers.escape import SaddleEscape
from ot_newton.solvers.monitor import LanczosMonitor
from ot_newton.solvers.newton import NewtonCG
from ot_newton.solvers.state import NewtonState
from ot_newton.solvers.switching import CurvatureReport, EscapeState, decide

SCALES = (1e-8, 1e-4, 1.0, 1e8)
scaled = pytest.mark.parametrize("scale", SCALES)

FIRST = EscapeState(phase="first-order")
NEWTON = EscapeState(phase="newton")
SAFE = CurvatureReport(step=10, lambda_min=0.1, lambda_max=1.0, sign="nonnegative", confidence=0.999)


@pytest.mark.parametrize(
    ("report", "state", "action"),
    [
        (CurvatureReport(step=3), FIRST, "stay"),
        (SAFE, FIRST, "newton"),
        (replace(SAFE, lambda_min=1e-3), FIRST, "stay"),
        (replace(SAFE, lambda_min=1.1e-3), FIRST, "newton"),
        (replace(SAFE, lambda_min=1e-11, lambda_max=1e-8), FIRST, "stay"),
        (replace(SAFE, lambda_min=2e-11, lambda_max=1e-8), FIRST, "newton"),
        (replace(SAFE, confidence=0.9), FIRST, "stay"),
        (replace(SAFE, sign="undetermined"), FIRST, "stay"),
        (replace(SAFE, lambda_min=-0.1, sign="negative"), FIRST, "stay"),
        (replace(SAFE, lambda_min=-0.1, sign="negative", gradient_met=True), FIRST, "escape"),
        (
            replace(SAFE, lambda_min=-0.1, sign="negative", gradient_met=True),
            replace(FIRST, n_switches=20),
            "newton",
        ),
        (replace(SAFE, lambda_min=1e-9, sign="undetermined", gradient_met=True), FIRST, "newton"),
        (CurvatureReport(step=9), replace(FIRST, first_order_steps=2000), "newton"),
        (replace(SAFE, lambda_min=0.4), replace(FIRST, threshold=0.5), "stay"),
        (CurvatureReport(step=5), NEWTON, "stay"),
        (CurvatureReport(step=5, negative_curvature=True), NEWTON, "first-order"),
        (CurvatureReport(step=5, negative_curvature=True), replace(NEWTON, on_negative="step"), "stay"),
        (CurvatureReport(step=5, negative_curvature=True), replace(NEWTON, n_switches=20), "stay"),
        (CurvatureReport(step=5, status=Status.MINIMUM), NEWTON, "stop"),
        (CurvatureReport(step=5, status=Status.SADDLE, lambda_min=-1.0), NEWTON, "escape"),
        (CurvatureReport(step=5, status=Status.SADDLE), replace(NEWTON, n_switches=20), "stop"),
        (CurvatureReport(step=5, status=Status.BUDGET), NEWTON, "stop"),
    ],
)
def test_decisions(report, state, action):
    decision = decide(report, state)
    assert decision.action == action and decision.reason
    assert decide(report, state) == decision


def saddle(x):
    return x[0] ** 2 - x[1] ** 2 + x[1] ** 4 / 4


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def tensor(values):
    return torch.as_tensor(np.asarray(values, dtype=float))


def accounted(r):
    """Every step is one row, every product is in a row, every switch has its row."""
    moves = [row for row in r.history if row.accepted and row.kind in ("first-order", "newton", "escape")]
    assert len(moves) == r.n_iter and [row.step for row in moves] == list(range(1, r.n_iter + 1))
    assert sum(row.hvps for row in r.history) == r.n_hvp == r.history[-1].n_hvp
    rows = [(row.step, row.reason) for row in r.history if row.kind == "switch"]
    assert rows == [(s.step, f"{s.action}: {s.reason}") for s in r.switches]
    assert r.n_first_order + r.n_newton == r.n_iter
    return True


@scaled
@pytest.mark.parametrize("start", [(0.0, 0.0), (1.0, 0.0), (1.0, 0.3)])
def test_saddles_are_left(scale, start):
    r = SaddleEscape(lambda x: scale * saddle(x)).minimize(tensor(start))
    assert r.status is Status.MINIMUM and r.success
    assert abs(float(r.x[1])) == pytest.approx(math.sqrt(2), rel=1e-6) and accounted(r)
    assert r.switches[-1].action == "newton" and "lambda_max" in r.switches[-1].reason
    if start[1] == 0.0:
        assert any(s.action == "escape" for s in r.switches)


def test_switch_happens_where_the_curvature_is_safe():
    r = SaddleEscape(rosenbrock, probe_every=5).minimize(torch.full((4,), -1.0, dtype=torch.float64))
    assert r.success and accounted(r)
    probes = {row.step: row for row in r.history if row.kind == "probe"}
    for s in r.switches:
        if s.action == "newton" and s.step in probes:
            assert probes[s.step].lambda_min > 1e-3 * probes[s.step].lambda_max
    assert all(step % 5 == 0 for step in probes)


def test_newton_hands_back_at_negative_curvature():
    """A well between two saddles: Newton overshoots into the concave part and hands back."""

    def loss(x):
        return (1 - torch.cos(x[0])) + 0.05 * x[0] ** 2 + 2 * (x[1] - torch.sin(2 * x[0])) ** 2

    found = set()
    for start in np.linspace(0.5, 6, 12):
        r = SaddleEscape(loss, probe_every=1, threshold=1e-3).minimize(tensor([start, 3.0]))
        assert r.status is Status.MINIMUM and accounted(r)
        found |= {s.action for s in r.switches}
        stay = SaddleEscape(loss, probe_every=1, on_negative="step").minimize(tensor([start, 3.0]))
        assert stay.status is Status.MINIMUM and "first-order" not in {s.action for s in stay.switches}
    assert "first-order" in found


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        torch.optim.LBFGS,
        torch.optim.RMSprop,
        lambda params: torch.optim.Adam(params, lr=0.02, betas=(0.8, 0.99)),
    ],
)
def test_any_torch_optimizer(optimizer):
    r = SaddleEscape(saddle, optimizer=optimizer, lr=0.05).minimize(tensor([1.0, 0.2]))
    assert r.status is Status.MINIMUM and r.n_first_order > 0 and accounted(r)


def test_first_order_cap_hands_over():
    def degenerate(x):
        return (x[0] - x[1]) ** 2 * (1 + x[0] ** 2) + 1e-7 * x[1] ** 4

    with pytest.warns(UserWarning):
        r = SaddleEscape(degenerate, max_first_order=30, max_iter=60).minimize(tensor([1.0, 3.0]))
    assert r.n_first_order == 30 and "first-order steps" in r.switches[0].reason and accounted(r)


@pytest.mark.filterwarnings("ignore::ot_newton.errors.ConvergenceWarning")
def test_ends():
    r = SaddleEscape(lambda x: -(x**2).sum(), max_first_order=5).minimize(tensor([1.0, 1.0]))
    assert r.status is Status.UNBOUNDED
    r = SaddleEscape(lambda x: (x * math.nan).sum()).minimize(tensor([1.0]))
    assert r.status is Status.NAN and r.n_iter == 0
    r = SaddleEscape(rosenbrock, max_iter=7).minimize(tensor([-1.0, -1.0, 2.0]))
    assert r.status is Status.MAX_ITER and r.n_iter == 7 and accounted(r)
    r = SaddleEscape(saddle, max_hvp=5).minimize(tensor([1.0, 0.1]))
    assert r.status is Status.BUDGET and accounted(r)
    calls = []
    r = SaddleEscape(saddle).minimize(
        tensor([1.0, 0.1]), callback=lambda info: calls.append(info.step) or len(calls) == 3
    )
    assert r.status is Status.CALLBACK and not r.success and calls == [1, 2, 3]


def test_saddle_is_reported_when_switches_are_spent():
    with pytest.warns(ConvergenceWarning, match="SADDLE"):
        r = SaddleEscape(saddle, max_switches=0).minimize(tensor([0.0, 0.0]))
    assert r.status is Status.SADDLE and r.lambda_min.value == pytest.approx(-2)


def test_monitor_of_the_caller_is_used_and_shape_kept():
    monitor = LanczosMonitor(every=4, threshold=1e-3)
    start = torch.full((2, 2), 0.7, dtype=torch.float32)
    r = SaddleEscape(lambda x: ((x**2 - 1) ** 2).sum(), monitor=monitor).minimize(start)
    assert r.success and r.x.shape == (2, 2) and r.x.dtype is torch.float32
    assert monitor.history and float((r.x - 1).abs().max()) < 1e-5


def test_large_problem_switches_on_a_certified_threshold():
    d = torch.linspace(0.05, 1, 400, dtype=torch.float64)

    def loss(x):
        return 0.5 * (d * x * x).sum() + x.sum()

    r = SaddleEscape(loss).minimize(torch.zeros(400, dtype=torch.float64))
    assert r.status is Status.MINIMUM and r.switches[0].step == 0 and r.n_first_order == 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"optimizer": 3}, TypeError, "optimizer must be a torch.optim class"),
        ({"lr": 0.0}, ValueError, "lr"),
        ({"probe_every": 0}, ValueError, "probe_every"),
        ({"threshold": -2.0}, ValueError, "threshold"),
        ({"on_negative": "jump"}, ValueError, "on_negative must be one of"),
        ({"confidence": 0.0}, ValueError, "confidence"),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ],
)
def test_bad_options(options, error, match):
    with pytest.raises(error, match=match):
        SaddleEscape(saddle, **options)


# ---- resume ----------------------------------------------------------------------------------------


def same(first, second):
    """Bitwise: points, counters, rows (without their times), switches, the last estimate."""
    assert torch.equal(first.x, second.x) and torch.equal(first.grad, second.grad)
    assert first.fun == second.fun and first.status is second.status and first.switches == second.switches
    counts = [(r.n_iter, r.n_fun, r.n_grad, r.n_hvp, r.n_first_order, r.n_newton) for r in (first, second)]
    assert counts[0] == counts[1]
    strip = [[str(replace(row, seconds=0.0)) for row in r.history] for r in (first, second)]
    assert strip[0] == strip[1]
    assert first.lambda_min.as_dict() == second.lambda_min.as_dict()
    assert torch.equal(first.lambda_min.vector, second.lambda_min.vector)


def through(path, part):
    part.state.save(path)
    return NewtonState.load(path)


OPTIMIZERS = (
    torch.optim.Adam,
    torch.optim.LBFGS,
    lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("start", [(0.0, 0.0), (1.0, 1e-3)])
def test_N52_escape_resumed_after_a_callback(optimizer, start, tmp_path):
    """Stopped after any step of either phase, at an escape too: the rest is the same, bitwise."""

    def solver():
        return SaddleEscape(saddle, optimizer=optimizer, probe_every=4)

    whole = solver().minimize(tensor(start))
    assert whole.status is Status.MINIMUM and whole.n_newton > 0
    kinds = set()
    for stop in sorted({1, 4, 5, whole.n_iter - 2, whole.n_iter - 1}):
        if not 0 < stop < whole.n_iter:
            continue
        part = solver().minimize(tensor(start), callback=lambda info, stop=stop: info.step == stop)
        assert part.status is Status.CALLBACK and part.n_iter == stop
        kinds.add(part.history[-1].kind)
        rest = solver().minimize(resume=through(tmp_path / "s.pt", part))
        same(whole, rest)
        assert accounted(rest)
    assert len(kinds) >= 2


@scaled
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.filterwarnings("ignore::ot_newton.errors.ConvergenceWarning")
def test_N52_escape_four_and_six_steps_are_ten(scale, dtype, tmp_path):
    def solver(steps):
        return SaddleEscape(lambda x: scale * rosenbrock(x), probe_every=3, max_iter=steps, seed=2)

    start = torch.full((4,), -1.0, dtype=dtype)
    whole, part = solver(10).minimize(start), solver(4).minimize(start)
    assert part.status is Status.MAX_ITER and part.n_iter == 4
    same(whole, solver(10).minimize(resume=through(tmp_path / "s.pt", part)))


@pytest.mark.filterwarnings("ignore::ot_newton.errors.ConvergenceWarning")
def test_N52_escape_keeps_the_warm_start_and_the_stall_count(tmp_path):
    class Warm:
        """A loss that depends, slightly, on where it was evaluated last."""

        def __init__(self):
            self.last = torch.zeros(4, dtype=torch.float64)

        def warm_state(self):
            return {"last": self.last.clone()}

        def load_warm_state(self, state):
            self.last = state["last"].clone()

        def __call__(self, x):
            value = rosenbrock(x) + 1e-6 * (x * self.last).sum()
            self.last = x.detach().clone()
            return value

    def solver(steps):
        monitor = LanczosMonitor(every=2, trigger="stall", stall=0.9, threshold=1e-3)
        return SaddleEscape(Warm(), max_iter=steps, monitor=monitor)

    start = torch.full((4,), -1.0, dtype=torch.float64)
    whole, part = solver(10).minimize(start), solver(4).minimize(start)
    state = through(tmp_path / "s.pt", part)
    same(whole, solver(10).minimize(resume=state))
    cold = solver(10).minimize(resume=replace(state, warm=None))
    assert not torch.equal(cold.x, whole.x)


def test_only_its_own_state_is_taken_up():
    part = NewtonCG(rosenbrock).minimize(tensor([-1.0, 2.0]), callback=lambda x: True)
    with pytest.raises(ValueError, match="resume must be the state of a SaddleEscape run"):
        SaddleEscape(rosenbrock).minimize(resume=part.state)
    with pytest.raises(TypeError, match="resume must be a NewtonState"):
        SaddleEscape(rosenbrock).minimize(resume={"x": 1})
    with pytest.raises(ValueError, match="x0 must be given"):
        SaddleEscape(rosenbrock).minimize()


@pytest.mark.parametrize("floor", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["noise_floor", "hvp_noise_floor"])
@pytest.mark.parametrize("solver", [NewtonCG, SaddleEscape])
def test_a_loss_that_cannot_bound_its_noise_gets_no_verdict(solver, name, floor):
    """A failed inner solve may report an infinite floor: a status and a warning, not an error."""

    class Loss:
        def __call__(self, x):
            return ((x**2 - 1) ** 2).sum()

    loss = Loss()
    setattr(loss, name, floor)
    with pytest.warns(ConvergenceWarning, match="reports no finite noise floor"):
        result = solver(loss).minimize(torch.full((3,), 0.1, dtype=torch.float64))
    assert result.status is Status.UNDETERMINED
    assert not result.success
