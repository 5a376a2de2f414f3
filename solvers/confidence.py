"""How sure a Lanczos run is that no eigenvalue lies below a level.

A Ritz value bounds the smallest eigenvalue from above only; a lower bound holds with a probability over
the random start, which must be Gaussian and independent of everything seen before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["combined_failure", "kuczynski_wozniakowski", "posterior_failure", "run_failure"]


def kuczynski_wozniakowski(n: int, k: int, gap: float) -> float:
    """Bound on `P(theta_min - lambda_min > gap (lambda_max - lambda_min))` after k steps in dimension n.

    `1.648 sqrt(n) exp(-(2k-1) sqrt(gap))`; the gap is relative to the spread of the spectrum.
    Source: Kuczynski and Wozniakowski, SIAM J. Matrix Anal. Appl. 13 (1992).
    """
    if gap <= 0.0:
        return 1.0
    if gap >= 1.0 or k >= n:
        return 0.0
    return min(1.0, 1.648 * math.sqrt(n) * math.exp(-(2 * k - 1) * math.sqrt(gap)))


def posterior_failure(n: int, alpha: Sequence[float], beta: Sequence[float], level: float) -> float:
    """Bound on the probability that an eigenvalue below ``level`` was missed, from the run itself.

    The next Lanczos vector is `p_k(H) q_1` with `|p_k(H) q_1| = 1`, so the start's component gamma along
    an eigenvector of eigenvalue lambda obeys `|gamma| <= 1 / |p_k(lambda)|`. Left of the smallest Ritz
    value `|p_k|` falls monotonically, so an eigenvalue below ``level`` needs
    `|gamma| <= 1 / |p_k(level)|`: for a uniform unit start of probability at most
    `sqrt(2 n / pi) / |p_k(level)|`.
    Source: van Dorsselaer, Hochstenbach and van der Vorst, SIAM J. Matrix Anal. Appl. 22 (2000).

    Args:
        n: dimension of the space the start was drawn in.
        alpha: diagonal of T.
        beta: off-diagonals of T, then the norm of the last residual.
        level: must lie below the smallest Ritz value; otherwise the bound is 1.
    """
    log_p, ratio = 0.0, 0.0
    for j, (a, b) in enumerate(zip(alpha, beta, strict=True)):
        pivot = level - a - (beta[j - 1] / ratio if j else 0.0)
        if not pivot < 0.0:
            return 1.0
        if b <= 0.0:
            return 0.0
        ratio = pivot / b
        log_p += math.log(-ratio)
    log_failure = 0.5 * math.log(2.0 * n / math.pi) - log_p
    return math.exp(log_failure) if log_failure < 0.0 else 1.0


def run_failure(
    n: int, alpha: Sequence[float], beta: Sequence[float], level: float, theta: float, top: float
) -> float:
    """Failure probability of one run: twice the smaller of the two bounds (either may be used).

    Args:
        n: dimension.
        alpha: diagonal of T.
        beta: off-diagonals and the last residual norm.
        level: no eigenvalue is to lie below this.
        theta: smallest Ritz value.
        top: an upper bound of lambda_max.
    """
    if not theta > level:
        return 1.0
    # lambda_min < level puts the gap, relative to the spread, above this.
    gap = (theta - level) / max(top - level, theta - level)
    known = kuczynski_wozniakowski(n, len(alpha), gap)
    return min(1.0, 2.0 * min(known, posterior_failure(n, alpha, beta, level)))


def combined_failure(first: float, second: float) -> float:
    """Failure of two independent runs together: `c (1 - log c)` with `c` the product (Fisher).

    The runs choose their own lengths, so the product alone would be optimistic.
    """
    c = first * second
    return c * (1.0 - math.log(c)) if c > 0.0 else 0.0
