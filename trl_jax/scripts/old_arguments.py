"""Names that scripts of 2024 imported from `trl.commands.cli_utils` and `trl.env_utils`."""

from dataclasses import dataclass, field

from trl_jax.scripts.utils import ScriptArguments

__all__ = ["DPOScriptArguments", "SFTScriptArguments", "strtobool"]
_REENTRANT = {"help": "For gradient_checkpointing_kwargs, which have no effect here."}


@dataclass
class SFTScriptArguments(ScriptArguments):
    """The dataset arguments of an SFT script in TRL 0.8 to 0.11."""

    dataset_name: str | None = field(
        default="timdettmers/openassistant-guanaco",
        metadata={"help": "Hub id, local folder, or jsonl, json, parquet or csv file."},
    )
    gradient_checkpointing_use_reentrant: bool = field(default=False, metadata=_REENTRANT)


@dataclass
class DPOScriptArguments(ScriptArguments):
    """The dataset arguments of a DPO script in TRL 0.8 to 0.11."""

    sanity_check: bool = field(default=False, metadata={"help": "For scripts that then use only a few rows."})
    gradient_checkpointing_use_reentrant: bool = field(default=False, metadata=_REENTRANT)


def strtobool(val: str) -> bool:
    """Parse a boolean.

    Raises:
        ValueError: the text is not a boolean.
    """
    for truth, texts in ((True, "y yes t true on 1"), (False, "n no f false off 0")):
        if val.lower() in texts.split():
            return truth
    raise ValueError(f"A truth value must be yes or no, true or false, on or off, 1 or 0, got {val!r}.")
