"""Names of losses and their variants, in TRL's spelling. Imports no JAX, so that configs can use it."""

DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
KTO_LOSSES = ("kto", "apo_zero_unpaired")
CPO_LOSSES = ("sigmoid", "hinge", "ipo", "simpo", "alphapo")
SFT_LOSSES = ("nll", "dft")
GRPO_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
SAMPLER_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
