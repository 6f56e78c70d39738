"""How the fields are handled that the configs of trainers with a reference share: DPOConfig and KTOConfig."""

from __future__ import annotations

from trl_jax.core.arguments import rules
from trl_jax.core.arguments.base import BASE, COMMON
from trl_jax.core.arguments.table import Handling, handled

WITH_REFERENCE: dict[str, Handling] = {
    **BASE,
    **{name: line for name, line in COMMON.items() if name not in ("chat_template_path", "eos_token", "pad_token")},
    **handled("label_smoothing_factor", "warned", "preference losses have no labels of tokens to smooth."),
    **handled("router_aux_loss_coef", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    **handled("precompute_ref_log_probs", "native"),
    **handled("precompute_ref_batch_size", "native", rule=rules.whole(1, optional=True, most=rules.MOST_EXAMPLES)),
    **handled("sync_ref_model", "refused", "the reference stays as it is in this release of trl_jax. Leave it out."),
    **handled("ref_model_mixup_alpha ref_model_sync_steps", "refused", "it belongs to sync_ref_model. Leave it out."),
    **handled("beta", "native", rule=rules.number(1e-9, most=rules.MOST_FLOAT32)),
}
