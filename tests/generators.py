"""Problems to test with: reference data, closed forms, and hypothesis strategies for random ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests import truth

__all__ = [
    "Case",
    "case_S",
    "cases",
    "duplicates",
    "far_zero_atoms",
    "one_target",
    "permutation",
    "pitchfork",
    "pitchfork_exact",
    "seeded",
    "single_source",
    "translations",
]

HALF = (0.5, 0.5)


@dataclass(frozen=True, eq=False)
class Case:
    """One problem in float64 numpy: what `OTProblem` and `truth.solve` both take."""

    x: np.ndarray
    y: np.ndarray
    a: np.ndarray | None = None
    b: np.ndarray | None = None
    eps: float = 1.0
    cost_scale: float = 1.0
    rho_x: float | None = None
    rho_y: float | None = None
    name: str = field(default="", compare=False)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """`x, y, a, b`."""
        return self.x, self.y, self.a, self.b

    @property
    def options(self) -> dict[str, float | None]:
        """Keyword arguments besides the arrays."""
        return {"eps": self.eps, "cost_scale": self.cost_scale, "rho_x": self.rho_x, "rho_y": self.rho_y}

    def truth(self) -> truth.Truth:
        """The dense float64 solution."""
        return truth.solve(*self.arrays, **self.options)

    def with_(self, **changes: Any) -> Case:
        """A changed copy."""
        return replace(self, **changes)

    def __repr__(self) -> str:
        """Short name for test ids and hypothesis reports."""
        shape = f"{self.x.shape[0]},{self.y.shape[0]},{self.x.shape[1]}"
        relaxed = "" if self.rho_x is None and self.rho_y is None else f" rho={self.rho_x},{self.rho_y}"
        return f"{self.name or f'Case({shape})'} eps={self.eps:g} s={self.cost_scale:g}{relaxed}"


def case_S(  # noqa: N802
    n: int, m: int, d: int, eps: float, *, cost_scale: float = 1.0, uniform: bool = False
) -> Case:
    """The reference data S(n,m,d) of the case tables; weights proportional to 1..n and m..1."""
    i, j = np.arange(n * d).reshape(n, d), np.arange(m * d).reshape(m, d)
    a, b = np.arange(1.0, n + 1), np.arange(m, 0.0, -1.0)
    if uniform:
        a, b = np.ones(n), np.ones(m)
    x, y = np.sin(1.3 * i + 0.7), np.cos(0.9 * j - 0.4) + 0.1
    return Case(x, y, a / a.sum(), b / b.sum(), eps, cost_scale, name=f"S({n},{m},{d})")


def pitchfork(u: float, eps: float, cost_scale: float = 1.0) -> Case:
    """x = {-u, u}, y = {-1, 1}, half weights."""
    half = np.array(HALF)
    x, y = np.array([[-u], [u]]), np.array([[-1.0], [1.0]])
    return Case(x, y, half, half, eps, cost_scale, name=f"pitchfork({u:g})")


def pitchfork_exact(u: float, eps: float, s: float = 1.0) -> dict[str, Any]:
    """Closed forms of the pitchfork: value, gradient, Hessian, P_11 and the Schur eigenvalue."""
    z = 2 * s * u / eps
    slope = s * (u - np.tanh(z))
    low = s * (1 - (2 * s / eps) / np.cosh(z) ** 2)
    plus, minus = np.array([1.0, 1.0]) / np.sqrt(2), np.array([-1.0, 1.0]) / np.sqrt(2)
    return {
        "value": s * (u**2 + 1) - eps * np.log(np.cosh(z)),
        "gradient": np.array([[-slope], [slope]]),
        "hessian": s * np.outer(plus, plus) + low * np.outer(minus, minus),
        "plan": 0.5 / (1 + np.exp(-2 * z)),
        "schur": 0.5 / np.cosh(z) ** 2,
        "lambda_minus": low,
    }


def single_source(m: int = 5, d: int = 2, eps: float = 0.3, cost_scale: float = 1.0) -> Case:
    """n = 1: H = 2 s I, value `sum b_j C_j`."""
    case = case_S(1, m, d, eps, cost_scale=cost_scale)
    return case.with_(name=f"n=1,m={m}")


def one_target(n: int = 5, d: int = 2, eps: float = 0.3, cost_scale: float = 1.0) -> Case:
    """m = 1: H = 2 s diag(a) (x) I."""
    case = case_S(n, 1, d, eps, cost_scale=cost_scale)
    return case.with_(name=f"n={n},m=1")


def permutation(n: int = 6, d: int = 2, eps: float = 1e-3, seed: int = 0) -> Case:
    """y is a shuffled x moved a little: the plan is a permutation / n and H = 2 s diag(a) (x) I."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(np.arange(n), np.arange(d), indexing="ij"), -1).sum(-1).astype(float)
    x = grid + 0.1 * rng.uniform(-1, 1, (n, d))
    y = x[rng.permutation(n)] + 0.05
    return Case(x, y, truth.uniform(n), truth.uniform(n), eps, name=f"permutation({n})")


def duplicates() -> Case:
    """The O6 problem: S(4,6,2) with x[1] = x[0]."""
    case = case_S(4, 6, 2, 0.2)
    x = case.x.copy()
    x[1] = x[0]
    return case.with_(x=x, a=np.array([0.1, 0.3, 0.2, 0.4]), b=truth.uniform(6), name="duplicates")


def far_zero_atoms() -> Case:
    """Zero-weight atoms of both clouds share a far place, where the bare kernel overflows."""
    case = case_S(5, 7, 2, 0.3)
    x, y = case.x.copy(), case.y.copy()
    x[1] = y[3] = (40.0, -30.0)
    a, b = np.array([0.5, 0, 0.2, 0.3, 0.0]), np.array([0.2, 0.1, 0.2, 0.0, 0.1, 0.3, 0.1])
    return case.with_(x=x, y=y, a=a, b=b, name="far zero atoms")


def seeded(n: int, m: int, d: int, eps: float, *, seed: int = 0, **options: Any) -> Case:
    """Uniform cube, uniform weights, seeded."""
    rng = np.random.default_rng(seed)
    x, y = rng.uniform(size=(n, d)), rng.uniform(size=(m, d))
    return Case(x, y, eps=eps, name=f"cube({n},{m},{d})", **options)


def _clouds(size: int, d: int) -> st.SearchStrategy[np.ndarray]:
    grid = st.integers(-256, 256).map(lambda k: k / 256)
    return hnp.arrays(np.float64, (size, d), elements=grid)


def _weights(size: int, zeros: bool) -> st.SearchStrategy[np.ndarray]:
    counts = hnp.arrays(np.int64, (size,), elements=st.integers(0 if zeros else 1, 8))
    return counts.map(lambda w: w / w.sum() if w.any() else np.full(size, 1 / size))


@st.composite
def cases(
    draw: Any, *, max_points: int = 6, max_dim: int = 3, zeros: bool = True, relaxed: bool = False
) -> Case:
    """Random problems: clouds on a grid in [-1,1]^d, rational weights, eps in [.1, 3], s in {.5, 1, 2}."""
    n, m = draw(st.integers(1, max_points)), draw(st.integers(1, max_points))
    d = draw(st.integers(1, max_dim))
    x, y = draw(_clouds(n, d)), draw(_clouds(m, d))
    a, b = draw(_weights(n, zeros)), draw(_weights(m, zeros))
    s = draw(st.sampled_from([0.5, 1.0, 2.0]))
    eps = s * draw(st.sampled_from([0.1, 0.25, 0.5, 1.0, 3.0]))
    penalties = st.sampled_from([None, 0.5, 2.0]) if relaxed else st.none()
    return Case(x, y, a, b, eps, s, draw(penalties), draw(penalties))


def translations(d: int) -> st.SearchStrategy[np.ndarray]:
    """Directions of a common translation, entries in [-1, 1], not all zero."""
    grid = st.integers(-8, 8).map(lambda k: k / 8)
    return hnp.arrays(np.float64, (d,), elements=grid).filter(lambda u: bool(np.any(u)))
