"""EOS, pad token and chat template end up on the tokenizer as in TRL."""

from __future__ import annotations

import pytest

from compat_tests.tiny import tiny_tokenizer
from trl_jax.data import chat
from trl_jax.data.chat import settle, settle_chat_template, warn_of_shared_pad


@pytest.fixture(autouse=True)
def _warn_afresh():
    chat._warn_shared.cache_clear()


@pytest.mark.parametrize(
    ("made", "asked", "eos", "pad"),
    [
        ({}, {}, "</s>", "<pad>"),
        ({"pad": None}, {}, "</s>", "</s>"),
        ({}, {"pad_token": "</s>"}, "</s>", "</s>"),
        ({"bos": "<s>"}, {"eos_token": "<s>"}, "<s>", "<pad>"),
        ({"pad": None, "bos": "<s>"}, {"eos_token": "<s>"}, "<s>", "<s>"),
        ({"pad": None, "eos": None, "bos": "<s>"}, {"pad_token": "<s>"}, None, "<s>"),
        ({"eos": None}, {}, None, "<pad>"),
    ],
)
def test_tokens_are_set_on_the_tokenizer_itself(made, asked, eos, pad):
    tokenizer = tiny_tokenizer(**made)
    assert settle(tokenizer, **asked) is tokenizer
    assert (tokenizer.eos_token, tokenizer.pad_token) == (eos, pad)


@pytest.mark.parametrize("argument", ["eos_token", "pad_token"])
def test_a_token_outside_the_vocabulary_is_refused(argument):
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match=rf"The specified `{argument}` \('<nope>'\) is not found in the vocabulary"):
        settle(tokenizer, **{argument: "<nope>"})
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("</s>", "<pad>")
    assert len(tokenizer) == len(tiny_tokenizer())


def test_neither_pad_nor_eos():
    tokenizer = tiny_tokenizer(pad=None, eos=None, bos="<s>")
    with pytest.raises(ValueError, match="neither a pad nor an EOS token.*pad_token=.*eos_token="):
        settle(tokenizer)


def test_pad_equal_to_eos_is_warned_of_once_per_process(caplog):
    warn_of_shared_pad(settle(tiny_tokenizer()))
    assert not caplog.messages
    for _ in range(3):
        warn_of_shared_pad(settle(tiny_tokenizer(pad=None)))
    assert len(caplog.messages) == 1
    assert "both '</s>', so the score is read at the last token before the EOS, as in TRL" in caplog.text


@pytest.mark.parametrize("name", ["own.jinja", "own.j2"])
def test_a_template_file_is_read(name, tmp_path):
    file = tmp_path / name
    file.write_text("{{ messages[0]['content'] }} – ś", encoding="utf-8")
    tokenizer = tiny_tokenizer()
    assert settle_chat_template(tokenizer, str(file), rows=600) == (600, [])
    assert tokenizer.chat_template == "{{ messages[0]['content'] }} – ś"


def test_another_tokenizer_s_template_comes_with_its_tokens(tmp_path):
    source, tokenizer = tiny_tokenizer(), tiny_tokenizer()
    source.add_tokens(["<new>"])
    source.chat_template = "{{ 'cloned' }}"
    source.save_pretrained(tmp_path)
    size = len(tokenizer.get_vocab())
    assert settle_chat_template(tokenizer, str(tmp_path), rows=size + 3) == (size + 3, [size, size + 1, size + 2])
    assert tokenizer.chat_template == "{{ 'cloned' }}" and tokenizer.convert_tokens_to_ids("<new>") == size
    assert tokenizer.convert_tokens_to_ids(["<extra_id_0>", "<extra_id_1>"]) == [size + 1, size + 2]
    with pytest.raises(ValueError, match=r"adds 1 new tokens \(<new>\), .* Resize the checkpoint's embedding"):
        settle_chat_template(tiny_tokenizer(), str(tmp_path), rows=size)
    whole = -(-(size + 1) // 64) * 64
    for rows in (size, 600):  # spare rows are removed
        grown = tiny_tokenizer()
        assert settle_chat_template(grown, str(tmp_path), rows=rows, can_resize=True) == (whole, [*range(size, whole)])


def test_other_template_sources_are_refused(tmp_path):
    for place in ("org/model", str(tmp_path)):
        with pytest.raises(ValueError, match="is neither a .jinja or .j2 file nor a folder or Hub name of a tokenizer"):
            settle_chat_template(tiny_tokenizer(), place, rows=600)
    with pytest.raises(FileNotFoundError, match="gone.jinja': no such file"):
        settle_chat_template(tiny_tokenizer(), str(tmp_path / "gone.jinja"), rows=600)
