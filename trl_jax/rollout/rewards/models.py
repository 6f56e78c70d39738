"""Reward models: models with a score head that judge completions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trl_jax.core.printable import brief
from trl_jax.data.rows.chat import is_messages, rendered
from trl_jax.data.rows.tokenizer import load_tokenizer
from trl_jax.hub.find import find_checkpoint
from trl_jax.hub.load_arguments import told_of
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch.objects import as_checkpoint, is_torch_model

_ROWS = 32  # that are scored at once


@dataclass
class RewardModel:
    """Scores prompts with their completions.

    model: with a score head.
    tokenizer: the model's own, whose chat template renders conversations.
    template_options: further arguments of that template.
    """

    model: PreTrainedModel
    tokenizer: Any
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of the model's name or path."""
        return str(self.model.name_or_path).rstrip("/").rpartition("/")[2]

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> np.ndarray:
        """The score of each prompt with its completion, float32 `[B]`."""
        whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        if is_messages(prompts[0]):
            options = {**self.template_options, "tokenize": False}
            names = [f"The completion {brief(talk[-1:], 300)}" for talk in whole]
            whole = [rendered(self.tokenizer, *pair, **options) for pair in zip(whole, names, strict=True)]
        ids = self.tokenizer(text=whole, add_special_tokens=False)["input_ids"]
        return self.scores(ids)

    def scores(self, ids: list[list[int]]) -> np.ndarray:
        """The score of each text, float32 `[B]`, by its tokens."""
        return np.concatenate([self._scores(ids[start : start + _ROWS]) for start in range(0, len(ids), _ROWS)])

    def _scores(self, ids: list[list[int]]) -> np.ndarray:
        lengths = np.asarray([len(own) for own in ids])
        mask = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.full(mask.shape, self.tokenizer.pad_token_id, np.int64)
        tokens[mask] = np.concatenate([np.asarray(own, np.int64) for own in ids])
        return np.asarray(self.model(tokens, mask).logits[:, 0], np.float32)


def is_model(value: Any) -> bool:
    """Whether it is a reward model and not a function: a name or folder, a model of ours, or one of torch's."""
    return isinstance(value, str | os.PathLike | PreTrainedModel) or is_torch_model(value)


def reward_model(
    model: Any,
    tokenizer: Any = None,
    *,
    template_options: Mapping[str, Any] | None = None,
    model_init_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    seed: int = 42,
) -> RewardModel:
    """The reward model that a script passes in the place of a function.

    Args:
        model: a folder or name on the Hub; a model of ours, as `RewardTrainer.model`; or one of transformers'.
        tokenizer: None loads the model's own. Where it has no pad token, that becomes its eos token, as in TRL.
        model_init_kwargs: how a model given by name is loaded; the type of its weights is the checkpoint's, unless it
            says another.
        seed: draws a score head where the checkpoint has none.

    Raises:
        TypeError, ValueError: the model has another head, or cannot be loaded.
    """
    options = {"trust_remote_code": True, **(model_init_kwargs or {})} if trust_remote_code else model_init_kwargs or {}
    revision = options.get("revision") if isinstance(model, str | os.PathLike) else None
    if is_torch_model(model):
        place, config = model.config._name_or_path, model.config
        _check_labels(config)
        with as_checkpoint(model, "score", dropout=False) as checkpoint:
            ours = checkpoint.load(seed)
    elif isinstance(model, PreTrainedModel):
        ours, place, config = model, model.name_or_path, model.config
    else:
        with told_of("reward_funcs"):
            ours = find_checkpoint(str(model), **options).load(seed)
        place, config = str(model), ours.config
    if ours.backend.head != "score":
        raise TypeError(
            f"reward_funcs has the model {ours.name_or_path}, which has no score head: load it with "
            "trl_jax.AutoModelForSequenceClassification.from_pretrained, or pass its name."
        )
    if tokenizer is None:
        tokenizer = load_tokenizer(place, config, trust_remote_code=trust_remote_code, revision=revision)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    ours.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return RewardModel(ours, tokenizer, dict(template_options or {}))


def _check_labels(config: Any) -> None:
    if config.num_labels != 1:
        labels = ", ".join(f"{number} {name!r}" for number, name in sorted(config.id2label.items()))
        raise ValueError(
            f"reward_funcs has the model {config._name_or_path} with {config.num_labels} labels ({labels}), and a "
            "reward is one number; TRL takes the first label's score, whatever it means. Pass a function that gives "
            "the score you mean, as in lambda completions, **columns: scores_of(completions)[:, 1].tolist()."
        )
