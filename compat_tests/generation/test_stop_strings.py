"""Stop strings against transformers' StopStringCriteria: tokens that are bytes, pieces of words, and whole texts."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trl_jax.hub.generation_inputs import StopStrings

torch = pytest.importorskip("torch")

TEXT = [
    "the end of the story.\n\nstop here, they said; über naïve – 日本語 and more",
    "User: hello\nAssistant: STOP</s> the end",
] * 3


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return tokenizer


def byte_fallback() -> Tokenizer:
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.train_from_iterator(
        ["the end stop here STOP User: a b c d e f"] * 3, trainers.BpeTrainer(vocab_size=330, special_tokens=special)
    )
    return tokenizer


def pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    alphabet = sorted(set("".join(TEXT)) | set("abcdef"))
    tokenizer.train_from_iterator(
        [*TEXT, "abcdef fabcde"],
        trainers.WordPieceTrainer(vocab_size=200, initial_alphabet=alphabet, special_tokens=["[UNK]"]),
    )
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, byte_fallback, pieces], ids=lambda make: make.__name__)
def tokenizer(request):
    return PreTrainedTokenizerFast(tokenizer_object=request.param())


STRINGS = ["stop", "the end", "\n\n", "ü", "本", "st", "e", " of", "STOP</s>", "d t", "stop here, they", "."]


@pytest.mark.parametrize("strings", [*([string] for string in STRINGS), STRINGS[:3], "nd"], ids=str)
def test_texts_end_where_transformers_ends_them(tokenizer, strings):
    from transformers import StopStringCriteria

    try:
        theirs = StopStringCriteria(tokenizer, strings)
    except ValueError:
        pytest.skip("no token has its last character")
    ours, found = StopStrings(strings, tokenizer), []
    texts = [ids for text in TEXT[:2] for ids in [tokenizer(text)["input_ids"]]]
    rows = [ids[:end] for ids in texts for end in range(1, len(ids) + 1)]
    random = np.random.default_rng(0)
    rows += [random.integers(0, len(tokenizer), length).tolist() for length in (1, 2, 3, 8) for _ in range(60)]
    for row in rows:
        ids = np.array([row])
        found.append(ours(ids)[0])
        assert found[-1] == bool(theirs(torch.tensor(ids), None)[0]), tokenizer.convert_ids_to_tokens(row)
    assert any(found) or not any(string in TEXT[0] for string in strings)
