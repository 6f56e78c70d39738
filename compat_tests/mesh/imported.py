"""Preloads modules that are slow to import but safe to fork: JAX has no backend yet, and so no threads."""

import datasets  # noqa: F401
import transformers  # noqa: F401

import trl_jax.trainer.reward_trainer  # noqa: F401
