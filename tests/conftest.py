"""Shared settings: few threads (the products are small), fixed seeds, derandomized hypothesis."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True, max_examples=25, database=None)
settings.load_profile("default")


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - global state of code under test, not ours
