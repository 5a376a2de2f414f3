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
# # Banded Sinkhorn attention: what a short tail keeps of the gradient
#
# Attention whose weights are a transport plan instead of a row softmax: with scores $S = q k^\top/\sqrt d$ in a
# band $|i - j| \le W$, $T$ *stopped* Sinkhorn steps and a *tail* of $R$ differentiated ones,
#
# $$P = \exp(S + u 1^\top + 1 v^\top), \qquad P^\top 1 = b, \quad P 1 \approx a.$$
#
# The tail's gradient is exact for the tail. What stopping the base drops, the *bias*, is measured exactly by
# `bias_certificate`. This part of the package is written in JAX (`pip install ot-newton[jax]`).

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from ot_newton.attention import bias_certificate, contraction_certificate, sinkhorn_attention, tail_adjoint

plt.style.use("tableau-colorblind10")
plt.rcParams.update({"figure.dpi": 70, "savefig.dpi": 70, "figure.figsize": (6, 3.6)})
jax.config.update("jax_enable_x64", True)

heads, length, dim, bandwidth, base = 1, 24, 4, 6, 12
random = np.random.default_rng(0)
q, k, v = (jnp.asarray(random.normal(size=(heads, length, dim))) for _ in range(3))

# %% [markdown]
# ## The plan
# With the identity as values, the output is the plan itself.

# %%
identity = jnp.broadcast_to(jnp.eye(length), (heads, length, length))
plan = np.asarray(sinkhorn_attention(q, k, identity, bandwidth=bandwidth, base_steps=100)[0])
softmax = np.exp(np.asarray(q[0] @ k[0].T) / np.sqrt(dim))
softmax = np.where(plan > 0, softmax, 0)
softmax /= softmax.sum(axis=1, keepdims=True)

figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.6))
for panel, weights, title in zip(axes, (softmax, plan), ("row softmax in the band", "transport plan"), strict=True):
    image = panel.imshow(weights, cmap="cividis", vmin=0, vmax=0.6)
    panel.set(xlabel="key", ylabel="query", title=title)
figure.colorbar(image, ax=axes, label="weight")
plt.show()
print(f"column sums: softmax {softmax.sum(0).min():.2f} to {softmax.sum(0).max():.2f}", end=", ")
print(f"plan {plan.sum(0).min():.6f} to {plan.sum(0).max():.6f}")

# %% [markdown]
# ## The adjoint of the tail
# `jax.grad` through `sinkhorn_attention` and `tail_adjoint` give the same numbers, in $2R + 1$ streamed sweeps.

# %%
cotangent = jnp.asarray(random.normal(size=(heads, length, dim)))
options = {"bandwidth": bandwidth, "base_steps": base, "tail_steps": 2}
_, pull = jax.vjp(lambda *tokens: sinkhorn_attention(*tokens, **options), q, k, v)
by_autodiff = pull(cotangent)
adjoint = tail_adjoint(q, k, v, cotangent, **options)
gap = max(
    float(jnp.abs(one - two).max())
    for one, two in zip(by_autodiff, (adjoint.dq, adjoint.dk, adjoint.dv), strict=True)
)
print(f"largest difference {gap:.1e}")

# %% [markdown]
# ## Certificates
# `contraction_certificate` bounds the rate of a Sinkhorn step where one can be proved: on a dense support, or
# on blocks of a band, but not on the band as a whole, where two distant rows share no key.

# %%
dense = contraction_certificate(q, k, bandwidth=length)
band = contraction_certificate(q, k, bandwidth=bandwidth)
print("dense:", dense)
print("band: ", band)

# %% [markdown]
# ## Bias against R
# On a band the slow modes run along the diagonal, so that it needs a longer tail than a dense problem. The
# certificate also holds the missing part of the gradient: added, the gradient is that of all $T + R$ steps.

# %%
DEPTHS = (0, 1, 2, 4)


def biases(width):
    """Measured relative bias for every tail depth."""
    fixed = {"bandwidth": width, "base_steps": base}
    return [float(bias_certificate(q, k, v, cotangent, tail_steps=r, **fixed).relative[0]) for r in DEPTHS]


curves = {"band": biases(bandwidth), "dense": biases(length)}
figure, axes = plt.subplots()
for (name, values), style in zip(curves.items(), ("o-", "s--"), strict=True):
    axes.semilogy(DEPTHS, values, style, label=name)
axes.set(xlabel="tail depth R", ylabel="relative bias of the gradient", title=f"L = {length}, W = {bandwidth}, T = {base}")
axes.legend()
axes.grid(alpha=0.3)
plt.show()

certificate = bias_certificate(q, k, v, cotangent, **options)
whole = {"bandwidth": bandwidth, "base_steps": 0, "tail_steps": base + 2}
_, pull = jax.vjp(lambda one, two: sinkhorn_attention(one, two, v, **whole), q, k)
full = pull(cotangent)
repaired = (adjoint.dq + certificate.dq, adjoint.dk + certificate.dk)
rest = max(float(jnp.abs(one - two).max()) for one, two in zip(full, repaired, strict=True))
print(f"bias at R = 2: {float(certificate.relative[0]):.2e}; left after adding the certificate: {rest:.1e}")

# %% [markdown]
# ## What this notebook showed

# %%
assert np.allclose(plan.sum(0), 1) and np.allclose(plan.sum(1), 1, atol=1e-6)
assert gap < 1e-12
assert dense.rate is not None and 0 < float(dense.rate[0]) < 1
assert band.rate is None and "strictly positive" in band.reason
for values in curves.values():
    assert all(after < before for before, after in zip(values, values[1:], strict=False))
assert curves["dense"][2] < curves["band"][2]
assert rest < 1e-10
print("all assertions hold")
