"""Generalized knowledge distillation: TRL's experimental GKDTrainer on JAX."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import EvalPrediction
from transformers.trainer_callback import TrainerCallback

from trl_jax.config.base import BaseConfig
from trl_jax.core.torch_random import default_generator
from trl_jax.data.batch import IGNORED, Example
from trl_jax.data.loader import IndexedExample, StepBatch
from trl_jax.hub.generate import check_completes, check_generates
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft_backend import LoraBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch_bridge import also_of_tensors
from trl_jax.mesh.processes import several
from trl_jax.rollout.steps import BASE_SEED_WORDS
from trl_jax.tasks.distillation import GkdTask, generalized_jsd_loss
from trl_jax.tasks.task import Task
from trl_jax.trainer.arguments import InitOnlyArg, MirroredArg, accepting_old_keywords, as_config
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.gkd_config import GKDConfig
from trl_jax.trainer.overrides import REFUSED, TrainerTraits, by_name, check_generate
from trl_jax.training import model
from trl_jax.training.data import Batches, Completer, GeneratedSteps
from trl_jax.training.forward import balance_experts
from trl_jax.training.reference import ReferenceModel, given
from trl_jax.training.setup import Policy

logger = logging.getLogger(__name__)

_FOR_LOSS = (
    "The step is one compiled function, and a loss of the script's own is not in this release of trl_jax for GKD: "
    "choose beta, lmbda and seq_kd."
)
_FOR_SAMPLING = "Set temperature and max_new_tokens in GKDConfig, other options in the model's generation_config."
_NEVER_FORMATS = (
    "formatting_func is never called by GKDTrainer, in TRL either: rows are read as they are. Apply it to the dataset, "
    "or leave it out."
)
_TO_LATER = (
    "This GKD configuration (`lmbda=1.0`, `temperature=1.0`) is fully covered by `DistillationTrainer`, which also "
    "takes tools and vLLM servers. Consider migrating: replace `GKDConfig`/`GKDTrainer` with `DistillationConfig`/"
    "`DistillationTrainer`, `max_new_tokens` with `max_completion_length`, and set `beta=%s` explicitly (`beta` means "
    "the same in both, but defaults to 0.5 here and 1.0 there)."
)


class GKDTrainer(BaseTrainer):
    """Trains a student to match its teacher's next-token predictions, on completions of the student, the teacher or the
    dataset (Generalized Knowledge Distillation, https://huggingface.co/papers/2306.13649).

    The arguments are TRL's, in TRL's order. `lmbda`, `beta` and `seq_kd` may be set on the trainer at any time.

    Args:
        model: the student: a checkpoint's folder or Hub name, a model that `trl_jax.AutoModelForCausalLM` loaded, or a
            torch model of transformers, which receives the trained weights after `train()`.
        teacher_model: the teacher, in the same forms, with the student's vocabulary. It keeps its stored dtype.
        args: a GKDConfig; None means `GKDConfig("<model>-GKD")`.
        data_collator: refused; rows are read as by TRL's DataCollatorForChatML.
        train_dataset: rows with `messages`, the last of which is the completion; a text `prompt` may replace the
            messages before it. Or rows with `input_ids` and a `completion_mask`. A Dataset or an IterableDataset (with
            `max_steps`).
        eval_dataset: the same, or a dict of them. Evaluation uses the dataset's completions.
        processing_class: the tokenizer; loaded with the student if None.
        compute_metrics: gets an EvalPrediction of all logits `[N, T, V]`, not shifted, and labels `[N, T]`.
        callbacks: transformers callbacks, in addition to the default ones.
        optimizers: an optax transformation that includes its learning rate, and None or a function of the step.
        preprocess_logits_for_metrics: applied to each batch's logits and labels; its result replaces the logits.
        peft_config: our or peft's LoraConfig. Only the adapter is trained and saved.
        formatting_func: never called, as in TRL; causes a warning.

    Raises:
        TypeError, ValueError: names the invalid argument, row or checkpoint.
    """

    _name, _tag_names = "GKD", ["trl", "gkd"]
    _paper = (
        "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        "2306.13649",
    )
    config_class = GKDConfig
    _traits = TrainerTraits(
        refused=replace(
            REFUSED,
            never_called=REFUSED.never_called
            | by_name(
                ("training_step compute_loss prediction_step generalized_jsd_loss", _FOR_LOSS),
                ("generate_on_policy_outputs", _FOR_SAMPLING),
            ),
        ),
        idle_arguments={"formatting_func": _NEVER_FORMATS},
    )
    lmbda, beta, seq_kd = MirroredArg(), MirroredArg(), MirroredArg()
    temperature = InitOnlyArg()
    generalized_jsd_loss = staticmethod(also_of_tensors(generalized_jsd_loss))

    @accepting_old_keywords()
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel | None = None,
        teacher_model: str | os.PathLike | PreTrainedModel | None = None,
        args: GKDConfig | None = None,
        data_collator: None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict[str, Any]], Any] | None = None,
    ):
        if model is None or teacher_model is None:
            missing = "model" if model is None else "teacher_model"
            raise ValueError(
                f"{missing} is missing: pass a checkpoint's folder or Hub name, or a loaded model. Student and teacher "
                "need the same vocabulary."
            )
        if formatting_func is not None:
            logger.warning(_NEVER_FORMATS)
        self._passed_model, self._teacher, self._teacher_generation = model, teacher_model, None
        super().__init__(
            model, None if args is None else as_config(args, GKDConfig), data_collator, train_dataset, eval_dataset,
            processing_class, compute_metrics, callbacks, optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics, peft_config=peft_config,
        )  # fmt: skip
        if several():
            raise ValueError(
                "GKDTrainer with several processes is not in this release of trl_jax. Start a single one, or train "
                "with DistillationTrainer."
            )
        check_generates(self.model)
        self._mixture = self._mixed()
        if self.lmbda > 0:
            check_completes(self.model, self.generation_kwargs)
        if self.lmbda == 1.0 and self.temperature == 1.0:
            logger.warning(_TO_LATER, self.beta)

    @property
    def teacher_model(self) -> PreTrainedModel:
        """The teacher, with the student's tokenizer."""
        teacher = self._setup.reference.as_model(self.model)
        teacher.generation_config = self._teacher_generation
        return teacher

    @property
    def generation_kwargs(self) -> dict[str, Any]:
        """The sampling options of completions; all others come from the model's generation_config."""
        args = self.args
        return {
            "max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "do_sample": True, "top_k": 0,
            "top_p": 1.0, "pad_token_id": self.processing_class.pad_token_id, "eos_token_id": self._ends,
        }  # fmt: skip

    def _refresh_task(self) -> None:
        check_generate(self.model, self._passed_model, self._teacher)
        super()._refresh_task()

    def make_task(self) -> GkdTask:
        return GkdTask(self.beta, self.args.max_length)

    def batches(self, dataset: Dataset | IterableDataset, *, training: bool) -> Batches:
        """A dataloader over a prepared dataset. Iterating over it yields the dataset's own completions; only the steps
        of train() replace them."""
        batches = super().batches(dataset, training=training)
        if training:
            batches.steps = RewrittenSteps(batches.steps, self._mixture)
        return batches

    def _evaluate_one(self, dataset: Any, prefix: str) -> dict[str, float]:
        default_generator().skip(BASE_SEED_WORDS)  # torch's DataLoader draws a base seed per iterator
        return super()._evaluate_one(dataset, prefix)

    def _mixed(self) -> Mixture:
        setup = self._setup
        ends = self.model.generation_config.eos_token_id  # read once at construction, as in TRL
        self._ends = self.processing_class.eos_token_id if ends is None else ends
        write, dtype = Completer(setup, self.generation_kwargs), setup.args.compute_dtype
        teachers = setup.reference.dtype if dtype == "float32" and setup.reference.dtype else dtype
        return Mixture(
            lambda: self.lmbda,
            lambda: self.seq_kd,
            lambda prompts: write(setup.model, prompts, dtype),
            lambda prompts: write(self.teacher_model, prompts, teachers),
        )

    def _balance_experts(self, model: PreTrainedModel, args: BaseConfig) -> float:
        """As in TRL, the config's router fields are set as in SFTTrainer, but no load-balancing loss is added."""
        balance_experts(model, args.router_aux_loss_coef, in_config=True)
        return 0.0

    def _other_models(self) -> dict[str, Any]:
        return {"teacher_model": self._teacher}

    def _make_reference(self, args: BaseConfig, task: Task, policy: Policy) -> ReferenceModel:
        del task
        if not isinstance(policy.model.backend, NativeBackend | LoraBackend):
            raise ValueError(
                f"GKDTrainer does not train a model on the {policy.model.backend.name} backend. Use a family that "
                "trl_jax computes itself (docs/models lists them) and, as an adapter, a weight-based one such as LoRA."
            )
        loaded = model.load_teacher(self._teacher, args, args.teacher_model_init_kwargs, None)
        model.check_teacher(loaded, policy.model, "GKD")
        self._teacher_generation = loaded.generation_config
        return given(loaded, policy.vocab_size, as_bits=policy.sharding_plan is None and not self.seq_kd)


# Completions that are generated just before the step that trains on them.


@dataclass
class RewrittenSteps(GeneratedSteps):
    """The steps of a loader, with each micro-batch replaced by what `rewrite` returns.

    The loss of a step is divided by the number of targets in the dataset's rows even if their completions were
    replaced: TRL counts targets before generating. If a step is a mean over micro-batches, targets are not counted.
    """

    rewrite: Callable[[list[Example]], list[Example]]

    def _step(self, group: Sequence[Sequence[IndexedExample]], number: int) -> StepBatch:
        written, padded = [], 0
        for batch in group:
            examples = [item.example for item in batch]
            new = self.rewrite(examples)
            padded += _padded_tokens(new, generated=new is not examples)
            written.append([item._replace(example=example) for item, example in zip(batch, new, strict=True)])
        step = self.loader.step_layout.step(written, number)
        step = step._replace(num_padded_tokens=padded)
        if self.loader.step_layout.weighting == "micro_batches":
            return step
        targets = sum(item.example.num_counted_targets for batch in group for item in batch)
        scale = np.float32(max(1, step.num_targets) / max(1, targets))
        return step._replace(arrays=step.arrays._replace(weight=step.arrays.weight * scale))


def _padded_tokens(examples: list[Example], *, generated: bool) -> int:
    """The number of tokens in TRL's micro-batch including padding. Generated completions start after the longest
    prompt, because prompts are left-padded."""
    texts = [len(ids) for example in examples for ids in example.texts]
    if not generated:
        return len(texts) * max(texts)
    prompts = [len(prompt_of(example)) for example in examples]
    return len(texts) * (max(prompts) + max(text - prompt for text, prompt in zip(texts, prompts, strict=True)))


@dataclass
class Mixture:
    """Draws for each micro-batch, with Python's `random`, whose completions it has.

    Attributes:
        lmbda: returns the fraction of micro-batches that the student completes.
        seq_kd: returns whether the teacher completes the others; otherwise they keep the dataset's completions.
        student, teacher: generate completions from prompts, both as token ids.
    """

    lmbda: Callable[[], float]
    seq_kd: Callable[[], bool]
    student: Callable[[list[np.ndarray]], list[np.ndarray]]
    teacher: Callable[[list[np.ndarray]], list[np.ndarray]]

    def __call__(self, examples: list[Example]) -> list[Example]:
        if random.random() <= self.lmbda():
            write = self.student
        elif self.seq_kd():
            write = self.teacher
        else:
            return examples
        prompts = list(map(prompt_of, examples))
        return [
            completed(example, prompt, completion)
            for example, prompt, completion in zip(examples, prompts, write(prompts), strict=True)
        ]


def prompt_of(example: Example) -> np.ndarray:
    """The tokens of a text before its first label."""
    [ids], [labels] = example.texts, example.labels
    labeled = np.flatnonzero(np.asarray(labels) != IGNORED)
    return np.asarray(ids[: labeled[0] if len(labeled) else len(ids)], np.int32)


def completed(example: Example, prompt: np.ndarray, completion: np.ndarray) -> Example:
    """The example with its completion replaced; all completion tokens are targets."""
    labels = np.concatenate([np.full(len(prompt), IGNORED, np.int32), completion])
    return example._replace(texts=(np.concatenate([prompt, completion]).astype(np.int32),), labels=(labels,))
