"""Models: an `Arch` describes the architecture, a decoder or encoder implements it, a head computes outputs."""

from trl_jax.core.trainers import lazy_getattr

__getattr__ = lazy_getattr(__name__, {"create_reference_model": "trl_jax.training.reference"})  # TRL exports it here
