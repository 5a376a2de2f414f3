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
# # Quickstart: plan, gradient, Hessian product, Newton
#
# Entropic optimal transport between two clouds,
#
# $$\mathrm{OT}_\varepsilon(x, y) = \min_P \langle P, C\rangle + \varepsilon\, \mathrm{KL}(P \,|\, a b^\top),
# \qquad C_{ij} = |x_i - y_j|^2,\quad P 1 = a,\; P^\top 1 = b,$$
#
# is a smooth function of the points. This notebook solves it, differentiates it twice, and lets Newton's
# method move the points.

# %%
import matplotlib.pyplot as plt
import torch

import ot_newton as otn

plt.style.use("tableau-colorblind10")
plt.rcParams.update({"figure.dpi": 70, "savefig.dpi": 70, "figure.figsize": (7.5, 3.4)})
generator = torch.Generator().manual_seed(0)

# %% [markdown]
# ## Solve
# `eps` has no default: it is in units of the cost, here squared length. Everything else has one.

# %%
n, m, d, eps = 40, 50, 2, 0.1
x = torch.randn(n, d, generator=generator, dtype=torch.float64)
angle = 2 * torch.pi * torch.rand(m, generator=generator, dtype=torch.float64)
y = 2 * torch.stack([angle.cos(), angle.sin()], dim=1)

problem = otn.OTProblem(x, y, eps=eps)
result = otn.sinkhorn(problem)
print(result.status.message)
print(f"value {float(result.value):.6f}, transport cost {float(result.cost):.6f}")
print(f"{result.n_iter} iterations, marginal error {result.marginal_error:.1e}")
assert result.converged

# %% [markdown]
# ## The plan is an operator
# `result.plan @ V` streams one product with $P$: one *plan pass*, a sweep over all pairs, which is the unit
# of cost of everything here. The matrix is formed only if asked for.

# %%
plan = result.plan
moved = plan.barycentric_map()
print(plan, "row sums - a:", float((plan.row_sums() - problem.a).abs().max()))

figure, axes = plt.subplots(figsize=(4.6, 4.6))
axes.plot(*torch.stack([x, moved]).permute(2, 0, 1), color="0.8", lw=0.8, zorder=0)
axes.scatter(*x.T, s=14, marker="o", label="x")
axes.scatter(*y.T, s=14, marker="x", label="y")
axes.scatter(*moved.T, s=12, marker="^", label="where the plan sends x")
axes.set(xlabel="first coordinate", ylabel="second coordinate", title=f"entropic map, eps = {eps}")
axes.set_aspect("equal")
axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=8)
plt.show()

assert torch.allclose(plan @ y / problem.a[:, None], moved)
assert torch.allclose(plan.to_dense().sum(0), problem.b)

# %% [markdown]
# ## Gradient
# In closed form from the plan, and the same number through autograd: `ot_cost` is a loss like any other.

# %%
z = x.clone().requires_grad_(True)
(autograd,) = torch.autograd.grad(otn.ot_cost(z, y, eps=eps), z)
print("closed form against autograd:", float((autograd - result.gradient("x")).abs().max()))
assert torch.allclose(autograd, result.gradient("x"), atol=1e-8)

# %% [markdown]
# ## Hessian-vector product
# `result.hessian("x")` is the $nd \times nd$ Hessian as an operator. For $n = 10^5$ points in three
# dimensions its matrix would take 720 GB; a product takes a few plan passes and no more memory than the
# clouds.
#
# Shifting all points by $u$ shifts the gradient by $2 a_i u$ (translation law): a test with no
# tolerance to argue about. `check_hvp` runs the general tests: symmetry, linearity, Taylor slopes.

# %%
H = result.hessian("x")
v = torch.randn(n, d, generator=generator, dtype=torch.float64)
product = H @ v

step = 1e-5
plus, minus = (otn.sinkhorn(otn.OTProblem(x + t * v, y, eps=eps), tol=1e-12) for t in (step, -step))
difference = (plus.gradient("x") - minus.gradient("x")) / (2 * step)
error = float((product - difference).norm() / product.norm())
shift = H @ torch.ones_like(x)
print(f"relative distance from a finite difference: {error:.1e}")
print(f"translation law, largest error: {float((shift - 2 / n).abs().max()):.1e}")
report = otn.check_hvp(lambda p: otn.ot_cost(p, y, eps=eps, tol=1e-12), x)
print("check_hvp passed:", report.passed)

assert error < 1e-6
assert torch.allclose(shift, torch.full_like(shift, 2 / n))
assert report.passed

# %% [markdown]
# ## Newton on the positions
# Minimize the cost over the points. `SinkhornLoss` counts plan passes, so that Newton-CG and Adam can be
# compared in the same currency; on the streaming backend every CG step of a Hessian product counts too. Newton ends with a certificate: the smallest Hessian eigenvalue at the
# point where it stopped.

# %%
loss = otn.SinkhornLoss(eps, backend="torch_tiles")
newton_passes, newton_norms = [], []


def watch(info):
    """Keep what each Newton step cost."""
    newton_passes.append(loss.plan_passes)
    newton_norms.append(info.grad_norm)


found = otn.NewtonCG(lambda p: loss(p, y)).minimize(x, callback=watch)
print(found.status.message)
print(f"{found.n_iter} steps, {found.n_hvp} Hessian products, smallest curvature {float(found.lambda_min):.2e}")

adam_loss = otn.SinkhornLoss(eps, backend="torch_tiles")
z = x.clone().requires_grad_(True)
adam = torch.optim.Adam([z], lr=0.05)
adam_passes, adam_norms = [], []
for _ in range(150):
    adam.zero_grad()
    adam_loss(z, y).backward()
    adam_passes.append(adam_loss.plan_passes)
    adam_norms.append(float(z.grad.norm()))
    adam.step()

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
for panel, newton, first in (
    (left, range(1, len(newton_norms) + 1), range(1, len(adam_norms) + 1)),
    (right, newton_passes, adam_passes),
):
    panel.semilogy(newton, newton_norms, "o-", ms=4, label="Newton-CG")
    panel.semilogy(first, adam_norms, "--", label="Adam, lr = 0.05")
    panel.grid(alpha=0.3)
left.set(xlabel="step", ylabel="gradient norm", title="per step")
right.set(xlabel="plan passes", title="per unit of cost")
right.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## What this notebook showed

# %%
assert found.success and found.status is otn.Status.MINIMUM
assert found.lambda_min.sign == "nonnegative" and found.lambda_min.confidence >= 0.99
assert float(found.grad.norm()) < 1e-7 * float(result.gradient("x").norm())
assert min(adam_norms) > 100 * float(found.grad.norm())
print("all assertions hold")
