"""What takes seconds to import and nothing to fork; JAX has no backend yet, so it has no threads either."""

import datasets  # noqa: F401
import transformers  # noqa: F401

import trl_jax.trainer.reward_trainer  # noqa: F401
