"""Parameters have the methods of torch tensors, with torch's results and not NumPy's of the same name."""

from __future__ import annotations

import copy
import io
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trl_jax
from compat_tests.tiny import tiny_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

ONE, OTHER = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))

# Of the parameters `p` and `q`; also without torch.
EVERYWHERE = """
p.repeat(2, 1) | p.repeat((2, 1)) | p.nonzero() | p.max(0) | p.min(0) | p.max(dim=1).values | p.max() | p.max(0)[1]
p.sort() | p.sort(descending=True).indices | p.argsort(dim=0) | p.std() | p.var(unbiased=False) | p.std(0)
p.std(dim=0, keepdim=True) | p.std(False) | p.sum() | p.sum(dim=0) | p.sum(0) | p.sum(-1, keepdim=True)
p.sum((0, 1)) | p.argmax(dim=1) | p.argmax() | p.mean(dim=0, keepdim=True) | p.prod(0) | p.cumsum(0) | p.all(dim=0)
p.any() | p.size() | p.size(0) | p.size(-1) | p.shape | p.ndim | p.dim() | p.numel() | p.nelement() | p.nbytes
p.element_size() | p.itemsize | p.view(-1) | p.view(2, -1) | p.reshape(-1, 2) | p.reshape((-1, 2)) | p.flatten()
p.norm() | p.norm(p=1, dim=1) | p.norm(2, dim=0, keepdim=True) | p.norm(float("inf")) | p.t() | p.T | p.transpose(0, 1)
p.permute(1, 0) | p.squeeze() | p.squeeze(0) | p[:1].squeeze(0) | p.unsqueeze(0) | p.clone() | p.detach() | p.cpu()
p.float() | p.to("cpu") | p[0, 0].item() | p.tolist() | p.is_leaf | p.grad_fn | p.grad | p.abs().mean().item()
p.isnan().any() | p.isfinite().all() | p == q | (p == p).all() | p != q | p * 2 | 2 * p | 1 - p | p / 2 | p ** 2 | -p
abs(p) | p + q | p - q.data | (p - q).abs().max().item() | (p - q).norm() | (p > 0).float().mean() | (p > 0).sum(1)
p @ p.t() | p.pow(2).sum().sqrt().item() | (p ** 2).sum().sqrt() | p[0].sum().item() | [r.norm() for r in p]
p[:2].max(0) | p.data.size(0) | p.data.max(0) | p.data.clone().repeat(2, 1) | p.detach().float().cpu().numpy() | len(p)
p.is_floating_point() | float(p.data.mean()) | f"{p.norm().item():.4f}" | np.asarray(p.data).mean()
""".replace("\n", "|")

IN_TORCH = """
p.dtype | p.data.dtype | p.device | p.device.type | p.half() | p.to(torch.bfloat16) | p.to(dtype=torch.float64)
p.topk(2) | p.clamp(min=0) | p.chunk(2) | p.median(0) | p.unbind(0)[0] | p.quantile(0.5) | torch.isnan(p).any()
torch.equal(p, q) | torch.equal(p, p) | torch.allclose(p, q) | torch.norm(p) | torch.stack([p, q]).mean()
torch.cat([p.flatten(), q.flatten()]).norm() | torch.nn.utils.parameters_to_vector([p, q]).norm() | torch.zeros_like(p)
p.detach().clone().requires_grad_().requires_grad | isinstance(p.data, torch.Tensor) | str(p.shape) | p.is_contiguous()
len({one.data_ptr() for one in model.parameters()}) | {name: one.device.type for name, one in model.named_parameters()}
torch.nn.functional.embedding(torch.tensor([3]), p) | torch.nn.functional.linear(torch.ones(1, 64), p)
list(model.state_dict(prefix="x.", keep_vars=True)) | torch.nn.functional.rms_norm(torch.ones(1, 64), (64,), norm)
model.device | model.device.type | next(model.parameters()).device | model.state_dict().keys()
""".replace("\n", "|")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", head="causal", num_hidden_layers=2)


@pytest.fixture(scope="module")
def models(folder):
    return [kind.AutoModelForCausalLM.from_pretrained(folder) for kind in (trl_jax, transformers)]


def value(model, call):
    known = {"p": model.get_parameter(ONE), "q": model.get_parameter(OTHER), "model": model, "np": np}
    known["norm"] = model.model.norm.weight
    return eval(call, known | ({"torch": torch} if "torch" in call else {}))


def assert_same(found, wanted, call):
    if isinstance(wanted, torch.Tensor):
        found = found if isinstance(found, torch.Tensor) else torch.from_numpy(np.array(found))
        assert found.shape == wanted.shape and found.dtype == wanted.dtype, call
        torch.testing.assert_close(found, wanted.detach(), msg=call, check_device=False)
    elif isinstance(wanted, list | tuple) and not isinstance(wanted, torch.Size):
        assert len(found) == len(wanted), call
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other, call)
    elif isinstance(wanted, float | np.ndarray):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=call)
    else:
        assert found == wanted, call


def calls_of(text):
    return list(filter(None, map(str.strip, text.split("|"))))


def test_the_results_are_torchs(models):
    ours, theirs = models
    for call in calls_of(EVERYWHERE + IN_TORCH):
        assert_same(value(ours, call), value(theirs, call), call)


def test_without_torch_the_results_are_torchs(models, monkeypatch):
    wanted = {call: value(models[1], call) for call in calls_of(EVERYWHERE)}
    monkeypatch.delitem(sys.modules, "torch")
    found = {call: value(models[0], call) for call in wanted}
    weight = models[0].get_parameter(ONE)
    with pytest.raises(AttributeError, match="has no attribute 'topk'. Use NumPy, or install and import torch"):
        weight.topk(2)
    for write in (lambda: weight.mul_(2), lambda: weight.data[0].zero_(), lambda: weight.data.t().fill_(0)):
        with pytest.raises(ValueError, match=f"Cannot write into {ONE}: these are a copy"):
            write()
    array = np.array(weight)
    for function in (np.nonzero, np.argsort, np.max, np.std, lambda x: np.transpose(x, (0, 1)), lambda x: np.size(x)):
        np.testing.assert_array_equal(function(weight), function(array))
        np.testing.assert_array_equal(function(weight.data), function(array))
    monkeypatch.undo()
    for call in wanted:
        assert_same(found[call], wanted[call], call)


def test_views_cannot_be_written_and_copies_can(models):
    weight = models[0].get_parameter(ONE)
    before = weight.clone()
    for write in (
        lambda: weight.data.view(-1).zero_(), lambda: weight.data.t().mul_(2), lambda: weight.unsqueeze(0).fill_(1),
        lambda: weight.data[0].zero_(), lambda: [row.zero_() for row in weight.data],
        lambda: weight.chunk(2)[1].zero_(), lambda: weight.copy_(before + 1),
        lambda: torch.add(before, 1, out=weight.data),
        lambda: torch._foreach_mul_([weight.data], 2), lambda: torch.nn.init.zeros_(weight.data),
        lambda: torch.nn.functional.relu(weight, inplace=True),
        lambda: weight.data.__setitem__(0, 1), lambda: weight.detach().__iadd__(1),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"Cannot write into {ONE}: these are a copy"):
            write()
    for function in (np.nonzero, np.max, np.std, lambda x: np.sum(x, axis=0)):  # NumPy's results of NumPy's functions
        np.testing.assert_array_equal(function(weight), function(np.array(weight)))
        np.testing.assert_array_equal(function(weight.data), function(np.array(weight)))
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[0] = 1
    for copied in (weight.clone(), weight.data.cpu(), weight.float(), weight.to("cpu")):
        assert type(copied) is torch.Tensor and copied.mul_(0).sum() == 0
    for result in (weight.data + 0, weight.abs(), weight.norm(dim=0), weight[0] * 2):
        assert result.mul_(0).sum() == 0 and result.view(-1).zero_().sum() == 0
    layer = torch.nn.Linear(64, 64)
    layer.weight.data = weight.data
    assert torch.equal(layer.weight, weight)
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(weight, before)
    leaf = (weight * 2).requires_grad_()
    (leaf**2).sum().backward()
    assert torch.equal(leaf.grad, 2 * leaf) and leaf.grad.zero_().sum() == 0
    before.copy_(weight)
    assert torch.equal(weight, before) and torch.equal(copy.deepcopy(weight), before)


def test_a_state_dict_can_be_saved_and_loaded_by_torch(models, tmp_path):
    ours, theirs = models
    state, file = ours.state_dict(), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)  # only weights
    safetensors_torch.save_file({ONE: state[ONE]}, tmp_path / "one.safetensors")
    stored = safetensors_torch.load_file(tmp_path / "one.safetensors")[ONE]
    twin = transformers.AutoModelForCausalLM.from_config(theirs.config)
    twin.load_state_dict(state)
    assigned = transformers.AutoModelForCausalLM.from_config(theirs.config)
    assigned.load_state_dict(state, assign=True)
    assigned(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    torch.optim.SGD(assigned.parameters(), lr=0.1).step()
    assert not torch.equal(assigned.get_parameter(ONE), ours.get_parameter(ONE))
    for one in (loaded[ONE], stored, twin.get_parameter(ONE), pickle.loads(pickle.dumps(ours.get_parameter(ONE)))):
        assert torch.equal(one, theirs.get_parameter(ONE))
    assert type(loaded[ONE]) is torch.Tensor


def test_jax_takes_values(models):
    values = models[0].state_dict()[ONE]
    for function in (jnp.asarray, jnp.sum, lambda x: jnp.sum(x**2), lambda x: jnp.linalg.norm(abs(x) + 1)):
        found = function(values)
        assert isinstance(found, jax.Array)
        np.testing.assert_allclose(found, function(jnp.asarray(values)), rtol=1e-6)
    ones = jnp.ones(values.shape)
    for found in (ones - 2 * values, (-2 * values) + ones):
        assert isinstance(found, jax.Array)
        np.testing.assert_allclose(found, 1 - 2 * np.asarray(values), rtol=1e-6)


def test_a_resized_copy_leaves_the_shapes_of_the_original(folder):
    original = trl_jax.AutoModelForCausalLM.from_pretrained(folder)
    table = original.get_parameter("model.embed_tokens.weight")
    rows, resized = table.shape[0], copy.copy(original)
    resized.resize_token_embeddings(rows + 8)
    assert resized.get_parameter("model.embed_tokens.weight").shape[0] == rows + 8 and table.shape[0] == rows
