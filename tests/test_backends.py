"""Every backend through the one conformance check of the protocol, and the table that selects them."""

from __future__ import annotations

import pytest
import torch

from ot_newton.backends.select import DENSE_ENTRIES, choose_backend, get_backend
from tests.conformance import BACKEND_CHECKS
from tests.helpers import BACKENDS


@pytest.mark.parametrize("check", BACKEND_CHECKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", BACKENDS)
def test_conformance(name: str, dtype: torch.dtype, check: str) -> None:
    BACKEND_CHECKS[check](get_backend(name), dtype)


@pytest.mark.parametrize("name", BACKENDS)
def test_names(name: str) -> None:
    assert get_backend(name).name == name


def test_selection_table() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    side = int(DENSE_ENTRIES**0.5)
    assert choose_backend("auto", cpu, side, side) == "dense"
    assert choose_backend("auto", cpu, side, side + 1) == "cpu"
    assert choose_backend("auto", cpu, side, side, lanes=2) == "cpu"
    assert choose_backend("auto", cuda, side, side) == "dense"
    for name in BACKENDS:
        assert choose_backend(name, cpu, 10**6, 10**6) == name


def test_selection_refuses() -> None:
    with pytest.raises(ValueError, match="backend must be one of.*'nonsense'"):
        choose_backend("nonsense", torch.device("cpu"), 1, 1)
    with pytest.raises(ValueError, match="cpu.*cuda"):
        choose_backend("cpu", torch.device("cuda"), 1, 1)
