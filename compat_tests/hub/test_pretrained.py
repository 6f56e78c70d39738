"""What scripts do with a model's modules and adapters has the same effect as on transformers' and PEFT's models."""

from __future__ import annotations

import copy
import pickle
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows, tiny_model
from trl_jax.hub import parameters
from trl_jax.hub.parameters import EmbeddingModule, Submodule
from trl_jax.mesh.mesh import Fetched

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")


def freeze(parameters):
    for parameter in parameters:
        parameter.requires_grad = False


def only_norm(model):
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)


def every_second(model):
    freeze(parameter for number, (_, parameter) in enumerate(model.named_parameters()) if number % 2)


FREEZES = {
    "head": lambda model: model.lm_head.requires_grad_(False),
    "heads parameters": lambda model: freeze(model.lm_head.parameters()),
    "heads weight": lambda model: model.lm_head.weight.requires_grad_(False),
    "heads weight by name": lambda model: model.get_parameter("lm_head.weight").requires_grad_(False),
    "output embeddings": lambda model: model.get_output_embeddings().requires_grad_(False),
    "input embeddings": lambda model: model.get_input_embeddings().requires_grad_(False),
    "parameters of the embedding": lambda model: freeze(model.get_input_embeddings().parameters()),
    "weight of the embedding": lambda model: model.get_input_embeddings().weight.requires_grad_(False),
    "base model": lambda model: model.base_model.requires_grad_(False),
    "last layers": lambda model: [layer.requires_grad_(False) for layer in model.model.layers[-2:]],
    "a submodule": lambda model: model.get_submodule("model.layers.1.mlp").requires_grad_(False),
    "attention": lambda model: freeze(model.model.layers[0].self_attn.parameters()),
    "all but a norm": only_norm,
    "the first": lambda model: freeze(list(model.parameters())[:7]),
    "the last": lambda model: freeze(list(model.parameters())[-4:]),
    "every second": every_second,
    "vectors": lambda model: freeze(parameter for parameter in model.parameters() if parameter.dim() == 1),
    "by name": lambda model: freeze(one for name, one in model.named_parameters() if "bias" in name or "1.mlp" in name),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    def made(tie):
        folder = tmp_path_factory.mktemp("model")
        return tiny_model(folder, "llama", head="causal", num_hidden_layers=3, tie=tie, attention_bias=True)

    return {tie: made(tie) for tie in (True, False)}


def flags(model):
    return [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_freezing_by_module_and_position(tie, folders):
    for how, script in FREEZES.items():
        kinds = trl_jax.AutoModelForCausalLM, transformers.AutoModelForCausalLM
        ours, theirs = (kind.from_pretrained(folders[tie]) for kind in kinds)
        for model in (ours, theirs):
            script(model)
        assert flags(ours) == flags(theirs), how
        assert not all(flag for _, flag in flags(ours)), how
        assert ours.num_parameters(only_trainable=True) == theirs.num_parameters(only_trainable=True), how


def test_modules_are_found_by_name(folders):
    model = trl_jax.AutoModelForCausalLM.from_pretrained(folders[True])
    assert model.get_submodule("") is model
    assert [name for name, _ in model.lm_head.named_parameters()] == ["weight"]
    assert np.array_equal(model.lm_head.weight, model.get_input_embeddings().weight)
    with pytest.raises(AttributeError, match="is not a module but a parameter"):
        model.get_submodule("model.norm.weight")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        model.get_submodule("nothing")
    classifier = trl_jax.AutoModelForSequenceClassification.from_pretrained(folders[True])
    with pytest.raises(AttributeError, match="lm_head"):
        classifier.lm_head.requires_grad_(False)


IDENTITIES = {
    "head by id": lambda model: set(map(id, model.lm_head.parameters())),
    "weight of the head by id": lambda model: {id(model.lm_head.weight)},
    "a layer by id": lambda model: [id(parameter) for parameter in model.model.layers[1].parameters()],
    "embedding by id": lambda model: {id(model.get_input_embeddings().weight)},
    "by name": lambda model: {id(model.get_parameter("model.norm.weight"))},
}


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_a_parameter_is_one_object(tie, folders):
    kinds = trl_jax.AutoModelForCausalLM, transformers.AutoModelForCausalLM
    ours, theirs = (kind.from_pretrained(folders[tie]) for kind in kinds)
    for how, some in IDENTITIES.items():
        found, wanted = (
            [name for name, parameter in model.named_parameters() if id(parameter) in some(model)]
            for model in (ours, theirs)
        )
        assert found == wanted and wanted, how
    for model in (ours, theirs):
        weights = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert (weights[0] is weights[1]) == (weights[1] is model.model.embed_tokens.weight) == tie
        assert weights[1] is model.lm_head.weight is model.get_submodule("lm_head").weight
        groups = {parameter: parameter.dim() for parameter in model.parameters()}
        assert all(groups[parameter] == parameter.dim() for parameter in model.lm_head.parameters())
        assert len({*model.parameters(), *model.lm_head.parameters()}) == len(groups)
        other = copy.deepcopy(model)
        assert not {*other.parameters()} & {*model.parameters()} and other.lm_head.weight is other.lm_head.weight
        norm, table = model.model.norm.weight, model.get_input_embeddings().weight
        model.resize_token_embeddings(model.config.vocab_size + 8)
        assert norm is model.model.norm.weight and table is model.get_input_embeddings().weight
        assert tuple(table.shape) == (528, 64) and table.numel() == 528 * 64


def test_a_parameter_has_the_current_values(folders, tmp_path):
    """Also after training, as in torch: a script that wants the old ones clones them."""
    args = trl_jax.SFTConfig(str(tmp_path), **BASE | {"max_steps": 2})
    trainer = trl_jax.SFTTrainer(str(folders[True]), args, train_dataset=Dataset.from_list(text_rows(8)))
    norm = trainer.model.model.norm.weight
    before, ids, seen = norm.clone(), [id(one) for one in trainer.model.parameters()], []

    class Looks(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            seen.append(
                (norm is model.model.norm.weight, norm.numpy().copy(), ids == list(map(id, model.parameters())))
            )

    trainer.add_callback(Looks())
    trainer.train()
    assert [(same, every) for same, _, every in seen] == [(True, True)] * 2
    assert (before != norm).any() and (seen[0][1] != norm).any()
    np.testing.assert_array_equal(seen[1][1], norm)
    np.testing.assert_array_equal(norm, trainer.model.state_dict()["model.norm.weight"])
    assert norm.requires_grad and id(norm) in ids


def test_parameters_keep_neither_models_nor_values(folders):
    model = trl_jax.AutoModelForCausalLM.from_pretrained(folders[True])
    values = [weakref.ref(model.weights.values_of(name)) for name, _ in model.named_parameters()]
    assert sum(one() is not None for one in values) == 1  # the last
    norm, table, gone = model.model.norm.weight, model.lm_head.weight, weakref.ref(model)
    wanted = norm.clone()
    del model
    assert gone() is None
    np.testing.assert_array_equal(norm, wanted)
    assert norm.requires_grad and table.shape == (520, 64) and (table[3:5] * 2 == 2 * np.asarray(table)[3:5]).all()


@pytest.mark.parametrize("task", ["CAUSAL_LM", None])
def test_a_model_with_an_adapter_is_a_peft_model(task, folders, tmp_path):
    rows = Dataset.from_list(text_rows(4))
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=task)
    args = trl_jax.SFTConfig(str(tmp_path), **BASE | {"max_steps": 1})
    trainer = trl_jax.SFTTrainer(str(folders[True]), args, train_dataset=rows, peft_config=lora)
    trainer.train()
    model, theirs = (
        trainer.model,
        peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folders[True]), lora),
    )
    for kind in (peft.PeftModel, peft.PeftModelForCausalLM, transformers.PreTrainedModel, torch.nn.Module):
        assert isinstance(model, kind) == isinstance(theirs, kind)
        assert isinstance(model.merge_and_unload(), kind) == isinstance(theirs.get_base_model(), kind)
    assert isinstance(model, trl_jax.PreTrainedModel) and isinstance(
        trainer.accelerator.unwrap_model(model), peft.PeftModel
    )
    assert model.active_adapters == theirs.active_adapters and model.active_adapter == theirs.active_adapter
    model.save_pretrained(tmp_path / "saved")
    loaded = peft.PeftModel.from_pretrained(theirs.get_base_model(), tmp_path / "saved")
    trained = {name: values for name, values in model.named_parameters() if "lora_" in name}
    assert trained.keys() == {name for name, _ in loaded.named_parameters() if "lora_" in name}
    for name, values in trained.items():
        np.testing.assert_array_equal(values, loaded.get_parameter(name).detach().numpy())
    again = trl_jax.SFTTrainer(model, args, train_dataset=rows, processing_class=trainer.processing_class)
    again.train()
    assert isinstance(again.model, peft.PeftModel) and not hasattr(model.get_base_model(), "peft_config")


def test_a_model_is_a_transformers_model(folders, tmp_path):
    args = trl_jax.SFTConfig(str(tmp_path), **BASE | {"max_steps": 1})
    trainer = trl_jax.SFTTrainer(str(folders[True]), args, train_dataset=Dataset.from_list(text_rows(4)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[True])
    for kind in (transformers.PreTrainedModel, torch.nn.Module, peft.PeftModel, str):
        assert isinstance(trainer.model, kind) == isinstance(theirs, kind)
    assert isinstance(trainer.model, trl_jax.PreTrainedModel) and type(trainer.model) is trl_jax.PreTrainedModel
    trainer.train()
    again = trl_jax.SFTTrainer(
        trainer.model, args, train_dataset=trainer.train_dataset, processing_class=trainer.processing_class
    )
    again.train()
    assert again.model is trainer.model and type(copy.deepcopy(again.model)) is trl_jax.PreTrainedModel


def test_without_peft_its_class_is_ours(folders, tmp_path):
    from trl_jax.hub.auto import PeftModel, find_checkpoint

    lora = trl_jax.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    made = find_checkpoint(str(folders[True]), head="lm").load_adapted(lora, 3)
    made.save_pretrained(tmp_path / "adapter")
    base = trl_jax.AutoModelForCausalLM.from_pretrained(folders[True])
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    assert isinstance(made, PeftModel) and isinstance(loaded, PeftModel)
    assert not isinstance(base, PeftModel) and not isinstance(loaded.merge_and_unload(), PeftModel)
    ids = np.array([[5, 9, 11, 7]])
    np.testing.assert_allclose(loaded(ids).logits, made(ids).logits, atol=1e-5)
    assert np.abs(base(ids).logits - made(ids).logits).max() > 1e-3
    with pytest.raises(
        TypeError, match="model is a str. Without peft, adapters are only loaded onto models of trl_jax"
    ):
        PeftModel.from_pretrained(str(folders[True]), tmp_path / "adapter")
    with pytest.raises(TypeError, match="does not accept device_mesh"):
        PeftModel.from_pretrained(base, tmp_path / "adapter", device_mesh=1)


def listed(model):
    """Modules by name with their classes; the model itself is checked elsewhere."""
    return [(name, module.__class__) for name, module in model.named_modules() if name]


def test_modules_are_those_of_transformers_and_peft(folders, tmp_path):
    ours, theirs = (
        kind.from_pretrained(folders[True])
        for kind in (trl_jax.AutoModelForCausalLM, transformers.AutoModelForCausalLM)
    )
    assert listed(ours) == listed(theirs) and len(listed(ours)) > 30
    inner = [model.model.layers[1].self_attn for model in (ours, theirs)]
    assert listed(inner[0]) == listed(inner[1]) and isinstance(ours.model.norm, type(theirs.model.norm))
    assert [name for name, _ in ours.named_children()] == [name for name, _ in theirs.named_children()]
    for model in (ours, theirs):
        assert [name for name, _ in model.model.norm.named_parameters("norm")] == ["norm.weight"]
        assert not list(model.parameters(recurse=False)) and len(list(model.model.norm.parameters(recurse=False))) == 1
        assert sum(isinstance(module, torch.nn.Embedding) for module in model.modules()) == 1
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM")
    args = trl_jax.SFTConfig(str(tmp_path), **BASE | {"max_steps": 1})
    model = trl_jax.SFTTrainer(
        str(folders[True]), args, train_dataset=Dataset.from_list(text_rows(4)), peft_config=lora
    ).model
    assert listed(model) == listed(peft.get_peft_model(theirs, lora))
    found = [name for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    assert len(found) == 4 and accelerate.Accelerator(cpu=True).unwrap_model(model) is model


def test_a_module_is_one_object(folders):
    """So that scripts can leave one out by `is`, `in` or `id`, as in torch."""
    model = trl_jax.AutoModelForCausalLM.from_pretrained(folders[True])
    head, modules = model.lm_head, list(model.modules())
    assert any(module is head for module in modules) and head in modules
    assert model.get_output_embeddings() is head and model.get_input_embeddings() is model.model.embed_tokens
    assert len({id(module) for module in modules}) == len(modules)
    sizes = [module.num_embeddings for module in modules if isinstance(module, torch.nn.Embedding)]
    assert sizes == [model.vocab_size]
    assert copy.copy(model).lm_head is not head
    gone = weakref.ref(next(iter(model.params.values())))
    del model, head, modules
    assert gone() is None


def test_listing_modules_draws_no_random_numbers(folders, tmp_path):
    """Nor does it initialize the adapter, which "pissa" could not do without weights."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights="pissa")
    args, rows = trl_jax.SFTConfig(str(tmp_path), **BASE | {"max_steps": 1}), Dataset.from_list(text_rows(4))
    model = trl_jax.SFTTrainer(str(folders[True]), args, train_dataset=rows, peft_config=lora).model
    before = torch.get_rng_state()
    assert sum(isinstance(module, peft.tuners.lora.LoraLayer) for module in model.modules()) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_an_adapter_with_fully_trained_modules_cannot_be_disabled(folders, tmp_path):
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"], task_type="CAUSAL_LM")
    args, rows = trl_jax.SFTConfig(str(tmp_path), **BASE | {"max_steps": 1}), Dataset.from_list(text_rows(4))
    model = trl_jax.SFTTrainer(str(folders[True]), args, train_dataset=rows, peft_config=lora).model
    with (
        pytest.raises(ValueError, match="norm.weight of .* is fully trained.*original values are not kept"),
        model.disable_adapter(),
    ):
        pass


def test_modules_cannot_be_changed(folders):
    """Nor silently: the model does not compute with them."""
    model = trl_jax.AutoModelForCausalLM.from_pretrained(folders[True])
    for name, module in model.named_modules():  # the usual loop before QLoRA
        if "norm" in name:
            module = module.to(torch.float32)
    assert model.model.norm.to("cuda").eval().train() is not None
    with pytest.raises(ValueError, match=r"model.norm.to\(bfloat16\): weights train in float32"):
        model.model.norm.to(dtype=torch.bfloat16)
    with pytest.raises(AttributeError, match="Cannot set lm_head of"):
        model.lm_head = torch.nn.Linear(64, 8)
    with pytest.raises(
        AttributeError, match="p cannot be set on model.layers.0.self_attn: the model computes with JAX"
    ):
        model.model.layers[0].self_attn.p = 0.0
    for name in ("forward", "loss_function"):
        with pytest.raises(AttributeError, match=f"Cannot set {name} of .* never calls it. Override compute_loss"):
            setattr(model, name, lambda *given: None)
    model.best_step = 3  # a script's own attributes can be set


def test_tensor_methods_read_parameters_and_write_only_into_copies(folders):
    ours, theirs = (
        kind.from_pretrained(folders[True])
        for kind in (trl_jax.AutoModelForCausalLM, transformers.AutoModelForCausalLM)
    )
    for read in (
        lambda weight: weight.data.norm(2).item(), lambda weight: weight.abs().mean().item(),
        lambda weight: weight.detach().pow(2).sum().item(), lambda weight: (weight.nelement(), weight.element_size()),
        lambda weight: weight.detach().clone().mul_(2).add_(1).sum().item(), lambda weight: weight.std().item(),
        lambda weight: weight.data.var().item(), lambda weight: float(np.std(weight.detach().numpy())),
    ):  # fmt: skip
        assert read(ours.model.norm.weight) == pytest.approx(read(theirs.model.norm.weight), rel=1e-6)
    copy_of_it = ours.model.norm.weight.clone()
    copy_of_it.mul_(2)
    np.testing.assert_array_equal(copy_of_it, 2 * np.asarray(ours.model.norm.weight))
    for write in (
        lambda weight: weight.data.mul_(2), lambda weight: weight.add_(1), lambda weight: weight.data.copy_(copy_of_it),
        torch.nn.init.zeros_,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="Cannot write into model.norm.weight"):
            write(ours.model.norm.weight)


def test_jax_and_torch_take_parameters_as_arrays(folders):
    weight = trl_jax.AutoModelForCausalLM.from_pretrained(folders[True]).model.norm.weight
    values, kept = np.asarray(weight), weight.clone()
    for function in (
        jnp.asarray, jnp.sum, jnp.linalg.norm, jax.jit(lambda x: 2 * x), jax.device_put, jax.vmap(jnp.square),
        jax.grad(lambda x: (x**3).sum()), lambda x: jnp.ones(64) * x, lambda x: jax.tree.map(jnp.sum, {"x": x})["x"],
    ):  # fmt: skip
        found = function(weight)
        assert isinstance(found, jax.Array)
        np.testing.assert_array_equal(found, function(values))
    torch.testing.assert_close(kept, weight)
    assert weight.dtype == torch.float32 and torch.zeros(2, dtype=weight.dtype).dtype is torch.float32
    torch.testing.assert_close(weight, weight.detach())
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        torch.testing.assert_close(kept.mul_(2), weight)


def test_a_models_own_state_can_be_passed_when_saving(folders, tmp_path):
    """As in `model.save_pretrained(folder, state_dict=accelerator.get_state_dict(model))`."""
    model = trl_jax.AutoModelForCausalLM.from_pretrained(folders[True])
    state = model.state_dict()
    model.save_pretrained(tmp_path / "own", state_dict=state, is_main_process=True)
    assert (tmp_path / "own/model.safetensors").is_file()
    changed = state | {"model.norm.weight": 2 * state["model.norm.weight"]}
    for other in (changed, {"model.norm.weight": state["model.norm.weight"]}, {}):
        with pytest.raises(TypeError, match="save_pretrained: state_dict=.* is not supported") as told:
            model.save_pretrained(tmp_path / "other", state_dict=other)
        assert len(str(told.value)) < 300


def test_without_torch_modules_have_names(folders, monkeypatch):
    model = trl_jax.AutoModelForCausalLM.from_pretrained(folders[True])
    with_weights = {name.rpartition(".")[0] for name in model.names()} | {"lm_head"}
    torchs = [name for name, _ in listed(model) if any((one + ".").startswith(name + ".") for one in with_weights)]
    monkeypatch.delitem(sys.modules, "torch")
    assert [name for name, _ in model.named_modules()] == ["", *torchs]
    assert {type(module) for _, module in model.named_modules() if module is not model} == {Submodule, EmbeddingModule}
    assert repr(model.model.norm) == "model.norm (Submodule)" and not hasattr(model.model.norm, "eps")
    with pytest.raises(AttributeError, match="register_forward_hook of model.norm exists in torch only"):
        model.model.norm.register_forward_hook(print)
    monkeypatch.undo()  # as a script that imports torch later
    assert any(isinstance(module, torch.nn.Linear) for module in model.modules())


def test_an_adapter_can_be_disabled(folders, tmp_path):
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args = trl_jax.SFTConfig(str(tmp_path), **BASE | {"max_steps": 1})
    trainer = trl_jax.SFTTrainer(
        str(folders[True]), args, train_dataset=Dataset.from_list(text_rows(4)), peft_config=lora
    )
    trainer.train()
    model, base = trainer.model, trl_jax.AutoModelForCausalLM.from_pretrained(folders[True])
    ids, adapted = np.array([[5, 9, 11, 7]]), [name for name, _ in model.named_parameters()]
    before = model(ids).logits
    with model.disable_adapter():
        np.testing.assert_array_equal(model(ids).logits, base(ids).logits)
        np.testing.assert_array_equal(model.generate(ids, max_new_tokens=4), base.generate(ids, max_new_tokens=4))
        with model.disable_adapter():  # nested: the outer one still holds afterwards, as in PEFT
            pass
        np.testing.assert_array_equal(model(ids).logits, base(ids).logits)
        logps = [trl_jax.token_logps_and_entropies(one, ids)[0] for one in (model, base)]
        np.testing.assert_array_equal(*logps)
        assert isinstance(model, peft.PeftModel) and [name for name, _ in model.named_parameters()] == adapted
        with pytest.raises(ValueError, match=r"cannot train, evaluate or predict in `with model.disable_adapter\(\)"):
            trainer.evaluate(Dataset.from_list(text_rows(4)))
    np.testing.assert_array_equal(model(ids).logits, before)
    assert np.abs(before - base(ids).logits).max() > 1e-3
    assert [name for name, _ in model.named_parameters()] == adapted
    assert (
        not hasattr(base, "disable_adapter")
        and not hasattr(base, "active_adapter")
        and hasattr(model, "disable_adapter")
    )
    assert trainer.accelerator.get_state_dict(model).keys() == model.state_dict().keys()


FACTS = """
q_proj.in_features | q_proj.out_features | q_proj.weight.shape | q_proj.bias.shape | q_proj.extra_repr() | q_proj
up_proj.bias | layer.self_attn.layer_idx | layer.self_attn.head_dim | layer.hidden_size | model.model.norm
model.model.norm.variance_epsilon | layer.mlp.act_fn | model.lm_head.in_features | model.lm_head.bias | layer
model.model.embed_tokens.padding_idx | model.model.embed_tokens.embedding_dim | q_proj.state_dict().keys() | model
layer.training | layer.to("cpu").training | model.main_input_name | model.base_model_prefix | model.config_class
model.model.config.hidden_size | model.model.dtype | next(layer.parameters()).shape | model.get_submodule(ACT)
model.zero_grad() | model.compile() | model.disable_input_require_grads() | model.can_generate()
""".replace("\n", "|")


def fact(model, call, base):
    q_proj, up_proj = (
        model.get_submodule(f"{base}model.layers.0.{name}") for name in ("self_attn.q_proj", "mlp.up_proj")
    )
    layer, model = model.get_submodule(f"{base}model.layers.0"), model if not base else model.model
    known = {"model": model, "layer": layer, "q_proj": q_proj, "up_proj": up_proj, "ACT": "model.layers.0.mlp.act_fn"}
    found = eval(call, known)
    return repr(found) if isinstance(found, torch.nn.Module) else found


def test_modules_say_about_themselves_what_torchs_do(folders):
    ours, theirs = (
        kind.from_pretrained(folders[True])
        for kind in (trl_jax.AutoModelForCausalLM, transformers.AutoModelForCausalLM)
    )
    for call in filter(None, map(str.strip, FACTS.split("|"))):
        assert fact(ours, call, "") == fact(theirs, call, ""), call
    visited = []
    for model in (ours, theirs):
        seen = []
        assert (
            model.apply(lambda module, seen=seen: seen.append(type(module.extra_repr()) and module.__class__)) is model
        )
        visited.append(seen[:-1])  # the last one is the model
    assert visited[0] == visited[1] and len(visited[0]) > 30
    with pytest.raises(ValueError, match="Cannot write into model.embed_tokens.weight"):
        ours.apply(lambda one: torch.nn.init.zeros_(one.weight) if isinstance(one, torch.nn.Embedding) else None)
    assert list(ours.buffers()) == list(ours.model.named_buffers()) == []


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapted_modules_are_found_where_peft_looks(dora, folders, tmp_path):
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", use_dora=dora)
    args, rows = trl_jax.SFTConfig(str(tmp_path), **BASE), Dataset.from_list(text_rows(4))
    ours = trl_jax.SFTTrainer(str(folders[True]), args, train_dataset=rows, peft_config=lora).model
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folders[True]), lora)
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    for call in (
        lambda model: model.get_submodule(name).weight.shape, lambda model: model.get_submodule(name).bias.shape,
        lambda model: model.get_submodule(name).in_features, lambda model: model.model.model.norm.weight.shape,
        lambda model: model.lm_head.weight.shape, lambda model: model.base_model.lm_head.weight.shape,
        lambda model: model.get_submodule(name).lora_A["default"].weight.shape,
        lambda model: repr(model.get_submodule(name)),
        lambda model: dict(model.get_submodule(name).scaling), lambda model: model.get_submodule(name).r["default"],
        lambda model: model.peft_type,
    ):  # fmt: skip
        assert call(ours) == call(theirs)
    for method, instead in (
        ("merge_adapter", "merge_and_unload"), ("unload", "get_base_model"),
        ("disable_adapter_layers", "disable_adapter"), ("add_adapter", "peft_config"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=f"{method} of .* exists in torch only: .*{instead}"):
            getattr(ours, method)
    ours.set_adapter("default")
    with pytest.raises(ValueError, match="Adapter other not found"):
        ours.set_adapter("other")
    found, wanted = map(peft.get_peft_model_state_dict, (ours, theirs))
    assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in wanted.items()}
    peft.set_peft_model_state_dict(theirs, found)
    assert all(torch.equal(one, found[name]) for name, one in peft.get_peft_model_state_dict(theirs).items())
    other = {key: values + 0.5 for key, values in found.items()}
    peft.set_peft_model_state_dict(ours, other)
    assert all(torch.equal(values, other[key]) for key, values in peft.get_peft_model_state_dict(ours).items())
    state = ours.state_dict()
    peft.set_peft_model_state_dict(ours, found)
    assert ours.load_state_dict(state) == ([], []) and ours.load_state_dict({}, strict=False).missing_keys
    assert all(torch.equal(values, other[key]) for key, values in peft.get_peft_model_state_dict(ours).items())
    base = "base_model.model.model.norm.weight"
    with pytest.raises(ValueError, match=f"load_state_dict: {base} belongs to the base model, which does not train"):
        ours.load_state_dict(state | {base: state[base] + 1})
    with pytest.raises(TypeError, match="does not support item assignment"):
        ours.get_submodule(name).scaling["default"] = 1.0


def test_what_only_torch_can_do_says_what_to_write(folders):
    model = trl_jax.AutoModelForCausalLM.from_pretrained(folders[True])
    for kind in ("forward", "forward_pre", "full_backward"):
        for module in (model, model.model.layers[0]):
            with pytest.raises(AttributeError, match=f"register_{kind}_hook of .* calls no modules. Call the model"):
                getattr(module, f"register_{kind}_hook")
    with pytest.raises(AttributeError, match="model.norm.weight has no register_hook: gradients stay within"):
        model.model.norm.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(TypeError, match="model.norm cannot be called: JAX computes the whole model at once"):
        model.model.norm(torch.zeros(1, 64))
    with pytest.raises(TypeError, match=r"cannot be pickled. Call model.save_pretrained\(folder\)"):
        pickle.dumps(model)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(TypeError, match=r"peft adds modules of torch, .* peft_config=LoraConfig\(...\)"):
        peft.get_peft_model(model, lora)
    assert (
        not hasattr(model, "nothing") and not hasattr(model.model.norm, "nothing") and not hasattr(model, "peft_config")
    )


def test_calls_take_arguments_that_change_nothing(folders):
    ours, theirs = (
        kind.from_pretrained(folders[True])
        for kind in (trl_jax.AutoModelForCausalLM, transformers.AutoModelForCausalLM)
    )
    ids = torch.tensor([[5, 9, 11, 7], [8, 6, 4, 3]])
    for options in (
        {}, {"return_dict": True, "use_cache": False}, {"output_hidden_states": False, "output_attentions": None},
        {"position_ids": torch.arange(4)[None]}, {"logits_to_keep": 2}, {"labels": ids}, {"return_dict": False},
    ):  # fmt: skip
        found, wanted = ours.forward(input_ids=ids, **options), theirs(input_ids=ids, **options)
        torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=1e-4)
        if options.get("return_dict", True):
            torch.testing.assert_close(found.logits, wanted.logits, atol=1e-5, rtol=1e-4)
            assert ("loss" in found) == ("loss" in wanted) == (found.loss is not None)
            assert found.keys() == wanted.keys() - {"cache", "past_key_values"} and found.hidden_states is None
    for options, given in (
        ({"output_hidden_states": True}, "output_hidden_states"), ({"position_ids": torch.ones(2, 4)}, "position_ids"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 4, 64)}, "inputs_embeds"), ({"past": 1}, "past"),
    ):  # fmt: skip
        with pytest.raises(
            TypeError, match=f"computes logits from input_ids and attention_mask, not from {given}. For"
        ):
            ours(**{"input_ids": ids} | options)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_a_state_dict_can_be_loaded(tie, folders):
    ours, theirs = (
        kind.from_pretrained(folders[tie]) for kind in (trl_jax.AutoModelForCausalLM, transformers.AutoModelForCausalLM)
    )
    torch.manual_seed(3)
    twin = transformers.AutoModelForCausalLM.from_config(theirs.config)
    norm, before = ours.model.norm.weight, ours.model.norm.weight.clone()
    assert ours.load_state_dict(twin.state_dict()) == ([], [])
    for name, values in twin.state_dict().items():
        assert torch.equal(ours.state_dict()[name], values), name
    ids = torch.tensor([[5, 9, 11, 7]])
    torch.testing.assert_close(ours(ids).logits, twin(ids).logits, atol=1e-5, rtol=1e-4)
    changed = {"model.norm.weight": 2 * before.numpy(), "other": np.zeros(3)}
    found = ours.load_state_dict(changed, strict=False)
    assert found == tuple(
        twin.load_state_dict({name: torch.as_tensor(one) for name, one in changed.items()}, strict=False)
    )
    assert torch.equal(norm, 2 * before) and torch.equal(ours.lm_head.weight, twin.lm_head.weight)
    for state, text in (
        (changed, "Missing key.*model.embed_tokens.weight.*Unexpected key.*'other'"),
        (
            ours.state_dict() | {"model.norm.weight": np.zeros(3)},
            r"size mismatch for model.norm.weight: .*\[3\].*\[64\]",
        ),
    ):
        for model in (ours, theirs):
            given = {name: torch.as_tensor(np.array(one)) for name, one in state.items()} if model is theirs else state
            with pytest.raises(RuntimeError, match="(?s)" + text.replace("'other'", "other")):
                model.load_state_dict(given)
    assert torch.equal(norm, 2 * before)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_tied_weights_and_modules_load_as_in_torch(tie, folders):
    ours, theirs = (
        kind.from_pretrained(folders[tie]) for kind in (trl_jax.AutoModelForCausalLM, transformers.AutoModelForCausalLM)
    )
    assert [name for name, _ in ours.named_parameters(remove_duplicate=False)] == [*theirs.state_dict()]
    table = theirs.model.embed_tokens.weight.detach()
    state = {"lm_head.weight": 2 * table, "model.embed_tokens.weight": 3 * table}  # torch's order is the other one
    layer = {name: -one for name, one in theirs.model.layers[1].state_dict().items()}
    for model in (ours, theirs):
        model.load_state_dict(state, strict=False)
        assert model.model.layers[1].load_state_dict(layer) == ([], [])
        with pytest.raises(RuntimeError, match="Missing key.*self_attn.q_proj.weight"):
            model.model.layers[1].load_state_dict({})
        with pytest.raises(TypeError, match="Expected state_dict to be dict-like, got <class 'list'>"):
            model.load_state_dict([])
    assert all(torch.equal(ours.state_dict()[name], values) for name, values in theirs.state_dict().items())


@pytest.mark.parametrize("divided", [True, False], ids=["divided", "replicated"])
def test_several_processes_read_and_set_current_values(divided, folders, monkeypatch):
    ours, theirs = (
        kind.from_pretrained(folders[True])
        for kind in (trl_jax.AutoModelForCausalLM, transformers.AutoModelForCausalLM)
    )
    reads = []
    ours.read = lambda array: reads.append(array) or Fetched(array)
    monkeypatch.setattr(parameters, "spans_hosts", lambda array: divided)
    held, before = dict(ours.named_parameters()), len(reads)
    norms = [parameter.norm() for parameter in held.values()]
    assert (len(reads) == before) == divided  # values that all processes have read are there for a single one
    with pytest.raises(ValueError, match="Cannot write into model.norm.weight"):
        held["model.norm.weight"].data.mul_(2)
    for model in (ours, theirs):
        model.load_state_dict({name: 2 * values for name, values in model.state_dict().items()})
    assert [held[name].norm().item() for name in held] == pytest.approx([2 * norm.item() for norm in norms])
    assert all(torch.equal(held[name].data, values) for name, values in theirs.named_parameters())


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_transformers_selects_parameters_by_the_class_of_their_module(tie, folders, tmp_path):
    kinds = [torch.nn.Embedding, transformers.models.llama.modeling_llama.LlamaRMSNorm]
    ours, theirs = (
        kind.from_pretrained(folders[tie]) for kind in (trl_jax.AutoModelForCausalLM, transformers.AutoModelForCausalLM)
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args, rows = trl_jax.SFTConfig(str(tmp_path), **BASE), Dataset.from_list(text_rows(4))
    adapted = trl_jax.SFTTrainer(str(folders[tie]), args, train_dataset=rows, peft_config=lora).model
    for model, peer in ((ours, lambda: theirs), (adapted, lambda: peft.get_peft_model(theirs, lora))):
        found, wanted = (transformers.trainer_pt_utils.get_parameter_names(one, kinds) for one in (model, peer()))
        assert found == wanted and not any("norm" in name for name in found)


def test_a_state_dict_that_is_loaded_during_training_is_trained_further(folders, tmp_path):
    losses, trl = [], pytest.importorskip("trl")
    for package in (trl_jax, trl):

        class Restart(transformers.TrainerCallback):
            def on_train_begin(self, args, state, control, model, **kwargs):
                self.first = {name: values.clone() for name, values in model.state_dict().items()}

            def on_step_end(self, args, state, control, model, **kwargs):
                model.load_state_dict(self.first)

        settings = BASE | {"max_steps": 3, "learning_rate": 0.05, "lr_scheduler_type": "constant"}
        args = package.SFTConfig(str(tmp_path / package.__name__), **settings)
        rows = Dataset.from_list(text_rows(2))
        trainer = package.SFTTrainer(str(folders[True]), args, train_dataset=rows, callbacks=[Restart()])
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == pytest.approx(losses[1], abs=2e-4) and len(losses[0]) == 3
