"""Names that scripts of 2024 imported from `trl.commands.cli_utils` and `trl.env_utils`."""

from dataclasses import dataclass, field

from trl_jax.scripts.utils import ScriptArguments

__all__ = ["DPOScriptArguments", "SFTScriptArguments", "strtobool"]
_REENTRANT = {"help": "Scripts pass it on in gradient_checkpointing_kwargs, which have no effect here."}


@dataclass
class SFTScriptArguments(ScriptArguments):
    """The data of a fine-tuning script, as TRL 0.8 to 0.11 had it."""

    dataset_name: str | None = field(
        default="timdettmers/openassistant-guanaco",
        metadata={"help": "Hub id, local folder, or jsonl, json, parquet or csv file of the rows."},
    )
    gradient_checkpointing_use_reentrant: bool = field(default=False, metadata=_REENTRANT)


@dataclass
class DPOScriptArguments(ScriptArguments):
    """The data of a script of preference optimisation, as TRL 0.8 to 0.11 had it."""

    sanity_check: bool = field(default=False, metadata={"help": "Scripts take few rows then."})
    gradient_checkpointing_use_reentrant: bool = field(default=False, metadata=_REENTRANT)


def strtobool(val: str) -> bool:
    """The truth that a text names.

    Raises:
        ValueError: a text that names none.
    """
    for truth, texts in ((True, "y yes t true on 1"), (False, "n no f false off 0")):
        if val.lower() in texts.split():
            return truth
    raise ValueError(f"Invalid truth value {val!r}: wanted yes or no, true or false, on or off, 1 or 0.")
