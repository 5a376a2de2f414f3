"""Examples in docstrings run, and every public name has one; the solvers' run in `test_solver_docs`."""

from __future__ import annotations

import doctest
import importlib

import pytest

import ot_newton
import ot_newton.attention

MODULES = (
    "batch", "errors", "losses", "potentials", "problem", "result", "solve", "operators.hessian_operator",
    "operators.plan", "operators.schur_operator", "attention.attend", "attention.adjoint", "attention.bias",
    "attention.contraction", "attention.dustbins", "attention.feasibility",
)  # fmt: skip
SHOWN_BY = {
    "EigenEstimate": "lambda_min",
    "EigenPairs": "extreme_eigenpairs",
    "EscapeResult": "SaddleEscape",
    "NewtonResult": "NewtonCG",
}
"""Results of the solvers, shown where they are returned."""
PUBLIC = [(ot_newton, name) for name in ot_newton.__all__]
PUBLIC += [(ot_newton.attention, name) for name in ot_newton.attention.__all__]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("error::UserWarning")
def test_examples_of_a_module_run(name):
    module = importlib.import_module(f"ot_newton.{name}")
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_public_name_is_documented_with_an_example(package, name):
    text = getattr(package, SHOWN_BY.get(name, name)).__doc__
    assert len(text.splitlines()) >= 5
    assert ">>>" in text
