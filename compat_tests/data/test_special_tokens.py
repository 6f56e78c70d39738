"""EOS, pad token and chat template end up on the tokenizer as in TRL."""

from __future__ import annotations

import datasets
import pytest

from compat_tests.tiny import tiny_model, tiny_tokenizer
from trl_jax.data import chat
from trl_jax.data.chat import (
    PartsTokenizer,
    check_template,
    copy_ids_to_generation_config,
    copy_special_ids,
    set_chat_template,
    set_special_tokens,
    warn_of_shared_pad,
    with_eos,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _warn_afresh():
    chat._warn_of_shared_pad_once.cache_clear()


def test_a_vision_language_config_has_the_pad_id_in_its_text_config_only():
    """As in TRL, whose saved config.json has no other."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("llava_next")
    copy_special_ids(config, tiny_tokenizer(), eos=True)
    assert config.text_config.pad_token_id == 0 and "pad_token_id" not in config.to_dict()


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
    assert set_special_tokens(tokenizer, **asked) is tokenizer
    assert (tokenizer.eos_token, tokenizer.pad_token) == (eos, pad)


@pytest.mark.parametrize("argument", ["eos_token", "pad_token"])
def test_a_token_outside_the_vocabulary_is_refused(argument):
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match=rf"The specified `{argument}` \('<nope>'\) is not found in the vocabulary"):
        set_special_tokens(tokenizer, **{argument: "<nope>"})
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("</s>", "<pad>")
    assert len(tokenizer) == len(tiny_tokenizer())


def test_neither_pad_nor_eos():
    tokenizer = tiny_tokenizer(pad=None, eos=None, bos="<s>")
    with pytest.raises(ValueError, match="neither a pad nor an EOS token.*pad_token=.*eos_token="):
        set_special_tokens(tokenizer)


def test_pad_equal_to_eos_is_warned_of_once_per_process(caplog):
    warn_of_shared_pad(set_special_tokens(tiny_tokenizer()))
    assert not caplog.messages
    for _ in range(3):
        warn_of_shared_pad(set_special_tokens(tiny_tokenizer(pad=None)))
    assert len(caplog.messages) == 1
    assert "both '</s>', so the score is read at the last token before the EOS, as in TRL" in caplog.text


@pytest.mark.parametrize("name", ["own.jinja", "own.j2"])
def test_a_template_file_is_read(name, tmp_path):
    file = tmp_path / name
    file.write_text("{{ messages[0]['content'] }} – ś", encoding="utf-8")
    tokenizer = tiny_tokenizer()
    assert set_chat_template(tokenizer, str(file), rows=600) == (600, [])
    assert tokenizer.chat_template == "{{ messages[0]['content'] }} – ś"


def test_another_tokenizer_s_template_comes_with_its_tokens(tmp_path):
    source, tokenizer = tiny_tokenizer(), tiny_tokenizer()
    source.add_tokens(["<new>"])
    source.chat_template = "{{ 'cloned' }}"
    source.save_pretrained(tmp_path)
    size = len(tokenizer.get_vocab())
    assert set_chat_template(tokenizer, str(tmp_path), rows=size + 3) == (size + 3, [size, size + 1, size + 2])
    assert tokenizer.chat_template == "{{ 'cloned' }}" and tokenizer.convert_tokens_to_ids("<new>") == size
    assert tokenizer.convert_tokens_to_ids(["<extra_id_0>", "<extra_id_1>"]) == [size + 1, size + 2]
    with pytest.raises(ValueError, match=r"adds 1 new tokens \(<new>\), .* Resize the checkpoint's embedding"):
        set_chat_template(tiny_tokenizer(), str(tmp_path), rows=size)
    whole = -(-(size + 1) // 64) * 64
    for rows in (size, 600):  # spare rows are removed
        grown = tiny_tokenizer()
        assert set_chat_template(grown, str(tmp_path), rows=rows, can_resize=True) == (whole, [*range(size, whole)])


def test_other_template_sources_are_refused(tmp_path):
    for place in ("org/model", str(tmp_path)):
        with pytest.raises(ValueError, match="is neither a .jinja or .j2 file nor a folder or Hub name of a tokenizer"):
            set_chat_template(tiny_tokenizer(), place, rows=600)
    with pytest.raises(FileNotFoundError, match="gone.jinja': no such file"):
        set_chat_template(tiny_tokenizer(), str(tmp_path / "gone.jinja"), rows=600)


BY_PARTS = (
    "{% for message in messages %}{% for part in message['content'] %}{{ part['text'] }} {% endfor %}{% endfor %}"
)


def around(tokenizer, before, after):
    """Make the tokenizer add these tokens to each text."""
    from tokenizers import processors

    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in {before, after}]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before} $A {after}", pair=f"{before} $A {after} $B", special_tokens=ids
    )
    return tokenizer


def of_letters(letters):
    """A tokenizer that knows only these letters and drops all others."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "<s>", "</s>", *letters]
    backend = Tokenizer(models.BPE({token: place for place, token in enumerate(known)}, []))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


PARTS = {
    "bos": (lambda: tiny_tokenizer(bos="<s>"), BY_PARTS),
    "begins-with-bos": (lambda: tiny_tokenizer(bos="<s>"), "<s>" + BY_PARTS),
    "without-bos": (tiny_tokenizer, BY_PARTS),
    "both-ends": (lambda: around(tiny_tokenizer(bos="<s>"), "<s>", "</s>"), BY_PARTS),
    "without-a": (lambda: around(of_letters("bred"), "<s>", "</s>"), BY_PARTS),
}


@pytest.mark.parametrize("case", PARTS)
def test_conversations_are_tokenized_as_by_a_processor(case):
    pytest.importorskip("torch")
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    make, template = PARTS[case]
    tokenizer = make()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    template = template.replace("{{ part['text'] }}", "{% generation %}{{ part['text'] }}{% endgeneration %}")
    tokenizer.chat_template = template
    processor = LlavaProcessor(CLIPImageProcessorPil(), tokenizer, chat_template=template)
    talks = [[{"role": "user", "content": text}] for text in ("bread", "gladly bread a", "soup bread river")]
    how = {"tokenize": True, "return_dict": True}
    theirs, ours = [], PartsTokenizer(tokenizer)
    for talk in talks:
        parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in talk]
        masked = processor.apply_chat_template([parts], **how, return_assistant_tokens_mask=True)
        theirs.append(masked["input_ids"][0])
        assert ours.apply_chat_template(talk, **how) == {"input_ids": theirs[-1]}
        assert ours.apply_chat_template(talk, return_dict=False) == theirs[-1]
        found = ours.apply_chat_template(talk, **how, return_assistant_tokens_mask=True)
        assert found == {"input_ids": theirs[-1], "assistant_masks": masked["assistant_masks"][0]}
        cut = ours.apply_chat_template(talk, **how, truncation=True, max_length=100)
        assert cut == {"input_ids": theirs[-1]}
    assert ours.ids_of([ours.apply_chat_template(talk, tokenize=False) for talk in talks]) == theirs


def test_conversations_that_begin_with_bos_and_others_are_tokenized_together():
    tokenizer = tiny_tokenizer(bos="<s>")
    one, other = (tokenizer(text=text)["input_ids"] for text in ("bread", "soup"))
    assert PartsTokenizer(tokenizer).ids_of(["bread", "<s>bread", "soup"]) == [one, one, other]


def test_a_tokenizer_that_splits_differently_with_special_tokens_is_named():
    tokenizer = tiny_tokenizer(bos="<s>")

    class Other(type(tokenizer)):
        def __call__(self, text, add_special_tokens=True, **options):
            text = f" {text}" if add_special_tokens and isinstance(text, str) else text
            if isinstance(text, list) and add_special_tokens:
                text = [f" {one}" for one in text]
            return super().__call__(text, add_special_tokens=add_special_tokens, **options)

    tokenizer.__class__ = Other
    tokenizer.chat_template = BY_PARTS.replace(
        "{{ part['text'] }}", "{% generation %}{{ part['text'] }}{% endgeneration %}"
    )
    talk = [{"role": "user", "content": "bread"}]
    ids = PartsTokenizer(tokenizer).apply_chat_template(talk)
    assert ids["input_ids"] == tokenizer("bread ")["input_ids"]
    with pytest.raises(ValueError, match=r"The tokenizer \(Other\) splits 'bread ' differently"):
        PartsTokenizer(tokenizer).apply_chat_template(talk, return_assistant_tokens_mask=True)


def test_errors_name_the_class_of_the_users_tokenizer():
    tokenizer = tiny_tokenizer(eos=None)
    kind = type(tokenizer).__name__
    with pytest.raises(ValueError, match=rf"the tokenizer \({kind}\) has no chat template"):
        check_template(PartsTokenizer(tokenizer), {}, "Row 0")
    with pytest.raises(ValueError, match=rf"the tokenizer \({kind}\) has none"):
        with_eos("bread", PartsTokenizer(tokenizer), "Row 0")


@pytest.mark.parametrize("before", [0, [0], [4, 0], [4], 4, None])
def test_the_eos_id_of_a_generation_config_is_trls(before, tmp_path):
    """`tiny_tokenizer(pad="</s>")` has the EOS id 0, which is falsy."""
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    tiny_model(tmp_path, head="causal", num_hidden_layers=1, hidden_size=16, tokenizer={"pad": "</s>"})
    ours = transformers.GenerationConfig(eos_token_id=before)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model.generation_config.eos_token_id = before
    args = trl.SFTConfig(str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none", eos_token="</s>")
    rows = datasets.Dataset.from_list([{"text": "bread"}])
    theirs = trl.SFTTrainer(model, args=args, train_dataset=rows).model.generation_config
    tokenizer = set_special_tokens(tiny_tokenizer(pad="</s>"), eos_token="</s>")
    assert tokenizer.eos_token_id == 0
    copy_ids_to_generation_config(ours, tokenizer, eos=True)
    assert ours.eos_token_id == theirs.eos_token_id
