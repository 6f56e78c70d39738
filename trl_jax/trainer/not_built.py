"""Names of TRL's, of this release or an earlier one, that are not built: they import, and say so when they are used.

Scripts import them beside others, and many never use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Signature
from typing import Any, NoReturn

_REWARDED = "GRPOTrainer or RLOOTrainer, which train on completions that the model writes"
_PAIRS = "DPOTrainer, which trains on preference pairs"
_DISTILLED = "DistillationTrainer, where the student writes, or SFTTrainer on rows that the teacher wrote"
_JUDGE = "AutoModelForSequenceClassification with a trained reward model, as `trl-jax score` does"
_VALUE = "GRPOTrainer or RLOOTrainer, which need no value head"
_CALLBACK = "a TrainerCallback of the script's own, which gets the model as kwargs['model']"

# What comes near it, by name; "" where nothing does.
NEAR: dict[str, str] = {
    "AlignPropConfig": "", "AlignPropTrainer": "", "DDPOConfig": "", "DDPOTrainer": "",
    "DDPOStableDiffusionPipeline": "", "DefaultDDPOStableDiffusionPipeline": "",
    "AllTrueJudge": _JUDGE, "BaseBinaryJudge": _JUDGE, "BaseJudge": _JUDGE, "BasePairwiseJudge": _JUDGE,
    "BaseRankJudge": _JUDGE, "HfPairwiseJudge": _JUDGE, "OpenAIPairwiseJudge": _JUDGE, "PairRMJudge": _JUDGE,
    "AutoModelForCausalLMWithValueHead": _VALUE, "AutoModelForSeq2SeqLMWithValueHead": _VALUE,
    "PreTrainedModelWrapper": _VALUE,
    "AsyncGRPOConfig": _REWARDED, "AsyncGRPOTrainer": _REWARDED, "NashMDConfig": _REWARDED, "NashMDTrainer": _REWARDED,
    "OnlineDPOConfig": _REWARDED, "OnlineDPOTrainer": _REWARDED, "PPOConfig": _REWARDED, "PPOTrainer": _REWARDED,
    "PPOv2Config": _REWARDED, "PPOv2Trainer": _REWARDED, "TextEnvironment": _REWARDED, "TextHistory": _REWARDED,
    "XPOConfig": _REWARDED, "XPOTrainer": _REWARDED, "BestOfNSampler": "examples/best_of_n.py, which does its work",
    "BCOConfig": "KTOTrainer, which trains on answers that are good or bad",
    "BCOTrainer": "KTOTrainer, which trains on answers that are good or bad",
    "DPODataCollatorWithPadding": _PAIRS,
    "GKDConfig": _DISTILLED, "GKDTrainer": _DISTILLED, "GOLDConfig": _DISTILLED, "GOLDTrainer": _DISTILLED,
    "MiniLLMConfig": _DISTILLED, "MiniLLMTrainer": _DISTILLED,
    "LengthSampler": "max_completion_length of GRPOConfig or RLOOConfig",
    "PPODecorators": "nothing, for JAX frees memory by itself: leave it out",
    "IterativeSFTConfig": "SFTTrainer", "IterativeSFTTrainer": "SFTTrainer",
    "PRMConfig": "RewardTrainer, which scores whole answers", "PRMTrainer": "RewardTrainer, which scores whole answers",
    "MergeModelCallback": _CALLBACK, "MergeConfig": _CALLBACK, "WeaveCallback": _CALLBACK, "WinRateCallback": _CALLBACK,
    "SyncRefModelCallback": "DPOConfig(sync_ref_model=True), GRPOConfig too",
    "DataCollatorForChatML": "SFTConfig(assistant_only_loss=True) with rows of 'messages'",
}  # fmt: skip


class _NotBuilt(type):
    """The class of classes that say so."""

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(_sentence(cls))

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise NotImplementedError(_sentence(cls))


def _sentence(cls: type) -> str:
    name = next(kind.__name__ for kind in cls.__mro__ if kind.__module__ == __name__)  # of a script's subclass, too
    near = NEAR[name]
    return f"{name} of TRL's is not built in trl_jax." + (f" Near it: {near}." if near else "")


def placeholder(name: str) -> type:
    """A class of that name whose use raises NotImplementedError; subclasses of it, too. Those of configs may be
    dataclasses, as recipes define them for all trainers at once."""
    kind = _NotBuilt(name, (), {"__module__": __name__, "__signature__": Signature()})  # which a dataclass asks for
    return dataclass(kind) if name.endswith("Config") else kind
