"""camembert: roberta in French."""

from __future__ import annotations

from trl_jax.hub.families import roberta

FAMILY = roberta.family("camembert", "Camembert", roberta.head_first)
