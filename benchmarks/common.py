"""Shared by the benchmarks: data, checkpoints, child processes and tables.

Heavy packages are not imported at module level, because child processes that measure imports import this file.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

PAD, EOS = SPECIAL = ["<pad>", "</s>"]


def parser(description: str) -> argparse.ArgumentParser:
    """An argument parser with the options that all benchmarks share."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--json", type=Path, help="also write everything measured to this file")
    options.add_argument("--cpus", type=int, help="processor cores each side may use; unset, all of them")
    return options


def prepare(cpus: int | None) -> None:
    """Use only the CPU and no network, and restrict this process and its children to the same cores."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    if cpus is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` in a fresh interpreter, so that its imports and peak memory are measured separately."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def memory(field: str = "VmHWM") -> float:
    """Memory of this process in MB, from /proc (Linux only): VmHWM is the peak so far, RssAnon what is allocated now.

    getrusage is not used because its peak starts at the parent process's peak.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024 / 1e6


def read_rows(path: Path) -> list[dict[str, str]]:
    """The `chosen` and `rejected` texts of a jsonl file, which may be gzipped."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [{side: row[side] for side in ("chosen", "rejected")} for row in rows]


def turn_about(
    calls: dict[Any, Callable[[], Any]], turns: int
) -> tuple[dict[Any, Any], dict[Any, float], dict[Any, list[float]]]:
    """Run each call once, which compiles, and then all of them alternately, `turns` times.

    Returns:
        The result of each first call, its CPU seconds, and the CPU seconds of the later calls.
    """
    results, first, times = {}, {}, {name: [] for name in calls}
    for name, call in calls.items():
        first[name], results[name] = _timed(call)
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(_timed(call)[0])
    return results, first, times


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def spread(values: Iterable[float]) -> str:
    """Format values as `median (min to max)`."""
    values = list(values)
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table, numbers with four digits."""
    cells = [list(rows[0])] + [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_json(path: Path | None, report: Any) -> None:
    """Write the report to the file, if any."""
    if path is not None:
        path.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")


def build_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer on `texts` and save it to `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS).save_pretrained(folder)


class NoTorch:
    """A module finder that raises ModuleNotFoundError for torch."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("torch is hidden, as where it is not installed.", name=name)


def hide_torch() -> None:
    """Make torch appear not to be installed; otherwise transformers imports it."""
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
    sys.meta_path.insert(0, NoTorch())


def build_llama(
    folder: Path,
    *,
    layers: int,
    width: int,
    vocab_size: int,
    dtype: str = "float32",
    head: int = 32,
    group: int = 2,
    inner: int | None = None,
    windows: Sequence[int | None] = (),
) -> None:
    """Write a causal llama with random weights, without torch.

    Args:
        head: channels per head.
        group: query heads per key/value head.
        windows: attention window of each layer in tokens, None for full attention; if given, the model is a ministral.
    """
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    rng, weight_dtype = np.random.default_rng(0), ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    inner, keys = inner or 3 * width, width // group
    shapes = {"self_attn.q_proj": (width, width), "self_attn.o_proj": (width, width)}
    shapes |= {"self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width)}
    shapes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    shapes |= {"mlp.down_proj": (width, inner)}
    norms = ("input_layernorm", "post_attention_layernorm")
    weights = {"model.embed_tokens.weight": (vocab_size, width), "model.norm.weight": None}
    for layer in range(layers):
        weights |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        weights |= {f"model.layers.{layer}.{name}.weight": None for name in norms}
    tensors = {
        name: np.ones(width, weight_dtype) if shape is None else rng.normal(0, 0.02, shape).astype(weight_dtype)
        for name, shape in weights.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size,
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": width // head, "num_key_value_heads": keys // head, "head_dim": head,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096,
        "tie_word_embeddings": True, "initializer_range": 0.02, "torch_dtype": dtype,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    if windows:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        config |= {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "layer_types": kinds}
        config["sliding_window"] = next(window for window in windows if window is not None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
