"""Generation on meshes of simulated CPU devices, with completions divided over devices: the same as on one device."""

from __future__ import annotations

import json
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import pytest
from datasets import Dataset

from compat_tests.effort import only_thorough, thorough
from compat_tests.parity.grpo_cases import prompt_rows
from compat_tests.parity.reference import BASE
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.generation import generator
from trl_jax.generation import weights as generation_weights
from trl_jax.generation.decode import next_tokens
from trl_jax.generation.generator import Lengths, Limit, cache_bytes, device_bytes
from trl_jax.generation.reuse import TurnCache
from trl_jax.generation.weights import Weights, shard_for_generation
from trl_jax.hub.auto import AutoModelForCausalLM
from trl_jax.hub.generate import complete
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.hub.quantization import BitsAndBytesConfig
from trl_jax.scripts import generate
from trl_jax.trainer.grpo_config import GRPOConfig
from trl_jax.trainer.grpo_trainer import GRPOTrainer

MESHES = ("data:8", "fsdp:8", "data:2,fsdp:2,tensor:2", "tensor:2,data:4")
ENDS = list(range(30, 44))
FAMILIES = {
    "llama": {}, "gemma2": {"sliding_window": 6}, "qwen3_moe": {}, "deepseek_v3": {}, "lfm2": {}, "qwen3_next": {},
    "nemotron_h": {}, "gpt_oss": {}, "gemma4_text": {"num_hidden_layers": 6},
}  # fmt: skip


@pytest.fixture(scope="module")
def load(checkpoint):
    def loaded(mesh=None, model_type="llama", layers=2):
        facts = {"num_hidden_layers": layers} | FAMILIES[model_type]
        return AutoModelForCausalLM.from_pretrained(checkpoint(model_type, head="causal", **facts), mesh_shape=mesh)

    return loaded


@pytest.fixture
def gathers(monkeypatch):
    """has(memory): pretend that a device has this much memory for gathering all parameters at once."""

    def has(memory):
        monkeypatch.setattr(generation_weights, "device_memory", lambda: memory)

    return has


def drawn(count, longest=30):
    dice = np.random.default_rng(0)
    return [dice.integers(5, 60, length).tolist() for length in dice.integers(1, longest, count)]


@only_thorough
@pytest.mark.parametrize("memory", [None, 1])  # all at once, see the completions of a prompt below
@pytest.mark.parametrize("mesh", MESHES)
def test_each_device_writes_its_own(mesh, memory, load, gathers):
    """Nine prompts, six at a time: some devices get more, and waiting prompts take the slots that become free."""
    gathers(memory)
    options = {"seed": 3, "do_sample": True, "max_new_tokens": 20, "eos_token_id": ENDS, "batch_size": 6}
    done, wanted = (load(where).generate_batch(drawn(9), **options) for where in (mesh, None))
    assert len({len(one.generated_tokens) for one in wanted.values()}) > 3
    for name, one in wanted.items():
        assert done[name].generated_tokens == one.generated_tokens
        np.testing.assert_allclose(done[name].logprobs, one.logprobs, atol=1e-5)


def test_a_few_at_a_time(load, monkeypatch):
    """The limit is per device: each of four groups of devices has a prompt with two completions."""
    sizes, advance = set(), generator.next_tokens

    def next_tokens_seen(*given, **options):
        found = advance(*given, **options)
        sizes.add((found[0].tokens.shape, device_bytes(found[0].cache.parts)))
        return found

    monkeypatch.setattr(generator, "next_tokens", next_tokens_seen)
    model = load("data:2,fsdp:2,tensor:2", layers=1)
    options = {"max_new_tokens": 20, "do_sample": True, "eos_token_id": ENDS, "pad_token_id": 0}

    def completed(limit):
        return complete(model, drawn(9), options, group=2, stream=TorchGenerator(1), logps=False, limit=limit)

    whole = completed(Limit())
    sizes.clear()
    few = completed(Limit(2))
    np.testing.assert_array_equal(few.tokens, whole.tokens)
    lengths = Lengths(32, 32, 64)
    assert ((8, 32), cache_bytes(Weights.of(model.graph, model.arrays), 1, 2, lengths)) in sizes


@pytest.mark.parametrize(
    ("model_type", "mesh"),
    [("llama", "data:2,fsdp:2,tensor:2"), *[thorough(kind, "fsdp:4,tensor:2") for kind in list(FAMILIES)[1:]]],
)
def test_turns_reuse_the_cache_of_their_device(model_type, mesh, load, monkeypatch):
    """Some conversations end after the first turn, so the devices have different numbers of texts in the second."""
    begin, reused, found = TurnCache.begin, [], []

    def begun(turns, *given):
        reused.append(begin(turns, *given))
        return reused[-1]

    monkeypatch.setattr(TurnCache, "begin", begun)
    options = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": ENDS, "pad_token_id": 0}
    for where, turns in ((None, None), (mesh, TurnCache())):
        model, stream = load(where, model_type, layers=1 if model_type == "llama" else 2), TorchGenerator(1)
        texts, group = [row + row + [7] * 9 for row in drawn(6)], 4
        for _ in range(2):
            out = complete(model, texts, options, group=group, stream=stream, turns=turns)
            own = [tokens[:length].tolist() for tokens, length in zip(out.tokens, out.lengths, strict=True)]
            found.append((own, np.concatenate([logps[: len(ids)] for ids, logps in zip(own, out.logps, strict=True)])))
            texts = [texts[row // group] + ids + [8] for row, ids in enumerate(own) if row % 5]
            group = 1
    assert [turn is not None for turn in reused] == [False, True]
    assert len({*reused[1].shard_of}) > 1
    for (tokens, logps), (others, other_logps) in zip(found[:2], found[2:], strict=True):
        assert tokens == others
        np.testing.assert_allclose(other_logps, logps, atol=1e-5)


@only_thorough
@pytest.mark.parametrize("model_type", list(FAMILIES)[1:])
def test_every_kind_of_cache_is_divided(model_type, load, gathers):
    options = {"seed": 3, "do_sample": True, "max_new_tokens": 24, "eos_token_id": ENDS, "batch_size": 6}
    wanted = load(model_type=model_type).generate_batch(drawn(9), **options)
    for memory in (None, 1):
        gathers(memory)
        done = load("data:2,fsdp:2,tensor:2", model_type).generate_batch(drawn(9), **options)
        assert [one.generated_tokens for one in done.values()] == [one.generated_tokens for one in wanted.values()]


@pytest.mark.parametrize(("prompts", "group"), [(2, 6), thorough(1, 8), thorough(3, 5)])
def test_completions_of_a_prompt_lie_on_several(prompts, group, load, monkeypatch):
    """Two prompts with six completions each make 12 rows: two on each of six devices, none on the other two. A single
    step program is enough, because keys and values have the steps' sharding from the start."""
    shapes, advance = set(), next_tokens

    def next_tokens_seen(weights, state, *rest, **options):
        shapes.add(state.tokens.sharding.shard_shape(state.tokens.shape)[0])
        return advance(weights, state, *rest, **options)

    monkeypatch.setattr(generator, "next_tokens", next_tokens_seen)
    ids = np.asarray([row[:4] for row in drawn(40) if len(row) >= 4][:prompts])
    options = {"do_sample": True, "seed": 1, "max_new_tokens": 30, "num_return_sequences": group, "pad_token_id": 0}
    before = next_tokens._cache_size()
    first = load("data:8", layers=1).generate(ids, eos_token_id=None, **options)
    assert max(shapes) == -(-prompts * group // 8) and next_tokens._cache_size() == before + 1
    np.testing.assert_array_equal(first, load("fsdp:4,tensor:2", layers=1).generate(ids, eos_token_id=None, **options))
    assert next_tokens._cache_size() == before + 2


def test_what_the_host_looks_at_stops_rows_by_their_number(load):
    """Three rows on eight devices."""
    ids = np.asarray([[5, 6], [7, 8], [9, 10]])

    def ends(seen, scores):
        assert len(seen) == 3
        return np.asarray([seen.shape[1] >= length for length in (5, 7, 9)])

    options = {"do_sample": True, "seed": 1, "max_new_tokens": 12, "eos_token_id": 1, "pad_token_id": 0}
    rows = load("data:8", layers=1).generate(ids, stopping_criteria=[ends], **options)
    assert rows.shape == (3, 9) and [int((row != 0).sum()) for row in rows] == [5, 7, 9]


def test_meshes_that_no_generation_has(load):
    with pytest.raises(ValueError, match="mesh_shape must not have a sequence axis outside of training"):
        load("data:4,sequence:2")
    with pytest.raises(ValueError, match="tensor=8 does not divide the"):
        load("tensor:8")
    with pytest.raises(ValueError, match="mesh_shape asks for data 3 = 3 devices, but there are 8"):
        load("data:3")


def test_the_command_writes_the_same_file(checkpoint, tmp_path, capsys):
    prompts, folder = tmp_path / "prompts.jsonl", str(checkpoint("llama", head="causal", num_hidden_layers=1))
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one two", "three", "four five six")))
    written = []
    for mesh in (None, "data:4,tensor:2"):
        out = str(tmp_path / f"{mesh}.jsonl")
        fields = {"do_sample": True, "max_new_tokens": 6}
        generate.main(generate.GenerateArguments(folder, str(prompts), out, mesh_shape=mesh, fields=fields))
        assert ("Pass --mesh_shape data:8 to use all of them." in capsys.readouterr().err) == (mesh is None)
        written.append(Path(out).read_text())
    assert written[0] == written[1] and written[0].count('"completion"') == 3


@only_thorough
@pytest.mark.parametrize("few_bits", [False, True])
def test_adapters_and_few_bits_write_the_same_whole_or_gathered(few_bits, checkpoint, tmp_path, gathers):
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    folder, written = str(checkpoint("llama", head="causal", **wide)), []
    quantization = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)} if few_bits else None
    sizes = {"max_steps": 2, "per_device_train_batch_size": 2, "num_generations": 4, "max_completion_length": 8}

    def rewarded(completion_ids, **columns):
        written[-1].append([list(ids) for ids in completion_ids])
        return [float(len(set(ids))) for ids in completion_ids]

    for mesh, memory in (("data:8", None), ("fsdp:8", None), ("fsdp:8", 1)):
        gathers(memory)
        written.append([])
        options = BASE | sizes | {"mesh_shape": mesh, "model_init_kwargs": quantization, "learning_rate": 1e-2}
        args = GRPOConfig(str(tmp_path / f"{mesh}{memory}"), **options)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        GRPOTrainer(folder, rewarded, args, Dataset.from_list(prompt_rows(20)), peft_config=lora).train()
    assert len(written[0]) == 2 and written[0] == written[1] == written[2]


@pytest.mark.parametrize("sequence", [1, 2])
def test_all_arrays_are_of_one_mesh(sequence):
    """JAX lowers cuDNN's kernel only if all arrays have the same mesh. If training shards the sequence, that axis is
    renamed here."""
    mesh = jax.make_mesh((4 // sequence, sequence, 2), ("fsdp", "sequence", "tensor"))
    places = {"a": jax.P("fsdp"), "b": jax.P(None, "tensor"), "c": jax.P()}
    arrays = {name: jax.device_put(np.ones((8, 4)), jax.NamedSharding(mesh, place)) for name, place in places.items()}
    found, shards = shard_for_generation(arrays, 1)
    assert {array.sharding.mesh for array in found.values()} == {shards.mesh} and shards.count == 4
    assert (shards.mesh == mesh) == (sequence == 1)
    for path, array in found.items():
        mine, other = (one.addressable_shards[-1].data for one in (array, arrays[path]))
        assert mine.unsafe_buffer_pointer() == other.unsafe_buffer_pointer()
        assert array.sharding.spec == arrays[path].sharding.spec
