"""The problem: two weighted clouds, a squared Euclidean cost and eps; frozen, validated once.

C_ij = s |x_i - y_j|^2,   OT = min_P <P,C> + eps KL(P | a b^T)   s.t. P1 = a, P^T 1 = b   (MATH 1)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ot_newton.errors import check_number

__all__ = ["CentredProblem", "OTProblem", "as_tensor"]

MASS_TOLERANCE = 1e-6
HALF = (torch.float16, torch.bfloat16)


def as_tensor(name: str, value: Any) -> Tensor:
    """A detached floating tensor of what the user passed: torch, numpy (any strides), list.

    Integers become the default dtype.

    Raises:
        TypeError: not numeric, or complex.
    """
    if isinstance(value, Tensor):
        tensor = value.detach()
    else:
        try:
            import numpy as np

            array = np.asarray(value)
            if array.dtype == object:
                raise TypeError("object array")
            tensor = torch.from_numpy(
                np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)
            )
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            raise TypeError(
                f"{name} must be a tensor, a numpy array or nested numbers, got {kind}"
            ) from error
    if tensor.is_complex() or tensor.is_sparse:
        raise TypeError(f"{name} must be a real dense tensor, got {tensor.dtype}, layout {tensor.layout}")
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    return tensor.contiguous()


def _check_cloud(name: str, cloud: Tensor) -> None:
    if cloud.dim() < 2:
        raise ValueError(f"{name} must have shape (..., points, d), got {tuple(cloud.shape)}")
    if cloud.shape[-2] == 0:
        raise ValueError(f"{name} has no points: got shape {tuple(cloud.shape)}, at least one is needed")
    if cloud.shape[-1] == 0:
        raise ValueError(f"{name} has dimension d = 0: got shape {tuple(cloud.shape)}, d >= 1 is needed")
    if 0 in cloud.shape:
        raise ValueError(f"{name} has an empty batch dimension: got shape {tuple(cloud.shape)}")
    _check_finite(name, cloud)


def _check_finite(name: str, tensor: Tensor) -> None:
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        at = tuple((~finite).nonzero()[0].tolist())
        raise ValueError(f"{name} must be finite, got {tensor[at].item()} at index {at}")


def _check_device(reference: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.device != reference.device:
            raise ValueError(
                f"{name} is on device {tensor.device}, but x is on {reference.device}: put both on one device"
            )


def _weights(name: str, value: Any, count: int, points: str, like: Tensor) -> Tensor:
    """Validated weights in ``like``'s dtype; uniform for None."""
    if value is None:
        return torch.full((count,), 1.0 / count, dtype=like.dtype, device=like.device)
    weight = as_tensor(name, value)
    _check_device(like, **{name: weight})
    if weight.dim() < 1 or weight.shape[-1] != count:
        raise ValueError(
            f"{name} must have shape (..., {count}), one weight per point of {points}, "
            f"got {tuple(weight.shape)}"
        )
    _check_finite(name, weight)
    if bool((weight < 0).any()):
        raise ValueError(f"{name} must be non-negative, got a minimum of {float(weight.min()):g}")
    if bool((weight.double().sum(-1) <= 0).any()):
        raise ValueError(f"{name} must have positive total mass, got a sum of 0")
    return weight.to(like.dtype)


def _broadcast_batch(**shapes: torch.Size) -> torch.Size:
    try:
        shape: torch.Size = torch.broadcast_shapes(*shapes.values())  # type: ignore[no-untyped-call]
        return shape
    except RuntimeError as error:
        found = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(f"batch dimensions must broadcast, got {found}") from error


@dataclass(frozen=True, eq=False, repr=False)
class CentredProblem:
    """The problem as backends see it: one batch dimension, compute dtype, centred clouds.

    Both sides hard: each cloud is centred on its own weighted mean and `shift = mean x - mean y` is put
    back in values, gradients and potentials (MATH 2); otherwise a common mean, and `shift = 0`.

    Attributes:
        x, y: (B,n,d), (B,m,d) centred.
        a, b: (B,n), (B,m).
        shift: (B,d) `D`.
        balanced: both sides hard.
    """

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    shift: Tensor
    balanced: bool

    @cached_property
    def max_cost(self) -> float:
        """Upper bound of `|x~_i - y~_j|^2` over the atoms of positive weight, all lanes."""
        reach = [
            float((cloud.double().square().sum(-1) * (weight > 0)).max().sqrt())
            for cloud, weight in ((self.x, self.a), (self.y, self.b))
        ]
        return (reach[0] + reach[1]) ** 2


@dataclass(frozen=True, eq=False)
class OTProblem:
    """Entropic optimal transport between two weighted clouds, validated once.

    Args:
        x: (..., n, d) points; torch or numpy, any float dtype, any strides. Integers are converted.
        y: (..., m, d) points; batch dimensions broadcast with those of x, mixed dtypes are promoted.
        a: (..., n) non-negative weights of x, uniform 1/n by default. Zeros are allowed: their rows of
            plan, gradient and Hessian are exactly zero.
        b: (..., m) weights of y. Both sides hard: masses may differ by 1e-6 relative, b is then scaled
            to the mass of a (``b_factor`` keeps the factor).
        eps: entropic regularization, in units of the cost; no default.
        cost_scale: s in `C = s |x - y|^2`: 1 full squared distance, 0.5 GeomLoss's half cost.
        rho_x: marginal penalty of the x side, None for a hard marginal (MATH 1).
        rho_y: the same for y.

    Half-precision clouds are computed in float32. Inputs are detached: differentiable losses are
    `ot_cost` and `SinkhornLoss`.

    Raises:
        TypeError: an argument is not numeric.
        ValueError: shape, sign, mass, finiteness, device; the message names the argument.

    Example:
        >>> import torch
        >>> OTProblem(torch.zeros(3, 2), torch.ones(4, 2), eps=0.1)
        OTProblem(n=3, m=4, d=2, eps=0.1, cost_scale=1, float32, cpu)
    """

    x: Tensor
    y: Tensor
    a: Tensor = None  # type: ignore[assignment]
    b: Tensor = None  # type: ignore[assignment]
    eps: float = field(kw_only=True)
    cost_scale: float = field(default=1.0, kw_only=True)
    rho_x: float | None = field(default=None, kw_only=True)
    rho_y: float | None = field(default=None, kw_only=True)
    b_factor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Validate everything before any work."""

        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("eps", check_number("eps", self.eps))
        put("cost_scale", check_number("cost_scale", self.cost_scale))
        for name in ("rho_x", "rho_y"):
            if getattr(self, name) is not None:
                put(name, check_number(name, getattr(self, name)))
        x, y = as_tensor("x", self.x), as_tensor("y", self.y)
        _check_device(x, y=y)
        _check_cloud("x", x)
        _check_cloud("y", y)
        if x.shape[-1] != y.shape[-1]:
            raise ValueError(
                f"x and y must share their last dimension d, got {tuple(x.shape)} and {tuple(y.shape)}"
            )
        dtype = torch.promote_types(x.dtype, y.dtype)
        x, y = (c.to(torch.float32 if dtype in HALF else dtype) for c in (x, y))
        a = _weights("a", self.a, x.shape[-2], "x", x)
        b = _weights("b", self.b, y.shape[-2], "y", y)
        _broadcast_batch(x=x.shape[:-2], y=y.shape[:-2], a=a.shape[:-1], b=b.shape[:-1])
        mass_a, mass_b = a.double().sum(-1), b.double().sum(-1)
        factor = torch.ones_like(mass_a / mass_b)
        if self.rho_x is None and self.rho_y is None:
            off = ((mass_a - mass_b).abs() / mass_a).max()
            if float(off) > MASS_TOLERANCE:
                raise ValueError(
                    f"a and b must have equal mass when both marginals are hard, got sums "
                    f"{mass_a.flatten()[0].item():.9g} and {mass_b.flatten()[0].item():.9g} "
                    f"(relative difference {float(off):.2g}, at most {MASS_TOLERANCE:g}); "
                    "normalize them, or set rho_x or rho_y"
                )
            factor = mass_a / mass_b
            b = (b.double() * factor[..., None]).to(b.dtype)
        for name, value in (("x", x), ("y", y), ("a", a), ("b", b), ("b_factor", factor)):
            put(name, value)

    def __repr__(self) -> str:
        """Sizes and parameters, no tensors."""
        batch = f"batch={tuple(self.batch_shape)}, " if self.batch_shape else ""
        rho = "".join(
            f", {k}={v:g}" for k, v in (("rho_x", self.rho_x), ("rho_y", self.rho_y)) if v is not None
        )
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"OTProblem({batch}n={self.n}, m={self.m}, d={self.d}, eps={self.eps:g}, "
            f"cost_scale={self.cost_scale:g}{rho}, {kind}, {self.device})"
        )

    @property
    def n(self) -> int:
        """Points in x."""
        return int(self.x.shape[-2])

    @property
    def m(self) -> int:
        """Points in y."""
        return int(self.y.shape[-2])

    @property
    def d(self) -> int:
        """Dimension of the points."""
        return int(self.x.shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype: float64 or float32."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """Where the clouds live."""
        return self.x.device

    @property
    def balanced(self) -> bool:
        """Both marginals hard."""
        return self.rho_x is None and self.rho_y is None

    @cached_property
    def batch_shape(self) -> torch.Size:
        """Batch dimensions, () for a single problem."""
        return _broadcast_batch(
            x=self.x.shape[:-2], y=self.y.shape[:-2], a=self.a.shape[:-1], b=self.b.shape[:-1]
        )

    @property
    def lanes(self) -> int:
        """Number of problems in the batch."""
        return int(self.batch_shape.numel())

    def lane(self, index: int) -> OTProblem:
        """The problem of one lane of the flattened batch, unbatched.

        Example:
            >>> import torch
            >>> OTProblem(torch.zeros(2, 3, 1), torch.ones(4, 1), eps=1.0).lane(0)
            OTProblem(n=3, m=4, d=1, eps=1, cost_scale=1, float32, cpu)
        """
        x, y, a, b = (t[index] for t in self._flat())
        return OTProblem(
            x, y, a, b, eps=self.eps, cost_scale=self.cost_scale, rho_x=self.rho_x, rho_y=self.rho_y
        )

    def expanded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Clouds and weights with the full batch shape."""
        shape = self.batch_shape
        clouds = [c.expand(*shape, *c.shape[-2:]) for c in (self.x, self.y)]
        weights = [w.expand(*shape, w.shape[-1]) for w in (self.a, self.b)]
        return clouds[0], clouds[1], weights[0], weights[1]

    def _flat(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Clouds and weights with exactly one batch dimension."""
        x, y, a, b = self.expanded()
        return (
            x.reshape(-1, *x.shape[-2:]),
            y.reshape(-1, *y.shape[-2:]),
            a.reshape(-1, a.shape[-1]),
            b.reshape(-1, b.shape[-1]),
        )

    @cached_property
    def centred(self) -> CentredProblem:
        """The centred, flattened problem; computed once, O((n+m)d)."""
        x, y, a, b = self._flat()
        mean_x, mean_y = _mean(x, a), _mean(y, b)
        if not self.balanced:
            mean_x = mean_y = (mean_x + mean_y) / 2
        # Rounded to the compute dtype first, so that what is subtracted is exactly what is put back.
        mean_x, mean_y = mean_x.to(x.dtype), mean_y.to(x.dtype)
        shift = mean_x.double() - mean_y.double()
        return CentredProblem(
            x=(x - mean_x[:, None, :]).contiguous(),
            y=(y - mean_y[:, None, :]).contiguous(),
            a=a.contiguous(),
            b=b.contiguous(),
            shift=shift,
            balanced=self.balanced,
        )


def _mean(cloud: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean in float64, (B,d): atoms of zero weight do not move it."""
    w = weight.double()
    return (w[:, :, None] * cloud.double()).sum(1) / w.sum(-1)[:, None]
