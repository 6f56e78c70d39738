"""The parts of a run, each handed what it needs."""

from trl_jax.hub.torch.models_aside import leave_models_aside

leave_models_aside()  # before any of these imports transformers' callbacks
