"""The conformance checks, one per contract: `check_backend` and `check_operator`, `check_scipy`."""

from __future__ import annotations

from tests.conformance_backend import BACKEND_CHECKS, check_backend
from tests.conformance_operator import check_operator
from tests.conformance_scipy import SCIPY_CHECKS, check_scipy

__all__ = ["BACKEND_CHECKS", "SCIPY_CHECKS", "check_backend", "check_operator", "check_scipy"]
