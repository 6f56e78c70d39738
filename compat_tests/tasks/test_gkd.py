"""GKD: rows as in TRL's DataCollatorForChatML, and the divergence of full logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from compat_tests.tiny import CHAT_TEMPLATE, text_rows, tiny_tokenizer
from trl_jax.experimental.gkd import GKDTrainer
from trl_jax.nn.head import HeadInputs, divergences
from trl_jax.tasks.distillation import generalized_jsd_loss, prepare_chatml

# The divergence

DRAWN = np.random.default_rng(0)
STUDENT, TEACHER = (DRAWN.standard_normal((2, 5, 7), np.float32) * 2 for _ in range(2))
LABELS = np.array([[-100, 3, 1, -100, 2], [0, -100, -100, 5, 6]])
OPTIONS = [
    {"labels": LABELS},
    {},
    {"labels": LABELS, "beta": 0, "temperature": 0.7},
    {"labels": LABELS, "beta": 1.0, "reduction": "sum"},
    {"beta": 0.1, "reduction": "mean"},
    {"labels": LABELS, "beta": 0.9, "reduction": "mean"},
    {"labels": LABELS, "reduction": "none"},
    {"labels": LABELS, "num_items_in_batch": 9},
    {"labels": np.full_like(LABELS, -100)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options)) or "no labels")
def test_it_is_trls(options):
    torch = pytest.importorskip("torch")
    gkd = pytest.importorskip("trl.experimental.gkd")
    given = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    theirs = gkd.GKDTrainer.generalized_jsd_loss(torch.from_numpy(STUDENT), torch.from_numpy(TEACHER), **given)
    ours = generalized_jsd_loss(STUDENT, TEACHER, **options)
    assert ours.shape == tuple(theirs.shape)
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-7)
    of_tensors = GKDTrainer.generalized_jsd_loss(torch.from_numpy(STUDENT), torch.from_numpy(TEACHER), **given)
    assert isinstance(of_tensors, torch.Tensor)
    np.testing.assert_allclose(of_tensors, ours, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_training_computes_the_same_in_chunks(beta):
    """The hidden states are the logits, and the head is the identity."""

    def in_chunks(hidden):
        heads = (HeadInputs(logits.reshape(-1, 7), jnp.eye(7)) for logits in (hidden, TEACHER))
        return divergences(*heads, jnp.zeros(10, jnp.int32), beta=beta).divergence.sum()

    def whole(logits):
        return generalized_jsd_loss(logits, TEACHER, beta=beta, reduction="sum")

    found, wanted = (jax.value_and_grad(of)(jnp.asarray(STUDENT)) for of in (in_chunks, whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


# Rows

TALKS = [row["messages"] for row in text_rows(6, "chat", seed=1)]
TALKS.append([
    {"role": "system", "content": "Grüße: 日本語 \U0001f600"},
    {"role": "user", "content": "Was ist das? \U0001f600"},
    {"role": "assistant", "content": "\U0001f680 Eine Rakete – größer als ein Ei."},
])  # fmt: skip
TALKS.append([*TALKS[0], {"role": "user", "content": "and"}, {"role": "assistant", "content": ""}])
# With this template, the prompt's text is not a prefix of the conversation's.
OTHER = CHAT_TEMPLATE.replace("assistant:{% endif %}", "assistant: <think></think>{% endif %}")
WORDS = tiny_tokenizer(chat_template=True)
GIVEN = WORDS("How do I bake bread? first then warm")["input_ids"]


def by_trl(rows, tokenizer, max_length):
    """For each row the prompt's ids, all ids and the labels, without padding."""
    from trl.experimental.utils import DataCollatorForChatML

    collate, found = DataCollatorForChatML(tokenizer, max_length=max_length), []
    for row in rows:
        batch = collate([row])
        found.append([batch[name][0].tolist() for name in ("prompts", "input_ids", "labels")])
    return found


def by_us(rows, tokenizer, max_length):
    made = prepare_chatml(Dataset.from_list(rows), tokenizer, max_length=max_length, num_proc=None, name="train")
    found = []
    for ids, labels in zip(made["input_ids"], made["labels"], strict=True):
        start = labels.count(-100)
        found.append([ids[:start], ids, labels])
    return found


@pytest.mark.parametrize("max_length", [None, 45])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, OTHER], ids=["prefix", "no prefix"])
def test_conversations_are_trls(template, max_length):
    tokenizer = tiny_tokenizer(chat_template=template)
    tokenizer.model_max_length = 70
    rows = [{"messages": talk} for talk in TALKS if max_length is None or talk is not TALKS[6]]
    theirs = by_trl(rows, tokenizer, max_length)
    assert by_us(rows, tokenizer, max_length) == theirs
    assert max(len(ids) for _, ids, _ in theirs) == (max_length or 70)


def test_other_tokenizers_are_trls():
    """A word-level tokenizer without byte offsets."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: n for n, word in enumerate(["<pad>", "</s>", "<unk>", *"user : assistant hi there you".split()])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    talk = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hi you"}]
    rows = [{"messages": talk}]
    assert by_us(rows, tokenizer, 64) == by_trl(rows, tokenizer, 64)


def test_other_columns_are_trls_and_prepared_rows_stay():
    text = WORDS.apply_chat_template(TALKS[0][:-1], tokenize=False, add_generation_prompt=True)
    mask = [0] * 5 + [1] * (len(GIVEN) - 5)
    for rows in (
        [{"messages": TALKS[0], "prompt": text.replace("assistant:", "")}],
        [{"input_ids": GIVEN, "completion_mask": mask, "prompt": "How"}],
        [{"input_ids": GIVEN, "prompt": WORDS.decode(GIVEN[:4])}],
    ):
        assert by_us(rows, WORDS, 64) == by_trl(rows, WORDS, 64)
    once = prepare_chatml(
        Dataset.from_list([{"messages": TALKS[0]}]), WORDS, max_length=64, num_proc=None, name="train"
    )
    again = prepare_chatml(once, WORDS, max_length=20, num_proc=None, name="eval")
    assert again[0] == once[0]
    stream = IterableDataset.from_generator(lambda: ({"messages": talk} for talk in TALKS[:2]))
    [first, _] = prepare_chatml(stream, WORDS, max_length=64, num_proc=None, name="train")
    assert first["input_ids"] == once[0]["input_ids"] and first["labels"] == once[0]["labels"]


REFUSED = {
    "columns": ({"text": "a"}, "train_dataset must have the column 'messages', or 'input_ids'"),
    "no messages": ({"messages": "a"}, "Row 0 of train_dataset, column 'messages': must be messages"),
    "one message": ({"messages": TALKS[0][-1:]}, "must be a prompt of at least one message, and the completion"),
    "a conversation as prompt": ({"messages": TALKS[0], "prompt": TALKS[0][:-1]}, "column 'prompt': must be the text"),
    "no prompt left": ({"messages": [TALKS[0][0], TALKS[0][1] | {"content": "a " * 99}]}, "no prompt tokens left"),
    "no ids": ({"input_ids": [], "prompt": "a"}, "column 'input_ids': must be a list of at least one token id"),
    "padding": ({"input_ids": [5, 6], "prompt": "a", "attention_mask": [0, 1]}, "leave padding out"),
    "mask": ({"input_ids": [5, 6], "completion_mask": [0]}, "column 'completion_mask': must be 2 values"),
    "another prompt": ({"input_ids": GIVEN, "prompt": "warm"}, "does not begin with the tokens of its prompt"),
    "no prompt": ({"input_ids": GIVEN}, "neither a completion_mask, a prompt nor messages"),
    "labels": ({"input_ids": [5, 6, 7], "labels": [-100, 6, 8]}, "column 'labels': must be -100 for the prompt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    row, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        by_us([row], WORDS, 64)
