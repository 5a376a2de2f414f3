"""Dense float64 truth of the attention's surrogate by torch autograd; shares no code with the package.

The stopped base and the differentiated tail are written as in the definition, on the active tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

__all__ = ["Problem", "augment", "gaussian", "support", "truth"]


@dataclass(frozen=True)
class Problem:
    """One lane: q (n, d), k (m, d), v (m, p), cotangent (n, p), targets, support, steps, scale."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    bar: np.ndarray
    a: np.ndarray
    b: np.ndarray
    mask: np.ndarray
    base_steps: int
    tail_steps: int
    scale: float


def support(n: int, m: int, width: int, q_ids: Any = None, k_ids: Any = None) -> np.ndarray:
    """The band, cut by segments."""
    mask = np.abs(np.arange(n)[:, None] - np.arange(m)[None, :]) <= width
    if q_ids is not None:
        mask &= (np.asarray(q_ids)[:, None] == np.asarray(k_ids)[None, :]) & (np.asarray(q_ids)[:, None] >= 0)
    return mask


def gaussian(n: int, m: int, d: int, width: int, *, seed: int, **values: Any) -> Problem:
    """A random problem with unit targets."""
    rng = np.random.default_rng(seed)
    q, k, v, bar = (rng.normal(size=(length, d)) for length in (n, m, m, n))
    fields = {"a": np.ones(n), "b": np.ones(m), "base_steps": 4, "tail_steps": 2, "scale": 0.6}
    return Problem(q, k, v, bar, mask=support(n, m, width), **{**fields, **values})


def augment(problem: Problem, tokens: tuple[np.ndarray, ...], masses: tuple[float, float]) -> Problem:
    """The problem with one dustbin token (q, k, v) on both sides, meeting everything."""
    tq, tk, tv = (t.reshape(1, -1) for t in tokens)
    return replace(
        problem,
        q=np.concatenate([problem.q, tq]),
        k=np.concatenate([problem.k, tk]),
        v=np.concatenate([problem.v, tv]),
        bar=np.concatenate([problem.bar, 0 * problem.bar[:1]]),
        a=np.append(problem.a, masses[0]),
        b=np.append(problem.b, masses[1]),
        mask=np.pad(problem.mask, ((0, 1), (0, 1)), constant_values=True),
    )


def truth(problem: Problem, *, full: bool = False) -> dict[str, np.ndarray]:
    """Output, gradients and gradient in the scores; ``full`` differentiates the base too."""
    p = problem
    q, k, v, a, b = (
        torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (p.q, p.k, p.v, p.a, p.b)
    )
    rows, cols = torch.tensor(p.a > 0), torch.tensor(p.b > 0)
    scores = p.scale * q @ k.T
    scores.retain_grad()
    s = torch.where(torch.tensor(p.mask), scores, -torch.inf)[rows][:, cols]
    log_a, log_b = torch.log(a[rows]), torch.log(b[cols])
    right, left = torch.zeros_like(log_b), torch.zeros_like(log_a)
    for step in range(p.base_steps + p.tail_steps):
        if step == p.base_steps and not full:
            left, right = left.detach(), right.detach()
        left = log_a - torch.logsumexp(s + right[None, :], 1)
        right = log_b - torch.logsumexp(s + left[:, None], 0)
    if p.tail_steps == 0 and not full:
        left, right = left.detach(), right.detach()
    plan = torch.exp(s + left[:, None] + right[None, :])
    active = plan @ v[cols]
    out = torch.zeros(p.bar.shape, dtype=torch.float64).index_put((torch.nonzero(rows)[:, 0],), active)
    (out * torch.tensor(p.bar)).sum().backward()
    zero = torch.zeros(1, dtype=torch.float64)
    found = {"q": q, "k": k, "v": v, "a": a, "b": b, "scores": scores}
    gradients = {name: (zero if x.grad is None else x.grad).numpy() for name, x in found.items()}
    return {"out": out.detach().numpy(), "plan": plan.detach().numpy(), **gradients}
