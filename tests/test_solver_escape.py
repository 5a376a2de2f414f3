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
