"""Distillation: a student learns a teacher's distributions, on its own completions or, in GKD, on any completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.core.text import brief
from trl_jax.data import chat, checks, tokenize
from trl_jax.data.batch import IGNORED, Batch, Columns, LossBatch
from trl_jax.data.checks import cell_error
from trl_jax.losses.supervised import of_texts, real_examples, summed
from trl_jax.nn.head import Distributions, divergences
from trl_jax.tasks.policy import RolloutTask
from trl_jax.tasks.task import Sums, TokenTask, joined, weighted_loss

_SUMS = ("entropy", "targets")

# On-policy distillation


@dataclass(frozen=True)
class DistillationTask(RolloutTask):
    """TRL's on-policy distillation (GKD, https://huggingface.co/papers/2306.13649). The run's reference is the teacher.

    beta: of the generalized Jensen-Shannon divergence, see `nn.head.divergences`.
    """

    beta: float = 1.0

    axis: ClassVar[Literal["text"]] = "text"
    compared: ClassVar[tuple[str, ...]] = ()
    per_token: ClassVar[bool] = True
    whole_micro_batches: ClassVar[bool] = False
    compares_distributions: ClassVar[bool] = True

    def token_stats(self, outputs: Distributions, batch: Batch) -> dict[str, jax.Array]:
        """Sums over the unmasked tokens of each completion, `[X]`: divergence, the student's entropy, and their
        number."""
        token_values = divergences(*outputs, beta=self.beta, temperature=self.temperature)
        values = token_values._asdict() | {"targets": jnp.ones(len(batch.text))}
        return {name: of_texts(value, batch.text, len(batch.weight)) for name, value in values.items()}

    def loss(self, outputs: dict[str, jax.Array], batch: Batch | LossBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The weighted sum of the divergences of tokens, and sums over the micro-batches."""
        real = real_examples(batch.weight, batch.micro_batch)
        sums = {name: summed(jax.lax.stop_gradient(outputs[name]), real) for name in _SUMS}
        return jnp.sum(batch.weight * outputs["divergence"]), sums | {"examples": summed(1.0, real)}

    def metrics(self, sums: Sequence[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
        """TRL's metric: the mean over micro-batches of the mean entropy of the student's predictions, in nats."""
        totals = joined(sums, dict.fromkeys((*_SUMS, "examples"), np.sum), count="examples")
        if not totals["examples"].size:
            return {}
        return {"entropy": float(np.mean(totals["entropy"] / np.maximum(totals["targets"], 1)))}


class TokenDivergences(NamedTuple):
    """Numbers per completion token, float32; 0 for tokens to ignore.

    divergence: of the student's distribution from the teacher's, in nats. entropy: of the student, without gradient.
    student_logps, teacher_logps: log-probabilities of the tokens; no gradient for the teacher.
    """

    divergence: jax.Array
    entropy: jax.Array
    student_logps: jax.Array
    teacher_logps: jax.Array


@dataclass(frozen=True)
class ScriptedDistillationTask(DistillationTask):
    """The same for a user-defined loss, which reads both distributions of each token; each micro-batch is one pass."""

    axis: ClassVar[Literal["read"]] = "read"
    whole_micro_batches: ClassVar[bool] = True

    def token_stats(self, outputs: Distributions, batch: Batch) -> dict[str, Any]:
        return {"distributions": outputs}

    def of_tokens(self, distributions: Distributions, beta: float) -> TokenDivergences:
        """Numbers of each read, `[N]`, for a given `beta`."""
        student = divergences(*distributions, beta=beta, temperature=self.temperature)
        logps = [
            head.token_outputs(distributions.targets, self.temperature).logps
            for head in (distributions.model, jax.lax.stop_gradient(distributions.reference))
        ]
        return TokenDivergences(student.divergence, student.entropy, *logps)

    def loss(self, outputs: dict[str, Any], batch: Batch | LossBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        return super().loss(super().token_stats(outputs["distributions"], batch), batch)


# GKD


@dataclass(frozen=True)
class GkdTask(TokenTask):
    """TRL's GKD (https://huggingface.co/papers/2306.13649). The run's reference is the teacher.

    beta: of the generalized Jensen-Shannon divergence, see `nn.head.divergences`. Both distributions are at temperature
        1, as in TRL, whose `temperature` only applies to sampling.
    max_length: rows keep this many of their last tokens; None as in `prepare_chatml`.
    """

    beta: float = 0.5
    max_length: int | None = None

    per_token: ClassVar[bool] = True
    compares_distributions: ClassVar[bool] = True
    columns: ClassVar[Columns] = Columns(("input_ids",), labels=("labels",))

    def prepare(
        self,
        dataset: Dataset | IterableDataset,
        tokenizer: Any,
        *,
        max_length: int | None,
        num_proc: int | None,
        name: str,
    ) -> Dataset | IterableDataset:
        """Add `input_ids` and `labels`, as in TRL's DataCollatorForChatML."""
        del max_length  # rows to predict are truncated like the others
        return prepare_chatml(dataset, tokenizer, max_length=self.max_length, num_proc=num_proc, name=name)

    def token_stats(self, outputs: Distributions, batch: Batch) -> dict[str, jax.Array]:
        """The sum of the divergences over the targets of each text, `[X]`."""
        token_divergences = divergences(*outputs, beta=self.beta).divergence
        return {"divergence": of_texts(token_divergences, batch.text, len(batch.weight))}

    def loss(self, outputs: dict[str, jax.Array], batch: Batch | LossBatch) -> tuple[jax.Array, Sums]:
        """The weighted sum of the divergences of tokens."""
        return weighted_loss(outputs["divergence"], batch)


def generalized_jsd_loss(
    student_logits: Any,
    teacher_logits: Any,
    labels: Any = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Any = None,
) -> jax.Array:
    r"""Divergence of a student from a teacher (Agarwal et al. 2023, arXiv:2306.13649, eq. 1), in nats, float32.

    With $m = (1 - \beta) p_s + \beta p_t$ it is $\beta\, KL(p_t \| m) + (1 - \beta)\, KL(p_s \| m)$. At $\beta = 0$ it
    is the forward $KL(p_t \| p_s)$ and at $\beta = 1$ the reverse $KL(p_s \| p_t)$.

    This needs `[rows, T, V]` arrays. Training uses `nn.head.divergences`, which computes the same in chunks of tokens.

    Args:
        student_logits, teacher_logits: `[rows, T, V]`, of the same positions.
        labels: `[rows, T]`, -100 at positions to ignore; None includes all.
        beta: from 0 to 1.
        temperature: divides both logits.
        reduction: "batchmean" divides the sum by the number of included positions (without labels, by `rows`), "sum"
            does not divide, "mean" averages over positions and the vocabulary. Any other value returns the terms
            themselves, `[positions, V]` with labels and `[rows, T, V]` without.
        num_items_in_batch: if given, divides the sum, whatever the reduction.
    """
    student, teacher = (
        jax.nn.log_softmax(jnp.asarray(logits, jnp.float32) / temperature)
        for logits in (student_logits, teacher_logits)
    )
    if beta in (0, 1):
        terms = _kl_terms(teacher, student) if beta == 0 else _kl_terms(student, teacher)
    else:
        mixture = jnp.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
        terms = beta * _kl_terms(teacher, mixture) + (1 - beta) * _kl_terms(student, mixture)
    counts = None if labels is None else jnp.asarray(labels) != IGNORED
    if num_items_in_batch is None and reduction not in ("batchmean", "sum", "mean"):
        return terms if counts is None else terms[counts]
    total = jnp.sum(terms if counts is None else jnp.where(counts[..., None], terms, 0))
    if num_items_in_batch is not None:
        return total / jnp.asarray(num_items_in_batch)
    if reduction == "sum":
        return total
    if reduction == "mean":
        return total / (terms.size if counts is None else jnp.sum(counts) * terms.shape[-1])
    return total / jnp.maximum(1, len(terms) if counts is None else jnp.sum(counts))


def _kl_terms(first: jax.Array, second: jax.Array) -> jax.Array:
    """The terms of KL(first || second), from log-probabilities."""
    return jnp.exp(first) * (first - second)


# Rows of GKD: conversations as token ids, with labels for the last message, as in TRL's DataCollatorForChatML.

_LONGEST = 1024  # without a max_length, unless the tokenizer has a smaller one
_PROMPTS = ("prompt", "original_prompt_text")


def prepare_chatml(
    dataset: Dataset | IterableDataset, tokenizer: Any, *, max_length: int | None, num_proc: int | None, name: str
) -> Dataset | IterableDataset:
    """Add `input_ids` and `labels`; labels are -100 for the tokens of the prompt.

    A row has `messages`, the last of which is the completion; a `prompt` (a string) may replace the messages before it.
    Or it has `input_ids` with `labels`, a `completion_mask`, or the `prompt` (a string) that they begin with. No row is
    dropped: longer conversations keep their last `max_length` tokens.

    Args:
        max_length: None means the tokenizer's `model_max_length`, at most 1024.
        num_proc, name: see `Task.prepare`.

    Raises:
        TypeError, ValueError: a row cannot be trained on, or has no prompt tokens left after truncation. A stream
            raises when it reaches the row.
    """
    rows, first = tokenize.peek(dataset, name, ("messages",))
    where = checks.argument(name)
    if "messages" not in first and "input_ids" not in first:
        raise ValueError(
            f"{where} must have the column 'messages', or 'input_ids' with a 'completion_mask' or a 'prompt', got "
            f"{brief(list(first), 500)}. Put the prompt and the completion into one list of messages."
        )
    if max_length is None:
        max_length = min(tokenizer.model_max_length, _LONGEST)
    row_options = {"tokenizer": tokenizer, "max_length": max_length, "where": where}
    options = tokenize.map_options(rows, num_proc, f"Tokenizing {where}")
    return rows.map(_encode_row, with_indices=True, fn_kwargs=row_options, **options)


def _encode_row(row: dict[str, Any], index: int, tokenizer: Any, max_length: int, where: str) -> dict[str, list[int]]:
    """`input_ids` and `labels` of one row; `where` names the dataset."""
    location = f"Row {index} of {where}"
    is_tokenized = row.get("input_ids") is not None
    ids, start = (_tokenized_ids if is_tokenized else _rendered_ids)(row, tokenizer, location)
    if not is_tokenized and len(ids) > max_length:
        ids, start = ids[-max_length:], start - (len(ids) - max_length)
    if start <= 0:
        raise ValueError(
            f"{location} has no prompt tokens left after truncation to max_length={max_length}. This happens when the "
            "completion alone fills the whole window, so the prompt is entirely dropped, leaving nothing to generate "
            "from. Increase `max_length`."
        )
    return {"input_ids": ids, "labels": [IGNORED] * start + ids[start:]}


def _rendered_ids(row: dict[str, Any], tokenizer: Any, location: str) -> tuple[list[int], int]:
    """The ids of a conversation, and the position at which its completion begins."""
    messages = row["messages"]
    if not chat.is_messages(messages):
        raise cell_error(location, "messages", messages, "messages, each a dict with role and content")
    chat.check_unicode(messages, "messages", location)
    chat.check_template(tokenizer, {}, location)
    text = chat.rendered(tokenizer, messages, location, tokenize=False)
    prompt = _prompt(row, tokenizer, location)
    if not _is_byte_level(tokenizer):
        return _ids(tokenizer, text), len(_ids(tokenizer, prompt))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, length = encoded["input_ids"], len(prompt.encode())
    for index, byte_offset in enumerate(_first_bytes(text, encoded["offset_mapping"])):
        if byte_offset >= length:
            return ids, index
    return ids, len(ids)


def _tokenized_ids(row: dict[str, Any], tokenizer: Any, location: str) -> tuple[list[int], int]:
    """The ids of a tokenized row, and the position at which its completion begins."""
    ids, mask, labels = row["input_ids"], row.get("completion_mask"), row.get("labels")
    if not isinstance(ids, list) or not ids:
        raise cell_error(location, "input_ids", ids, "a list of at least one token id")
    if 0 in (row.get("attention_mask") or ()):
        raise cell_error(location, "attention_mask", row["attention_mask"], "1 for every token: leave padding out")
    if labels is not None:  # of a row that was prepared before
        start = next((index for index, label in enumerate(labels) if label != IGNORED), len(ids))
        if labels[start:] != ids[start:]:
            raise cell_error(location, "labels", labels, f"{IGNORED} for the prompt, then the ids of the completion")
        return ids, start
    if mask is not None:
        if len(mask) != len(ids):
            raise cell_error(location, "completion_mask", mask, f"{len(ids):,} values, one per token of 'input_ids'")
        return ids, mask.index(1) if 1 in mask else len(ids)
    prompt = _ids(tokenizer, _prompt(row, tokenizer, location))[: len(ids)]
    if prompt != ids[: len(prompt)]:
        raise ValueError(
            f"{location}: 'input_ids' does not begin with the tokens of its prompt, so it is not known where the "
            "completion begins. Add a column 'completion_mask', 1 for each token of the completion."
        )
    return ids, len(prompt)


def _prompt(row: dict[str, Any], tokenizer: Any, location: str) -> str:
    """The text of the prompt."""
    for column in _PROMPTS:
        if row.get(column) is not None:
            if not isinstance(row[column], str):
                valid = "the text of the prompt. For a conversation, put all of it into 'messages' and leave this out"
                raise cell_error(location, column, row[column], valid)
            return row[column]
    messages = row.get("messages")
    if not messages:
        raise ValueError(f"{location} has 'input_ids' and neither a completion_mask, a prompt nor messages. Add one.")
    if len(messages) < 2:
        raise cell_error(location, "messages", messages, "a prompt of at least one message, and the completion")
    chat.check_template(tokenizer, {}, location)
    return chat.rendered(tokenizer, messages[:-1], location, add_generation_prompt=True, tokenize=False)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether tokens are pieces of UTF-8, detected as in TRL. Other tokenizers may not have offsets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow (Python) tokenizers have none
    return backend is not None and "ByteLevel" in repr(backend.pre_tokenizer) + repr(backend.decoder)


def _first_bytes(text: str, spans: list[tuple[int, int]]) -> list[int]:
    """The UTF-8 byte offset at which each token begins.

    Args:
        spans: of characters; tokens that share a character have the same span. An empty span begins at the end of the
            previous token.
    """
    bytes_before = [0]
    for character in text:
        bytes_before.append(bytes_before[-1] + len(character.encode()))
    offsets, end = [], 0
    for first, last in spans:
        offsets.append(end if first == last else bytes_before[first])
        end = end if first == last else bytes_before[last]
    return offsets
