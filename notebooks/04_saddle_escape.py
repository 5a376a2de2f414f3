# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Leaving saddles: the pitchfork, and regression without labels
#
# A stationary point with negative curvature is not a solution, and a first-order method started there does
# not move. Two examples: one with a formula, one with data.

# %%
import math

import matplotlib.pyplot as plt
import torch

import ot_newton as otn

plt.style.use("tableau-colorblind10")
plt.rcParams.update({"figure.dpi": 70, "savefig.dpi": 70, "figure.figsize": (6, 3.6)})

# %% [markdown]
# ## A pitchfork bifurcation
# Move x = {-u, u} towards y = {-1, 1}. Then $\mathrm{OT} = u^2 + 1 - \varepsilon \log\cosh(2u/\varepsilon)$,
# whose stationary points solve $u = \tanh(2u/\varepsilon)$, and the curvature at $u = 0$ across is
# $1 - 2/\varepsilon$. Above eps = 2 the point $u = 0$ is the minimum; below, it is a saddle between two.
#
# Newton-CG is started *at* $u = 0$, where the gradient vanishes. It takes a certificate, finds the negative
# curvature if there is one, and leaves along it.

# %%
y = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
centre = torch.zeros(2, 1, dtype=torch.float64)


def curvature(eps):
    """Smallest curvature at u = 0."""
    return otn.lambda_min(otn.sinkhorn(otn.OTProblem(centre, y, eps=eps)).hessian("x")).value


def branch(eps):
    """Distance of the points at the minimum that Newton finds from the saddle."""
    found = otn.NewtonCG(lambda x: otn.ot_cost(x, y, eps=eps)).minimize(centre)
    assert found.success
    return abs(float(found.x[1, 0] - found.x[0, 0])) / 2


GRID = (0.4, 0.8, 1.2, 1.5, 1.7, 1.8, 1.9, 1.95, 2.1, 2.3, 2.6)
branches = [branch(eps) for eps in GRID]
curvatures = [curvature(eps) for eps in GRID]

low, high = 1.0, 3.0
while high - low > 1e-6:
    middle = (low + high) / 2
    low, high = (middle, high) if curvature(middle) < 0 else (low, middle)
critical = (low + high) / 2
print(f"the curvature at u = 0 changes sign at eps = {critical:.6f}")

# %%
us = torch.linspace(1e-3, 0.999, 300, dtype=torch.float64)
curve = 2 * us / torch.atanh(us)
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6))
for sign in (1, -1):
    left.plot(curve, sign * us, "-", color="C0", label="u = tanh(2u/eps)" if sign > 0 else None)
    left.plot(GRID, [sign * u for u in branches], "o", color="C1", label="Newton-CG" if sign > 0 else None)
left.plot([0, 2], [0, 0], ":", color="0.4", label="saddle")
left.plot([2, 2.7], [0, 0], "-", color="C0")
left.axvline(critical, color="0.7", lw=0.8)
left.set(xlabel="eps", ylabel="u at the minimum", title="pitchfork at eps = 2")
left.legend(fontsize=8)
right.plot(GRID, [1 - 2 / eps for eps in GRID], "-", label="1 - 2/eps")
right.plot(GRID, curvatures, "o", label="lambda_min")
right.axhline(0, color="0.5", lw=0.8)
right.set(xlabel="eps", ylabel="smallest curvature at u = 0", title="the sign changes there too")
right.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Regression without labels
# X and Y = X W* + noise, the rows of Y shuffled. Minimize $\mathrm{OT}_\varepsilon(XW, Y)$ over W. The
# function has several minima and saddles between them; W = 0 is one where all predictions coincide.
# `SaddleEscape` watches the smallest curvature while Adam runs, and hands over to Newton-CG above the
# threshold.

# %%
generator = torch.Generator().manual_seed(4)
rows, d_x, d_y, eps = 120, 3, 2, 0.1
centres = 2 * torch.rand(3, d_x, generator=generator, dtype=torch.float64) - 1
spread = torch.tensor([0.3, 0.05, 0.6], dtype=torch.float64)
label = torch.arange(rows) % 3
noise = torch.randn(rows, d_x, generator=generator, dtype=torch.float64)
X = centres[label] + spread[label, None] * noise
truth = torch.randn(d_x, d_y, generator=generator, dtype=torch.float64)
Y = X @ truth + 0.1 * torch.randn(rows, d_y, generator=generator, dtype=torch.float64)
Y = Y[torch.randperm(rows, generator=generator)]

loss = otn.SinkhornLoss(eps)
start = 0.01 * torch.randn(d_x, d_y, generator=generator, dtype=torch.float64)
found = otn.SaddleEscape(lambda W: loss(X @ W, Y), probe_every=5).minimize(start)
print(found.status.message)
print(f"{found.n_first_order} Adam steps, {found.n_newton} Newton steps, {found.n_hvp} Hessian products")
for switch in found.switches:
    print(f"step {switch.step}: {switch.action}, {switch.reason}")
value_at_truth = float(otn.ot_cost(X @ truth, Y, eps=eps))
print(f"value {found.fun:.5f}, at W* {value_at_truth:.5f}, |W - W*| = {float((found.x - truth).norm()):.3f}")

# %%
probes = [r for r in found.history if r.lambda_min is not None]
steps = [r for r in found.history if r.kind in ("start", "first-order", "newton", "escape") and r.accepted]
handover = next(s.step for s in found.switches if s.action == "newton")
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), sharex=True)
left.plot([r.step for r in probes], [r.lambda_min for r in probes], "o-", label="lambda_min")
left.axhline(0, color="0.5", lw=0.8)
left.axvline(handover, color="C1", ls="--", label="Newton takes over")
left.set(xlabel="step", ylabel="smallest curvature", title="curvature along the run")
left.legend(fontsize=8)
right.semilogy([r.step for r in steps], [r.grad_norm for r in steps], "-", label="gradient norm")
right.axvline(handover, color="C1", ls="--", label="Newton takes over")
right.set(xlabel="step", ylabel="gradient norm", title="gradient along the run")
right.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## What this notebook showed

# %%
assert abs(critical - 2) <= 0.02
for eps, u, value in zip(GRID, branches, curvatures, strict=True):
    assert math.isclose(u, math.tanh(2 * u / eps), abs_tol=1e-6)
    assert (u > 0.1) == (eps < 2)
    assert math.isclose(value, 1 - 2 / eps, abs_tol=1e-9)
assert probes[0].lambda_min < 0
assert found.success and found.lambda_min.sign == "nonnegative"
assert found.fun < float(loss(X @ start, Y))
assert steps[-1].grad_norm < 1e-6 * max(r.grad_norm for r in steps)
print("all assertions hold")
