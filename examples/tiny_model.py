"""Build a llama that is small enough to train within seconds. Nothing is downloaded.

The result is an ordinary Hugging Face checkpoint of a causal language model with random weights. `RewardTrainer`
replaces its language model head with a score head.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import trl_jax  # noqa: F401  before transformers, so that it does not say that PyTorch is missing

# isort: split

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, USER, ASSISTANT = SPECIAL = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
}


def build(folder: str | Path, texts: Iterable[str], vocab_size: int = 1024, seed: int = 0, **shape: int) -> Path:
    """Write a tokenizer, config.json and model.safetensors to `folder`.

    Args:
        texts: training data of the tokenizer.
        shape: overrides entries of CONFIG.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.save_pretrained(folder)
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in [("pad", PAD), ("bos", BOS), ("eos", EOS)]
    }
    config = CONFIG | shape | ids | {"vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(draw_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A lower-casing BPE tokenizer: with so little text, "Start" and "start" should be the same token."""
    inner = Tokenizer(models.BPE())
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
    )


def draw_weights(config: dict, seed: int) -> dict[str, np.ndarray]:
    """Normal noise for each matrix `[out, in]` and ones for each norm, under the names of a llama checkpoint."""
    rng = np.random.default_rng(seed)
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def noise(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0.0, config["initializer_range"], (rows, columns)).astype(np.float32)

    weights = {"model.embed_tokens.weight": noise(config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        matrices = {
            "self_attn.q_proj": noise(queries, width),
            "self_attn.k_proj": noise(keys, width),
            "self_attn.v_proj": noise(keys, width),
            "self_attn.o_proj": noise(width, queries),
            "mlp.gate_proj": noise(inner, width),
            "mlp.up_proj": noise(inner, width),
            "mlp.down_proj": noise(width, inner),
            "input_layernorm": np.ones(width, np.float32),
            "post_attention_layernorm": np.ones(width, np.float32),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": array for name, array in matrices.items()}
    return weights | {"model.norm.weight": np.ones(width, np.float32)}
