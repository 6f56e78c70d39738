"""The settings of a policy's loss, in TRL's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trl_jax.core.arguments.tables.grpo import LOSSES

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # those with the clipped surrogate
PER_GENERATION = ("dapo", "cispo", "vespo")  # those that divide by the tokens of a generation
SamplerCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class PolicyLoss:
    r"""The loss of `grpo_loss`.

    With $l$ the log-probability of a token, $\rho = \exp(l - l_{old})$ its ratio, $A$ its completion's advantage and
    $sg$ a stopped gradient, the loss of a token is:

    | loss_type | loss of a token | from |
    | --- | --- | --- |
    | grpo, bnpo, dr_grpo, dapo, luspo | $-\min(\min(\rho, \delta) A, clip(\rho, 1 - \epsilon, 1 + \epsilon_h) A)$ |
      GRPO, arXiv:2402.03300, eq. 3; $\delta$ of INTELLECT-2, arXiv:2505.07291 |
    | cispo | $-sg(\min(\rho, \epsilon_h)) A\, l$ | MiniMax-M1, arXiv:2506.13585; ScaleRL, arXiv:2510.13786 |
    | sapo | $-\frac{4}{\tau} \sigma(\tau (\rho - 1)) A$, $\tau$ by the sign of $A$ | SAPO, arXiv:2511.20347 |
    | vespo | $-sg(e^\lambda w^k e^{-\lambda w}) A\, l$ with $w = \prod_t \rho_t$ | VESPO, arXiv:2602.10693 |

    and the step's is a mean of them: over each completion, then over completions (grpo, sapo); over the tokens of a
    micro-batch (bnpo, arXiv:2506.02864); over as many completions of `max_completion_length` tokens (dr_grpo,
    arXiv:2503.20783); over the tokens of the whole generation (dapo, arXiv:2503.14476, eq. 8; cispo, vespo); the sum
    over each completion, then the mean over completions (luspo, arXiv:2602.05261). `token_weights` has the divisors.

    Args:
        epsilon, epsilon_high: how far the ratio may go from 1; epsilon_high None: as epsilon. Of cispo, epsilon_high
            itself is the most that a ratio counts.
        delta: the most that the ratio counts, of a negative advantage too; None: no bound.
        beta: the factor of the divergence from the reference, `kl_k3`, that is added to each token's loss.
        use_bias_correction_kl: multiply that divergence by the ratio (DeepSeek-V3.2, arXiv:2512.02556).
        importance_sampling_level: "token", or "sequence": the ratio of a whole completion, the geometric mean of its
            tokens' (GSPO, arXiv:2507.18071).
        off_policy_mask_threshold: completions of a negative advantage whose mean log-ratio of sampler and policy is
            above do not count (DeepSeek-V3.2, eq. 9); None: all count.
        top_entropy_quantile: the share of a micro-batch's tokens that count, those of the highest entropy
            (arXiv:2506.01939); of the divergence all count.
        sapo_temperature_neg, sapo_temperature_pos: tau, of advantages up to 0 and above.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: of advantages from 0 on, and below.
        max_completion_length: the constant of dr_grpo.
        sampler_correction: multiply by the ratio of the old policy and what sampled (`sampler_ratio`): of each "token"
            or of the whole "sequence", which sampler_clip_min and sampler_clip_max truncate, or beyond which it is 0
            ("mask"). None: the policy itself sampled.
    """

    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    importance_sampling_level: str = "token"
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: int = 512
    sampler_correction: SamplerCorrection | None = None
    sampler_clip_min: float | None = None
    sampler_clip_max: float | None = 3.0

    def __post_init__(self):
        if self.loss_type not in LOSSES:
            raise ValueError(f"Unknown loss type: {self.loss_type}. Should be one of {list(LOSSES)}")
        if self.importance_sampling_level not in ("token", "sequence"):
            raise ValueError(
                f"Unknown importance sampling level: {self.importance_sampling_level}. Possible values are 'token' and "
                "'sequence'."
            )

    @property
    def highest(self) -> float:
        """epsilon_high, or epsilon in its place."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def of_sequences(self) -> bool:
        """Whether ratios are those of whole completions."""
        return self.importance_sampling_level == "sequence"

    @property
    def corrects_sequences(self) -> bool:
        """Whether the sampler's correction is one number a completion."""
        return self.sampler_correction is not None and self.sampler_correction.startswith("sequence")


DEFAULTS = PolicyLoss()
