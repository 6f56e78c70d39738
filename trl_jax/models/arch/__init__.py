"""The facts that tell one model from another: of a decoder `Arch`, of an encoder `EncoderArch`, and what these hold.

A fact of experts is in `experts.py`, one of attention or what stands in its place in `mixers.py`, one that tells the
layers of a model apart in `layers.py`; whatever holds for a whole decoder is a field of `Arch`.
"""

from trl_jax.models.arch.decoder import BLOCKS, Arch
from trl_jax.models.arch.encoder import ConvolutionFacts, EncoderArch, HeadFacts
from trl_jax.models.arch.experts import Experts
from trl_jax.models.arch.layers import LayerEmbedding, LayerKind, Run
from trl_jax.models.arch.mixers import (
    GatedDelta,
    Heads,
    Latent,
    MixerScales,
    QueryGrowth,
    ShortConvolution,
    StateSpace,
)

__all__ = [
    "BLOCKS",
    "Arch",
    "ConvolutionFacts",
    "EncoderArch",
    "Experts",
    "GatedDelta",
    "HeadFacts",
    "Heads",
    "Latent",
    "LayerEmbedding",
    "LayerKind",
    "MixerScales",
    "QueryGrowth",
    "Run",
    "ShortConvolution",
    "StateSpace",
]
