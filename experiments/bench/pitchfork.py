"""Table `peer-hessians`: the Hessian of the pitchfork problem from each library beside the exact one.

x = {-u, u}, y = {-1, 1}, uniform weights, `C = s |x - y|^2`: the Hessian has the eigenvector (1,1) with
eigenvalue s and (-1,1) with `s (1 - (2s/eps) sech^2(2 s u/eps))`. At u = 0 the second is negative: a saddle.
GeomLoss has s = 1/2, the others s = 1; each is compared with the exact matrix of its own cost.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from ot_newton.experiments.bench import peer_geomloss, peer_ott, peer_pot
from ot_newton.experiments.bench.harness import reason_of
from ot_newton.experiments.bench.settings import Settings
from ot_newton.problem import OTProblem
from ot_newton.solve import sinkhorn

__all__ = ["exact_hessian", "rows"]

Row = dict[str, Any]
EPS = 1.0
POSITIONS = (0.5, 0.0)
DEGENERATE = 1e-6


def exact_hessian(u: float, eps: float, cost_scale: float) -> Any:
    """The closed form (2,2).

    Args:
        u: half the distance of the two points of x.
        eps: regularization.
        cost_scale: s.
    """
    even = cost_scale
    odd = cost_scale * (1.0 - 2.0 * cost_scale / eps / math.cosh(2.0 * cost_scale * u / eps) ** 2)
    return np.array([[even + odd, even - odd], [even - odd, even + odd]]) / 2.0


def _clouds(u: float) -> tuple[Any, Any]:
    return np.array([[-u], [u]]), np.array([[-1.0], [1.0]])


def _ours(u: float, dtype: torch.dtype) -> Any:
    x, y = (torch.from_numpy(cloud).to(dtype) for cloud in _clouds(u))
    return sinkhorn(OTProblem(x, y, eps=EPS)).hessian("x").to_dense().double().numpy()


def _ott(u: float, danskin: bool, dtype: str) -> Any:
    return peer_ott.hessian_by_jax(*_clouds(u), EPS, danskin=danskin, dtype=dtype)


Maker = Callable[[float], Any]
CONTESTANTS: tuple[tuple[str, str, float, Maker], ...] = (
    ("ot-newton", "float64", 1.0, partial(_ours, dtype=torch.float64)),
    ("ot-newton", "float32", 1.0, partial(_ours, dtype=torch.float32)),
    ("OTT, jax.hessian, implicit", "float64", 1.0, partial(_ott, danskin=False, dtype="float64")),
    ("OTT, jax.hessian, implicit", "float32", 1.0, partial(_ott, danskin=False, dtype="float32")),
    ("OTT, jax.hessian, default", "float64", 1.0, partial(_ott, danskin=True, dtype="float64")),
    ("GeomLoss, double backward", "float64", 0.5, lambda u: peer_geomloss.hessian(*_clouds(u), EPS)),
    ("POT, autodiff", "float64", 1.0, lambda u: peer_pot.hessian(*_clouds(u), EPS, "autodiff")),
    ("POT, envelope", "float64", 1.0, lambda u: peer_pot.hessian(*_clouds(u), EPS, "envelope")),
)


def _sign(curvature: float) -> int:
    return 0 if abs(curvature) < DEGENERATE else int(math.copysign(1, curvature))


def _row(make: Callable[[], Any], exact: Any) -> Row:
    """Matrix, smallest eigenvalue and error, or the reason why there is none."""
    out: Row = {"exact": exact.tolist(), "lambda_min_exact": float(np.linalg.eigvalsh(exact)[0])}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            matrix = np.asarray(make(), np.float64)
    except Exception as error:  # noqa: BLE001  a broken peer is a row
        return out | {"status": "ERROR", "message": reason_of(error)}
    if not np.isfinite(matrix).all():
        return out | {"status": "ERROR", "message": "not finite"}
    smallest = float(np.linalg.eigvalsh((matrix + matrix.T) / 2)[0])
    return out | {
        "status": "OK",
        "hessian": matrix.tolist(),
        "lambda_min": smallest,
        "error": float(np.abs(matrix - exact).max() / np.abs(exact).max()),
        "sign_right": _sign(smallest) == _sign(out["lambda_min_exact"]),
    }


def rows(settings: Settings) -> Iterator[Row]:
    """One row per library and position.

    Args:
        settings: not used; the problem has two points.

    Yields:
        The rows.
    """
    for u in POSITIONS:
        for name, precision, cost_scale, make in CONTESTANTS:
            head: Row = {"kind": "hessian", "contestant": name, "precision": precision}
            head |= {"u": u, "eps": EPS, "cost_scale": cost_scale, "stopping": "each library's tightest"}
            yield head | _row(partial(make, u), exact_hessian(u, EPS, cost_scale))
