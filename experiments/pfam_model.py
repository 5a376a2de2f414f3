r"""The model of `pfam-attention`: embedding, Sinkhorn self-attention, one Sinkhorn cross-attention.

A and B are encoded apart, by the same weights: letter and position embeddings, then `layers - 1` layers of
self-attention with an MLP. The last layer couples A's queries with B's keys. With P the mean of its heads'
couplings and E the letter embedding, A's residue i is predicted from `O_i = sum_j P_ij E[B_j]` and nothing
else: `logits = s O_i E' + bias`. B's values carry neither position nor context, heads have no values of
their own, and no residual connection passes by the coupling. So all that the readout knows of A_i is which
letters of B the coupling picks. The query, however, reads A_i: a low reconstruction says that the coupling
finds letters like A_i in B, which the alignment alone could not tell (`references` has its number). What is
left when the query does not see A_i is measured too (`hidden_log_probability`).

Queries and keys have length one, times `contrast` on one side: content scores lie in [-contrast, contrast],
which keeps couplings soft and the tail short. Scores also have learned harmonics of i - j, zero at the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ot_newton.attention.attend import sinkhorn_attention
from ot_newton.attention.dustbins import Dustbin
from ot_newton.experiments.pfam_pairs import HIDDEN, RESIDUES, Pairs

__all__ = ["Evaluation", "evaluate", "initial_parameters", "loss"]

Parameters = dict[str, Any]
Settings = Mapping[str, Any]
HARMONICS = 8
FLOOR = 1e-6


class Evaluation(NamedTuple):
    """What is measured of one set of parameters.

    Attributes:
        log_probability: of A's residues, (K, L, 20).
        hidden_log_probability: the same where the positions of `hidden` are not shown to the query.
        plan: mean coupling of the heads, (K, L, L).
        dustbin: mass that each residue of A sends to the dustbin, (K, L).
    """

    log_probability: Any
    hidden_log_probability: Any
    plan: Any
    dustbin: Any


def initial_parameters(settings: Settings) -> Parameters:
    """Parameters of step 0; the readout is small, so that predictions start near uniform."""
    width, heads, head = settings["width"], settings["heads"], settings["width"] // settings["heads"]
    keys = iter(jax.random.split(jax.random.key(settings["seed"]), 8 * settings["layers"] + 1))

    def matrix(rows: int, cols: int, gain: float = 1.0) -> Any:
        return gain / math.sqrt(rows) * jax.random.normal(next(keys), (rows, cols), jnp.float32)

    def scores() -> Parameters:
        harmonics = jnp.zeros((heads, 2 * HARMONICS), jnp.float32)
        return {"q": matrix(width, width), "k": matrix(width, width), "harmonics": harmonics}

    inner = [
        {
            **scores(),
            "v": matrix(width, width),
            "o": matrix(width, width, 0.5),
            "up": matrix(width, 2 * width),
            "down": matrix(2 * width, width, 0.5),
        }
        for _ in range(settings["layers"] - 1)
    ]
    found: Parameters = {
        "letters": math.sqrt(HIDDEN + 1) * matrix(HIDDEN + 1, width),
        "inner": inner,
        "cross": scores(),
        "readout": jnp.float32(1 / math.sqrt(width)),
        "bias": jnp.zeros((RESIDUES,), jnp.float32),
    }
    if settings["dustbin"] is not None:
        token = jnp.zeros((heads, head + 2 * HARMONICS), jnp.float32)
        value = jnp.zeros((heads, width), jnp.float32)
        found["dustbin"] = Dustbin(token, token, value, capacity=settings["dustbin"])
    return found


def _normal(x: Any) -> Any:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + FLOOR)


def _unit(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + FLOOR)


def _split(x: Any, heads: int) -> Any:
    """(K, L, width) as (K, heads, L, width / heads)."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], heads, -1), -2, -3)


def _waves(length: int, count: int, longest: float) -> tuple[Any, Any]:
    """Cosines and sines of positions, (L, count) each; wavelengths 6 .. longest."""
    angle = np.arange(length)[:, None] * (2 * np.pi / np.geomspace(6.0, longest, count))
    return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


def _queries_keys(layer: Parameters, x: Any, y: Any, settings: Settings) -> tuple[Any, Any]:
    """Queries of x and keys of y whose products are the scores; see the module."""
    heads, length = settings["heads"], x.shape[-2]
    q = settings["contrast"] * _unit(_split(x @ layer["q"], heads))
    k = _unit(_split(y @ layer["k"], heads))
    cos, sin = _waves(length, HARMONICS, 2.0 * settings["length"])
    even, odd = layer["harmonics"][:, None, :HARMONICS], layer["harmonics"][:, None, HARMONICS:]
    # even cos(w(i - j)) + odd sin(w(i - j)) as a product of features of i and of j
    rows = jnp.concatenate([even * cos + odd * sin, even * sin - odd * cos], axis=-1)
    cols = jnp.broadcast_to(jnp.concatenate([cos, sin], axis=-1), rows.shape)
    batch = q.shape[:-3]
    q = jnp.concatenate([q, jnp.broadcast_to(rows, (*batch, *rows.shape))], axis=-1)
    return q, jnp.concatenate([k, jnp.broadcast_to(cols, (*batch, *cols.shape))], axis=-1)


def _segments(count: Any, length: int) -> Any:
    return jnp.where(jnp.arange(length) < count[:, None], 0, -1)


def _attend(q: Any, k: Any, v: Any, settings: Settings, **options: Any) -> Any:
    return sinkhorn_attention(
        q,
        k,
        v,
        bandwidth=settings["bandwidth"],
        base_steps=settings["base_steps"],
        tail_steps=settings["tail_steps"],
        scale=1.0,
        backend=settings["backend"],
        **options,
    )


def _encode(parameters: Parameters, letters: Any, count: Any, settings: Settings) -> Any:
    """Normalized states of one side, (K, L, width)."""
    length, heads = letters.shape[-1], settings["heads"]
    place = jnp.concatenate(_waves(length, settings["width"] // 2, 4.0 * settings["length"]), axis=-1)
    x = parameters["letters"][letters] + place
    for layer in parameters["inner"]:
        h = _normal(x)
        q, k = _queries_keys(layer, h, h, settings)
        v = _split(h @ layer["v"], heads)
        mixed = _attend(q, k, v, settings, segment_ids=_segments(count, length))
        x = x + jnp.swapaxes(mixed, -2, -3).reshape(x.shape) @ layer["o"]
        x = x + jax.nn.gelu(_normal(x) @ layer["up"]) @ layer["down"]
    return _normal(x)


def _cross(parameters: Parameters, pairs: Pairs, hide: Any, settings: Settings, extra: int = 0) -> Any:
    """Mean over the heads of `P [E[B], I]`, (K, L, width + extra).

    Args:
        parameters: see `initial_parameters`.
        pairs: K pairs.
        hide: residues of A that the query does not see, (K, L).
        settings: see `loss`.
        extra: 0, or L + 1 for the coupling itself beside the output, the dustbin's column last.
    """
    count, length = pairs.a.shape
    shown = jnp.where(hide, HIDDEN, pairs.a)
    x = _encode(parameters, shown, pairs.n, settings)
    y = _encode(parameters, pairs.b, pairs.m, settings)
    q, k = _queries_keys(parameters["cross"], x, y, settings)
    sides = (_segments(pairs.n, length), _segments(pairs.m, length))
    a, b = (jnp.where(side >= 0, 1.0, 0.0).astype(jnp.float32) for side in sides)
    if settings["dustbin"] != "lengths":  # unequal lengths: each residue of B takes n / m
        b = b * (pairs.n / pairs.m).astype(jnp.float32)[:, None]
    unit = jnp.broadcast_to(jnp.eye(length, extra, dtype=jnp.float32), (count, length, extra))
    values = jnp.concatenate([parameters["letters"][pairs.b], unit], axis=-1)
    bins = parameters.get("dustbin")
    if bins is not None:
        last = jnp.zeros((settings["heads"], extra), jnp.float32).at[:, -1:].set(1.0)
        bins = Dustbin(bins.q, bins.k, jnp.concatenate([bins.v, last], axis=-1), capacity=bins.capacity)
    v = jnp.broadcast_to(values[:, None], (*q.shape[:-1], values.shape[-1]))
    return jnp.mean(_attend(q, k, v, settings, segment_ids=sides, a=a, b=b, dustbin=bins), axis=1)


def _log_probability(parameters: Parameters, output: Any) -> Any:
    logits = parameters["readout"] * output @ parameters["letters"][:RESIDUES].T + parameters["bias"]
    return jax.nn.log_softmax(logits, axis=-1)


def loss(parameters: Parameters, pairs: Pairs, scored: Any, hide: Any, settings: Settings) -> Any:
    """Reconstruction: mean cross-entropy of A's scored residues.

    Args:
        parameters: see `initial_parameters`.
        pairs: K pairs.
        scored: `Pairs.scored`, (K, L).
        hide: residues of A that the query does not see, (K, L).
        settings: `width`, `heads`, `layers`, `contrast`, `length`, `bandwidth`, `base_steps`, `tail_steps`,
            `dustbin`, `backend`, `seed`.
    """
    found = _log_probability(parameters, _cross(parameters, pairs, hide, settings))
    picked = jnp.take_along_axis(found, jnp.minimum(pairs.a, RESIDUES - 1)[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(scored, picked, 0.0)) / jnp.sum(scored)


def evaluate(parameters: Parameters, pairs: Pairs, hidden: Any, settings: Settings) -> Evaluation:
    """Predictions and couplings; nothing is trained on the couplings.

    Args:
        parameters: see `initial_parameters`.
        pairs: K pairs.
        hidden: positions to hide for `hidden_log_probability`, (K, L).
        settings: see `loss`.
    """
    count, length = pairs.a.shape
    width = settings["width"]
    twice = Pairs(*(jnp.concatenate([x, x]) for x in pairs))
    hide = jnp.concatenate([jnp.zeros(pairs.a.shape, bool), hidden])
    found = _cross(parameters, twice, hide, settings, extra=length + 1)
    log_probability = _log_probability(parameters, found[..., :width])
    coupling = found[:count, :, width:]
    return Evaluation(
        log_probability[:count], log_probability[count:], coupling[..., :length], coupling[..., length]
    )
