"""Whether a run balances the experts of its model, and how much that counts."""

from __future__ import annotations

from trl_jax.run.state import RunState


def balance_experts(run: RunState, coefficient: float | None, *, in_config: bool = False) -> bool:
    """Let a run add its model's load-balancing loss.

    Args:
        in_config: the model's config says so from there on, as TRL's SFTTrainer has it.
        coefficient: `router_aux_loss_coef` of the arguments; None is that of the model's config, 0.0 without any.

    Returns:
        Whether the loss is added.

    Raises:
        ValueError: there is a coefficient and the model gives no routers' numbers.
    """
    config, model = run.model.config.get_text_config(), run.model
    facts = config.to_dict()
    own = facts.get("router_aux_loss_coef", 0.0) if coefficient is None else coefficient
    if "output_router_logits" not in facts:
        if coefficient:
            raise ValueError(
                f"`router_aux_loss_coef` is set to {coefficient} but {_name(run)} is not a Mixture-of-Experts model "
                "that returns its router logits, so there is no auxiliary loss to weight. Leave it out."
            )
        return False
    if own and not model.backend.has_routers:
        raise ValueError(
            f"router_aux_loss_coef={own} of {_name(run)}: this model runs on the {model.backend.name} backend, which "
            "has no load-balancing loss. Pass router_aux_loss_coef=0.0 to train without it."
        )
    if in_config and "router_aux_loss_coef" in facts:
        config.output_router_logits, config.router_aux_loss_coef = own != 0, own
    run.router_aux_loss_coef = own
    return own != 0


def _name(run: RunState) -> str:
    return run.model.config.architectures[0]
