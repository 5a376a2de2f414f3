"""Cases from public reports, O1 to O17: extreme inputs, precision, dtypes, layouts; tests bear the ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ot_newton as otn
from tests import truth
from tests.exact_cases import EXACT_ROWS, OT_ROWS, Row
from tests.generators import Case, case_S, duplicates, far_zero_atoms, pitchfork, seeded
from tests.helpers import BACKENDS, dense_hessian, problem_of, rounded, solve
from tests.tolerances import assert_close, assert_printed, relative_error, to_numpy

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
EVERYWHERE = pytest.mark.parametrize("backend", BACKENDS)


@EVERYWHERE
@DTYPES
def test_O01_tiny_eps(dtype: torch.dtype, backend: str) -> None:
    """K = exp(-C/eps) underflows everywhere; the answer is a permutation."""
    result = solve(pitchfork(0.5, 1e-4), dtype, backend=backend, tol=None)
    expected = 0.25 + 6.9315e-5
    assert abs(float(result.value) - expected) <= (1e-9 if dtype == torch.float64 else 1e-6)
    half = np.diag([0.5, 0.5])
    assert np.abs(to_numpy(result.plan.to_dense()) - half).max() <= (1e-9 if dtype == torch.float64 else 2e-3)
    limit = 1e-9 if dtype == torch.float64 else 2e-3
    assert np.abs(to_numpy(result.gradient("x")) - np.array([[0.5], [-0.5]])).max() <= limit
    assert np.abs(dense_hessian(result) - np.eye(2)).max() <= limit


@EVERYWHERE
@pytest.mark.parametrize("eps", [1e-6, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_O02_one_identical_point(backend: str, eps: float, scale: float) -> None:
    point = np.array([[1.0, 2.0]])
    result = solve(Case(point, point, eps=eps, cost_scale=scale), backend=backend)
    assert abs(float(result.value)) <= 1e-14 * max(1.0, eps)
    assert torch.count_nonzero(result.gradient("x")) == 0
    assert np.abs(dense_hessian(result) - 2 * scale * np.eye(2)).max() <= 1e-14


@EVERYWHERE
def test_O02_all_points_identical(backend: str) -> None:
    """The cost has no spread: no scale may be taken from it."""
    point = np.tile([[1.0, 2.0]], (4, 1))
    case = Case(point, point[:3], eps=0.5)
    result, exact = solve(case, backend=backend), case.truth()
    assert abs(float(result.value)) <= 1e-14
    assert np.abs(dense_hessian(result) - exact.hessian("x")).max() <= 1e-12


@pytest.mark.parametrize("name", ["x", "y", "a", "b"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_O02_non_finite_input_is_named(name: str, bad: float) -> None:
    case = case_S(3, 4, 2, 1.0)
    arrays = {key: torch.tensor(getattr(case, key)) for key in ("x", "y", "a", "b")}
    arrays[name].view(-1)[1] = bad
    with pytest.raises(ValueError, match=rf"^{name} must be finite.*{'nan' if bad != bad else 'inf'}"):
        otn.OTProblem(**arrays, eps=1.0)


@EVERYWHERE
def test_O03_zero_weights(backend: str) -> None:
    row, keep, dead = OT_ROWS["O3"], [0, 2, 3], [1, 4]
    case = row.case
    result = solve(case, backend=backend)
    small = case.with_(x=case.x[keep], a=np.asarray(case.a)[keep])
    reduced = solve(small, backend=backend)
    assert_printed(result.value, row.value)
    assert abs(float(result.value) - float(reduced.value)) <= 1e-14
    gradient, h = to_numpy(result.gradient("x")), dense_hessian(result)
    for found, printed in zip(gradient[0], row.gradient, strict=True):
        assert_printed(found, str(printed))
    assert np.abs(gradient[keep] - to_numpy(reduced.gradient("x"))).max() <= 1e-14
    assert np.array_equal(gradient[dead], np.zeros((2, 2)))
    live = [0, 1, 4, 5, 6, 7]
    assert np.abs(h[np.ix_(live, live)] - dense_hessian(reduced)).max() <= 1e-14
    assert not np.delete(h, live, axis=0).any()
    assert not np.delete(h, live, axis=1).any()
    spectrum = np.linalg.eigvalsh(h)
    assert_printed(spectrum[-1], str(row.lambda_max))
    assert_printed(spectrum.sum(), str(row.trace))
    assert_printed(np.linalg.eigvalsh(h[np.ix_(live, live)])[0], ".1718125237")


@EVERYWHERE
@DTYPES
@pytest.mark.parametrize("rho", [None, 0.7])
def test_O03_zero_weights_of_both_sides(rho: float | None, dtype: torch.dtype, backend: str) -> None:
    """Atoms of no mass share a far place, where the bare kernel overflows: exact zeros, nothing NaN."""
    case = rounded(far_zero_atoms().with_(rho_x=rho), dtype)
    result, exact = solve(case, dtype, backend=backend), case.truth()
    assert_close(result.value, exact.value, "value", dtype)
    for wrt in ("x", "y", "a", "b"):
        assert_close(result.gradient(wrt), exact.gradient(wrt), "gradient", dtype)
    h = dense_hessian(result, "xy")
    assert_close(h, exact.hessian("xy"), "hvp", dtype)
    dead = np.repeat(np.concatenate([case.a, case.b]) == 0, 2)  # type: ignore[arg-type, list-item]
    assert not h[dead].any()
    assert not h[:, dead].any()


@EVERYWHERE
@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_O04_common_translation_in_float32(offset: float, backend: str) -> None:
    """Against float64 on the same shifted and rounded inputs."""
    base = seeded(20, 25, 3, 0.25, seed=4)
    case = rounded(base.with_(x=base.x + offset, y=base.y + offset), torch.float32)
    result, exact = solve(case, torch.float32, backend=backend), case.truth()
    assert relative_error(result.value, exact.value) <= 1e-5
    assert relative_error(result.cost, exact.cost) <= 1e-5
    assert relative_error(result.plan.to_dense(), exact.plan) <= 1e-5
    assert relative_error(dense_hessian(result), exact.hessian("x")) <= 1e-5


@EVERYWHERE
def test_O04_exact_translation_in_float32(backend: str) -> None:
    """Coordinates on multiples of 2^-13 lose nothing when moved by 1000: the plan is the same."""
    base = seeded(20, 25, 3, 0.25, seed=5)
    grid = base.with_(x=np.round(base.x * 2**13) / 2**13, y=np.round(base.y * 2**13) / 2**13)
    moved = grid.with_(x=grid.x + 1000, y=grid.y + 1000)
    here, there = (solve(case, torch.float32, backend=backend) for case in (grid, moved))
    assert relative_error(there.value, here.value) <= 1e-5
    assert relative_error(there.plan.to_dense(), here.plan.to_dense()) <= 1e-5
    assert relative_error(there.gradient("x"), here.gradient("x")) <= 1e-5
    assert relative_error(dense_hessian(there), dense_hessian(here)) <= 1e-5


@EVERYWHERE
def test_O04_clouds_far_from_each_other_in_float32(backend: str) -> None:
    """Own means: a separation of 100 costs the plan nothing."""
    base = seeded(20, 25, 3, 0.25, seed=6)
    case = rounded(base.with_(y=base.y + 100), torch.float32)
    result, near = solve(case, torch.float32, backend=backend), case.with_(y=case.y - 100).truth()
    added = 3e4 - 200 * (case.x.mean(0) - (case.y - 100).mean(0)).sum()
    assert relative_error(result.value, near.value + added) <= 1e-6
    assert relative_error(result.cost, near.cost + added) <= 1e-6
    assert relative_error(result.plan.to_dense(), near.plan) <= 1e-5
    assert relative_error(result.gradient("x"), near.gradient("x") - 200 / 20) <= 1e-5
    assert relative_error(dense_hessian(result), near.hessian("x")) <= 1e-5


@EVERYWHERE
@DTYPES
def test_O05_coincident_points(dtype: torch.dtype, backend: str) -> None:
    """No square root: derivatives at coincident points are finite and right."""
    result = solve(pitchfork(0.0, 1.0), dtype, backend=backend)
    limit = 1e-14 if dtype == torch.float64 else 1e-6
    assert np.abs(to_numpy(result.gradient("x"))).max() <= limit
    assert np.abs(dense_hessian(result) - np.array([[0.0, 1.0], [1.0, 0.0]])).max() <= 10 * limit


@EVERYWHERE
def test_O06_duplicate_points(backend: str) -> None:
    case, row = duplicates(), OT_ROWS["O6"]
    result = solve(case, backend=backend)
    assert_printed(result.value, row.value)
    merged = case.with_(x=case.x[1:], a=np.array([0.4, 0.2, 0.4]))
    assert abs(float(solve(merged, backend=backend).value) - float(result.value)) <= 1e-13
    direction = torch.tensor([10, 0, -1 / 0.3, 0, 0, 0, 0, 0], dtype=torch.float64)
    product = to_numpy(result.hessian("x") @ direction)
    assert_printed(product[0], ".199317150721")
    assert_printed(product[1], ".746442951646")
    assert np.abs(product[2:4] + product[:2]).max() <= 1e-12
    assert not product[4:].round(12).any()
    plan = to_numpy(result.plan.to_dense())[0]
    centred = case.y - plan @ case.y / plan.sum()
    covariance = (centred.T * plan) @ centred / plan.sum()
    closed = (2 * np.eye(2) - 4 / case.eps * covariance)[:, 0]
    assert np.abs(product[:2] - closed).max() <= 1e-12
    assert_printed(np.linalg.eigvalsh(dense_hessian(result))[0], str(row.lambda_min))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((0, 2), (7, 2)), r"^x has no points"),
        (((7, 2), (0, 2)), r"^y has no points"),
        (((0, 2), (0, 2)), r"^x has no points"),
        (((3, 0), (7, 0)), r"^x has dimension d = 0"),
        (((3, 2), (7, 3)), r"^x and y must share.*\(3, 2\).*\(7, 3\)"),
        (((3,), (7, 2)), r"^x must have shape.*\(3,\)"),
        (((0, 3, 2), (0, 7, 2)), r"^x has an empty batch"),
    ],
)
def test_O07_empty_clouds(shapes: tuple[tuple[int, ...], tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        otn.OTProblem(torch.zeros(shapes[0]), torch.zeros(shapes[1]), eps=1.0)


@EVERYWHERE
@pytest.mark.parametrize("sizes", [(1, 7), (7, 1), (1, 1)], ids=str)
def test_O07_single_points(sizes: tuple[int, int], backend: str) -> None:
    case = case_S(*sizes, 2, 0.3)
    result, exact = solve(case, backend=backend), case.truth()
    assert_close(result.value, exact.value, "value")
    assert np.abs(dense_hessian(result, "xy") - exact.hessian("xy")).max() <= 1e-12


@EVERYWHERE
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_O11_half_precision_computes_in_float32(half: torch.dtype, backend: str) -> None:
    case = case_S(9, 11, 3, 0.3)
    x, y = (torch.tensor(t).to(half) for t in (case.x, case.y))
    low = otn.sinkhorn(otn.OTProblem(x, y, eps=0.3), backend=backend)
    high = otn.sinkhorn(otn.OTProblem(x.float(), y.float(), eps=0.3), backend=backend)
    assert low.value.dtype == low.hessian("x").dtype == torch.float32
    assert relative_error(low.value, high.value) <= 1e-5
    assert relative_error(low.gradient("x"), high.gradient("x")) <= 1e-5
    assert relative_error(dense_hessian(low), dense_hessian(high)) <= 1e-5
    exact = truth.solve(x.double().numpy(), y.double().numpy(), eps=0.3)
    assert relative_error(low.value, exact.value) <= 1e-5


def test_O12_mixed_dtypes_are_promoted() -> None:
    case = case_S(5, 7, 2, 0.5)
    x, y = torch.tensor(case.x, dtype=torch.float32), torch.tensor(case.y, dtype=torch.float64)
    for one, two in ((x, y), (y, x)):
        result = otn.sinkhorn(otn.OTProblem(one, two, eps=0.5))
        assert result.value.dtype == result.f.dtype == result.gradient("y").dtype == torch.float64
    exact = truth.solve(x.double().numpy(), case.y, eps=0.5)
    assert_close(otn.sinkhorn(otn.OTProblem(x, y, eps=0.5)).value, exact.value, "value")
    assert otn.OTProblem(x, y.to(torch.float16), eps=0.5).dtype == torch.float32
    assert otn.OTProblem(x, y.numpy(), eps=0.5).dtype == torch.float64


@pytest.mark.parametrize("name", ["y", "a", "b"])
def test_O12_mixed_devices_are_refused(name: str) -> None:
    """Any second device will do: "meta" exists everywhere."""
    case = case_S(5, 7, 2, 0.5)
    arrays = {key: torch.tensor(getattr(case, key)) for key in ("x", "y", "a", "b")}
    arrays[name] = arrays[name].to("meta")
    with pytest.raises(ValueError, match=rf"^{name} is on device meta.*cpu"):
        otn.OTProblem(**arrays, eps=0.5)


@pytest.mark.parametrize("n", [3, 5, 7, 1000])
def test_O12_masses_of_other_precision_are_accepted(n: int) -> None:
    """Uniform weights in float32 and in float64 differ by 1e-8: one mass, scaled, no error."""
    x, y = torch.randn(n, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    a = torch.full((n,), 1 / n, dtype=torch.float32)
    problem = otn.OTProblem(x, y, a, torch.full((5,), 0.2, dtype=torch.float64), eps=1.0)
    assert float(abs(problem.a.sum() - problem.b.sum())) <= 1e-15
    assert float(abs(problem.b_factor - 1)) <= 1e-6


@EVERYWHERE
@pytest.mark.parametrize("row", EXACT_ROWS, ids=repr)
def test_O13_float64_in_float64_out(row: Row, backend: str) -> None:
    result = solve(row.case, backend=backend)
    for tensor in (result.f, result.g, result.value, result.cost, result.gradient("x")):
        assert tensor.dtype == torch.float64
    assert abs(float(result.value) - float(row.value)) <= 1e-12 * float(row.value)


def _views(t: torch.Tensor) -> list[Any]:
    """The same numbers: transposed, strided, expanded storage, F order, negative strides, big-endian."""
    spaced = torch.full((2 * t.shape[0], *t.shape[1:]), float("nan"), dtype=t.dtype)
    spaced[::2] = t
    views: list[Any] = [t.t().contiguous().t(), spaced[::2], t.unsqueeze(0).expand(1, *t.shape)[0]]
    array = t.numpy()
    views += [np.asfortranarray(array), np.ascontiguousarray(array[::-1])[::-1]]
    read_only = array.copy()
    read_only.setflags(write=False)
    return [*views, read_only, array.astype(array.dtype.newbyteorder(">")), array.tolist()]


@EVERYWHERE
def test_O14_layouts_give_the_same_bits(backend: str) -> None:
    case = case_S(9, 7, 3, 0.5)
    x, y, a, b = (torch.tensor(t) for t in case.arrays)
    expected = otn.sinkhorn(otn.OTProblem(x, y, a, b, eps=0.5), backend=backend)
    v = torch.randn(27, 4, dtype=torch.float64)
    product = expected.hessian("x") @ v
    for vx, vy, va, vb in zip(_views(x), _views(y), _views(a), _views(b), strict=True):
        result = otn.sinkhorn(otn.OTProblem(vx, vy, va, vb, eps=0.5), backend=backend)
        assert torch.equal(result.value, expected.value)
        assert torch.equal(result.gradient("x"), expected.gradient("x"))
        assert torch.equal(result.hessian("x") @ v.t().contiguous().t(), product)


@EVERYWHERE
def test_O14_expanded_clouds(backend: str) -> None:
    """One point expanded to many, and a batch expanded from one problem."""
    x = torch.tensor([[0.3, -0.2]], dtype=torch.float64).expand(5, 2)
    y = torch.randn(7, 2, dtype=torch.float64)
    one = otn.sinkhorn(otn.OTProblem(x, y, eps=0.5), backend=backend)
    two = otn.sinkhorn(otn.OTProblem(x.contiguous(), y, eps=0.5), backend=backend)
    assert torch.equal(one.gradient("x"), two.gradient("x"))
    batch = otn.sinkhorn(otn.OTProblem(x.expand(3, 5, 2), y, eps=0.5), backend=backend)
    for lane in range(3):
        assert relative_error(batch.gradient("x")[lane], two.gradient("x")) <= 1e-12


@EVERYWHERE
@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 256), (3, 1, 256), (3, 9, 7), (1, 9, 7)], ids=str)
def test_O15_batch_equals_loop(shape: tuple[int, int, int], dtype: torch.dtype, backend: str) -> None:
    count, n, m = shape
    x, y = torch.randn(count, n, 2, dtype=dtype), torch.randn(count, m, 2, dtype=dtype)
    a, b = torch.rand(count, n, dtype=dtype) + 0.2, torch.rand(count, m, dtype=dtype) + 0.2
    a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
    # float32 lanes may stop one iteration apart, by rounding of the error: there a fixed number of them.
    options = {} if dtype == torch.float64 else {"tol": 0, "max_iter": 150}
    batch = otn.sinkhorn(otn.OTProblem(x, y, a, b, eps=1.0), backend=backend, **options)
    assert batch.converged.shape == batch.n_iter.shape == batch.value.shape == (count,)
    v = torch.randn(count, n * 2, 3, dtype=dtype)
    product = batch.hessian("x") @ v
    for lane in range(count):
        own_problem = otn.OTProblem(x[lane], y[lane], a[lane], b[lane], eps=1.0)
        alone = otn.sinkhorn(own_problem, backend=backend, **options)
        assert int(batch.n_iter[lane]) == alone.n_iter
        assert relative_error(batch.value[lane], alone.value) <= 1e-6
        assert relative_error(batch.gradient("x")[lane], alone.gradient("x")) <= 1e-6
        own = alone.hessian("x") @ v[lane]
        limit = 1e-6 if dtype == torch.float64 else 1e-5
        assert relative_error(product[lane], own) <= limit
        assert relative_error(batch[lane].hessian("x") @ v[lane], own) <= limit


@EVERYWHERE
def test_O15_singleton_batches_broadcast(backend: str) -> None:
    x, y = torch.randn(1, 6, 2, dtype=torch.float64), torch.randn(4, 8, 2, dtype=torch.float64)
    a = torch.rand(4, 6, dtype=torch.float64) + 0.2
    a = a / a.sum(-1, keepdim=True)
    for weights in (None, a):
        batch = otn.sinkhorn(otn.OTProblem(x, y, weights, eps=1.0), backend=backend)
        assert batch.gradient("x").shape == (4, 6, 2)
        for lane in range(4):
            own = None if weights is None else weights[lane]
            alone = otn.sinkhorn(otn.OTProblem(x[0], y[lane], own, eps=1.0), backend=backend)
            assert relative_error(batch.gradient("x")[lane], alone.gradient("x")) <= 1e-9
    with pytest.raises(ValueError, match=r"batch dimensions must broadcast.*\(3,\).*\(4,\)"):
        otn.OTProblem(torch.randn(3, 6, 2), torch.randn(4, 8, 2), eps=1.0)


@EVERYWHERE
def test_O17_seven_hundred_dimensions(backend: str) -> None:
    row = OT_ROWS["O17"]
    case = row.case
    result, exact = solve(case, backend=backend), case.truth()
    assert abs(float(result.value) - float(row.value)) <= 1e-12 * float(row.value)
    assert abs(float(result.cost) - float(str(row.cost))) <= 1e-12 * float(row.value)
    assert_printed(np.linalg.norm(to_numpy(result.gradient("x"))), "16.1850953110")
    h, v = result.hessian("x"), np.random.default_rng(0).standard_normal((4200, 3))
    product = to_numpy(h @ torch.tensor(v))
    for k in range(3):
        assert_close(product[:, k], exact.product("x", v[:, k]), "hvp")
    # On the span of the clouds (11 dimensions) H is a 66 x 66 matrix, elsewhere it is 2 diag(r).
    basis = np.linalg.qr(np.concatenate([case.x, case.y]).T)[0]
    lift = np.kron(np.eye(6), basis)
    small = lift.T @ to_numpy(h @ torch.tensor(lift))
    spectrum = np.linalg.eigvalsh(small)
    assert_printed(spectrum[0], str(row.lambda_min), "lambda_min")
    outside = np.kron(np.eye(6), (np.eye(700) - basis @ basis.T)[:, :1])
    rest = to_numpy(h @ torch.tensor(outside))
    assert np.abs(rest - outside / 3).max() <= 1e-9
    assert_printed(spectrum.sum() + (700 - 11) * 6 / 3, str(row.trace), "trace")
    assert max(spectrum[-1], 1 / 3) <= 1 / 3 + 1e-9


@EVERYWHERE
@DTYPES
@pytest.mark.parametrize("d", [1023, 1024, 1025, 2049])
def test_O17_more_dimensions(d: int, dtype: torch.dtype, backend: str) -> None:
    case = rounded(case_S(6, 5, d, 10.0, uniform=True), dtype)
    # A count, since the rounding floor, the smallest tolerance, is 5e-5 in float32 here.
    result, exact = otn.sinkhorn(problem_of(case, dtype), tol=0.0, max_iter=30, backend=backend), case.truth()
    assert_close(result.value, exact.value, "value", dtype)
    assert_close(result.gradient("x"), exact.gradient("x"), "gradient", dtype)
    v = np.random.default_rng(1).standard_normal(6 * d)
    product = result.hessian("x") @ torch.tensor(v, dtype=dtype)
    assert_close(product, exact.product("x", to_numpy(torch.tensor(v, dtype=dtype))), "hvp", dtype)


def test_O17_problem_repr_is_short() -> None:
    assert len(repr(problem_of(OT_ROWS["O17"].case))) < 200
