from trl_jax.core.arguments.base import COMMON
GRPO = dict(COMMON)
