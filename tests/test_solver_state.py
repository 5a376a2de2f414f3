"""Callbacks, records, save and resume: the cases N49 to N52."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from ot_newton.errors import Status
from ot_newton.solvers.callbacks import CallbackDispatch
from ot_newton.solvers.history import StepRecord
from ot_newton.solvers.monitor import LanczosMonitor
from ot_newton.solvers.newton import NewtonCG
from ot_newton.solvers.state import NewtonState

SCALES = (1e-8, 1e-4, 1.0, 1e8)
scaled = pytest.mark.parametrize("scale", SCALES)
typed = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
METHODS = ("trust-region", "line-search")
both = pytest.mark.parametrize("method", METHODS)
pytestmark = pytest.mark.filterwarnings("ignore::ot_newton.errors.ConvergenceWarning")


def rosenbrock(x):
    x = x.reshape(-1)
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def start(n=8):
    return torch.full((n,), -1.0, dtype=torch.float64)


def stop_by_return(x):
    return x.shape == (8,)


def stop_by_info(info):
    return info.record.step >= 1 and info.fun < 1e12


def stop_by_exception(x):
    raise StopIteration


def stop_by_keyword(*, intermediate_result):
    return intermediate_result.fun < 1e12 and intermediate_result.x.shape == (8,)


class StopByObject:
    def __call__(self, intermediate_result):
        return np.bool_(intermediate_result.step >= 1)


def stop_by_tensor(x):
    return (x < 1e9).all()


@both
@scaled
@pytest.mark.parametrize(
    "callback",
    [stop_by_return, stop_by_info, stop_by_exception, stop_by_keyword, StopByObject(), stop_by_tensor],
)
def test_N49_every_spelling_stops(method, scale, callback):
    dtype = torch.float32 if scale == 1e-4 else torch.float64
    loss = NewtonCG(lambda x: scale * rosenbrock(x), method=method)
    r = loss.minimize(start().to(dtype), callback=callback)
    assert r.status is Status.CALLBACK and r.success is False and r.n_iter == 1


@both
@scaled
@typed
def test_N50_a_stop_by_callback_is_no_success(method, scale, dtype):
    """Even at a point that would pass the test in the next step."""

    def loss(x):
        return scale * (x**2).sum()

    x0 = start().to(dtype)
    r = NewtonCG(loss, method=method).minimize(x0, callback=lambda x: True)
    assert float(r.grad.norm()) < (1e-10 if dtype is torch.float64 else 1e-5) * scale
    assert r.status is Status.CALLBACK and not r.success and "callback" in r.message
    quiet = NewtonCG(loss, method=method).minimize(x0, callback=lambda x: None)
    assert quiet.status is Status.MINIMUM


@both
@scaled
@typed
def test_N51_records_are_rich_and_counts_are_true(method, scale, dtype):
    calls = {"f": 0, "hvp": 0}
    seen = []

    def plain(x):
        return scale * rosenbrock(x)

    def loss(x):
        calls["f"] += 1
        return plain(x)

    def hvp(x, v):
        calls["hvp"] += 1
        leaf = x.clone().requires_grad_(True)
        with torch.enable_grad():
            grad = torch.autograd.grad(plain(leaf), leaf, create_graph=True)[0]
        return torch.autograd.grad(grad, leaf, v)[0]

    def watch(info):
        seen.append((info.step, info.cg_iterations, info.cg_reason, info.radius, info.ratio))

    r = NewtonCG(loss, method=method, hvp=hvp, gtol=1e-4, monitor=LanczosMonitor(every=4)).minimize(
        start(3).to(dtype), callback=watch
    )
    assert r.success and calls == {"f": r.n_fun, "hvp": r.n_hvp}
    assert sum(row.hvps for row in r.history) == calls["hvp"] == r.history[-1].n_hvp
    assert [row[0] for row in seen] == list(range(1, r.n_iter + 1))
    steps = [row for row in r.history if row.kind == "newton" and row.accepted]
    assert len(steps) == r.n_iter
    for row in steps:
        assert row.cg_iterations >= 1 and row.cg_reason and row.step_norm > 0 and row.radius > 0
        assert np.isfinite([row.fun, row.grad_norm, row.ratio]).all()
        assert np.isfinite(row.curvature) == (row.cg_reason == "NEGATIVE_CURVATURE")
        assert (row.lambda_min is not None) == (row.step % 4 == 0)
    for earlier, later in zip(r.history, r.history[1:], strict=False):
        assert later.n_hvp >= earlier.n_hvp and later.seconds >= earlier.seconds
    assert StepRecord.from_dict(steps[0].as_dict()) == steps[0]


def test_N51_callback_can_use_the_hessian():
    values = []

    def probe(info):
        values.append(float((info.hessian @ torch.eye(8, dtype=torch.float64)).diagonal().min()))
        return len(values) == 2

    r = NewtonCG(rosenbrock).minimize(start(), callback=probe)
    assert r.n_iter == 2 and len(values) == 2
    exact = torch.func.hessian(rosenbrock)(r.x).diagonal().min()
    assert values[-1] == pytest.approx(float(exact))


def same(first, second):
    assert torch.equal(first.x, second.x) and torch.equal(first.grad, second.grad)
    assert first.fun == second.fun and first.status is second.status
    counts = [(r.n_iter, r.n_fun, r.n_grad, r.n_hvp) for r in (first, second)]
    assert counts[0] == counts[1]
    strip = [[replace(row, seconds=0.0) for row in r.history] for r in (first, second)]
    assert [str(row) for row in strip[0]] == [str(row) for row in strip[1]]


@both
@scaled
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@typed
def test_N52_four_and_six_steps_are_ten(method, scale, shape, dtype, tmp_path):
    x0 = start().to(dtype).reshape(shape)
    options = {"method": method, "seed": 5}

    def loss(x):
        return scale * rosenbrock(x)

    def solver(steps):
        return NewtonCG(loss, max_iter=steps, monitor=LanczosMonitor(every=3), **options)

    whole = solver(10).minimize(x0)
    part = solver(4).minimize(x0)
    assert part.n_iter == 4 and part.status is Status.MAX_ITER
    part.state.save(tmp_path / "state.pt")
    state = NewtonState.load(tmp_path / "state.pt")
    assert state.x.shape == shape and state.x.dtype is dtype
    rest = solver(10).minimize(resume=state)
    same(whole, rest)
    assert rest.x.shape == shape and rest.x.dtype is dtype and rest.n_iter == 10
    end = NewtonCG(loss, max_iter=20, **options).minimize(x0)
    resumed = NewtonCG(loss, max_iter=20, **options).minimize(resume=part.state)
    assert torch.equal(end.x, resumed.x) and end.n_iter == resumed.n_iter


def test_N52_resume_after_a_callback_and_through_an_escape(tmp_path):
    def saddle(x):
        return x[0] ** 2 - x[1] ** 2 + x[1] ** 4 / 4

    x0 = torch.tensor([1.0, 0.0], dtype=torch.float64)
    whole = NewtonCG(saddle).minimize(x0)
    for stop in range(1, whole.n_iter):
        part = NewtonCG(saddle).minimize(x0, callback=lambda info, stop=stop: info.step == stop)
        assert part.status is Status.CALLBACK and part.n_iter == stop
        part.state.save(tmp_path / "s.pt")
        same(whole, NewtonCG(saddle).minimize(resume=NewtonState.load(tmp_path / "s.pt")))


class Warm:
    """A loss whose value depends, slightly, on where it was last evaluated; like an inner solver."""

    def __init__(self):
        self.last, self.held, self.plan_passes = torch.zeros(8, dtype=torch.float64), False, 0

    def warm_state(self):
        return {"last": self.last.clone()}

    def load_warm_state(self, state):
        self.last = state["last"].clone()

    @contextlib.contextmanager
    def freeze(self):
        self.held = True
        yield
        self.held = False

    def __call__(self, x):
        value = rosenbrock(x) + 1e-6 * (x * self.last).sum()
        self.plan_passes += 1
        if not self.held:
            self.last = x.detach().clone()
        return value


@both
def test_N52_warm_start_state_belongs_to_the_saved_state(method, tmp_path):
    whole = NewtonCG(Warm(), method=method, max_iter=10).minimize(start())
    part = NewtonCG(Warm(), method=method, max_iter=4).minimize(start())
    part.state.save(tmp_path / "s.pt")
    rest = NewtonCG(Warm(), method=method, max_iter=10).minimize(resume=NewtonState.load(tmp_path / "s.pt"))
    same(whole, rest)
    cold = replace(part.state, warm=None)
    other = NewtonCG(Warm(), method=method, max_iter=10).minimize(resume=cold)
    assert not torch.equal(other.x, whole.x)


def test_state_file_is_checked(tmp_path):
    torch.save({"something": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="saved by NewtonState"):
        NewtonState.load(tmp_path / "other.pt")
    with pytest.raises(ValueError, match="unknown fields"):
        StepRecord.from_dict({"step": 1, "kind": "start", "fun": 0.0, "grad_norm": 0.0, "color": "red"})


def test_callbacks_may_be_several_and_must_be_callable():
    seen = []
    r = NewtonCG(rosenbrock).minimize(
        start(), callback=[lambda x: seen.append("x"), lambda info: seen.append(info.step) or info.step == 2]
    )
    assert r.n_iter == 2 and seen == ["x", 1, "x", 2]
    with pytest.raises(TypeError, match="callback must be callable"):
        NewtonCG(rosenbrock).minimize(start(), callback=[3])
    assert not CallbackDispatch(None)


@both
def test_a_rejected_trial_does_not_spoil_the_warm_start(method):
    """Every evaluation starts warm from an accepted point, whatever was tried and rejected before it."""

    class Recording(Warm):
        starts = []

        def __call__(self, x):
            self.starts.append(tuple(self.last.tolist()))
            return super().__call__(x)

    loss = Recording()
    loss.last, loss.starts = start(), []
    accepted = {tuple(start().tolist())}
    r = NewtonCG(loss, method=method).minimize(start(), callback=lambda x: accepted.add(tuple(x.tolist())))
    assert r.n_fun > r.n_iter + 1 and len(loss.starts) == r.n_fun
    assert set(loss.starts) <= accepted
