"""Models: an `Arch` describes the architecture, a decoder or encoder implements it, a head computes outputs."""

from trl_jax.core.trainers import fetching

__getattr__ = fetching(__name__, {"create_reference_model": "trl_jax.training.reference"})  # TRL exports it here
