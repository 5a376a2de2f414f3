"""Conformance of a backend: every product of `PlanBackend` against float64 numpy.

`BACKEND_CHECKS` are functions `(backend, dtype)`; `check_backend` runs them all. Tolerances are bounds of
the rounding of the exponents, computed from the terms, so that they hold for any size and offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.protocols import PassCounter
from tests.bound import Bound, draw, problems, wide

__all__ = ["BACKEND_CHECKS", "check_backend"]

WIDTHS = (1, 2, 3, 8, 17)
LN2 = float(np.log(2.0))


def _flip(bound: Bound, axis: int) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
    """(bias summed over, its weight, the other side's bias, q.k with the summed index last)."""
    dots = wide(bound.q) @ wide(bound.k).swapaxes(1, 2)
    if axis == 1:
        return bound.u, bound.b, bound.w, dots
    return bound.w, bound.a, bound.u, dots.swapaxes(1, 2)


def _true_lse(dots: np.ndarray, bias: Tensor, weight: Tensor) -> np.ndarray:
    with np.errstate(divide="ignore"):
        terms = dots + np.where(wide(weight) > 0, wide(bias) + np.log2(wide(weight)), -np.inf)[:, None, :]
        top = terms.max(2, keepdims=True)
        return np.asarray(np.log2(np.exp2(terms - top).sum(2)) + top[..., 0])


def _size(*arrays: Any) -> float:
    return max(float(np.max(np.abs(wide(t) if isinstance(t, Tensor) else t), initial=0.0)) for t in arrays)


def _assert_bits(found: Tensor, expected: np.ndarray, limit: float, what: str) -> None:
    assert tuple(found.shape) == expected.shape, f"{what}: shape {tuple(found.shape)}, not {expected.shape}"
    worst = float(np.max(np.abs(wide(found) - expected)))
    assert worst <= limit, f"{what}: off by {worst:.3e} bits, allowed {limit:.3e}"


def _assert_product(
    bound: Bound, found: Tensor, expected: np.ndarray, envelope: np.ndarray, what: str
) -> None:
    """Entry by entry, relative to `sum |P| |V|` of that entry: no large entry hides a small one."""
    assert tuple(found.shape) == expected.shape, f"{what}: shape {tuple(found.shape)}, not {expected.shape}"
    assert found.dtype == bound.dtype, f"{what}: dtype {found.dtype}, not {bound.dtype}"
    assert found.device == bound.q.device, f"{what}: device {found.device}, not {bound.q.device}"
    tiny = 2.0**-99 * _size(bound.a) * _size(bound.b)
    limit = (2 * bound.rounding * LN2) * envelope + tiny
    excess = np.abs(wide(found) - expected) - limit
    assert not np.isnan(excess).any(), f"{what}: NaN"
    assert float(excess.max(initial=0.0)) <= 0, f"{what}: {float(excess.max()):.3e} beyond rounding"


def check_lse_max(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Max-stabilized log-sum-exp of both axes, also with biases far beyond the exponent range."""
    for bound in problems(backend, dtype, device):
        for axis in (0, 1):
            bias, weight, _, dots = _flip(bound, axis)
            for shift in (0.0, 3000.0, -3000.0):
                counter = PassCounter()
                moved = bias + shift
                found, rowsum = bound.tiles(counter).lse(moved, weight, axis)
                limit = 2 * bound.rounding + 16 * torch.finfo(dtype).eps * abs(shift)
                _assert_bits(found, _true_lse(dots, moved, weight), limit, f"lse axis {axis} shift {shift}")
                assert found.dtype == dtype
                assert rowsum is None
                assert 1 <= counter.passes <= 2


def check_lse_stabilized(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """The one-pass form near a fixed point, up to a few bits away from it."""
    for bound in problems(backend, dtype, device):
        for axis in (0, 1):
            bias, weight, _, dots = _flip(bound, axis)
            true = _true_lse(dots, bias, weight)
            generator = np.random.default_rng(1)
            for spread in (0.0, 1.0, 20.0):
                shift = generator.uniform(-spread, spread, true.shape)
                stabilizer = torch.tensor(-true + shift, dtype=dtype, device=device)
                counter = PassCounter()
                found, rowsum = bound.tiles(counter).lse(bias, weight, axis, stabilizer)
                limit = 2 * bound.rounding + 4 * torch.finfo(dtype).eps * (_size(true) + spread)
                _assert_bits(found, true, limit, f"stabilized lse axis {axis} spread {spread}")
                assert rowsum is not None, "the guard tripped inside its range"
                expected = np.exp2(true + wide(stabilizer))
                worst = float(np.max(np.abs(wide(rowsum) / expected - 1)))
                assert worst <= 2 * limit, f"rowsum: relative error {worst:.3e}"
                assert counter.passes == 1


def check_lse_guard(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """One bad stabilizer (too large, too small, NaN, inf) falls back to the max-stabilized path."""
    for shape in ((17, 15, 3), (129, 127, 16)):
        bound = draw(backend, dtype, shape, batch=2, device=device)
        for axis in (0, 1):
            bias, weight, _, dots = _flip(bound, axis)
            true = _true_lse(dots, bias, weight)
            for bad in (64.0, -64.0, 1e4, -1e4, float("nan"), float("inf"), float("-inf")):
                stabilizer = torch.tensor(-true, dtype=dtype, device=device)
                stabilizer[1, -1] += bad
                found, rowsum = bound.tiles().lse(bias, weight, axis, stabilizer)
                _assert_bits(found, true, 2 * bound.rounding, f"guarded lse axis {axis} bad {bad}")
                assert rowsum is None, f"the guard let {bad} through"


def check_lse_repeated(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """One bound object asked for a sequence of biases answers each as a fresh one does (stored state)."""
    near = draw(backend, dtype, (17, 129, 3), batch=2, device=device)
    spread = Bound(backend, dtype, 12 * near.q, near.k, near.w, near.u, near.a, near.b)
    for bound, scales in ((near, (0.0, 1.0, 12.0, 300.0, 5.0, 0.0)), (spread, (0.0, 40.0, 60.0, 5.0, 30.0))):
        tiles = bound.tiles()
        generator = np.random.default_rng(2)
        for scale in scales:
            for axis in (0, 1):
                bias, weight, _, dots = _flip(bound, axis)
                noise = scale * generator.uniform(-2, 2, tuple(bias.shape))
                step = torch.tensor(noise, dtype=dtype, device=device)
                moved = bias + step
                true = _true_lse(dots, moved, weight)
                stabilizer = torch.tensor(-true, dtype=dtype, device=device)
                found, _ = tiles.lse(moved, weight, axis, stabilizer)
                limit = 2 * bound.rounding + 16 * torch.finfo(dtype).eps * (_size(step) + _size(true))
                _assert_bits(found, true, limit, f"repeated lse axis {axis} scale {scale}")


def check_apply(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """`P V` and `P^T U` at many widths: values, exact zeros, dtype, one pass each."""
    for bound in problems(backend, dtype, device):
        dense = bound.dense
        counter = PassCounter()
        plan = bound.plan(counter)
        for axis in (0, 1):
            matrix = dense if axis == 1 else dense.swapaxes(1, 2)
            dead = (bound.a if axis == 1 else bound.b) == 0
            for width in WIDTHS:
                v = torch.randn(matrix.shape[0], matrix.shape[2], width, dtype=dtype, device=device)
                before = counter.passes
                found = plan.apply(v, axis)
                assert counter.passes == before + 1
                envelope = matrix @ np.abs(wide(v))
                _assert_product(bound, found, matrix @ wide(v), envelope, f"apply axis {axis} width {width}")
                assert torch.count_nonzero(found[dead]) == 0, "zero weights must give exact zeros"


def check_hadamard(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Hadamard-weighted transport: both axes, every broadcast of K or 1, with and without transport."""
    blocks = [(1, 1, 1), (3, 3, 3), (3, 1, 1), (1, 3, 1), (1, 1, 3), (3, 1, 3), (1, 3, 3), (3, 3, 1)]
    for index, bound in enumerate(problems(backend, dtype, device)):
        dense = bound.dense
        for offset in range(2):
            check_one_hadamard(bound, dense, 1 + index % 4, blocks[(2 * index + offset) % 8], offset == 0)


def check_one_hadamard(
    bound: Bound, dense: np.ndarray, rank: int, blocks: tuple[int, int, int], with_transport: bool
) -> None:
    """One shape of `apply_hadamard` on both axes."""
    batch, n, m = dense.shape
    options: dict[str, Any] = {"dtype": bound.dtype, "device": bound.q.device}
    left = torch.randn(batch, blocks[0], n, rank, **options)
    right = torch.randn(batch, blocks[1], m, rank, **options)
    factor = np.einsum("bkip,bkjp->bkij", *_same_block(wide(left), wide(right)))
    size = np.einsum("bkip,bkjp->bkij", *_same_block(np.abs(wide(left)), np.abs(wide(right))))
    for axis in (0, 1):
        length, order = (m, "bkij,bkjw->bkiw") if axis == 1 else (n, "bkij,bkiw->bkjw")
        v = torch.randn(batch, blocks[2], length, 2, **options)
        transport = torch.randn(batch, length, 3, **options) if with_transport else None
        counter = PassCounter()
        found, moved = bound.plan(counter).apply_hadamard(left, right, v, axis, transport)
        assert counter.passes == 1
        expected = np.einsum(order, *_same_block(dense[:, None] * factor, wide(v)))
        envelope = np.einsum(order, *_same_block(dense[:, None] * size, np.abs(wide(v))))
        _assert_product(bound, found, expected, envelope, f"hadamard axis {axis} blocks {blocks}")
        if transport is None:
            assert moved is None
        else:
            assert moved is not None
            matrix = dense if axis == 1 else dense.swapaxes(1, 2)
            envelope = matrix @ np.abs(wide(transport))
            _assert_product(bound, moved, matrix @ wide(transport), envelope, f"transport axis {axis}")


def _same_block(one: np.ndarray, two: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    count = max(one.shape[1], two.shape[1])
    return (
        np.broadcast_to(one, (one.shape[0], count, *one.shape[2:])),
        np.broadcast_to(two, (two.shape[0], count, *two.shape[2:])),
    )


def check_dense(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """`to_dense` entry by entry."""
    for bound in problems(backend, dtype, device):
        _assert_product(bound, bound.plan().to_dense(), bound.dense, bound.dense, "to_dense")


def check_adjoint(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """`<U, P V> = <P^T U, V>` to rounding of the sums."""
    for bound in problems(backend, dtype, device):
        batch, n, m = bound.dense.shape
        u = torch.randn(batch, n, 4, dtype=dtype, device=device)
        v = torch.randn(batch, m, 4, dtype=dtype, device=device)
        plan = bound.plan()
        one = float(np.sum(wide(u) * wide(plan.apply(v, 1))))
        two = float(np.sum(wide(plan.apply(u, 0)) * wide(v)))
        size = float(np.sum(np.abs(wide(u)) * (bound.dense @ np.abs(wide(v)))))
        assert abs(one - two) <= 4 * bound.rounding * size


def check_batch_is_loop(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Each lane of a batch equals the lane alone."""
    for shape in ((1, 17, 3), (17, 129, 16), (127, 15, 2)):
        bound = draw(backend, dtype, shape, batch=3, zeros=True, device=device)
        v = torch.randn(3, shape[1], 4, dtype=dtype, device=device)
        together = bound.plan().apply(v, 1)
        lse, _ = bound.tiles().lse(bound.u, bound.b, 1)
        for lane in range(3):
            parts = {name: getattr(bound, name)[lane : lane + 1] for name in ("q", "k", "w", "u", "a", "b")}
            alone = Bound(backend, dtype, **parts)
            envelope = alone.dense @ np.abs(wide(v[lane : lane + 1]))
            found = alone.plan().apply(v[lane : lane + 1], 1)
            _assert_product(alone, found, wide(together[lane : lane + 1]), envelope, "lane alone")
            single, _ = alone.tiles().lse(alone.u, alone.b, 1)
            _assert_bits(single, wide(lse[lane : lane + 1]), alone.rounding, "lane alone, lse")


def _layouts(t: Tensor) -> list[Tensor]:
    """The same numbers as transposed, strided and offset views."""
    spaced = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))
    spaced[..., ::2] = t
    longer = t.new_full((t.shape[0], t.shape[1] + 3, *t.shape[2:]), float("nan"))
    longer[:, 3:] = t
    transposed = t.transpose(1, -1).contiguous().transpose(1, -1) if t.ndim > 2 else t.t().contiguous().t()
    return [spaced[..., ::2], longer[:, 3:], transposed]


def check_layouts(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Non-contiguous and expanded inputs give the same bits as contiguous ones."""
    bound = draw(backend, dtype, (17, 129, 5), batch=2, device=device)
    names = ("q", "k", "w", "u", "a", "b")
    views = {name: _layouts(getattr(bound, name)) for name in names}
    v = torch.randn(2, 129, 3, dtype=dtype, device=device)
    expected, lse = bound.plan().apply(v, 1), bound.tiles().lse(bound.u, bound.b, 1)[0]
    for index in range(3):
        other = Bound(backend, dtype, **{name: views[name][index] for name in names})
        assert torch.equal(other.plan().apply(_layouts(v)[index], 1), expected)
        assert torch.equal(other.tiles().lse(other.u, other.b, 1)[0], lse)
    ones = torch.ones(2, 129, 1, dtype=dtype, device=device)
    full = bound.plan().apply(ones.repeat(1, 1, 4), 1)
    assert torch.equal(bound.plan().apply(ones.expand(2, 129, 4), 1), full)
    lanes = {name: getattr(bound, name)[:1] for name in names}
    shared = Bound(backend, dtype, **{name: t.expand(2, *t.shape[1:]) for name, t in lanes.items()})
    first, second = shared.plan().apply(ones, 1)
    assert torch.equal(first, second)


def check_offsets(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Large products cancelled by large biases: the error stays within the rounding of the terms."""
    for offset in (30.0, 300.0):
        bound = draw(backend, dtype, (17, 129, 3), offset=offset, device=device)
        if bound.rounding > 0.2:
            bound = draw(backend, dtype, (17, 129, 3), offset=0.1 * offset, device=device)
        v = torch.randn(1, 129, 2, dtype=dtype, device=device)
        envelope = bound.dense @ np.abs(wide(v))
        _assert_product(bound, bound.plan().apply(v, 1), bound.dense @ wide(v), envelope, f"offset {offset}")


def check_zero_weight_overflow(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Kernel entries between two zero-weight atoms may overflow; nothing of it may show."""
    bound = draw(backend, dtype, (17, 15, 3), batch=2, zeros=True, device=device)
    w, u = bound.w.clone(), bound.u.clone()
    w[bound.a == 0], u[bound.b == 0] = 3000.0, 3000.0
    far = Bound(backend, dtype, bound.q, bound.k, w, u, bound.a, bound.b)
    v, t = torch.randn(2, 15, 3, dtype=dtype), torch.randn(2, 15, 2, dtype=dtype)
    v, t = v.to(device), t.to(device)
    assert torch.equal(far.plan().apply(v, 1), bound.plan().apply(v, 1))
    assert torch.equal(far.plan().to_dense(), bound.plan().to_dense())
    left, right = torch.randn(2, 1, 17, 2, dtype=dtype), torch.randn(2, 1, 15, 2, dtype=dtype)
    block = (left.to(device), right.to(device), v[:, None])
    one, two = far.plan().apply_hadamard(*block, 1, t), bound.plan().apply_hadamard(*block, 1, t)
    assert torch.equal(one[0], two[0])
    assert one[1] is not None
    assert two[1] is not None
    assert torch.equal(one[1], two[1])
    lse, _ = far.tiles().lse(far.u, far.b, 1)
    expected, _ = bound.tiles().lse(bound.u, bound.b, 1)
    assert torch.equal(lse, expected)
    stabilizer = -expected
    lse, rowsum = far.tiles().lse(far.u, far.b, 1, stabilizer)
    _assert_bits(lse, wide(expected), 2 * bound.rounding, "stabilized lse beside overflowing atoms")
    assert rowsum is not None
    assert not torch.isnan(rowsum).any()


def check_all_masked(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """A lane without any mass gives an empty sum: -inf or a finite stand-in, never NaN; others are right."""
    bound = draw(backend, dtype, (5, 7, 2), batch=2, device=device)
    weight = bound.b.clone()
    weight[0] = 0
    lse, _ = bound.tiles().lse(bound.u, weight, 1)
    assert not torch.isnan(lse).any()
    assert bool((lse[0] < -900 if dtype == torch.float64 else lse[0] < -90).all())
    expected, _ = bound.tiles().lse(bound.u, bound.b, 1)
    assert torch.equal(lse[1], expected[1])


def check_inputs_untouched(backend: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """No call writes to what it was given, and no result aliases it or a later result."""
    bound = draw(backend, dtype, (15, 17, 3), batch=2, zeros=True, device=device)
    v = torch.randn(2, 17, 3, dtype=dtype, device=device)
    given = [bound.q, bound.k, bound.w, bound.u, bound.a, bound.b, v]
    before = [t.clone() for t in given]
    tiles, plan = bound.tiles(), bound.plan()
    first = plan.apply(v, 1)
    kept = first.clone()
    lse, _ = tiles.lse(bound.u, bound.b, 1)
    kept_lse = lse.clone()
    plan.apply(2 * v, 1)
    tiles.lse(bound.u + 1, bound.b, 1, -lse - 1)
    plan.apply_hadamard(v[:, None, :15], v[:, None], v[:, None], 1, v)
    assert torch.equal(first, kept)
    assert torch.equal(lse, kept_lse)
    assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))


BACKEND_CHECKS: dict[str, Callable[[Any, torch.dtype], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_lse_max,
        check_lse_stabilized,
        check_lse_guard,
        check_lse_repeated,
        check_apply,
        check_hadamard,
        check_dense,
        check_adjoint,
        check_batch_is_loop,
        check_layouts,
        check_offsets,
        check_zero_weight_overflow,
        check_all_masked,
        check_inputs_untouched,
    )
}


def check_backend(backend: Any, *, dtype: torch.dtype) -> None:
    """Run every check on one backend in one dtype."""
    for check in BACKEND_CHECKS.values():
        check(backend, dtype)
