"""Plans: the training step from a config.json alone, the compiler's figures, and suggestions."""

import importlib.util
import json
import shutil
from dataclasses import replace

import jax
import pytest
from datasets import Dataset

from compat_tests.effort import only_thorough
from compat_tests.plan.planned import LORA, NESTED, SIDES, alike, with_figures
from trl_jax.hub.auto import find_checkpoint
from trl_jax.plan import trace
from trl_jax.plan.chips import CHIPS, Topology, topology
from trl_jax.plan.compile import devices, parse_memory_error
from trl_jax.plan.plan import Run, plan, suggestions_for
from trl_jax.scripts.plan import suggestions_text, text
from trl_jax.trainer.reward_config import RewardConfig

SHAPE = {"per_device_train_batch_size": 4, "max_length": 96, "bf16": False, "report_to": "none"}


@pytest.fixture
def bare(checkpoint, tmp_path):
    """bare(model_type) -> a run of a checkpoint folder that contains only config.json."""

    def find(model_type="llama", *, dtype="float32", **facts):
        shutil.copy(checkpoint(model_type, **facts) / "config.json", tmp_path / "config.json")
        return Run(find_checkpoint(str(tmp_path), dtype=dtype))

    return find


def config(tmp_path, **changes):
    return RewardConfig(str(tmp_path / "out"), **(SHAPE | changes))


@only_thorough
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param({"dtype": "bfloat16"}, {"gradient_accumulation_steps": 2}, id="whole", marks=only_thorough),
        pytest.param({"head": "causal"}, {"adapter": LORA, "quantization": NESTED}, id="nf4"),
        pytest.param(
            {"head": "causal", "dtype": "bfloat16"},
            {"adapter": LORA, "neftune_noise_alpha": 5.0, "bf16": True},
            id="halves",
            marks=only_thorough,
        ),
    ],
)
def test_the_programs_are_those_of_a_trainer_with_weights(checkpoint, tmp_path, kind, how):
    found = alike(checkpoint(**kind), tmp_path, **({"bf16": False} | how))
    assert (found.trained < found.parameters / 4) == ("adapter" in how)
    assert f"({found.trained:,} trained)" in text(found) or "adapter" not in how
    assert "Evaluation: a pass of" in text(found) and "in memory: peak" in text(found)


def test_arguments_and_compiler_agree(bare, tmp_path):
    args = config(tmp_path, batch_layout="padded", remat_policy="nothing_saveable")
    found = plan(bare(), args, topology("cpu:1"))
    own, told = found.memory, found.compiled
    assert own.parameters == 4 * found.parameters and own.moments == 8 * found.parameters + 4
    held = own.parameters + own.moments  # without the parts of the batch that a decoder does not read
    assert held < told.arguments < held + own.batch + 64  # plus the learning rate
    assert 0 <= found.peak - told.arguments - told.allocated < 4096 and found.fits is None and found.mesh == {}
    arch = find_checkpoint(str(tmp_path)).native.arch
    matrices = found.parameters - arch.vocab_size * arch.hidden_size
    attended = 4 * 2 * 96 * 96 * arch.num_layers * arch.num_heads * arch.head_dim
    flops = 8 * 4 * 2 * 96 * matrices + 16 * attended  # forward, backward, and forward again
    assert told.cost.unknown == 0 and 0.8 < told.cost.flops / flops < 1.02  # a layer's last product is not recomputed
    json.dumps(found.as_dict())
    assert "simulated devices have no memory limit" in text(found)
    assert not (tmp_path / "out").exists()


def test_streams_are_planned_as_worst_as_can_be(bare, tmp_path):
    found = plan(bare(), config(tmp_path), topology("cpu:1"), compiles=False)
    assert found.layout == "shared" and found.one[:3] == (1, 1, 4 * 2 * 96) and found.compiled is None
    assert "nothing was compiled" in str(found.why) and found.tokens == 4 * 2 * 96


def test_without_a_compiler_only_arguments_are_counted(bare, tmp_path):
    found = plan(bare(), config(tmp_path, mesh_shape="fsdp:8"), topology("h100:8"))
    whole = plan(bare(), config(tmp_path), topology("h100:8"))
    assert found.compiled is None and found.fits is None and found.layout == "shared" and found.mesh == {"fsdp": 8}
    assert found.memory.parameters < whole.memory.parameters / 4 and whole.memory.parameters == 4 * whole.parameters
    assert "Whether it fits is unknown: weights" in text(found) and "no GPU is needed" in text(found)
    too_small = plan(bare(), config(tmp_path), small_chip(whole.memory.parameters))
    assert too_small.fits is False and "It does not fit: weights, optimizer state and batch alone" in text(too_small)


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [("bert", "packed"), ("deberta-v2", "padded"), ("qwen3_moe", "shared"), ("gpt2", "shared"), ("phimoe", "packed")],
)
def test_other_families_are_planned(bare, tmp_path, model_type, layout):
    found = plan(bare(model_type), config(tmp_path), topology("cpu:1"), compiles=False)
    rows = 4 * 2 * 96
    assert found.layout == layout and found.one.tokens == rows and found.memory.parameters == 4 * found.parameters


@pytest.mark.parametrize(
    ("model_type", "place", "said", "attention"),
    [
        ("llama", "cpu:1", {}, "plain XLA, along packed rows, in blocks of 64 queries"),
        ("llama", "cpu:1", {"batch_layout": "padded"}, "plain XLA, per row, in blocks of 256 queries"),
        ("llama", "v5e:1x1", {}, "splash attention, along packed rows, in blocks of 512 queries"),
        ("llama", "h100:1", {"bf16": True}, "cuDNN flash attention"),
        ("llama", "h100:1", {}, "plain XLA, per row, in blocks of 256 queries, text by text"),
        ("bert", "h100:1", {"bf16": True}, "plain XLA, per row, in blocks of 256 queries"),
        ("gpt_oss", "h100:1", {"bf16": True}, "plain XLA, per row, in blocks of 256 queries"),  # because of its sinks
    ],
)
def test_what_computes_attention_is_told(bare, tmp_path, model_type, place, said, attention):
    found = plan(bare(model_type), config(tmp_path, **said), topology(place), compiles=False)
    assert found.attention.startswith(attention)


def test_real_rows_tell_the_lengths(bare, tmp_path):
    lengths = [20, 30, 90, 40, 25, 50, 31, 33]
    rows = Dataset.from_dict({f"{side}_ids": [[id] * n for n in lengths] for side, id in SIDES.items()})
    args = config(tmp_path, train_sampling_strategy="sequential", batch_layout="padded")
    rows = trace.Rows(rows, None, trace.PlaceholderTokenizer())
    found = plan(replace(bare(), rows=rows), args, topology("h100:1"))
    assert found.lengths == {64: 1, 96: 1} and found.tokens == sum(lengths) and found.one.length == 96


def test_what_an_evaluation_needs_counts_and_has_suggestions_of_its_own(bare, tmp_path):
    args = config(tmp_path, per_device_train_batch_size=1, per_device_eval_batch_size=64, eval_strategy="epoch")
    run, whole = bare(), plan(bare(), args, small_chip(10**12))
    assert plan(run, config(tmp_path, per_device_train_batch_size=1), small_chip(10**12)).phases == whole.phases[:1]
    whole = with_figures(whole, args)
    step, evaluation = whole.phases
    assert step.peak < evaluation.peak == whole.peak and whole.fits
    place = small_chip((step.peak + evaluation.peak) // 2)

    def planned(changed):
        return with_figures(plan(run, changed, place), changed)

    found = planned(args)
    assert found.fits is False and "It does not fit in evaluation: " in text(found)
    suggestions = list(suggestions_for(args, found, planned))
    [suggestion] = [suggestion for suggestion in suggestions if "per_device_eval_batch_size" in suggestion.settings]
    assert suggestion.plan.fits and suggestion.settings["per_device_eval_batch_size"] < 64
    changed = {key for one in suggestions for key in one.settings}
    assert not {"gradient_checkpointing", "per_device_train_batch_size"} & changed


def test_rows_without_a_test_split_are_refused_as_in_training(bare, tmp_path):
    pairs = Dataset.from_dict({f"{side}_ids": [[id] * 9] * 8 for side, id in SIDES.items()})
    run = replace(bare(), rows=trace.Rows(pairs, None, trace.PlaceholderTokenizer()))
    with pytest.raises(ValueError, match="eval_strategy='epoch' needs an eval_dataset"):
        plan(run, config(tmp_path, eval_strategy="epoch"), topology("h100:1"))


def test_what_does_not_train_has_no_moments(bare, tmp_path):
    how = {"head": "causal", "dtype": "bfloat16"}
    whole, halves, quarter = (
        plan(replace(bare(**how), **held), config(tmp_path), topology("h100:1"))
        for held in ({}, {"adapter": LORA}, {"adapter": LORA, "quantization": NESTED})
    )
    own = 4 * halves.trained
    assert halves.memory.moments == 2 * own + 4
    base = 2 * (whole.parameters - 64)  # the head is trained
    assert base <= halves.memory.parameters - own < 1.05 * base
    assert quarter.memory.moments == halves.memory.moments
    assert quarter.memory.parameters < 0.75 * halves.memory.parameters


def test_an_adapter_s_base_must_say_how_it_is_stored(bare, tmp_path):
    run = replace(bare(dtype="auto"), adapter=LORA)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "dtype"}))
    run = replace(run, checkpoint=find_checkpoint(str(tmp_path), dtype="auto"))
    with pytest.raises(ValueError, match="does not say which dtype the weights are stored in.*--dtype bfloat16"):
        plan(run, config(tmp_path), topology("h100:1"))


def test_a_text_needs_a_bound(bare, tmp_path):
    with pytest.raises(
        ValueError, match="max_length=None leaves the length of texts open: pass --max_length, or --dataset_name"
    ):
        plan(bare(), config(tmp_path, max_length=None), topology("cpu:1"))


def test_an_exported_program_has_no_outline(bare, tmp_path):
    exported = replace(bare(), checkpoint=replace(bare().checkpoint, native=None))
    said = "'llama' runs as an exported program, which cannot be compiled .* Plan with a native model type"
    with pytest.raises(ValueError, match=said):
        plan(exported, config(tmp_path), topology("cpu:1"))


@pytest.mark.parametrize(
    ("error", "found"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 31.50G of 15.75G hbm. E", (31.5, 15.75)),
        ("memory required for HLO temporaries (82.38G) exceeds available HBM (15.75G).", (82.38, 15.75)),
    ],
)
def test_a_refusal_of_the_compiler_says_what_was_wanted(error, found):
    assert parse_memory_error(error) == tuple(int(gib * 2**30) for gib in found)
    assert parse_memory_error("INTERNAL: Mosaic failed") is None


def test_fewer_devices_than_are_simulated_are_refused():
    with pytest.raises(
        ValueError, match=r"cpu:64: JAX has already started with \d+ CPU device.s.. Call trl_jax.*prepare"
    ):
        devices(topology("cpu:64"))


def small_chip(size):
    return Topology("h100:4", "h100", (4,), CHIPS["h100"]._replace(memory=size))


@pytest.mark.parametrize(
    ("share", "wanted"),
    [
        (0.9, ["gradient_checkpointing", "bf16", "mesh_shape", "per_device_train_batch_size", "max_length"]),
        (0.02, ["gradient_checkpointing", "bf16", "mesh_shape", "per_device_train_batch_size", "max_length", "all"]),
    ],
)
def test_suggestions_are_planned_one_by_one_and_then_together(bare, tmp_path, share, wanted):
    args = config(tmp_path, gradient_checkpointing=False, max_length=512)
    checkpoint = bare()
    whole = with_figures(plan(checkpoint, args, small_chip(1)), args).peak
    place = small_chip(share * whole)

    def planned(changed):
        return with_figures(plan(checkpoint, changed, place), changed)

    found = list(suggestions_for(args, planned(args), planned))
    assert [next(iter(suggestion.settings)) for suggestion in found[: len(wanted)]][:5] == wanted[:5]
    assert len(found) == len(wanted)
    assert all(suggestion.plan.peak < whole for suggestion in found)
    # The arguments that were passed are unchanged.
    assert args.gradient_checkpointing is False and args.max_length == 512
    if "all" in wanted:
        assert found[-1].plan.peak < min(suggestion.plan.peak for suggestion in found[:-1])
        assert found[-1].settings == {key: value for one in found[:-1] for key, value in one.settings.items()}
    else:
        assert any(suggestion.plan.fits for suggestion in found)
    assert "--gradient_checkpointing True" in suggestions_text(found[0])


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed; trl_jax[tpu] has it")
def test_a_tpu_that_is_not_there(bare, tmp_path):
    found = plan(bare(hidden_size=128), config(tmp_path, bf16=True), topology("v6e:1x1"))
    assert found.fits and found.layout == "shared" and found.compiled.cost.unknown == 0
    assert found.compiled.cost.flops > 6 * found.tokens * found.parameters / 2
    assert found.bound.step > 0 and "a lower bound, not a forecast" in text(found)
    with pytest.raises(ValueError, match="--topology v6e:3x5: the TPU compiler does not know this shape"):
        devices(topology("v6e:3x5"))


def test_libtpu_is_named_where_it_is_missing(bare, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *at: None if name == "libtpu" else find(name, *at))
    found = plan(bare(), config(tmp_path), topology("v5e:2x2"))
    assert found.compiled is None and 'pip install "trl_jax[tpu]"' in text(found)
    assert jax.default_backend() == "cpu"
