"""The argument tables: every field of every config has an entry, with the right warnings and errors."""

import dataclasses
import importlib
import json
import pkgutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import trl_jax.trainer
from compat_tests.effort import usual
from trl_jax.config.arguments import defaults_of, validate
from trl_jax.config.base import BaseConfig
from trl_jax.config.devices import DETERMINISTIC_FLAG
from trl_jax.config.optimizers import NEAREST, OPTIMIZERS, SCHEDULES
from trl_jax.config.renamed import GONE, RENAMED, translate_old_names, way_out
from trl_jax.config.rules import as_choice, as_dict, as_pad_multiple, bool_fields, show
from trl_jax.hub.config import checked_arguments
from trl_jax.hub.peft_config import LoraConfig, PromptEncoderConfig, PromptTuningConfig
from trl_jax.hub.quantization import BitsAndBytesConfig
from trl_jax.scripts.data import DatasetMixtureConfig
from trl_jax.scripts.utils import ScriptArguments
from trl_jax.trainer.grpo_config import GRPOConfig
from trl_jax.trainer.model_config import ModelConfig
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.trainer.rloo_config import RLOOConfig
from trl_jax.trainer.sft_config import SFTConfig

TABLE, DEFAULTS = RewardConfig.argument_table(), defaults_of(dataclasses.fields(RewardConfig))


def config_classes():
    """BaseConfig and the config class of every trainer."""
    for module in pkgutil.iter_modules(trl_jax.trainer.__path__):
        if module.name.endswith("_config"):
            importlib.import_module(f"trl_jax.trainer.{module.name}")
    kinds = [BaseConfig]
    for kind in kinds:
        kinds.extend(kind for kind in kind.__subclasses__() if kind.__module__.startswith("trl_jax.trainer."))
    return kinds


def verdict(**changed):
    return validate(TABLE, DEFAULTS | changed, DEFAULTS)


def test_config_classes_are_found():
    assert {BaseConfig, RewardConfig} <= set(config_classes())


@pytest.mark.parametrize("kind", config_classes())
def test_every_field_has_a_line_and_a_default_and_nothing_else_has(kind):
    fields = dataclasses.fields(kind)
    assert {f.name for f in fields} == set(kind.argument_table()) == set(defaults_of(fields))


@pytest.mark.parametrize("kind", config_classes())
def test_a_config_can_be_made_alone_and_its_defaults_are_accepted_in_silence(kind, tmp_path):
    defaults = defaults_of(dataclasses.fields(kind))
    assert validate(kind.argument_table(), defaults, defaults) == ([], [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = kind(str(tmp_path / "out"))
    assert made.check() == [] and made.remats == [False, True]


@pytest.mark.parametrize("kind", config_classes())
def test_every_config_checks_its_values(kind, tmp_path):
    with pytest.raises(ValueError, match="^batch_layout='mixed' is not in this release of trl_jax; supported: auto, "):
        kind(str(tmp_path / "out"), batch_layout="mixed")


# TRL's error messages for wrong values use another form of the name.
TOLD_AS = {"vllm_importance_sampling_mode": "vllm importance sampling level"}
ODD = [
    "abc", -1, 10**400, float("nan"), object(), b"x", (1, 2), {"a": 1}, {1: 2}, frozenset("a"), "x" * 5000, "a\0b",
    Path("x"), np.float32(0.5), np.int64(3), np.ones(2),
]  # fmt: skip


@usual(
    "BaseConfig",
    "RewardConfig",
    "GRPOConfig",
    "SFTConfig",
    "ReferenceFreeConfig",
    "DPOConfig",
    "KTOConfig",
    "ORPOConfig",
    "CPOConfig",
)
@pytest.mark.parametrize("kind", config_classes())
@pytest.mark.filterwarnings("ignore")
def test_an_odd_value_is_accepted_or_refused_by_name(kind, tmp_path):
    """Each field, in each class that handles it differently from BaseConfig."""
    before = {} if kind is BaseConfig else BaseConfig.argument_table()
    names = [name for name, line in kind.argument_table().items() if line != before.get(name)]
    for name in names:
        for value in ODD:
            try:
                made = kind(**{"output_dir": str(tmp_path / "out"), name: value})
            except (TypeError, ValueError) as error:
                text = str(error).lower()
                assert name in text or TOLD_AS.get(name, name.replace("_", " ")) in text, (name, value)
            else:  # accepted: it can be saved with the run, and is a plain number
                assert name in json.loads(made.to_json_string()) and made.check() is not None
                assert not isinstance(vars(made)[name], np.generic), (name, value)


@pytest.mark.parametrize("kind", [LoraConfig, PromptEncoderConfig, PromptTuningConfig])
def test_an_odd_value_of_an_adapter_is_accepted_or_refused_by_name(kind):
    for name in (field.name for field in dataclasses.fields(kind)):
        for value in (*ODD, [], {}):
            try:
                made = kind(**{name: value})
            except ValueError as error:
                assert name in str(error), (name, value)
            else:
                assert not isinstance(getattr(made, name), np.generic | np.ndarray), (name, value)


def test_sizes_of_devices_in_a_dict_are_written(tmp_path):
    args = RewardConfig(str(tmp_path / "out"), parallelism_config={"tp_size": 1}, report_to=())
    assert args.report_to == [] and json.loads(args.to_json_string())["parallelism_config"] == {"tp_size": 1}
    with pytest.raises(ValueError, match="^The keys of parallelism_config must be among .*, got 'tensor'"):
        RewardConfig(str(tmp_path / "out"), parallelism_config={"tensor": 2})


BOOLS = [(kind, name, optional) for kind in config_classes() for name, optional in bool_fields(kind).items()]
OTHERS = (BitsAndBytesConfig, DatasetMixtureConfig, ModelConfig, ScriptArguments)


def test_boolean_fields_are_found():
    found = {(kind.__name__, name): optional for kind, name, optional in BOOLS}
    assert found["SFTConfig", "shuffle_dataset"] is False and found["GRPOConfig", "shuffle_dataset"] is True
    assert found["RewardConfig", "bf16"] is True and found["RewardConfig", "push_to_hub"] is False
    assert ("RewardConfig", "include_num_input_tokens_seen") not in found and len(found) > 400


@pytest.mark.parametrize("kind", config_classes())
def test_boolean_fields_take_what_a_command_line_does_and_nothing_else(kind, tmp_path):
    args = kind(str(tmp_path / "out"))
    for name, optional in bool_fields(kind).items():
        before = vars(args)[name]
        for text in ("no", "False", "f", "N", "0", 0, np.False_, False):
            setattr(args, name, text)
            assert vars(args)[name] is False, (name, text)
        for text in ("YES", "true", "t", "y", "1", 1, np.int64(1), True):
            setattr(args, name, text)
            assert vars(args)[name] is True, (name, text)
        for wrong in ("off", "", "None", 2, -1, 1.0, [], np.zeros(2), *(() if optional else (None,))):
            setattr(args, name, wrong)
            with pytest.raises(ValueError, match=f"^{name} must be True, False(, None)?, or one of yes/no, true/"):
                args.check()
        setattr(args, name, before)
    args.check()


@pytest.mark.parametrize(("given", "wanted"), [("False", False), ("n", False), (0, False), ("TRUE", True), (1, True)])
def test_boolean_fields_are_bools_in_a_config(given, wanted, tmp_path):
    assert SFTConfig(str(tmp_path), shuffle_dataset=given).shuffle_dataset is wanted


def test_every_wrong_boolean_has_a_line(tmp_path):
    with pytest.raises(ValueError) as caught:
        SFTConfig(str(tmp_path), shuffle_dataset="maybe", push_to_hub="never", batch_layout="mixed")
    lines = str(caught.value).splitlines()
    assert [line.replace("=", " ").split()[0] for line in lines] == ["push_to_hub", "shuffle_dataset", "batch_layout"]


@pytest.mark.parametrize("kind", OTHERS)
def test_boolean_fields_of_the_other_dataclasses_of_a_script(kind):
    four = {"load_in_4bit": True} if kind is BitsAndBytesConfig else {}
    for name in bool_fields(kind).keys() - {"load_in_4bit", "load_in_8bit"}:
        assert vars(kind(**four, **{name: "False"}))[name] is False
        assert vars(kind(**four, **{name: "y"}))[name] is True
        with pytest.raises(ValueError, match=f"^{name} must be True, False, or one of yes/no.*, got 'maybe'"):
            kind(**four, **{name: "maybe"})
    assert ModelConfig(load_in_4bit="False", load_in_8bit="1").load_in_8bit is True


@pytest.mark.parametrize("name", bool_fields(LoraConfig))
def test_boolean_fields_of_lora(name):
    with pytest.raises(ValueError, match=f"^LoraConfig: {name} must be True or False, got 'False'"):
        LoraConfig(**{name: "False"})


def test_the_code_of_a_tokenizer_does_not_run_for_the_text_false():
    found, _, _ = checked_arguments({"trust_remote_code": "False", "local_files_only": "no"}, None)
    assert found == {"code": False, "local_files_only": False}
    with pytest.raises(ValueError, match="^trust_remote_code must be True, False, None, or one of.*, got 'never'"):
        checked_arguments({"trust_remote_code": "never"}, None)


@pytest.mark.parametrize(("kind", "given", "text"), [
    (RewardConfig, {"save_total_limit": "1"},
     "save_total_limit must be a whole number of at least -1 or None, got '1'."),
    (RewardConfig, {"eval_steps": "abc"}, "eval_steps must be a number or None, got 'abc'."),
    (RewardConfig, {"save_steps": "5"}, "save_steps must be a number, got '5'."),
    (RewardConfig, {"max_steps": None}, "max_steps must be a number, got None."),
    (SFTConfig, {"chat_template_path": 5}, "chat_template_path must be a path, a name or None, got 5."),
    (GRPOConfig, {"top_k": 2**63}, "top_k must be at most 2,147,483,647, got 9223372036854775808."),
    (RLOOConfig, {"temperature": 2**63}, "temperature must be at most 4.611686018427388e+18, got 9223372036854775808."),
    (GRPOConfig, {"use_adaptive_entropy": True, "entropy_coef_min": 2},
     "entropy_coef_min must be at most entropy_coef_max=1.0, got 2."),
    (RewardConfig, {"learning_rate": np.ones(2)}, "learning_rate=array([1., 1.]) is an array, but no argument takes"),
])  # fmt: skip
def test_values_that_no_run_could_use_are_refused_in_a_line(kind, given, text, tmp_path):
    with pytest.raises(ValueError) as caught:
        kind(str(tmp_path), **given)
    assert str(caught.value).startswith(text) and "\n" not in str(caught.value), caught.value


WARNED = {
    "label_smoothing_factor": (0.1, "preference pairs have no labels to smooth."),
    "torch_compile_backend": ("inductor", "XLA compiles every step."),
    "torch_compile_mode": ("max-autotune", "XLA compiles every step."),
    "use_liger_kernel": (True, "XLA compiles its own kernels; results are equal."),
    "liger_kernel_config": ({"rope": True}, "XLA compiles its own kernels; results are equal."),
    "torch_empty_cache_steps": (5, "JAX manages its own memory."),
    "dataloader_num_workers": (4, "batches are made in this process, ahead of the step."),
    "dataloader_prefetch_factor": (2, "batches are made in this process, ahead of the step."),
    "dataloader_multiprocessing_context": ("spawn", "batches are made in this process, ahead of the step."),
    "dataloader_in_order": (False, "batches always come in order."),
    "label_names": (["labels"], "preference pairs have no labels."),
    "ddp_bucket_cap_mb": (25, "collectives are XLA's."),
    "ddp_backend": ("nccl", "collectives are XLA's."),
}


def test_the_list_of_warnings_is_whole():
    assert set(WARNED) == {name for name, line in TABLE.items() if line.how == "warned"}


@pytest.mark.parametrize("name", WARNED)
def test_warned(name):
    value, why = WARNED[name]
    assert verdict(**{name: value}) == ([], [f"{name}={value!r} has no effect in trl_jax: {why}"])


@pytest.mark.parametrize("name", ["fp16", "fp16_full_eval"])
def test_float16_runs_as_bfloat16(name):
    refusals, warnings = verdict(**{name: True})
    assert refusals == []
    assert warnings == [
        f"{name}=True: float16 runs as bfloat16, which needs no loss scaling. Use the bf16 argument instead."
    ]


REFUSED = {
    "optim_target_modules": ("all-linear", "it is for GaLore and APOLLO, which are not supported; leave it out."),
}


def test_the_list_of_refusals_is_whole():
    assert set(REFUSED) == {name for name, line in TABLE.items() if line.how == "refused"}


def test_offloading_needs_something_that_is_kept():
    assert verdict(activation_offloading=True, gradient_checkpointing=True) == ([], [])
    [refusal], _ = verdict(activation_offloading=True, gradient_checkpointing=False)
    assert refusal == (
        "activation_offloading=True requires gradient_checkpointing=True, whose saved activations it moves to the "
        "host, got False."
    )
    [refusal], _ = verdict(
        activation_offloading=True, gradient_checkpointing=True, remat_policy="dots_with_no_batch_dims_saveable"
    )
    assert refusal.startswith("activation_offloading=True requires remat_policy='auto' or 'nothing_saveable', got 'do")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    value, instead = REFUSED[name]
    assert verdict(**{name: value}) == (
        [f"{name}={value!r} is not in this release of trl_jax: {instead}"],
        [],
    )


@pytest.mark.parametrize("name, value", [
    ("fsdp", ""), ("fsdp", []), ("fsdp", False), ("fsdp_config", {}), ("fsdp_config", {"version": 2}),
    ("parallelism_config", {"tp_size": 1, "dp_shard_size": 1}), ("optim_args", ""),
    ("fsdp", "full_shard auto_wrap"), ("fsdp", True), ("deepspeed", {"zero_optimization": {"stage": 3}}),
    ("parallelism_config", {"tp_size": 2}), ("mesh_shape", "data:2,fsdp:-1"), ("mesh_shape", {"tensor": 2}),
    ("optim_args", None), ("debug", None),
    ("include_num_input_tokens_seen", "all"), ("include_for_metrics", ["inputs", "loss"]),
    ("batch_eval_metrics", True), ("eval_do_concat_batches", False), ("skip_memory_metrics", False),
    ("debug", "underflow_overflow"), ("optim", "adafactor"), ("train_sampling_strategy", "group_by_length"),
    ("accelerator_config", {"split_batches": True, "dispatch_batches": False, "even_batches": False}),
    ("deepspeed", ""), ("debug", []),
    ("include_for_metrics", []), ("include_num_input_tokens_seen", False), ("neftune_noise_alpha", 0.0),
    ("neftune_noise_alpha", 5.0), ("auto_find_batch_size", True),
    ("label_smoothing_factor", 0), ("hub_strategy", "end"),
    ("push_to_hub", True), ("hub_private_repo", True), ("hub_token", "hf_secret"),
    ("accelerator_config", {"split_batches": False}), ("accelerator_config", "{}"),
    ("lr_scheduler_kwargs", "{}"), ("gradient_checkpointing_kwargs", {"use_reentrant": False}),
    ("activation_checkpointing_kwargs", '{"use_reentrant": true}'), ("max_grad_norm", None),
    ("max_grad_norm", 0), ("max_grad_norm", -1), ("pad_to_multiple_of", "None"), ("pad_to_multiple_of", "64"),
    ("pad_to_multiple_of", 8), ("max_length", None), ("model_init_kwargs", '{"dtype": "bfloat16"}'),
    ("dataset_num_proc", 0), ("save_total_limit", 0), ("torch_compile", True), ("use_cache", True),
    ("eval_accumulation_steps", 4), ("local_rank", 0), ("ddp_find_unused_parameters", False),
    ("logging_nan_inf_filter", False), ("enable_jit_checkpoint", True), ("ignore_data_skip", True),
    ("save_only_model", True), ("resume_from_checkpoint", "last"), ("remove_unused_columns", False),
])  # fmt: skip
def test_accepted_in_silence(name, value):
    assert verdict(**{name: value}) == ([], [])


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("optim", "adagrd",
         "optim='adagrd' is not in this release of trl_jax; supported: " + ", ".join(OPTIMIZERS) + "."),
        ("optim", "galore_adamw",
         "optim='galore_adamw' is not in this release of trl_jax; the closest supported optimizer is adamw_torch."),
        ("optim_args", "a=1",
         f"optim_args has the key 'a', but optim={DEFAULTS['optim']!r} takes no keys; leave it out."),
        ("lr_scheduler_type", "greedy",
         "lr_scheduler_type='greedy' follows an evaluation metric, but eval_strategy is 'no'. "
         "Set eval_strategy."),
        ("lr_scheduler_type", "step", "lr_scheduler_type='step' is not in this release of trl_jax; supported: "
         + ", ".join(SCHEDULES) + "."),
        ("train_sampling_strategy", "batch_rebalance",
         "train_sampling_strategy='batch_rebalance' is not in this "
         "release of trl_jax; supported: random, sequential, group_by_length."),
        ("parallelism_config", {"pp_size": 2}, "The keys of parallelism_config must be among dp_replicate_size, "
         "dp_shard_size, tp_size, cp_size, sp_size, got 'pp_size'."),
        ("parallelism_config", {"tp_size": 0.5},
         "tp_size of parallelism_config must be a whole number of at least 1, got 0.5."),
        ("mesh_shape", "data:2,model:4", "mesh_shape must be axes and sizes such as 'data:2,fsdp:4', got "
         "'data:2,model:4': 'model' is not one of data, fsdp, tensor, sequence, occurs twice or has no size."),
        ("mesh_shape", "data:-1,fsdp:-1",
         "mesh_shape must have sizes of at least 1, and -1 for at most one axis, got 'data:-1,fsdp:-1'."),
        ("mesh_shape", "data", "mesh_shape must be axes and sizes such as 'data:2,fsdp:4', got 'data': "
         "'data' is not one of data, fsdp, tensor, sequence, occurs twice or has no size."),
        ("fsdp", "full_shard shard_grad_op",
         "fsdp must name one strategy, got full_shard and shard_grad_op."),
        ("fsdp", "full_shard offload",
         "fsdp=offload is not in this release of trl_jax. Leave it out: fsdp already shards the memory over the "
         "devices."),
        ("deepspeed", {"zero_optimization": {"stage": 4}},
         "zero_optimization.stage of deepspeed must be 0, 1, 2 or 3, got 4."),
        ("deepspeed", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
         "deepspeed sets zero_optimization.offload_param, which is not in this release of trl_jax. Leave it out."),
        ("fsdp", "full_shards", "fsdp must be some of full_shard, shard_grad_op, no_shard, "
         "hybrid_shard, hybrid_shard_zero2, offload, auto_wrap, got ['full_shards']."),
        ("deepspeed", "none.json",
         "deepspeed='none.json': there is no such file. Pass a JSON file or a dict, or leave it out."),
        ("deepspeed", {"gradient_clipping": 0.5}, "deepspeed sets gradient_clipping to 0.5, but max_grad_norm is 1.0. "
         'Make them equal, or write "auto" in the file.'),
        ("deepspeed", {"train_batch_size": 60}, "deepspeed sets train_batch_size to 60, but it is devices x "
         'per_device_train_batch_size x gradient_accumulation_steps, a multiple of 8. Write "auto" in the file.'),
        ("deepspeed", {"fp16": {"enabled": True}},
         "deepspeed sets fp16, but trl_jax has no loss scaling. Set bf16 in the file instead."),
        ("deepspeed", {"optimizer": {"type": "Lamb"}},
         "deepspeed sets the optimizer 'Lamb'. Leave it out and set optim instead."),
        ("deepspeed", {"scheduler": {"type": "OneCycle"}},
         "deepspeed sets the scheduler 'OneCycle'. Leave it out and set lr_scheduler_type instead."),
        ("debug", "everything", "debug must be underflow_overflow or tpu_metrics_debug, got ['everything']."),
        ("include_for_metrics", ["labels"],
         "include_for_metrics must be a list with inputs, loss or both, got ['labels']."),
        ("include_num_input_tokens_seen", "some",
         "include_num_input_tokens_seen must be 'all', 'non_padding' or 'no', got 'some'."),
        ("accelerator_config", {"use_seedable_sampler": False}, "accelerator_config sets use_seedable_sampler=False, "
         "which is not in this release of trl_jax: the order of rows follows data_seed; leave it out."),
        ("accelerator_config", {"split": True}, "The keys of accelerator_config must be among split_batches, "
         "dispatch_batches, even_batches, use_seedable_sampler, non_blocking, gradient_accumulation_kwargs, "
         "use_configured_state, got 'split'."),
        ("accelerator_config", "a.json",
         "accelerator_config='a.json': there is no such file. Pass a JSON file or a dict, or leave it out."),
        (
            "lr_scheduler_kwargs",
            {"num_cycles": 2},
            (
                "lr_scheduler_kwargs has the keys ['num_cycles'], but lr_scheduler_type='linear' "
                "takes no keys. Leave them out."
            ),
        ),
        (
            "lr_scheduler_kwargs",
            "cycles",
            (
                "lr_scheduler_kwargs must be a dict, or a JSON object in a string such as '{\"key\": 1}', got "
                "'cycles'. It is not valid JSON: Expecting value: line 1 column 1 (char 0)."
            ),
        ),
        (
            "model_init_kwargs",
            "[1]",
            (
                "model_init_kwargs must be a dict, or a JSON object in a string such as '{\"key\": 1}', got [1]."
            ),
        ),
        (
            "gradient_checkpointing_kwargs",
            {"every_n_layers": 2},
            (
                "gradient_checkpointing_kwargs has the keys ['every_n_layers'], which are not in this release of"
                " trl_jax: it takes use_reentrant only. Leave them out."
            ),
        ),
        (
            "pad_to_multiple_of",
            "much",
            "pad_to_multiple_of must be \"auto\", a whole number of at least 1, or None, got 'much'.",
        ),
        (
            "pad_to_multiple_of",
            0,
            'pad_to_multiple_of must be "auto", a whole number of at least 1, or None, got 0.',
        ),
        (
            "per_device_train_batch_size",
            0,
            "per_device_train_batch_size must be a whole number of at least 1, got 0.",
        ),
        (
            "gradient_accumulation_steps",
            1.5,
            "gradient_accumulation_steps must be a whole number of at least 1, got 1.5.",
        ),
        ("max_length", 0, "max_length must be a whole number of at least 1 or None, got 0."),
        ("learning_rate", "1e-4", "learning_rate must be a number of at least 0, got '1e-4'."),
        ("weight_decay", float("nan"), "weight_decay must be a number of at least 0, got nan."),
        (
            "center_rewards_coefficient",
            -1.0,
            "center_rewards_coefficient must be a number of at least 0 or None, got -1.0.",
        ),
        ("num_train_epochs", -1, "num_train_epochs must be a number of at least 0, got -1."),
    ],
)  # fmt: skip
def test_single_values_refused(name, value, text):
    assert verdict(**{name: value}) == ([text], [])


NAN = float("nan")
CANNOT_WORK = {
    "per_device_train_batch_size": (10**9, "at most 1,048,576"),
    "per_device_eval_batch_size": (10**9, "at most 1,048,576"),
    "gradient_accumulation_steps": (10**9, "at most 65,536"),
    "num_train_epochs": (1e300, "at most 2,147,483,647"),
    "max_steps": (10**30, "at most 2,147,483,647"),
    "warmup_steps": (1e300, "at most 2,147,483,647"),
    "learning_rate": (1e39, "at most 3.4028234663852886e+38"),
    "adam_epsilon": (1e300, "at most 3.4028234663852886e+38"),
    "center_rewards_coefficient": (1e300, "at most 3.4028234663852886e+38"),
    "neftune_noise_alpha": (1e300, "at most 3.4028234663852886e+38"),
    "pad_to_multiple_of": (10**9, "at most 1,048,576"),
    "dataset_num_proc": (10**9, "at most 4,194,304"),
    "seed": (2**32, "at most 4,294,967,295"),
    "data_seed": (2**64, "at most 18,446,744,073,709,551,615"),
}  # fmt: skip


@pytest.mark.parametrize("name", CANNOT_WORK)
def test_values_that_can_never_work_are_refused_before_anything_is_allocated(name):
    value, wanted = CANNOT_WORK[name]
    assert verdict(**{name: value}) == ([f"{name} must be {wanted}, got {value!r}."], [])
    with pytest.raises(ValueError, match=f"{name} must be at most"):
        RewardConfig("out", bf16=False, use_cpu=True, **{name: value})


@pytest.mark.parametrize("name", "warmup_steps max_steps logging_steps save_steps eval_steps eval_delay".split())
def test_steps_that_are_no_number(name):
    none = " or None" if name == "eval_steps" else ""
    assert verdict(**{name: NAN}) == ([f"{name} must be a number{none}, got nan."], [])


def test_a_step_of_too_many_pairs_names_both_that_make_it():
    [refusal], _ = verdict(per_device_train_batch_size=2**12, gradient_accumulation_steps=2**10)
    assert refusal == (
        "gradient_accumulation_steps x per_device_train_batch_size must be at most 1,048,576, got 1024 x 4096 = "
        "4,194,304. Lower one of them."
    )
    assert verdict(per_device_train_batch_size=2**12, gradient_accumulation_steps=2**8) == ([], [])


@pytest.mark.parametrize("name", ["adam_beta1", "adam_beta2"])
def test_betas_of_one_are_refused_where_they_are_used(name):
    refused = [f"{name} must be a number of at least 0 and below 1, got 1.0."]
    assert verdict(**{name: 1.0})[0] == verdict(**{name: 1.0}, optim="ademamix")[0] == refused
    assert verdict(**{name: 1.0}, optim="lion_32bit")[0] == refused
    assert verdict(**{name: 1.0}, optim="sgd") == ([], [])


@pytest.mark.parametrize("name, value", [
    ("adam_epsilon", 0), ("adam_beta2", 0.0), ("max_steps", -1), ("warmup_steps", 0.5), ("warmup_steps", 10_000),
    ("save_steps", 10**10), ("seed", 2**32 - 1), ("data_seed", -1), ("max_length", 10**9), ("num_train_epochs", 10**6),
    ("per_device_train_batch_size", 2**17), ("gradient_accumulation_steps", 10**4), ("eval_steps", None),
])  # fmt: skip
def test_values_that_are_only_unusual_are_taken(name, value):
    assert verdict(**{name: value}) == ([], [])


def test_a_schedule_of_no_number():
    [refusal], _ = verdict(lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": NAN})
    assert refusal == "num_cycles of lr_scheduler_kwargs must be a number, got nan."
    [refusal], _ = verdict(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": [2]})
    assert refusal == "power of lr_scheduler_kwargs must be a number, got [2]."
    assert verdict(lr_scheduler_type="inverse_sqrt", lr_scheduler_kwargs={"timescale": None}) == ([], [])
    [refusal], _ = verdict(lr_scheduler_type="inverse_sqrt", lr_scheduler_kwargs={"timescale": "x"})
    assert refusal == "timescale of lr_scheduler_kwargs must be a number or None, got 'x'."
    floor = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}
    [refusal], _ = verdict(**floor, learning_rate=0.0)
    assert refusal.startswith("min_lr of lr_scheduler_kwargs is divided by learning_rate, which is 0.")
    [refusal], _ = verdict(optim="sgd", optim_args="momentum=nan")
    assert refusal == "momentum of optim_args must be of type float, got 'nan'."


def test_cosine_takes_num_cycles_only():
    cosine = {"lr_scheduler_type": "cosine"}
    assert verdict(**cosine, lr_scheduler_kwargs={"num_cycles": 0.5}) == ([], [])
    [refusal], _ = verdict(**cosine, lr_scheduler_kwargs={"min_lr": 0.1})
    assert (
        refusal == "lr_scheduler_kwargs has the keys ['min_lr'], but lr_scheduler_type='cosine' takes num_cycles. Leave"
        " them out."
    )


def test_unused_columns_may_be_asked_for_either_way_and_are_never_read():
    line = TABLE["remove_unused_columns"]
    assert (line.how, line.why) == ("silent", "the loader takes the columns it needs and leaves the others")


@pytest.mark.parametrize(
    "given, meant",
    [("None", None), ("null", None), (None, None), ("AUTO", "auto"), ("auto", "auto"), ("128", 128), (8, 8)],
)
def test_what_a_pad_multiple_means(given, meant):
    assert as_pad_multiple("pad_to_multiple_of", given) == meant


@pytest.mark.parametrize("given", ["much", "0", "-8", "1.5", "", 0, 1.5, True])
def test_a_pad_multiple_that_means_nothing(given):
    with pytest.raises(ValueError) as error:
        as_pad_multiple("pad_to_multiple_of", given)
    assert (
        str(error.value) == f'pad_to_multiple_of must be "auto", a whole number of at least 1, or None, got {given!r}.'
    )
    assert verdict(pad_to_multiple_of=given) == ([str(error.value)], [])


@pytest.mark.parametrize(
    "given, meant",
    [(None, None), (False, None), ("", None), ("False", None), (True, True), ("true", True), ("out/a", "out/a")],
)
def test_what_resuming_means(given, meant):
    assert as_choice(given) is meant or as_choice(given) == meant


def test_epochs_do_not_matter_beside_max_steps():
    assert verdict(num_train_epochs=-1, max_steps=10) == ([], [])


def test_a_token_is_not_shown():
    assert show("hub_token", "hf_secret") == "hub_token='<HUB_TOKEN>'"


def test_full_determinism_wants_the_flag(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    [refusal], _ = verdict(full_determinism=True)
    assert (
        refusal == "full_determinism=True requires XLA_FLAGS=--xla_gpu_deterministic_ops=true in the environment before"
        " Python starts, got XLA_FLAGS='--xla_dump_to=x'. Set it, or pass use_cpu=True."
    )
    assert verdict(full_determinism=True, use_cpu=True) == ([], [])
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x {DETERMINISTIC_FLAG}")
    assert verdict(full_determinism=True) == ([], [])


def test_all_refusals_are_told_at_once():
    refusals, warnings = verdict(optim="lomo", debug="x", label_names=["x"])
    assert len(refusals) == 2 and len(warnings) == 1


def test_a_long_value_is_cut():
    _, [warning] = verdict(liger_kernel_config={"stage": {"stage": 3}, "comment": "auto" * 20})
    cut = "liger_kernel_config={'stage': {'stage': 3}, 'comment': 'autoautoautoautoautoa..."
    assert warning.startswith(f"{cut} has no effect")


def test_judging_changes_nothing():
    kwargs = {"num_cycles": 1}
    values = DEFAULTS | {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": kwargs}
    before = dict(values)
    validate(TABLE, values, DEFAULTS)
    assert values == before and kwargs == {"num_cycles": 1}
    assert as_dict("lr_scheduler_kwargs", kwargs) is not kwargs


@pytest.mark.parametrize("name, text", [
    ("evaluation_strategy", "use eval_strategy."),
    ("warmup_ratio", "use warmup_steps: a number below 1 is a ratio."),
    ("overwrite_output_dir", "leave it out: transformers no longer has it."),
    ("lerning_rate", "did you mean learning_rate?"),
    ("zzz", "no argument has a similar name."),
])  # fmt: skip
def test_way_out_of_an_unknown_name(name, text):
    assert way_out(name, TABLE) == text


def test_a_renamed_argument_is_not_also_a_field():
    assert not set(RENAMED) & set(TABLE)
    assert set(GONE.split()) <= set(RENAMED)


def test_every_name_of_transformers_has_its_fate():
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    assert {name.value for name in OptimizerNames} == {*OPTIMIZERS, *NEAREST} and not set(OPTIMIZERS) & set(NEAREST)
    assert set(TABLE["lr_scheduler_type"].supported) == {name.value for name in SchedulerType}
    assert set(NEAREST.values()) <= set(OPTIMIZERS)


@pytest.mark.parametrize("name, told", [
    ("paged_adamw_32bit", "the optimizer state stays on the device, unpaged; results are the same."),
    ("adamw_bnb_8bit", "the first moment is bfloat16 and the second float32: 6 bytes per parameter, instead of 2 "
     "with 8 bits."),
    ("lion_8bit",
     "the optimizer state is kept in 32 bits, 4 bytes per parameter; results equal the 32-bit optimizer's."),
])  # fmt: skip
def test_an_optimizer_that_is_not_quite_the_same_says_so(name, told):
    assert verdict(optim=name) == ([], [f"optim={name!r}: {told}"])


def test_every_optimizer_that_needs_no_note_has_none():
    silent = [name for name in OPTIMIZERS if verdict(optim=name) == ([], [])]
    assert silent == ["adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused",
                      "adamw_anyprecision", "adafactor", "sgd", "adagrad", "rmsprop", "rmsprop_bnb",
                      "rmsprop_bnb_32bit", "lion_32bit", "ademamix",
                      "schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"]  # fmt: skip


def test_a_deepspeed_file_that_agrees_is_read_and_the_rest_of_it_warned_of(tmp_path):
    path = tmp_path / "zero3.json"
    path.write_text(
        '{"zero_optimization": {"stage": 3}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 8,'
        ' "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "bf16": {},'
        ' "steps_per_print": 5, "wall_clock_breakdown": false}'
    )
    told = "deepspeed: steps_per_print, wall_clock_breakdown have no effect in trl_jax."
    assert verdict(deepspeed=str(path)) == ([], [told])


@pytest.mark.parametrize("given, now, environment, notes", [
    ({"evaluation_strategy": "steps"}, {"eval_strategy": "steps"}, {},
     ["evaluation_strategy is an old name: use eval_strategy."]),
    ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}, {},
     ["warmup_ratio is an old name: use warmup_steps: a number below 1 is a ratio."]),
    ({"warmup_ratio": 0.1, "warmup_steps": 5}, {"warmup_steps": 5}, {}, []),
    ({"warmup_ratio": 0.1, "warmup_steps": 0}, {"warmup_steps": 0.1}, {},
     ["warmup_ratio is an old name: use warmup_steps: a number below 1 is a ratio."]),
    ({"no_cuda": True}, {"use_cpu": True}, {}, ["no_cuda is an old name: use use_cpu."]),
    ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}, {},
     ["group_by_length is an old name: use train_sampling_strategy."]),
    ({"group_by_length": False}, {}, {}, ["group_by_length is an old name: use train_sampling_strategy."]),
    ({"logging_dir": "logs"}, {}, {"TENSORBOARD_LOGGING_DIR": "logs"},
     ["logging_dir is an old name: set the environment variable TENSORBOARD_LOGGING_DIR."]),
    ({"push_to_hub_token": "x"}, {"hub_token": "x"}, {}, ["push_to_hub_token is an old name: use hub_token."]),
    ({"push_to_hub_organization": "us", "hub_model_id": "m"}, {"hub_model_id": "us/m"}, {},
     ["push_to_hub_organization is an old name: use hub_model_id, as organization/name."]),
    ({"overwrite_output_dir": True, "seed": 1}, {"seed": 1}, {},
     ["overwrite_output_dir no longer has an effect; leave it out: transformers no longer has it."]),
    ({"save_safetensors": True}, {}, {},
     ["save_safetensors no longer has an effect; leave it out: transformers no longer has it."]),
    ({"reference_free": False}, {}, {},
     ["reference_free=False has no effect: TRL no longer has it. Leave it out."]),
    ({"padding_value": 0}, {}, {}, ["padding_value no longer has an effect; leave it out: TRL no longer has it."]),
    ({"optim": "adamw_hf"}, {"optim": "adamw_torch"}, {},
     ["optim='adamw_hf' is an old value: use optim='adamw_torch'."]),
])  # fmt: skip
def test_old_names_are_translated(given, now, environment, notes):
    before = dict(given)
    assert translate_old_names(given, TABLE) == (now, environment, notes) and given == before


@pytest.mark.parametrize("given, text", [
    ({"save_safetensors": False}, "save_safetensors=False: weights are always saved as safetensors. Leave it out."),
    ({"evaluation_strategy": "steps", "eval_strategy": "no"},
     "evaluation_strategy='steps' and eval_strategy='no' are the same argument. Leave evaluation_strategy out."),
    ({"max_prompt_length": 5}, "max_prompt_length=5: use max_length, which limits prompt and completion together."),
    ({"rpo_alpha": 0.5}, "rpo_alpha=0.5: use loss_type=['sigmoid', 'sft'] and loss_weights=[1.0, rpo_alpha]."),
    ({"push_to_hub_organization": "us"},
     "push_to_hub_organization requires a model name: use hub_model_id='organization/name'."),
])  # fmt: skip
def test_old_names_that_cannot_be(given, text):
    with pytest.raises(TypeError) as error:
        translate_old_names(given, TABLE)
    assert str(error.value) == text
