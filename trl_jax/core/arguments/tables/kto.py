"""How each field of KTOConfig is handled."""

from __future__ import annotations

from trl_jax.core.arguments import rules
from trl_jax.core.arguments.table import Handling, fields
from trl_jax.core.arguments.tables.with_reference import WITH_REFERENCE

LOSSES = ("kto", "apo_zero_unpaired")

KTO: dict[str, Handling] = {
    **WITH_REFERENCE,
    **fields("label_names", "warned", "the column that says which answers are desirable is called 'label'."),
    **fields("loss_type", "native", rule=rules.one_of(*LOSSES)),
    **fields("desirable_weight undesirable_weight", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
}
