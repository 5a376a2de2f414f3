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
# # One operator, three libraries
#
# Plan, Schur complement and Hessian are operators with `shape`, `dtype` and `@`. The same object is handed
# to scipy (`to_scipy()`) and to `linear_operator`, GPyTorch's algebra (`to_linear_operator()`), without a
# copy and without a matrix.

# %%
import matplotlib.pyplot as plt
import numpy as np
import scipy.optimize
import scipy.sparse.linalg
import torch

import ot_newton as otn

plt.style.use("tableau-colorblind10")
plt.rcParams.update({"figure.dpi": 70, "savefig.dpi": 70, "figure.figsize": (6, 3.6)})
generator = torch.Generator().manual_seed(0)

n, m, d, eps = 30, 40, 2, 0.3
x = torch.randn(n, d, generator=generator, dtype=torch.float64)
y = torch.rand(m, d, generator=generator, dtype=torch.float64)
result = otn.sinkhorn(otn.OTProblem(x, y, eps=eps))
H = result.hessian("x")
H_scipy, H_linear = H.to_scipy(), H.to_linear_operator()
for operator in (H, H_scipy):
    print(operator)
print(type(H_linear).__name__, tuple(H_linear.shape), H_linear.dtype)

# %% [markdown]
# ## Products and shapes
# A vector is flat (`n d`), a block (`n d`, k), or has the shape of the cloud (`n`, `d`), row-major.

# %%
v = torch.randn(n, d, generator=generator, dtype=torch.float64)
flat = v.reshape(-1)
in_torch = H @ flat
in_scipy = H_scipy @ flat.numpy()
in_linear = H_linear @ flat
print("scipy against torch:", np.abs(in_scipy - in_torch.numpy()).max())
print("linear_operator against torch:", float((in_linear - in_torch).abs().max()))

plan = result.plan
plan_scipy = plan.to_scipy()
u = torch.randn(n, generator=generator, dtype=torch.float64)
transposed = plan_scipy.rmatvec(u.numpy())

# %% [markdown]
# ## Eigenvalues
# Lanczos of this package, `eigsh` of scipy and a dense factorization through `linear_operator`.

# %%
k = 6
own = otn.extreme_eigenpairs(H, k, which="smallest")
by_scipy = scipy.sparse.linalg.eigsh(H_scipy, k=k, which="SA", return_eigenvectors=False)
exact = torch.linalg.eigvalsh(H.to_dense())
by_linear = torch.linalg.eigvalsh(H_linear.to_dense())

figure, axes = plt.subplots()
axes.plot(range(1, n * d + 1), exact, "-", color="0.5", label="dense")
axes.plot(range(1, k + 1), own.values, "o", ms=4, label="extreme_eigenpairs")
axes.plot(range(1, k + 1), np.sort(by_scipy), "x", ms=9, label="scipy eigsh")
axes.set(xlabel="index", ylabel="eigenvalue of the Hessian", title=f"{n * d} eigenvalues, {k} by each Lanczos")
axes.legend()
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## Linear solves
# A Newton step with a shift that makes the system definite: scipy's MINRES on the operator against
# `torch.linalg.solve` on its matrix.

# %%
shift = 0.1 - min(0.0, float(exact[0]))
gradient = result.gradient("x").reshape(-1)
shifted = scipy.sparse.linalg.LinearOperator(
    H_scipy.shape, matvec=lambda p: H_scipy @ p + shift * p, dtype=H_scipy.dtype
)
step, info = scipy.sparse.linalg.minres(shifted, -gradient.numpy(), rtol=1e-12)
dense_step = torch.linalg.solve(H.to_dense() + shift * torch.eye(n * d, dtype=x.dtype), -gradient)
print("MINRES exit", info, "distance from the dense solve", np.abs(step - dense_step.numpy()).max())

# %% [markdown]
# ## scipy's optimizers
# `scipy_hessp` wraps a loss as `fun`, `jac` and `hessp`; every point is solved once. scipy's trust-ncg
# and our Newton-CG reach the same minimum; only the latter certifies it.

# %%
loss = otn.SinkhornLoss(eps)
wrapped = otn.scipy_hessp(lambda p: loss(p, y), x)
by_scipy_newton = scipy.optimize.minimize(
    wrapped.fun,
    x.reshape(-1).numpy(),
    jac=wrapped.jac,
    hessp=wrapped,
    method="trust-ncg",
    options={"gtol": 1e-9},
)
by_newton = otn.NewtonCG(lambda p: otn.ot_cost(p, y, eps=eps)).minimize(x)
print(f"trust-ncg {by_scipy_newton.fun:.12f} after {by_scipy_newton.nit} steps, {by_scipy_newton.nhev} products")
print(f"Newton-CG    {by_newton.fun:.12f} after {by_newton.nit} steps, {by_newton.nhev} products")
print("certificate:", by_newton.status.message)

# %% [markdown]
# ## What this notebook showed

# %%
assert np.allclose(in_scipy, in_torch.numpy(), atol=1e-14) and torch.allclose(in_linear, in_torch, atol=1e-14)
assert torch.equal((H @ v).reshape(-1), in_torch)
assert np.allclose(transposed, (plan.T @ u).numpy(), atol=1e-15)
assert np.allclose(plan_scipy @ np.ones(m), plan.row_sums().numpy(), atol=1e-15)
assert bool(own.converged.all()) and np.allclose(own.values, exact[:k], atol=1e-8)
assert np.allclose(np.sort(by_scipy), exact[:k], atol=1e-8)
assert torch.allclose(by_linear, exact, atol=1e-12)
assert info == 0 and np.allclose(step, dense_step.numpy(), atol=1e-8)
assert by_newton.success and abs(by_scipy_newton.fun - by_newton.fun) < 1e-9
print("all assertions hold")
