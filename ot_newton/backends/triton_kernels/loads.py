"""Counts what interpreted kernels load and store, element by element (for studies of memory traffic)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Traffic", "count_traffic", "running"]


@dataclass
class Traffic:
    """Bytes moved between memory and the kernels, masked-out elements left out.

    Attributes:
        loaded: bytes loaded, by kernel name.
        stored: bytes stored, by kernel name.
        launches: number of launches, by kernel name.
    """

    loaded: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)


_active: list[Traffic] = []
_kernel = [""]


def running(kernel: str) -> None:
    """Told by the launcher which kernel comes next."""
    _kernel[0] = kernel
    for traffic in _active:
        traffic.launches[kernel] = traffic.launches.get(kernel, 0) + 1


def _moved(mask: Any, itemsize: int) -> int:
    return int(np.count_nonzero(mask.data)) * itemsize


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the traffic of every kernel launched inside.

    Returns:
        A `Traffic` that fills while the block runs.

    Raises:
        RuntimeError: the kernels are compiled, not interpreted.
    """
    from triton import knobs

    if not knobs.runtime.interpret:
        raise RuntimeError("loads are counted in Triton's interpreter only: set TRITON_INTERPRET=1 first")
    from triton.runtime.interpreter import InterpreterBuilder

    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        value = load(self, ptrs, mask, *rest)
        moved = _moved(mask, value.data.dtype.itemsize)
        traffic.loaded[_kernel[0]] = traffic.loaded.get(_kernel[0], 0) + moved
        return value

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        moved = _moved(mask, value.data.dtype.itemsize)
        traffic.stored[_kernel[0]] = traffic.stored.get(_kernel[0], 0) + moved
        return store(self, ptrs, value, mask, *rest)

    _active.append(traffic)
    InterpreterBuilder.create_masked_load = counted_load
    InterpreterBuilder.create_masked_store = counted_store
    try:
        yield traffic
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
        _active.remove(traffic)
