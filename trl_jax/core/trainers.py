"""The table of trainers, the names of their losses, placeholders for names of TRL that are not implemented, and lazy
imports."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Signature
from typing import Any, NamedTuple, NoReturn

# Lazy imports


def lazy_getattr(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a `__getattr__` for `package` that imports names on first use.

    Args:
        where: name -> the module that defines it.
    """

    def fetch(name: str) -> Any:
        if name in where:
            value = getattr(importlib.import_module(where[name]), name)
            vars(importlib.import_module(package))[name] = value
            return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return fetch


def places(package: str, names: Mapping[str, str]) -> dict[str, str]:
    """Name -> module, for `lazy_getattr`, from the names that each module of `package` has, separated by spaces."""
    return {name: f"{package}.{module}" for module, all_names in names.items() for name in all_names.split()}


# Trainers. An entry here gives a trainer its public names, its command and its support in `plan`.


class TrainerNames(NamedTuple):
    """The names of a trainer; its modules are named as in TRL.

    command: as in `trl-jax sft`. The script is scripts/<command>.py; the classes are in trainer/<command>_trainer.py
        and trainer/<command>_config.py.
    trainer, config: the class names.
    rows: what the command line calls the rows of a dataset.
    summary: one line for `trl-jax --help`.
    """

    command: str
    trainer: str
    config: str
    rows: str
    summary: str

    @property
    def where(self) -> dict[str, str]:
        """Class name -> the module that defines it."""
        start = f"trl_jax.trainer.{self.command}"
        return {self.trainer: f"{start}_trainer", self.config: f"{start}_config"}

    def load(self, name: str) -> type:
        """Import one of the two classes."""
        return vars(importlib.import_module(self.where[name]))[name]

    def load_trainer(self) -> type:
        return self.load(self.trainer)

    def load_config(self) -> type:
        return self.load(self.config)


_TABLE = (
    TrainerNames("reward", "RewardTrainer", "RewardConfig", "pairs", "train a reward model on preference pairs"),
    TrainerNames("sft", "SFTTrainer", "SFTConfig", "rows", "fine-tune a language model on texts or conversations"),
    TrainerNames(
        "dpo", "DPOTrainer", "DPOConfig", "pairs", "train a language model on preference pairs with a reference model"
    ),
    TrainerNames("kto", "KTOTrainer", "KTOConfig", "rows", "train a language model on completions labeled good or bad"),
    TrainerNames(
        "orpo",
        "ORPOTrainer",
        "ORPOConfig",
        "pairs",
        "train on preference pairs with the ORPO loss, without a reference",
    ),
    TrainerNames(
        "cpo", "CPOTrainer", "CPOConfig", "pairs", "train on preference pairs with the CPO, SimPO or AlphaPO loss"
    ),
    TrainerNames(
        "grpo", "GRPOTrainer", "GRPOConfig", "prompts", "train a language model online with reward functions (GRPO)"
    ),
    TrainerNames(
        "rloo", "RLOOTrainer", "RLOOConfig", "prompts", "train a language model online with REINFORCE leave-one-out"
    ),
    TrainerNames(
        "distillation",
        "DistillationTrainer",
        "DistillationConfig",
        "prompts",
        "distill a teacher model into a smaller one, online, on the student's completions",
    ),
)
TRAINERS: dict[str, TrainerNames] = {names.command: names for names in _TABLE}
# Trainers in trl.experimental, by the name of their module there. The first four are also in TRAINERS.
EXPERIMENTAL: dict[str, TrainerNames] = {
    **{name: TRAINERS[name] for name in ("cpo", "distillation", "kto", "orpo")},
    "gkd": TrainerNames(
        "gkd", "GKDTrainer", "GKDConfig", "rows", "distill a teacher on completions of the student and of a dataset"
    ),
    "async_grpo": TrainerNames(
        "async_grpo", "AsyncGRPOTrainer", "AsyncGRPOConfig", "prompts", "train with GRPO while vLLM servers generate"
    ),
    "online_dpo": TrainerNames(
        "online_dpo", "OnlineDPOTrainer", "OnlineDPOConfig", "prompts", "DPO on pairs that the model writes itself"
    ),
}
DEFAULT = "reward"  # command that `trl-jax plan` assumes
WHERE: dict[str, str] = {name: module for names in _TABLE for name, module in names.where.items()}


def plannable() -> dict[str, TrainerNames]:
    """The trainers that `trl-jax plan --trainer` accepts."""
    return TRAINERS | {name: EXPERIMENTAL[name] for name in ("gkd", "online_dpo")}


def names_of_config(args: object) -> TrainerNames:
    """The trainer that these arguments belong to.

    Raises:
        TypeError: they belong to no known trainer.
    """
    table = (*TRAINERS.values(), *EXPERIMENTAL.values())
    by_class = {(names.where[names.config], names.config): names for names in table}
    for cls in type(args).__mro__:  # GKDConfig derives from SFTConfig
        if (names := by_class.get((cls.__module__, cls.__qualname__))) is not None:
            return names
    configs = ", ".join(names.config for names in TRAINERS.values())
    raise TypeError(
        f"args must be one of {configs}, got a {type(args).__module__}.{type(args).__qualname__}. For a config of your "
        "own, pass its trainer."
    )


# Names of losses and their variants, in TRL's spelling

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

# Names of this or earlier TRL releases that are not implemented: importing them works, using them raises an error.


_REWARDED = "GRPOTrainer or RLOOTrainer, which train on completions that the model writes"
_PAIRS = "DPOTrainer, which trains on preference pairs"
_DISTILLED = "DistillationTrainer, where the student writes, or SFTTrainer on rows that the teacher wrote"
_JUDGE = "AutoModelForSequenceClassification with a trained reward model, as `trl-jax score` does"
_VALUE = "GRPOTrainer or RLOOTrainer, which need no value head"
_CALLBACK = "a TrainerCallback of the script's own, which gets the model as kwargs['model']"

# The closest alternative to each name; "" if there is none.
NEAR: dict[str, str] = {
    "AlignPropConfig": "", "AlignPropTrainer": "", "DDPOConfig": "", "DDPOTrainer": "",
    "DDPOStableDiffusionPipeline": "", "DefaultDDPOStableDiffusionPipeline": "",
    "AllTrueJudge": _JUDGE, "BaseBinaryJudge": _JUDGE, "BaseJudge": _JUDGE, "BasePairwiseJudge": _JUDGE,
    "BaseRankJudge": _JUDGE, "HfPairwiseJudge": _JUDGE, "OpenAIPairwiseJudge": _JUDGE, "PairRMJudge": _JUDGE,
    "AutoModelForCausalLMWithValueHead": _VALUE, "AutoModelForSeq2SeqLMWithValueHead": _VALUE,
    "PreTrainedModelWrapper": _VALUE,
    "NashMDConfig": _REWARDED, "NashMDTrainer": _REWARDED, "PPOConfig": _REWARDED, "PPOTrainer": _REWARDED,
    "PPOv2Config": _REWARDED, "PPOv2Trainer": _REWARDED, "TextEnvironment": _REWARDED, "TextHistory": _REWARDED,
    "XPOConfig": _REWARDED, "XPOTrainer": _REWARDED, "BestOfNSampler": "examples/best_of_n.py, which does its work",
    "BCOConfig": "KTOTrainer, which trains on answers that are good or bad",
    "BCOTrainer": "KTOTrainer, which trains on answers that are good or bad",
    "DPODataCollatorWithPadding": _PAIRS,
    "MiniLLMConfig": _DISTILLED, "MiniLLMTrainer": _DISTILLED,
    "LengthSampler": "max_completion_length of GRPOConfig or RLOOConfig",
    "PPODecorators": "nothing, for JAX frees memory by itself: leave it out",
    "IterativeSFTConfig": "SFTTrainer", "IterativeSFTTrainer": "SFTTrainer",
    "PRMConfig": "RewardTrainer, which scores whole answers", "PRMTrainer": "RewardTrainer, which scores whole answers",
    "MergeModelCallback": _CALLBACK, "MergeConfig": _CALLBACK, "WeaveCallback": _CALLBACK, "WinRateCallback": _CALLBACK,
    "SyncRefModelCallback": "DPOConfig(sync_ref_model=True), GRPOConfig too",
    "DataCollatorForChatML": "SFTConfig(assistant_only_loss=True) with rows of 'messages'",
}  # fmt: skip


# Trainers that TRL 1.16 only has in trl.experimental, without "Config" and "Trainer" -> (module, closest alternative).
_EXPERIMENTAL: dict[str, tuple[str, str]] = {
    "A2PO": ("a2po", _REWARDED), "AsyncDistillation": ("async_distillation", _DISTILLED),
    "GMPO": ("gmpo", _REWARDED), "GOLD": ("gold", _DISTILLED), "IWOPD": ("iw_opd", _DISTILLED),
    "SDFT": ("sdft", _DISTILLED), "SDPO": ("sdpo", _DISTILLED),
    "ServerDistillation": ("server_distillation", _DISTILLED), "TPO": ("tpo", _PAIRS),
}  # fmt: skip


def check_not_experimental(name: str) -> None:
    """Raise ImportError, as TRL 1.16 does, for a name that is only in trl.experimental, so that a script's
    `except ImportError` can import it from there."""
    for package, names in EXPERIMENTAL.items():
        if package not in TRAINERS and name in (names.trainer, names.config):
            raise ImportError(
                f"{name} is in trl_jax.experimental.{package}, because TRL only has it in trl.experimental."
            )
    module, near = _EXPERIMENTAL.get(name.removesuffix("Config").removesuffix("Trainer"), (None, None))
    if module is not None and name.endswith(("Config", "Trainer")):
        raise ImportError(
            f"{name} is not implemented in trl_jax. Closest: {near}. TRL has it in trl.experimental.{module}, which "
            "`python -m trl_jax` imports from the installed trl; it trains with torch."
        )


class _NotBuilt(type):
    """The metaclass of placeholders: calling them or reading their attributes raises NotImplementedError."""

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(_sentence(cls))

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise NotImplementedError(_sentence(cls))


def _sentence(cls: type) -> str:
    name = next(kind.__name__ for kind in cls.__mro__ if kind.__module__ == __name__)  # cls may be a user's subclass
    near = NEAR[name]
    return f"TRL's {name} is not implemented in trl_jax." + (f" Closest: {near}." if near else "")


def placeholder(name: str) -> type:
    """A class with this name whose use raises NotImplementedError, also in subclasses. Configs are dataclasses, so that
    a script can derive its own dataclasses from them."""
    kind = _NotBuilt(name, (), {"__module__": __name__, "__signature__": Signature()})  # read by dataclass
    return dataclass(kind) if name.endswith("Config") else kind
