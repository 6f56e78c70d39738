"""How each field of DistillationConfig is handled."""

from __future__ import annotations

from trl_jax.core.arguments import rules
from trl_jax.core.arguments.table import Handling, fields
from trl_jax.core.arguments.tables.base import BASE
from trl_jax.core.arguments.tables.generation import WRITING, without_sequence_axis

DISTILLATION: dict[str, Handling] = {
    **WRITING,
    **without_sequence_axis("DistillationTrainer"),
    **fields("max_prompt_length", "native", rule=rules.whole(1, optional=True)),
    **fields("teacher_model_name_or_path teacher_model_revision", "native"),
    **fields("teacher_model_init_kwargs", "native", rule=BASE["model_init_kwargs"].rule),
    **fields("beta", "native", rule=rules.number(0, most=1.0)),
    **fields("max_tool_calling_iterations", "native", rule=rules.whole(1, optional=True)),
}
