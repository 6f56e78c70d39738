"""Completions of a dataset's rows that a model writes anew just before the step that learns from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_jax.core.torch_random import default_generator
from trl_jax.data.batch import IGNORED, Example
from trl_jax.data.loader import ExampleLoader, IndexedExample, StepBatch
from trl_jax.hub.generate import complete
from trl_jax.rollout.rollout import BASE_SEED_WORDS
from trl_jax.training.logging import GenerationProgress, ProgressLine
from trl_jax.training.state import Setup


@dataclass
class RewrittenSteps:
    """The steps of a loader, with each micro-batch as `rewrite` returns it.

    Steps are made when they are asked for, with the parameters of that moment. The loss of a step is divided by the
    targets of the dataset's rows, also where their completions were replaced, as in TRL, which counts them first.

    Completions are sampled with the process's random stream, which is advanced at the start of an epoch by the words
    that torch's DataLoader draws there.
    """

    loader: ExampleLoader
    rewrite: Callable[[list[Example]], list[Example]]

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def batch_size(self) -> int:
        return self.loader.batch_size

    @property
    def drop_last(self) -> bool:
        return self.loader.drop_last

    def laid_out(self, **changes: Any) -> ExampleLoader:
        """The loader of the dataset's own rows, with these fields of the layout changed."""
        return self.loader.laid_out(**changes)

    def set_epoch(self, epoch: int, skip: int = 0, skipped_digest: int | None = None) -> None:
        self.loader.set_epoch(epoch, skip, skipped_digest)
        if not skip:  # within an epoch, the restored stream has been advanced
            default_generator().skip(BASE_SEED_WORDS)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[StepBatch]:
        for number, group in enumerate(self.loader.groups()):
            yield self._step(group, number)

    def _step(self, group: Sequence[Sequence[IndexedExample]], number: int) -> StepBatch:
        written, padded = [], 0
        for batch in group:
            examples = [one.example for one in batch]
            new = self.rewrite(examples)
            padded += _padded_tokens(new, generated=new is not examples)
            written.append([one._replace(example=example) for one, example in zip(batch, new, strict=True)])
        step = self.loader.step_layout.step(written, number)
        targets = sum(one.example.num_counted_targets for batch in group for one in batch)
        scale = np.float32(max(1, step.num_targets) / max(1, targets))
        arrays = step.arrays._replace(weight=step.arrays.weight * scale)
        return step._replace(arrays=arrays, num_padded_tokens=padded)


def _padded_tokens(examples: list[Example], *, generated: bool) -> int:
    """The tokens of TRL's micro-batch, padding included: generated completions begin at the end of the longest
    prompt."""
    texts = [len(ids) for example in examples for ids in example.texts]
    if not generated:
        return len(texts) * max(texts)
    prompts = [len(prompt_of(example)) for example in examples]
    return len(texts) * (max(prompts) + max(text - prompt for text, prompt in zip(texts, prompts, strict=True)))


@dataclass
class Mixture:
    """Decides for each micro-batch, with Python's `random`, who wrote its completions.

    lmbda: the share of micro-batches that the student completes.
    seq_kd: whether the teacher completes the others; otherwise they keep the dataset's completions.
    student, teacher: prompts -> completions, both as token ids.
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
    """The example with another completion, every token of which is a target."""
    labels = np.concatenate([np.full(len(prompt), IGNORED, np.int32), completion])
    return example._replace(texts=(np.concatenate([prompt, completion]).astype(np.int32),), labels=(labels,))


class Completer:
    """Completes prompts with the process's random stream.

    Args:
        options: fields of a GenerationConfig, including `eos_token_id` and `pad_token_id`.
    """

    def __init__(self, setup: Setup, options: Mapping[str, Any]):
        self._setup, self._options, self._line = setup, options, ProgressLine(setup.events)

    def __call__(self, model: Any, prompts: list[np.ndarray], dtype: str) -> list[np.ndarray]:
        """The completions of one prompt each, int32; each includes the token that ends it.

        Args:
            model: the PreTrainedModel that writes.
            dtype: of its computation.
        """
        args = self._setup.args
        how = {"head_dtype": "float32" if args.cast_lm_head_to_fp32 else None, "logps": False}
        how["progress"] = GenerationProgress(self._line, len(prompts))
        with self._setup.on_device():
            out = complete(model, prompts, self._options, group=1, stream=default_generator(), dtype=dtype, **how)
        self._line("training")
        return [tokens[:length] for tokens, length in zip(out.tokens, out.lengths, strict=True)]
