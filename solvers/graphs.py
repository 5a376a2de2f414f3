"""Two helpers on autograd graphs: vector-Jacobian products that never return None, and names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["gradient", "graph_names"]


def gradient(
    outputs: Tensor, leaf: Tensor, vectors: Tensor | None, shape: torch.Size, **options: bool
) -> Tensor:
    """Vector-Jacobian product; zeros of ``shape`` where the graph does not reach the leaf."""
    kept = {"retain_graph": True, **options}
    found: Any = torch.autograd.grad(outputs, leaf, vectors, allow_unused=True, **kept)
    grad: Tensor | None = found[0]
    return torch.zeros(shape, dtype=leaf.dtype, device=leaf.device) if grad is None else grad


def graph_names(out: Tensor) -> tuple[list[str], list[str]]:
    """Names of the custom Functions (with their module, if not the user's) and of all operations."""
    custom: list[str] = []
    operations: list[str] = []
    stack: list[Any] = [out.grad_fn]
    seen: set[Any] = set()
    while stack and len(seen) < 10_000:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        operations.append(str(node.name()))
        forward = getattr(type(node), "_forward_cls", None)
        if forward is not None:
            module, name = str(forward.__module__), str(forward.__name__)
            custom.append(f"{module}.{name}" if module.startswith("linear_operator") else name)
        stack.extend(parent for parent, _ in node.next_functions)
    return sorted(set(custom)), operations
