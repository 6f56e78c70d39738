"""ModelConfig: command-line flags that select the model and its adapter."""

import functools
import warnings
from dataclasses import dataclass, field
from typing import Any

from trl_jax.config.renamed import translate_old_names
from trl_jax.config.rules import read_bools


def _taking_torch_dtype(kind: type) -> type:
    """Let the constructor take `torch_dtype`, the earlier name of `dtype`."""
    plain = kind.__init__

    @functools.wraps(plain)
    def init(self, *args: Any, **kwargs: Any) -> None:
        if "torch_dtype" in kwargs:
            kwargs, _, notes = translate_old_names(kwargs, kind.__dataclass_fields__)
            warnings.warn(notes[0], FutureWarning, stacklevel=2)
        plain(self, *args, **kwargs)

    kind.__init__ = init
    return kind


@_taking_torch_dtype
@dataclass
class ModelConfig:
    """TRL's fields, defaults and order. The script that reads a flag reports whether it is supported.

    A `lora_target_modules` with a single entry becomes that string, because it may be a pattern or "all-linear".

    Raises:
        ValueError: both load_in_8bit and load_in_4bit are set.
    """

    _argument_group_name = "model"

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of the checkpoint to start from."}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the checkpoint."})
    dtype: str | None = field(
        default="float32",
        metadata={
            "help": "Data type to load the weights in; auto keeps the checkpoint's.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "Name of the attention kernel to use."})
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter instead of the whole model."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the LoRA adapter."})
    lora_alpha: int = field(
        default=32, metadata={"help": "Scale of the LoRA adapter, before it is divided by the rank."}
    )
    lora_dropout: float = field(
        default=0.05, metadata={"help": "Dropout probability at the input of the LoRA adapter."}
    )
    lora_target_modules: list[str] | None = field(default=None, metadata={"help": "Modules to adapt with LoRA."})
    lora_target_parameters: list[str] | None = field(default=None, metadata={"help": "Parameters to adapt with LoRA."})
    lora_modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules to train in full, in addition to the adapter."}
    )
    lora_task_type: str = field(
        default="CAUSAL_LM", metadata={"help": "Task of the adapter: SEQ_CLS for a reward model."}
    )
    use_rslora: bool = field(
        default=False, metadata={"help": "Divide lora_alpha by the square root of the rank instead of by the rank."}
    )
    use_dora: bool = field(
        default=False,
        metadata={
            "help": "Use DoRA: LoRA adapts the direction of a weight matrix, and a separate vector its magnitude."
        },
    )
    load_in_8bit: bool = field(default=False, metadata={"help": "Quantize the base model to 8 bits."})
    load_in_4bit: bool = field(default=False, metadata={"help": "Quantize the base model to 4 bits."})
    bnb_4bit_quant_type: str = field(
        default="nf4", metadata={"help": "Number format of 4-bit weights.", "choices": ["fp4", "nf4"]}
    )
    use_bnb_nested_quant: bool = field(default=False, metadata={"help": "Quantize the scales of 4-bit weights too."})
    bnb_4bit_quant_storage: str | None = field(default=None, metadata={"help": "Data type that stores 4-bit weights."})

    def __post_init__(self):
        read_bools(self)
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit=True and load_in_4bit=True: a model has one of them. Leave one out.")
        if isinstance(self.lora_target_modules, (list, tuple)) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]

    @property
    def trust_remote_code(self) -> bool:
        """False: a model's own code is never run. In TRL this became an argument of the trainers' configs."""
        return False

    @property
    def torch_dtype(self) -> str | None:
        """The earlier name of `dtype`."""
        return self.dtype
