"""Callbacks that TRL has beside transformers' own."""

from trl_jax.trainer.callbacks.completions import LogCompletionsCallback as LogCompletionsCallback
from trl_jax.trainer.callbacks.moving_average import BEMACallback as BEMACallback
from trl_jax.trainer.callbacks.rich_progress import RichProgressCallback as RichProgressCallback
