"""`model.generate` against transformers: the same arguments, the same sequences, the same errors."""

from __future__ import annotations

import numpy as np
import pytest

import trl_jax
from compat_tests.effort import thorough, usual
from compat_tests.generation.test_stop_strings import byte_level
from compat_tests.models import causal
from trl_jax.core.torch_random import default_generator
from trl_jax.hub.auto import AutoModelForCausalLM

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SEED = 11
PADS = (0, 4, 6, 2)  # left-padding of each prompt
EOS = [50, 60, 70, 80]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return causal.build(tmp_path_factory.mktemp("llama"), "llama", tie=False, num_hidden_layers=1)


@pytest.fixture(scope="module")
def ours(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return causal.reference(folder)


@pytest.fixture(autouse=True)
def settled(ours, theirs):
    """Each test starts from the checkpoint's generation_config and the same seed."""
    before = [model.generation_config.to_dict() for model in (ours, theirs)]
    transformers.set_seed(SEED)
    trl_jax.set_seed(SEED)
    yield
    for model, config in zip((ours, theirs), before, strict=True):
        model.generation_config = transformers.GenerationConfig(**config)


def prompts(rows: int = 4) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(5, 60, (rows, 9))
    mask = np.ones_like(ids)
    for row, pads in enumerate(PADS[:rows]):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(ours, theirs, **arguments) -> tuple:
    """The results of both; transformers gets arrays as torch tensors."""
    tensors = {
        name: torch.tensor(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }
    return ours.generate(**tensors), theirs.generate(**tensors)


def assert_same(found, expected):
    assert found.dtype == torch.int64
    np.testing.assert_array_equal(found.numpy(), expected.numpy())
    after = torch.rand(1).item()
    assert default_generator().uniform(1, 0.5)[0] + 0.5 == pytest.approx(after, abs=1e-7)


CONFIGURATIONS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0},
    "default_top_k": {"do_sample": True},
    "hot": {"do_sample": True, "temperature": 1.7, "top_k": 0, "top_p": 0.95},
    "several": {"do_sample": True, "num_return_sequences": 3, "temperature": 0.7, "min_p": 0.01},
    "penalized": {"do_sample": True, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "top_k": 30},
    "penalized_greedy": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 2},
    "lengths": {"do_sample": True, "min_new_tokens": 9, "exponential_decay_length_penalty": (10, 1.3), "top_k": 0},
    "banned": {"bad_words_ids": [[5], [17], [30, 31]], "suppress_tokens": [8, 9], "begin_suppress_tokens": [21, 22]},
    "forced": {"forced_eos_token_id": 60, "min_length": 12, "sequence_bias": [[[33], 2.5], [[33, 34], 4.0]]},
    "truncated": {"do_sample": True, "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "top_h": 0.9},
    "renormalized": {"do_sample": True, "top_k": 40, "renormalize_logits": True, "remove_invalid_values": True},
    "long": {"do_sample": True, "top_k": 0, "max_new_tokens": 90, "eos_token_id": 50},
    "never_ending": {"do_sample": True, "eos_token_id": None, "pad_token_id": 3, "top_k": 0},
}


@usual("greedy", "long", "never_ending")
@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_sequences_are_transformers(ours, theirs, options):
    options = {"max_new_tokens": 24, "eos_token_id": EOS, "pad_token_id": 0} | options
    assert_same(*both(ours, theirs, **prompts(), **options))


def test_calls_in_a_row_go_on_with_the_stream(ours, theirs):
    options = {"do_sample": True, "max_new_tokens": 5, "pad_token_id": 0}
    first, expected = both(ours, theirs, **prompts(), **options)
    np.testing.assert_array_equal(first, expected)
    second, expected = both(ours, theirs, **prompts(2), **options)
    assert_same(second, expected)
    assert second.tolist() != first[:2].tolist()


def test_a_seed_stands_for_torchs_and_leaves_the_process_alone(ours, theirs):
    options = {"do_sample": True, "max_new_tokens": 5, "pad_token_id": 0}
    found = ours.generate(**prompts(), seed=SEED, **options)
    assert default_generator().position == 0 and found.dtype == np.int64
    np.testing.assert_array_equal(
        found, theirs.generate(**{k: torch.tensor(v) for k, v in prompts().items()}, **options)
    )


# Sources of the fields.

FIELDS = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.6, "top_k": 7, "min_new_tokens": 4}


@pytest.mark.parametrize("passed", [True, False])
def test_a_checkpoints_fields_act_where_a_config_leaves_them_open(ours, theirs, passed):
    for model in (ours, theirs):
        model.generation_config.update(repetition_penalty=1.5, no_repeat_ngram_size=2, min_p=0.02, eos_token_id=EOS)
    config = {"generation_config": transformers.GenerationConfig(**FIELDS)} if passed else FIELDS
    assert_same(*both(ours, theirs, **prompts(), **config))


def test_keywords_beat_a_config_and_a_None_is_one_of_them(ours, theirs):
    for model in (ours, theirs):
        model.generation_config.update(repetition_penalty=1.9, eos_token_id=EOS)
    config = transformers.GenerationConfig(**FIELDS)
    keywords = {"temperature": None, "repetition_penalty": 1.0, "max_new_tokens": 15}
    assert_same(*both(ours, theirs, **prompts(), generation_config=config, **keywords))
    assert config.temperature == 0.6


@pytest.mark.parametrize(
    "lengths", [{}, {"max_length": 14}, {"max_length": 9, "max_new_tokens": 3}, {"min_length": 12}]
)
def test_lengths(ours, theirs, lengths):
    assert_same(*both(ours, theirs, **prompts(), eos_token_id=EOS, pad_token_id=0, **lengths))


def test_a_length_that_nobody_chose_is_told_of(ours, theirs):
    for model in (ours, theirs):
        with pytest.warns(UserWarning, match=r"model-agnostic default `max_length` \(=29\)"):
            model.generate(torch.tensor(prompts()["input_ids"]), pad_token_id=0)


# All forms of prompts.


@pytest.mark.parametrize("form", ["lists", "ragged", "numpy", "jax", "positional"])
def test_prompts_come_in_any_form(ours, theirs, form):
    import jax.numpy as jnp

    options = {"max_new_tokens": 6, "pad_token_id": 0}
    arrays = prompts()
    expected = theirs.generate(**{name: torch.tensor(array) for name, array in arrays.items()}, **options).numpy()
    rows = [row[row > 0].tolist() for row in arrays["input_ids"]]
    found = {
        "lists": lambda: ours.generate(**{name: array.tolist() for name, array in arrays.items()}, **options),
        "ragged": lambda: ours.generate(rows, **options),
        "numpy": lambda: ours.generate(**arrays, **options),
        "jax": lambda: ours.generate(**{name: jnp.asarray(array) for name, array in arrays.items()}, **options),
        "positional": lambda: ours.generate(arrays["input_ids"], **options),
    }[form]()
    assert isinstance(found, np.ndarray) and found.dtype == np.int64
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("eos", [1, [1, 0]])
def test_a_mask_is_deduced_as_transformers_does(ours, theirs, eos):
    """Not if the pad id may be a real token."""
    ids = {"input_ids": prompts()["input_ids"]}
    assert_same(*both(ours, theirs, **ids, eos_token_id=eos, pad_token_id=0, max_new_tokens=8))


def test_no_prompt_is_the_bos(ours, theirs):
    found, expected = both(ours, theirs, bos_token_id=2, max_new_tokens=4)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("repeats", "prompts_once", "group"), [thorough((4, 4), 2, 8), ((4, 6), 5, 4), thorough((1, 3), 4, 2)]
)
def test_prompts_that_repeat_are_computed_once(ours, theirs, monkeypatch, repeats, prompts_once, group):
    from trl_jax.generation import generator

    seen, inner = [], generator.generate
    monkeypatch.setattr(
        generator, "generate", lambda weights, request, *rest, **options: (
            seen.append(request) or inner(weights, request, *rest, **options)
        )
    )  # fmt: skip
    arrays = {name: array.repeat(repeats, axis=0) for name, array in prompts(2).items()}
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 4, "pad_token_id": 0}
    assert_same(*both(ours, theirs, **arrays, **options))
    assert (len(seen[0].prompts), seen[0].group) == (prompts_once, group)


def test_right_padding_is_told_of(ours, caplog):
    ids = prompts()["input_ids"][:, ::-1].copy()
    ours.generate(ids, attention_mask=(ids > 0).astype(int), pad_token_id=0, max_new_tokens=2)
    assert "right-padding was detected" in caplog.text


# User-defined functions.


class Shift(transformers.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return torch.where(torch.arange(scores.shape[1]) == (input_ids[:, -1:] + 1) % 60, scores + 3, scores)


class Until(transformers.StoppingCriteria):
    def __init__(self, last):
        self.last = last

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] > self.last


OWN = {"do_sample": True, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": EOS}


def test_own_processors_and_criteria_get_torchs_tensors(ours, theirs):
    own = {"logits_processor": [Shift()], "stopping_criteria": transformers.StoppingCriteriaList([Until(54)])}
    assert_same(*both(ours, theirs, **prompts(), **own, **OWN, temperature=0.5, num_return_sequences=2))


def test_own_functions_get_numpys_arrays(ours, theirs):
    def shift(ids, scores):
        assert isinstance(ids, np.ndarray) and ids.shape[0] == scores.shape[0] == 4
        return np.where(np.arange(scores.shape[1]) == (ids[:, -1:] + 1) % 60, scores + 3, scores)

    expected = theirs.generate(
        **{name: torch.tensor(array) for name, array in prompts().items()},
        logits_processor=transformers.LogitsProcessorList([Shift()]), stopping_criteria=[Until(54)], **OWN,
    )  # fmt: skip
    own = {"logits_processor": [shift], "stopping_criteria": [lambda ids, scores: ids[:, -1] > 54]}
    np.testing.assert_array_equal(ours.generate(**prompts(), **own, **OWN), expected)


def test_an_own_processor_of_a_built_in_class_takes_its_place(ours, theirs):
    own = {"logits_processor": transformers.LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(3.0)])}
    fields = {
        "repetition_penalty": 1.1,
        "suppress_tokens": [30],
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    found, expected = both(ours, theirs, **prompts(), **own, **fields, max_new_tokens=3, pad_token_id=0)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    for one, other in zip(found.scores, expected.scores, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_prefix_function_says_what_may_follow(ours, theirs):
    def allowed(row, ids):
        return [(int(ids[-1]) * 7 + row + i) % 60 for i in range(4)]

    own = {"prefix_allowed_tokens_fn": allowed, "forced_eos_token_id": 60, "num_return_sequences": 2}
    assert_same(*both(ours, theirs, **prompts(), **own, **OWN))
    with pytest.raises(ValueError, match="returned an empty list for batch ID 0"):
        ours.generate(**prompts(), prefix_allowed_tokens_fn=lambda row, ids: [], **OWN)


def test_another_function_compiles_nothing_anew(ours):
    from trl_jax.generation.decode import next_tokens

    def once(bias):
        ours.generate(**prompts(), logits_processor=[lambda ids, scores: scores + bias], **OWN)

    once(1.0)
    before = next_tokens._cache_size()
    once(2.0)
    assert next_tokens._cache_size() == before


class Streamer:
    def __init__(self):
        self.got = []

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.got.append("end")


def test_streamers_get_each_step(ours, theirs):
    got = []
    for model in (ours, theirs):
        streamer = Streamer()
        model.generate(**{name: torch.tensor(array) for name, array in prompts().items()}, streamer=streamer, **OWN)
        got.append(streamer.got)
    assert got[0] == got[1] and got[0][-1] == "end" and len(got[0]) > 3


@pytest.mark.parametrize("strings", ["e", ["a", "th", "!"]])
def test_strings_end_rows(ours, theirs, strings):
    """With a tokenizer that has fewer ids than the model."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level())
    options = {"stop_strings": strings, "tokenizer": tokenizer, "do_sample": True, "temperature": 3.0, "top_k": 0}
    options |= {"max_new_tokens": 40, "pad_token_id": 0, "num_return_sequences": 3}
    found, expected = both(ours, theirs, **prompts(), **options)
    assert_same(found, expected)
    assert (expected[:, -1] == 0).sum() > 5


def test_time_ends_all_rows(ours):
    found = ours.generate(**prompts(), max_time=0.0, max_new_tokens=50, pad_token_id=0)
    assert found.shape[1] == 10


def test_a_temperature_is_of_sampling_alone(ours, theirs):
    """Greedy decoding also ignores the other sampling parameters."""
    options = {"temperature": 0.5, "top_k": 3, "return_dict_in_generate": True, "output_scores": True}
    found, expected = both(ours, theirs, **prompts(), **options, max_new_tokens=2, pad_token_id=0)
    for one, other in zip(found.scores, expected.scores, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_scores_logits_and_log_probabilities(ours, theirs):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "temperature": 0.7}
    found, expected = both(ours, theirs, **prompts(), **OWN, **options, top_k=9)
    np.testing.assert_array_equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(found[name]) == len(expected[name])
        for step, (one, other) in enumerate(zip(found[name], expected[name], strict=True)):
            alive = ~np.isin(expected.sequences[:, 9 : 9 + step], EOS).any(axis=1)
            np.testing.assert_allclose(one[alive], other[alive], atol=1e-5)
    tokens = expected.sequences[:, 9:]
    logp = torch.stack(expected.logits, 1).log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0].numpy()
    ended = np.cumsum(np.isin(tokens, EOS), axis=1) - np.isin(tokens, EOS) > 0
    np.testing.assert_allclose(found.logprobs, np.where(ended, 0, logp), atol=1e-5)
    plain = ours.generate(**prompts(), **OWN, return_dict_in_generate=True)
    assert plain.scores is plain.logits is None and plain.logprobs.dtype == np.float32


# Errors.

WRONG = [
    {"max_new_tokens": 0}, {"max_length": 9}, {"do_sample": True, "temperature": 2}, {"do_sample": True, "top_k": -1},
    {"do_sample": True, "top_p": -0.5}, {"do_sample": True, "min_p": 2.0}, {"num_return_sequences": 2},
    {"attention_maks": None, "no_such_thing": 3}, {"stop_strings": "a"}, {"repetition_penalty": -1.0},
    {"bad_words_ids": []}, {"early_stopping": "maybe"}, {"cache_implementation": "none"},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_errors_have_transformers_words(ours, theirs, wrong):
    ids = torch.tensor(prompts()["input_ids"])
    with pytest.raises(ValueError) as expected:
        theirs.generate(ids, pad_token_id=0, **wrong)
    with pytest.raises(ValueError) as found:
        ours.generate(ids, pad_token_id=0, **wrong)
    assert str(found.value) == str(expected.value)


def test_errors_of_the_prompt_have_transformers_words(ours, theirs):
    for model in (ours, theirs):
        with pytest.raises(ValueError, match="`bos_token_id` has to be defined when no `input_ids` are provided."):
            model.generate(bos_token_id=None)
        with pytest.raises(ValueError, match="were passed alongside input_ids which is not allowed."):
            model.generate(torch.ones(1, 2, dtype=torch.int64), input_ids=torch.ones(1, 2, dtype=torch.int64))
        with pytest.raises(ValueError, match="`attention_mask` passed to `generate` must be 2D."):
            model.generate(torch.ones(1, 2, dtype=torch.int64), attention_mask=torch.ones(1, 1, 2, 2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"input_ids": [[1, 5000]]}, "input_ids has the id 5000, but the model's ids run from 0 to"),
        ({"input_ids": [[-100, 3]]}, "input_ids has the id -100"),
        ({"input_ids": [3, 4]}, r"input_ids must be integers .* got shape \(2,\) and dtype int64"),
        ({"input_ids": [[]]}, "at least one token per row"),
        ({"input_ids": [[0.5]]}, "dtype float64"),
        ({"input_ids": [[3, 4], [0, 0]]}, "Row 1 of input_ids is all padding"),
        (
            {"input_ids": [[3, 4]], "attention_mask": [[1]]},
            r"attention_mask must have the shape of input_ids, .* got \(1, 1\)",
        ),
        ({"penalty_alpha": 0.6, "top_k": 4}, "there is no contrastive search"),
        ({"prompt_lookup_num_tokens": 3}, "there is no assisted decoding"),
        ({"assistant_model": "draft"}, "assistant_model='draft' is not in this release"),
        ({"guidance_scale": 1.5}, "there is no guidance"),
        ({"watermarking_config": {}}, "there are no watermarks"),
        ({"custom_generate": "someone/repository"}, "transformers' decoding loops need torch"),
        ({"inputs_embeds": np.ones((1, 2, 3))}, "prompts must be token ids"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "intermediate values of the model are not kept"),
        ({"cache_implementation": "quantized"}, "the cache always stores keys and values as computed"),
        ({"cache_implementation": "paged"}, "call generate_batch"),
        ({"token_healing": True}, "tokens are not healed"),
    ],
)
def test_other_errors_say_what_to_do(ours, wrong, message):
    with pytest.raises(ValueError, match=message):
        ours.generate(**({"input_ids": [[3, 4]], "pad_token_id": 0} | wrong))


def test_logits_that_are_not_finite_are_told_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.params = model.params | {path: array * np.nan for path, array in model.params.items() if "norm" in path}
    trl_jax.set_seed(1)
    with pytest.raises(RuntimeError, match="probability tensor contains either `inf`, `nan` or element < 0"):
        model.generate([[3, 4]], do_sample=True, max_new_tokens=3)


def test_a_processor_that_leaves_no_token_is_told_of(ours):
    with pytest.raises(RuntimeError, match="all tokens are masked out"):
        ours.generate([[3, 4]], do_sample=True, logits_processor=[lambda ids, scores: scores - np.inf])


def test_a_score_head_cannot_generate(tmp_path):
    from compat_tests.tiny import tiny_model

    model = trl_jax.AutoModelForSequenceClassification.from_pretrained(tiny_model(tmp_path, "llama"), num_labels=1)
    with pytest.raises(ValueError, match="cannot generate: .*AutoModelForCausalLM"):
        model.generate([[3, 4]])


def test_positions_that_end_are_told_of(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(causal.build(tmp_path, "gpt2", tie=True, num_hidden_layers=1))
    with pytest.raises(ValueError, match=f"but .* supports {model.max_positions}. Lower max_new_tokens"):
        model.generate([[3, 4]], max_new_tokens=model.max_positions - 1)
    assert model.generate([[3, 4]], max_new_tokens=2, pad_token_id=0).shape == (1, 4)
