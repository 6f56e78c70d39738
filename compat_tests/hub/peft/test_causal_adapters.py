"""Adapters of causal language models against PEFT: logits, gradients, files, merged weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from compat_tests.effort import usual
from compat_tests.models import causal, variants
from trl_jax.hub.auto import AutoModelForCausalLM, find_checkpoint
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.hub.quantization import BitsAndBytesConfig
from trl_jax.models.model import merge

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

QUERY = {"target_modules": ["q_proj"]}
CONFIGS = {
    "linear": {"target_modules": "all-linear"},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "table": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["lm_head", "embed_tokens"]},
    "dora_head": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "saved_head": QUERY | {"modules_to_save": ["lm_head"]},
    "saved_table": QUERY | {"modules_to_save": ["embed_tokens"]},
    "saved_both": QUERY | {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": QUERY | {"trainable_token_indices": [3, 9, 7]},
    "named_tokens": QUERY | {"trainable_token_indices": {"embed_tokens": [5, 2]}},
}
QUICKLY = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return {tie: causal.build(tmp_path_factory.mktemp("base"), "llama", tie=tie) for tie in (False, True)}


def theirs_with(base, **facts):
    """PEFT's model with randomly perturbed trainable parameters."""
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", init_lora_weights=False, **facts)
    torch.manual_seed(3)
    model = peft.get_peft_model(causal.reference(base), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def test_the_maps_around_a_stack_are_adapted_by_pefts_names(tmp_path):
    """opt's projections of its narrow embedding into the residual stream and out of it."""
    base = causal.build(tmp_path / "base", "opt", tie=True, enable_bias=False, **causal.NORMED_SUMS)
    _assert_computed_and_written(theirs_with(base, target_modules="all-linear"), tmp_path)
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in written if "project" in name} == {"project_in", "project_out"}


def test_merging_a_position_table_keeps_the_head_tied(tmp_path):
    base = causal.build(tmp_path / "base", "gpt2", tie=True)
    _assert_computed_and_written(theirs_with(base, target_modules=["wpe"]), tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert again.config.tie_word_embeddings and "lm_head.weight" not in dict(again.named_parameters())


@usual("head-True", "table-True", "saved_both-True")
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_peft_wrote_computes_and_is_written_as_it_was(name, tie, bases, tmp_path):
    _assert_computed_and_written(theirs_with(bases[tie], **CONFIGS[name]), tmp_path)


def _assert_computed_and_written(theirs, tmp_path):
    ids, mask = causal.rows()
    theirs.save_pretrained(tmp_path / "in")
    model = find_checkpoint(str(tmp_path / "in"), head="lm").load(0)
    logits, seen = causal.forward(theirs, ids, mask), mask > 0
    wanted = logits.detach().numpy()[seen]
    variants.assert_close(np.asarray(model(ids, mask).logits)[seen], wanted, 1e-5, "logits")
    model.save_pretrained(tmp_path / "out")
    before, after = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("in", "out"))
    assert set(before) == set(after)
    assert all(np.array_equal(before[tensor], after[tensor]) for tensor in before)
    _assert_same_parameters(model, theirs)
    _assert_same_gradients(model, theirs, logits, ids, mask)
    plain = model.merge_and_unload()
    variants.assert_close(np.asarray(plain(ids, mask).logits)[seen], wanted, 1e-5, "merged")
    plain.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    variants.assert_close(np.asarray(again(ids, mask).logits)[seen], wanted, 1e-5, "merged and saved")


def _assert_same_parameters(model, theirs):
    """Compares names, values and which parameters train. PEFT also keeps the original of a fully trained module, and
    torch lists shared tensors only once, such as those of a head that we untie from the embedding."""
    every = dict(theirs.named_parameters(remove_duplicate=False))
    wanted = {name: one for name, one in theirs.named_parameters() if ".original_module." not in name}
    found = dict(model.named_parameters())
    wanted |= {name: every[name] for name in found if name in every and "lm_head" in name}
    assert found.keys() == wanted.keys() == set(model.names())
    for name, parameter in found.items():
        assert parameter.requires_grad == wanted[name].requires_grad, name
        np.testing.assert_array_equal(parameter, wanted[name].detach().numpy(), name)
    head = theirs.get_output_embeddings()
    if not hasattr(head, "token_adapter"):  # some rows of its weight train
        weight = getattr(head, "base_layer", head).weight.detach().numpy()
        assert np.array_equal(model.get_output_embeddings().weight, weight)


def _assert_same_gradients(model, theirs, logits, ids, mask):
    reads, targets = causal.reads_and_targets(ids, mask)
    real = len(reads) - 2
    at_target = torch.log_softmax(logits, -1).reshape(-1, logits.shape[-1])[reads[:real], targets[:real]]
    at_target.sum().backward()
    places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)

    def total(params):
        adapted = merge(model.graph, model.frozen | params)
        found = adapted(jnp.asarray(ids), places, reads, targets=targets, valid=jnp.asarray(mask, bool))
        return jnp.sum(found.logps)

    gradients = jax.jit(jax.grad(total), compiler_options=QUICKLY)(model.params)
    found = dict(model.backend.on_disk(gradients))
    compared = 0
    for name, parameter in theirs.named_parameters():
        tensor = name.replace(".default", "").replace("modules_to_save.", "")
        tensor = tensor.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
        if parameter.requires_grad:
            variants.assert_close(found[tensor], parameter.grad.numpy(), 1e-4, tensor)
            compared += 1
    assert compared == len(found) - len([tensor for tensor in found if ".base_layer." in tensor])


def test_a_bias_without_a_layer_bias_cannot_be_merged(bases):
    lora = LoraConfig(target_modules=["q_proj"], lora_bias=True)
    model = find_checkpoint(str(bases[False]), head="lm").load_adapted(lora, 0)
    with pytest.raises(ValueError, match="the adapter of q_proj has a bias"):
        model.merge_and_unload()


@pytest.mark.parametrize("tie", [False, True])
def test_a_new_adapter_is_drawn_as_pefts(tie, bases):
    from transformers import set_seed

    facts = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "lm_head", "embed_tokens"]}
    ours = find_checkpoint(str(bases[tie]), head="lm").load_adapted(LoraConfig(**facts), 7)
    reference = causal.reference(bases[tie])
    set_seed(7)
    theirs = peft.get_peft_model_state_dict(peft.get_peft_model(reference, peft.LoraConfig(**facts)))
    mine = dict(ours.backend.on_disk(ours.params))
    assert set(mine) == set(theirs)
    for name, values in theirs.items():
        np.testing.assert_allclose(mine[name], values.detach().numpy(), rtol=1e-5, atol=1e-7, err_msg=name)


def test_an_adapter_of_a_gated_delta_net_is_drawn_after_what_loading_draws(tmp_path):
    """transformers draws decays of delta nets while it loads a checkpoint that has them."""
    from transformers import set_seed

    folder = causal.build(tmp_path, "qwen3_5_text", tie=True, num_hidden_layers=2, full_attention_interval=2)
    facts = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["in_proj_qkv", "q_proj"]}
    ours = find_checkpoint(str(folder), head="lm").load_adapted(LoraConfig(**facts), 7)
    set_seed(7)
    theirs = peft.get_peft_model_state_dict(peft.get_peft_model(causal.reference(folder), peft.LoraConfig(**facts)))
    mine = dict(ours.backend.on_disk(ours.params))
    assert set(mine) == set(theirs)
    for name, values in theirs.items():
        np.testing.assert_allclose(mine[name], values.detach().numpy(), rtol=1e-5, atol=1e-7, err_msg=name)


@usual("granitemoehybrid", "gpt_oss", "qwen3_moe")
@pytest.mark.parametrize("family", causal.DECODERS)
def test_every_parameter_has_one_name(family, tmp_path):
    folder = causal.build(tmp_path, family, tie=False)
    unread = ["out_proj"] if family in ("falcon_h1", "nemotron_h") else None  # PEFT refuses Mamba's
    lora = LoraConfig(r=2, target_modules="all-linear", exclude_modules=unread, task_type="CAUSAL_LM")
    model = find_checkpoint(str(folder), head="lm").load_adapted(lora, 0)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    buffers = sum(array.size for path, array in model.frozen.items() if path in model.backend.base.buffers)
    assert sum(sizes.values()) == model.num_parameters() - buffers
    assert sum(size for name, size in sizes.items() if ".lora_" in name) == model.num_parameters(only_trainable=True)
    for name in list(sizes)[:: len(sizes) // 3]:
        assert model.get_parameter(name).numel() == sizes[name]


@pytest.mark.parametrize("tie", [False, True])
def test_a_frozen_head_keeps_its_sixteen_bits_and_gets_no_gradient(tie, bases, tmp_path):
    """In 4 bits the head is not quantized, as in bitsandbytes."""
    checkpoint = find_checkpoint(str(bases[tie]), head="lm", dtype="bfloat16")
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    bits = BitsAndBytesConfig(load_in_4bit=True)
    halves, few = (checkpoint.load_adapted(lora, 0, quantization=asked) for asked in (None, bits))
    head = "decoder.embed.weight.codes" if tie else "lm_head.weight.codes"
    for model in (halves, few):
        assert model.frozen[head].dtype == jnp.uint16 and "lm_head.lora_A" not in model.params
    plain = AutoModelForCausalLM.from_pretrained(bases[tie], dtype="bfloat16")
    ids, mask = causal.rows()
    variants.assert_close(halves(ids, mask).logits, np.asarray(plain(ids, mask).logits), 1e-5)
    assert few.frozen["decoder.layers.attention.q.weight.codes"].dtype == jnp.uint8
    for model, same in ((halves, plain), (few, few.merge_and_unload())):  # B is zero
        frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}
        names = [name.removeprefix("base_model.model.").replace(".base_layer", "") for name in frozen]
        wanted = dict(same.named_parameters())
        assert wanted.keys() <= set(names) and set(names) - wanted.keys() <= {"lm_head.weight"}
        for name, values in zip(names, frozen.values(), strict=True):
            if name in wanted:
                np.testing.assert_array_equal(values, wanted[name], name)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"trainable_token_indices": {"nothing": [1]}}, "not a token embedding"),
        ({"trainable_token_indices": [100_000]}, "must be distinct ids from 0 to"),
        ({"trainable_token_indices": [1], "modules_to_save": ["embed_tokens"]}, "already marked to be trained fully"),
        ({"trainable_token_indices": [1], "target_modules": ["embed_tokens"]}, "would get an adapter"),
    ],
)
def test_rows_that_cannot_train_are_refused(facts, text, bases):
    with pytest.raises(ValueError, match=text):
        find_checkpoint(str(bases[False]), head="lm").load_adapted(LoraConfig(r=2, **(QUERY | facts)), 0)


@pytest.mark.parametrize("name", ["target_modules", "trainable_token_indices"])
def test_positions_that_peft_would_look_up_by_the_mask_are_refused(name, tmp_path):
    """transformers calls opt's embed_positions with the attention mask, so that PEFT adapts rows 0 and 1 of it."""
    folder = causal.build(tmp_path, "opt", tie=True, num_hidden_layers=1)
    theirs = peft.get_peft_model(
        causal.reference(folder), peft.LoraConfig(r=2, target_modules=["embed_positions"], init_lora_weights=False)
    )
    table = theirs.get_submodule("base_model.model.model.decoder.embed_positions")
    mask, positions = torch.ones(1, 4, dtype=torch.int64), torch.arange(4)[None]
    with torch.no_grad():
        added = table(mask, 0, position_ids=positions) - table.base_layer(mask, 0, positions)
    assert torch.allclose(added, added[:, :1].expand_as(added), atol=1e-6)  # equal at all positions
    asked = {"target_modules": ["embed_positions"]}
    asked = asked if name == "target_modules" else QUERY | {name: {"embed_positions": [2]}}
    with pytest.raises(ValueError, match="embed_positions cannot have an adapter or trainable_token_indices"):
        find_checkpoint(str(folder), head="lm").load_adapted(LoraConfig(r=2, **asked), 0)
    find_checkpoint(str(folder), head="lm").load_adapted(
        LoraConfig(r=2, modules_to_save=["embed_positions"], **QUERY), 0
    )
