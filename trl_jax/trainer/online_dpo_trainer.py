"""Online direct preference optimization: TRL's experimental OnlineDPOTrainer on JAX."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback

from trl_jax.config.base import BaseConfig
from trl_jax.core.text import brief
from trl_jax.data.batch import IGNORED, Example, Extras
from trl_jax.data.chat import prompt_options, rendered
from trl_jax.data.loader import IndexedExample, StepBatch
from trl_jax.data.prompts import completion_texts, is_conversation
from trl_jax.generation.generator import StopRule
from trl_jax.hub.generate import check_completes, check_generates, stop_rule
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.processes import several
from trl_jax.rollout.rewards import HELPERS, RewardFunctions, check_signature, is_model, raised_by, reward_functions
from trl_jax.tasks.dpo import OnlineDpoTask
from trl_jax.tasks.task import Task
from trl_jax.trainer.arguments import InitOnlyArg, accepting_old_keywords, as_config, refuse
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.online import eos_token_ids, sampling_options
from trl_jax.trainer.online_dpo_config import OnlineDPOConfig
from trl_jax.trainer.overrides import REFUSED, TrainerTraits, by_name, check_generate
from trl_jax.trainer.reference import loaded_reference, reference_as_model
from trl_jax.training.data import Batches, Completer, GeneratedSteps, image_columns
from trl_jax.training.policy_generator import up_to_end
from trl_jax.training.reference import ReferenceModel
from trl_jax.training.setup import Policy
from trl_jax.training.state import Setup

_FOR_LOSS = (
    "The step is one compiled function, and a loss of the script's own is not in this release of trl_jax for online "
    "DPO: choose loss_type and beta."
)
_FOR_COMPLETIONS = "Set the sampling of completions with generation_kwargs."
_FOR_REWARDS = "Write a reward function: it gets prompts, completions, completion_ids and all columns of the rows."
_NO_EVALUATION = (
    "OnlineDPOTrainer has no evaluation, as in TRL: pairs exist only while the model trains. Set eval_strategy='no', "
    "and score completions of trainer.model in a callback."
)


@runtime_checkable
class PairwiseJudge(Protocol):
    """The interface of pairwise judges in earlier TRL releases."""

    def judge(self, prompts: list[str], completions: list[list[str]]) -> Sequence[int]:
        """The better of the two completions of each prompt: 0 for the first, 1 for the second."""


class OnlineDPOTrainer(BaseTrainer):
    """Trains a language model on pairs of its own completions, of which rewards or a judge choose the better one
    (Direct Language Model Alignment from Online AI Feedback, https://huggingface.co/papers/2402.04792).

    The arguments are TRL's, in TRL's order; `judge` comes from earlier TRL releases.

    Args:
        model: a checkpoint's folder or Hub name, a model that `trl_jax.AutoModelForCausalLM` loaded, or a torch model
            of transformers, which receives the trained weights after `train()`.
        ref_model: the reference model; None: the model before training, or the base model of a new adapter.
        reward_funcs: a reward function or reward model, or a list of them. A function is called with `prompts`,
            `completions`, `completion_ids` (padded to the longest), the dataset's other columns and `trainer_state`,
            and returns a number or None for each completion. A model is a folder or Hub name, a model that
            `trl_jax.AutoModelForSequenceClassification` loaded, or a torch model.
        args: an OnlineDPOConfig; None means `OnlineDPOConfig("<model>-OnlineDPO")`.
        data_collator, compute_metrics, preprocess_logits_for_metrics: must be None.
        train_dataset: rows with a `prompt`, a text or messages; other columns go to the reward functions. A Dataset or
            an IterableDataset (with `max_steps`).
        eval_dataset: the same, or a dict of them, for callbacks.
        processing_class: the tokenizer; loaded with the model if None.
        reward_processing_classes: tokenizers of the reward models, one entry per reward function; None loads them with
            the models.
        peft_config: our or peft's LoraConfig.
        callbacks: transformers callbacks, in addition to the default ones.
        optimizers: an optax transformation that includes its learning rate, and None or a function of the step.
        judge: a `PairwiseJudge`, instead of reward_funcs. Conversations are passed to it as text, "User: ..." etc.

    Attributes:
        num_generations: completions per prompt.
        reward_func_names, reward_processing_classes: one entry per reward function; empty with a judge.

    Raises:
        TypeError, ValueError: names the invalid argument, row or checkpoint.
    """

    _name, _tag_names = "OnlineDPO", ["trl", "online-dpo"]
    _paper = "Direct Language Model Alignment from Online AI Feedback", "2402.04792"
    config_class = OnlineDPOConfig
    _traits = TrainerTraits(
        refused=replace(
            REFUSED,
            never_called=REFUSED.never_called
            | by_name(
                ("training_step compute_loss prediction_step _forward", _FOR_LOSS),
                ("_generate _generate_vllm", _FOR_COMPLETIONS),
                ("_calculate_rewards_from_functions", _FOR_REWARDS),
            ),
        ),
        tokenizer_sides={"padding_side": "left"},
    )
    num_generations = 2
    judge: PairwiseJudge | None = None
    _reward_functions: RewardFunctions | None = None
    reward_func_names: Sequence[str] = ()
    reward_processing_classes: Sequence[Any] = ()
    temperature, top_p, top_k, min_p = InitOnlyArg(), InitOnlyArg(), InitOnlyArg(), InitOnlyArg()
    repetition_penalty, max_length, use_vllm = InitOnlyArg(), InitOnlyArg(), InitOnlyArg()

    @accepting_old_keywords()
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        ref_model: str | os.PathLike | PreTrainedModel | None = None,
        reward_funcs: Any = None,
        args: OnlineDPOConfig | None = None,
        data_collator: None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        compute_metrics: None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: None = None,
        *,
        judge: PairwiseJudge | None = None,
    ):
        refuse(compute_metrics=compute_metrics, preprocess_logits_for_metrics=preprocess_logits_for_metrics)
        if ref_model is model and not isinstance(model, str | os.PathLike):
            raise ValueError(
                "`model` and `ref_model` cannot be the same object. If you want `ref_model` to be the same as `model`, "
                "either omit the `ref_model` argument or pass `None`."
            )
        args = None if args is None else as_config(args, OnlineDPOConfig)
        if args is not None and (args.eval_strategy != "no" or args.eval_on_start):
            raise ValueError(_NO_EVALUATION)
        self.judge = judge
        self.reward_funcs = _checked_sources(reward_funcs, judge)
        self._passed_model, self._ref_model, self._fresh_adapter = model, ref_model, peft_config is not None
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class, None, callbacks, optimizers,
            peft_config=peft_config,
        )  # fmt: skip
        if several():
            raise ValueError(
                "OnlineDPOTrainer with several processes is not in this release of trl_jax. Start a single process, or "
                "train with GRPOTrainer."
            )
        check_generates(self.model)
        setup = self._setup
        rewards = None if judge is not None else self._rewards(setup, reward_processing_classes)
        self.eos_token_ids = eos_token_ids(setup.processing_class, self.model)
        self.generation_kwargs = sampling_options(
            self.args, setup.processing_class, self.model, new_tokens=self.args.max_new_tokens
        )
        check_completes(self.model, self.generation_kwargs)
        scores = judge if rewards is None else rewards
        self._pairs = PairWriter(
            setup, Completer(setup, self.generation_kwargs), scores, frozenset(self.eos_token_ids),
            stop_rule(setup.model, self.generation_kwargs, setup.processing_class),
        )  # fmt: skip

    def _refresh_task(self) -> None:
        check_generate(self.model, self._passed_model)
        super()._refresh_task()

    @property
    def beta(self) -> float:
        """`args.beta`; if that is a list, its value for the current epoch."""
        return beta_of(self.args.beta, int(self.state.epoch or 0))

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """The reference model; None with a new adapter, where the base model is the reference."""
        return reference_as_model(self._setup.reference, self.model, self._ref_model)

    @property
    def reward_weights(self) -> Any:
        """The weight of each reward function, float32; None with a judge. It and its values may be set at any time,
        with effect from the next step."""
        return None if self._reward_functions is None else self._reward_functions.weights

    @reward_weights.setter
    def reward_weights(self, weights: Any) -> None:
        if self._reward_functions is not None:  # otherwise super().__init__ overwrites it, as in TRL
            self._reward_functions.set_weights(weights)

    def make_task(self) -> OnlineDpoTask:
        args = self.args
        return OnlineDpoTask(
            loss_type=args.loss_type, accumulation=args.gradient_accumulation_steps, scored=self.judge is None
        )

    def batches(self, dataset: Dataset | IterableDataset, *, training: bool) -> Batches:
        """A dataloader over a prepared dataset. Iterating over it yields rows; only the steps of train() turn them into
        pairs."""
        if not training:
            raise TypeError(_NO_EVALUATION)
        loader = replace(self.loader(dataset, training=True), columns=image_columns(dataset), example=_row)
        return Prompts(PairSteps(loader, self._pairs), self._setup.task)

    def loader(self, dataset: Dataset | IterableDataset, *, training: bool) -> Any:
        args, column = self.args, self.args.length_column_name
        by_length = args.train_sampling_strategy == "group_by_length" and isinstance(dataset, Dataset)
        if by_length and column not in dataset.column_names:
            raise ValueError(
                "train_sampling_strategy='group_by_length' needs the length of each row, which is not known of prompts "
                f"that are not completed yet. Add a column {column!r} with the lengths, or use "
                "'random'."
            )
        return super().loader(dataset, training=training)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> NoReturn:
        """Raises TypeError: evaluation is not supported."""
        raise TypeError(_NO_EVALUATION)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> NoReturn:
        """Raises TypeError: evaluation is not supported."""
        raise TypeError(_NO_EVALUATION)

    def _other_models(self) -> dict[str, Any]:
        return {"ref_model": self._ref_model}

    def _make_reference(self, args: BaseConfig, task: Task, policy: Policy) -> ReferenceModel:
        del task
        if policy.model.backend.virtual.count:
            raise ValueError(
                "OnlineDPOTrainer does not train an adapter of virtual tokens. Use a weight-based one such as LoRA."
            )
        return loaded_reference(args, policy, self._ref_model, fresh_adapter=self._fresh_adapter)

    def _rewards(self, setup: Setup, tokenizers: Any) -> RewardFunctions:
        args, events = setup.args, setup.events
        columns = () if args.remove_unused_columns else setup.train_dataset.column_names
        rewards = reward_functions(
            self.reward_funcs, tokenizers, weights=args.reward_weights, trainer_state=lambda: events.state,
            columns=columns, helpers=HELPERS[:1], model_init_kwargs=args.model_init_kwargs,
            trust_remote_code=args.trust_remote_code, seed=args.seed,
        )  # fmt: skip
        self.reward_func_names, self.reward_processing_classes = list(rewards.names), rewards.tokenizers
        self._reward_functions = rewards
        return rewards


def _checked_sources(reward_funcs: Any, judge: Any) -> list[Any]:
    """The reward functions as a list, empty with a judge.

    Raises:
        TypeError: a function does not take the arguments that it would get, or `judge` is not a judge.
        ValueError: both or neither of them are given.
    """
    if reward_funcs is None and judge is None:
        raise ValueError("`reward_funcs` must be provided. Pass reward functions or models, or a judge.")
    if reward_funcs is not None and judge is not None:
        raise ValueError("reward_funcs and judge both choose the better completion. Pass only one of them.")
    if judge is not None:
        if not isinstance(judge, PairwiseJudge):
            raise TypeError(
                f"judge is a {type(judge).__name__}, which has no method judge. Pass an object whose judge(prompts, "
                "completions) returns 0 for each prompt whose first completion is better, else 1."
            )
        return []
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    for function in functions:
        if callable(function) and not is_model(function):
            # Fail before weights are read; checked again later with the columns of the rows.
            check_signature(function, helpers=HELPERS[:1])
    return functions


def beta_of(beta: float | list[float], epoch: int) -> float:
    """The value of `beta` in this epoch: a list has one value per epoch, and the last one applies to later epochs."""
    return beta[min(epoch, len(beta) - 1)] if isinstance(beta, list) else beta


# Prompts, and the pairs that are generated from them just before a step.


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """The `example` function of a loader that returns rows unchanged."""
    return row


class Prompts(Batches):
    """Micro-batches of rows, as dicts of lists."""

    def __iter__(self) -> Iterator[dict[str, list]]:
        for group in self.steps.loader.groups():
            for batch in group:
                rows = [item.example for item in batch]
                yield {name: [row[name] for row in rows] for name in rows[0]}


@dataclass
class PairSteps(GeneratedSteps):
    """The steps of a loader of rows; `pairs(rows, epoch)` turns the rows of each micro-batch into preference pairs."""

    pairs: Callable[[list[dict[str, Any]], int], list[Example]]

    def _step(self, group: Sequence[Sequence[IndexedExample]], number: int) -> StepBatch:
        written = []
        for batch in group:
            pairs = self.pairs([row.example for row in batch], self.loader.epoch)
            pairs = [_with_number(pair, "micro_batches", len(group)) for pair in pairs]
            written.append([row._replace(example=pair) for row, pair in zip(batch, pairs, strict=True)])
        return self.loader.step_layout.step(written, number)


def _with_number(example: Example, name: str, value: float) -> Example:
    extras = example.extras
    return example._replace(extras=extras._replace(example={**extras.example, name: value}))


@dataclass
class PairWriter:
    """Completes each prompt twice and chooses the better completion.

    Attributes:
        scores: reward functions that score each completion, or a judge that compares two.
        ends: the EOS token ids.
        stop: also ends completions, at stop strings; None without any.
    """

    setup: Setup
    complete: Completer
    scores: RewardFunctions | PairwiseJudge
    ends: frozenset[int]
    stop: StopRule | None

    def __call__(self, rows: list[dict[str, Any]], epoch: int) -> list[Example]:
        """The pairs of a micro-batch, the chosen completion first.

        Raises:
            ValueError: `max_length` leaves no prompt tokens.
        """
        setup, count = self.setup, len(rows)
        args, tokenizer, prompts = setup.args, setup.processing_class, [row["prompt"] for row in rows]
        ids = prompt_ids(prompts, tokenizer)
        written = self.complete(setup.model, ids * 2, args.compute_dtype)  # all first, then all second completions
        written = [up_to_end(tokens, [*self.ends]) for tokens in written]
        ended = np.asarray([
            int(tokens[-1]) in self.ends or bool(self.stop and self.stop(prompt, tokens, len(tokens) - 1))
            for prompt, tokens in zip(ids * 2, written, strict=True)
        ])  # fmt: skip
        texts = completion_texts(prompts * 2, written, tokenizer)
        if isinstance(self.scores, RewardFunctions):
            scores = self._scores(rows, prompts, texts, written, ended)
            first_is_chosen, totals = scores[:count] >= scores[count:], scores.tolist()
        else:
            first_is_chosen, totals = _judged(self.scores, prompts, texts), None
        ids = _cut(ids, max(map(len, written)), args.max_length)
        beta, examples = beta_of(args.beta, epoch), []
        for number, first in enumerate(first_is_chosen):
            pair = (number, number + count) if first else (number + count, number)
            numbers = {"beta": beta, "ended": float(ended[list(pair)].sum())}
            if totals is not None:
                numbers |= {"score_chosen": totals[pair[0]], "score_rejected": totals[pair[1]]}
            examples.append(_pair(ids[number], [written[index] for index in pair], numbers))
        return examples

    def _scores(
        self, rows: list[dict[str, Any]], prompts: list, texts: list, written: list[np.ndarray], ended: np.ndarray
    ) -> np.ndarray:
        """The weighted sum of each completion's rewards, less `missing_eos_penalty` without EOS; float32 `[2B]`."""
        args, pad = self.setup.args, self.setup.processing_class.pad_token_id
        longest = max(map(len, written))
        padded = [[*tokens.tolist(), *[pad] * (longest - len(tokens))] for tokens in written]
        reward_rows = [{"prompt": row["prompt"]} for row in rows] if args.remove_unused_columns else rows
        rewards = self.scores(reward_rows * 2, prompts * 2, texts, padded)
        weights = self.scores.current_weights
        scores = np.nansum(rewards * weights, axis=1, dtype=np.float32)
        if args.missing_eos_penalty is not None:
            scores[~ended] -= np.float32(args.missing_eos_penalty)
        return scores


def prompt_ids(prompts: list, tokenizer: Any) -> list[list[int]]:
    """Token ids of prompts, without special tokens other than those in the chat template, as in TRL.

    Raises:
        ValueError: a prompt has no tokens.
    """
    texts = []
    for prompt in prompts:
        if is_conversation(prompt):
            where = f"The prompt {brief(prompt, 300)}"
            prompt = rendered(tokenizer, list(prompt), where, tokenize=False, **prompt_options(prompt))
        texts.append(prompt)
    ids = tokenizer(text=texts, add_special_tokens=False)["input_ids"]
    if not all(ids):
        raise ValueError("A prompt is empty, and a completion needs at least one token before it. Leave the row out.")
    return [list(prompt) for prompt in ids]


def _cut(ids: list[list[int]], completion: int, max_length: int) -> list[list[int]]:
    """Truncate prompts at the start as TRL does: the left-padded batch of prompts loses as many columns as the longest
    prompt plus `completion` tokens exceed `max_length`."""
    longest = max(map(len, ids))
    columns = max(longest + completion - max_length, 0)
    if columns >= longest:
        raise ValueError(
            f"max_length={max_length} leaves no token of the prompts before a completion of {completion} tokens. Raise "
            "max_length above max_new_tokens."
        )
    return [prompt[max(0, columns - (longest - len(prompt))) :] for prompt in ids]


def _pair(prompt: list[int], completions: list[np.ndarray], numbers: Mapping[str, float]) -> Example:
    """A prompt with its chosen and rejected completions; all completion tokens are targets."""
    texts = tuple(np.concatenate([prompt, tokens]).astype(np.int32) for tokens in completions)
    labels = tuple(np.concatenate([np.full(len(prompt), IGNORED), tokens]).astype(np.int32) for tokens in completions)
    return Example(texts, Extras(dict(numbers)), labels)


def _judged(judge: PairwiseJudge, prompts: list, texts: list) -> list[bool]:
    """Whether the first completion of each prompt is the better one.

    Raises:
        ValueError: the judge returned the wrong number of ranks.
    """
    if is_conversation(prompts[0]):
        prompts, texts = list(map(_plain, prompts)), list(map(_plain, texts))
    count = len(prompts)
    pairs = [list(pair) for pair in zip(texts[:count], texts[count:], strict=True)]
    with raised_by("the judge", prompts):
        ranks = list(judge.judge(prompts, pairs))
        if len(ranks) != count:
            raise ValueError(f"The judge returned {len(ranks)} ranks for {count} prompts: return one for each prompt.")
    return [int(rank) == 0 for rank in ranks]


def _plain(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as plain text for a judge, without a chat template."""
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages)
