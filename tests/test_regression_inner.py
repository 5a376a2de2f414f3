"""Newton on the log of the column marginal: against the float64 truth, near and far, and what it counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ot_newton.errors import Status
from ot_newton.experiments.data import mixture, start
from ot_newton.experiments.regression_inner import LogNewton, bound
from ot_newton.experiments.regression_loss import RegressionLoss
from ot_newton.potentials import Biases, biases_to_potentials
from ot_newton.problem import OTProblem
from ot_newton.solve import sinkhorn, start_biases
from tests import truth

EPS = 0.1


def cloud_pair(seed: int, n: int = 12, m: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(k, 2, generator=generator, dtype=torch.float64) for k in (n, m))
    y[0] = 4.0  # an outlying atom
    return x, y


def flat_start(problem: OTProblem) -> Biases:
    zero = (torch.zeros_like(problem.x[:, 0]), torch.zeros_like(problem.y[:, 0]))
    found = start_biases(problem, zero)
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_the_plan_of_the_truth(seed):
    x, y = cloud_pair(seed)
    problem = OTProblem(x, y, eps=1.0)
    solver = LogNewton()
    (lane,) = bound(problem, flat_start(problem))
    end = solver.solve(lane, 1e-13, stubborn=True)
    assert end.converged
    assert end.passes == 2 * end.iterations
    exact = truth.solve(x.numpy(), y.numpy(), eps=1.0)
    f, g = biases_to_potentials(problem, Biases(end.row[None], end.col[None]))
    cost = ((x[:, None] - y[None]) ** 2).sum(-1)
    plan = torch.exp((f[:, None] + g[None] - cost) / 1.0) / (12 * 9)
    np.testing.assert_allclose(plan.numpy(), exact.plan, rtol=1e-9, atol=1e-15)
    moved = solver.transport(torch.cat([torch.ones(9, 1, dtype=torch.float64), y], 1))
    np.testing.assert_allclose(moved[:, 0].numpy(), np.full(12, 1 / 12), rtol=1e-13)
    np.testing.assert_allclose(moved[:, 1:].numpy(), exact.plan @ y.numpy(), atol=1e-11)


def test_a_plan_next_to_the_last_one_needs_no_new_inverse():
    data = mixture(0, 60)
    loss = RegressionLoss(data.x, data.y, eps=0.3)
    w = start(data, 0)
    loss.value(w)
    assert loss.near is not None
    made, passes = loss.near.factorizations, loss.plan_passes
    loss.value_and_grad(w + 1e-5)
    assert loss.near.factorizations == made
    assert loss.plan_passes - passes <= 15


@pytest.mark.parametrize("seed", range(3))
def test_a_cold_start_and_one_from_far_away_end_at_the_library_plan(seed):
    data = mixture(seed, 60)
    w = start(data, 0)
    reference = sinkhorn(OTProblem(data.x @ w, data.y, eps=EPS), tol=1e-12, method="newton")
    value = float(reference.value)
    loss = RegressionLoss(data.x, data.y, eps=EPS)
    assert loss.value(w) == pytest.approx(value, rel=1e-10)
    loss.value(w + 40.0)  # potentials of a W far away are no start
    assert loss.value(w) == pytest.approx(value, rel=1e-10)
    assert loss.missed == 0


def test_every_pass_of_a_start_from_far_away_is_counted(monkeypatch):
    data = mixture(1, 60)
    loss = RegressionLoss(data.x, data.y, eps=EPS)
    seen = []
    real = LogNewton.solve

    def counting(self, at, tol, *, stubborn=False):
        end = real(self, at, tol, stubborn=stubborn)
        seen.append(end.passes)
        return end

    monkeypatch.setattr(LogNewton, "solve", counting)
    loss.value_and_grad(start(data, 0))
    loss.value_and_grad(start(data, 0) + 30.0)
    products = loss.plan_passes - sum(seen)  # of the gradients and values
    assert len(seen) > 6
    assert 0 < products <= 6


def test_it_gives_up_on_a_start_that_is_too_far_and_forgets_its_inverse():
    data = mixture(2, 60)
    problem = OTProblem(data.x @ start(data, 0), data.y, eps=1e-3)
    solver = LogNewton()
    (lane,) = bound(problem, flat_start(problem))
    end = solver.solve(lane, 1e-9)
    assert not end.converged
    assert solver.inverse is None
    assert end.iterations <= 40


def test_plans_too_large_to_store_go_to_the_library(monkeypatch):
    monkeypatch.setattr("ot_newton.experiments.regression_loss.DENSE_ENTRIES", 100)
    data = mixture(0, 30)
    loss = RegressionLoss(data.x, data.y, eps=0.5)
    assert loss.near is None
    monkeypatch.undo()
    stored = RegressionLoss(data.x, data.y, eps=0.5)
    assert stored.near is not None
    w = start(data, 0)
    assert loss.value(w) == pytest.approx(stored.value(w), rel=1e-10)
    assert loss._result is not None
    assert loss._result.status is Status.CONVERGED
