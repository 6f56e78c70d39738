"""GGUF checkpoints of llama.cpp: dequantised tensor by tensor, under the names transformers gives them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trl_jax.core.printable import brief, listed
from trl_jax.hub.formats.gguf_header import check_fields
from trl_jax.hub.formats.safetensors import SINGLE

LINK = "model.gguf"  # in the folder of the config.json and tokenizer that were made from the file

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Keys after "<architecture>.", and the config's.
_CONFIG = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Further keys without effect on what is computed; of rope, only scaling has one.
_INERT = re.compile(r"rope\.dimension_count|attention\.value_length|rope\.scaling\.(type|factor)$")
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFiles:
    """The tensors of a GGUF file, with the methods of `safetensors.CheckpointFiles`; read as float32.

    Attributes: shards, shapes, dtypes, as there.
    """

    def __init__(self, path: Path):
        reader = _open(path)
        tensors = {_full_name(tensor.name): tensor for tensor in reader.tensors if tensor.name != "rope_freqs.weight"}
        self._tensors = tensors
        self.shards = {SINGLE: list(tensors)}
        self.shapes = {name: tuple(int(size) for size in tensor.shape[::-1]) for name, tensor in tensors.items()}
        self.dtypes = dict.fromkeys(tensors, "float32")
        self._heads = _permuted_heads(reader)

    def check_dtypes(self, tensors: Iterable[str]) -> None:
        """Nothing: every type that the gguf package knows can be read."""

    def read(self, tensor: str) -> np.ndarray:
        """The values of one tensor, float32."""
        import gguf

        packed = self._tensors[tensor]
        values = gguf.quants.dequantize(packed.data, packed.tensor_type).astype(np.float32, copy=False)
        values = values.reshape(self.shapes[tensor])
        projection = re.search(r"\.([qk])_proj\.", tensor)
        if projection is None or self._heads is None:
            return values
        # llama.cpp rotates neighbouring channels of a head, transformers those half a head apart.
        split = values.reshape(self._heads[projection[1]], -1, 2, *values.shape[1:])
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


def unpack(path: Path) -> Path:
    """Make a folder with the config and the tokenizer that the file describes, and a link to its weights.

    Raises:
        ValueError: the architecture, or a fact of it, is not read here.
    """
    import huggingface_hub

    stat = path.resolve().stat()
    name = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = Path(huggingface_hub.cached_assets_path("trl_jax", "gguf", name))
    if not (folder / LINK).exists():
        reader, config = describe(path)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _tokenizer(reader, config["model_type"]).save_pretrained(folder)
        (folder / LINK).unlink(missing_ok=True)
        (folder / LINK).symlink_to(path.resolve())
    return folder


def describe(path: Path) -> tuple[Any, dict[str, Any]]:
    """The open file and the config that describes its model."""
    reader = _open(path)
    try:
        return reader, _config(reader, path)
    except (KeyError, IndexError, TypeError, OverflowError, UnicodeDecodeError) as error:  # of damaged fields
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a readable GGUF file: {brief(error, 500)}. Download it again.")


def _open(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"{path}: reading GGUF needs the gguf package: pip install 'trl_jax[gguf]'.") from error
    try:
        check_fields(path)
        return gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError) as error:  # its errors of a damaged file
        raise _unreadable(path, error) from error


def _value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents() if key in reader.fields else None


def _config(reader: Any, path: Path) -> dict[str, Any]:
    architecture = _value(reader, "general.architecture")
    if architecture not in _MODEL_TYPES:
        raise ValueError(
            f"{path}: a GGUF file of architecture {brief(architecture)}; read are {', '.join(_MODEL_TYPES)}. Pass the "
            "safetensors repository it was made of."
        )
    keys = {key.partition(".")[2] for key in reader.fields if key.startswith(f"{architecture}.")}
    scaling = _value(reader, f"{architecture}.rope.scaling.type")
    unknown = sorted(key for key in keys if key not in _CONFIG and not _INERT.fullmatch(key))
    if unknown or scaling not in (None, "none"):
        keys = listed(unknown) or f"rope.scaling.type={brief(scaling)}"
        raise ValueError(f"{path}: {keys} may change what the model computes and is not read from GGUF files.")
    config = {name: _value(reader, f"{architecture}.{key}") for key, name in _CONFIG.items() if key in keys}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "rope_freqs.weight" in tensors:
        raise ValueError(f"{path}: rope_freqs.weight stretches positions, which is not read from GGUF files.")
    ids = {name: _value(reader, f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    return config | {
        "model_type": _MODEL_TYPES[architecture],
        "architectures": ["LlamaForCausalLM"] if architecture == "llama" else [f"Qwen{architecture[-1]}ForCausalLM"],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in tensors,
        **{f"{name}_token_id": number for name, number in ids.items() if name != "unk" and number is not None},
    }


_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _tokenizer(reader: Any, model_type: str) -> Any:
    """Convert the vocabulary with transformers, whose reader of the file would need torch."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    described = {
        name: _value(reader, f"tokenizer.{key}")
        for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in reader.fields
    }
    backend, more = convert_gguf_tokenizer(model_type, described)
    special = {f"{name}_token": _value(reader, f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    special = {name: described["tokens"][number] for name, number in special.items() if number is not None}
    # llama.cpp puts BOS before a sentencepiece vocabulary's texts unless the file says otherwise.
    added = {"add_bos_token": True} if described["tokenizer_type"] == "llama" else {}
    for key in ("add_bos_token", "add_eos_token"):
        if f"tokenizer.ggml.{key}" in reader.fields:
            added[key] = _value(reader, f"tokenizer.ggml.{key}")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **more, **special, **added)
    tokenizer.chat_template = _value(reader, "tokenizer.chat_template")
    return tokenizer


def _full_name(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _TENSORS:
        return name  # refused later, as an unexpected tensor
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_TENSORS[match[2]]}.{match[3]}"


def _permuted_heads(reader: Any) -> dict[str, int] | None:
    """The heads of q and k where their rows have llama.cpp's order; None where they have transformers'."""
    if _value(reader, "general.architecture") != "llama":
        return None
    heads = _value(reader, "llama.attention.head_count")
    return {"q": heads, "k": _value(reader, "llama.attention.head_count_kv") or heads}
