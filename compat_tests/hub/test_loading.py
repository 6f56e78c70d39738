"""Loading checkpoints: tensor names, shards, dtypes, heads, and a single copy of the weights in memory."""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compat_tests.effort import thorough
from compat_tests.models import variants
from compat_tests.tiny import tiny_model
from trl_jax.hub import checkpoint, config, formats, pretrained
from trl_jax.hub.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl_jax.hub.families import read_arch
from trl_jax.hub.formats import CheckpointFiles
from trl_jax.mesh.mesh import owned

BIG = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 2000}


def loaded(folder, **options):
    return checkpoint.load(config.read_native_config(folder), **options)


def assert_same_params(one, other):
    assert one.keys() == other.keys()
    for path, array in one.items():
        np.testing.assert_array_equal(array, other[path], err_msg=path)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """About 6 million parameters, so that Python's own objects are small in comparison."""
    pytest.importorskip("torch")
    return tiny_model(tmp_path_factory.mktemp("big"), "llama", **BIG)


@pytest.mark.parametrize("dtype", ["float32", thorough("auto"), thorough("bfloat16")])
def test_the_host_holds_one_tensor_beside_the_weights(big, dtype, monkeypatch):
    """tracemalloc counts NumPy's allocations, i.e. what is read, but not JAX's arrays, the one copy of the weights."""
    small, _ = loaded(big, dtype=dtype, seed=0)  # not counted: allocations that happen only once
    monkeypatch.setattr(checkpoint, "SMALL", 0)
    assert_same_params(loaded(big, dtype=dtype, seed=0)[0], small)
    del small
    gc.collect()
    tracemalloc.start()
    params, _ = loaded(big, dtype=dtype, seed=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    weights = sum(array.nbytes for array in params.values())
    largest = max(4 * int(np.prod(shape)) for shape in CheckpointFiles(big).shapes.values())
    assert largest < weights / 8 and weights > 16e6
    assert largest < peak < 2 * largest, f"{peak:,} bytes for {weights:,} of weights, {largest:,} the largest"


def test_small_arrays_are_read_and_written_without_compiling(tmp_path, caplog):
    """Compiling a program for each shape would take longer than everything else in loading."""
    folder = tiny_model(tmp_path / "in", "qwen3", head_dim=22, vocab_size=530)  # shapes that no other test uses
    with jax.log_compiles():
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        model.save_pretrained(tmp_path / "out")
        compiled = [record.getMessage() for record in caplog.records if "XLA compilation" in record.getMessage()]
        assert compiled == []
        model.params["decoder.embed.weight"] + 1  # shows that compilations would be seen
    assert any("XLA compilation" in record.getMessage() for record in caplog.records)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_arrays_that_are_read_are_no_views_of_files_and_can_be_donated():
    values = np.arange(4096, dtype=np.float32)
    array = jax.block_until_ready(owned(values))
    values[0] = 7.0
    assert array[0] == 0.0
    donated = jax.jit(lambda array: array + 1.0, donate_argnums=0)(array)
    assert array.is_deleted() and donated[1] == 2.0 and values[1] == 1.0


def test_files_are_opened_anew_while_they_are_read(big, monkeypatch):
    """Pages read from a mapped file count as this process's memory until the file is closed."""
    wanted, _ = loaded(big, dtype="auto", seed=0)
    opened, really = [], formats.safe_open
    monkeypatch.setattr(formats, "safe_open", lambda *given, **how: opened.append(given) or really(*given, **how))
    monkeypatch.setattr(formats, "_MAPPED", 2**21)
    found, _ = loaded(big, dtype="auto", seed=0)
    assert_same_params(found, wanted)
    assert len(opened) > 4 and len(set(opened)) == 1


def test_tensors_are_let_go_as_soon_as_they_are_in_place(big, monkeypatch):
    """Tensors that were read do not accumulate."""
    monkeypatch.setattr(checkpoint, "SMALL", 0)
    living, most, read_at_all = set(), 0, 0

    class Counted(np.ndarray):
        def __del__(self):
            living.discard(id(self))

    def read(self, tensor):
        nonlocal most, read_at_all
        read_at_all += 1
        values = CheckpointFiles.read(self, tensor).view(Counted)
        living.add(id(values))
        most = max(most, len(living))
        return values

    monkeypatch.setattr(checkpoint, "CheckpointFiles", type("Files", (CheckpointFiles,), {"read": read}))
    loaded(big, dtype="float32", seed=0)
    # The next tensor is read before the last reference to the previous one is dropped, and JAX keeps a few alive while
    # its threads copy them.
    assert most <= 8 < read_at_all / 2


def test_nothing_is_initialized_before_it_is_read(big, monkeypatch):
    """Shapes come from an abstract model: when the first tensor is read, no parameter has been allocated."""
    monkeypatch.setattr(checkpoint.ArrayReader, "_assemble", lambda self, entry, shape, *how: (entry, shape))
    tracemalloc.start()
    params, _ = loaded(big, dtype="float32", seed=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(params) == 12 and peak < 3e6


@pytest.mark.parametrize("head", ["classifier", "causal", "base"])
def test_shards_hold_what_one_file_holds(head, checkpoint):
    pytest.importorskip("torch")
    whole, _ = loaded(checkpoint("qwen3", head=head), dtype="float32", seed=3)
    pieces, _ = loaded(checkpoint("qwen3", head=head, shards=True), dtype="float32", seed=3)
    assert_same_params(whole, pieces)


def test_the_seed_draws_the_head_and_nothing_else(checkpoint):
    pytest.importorskip("torch")
    folder = checkpoint("llama", head="base")
    one, two = (loaded(folder, dtype="float32", seed=seed)[0] for seed in (1, 2))
    assert not np.array_equal(one.pop("score.weight"), two.pop("score.weight"))
    assert_same_params(one, two)


@pytest.mark.parametrize("head", ["classifier", "base"])
def test_a_head_of_another_name_is_the_one_tensor_left_over(head, checkpoint, tmp_path, caplog):
    folder = shutil.copytree(checkpoint("llama", head=head), tmp_path / "there")
    tensors = load_file(folder / "model.safetensors")
    value = tensors.pop("score.weight", np.full((1, 64), 0.25, np.float32))
    save_file(tensors | {"v_head.summary.weight": value}, folder / "model.safetensors")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    np.testing.assert_array_equal(model.params["score.weight"], value)
    assert "v_head.summary.weight has the shape of the score head and is loaded and saved as score." in caplog.text
    model.save_pretrained(tmp_path / "back")
    np.testing.assert_array_equal(load_file(tmp_path / "back" / "model.safetensors")["score.weight"], value)
    save_file(tensors | {"v_head.weight": value, "q_head.weight": value}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="Unexpected: .*q_head.weight; .*v_head.weight"):
        AutoModelForSequenceClassification.from_pretrained(folder)


def test_the_head_that_is_drawn_is_torchs(checkpoint):
    """Drawn as in TRL's run: first the seed is set, then transformers creates the layer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = checkpoint("llama", head="causal")
    transformers.set_seed(42)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    ours = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32", seed=42)
    np.testing.assert_allclose(ours.params["score.weight"], theirs.score.weight.detach().numpy(), rtol=2e-7, atol=1e-9)


def test_rounding_to_bfloat16_is_torchs(checkpoint):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    folder = checkpoint("llama")
    params, _ = loaded(folder, dtype="bfloat16", seed=0)
    wanted = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].to(torch.bfloat16).float()
    assert params["decoder.embed.weight"].dtype == np.float32
    np.testing.assert_array_equal(params["decoder.embed.weight"], wanted.numpy())


def test_tensors_that_old_checkpoints_carry_are_ignored(tmp_path):
    pytest.importorskip("torch")
    from safetensors.numpy import load_file, save_file

    folder = tiny_model(tmp_path, "llama")
    wanted, _ = loaded(folder, dtype="float32", seed=0)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert_same_params(loaded(folder, dtype="float32", seed=0)[0], wanted)


def test_a_subfolder_and_a_path_object(tmp_path):
    pytest.importorskip("torch")
    folder = tiny_model(tmp_path / "nested" / "deep", "llama")
    by_name = AutoModelForSequenceClassification.from_pretrained(str(folder))
    by_parts = AutoModelForSequenceClassification.from_pretrained(tmp_path / "nested", subfolder="deep")
    assert_same_params(by_name.params, by_parts.params)
    with pytest.raises(FileNotFoundError, match="has no subfolder 'shallow'"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path, subfolder="shallow")


def test_scores_of_rows_without_a_pad_token(checkpoint):
    pytest.importorskip("torch")
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint("llama"))
    ids, mask = variants.rows()
    wanted = model(ids[:1]).logits
    model.config.pad_token_id = None
    np.testing.assert_array_equal(model(ids[:1]).logits, wanted)
    with pytest.raises(ValueError, match="Cannot score 7 rows without config.pad_token_id"):
        model(ids, mask)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([1, 2], r"input_ids must be integers \[rows, T\], got int64 \[2\]"),
        ([[0.5]], "input_ids must be integers"),
        ([[1, 520]], "input_ids must be between 0 and 519, got ids from 1 to 520"),
        ([[-1, 5]], "got ids from -1 to 5"),
        (np.zeros((2, 0), np.int32), r"input_ids is \[2, 0\], but each row needs at least one token"),
    ],
)
def test_ids_that_cannot_be_scored(ids, text, checkpoint):
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match=text):
        AutoModelForSequenceClassification.from_pretrained(checkpoint("llama"))(ids)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"num_labels": 2}, ValueError, "num_labels is 2, but reward models require `num_labels=1`"),
        ({"dtype": "int8"}, ValueError, "dtype must be one of float32, bfloat16, float16, auto, got 'int8'"),
        ({"attn_implementation": "magic"}, ValueError, "attn_implementation must be one of .* got 'magic'"),
        ({"color": 1, "shape": 2}, TypeError, "does not accept color, shape. It accepts num_labels, dtype"),
    ],
)
def test_arguments_are_judged_by_name(how, error, text, checkpoint):
    pytest.importorskip("torch")
    with pytest.raises(error, match=text):
        AutoModelForSequenceClassification.from_pretrained(checkpoint("llama"), **how)


def test_the_name_of_a_kernel_of_torchs_has_no_effect(checkpoint):
    pytest.importorskip("torch")
    folder = checkpoint("llama")
    for attention in ("kernels-community/vllm-flash-attn3", "owner/name@main:attend"):
        AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation=attention)
    with pytest.raises(ValueError, match="attn_implementation must be one of .* got 'owner/'"):
        AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="owner/")


@pytest.mark.parametrize(
    ("key", "value"), [("device_map", "auto"), ("low_cpu_mem_usage", True), ("trust_remote_code", True)]
)
def test_arguments_without_effect_are_warned_of(key, value, checkpoint, caplog):
    pytest.importorskip("torch")
    AutoModelForSequenceClassification.from_pretrained(checkpoint("llama"), **{key: value})
    assert f"{key} has no effect" in caplog.text


def test_what_a_tokenizer_returns_can_be_handed_over(checkpoint):
    pytest.importorskip("torch")
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint("llama"))
    ids, mask = variants.rows()
    encoded = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    np.testing.assert_array_equal(model(**encoded).logits, model(ids, mask).logits)


def test_a_script_in_torch_computes_logits_and_a_loss(checkpoint):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = checkpoint("llama", head="causal")
    ids = torch.as_tensor(variants.rows()[0]).long()
    labels = torch.where(torch.arange(ids.shape[1]) < 3, -100, ids)
    with torch.no_grad():
        wanted = transformers.AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids, labels=labels)
    found = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids, labels=labels)
    assert found[0] is found.loss and found["logits"] is found.logits
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.logits.argmax(-1), wanted.logits.argmax(-1))
    with pytest.raises(ValueError, match="labels must be the ids that a language model predicts"):
        AutoModelForCausalLM.from_pretrained(folder)(ids, labels=labels[:1])


def test_scores_are_computed_in_float32_wherever_they_are(checkpoint, monkeypatch):
    """On the CPU all precisions are equal, so the test looks at the setting under which the program is traced."""
    pytest.importorskip("torch")
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint("llama"))
    seen, scores = [], pretrained.compiled_scores

    def spied(*given):
        seen.append(jax.config.jax_default_matmul_precision)
        return scores(*given)

    monkeypatch.setattr(pretrained, "compiled_scores", spied)
    model([[5, 6]])
    assert seen == ["float32"] and jax.config.jax_default_matmul_precision is None


def test_whether_the_head_is_tied_is_what_the_family_and_then_the_files_say(checkpoint, monkeypatch, caplog):
    """If the config does not say, the family's default applies, and then the files decide."""
    pytest.importorskip("torch")

    def read_as_tied(raw, source):
        family, arch = read_arch(raw, source)
        return family, replace(arch, tied_embeddings=True)

    monkeypatch.setattr(config, "read_arch", read_as_tied)
    folder = checkpoint("llama", head="causal")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert "tie_word_embeddings=true, but lm_head.weight differs from model.embed_tokens.weight" in caplog.text
    np.testing.assert_array_equal(model.params["lm_head.weight"], CheckpointFiles(folder).read("lm_head.weight"))


def test_the_number_of_parameters_is_that_of_the_files(checkpoint):
    pytest.importorskip("torch")
    folder = checkpoint("llama")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    sizes = [int(np.prod(shape)) for shape in CheckpointFiles(folder).shapes.values()]
    assert model.num_parameters() == sum(sizes)
    embedding = json.loads((folder / "config.json").read_text())["vocab_size"] * 64
    assert model.num_parameters(exclude_embeddings=True) == sum(sizes) - embedding


def test_keys_seen_in_real_configs_are_understood(checkpoint, tmp_path):
    """Keys of SmolLM2, of Qwen2.5 and of transformers itself; values that would change the computation are refused."""
    folder = shutil.copytree(checkpoint(), tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    harmless = {"rope_interleaved": False, "use_mrope": False, "is_llama_config": True, "unk_token_id": 0}
    harmless |= {"_attn_implementation_autoset": True, "_commit_hash": None, "max_sequence_length": 2048}
    (folder / "config.json").write_text(json.dumps(raw | harmless))
    AutoModelForSequenceClassification.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw | {"rope_interleaved": True}))
    with pytest.raises(ValueError, match="rope_interleaved must be False.*, got True"):
        AutoModelForSequenceClassification.from_pretrained(folder)
