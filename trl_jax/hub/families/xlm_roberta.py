"""xlm-roberta: roberta in a hundred languages."""

from __future__ import annotations

from trl_jax.hub.families import roberta

FAMILY = roberta.family("xlm-roberta", "XLMRoberta", roberta.head_first)
