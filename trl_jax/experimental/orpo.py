"""The names of TRL's `trl.experimental.orpo`."""

from trl_jax.trainer.orpo_config import ORPOConfig as ORPOConfig
from trl_jax.trainer.orpo_trainer import ORPOTrainer as ORPOTrainer
