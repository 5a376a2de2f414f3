"""Hessian-vector products to |g| = 1e-8, beside scipy: `python -m ot_newton.experiments.bench.solvers`.

Counts only, so a busy machine changes nothing. Three losses, ten starts each:

    rosenbrock   n = 100, starts uniform in [-2, 2]^n
    mlp          64-128-10, tanh, cross-entropy + 1e-3 |w|^2 / 2 on scikit-learn's digits (float64)
    regression   W -> OT_eps(X W, Y) of the shuffled-regression experiment, mixture of 120 rows, eps = .1

Both sides run on one counted loss. A run ends at the first accepted point with |g| <= 1e-8; where scipy ends
short of that (Newton-CG stops its CG where p^T H p, near |H| |g|^2, falls below 3 eps_mach, an absolute
threshold), both are compared at the |g| it reached, and the row says so. The products of our certificate,
which scipy has no counterpart of, are listed apart; everything else counts, on scipy's side also the
products by which it evaluates its model.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.experiments.bench.settings import Settings
from ot_newton.experiments.data import mixture, start
from ot_newton.experiments.regression_loss import RegressionLoss
from ot_newton.solvers.newton import NewtonCG
from ot_newton.solvers.scipy_bridge import scipy_hessp

__all__ = ["PROBLEMS", "Count", "compare", "count_newton", "count_rows", "count_scipy", "rows"]

Row = dict[str, Any]
GRADIENT_NORM = 1e-8
STARTS = 10
MAX_HVP = 100_000
MIXTURE_ROWS, MIXTURE_EPS = 120, 0.1
HIDDEN, PENALTY = 128, 1e-3
RIVALS = {"trust-region": ("trust-ncg", 0.8), "line-search": ("Newton-CG", 1.0)}
CERTIFICATE_SHARE = 0.15


@dataclass(frozen=True, eq=False)
class Count:
    """Gradient norms and products of one run.

    Attributes:
        trace: (gradient norm, products so far without certificates) at every accepted point.
        certificate: products of certificates.
        status: how it ended, in its own words.
    """

    trace: list[tuple[float, int]] = field(repr=False)
    certificate: int
    status: str

    @property
    def reached(self) -> float:
        """Smallest gradient norm."""
        return min(norm for norm, _ in self.trace)

    def products(self, level: float) -> int:
        """Products spent when the gradient norm first was at most ``level``.

        Raises:
            ValueError: it never was.
        """
        for norm, products in self.trace:
            if norm <= level:
                return products
        raise ValueError(
            f"level must have been reached, got {level:g} and a run that ended at {self.reached:g}"
        )


def rosenbrock(seed: int) -> tuple[Any, Tensor]:
    """The chained function of 100 variables and a start."""

    def loss(x: Tensor) -> Tensor:
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()

    draw = torch.rand(100, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return _aimed(loss), 4 * draw - 2


def mlp(seed: int) -> tuple[Any, Tensor]:
    """The network on the digits, and weights of variance 1 / fan-in."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images / 16.0, dtype=torch.float64)
    y = torch.as_tensor(labels)
    sizes = (x.shape[1] * HIDDEN, HIDDEN, HIDDEN * 10, 10)

    def loss(w: Tensor) -> Tensor:
        first, bias, last, offset = torch.split(w, list(sizes))
        hidden = torch.tanh(x @ first.view(-1, HIDDEN) + bias)
        scores = hidden @ last.view(HIDDEN, 10) + offset
        return torch.nn.functional.cross_entropy(scores, y) + 0.5 * PENALTY * (w @ w)

    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    scales = (x.shape[1] ** -0.5, 0.0, HIDDEN**-0.5, 0.0)
    return _aimed(loss), torch.cat([scale * part for scale, part in zip(scales, parts, strict=True)])


class _Regression(RegressionLoss):
    """The experiment's loss, its gradient test at the norm of this bench."""

    def noise_floor(self, w: Tensor) -> float:
        return max(GRADIENT_NORM, super().noise_floor(w))


def regression(seed: int) -> tuple[Any, Tensor]:
    """Problem 0 of the mixture and the experiment's start."""
    data = mixture(0, MIXTURE_ROWS)
    return _Regression(data.x, data.y, eps=MIXTURE_EPS), start(data, seed)


PROBLEMS: dict[str, Callable[[int], tuple[Any, Tensor]]] = {
    "rosenbrock": rosenbrock,
    "mlp": mlp,
    "regression": regression,
}


def _aimed(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Gradient norms below the bench's count as zero: an absolute test for a solver whose own is relative."""
    loss.noise_floor = GRADIENT_NORM  # type: ignore[attr-defined]
    return loss


def count_newton(loss: Any, x0: Tensor, method: str) -> Count:
    """Run ours with one of its methods; certificates and escapes as always."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = NewtonCG(loss, gtol=0.0, method=method, max_iter=5000, max_hvp=MAX_HVP).minimize(x0)
    trace, apart = [], 0
    for row in result.history:
        apart += row.hvps if row.kind == "certificate" else 0
        if row.accepted:
            trace.append((row.grad_norm, row.n_hvp - apart))
    return Count(trace, apart, result.status.name)


class _Spent(Exception):  # noqa: N818  not an error: the budget of a run
    """More products than a run may spend."""


def count_scipy(loss: Any, x0: Tensor, method: str) -> Count:
    """Run scipy's ``method`` on the same loss until |g| <= 1e-8 or until it gives up."""
    from scipy import optimize

    minimize: Any = optimize.minimize

    problem = scipy_hessp(loss, x0)
    counted = problem.objective
    assert counted is not None
    trace: list[tuple[float, int]] = []

    def watch(x: Any) -> None:
        trace.append((float(np.linalg.norm(problem.jac(x))), counted.n_hvp))
        if trace[-1][0] <= GRADIENT_NORM:
            raise StopIteration
        if counted.n_hvp >= MAX_HVP:
            raise _Spent

    flat = x0.reshape(-1).numpy()
    options: Row = {"maxiter": 100_000}
    options |= {"gtol": GRADIENT_NORM} if method.startswith("trust") else {"xtol": 0.0}
    trace.append((float(np.linalg.norm(problem.jac(flat))), 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = minimize(
                problem.fun,
                flat,
                jac=problem.jac,
                hessp=problem,
                method=method,
                callback=watch,
                options=options,
            )
            status = str(found.message)
        except _Spent:
            status = f"{MAX_HVP} products spent"
    return Count(trace, 0, "|g| reached" if trace[-1][0] <= GRADIENT_NORM else status)


def compare(name: str, seed: int, method: str, ours: Count, theirs: Count) -> Row:
    """One start: products of both at the norm that both reached."""
    level = max(GRADIENT_NORM, theirs.reached, ours.reached)
    n_hvp = ours.trace[-1][1]
    return {
        "kind": "count",
        "problem": name,
        "start": seed,
        "method": method,
        "rival": RIVALS[method][0],
        "hvps": ours.products(level),
        "rival_hvps": theirs.products(level),
        "grad_norm": level,
        "status": ours.status,
        "rival_status": theirs.status,
        "certificate_hvps": ours.certificate,
        "certificate_share": ours.certificate / max(n_hvp, 1),
    }


def summarize(name: str, method: str, n: int, counts: list[Row]) -> Row:
    """Geometric means over the starts beside the targets."""
    rival, target = RIVALS[method]

    def mean(key: str) -> float:
        return math.exp(sum(math.log(row[key]) for row in counts) / len(counts))

    ratio = mean("hvps") / mean("rival_hvps")
    allowed = [max(2 * n, CERTIFICATE_SHARE * row["hvps"]) for row in counts]
    within = all(row["certificate_hvps"] <= most for row, most in zip(counts, allowed, strict=True))
    return {
        "kind": "claim",
        "claim": f"{name}: HVPs of {method} over those of scipy's {rival}",
        "target": f"<= {target:g}x",
        "status": "MET" if ratio <= target else "MISSED",
        "ratio": ratio,
        "hvps": mean("hvps"),
        "rival_hvps": mean("rival_hvps"),
        "starts": len(counts),
        "short_of_norm": sum(row["grad_norm"] > GRADIENT_NORM for row in counts),
        "certificate_hvps": max(row["certificate_hvps"] for row in counts),
        "certificate_within": within,
    }


def rows(settings: Settings) -> Iterator[Row]:
    """Rows of `make bench`: all problems and starts; two starts of the small ones in a smoke run.

    Args:
        settings: only whether it is a smoke run is used.

    Yields:
        The rows.
    """
    if settings == Settings.smoke():
        yield from count_rows(("rosenbrock", "regression"), 2)
    else:
        yield from count_rows()


def count_rows(problems: tuple[str, ...] = tuple(PROBLEMS), starts: int = STARTS) -> Iterator[Row]:
    """A row per start and method, then one per claim.

    Args:
        problems: names in `PROBLEMS`.
        starts: seeds 0 to starts - 1.

    Yields:
        The rows.
    """
    for name in problems:
        n = 0
        found: dict[str, list[Row]] = {method: [] for method in RIVALS}
        for seed in range(starts):
            for method, (rival, _) in RIVALS.items():
                loss, x0 = PROBLEMS[name](seed)
                n = x0.numel()
                ours = count_newton(loss, x0, method)
                loss, x0 = PROBLEMS[name](seed)
                found[method].append(compare(name, seed, method, ours, count_scipy(loss, x0, rival)))
                yield found[method][-1]
        for method, counts in found.items():
            yield summarize(name, method, n, counts)


def main(arguments: list[str] | None = None) -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description="Hessian-vector products to |g| <= 1e-8, beside scipy")
    parser.add_argument("problems", nargs="*", choices=[*PROBLEMS, []], default=list(PROBLEMS))
    parser.add_argument("--starts", type=int, default=STARTS)
    chosen = parser.parse_args(arguments)
    write = sys.stdout.write
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "scipy", "scikit-learn"))
    write(f"float64, {versions}\n")
    for row in count_rows(tuple(chosen.problems), chosen.starts):
        cells = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        write("  ".join(cells) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
