"""User-defined losses written in torch: the same run as in jax.numpy and under TRL."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import THOROUGH, only_thorough
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows
from compat_tests.trainer.trainers import FACTS, make, table

torch = pytest.importorskip("torch")
logsigmoid = torch.nn.functional.logsigmoid


@pytest.fixture(scope="session")
def folder(checkpoint):
    return checkpoint(**FACTS)


def config(**changed):
    return BASE | {"per_device_train_batch_size": 4, "max_steps": 3} | changed


def untimed(log):
    return {name: float(value) for name, value in log.items() if not name.endswith(("runtime", "per_second"))}


def in_torch(base):
    class Margin(base):
        modes = set()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.modes.add("train" if model.training else "eval")
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False)
            chosen, rejected = torch.chunk(outputs.logits.squeeze(-1), 2)
            loss = -logsigmoid(chosen - rejected - 0.3).mean() + 0.1 * (chosen + rejected).square().mean()
            self.last = loss.item()
            if loss.item() > 1e9:
                raise OverflowError
            return (loss, outputs) if return_outputs else loss

    return Margin


class InJax(trl_jax.RewardTrainer):
    modes = set()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.modes.add("train" if model.training else "eval")
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        chosen, rejected = jnp.split(outputs.logits[:, 0], 2)
        loss = -jax.nn.log_sigmoid(chosen - rejected - 0.3).mean() + 0.1 * jnp.square(chosen + rejected).mean()
        return (loss, outputs) if return_outputs else loss


SHORT = 10, 6  # numbers of training and evaluation rows; their last batches are short


def run(package, kind, folder, out, sizes=SHORT):
    how = config(gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2)
    args = make(package, folder, out, config=how).args
    rows, other = table(sizes[0]), table(sizes[1], seed=1)
    trainer = kind(str(folder), args=args, train_dataset=rows, eval_dataset=other)
    trainer.train()
    return trainer, [*trainer.state.log_history, trainer.evaluate()]


def test_a_loss_in_torch_is_the_run_of_the_same_in_jax_and_in_trl(folder, tmp_path, caplog):
    trl = pytest.importorskip("trl")
    trainer, found = run(trl_jax, in_torch(trl_jax.RewardTrainer), folder, tmp_path / "torch")
    wanted = run(trl_jax, InJax, folder, tmp_path / "jax")[1]
    assert trainer.modes == InJax.modes == {"train", "eval"}
    for log, other in zip(found, wanted, strict=True):
        assert list(log) == list(other) and untimed(log) == pytest.approx(untimed(other), rel=1e-5, abs=1e-6)
    assert trainer.last > 0
    [line] = [one.getMessage() for one in caplog.records if "written in torch" in one.getMessage()]
    assert "`chosen, rejected = torch.chunk(outputs.logits.squeeze(-1), 2)`" in line
    theirs = run(trl, in_torch(trl.RewardTrainer), folder, tmp_path / "trl")[1]
    for name in ("loss", "grad_norm"):
        of_both = [[log[name] for log in logs if name in log] for logs in (found, theirs)]
        assert of_both[0] == pytest.approx(of_both[1], abs=2e-5) and len(of_both[0]) > 2
    assert found[-1]["eval_loss"] == pytest.approx(theirs[-1]["eval_loss"], abs=2e-4)  # a mean of batch means


def in_two_calls(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    chosen, rejected = (model(inputs[f"input_ids_{side}"], inputs[f"attention_mask_{side}"])[0] for side in SIDES)
    return -logsigmoid(chosen - rejected).mean()


def around_the_default(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    loss, outputs = super(self.kind, self).compute_loss(model, inputs, return_outputs=True)
    outputs.logits[0] = torch.tensor(0.0)  # writes into its own copy
    loss = loss + torch.zeros(()) * outputs.logits.sum()
    return (loss, outputs) if return_outputs else loss


SIDES = ("chosen", "rejected")


@only_thorough
@pytest.mark.parametrize("own", [in_two_calls, around_the_default])
def test_trls_own_loss_in_torch_is_the_plain_run(folder, tmp_path, own):
    kind = type("Own", (trl_jax.RewardTrainer,), {"compute_loss": own})
    kind.kind = kind
    sizes = SHORT if THOROUGH else (12, 8)  # each short batch needs another program
    found = run(trl_jax, kind, folder, tmp_path / "own", sizes)[1]
    wanted = run(trl_jax, trl_jax.RewardTrainer, folder, tmp_path / "plain", sizes)[1]
    for log, other in zip(found, wanted, strict=True):
        assert untimed(log) == pytest.approx(untimed(other), rel=1e-4, abs=1e-5)


def of_tokens(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1])
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum")
    return total / (num_items_in_batch or (labels[:, 1:] != -100).sum())


def test_compute_loss_func_in_torch_trains_a_language_model(checkpoint, tmp_path):
    folder = checkpoint(**FACTS, head="causal")
    rows = Dataset.from_dict({"text": [f"a word and {'more ' * n}of it" for n in range(8)]})
    found = []
    for own in (None, of_tokens):
        args = trl_jax.SFTConfig(str(tmp_path), **config(gradient_accumulation_steps=2))
        trainer = trl_jax.SFTTrainer(str(folder), args, train_dataset=rows, compute_loss_func=own)
        trainer.train()
        found.append([untimed(log) for log in trainer.state.log_history])
    for log, other in zip(*found, strict=True):
        assert log == pytest.approx({name: other[name] for name in log}, rel=1e-4, abs=1e-5)


class Counting:
    """A mixin for TRL's trainer or ours: a loss that uses tensor methods without naming torch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        counted = (inputs["labels"] != -100).sum()
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["counted"].append(self.accelerator.gather_for_metrics(counted).sum().item())
        self._metrics[mode]["twice"].append((2 * loss.mean()).detach())
        return (loss, outputs) if return_outputs else loss


def test_a_loss_that_needs_values_logs_what_it_logs_in_trl(checkpoint, tmp_path, monkeypatch, caplog):
    trl, folder = pytest.importorskip("trl"), checkpoint(**FACTS, head="causal")
    for name in ("jax", "jnp"):  # a user's script imports neither
        monkeypatch.delitem(globals(), name)
    rows, found = Dataset.from_dict({"text": [f"a word and {'more ' * n}of it" for n in range(8)]}), {}
    for package in (trl, trl_jax):
        kind = type("Counts", (Counting, package.SFTTrainer), {})
        args = package.SFTConfig(
            str(tmp_path / package.__name__), **config(eval_strategy="steps", eval_steps=3, loss_type="nll")
        )
        trainer = kind(str(folder), args=args, train_dataset=rows, eval_dataset=rows.select(range(4)))
        trainer.train()
        found[package] = [untimed(log) for log in trainer.state.log_history[:-1]]
    for log, other in zip(*found.values(), strict=True):
        assert list(log) == list(other) and log == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert {"counted", "twice"} <= found[trl_jax][0].keys() and found[trl_jax][-1]["eval_counted"] > 0
    assert any(one.getMessage().startswith("compute_loss needs values (`self._metrics[mode]") for one in caplog.records)


def test_a_loss_without_the_number_of_items_is_refused_before_weights_are_read(checkpoint, tmp_path):
    class Old(trl_jax.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            return model(**inputs).loss

    args, rows = trl_jax.SFTConfig(str(tmp_path), **config()), Dataset.from_dict({"text": ["a word"] * 4})
    with pytest.raises(TypeError, match="Old.compute_loss takes no num_items_in_batch, with which transformers calls"):
        Old(str(checkpoint(**FACTS, head="causal")), args, train_dataset=rows)


REFUSED = {
    "model(inputs['input_ids'], output_hidden_states=True).logits": r"model\(...\) with output_hidden_states",
    "model(inputs['input_ids']).hidden_states[-1]": "the model's hidden_states",
    "model(inputs['input_ids']).log_probs.sum()": "the model's log_probs",
    "sum(torch.norm(p) for p in self.model.parameters())": "the model's parameters",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_reads_more_than_outputs_is_refused_by_the_line(folder, tmp_path, words):
    scope = {"torch": torch}
    source = "def own(self, model, inputs, **how):\n    torch.relu(model(inputs['input_ids']).logits)\n"
    source += f"    return {words}"
    (tmp_path / "script.py").write_text(source)
    exec(compile(source, str(tmp_path / "script.py"), "exec"), scope)
    kind = type("Own", (trl_jax.RewardTrainer,), {"compute_loss": scope["own"]})
    trainer = kind(str(folder), make(trl_jax, folder, tmp_path).args, train_dataset=table(8))
    with pytest.raises(TypeError, match=rf"compute_loss uses {REFUSED[words]}, which is not available here: `return"):
        trainer.train()


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (lambda m, x: torch.relu(m(x["input_ids"]).logits), r"compute_loss returned a tensor \[8, 1\]"),
        (lambda m, x: torch.relu(m(x["input_ids"]).logits.detach()).mean(), "returned a tensor without a gradient"),
        (lambda m, x: float(torch.relu(m(x["input_ids"]).logits).mean()), "compute_loss returned a float"),
    ],
)
def test_what_is_no_loss_is_refused(folder, tmp_path, own, text):
    loss = {"compute_loss": lambda self, model, inputs, **how: own(model, inputs)}
    trainer = type("Own", (trl_jax.RewardTrainer,), loss)(
        str(folder), make(trl_jax, folder, tmp_path).args, train_dataset=table(8)
    )
    with pytest.raises(TypeError, match=text):
        trainer.train()


def test_without_torch_the_line_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_jax.training.user_loss_errors.available", lambda: False)
    kind = in_torch(trl_jax.RewardTrainer)
    trainer = kind(str(folder), make(trl_jax, folder, tmp_path).args, train_dataset=table(8))
    with pytest.raises(
        TypeError, match=r"torch functions do not accept them.*`chosen, rejected = torch\.chunk.*Write it with"
    ):
        trainer.train()


def away_from_the_base(numpy, log_softmax):
    """The divergence of an adapted model from its base, plus a penalty without which the first gradient is 0."""

    class Away:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            rows = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            logits, mask = model(**rows).logits, rows["attention_mask"]
            with self.model.disable_adapter(), model.disable_adapter():  # either, also nested
                before = log_softmax(model(**rows).logits)
            divergence = (numpy.exp(before) * (before - log_softmax(logits))).sum(-1)
            return ((divergence + (logits**2).mean(-1)) * mask).sum() / mask.sum()

    return Away


def test_a_loss_may_disable_the_adapter(checkpoint, tmp_path):
    trl, peft, transformers = map(pytest.importorskip, ("trl", "peft", "transformers"))
    folder = checkpoint(**FACTS | {"head": "causal", "chat_template": False})
    lora, rows = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}, text_rows(12)
    own = {"torch": away_from_the_base(torch, lambda logits: torch.log_softmax(logits, -1))}
    own["jax"] = away_from_the_base(jnp, jax.nn.log_softmax)
    found = []
    for package, loss in ((trl, "torch"), (trl_jax, "torch"), (trl_jax, "jax")):
        args = package.SFTConfig(
            str(tmp_path / loss), **config(learning_rate=0.1, eval_strategy="epoch", gradient_checkpointing=False)
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(folder) if package is trl else str(folder)
        kind = type("Own", (own[loss], package.SFTTrainer), {})
        data = {"train_dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:4])}
        trainer = kind(model, args, **data, peft_config=peft.LoraConfig(**lora))
        trainer.train()
        found.append(
            [log.get(name) for log in trainer.state.log_history for name in ("loss", "grad_norm", "eval_loss")]
        )
    wanted = [value for value in found[0] if value is not None]
    assert len(wanted) == 7
    for one in found[1:]:
        assert [value for value in one if value is not None] == pytest.approx(wanted, rel=1e-5)
