"""Generation with adapters and in bfloat16: PEFT's tokens, and the probabilities of a training forward pass."""

from __future__ import annotations

import numpy as np
import pytest

from compat_tests.effort import only_thorough, usually
from compat_tests.generation.near_ties import flips
from compat_tests.generation.test_complete import FIELDS, prompts
from compat_tests.models import causal
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.auto import AutoModelForCausalLM, find_checkpoint
from trl_jax.hub.generate import complete

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 0.8, "max_new_tokens": 24, "pad_token_id": 0}
SEED, FAR = 3, 0.1
# Fewer layers, because each is compiled.
FEW = {"deepseek_v3": {"num_hidden_layers": 1}, "gemma2": {"num_hidden_layers": 2}}
TARGETS = {
    **dict.fromkeys(("mixtral", "qwen3"), "q_proj v_proj o_proj"),
    "deepseek_v3": "q_b_proj kv_b_proj o_proj",
    "granitemoehybrid": "in_proj out_proj v_proj",
    "gemma4_text": "q_proj v_proj per_layer_input_gate per_layer_model_projection",
    "llama4_text": "k_proj shared_expert.up_proj",
}
PARAMETERS = {"llama4_text": ["experts.gate_up_proj", "experts.down_proj"]}


def adapted(folder, family: str):
    """Our model with an adapter saved by PEFT, and PEFT's model."""
    base, written = causal.build(folder / "base", family, tie=False, **FEW.get(family, {})), folder / "adapter"
    facts = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": TARGETS[family].split()}
    facts["target_parameters"] = PARAMETERS.get(family)
    config = peft.LoraConfig(**facts, init_lora_weights=False)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(causal.reference(base), config).eval()
    theirs.save_pretrained(written)
    return find_checkpoint(str(written), head="lm").load(0), theirs


# GRPO's curve with an adapter compares PEFT's tokens for ordinary attention.
@pytest.mark.parametrize("family", usually("deepseek_v3".__eq__, TARGETS))
def test_an_adapter_writes_pefts_tokens(family, tmp_path):
    """With the adapter separate and merged; without it, the base generates other tokens."""
    ours, theirs = adapted(tmp_path, family)
    ids = np.random.default_rng(1).integers(5, 100, (3, 9))
    torch.manual_seed(SEED)
    options = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": None}
    rows = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(np.ones_like(ids))}
    wanted = theirs.generate(**rows, **SAMPLED | options)
    scores = [step.numpy() for step in wanted.scores]
    for model in (ours, ours.merge_and_unload()):
        found = model.generate(input_ids=ids, attention_mask=np.ones_like(ids), seed=SEED, eos_token_id=None, **SAMPLED)
        assert flips(found[:, 9:], wanted.sequences[:, 9:].numpy(), scores, SEED) == 0
    torch.manual_seed(SEED)
    with theirs.disable_adapter():
        plain = theirs.generate(**rows, eos_token_id=None, **SAMPLED)
    assert plain.tolist() != found.tolist()


@only_thorough
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "lfm2", "falcon_h1"])
def test_in_bfloat16_probabilities_are_those_of_whole_texts(family, tmp_path):
    """Log-probabilities of sampled tokens, from bfloat16 generation and from float32 forward passes, differ by
    bfloat16's precision at most."""
    model = AutoModelForCausalLM.from_pretrained(causal.build(tmp_path, family, tie=False, **FEW.get(family, {})))
    done = complete(model, prompts(), FIELDS, group=2, stream=TorchGenerator(1), dtype="bfloat16")
    texts = [
        prompts()[row // 2] + tokens[:length].tolist()
        for row, (tokens, length) in enumerate(zip(done.tokens, done.lengths, strict=True))
    ]
    longest, gaps = max(map(len, texts)), []
    every = np.asarray(model(np.array([text + [0] * (longest - len(text)) for text in texts])).logits) / 0.8
    for row, (tokens, length) in enumerate(zip(done.tokens, done.lengths, strict=True)):
        logits = every[row, len(prompts()[row // 2]) - 1 : len(texts[row]) - 1]
        exact = np.take_along_axis(logits, tokens[:length, None], 1)[:, 0] - np.logaddexp.reduce(logits, axis=1)
        gaps += np.abs(done.logps[row, :length] - exact).tolist()
    assert 1e-5 < np.median(gaps) < FAR and len(gaps) > 60
