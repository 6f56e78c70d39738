"""Reward models given by name, as a trl_jax model or as a torch model, compared with TRL's scores."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from compat_tests.tiny import CHAT_TEMPLATE
from trl_jax.hub.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl_jax.rollout.rewards import reward_functions

torch = pytest.importorskip("torch")
PROMPTS = ["How do I bake the bread?", "How do I bake the bread?", "Tell me how to clean a window."]
COMPLETIONS = [" gladly warm it until it is ready", " whatever", " take notes and enjoy the result with a friend"]
ROWS = [{"prompt": prompt} for prompt in PROMPTS]
TALKS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
ANSWERS = [[{"role": "assistant", "content": completion.strip()}] for completion in COMPLETIONS]


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("llama")


@pytest.fixture(scope="module")
def theirs(folder):
    from transformers import AutoModelForSequenceClassification as Theirs

    return Theirs.from_pretrained(folder, num_labels=1).eval()


@pytest.fixture
def tokenizer(folder):
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = CHAT_TEMPLATE
    return loaded


def wanted(model, tokenizer, texts):
    """The scores as TRL computes them: right-padded, without special tokens, the first logit."""
    inputs = tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.inference_mode():
        return model(**inputs).logits[:, 0].numpy()


def scored(model, prompts, completions, tokenizer=None, **options):
    rewards = reward_functions(model, tokenizer, trainer_state=lambda: None, **options)
    return rewards(ROWS, prompts, completions, [[1]] * 3), rewards.names


@pytest.mark.parametrize("kind", ["name", "ours", "torch"])
def test_texts_are_scored_as_in_trl(kind, folder, theirs, tokenizer):
    model = {"name": str(folder), "ours": AutoModelForSequenceClassification.from_pretrained(folder), "torch": theirs}
    found, names = scored(model[kind], PROMPTS, COMPLETIONS)
    texts = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    np.testing.assert_allclose(found[:, 0], wanted(theirs, tokenizer, texts), atol=1e-5)
    assert names == [folder.name] and np.ptp(found) > 1e-3


def test_conversations_are_rendered_by_the_models_template(folder, theirs, tokenizer):
    found, _ = scored([str(folder)], TALKS, ANSWERS, [tokenizer])
    texts = [f"user: {prompt}</s>\nassistant: {completion.strip()}</s>\n"
             for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]  # fmt: skip
    np.testing.assert_allclose(found[:, 0], wanted(theirs, tokenizer, texts), atol=1e-5)


def test_options_of_the_template(folder, tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE + "{% if loudly %}!{% endif %}"
    plain, _ = scored(str(folder), TALKS, ANSWERS, tokenizer)
    loud, _ = scored(str(folder), TALKS, ANSWERS, tokenizer, template_options={"loudly": True})
    assert (plain != loud).all()


def test_more_rows_than_are_scored_at_once(folder, tokenizer, monkeypatch):
    whole, _ = scored(str(folder), PROMPTS, COMPLETIONS)
    monkeypatch.setattr("trl_jax.rollout.rewards._ROWS", 2)
    parts, _ = scored(str(folder), PROMPTS, COMPLETIONS)
    np.testing.assert_allclose(parts, whole, atol=1e-6)


def test_a_tokenizer_without_a_pad_token_pads_with_eos(folder, tokenizer):
    tokenizer.pad_token = None
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    scored(model, PROMPTS, COMPLETIONS, tokenizer)
    assert tokenizer.pad_token == "</s>" and model.config.pad_token_id == tokenizer.eos_token_id


def test_beside_functions(folder):
    def lengths(completions, **kwargs):
        return [float(len(text)) for text in completions]

    found, names = scored([lengths, str(folder), str(folder)], PROMPTS, COMPLETIONS)
    assert names == ["lengths", folder.name, f"{folder.name}_2"]
    assert found[:, 0].tolist() == [33.0, 9.0, 46.0] and (found[:, 1] == found[:, 2]).all()


def test_a_model_without_a_score(folder):
    with pytest.raises(TypeError, match=r"^reward_funcs contains the model .*, which has no score head: load it"):
        scored(AutoModelForCausalLM.from_pretrained(folder), PROMPTS, COMPLETIONS)


def test_a_classifier_of_several_labels(checkpoint):
    from transformers import AutoModelForSequenceClassification as Theirs

    labels = {"num_labels": 2, "id2label": {0: "NEGATIVE", 1: "POSITIVE"}}
    model = Theirs.from_pretrained(checkpoint("llama", **labels))
    text = r"with 2 labels \(0 'NEGATIVE', 1 'POSITIVE'\), but a reward is a single number; TRL would use the score"
    with pytest.raises(ValueError, match=text):
        scored(model, PROMPTS, COMPLETIONS)


def test_weights_in_bfloat16_are_computed_with_in_float32(folder, tokenizer):
    """TRL computes in bfloat16, whose rounding differs by up to 2e-2 here."""
    from transformers import AutoModelForSequenceClassification as Theirs

    halves = Theirs.from_pretrained(folder, num_labels=1, dtype="bfloat16").eval()
    found, _ = scored(halves, PROMPTS, COMPLETIONS)
    texts = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    rounded = wanted(halves.float(), tokenizer, texts)
    np.testing.assert_allclose(found[:, 0], rounded, rtol=1e-4, atol=1e-5)
