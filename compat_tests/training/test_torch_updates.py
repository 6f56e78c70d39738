"""AdamW and gradient clipping against torch, step by step; which parameters decay against transformers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from compat_tests.hub.vision.models import CASES
from compat_tests.hub.vision.test_families import built
from compat_tests.models import causal
from trl_jax.hub.auto import find_checkpoint
from trl_jax.training.optimizers import (
    Hyperparameters,
    clip_by_global_norm,
    decays,
    global_norm,
    make_optimizer,
    scale_by_adafactor,
)
from trl_jax.training.step import decay_names

SHAPES = {"kernel": (5, 4), "norm": (4,), "bias": (3,), "still": (2, 2)}
DECAYED = {"kernel": True, "norm": False, "bias": False, "still": True}
SETTINGS = [
    {"weight_decay": 0.0, "max_grad_norm": 1.0},
    {"weight_decay": 0.3, "max_grad_norm": 0.5},
    {"weight_decay": 0.1, "max_grad_norm": None, "b1": 0.8, "b2": 0.95, "eps": 1e-3},
    {"weight_decay": 0.1, "max_grad_norm": 0.0, "b1": 0.0, "b2": 0.5, "eps": 1e-6},
]
DEFAULTS = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
STEPS = 20


def gradients(step: int) -> dict[str, np.ndarray]:
    """Magnitudes from far below eps to far above the clipping norm; the gradient of `still` is zero."""
    dice = np.random.default_rng(step)
    size = 10.0 ** dice.uniform(-6, 1)
    drawn = {name: (size * dice.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}
    return drawn | {"still": np.zeros(SHAPES["still"], np.float32)}


def start() -> dict[str, np.ndarray]:
    dice = np.random.default_rng(99)
    return {name: dice.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def rate(step: int) -> float:
    return 1e-2 * (1 - step / STEPS)


def torchs(b1, b2, eps, weight_decay, max_grad_norm):
    torch = pytest.importorskip("torch")
    params = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start().items()}
    groups = [
        {"params": [p for name, p in params.items() if DECAYED[name]], "weight_decay": weight_decay},
        {"params": [p for name, p in params.items() if not DECAYED[name]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(b1, b2), eps=eps)
    for step in range(STEPS):
        for name, value in gradients(step).items():
            params[name].grad = torch.tensor(value)
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(params.values(), max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        yield {name: p.detach().numpy().copy() for name, p in params.items()}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_step_is_torchs(setting):
    setting = DEFAULTS | setting
    hyper = Hyperparameters(**{name: value for name, value in setting.items() if name != "max_grad_norm"})
    tx = make_optimizer("adamw_torch", hyper, decayed=DECAYED, max_grad_norm=setting["max_grad_norm"])
    params = {name: jnp.asarray(value) for name, value in start().items()}
    state = tx.init(params)
    for step, wanted in enumerate(torchs(**setting)):
        grads = {name: jnp.asarray(value) for name, value in gradients(step).items()}
        updates, state = tx.update(grads, state, params, learning_rate=np.float32(rate(step)))
        params = optax.apply_updates(params, updates)
        for name, value in wanted.items():
            np.testing.assert_allclose(params[name], value, rtol=0, atol=1e-6, err_msg=f"step {step}, {name}")


def test_only_what_decays_moves_without_a_gradient():
    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    tx = make_optimizer("adamw_torch", Hyperparameters(weight_decay=0.5), decayed=DECAYED, max_grad_norm=1.0)
    nothing = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    updates, _ = tx.update(nothing, tx.init(params), params, learning_rate=0.1)
    moved = {name: bool(np.any(update != 0)) for name, update in updates.items()}
    assert moved == DECAYED
    np.testing.assert_allclose(updates["kernel"], -0.05, rtol=1e-6)


@pytest.mark.parametrize("size", [1e-9, 0.1, 1.0, 1.0 + 1e-6, 3.0])
def test_clipping_is_torchs_to_the_last_digits(size):
    """At a norm of 1 + 1e-6, optax's clipping is off by a millionth, ten times float32's precision."""
    torch = pytest.importorskip("torch")
    grad = np.full((4,), size / 2, np.float32)
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor(grad)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    clip = clip_by_global_norm(1.0)
    ours, _ = clip.update({"g": jnp.asarray(grad)}, clip.init(None))
    np.testing.assert_allclose(ours["g"], parameter.grad.numpy(), rtol=2e-7)


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 2e-7), ("bfloat16", 2**-8)])
def test_a_norm_is_that_of_all_elements(dtype, apart):
    """Including rows left over after whole chunks, and rows too long for one chunk."""
    dice = np.random.default_rng(0)
    shapes = [(), (7,), (5, 3), (3, 5000), (31, 133, 200)]
    tree = {str(shape): jnp.asarray(dice.normal(size=shape), dtype) for shape in shapes}
    exact = np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in tree.values()))
    found = jax.jit(global_norm)(tree)
    assert found.dtype == dtype
    np.testing.assert_allclose(float(found), exact, rtol=apart)


# Convolutions and an MLP in one tensor, in several runs of layers; biases of experts.
@pytest.mark.parametrize("family", ["granitemoehybrid", "gpt_oss"])
def test_adafactor_averages_each_of_torchs_tensors(family, tmp_path):
    facts = {"num_hidden_layers": 2} | ({} if family == "gpt_oss" else {"layer_types": ["mamba", "attention"]})
    folder = causal.build(tmp_path / "model", family, tie=False, **facts)
    model = find_checkpoint(str(folder), head="lm").load(0)
    assert_adafactor_is_torchs(model.backend, model.params, causal.reference(folder), tmp_path / "after")


def test_adafactor_averages_the_kernels_of_towers(tmp_path):
    """The convolution of patches has four axes in torch; ours is a matrix."""
    _, theirs, _, _, params, backend = built(CASES["llava"], tmp_path / "model")
    assert "vision.tower.patches.weight" in backend.torch_param_layout().kernels
    assert_adafactor_is_torchs(backend, params, theirs, tmp_path / "after")


def assert_adafactor_is_torchs(backend, params, theirs, folder):
    """With the weights as gradients."""
    torch = pytest.importorskip("torch")
    from transformers.optimization import Adafactor

    rule = scale_by_adafactor(backend.torch_param_layout())
    steps, _ = rule.update(params, rule.init(params))
    found = dict(backend.on_disk(steps))
    before = {name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}
    for parameter in theirs.parameters():
        parameter.grad = parameter.detach().clone()
    Adafactor(theirs.parameters(), lr=1.0, scale_parameter=False, relative_step=False).step()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(before[name] - parameter)
    theirs.save_pretrained(folder)
    after = load_file(folder / "model.safetensors")
    assert len(found) > len(after) / 2  # a tower has layers that are not read
    for name, ours in found.items():
        np.testing.assert_allclose(ours, after[name], rtol=2e-3, atol=2e-4, err_msg=name)


def test_only_names_decide_about_rms_norms(tmp_path):
    """The last norm of nemotron_h is called norm_f, which transformers takes for a weight."""
    pytest.importorskip("torch")
    from transformers import Trainer

    kinds = ["linear_attention", "mlp"]
    folder = causal.build(tmp_path, "nemotron_h", tie=False, layers_block_type=kinds)
    model = find_checkpoint(str(folder), head="lm").load(0)
    wanted = Trainer.get_decay_parameter_names(None, causal.reference(folder))
    assert "model.norm_f.weight" in wanted
    assert {*decay_names(model.backend, model.params)} == {*wanted}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_decay_skips_what_transformers_skips(checkpoint, model_type):
    pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification, Trainer

    model = AutoModelForSequenceClassification.from_pretrained(checkpoint(model_type))
    wanted = Trainer.get_decay_parameter_names(None, model)
    ours = find_checkpoint(str(checkpoint(model_type))).load(0)
    assert decay_names(ours.backend, ours.params) == wanted
    wanted = set(wanted)
    names = {name for name, _ in model.named_parameters()}
    assert {name for name in names if decays(name)} == wanted
    assert wanted and names - wanted


def test_names_that_sound_like_a_norm_are_judged_as_transformers_judges_them():
    torch = pytest.importorskip("torch")
    from transformers import Trainer

    words = ["rmsnorm", "RMSNorm_2", "layernorm", "norm", "normal", "q_norm", "norm_q", "biases"]
    model = torch.nn.Module()
    for word in words:
        model.add_module(word, torch.nn.Linear(1, 1))
    wanted = Trainer.get_decay_parameter_names(None, model)
    assert [name for name, _ in model.named_parameters() if decays(name)] == wanted
    assert "rmsnorm.weight" not in wanted and "normal.weight" in wanted
