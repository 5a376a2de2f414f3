"""linear_operator's own test suite on our three operators, batched too, in both dtypes.

Only those checks are replaced whose call must raise here: derivatives in the operator's own tensors,
and everything that needs a positive definite matrix. Each of these asserts that it raises.
"""

from __future__ import annotations

import unittest
from typing import Any, ClassVar

import linear_operator
import pytest
import torch
from linear_operator import to_dense
from linear_operator.settings import linalg_dtypes
from linear_operator.test.linear_operator_test_case import (
    LinearOperatorTestCase,
    RectangularLinearOperatorTestCase,
)
from torch import Tensor

import ot_newton as otn

CONSTANT = "operator is a constant"
DEFINITE = "needs a positive definite matrix"


def make_result(dtype: torch.dtype, batch: tuple[int, ...], n: int, m: int, **options: Any) -> Any:
    """A solved problem with clouds and weights of a fixed seed."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)  # noqa: E731
    a, b = torch.softmax(0.3 * draw(n), -1), torch.softmax(0.3 * draw(m), -1)
    x, y, a, b = (t.to(dtype) for t in (draw(n, 2), draw(m, 2), a, b))
    b = b * (a.sum(-1, keepdim=True) / b.sum(-1, keepdim=True))
    return otn.sinkhorn(otn.OTProblem(x, y, a, b, eps=1.0, **options))


class Adapter:
    """What all cases share: the operator, its matrix, and the derivative checks."""

    seed = 0
    dtype: ClassVar[torch.dtype] = torch.float32
    batch: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def setUpClass(cls) -> None:
        cls.operator = cls.make()
        cls.matrix = cls.operator.to_dense()

    def setUp(self) -> None:
        super().setUp()
        self.former = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def tearDown(self) -> None:
        torch.set_default_dtype(self.former)
        super().tearDown()

    def create_linear_op(self) -> Any:
        return self.operator.to_linear_operator()

    def evaluate_linear_op(self, op: Any) -> Tensor:
        """The matrix of the operator that was wrapped, not of the wrapper."""
        return self.matrix.to(op.dtype).clone()

    def refuses(self, call: Any, match: str = DEFINITE) -> None:
        with pytest.raises(NotImplementedError, match=match):
            call()

    def check_products(self, product: Any, other: Any) -> None:
        """Values, derivative in the vector, and an error for a derivative in the operator."""
        op = self.create_linear_op()
        dense = self.evaluate_linear_op(op)
        one, two = (to_dense(other).clone().requires_grad_(True) for _ in range(2))
        given = one if isinstance(other, Tensor) else other
        found, expected = to_dense(product(op, given)), product(dense, two)
        self.assertAllClose(found, expected)
        weight = torch.randn_like(expected)
        if isinstance(other, Tensor):
            found.backward(weight)
            expected.backward(weight)
            self.assertAllClose(one.grad, two.grad)
        op = self.create_linear_op().detach().requires_grad_(True)
        self.refuses(lambda: to_dense(product(op, other)).backward(weight), CONSTANT)

    def _test_matmul(self, rhs: Any) -> None:
        self.check_products(lambda op, v: op @ v, rhs)
        self.check_products(torch.matmul, rhs)

    def _test_rmatmul(self, lhs: Any) -> None:
        self.check_products(lambda op, v: v @ op, lhs)
        self.check_products(lambda op, v: torch.matmul(v, op), lhs)

    def test_half(self) -> None:
        op = self.create_linear_op()
        with pytest.raises(TypeError, match="float16"):
            op.half()


class Square(Adapter):
    """The checks of a symmetric operator whose call must raise here, or that differentiate the operator."""

    should_call_cg = False
    should_call_lanczos = False
    should_call_lanczos_diagonalization = False

    def _test_solve(self, rhs: Tensor, lhs: Tensor | None = None, cholesky: bool = False) -> None:
        op = self.create_linear_op()
        inverse = self.evaluate_linear_op(op).inverse()
        ours, theirs = (
            [t.clone().requires_grad_(True) for t in (rhs, lhs) if t is not None] for _ in range(2)
        )
        found = linear_operator.solve(op, *ours) if len(ours) > 1 else torch.linalg.solve(op, *ours)
        expected = inverse @ theirs[0] if len(ours) == 1 else theirs[1] @ inverse @ theirs[0]
        self.assertAllClose(found, expected, rtol=1e-3, atol=1e-4)
        weight = torch.randn_like(expected)
        found.backward(weight)
        expected.backward(weight)
        for one, two in zip(ours, theirs, strict=True):
            self.assertAllClose(one.grad, two.grad, rtol=1e-3, atol=1e-4)
        op = self.create_linear_op().detach().requires_grad_(True)
        self.refuses(lambda: torch.linalg.solve(op, rhs.detach()).sum().backward(), CONSTANT)

    def test_eigh(self) -> None:
        for dtype in (torch.float64, torch.float32):
            op = self.create_linear_op().requires_grad_(True)
            dense = self.evaluate_linear_op(op)
            with linalg_dtypes(dtype):
                values, vectors = torch.linalg.eigh(op)
            vectors = vectors.to_dense()
            self.assertAllClose(values, torch.linalg.eigvalsh(dense))
            self.assertAllClose(vectors @ torch.diag_embed(values) @ vectors.mT, dense)
            self.refuses(lambda values=values: values.sum().backward(), CONSTANT)

    def test_eigvalsh(self) -> None:
        for dtype in (torch.float64, torch.float32):
            op = self.create_linear_op().requires_grad_(True)
            with linalg_dtypes(dtype):
                values = torch.linalg.eigvalsh(op)
            self.assertAllClose(values, torch.linalg.eigvalsh(self.evaluate_linear_op(op)))
            self.refuses(lambda values=values: values.sum().backward(), CONSTANT)

    def test_svd(self) -> None:
        op = self.create_linear_op().requires_grad_(True)
        dense = self.evaluate_linear_op(op)
        left, values, right = torch.linalg.svd(op)
        self.assertAllClose(values, torch.linalg.svdvals(dense))
        self.assertAllClose(left.to_dense() @ torch.diag_embed(values) @ right.to_dense(), dense)
        self.refuses(lambda: values.sum().backward(), CONSTANT)

    def test_bilinear_derivative(self) -> None:
        op = self.create_linear_op()
        left, right = torch.randn(*op.shape[:-1], 2), torch.randn(*op.shape[:-1], 2)
        assert set(op._bilinear_derivative(left, right)) == {None}
        self.refuses(lambda: op.requires_grad_(True)._bilinear_derivative(left, right), CONSTANT)

    def test_cholesky(self) -> None:
        op = self.create_linear_op()
        self.refuses(lambda: torch.linalg.cholesky(op))
        self.refuses(op._cholesky)

    def test_logdet(self) -> None:
        op = self.create_linear_op()
        for one in (op, op.add_jitter(0.5), 2 * op, op + torch.randn(*op.shape), op[..., :3, :3]):
            self.refuses(lambda one=one: torch.logdet(one))

    def _test_inv_quad_logdet(
        self, reduce_inv_quad: bool = True, cholesky: bool = False, linear_op: Any = None
    ) -> None:
        op = self.create_linear_op()
        vector = torch.randn(*op.shape[:-1], 3)
        self.refuses(
            lambda: op.inv_quad_logdet(inv_quad_rhs=vector, logdet=True, reduce_inv_quad=reduce_inv_quad)
        )
        self.refuses(lambda: linear_operator.inv_quad(op, vector, reduce_inv_quad))

    def test_root_decomposition(self, cholesky: bool = False) -> None:
        op = self.create_linear_op()
        self.refuses(lambda: linear_operator.root_decomposition(op))
        self.refuses(lambda: linear_operator.pivoted_cholesky(op, 2))

    def test_root_decomposition_cholesky(self) -> None:
        op = self.create_linear_op()
        self.refuses(lambda: op.root_decomposition(method="cholesky"))

    def test_root_inv_decomposition(self) -> None:
        op = self.create_linear_op()
        self.refuses(lambda: linear_operator.root_inv_decomposition(op))

    def test_sqrt_inv_matmul(self) -> None:
        op = self.create_linear_op()
        vector = torch.randn(*op.shape[:-1], 3)
        self.refuses(lambda: linear_operator.sqrt_inv_matmul(op, vector, vector.mT))

    def test_sqrt_inv_matmul_no_lhs(self) -> None:
        op = self.create_linear_op()
        self.refuses(lambda: linear_operator.sqrt_inv_matmul(op, torch.randn(*op.shape[:-1], 3)))

    def test_sample(self) -> None:
        op = self.create_linear_op()
        self.refuses(lambda: op.zero_mean_mvn_samples(10))

    def test_add_low_rank(self) -> None:
        op = self.create_linear_op()
        rows = torch.randn(*op.shape[:-1], 3)
        self.refuses(lambda: op.add_low_rank(rows))
        found = op.add_low_rank(rows, generate_roots=False)
        self.assertAllClose(found.to_dense(), self.evaluate_linear_op(op) + rows @ rows.mT)

    def test_cat_rows(self) -> None:
        op = self.create_linear_op()
        rows, corner = torch.randn(*op.shape[:-2], 1, op.shape[-1]), torch.rand(*op.shape[:-2], 1, 1)
        self.refuses(lambda: op.cat_rows(rows, corner))
        found = op.cat_rows(rows, corner, generate_roots=False, generate_inv_roots=False).to_dense()
        upper = torch.cat([self.evaluate_linear_op(op), rows], dim=-2)
        self.assertAllClose(found, torch.cat([upper, torch.cat([rows.mT, corner], dim=-2)], dim=-1))


class TestPlan(Adapter, RectangularLinearOperatorTestCase, unittest.TestCase):
    @classmethod
    def make(cls) -> Any:
        return make_result(cls.dtype, cls.batch, 5, 6).plan


class TestPlanTransposed64(TestPlan):
    dtype = torch.float64

    @classmethod
    def make(cls) -> Any:
        return make_result(cls.dtype, cls.batch, 5, 6).plan.T


class TestPlanBatch(TestPlan):
    batch = (3,)


class TestPlanTwoBatch64(TestPlan):
    dtype, batch = torch.float64, (2, 3)


class TestSchur(Square, LinearOperatorTestCase, unittest.TestCase):
    """One side relaxed: definite, so that the suite's random systems have solutions."""

    @classmethod
    def make(cls) -> Any:
        return make_result(cls.dtype, cls.batch, 5, 6, rho_x=1.0).schur()


class TestSchurNormalizedBatch64(TestSchur):
    dtype, batch = torch.float64, (3,)

    @classmethod
    def make(cls) -> Any:
        return make_result(cls.dtype, cls.batch, 5, 6, rho_x=1.0).schur("x", normalized=True)


class TestHessian(Square, LinearOperatorTestCase, unittest.TestCase):
    @classmethod
    def make(cls) -> Any:
        return make_result(cls.dtype, cls.batch, 3, 4).hessian("x")


class TestHessianY64(TestHessian):
    dtype = torch.float64

    @classmethod
    def make(cls) -> Any:
        return make_result(cls.dtype, cls.batch, 4, 3).hessian("y")


class TestHessianBatch(TestHessian):
    batch = (3,)


class TestHessianTwoBatch64(TestHessian):
    dtype, batch = torch.float64, (2, 3)


del RectangularLinearOperatorTestCase, LinearOperatorTestCase  # abstract: not to be collected here
