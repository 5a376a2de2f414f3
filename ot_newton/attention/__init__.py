"""Banded balanced optimal-transport attention in JAX, with an exact adjoint of its refinement tail.

`sinkhorn_attention` replaces the row softmax of attention by the balanced coupling `P` of queries and
keys inside a band. A base solve of `base_steps` Sinkhorn steps is stopped (no gradient); `tail_steps`
further steps are differentiated exactly, in `2R + 1` streamed sweeps instead of autodiff's dozens.
`bias_certificate` measures what stopping the base dropped.

JAX is an extra (`pip install ot-newton[jax]`) and is imported on the first use of a name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ot_newton.attention.adjoint import TailAdjoint
    from ot_newton.attention.attend import sinkhorn_attention, tail_adjoint
    from ot_newton.attention.bias import BiasCertificate, TailDepth, bias_certificate, select_tail_depth
    from ot_newton.attention.contraction import ContractionCertificate, contraction_certificate
    from ot_newton.attention.dustbins import Dustbin
    from ot_newton.attention.feasibility import check_band

_MODULES = {
    "BiasCertificate": "bias",
    "ContractionCertificate": "contraction",
    "Dustbin": "dustbins",
    "TailAdjoint": "adjoint",
    "TailDepth": "bias",
    "bias_certificate": "bias",
    "check_band": "feasibility",
    "contraction_certificate": "contraction",
    "select_tail_depth": "bias",
    "sinkhorn_attention": "attend",
    "tail_adjoint": "attend",
}

__all__ = [
    "BiasCertificate",
    "ContractionCertificate",
    "Dustbin",
    "TailAdjoint",
    "TailDepth",
    "bias_certificate",
    "check_band",
    "contraction_certificate",
    "select_tail_depth",
    "sinkhorn_attention",
    "tail_adjoint",
]


def __getattr__(name: str) -> object:
    """Import a public name, and JAX with it, on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'ot_newton.attention' has no attribute {name!r}")
    try:
        importlib.import_module("jax")
    except ImportError as error:
        raise ImportError(f"ot_newton.attention.{name} needs JAX: pip install ot-newton[jax]") from error
    value = getattr(importlib.import_module(f"ot_newton.attention.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted({*globals(), *__all__})
