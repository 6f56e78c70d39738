"""Prompt tuning, P-tuning and prefix tuning against TRL with PEFT: curves, files, generation, resuming."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset
from safetensors.numpy import load_file

import trl_jax
from compat_tests.effort import only_thorough, usual
from compat_tests.hub.peft.virtual_meshes import losses
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.marks import steps_of
from compat_tests.parity.reference import BASE
from compat_tests.parity.test_dpo_curve import assert_same
from compat_tests.plan.planned import LENGTH, alike
from compat_tests.tiny import text_rows
from trl_jax.hub.auto import find_checkpoint
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.prompt_tuning import virtual_backend
from trl_jax.nn.virtual_tokens import Lstm

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

RATE = {"learning_rate": 1e-2, "max_length": 64, "weight_decay": 0.1, "seed": 7, "per_device_eval_batch_size": 8}
RATE |= {"gradient_checkpointing": False}  # with it, transformers would drop PEFT's prefix
MLP = {"encoder_hidden_size": 24}
# Name -> trainer, type of the adapter and its fields, arguments.
CASES = {
    "drawn": ("SFT", "PromptTuning", {}, {}),
    "sampled": ("SFT", "PromptTuning", {"prompt_tuning_init": "SAMPLE_VOCAB"}, {"loss_type": "dft"}),
    "text": ("KTO", "PromptTuning", {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "take notes"}, {}),
    "mlp": ("DPO", "PromptEncoder", {}, {}),
    "lstm": ("SFT", "PromptEncoder", MLP | {"encoder_reparameterization_type": "LSTM"},
             {"gradient_accumulation_steps": 2}),
    "three": ("SFT", "PromptEncoder", {"encoder_reparameterization_type": "LSTM", "encoder_num_layers": 3}, {}),
    "prefix": ("SFT", "PrefixTuning", {}, {}),
    "projected": ("DPO", "PrefixTuning", {"prefix_projection": True}, {"precompute_ref_log_probs": True}),
    "zero": ("KTO", "PrefixTuning", {"init_weights": "zero", "prefix_projection": True} | MLP, {}),
}  # fmt: skip
IDS = np.array([[5, 9, 11, 7, 30, 31], [8, 40, 41, 42, 10, 3]])


def config_of(package, name, folder):
    _, kind, fields, _ = CASES[name]
    fields = fields | ({"tokenizer_name_or_path": str(folder)} if "prompt_tuning_init_text" in fields else {})
    return getattr(package, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=5, **fields)


def rows(kind, count=32):
    return Dataset.from_list(text_rows(count) if kind == "SFT" else rows_of(kind, count))


def trainer(package, name, folder, out, *, model=None, new=True, **config):
    kind, _, _, arguments = CASES[name]
    args = getattr(package, f"{kind}Config")(str(out), **(BASE | RATE | {"max_steps": 6} | arguments | config))
    adapter = config_of(peft if package is trl else trl_jax, name, folder) if new else None
    model = str(folder) if model is None else model
    sets = {"train_dataset": rows(kind), "eval_dataset": rows(kind, 8)}
    return getattr(package, f"{kind}Trainer")(model, args=args, peft_config=adapter, **sets)


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """runs(package, name) -> a trainer after six steps, and the folder with its saved adapter."""
    done = {}

    def of(package, name):
        key = package.__name__, name
        if key not in done:
            out = tmp_path_factory.mktemp("-".join(key))
            made = trainer(package, name, checkpoint(**SMALL), out, eval_strategy="steps", eval_steps=3)
            made.train()
            made.save_model(str(out / "saved"))
            done[key] = made, out / "saved"
        return done[key]

    return of


@usual("text")
@pytest.mark.parametrize("name", CASES)
def test_the_curve_and_the_adapter_are_trls(name, runs):
    (ours, mine), (theirs, other) = runs(trl_jax, name), runs(trl, name)
    assert len(steps_of(ours.state.log_history)) >= 6
    for entry, wanted in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert_same(entry, wanted)
    found, wanted = (load_file(folder / "adapter_model.safetensors") for folder in (mine, other))
    assert set(found) == set(wanted) == {"prompt_embeddings"}
    np.testing.assert_allclose(found["prompt_embeddings"], wanted["prompt_embeddings"], atol=1e-4)
    assert (mine / "adapter_config.json").read_text() == (other / "adapter_config.json").read_text()
    assert ours.get_num_trainable_parameters() == theirs.get_num_trainable_parameters()
    trained = {name: one.requires_grad for name, one in theirs.model.named_parameters()}
    assert {name: one.requires_grad for name, one in ours.model.named_parameters()} == trained
    assert trained.keys() == set(ours.model.names())


@usual("1")
@pytest.mark.parametrize("layers", [1, 3])
def test_a_memory_of_vectors_is_torchs(layers):
    """Compares values and gradients of P-tuning's LSTM."""
    made = {"num_transformer_submodules": 1, "token_dim": 6, "num_virtual_tokens": 4, "encoder_hidden_size": 5}
    kind = {"encoder_reparameterization_type": "LSTM", "encoder_num_layers": layers}
    torch.manual_seed(1)
    theirs = peft.PromptEncoder(peft.PromptEncoderConfig(**made, **kind))
    arrays = {name: jnp.asarray(value.detach().numpy()) for name, value in theirs.named_parameters()}
    ours, weight = Lstm(4, 6, 5, layers), np.arange(24, dtype=np.float32).reshape(4, 6)
    assert {name: array.shape for name, array in arrays.items()} == ours.shapes
    wanted = theirs(torch.arange(4)[None])[0]
    found, back = jax.vjp(jax.jit(ours), arrays)
    np.testing.assert_allclose(found, wanted.detach().numpy(), atol=1e-6)
    (wanted * torch.tensor(weight)).sum().backward()
    for name, gradient in back(jnp.asarray(weight))[0].items():
        wanted = theirs.get_parameter(name).grad.numpy()
        np.testing.assert_allclose(gradient, wanted, atol=1e-4, err_msg=name)


@only_thorough
def test_dropout_between_the_layers_of_a_memory(checkpoint):
    config = {"encoder_reparameterization_type": "LSTM", "encoder_dropout": 0.5, "num_virtual_tokens": 4}
    model = load_with(checkpoint(**SMALL), trl_jax.PromptEncoderConfig(**config))
    prompt_encoder, arrays = (
        model.backend.prompt_encoder,
        {path.partition(".")[2]: array for path, array in model.params.items()},
    )
    still, dropped, other = (prompt_encoder(arrays, key) for key in (None, jax.random.key(1), jax.random.key(2)))
    assert (
        model.backend.traits.drops_out and np.abs(dropped - other).max() > 1e-3 and np.abs(dropped - still).max() > 1e-3
    )


@usual("prefix")
@pytest.mark.parametrize("name", ["drawn", "mlp", "prefix", "projected"])
def test_peft_reads_it_and_computes_and_writes_what_we_do(name, runs):
    """Completions are compared with uncached passes: PEFT's cached generation is wrong with transformers 5.24
    (differences.md)."""
    made, folder = runs(trl_jax, name)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    ours = trl_jax.AutoPeftModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(IDS)).logits.numpy()
    for model in (ours, made.model):
        np.testing.assert_allclose(np.asarray(model(IDS).logits), wanted, atol=1e-4)
    if name not in MADE:  # for those in MADE, ours also has the network
        assert ours.num_parameters() == sum(p.numel() for p in theirs.parameters())
    rows = torch.tensor(IDS)
    for _ in range(8):
        with torch.no_grad():
            rows = torch.cat([rows, theirs(input_ids=rows).logits[:, -1:].argmax(-1)], 1)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
    assert np.asarray(ours.generate(IDS, **options | {"eos_token_id": None})).tolist() == rows.tolist()
    own = [IDS[0].tolist(), IDS[1, :3].tolist()]  # different lengths, each with virtual tokens in front
    found = [one.generated_tokens for one in ours.generate_batch(own, **options).values()]
    assert found == [ours.generate([ids], **options)[0, len(ids) :].tolist() for ids in own]
    logps, _ = trl_jax.token_logps_and_entropies(ours, IDS)
    scores = torch.log_softmax(torch.tensor(wanted[:, -6:-1]), -1)
    np.testing.assert_allclose(logps, scores.gather(-1, torch.tensor(IDS[:, 1:, None]))[..., 0], atol=1e-4)
    with pytest.raises(AttributeError, match="has no merge_and_unload: virtual tokens"):
        ours.merge_and_unload()


@usual("mlp")
@pytest.mark.parametrize("name", ["drawn", "mlp", "prefix", "projected"])
def test_it_goes_on_bit_for_bit_and_further_from_its_folder(name, checkpoint, tmp_path):
    """PEFT does not save P-tuning's network, so TRL makes a new one when it resumes; here it is saved with the
    vectors."""
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "eval_strategy": "no"}
    whole, again = (trainer(trl_jax, name, checkpoint(**SMALL), tmp_path / run, **options) for run in "ab")
    whole.train()
    half = tmp_path / "a" / "checkpoint-2"
    again.train(resume_from_checkpoint=str(half))
    files = {path.name: path.read_bytes() for path in (tmp_path / "a" / "checkpoint-4").glob("*.safetensors")}
    assert set(files) == {"adapter_model.safetensors"} | ({"prompt_encoder.safetensors"} if name in MADE else set())
    assert files == {name: (tmp_path / "b" / "checkpoint-4" / name).read_bytes() for name in files}
    further = trainer(trl_jax, name, checkpoint(**SMALL), tmp_path / "c", model=str(half), new=False)
    saved = load_file(half / "adapter_model.safetensors")["prompt_embeddings"]
    np.testing.assert_array_equal(dict(further.model.backend.on_disk(further.model.params))["prompt_embeddings"], saved)
    before = np.asarray(further.model(IDS).logits)
    further.train()
    assert np.abs(np.asarray(further.model(IDS).logits) - before).max() > 1e-4


MADE = ("mlp", "lstm", "three", "projected", "zero")


def test_of_ptuning_pefts_own_folder_computes_and_does_not_train(runs, checkpoint, tmp_path):
    _, folder = runs(trl, "mlp")
    model, other = (trl_jax.AutoPeftModelForCausalLM.from_pretrained(runs(p, "mlp")[1]) for p in (trl, trl_jax))
    np.testing.assert_allclose(np.asarray(model(IDS).logits), np.asarray(other(IDS).logits), atol=1e-3)
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_config.json").read_text() == (folder / "adapter_config.json").read_text()
    with pytest.raises(ValueError, match="^Cannot set a prompt learning adapter to trainable when loading pretrained"):
        trainer(trl_jax, "mlp", checkpoint(**SMALL), tmp_path, model=str(folder), new=False)
    with pytest.raises(FileNotFoundError, match="prompt_encoder.safetensors does not exist. PEFT saves the vectors"):
        other.backend.load(folder, 0)  # as when resuming from a checkpoint of TRL


def test_a_checkpoint_of_trls_is_gone_on_with(checkpoint, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "eval_strategy": "no"}
    theirs = trainer(trl, "drawn", checkpoint(**SMALL), tmp_path / "a", **options)
    theirs.train()
    ours = trainer(trl_jax, "drawn", checkpoint(**SMALL), tmp_path / "b", **options)
    ours.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    wanted = [entry["loss"] for entry in steps_of(theirs.state.log_history)]
    found = [entry["loss"] for entry in steps_of(ours.state.log_history)]
    np.testing.assert_allclose(found[-2:], wanted[-2:], atol=1e-5)


LAYOUTS = ("padded", "packed", "shared")


@only_thorough
@pytest.mark.parametrize("name", ["drawn", "lstm", "prefix"])
def test_numbers_do_not_depend_on_the_layout_and_each_document_has_its_own(name, checkpoint, tmp_path):
    options = {"packing": True, "max_length": 40, "max_steps": 2, "eval_strategy": "no"}
    found = {}
    for layout in LAYOUTS:
        made = trainer(trl_jax, name, checkpoint(**SMALL), tmp_path, batch_layout=layout, **options)
        made.train()
        found[layout] = [entry["loss"] for entry in steps_of(made.state.log_history)]
        [step] = [next(iter(made.loader(made.train_dataset, training=True)))]
        virtual = np.count_nonzero(step.arrays.tokens >= made.model.vocab_size)
        documents = sum(map(len, made.train_dataset["seq_lengths"]))
        assert virtual % 5 == 0 and 0 < virtual <= 5 * documents
        assert step.num_tokens == np.count_nonzero(step.arrays.router_token_count) - virtual
    for layout in LAYOUTS[1:]:
        np.testing.assert_allclose(found[layout], found["padded"], atol=1e-5)


def test_a_prefix_trains_where_layers_are_computed_twice(checkpoint, tmp_path):
    found = []
    for twice in (False, True):
        options = {"max_steps": 1, "eval_strategy": "no", "gradient_checkpointing": twice}
        made = trainer(trl_jax, "prefix", checkpoint(**SMALL), tmp_path, **options)
        made.train()
        found.append([steps_of(made.state.log_history)[0][key] for key in ("loss", "grad_norm")])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


@usual("DPO-mlp")
@pytest.mark.parametrize(("kind", "name"), [("SFT", "drawn"), ("SFT", "prefix"), ("DPO", "mlp"), ("KTO", "zero")])
def test_predictions_are_logits_of_the_texts(kind, name, checkpoint, tmp_path):
    assert CASES[name][0] == kind
    made = trainer(trl_jax, name, checkpoint(**SMALL), tmp_path)
    measured, predicted = made.evaluate(), made.predict(made.eval_dataset)
    logits, labels = predicted.predictions, predicted.label_ids
    assert logits.shape[:2] == labels.shape and predicted.metrics["test_loss"] == pytest.approx(measured["eval_loss"])
    ids = np.asarray(made.eval_dataset[0][made.parts.setup.task.columns.texts[0]])
    whole = np.asarray(made.model(ids[None]).logits)[0, -len(ids) :]
    np.testing.assert_allclose(logits[0, : len(ids)], whole, atol=1e-4)


@only_thorough
@pytest.mark.parametrize("name", ["mlp", "prefix"])
def test_a_reference_reads_texts_alone(name, checkpoint, tmp_path):
    """At learning rate 0, rewards come only from the virtual tokens; they are 0 if the reference is a copy that has
    them, too."""
    folder = checkpoint(**SMALL)
    config = config_of(trl_jax, name, folder)
    args = trl_jax.DPOConfig(str(tmp_path), **BASE | {"max_steps": 1, "learning_rate": 0.0})
    made = trl_jax.DPOTrainer(str(folder), args=args, train_dataset=rows("DPO"), peft_config=config)
    made.train()
    assert abs(made.state.log_history[0]["rewards/margins"]) > 1e-4
    made.save_model(str(tmp_path / "saved"))
    again = trl_jax.DPOTrainer(str(tmp_path / "saved"), args=args, train_dataset=rows("DPO"))
    again.train()
    first = again.state.log_history[0]
    assert first["loss"] == pytest.approx(np.log(2)) and first["rewards/margins"] == 0.0
    assert again.loader(again.train_dataset, training=True).step_layout.layout == "shared"


@usual("prefix")
@pytest.mark.parametrize("name", ["lstm", "mlp", "prefix"])
def test_a_model_of_pefts_gets_what_was_trained(name, checkpoint, tmp_path):
    """As in TRL's own test, the model is wrapped beforehand. DPO's reference is then a copy that includes the virtual
    tokens."""
    folder, found = checkpoint(**SMALL), []
    for package in (trl, trl_jax):
        base = transformers_model(folder)
        torch.manual_seed(3)
        model = peft.get_peft_model(base, config_of(peft, name, folder))
        made = trainer(package, name, folder, tmp_path, model=model, new=False, eval_strategy="no")
        made.train()
        with torch.no_grad():
            found.append(model.eval()(input_ids=torch.tensor(IDS)).logits.numpy())
    np.testing.assert_allclose(found[1], found[0], atol=1e-3)
    np.testing.assert_allclose(np.asarray(made.model(IDS).logits), found[1], atol=1e-4)


def transformers_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


@pytest.mark.parametrize("kind", ["PromptTuning", "PromptEncoder", "PrefixTuning"])
def test_fields_defaults_and_keys_are_pefts(kind):
    mine, theirs = (getattr(package, f"{kind}Config") for package in (trl_jax, peft))
    assert [f.name for f in dataclasses.fields(mine)] == [f.name for f in dataclasses.fields(theirs)]
    plain = {key: getattr(value, "value", value) for key, value in theirs(num_virtual_tokens=3).to_dict().items()}
    assert mine(num_virtual_tokens=3).to_dict() | {"peft_version": None} == plain | {"peft_version": None}


REFUSED = {
    "num_virtual_tokens is None. Set it to the number": ("PromptTuning", {"num_virtual_tokens": None}),
    "num_virtual_tokens must be an integer of at least 1, got 0": ("PromptTuning", {"num_virtual_tokens": 0}),
    "prompt_tuning_init must be TEXT or SAMPLE_VOCAB or RANDOM": ("PromptTuning", {"prompt_tuning_init": "WORDS"}),
    "prompt_tuning_init_text can't be None": (
        "PromptTuning", {"prompt_tuning_init": "TEXT", "tokenizer_name_or_path": "x"},
    ),
    "tokenizer_kwargs only valid when": ("PromptTuning", {"tokenizer_kwargs": {"use_fast": True}}),
    "modules_to_save must be None": ("PrefixTuning", {"modules_to_save": ["lm_head"]}),
    "inference_mode=True would leave nothing to train": ("PromptEncoder", {"inference_mode": True}),
    "token_dim must be 16": ("PromptTuning", {"token_dim": 9}),
    "type must be MLP or LSTM": ("PromptEncoder", {"encoder_reparameterization_type": "GRU"}),
    "encoder_dropout must be at least 0": ("PromptEncoder", {"encoder_dropout": 1}),
    "init_weights must be None or 'zero', got 'ones'": ("PrefixTuning", {"init_weights": "ones"}),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_no_virtual_tokens_can_be_is_refused_by_field(text, checkpoint, tmp_path):
    kind, fields = REFUSED[text]
    width = json.loads((Path(checkpoint(**SMALL)) / "config.json").read_text())["hidden_size"]
    with pytest.raises(ValueError, match=re.escape(text.replace("16", str(width)))):
        config = getattr(trl_jax, f"{kind}Config")(**{"num_virtual_tokens": 2} | fields)
        args = trl_jax.SFTConfig(str(tmp_path), **BASE)
        trl_jax.SFTTrainer(str(checkpoint(**SMALL)), args=args, train_dataset=rows("SFT"), peft_config=config)


def test_models_and_losses_that_virtual_tokens_do_not_go_with(checkpoint, tmp_path):
    config = trl_jax.PromptTuningConfig(num_virtual_tokens=2)
    pairs, args = Dataset.from_list(rows_of("Reward", 8)), trl_jax.RewardConfig(str(tmp_path), **BASE)
    with pytest.raises(ValueError, match="would depend on the other rows of the batch. Use a LoraConfig"):
        trl_jax.RewardTrainer(str(checkpoint(**SMALL)), args=args, train_dataset=pairs, peft_config=config)
    args = trl_jax.SFTConfig(str(tmp_path), **BASE)
    own = {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: jnp.sum(outputs.logits)}
    with pytest.raises(
        TypeError, match="^compute_loss_func would receive logits for the text tokens only.* Leave it out"
    ):
        trl_jax.SFTTrainer(str(checkpoint(**SMALL)), args=args, train_dataset=rows("SFT"), peft_config=config, **own)


def test_positions_are_counted_behind_virtual_tokens(checkpoint, tmp_path):
    """gpt2 has a position embedding of limited size."""
    folder = checkpoint("gpt2", head="causal", num_hidden_layers=1, max_position_embeddings=40)
    args = trl_jax.SFTConfig(str(tmp_path), **BASE | {"max_length": None})
    data = Dataset.from_list([{"input_ids": [5] * 36}])
    for count in (4, 5):
        config = trl_jax.PromptTuningConfig(num_virtual_tokens=count)
        if count == 4:
            made = trl_jax.SFTTrainer(str(folder), args=args, train_dataset=data, peft_config=config)
            assert made.model.max_positions == 36
        else:
            with pytest.raises(ValueError, match="35"):
                trl_jax.SFTTrainer(str(folder), args=args, train_dataset=data, peft_config=config)


FAMILIES = {
    "gpt2": {}, "gemma3_text": {}, "gemma2": {}, "mistral": {"sliding_window": 4}, "qwen3_moe": {}, "opt": {},
    "falcon_h1": {}, "gpt_oss": {}, "deepseek_v3": {}, "gemma4_text": {}, "granite": {},
}  # fmt: skip
REFUSED_MODELS = {
    ("falcon_h1", "PromptTuning"): "texts would be embedded differently than by the base model. Use a LoraConfig",
    ("falcon_h1", "PrefixTuning"): "does not have. Use a PromptTuningConfig or a LoraConfig",
    ("deepseek_v3", "PrefixTuning"): "does not have. Use a PromptTuningConfig or a LoraConfig",
    ("gemma4_text", "PrefixTuning"): "does not have. Use a PromptTuningConfig or a LoraConfig",
    ("gemma4_text", "PromptTuning"): "in which virtual tokens have no row. Use a LoraConfig",
}


@usual("gemma3_text-PromptTuning", "mistral-PrefixTuning", "gpt2-PrefixTuning", "deepseek_v3-PrefixTuning")
@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_familys_numbers_are_those_of_transformers(family, kind, checkpoint, tmp_path):
    """Scaled embeddings, learned positions, sliding windows, experts."""
    layers = {} if family == "gemma4_text" else {"num_hidden_layers": 2}
    folder = checkpoint(family, head="causal", **layers, **FAMILIES[family])
    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3, "base_model_name_or_path": str(folder)}
    if kind == "PromptTuning":
        options["prompt_tuning_init"] = "SAMPLE_VOCAB"
    if text := REFUSED_MODELS.get((family, kind)):
        with pytest.raises(ValueError, match=text):
            load_with(folder, getattr(trl_jax, f"{kind}Config")(**options))
        return
    torch.manual_seed(5)
    theirs = peft.get_peft_model(transformers_model(folder), getattr(peft, f"{kind}Config")(**options)).eval()
    theirs.save_pretrained(tmp_path)
    ours = trl_jax.AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(np.asarray(ours(IDS).logits), wanted, atol=2e-4)
    new = load_with(folder, getattr(trl_jax, f"{kind}Config")(**options))
    drawn = dict(new.backend.on_disk(new.params))["prompt_embeddings"]
    np.testing.assert_allclose(drawn, load_file(tmp_path / "adapter_model.safetensors")["prompt_embeddings"], atol=1e-6)


def load_with(folder, config):
    return find_checkpoint(str(folder), head="lm").load_adapted(config, 5)


@only_thorough
@pytest.mark.parametrize("name", ["drawn", "prefix"])
def test_a_plan_is_that_of_a_run(name, checkpoint, tmp_path):
    row = {"input_ids": [1] * LENGTH, "labels": [1] * LENGTH}
    config = config_of(trl_jax, name, None)
    (tmp_path / "out").mkdir()
    weights = Path(checkpoint(**SMALL))
    found = alike(weights, tmp_path / "out", kind=trl_jax.SFTTrainer, row=row, adapter=config, bf16=False)
    made = load_with(weights, config)
    assert (found.trained, found.parameters) == (made.num_parameters(only_trainable=True), made.num_parameters())


@usual("prefix")
@pytest.mark.parametrize("name", ["mlp", "prefix"])
def test_completions_of_the_policy_begin_behind_them(name, checkpoint, tmp_path):
    """GRPO's log-probabilities of completions are the model's own; its reference reads them without virtual tokens."""
    made, folder = [], checkpoint(**SMALL)
    options = {"max_steps": 2, "num_generations": 4, "max_completion_length": 6, "beta": 0.1, "num_iterations": 2}
    args = trl_jax.GRPOConfig(str(tmp_path), **BASE | options | {"per_device_train_batch_size": 8})
    prompts = Dataset.from_list([{"prompt": row["text"][:20]} for row in text_rows(8)])

    def reward(completion_ids, **others):
        made.extend(completion_ids)
        return [float(len(set(ids))) for ids in completion_ids]

    config = config_of(trl_jax, name, folder)
    run = trl_jax.GRPOTrainer(str(folder), reward, args=args, train_dataset=prompts, peft_config=config)
    run.train()
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    assert made and logs[0]["kl"] > 1e-4 and logs[0]["loss"] == pytest.approx(0.1 * logs[0]["kl"], abs=1e-5)
    assert all(entry["grad_norm"] > 0 for entry in logs) and logs[1]["kl"] != logs[0]["kl"]


@only_thorough
@pytest.mark.parametrize("name", ["drawn", "mlp", "prefix"])
@pytest.mark.parametrize("mesh", ["data:2", "fsdp:2", "tensor:2", "sequence:2"])
def test_two_devices_do_what_one_does(mesh, name, checkpoint, tmp_path):
    given = [str(checkpoint(**SMALL)), str(tmp_path), name]
    command = [sys.executable, "-m", "compat_tests.light", "compat_tests.hub.peft.virtual_meshes", *given, mesh]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("losses")]
    np.testing.assert_allclose([float(loss) for loss in line.split()[1:]], losses(*given, None), atol=1e-5)


@only_thorough
@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning"])
def test_before_a_frozen_model_in_few_bits(kind, checkpoint):
    """Vectors sampled from the vocabulary are rows of the embedding as stored (here in bfloat16)."""
    fields = {"prompt_tuning_init": "SAMPLE_VOCAB"} if kind == "PromptTuning" else {}
    found = find_checkpoint(str(checkpoint(**SMALL)), head="lm", dtype="bfloat16")
    config = getattr(trl_jax, f"{kind}Config")(num_virtual_tokens=4, **fields)
    halves = found.load_adapted(config, 5)
    few = found.load_adapted(config, 5, quantization=trl_jax.BitsAndBytesConfig(load_in_4bit=True))
    assert halves.frozen["decoder.embed.weight.codes"].dtype == jnp.uint16
    assert few.frozen["decoder.layers.attention.q.weight.codes"].dtype == jnp.uint8
    vectors = dict(halves.backend.on_disk(halves.params))["prompt_embeddings"]
    if fields:
        table = np.asarray(halves.backend.weight(halves.arrays, "decoder.embed.weight"))
        assert all((table == vector).all(axis=1).any() for vector in vectors)
    plain = NativeBackend(few.backend.base.source)  # the same numbers as floats
    twin = PreTrainedModel(
        few.params, virtual_backend(plain, config, None), few.config, few.folder, "twin",
        few.backend.base.weights(few.frozen),
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(few(IDS).logits), np.asarray(twin(IDS).logits), atol=1e-4)
