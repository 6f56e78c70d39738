"""RLOOTrainer as scripts for TRL up to 0.21 call it: config, policy, ref_policy, reward_model, rows of token ids."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.parity.reference import BASE, read_weights
from trl_jax.data.prompts import as_prompts
from trl_jax.legacy.policy import MissingEos

torch = pytest.importorskip("torch")
NEW = BASE | {
    "num_generations": 4, "max_completion_length": 6, "beta": 0.2, "learning_rate": 3e-3, "pad_to_multiple_of": None,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
}  # fmt: skip
OLD = {
    "num_generations": "rloo_k", "max_completion_length": "response_length", "beta": "kl_coef",
    "num_iterations": "num_ppo_epochs", "epsilon": "cliprange",
}  # fmt: skip
WITH_BOS = SMALL | {"tokenizer": {"bos": "<s>"}}


@pytest.fixture
def folders(checkpoint):
    """The folders of a policy, of another model as its reference, and of a reward model."""
    return [str(checkpoint(**facts)) for facts in (WITH_BOS, WITH_BOS | {"seed": 7}, {"tokenizer": {"bos": "<s>"}})]


def old_config(out, **more):
    given = {OLD.get(name, name): value for name, value in (NEW | more).items()}
    given.pop("max_steps", None)
    return trl_jax.RLOOConfig(str(out), **given)


def tokenized(tokenizer, n=8):
    """Rows as TRL 0.21's examples prepare them."""
    rows = Dataset.from_list(prompt_rows(n))
    return rows.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns=rows.column_names)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_policy_its_reference_and_a_reward_model(folders, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    policy, other, judge = folders
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    reference = AutoModelForCausalLM.from_pretrained(other)
    more = {"total_episodes": 30, "num_mini_batches": 2, "num_ppo_epochs": 2, "missing_eos_penalty": 0.5}
    args = old_config(tmp_path / "old", **more)
    trainer = trl_jax.RLOOTrainer(
        config=args,
        processing_class=tokenizer,
        policy=AutoModelForCausalLM.from_pretrained(policy),
        ref_policy=reference,
        reward_model=AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1),
        train_dataset=tokenized(tokenizer),
        eval_dataset=tokenized(tokenizer, 2),
    )
    # 16 completions per generation in 2 steps, each used twice; 30 completions are 2 generations.
    assert (args.generation_batch_size, args.steps_per_generation, args.max_steps) == (16, 4, 8)
    assert trainer.policy is trainer.model
    trainer.ref_model.save_pretrained(tmp_path / "reference")
    held = read_weights(tmp_path / "reference")["model.embed_tokens.weight"]
    assert np.array_equal(held, reference.get_input_embeddings().weight.detach().numpy())
    trainer.train()

    scorer = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1).eval()

    def score(prompts, completion_ids, **columns):
        """The reward model's score of the token ids, read at the last token."""
        ids = [tokenizer(prompt)["input_ids"] + own for prompt, own in zip(prompts, completion_ids, strict=True)]
        with torch.inference_mode():
            hidden = [scorer.model(torch.tensor([own])).last_hidden_state[0, -1] for own in ids]
            return [float(scorer.score(last)) for last in hidden]

    def unended(completion_ids, **columns):
        return [0.0 if tokenizer.eos_token_id in own else -0.5 for own in completion_ids]

    today = trl_jax.RLOOConfig(str(tmp_path / "new"), **NEW | {"max_steps": 1, "steps_per_generation": 4})
    modern = trl_jax.RLOOTrainer(policy, [score, unended], today, Dataset.from_list(prompt_rows(8)))
    modern.train()
    found, wanted = trainer.state.log_history[0], modern.state.log_history[0]
    for name in ("reward", "reward_std", "entropy", "completions/mean_length"):  # the completions are the same
        assert found[name] == pytest.approx(wanted[name], abs=1e-4)
    assert wanted["kl"] == pytest.approx(0, abs=1e-6) and found["kl"] > 0.1  # the reference differs


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_function_of_texts(folders, tmp_path):
    def of_texts(texts):
        seen.extend(texts)
        return [float(len(text) % 5) for text in texts]

    seen = []
    options = {"processing_class": None, "train_dataset": Dataset.from_list(prompt_rows(8))}
    args = old_config(tmp_path, total_episodes=8, num_sample_generations=0)
    names = {"policy": folders[0], "ref_policy": folders[0]}  # one checkpoint, loaded twice
    trainer = trl_jax.RLOOTrainer(config=args, **names, reward_model=of_texts, **options)
    trainer.train()
    asks = [row["prompt"] for row in prompt_rows(8)]
    assert len(seen) == 8 and all(any(text.startswith(ask) for ask in asks) for text in seen)
    assert trainer.state.log_history[0]["rewards/of_texts/mean"] == pytest.approx(np.mean([len(t) % 5 for t in seen]))


def test_it_is_told_once_and_evaluates_where_completions_were_shown(folders, tmp_path):
    options = {"train_dataset": Dataset.from_list(prompt_rows(8)), "eval_dataset": Dataset.from_list(prompt_rows(4))}
    args = trl_jax.RLOOConfig(str(tmp_path), **NEW)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = trl_jax.RLOOTrainer(config=args, policy=folders[0], reward_model=length_reward, **options)
        trainer.generate_completions(sampling=True)
    told = [str(one.message) for one in seen if one.filename == __file__ and one.category is FutureWarning]
    assert len(told) == 2 and told[0].startswith(
        "RLOOTrainer(config=, policy=, reward_model=) is the constructor of TRL up to 0.21. Use args=, model= and "
        "reward_funcs=;"
    )
    assert "num_iterations=1 (was 4), max_completion_length=512 (was 53), temperature=1.0 (was 0.7)" in told[0]
    assert "it evaluates. Call evaluate()" in told[1] and "eval_reward" in trainer.state.log_history[-1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_cannot_be(folders, tmp_path):
    args, rows = trl_jax.RLOOConfig(str(tmp_path), **NEW), Dataset.from_list(prompt_rows(8))
    model = trl_jax.AutoModelForCausalLM.from_pretrained(folders[0])

    def fails(error, text, *given, **named):
        with pytest.raises(error, match=text):
            trl_jax.RLOOTrainer(*given, **named, train_dataset=rows)

    fails(TypeError, "^The first argument is a RLOOConfig, as .* Pass it as args=", args, None, model)
    fails(TypeError, "^config and args are the same argument. Remove config.", config=args, args=args, model=model)
    fails(ValueError, "cannot be the same object. Remove ref_policy", policy=model, ref_policy=model)
    fails(ValueError, r"^data_collator=.*\(\.\.\.\) is not in this release", policy=model, data_collator=MissingEos)
    fails(TypeError, "no argument 'judge'", model, length_reward, args, judge=1)


def test_tokens_that_are_no_text_are_named(checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint(**WITH_BOS))
    ids, pad = tokenizer("How do I bake?")["input_ids"], tokenizer.pad_token_id
    rows = as_prompts(Dataset.from_dict({"input_ids": [[pad, pad, *ids], [*ids, pad]], "lengths": [1, 2]}), "train",
                      tokenizer)  # fmt: skip
    assert rows[:] == {"lengths": [1, 2], "prompt": ["How do I bake?"] * 2}
    as_dicts = Dataset.from_list([{"input_ids": {"input_ids": ids, "attention_mask": [1] * len(ids)}}])
    assert as_prompts(as_dicts, "train", tokenizer)[:] == {"prompt": ["How do I bake?"]}
    with pytest.raises(
        ValueError, match="^train_dataset: the input_ids of row 1 decode to .*, which tokenizes differently"
    ):
        as_prompts(Dataset.from_dict({"input_ids": [ids, ids[1:]]}), "train", tokenizer)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_penalty_is_a_reward_function_more(tmp_path):
    with pytest.raises(ValueError, match=r"missing_eos_penalty=1\.0 cannot be combined with reward_weights"):
        trl_jax.RLOOConfig(str(tmp_path), missing_eos_penalty=1.0, reward_weights=[1.0])
    assert MissingEos(2.0, lambda: 3)(completion_ids=[[1, 3], [1, 2]]) == [0.0, -2.0]
