"""The examples in the solvers' docstrings run, and every public entry has one."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = (
    "callbacks", "cg", "certificate", "confidence", "density", "eigenpairs", "escape", "graphs", "history",
    "hvp_check", "lanczos_process", "line_search", "linear_map", "monitor", "newton", "newton_loop",
    "objective", "options", "scipy_bridge", "spectra", "state", "switching", "trust_region",
)  # fmt: skip
ENTRIES = {
    "callbacks": ("CallbackDispatch", "SaddleDetector"),
    "density": ("spectral_density",),
    "eigenpairs": ("extreme_eigenpairs",),
    "escape": ("SaddleEscape",),
    "hvp_check": ("check_hvp",),
    "lanczos_process": ("lanczos",),
    "linear_map": ("as_linear_map",),
    "monitor": ("LanczosMonitor",),
    "newton": ("NewtonCG",),
    "scipy_bridge": ("scipy_hessp",),
    "spectra": ("lambda_max", "lambda_min"),
    "state": ("NewtonState",),
    "switching": ("decide",),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("error")
def test_examples_run(name):
    module = importlib.import_module(f"ot_newton.solvers.{name}")
    found = doctest.testmod(module, raise_on_error=False, verbose=False)
    assert found.failed == 0
    for entry in ENTRIES.get(name, ()):
        assert ">>>" in getattr(module, entry).__doc__, entry
