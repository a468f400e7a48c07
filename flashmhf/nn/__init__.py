"""Modules [..., d_model] -> [..., d_model], conversion and optimizers."""

from . import convert
from .baselines import MHFFN, DenseMoE, ParametricKV, SwiGLU
from .flashmhf import FlashMHF, default_subnet_dim
from .muon import Muon
from .optim import param_groups

__all__ = [
    "MHFFN", "DenseMoE", "FlashMHF", "Muon", "ParametricKV", "SwiGLU", "convert", "default_subnet_dim", "param_groups",
]  # fmt: skip
