"""SFTConfig: TRL's fields and defaults, names of earlier releases, errors and warnings."""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings

import pytest
from transformers import TrainingArguments

from compat_tests.trainer.test_reward_config import declared
from trl_jax.trainer.sft_config import SFTConfig

OWN = {"batch_layout": "auto", "remat_policy": "auto", "mesh_shape": None, "coordinator_address": None,
       "num_processes": None, "process_id": None, "initialization_timeout": 300,
       "max_minutes": None, "save_minutes": None, "log_json": None}  # fmt: skip


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_fields_order_defaults_and_types_are_trls():
    trl = pytest.importorskip("trl")
    assert [fact for fact in declared(SFTConfig) if fact[0] not in OWN] == declared(trl.SFTConfig)
    ours = inspect.signature(SFTConfig.__init__).parameters
    assert [name for name in ours if name not in OWN] == list(inspect.signature(trl.SFTConfig.__init__).parameters)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_same_values_as_trl_after_construction():
    trl = pytest.importorskip("trl")
    given = dict(use_cpu=True, dataset_kwargs='{"skip_prepare_dataset": true}', packing=True, pad_to_multiple_of="64",
                 packing_strategy="bfd-requeue", loss_type="chunked_nll", truncation_mode="keep_end",
                 report_to="none", pad_token="<pad>")  # fmt: skip
    ours, theirs = SFTConfig("out", **given).to_dict(), trl.SFTConfig("out", **given).to_dict()
    assert ours.pop("accelerator_config").items() >= theirs.pop("accelerator_config").items()
    assert {name: ours.pop(name) for name in OWN} == OWN
    assert ours == theirs


def test_defaults():
    args = SFTConfig()
    assert isinstance(args, TrainingArguments)
    assert (args.learning_rate, args.logging_steps, args.max_length, args.bf16) == (2e-5, 10, 1024, True)
    assert args.activation_checkpointing is True and args.remats == [False, True]


def test_a_plain_construction_says_nothing():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        SFTConfig("out", packing=True, label_smoothing_factor=0.1, router_aux_loss_coef=0.0, assistant_only_loss=True)
    assert [str(warning.message) for warning in said] == []


@pytest.mark.parametrize(("name", "old", "new"), [
    ("loss_type", "chunked_nll", "nll"), ("packing_strategy", "bfd-requeue", "bfd_split"),
    ("truncation_mode", "keep_end", "keep_end"),
])  # fmt: skip
def test_values_of_earlier_releases_are_told_at_the_callers_line(name, old, new):
    with pytest.warns(FutureWarning, match=f"{name}='{old}' is deprecated: use {name}=") as seen:
        args = SFTConfig("out", **{name: old})
    assert vars(args)[name] == new and seen[0].filename == __file__


@pytest.mark.parametrize(("old", "new", "value"), [
    ("max_seq_length", "max_length", 7), ("use_liger", "use_liger_kernel", False), ("dataset_batch_size", None, 9),
    ("num_of_sequences", None, 5), ("chars_per_token", None, 3.6),
])  # fmt: skip
def test_names_of_earlier_releases(old, new, value):
    with pytest.warns(FutureWarning, match=f"^{old} (is an old name: use {new}|no longer has an effect; leave it out)"):
        args = SFTConfig("out", **{old: value})
    assert new is None or vars(args)[new] == value


def test_names_of_earlier_releases_are_read_and_set():
    args = SFTConfig("out", max_length=7)
    assert args.max_seq_length == 7 and args.use_liger is False and args.evaluation_strategy == "no"
    with pytest.warns(FutureWarning, match="^max_seq_length is an old name: use max_length") as seen:
        args.max_seq_length = 9
    assert args.max_length == 9 and seen[0].filename == __file__ and "max_seq_length" not in vars(args)
    # Another trainer's, one without an equal value, an unknown one.
    for name in ("response_length", "warmup_ratio", "max_sequence"):
        with pytest.raises(AttributeError, match=f"'SFTConfig' object has no attribute '{name}'"):
            getattr(args, name)


def test_padding_free_is_a_layout():
    assert SFTConfig("out", padding_free=True).batch_layout == "packed"
    assert SFTConfig("out", padding_free=True, batch_layout="padded").batch_layout == "padded"


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_kwargs` is deprecated")
@pytest.mark.parametrize("name", ["gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"])
def test_selective_checkpointing_keeps_products(name):
    assert SFTConfig("out", **{name: {"selective": True, "use_reentrant": False}}).remats == [False]
    assert SFTConfig("out", **{name: {"selective": False}}).remats == [False, True]


@pytest.mark.parametrize(("given", "text"), [
    ({"loss_type": "mse"}, "Invalid `loss_type` mse passed. Supported values are 'nll' and 'dft'."),
    ({"truncation_mode": "middle"}, "Unsupported truncation mode: middle, expected 'keep_start' or 'keep_end'"),
    ({"packing_strategy": "ffd"},
     "packing_strategy='ffd' is not in this release of trl_jax; supported: bfd, bfd_split, wrapped."),
    ({"label_smoothing_factor": 1.5}, "label_smoothing_factor must be at most 1.0, got 1.5."),
    ({"router_aux_loss_coef": -1}, "router_aux_loss_coef must be a number of at least 0 or None, got -1."),
    ({"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"selective": True}},
     "`gradient_checkpointing_kwargs={'selective': True}` requires `gradient_checkpointing=True`."),
    ({"gradient_checkpointing_kwargs": {"selective": True, "use_reentrant": True}},
     "`gradient_checkpointing_kwargs={'selective': True}` requires non-reentrant gradient checkpointing. Set "
     "`use_reentrant` to `False`, or leave it unset."),
])  # fmt: skip
def test_values_that_are_refused(given, text):
    with pytest.raises(ValueError) as error:
        SFTConfig("out", **given)
    assert str(error.value) == text


@pytest.mark.parametrize(("given", "text"), [
    ({"label_smoothing_factor": 0.1, "loss_type": "dft"}, "label_smoothing_factor=0.1 has no effect with loss_type="),
    ({"dataset_kwargs": {"add_special_tokens": False}}, r"dataset_kwargs holds \['add_special_tokens'\], which have"),
    ({"use_liger_kernel": True}, "use_liger_kernel=True has no effect in trl_jax: XLA compiles its own kernels"),
    ({"label_names": ["mine"]}, r"label_names=\['mine'\] has no effect in trl_jax: the column of labels is called"),
])  # fmt: skip
def test_values_that_are_warned_of(given, text):
    with pytest.warns(UserWarning, match=f"^{text}"):
        SFTConfig("out", **given)


def test_it_is_written_as_json():
    written = json.loads(SFTConfig("out", dataset_kwargs={"skip_prepare_dataset": True}).to_json_string())
    assert written["dataset_kwargs"] == {"skip_prepare_dataset": True}
    assert written.keys() >= {f.name for f in dataclasses.fields(SFTConfig)}
