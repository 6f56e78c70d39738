"""Every family in every variant: scores and gradients match transformers."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import CONFIG_MAPPING

from compat_tests.effort import THOROUGH, usual, usually
from compat_tests.models import variants
from compat_tests.models.families import BODY_ONLY, UNLIKE, VARIANTS
from trl_jax.core.outputs import reads_of_rows
from trl_jax.hub import families
from trl_jax.hub.auto import AutoModelForSequenceClassification
from trl_jax.hub.config_reader import is_unread
from trl_jax.models.model import merge

torch = pytest.importorskip("torch")

GRADIENTS = [
    ("llama", "yarn"),
    ("llama", "both_biases"),
    ("llama", "wide_heads"),
    ("qwen2", "max_window_layers"),
    ("qwen3", "long_window"),
    ("qwen3", "attention_bias"),
]
GRADIENTS += [(family, list(own)[-1]) for family, own in VARIANTS.items()]
GRADIENTS += [("gemma4_text", "experts")]
# Their gradients are always compared in test_causal_families or test_multimodal_causal, or their layers are those of a
# family that is compared.
SCORES_ALONE = {"llama", "gemma2", "gpt_oss", "ministral3", "phi3", "smollm3", "gemma4_text", "llama4_text"}
if not THOROUGH:  # for the others, only scores
    GRADIENTS = [case for case in GRADIENTS if case[0] in UNLIKE - SCORES_ALONE]
# Each combines two features that variants of llama, qwen2 and qwen3, or of arcee and gpt_neox, have separately.
COMBINED = {
    ("llama", "attention_bias"), ("llama", "mlp_bias"), ("llama", "linear"), ("llama", "old_linear"),
    ("llama", "old_llama3"), ("qwen2", "tied"), ("qwen2", "yarn"), ("qwen3", "tied"), ("qwen3", "yarn"),
    ("qwen3", "max_window_layers"), ("qwen3", "long_window"),
}  # fmt: skip
# Covered by another variant of the family together with one of another family: layers of a single kind, rotations of
# odd width, old keys. test_causal_families covers Gemma 2's soft caps.
TOLD_ELSEWHERE = {
    ("apertus", "another_activation"), ("apertus", "rope_of_the_class"), ("exaone4", "no_window"),
    ("gemma2", "plain"), ("gemma4_text", "no_sharing"), ("glm4_moe", "odd"), ("gpt_neox", "odd_linear"),
    ("gpt_neox", "old"), ("gpt_oss", "original"), ("granitemoehybrid", "no_experts"),
    ("granitemoehybrid", "no_positions"), ("llama4_text", "not_normed"), ("nemotron_h", "no_experts"),
    ("olmo3", "pattern"), ("opt", "normed_sums"), ("phimoe", "alone"),
}  # fmt: skip
SELDOM = COMBINED | TOLD_ELSEWHERE
QUICKLY = {"xla_backend_optimization_level": 0}  # compiles in a third of the time with the same result


# test_causal_families covers the plain variants of all families as language models.
@pytest.mark.parametrize(
    ("family", "name"),
    usually(
        lambda *case: case not in SELDOM and (case[1] != "plain" or case[0] in {"llama", "gpt2", "gemma2"}),
        [case for case in variants.CASES if case not in GRADIENTS],
    ),
)
def test_scores(family, name, built):
    folder, length = built(family, name), variants.variant(family, name).get("length", variants.LENGTH)
    with_new_head = variants.variant(family, name).get("head") == "causal" or family in BODY_ONLY
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    if with_new_head:  # a random head, which we save so that both load it
        folder = folder / "saved"
        model.save_pretrained(folder)
    ids, mask = variants.rows(length)
    wanted = variants.reference_logits(folder, ids, mask)
    assert wanted.std() > 0.05
    variants.assert_close(model(ids, mask).logits, wanted, 1e-5)
    if THOROUGH or name == "plain":
        unmasked = variants.reference_logits(folder, ids, np.ones_like(ids))
        variants.assert_close(model(ids).logits, unmasked, 1e-5, "scores without a mask")


@usual("lfm2-biases", "gemma3_text-old", "gpt2-by_layer", "opt-normed_sums_no_bias", "qwen3_next-dense")
@pytest.mark.parametrize(("family", "name"), GRADIENTS)
def test_scores_and_gradients(family, name, built, tmp_path):
    """Of a weighted sum of scores, for every tensor on disk. Row 3 has a visible pad, whose embedding gets no
    gradient."""
    folder, length = built(family, name), variants.variant(family, name).get("length", variants.LENGTH)
    ids, mask = (rows[:6] for rows in variants.rows(length))
    pull = np.linspace(-1.0, 1.5, len(ids), dtype=np.float32)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    if family in BODY_ONLY:
        folder = folder / "saved"
        model.save_pretrained(folder)
    run = jax.jit(jax.grad(_pulled_scores(model, ids, mask, pull), has_aux=True), compiler_options=QUICKLY)
    gradients, scores = run(model.params)
    found = dict(model.backend.on_disk(gradients))

    reference = variants.reference(folder)
    logits = reference(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits[:, 0]
    variants.assert_close(scores, logits.detach().numpy(), 1e-5)
    (logits * torch.tensor(pull)).sum().backward()
    wanted = variants.reference_gradients(reference, tmp_path)
    assert set(found) == set(wanted)
    for tensor, values in wanted.items():
        variants.assert_close(found[tensor], values, 1e-4, tensor)
    if model.source.config.arch.padding_idx is not None:
        assert not np.any(gradients["decoder.embed.weight"][0])


def _pulled_scores(model, ids, mask, pull):
    reads = reads_of_rows(np.where(ids != 0, np.arange(ids.shape[1]), 0).max(axis=1), ids.shape[1])
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)

    def total(params):
        scorer = merge(model.graph, params)
        scores = scorer(jnp.asarray(ids), positions, reads, valid=jnp.asarray(mask, bool))
        return jnp.sum(scores * pull), scores

    return total


def test_bfloat16_weights_are_read_exactly(tmp_path):
    folder = variants.tiny_model(tmp_path, "qwen3", dtype="bfloat16")
    ids, mask = variants.rows()
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    variants.assert_close(model(ids, mask).logits, variants.reference_logits(folder, ids, mask), 1e-5)


@pytest.mark.parametrize("family", usually(UNLIKE.__contains__, VARIANTS))
def test_a_key_that_transformers_alone_knows_is_refused(family, built, tmp_path, monkeypatch):
    monkeypatch.setattr(families, "is_unread", lambda config_class, key: key != "attention_twist")
    config = json.loads((built(family, "plain") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_twist": 3}))
    with pytest.raises(ValueError, match=f"does not know for model_type '{family}': attention_twist=3"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "values", "text"),
    [
        ("gemma4_text", {"per_layer_config": {"1": 5}}, "per_layer_config: 1 must be an object, got 5"),
        ("hunyuan_v1_moe", {"moe_topk": []}, "moe_topk must be a whole number, or a list with the same one for each"),
        ("lfm2", {"full_attn_idxs": 3, "layer_types": None}, "full_attn_idxs must be a list of the numbers of layers"),
    ],
)
def test_a_wrong_value_of_a_family_is_named(model_type, values, text):
    config = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    with pytest.raises(ValueError, match=f"model/config.json: {text}"):
        families.read_arch(config | values, Path("model/config.json"))


def test_a_text_config_of_null_is_that_of_the_class():
    config = json.loads(CONFIG_MAPPING["llava"]().to_json_string(use_diff=False))
    _, arch = families.read_arch(config | {"text_config": None}, Path("model/config.json"))
    assert arch == families.read_arch(config, Path("model/config.json"))[1]


def test_a_key_that_nobody_knows_is_passed_over(built, tmp_path, caplog):
    """As in the tiny gpt2 of TRL's own tests, whose config has llama's sizes."""
    shutil.copytree(built("gpt2", "plain"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2, "twist": 3}))
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"{tmp_path / 'model' / 'config.json'}: ignoring num_key_value_heads, twist, "
        "which neither trl_jax nor transformers reads."
    ]


@pytest.mark.parametrize(("key", "unread"), [
    ("n_inner", False), ("hidden_size", False),  # a field, and an alias of one
    ("sliding_window", False),  # read by the cache of all models
    ("cross_attention_factor", True),
])  # fmt: skip
def test_keys_that_transformers_reads(key, unread):
    assert is_unread(CONFIG_MAPPING["gpt2"], key) == unread


def test_attributes_of_modules_are_not_keys_of_configs():
    """`embed_dim` is an attribute of SigLIP's modules, and a key in the configs of TRL's tiny gemma3."""
    tower = CONFIG_MAPPING["siglip_vision_model"]
    assert is_unread(tower, "embed_dim") and not is_unread(tower, "vision_use_head")


@pytest.mark.parametrize("family", usually(UNLIKE.__contains__, sorted(set(VARIANTS) - BODY_ONLY)))
def test_an_untouched_checkpoint_is_written_to_the_byte(family, built, tmp_path):
    """Also in bfloat16, where any arithmetic on a weight would show."""
    import transformers

    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        built(family, "plain"), dtype=torch.bfloat16
    )
    theirs.save_pretrained(tmp_path / "in", max_shard_size="100KB")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "in", dtype="auto")
    model.save_pretrained(tmp_path / "out")
    weights = sorted(path.name for path in (tmp_path / "in").glob("*.safetensors"))
    assert len(weights) > 1
    for name in weights:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes(), name
    before, after = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("in", "out"))
    assert {key for key in {*before, *after} if before.get(key) != after.get(key)} <= {"use_cache", "dtype"}


@pytest.mark.parametrize("family", usually(UNLIKE.__contains__, sorted(set(VARIANTS) - BODY_ONLY)))
def test_a_causal_model_becomes_a_classifier(family, tmp_path):
    """Both initialize the same head, and transformers finds exactly the tensors that are saved."""
    import transformers

    folder = variants.tiny_model(tmp_path / "in", family, head="causal")
    model = AutoModelForSequenceClassification.from_pretrained(folder, seed=5)
    model.save_pretrained(tmp_path / "out")
    kind = transformers.AutoModelForSequenceClassification
    transformers.set_seed(5)
    drawn = kind.from_pretrained(folder, num_labels=1, dtype=torch.float32).score.weight.detach().numpy()
    np.testing.assert_allclose(model.params["score.weight"], drawn, rtol=1e-6, atol=1e-9)
    _, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {key: list(found) for key, found in report.items() if found} == {}


IN_BFLOAT16 = (
    "llama qwen2 qwen3 mistral gemma2 gemma3_text gemma4_text phi3 olmo2 gpt_neox gpt_oss qwen3_moe apertus "
    "deepseek_v2 deepseek_v3 ernie4_5 ernie4_5_moe falcon_h1 glm4_moe granitemoe granitemoehybrid hunyuan_v1_moe lfm2 "
    "lfm2_moe llama4_text minimax_m2 nemotron_h phimoe qwen3_5_moe_text qwen3_5_text qwen3_next"
).split()
# If rounding selects another expert on either side, that text's error exceeds all others.
BY_MEDIAN = {"glm4_moe", "gpt_oss", "lfm2_moe", "phimoe", "qwen3_5_moe_text"}


@usual("llama", "gpt_oss")
@pytest.mark.parametrize("family", IN_BFLOAT16)
def test_bfloat16_is_no_further_from_float32_than_transformers_own(family, built):
    """Root mean square over 48 texts, or their median; torch's float32 result is the reference."""
    folder = built(family, "plain")
    ids = np.random.default_rng(3).integers(1, 512, (48, 32))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    if family in BODY_ONLY:
        folder = folder / "saved"
        model.save_pretrained(folder)
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), ids.shape)
    reads = np.arange(1, 49) * 32 - 1
    run = jax.jit(
        lambda params: merge(model.graph, params)(ids, positions, reads, dtype=jnp.bfloat16),
        compiler_options=QUICKLY,
    )
    reference = variants.reference(folder)
    with torch.no_grad():
        rows = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(np.ones_like(ids))}
        exact = reference(**rows).logits[:, 0].numpy()
        theirs = reference.to(torch.bfloat16)(**rows).logits[:, 0].float().numpy()
    off = [np.abs(found - exact) for found in (np.asarray(run(model.params)), theirs)]
    ours, theirs = (np.median(each) if family in BY_MEDIAN else np.sqrt(np.mean(each**2)) for each in off)
    assert 1e-4 * exact.std() < ours <= theirs
