"""Reward models from preference pairs: TRL's RewardTrainer on JAX."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import EvalPrediction

from trl_jax.core.layer_gather import SEQUENCE
from trl_jax.core.packed import reads_of_rows
from trl_jax.data.layout.batch import PairBatch
from trl_jax.data.layout.plan import Plan
from trl_jax.data.loader import PreferenceLoader
from trl_jax.data.rows import preference, special_tokens
from trl_jax.data.rows.checks import check_token_ids, check_type
from trl_jax.data.windows import EvaluationBatch, Windows
from trl_jax.engine.evaluation import Evaluated
from trl_jax.hub.auto import Checkpoint
from trl_jax.hub.peft.lora_config import as_lora_config
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.losses.pairwise import pairwise_loss
from trl_jax.models.functional import merge
from trl_jax.run import layout_choice, model_loading
from trl_jax.run.collator import DataCollatorForPreference
from trl_jax.run.devices import check_offloading, run_devices
from trl_jax.run.evaluation import refuse
from trl_jax.run.rng import chances, check_noise
from trl_jax.run.user_loss import BoundModel
from trl_jax.tasks import reward_metrics
from trl_jax.tasks.eval_report import report
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.old_keywords import accepting_old_keywords
from trl_jax.trainer.reward_config import RewardConfig, as_reward_config

logger = logging.getLogger(__name__)


class RewardTrainer(BaseTrainer):
    """Trains a sequence classifier with one label to score the chosen answer of each pair above the rejected one.

    The arguments are TRL's, in TRL's order.

    Args:
        model: a checkpoint's folder or Hub name, or what `trl_jax.AutoModelForSequenceClassification` loaded (its
            config gets the tokenizer's pad token, its params the trained weights), or a torch model of transformers,
            which has the trained weights after `train()`. Weights are kept in float32;
            `args.model_init_kwargs["dtype"]` ("float32" unless set) is what they are saved in.
        args: a RewardConfig; None means `RewardConfig("<model>-Reward")`.
        train_dataset: pairs in any form TRL takes, a Dataset or an IterableDataset (with `max_steps`).
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; loaded with the model if None. Its pad token is set if it has none.
        compute_metrics: gets an EvalPrediction of all scores `[2N, 1]`, label_ids `()`.
        callbacks: transformers' callbacks, besides the default ones.
        preprocess_logits_for_metrics: applied to each batch's scores `[2P, 1]`, with labels `()`.
        optimizers: an optax transformation with its rate, and None or a function of the step. The function scales
            what the transformation gives; without it the arguments' schedule does, as a share of its peak.
        optimizer_cls_and_kwargs: an optax factory, or a class of torch's that has a counterpart, and its arguments.
        data_collator: a DataCollatorForPreference, whose `pad_to_multiple_of` then holds.
        quantization_config: a BitsAndBytesConfig of ours or of transformers': the weights beside an adapter are held in
            4 or 8 bits.
        peft_config: a LoraConfig of ours or of peft's: an adapter trains beside the frozen model, and is what is saved.

    Raises:
        TypeError, ValueError: an argument, row or checkpoint at fault, by name.
    """

    @accepting_old_keywords
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        args: RewardConfig | None = None,
        data_collator: DataCollatorForPreference | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[np.ndarray, tuple], np.ndarray] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        refuse(data_collator=None if type(data_collator) is DataCollatorForPreference else data_collator)
        adapter = None if peft_config is None else as_lora_config(peft_config)
        model, brought = model_loading.told_apart(model)
        if args is None:
            args = RewardConfig(f"{model_loading.short_name(model if brought is None else brought)}-Reward")
        self.args = args = as_reward_config(args)
        self.data_collator = data_collator
        if train_dataset is None:
            raise ValueError("train_dataset is required: pass a datasets.Dataset of preference pairs.")
        check_type(train_dataset, "train")
        run_devices(args)  # several processes find each other before anything else
        if args.push_to_hub:  # first of all: a Hub that does not answer costs seconds, not a model's loading
            self.init_hf_repo()
        quantization = model_loading.quantization_of(quantization_config, args)
        checkpoint = model_loading.find(model, args) if brought is None else model_loading.taken(brought, args)
        # A torch model takes back what it has room for; an adapter belongs to tables of one size.
        can_resize = brought is None and adapter is None and checkpoint.can_resize
        self.processing_class = self._tokenizer(processing_class, checkpoint, brought)
        self._vocab_size = self._settle_tokens(checkpoint.vocab_size, can_resize)
        self._max_positions = checkpoint.max_positions
        # Rows first: a bad one is named before weights are read, and num_proc forks before JAX has threads.
        train_dataset = self.prepare_dataset(train_dataset, "train")
        eval_dataset = self._prepare_evaluation(eval_dataset)
        model = model_loading.ready(checkpoint, args, adapter, quantization)
        self._settle_model(model, brought)
        super().__init__(
            model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=self.processing_class, compute_metrics=compute_metrics, callbacks=callbacks,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics, optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs, brought=brought,
        )  # fmt: skip
        check_noise(args, model.backend)
        layout_choice.check_layout(args, model.backend)
        check_offloading(args, model.backend)

    def _tokenizer(self, given: Any, checkpoint: Checkpoint | PreTrainedModel, brought: Any) -> Any:
        """The one given, or the model's own."""
        if given is not None:
            return given
        place = model_loading.tokenizer_folder(checkpoint) if brought is None else brought.config._name_or_path
        return AutoTokenizer.from_pretrained(place, trust_remote_code=self.args.trust_remote_code)

    def _settle_tokens(self, rows: int, can_resize: bool) -> int:
        """Give the tokenizer the special tokens and the chat template of the arguments.

        Returns:
            How many tokens the model has to embed: `rows`, or more where it `grows`.
        """
        args, tokenizer = self.args, self.processing_class
        special_tokens.settle(tokenizer, eos_token=args.eos_token, pad_token=args.pad_token)
        if args.chat_template_path is not None:
            rows = special_tokens.settle_chat_template(
                tokenizer, args.chat_template_path, rows=rows, can_resize=can_resize
            )
        special_tokens.check_pad(tokenizer, rows)
        return rows

    def _prepare_evaluation(self, dataset: Any) -> Any:
        if dataset is None:
            return None
        if not isinstance(dataset, dict):
            return self.prepare_dataset(dataset, "eval")
        return {name: self.prepare_dataset(part, f"eval_dataset[{name!r}]") for name, part in dataset.items()}

    def _settle_model(self, model: PreTrainedModel, brought: Any) -> None:
        """Room for the tokens, TRL's tags, and the tokenizer's ids in its config and in that of torch's model."""
        if self._vocab_size != model.vocab_size:
            model.resize_token_embeddings(self._vocab_size)
        model.add_model_tags(["reward-trainer", "trl", "trl_jax"])  # as TRL tags its models
        eos = self.args.eos_token is not None or self.args.chat_template_path is not None
        for config in (model.config, *([] if brought is None else [brought.config])):
            special_tokens.settle_ids(config, self.processing_class, eos=eos)

    def score(
        self, params: dict, batch: PairBatch, *, dtype: str, bounded: bool = True, **how: Any
    ) -> jax.Array:
        """Scores `[2P]`, float32, of the texts of a batch; `how` as in Decoder.__call__. `bounded`: none is longer than
        max_length."""
        model = merge(self.model.graph, params, how.get("dropout_key"))
        if self.model.backend.window is not None:
            how["max_tokens"] = self.args.max_length if bounded else None
        reads = batch.at if batch.packed is not None else reads_of_rows(batch.at, batch.tokens.shape[1])
        how |= {"lengths": batch.lengths} if batch.packed is None else {"packed": batch.packed}
        return model(batch.tokens, batch.positions, reads, dtype=jnp.dtype(dtype), **how)

    def loss(
        self, params: dict, batch: PairBatch, key: jax.Array | None, *, remat: bool | str = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        how = {"remat": remat} | self.chances(key, batch.lengths)
        scores = self.score(params, batch, dtype=self.args.compute_dtype, **how)
        return self._pairwise_loss(scores, weight=batch.weight, margin=batch.margin, member=batch.member)

    def chances(self, key: jax.Array | None, lengths: jax.Array) -> dict[str, Any]:
        """The options of `score` in training; `key` is that of a pass through texts of these `lengths`."""
        return chances(self.args, key, lengths, self._pad_to_multiple_of)

    def evaluation_loss(self, scores: np.ndarray, batch: EvaluationBatch) -> dict[str, jax.Array]:
        loss, metrics = self._pairwise_loss(scores, weight=batch.weight, margin=batch.margin)
        return metrics | {"loss": loss}

    def compute_loss(
        self,
        model: BoundModel,
        inputs: dict[str, jax.Array],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The mean loss of a batch of pairs. Scripts override it, in jax.numpy; it is compiled, gradient and all.

        Args:
            model: called as `model(input_ids=..., attention_mask=...)`, gives `.logits` `[rows, 1]`.
            inputs: `input_ids` and `attention_mask` `[2P, T]`, chosen answers above rejected ones, and maybe `margin`
                `[P]`; also `input_ids_chosen` and so on, each `[P, T]`.
            return_outputs: give `(loss, outputs)`.
            num_items_in_batch: of TRL's signature; means nothing for pairs.
        """
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        chosen, rejected = jnp.split(outputs.logits[:, 0], 2)
        loss, _ = pairwise_loss(
            chosen,
            rejected,
            weight=jnp.full(len(chosen), 1.0 / len(chosen)),
            margin=inputs.get("margin"),
            center_rewards_coefficient=self.args.center_rewards_coefficient,
        )
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: BoundModel,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple:
        """(loss, logits `[2P, 1]`, None) of one batch. Where a script overrides it, evaluation calls it every time."""
        refuse(ignore_keys=ignore_keys)
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, None if prediction_loss_only else outputs["logits"], None

    def _pairwise_loss(self, scores: jax.Array, **pairs: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        chosen, rejected = jnp.split(scores, 2)
        center = self.args.center_rewards_coefficient
        return pairwise_loss(chosen, rejected, center_rewards_coefficient=center, **pairs)

    def prepare_dataset(self, dataset: Any, name: str, *, bounded: bool = True) -> Dataset | IterableDataset:
        prepared = preference.prepare(
            dataset,
            self.processing_class,
            max_length=self.args.max_length if bounded else None,
            num_proc=self.args.dataset_num_proc,
            name=name,
        )
        return check_token_ids(prepared, self._vocab_size, name, self._max_positions)

    def loader(self, dataset: Dataset | IterableDataset, *, training: bool) -> PreferenceLoader:
        args, backend = self.args, self.model.backend
        own = bool({"compute_loss", "prediction_step"} & self.overridden)
        striped = self.sharding_plan is not None and self.sharding_plan.size(SEQUENCE) > 1
        lengths = self._lengths(dataset) if training and args.train_sampling_strategy == "group_by_length" else None
        if own:
            laid_out = Plan("padded")  # a script's own methods see rows
        elif training:
            laid_out = layout_choice.plan(
                args,
                backend,
                dataset,
                parameters=self.model.num_parameters(exclude_embeddings=True),
                batch_size=self.train_batch_size,
                steps=self._plan().max_steps,
                shards=self.shards,
                striped=striped,
                lengths=lengths,
            )
        else:
            laid_out = layout_choice.unplanned(args, backend, striped=striped)
        return PreferenceLoader(
            dataset,
            batch_size=self.micro_batch_pairs if training else args.per_device_eval_batch_size * self.shards,
            shards=self.shards,
            divided=not own,
            fills=self._fills if training else False,
            pad_token_id=self.processing_class.pad_token_id,
            pad_to_multiple_of=self._pad_to_multiple_of,
            layout=laid_out.layout,
            buckets=laid_out.buckets,
            shapes=laid_out.shapes,
            accumulation=args.gradient_accumulation_steps if training else 1,
            shuffle=training and args.train_sampling_strategy != "sequential",
            seed=args.seed if args.data_seed is None else args.data_seed,
            lengths=lengths,
            # Every evaluation row counts; and of a stream TRL drops nothing.
            drop_last=training and args.dataloader_drop_last and isinstance(dataset, Dataset),
        )

    def windows(self, loader: PreferenceLoader) -> Windows:
        return Windows(loader, sort=self.model.backend.batch_invariant)

    def _lengths(self, dataset: Dataset | IterableDataset) -> np.ndarray | None:
        """Tokens of the longer side of each pair, unless a column tells; a stream has no order to change."""
        if not isinstance(dataset, Dataset):
            logger.warning("group_by_length has no effect on a stream: its rows come as they do.")
            return None
        if self.args.length_column_name in dataset.column_names:
            return np.asarray(dataset[self.args.length_column_name])
        sides = (np.fromiter(map(len, dataset[f"{side}_ids"]), np.int64) for side in ("chosen", "rejected"))
        return np.maximum(*sides)

    @property
    def _pad_to_multiple_of(self) -> int | str | None:
        collator = self.data_collator
        return self.args.pad_to_multiple_of if collator is None else collator.pad_to_multiple_of

    def training_metrics(self, steps: list[dict[str, np.ndarray]]) -> dict[str, float]:
        return reward_metrics.training_metrics(steps)

    def evaluation_metrics(self, evaluated: Evaluated) -> dict[str, float]:
        return reward_metrics.evaluation_metrics(evaluated.metrics)

    def more_metrics(self, evaluated: Evaluated, rows: tuple[Any, list[list[int]]], prefix: str) -> dict[str, float]:
        args = self.args
        if not args.eval_report or "prediction_step" in self.overridden:
            return {}
        scores = [self.real_scores(*b)[:, 0] for b in zip(evaluated.scores, evaluated.num_pairs, strict=True)]
        margins = np.concatenate([np.subtract(*np.split(batch, 2)) for batch in scores])
        dataset, places = rows
        subsets = None
        if isinstance(dataset, Dataset) and args.eval_subset_column in dataset.column_names:
            subsets = dataset[[place for batch in places for place in batch]][args.eval_subset_column]
        return report(margins, subsets, prefix=prefix, folder=Path(args.output_dir))

    def real_scores(self, scores: np.ndarray, num_pairs: int) -> np.ndarray:
        chosen, rejected = np.split(scores, 2)
        return np.concatenate([chosen[:num_pairs], rejected[:num_pairs]])[:, None]
