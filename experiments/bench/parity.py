"""Table `loss-parity`: value and gradient of every library on one problem, in float64.

Three problems: balanced, the divergence, and relaxed marginals ("unbalanced"), weights not uniform. Two
rules: a count of iterations, where each library is compared with float64 iterations in its own order of
updates, and to convergence, where all are compared with one fixed point. Errors are relative; the reference
is `reference`, which shares no code with any of them. A row with a bound that it exceeds has the status
WRONG, and the command then ends with 1.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ot_newton.experiments.bench.harness import reason_of
from ot_newton.experiments.bench.reference import SCHEMES, Pair, Softmins, Terms, converge, dense_terms
from ot_newton.experiments.bench.roofline import OneThread
from ot_newton.experiments.bench.settings import Settings
from ot_newton.experiments.bench.tasks import Rule
from ot_newton.problem import OTProblem

__all__ = ["LIBRARIES", "Library", "make_problem", "rows"]

Row = dict[str, Any]
EPS, RHO, COUNT = 0.1, 0.5, 10
SIZES = (60, 50, 3)
KINDS = ("balanced", "divergence", "unbalanced")
TIGHT = 1e-11
OUR_BOUND, PEER_BOUND = 1e-9, 1e-6
FIRST_ORDER = 1e-5
"""GeomLoss's value of a relaxed problem is no dual value: of first order in the error of its potentials."""

SMOOTH = {"balanced": PEER_BOUND, "divergence": PEER_BOUND}
"""Its gradient of a relaxed problem is reported: it lacks a factor `(rho + eps)/(rho + eps/2)`."""


@dataclass(frozen=True)
class Library:
    """Who is compared.

    Attributes:
        name: in the rows.
        module: with ``loss(problem, rule, debias=)``.
        orders: of its updates: with hard marginals, with relaxed ones, in a self term OT(x, x).
        value: bound on the error of its converged value, by kind; kinds without one are reported.
        gradient: bound on that of its gradient.
        converges: its stopping rule to convergence, in words.
        converged: and as it is asked for.
        formula: "dual" (MATH 3), "sides" (the dual's without the plan's mass, relaxed sides weighted by
        `rho + eps/2`:
            the same at convergence) or "primal" (of its plan).
        counted: whether it has rows at a count of iterations.
    """

    name: str
    module: str
    orders: tuple[str, str, str]
    value: dict[str, float]
    gradient: dict[str, float]
    converges: str
    converged: Rule = Rule(tol=TIGHT)
    formula: str = "dual"
    counted: bool = True

    def order(self, problem: OTProblem) -> str:
        """Of the cross term's updates."""
        return self.orders[0 if problem.balanced else 1]


def _all(bound: float) -> dict[str, float]:
    return dict.fromkeys(KINDS, bound)


LIBRARIES: tuple[Library, ...] = (
    Library(
        "ot-newton",
        "ours",
        orders=("x first", "x first", "self"),
        value=_all(OUR_BOUND),
        gradient=_all(OUR_BOUND),
        converges=f"L1 marginal error <= {TIGHT:g}",
    ),
    Library(
        "OTT-JAX",
        "peer_ott",
        orders=("y first, unweighted", "y first", "parallel"),
        value=_all(PEER_BOUND),
        gradient=_all(PEER_BOUND),
        converges=f"its test <= {TIGHT:g}, every 10 iterations",
    ),
    Library(
        "GeomLoss",
        "peer_geomloss",
        orders=("geomloss",) * 3,
        value=_all(PEER_BOUND) | {"unbalanced": FIRST_ORDER},
        gradient={},
        converges="annealing, scaling .9999",
        formula="sides",
    ),
    Library(
        "GeomLoss, one temperature",
        "peer_geomloss",
        orders=("geomloss",) * 3,
        value=_all(PEER_BOUND),
        gradient=SMOOTH,
        converges="1000 iterations",
        converged=Rule(1000),
        formula="sides",
        counted=False,
    ),
    Library(
        "POT",
        "peer_pot",
        orders=("y first, unweighted", "x first", "y first, unweighted"),
        value=_all(PEER_BOUND),
        gradient=_all(PEER_BOUND),
        converges=f"its test <= {TIGHT:g}",
        formula="primal",
    ),
)


def make_problem(kind: str, seed: int = 0) -> OTProblem:
    """Uniform clouds in the cube with zero weighted means, random weights, float64."""
    generator = torch.Generator().manual_seed(seed)
    n, m, d = SIZES
    x, y = (torch.rand(k, d, generator=generator, dtype=torch.float64) for k in (n, m))
    a, b = (0.5 + torch.rand(k, generator=generator, dtype=torch.float64) for k in (n, m))
    a, b = a / a.sum(), b / b.sum()
    rho = RHO if kind == "unbalanced" else None
    return OTProblem(x - a @ x, y - b @ y, a, b, eps=EPS, rho_x=rho, rho_y=rho)


class _Reference:
    """Value and gradient at the end of a rule, in a library's order of updates."""

    def __init__(self, kind: str, rule: Rule) -> None:
        self.kind, self.rule = kind, rule
        self.problem = make_problem(kind)
        self.cross = Softmins(self.problem)
        p = self.problem
        own = [OTProblem(z, z, w, w, eps=p.eps) for z, w in ((p.x, p.a), (p.y, p.b))]
        self.own = [Softmins(problem) for problem in own] if kind == "divergence" else []
        self._exact: dict[int, Pair] = {}

    def _pairs(self, s: Softmins, scheme: str) -> tuple[Pair, Pair]:
        """Final potentials, and those of the plan that makes the gradient."""
        if self.rule.iterations:
            order = SCHEMES[scheme]
            return order.run(s, self.rule.iterations), order.gradient_pair(s, self.rule.iterations)
        if id(s) not in self._exact:
            self._exact[id(s)] = converge(s)
        return (self._exact[id(s)],) * 2

    def _terms(self, s: Softmins, scheme: str, formula: str) -> tuple[float, Terms]:
        """The value as the library has it, and the terms at the plan of its gradient."""
        final, plan = self._pairs(s, scheme)
        found = dense_terms(s, *final)
        value = {"dual": found.dual, "primal": found.primal, "sides": _sides(s.problem, final)}[formula]
        return value, dense_terms(s, *plan)

    def expected(self, library: Library) -> tuple[float, Any]:
        """Value and gradient in x."""
        value, at = self._terms(self.cross, library.order(self.problem), library.formula)
        gradient = at.gradient
        for number, term in enumerate(self.own):
            own, slopes = self._terms(term, library.orders[2], library.formula)
            value = value - own / 2
            if number == 0:  # x is both arguments of OT(x, x)
                one_sided = SCHEMES[library.orders[2]].last is not None
                gradient = (
                    gradient - (slopes.gradient + (slopes.gradient if one_sided else slopes.gradient_y)) / 2
                )
        return value, gradient.numpy()


def _sides(problem: OTProblem, pair: Pair) -> float:
    """`<w, h>`, relaxed `(rho + eps/2) <w, 1 - exp(-h/rho)>`, added up; masses are 1."""
    total = 0.0
    for weight, h, rho in zip((problem.a, problem.b), pair, (problem.rho_x, problem.rho_y), strict=True):
        phi = h if rho is None else -(rho + problem.eps / 2) * torch.expm1(-h / rho)
        total += float((weight * phi).sum())
    return total


def _row(library: Library, reference: _Reference) -> Row:
    """Errors of one library, or the reason why there are none."""
    kind = reference.kind
    counted = reference.rule.iterations > 0
    rule = reference.rule if counted else library.converged
    try:
        module = importlib.import_module(f"ot_newton.experiments.bench.{library.module}")
        with OneThread(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            answer = module.loss(reference.problem, rule, debias=kind == "divergence")
    except Exception as error:  # noqa: BLE001  a broken peer is a row
        return {"status": "ERROR", "message": reason_of(error)}
    value, gradient = reference.expected(library)
    f, g = (torch.as_tensor(np.array(answer[key], np.float64)) for key in "fg")
    out: Row = {
        "value": answer["value"],
        "value_error": abs(answer["value"] - value) / abs(value),
        "gradient_error": float(np.linalg.norm(answer["gradient"] - gradient) / np.linalg.norm(gradient)),
        "marginal_error": reference.cross.marginal_error(f, g),
    }
    out |= {key: answer[key] for key in ("iterations", "value_own") if answer.get(key) is not None}
    bounds = {} if counted else {"value": library.value.get(kind), "gradient": library.gradient.get(kind)}
    out |= {f"{name}_bound": bound for name, bound in bounds.items() if bound is not None}
    missed = [
        f"{name} off by {out[f'{name}_error']:.1e}, bound {bound:.0e}"
        for name, bound in bounds.items()
        if bound is not None and not out[f"{name}_error"] <= bound
    ]
    return out | ({"status": "WRONG", "message": "; ".join(missed)} if missed else {"status": "OK"})


def rows(settings: Settings) -> Iterator[Row]:
    """One row per library, problem and rule.

    Args:
        settings: not used; the problems have 60 and 50 points.

    Yields:
        The rows.
    """
    n, m, d = SIZES
    for kind in KINDS:
        for rule in (Rule(COUNT), Rule(tol=TIGHT)):
            reference = _Reference(kind, rule)
            for library in LIBRARIES:
                if rule.iterations and not library.counted:
                    continue
                scheme = SCHEMES[library.order(reference.problem)]
                how = f"{rule.text}; {scheme.about}" if rule.iterations else library.converges
                head: Row = {
                    "kind": "parity",
                    "contestant": library.name,
                    "problem": kind,
                    "rule": rule.name if rule.iterations else "converged",
                }
                head |= {"size": [n, m, d], "eps": EPS, "precision": "float64", "stopping": how}
                yield head | _row(library, reference)
