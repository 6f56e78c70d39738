"""Torch models that a user has changed beyond weights and config are refused by name, because JAX would ignore the
change."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from compat_tests.effort import usually
from compat_tests.hub.vision.models import CASES
from compat_tests.models import encoders
from compat_tests.models.families import SHAPES
from compat_tests.parity.dpo_cases import SMALL
from trl_jax.hub.torch_objects import as_folder


@pytest.fixture
def model(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint(**SMALL), dtype=torch.float32)


def accepted(model, head="lm", **options):
    with as_folder(model, head, **options):
        return True


def layer(model):
    return model.model.layers[0]


def act(model):
    layer(model).mlp.act_fn = nn.ReLU()


def forward(model):
    layer(model).mlp.forward = lambda hidden: 2 * hidden


def hook(model):
    layer(model).register_forward_hook(lambda module, given, found: found)


def before(model):
    model.lm_head.register_forward_pre_hook(lambda module, given: given)


def backward(model):
    layer(model).register_full_backward_hook(lambda module, given, found: None)


def gradient(model):
    model.lm_head.weight.register_hook(lambda gradient: 0 * gradient)


def tie(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def epsilon(model):
    layer(model).input_layernorm.variance_epsilon = 0.5


def later_config(model):
    model.config.rms_norm_eps = 0.25


def scale(model):
    layer(model).self_attn.scaling = 0.01


def frequencies(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def norm(model):
    model.model.norm = nn.Identity()


CHANGES = {
    act: r"model\.layers\.0\.mlp\.act_fn is a ReLU, but a SiLUActivation according to its config",
    forward: r"model\.layers\.0\.mlp\.forward was replaced by the script",
    hook: r"model\.layers\.0 has a hook set by the script, <lambda>",
    before: "lm_head has a hook set by the script, <lambda>",
    backward: r"model\.layers\.0 has a hook set by the script, <lambda>",
    gradient: r"the gradient of lm_head\.weight has a hook",
    tie: "its head and embedding are tied, but its config has tie_word_embeddings=False",
    epsilon: r"input_layernorm\.variance_epsilon is 0\.5, but 1e-06 according to its config",
    later_config: r"input_layernorm\.variance_epsilon is 1e-06, but 0\.25 according to its config",
    scale: r"self_attn\.scaling is 0\.01, but 0\.35\d+ according to its config",
    frequencies: r"rotary_emb\.inv_freq differs from the values that its config determines",
    norm: r"model\.norm is a Identity, but a LlamaRMSNorm according to its config",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_that_jax_would_pass_over_is_refused(change, model):
    change(model)
    words = r"model is a LlamaForCausalLM that was modified after it was created: .*"
    with pytest.raises(ValueError, match=words + CHANGES[change] + r"\. JAX would ignore"):
        accepted(model)


def test_a_dropout_that_was_turned_off_is_refused(checkpoint):
    """TRL's disable_dropout_in_model leaves a model like this; it is accepted only if the run disables dropout
    anyway."""
    folder = checkpoint("gpt2", head="causal", num_hidden_layers=1, resid_pdrop=0.1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert accepted(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0
    with pytest.raises(ValueError, match=r"\.p is 0, but 0\.1 according to its config"):
        accepted(model)
    assert accepted(model, dropout=False)


def test_dropout_around_a_score_head_is_left_out_where_it_does_not_count(checkpoint, caplog):
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint(), num_labels=1)
    linear = model.score
    model.score = nn.Sequential(nn.Dropout(0.3), linear)
    with pytest.raises(ValueError, match="score is a Sequential, but a Linear according to its config"):
        accepted(model, "score")
    assert accepted(model, "score", dropout=False) and model.score is linear
    assert "model.score is a linear layer wrapped with dropout" in caplog.text
    model.score = nn.Sequential(linear, nn.Linear(1, 1))
    with pytest.raises(ValueError, match="score is a Sequential"):
        accepted(model, "score", dropout=False)


def test_what_scripts_and_libraries_do_to_models_is_no_change(model):
    """Hooks that require gradients, from transformers and as in PEFT's documentation; gradient checkpointing; a round
    trip through 16 bits; another vocabulary size; a forward pass."""

    def make_inputs_require_grad(module, given, found):
        found.requires_grad_(True)

    model.get_input_embeddings().register_forward_hook(make_inputs_require_grad)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    model.resize_token_embeddings(600)
    model.config.pad_token_id = 3
    model.to(torch.bfloat16).train()
    model(input_ids=torch.tensor([[3, 4]])).logits.sum().backward()
    drawn = torch.get_rng_state()
    assert accepted(model)
    assert torch.equal(torch.get_rng_state(), drawn)  # the user's random stream is not disturbed


def test_a_head_that_is_tied_by_its_config_is_no_change(checkpoint):
    assert accepted(AutoModelForCausalLM.from_pretrained(checkpoint(**SMALL | {"tie": True})))


USUAL = {"gemma3_text", "gpt_oss", "qwen3_next"}


@pytest.mark.parametrize("family", usually(USUAL.__contains__, sorted(SHAPES.keys() - set(encoders.FAMILIES))))
def test_models_as_transformers_makes_them_are_accepted(family, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family, head="causal"), dtype=torch.float32)
    assert accepted(model)


def test_encoders_are_accepted(checkpoint):
    folder = checkpoint("bert", num_hidden_layers=1)
    assert accepted(AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1), "score")


@pytest.mark.parametrize(
    "case", usually({"gemma3", "mistral3"}.__contains__, [name for name in CASES if " " not in name])
)
def test_vision_language_models_as_transformers_makes_them_are_accepted(case, tmp_path):
    """The whole model's config decides whether the head is tied, not its text part's."""
    config = getattr(transformers, CASES[case].config_class)(**CASES[case].values)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    assert accepted(AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32))
