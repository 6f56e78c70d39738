"""The names of TRL's `trl.experimental.cpo`."""

from trl_jax.trainer.cpo_config import CPOConfig as CPOConfig
from trl_jax.trainer.cpo_trainer import CPOTrainer as CPOTrainer
