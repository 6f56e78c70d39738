"""Read GGUF files and MXFP4 tensors."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from trl_jax.core.text import brief, listed
from trl_jax.hub.formats import SINGLE, CheckpointFiles

# GGUF checkpoints of llama.cpp: dequantized one tensor at a time, with transformers' names


LINK = "model.gguf"  # link to the file, next to the config.json and tokenizer extracted from it

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Keys after "<architecture>." -> keys of the config.
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
# Further keys that need no counterpart. Rope scaling must be off, which `_config` checks.
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
    """The tensors of a GGUF file in float32, with the methods and attributes of `formats.CheckpointFiles`."""

    def __init__(self, path: Path):
        reader = _open(path)
        tensors = {_full_name(tensor.name): tensor for tensor in reader.tensors if tensor.name != "rope_freqs.weight"}
        self._tensors = tensors
        self.shards = {SINGLE: list(tensors)}
        self.shapes = {name: tuple(int(size) for size in tensor.shape[::-1]) for name, tensor in tensors.items()}
        self.dtypes = dict.fromkeys(tensors, "float32")
        self._heads = _permuted_heads(reader)

    def check_dtypes(self, tensors: Iterable[str]) -> None:
        """Does nothing: every type that the gguf package knows can be read."""

    def read(self, tensor: str) -> np.ndarray:
        """The values of one tensor, float32."""
        import gguf

        packed = self._tensors[tensor]
        values = gguf.quants.dequantize(packed.data, packed.tensor_type).astype(np.float32, copy=False)
        values = values.reshape(self.shapes[tensor])
        projection = re.search(r"\.([qk])_proj\.", tensor)
        if projection is None or self._heads is None:
            return values
        # llama.cpp's rotary embeddings pair adjacent channels of a head, transformers' pair channels half a head apart.
        split = values.reshape(self._heads[projection[1]], -1, 2, *values.shape[1:])
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


def unpack(path: Path) -> Path:
    """Create a folder with the config and tokenizer described in the file, and a link to its weights.

    Raises:
        ValueError: the architecture, or one of its settings, is not supported.
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
    """The opened file, and the config of its model."""
    reader = _open(path)
    try:
        return reader, _config(reader, path)
    except (KeyError, IndexError, TypeError, OverflowError, UnicodeDecodeError) as error:  # damaged fields
        raise _unreadable_error(path, error) from error


def _unreadable_error(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a readable GGUF file: {brief(error, 500)}. Download it again.")


def _open(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            f"{path}: reading GGUF files requires the gguf package: pip install 'trl_jax[gguf]'."
        ) from error
    try:
        check_fields(path)
        return gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError) as error:  # raised for damaged files
        raise _unreadable_error(path, error) from error


def _value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents() if key in reader.fields else None


def _config(reader: Any, path: Path) -> dict[str, Any]:
    architecture = _value(reader, "general.architecture")
    if architecture not in _MODEL_TYPES:
        raise ValueError(
            f"{path} is a GGUF file of architecture {brief(architecture)}, but only {', '.join(_MODEL_TYPES)} can be "
            "read. Use the safetensors repository that it was made from."
        )
    keys = {key.partition(".")[2] for key in reader.fields if key.startswith(f"{architecture}.")}
    scaling = _value(reader, f"{architecture}.rope.scaling.type")
    unknown = sorted(key for key in keys if key not in _CONFIG and not _INERT.fullmatch(key))
    if unknown or scaling not in (None, "none"):
        keys = listed(unknown) or f"rope.scaling.type={brief(scaling)}"
        raise ValueError(f"{path}: {keys} may change what the model computes, but cannot be read from GGUF files.")
    config = {name: _value(reader, f"{architecture}.{key}") for key, name in _CONFIG.items() if key in keys}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "rope_freqs.weight" in tensors:
        raise ValueError(f"{path}: rope_freqs.weight rescales positions, which cannot be read from GGUF files.")
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
    """Convert the vocabulary with transformers, whose GGUF reader would need torch."""
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
    # llama.cpp adds a BOS token for a sentencepiece vocabulary unless the file says otherwise.
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
    """Numbers of heads of q and k if their rows are in llama.cpp's order; None if they are in transformers' order."""
    if _value(reader, "general.architecture") != "llama":
        return None
    heads = _value(reader, "llama.attention.head_count")
    return {"q": heads, "k": _value(reader, "llama.attention.head_count_kv") or heads}


# Checking a file's fields before the gguf package reads them, because it trusts every length


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type of a number -> bytes
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 24  # maximum array length; vocabularies have a few hundred thousand entries
_FIELDS = 1 << 16


def check_fields(path: Path) -> None:
    """Check the sizes of all fields of a file without reading their values.

    Raises:
        ValueError: a field claims more than the file holds, or than is plausible.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        magic, version, _, fields = struct.unpack("<4sIQQ", _read(file, 24))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r} and version {version} instead of b'GGUF' and 2 or 3")
        if fields > _FIELDS:
            raise ValueError(f"it claims {fields:,} fields")
        for _ in range(fields):
            _skip(file, _number(file, 8), size)
            _skip_value(file, _number(file, 4), size)


def _skip_value(file: BinaryIO, kind: int, size: int) -> None:
    if kind == _ARRAY:
        inner, count = _number(file, 4), _number(file, 8)
        if inner == _ARRAY or count > _LONGEST:
            raise ValueError(f"a field claims an array of {count:,} entries of type {inner}")
        if inner in _SIZES:
            _skip(file, count * _SIZES[inner], size)
            return
        for _ in range(count):
            _skip_value(file, inner, size)
    elif kind == _STRING:
        _skip(file, _number(file, 8), size)
    elif kind in _SIZES:
        _skip(file, _SIZES[kind], size)
    else:
        raise ValueError(f"a field has the unknown type {kind}")


def _skip(file: BinaryIO, count: int, size: int) -> None:
    if count > size - file.tell():
        raise ValueError(f"a field claims {count:,} bytes at byte {file.tell():,} of {size:,}")
    file.seek(count, 1)


def _number(file: BinaryIO, width: int) -> int:
    return int.from_bytes(_read(file, width), "little")


def _read(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError("it ends in the middle of its fields")
    return data


# Experts in 4 bits, dequantized to bfloat16: MXFP4 of the OCP Microscaling Formats (MX) Specification 1.0


METHOD = "mxfp4"  # in quantization_config.quant_method
BLOCKS, SCALES = "_blocks", "_scales"
_POSITIVE = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # the numbers of E2M1; the first bit is the sign
_NUMBERS = np.concatenate([_POSITIVE, -_POSITIVE])
_BYTES = _NUMBERS[np.arange(256)[:, None] >> np.asarray([0, 4]) & 15]  # numbers of a byte, `[256, 2]`, low bits first
_BIAS = 127  # bias of a scale's exponent


class Mxfp4Files(CheckpointFiles):
    """A checkpoint in which `<tensor>_blocks`, uint8 `[E, out, G, B]`, and `<tensor>_scales`, uint8 `[E, out, G]`, are
    read as one bfloat16 tensor `[E, in, out]`: G blocks of 2B numbers, each block scaled by a power of two."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._quantized: set[str] = set()
        for name in [name for name in self.shapes if self._is_quantized(name.removesuffix(BLOCKS))]:
            self._join(name.removesuffix(BLOCKS))

    def _is_quantized(self, tensor: str) -> bool:
        parts = tensor + BLOCKS, tensor + SCALES
        return all(self.dtypes.get(part) == "U8" for part in parts) and (
            self.shapes[parts[0]][:-1] == self.shapes[parts[1]] and len(self.shapes[parts[1]]) == 3
        )

    def _join(self, tensor: str) -> None:
        blocks, scales = tensor + BLOCKS, tensor + SCALES
        experts, outputs, groups, size = self.shapes[blocks]
        for shard, names in self.shards.items():
            whole = [tensor if name == blocks else name for name in names]
            self.shards[shard] = [name for name in whole if name != scales]
        for part in (blocks, scales):
            del self.shapes[part], self.dtypes[part]
        self.shapes[tensor], self.dtypes[tensor] = (experts, groups * size * 2, outputs), "bfloat16"
        self._shard_of[tensor] = self._shard_of[blocks]
        self._quantized.add(tensor)

    def read(self, tensor: str) -> np.ndarray:
        if tensor not in self._quantized:
            return super().read(tensor)
        return dequantized(super().read(tensor + BLOCKS), super().read(tensor + SCALES))

    def read_part(self, tensor: str, index: tuple[slice, ...]) -> np.ndarray:
        return self.read(tensor)[index] if tensor in self._quantized else super().read_part(tensor, index)


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """bfloat16 `[E, in, out]` from uint8 `[E, out, G, B]` and `[E, out, G]`, one expert at a time."""
    experts, outputs, groups, size = blocks.shape
    whole = np.empty((experts, groups * size * 2, outputs), ml_dtypes.bfloat16)
    with np.errstate(over="ignore", invalid="ignore"):  # a scale of 255 means NaN
        powers = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)
        for expert in range(experts):
            values = _BYTES[blocks[expert]].reshape(outputs, groups, -1) * powers[expert][..., None]
            whole[expert] = values.reshape(outputs, -1).T
    return whole
