"""Names of early TRL releases that scripts still import: they still do what they did."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.tiny import tiny_model, tiny_tokenizer
from trl_jax.data.sft import AnswerMarks, answer_labels
from trl_jax.legacy.collators import (
    DataCollatorForCompletionOnlyLM,
    RewardDataCollatorWithPadding,
    conversations_formatting_function,
    get_formatting_func_from_dataset,
    instructions_formatting_function,
)

NOT = -100
QUESTION, ANSWER = (7, 8), (5, 6)
IDS = [
    ([1, 5, 6, 2, 3], [NOT, NOT, NOT, 2, 3], None),
    ([5, 6, 2, 5, 6, 3, 4], [NOT] * 5 + [3, 4], None),  # after the last marker
    ([1, 2, 5, 3], [NOT] * 4, None),
    ([5, 6, 0, 3, 0], [NOT, NOT, NOT, 3, NOT], None),  # the pad token is not a target
    ([7, 8, 1, 5, 6, 2, 7, 8, 3, 5, 6, 4], [NOT] * 5 + [2] + [NOT] * 5 + [4], QUESTION),
    ([9, 7, 8, 1, 5, 6, 2, 7, 8, 3], [NOT] * 6 + [2] + [NOT] * 3, QUESTION),  # a question without an answer
    ([1, 5, 6, 2, 7, 8, 3, 5, 6, 4], [NOT] * 3 + [2] + [NOT] * 5 + [4], QUESTION),  # text before an answer
    ([1, 5, 6, 2], [NOT] * 4, QUESTION),
    ([7, 8, 2], [NOT] * 3, QUESTION),
    ([5], [NOT], None),
]


@pytest.mark.parametrize("ids, wanted, question", IDS)
def test_labels_of_answers(ids, wanted, question):
    assert answer_labels(ids, AnswerMarks(ANSWER, question, 0)) == wanted


class Masking:
    """What TRL's collator did with a batch, written in torch for today's TRL trainer."""

    def __init__(self, tokenizer, mark):
        self.tokenizer, self.mark = tokenizer, mark

    def __call__(self, rows):
        import torch

        longest, pad = max(len(row["input_ids"]) for row in rows), self.tokenizer.pad_token_id
        ids = torch.tensor([row["input_ids"] + [pad] * (longest - len(row["input_ids"])) for row in rows])
        labels = torch.where(ids == pad, NOT, ids)
        for row in labels:
            text = row.tolist()
            ends = [at + len(self.mark) for at in range(longest) if text[at : at + len(self.mark)] == self.mark]
            row[: ends[-1] if ends else longest] = NOT
        mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_answers_alone_train_as_they_did(tmp_path):
    trl = pytest.importorskip("trl")
    folder, tokenizer = tmp_path / "model", tiny_tokenizer(tmp_path / "model")
    tiny_model(folder, head="causal")
    mark = tokenizer.encode("### Answer:", add_special_tokens=False)
    texts = [f"### Question: what is {n}?\n" + ("### Answer:" if n % 4 else "") + f" it is {n * 7}." for n in range(12)]
    losses = []
    for package in (trl, trl_jax):
        mine = DataCollatorForCompletionOnlyLM("### Answer:", tokenizer=tokenizer)
        assert mine.marks.response == tuple(mark)
        collator = Masking(tokenizer, mark) if package is trl else mine
        args = package.SFTConfig(
            str(tmp_path / package.__name__), per_device_train_batch_size=4, max_steps=3, logging_steps=1, bf16=False,
            use_cpu=True, report_to="none", save_strategy="no", learning_rate=1e-3,
        )  # fmt: skip
        rows = Dataset.from_dict({"text": texts})
        trainer = package.SFTTrainer(str(folder), args, collator, rows, processing_class=tokenizer)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-5)


def test_texts_without_an_answer_are_counted(tmp_path, caplog):
    from trl_jax.data.sft import label_answers

    rows = Dataset.from_dict({"input_ids": [[1, 5, 6, 2], [1, 2], []]})
    found = label_answers(rows, AnswerMarks(ANSWER, None, 0), "train_dataset", {})
    assert found["labels"] == [[NOT, NOT, NOT, 2], [NOT, NOT], []]
    assert "2 of 3 rows of train_dataset have no answer to train on" in caplog.text


@pytest.mark.parametrize("given, error, text", [
    ({"mlm": True}, ValueError, r"^DataCollatorForCompletionOnlyLM\(mlm=...\) is not in this release"),
    ({"ignore_index": 0}, ValueError, "ignore_index"), ({"padding_free": True}, ValueError, "padding_free=True"),
    ({"tokenizer": None}, TypeError, "needs tokenizer="), ({"response_template": []}, ValueError, "has no tokens"),
])  # fmt: skip
def test_bad_words_of_the_collator(given, error, text):
    options = {"response_template": [5], "tokenizer": tiny_tokenizer()} | given
    with pytest.raises(error, match=text):
        DataCollatorForCompletionOnlyLM(**options)


def test_answers_alone_are_not_packed(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path)
    tiny_model(tmp_path)
    collator = DataCollatorForCompletionOnlyLM([5], tokenizer=tokenizer)
    for strategy in ("bfd", "wrapped"):
        args = trl_jax.SFTConfig(str(tmp_path / "out"), packing=True, packing_strategy=strategy, bf16=False)
        with pytest.raises(ValueError, match="[Cc]ollator"):
            trl_jax.SFTTrainer(str(tmp_path), args, collator, Dataset.from_dict({"text": ["a"]}))


def test_the_collators_give_batches():
    tokenizer = tiny_tokenizer()
    batch = DataCollatorForCompletionOnlyLM([5, 6], tokenizer=tokenizer, return_tensors="np")(
        [{"input_ids": [9, 5, 6, 7, 8]}, {"input_ids": [5, 6, 9]}]
    )
    assert batch["labels"].tolist() == [[NOT, NOT, NOT, 7, 8], [NOT, NOT, 9, NOT, NOT]]
    rows = [
        {"input_ids_chosen": [5, 6], "attention_mask_chosen": [0, 1], "input_ids_rejected": [7], "margin": 0.5},
        {"input_ids_chosen": [8], "attention_mask_chosen": [1], "input_ids_rejected": [9], "margin": 1},
    ]
    found = RewardDataCollatorWithPadding(tokenizer, return_tensors="np")(rows)
    assert found["input_ids_chosen"].tolist() == [[5, 6], [8, tokenizer.pad_token_id]]
    assert found["attention_mask_chosen"].tolist() == [[0, 1], [1, 0]] and found["margin"].tolist() == [0.5, 1]
    assert found["attention_mask_rejected"].tolist() == [[1], [1]] and found["return_loss"] is True


def test_texts_of_one_length():
    tokenizer = tiny_tokenizer()
    texts = ["one two three four five six", "seven eight nine", "ten eleven twelve"]
    dataset = Dataset.from_dict({"text": texts})
    rows = trl_jax.ConstantLengthDataset(tokenizer, dataset, "text", seq_length=4, shuffle=False)
    flat = list(itertools.chain(*([*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts)))
    assert [row["input_ids"] for row in rows] == [flat[at : at + 4] for at in range(0, len(flat) - 3, 4)]
    endless = trl_jax.ConstantLengthDataset(
        tokenizer, [{"a": text} for text in texts], None, lambda row: row["a"], infinite=True, seq_length=4,
        num_of_sequences=1,
    )  # fmt: skip
    assert len(list(itertools.islice(endless, 40))) == 40
    assert not list(trl_jax.ConstantLengthDataset(tokenizer, Dataset.from_dict({"text": []}), "text", infinite=True))
    with pytest.raises(ValueError, match="needs dataset_text_field=, such as 'text'"):
        trl_jax.ConstantLengthDataset(tokenizer, [])


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_setup_chat_format(tmp_path, kind):
    tokenizer = tiny_tokenizer(tmp_path)
    tiny_model(tmp_path)
    if kind == "torch":
        transformers = pytest.importorskip("transformers")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    else:
        model = trl_jax.AutoModelForCausalLM.from_pretrained(tmp_path)
    model, tokenizer = trl_jax.setup_chat_format(model, tokenizer, resize_to_multiple_of=64)
    talk = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert model.config.eos_token_id == model.generation_config.pad_token_id == tokenizer.eos_token_id
    assert tokenizer.bos_token == "<|im_start|>" and model.config.vocab_size % 64 == 0
    assert model.config.vocab_size >= len(tokenizer)
    with pytest.raises(ValueError, match="Chat template is already added to the tokenizer"):
        trl_jax.setup_chat_format(model, tokenizer)


def test_an_adapter_with_its_base(tmp_path):
    folder = tmp_path / "base"
    tokenizer = tiny_tokenizer(folder)
    tiny_model(folder)
    lora = trl_jax.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    args = trl_jax.SFTConfig(str(tmp_path / "out"), max_steps=1, bf16=False, report_to="none", save_strategy="no")
    trainer = trl_jax.SFTTrainer(
        str(folder), args, train_dataset=Dataset.from_dict({"text": ["a b c"] * 8}), peft_config=lora,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.save_model(str(tmp_path / "adapter"))
    model = trl_jax.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", device_map=None)
    ids = np.asarray([[5, 6, 7]])
    wanted = trainer.model(input_ids=ids).logits
    np.testing.assert_allclose(model(input_ids=ids).logits, wanted, atol=1e-5)
    np.testing.assert_allclose(model.merge_and_unload()(input_ids=ids).logits, wanted, atol=1e-4)
    with pytest.raises(ValueError, match="which holds a full model. Load it with AutoModelForCausalLM"):
        trl_jax.AutoPeftModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="a model has a single adapter"):
        trl_jax.AutoPeftModelForSequenceClassification.from_pretrained(folder, "other")


def test_small_questions():
    assert trl_jax.get_kbit_device_map() is None
    assert not trl_jax.is_xpu_available() and not trl_jax.is_npu_available()
    assert trl_jax.is_peft_available() in (True, False)


def test_rows_are_written_as_conversations():
    tokenizer = tiny_tokenizer(chat_template=True)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "there"}]
    wanted = "user: Hi</s>\nassistant: there</s>\n"
    write = conversations_formatting_function(tokenizer, "messages")
    assert write({"messages": talk}) == wanted and write({"messages": [talk, talk]}) == [wanted] * 2
    write = instructions_formatting_function(tokenizer)
    assert write({"prompt": "Hi", "completion": "there"}) == wanted
    assert write({"prompt": ["Hi"], "completion": ["there"]}) == [wanted]
    rows = {"conversations": [talk]}, {"prompt": ["Hi"], "completion": ["there"]}, {"text": ["a"]}
    found = [get_formatting_func_from_dataset(Dataset.from_dict(row), tokenizer) for row in rows]
    assert found[0]({"conversations": talk}) == found[1]({"prompt": "Hi", "completion": "there"}) == wanted
    assert found[2] is None


def test_a_models_arguments_answer_what_moved_to_the_trainers():
    [model, args] = trl_jax.TrlParser((trl_jax.ModelConfig, trl_jax.SFTConfig)).parse_args_and_config(
        ["--output_dir", "out", "--trust_remote_code", "--dtype", "bfloat16"]
    )
    assert model.torch_dtype == "bfloat16"
    assert model.trust_remote_code is False and args.trust_remote_code is True
    with pytest.warns(FutureWarning, match="^torch_dtype is an old name: use dtype.$"):
        assert trl_jax.ModelConfig("model", torch_dtype="float16") == trl_jax.ModelConfig("model", dtype="float16")
    with pytest.raises(TypeError, match="are the same argument. Leave torch_dtype out"):
        trl_jax.ModelConfig(torch_dtype="float16", dtype="float16")
