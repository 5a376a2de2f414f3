"""The one table of tolerances, each with its reason. Errors are relative to the size of the expected array.

Use `assert_close(found, expected, "gradient", dtype)`. Values printed in a reference table are compared
to half a unit of the last digit printed instead: `assert_printed(found, "1.494854360715")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = [
    "TABLE",
    "Tolerance",
    "assert_close",
    "assert_printed",
    "half_unit",
    "relative_error",
    "rtol",
    "to_numpy",
]


@dataclass(frozen=True)
class Tolerance:
    """Relative tolerances per dtype, and where they come from."""

    float64: float
    float32: float
    reason: str


TABLE = {
    "value": Tolerance(1e-11, 2e-6, "the dual is second order in the marginal error: only the sum rounds"),
    "cost": Tolerance(1e-11, 2e-5, "<P,C> is first order in the marginal error; exponents round at |C|/eps"),
    "gradient": Tolerance(1e-10, 2e-5, "first order in the plan: eps_mach |C|/eps, about 1e-14 / 1e-6 here"),
    "hvp": Tolerance(1e-9, 1e-4, "Schur solve at rtol 1e-10 / 1e-5 times the coupling's condition"),
    "plan": Tolerance(1e-11, 2e-5, "relative error of an entry is the rounding of its exponent"),
    "translation": Tolerance(1e-12, 2e-5, "I1 holds at any stop: only products round, the solve is exact"),
    "symmetry": Tolerance(1e-9, 1e-4, "as for one product: the two sides stop at different residuals"),
    "batch": Tolerance(1e-12, 1e-6, "same sums in another order"),
    "scaling": Tolerance(1e-12, 2e-5, "exact powers of two commute with rounding, others do not"),
    "homogeneity": Tolerance(1e-8, 1e-4, "as printed in O28"),
}


def to_numpy(value: Any) -> np.ndarray:
    """A float64 array on the host from a tensor, an array or a number."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().double().numpy()
    return np.asarray(value, dtype=np.float64)


def rtol(quantity: str, dtype: Any = torch.float64) -> float:
    """The table's tolerance of a quantity in a dtype (half precision computes in float32)."""
    entry = TABLE[quantity]
    return entry.float64 if "float64" in str(dtype) else entry.float32


def relative_error(found: Any, expected: Any, scale: float | None = None) -> float:
    """`max |found - expected| / scale`, the scale being `max |expected|` unless given; NaN counts as inf."""
    found, expected = to_numpy(found), to_numpy(expected)
    assert found.shape == expected.shape, f"shape {found.shape} instead of {expected.shape}"
    if expected.size == 0:
        return 0.0
    size = float(np.max(np.abs(expected))) if scale is None else scale
    worst = float(np.max(np.abs(found - expected)))
    return float("inf") if np.isnan(worst) else worst / max(size, 1e-300)


def assert_close(
    found: Any,
    expected: Any,
    quantity: str,
    dtype: Any = torch.float64,
    *,
    scale: float | None = None,
    floor: float = 0.0,
) -> None:
    """Assert one quantity against truth at the table's tolerance.

    ``floor`` is the result's own rounding floor `eps_mach |C|/eps`: first-order quantities of float32
    at small eps cannot be better than a few times that.
    """
    error, limit = relative_error(found, expected, scale), max(rtol(quantity, dtype), 8 * floor)
    assert error <= limit, f"{quantity}: relative error {error:.3e} > {limit:.1e} in {dtype}"


def half_unit(printed: str) -> float:
    """Half a unit of the last digit of a printed decimal number."""
    mantissa, _, exponent = printed.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 0.5 * 10.0 ** (int(exponent or 0) - decimals)


def assert_printed(found: Any, printed: str, what: str = "") -> None:
    """Assert a number against a printed one, to half a unit of its last digit (plus one rounding)."""
    number, value = float(printed), float(found)
    limit = half_unit(printed) * (1 + 1e-6) + 4 * np.finfo(np.float64).eps * abs(number)
    assert abs(value - number) <= limit, f"{what}: {value!r} is not {printed} (off by {value - number:.2e})"
