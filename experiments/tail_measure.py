"""One case of `tail-exactness`: its arrays, its gradients by autodiff and by the limit, and the comparison.

Compared are the gradient of the library (the tail's adjoint), autodiff of the same surrogate and of the whole
recursion without a stop (both dense, in float64), and the gradient of the converged coupling, from the linear
system of its marginal equations, in numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ot_newton.attention.arguments import check_call
from ot_newton.attention.attend import tail_adjoint
from ot_newton.attention.bias import bias_certificate
from ot_newton.attention.contraction import contraction_certificate
from ot_newton.attention.core import lane_forward
from ot_newton.attention.duals import base_history, tail_duals
from ot_newton.attention.sweeps import Array, Config, Lane, make_sweeps

__all__ = ["Limit", "converged", "measure"]

NumpyArray = npt.NDArray[Any]
Gradients = tuple[Any, Any, Any]
SINKHORN_STEPS, NEWTON_STEPS, MARGINAL_TOL = 400, 60, 1e-12


class Limit(NamedTuple):
    """The converged coupling of one lane and its gradients.

    Attributes:
        dq: (n, d).
        dk: (m, d).
        dv: (m, p).
        plan: (n, m).
        marginal_error: largest deviation of its row and column sums from 1.
    """

    dq: NumpyArray
    dk: NumpyArray
    dv: NumpyArray
    plan: NumpyArray
    marginal_error: float


def _problem(settings: Mapping[str, Any]) -> tuple[NumpyArray, ...]:
    """Gaussian q, k, v and cotangent, (problems, n, d), representable in float32."""
    rng = np.random.default_rng(settings["seed"])
    shape = (settings["problems"], settings["n"], settings["d"])
    return tuple(rng.standard_normal(shape).astype(np.float32).astype(np.float64) for _ in range(4))


def measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Errors and biases of one case, depth and backend.

    Args:
        settings: `n`, `d`, `bandwidth`, `scale` (of the scores, in units of 1 / sqrt(d)), `base_steps`,
            `tail_steps`, `backend`, `problems` (lanes) and `seed`.
    """
    s = settings
    options: dict[str, Any] = {
        "bandwidth": s["bandwidth"],
        "base_steps": s["base_steps"],
        "tail_steps": s["tail_steps"],
        "scale": s["scale"] / s["d"] ** 0.5,
    }
    q, k, v, bar = _problem(s)
    with jax.enable_x64(True):
        surrogate = _autodiff(options, q, k, v, bar, through_base=False)
        whole = _autodiff(options, q, k, v, bar, through_base=True)
        ours = {}
        for dtype in ("float64", "float32"):
            cast = [jnp.asarray(x, dtype) for x in (q, k, v, bar)]
            found = tail_adjoint(*cast, **options, backend=s["backend"])
            ours[dtype] = tuple(np.asarray(x, np.float64) for x in (found.dq, found.dk, found.dv))
        arrays = [jnp.asarray(x) for x in (q, k, v, bar)]
        bias = bias_certificate(*arrays, **options, backend=s["backend"])
        contraction = contraction_certificate(arrays[0], arrays[1], **options)
    limits = [
        converged(q[h], k[h], v[h], bar[h], options["bandwidth"], options["scale"]) for h in range(len(q))
    ]
    limit = tuple(np.stack([getattr(one, name) for one in limits]) for name in ("dq", "dk", "dv"))
    dq, dk, dv = ours["float64"]
    corrected = (dq + np.asarray(bias.dq), dk + np.asarray(bias.dk), dv)
    return {
        "error_float64": _difference(ours["float64"], surrogate),
        "error_float32": _difference(ours["float32"], surrogate),
        "remainder_error": _difference(corrected, whole),
        "bias": [float(x) for x in bias.relative],
        "l1": [float(x) for x in bias.l1],
        "dobrushin_bound": [float(x) for x in bias.dobrushin_bound],
        "hilbert_bound": [float(x) for x in bias.hilbert_bound],
        "bias_qk": _difference(ours["float64"][:2], whole[:2]),
        "limit_error": _difference(ours["float64"][:2], limit[:2]),
        "limit_marginal_error": max(one.marginal_error for one in limits),
        "diameter": [float(x) if np.isfinite(x) else None for x in contraction.diameter],
        "log_gap": [float(x) if np.isfinite(x) else None for x in contraction.log_gap],
        "sigma2": [float(np.linalg.svd(one.plan, compute_uv=False)[1]) for one in limits],
    }


def _output(config: Config, through_base: bool, lane: Lane) -> Array:
    """One lane's output without the custom derivative."""
    if not through_base:
        return lane_forward(config, lane)[0]
    sweeps = make_sweeps(config, lane)
    history = base_history(sweeps, lane, config.base_steps)
    duals = tail_duals(sweeps, lane, history.rows[-1], history.cols[-1], config.tail_steps)
    return sweeps.row_apply(duals.rows[-1], duals.cols[-1], lane.v)


@partial(jax.jit, static_argnums=(0, 1))
def _pullback(config: Config, through_base: bool, lane: Lane, bar: Array) -> Gradients:
    """Cotangents of the lanes' scaled queries, keys and values."""

    def outputs(q: Array, k: Array, v: Array) -> Array:
        whole = lane._replace(q=q, k=k, v=v)
        return jax.vmap(lambda one: _output(config, through_base, one))(whole)

    return jax.vjp(outputs, lane.q, lane.k, lane.v)[1](bar)  # type: ignore[no-any-return]


def _autodiff(
    options: Mapping[str, Any],
    q: NumpyArray,
    k: NumpyArray,
    v: NumpyArray,
    bar: NumpyArray,
    *,
    through_base: bool,
) -> Gradients:
    """Dense autodiff in float64 of the surrogate, or of the whole recursion."""
    call = check_call(q, k, v, {**options, "backend": "reference"})  # type: ignore[typeddict-item]
    dq, dk, dv = _pullback(call.config, through_base, call.lane, jnp.asarray(bar))
    return options["scale"] * np.asarray(dq), np.asarray(dk), np.asarray(dv)


def _difference(found: Any, exact: Any) -> float:
    """Largest over the lanes of the relative error of the stacked arrays."""
    worst = 0.0
    for lane in range(len(found[0])):
        mine, truth = (np.concatenate([np.ravel(x[lane]) for x in arrays]) for arrays in (found, exact))
        worst = max(worst, float(np.linalg.norm(mine - truth) / np.linalg.norm(truth)))
    return worst


def converged(
    q: NumpyArray, k: NumpyArray, v: NumpyArray, bar: NumpyArray, bandwidth: int, scale: float
) -> Limit:
    """The coupling with unit marginals in the band, and the gradients of `<bar, P v>`.

    With `G = bar v'`, the multipliers solve `[[D_r, P], [P', D_c]] (x, y) = ((P * G) 1, (P * G)' 1)`, and the
    gradient in the scores is `P * (G - x 1' - 1 y')`: implicit differentiation of the marginal equations.

    Args:
        q: (n, d).
        k: (n, d).
        v: (n, p).
        bar: (n, p).
        bandwidth: W.
        scale: of the scores.
    """
    n = len(q)
    outside = np.abs(np.arange(n)[:, None] - np.arange(n)[None, :]) > bandwidth
    scores = np.where(outside, -np.inf, scale * (q @ k.T))
    u, w = np.zeros(n), np.zeros(n)
    for _ in range(SINKHORN_STEPS):
        u = -np.logaddexp.reduce(scores + w[None, :], axis=1)
        w = -np.logaddexp.reduce(scores + u[:, None], axis=0)
    plan = np.exp(scores + u[:, None] + w[None, :])
    for _ in range(NEWTON_STEPS):
        gap = np.concatenate([plan.sum(1), plan.sum(0)]) - 1.0
        if np.max(np.abs(gap)) <= MARGINAL_TOL:
            break
        step = np.linalg.lstsq(_marginal_jacobian(plan), -gap, rcond=None)[0]
        u, w = u + step[:n], w + step[n:]
        plan = np.exp(scores + u[:, None] + w[None, :])
    weighted = plan * (bar @ v.T)
    sums = np.concatenate([weighted.sum(1), weighted.sum(0)])
    x = np.linalg.lstsq(_marginal_jacobian(plan), sums, rcond=None)[0]
    slope = weighted - plan * (x[:n, None] + x[None, n:])
    error = np.max(np.abs(np.concatenate([plan.sum(1), plan.sum(0)]) - 1.0))
    return Limit(scale * slope @ k, scale * slope.T @ q, plan.T @ bar, plan, float(error))


def _marginal_jacobian(plan: NumpyArray) -> NumpyArray:
    """Derivative of row and column sums in the potentials."""
    return np.block([[np.diag(plan.sum(1)), plan], [plan.T, np.diag(plan.sum(0))]])
