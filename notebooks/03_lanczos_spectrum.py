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
# # Lanczos: spectra along a run, and what a certificate means
#
# Lanczos reads the spectrum of a Hessian from products alone. Three questions are asked of it here: what
# does the whole spectrum look like (`spectral_density`), what is its lowest end (`lambda_min`), and how sure
# is that.

# %%
import matplotlib.pyplot as plt
import torch

import ot_newton as otn

plt.style.use("tableau-colorblind10")
plt.rcParams.update({"figure.dpi": 70, "savefig.dpi": 70, "figure.figsize": (6, 3.6)})
generator = torch.Generator().manual_seed(0)

n, m, d, eps = 50, 60, 2, 0.3
y = torch.randn(m, d, generator=generator, dtype=torch.float64)
x0 = 0.05 * torch.randn(n, d, generator=generator, dtype=torch.float64)
loss = otn.SinkhornLoss(eps)

# %% [markdown]
# ## A run that starts at negative curvature
# All points of x start in one heap in the middle of y: almost a stationary point, but a saddle, since the
# heap wants to spread. `SaddleEscape` runs Adam until the smallest curvature is safely positive, then
# Newton-CG. The callback takes a density of the Hessian at a few steps.

# %%
WATCHED = (1, 21, 61)
densities = {}


def watch(info):
    """Keep the spectral density at a few steps."""
    if info.step in WATCHED:
        densities[info.step] = otn.spectral_density(info.hessian, n_probes=6, k=30, seed=1)


found = otn.SaddleEscape(lambda p: loss(p, y), lr=0.05, probe_every=5).minimize(x0, callback=watch)
end = otn.sinkhorn(otn.OTProblem(found.x, y, eps=eps)).hessian("x")
densities[found.n_iter] = otn.spectral_density(end, n_probes=6, k=30, seed=1)
print(found.status.message)
print(f"{found.n_first_order} Adam steps, {found.n_newton} Newton steps")
for switch in found.switches:
    print(f"step {switch.step}: {switch.action}, {switch.reason}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6))
for (step, density), style in zip(densities.items(), ("-", "--", "-.", ":"), strict=True):
    (line,) = left.plot(density.grid * n, density.density / n, style, label=f"step {step}")
    band = (density.density - density.error) / n, (density.density + density.error) / n
    left.fill_between(density.grid * n, *band, alpha=0.25, color=line.get_color(), lw=0)
left.axvline(0, color="0.5", lw=0.8)
left.set(xlabel="n × eigenvalue", ylabel="density", title="mean of 6 probes and its standard error")
left.legend()

probes = [(r.step, r.lambda_min, r.lambda_max) for r in found.history if r.lambda_min is not None]
right.plot([p[0] for p in probes], [n * p[1] for p in probes], "o-", label="smallest")
right.plot([p[0] for p in probes], [n * p[2] for p in probes], "s--", label="largest")
right.axhline(0, color="0.5", lw=0.8)
right.set(xlabel="step", ylabel="n × eigenvalue", title="extreme curvature, as probed")
right.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# The density is a mean over random probes, and so is every average taken from it: the fraction of negative
# eigenvalues comes with a standard error. At this size it can be compared with the truth.

# %%
start = otn.sinkhorn(otn.OTProblem(x0, y, eps=eps)).hessian("x")
exact = torch.linalg.eigvalsh(start.to_dense())
estimate = otn.spectral_density(start, n_probes=10, k=40, seed=2)
trace, trace_error = estimate.mean(lambda values: values)
print(f"mean eigenvalue {trace:.3e} +- {trace_error:.1e}, exactly {float(exact.mean()):.3e}")
fraction, fraction_error = estimate.mass_below(0.0)
print(f"negative: {fraction:.2f} +- {fraction_error:.2f}, exactly {float((exact < 0).double().mean()):.2f}")

# %% [markdown]
# ## What a certificate means
#
# `lambda_min` returns an upper bound of the smallest eigenvalue, with a witness, and a verdict:
#
# - **negative** is a proof: the unit vector `vector` has $v^\top H v < 0$ beyond the noise floor, and anyone
#   can check it with one product;
# - **nonnegative** is probable, never proved by products alone: a random start can miss a direction. The
#   confidence bounds that probability, over two independent starts;
# - **undetermined** says that the steps or the precision did not suffice.
#
# `dense_below=0` asks for Lanczos although these matrices are small enough to factorize.

# %%
bottom = torch.linalg.eigvalsh(end.to_dense())
cases = {
    "start": otn.lambda_min(start, dense_below=0),
    "end": otn.lambda_min(end, dense_below=0),
    "end, 3 steps only": otn.lambda_min(end, dense_below=0, max_steps=3),
}
for name, found_there in cases.items():
    print(
        f"{name:18s} {found_there.sign:13s} value {found_there.value:+.3e}, confidence "
        f"{found_there.confidence:.3f}, {found_there.n_hvp} products"
    )
print(f"{'exactly':18s} start {float(exact[0]):+.3e}, end {float(bottom[0]):+.3e}")

# %%
witness = cases["start"].vector
curvature = float(witness @ (start @ witness))
seeds = [otn.lambda_min(end, dense_below=0, seed=seed, tol=1e-3) for seed in range(5)]
print(f"witness of the start: v.Hv = {curvature:.3e}, noise floor {cases['start'].noise_floor:.1e}")
print("values at the end over five seeds:", ", ".join(f"{s.value:.4e}" for s in seeds))

# %% [markdown]
# ## What this notebook showed

# %%
assert cases["start"].sign == "negative" and curvature < -cases["start"].noise_floor
assert abs(cases["start"].value - float(exact[0])) < 1e-5 * float(exact.abs().max())
assert found.success and cases["end"].sign == "nonnegative" and cases["end"].confidence >= 0.99
assert abs(cases["end"].value - float(bottom[0])) < 1e-5 * float(bottom[-1])
assert cases["end, 3 steps only"].sign == "undetermined"
assert all(float(bottom[0]) - 1e-12 <= s.value for s in seeds)
assert abs(trace - float(exact.mean())) < 4 * trace_error
assert abs(fraction - float((exact < 0).double().mean())) < 4 * fraction_error + 0.02
assert float(densities[1].mass_below(0.0)[0]) > 0 and float(densities[found.n_iter].mass_below(0.0)[0]) == 0
print("all assertions hold")
