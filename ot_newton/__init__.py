"""Second-order optimization on a streaming Hessian-vector-product oracle for entropic optimal transport.

Names are imported on first use, so that importing the package stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ot_newton.batch import BatchResult, sinkhorn_batch
    from ot_newton.errors import (
        ConvergenceWarning,
        DegenerateWarning,
        LinearSolveError,
        OTNewtonError,
        PrecisionWarning,
        Status,
    )
    from ot_newton.losses import SinkhornLoss, ot_cost, sinkhorn_divergence
    from ot_newton.operators.hessian_operator import HessianOperator
    from ot_newton.operators.plan import TransportPlan
    from ot_newton.operators.schur_operator import SchurComplement
    from ot_newton.potentials import Potentials
    from ot_newton.problem import OTProblem
    from ot_newton.result import SinkhornResult
    from ot_newton.solve import sinkhorn
    from ot_newton.solvers.callbacks import SaddleDetector
    from ot_newton.solvers.density import spectral_density
    from ot_newton.solvers.eigenpairs import EigenPairs, extreme_eigenpairs
    from ot_newton.solvers.escape import EscapeResult, SaddleEscape
    from ot_newton.solvers.hvp_check import check_hvp
    from ot_newton.solvers.monitor import LanczosMonitor
    from ot_newton.solvers.newton import NewtonCG, NewtonResult
    from ot_newton.solvers.scipy_bridge import scipy_hessp
    from ot_newton.solvers.spectra import EigenEstimate, lambda_max, lambda_min, lanczos
    from ot_newton.solvers.state import NewtonState

__version__ = "0.1.0"

_MODULES = {
    "BatchResult": "batch",
    "ConvergenceWarning": "errors",
    "DegenerateWarning": "errors",
    "EigenEstimate": "solvers.spectra",
    "EigenPairs": "solvers.eigenpairs",
    "EscapeResult": "solvers.escape",
    "HessianOperator": "operators.hessian_operator",
    "LanczosMonitor": "solvers.monitor",
    "LinearSolveError": "errors",
    "NewtonCG": "solvers.newton",
    "NewtonResult": "solvers.newton",
    "NewtonState": "solvers.state",
    "OTNewtonError": "errors",
    "OTProblem": "problem",
    "Potentials": "potentials",
    "PrecisionWarning": "errors",
    "SaddleDetector": "solvers.callbacks",
    "SaddleEscape": "solvers.escape",
    "SchurComplement": "operators.schur_operator",
    "SinkhornLoss": "losses",
    "SinkhornResult": "result",
    "Status": "errors",
    "TransportPlan": "operators.plan",
    "check_hvp": "solvers.hvp_check",
    "extreme_eigenpairs": "solvers.eigenpairs",
    "lambda_max": "solvers.spectra",
    "lambda_min": "solvers.spectra",
    "lanczos": "solvers.spectra",
    "ot_cost": "losses",
    "scipy_hessp": "solvers.scipy_bridge",
    "sinkhorn": "solve",
    "sinkhorn_batch": "batch",
    "sinkhorn_divergence": "losses",
    "spectral_density": "solvers.density",
}

__all__ = [
    "BatchResult",
    "ConvergenceWarning",
    "DegenerateWarning",
    "EigenEstimate",
    "EigenPairs",
    "EscapeResult",
    "HessianOperator",
    "LanczosMonitor",
    "LinearSolveError",
    "NewtonCG",
    "NewtonResult",
    "NewtonState",
    "OTNewtonError",
    "OTProblem",
    "Potentials",
    "PrecisionWarning",
    "SaddleDetector",
    "SaddleEscape",
    "SchurComplement",
    "SinkhornLoss",
    "SinkhornResult",
    "Status",
    "TransportPlan",
    "check_hvp",
    "extreme_eigenpairs",
    "lambda_max",
    "lambda_min",
    "lanczos",
    "ot_cost",
    "scipy_hessp",
    "sinkhorn",
    "sinkhorn_batch",
    "sinkhorn_divergence",
    "spectral_density",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use and keep it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'ot_newton' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ot_newton.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted({*globals(), *__all__})
