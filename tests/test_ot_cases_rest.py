"""Cases O27 and O36: solves of our own, and no compilation per shape."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from numba.core.dispatcher import Dispatcher

import ot_newton as otn
from ot_newton.backends import cpu_kernels
from tests.generators import case_S, seeded
from tests.helpers import problem_of, solve
from tests.tolerances import assert_close, to_numpy

PACKAGE = Path(otn.__file__).parent
FOREIGN = {"lineax", "optimistix", "jaxopt", "equinox", "torchsparsegradutils", "cola", "gpytorch"}


def test_O27_no_foreign_linear_solver_is_imported() -> None:
    """An upgrade elsewhere cannot break implicit differentiation: CG is `ot_newton.solvers.cg`."""
    roots = [PACKAGE, PACKAGE / "solvers", PACKAGE / "operators", PACKAGE / "backends"]
    found = {}
    for path in (file for root in roots for file in root.glob("*.py")):
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
        found[path.name] = names & FOREIGN
    assert len(found) > 30
    assert not any(found.values()), {name: bad for name, bad in found.items() if bad}


@pytest.mark.parametrize("eps", [0.5, 0.05])
def test_O27_own_cg_agrees_with_a_dense_solve(eps: float) -> None:
    """The Schur solution of the streaming path is that of numpy's pseudo-inverse."""
    case = case_S(9, 7, 2, eps)
    result = solve(case, backend="cpu")
    system = result.linearized.system()
    rhs = torch.tensor(np.random.default_rng(0).standard_normal((1, 7, 3)))
    rhs = rhs - rhs.sum(1, keepdim=True) / 7
    found = system.solve(rhs, 0 * rhs, 1e-12).w[0]
    dense = to_numpy(system.matmat(torch.eye(7, dtype=torch.float64)[None]))[0]
    expected = np.linalg.pinv(dense, rcond=1e-13) @ to_numpy(rhs)[0]
    found = found - found.mean(0)
    assert_close(found, expected - expected.mean(0), "hvp")


def signatures() -> dict[str, int]:
    """Compiled signatures of every CPU kernel."""
    functions = {name: getattr(cpu_kernels, name) for name in dir(cpu_kernels)}
    return {name: len(f.signatures) for name, f in functions.items() if isinstance(f, Dispatcher)}


def run(n: int, d: int, dtype: torch.dtype) -> None:
    result = otn.sinkhorn(problem_of(seeded(n, n + 1, d, 0.5, seed=n), dtype), backend="cpu")
    h = result.hessian("xy")
    h @ torch.ones(h.shape[0], dtype=dtype)
    h @ torch.ones(h.shape[0], 3, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_O36_a_new_size_compiles_nothing(dtype: torch.dtype) -> None:
    """Compiled once per dtype and dimension at most; nothing for another n, m or number of columns."""
    for d in (2, 40, 41):
        run(30, d, dtype)
    before = signatures()
    assert sum(before.values()) > 0
    for n, d in ((31, 2), (47, 2), (130, 2), (33, 40), (70, 41)):
        run(n, d, dtype)
    assert signatures() == before
    run(30, 42, dtype)
    assert sum(signatures().values()) <= sum(before.values()) + 1


def test_O36_nothing_is_tuned_behind_the_users_back() -> None:
    """The same call twice gives the same bits: no timing decides which code runs."""
    values = []
    for _ in range(2):
        result = otn.sinkhorn(problem_of(seeded(60, 50, 3, 0.1)), backend="cpu")
        values.append((result.value, result.f, result.hessian("x") @ torch.ones(180, dtype=torch.float64)))
    assert all(torch.equal(one, other) for one, other in zip(*values, strict=True))
