"""GRPOConfig and RLOOConfig: TRL's fields and defaults, how arguments are derived from each other, errors and
warnings."""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings

import pytest
from transformers import TrainingArguments

from compat_tests.trainer.test_reward_config import declared
from trl_jax.scripts.utils import TrlParser
from trl_jax.trainer.grpo_config import GRPOConfig
from trl_jax.trainer.rloo_config import RLOOConfig

OWN = {"batch_layout": "auto", "remat_policy": "auto", "mesh_shape": None, "coordinator_address": None,
       "num_processes": None, "process_id": None, "initialization_timeout": 300,
       "max_minutes": None, "save_minutes": None, "log_json": None, "max_prompt_length": None,
       "reward_timeout": None, "chat_template_path": None, "vllm_weights_dir": None,
       "vllm_server_restart_timeout": None, "max_completions_per_device": None}  # fmt: skip
# Arguments of earlier RLOOConfigs, which ours keeps.
OLD = dict.fromkeys(("missing_eos_penalty", "total_episodes", "reward_model_path", "sft_model_path"))
OLD["sanity_check"] = False
BOTH = pytest.mark.parametrize("kind", [GRPOConfig, RLOOConfig])
NAMES = {*OWN, *OLD, "generate_ahead"}
ALGORITHMS = {GRPOConfig: "GRPO", RLOOConfig: "RLOO"}


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@BOTH
def test_fields_order_defaults_and_types_are_trls(kind):
    theirs = getattr(pytest.importorskip("trl"), kind.__name__)
    assert [fact for fact in declared(kind) if fact[0] not in NAMES] == declared(theirs)
    ours = inspect.signature(kind.__init__).parameters
    assert [name for name in ours if name not in NAMES] == list(inspect.signature(theirs.__init__).parameters)


SHARED = dict(use_cpu=True, report_to="none", pad_to_multiple_of="64", bf16=False, max_steps=3,
              generation_kwargs='{"min_new_tokens": 3}', chat_template_kwargs={"enable_thinking": False},
              reward_weights=[0.5, 2.0], num_generations=4)  # fmt: skip


@BOTH
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("given", [
    {}, {"generation_batch_size": 32}, {"steps_per_generation": 6}, {"gradient_accumulation_steps": 3},
    {"eval_strategy": "steps", "num_generations_eval": 1}, {"use_transformers_paged": True},
])  # fmt: skip
def test_the_same_values_as_trl_after_construction(kind, given):
    theirs = getattr(pytest.importorskip("trl"), kind.__name__)("out", **SHARED, **given).to_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "use_transformers_continuous_batching=True: completions are written by")
        ours = kind("out", **SHARED, **given).to_dict()
    assert ours.pop("accelerator_config").items() >= theirs.pop("accelerator_config").items()
    own = OWN | (OLD if kind is RLOOConfig else {"generate_ahead": False})
    assert {name: ours.pop(name) for name in own} == own
    assert ours == theirs


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("given", [
    {"scale_rewards": True}, {"scale_rewards": False}, {"scale_rewards": "batch"},
    {"vllm_importance_sampling_cap": 2.0}, {"log_completions": True, "log_completions_hub_repo": "mine"},
])  # fmt: skip
def test_values_of_grpo_alone(given):
    trl = pytest.importorskip("trl")
    names = ("scale_rewards", "vllm_importance_sampling_clip_max", "log_completions_hub_repo")
    ours, theirs = (vars(kind("out", use_cpu=True, bf16=False, **given)) for kind in (GRPOConfig, trl.GRPOConfig))
    assert [ours[name] for name in names] == [theirs[name] for name in names]


@BOTH
def test_defaults(kind):
    args = kind()
    assert isinstance(args, TrainingArguments)
    assert (args.learning_rate, args.logging_steps, args.bf16, args.remats) == (1e-6, 10, True, [False, True])
    assert (args.generation_batch_size, args.steps_per_generation, args.remove_unused_columns) == (8, 1, False)
    assert (args.num_generations, args.beta) == ((8, 0.0) if kind is GRPOConfig else (2, 0.05))


WAY_OUT = " Raise per_device_train_batch_size, which counts completions, or gradient_accumulation_steps."
SIZES = {
    "generation_batch_size=9": "generation_batch_size (9) must be divisible by the global batch size (8).",
    "generation_batch_size=8, steps_per_generation=1":
        "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time",
    "num_generations=3": "generation_batch_size (8) must be divisible by num_generations (3).",
    "eval_strategy='steps', num_generations_eval=3": "The global eval batch size (8 * 1) must be divisible by the "
        "number of generations used for evaluation (3).",
    "num_generations=1": "{} requires at least 2 generations per prompt to calculate the advantages. You provided 1, "
        "which is less than the minimum required.",
    "auto_find_batch_size=True": "auto_find_batch_size is not supported by {}, because the generation batch must "
        "contain full prompt groups of num_generations completions, and reducing the batch size on out-of-memory "
        "breaks this invariant. Set auto_find_batch_size=False and lower per_device_train_batch_size instead.",
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("given", SIZES)
def test_batches_that_are_no_whole_groups_are_refused_in_trls_words(kind, given):
    given, text = eval(f"dict({given})"), SIZES[given].format(ALGORITHMS[kind])
    theirs = getattr(pytest.importorskip("trl"), kind.__name__)
    for one in (kind, theirs):
        with pytest.raises(ValueError) as error:
            one("out", **({"use_cpu": True, "bf16": False} | given))
        assert str(error.value).removesuffix(WAY_OUT) == text


@BOTH
@pytest.mark.parametrize("given", [{"parallelism_config": {"cp_size": 2}}, {"mesh_shape": "sequence:2"}])
def test_texts_are_not_divided_over_devices(kind, given):
    with pytest.raises(ValueError, match=f"^{ALGORITHMS[kind]}Trainer does not support sequence-dim parallelism "):
        kind("out", **given)


REFUSED_BY_BOTH = [
    ({"max_completion_length": None}, "max_completion_length must be a whole number of at least 1, got None."),
    ({"num_iterations": 0}, "num_iterations must be a whole number of at least 1, got 0."),
    ({"steps_per_generation": 0}, "steps_per_generation must be a whole number of at least 1 or None, got 0."),
    ({"temperature": 0}, "temperature must be a number above 0, got 0."),
    ({"reward_timeout": 0}, "reward_timeout must be a number above 0, got 0."),
    ({"top_p": 1.5}, "top_p must be at most 1.0, got 1.5."),
    ({"top_k": -2}, "top_k must be a whole number of at least -1 or None, got -2."),
    ({"min_p": -0.1}, "min_p must be a number of at least 0 or None, got -0.1."),
    ({"reward_weights": 0.5}, "reward_weights must be a list of numbers, one for each reward function, got 0.5."),
    ({"reward_weights": [1.0, "a"]},
     "reward_weights must be a list of numbers, one for each reward function, got [1.0, 'a']."),
    ({"vllm_mode": "both"}, "vllm_mode='both' is not in this release of trl_jax; supported: server, colocate."),
    ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex='a+' is not in this release of trl_jax "
     "without vllm_mode='server': trl_jax's own generator cannot constrain completions to a pattern; leave it out."),
    ({"vllm_server_port": 70000}, "vllm_server_port must be at most 65,535, got 70000."),
    ({"max_completions_per_device": 0},
     "max_completions_per_device must be a whole number of at least 1 or None, got 0."),
    ({"max_completions_per_device": 8, "use_vllm": True, "vllm_mode": "server"}, "max_completions_per_device=8 has no "
     "effect with vllm_mode='server', where the server schedules completions (vLLM's --max-num-seqs). Leave it out."),
    ({"vllm_server_timeout": 0}, "vllm_server_timeout must be a number above 0, got 0."),
    ({"vllm_server_restart_timeout": 0}, "vllm_server_restart_timeout must be a number above 0, got 0."),
    ({"ref_model_mixup_alpha": 2.0},
     "ref_model_mixup_alpha must be a number from 0.0 to 1.0, the weight of the policy in the updated "
     "reference, got 2.0."),
    ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs must be a dict, or a JSON object in a string such "
     "as '{\"key\": 1}', got [1]."),
    ({"chat_template_kwargs": {"x": 1, "tokenize": False}}, "chat_template_kwargs has 'tokenize', which the trainer "
     "passes itself: apply_chat_template would get multiple values for keyword argument 'tokenize'. Leave it out, "
     "and use chat_template_path= for the template and tools= for the tools."),
]  # fmt: skip
REFUSED = {
    RLOOConfig: [
        ({"reward_clip_range": (1.0, -1.0)}, "reward_clip_range must be two numbers in ascending order, such as "
         "(-10.0, 10.0), or None, got (1.0, -1.0)."),
    ],
    GRPOConfig: [
        ({"loss_type": "ppo"}, "Unknown loss type: ppo. Should be one of ['grpo', 'dr_grpo', 'dapo', 'bnpo', 'cispo', "
         "'sapo', 'luspo', 'vespo']"),
        ({"importance_sampling_level": "word"}, "Unknown importance sampling level: word. Possible values are 'token' "
         "and 'sequence'."),
        ({"scale_rewards": "std"}, "Invalid value for scale_rewards: std. Must be one of 'batch', 'group', or 'none'."),
        ({"multi_objective_aggregation": "max"}, "Invalid multi_objective_aggregation: max. Must be "
         "'sum_then_normalize' or 'normalize_then_sum'."),
        ({"log_completions_hub_repo": "mine"}, "log_completions_hub_repo is set, but log_completions is False. Enable "
         "log_completions to upload completions to the Hub, or unset log_completions_hub_repo."),
        ({"vllm_importance_sampling_clip_min": 4.0}, "vllm_importance_sampling_clip_min (4.0) must be less than "
         "vllm_importance_sampling_clip_max (3.0)."),
        ({"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
         "At least one of `vllm_importance_sampling_clip_min` or `vllm_importance_sampling_clip_max` must be set when "
         "`vllm_importance_sampling_mode` is a `*_truncate` mode."),
        ({"vllm_importance_sampling_mode": "word"}, "Unknown vLLM importance sampling level: word. Possible values are "
         "'token_truncate', 'token_mask', 'sequence_truncate', and 'sequence_mask'."),
        ({"top_entropy_quantile": 1.1}, "top_entropy_quantile must be at most 1.0, got 1.1."),
        ({"beta": -1.0}, "beta must be a number of at least 0, got -1.0."),
        ({"delta": -1.0}, "delta must be a number of at least 0 or None, got -1.0."),
        ({"generate_ahead": True}, "generate_ahead=True has vLLM servers generate while a step trains, but completions "
         "are not generated by servers. Set use_vllm=True and vllm_mode='server', or generate_ahead=False."),
        ({"generate_ahead": True, "use_vllm": True, "vllm_mode": "server",
          "vllm_importance_sampling_correction": False},
         "generate_ahead=True trains on completions of an earlier policy, which needs "
         "vllm_importance_sampling_correction=True, got False. Set it, or generate_ahead=False."),
        ({"entropy_coef": float("nan")}, "entropy_coef must be a number of at least -3.40282e+38, got nan."),
    ],
}  # fmt: skip
CASES = [(kind, *case) for kind, cases in REFUSED.items() for case in (*cases, *REFUSED_BY_BOTH)]


@pytest.mark.parametrize(("kind", "given", "text"), CASES)
def test_values_that_are_refused(kind, given, text):
    with pytest.raises(ValueError) as error:
        kind("out", **given)
    assert str(error.value) == text


@BOTH
def test_keys_of_generation_kwargs_that_are_not_built(kind):
    with pytest.raises(
        ValueError, match=r"^generation_kwargs has the keys \['num_beam_groups'\], which are not in this release"
    ):
        kind("out", generation_kwargs={"num_beam_groups": 2, "num_beams": 2, "top_p": 0.5})
    for given, text in (
        ({"stop_strings": ["END", ""]}, "stop_strings=.'END', ''.. It must be a string or a list of strings, none"),
        ({"stop_strings": 3}, "It must be a string or a list of strings"),
        ({"num_return_sequences": 2}, "GRPO and RLOO have num_generations"),
        ({"seed": 1}, "supported: bad_words_ids, begin_suppress_tokens"),
    ):
        with pytest.raises(ValueError, match=text):
            kind("out", generation_kwargs=given)


@BOTH
@pytest.mark.parametrize(("given", "text"), [
    ({"use_vllm": True}, "use_vllm=True: completions come from trl_jax's own generator, in this process. No "
     "vLLM server is contacted, and vLLM's options have no effect. For completions by a server, set "
     "vllm_mode='server'."),
    ({"use_transformers_continuous_batching": True},
     "use_transformers_continuous_batching=True: completions come from trl_jax's own generator."),
    ({"cache_implementation": "static"}, "cache_implementation='static' has no effect in trl_jax: completions "
     "come from trl_jax's own generator, which has one kind of cache."),
    ({"ds3_gather_for_generation": False}, "ds3_gather_for_generation=False has no effect in trl_jax: completions "
     "come from trl_jax's own generator, which gathers one layer at a time."),
    ({"data_seed": 3},
     "data_seed=3 has no effect in trl_jax: shuffle_dataset and seed determine the order of prompts."),
])  # fmt: skip
def test_values_that_are_said_in_one_line(kind, given, text):
    quiet = {"vllm_mode": "colocate", "vllm_server_port": 9, "vllm_gpu_memory_utilization": 0.5}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kind("out", **given, **quiet)
    assert [(str(warning.message), warning.filename) for warning in said] == [(text, __file__)]


@pytest.mark.parametrize(("given", "text", "now"), [
    ({"max_prompt_length": 64}, "max_prompt_length=64 is deprecated, and TRL no longer has it. It still keeps the "
     "last 64 tokens of longer prompts. Leave it out to keep prompts whole.", {"max_prompt_length": 64}),
    ({"use_transformers_paged": True}, "`use_transformers_paged` is deprecated and will be removed in v2.0.0. Use "
     "`use_transformers_continuous_batching` instead.", {"use_transformers_continuous_batching": True}),
    ({"vllm_importance_sampling_cap": 2.5}, "The `vllm_importance_sampling_cap` argument is deprecated and will be "
     "removed in v2.0.0. Use `vllm_importance_sampling_clip_max` instead.",
     {"vllm_importance_sampling_clip_max": 2.5}),
])  # fmt: skip
def test_arguments_of_earlier_releases_are_told_at_the_callers_line(given, text, now):
    with pytest.warns(FutureWarning) as seen:
        args = GRPOConfig("out", **given)
    told = [warning for warning in seen if warning.category is FutureWarning]
    assert [(str(warning.message), warning.filename) for warning in told] == [(text, __file__)]
    assert vars(args).items() >= now.items()


@pytest.mark.parametrize(("kind", "old", "new", "value"), [
    (GRPOConfig, "wandb_log_unique_prompts", "log_unique_prompts", True),
    (GRPOConfig, "use_liger_loss", "use_liger_kernel", False), (GRPOConfig, "vllm_device", None, "cuda:1"),
    (RLOOConfig, "rloo_k", "num_generations", 4), (RLOOConfig, "kl_coef", "beta", 0.1),
    (RLOOConfig, "cliprange", "epsilon", 0.3), (RLOOConfig, "num_ppo_epochs", "num_iterations", 2),
    (RLOOConfig, "response_length", "max_completion_length", 53), (RLOOConfig, "exp_name", "run_name", "mine"),
    (RLOOConfig, "normalize_advantage", "normalize_advantages", True), (RLOOConfig, "token_level_kl", None, True),
    (RLOOConfig, "whiten_rewards", None, False), (RLOOConfig, "num_sample_generations", None, 10),
    (RLOOConfig, "local_rollout_forward_batch_size", None, 64), (RLOOConfig, "stop_token", None, "eos"),
])  # fmt: skip
def test_names_of_earlier_releases(kind, old, new, value):
    with pytest.warns(FutureWarning, match=f"^{old} (is an old name: use {new}|no longer has an effect; leave it out)"):
        args = kind("out", **{old: value})
    assert new is None or vars(args)[new] == value


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_how_generations_were_cut_and_ended(tmp_path):
    line = "--output_dir out --per_device_train_batch_size 4 --gradient_accumulation_steps 3 --num_mini_batches 2 "
    line += "--stop_token_id 7 --total_episodes 25 --num_ppo_epochs 4 --missing_eos_penalty 1.0 --sft_model_path mine "
    # transformers' parser has the flag --no_remove_unused_columns only if the default is True, as it was then.
    line += "--sanity_check --no_remove_unused_columns"
    [args] = TrlParser((RLOOConfig,)).parse_args_and_config(line.split())
    assert (args.steps_per_generation, args.generation_batch_size) == (6, 24)
    assert args.max_steps == 2 * 2 * 4  # 2 generations of 2 steps each, used 4 times
    assert args.generation_kwargs == {"eos_token_id": 7} and args.sft_model_path == "mine"
    assert args.sanity_check is True and RLOOConfig("out").sanity_check is False


@pytest.mark.parametrize(("given", "text"), [
    ({"normalize_reward": True}, "normalize in the reward function"),
    ({"non_eos_penalty": True}, "use missing_eos_penalty, which is subtracted from the score"),
    ({"stop_token": "period"}, "stop_token must be 'eos', got 'period'. For other tokens, use generation_kwargs="),
    ({"stop_token_id": 2, "generation_kwargs": {}}, "stop_token_id=2 cannot be combined with generation_kwargs: use"),
    ({"reward_clip_range": 10.0},
     "reward_clip_range must be two numbers .*, got 10.0..* a single number had an effect only with"),
    ({"total_episodes": 0}, "total_episodes must be a whole number of at least 1 or None, got 0"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_had_another_meaning(given, text):
    with pytest.raises((TypeError, ValueError), match=text):
        RLOOConfig("out", **given)


@BOTH
def test_a_command_line_and_a_file(kind, tmp_path):
    of_file = "reward_clip_range: [-1.0, 2.0]" if kind is RLOOConfig else "scale_rewards: none"
    (tmp_path / "run.yaml").write_text(of_file)
    line = ["--output_dir", "out", "--num_generations", "4", "--reward_weights", "0.5", "1.5", "--min_p", "0.1",
            "--generation_kwargs", '{"min_length": 2}', "--config", str(tmp_path / "run.yaml")]  # fmt: skip
    [args] = TrlParser((kind,)).parse_args_and_config(line)
    assert (args.num_generations, args.reward_weights, args.min_p) == (4, [0.5, 1.5], 0.1)
    assert args.generation_kwargs == {"min_length": 2}
    assert args.scale_rewards == "none" if kind is GRPOConfig else tuple(args.reward_clip_range) == (-1.0, 2.0)


def test_a_pair_of_numbers_on_the_command_line():
    [args] = TrlParser((RLOOConfig,)).parse_args_and_config(["--output_dir", "out", "--reward_clip_range", "-1", "2.5"])
    assert args.reward_clip_range == [-1.0, 2.5]


@BOTH
def test_it_is_written_as_json(kind):
    written = json.loads(kind("out", generation_kwargs={"min_p": 0.1}).to_json_string())
    assert written["generation_kwargs"] == {"min_p": 0.1}
    assert written.keys() >= {f.name for f in dataclasses.fields(kind)}
