"""SFTTrainer: TRL's constructor, TRL's error messages, user-defined losses and metrics, and what is saved."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer, TrainingArguments

import trl_jax
from compat_tests.effort import only_thorough, thorough, usual, usually
from compat_tests.models import towers
from compat_tests.parity.reference import BASE, read_weights
from compat_tests.tiny import text_rows, tiny_model, tiny_tokenizer
from compat_tests.trainer.trainers import FACTS
from trl_jax.trainer.collators import DataCollatorForLanguageModeling

CAUSAL = FACTS | {"head": "causal"}


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**CAUSAL)


def make(package, model, out, *, rows=None, config=None, **arguments):
    """An SFTTrainer of trl or trl_jax on 16 rows, 4 steps; `config` overrides the parity tests' BASE."""
    args = package.SFTConfig(str(out), **(BASE | (config or {})))
    rows = text_rows(16, "prompt") if rows is None else rows
    model = str(model) if isinstance(model, Path) else model
    return package.SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), **arguments)


def steps(trainer):
    return [log for log in trainer.state.log_history if "loss" in log]


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("method", ["__init__", "train", "evaluate", "compute_loss", "prediction_step", "log"])
def test_the_arguments_are_trls(method):
    trl = pytest.importorskip("trl")
    assert parameters(getattr(trl_jax.SFTTrainer, method)) == parameters(getattr(trl.SFTTrainer, method))


@pytest.mark.parametrize(("config", "arguments", "text"), [
    ({"padding_free": True}, {}, "When `padding_free=True` without packing, `max_length` is not enforced."),
    ({"packing": True, "max_length": None}, {}, "When packing is enabled, `max_length` can't be `None`."),
    ({"packing": True}, {"data_collator": DataCollatorForLanguageModeling(0)},
     "Passing a custom data collator is not supported when using padding-free."),
    ({"loss_type": "dft"}, {"compute_loss_func": len},
     "You passed a `compute_loss_func` together with `loss_type='dft'` to the `SFTTrainer`"),
    ({"assistant_only_loss": True}, {}, "You set `assistant_only_loss=True`, but the dataset is not conversational."),
    ({"completion_only_loss": True}, {"formatting_func": lambda row: row["prompt"]},
     "A formatting function was provided while `completion_only_loss=True`, which is incompatible"),
    ({"eos_token": "<no>"}, {}, r"The specified `eos_token` \('<no>'\) is not found in the vocabulary"),
    ({"router_aux_loss_coef": 0.1}, {},
     "`router_aux_loss_coef` is set to 0.1 but LlamaForCausalLM is not a Mixture-of-Experts model"),
])  # fmt: skip
def test_errors_in_trls_words(config, arguments, text, folder, tmp_path):
    with pytest.raises(ValueError, match=text):
        make(trl_jax, folder, tmp_path, config=config, **arguments)


def test_the_dataset_is_required(folder, tmp_path):
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        trl_jax.SFTTrainer(str(folder), trl_jax.SFTConfig(str(tmp_path)))


def test_a_model_with_another_head_is_refused(checkpoint, tmp_path):
    model = trl_jax.AutoModelForSequenceClassification.from_pretrained(checkpoint(**FACTS))
    with pytest.raises(TypeError, match="AutoModelForCausalLM"):
        make(trl_jax, model, tmp_path)


def test_keywords_of_earlier_releases(folder, tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, save_strategy="no", seed=3)
    rows = Dataset.from_list([{"story": row["text"]} for row in text_rows(4)])
    given = {"max_seq_length": 16, "dataset_text_field": "story", "packing": True, "dataset_batch_size": 10}
    with pytest.warns(FutureWarning) as told:
        trainer = trl_jax.SFTTrainer(str(folder), args, train_dataset=rows, **given)
    texts = [str(warning.message) for warning in told]
    for said in ("max_seq_length is an argument of SFTConfig now: use SFTConfig(max_length=...).",
                 "packing is an argument of SFTConfig now: use SFTConfig(packing=...).",
                 "dataset_batch_size no longer has an effect; leave it out: TRL no longer has it."):  # fmt: skip
        assert said in texts
    assert (trainer.args.max_length, trainer.args.seed, trainer.args.packing) == (16, 3, True)
    assert trainer.train_dataset.column_names == ["input_ids", "labels", "seq_lengths"]
    with pytest.raises(
        TypeError, match=r"packing=True is an argument of SFTConfig now: pass args=SFTConfig\(packing=True\)."
    ):
        trl_jax.SFTTrainer(str(folder), train_dataset=rows, packing=True)


def jax_loss(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1], labels[:, 1:]
    log_p = jax.nn.log_softmax(logits)
    at = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    total = -jnp.sum(jnp.where(targets == -100, 0, at))
    return total / (jnp.sum(targets != -100) if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_loss_that_is_passed(folder, tmp_path):
    """A user's copy of the built-in loss: the curves agree up to rounding, in steps of unequal batches."""
    config = {"gradient_accumulation_steps": 2, "max_steps": 3}
    own = make(trl_jax, folder, tmp_path / "own", config=config)
    passed = make(trl_jax, folder, tmp_path / "passed", config=config, compute_loss_func=jax_loss)
    own.train(), passed.train()
    for mine, other in zip(steps(passed), steps(own), strict=True):
        assert list(mine) == list(other) and mine == pytest.approx(other, abs=2e-5)
    rows = Dataset.from_list(text_rows(8, "prompt", seed=2))
    assert passed.evaluate(rows)["eval_entropy"] == pytest.approx(own.evaluate(rows)["eval_entropy"], abs=1e-5)


class Halved(trl_jax.SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (loss / 2, outputs) if return_outputs else loss / 2


@only_thorough
def test_a_loss_of_a_subclass_finds_the_task_s_behind_super(folder, tmp_path):
    config = {"max_steps": 1, "loss_type": "dft"}
    trainer = make(trl_jax, folder, tmp_path / "own", config=config)
    args = trl_jax.SFTConfig(str(tmp_path / "halved"), **(BASE | config))
    halved = Halved(str(folder), args, train_dataset=Dataset.from_list(text_rows(16, "prompt")))
    trainer.train(), halved.train()
    assert steps(halved)[0]["loss"] == pytest.approx(steps(trainer)[0]["loss"] / 2, rel=1e-5)


def accuracy(found):
    """As user scripts write it: from unshifted logits and the collator's labels."""
    logits, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
    real, inputs = labels != -100, np.asarray(found.inputs)
    ids = {"shape": str(inputs.shape), "ids": int(inputs.sum())}
    return {"right": float((np.argmax(logits, -1) == labels)[real].mean()), "targets": int(real.sum()), **ids}


LABELED = {
    "padded": {"pad_to_multiple_of": None},
    "multiple": {"pad_to_multiple_of": 8},
    "completions": {"pad_to_multiple_of": None},
    "end to end": {"padding_free": True, "max_length": None, "pad_to_multiple_of": None},
    "end to end, multiple": {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8},
    "packed": {"packing": True, "max_length": 48, "pad_to_multiple_of": None},
    "packed for training": {"packing": True, "eval_packing": False, "max_length": 48, "pad_to_multiple_of": None},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 24, "pad_to_multiple_of": None},
}


@usual("padded", "multiple", "end to end, multiple", "packed")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", LABELED)
def test_compute_metrics_and_predict_give_what_trl_gives(name, folder, tmp_path):
    trl = pytest.importorskip("trl")
    rows, found = text_rows(6, "prompt", seed=4), {}
    if name == "completions":
        rows = [{"prompt": row["prompt"][:4], "completion": row["prompt"][4:]} for row in rows]
    else:
        rows = [{"text": row["prompt"]} for row in rows]
    config = LABELED[name] | {"per_device_eval_batch_size": 4, "include_for_metrics": ["inputs"]}
    for package in (trl_jax, trl):
        trainer = make(package, folder, tmp_path / package.__name__, rows=rows, compute_metrics=accuracy,
                       eval_dataset=Dataset.from_list(rows), config=config)  # fmt: skip
        found[package] = trainer.evaluate(), trainer.predict(trainer.eval_dataset)
    (mine, ours), (other, theirs) = found[trl_jax], found[trl]
    for key in ("right", "targets", "shape", "ids"):
        assert mine[f"eval_{key}"] == other[f"eval_{key}"]
    assert ours.predictions.shape == theirs.predictions.shape
    assert np.array_equal(ours.label_ids, theirs.label_ids)
    real = theirs.label_ids[:, 1:] != -100
    assert real.any() and np.abs(ours.predictions[:, :-1][real] - theirs.predictions[:, :-1][real]).max() < 1e-4
    assert "test_loss" in ours.metrics


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("end_to_end", [False, True])
def test_metrics_by_batch_see_what_trl_shows(end_to_end, folder, tmp_path):
    """Labels, the arguments of preprocess_logits_for_metrics, and losses per row."""
    trl = pytest.importorskip("trl")
    rows, seen = [{"text": row["prompt"]} for row in text_rows(6, "prompt", seed=4)], {}
    config = {"per_device_eval_batch_size": 4, "pad_to_multiple_of": None, "batch_eval_metrics": True}
    config |= {"include_for_metrics": ["loss"], "padding_free": end_to_end, "max_length": None}
    for package in (trl_jax, trl):
        shown = seen[package] = []

        def likeliest(logits, labels, shown=shown):
            shown.append((tuple(logits.shape), np.asarray(labels).tolist()))
            return logits.argmax(-1)

        def compute(part, compute_result, shown=shown):
            likely, labels = np.asarray(part.predictions), np.asarray(part.label_ids)
            of_tokens = np.where(labels == -100, 0, likely)
            shown.append((of_tokens.tolist(), labels.tolist(), tuple(part.losses.shape), compute_result))
            return {}

        trainer = make(package, folder, tmp_path / package.__name__, rows=rows, compute_metrics=compute, config=config,
                       eval_dataset=Dataset.from_list(rows), preprocess_logits_for_metrics=likeliest)  # fmt: skip
        trainer.evaluate()
    calls = {package: sorted(map(repr, shown)) for package, shown in seen.items()}
    assert len(calls[trl]) == 4 and calls[trl_jax] == calls[trl]


@pytest.mark.parametrize("size", [1, 4, thorough(6)])
def test_an_evaluation_is_the_same_in_any_batches(size, folder, tmp_path):
    rows = Dataset.from_list(text_rows(6, "prompt", seed=4))
    sides = (make(trl_jax, folder, tmp_path, config={"per_device_eval_batch_size": batch}) for batch in (2, size))
    one, other = (side.evaluate(rows) for side in sides)
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert one[name] == pytest.approx(other[name], rel=1e-5)


def test_documents_of_a_row_are_apart_without_packing(folder, tmp_path):
    """TRL reads `seq_lengths` only with packing or padding_free: the second document would see the first."""
    trainer = make(trl_jax, folder, tmp_path, config={"pad_to_multiple_of": None})
    documents = [[5, 6, 7, 8], [9, 8, 7]]
    row = {"input_ids": sum(documents, []), "labels": sum(documents, []), "seq_lengths": [4, 3]}
    apart = trainer.evaluate(Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in documents]))
    assert trainer.evaluate(Dataset.from_list([row]))["eval_loss"] == pytest.approx(apart["eval_loss"], rel=1e-5)
    whole = trainer.evaluate(Dataset.from_list([row]).remove_columns("seq_lengths"))
    assert abs(whole["eval_loss"] - apart["eval_loss"]) > 1e-3


@pytest.mark.parametrize("family", ["gpt_oss", *map(thorough, ("opt", "glm4v", "qwen2_5_vl", "qwen2_vl"))])
def test_documents_are_apart_where_the_masks_of_transformers_ignore_their_boundaries(family, tmp_path):
    """TRL's loss without padding is not its loss with padding for these types; trl_jax has the latter in both."""
    trl = pytest.importorskip("trl")
    folder = tmp_path / "model"
    if family in towers.CASES:
        towers.build(folder, family)
    else:
        tiny_model(folder, family, head="causal", num_hidden_layers=1)
    rows, found = Dataset.from_list(text_rows(4, "prompt", seed=1)), []
    for package, free in ((trl, False), (trl_jax, True), (trl, True)):
        config = {"padding_free": free, "max_length": None, "pad_to_multiple_of": None, "use_cpu": True}
        out = tmp_path / f"{package.__name__}{free}"
        config |= {"per_device_eval_batch_size": 4}
        given = {"processing_class": AutoTokenizer.from_pretrained(folder), "eval_dataset": rows}
        found.append(make(package, folder, out, config=config, **given).evaluate()["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert abs(found[2] - found[0]) > 1e-3


def test_a_packed_set_is_packed_once(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, config={"packing": True, "max_length": 64})
    again = trainer.prepare_dataset(trainer.train_dataset, "train")
    assert again["input_ids"][:] == trainer.train_dataset["input_ids"][:]
    assert again["seq_lengths"][:] == trainer.train_dataset["seq_lengths"][:]


def test_rows_that_are_prepared_already(folder, tmp_path):
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}] * 8
    config = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": 2, "max_steps": 1}
    trainer = make(trl_jax, folder, tmp_path, rows=rows, config=config)
    trainer.train()
    assert trainer.train_dataset[0] == rows[0] and steps(trainer)[0]["num_tokens"] == 16


def test_a_torch_model_gets_the_trained_weights(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    before = model.lm_head.weight.detach().numpy().copy()
    trainer = make(trl_jax, model, tmp_path, config={"max_steps": 2})
    trainer.train()
    assert np.abs(model.lm_head.weight.detach().numpy() - before).max() > 1e-4


def test_what_is_saved_is_a_language_model(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, config={"max_steps": 1, "eos_token": "<pad>"})
    trainer.model.generation_config.max_length = 77  # scripts do this before they save
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(dataset_name="mine", tags=["own"])
    names = ("config.json", "generation_config.json")
    config, generation = (json.loads((tmp_path / name).read_text()) for name in names)
    assert config["architectures"] == ["LlamaForCausalLM"] and config["eos_token_id"] == 0
    assert generation["max_length"] == 77 and generation["eos_token_id"][0] == 0
    card = (tmp_path / "README.md").read_text()
    assert all(f"- {tag}\n" in card for tag in ("trl", "sft", "own")) and "pipeline_tag: text-generation" in card
    assert "reward" not in card and "AutoModelForCausalLM" in card


def test_a_run_that_goes_on_is_the_run_that_was_not_broken_off(folder, tmp_path):
    """With packed rows and accumulation, every logged number of the later steps is the same, including num_tokens."""
    config = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "packing": True, "max_length": 48,
              "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}  # fmt: skip
    rows = text_rows(40, "prompt")
    whole = make(trl_jax, folder, tmp_path / "run", rows=rows, config=config)
    whole.train()
    resumed = make(trl_jax, folder, tmp_path / "run", rows=rows, config=config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert steps(resumed)[2:] == steps(whole)[2:] and len(steps(whole)) == 4


def test_four_bit_weights_with_an_adapter_train_as_the_floats_that_they_stand_for(folder, tmp_path):
    """QLoRA, written as for TRL: losses equal those of a float checkpoint with the dequantized weights."""
    bits = trl_jax.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    lora = trl_jax.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    config = {"model_init_kwargs": {"quantization_config": bits}, "learning_rate": 1e-2}
    few = make(trl_jax, folder, tmp_path / "few", config=config, peft_config=lora)
    assert few.model.frozen["decoder.layers.mlp.up.weight.codes"].dtype == np.uint8
    few.model.merge_and_unload().save_pretrained(tmp_path / "floats")  # the adapter is still zero
    few.processing_class.save_pretrained(tmp_path / "floats")
    plain = make(trl_jax, tmp_path / "floats", tmp_path / "plain", config={"learning_rate": 1e-2}, peft_config=lora)
    for trainer in (few, plain):
        trainer.train()
    found, wanted = ([log["loss"] for log in steps(trainer)] for trainer in (few, plain))
    assert wanted[-1] < wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_chat_template_of_a_file_or_of_another_tokenizer_is_trls(checkpoint, tmp_path):
    trl = pytest.importorskip("trl")
    base = checkpoint(**CAUSAL | {"tokenizer": {"chat_template": "{{ messages[0]['content'] }}"}})
    file, other = tmp_path / "turns.jinja", tmp_path / "other"
    file.write_text("{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}")
    tiny_tokenizer(other, chat_template=True)
    for number, path in enumerate((file, other)):
        config = {"chat_template_path": str(path)}
        ours, theirs = (
            make(package, base, tmp_path / f"{number}", rows=text_rows(8, "chat"), config=config)
            for package in (trl_jax, trl)
        )
        assert ours.processing_class.chat_template == theirs.processing_class.chat_template
        assert ours.train_dataset["input_ids"] == theirs.train_dataset["input_ids"]


def test_a_pad_token_that_is_the_eos_token_says_nothing_of_scores(folder, tmp_path, caplog):
    make(trl_jax, folder, tmp_path, processing_class=tiny_tokenizer(pad="</s>"))
    assert "score" not in caplog.text


@only_thorough
@pytest.mark.parametrize("kind", ["name", "torch", "ours"])
def test_tokens_that_a_chat_template_brings_train_beside_an_adapter_as_in_trl(kind, checkpoint, tmp_path):
    """Compares rows of the embedding and the head after one step of SGD. The adapter's initial values differ from
    TRL's, because transformers draws more random numbers when it resizes."""
    trl, peft, transformers = map(pytest.importorskip, ("trl", "peft", "transformers"))
    base, other = checkpoint(**CAUSAL | {"tokenizer": {"chat_template": True}}), tmp_path / "other"
    words = tiny_tokenizer(chat_template="{% for m in messages %}<turn>{{ m['content'] }}<end>{% endfor %}")
    words.add_tokens(["<turn>", "<end>"])
    words.save_pretrained(other)
    config, found = {"chat_template_path": str(other), "max_steps": 1, "learning_rate": 1.0, "optim": "sgd"}, []
    for package, of in ((trl, peft), (trl_jax, trl_jax)):
        model, out = base, tmp_path / package.__name__
        if kind == "torch":
            model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32")
        elif kind == "ours" and package is trl_jax:
            model = trl_jax.AutoModelForCausalLM.from_pretrained(base)
        lora = of.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        trainer = make(package, model, out, rows=text_rows(16, "chat"), config=config, peft_config=lora)
        trainer.train()
        trainer.save_model(str(out))
        found.append((steps(trainer), read_weights(out)))
    (theirs, wanted), (ours, weights) = found
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], abs=5e-5)
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-2)
    assert weights.keys() == wanted.keys()  # with the resized embedding and head, as PEFT saves them
    for name in ("lm_head.weight", "model.embed_tokens.token_adapter.trainable_tokens_delta"):
        mine, trls = weights[f"base_model.model.{name}"], wanted[f"base_model.model.{name}"]
        np.testing.assert_allclose(mine, trls, atol=2e-4, err_msg=name)
        assert np.abs(mine[-1] - mine).max() > 1e-2
    ids = np.asarray([[3, 512, 9, 513]])
    for package in ("trl_jax", "trl"):  # on the base model that the adapter names, which is resized, too
        again = trl_jax.AutoModelForCausalLM.from_pretrained(tmp_path / package)
        logits = np.asarray(trainer.model(ids).logits) if package == "trl_jax" else None
        assert again.vocab_size == 576
        assert logits is None or np.abs(np.asarray(again(ids).logits) - logits).max() < 1e-4
    trainer.train()  # copies the trained weights back into the torch model
    assert kind != "torch" or model.lm_head.out_features == trainer.model.vocab_size == 576


PADDING_FREE = {
    "padding_free": {"padding_free": True, "max_length": None},
    "packed": {"packing": True, "max_length": 40},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 40},
}


@pytest.mark.parametrize("name", usually(lambda name: name == "padding_free", PADDING_FREE))
def test_tokens_that_were_read_are_counted_as_in_trl_where_texts_lie_end_to_end(name, folder, tmp_path):
    seen = []
    for package in (trl_jax, pytest.importorskip("trl")):
        config = {"max_steps": 2, "pad_to_multiple_of": None, "include_num_input_tokens_seen": "all"}
        trainer = make(package, folder, tmp_path / package.__name__, config=config | PADDING_FREE[name])
        trainer.train()
        seen.append(trainer.state.num_input_tokens_seen)
    assert seen[0] == seen[1] > 40


@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 8}, {"padding": "max_length", "max_length": 64}])
def test_transformers_collator_of_labels(options, tmp_path):
    """It trains on the labels of the rows, as TRL's own collator does."""
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    folder = tiny_model(tmp_path / "model", "llama", head="causal", num_hidden_layers=1)
    words, found = transformers.AutoTokenizer.from_pretrained(folder), []
    ids = [[*range(5, 5 + n), 0, 7] for n in (3, 5, 8, 2, 9, 4, 6, 7)]  # 0 is also the pad token, and is predicted
    rows = Dataset.from_dict({"input_ids": ids, "labels": [[-100, -100, *one[2:]] for one in ids]})
    for package in (trl, trl_jax):
        args = package.SFTConfig(str(tmp_path / package.__name__), **BASE | {"max_steps": 2, "use_cpu": True})
        collator = transformers.DataCollatorForSeq2Seq(words, **options)
        if package is trl:
            trainer = package.SFTTrainer(str(folder), args, collator, rows, processing_class=words)
        else:
            trainer = package.SFTTrainer(str(folder), args, None if options else collator, rows, processing_class=words)
            trainer.data_collator = collator  # also later
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        norm = trainer.model.get_parameter("model.norm.weight").detach().cpu().numpy()
        found.append((losses, norm))
    np.testing.assert_allclose(found[1][0], found[0][0], atol=1e-5)
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-5)


def test_what_transformers_collators_would_change_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tiny_model(tmp_path / "model", "llama", head="causal", num_hidden_layers=1)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    rows, args = Dataset.from_dict({"text": ["bread soup"] * 4}), trl_jax.SFTConfig(str(tmp_path), **BASE)
    left = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    unpadded = transformers.AutoTokenizer.from_pretrained(folder)
    unpadded.pad_token = None
    seq2seq, masked = transformers.DataCollatorForSeq2Seq, transformers.DataCollatorForLanguageModeling
    guesses = masked(words, mlm=False)
    guesses.mlm = True  # as with a tokenizer that has a mask token
    for collator, told in (
        (seq2seq(words, label_pad_token_id=0), "has label_pad_token_id=0, .* Set it to -100"),
        (seq2seq(words, padding=False), "has padding=False"),
        (seq2seq(words, return_tensors="np"), "has return_tensors='np'"),
        (seq2seq(left), "has tokenizer.padding_side='left', .* Set it to 'right'"),
        (seq2seq(unpadded), "the tokenizer does not have a padding token"),
        (guesses, "A causal language model is not trained with mlm=True"),
    ):
        with pytest.raises(ValueError, match=told):
            trl_jax.SFTTrainer(str(folder), args, collator, rows, processing_class=words)


def test_the_training_rows_decide_whether_an_evaluation_covers_prompts(folder, tmp_path):
    """As in TRL: rows with prompts and completions are evaluated as whole texts if training rows are texts."""
    trl, found = pytest.importorskip("trl"), []
    answered = Dataset.from_list([{"prompt": "bake the bread", "completion": " gladly"}] * 4)
    for package in (trl_jax, trl):
        rows = [{"text": "bake the soup"}] * 4
        made = make(package, folder, tmp_path / package.__name__, rows=rows, eval_dataset=answered)
        found.append(made.evaluate()["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
