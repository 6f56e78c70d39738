"""Thirty steps of TRL with PEFT against ours, without copying initial values; each package also reads the other's
files."""

from __future__ import annotations

import re

import numpy as np
import pytest
from safetensors.numpy import save_file

import trl_jax
from compat_tests.effort import THOROUGH, only_thorough, usually
from compat_tests.hub.peft.runs import CASES
from compat_tests.parity.marks import assert_same_curve, assert_same_weights, steps_of
from compat_tests.parity.reference import read_weights

IDS = np.array([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
# Adapters on parts of layers; DoRA on fused layers, Conv1D and an embedding; an encoder; experts and a router; experts
# with other ranks; a changed base.
SCORED = ("llama", "phi3", "gpt2", "bert", "qwen3_moe", "gpt_oss", "mixtral", "qwen3")
# Loading such an adapter repeats the matrix decomposition in float32: where two singular values are a thousandth apart,
# the residual is off by 1e-5, more on some processors than on others.
SCORES = {"qwen3": 1e-4}
USUAL = {"llama"}.__contains__
ADRIFT = re.compile(r"(k_proj|c_attn|key)\.(base_layer\.)?bias")  # their exact gradient is zero


@pytest.mark.parametrize("name", usually(USUAL, CASES))
def test_the_curve_is_trls(adapted, name):
    assert len(steps_of(adapted.theirs(name).logs)) == 30
    assert_same_curve(adapted.ours(name).logs, adapted.theirs(name).logs)


@pytest.mark.parametrize("name", usually(USUAL, CASES))
def test_the_adapter_is_pefts(adapted, name):
    ours, theirs = adapted.ours(name).weights, adapted.theirs(name).weights
    assert set(ours) == set(theirs)
    held = [tensor for tensor in theirs if not ADRIFT.search(tensor)]
    if CASES[name].get("init_lora_weights") == "pissa":
        ours, theirs = signed(ours), signed(theirs)
    assert_same_weights({t: ours[t] for t in held}, {t: theirs[t] for t in held})


def signed(weights):
    """Singular vectors are unique only up to sign: here the largest element of each row of A is made positive."""
    found = dict(weights)
    for name in [name for name in weights if "lora_A" in name]:
        a, other = weights[name], name.replace("lora_A", "lora_B")
        signs = np.sign(a[np.arange(len(a)), np.abs(a).argmax(axis=1)])
        found[name], found[other] = signs[:, None] * a, weights[other] * signs
    return found


@pytest.mark.parametrize("name", usually(USUAL, CASES))
def test_adapter_config_is_pefts_key_by_key(adapted, name):
    ours, theirs = adapted.ours(name).config, adapted.theirs(name).config
    sets = {"target_modules", "target_parameters"}
    listed = sets & {key for key, value in theirs.items() if isinstance(value, list)}
    assert len(theirs) == 41
    assert {key: sorted(v) if key in listed else v for key, v in ours.items()} == {
        key: sorted(v) if key in listed else v for key, v in theirs.items()
    }


@pytest.mark.parametrize("name", usually(USUAL, CASES))
def test_as_many_numbers_train_as_with_peft(adapted, name):
    """If layers have smaller ranks or no adapter, the array that stacks all layers has unused elements."""
    ours, theirs = (run.trainer.get_num_trainable_parameters() for run in (adapted.ours(name), adapted.theirs(name)))
    assert ours == theirs


@pytest.mark.parametrize("name", usually(USUAL, SCORED))
def test_peft_and_transformers_score_as_we_do(adapted, name):
    import torch
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification

    run = adapted.ours(name)
    model = run.trainer.model
    ours = np.asarray(model(IDS).logits)
    folder = run.folder.parent / "merged"
    model.merge_and_unload().save_pretrained(folder)
    for theirs in (
        AutoPeftModelForSequenceClassification.from_pretrained(run.folder, num_labels=1),
        AutoModelForSequenceClassification.from_pretrained(folder),
    ):
        theirs.config.pad_token_id = model.config.pad_token_id
        with torch.no_grad():
            found = theirs.eval()(input_ids=torch.tensor(IDS)).logits.numpy()
        assert np.abs(found - ours).max() < SCORES.get(name, 1e-5)


@pytest.mark.parametrize("name", usually(USUAL, SCORED))
def test_we_score_as_peft_does_what_it_wrote(adapted, name):
    import torch

    theirs = adapted.theirs(name)
    ours = trl_jax.AutoModelForSequenceClassification.from_pretrained(theirs.folder)
    ours.config.pad_token_id = theirs.trainer.model.config.pad_token_id
    with torch.no_grad():
        wanted = theirs.trainer.model.eval()(input_ids=torch.tensor(IDS)).logits.numpy()
    assert np.abs(np.asarray(ours(IDS).logits) - wanted).max() < SCORES.get(name, 1e-5)


@only_thorough
def test_a_peft_model_is_trained_further_and_has_the_result(adapted, tmp_path):
    import torch
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoTokenizer

    from compat_tests.trainer.trainers import make

    folder = adapted.ours("gpt2" if THOROUGH else "llama").folder
    brought = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1, is_trainable=True).eval()
    words = AutoTokenizer.from_pretrained(folder)
    trainer = make(trl_jax, brought, tmp_path, processing_class=words, config={"max_steps": 2})
    before = np.asarray(trainer.model(IDS).logits)
    trainer.train()
    with torch.no_grad():
        after = brought(input_ids=torch.tensor(IDS)).logits.numpy()
    assert np.abs(after - np.asarray(trainer.model(IDS).logits)).max() < 1e-5 < np.abs(after - before).max()


def test_what_is_frozen_stays_and_padding_stays_zero(adapted):
    """llama's ranks differ by layer, and one layer has no adapter: the padding in the stacked arrays must stay zero."""
    trainer, start = adapted.ours("llama").trainer, trl_jax.AutoModelForSequenceClassification
    base = start.from_pretrained(adapted.model("llama"))
    for path, array in trainer.model.frozen.items():
        assert (np.asarray(array) == np.asarray(base.params[path])).all(), path
    a = np.asarray(trainer.model.params["model.layers.{}.self_attn.q_proj.lora_A"])
    b = np.asarray(trainer.model.params["model.layers.{}.self_attn.q_proj.lora_B"])
    assert a.shape == (3, 7, 64) and not a[0].any() and not a[2, 4:].any() and a[1].all() and not b[2, :, 4:].any()
    state = trainer.parts.setup.progress.optimizer_state
    assert not set(trainer.model.frozen) & {str(path[-1].key) for path, _ in _leaves(state) if hasattr(path[-1], "key")}


def _leaves(tree):
    import jax

    return jax.tree_util.tree_flatten_with_path(tree)[0]


# ---- what vLLM's LoRA loader requires, transcribed from its source -----------------------------------------------

# The tensor names it knows; an embedding's base weights are skipped.
NAMED = re.compile(r"base_model\.model\..+\.(lora_[AB]\.weight|lora_embedding_[AB]|embed_tokens\.base_layer\.weight)$")
ASKED = ("r", "lora_alpha", "target_modules")
TAKEN = {"modules_to_save": (None, []), "use_dora": (False,), "bias": ("none",)}
MAX_RANK = 16  # vLLM's default
HEAD = "base_model.model.score.weight"


def objections(folder, config) -> set[str]:
    """Config keys and tensor names that vLLM would refuse or misread."""
    ranks, alphas = config["rank_pattern"], config["alpha_pattern"]
    r, alpha = config["r"], config["lora_alpha"]
    found = {key for key in ASKED if key not in config}
    found |= {key for key, good in TAKEN.items() if config[key] not in good}
    found |= {"r"} if max([r, *ranks.values()]) > MAX_RANK else set()
    others = {alphas.get(key, alpha) / ranks.get(key, r) for key in ranks | alphas}
    found |= {"alpha_pattern"} if others - {alpha / r} else set()  # one scale for all modules
    return found | {name for name in read_weights(folder) if not NAMED.match(name)}


@only_thorough
@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_vllm_refuses_a_reward_models_adapter_for_its_head_alone(side, adapted, tmp_path):
    """PEFT writes modules_to_save for every classifier, and vLLM refuses adapters that have any. Without them and
    without the head, the same folder passes; merge_and_unload() keeps the head."""
    run = getattr(adapted, side)("qwen3_moe")
    assert objections(run.folder, run.config) == {"modules_to_save", HEAD}
    bare = {name: value for name, value in run.weights.items() if name != HEAD}
    save_file(bare, tmp_path / "model.safetensors")
    assert objections(tmp_path, run.config | {"modules_to_save": None}) == set()


@only_thorough
def test_what_else_vllm_refuses(adapted):
    runs = {name: adapted.ours(name) for name in ("phi3", "qwen2", "llama")}
    wrong = {name: objections(run.folder, run.config) for name, run in runs.items()}
    assert "use_dora" in wrong["phi3"] and any("magnitude" in name for name in wrong["phi3"])
    assert "bias" in wrong["qwen2"] and "alpha_pattern" in wrong["llama"]
