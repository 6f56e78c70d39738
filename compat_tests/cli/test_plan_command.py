"""`trl-jax plan` as a command."""

import json
import os
import subprocess
import sys

import pytest

from compat_tests.effort import only_thorough
from compat_tests.plan.planned import with_figures
from compat_tests.tiny import preference_rows
from trl_jax.cli.main import main
from trl_jax.core.trainers import TRAINERS
from trl_jax.plan import plan as plans
from trl_jax.plan.chips import CHIPS
from trl_jax.scripts.plan import IGNORED_ARGUMENTS, ignored_arguments
from trl_jax.trainer.reward_config import RewardConfig


@pytest.fixture(autouse=True)
def begun(monkeypatch):
    """JAX is already initialized in this process and keeps its settings."""
    monkeypatch.setattr("trl_jax.plan.compile.prepare", lambda place: None)


@only_thorough
def test_simulated_devices_from_the_shell(checkpoint, tmp_path):
    """In a separate process, because JAX must be told how many devices to simulate before it is initialized."""
    written = tmp_path / "plan.json"
    flags = f"--model_name_or_path {checkpoint()} --topology cpu:2 --mesh_shape fsdp:2 --json {written}"
    flags += " --max_length 64 --per_device_train_batch_size 2 --batch_layout padded"
    done = subprocess.run(
        [sys.executable, "-m", "trl_jax.cli.main", "plan", *flags.split()],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "on cpu:2: 2 device(s), simulated, memory unknown; mesh fsdp:2." in done.stdout
    found = json.loads(written.read_text())
    gathered = [one for one in found["compiled"]["cost"]["collectives"] if one["kind"] == "all-gather"]
    assert sum(one["bytes"] for one in gathered) > 2 * found["memory"]["parameters"]  # forward and backward
    assert found["memory"]["parameters"] < 0.6 * 4 * found["parameters"] and found["suggestions"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


def test_suggestions_from_the_shell(checkpoint, capsys, monkeypatch):
    monkeypatch.setitem(CHIPS, "a100", CHIPS["a100"]._replace(memory=3e8))
    monkeypatch.setattr(
        plans, "plan", lambda run, args, place, plan=plans.plan: with_figures(plan(run, args, place), args)
    )
    flags = f"--model_name_or_path {checkpoint()} --topology a100:1 --max_length 50000 --per_device_train_batch_size 2"
    assert main(["plan", *flags.split()]) == 0
    told = capsys.readouterr().out
    assert "It does not fit: " in told
    assert "- --per_device_train_batch_size 1 --gradient_accumulation_steps 2: It fits" in told
    assert "- --max_length 25000: It fits" in told
    for flag in ("--suggestions", "--levers"):  # the second is its old name
        assert main(["plan", *flags.split(), flag, "false"]) == 0
        assert "- --max_length" not in capsys.readouterr().out


def test_rows_of_a_file_tell_the_lengths(checkpoint, capsys, tmp_path):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in preference_rows(12)))
    flags = f"--model_name_or_path {checkpoint()} --topology h100:1 --dataset_name {rows}"
    assert main(["plan", *flags.split(), "--per_device_train_batch_size", "4", "--batch_layout", "padded"]) == 0
    told = capsys.readouterr().out
    assert "Row lengths: 32" in told or "Row lengths: 64" in told
    assert "(x" in told and "Whether it fits is unknown: weights" in told


def test_mistakes_are_told_in_a_line(checkpoint, capsys):
    assert main(["plan", "--model_name_or_path", str(checkpoint()), "--topology", "v9:1"]) == 2
    assert "--topology v9:1 is unknown. Known: v5e:AxB" in capsys.readouterr().err
    assert main(["plan", "--topology", "v5e:2x2", "--max_length", "64"]) == 2
    assert "--model_name_or_path is missing" in capsys.readouterr().err
    assert main(["plan", "reward", "--topology", "v5e:2x2", "--model_name_or_path", "x"]) == 2
    assert "unexpected 'reward': the trainer is the flag --trainer reward." in capsys.readouterr().err
    assert main(["plan", "--topology", "v5e:2x2", "--model_name_or_path", "x", "--load_in_4bit"]) == 2
    assert "--load_in_4bit and --load_in_8bit need --use_peft" in capsys.readouterr().err


def test_every_argument_has_a_part_in_a_plan_or_is_told_to_have_none(checkpoint, tmp_path):
    """Add new arguments to one of the two lists."""
    honored = """
        max_steps num_train_epochs per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
        optim optim_args lr_scheduler_type lr_scheduler_kwargs train_sampling_strategy learning_rate weight_decay
        adam_beta1 adam_beta2 adam_epsilon max_grad_norm warmup_steps neftune_noise_alpha bf16 fp16 tf32
        activation_checkpointing gradient_checkpointing activation_checkpointing_kwargs gradient_checkpointing_kwargs
        activation_offloading remat_policy eval_strategy eval_on_start seed data_seed dataloader_drop_last
        length_column_name accelerator_config parallelism_config fsdp fsdp_config deepspeed mesh_shape
        model_init_kwargs trust_remote_code chat_template_path disable_dropout eos_token pad_token max_length
        dataset_num_proc pad_to_multiple_of center_rewards_coefficient batch_layout
        dataset_text_field dataset_kwargs packing packing_strategy eval_packing padding_free truncation_mode
        shuffle_dataset completion_only_loss assistant_only_loss average_tokens_across_devices loss_type
        label_smoothing_factor router_aux_loss_coef max_prompt_length
        beta discopop_tau f_alpha_divergence_coef f_divergence_type label_smoothing ld_alpha
        alpha cpo_alpha simpo_gamma
        loss_weights precompute_ref_log_probs use_weighting desirable_weight undesirable_weight
        cast_lm_head_to_fp32 chat_template_kwargs delta entropy_coef entropy_coef_delta entropy_coef_max
        entropy_coef_min entropy_target epsilon epsilon_high generation_batch_size generation_kwargs
        importance_sampling_level max_completion_length num_generations num_generations_eval num_iterations
        off_policy_mask_threshold reward_weights sapo_temperature_neg sapo_temperature_pos steps_per_generation
        temperature top_entropy_quantile total_episodes use_adaptive_entropy use_bias_correction_kl
        max_completions_per_device
        vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
        teacher_model_init_kwargs teacher_model_name_or_path teacher_model_revision
    """
    tables = [names.load_config().argument_table() for names in TRAINERS.values()]
    known = {name for table in tables for name, line in table.items() if line.how in ("native", "mapped")}
    assert known == IGNORED_ARGUMENTS | set(honored.split()) and not IGNORED_ARGUMENTS & set(honored.split())
    quiet = RewardConfig(str(tmp_path), eval_strategy="steps", max_length=64)
    assert ignored_arguments(quiet) == ["output_dir"]


def test_what_a_plan_does_not_look_at_is_named(checkpoint, capsys):
    flags = f"--model_name_or_path {checkpoint()} --topology h100:1 --max_length 64 --push_to_hub --save_steps 7"
    flags += " --eval_strategy steps --eval_steps 5 --resume_from_checkpoint somewhere --use_peft --load_in_4bit"
    assert main(["plan", *flags.split(), "--batch_layout", "padded"]) == 0
    told = capsys.readouterr()
    named = "--eval_steps, --push_to_hub, --resume_from_checkpoint, --save_steps"
    assert f"The plan covers a step and an evaluation pass; it does not depend on {named}." in told.err
    assert "Evaluation: a pass of 16 x 64 tokens per device" in told.out and " trained) on h100:1" in told.out
