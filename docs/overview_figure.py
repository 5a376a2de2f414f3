"""Draw the README's figure, `docs/overview.png`: `python docs/overview_figure.py` (half a minute).

Left: 40 points moved to minimize OT_eps(x, y), Newton-CG against Adam in plan passes, on the streaming
backend. Right: shuffled regression; the smallest curvature along a run that starts near a saddle, and where
Newton took over.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import torch

import ot_newton as otn

mpl.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

EPS = 0.1
ADAM_STEPS = 300


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def moved_points(axes: plt.Axes) -> None:
    """Gradient norm against plan passes."""
    generator = torch.Generator().manual_seed(0)
    x = normal(generator, 40, 2)
    angle = 2 * torch.pi * torch.rand(50, generator=generator, dtype=torch.float64)
    y = 2 * torch.stack([angle.cos(), angle.sin()], dim=1)
    loss = otn.SinkhornLoss(EPS, backend="torch_tiles")
    newton: list[tuple[int, float]] = []
    otn.NewtonCG(lambda p: loss(p, y)).minimize(
        x, callback=lambda info: newton.append((loss.plan_passes, info.grad_norm))
    )
    loss = otn.SinkhornLoss(EPS, backend="torch_tiles")
    adam: list[tuple[int, float]] = []
    point = x.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([point], lr=0.05)
    for _ in range(ADAM_STEPS):
        optimizer.zero_grad()
        loss(point, y).backward()
        adam.append((loss.plan_passes, float(point.grad.norm())))
        optimizer.step()
    axes.semilogy(*zip(*newton, strict=True), "o-", ms=4, label="Newton-CG")
    axes.semilogy(*zip(*adam, strict=True), "--", label="Adam, lr = 0.05")
    axes.set(xlabel="plan passes", ylabel="gradient norm", title="moving 40 points")


def shuffled_regression(axes: plt.Axes) -> None:
    """Smallest curvature along a run of `SaddleEscape`."""
    generator = torch.Generator().manual_seed(4)
    centres = 2 * torch.rand(3, 3, generator=generator, dtype=torch.float64) - 1
    label = torch.arange(120) % 3
    spread = torch.tensor([0.3, 0.05, 0.6], dtype=torch.float64)
    x = centres[label] + spread[label, None] * normal(generator, 120, 3)
    y = x @ normal(generator, 3, 2) + 0.1 * normal(generator, 120, 2)
    y = y[torch.randperm(120, generator=generator)]
    loss = otn.SinkhornLoss(EPS)
    found = otn.SaddleEscape(lambda w: loss(x @ w, y), probe_every=5).minimize(0.01 * normal(generator, 3, 2))
    probes = [record for record in found.history if record.lambda_min is not None]
    axes.plot([r.step for r in probes], [r.lambda_min for r in probes], "o-", label="lambda_min")
    handover = next(s.step for s in found.switches if s.action == "newton")
    axes.axvline(handover, color="C1", ls="--", label="Newton takes over")
    axes.axhline(0, color="0.5", lw=0.8)
    axes.set(xlabel="step", ylabel="smallest curvature", title="leaving a saddle")


def main() -> None:
    """Draw and store."""
    plt.style.use("tableau-colorblind10")
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2))
    for axes, draw in zip(panels, (moved_points, shuffled_regression), strict=True):
        draw(axes)
        axes.legend(fontsize=9)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("overview.png"), dpi=80, metadata={"Software": None})


if __name__ == "__main__":
    main()
