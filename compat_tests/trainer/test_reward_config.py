"""RewardConfig: TRL's fields, and construction with and without torch."""

import copy
import dataclasses
import inspect
import json
import os
import pickle
import subprocess
import sys
import typing
import warnings

import pytest
from transformers import TrainingArguments

from trl_jax.config.base import BaseConfig
from trl_jax.config.devices import requested_mesh
from trl_jax.trainer.model_config import ModelConfig
from trl_jax.trainer.reward_config import RewardConfig


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def declared(cls):
    hints = typing.get_type_hints(cls)
    return [(f.name, hints[f.name], f.default, f.default_factory, f.init) for f in dataclasses.fields(cls)]


OWN = {"eval_report": False, "eval_subset_column": "subset", "batch_layout": "auto",
       "remat_policy": "auto", "mesh_shape": None, "coordinator_address": None, "num_processes": None,
       "process_id": None, "initialization_timeout": 300,
       "max_minutes": None, "save_minutes": None, "log_json": None}  # fmt: skip


@pytest.mark.parametrize("ours, theirs", [(RewardConfig, "RewardConfig"), (ModelConfig, "ModelConfig")])
def test_fields_order_defaults_and_types_are_trls(ours, theirs):
    trl = pytest.importorskip("trl")
    assert [fact for fact in declared(ours) if fact[0] not in OWN] == declared(getattr(trl, theirs))


def test_positional_arguments_are_trls():
    trl = pytest.importorskip("trl")
    ours = inspect.signature(RewardConfig.__init__).parameters
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in OWN)
    assert [name for name in ours if name not in OWN] == list(inspect.signature(trl.RewardConfig.__init__).parameters)
    args = RewardConfig("out", 2, 1.5)
    assert (args.output_dir, args.per_device_train_batch_size, args.num_train_epochs) == ("out", 2, 1.5)


def test_the_same_values_as_trl_after_construction():
    trl = pytest.importorskip("trl")
    given = dict(use_cpu=True, eval_strategy="steps", load_best_model_at_end=True, save_steps=20,
                 model_init_kwargs='{"dtype": "float32"}', pad_to_multiple_of="64", report_to="none",
                 lr_scheduler_type="cosine", lr_scheduler_kwargs='{"num_cycles": 1}')  # fmt: skip
    ours, theirs = RewardConfig("out", **given).to_dict(), trl.RewardConfig("out", **given).to_dict()
    # accelerate removes use_configured_state from its own config when torch picks a device; ours never picks one.
    assert ours.pop("accelerator_config").items() >= theirs.pop("accelerator_config").items()
    assert {name: ours.pop(name) for name in OWN} == OWN
    assert ours == theirs


def test_defaults():
    args = RewardConfig()
    assert isinstance(args, TrainingArguments)
    assert (args.output_dir, args.learning_rate, args.logging_steps) == ("trainer_output", 1e-4, 10)
    assert args.bf16 is True and args.activation_checkpointing is True and args.gradient_checkpointing is True
    assert args.pad_to_multiple_of == "auto" and args.compute_dtype == "bfloat16" and args.eval_dtype is None


def test_a_plain_construction_says_nothing():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        RewardConfig("out", bf16=False, torch_compile=True, tf32=True, gradient_checkpointing_kwargs=None)
    assert [str(warning.message) for warning in said] == []


@pytest.mark.parametrize("given, found", [
    (dict(gradient_checkpointing=False), False), (dict(activation_checkpointing=False), False),
    (dict(gradient_checkpointing=None), False), (dict(activation_checkpointing=True), True),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
def test_the_two_names_of_checkpointing_agree(given, found):
    args = RewardConfig("out", **given)
    assert args.activation_checkpointing is found and args.gradient_checkpointing is found


@pytest.mark.parametrize("given, bf16, computes", [
    (dict(), True, "bfloat16"), (dict(bf16=False), False, "float32"), (dict(fp16=True), False, "bfloat16"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:fp16=True")
def test_precision(given, bf16, computes):
    args = RewardConfig("out", **given)
    assert args.bf16 is bf16 and args.compute_dtype == computes


@pytest.mark.filterwarnings("ignore:fp16_full_eval=True")
def test_full_eval_in_half_precision():
    assert RewardConfig("out", bf16_full_eval=True).eval_dtype == "bfloat16"
    assert RewardConfig("out", fp16_full_eval=True).eval_dtype == "bfloat16"


def test_both_half_precisions_are_an_error():
    with pytest.raises(ValueError, match="At most one of fp16 and bf16 can be True, but not both"):
        RewardConfig("out", fp16=True, bf16=True)


def test_a_warning_names_the_argument_and_points_at_the_caller():
    with pytest.warns(UserWarning) as seen:
        args = RewardConfig("out", label_smoothing_factor=0.1)
    [warning] = seen
    assert str(warning.message).startswith("label_smoothing_factor=0.1 has no effect in trl_jax")
    assert warning.filename == __file__
    assert args.label_smoothing_factor == 0.1


def test_pad_token_is_deprecated():
    text = r"pad_token='<pad>' is deprecated: set tokenizer.pad_token and pass the tokenizer to the trainer as"
    with pytest.warns(FutureWarning, match=text) as seen:
        assert RewardConfig("out", pad_token="<pad>").pad_token == "<pad>"
    assert seen[0].filename == __file__


def test_every_refusal_is_in_the_error():
    with pytest.raises(ValueError) as error:
        RewardConfig(
            "out", fsdp="shards", accelerator_config="a.json", lr_scheduler_type="reduce_lr_on_plateau", max_length=0
        )
    assert str(error.value).splitlines() == [
        (
            "lr_scheduler_type='reduce_lr_on_plateau' follows an evaluation metric, but eval_strategy is 'no'."
            " Set eval_strategy."
        ),
        "accelerator_config='a.json': there is no such file. Pass a JSON file or a dict, or leave it out.",
        (
            "fsdp must be some of full_shard, shard_grad_op, no_shard, hybrid_shard,"
            " hybrid_shard_zero2, offload, auto_wrap, got ['shards']."
        ),
        "max_length must be a whole number of at least 1 or None, got 0.",
    ]


def test_processes_on_several_hosts_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="WORLD_SIZE=4 is set .* Start the script once per host, with python."):
        RewardConfig("out")


def test_old_names_are_taken_and_told_at_the_callers_line(monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "before")
    with pytest.warns(FutureWarning) as seen:
        args = RewardConfig("out", evaluation_strategy="steps", warmup_ratio=0.1, no_cuda=True, logging_dir="here")
    assert (args.eval_strategy, args.warmup_steps, args.use_cpu) == ("steps", 0.1, True)
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == "here"
    assert {warning.filename for warning in seen} == {__file__} and len(seen) == 4
    with pytest.warns(FutureWarning, match="evaluation_strategy is an old name: use eval_strategy."):
        inherited = type("Mine", (RewardConfig,), {})("out", evaluation_strategy="steps")
    assert inherited.eval_strategy == "steps"


LAUNCHED = {
    "stage 3": ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "fsdp"),
    "stage 2": ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, "data"),
    "full shard": ({"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "1"}, "fsdp"),
    "version 2": ({"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "true"}, "fsdp"),
    "no shard": ({"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "data"),
}


@pytest.mark.parametrize(("told", "axis"), LAUNCHED.values(), ids=list(LAUNCHED))
def test_what_accelerates_launcher_was_told_divides_the_run(told, axis, monkeypatch):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    args = RewardConfig("out")
    assert requested_mesh(vars(args)).sizes == {axis: -1}
    assert requested_mesh(vars(RewardConfig("out", mesh_shape="data:1"))).sizes == {"data": 1}
    assert all(os.environ[name] == value for name, value in told.items())


@pytest.mark.parametrize(("precision", "dtype"), [("no", "float32"), ("bf16", "bfloat16"), ("fp16", "bfloat16")])
def test_the_launchers_precision_counts_without_one_of_the_config(precision, dtype, monkeypatch):
    """mixed_precision is transformers': what TRL computes in."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    args = RewardConfig("out", bf16=False)
    assert (args.mixed_precision, args.compute_dtype) == (precision, dtype)
    assert RewardConfig("out").mixed_precision == "bf16" and RewardConfig("out").compute_dtype == "bfloat16"


def test_fp8_of_the_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert RewardConfig("out").compute_dtype == "bfloat16"
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION=fp8 is not in this release"):
        RewardConfig("out", bf16=False)


def test_a_deepspeed_file_of_the_launcher(monkeypatch, tmp_path):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 16}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    with pytest.raises(ValueError, match="deepspeed sets train_micro_batch_size_per_gpu to 16, but .* is 8"):
        RewardConfig("out")
    assert RewardConfig("out", per_device_train_batch_size=16).deepspeed == str(file)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    with pytest.raises(ValueError, match="deepspeed sets zero_optimization.offload_param, which is not"):
        RewardConfig("out")


@pytest.mark.parametrize(
    "name, text",
    [
        ("zzz", "RewardConfig has no argument 'zzz': no argument has a similar name."),
        ("max_lenght", "RewardConfig has no argument 'max_lenght': did you mean max_length?"),
    ],
)
def test_unknown_names(name, text):
    with pytest.raises(TypeError) as error:
        RewardConfig("out", **{name: 1})
    assert str(error.value) == text


def test_a_subclass_may_add_its_own():
    @dataclasses.dataclass
    class Mine(RewardConfig):
        temperature: float = 1.0

    class Wrapped(RewardConfig):
        def __init__(self, name, **kwargs):
            super().__init__(f"runs/{name}", **kwargs)

    assert Mine("out", temperature=2.0).temperature == 2.0
    assert Wrapped(name="a", max_length=7).output_dir == "runs/a"


def test_a_subclass_s_own_defaults_are_held_to_the_same_rules():
    @dataclasses.dataclass
    class Finding(RewardConfig):
        optim_target_modules: str = "all-linear"
        label_smoothing_factor: float = 0.1
        learning_rate: float = 3e-5

    @dataclasses.dataclass
    class Further(Finding):
        optim_target_modules: str | None = None

    with pytest.raises(ValueError, match="^optim_target_modules='all-linear' is not in this release of trl_jax: "):
        Finding("out")
    with pytest.warns(UserWarning, match="^label_smoothing_factor=0.1 has no effect in trl_jax") as seen:
        assert Further("out").learning_rate == 3e-5
    assert len(seen) == 1
    with pytest.warns(UserWarning):
        assert Finding("out", optim_target_modules=None).optim_target_modules is None


def test_help_says_what_auto_padding_does():
    [told] = [f.metadata["help"] for f in dataclasses.fields(RewardConfig) if f.name == "pad_to_multiple_of"]
    for words in ("multiples of 32 up to 256, then four per doubling", "do not depend on it"):
        assert words in told


@pytest.mark.parametrize("given, kept", [("None", None), ("null", None), ("128", 128), (None, None), ("AUTO", "auto")])
def test_pad_to_multiple_of(given, kept):
    assert RewardConfig("out", pad_to_multiple_of=given).pad_to_multiple_of == kept


def test_what_torch_would_get_is_kept_as_given():
    with pytest.warns(UserWarning, match="torch_compile_mode"):
        args = RewardConfig("out", torch_compile=True, torch_compile_mode="default", tf32=False)
    assert (args.torch_compile, args.torch_compile_mode, args.torch_compile_backend) == (
        True,
        "default",
        None,
    )
    assert args.tf32 is False and args.use_cpu is False


def test_one_device():
    args = RewardConfig("out", use_cpu=True, per_device_train_batch_size=3, per_device_eval_batch_size=5)
    assert (str(args.device), args.device.type, args.n_gpu) == ("cpu", "cpu", 0)
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    state = args.distributed_state
    assert (state.num_processes, str(state.device)) == (1, "cpu") and state.is_main_process and state.is_last_process
    state.wait_for_everyone()
    with state.main_process_first(), state.local_main_process_first():
        assert state.on_main_process(len)("ab") == 2
    assert (args.train_batch_size, args.eval_batch_size) == (3, 5)
    assert args.should_log and args.should_save and args.parallel_mode.value == "not_parallel"
    assert args.get_process_log_level() >= 0
    with args.main_process_first():
        pass


@pytest.mark.parametrize("backend, kind, shown, gpus", [
    ("cpu", "cpu", "cpu", 0), ("gpu", "cuda", "cuda:0", 1), ("tpu", "tpu", "tpu:0", 1),
])  # fmt: skip
def test_device_speaks_torchs_words(monkeypatch, backend, kind, shown, gpus):
    import jax

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    args = RewardConfig("out")
    assert (args.device.type, str(args.device), args.n_gpu) == (kind, shown, gpus)


def test_torch_is_never_asked_for_a_device(monkeypatch):
    torch = pytest.importorskip("torch")

    def asked(*args, **kwargs):
        raise AssertionError("torch was asked")

    for name in ("is_available", "device_count", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, name, asked)
    args = RewardConfig("out", tf32=True, torch_compile=True, bf16_full_eval=True)
    assert args.n_gpu in (0, 1)


def test_dictionaries_hide_tokens():
    args = RewardConfig("out")
    args.hub_token = "hf_secret"
    for text in (args.to_json_string(), str(args), repr(args), str(args.to_sanitized_dict())):
        assert "hf_secret" not in text
    assert json.loads(args.to_json_string())["learning_rate"] == 1e-4
    assert args.to_sanitized_dict()["train_batch_size"] == 8


def test_copies():
    args = RewardConfig("out", max_length=64, eval_strategy="steps", eval_steps=5)
    for twin in (
        copy.copy(args),
        copy.deepcopy(args),
        pickle.loads(pickle.dumps(args)),
        dataclasses.replace(args),
    ):
        assert twin.to_dict() == args.to_dict()


def test_checked_again_after_a_change():
    args = RewardConfig("out")
    assert args.check() == []
    args.set_optimizer(name="lomo")
    with pytest.raises(
        ValueError, match="optim='lomo' is not in this release of trl_jax; the closest supported optimizer is ada"
    ):
        args.check()


def test_the_users_dict_is_left_alone():
    given = {"num_cycles": 1}
    args = RewardConfig("out", lr_scheduler_type="cosine", lr_scheduler_kwargs=given, model_init_kwargs={"a": "1"})
    assert given == {"num_cycles": 1} and args.model_init_kwargs == {"a": "1"}


def test_output_dir(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError) as error:
        RewardConfig(str(tmp_path / "file" / "out"))
    assert (
        str(error.value) == f"output_dir='{tmp_path}/file/out': {tmp_path}/file is a file. Choose another output_dir."
    )
    with pytest.raises(NotADirectoryError, match="is a file. Choose another output_dir."):
        RewardConfig(str(tmp_path / "file"))
    assert not (tmp_path / "new").exists()
    RewardConfig(str(tmp_path / "new" / "run"))
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=f"{tmp_path} is not writable. Choose another output_dir."):
        RewardConfig(str(tmp_path / "run"))


def test_home_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RewardConfig("~/run").output_dir == f"{tmp_path}/run"


TORCH_FREE = """
import sys
for name in ("torch", "trl", "accelerate", "peft"):
    sys.modules[name] = None  # importing it fails, and finding it finds nothing
from trl_jax.trainer.reward_config import RewardConfig
args = RewardConfig("out", eval_strategy="steps", bf16_full_eval=True, tf32=True, torch_compile=True)
assert "jax" not in sys.modules, "a configuration starts no backend"
import warnings
warnings.simplefilter("ignore")
for given in (dict(fsdp="full_shard"), dict(deepspeed={"zero_optimization": {"stage": 3}}),
              dict(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps"), dict(fp16=True)):
    made = RewardConfig("out", **given)
    assert all(getattr(made, name) == value for name, value in given.items()), given
assert args.to_json_string() and args.to_sanitized_dict()["eval_batch_size"] == 8
assert args.optim == "adamw_torch" and args.get_process_log_level() and args.should_save
with args.main_process_first():
    assert args.device.type in ("cpu", "cuda", "tpu")
print("fine")
"""


def test_construction_without_torch(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", TORCH_FREE], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert run.stdout == "fine\n", run.stderr


def test_model_config():
    assert ModelConfig(lora_target_modules=["all-linear"]).lora_target_modules == "all-linear"
    assert ModelConfig(lora_target_modules=["q", "k"]).lora_target_modules == ["q", "k"]
    with pytest.raises(ValueError, match="load_in_8bit=True and load_in_4bit=True: a model has one of them"):
        ModelConfig(load_in_8bit=True, load_in_4bit=True)


def test_base_config_is_a_training_arguments():
    assert issubclass(RewardConfig, BaseConfig) and issubclass(BaseConfig, TrainingArguments)
