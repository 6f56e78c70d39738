"""Names that scripts still use and that mean nothing any more, and what to write today."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

GONE = (
    "fp16_backend half_precision_backend include_tokens_per_second ipex jit_mode_eval overwrite_output_dir"
    " past_index ray_scope save_safetensors torchdynamo tpu_num_cores use_ipex use_mps_device"
)
RENAMED = {
    "dispatch_batches": "leave it out: one process makes the batches.",
    "evaluation_strategy": "use eval_strategy.",
    "group_by_length": "use train_sampling_strategy.",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR.",
    "max_prompt_length": "use max_length, which holds for prompt and answer together.",
    "no_cuda": "use use_cpu.",
    "push_to_hub_model_id": "use hub_model_id.",
    "push_to_hub_organization": "use hub_model_id, as organization/name.",
    "push_to_hub_token": "use hub_token.",
    "split_batches": "leave it out: one process makes the batches.",
    "torch_dtype": "use dtype.",
    "warmup_ratio": "use warmup_steps: a number below 1 is a ratio.",
    **dict.fromkeys(GONE.split(), "leave it out: transformers no longer has it."),
}


def way_out(name: str, known: Iterable[str]) -> str:
    """What to write instead of the unknown name, as a sentence."""
    if name in RENAMED:
        return RENAMED[name]
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else "no argument has a name like it."
