"""LanczosMonitor and SaddleDetector: cadence, caps, records, plain training loops."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch

from ot_newton.errors import Status
from ot_newton.solvers.callbacks import SaddleDetector
from ot_newton.solvers.monitor import LanczosMonitor, MonitorRecord
from ot_newton.solvers.newton import NewtonCG

SCALES = (1e-8, 1e-4, 1.0, 1e8)
scaled = pytest.mark.parametrize("scale", SCALES)


def saddle(x):
    return x[0] ** 2 - x[1] ** 2 + x[1] ** 4 / 4


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def tensor(values):
    return torch.as_tensor(np.asarray(values, dtype=float))


def test_cadence_and_records():
    monitor = LanczosMonitor(every=5)
    h = torch.diag(tensor([1, -2, 3]))
    records = [monitor(step, h) for step in range(12)]
    assert [r is not None for r in records] == [step % 5 == 0 for step in range(12)]
    assert [r.step for r in monitor.history] == [0, 5, 10] and monitor.n_hvp == 9
    assert isinstance(records[0], MonitorRecord) and records[0].lambda_min == pytest.approx(-2)
    assert records[0].sign == "negative" and records[0].lambda_max == pytest.approx(3)
    assert monitor.history[-1].total_hvp == monitor.n_hvp == sum(r.n_hvp for r in monitor.history)
    assert set(records[0].as_dict()) >= {"step", "lambda_min", "confidence", "n_hvp", "seconds"}


def test_cap_in_products():
    monitor = LanczosMonitor(every=1, max_hvp=10)
    h = torch.diag(tensor([1, 2, 3]))
    made = [monitor(step, h) is not None for step in range(6)]
    assert made == [True, True, True, False, False, False] and monitor.n_hvp == 9
    big = LanczosMonitor(every=1, max_hvp=50, max_steps=20)
    d = torch.linspace(0.5, 1, 1000, dtype=torch.float64)
    assert big(0, torch.diag(d)) is not None
    assert big.n_hvp <= 41 and big(1, torch.diag(d)) is None


def test_stall_trigger():
    monitor = LanczosMonitor(every=2, trigger="stall", stall=0.1)
    h = torch.eye(2, dtype=torch.float64)
    norms = [8.0, 7.0, 4.0, 3.0, 3.9, 3.0, 3.85, 2.0, 1.0]
    made = [monitor(s, h, grad_norm=g) is not None for s, g in enumerate(norms)]
    assert made == [False, False, False, False, True, False, True, False, False]
    with pytest.raises(ValueError, match="grad_norm must be given"):
        monitor(9, h)


def test_plain_torch_training_loop():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    unused = torch.nn.Parameter(torch.zeros(2))
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    named = LanczosMonitor(every=2, params=[*model.parameters(), unused])
    found = LanczosMonitor(every=2)
    for step in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        record, other = named(step, loss), found(step, loss)
        loss.backward()
        optimizer.step()
        if record is not None:
            assert other.lambda_max == pytest.approx(record.lambda_max, rel=1e-4)
    assert len(named.history) == 2 and named.history[0].n_hvp == 4 * 3 + 4 + 4 + 1 + 2
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def of_flat(w):
        hidden = torch.tanh(x @ w[:12].reshape(4, 3).T + w[12:16])
        return torch.nn.functional.mse_loss(hidden @ w[16:20][:, None] + w[20:], y)

    record = named.probe(4, torch.nn.functional.mse_loss(model(x), y))
    exact = torch.linalg.eigvalsh(torch.func.hessian(of_flat)(flat))
    assert record.lambda_min == pytest.approx(float(exact[0]), abs=1e-5)
    assert record.lambda_max == pytest.approx(float(exact[-1]), rel=1e-4)
    closure = LanczosMonitor()(0, lambda: torch.nn.functional.mse_loss(model(x), y))
    assert closure.lambda_max == pytest.approx(record.lambda_max, rel=1e-5)
    assert all(p.grad is not None for p in model.parameters())


@scaled
def test_function_with_a_point(scale):
    record = LanczosMonitor()(0, lambda x: scale * saddle(x), tensor([0, 0]))
    assert record.lambda_min == pytest.approx(-2 * scale) and record.sign == "negative"


def test_every_probe_has_fresh_starts_and_state_is_kept():
    h = torch.diag(torch.linspace(-1, 1, 400, dtype=torch.float64))
    monitor = LanczosMonitor(every=1, max_steps=6)
    first, second = monitor(0, h), monitor(1, h)
    assert first.lambda_min != second.lambda_min
    copy = LanczosMonitor(every=1, max_steps=6)
    copy.load_state_dict(monitor.state_dict())
    assert copy.history == monitor.history and copy(2, h).lambda_min == monitor(2, h).lambda_min


def test_monitor_inside_newton():
    monitor = LanczosMonitor(every=3)
    r = NewtonCG(rosenbrock, monitor=monitor).minimize(torch.full((6,), -1.0, dtype=torch.float64))
    probed = [row for row in r.history if row.kind == "newton" and row.lambda_min is not None]
    assert len(probed) == len(monitor.history) > 0
    assert [row.step for row in probed] == [m.step for m in monitor.history]
    assert all(row.step % 3 == 0 for row in probed) and sum(row.hvps for row in r.history) == r.n_hvp


@pytest.mark.filterwarnings("ignore::ot_newton.errors.ConvergenceWarning")
@scaled
def test_detector_stops_logs_and_triggers(scale, caplog):
    def loss(x):
        return scale * saddle(x)

    start = tensor([2, 0.1])
    stop = SaddleDetector(every=1)
    r = NewtonCG(loss).minimize(start, callback=stop)
    assert r.status is Status.CALLBACK and stop.found and stop.found[0][1].value < 0
    log = SaddleDetector(action="log", every=1)
    with caplog.at_level(logging.WARNING, logger="ot_newton.solvers"):
        r = NewtonCG(loss).minimize(start, callback=log)
    assert r.status is Status.MINIMUM and log.found and "lambda_min" in caplog.text
    seen = []
    trigger = SaddleDetector(action=lambda info, e: seen.append((info.step, e.value)), every=1)
    r = NewtonCG(loss).minimize(start, callback=trigger)
    assert r.status is Status.MINIMUM and seen and all(value < 0 for _, value in seen)
    high = SaddleDetector(threshold=0.9, every=1)
    assert (
        NewtonCG(lambda x: scale * (x[0] ** 2 + 0.5 * x[1] ** 2 + x[0] ** 4))
        .minimize(start, callback=high)
        .status
        is Status.CALLBACK
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"every": 0}, "every"),
        ({"trigger": "often"}, "trigger must be one of"),
        ({"stall": 0.0}, "stall"),
        ({"max_hvp": -1}, "max_hvp"),
        ({"confidence": 2.0}, "confidence"),
        ({"tol": -1.0}, "tol"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        LanczosMonitor(**options)


def test_bad_losses():
    monitor = LanczosMonitor()
    with pytest.raises(TypeError, match="loss must be an operator"):
        monitor(0, torch.zeros(()))
    with pytest.raises(TypeError, match="loss must be an operator"):
        monitor(0, lambda: math.pi)
    with pytest.raises(ValueError, match="action must be one of"):
        SaddleDetector(action="shout")
