"""Launches and bytes of a half-iteration: torch's operations one by one, Triton's kernels from their loads.

Every operation that is no view and no allocation would be one kernel on a GPU; its bytes are those of its
operands read and of its results written, each once. In an eager pipeline every matrix between two
operations goes through memory. Run as a module it answers requests (see `child`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ot_newton.backends.common import log2_weight
from ot_newton.backends.select import get_backend
from ot_newton.backends.triton_kernels.configs import INTERPRETER, KernelKey, TileConfig, d_bucket
from ot_newton.fixed_point import SinkhornOptions, run_sinkhorn
from ot_newton.problem import OTProblem
from ot_newton.protocols import PassCounter, PlanBackend

__all__ = ["PIPELINES", "OperationCounter", "answer"]

NO_LAUNCH = {
    "_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty", "set_",
}  # fmt: skip
SYNC = "_local_scalar_dense"
STARTED, MEASURED = 1, 2
"""Iterations of the two runs whose difference is counted: what happens once cancels."""

PIPELINES = ("triton", "unfused, stored", "unfused, recomputed", "torch_tiles", "dense")
"""Our kernel; a matrix of scores in memory, from stored products or from products made anew; our others."""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _bytes(value: Any) -> int:
    """Bytes of the tensors in a value, an expanded one by what it holds."""
    return sum(
        min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in _tensors(value) if t.numel()
    )


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and their bytes while it is entered.

    Args:
        ignored: names of operations left out.

    Attributes:
        launches: by name of operation.
        moved: bytes read and written.
        syncs: reads of a device value by the host.
    """

    def __init__(self, ignored: frozenset[str] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ignored = ignored | NO_LAUNCH
        self.launches: Counter[str] = Counter()
        self.moved = 0
        self.syncs = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and note it."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == SYNC:
            self.syncs += 1
        elif not func.is_view and name not in self.ignored:
            self.launches[name] += 1
            self.moved += _bytes(args) + _bytes(result)
        return result


class UnfusedTiles:
    """The plain pipeline: a matrix of scores in memory, reduced by separate operations (8 with the product).

    Args:
        q: scaled clouds (B, n, d).
        k: (B, m, d).
        stored: keep `q.k` for all iterations, as with a stored cost matrix, or multiply at each.
    """

    def __init__(self, q: Tensor, k: Tensor, *, stored: bool) -> None:
        self.q, self.k = q, k
        self.dots = q @ k.mT if stored else None
        self._log_weights: dict[int, Tensor] = {}

    def lse(
        self, bias: Tensor, weight: Tensor, axis: int, stabilizer: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `Tiles.lse`; always with the maximum of the row."""
        if axis not in self._log_weights:
            self._log_weights[axis] = log2_weight(weight)
        shift = (bias + self._log_weights[axis])[:, None, :]
        if self.dots is None:
            out, summed = (self.q, self.k) if axis == 1 else (self.k, self.q)
            scores = torch.baddbmm(shift, out, summed.mT)
        else:
            scores = (self.dots if axis == 1 else self.dots.mT) + shift
        top = scores.amax(-1)
        return scores.sub_(top[..., None]).exp2_().sum(-1).log2_().add_(top), None


class UnfusedBackend:
    """Binds `UnfusedTiles`; for counting only: it has no plan products."""

    def __init__(self, *, stored: bool) -> None:
        self.name, self.stored = "unfused", stored

    def bind(self, q: Tensor, k: Tensor, counter: PassCounter) -> UnfusedTiles:
        """See `PlanBackend.bind`."""
        return UnfusedTiles(q, k, stored=self.stored)


def _triton_backend(d: int, tile: Mapping[str, int], precision: str = "ieee") -> PlanBackend:
    """The interpreted kernels with a given tile, which stands as if it had been tuned."""
    from ot_newton.backends.triton_kernels import launch

    bucket = d_bucket(d, torch.float32)
    key = KernelKey("lse", bucket.dim, bucket.by_coordinate, precision)
    launch._tuned[key, INTERPRETER] = TileConfig(**tile)
    backend: PlanBackend = cast(Any, launch.TritonBackend(precision, autotune=True, host_guard=False))
    return backend


def half_iteration(request: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes of one stabilized half-iteration, counted load by load, of a result that was checked.

    Args:
        request: n, m, d, precision, tile.

    Returns:
        Bytes loaded and stored, launches, largest error of the result in bits.
    """
    from ot_newton.backends.triton_kernels.loads import count_traffic

    n, m, d = (request[name] for name in ("n", "m", "d"))
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, size, d, generator=generator) / math.sqrt(d) for size in (n, m))
    bias = torch.randn(1, m, generator=generator)
    weight, stabilizer = torch.full((1, m), 1.0 / m), torch.zeros(1, n)
    backend = _triton_backend(d, request["tile"], request["precision"])
    tiles = backend.bind(q, k, PassCounter())
    with count_traffic() as traffic:
        found, _ = tiles.lse(bias, weight, 1, stabilizer)
    scores = (q.double() @ k.double().mT + bias.double()[:, None, :]) * math.log(2.0)
    true = torch.logsumexp(scores + weight.double().log()[:, None, :], -1) / math.log(2.0)
    return {
        "loaded": traffic.loaded["lse"],
        "stored": traffic.stored["lse"],
        "launches": traffic.launches["lse"],
        "triton": version("triton"),
        "error_bits": float((found.double() - true).abs().max()),
    }


def _backend(pipeline: str, d: int, tile: Mapping[str, int]) -> PlanBackend:
    if pipeline == "triton":
        return _triton_backend(d, tile)
    if pipeline.startswith("unfused"):
        return cast(PlanBackend, UnfusedBackend(stored=pipeline.endswith("stored")))
    return get_backend(pipeline)


def solver_launches(request: Mapping[str, Any]) -> dict[str, Any]:
    """Launches and bytes of one half-iteration of the solver, from the difference of two runs.

    Args:
        request: pipeline, n (points of both clouds), d, tile.

    Returns:
        Per half-iteration: Triton's launches, other launches by name, syncs, bytes; and the last potential
        of the longer run, to compare pipelines.
    """
    pipeline, n, d = (request[name] for name in ("pipeline", "n", "d"))
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, d, generator=generator) / math.sqrt(d) for _ in range(2))
    interpreted = pipeline == "triton"
    found = []
    for iterations in (STARTED, MEASURED):
        problem = OTProblem(x, y, eps=1.0)
        options = SinkhornOptions(tol=0.0, max_iter=iterations, anneal=False, check_every=10**6)
        # The interpreter copies arguments in and out; a GPU does not.
        operations = OperationCounter(frozenset({"copy_"}) if interpreted else frozenset())
        with _traffic(interpreted) as traffic, operations:
            point = run_sinkhorn(problem, _backend(pipeline, d, request["tile"]), options, PassCounter())
        kernels = sum(traffic.launches.values()) if traffic else 0
        bytes_moved = sum((*traffic.loaded.values(), *traffic.stored.values())) if traffic else 0
        found.append((operations, kernels, operations.moved + bytes_moved))
    (first, kernels_before, moved_before), (last, kernels, moved) = found
    halves = 2 * (MEASURED - STARTED)
    last.launches.subtract(first.launches)
    return {
        "triton_launches": (kernels - kernels_before) / halves,
        "launches": {name: count / halves for name, count in sorted(last.launches.items()) if count},
        "syncs": (last.syncs - first.syncs) / halves,
        "bytes": (moved - moved_before) / halves,
        "triton": version("triton"),
        "potential": point.biases.col[0, :8].tolist(),
    }


def _traffic(interpreted: bool) -> Any:
    if not interpreted:
        return nullcontext()
    from ot_newton.backends.triton_kernels.loads import count_traffic

    return count_traffic()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request of `child`: its ``what`` names the function."""
    ways = {"half-iteration": half_iteration, "solver": solver_launches}
    return ways[request["what"]](request)


if __name__ == "__main__":
    from ot_newton.experiments.bench.child import serve

    torch.set_num_threads(1)
    serve(answer)
