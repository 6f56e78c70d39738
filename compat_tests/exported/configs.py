"""Tiny checkpoints of every model_type that the exporter supports, written by transformers, and its results."""

from __future__ import annotations

from pathlib import Path

import numpy as np

TYPES = (
    "albert arcee axk1 axk2 bert big_bird biogpt bloom camembert convbert ctrl data2vec-text deberta deberta-v2 "
    "deepseek_v3 diffllama distilbert doge electra ernie esm esmc eurobert exaone4 falcon gemma gemma2 gemma3_text "
    "glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj gte helium hunyuan_v1_dense hunyuan_v1_moe ibert jamba "
    "jina_embeddings_v3 layoutlm lilt llama luke markuplm megatron-bert minicpm3 minimax ministral ministral3 mistral "
    "mistral4 mixtral mobilebert modernbert modernbert-decoder mpnet mpt mra nemotron nomic_bert olmo olmo2 olmo3 "
    "openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_text qwen3_moe qwen3_next rembert "
    "roberta roberta-prelayernorm roc_bert roformer seed_oss smollm3 squeezebert stablelm starcoder2 ultrabert "
    "xlm-roberta xlm-roberta-xl xlnet deepseek_v2 fnet gpt-sw3 nystromformer"
).split()
# Every kind of attention, router, position and pooling; all but one are not native families.
SOME = (
    "albert bloom gpt_neo gpt_oss xlnet"  # the fast ones of each kind
).split()

SMALL = {
    **dict.fromkeys("hidden_size d_model n_embd dim embedding_size emb_dim".split(), 32),
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers".split(), 2),
    **dict.fromkeys("num_attention_heads n_head n_heads num_heads".split(), 4),
    **dict.fromkeys("intermediate_size ffn_dim n_inner d_inner hidden_dim dff ffn_hidden_size".split(), 48),
    **dict.fromkeys("max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length".split(), 128),
    **dict.fromkeys("num_local_experts num_experts n_routed_experts".split(), 4),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size".split(), 24),
    **dict.fromkeys("sliding_window local_attention".split(), 8),
    "vocab_size": 96, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, "num_experts_per_tok": 2,
    "type_vocab_size": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16,
    "head_dim": 4, "num_key_value_heads": 4,
}  # fmt: skip
GROUPED = {**LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
LINEAR = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "layer_types": ["linear_attention", "full_attention"],
}
TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
OWN = {
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "axk1": GROUPED,
    "axk2": GROUPED,
    "deepseek_v3": GROUPED,
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 4, "token_dropout": True},
    "esmc": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 16},
    "deepseek_v2": GROUPED,
    "minicpm3": LATENT,
    "mistral4": {**GROUPED, "n_group": 1, "head_dim": 12},  # a third of which is rotated
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
}


def config(model_type: str, **overrides):
    """A small config with every key of `SMALL` that the type has; the pad id is 0."""
    from transformers import AutoConfig

    if model_type == "qwen3_5":
        text = config("qwen3_5_text", **overrides).to_dict()
        return AutoConfig.for_model(model_type, text_config=text, vision_config=TOWER, num_labels=1)
    known = AutoConfig.for_model(model_type).to_dict()
    facts = {key: value for key, value in SMALL.items() if key in known}
    facts |= {"num_labels": 1, "pad_token_id": 0, **OWN.get(model_type, {}), **overrides}
    return AutoConfig.for_model(model_type, **facts)


def build(folder: Path, model_type: str, *, dtype="float32", head=True, seed=0, **overrides) -> Path:
    """Write a checkpoint with noise in every parameter; head=False writes only the trunk."""
    import torch
    import transformers

    made = transformers.AutoModelForSequenceClassification if head else transformers.AutoModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = made.from_config(config(model_type, **overrides))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return Path(folder)


def rows(length: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask `[4, length]`: two full rows and two right-padded ones."""
    ids = np.random.default_rng(0).integers(5, 90, (4, length)).astype(np.int32)
    mask = np.ones_like(ids)
    for row, kept in ((1, 15), (3, 5)):
        ids[row, kept:], mask[row, kept:] = 0, 0
    return ids, mask


def reference(folder: Path, dtype: str = "float32"):
    """transformers' classifier as TRL loads it, in eval mode."""
    import torch
    import transformers

    torch.set_num_threads(1)
    made = transformers.AutoModelForSequenceClassification
    return made.from_pretrained(folder, num_labels=1, dtype=getattr(torch, dtype)).eval()


def scores(model, ids: np.ndarray, mask: np.ndarray):
    """transformers' scores `[R]`, differentiable."""
    import torch

    return model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits[:, 0]
