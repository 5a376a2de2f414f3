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
    from ot_newton.solvers.escape import SaddleEscape
    from ot_newton.solvers.hvp_check import check_hvp
    from ot_newton.solvers.monitor import LanczosMonitor
    from ot_newton.solvers.newton import NewtonCG, NewtonResult
    from ot_newton.solvers.spectra import EigenEstimate, lambda_max, lambda_min, lanczos, spectral_density

__version__ = "0.1.0"

_MODULES = {
    "BatchResult": "batch",
    "ConvergenceWarning": "errors",
    "DegenerateWarning": "errors",
    "EigenEstimate": "solvers.spectra",
    "HessianOperator": "operators.hessian_operator",
    "LanczosMonitor": "solvers.monitor",
    "LinearSolveError": "errors",
    "NewtonCG": "solvers.newton",
    "NewtonResult": "solvers.newton",
    "OTNewtonError": "errors",
    "OTProblem": "problem",
    "Potentials": "potentials",
    "PrecisionWarning": "errors",
    "SaddleEscape": "solvers.escape",
    "SchurComplement": "operators.schur_operator",
    "SinkhornLoss": "losses",
    "SinkhornResult": "result",
    "Status": "errors",
    "TransportPlan": "operators.plan",
    "check_hvp": "solvers.hvp_check",
    "lambda_max": "solvers.spectra",
    "lambda_min": "solvers.spectra",
    "lanczos": "solvers.spectra",
    "ot_cost": "losses",
    "sinkhorn": "solve",
    "sinkhorn_batch": "batch",
    "sinkhorn_divergence": "losses",
    "spectral_density": "solvers.spectra",
}

__all__ = [
    "BatchResult",
    "ConvergenceWarning",
    "DegenerateWarning",
    "EigenEstimate",
    "HessianOperator",
    "LanczosMonitor",
    "LinearSolveError",
    "NewtonCG",
    "NewtonResult",
    "OTNewtonError",
    "OTProblem",
    "Potentials",
    "PrecisionWarning",
    "SaddleEscape",
    "SchurComplement",
    "SinkhornLoss",
    "SinkhornResult",
    "Status",
    "TransportPlan",
    "check_hvp",
    "lambda_max",
    "lambda_min",
    "lanczos",
    "ot_cost",
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
