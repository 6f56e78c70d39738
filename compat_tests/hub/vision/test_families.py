"""Logits, gradients and files of tiny vision-language models match those of transformers."""

from __future__ import annotations

import copy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from compat_tests.effort import usual
from compat_tests.hub.vision.models import CASES, IMAGE
from trl_jax.core.outputs import Packed, PrecomputedFeatures
from trl_jax.data.images import feature_index, join_images
from trl_jax.hub.config import read_native_config
from trl_jax.hub.modules import in_order, modules_of
from trl_jax.hub.native_backend import load_native
from trl_jax.hub.vision import vision_families
from trl_jax.mesh.mesh import layers_gathered_by
from trl_jax.models.model import merge
from trl_jax.training.features import tower_of

torch = pytest.importorskip("torch")
ROWS = ((), (0,), (2, 0, 1))  # indices of the images of each text


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return built(CASES[request.param], tmp_path_factory.mktemp(request.param))


def built(case, folder):
    """(case, transformers' model, its folder, trl_jax's config, parameters, backend)"""
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, case.config_class)(**case.values)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # initially, biases, norms and learned vectors are zeros and ones
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.02))
        for name, buffer in model.named_buffers():
            if name.rpartition(".")[2] in case.buffers:
                buffer.fill_(case.buffers[name.rpartition(".")[2]])
    model.save_pretrained(folder)
    native = read_native_config(folder, "lm").with_images()
    return case, model, folder, native, *load_native(native, dtype="float32", seed=0)


def texts(case):
    """Token ids of each text, and the indices of its images."""
    generator, found = np.random.default_rng(0), []
    for numbers in ROWS:
        ids = generator.integers(7, 60, 4).tolist()
        for number in numbers:
            ids += [IMAGE] * case.tokens[number] + generator.integers(7, 60, 3).tolist()
        found.append((np.array(ids), numbers))
    return found


def of_transformers(case, model, rows, dtype=torch.float32):
    """The logits of each text; leaves the gradients of the mean of their sines in the model."""
    found = []
    model.zero_grad()
    for ids, numbers in rows:
        joined = {name: [case.processed[number][name] for number in numbers] for name in case.processed[0]}
        given = {name: torch.tensor(np.concatenate(arrays)) for name, arrays in joined.items() if arrays}
        options = case.options(ids[None]) if case.options and numbers else {}
        given |= {name: torch.tensor(array) for name, array in options.items()}
        given = {name: one.to(dtype) if one.is_floating_point() else one for name, one in given.items()}
        found.append(model(input_ids=torch.tensor(ids[None]), **given).logits[0])
    torch.sin(torch.cat(found)).mean().backward()
    return [logits.detach().float().numpy() for logits in found]


def gradients(model, folder):
    """The gradients of transformers' model by name on disk; buffers have none."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        model.save_pretrained(folder)
        for name, tensor in tensors.items():
            tensor.copy_(values[name])
    return load_file(folder / "model.safetensors")


def images_of(native, case, numbers, model):
    joined = {name: [case.processed[number][name] for number in numbers] for name in case.processed[0]}
    return native.vision.patches({name: np.concatenate(arrays) for name, arrays in joined.items()}, model.config)


def positions_of(native, ids, images):
    if native.vision.positions is None:
        return np.arange(len(ids))
    return native.vision.positions(ids, IMAGE, images)


def padded(native, case, model, rows):
    """Tokens `[R, T]`, positions, indices of all tokens, and images of a single shard."""
    length = max(len(ids) for ids, _ in rows)
    tokens, at, positions, every = np.zeros((len(rows), length), np.int32), [], [], []
    first = 0
    for row, (ids, numbers) in enumerate(rows):
        images = images_of(native, case, numbers, model) if numbers else []
        tokens[row, : len(ids)] = ids
        at.append(np.pad(feature_index(ids, IMAGE, images, first), (0, length - len(ids)), constant_values=-1))
        place = positions_of(native, ids, images)
        positions.append(np.pad(place, [(0, length - len(ids))] + [(0, 0)] * (place.ndim - 1)))
        first += sum(len(image.groups) for image in images)
        every += images
    reads = np.concatenate([row * length + np.arange(len(ids)) for row, (ids, _) in enumerate(rows)])
    return tokens, np.stack(positions), reads, join_images([every], np.stack(at))


def packed(native, case, model, rows):
    """The same texts packed into one row, padded to a multiple of 64 tokens, with what each token attends to."""
    tokens, positions, reads, images = padded(native, case, model, rows)
    length = -len(reads) % 64 + len(reads)

    def row(array, fill=0):
        flat = array.reshape(-1, *array.shape[2:])[reads]
        return np.pad(flat, [(0, length - len(reads))] + [(0, 0)] * (flat.ndim - 1), constant_values=fill)[None]

    first, end, start = np.full((1, length), length), np.full((1, length), length), 0
    for ids, _ in rows:
        first[0, start : start + len(ids)] = start
        end[0, start : start + len(ids)] = start + np.arange(len(ids)) + 1
        start += len(ids)
    seen = Packed(jnp.asarray(first), jnp.asarray(end), jnp.full((1, length), max(len(ids) for ids, _ in rows)))
    return row(tokens), row(positions), np.arange(len(reads)), images._replace(at=row(images.at, -1)), seen


@usual("gemma3", "gemma4", "internvl", "llava_next", "mistral3", "qwen2_5_vl", "qwen3_vl", "smolvlm")
def test_logits_gradients_and_files_are_those_of_transformers(case, tmp_path):
    case, model, folder, native, params, backend = case
    rows = texts(case)
    theirs = np.concatenate(of_transformers(case, model, rows))
    tokens, positions, reads, images = padded(native, case, model, rows)

    def logits(params):
        return merge(backend.graph, params)(tokens, positions, reads, images=jax.tree.map(jnp.asarray, images))

    ours = jax.jit(logits)(params)
    assert np.std(theirs) > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    in_torch = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, values in backend.named(params):
        np.testing.assert_array_equal(values, in_torch[name].detach().numpy(), name)
    grads = jax.jit(jax.grad(lambda params: jnp.sin(logits(params)).mean()))(params)
    wanted = gradients(model, tmp_path / "gradients")
    found = dict(backend.on_disk(grads))
    towers = [name for name in found if name not in wanted]
    assert not towers
    for name, gradient in found.items():
        scale = max(np.abs(wanted[name]).max(), 1e-5)
        np.testing.assert_allclose(gradient / scale, wanted[name] / scale, atol=1e-4, err_msg=name)
    unread = [name for name in wanted if name not in found]
    assert all(not wanted[name].any() for name in unread)
    backend.save(tmp_path / "saved", params, model.config)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)


@usual("gemma4", "llava_next", "qwen3_vl")
def test_bfloat16_is_no_farther_from_float32_than_transformers(case):
    case, model, _, native, params, backend = case
    rows = texts(case)
    exact = np.concatenate(of_transformers(case, model, rows))
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    theirs = np.concatenate(of_transformers(case, rounded, rows, torch.bfloat16))
    tokens, positions, reads, images = padded(native, case, model, rows)
    ours = jax.jit(
        lambda params: merge(backend.graph, params)(
            tokens, positions, reads, images=jax.tree.map(jnp.asarray, images), dtype=jnp.bfloat16
        )
    )(params)
    own, their = (np.sqrt(np.mean((logits - exact) ** 2)) for logits in (np.asarray(ours, np.float32), theirs))
    assert 0 < own <= their


@usual("qwen2_5_vl")
def test_packed_texts_and_padded_ones_have_the_same_logits_and_gradients(case):
    case, model, _, native, params, backend = case
    rows = texts(case)
    tokens, positions, reads, images = padded(native, case, model, rows)
    given = packed(native, case, model, rows)

    def logits_and_gradients(tokens, positions, reads, images, packed=None):
        def loss(params):
            images_of_pass = jax.tree.map(jnp.asarray, images)
            module = merge(backend.graph, params)
            logits = module(tokens, positions, reads, images=images_of_pass, packed=packed)
            return jnp.sin(logits).mean(), logits

        (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return logits, gradients

    apart, gradients_apart = logits_and_gradients(tokens, positions, reads, images)
    together, gradients_together = logits_and_gradients(*given)
    np.testing.assert_allclose(together, apart, atol=1e-5)
    for path, wanted in gradients_apart.items():
        scale = max(np.abs(wanted).max(), 1e-5)
        np.testing.assert_allclose(gradients_together[path] / scale, wanted / scale, atol=1e-4, err_msg=path)


def test_without_images_the_tower_is_carried_along_unread(case, tmp_path):
    _, model, folder, native, *_ = case
    params, backend = load_native(read_native_config(folder, "lm"), dtype="float32", seed=0)
    assert not any(path.startswith("vision.") for path in params)
    backend.save(tmp_path / "saved", params, model.config)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)


@usual("qwen2_5_vl")
def test_images_of_two_shards_have_the_same_logits(case):
    case, model, _, native, params, backend = case
    rows = texts(case)[1:]
    tokens, positions, reads, images = padded(native, case, model, rows)
    parts = [images_of(native, case, numbers, model) for _, numbers in rows]
    at = np.full_like(tokens, -1)
    for row, ((ids, _), own) in enumerate(zip(rows, parts, strict=True)):
        at[row, : len(ids)] = feature_index(ids, IMAGE, own)
    module = merge(backend.graph, params)
    whole, divided = (
        module(tokens, positions, reads, images=jax.tree.map(jnp.asarray, each))
        for each in (images, join_images(parts, at))
    )
    np.testing.assert_allclose(divided, whole, atol=1e-5)


@usual("llava_next")
def test_features_that_are_computed_before_give_the_same_logits(case):
    case, model, _, native, params, backend = case
    rows, tower = texts(case)[1:], tower_of(backend, params, "float32")
    tokens, positions, reads, images = padded(native, case, model, rows)
    at, every, first = np.full_like(tokens, -1), [], 0
    for row, (ids, numbers) in enumerate(rows):
        own = images_of(native, case, numbers, model)
        at[row, : len(ids)] = feature_index(ids, IMAGE, own, first)
        first += sum(len(image.groups) for image in own)
        every += [image._replace(features=(tower.features(image),)) for image in own]
    kept, module = join_images([every], at), merge(backend.graph, params)
    assert isinstance(kept, PrecomputedFeatures) and np.array_equal(kept.at, images.at)
    computed, same = (
        module(tokens, positions, reads, images=jax.tree.map(jnp.asarray, each)) for each in (images, kept)
    )
    np.testing.assert_allclose(same, computed, atol=1e-5)


def test_a_mesh_gathers_all_stacked_parameters_layer_by_layer(case):
    case, model, _, native, params, backend = case
    tokens, positions, reads, images = padded(native, case, model, texts(case))
    gathered = set()

    def gather(path, array):
        gathered.add(path)
        return array

    with layers_gathered_by(gather):
        jax.eval_shape(lambda params: merge(backend.graph, params)(tokens, positions, reads, images=images), params)
    assert {path for path in gathered if path.startswith("vision.")}
    assert gathered == {path for path, axes in backend.axes.items() if "layers" in axes}


def test_the_page_lists_all_model_types():
    page = (Path(__file__).parents[3] / "docs" / "pages" / "vision.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.split("## Models")[1].split("## ")[0].splitlines() if "|" in line]
    listed = {name.strip() for row in rows[2:] for name in row.split(",")}
    assert listed == vision_families().keys()
    assert vision_families().keys() == {name.split()[0] for name in CASES}


@pytest.mark.parametrize("name", [name for name in CASES if " " not in name])
def test_linear_maps_are_in_the_order_of_transformers(name, tmp_path):
    """PEFT initializes adapters in this order."""
    import transformers

    case = CASES[name]
    config = getattr(transformers, case.config_class)(**case.values)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    native = read_native_config(tmp_path, "lm").with_images()
    found = [one for one, module, _ in in_order(modules_of(native)) if module.kind == "linear"]
    wanted = [one for one, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    left_out = {*wanted} - {*found}  # tied heads, and layers whose output is not used
    assert found == [one for one in wanted if one not in left_out]
    assert all(one.endswith("lm_head") or ".layers.2." in one for one in left_out)
