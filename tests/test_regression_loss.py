"""The loss of the regression study: against the float64 truth, near and far, and what it counts."""

from __future__ import annotations

import pytest
import torch

from ot_newton.experiments import regression_loss
from ot_newton.experiments.data import mixture, start
from ot_newton.experiments.regression_loss import RegressionLoss
from ot_newton.solve import sinkhorn
from tests import truth

EPS = 0.1


def exact(data, w):
    return truth.solve((data.x @ w).numpy(), data.y.numpy(), eps=EPS)


@pytest.mark.parametrize("seed", range(3))
def test_a_cold_start_and_one_from_far_away_end_at_the_truth(seed):
    data = mixture(seed, 60)
    w = start(data, 0)
    solved = exact(data, w)
    loss = RegressionLoss(data.x, data.y, eps=EPS)
    assert loss.value(w) == pytest.approx(solved.value, rel=1e-10)
    loss.value(w + 40.0)  # potentials of a W far away are no start
    value, gradient = loss.value_and_grad(w)
    assert value == pytest.approx(solved.value, rel=1e-6)
    wanted = data.x.T @ torch.as_tensor(solved.gradient("x"))
    assert float((gradient - wanted).norm()) <= 1e-2 * float(wanted.norm())
    assert loss.value(w) == pytest.approx(solved.value, rel=1e-10)
    assert loss.missed == 0


def test_a_plan_next_to_the_last_one_needs_no_new_factor():
    data = mixture(0, 60)
    loss = RegressionLoss(data.x, data.y, eps=0.3)
    w = start(data, 0)
    loss.value(w)
    made, passes = loss.warm_state()["last"]["factor"], loss.plan_passes
    assert made is not None
    loss.value_and_grad(w + 1e-5)
    assert loss.warm_state()["last"]["factor"] is made
    assert loss.plan_passes - passes <= 15


def test_potentials_follow_w_by_the_responses_of_the_hessian(monkeypatch):
    """The start of a solve off the last Hessian is wrong by the square of the move."""
    data = mixture(0, 60)
    loss = RegressionLoss(data.x, data.y, eps=0.3)
    w = start(data, 0)
    loss.hessian(w)
    move = torch.randn(w.shape, generator=torch.Generator().manual_seed(0), dtype=w.dtype)
    errors = []

    def first(problem, **options):
        result = real(problem, **options)
        errors.append(result.history[0].marginal_error)
        return result

    real = sinkhorn
    monkeypatch.setattr(regression_loss, "sinkhorn", first)
    state = loss.warm_state()
    for h in (1e-2, 1e-3):
        loss.load_warm_state(state)
        count = len(errors)
        loss.value_and_grad(w + h * move)
        errors[count + 1 :] = []
    assert 50 <= errors[0] / errors[1] <= 200


def test_every_pass_of_a_start_from_far_away_is_counted(monkeypatch):
    data = mixture(1, 60)
    loss = RegressionLoss(data.x, data.y, eps=EPS)
    results = []

    def noted(problem, **options):
        results.append(real(problem, **options))
        return results[-1]

    real = sinkhorn
    monkeypatch.setattr(regression_loss, "sinkhorn", noted)
    loss.value_and_grad(start(data, 0))
    loss.value_and_grad(start(data, 0) + 30.0)
    loss.hessian(start(data, 0) + 30.0)
    assert len(results) >= 3
    assert loss.plan_passes == sum(result.plan_passes for result in results)
    assert loss.n_sinkhorn == sum(result.n_iter for result in results)


def test_a_frozen_loss_remembers_nothing():
    data = mixture(2, 40)
    loss = RegressionLoss(data.x, data.y, eps=0.5)
    w = start(data, 0)
    loss.value_and_grad(w)
    before = loss.warm_state()
    with loss.freeze():
        once = loss.value_and_grad(w + 1.0)[0]
        loss.value_and_grad(w + 2.0)
        assert loss.value_and_grad(w + 1.0)[0] == once
        loss.hessian(w + 1.0)
    after = loss.warm_state()
    assert set(before["last"]) == set(after["last"])
    assert all(torch.equal(part, after["last"][name]) for name, part in before["last"].items())
    assert after["bent"] is None
    assert after["wanted"] == before["wanted"]


def test_plans_too_large_to_store_stream(monkeypatch):
    """The same value on the streaming backend, whose slow modes are kept in place of a factor."""
    data = mixture(0, 150)
    w = start(data, 0)
    stored = RegressionLoss(data.x, data.y, eps=0.1).value(w)
    monkeypatch.setattr("ot_newton.backends.select.DENSE_ENTRIES", 100)
    loss = RegressionLoss(data.x, data.y, eps=0.1)
    assert loss.value(w) == pytest.approx(stored, rel=1e-10)
    assert "factor" not in loss.warm_state()["last"]
    assert "modes" in loss.warm_state()["last"]
    assert "modes" not in loss.warm_state(inverses=False)["last"]
