"""Pairs of aligned sequences as arrays: split by sequence, crops, drawing, and what needs no training.

A pair (A, B) holds residues of two sequences of one family. A crop starts at one column of the alignment for
both, so that aligned residues stay near the diagonal. `partner[i] = j` where A's residue i and B's residue j
stand in one column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ot_newton.experiments.pfam_data import Alignment

__all__ = [
    "HIDDEN", "LETTERS", "RESIDUES", "Family", "Metrics", "Pairs", "alignment_metrics", "draw_pairs",
    "held_out_pairs", "make_family", "mean_cross_entropy", "references",
]  # fmt: skip

Array = npt.NDArray[Any]
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
RESIDUES = len(LETTERS)
UNKNOWN, HIDDEN = RESIDUES, RESIDUES + 1
TINY = float(np.finfo(np.float32).tiny)
WIDTHS = np.geomspace(0.25, 64.0, 49)
FIT_PAIRS = 256
FIT_DRAW, HELD_OUT_DRAW = 1_000_001, 1_000_002


class Pairs(NamedTuple):
    """Crops of K pairs, padded to L.

    Attributes:
        a: residues of A, (K, L), `UNKNOWN` for rare letters and padding.
        b: residues of B.
        n: residues of each A, (K,).
        m: residues of each B.
        partner: (K, L), -1 where A's residue has no partner in the crop of B.
        names: (index of A, index of B) in the family, (K, 2).
    """

    a: Array
    b: Array
    n: Array
    m: Array
    partner: Array
    names: Array

    @property
    def scored(self) -> Array:
        """Which residues of A are predicted, (K, L): known letters, no padding."""
        return (np.arange(self.a.shape[1]) < self.n[:, None]) & (self.a < RESIDUES)


@dataclass(frozen=True, eq=False)
class Family:
    """Sequences of an alignment, split by sequence.

    Attributes:
        alignment: what it is made of.
        residues: letters of each sequence as numbers.
        columns: the alignment's column of each.
        train: indices of training sequences.
        held_out: indices of the others; no pair mixes the two.
    """

    alignment: Alignment
    residues: tuple[Array, ...] = field(repr=False)
    columns: tuple[Array, ...] = field(repr=False)
    train: Array
    held_out: Array

    @property
    def width(self) -> int:
        """Columns of the alignment."""
        return len(self.alignment.rows[0])


def make_family(alignment: Alignment, *, held_out: float, seed: int) -> Family:
    """Encode an alignment and split its sequences.

    Args:
        alignment: of at least 4 sequences.
        held_out: share of sequences that no training pair contains.
        seed: of the split.

    Raises:
        ValueError: too few sequences for pairs on both sides, or a sequence without residues.
    """
    count = len(alignment.rows)
    aside = min(max(2, round(held_out * count)), count - 2)
    if count < 4:
        raise ValueError(f"{alignment.name}: pairs on both sides of a split need 4 sequences, got {count}")
    residues, columns = [], []
    for name, row in zip(alignment.names, alignment.rows, strict=True):
        places = [k for k, letter in enumerate(row) if letter.isalpha()]
        codes = [LETTERS.find(row[k].upper()) for k in places]
        if not places:
            raise ValueError(f"{alignment.name}: sequence {name} has no residues")
        residues.append(np.array([code if code >= 0 else UNKNOWN for code in codes], np.int32))
        columns.append(np.array(places, np.int32))
    order = np.random.default_rng(seed).permutation(count)
    return Family(alignment, tuple(residues), tuple(columns), np.sort(order[aside:]), np.sort(order[:aside]))


def draw_pairs(
    family: Family, pool: Array, count: int, *, length: int, bandwidth: int, seed: tuple[int, ...]
) -> Pairs:
    """Draw pairs of different sequences whose crops differ in length by at most the bandwidth.

    Longer differences have no balanced coupling in the band; they are drawn anew. In a family longer than the
    crop, its first column is drawn too.

    Args:
        family: the sequences.
        pool: indices to draw from.
        count: K.
        length: L.
        bandwidth: W.
        seed: decides the draw alone, so that a resumed run sees the same batches.

    Raises:
        ValueError: hardly any pair fits.
    """
    rng = np.random.default_rng(seed)
    crops: list[tuple[Array, Array]] = []
    names = []
    for _ in range(200 * count):
        first, second = rng.choice(pool, 2, replace=False)
        start = int(rng.integers(0, max(1, family.width - length + 1)))
        a, b = (_crop(family, index, start, length) for index in (first, second))
        if min(len(a), len(b)) > 0 and abs(len(a) - len(b)) <= bandwidth:
            crops += [(family.residues[first][a], family.columns[first][a])]
            crops += [(family.residues[second][b], family.columns[second][b])]
            names.append((first, second))
        if len(names) == count:
            return _pack(crops, np.array(names), length)
    raise ValueError(
        f"{family.alignment.name}: lengths of pairs must differ by at most bandwidth={bandwidth}, found "
        f"{len(names)} such pairs in {200 * count} draws: raise bandwidth"
    )


def held_out_pairs(family: Family, settings: Mapping[str, Any]) -> Pairs:
    """The pairs of held-out sequences that everything is measured on.

    Args:
        family: the sequences.
        settings: `eval_pairs`, `length`, `bandwidth` and `seed`.

    Raises:
        ValueError: see `draw_pairs`.
    """
    length, bandwidth = settings["length"], settings["bandwidth"]
    seed = (settings["seed"], HELD_OUT_DRAW)
    pool, count = family.held_out, settings["eval_pairs"]
    return draw_pairs(family, pool, count, length=length, bandwidth=bandwidth, seed=seed)


def _crop(family: Family, index: int, start: int, length: int) -> Array:
    """Indices of the residues in a crop."""
    return np.flatnonzero(family.columns[index] >= start)[:length]


def _pack(crops: list[tuple[Array, Array]], names: Array, length: int) -> Pairs:
    count = len(names)
    codes = np.full((2, count, length), UNKNOWN, np.int32)
    sizes = np.zeros((2, count), np.int32)
    partner = np.full((count, length), -1, np.int32)
    for k in range(count):
        for side in (0, 1):
            values = crops[2 * k + side][0]
            codes[side, k, : len(values)], sizes[side, k] = values, len(values)
        _, rows, cols = np.intersect1d(crops[2 * k][1], crops[2 * k + 1][1], return_indices=True)
        partner[k, rows] = cols
    return Pairs(codes[0], codes[1], sizes[0], sizes[1], partner, names)


class Metrics(NamedTuple):
    """How a coupling meets the aligned pairs inside the band.

    Attributes:
        sparse: mean of -log of the row-normalized coupling at the aligned pairs.
        hit: share of aligned residues whose largest entry is their partner.
        offset: mean distance of the row's barycenter of positions from the partner.
        pairs: aligned pairs inside the band.
        outside: aligned pairs outside of it, which no coupling on the band can meet; not counted above.
    """

    sparse: float
    hit: float
    offset: float
    pairs: int
    outside: int


def alignment_metrics(plan: Array, pairs: Pairs, bandwidth: int) -> Metrics:
    """Compare couplings with the alignment; only real residues of B count in a row's normalization.

    Args:
        plan: (K, L, L), not negative.
        pairs: the K pairs.
        bandwidth: W.
    """
    length = plan.shape[-1]
    place = np.arange(length)
    active = place < pairs.m[:, None]
    rows = np.where(active[:, None, :], np.asarray(plan, np.float64), 0.0)
    rows = rows / np.maximum(rows.sum(-1, keepdims=True), TINY)
    aligned = pairs.partner >= 0
    inside = aligned & (np.abs(pairs.partner - place) <= bandwidth)
    k, i = np.nonzero(inside)
    j = pairs.partner[k, i]
    met = rows[k, i, j]
    return Metrics(
        sparse=float(np.mean(-np.log(np.maximum(met, TINY)))),
        hit=float(np.mean(rows[k, i].argmax(-1) == j)),
        offset=float(np.mean(np.abs(rows[k, i] @ place - j))),
        pairs=len(k),
        outside=int(aligned.sum() - len(k)),
    )


def mean_cross_entropy(log_probability: Array, pairs: Pairs, where: Array | None = None) -> float:
    """Mean of `-log p(residue)` over the scored residues of A.

    Args:
        log_probability: (K, L, 20).
        pairs: the K pairs.
        where: (K, L), residues to count among the scored ones; all by default.
    """
    k, i = np.nonzero(pairs.scored if where is None else pairs.scored & where)
    return float(-np.mean(log_probability[k, i, pairs.a[k, i]]))


def references(family: Family, held_out: Pairs, *, bandwidth: int, seed: int) -> dict[str, dict[str, Any]]:
    """What needs no training, measured on the held-out pairs; tables are counted on training pairs.

    Returns:
        `uniform` (no position or letter is preferred), `diagonal` (the deterministic i -> i; its sparse CE is
        that of exp(-|i - j| / s), s fitted on training pairs, since a 0 has no logarithm) and `aligned` (the
        true partners, as far as a letter of B tells one of A).
    """
    length = held_out.a.shape[1]
    sample = draw_pairs(
        family, family.train, FIT_PAIRS, length=length, bandwidth=bandwidth, seed=(seed, FIT_DRAW)
    )
    place = np.arange(length)
    band = np.abs(place[:, None] - place[None, :]) <= bandwidth
    letters = np.bincount(sample.a[sample.scored], minlength=RESIDUES)[:RESIDUES] + 1.0
    frequency = np.log(letters / letters.sum())
    straight = [np.where(place < pairs.m[:, None], place, -1) for pairs in (sample, held_out)]
    fits = [
        (alignment_metrics(_laplace(width, band, sample), sample, bandwidth).sparse, width)
        for width in WIDTHS
    ]
    width = float(min(fits)[1])
    uniform = alignment_metrics(np.broadcast_to(band, (len(held_out.n), *band.shape)), held_out, bandwidth)
    diagonal = alignment_metrics(
        np.broadcast_to(np.eye(length), (len(held_out.n), *band.shape)), held_out, bandwidth
    )
    soft = alignment_metrics(_laplace(width, band, held_out), held_out, bandwidth)
    found: dict[str, dict[str, Any]] = {
        "uniform": uniform._asdict(),
        "diagonal": {**diagonal._asdict(), "sparse": soft.sparse, "width": width},
        "aligned": {
            "sparse": 0.0,
            "hit": 1.0,
            "offset": 0.0,
            "pairs": uniform.pairs,
            "outside": uniform.outside,
        },
    }
    guesses = {
        "uniform": np.broadcast_to(frequency, (*held_out.a.shape, RESIDUES)),
        "diagonal": _substitution(sample, straight[0], held_out, straight[1], frequency),
        "aligned": _substitution(sample, sample.partner, held_out, held_out.partner, frequency),
    }
    for name, guess in guesses.items():
        found[name]["reconstruction"] = mean_cross_entropy(guess, held_out)
    return found


def _laplace(width: float, band: Array, pairs: Pairs) -> Array:
    place = np.arange(band.shape[0])
    kernel = np.where(band, np.exp(-np.abs(place[:, None] - place[None, :]) / width), 0.0)
    return np.broadcast_to(kernel, (len(pairs.n), *band.shape))


def _substitution(sample: Pairs, known: Array, held_out: Pairs, partner: Array, frequency: Array) -> Array:
    """Log p(letter of A | letter of its partner), counted on the sample; frequencies without a partner."""
    counts = np.tile(np.exp(frequency), (RESIDUES, 1))
    k, i = np.nonzero(sample.scored & (known >= 0))
    other = sample.b[k, known[k, i]]
    kept = other < RESIDUES
    np.add.at(counts, (other[kept], sample.a[k, i][kept]), 1.0)
    table = np.log(counts / counts.sum(1, keepdims=True))
    letters = np.take_along_axis(held_out.b, np.maximum(partner, 0), axis=1)
    usable = (partner >= 0) & (letters < RESIDUES)
    return np.where(usable[..., None], table[np.minimum(letters, RESIDUES - 1)], frequency)
