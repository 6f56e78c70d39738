"""Eight simulated CPU devices: the results of one device, less memory per device, and only the collectives a mesh
needs."""

from __future__ import annotations

import contextlib
import logging
import re

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset

from benchmarks.gaps import gaps
from benchmarks.mesh_runs import FACTS, PAIRS, run
from compat_tests import tiny
from compat_tests.effort import only_thorough, thorough
from compat_tests.parity.reference import BASE
from compat_tests.plan.planned import LORA, alike
from trl_jax.core.outputs import BLOCK
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.hub.quantization import BitsAndBytesConfig
from trl_jax.mesh.mesh import ShardingPlan, make_mesh, on_each_device
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.trainer.reward_trainer import RewardTrainer
from trl_jax.training import (
    layout,
    step,
)
from trl_jax.training.devices import compiler_options
from trl_jax.training.forward import Forward

ROWS = tiny.preference_rows(5 * PAIRS, margin=True)
MARKS = {"loss": 1e-5, "train_loss": 1e-5, "grad_norm": 2e-4}  # others: 2e-4
NO_GRADIENT = ("rewards", "weights", "predictions")  # may drift if a bias has no gradient: see benchmarks/gaps.py


@pytest.fixture(scope="module")
def alone(checkpoint):
    """The same run on one device, once per model and layout."""
    made = {}

    def of(model, layout):
        if (model, layout) not in made:
            made[model, layout] = run(checkpoint(model, **FACTS.get(model, {})), ROWS, "data:1", layout, **HOW[model])
        return made[model, layout]

    return of


# benchmarks/meshes.py has all of them. In bert, one weight's first gradient is as small as Adam's eps, so that its
# first step would be rounding: eps is larger there.
MESHES = "data:2,fsdp:2,tensor:2", "fsdp:2,tensor:2,sequence:2"
CASES = [
    ("llama", "shared", MESHES[0]), thorough("llama", "shared", MESHES[1]),
    ("gemma2", "padded", "data:2,sequence:4"), thorough("bert", "padded", "zero2:8"),
]  # fmt: skip
HOW = {"llama": {"accumulation": 2, "scores": False}, "gemma2": {}, "bert": {"scores": False, "adam_epsilon": 1e-6}}


@pytest.mark.parametrize(("model", "layout", "mesh"), CASES, ids=lambda part: str(part))
def test_the_numbers_of_one_device(model, layout, mesh, checkpoint, alone):
    wanted = alone(model, layout)
    found = gaps(run(checkpoint(model, **FACTS.get(model, {})), ROWS, mesh, layout, **HOW[model]), wanted)
    drifting = NO_GRADIENT if model == "bert" else ()
    assert all(gap <= MARKS.get(key, 2e-4) for key, gap in found.items() if key not in drifting), found


@contextlib.contextmanager
def made_before(make, batches, most):
    for batch in batches:
        make(batch)
    yield


DIVIDED = {"fsdp": "full_shard", "fsdp_config": {"min_num_params": 1}}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
ADAPTED = [
    pytest.param("qwen3_moe", {"mesh_shape": MESHES[0]}, None, 2, id="experts", marks=only_thorough),
    pytest.param("llama", DIVIDED, FOUR_BITS, 1, id="4 bits"),
    pytest.param("llama", DIVIDED, {"load_in_8bit": True}, 1, id="8 bits", marks=only_thorough),
]


@pytest.mark.parametrize(("model", "said", "bits", "pairs"), ADAPTED)
def test_adapters_are_those_of_one_device(model, said, bits, pairs, checkpoint, tmp_path, monkeypatch):
    """A sharded base, quantized or not, with replicated adapters, also of experts. All programs are compiled ahead from
    shapes, as on TPUs."""
    monkeypatch.setattr(step, "compiles_ahead", lambda device: True)
    monkeypatch.setattr(step, "compile_ahead", made_before)

    def run(said, size):
        config = BASE | {"per_device_train_batch_size": size, "max_steps": 2} | said
        built = RewardTrainer(
            str(checkpoint(model)), RewardConfig(str(tmp_path / str(size)), **config),
            train_dataset=Dataset.from_list(ROWS), peft_config=LoraConfig(r=4, target_modules="all-linear"),
            quantization_config=None if bits is None else BitsAndBytesConfig(**bits),
        )  # fmt: skip
        built.train()
        return built

    ours, alone = run(said, pairs), run({"mesh_shape": "data:1"}, 8)
    held = ours.model.frozen
    parts = {path for path, array in held.items() if array.addressable_shards[0].data.size < array.size}
    assert parts and parts >= {path for path in held if path.endswith((".codes", ".scales"))}
    for found, wanted in zip(ours.state.log_history, alone.state.log_history, strict=True):
        for key in found.keys() & MARKS.keys():
            assert abs(found[key] - wanted[key]) <= MARKS[key], key
    for path, array in alone.model.params.items():
        np.testing.assert_allclose(np.asarray(ours.model.params[path]), array, atol=2e-4, err_msg=path)


def trainer(checkpoint, out, rows=ROWS, **config):
    config = BASE | {"per_device_train_batch_size": 2, "save_strategy": "no"} | config
    args, data = RewardConfig(str(out), **config), Dataset.from_list(rows)
    return RewardTrainer(str(checkpoint("llama")), args, train_dataset=data)


def test_all_devices_share_the_pairs_unless_told_otherwise(checkpoint, tmp_path, caplog):
    built = trainer(checkpoint, tmp_path)
    assert (built.args.world_size, built.parts.setup.shards, built.args.parallel_mode.value) == (8, 8, "distributed")
    assert built.accelerator.num_processes == 8 and built.args.train_batch_size == 2
    [step, *_] = built.get_train_dataloader().steps
    assert step.arrays.tokens.shape[:3] == (1, 8, 1) and step.num_examples == 16
    with built.args.main_process_first():
        pass


def test_memory_falls_with_the_devices(checkpoint, tmp_path, caplog):
    built = trainer(checkpoint, tmp_path, fsdp="full_shard")
    with caplog.at_level(logging.INFO, "trl_jax"):
        built.parts.train_step.start(built.parts.training.build_optimizer())
    [line] = [record.message for record in caplog.records if record.message.startswith("Mesh")]
    assert re.fullmatch(
        r"Mesh fsdp 8 on 8 devices \(cpu\): each holds \d+\.\d kB of \d+\.\d kB of the weights and \d+\.\d kB of "
        r"\d\.\d MB of the optimizer's state\.", line), line  # fmt: skip
    for path, array in built.model.params.items():
        held = array.addressable_shards[0].data.size
        assert held * (1 if array.size < 3 * 4096 else 8) == array.size, path


def test_row19_another_mesh_goes_on_with_the_same_numbers(checkpoint, tmp_path):
    """Uses the meshes and batch sizes of CASES, so that programs are compiled only once."""
    how = {"max_steps": 4, "gradient_accumulation_steps": 2, "batch_layout": "shared", "save_steps": 2}
    first = how | {"per_device_train_batch_size": 1, "mesh_shape": MESHES[0], "save_strategy": "steps"}
    unbroken = trainer(checkpoint, tmp_path, **first)
    unbroken.train()
    left = str(tmp_path / "checkpoint-2")
    second = how | {"per_device_train_batch_size": 2, "mesh_shape": MESHES[1]}
    other = trainer(checkpoint, tmp_path / "other", **second)
    other.train(resume_from_checkpoint=left)
    assert [log["step"] for log in other.state.log_history] == [1, 2, 3, 4, 4]
    pairs = zip(unbroken.state.log_history[2:4], other.state.log_history[2:4], strict=True)
    for mine, theirs in pairs:
        assert mine["num_tokens"] == theirs["num_tokens"] and abs(mine["loss"] - theirs["loss"]) < 1e-5
        assert abs(mine["grad_norm"] - theirs["grad_norm"]) < 2e-4
    for path, array in unbroken.model.params.items():
        np.testing.assert_allclose(np.asarray(array), np.asarray(other.model.params[path]), atol=2e-4)
    fewer = trainer(checkpoint, tmp_path / "other", **(second | {"gradient_accumulation_steps": 1}))
    with pytest.raises(ValueError, match="in steps of 8 examples on 4 devices; 2 devices x .* give 4. Set grad.*=2"):
        fewer.train(resume_from_checkpoint=left)


@pytest.mark.parametrize(("model", "facts"), [("llama", {"dtype": "bfloat16", "shards": True}), ("gpt_neox", {}),
                                              ("qwen3_moe", {})], ids=str)  # fmt: skip
def test_each_device_reads_its_own_part(model, facts, checkpoint):
    """Straight from the files into its shards, also for fused tensors, experts and transposed ones."""
    from trl_jax.hub.checkpoint import load
    from trl_jax.hub.config import read_native_config
    from trl_jax.models.model import logical_axes

    folder = checkpoint(model, **facts)
    sharding_plan = ShardingPlan(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    config = read_native_config(folder)
    alone, _ = load(config, dtype="float32", seed=0)
    parts, _ = load(config, dtype="float32", seed=0, sharding_of=sharding_plan.sharding_of)
    axes = logical_axes(config.model)
    for path, array in alone.items():
        assert parts[path].sharding == sharding_plan.sharding_of(axes[path], array.shape) or "score" in path
        np.testing.assert_array_equal(np.asarray(parts[path]), np.asarray(array))


# ---- collectives -----------------------------------------------------------------------------------------------

COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def compiled(built):
    """A trainer's compiled step, and its collectives as (kind, largest array)."""
    [batch, *_] = built.get_train_dataloader().steps
    of_run, tx = built.parts.train_step, built.parts.training.build_optimizer()
    step, state = of_run.compiled(tx, remat=True), of_run.new_optimizer_state(tx)
    done = step.lower(built.model.params, state, of_run.placed(batch).arrays, np.float32(0), None).compile()
    found = []
    for line in done.as_text().splitlines():
        if match := COLLECTIVE.search(line):
            shapes = [tuple(map(int, part.split(","))) for part in re.findall(r"f32\[([\d,]+)\]", match[1])]
            found.append((match[2], max(shapes, key=np.prod, default=())))
    return done, found


def test_only_parameters_and_sums_go_between_devices(checkpoint, tmp_path):
    built = trainer(checkpoint, tmp_path, mesh_shape="fsdp:8")
    done, found = compiled(built)
    by_layer = {array.shape[1:] for path, array in built.model.params.items() if ".layers." in path}
    whole = by_layer | {built.model.params["decoder.embed.weight"].shape}
    pairs = 64  # limit for the sums that are logged
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce", "reduce-scatter"}
    for kind, shape in found:
        small = np.prod(shape) <= pairs
        if kind == "all-gather":
            assert small or shape in whole, shape
        if kind == "all-reduce":  # vectors, and matrices too small to shard
            assert small or np.prod(shape) <= 3 * 4096, shape
    scattered = sorted(np.prod(shape) * 8 for kind, shape in found if kind == "reduce-scatter")
    divided = [a for p, a in built.model.params.items() if not a.sharding.is_fully_replicated]
    assert scattered == sorted(a.size // (3 if a.ndim == 3 else 1) for a in divided)
    ours = sum(a.addressable_shards[0].data.nbytes for a in [*built.model.params.values()])
    assert done.memory_analysis().argument_size_in_bytes < 3.2 * ours + 20_000  # weights, two moments, the batch


def test_of_a_text_only_keys_and_values_are_gathered(checkpoint, tmp_path):
    built = trainer(checkpoint, tmp_path, mesh_shape="sequence:8")
    _, found = compiled(built)
    arch = built.model.source.config.arch
    [step, *_] = built.get_train_dataloader().steps
    tokens = -(-step.arrays.tokens.shape[-1] // (8 * BLOCK)) * 8 * BLOCK
    whole = tokens * arch.num_key_heads * arch.head_dim
    moved = {kind: {int(np.prod(shape)) for one, shape in found if one == kind} for kind, _ in found}
    assert moved.keys() == {"all-gather", "all-reduce", "reduce-scatter"}
    assert moved["all-gather"] == {whole} and moved["reduce-scatter"] == {whole // 8}
    gradients = {array.size for array in built.model.params.values()}
    # The others are logged sums, or have one token per text.
    assert {size for size in moved["all-reduce"] if size > 1024} <= gradients


@only_thorough
def test_rows_of_texts_stay_where_they_are(checkpoint, tmp_path, monkeypatch, alone):
    """Attention per text, as on GPUs: no more is sent than for packed rows, with heads sharded or not, and results
    equal those of one device."""
    mesh = "data:2,fsdp:2,tensor:2"
    wanted = alone("llama", "shared")
    _, along = compiled(trainer(checkpoint, tmp_path / "along", mesh_shape=mesh))
    monkeypatch.setattr(layout, "by_rows", lambda args, **_: True)
    built = trainer(checkpoint, tmp_path, mesh_shape=mesh)
    [step, *_] = built.get_train_dataloader().steps
    assert step.arrays.packed.texts is not None
    assert sorted(compiled(built)[1]) == sorted(along)
    found = gaps(run(checkpoint("llama"), ROWS, mesh, "shared", **HOW["llama"]), wanted)
    assert all(gap <= MARKS.get(key, 2e-4) for key, gap in found.items()), found


def test_collectives_run_beside_products_on_gpus():
    """XLA overlaps collectives by default on TPUs; on GPUs it needs options, whose names must be known to this XLA."""
    assert compiler_options("tpu", several=True) == compiler_options("cuda", several=False) == {}
    assert jax.jit(lambda x: x + 1, compiler_options=compiler_options("cuda", several=True))(1) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_hide_latency": True})(1)


@only_thorough
def test_a_gathered_row_would_be_noticed(checkpoint, tmp_path, monkeypatch):
    loss = Forward.loss

    def gathering(self, params, batch, key, **how):
        total, metrics = loss(self, params, batch, key, **how)
        return total + 0 * jnp.sum(jax.lax.all_gather(batch.tokens, "data")).astype(jnp.float32), metrics

    monkeypatch.setattr(Forward, "loss", gathering)
    done, found = compiled(trainer(checkpoint, tmp_path, mesh_shape="data:8"))
    assert re.search(r"= s32\[8,1,\d+\]\S* all-gather", done.as_text())
    # All that data parallelism should need.
    assert {kind for kind, shape in found if np.prod(shape) > 64} == {"all-reduce"}


@only_thorough
def test_experts_over_tensor_are_those_of_one_device():
    from flax import nnx

    from trl_jax.models.arch import Experts
    from trl_jax.nn.moe import MoE

    dice = np.random.default_rng(0)
    graph, state = nnx.split(MoE(16, Experts(count=4, top_k=2, size=8, renormalized=True), activation="silu"))
    state = jax.tree.map(lambda leaf: jnp.asarray(dice.normal(size=leaf.shape), jnp.float32), state)
    x = jnp.asarray(dice.normal(size=(2, 70, 16)), jnp.float32)

    def loss(state, x):
        return jnp.sum(jnp.square(nnx.merge(graph, state)(x)))

    alone = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(state, x)
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        whole = jax.device_put((state, x), jax.NamedSharding(mesh, jax.P()))
        sharded_step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*whole)
    for mine, theirs in zip(jax.tree.leaves(sharded_step), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=2e-4, atol=2e-3)


# ---- values of mesh_shape and fsdp, errors --------------------------------------------------------------------


@pytest.mark.parametrize(("said", "sizes"), [
    ({}, {"data": 8}), ({"fsdp": True}, {"fsdp": 8}), ({"fsdp": "full_shard auto_wrap"}, {"fsdp": 8}),
    ({"fsdp": "hybrid_shard"}, {"fsdp": 8}), ({"fsdp": "no_shard"}, {"data": 8}),
    ({"deepspeed": {"zero_optimization": {"stage": 3}}}, {"fsdp": 8}),
    ({"deepspeed": {"zero_optimization": {"stage": 1}}}, {"data": 8}),
    ({"parallelism_config": {"dp_shard_size": 4}}, {"data": 2, "fsdp": 4}),
    ({"parallelism_config": {"tp_size": 2, "dp_replicate_size": 4}}, {"data": 4, "tensor": 2}),
    ({"parallelism_config": {"cp_size": 2, "dp_shard_size": 2}}, {"data": 2, "fsdp": 2, "sequence": 2}),
    ({"mesh_shape": "data:-1,tensor:2"}, {"data": 4, "tensor": 2}),
    ({"mesh_shape": "data:2,fsdp:4", "fsdp": "no_shard"}, {"data": 2, "fsdp": 4}),
    ({"mesh_shape": "data:2"}, {"data": 2}),
], ids=str)  # fmt: skip
def test_words(said, sizes, checkpoint, tmp_path):
    args = RewardConfig(str(tmp_path), use_cpu=True, **said)
    from trl_jax.training.devices import sharding_plan_of

    sharding_plan = sharding_plan_of(args)
    assert {axis: size for axis, size in sharding_plan.mesh.shape.items() if size > 1} == sizes
    zero = "stage" in str(said) and "3" not in str(said)
    assert sharding_plan.moments_over == ("data" if zero else None)
    assert args.world_size == np.prod(list(sizes.values()))


@pytest.mark.parametrize(("said", "text"), [
    ({"mesh_shape": "data:3"}, "mesh_shape asks for data 3 = 3 devices, but there are 8. Make the product 8, or use"),
    ({"mesh_shape": "data:16"}, "mesh_shape asks for data 16 = 16 devices, but there are 8."),
    ({"mesh_shape": "fsdp:2,tensor:4"}, "mesh: tensor=4 does not divide the 2 key heads of .* Choose a divisor"),
    ({"deepspeed": {"train_batch_size": 8}},
     "deepspeed sets train_batch_size to 8, but 8 devices x per_device_train_batch_size x gradient_acc.* = 16"),
    ({"accelerator_config": {"split_batches": True}}, "split_batches=True, .* by the 8 devices that share the batch"),
    ({"accelerator_config": {"even_batches": False}}, "even_batches=False, .* Leave it out, or set dataloader_"),
], ids=str)  # fmt: skip
def test_refused(said, text, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=text):
        trainer(checkpoint, tmp_path, **said)


def test_whole_texts_are_refused_where_they_would_be_divided(checkpoint, tmp_path):
    args, data = RewardConfig(str(tmp_path), **BASE, mesh_shape="data:4,sequence:2"), Dataset.from_list(ROWS)
    with pytest.raises(ValueError, match="mesh: sequence 2 divides .* requires a native decoder .* is not one"):
        RewardTrainer(str(checkpoint("bert")), args, train_dataset=data)

    class Own(RewardTrainer):
        def compute_loss(self, *given, **more):
            return super().compute_loss(*given, **more)

    with pytest.raises(ValueError, match="mesh: sequence 2 divides texts, and a script.s own compute_loss gets"):
        Own(str(checkpoint("llama")), args, train_dataset=data)


def test_what_does_not_come_out_even_stays_whole():
    table, norm, keys = ("vocab", "embed"), ("layers", "norm"), ("layers", "kv", "embed")
    axes = {"embed": table, "norm": norm, "keys": keys, "experts": ("layers", "experts", "embed", "mlp")}
    spec = ShardingPlan(make_mesh({"fsdp": 4, "tensor": 2}), axes=axes).spec
    assert spec("embed", (520, 66)) == jax.P("tensor", None)  # 66 is not divisible by 4, and 520 is already sharded
    assert spec("embed", (521, 66)) == jax.P(None, None)
    assert spec("embed", (521, 64)) == jax.P(None, "fsdp")
    assert spec("norm", (3, 8192)) == jax.P() == spec("some.other.vector", (8192,))
    assert spec("keys", (3, 32, 64)) == jax.P()  # too small
    assert spec("experts", (3, 8, 64, 32)) == jax.P(None, "tensor", "fsdp", None)
    assert spec("some.other.name", (128, 64)) == jax.P("fsdp", None)
    with pytest.raises(ValueError, match="needs 4 devices, but there are 8"):
        make_mesh({"data": 4})
    with pytest.raises(ValueError, match="Unknown mesh axis 'model': the axes of a mesh are"):
        make_mesh({"model": 8})


# ---- data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [3, 21])
def test_row46_an_evaluation_of_any_size(pairs, checkpoint, tmp_path):
    """With fewer pairs than devices, or an uneven division: every pair counts exactly once."""
    rows = Dataset.from_list(tiny.preference_rows(pairs, seed=5))
    alone, sharded_step = (
        trainer(checkpoint, tmp_path, mesh_shape=mesh, per_device_eval_batch_size=size).predict(rows)
        for mesh, size in (("data:1", 16), ("data:8", 2))
    )
    assert alone.predictions.shape == (2 * pairs, 1)
    np.testing.assert_allclose(sharded_step.predictions, alone.predictions, atol=2e-5)
    assert abs(sharded_step.metrics["test_loss"] - alone.metrics["test_loss"]) < 1e-6


@only_thorough
def test_a_plan_s_programs_are_those_of_a_run(checkpoint, tmp_path):
    """With a sharded bfloat16 base; the bytes per device must match, too."""
    found = alike(checkpoint("llama", head="causal", dtype="bfloat16"), tmp_path, 8, LORA, mesh_shape="fsdp:4,tensor:2")
    assert found.memory.gathered > 0 and found.mesh == {"fsdp": 4, "tensor": 2}


def test_a_kernel_gets_its_heads_and_no_compiler_divides_it():
    """Like cuDNN's kernel, which JAX cannot partition next to manually partitioned axes."""
    shapes, seen, heads = [(4, 6, count, 2) for count in (4, 2, 2)], [], jax.P(None, None, "tensor")
    q, k, v = (np.random.default_rng(n).normal(size=shape).astype(np.float32) for n, shape in enumerate(shapes))
    lengths = np.array([6, 3, 1, 5], np.int32)

    def attend(q, k, v, lengths):
        seen.append((q.shape, k.shape))
        inside = (jnp.arange(q.shape[1]) < lengths[:, None])[:, :, None, None]
        return jnp.where(inside, q * (k + v).repeat(q.shape[2] // k.shape[2], axis=2), 0)

    wanted = np.asarray(attend(q, k, v, lengths))
    with jax.set_mesh(jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        rows = jax.P("fsdp")
        run = jax.shard_map(
            lambda *given: on_each_device(attend, (heads, heads, heads, jax.P()), heads)(*given),
            in_specs=(rows,) * 4, out_specs=rows, axis_names={"fsdp"}, check_vma=False,
        )  # fmt: skip
        np.testing.assert_array_equal(jax.jit(run)(q, k, v, lengths), wanted)
    assert seen[-1] == ((1, 6, 2, 2), (1, 6, 1, 2))
