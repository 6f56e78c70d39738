"""Helpers that scripts import from `trl.trainer.utils`, for JAX and NumPy arrays, and, for losses, torch tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import ModelCard, ModelCardData

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.core.trainers import lazy_getattr
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.hub.quantization import BitsAndBytesConfig
from trl_jax.hub.torch_bridge import also_of_tensors, any_tensor, as_arrays, batch_tensor, peft_available
from trl_jax.trainer.model_config import ModelConfig

# Names that earlier TRL releases had in this module.
_OLD = (
    "ConstantLengthDataset", "DataCollatorForCompletionOnlyLM", "RewardDataCollatorWithPadding",
    "SIMPLE_CHAT_TEMPLATE", "SIMPLE_QUERY_CHAT_TEMPLATE", "SIMPLE_SFT_CHAT_TEMPLATE",
)  # fmt: skip
__getattr__ = lazy_getattr(__name__, dict.fromkeys(_OLD, "trl_jax.legacy.collators"))


def get_peft_config(model_args: ModelConfig) -> LoraConfig | None:
    """The LoRA config that the flags describe, of PEFT's class if peft is imported; None without `use_peft`.

    Raises:
        ValueError: a flag has an invalid value.
    """
    if not model_args.use_peft:
        return None
    kind = sys.modules["peft"].LoraConfig if "peft" in sys.modules else LoraConfig
    return kind(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
    )


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """The quantization config that the flags describe; None without quantization."""
    if not model_args.load_in_4bit and not model_args.load_in_8bit:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=model_args.load_in_4bit,
        load_in_8bit=model_args.load_in_8bit,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
    )


def is_peft_available() -> bool:
    """Whether peft is installed; adapters work without it."""
    return peft_available()


def is_xpu_available() -> bool:
    """False: JAX chooses the devices, torch's are not queried."""
    return False


def is_npu_available() -> bool:
    """False, as for `is_xpu_available`."""
    return False


def get_kbit_device_map() -> None:
    """None: JAX places all arrays, including quantized ones."""


def compute_accuracy(eval_pred: Any) -> dict[str, float]:
    """The fraction of entries whose largest logit is that of the label; labels of -100 are ignored.

    Args:
        eval_pred: (logits `[N, C]` or `[N, T, C]`, labels `[N]` or `[N, T]`).

    Raises:
        ValueError: there are no labels, as in a RewardTrainer's evaluation, which reports accuracy itself.
    """
    predictions, labels = eval_pred
    if len(labels) == 0:
        raise ValueError("There are no labels: RewardTrainer reports eval_accuracy itself. Leave compute_metrics out.")
    labels, predicted = np.asarray(labels), np.argmax(np.asarray(predictions), axis=-1)
    labeled = labels != -100
    return {"accuracy": float(np.mean(predicted[labeled] == labels[labeled]))}


# Arrays


def pad(
    tensors: Sequence[np.ndarray | jax.Array],
    padding_value: float = 0,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
) -> np.ndarray | jax.Array:
    """Pad and stack arrays `[T_i, ...]` to one array `[N, T, ...]`: NumPy if the first one is a NumPy array, else JAX.

    Args:
        tensors: N arrays with the same number of axes. Each axis is padded to its maximum, the first one on
            `padding_side` and the others on the right.
        pad_to_multiple_of: T is rounded up to a multiple of it.

    Raises:
        ValueError: `padding_side` is neither "left" nor "right".
    """
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}.")
    if any_tensor(*tensors):
        arrays = as_arrays(list(tensors))
        return batch_tensor(pad(arrays, padding_value, padding_side, pad_to_multiple_of))
    shape = np.max([np.shape(tensor) for tensor in tensors], axis=0)
    if pad_to_multiple_of is not None:
        shape[0] = -(-shape[0] // pad_to_multiple_of) * pad_to_multiple_of
    xp = np if isinstance(tensors[0], np.ndarray) else jnp

    def padded(tensor: Any) -> Any:
        missing = [(0, int(more)) for more in shape - np.shape(tensor)]
        if padding_side == "left":
            missing[0] = missing[0][::-1]
        return xp.pad(tensor, missing, constant_values=padding_value)

    return xp.stack([padded(tensor) for tensor in tensors]).astype(tensors[0].dtype)


def selective_log_softmax(
    logits: jax.Array, index: jax.Array, temperature: float = 1.0, row_mask: jax.Array | None = None
) -> jax.Array:
    """Log-probabilities (in nats) of selected classes.

    Args:
        logits: `[..., C]`.
        index: `[...]`, one class per row of logits, or `[..., K]`.
        temperature: divides the logits.
        row_mask: `[...]`; the result is 0 where it is 0.

    Returns:
        An array with the shape of `index` and the dtype of `logits`.

    Raises:
        ValueError: the temperature is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    single = index.ndim == logits.ndim - 1
    if any_tensor(logits):
        logps = (logits / temperature).log_softmax(-1).gather(-1, index[..., None] if single else index)
        logps = logps[..., 0] if single else logps
        if row_mask is None:
            return logps
        return logps.masked_fill(~(row_mask if row_mask.ndim == logps.ndim else row_mask[..., None]).bool(), 0)
    logps = jax.nn.log_softmax(logits / temperature, axis=-1)
    chosen = jnp.take_along_axis(logps, index[..., None] if single else index, axis=-1)
    chosen = chosen[..., 0] if single else chosen
    if row_mask is None:
        return chosen
    return jnp.where(row_mask if row_mask.ndim == chosen.ndim else row_mask[..., None], chosen, 0)


def entropy_from_logits(logits: jax.Array, chunk_size: int = 128) -> jax.Array:
    """Shannon entropy (in nats) of each row of logits `[..., C]` -> `[...]`, `chunk_size` rows at a time."""
    if any_tensor(logits):
        logps = logits.log_softmax(-1)
        return -(logps.exp() * logps).sum(-1)
    rows = logits.reshape(-1, logits.shape[-1])

    def entropy(row: jax.Array) -> jax.Array:
        logps = jax.nn.log_softmax(row)
        return -jnp.sum(jnp.exp(logps) * logps)

    return jax.lax.map(entropy, rows, batch_size=chunk_size).reshape(logits.shape[:-1])


def nanstd(tensor: jax.Array, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> jax.Array:
    """Sample standard deviation (ddof=1) of the non-NaN values; NaN for fewer than two."""
    if any_tensor(tensor):
        count, mean = (~tensor.isnan()).sum(dim, keepdim=True), tensor.nanmean(dim, keepdim=True)
        std = ((tensor - mean).square().nansum(dim, keepdim=True) / (count - 1)).sqrt()
        std = std.masked_fill(count < 2, float("nan"))
        return std if keepdim else std.reshape(tensor.nansum(dim).shape)
    return jnp.nanstd(tensor, axis=dim, ddof=1, keepdims=keepdim)


def nanmin(tensor: jax.Array) -> jax.Array:
    """The minimum of the non-NaN values; NaN if all are NaN."""
    if any_tensor(tensor):
        numbers = tensor[~tensor.isnan()]
        return numbers.min() if len(numbers) else tensor.new_tensor(float("nan"))
    return jnp.nanmin(tensor)


def nanmax(tensor: jax.Array) -> jax.Array:
    """The maximum of the non-NaN values; NaN if all are NaN."""
    return -nanmin(-tensor) if any_tensor(tensor) else jnp.nanmax(tensor)


@also_of_tensors
def flush_left(mask: np.ndarray, *tensors: np.ndarray) -> Any:
    """Rotate each row left so that it starts at its first nonzero mask entry, then drop all columns starting from the
    first one that is zero in all rows.

    Args:
        mask: `[N, M]`.
        tensors: arrays of the same shape.

    Returns:
        The mask, or, if there are `tensors`, a tuple of the mask and the tensors.
    """
    mask = np.asarray(mask)
    width = mask.shape[1]
    places = (np.arange(width) + (mask != 0).argmax(axis=1)[:, None]) % width
    moved = [np.take_along_axis(np.asarray(array), places, axis=1) for array in (mask, *tensors)]
    empty = ~moved[0].any(axis=0)
    end = int(empty.argmax()) if empty.any() else width
    moved = [array[:, :end] for array in moved]
    return tuple(moved) if tensors else moved[0]


def identity(x: Any) -> Any:
    """Return `x`: a collate function that leaves rows unchanged."""
    return x


def remove_none_values(example: list | Mapping[str, Any]) -> Any:
    """A copy of `example` without keys whose value is None, recursively.

    Raises:
        TypeError: `example` is neither a list nor a mapping.
    """
    if not isinstance(example, list | Mapping):
        raise TypeError(f"remove_none_values takes a list or a mapping, got {type(example).__name__}.")

    def of(value: Any) -> Any:
        return remove_none_values(value) if isinstance(value, dict | list) else value

    if isinstance(example, list):
        return [of(value) for value in example]
    return {key: of(value) for key, value in example.items() if value is not None}


class RepeatSampler:
    """Dataset indices, repeated as in online training, in the same order as torch for a given seed.

    Args:
        data_source: the dataset; an incomplete last batch is dropped.
        mini_repeat_count: how many times each index is repeated consecutively.
        batch_size: number of distinct indices in a batch.
        repeat_count: how many times each batch is repeated.
        seed: None: torch's default seed, as in TRL.
    """

    _TORCH_DEFAULT = 67280421310721

    def __init__(
        self,
        data_source: Sized,
        mini_repeat_count: int,
        batch_size: int = 1,
        repeat_count: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ):
        self.data_source, self.mini_repeat_count, self.batch_size = data_source, mini_repeat_count, batch_size
        self.repeat_count, self.num_samples, self.shuffle, self.seed = repeat_count, len(data_source), shuffle, seed
        self._stream = TorchGenerator(self._TORCH_DEFAULT if seed is None else seed)

    def __iter__(self) -> Iterator[int]:
        order = self._stream.permutation(self.num_samples) if self.shuffle else np.arange(self.num_samples)
        whole = order[: self.num_samples // self.batch_size * self.batch_size].reshape(-1, self.batch_size)
        once = np.repeat(whole, self.mini_repeat_count, axis=1)
        yield from np.repeat(once, self.repeat_count, axis=0).reshape(-1).tolist()

    def __len__(self) -> int:
        return self.num_samples // self.batch_size * self.batch_size * self.mini_repeat_count * self.repeat_count


def generate_model_card(
    base_model: str | None,
    model_name: str,
    hub_model_id: str,
    dataset_name: str | list[str] | None,
    tags: list[str],
    wandb_url: str | None,
    trackio_url: str | None,
    trainer_name: str,
    trainer_citation: str | None = None,
    template_file: str | None = None,
    paper_title: str | None = None,
    paper_id: str | None = None,
    comet_url: str | None = None,
) -> ModelCard:
    """A model card with TRL's metadata and our own text; `save(path)` writes it.

    Args:
        base_model: the repository of the model that was fine-tuned.
        hub_model_id: "username/model", for the usage example in the card.
        wandb_url, trackio_url, comet_url: links to the run in a tracker.
        trainer_citation: BibTeX.
        template_file: "lm_model_card.md" for language models (the default), or "rm_model_card.md" for reward models.
        paper_title, paper_id: title and arXiv number of the method's paper.

    Raises:
        ValueError: `template_file` is unknown.
    """
    if (template_file or _LM_CARD) not in _TASKS_OF_CARDS:
        raise ValueError(f"template_file={template_file!r} is not one of {', '.join(_TASKS_OF_CARDS)}.")
    task, inputs = _TASKS_OF_CARDS[template_file or _LM_CARD]
    data = ModelCardData(
        base_model=base_model, datasets=dataset_name, library_name="transformers", licence="license",
        model_name=model_name, tags=["generated_from_trainer", *tags],
    )  # fmt: skip
    datasets = [dataset_name] if isinstance(dataset_name, str) else dataset_name or []
    on = ", ".join(f"[{name}](https://huggingface.co/datasets/{name})" for name in datasets)
    origin = f", fine-tuned from [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    paper = f", a method of [{paper_title}](https://huggingface.co/papers/{paper_id})" if paper_id else ""
    trackers = {"Weights & Biases": wandb_url, "Trackio": trackio_url, "Comet": comet_url}
    runs = ", ".join(f"[{name}]({url})" for name, url in trackers.items() if url)
    parts = [
        f"# {model_name}",
        f"A model{origin}{f' on {on}' if on else ''}, trained by {trainer_name}{paper}.",
        f'```python\nfrom transformers import pipeline\n\nmodel = pipeline("{task}", model="{hub_model_id}")\n'
        f"print(model({inputs}))\n```",
        f"The run: {runs}." if runs else "",
        "\n".join(f"- {name} {version(name)}" for name in ("transformers", "datasets", "tokenizers", "jax")),
        f"Cite {trainer_name} as\n\n```bibtex\n{trainer_citation}\n```" if trainer_citation else "",
    ]
    text = "\n\n".join(part for part in parts if part)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")


_LM_CARD = "lm_model_card.md"
_TASKS_OF_CARDS = {  # the pipeline and its example input
    _LM_CARD: ("text-generation", '[{"role": "user", "content": "Hello!"}]'),
    "rm_model_card.md": ("text-classification", '"Hello!"'),
}
