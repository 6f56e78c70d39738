"""SFT and DPO of language models on simulated devices against TRL on one."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)

import pytest
from datasets import Dataset

from compat_tests.effort import thorough
from compat_tests.mesh.rank import rows_of
from compat_tests.parity import golden, reference
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.marks import assert_same_weights, steps_of
from compat_tests.parity.test_dpo_curve import assert_same

CONFIG = {"max_length": 64, "max_steps": 6, "learning_rate": 3e-3}
ROWS = 4  # per step, over all devices


@pytest.fixture(scope="module")
def trl(checkpoint, tmp_path_factory):
    """TRL's run of a trainer, once per trainer."""
    made = {}

    def of(trainer):
        if trainer not in made:
            out = tmp_path_factory.mktemp("trl")
            made[trainer] = golden.run_trl(
                f"meshes/{trainer}", checkpoint(**SMALL), rows_of(trainer, 24), out, model=SMALL, trainer=trainer,
                per_device_train_batch_size=ROWS, **CONFIG,
            )  # fmt: skip
        return made[trainer]

    return of


@pytest.mark.parametrize(
    ("trainer", "mesh", "shards", "layout"),
    [
        thorough("SFT", "data:2", 2, "padded"),
        thorough("SFT", "fsdp:2", 2, "packed"),
        thorough("SFT", "tensor:2", 1, "packed"),
        thorough("SFT", "fsdp:2,sequence:2", 2, "packed"),
        thorough("DPO", "fsdp:2", 2, "shared"),
        thorough("DPO", "tensor:2", 1, "shared"),
    ],
)
def test_the_curve_is_trls(trainer, mesh, shards, layout, trl, checkpoint, tmp_path):
    config = {"mesh_shape": mesh, "batch_layout": layout, "per_device_train_batch_size": ROWS // shards}
    ours = reference.run_ours(checkpoint(**SMALL), rows_of(trainer, 24), tmp_path, trainer=trainer, **CONFIG | config)
    theirs = trl(trainer)
    assert len(steps_of(theirs.logs)) == 6
    for mine, other in zip(ours.logs, theirs.logs, strict=True):
        assert_same(mine, other)
    assert_same_weights(ours.weights, theirs.weights, 1e-3)


def test_a_loss_that_multiplies_by_the_number_of_processes_is_trls(trl, checkpoint, tmp_path):
    """As transformers' own does, because ranks take the mean of their gradients."""
    import jax.numpy as jnp
    import optax

    import trl_jax

    class Summed(trl_jax.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            labels = inputs["labels"][:, 1:]
            losses = optax.softmax_cross_entropy_with_integer_labels(outputs.logits[:, :-1], labels.clip(0))
            loss = jnp.sum(losses * (labels != -100)) / num_items_in_batch * self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

    config = CONFIG | {"mesh_shape": "data:2", "per_device_train_batch_size": ROWS // 2, "max_steps": 2}
    args = trl_jax.SFTConfig(str(tmp_path), **reference.BASE | config | {"lr_scheduler_type": "constant"})
    rows = Dataset.from_list(rows_of("SFT", 24))
    trainer = Summed(str(checkpoint(**SMALL)), args, train_dataset=rows)
    trainer.train()
    assert trainer.accelerator.num_processes == 2
    ours, theirs = steps_of(trainer.state.log_history)[0], steps_of(trl("SFT").logs)[0]
    for name in ("loss", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


def test_a_prediction_step_of_ones_own_leaves_steps_as_they_are(checkpoint, tmp_path):
    """It gets whole batches in evaluations, while steps are still divided over the devices."""
    import trl_jax

    class Own(trl_jax.SFTTrainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return loss * self.accelerator.num_processes, logits, labels  # 1: the inputs have the rows of all devices

    config = CONFIG | {"mesh_shape": "data:2", "per_device_train_batch_size": ROWS // 2, "max_steps": 2}
    runs = []
    for kind in (trl_jax.SFTTrainer, Own):
        args = trl_jax.SFTConfig(str(tmp_path / kind.__name__), **reference.BASE | config)
        rows = Dataset.from_list(rows_of("SFT", 24))
        trainer = kind(str(checkpoint(**SMALL)), args, train_dataset=rows, eval_dataset=rows.select(range(5)))
        trainer.train()
        runs.append((steps_of(trainer.state.log_history), trainer.evaluate()))
    (steps, evaluated), (ours, of_own) = runs
    for one, other in zip(steps, ours, strict=True):
        assert_same(one, other)
    assert of_own["eval_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-4)


@pytest.mark.parametrize("own_loss", [False, thorough(True)])
def test_noise_depends_on_the_texts_of_one_device(own_loss, checkpoint, tmp_path, monkeypatch):
    """As in TRL, each of whose ranks concatenates its own texts: two devices are like two micro-batches."""
    import trl_jax
    from trl_jax.nn.layers import Noise

    class Own(trl_jax.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    monkeypatch.setattr(Noise, "__call__", lambda self, x: x + self.alpha / self.length)  # not random
    rows = Dataset.from_list([{"text": "How do I bake the bread?"}] * 4)
    config = reference.BASE | {
        "neftune_noise_alpha": 7.0, "padding_free": True, "max_length": None, "pad_to_multiple_of": None,
        "per_device_train_batch_size": 2, "max_steps": 1,
    }  # fmt: skip
    losses = []
    for more in ({"mesh_shape": "data:2"}, {"mesh_shape": "data:1", "gradient_accumulation_steps": 2}):
        args = trl_jax.SFTConfig(str(tmp_path / more["mesh_shape"][-1]), **config | more)
        trainer = (Own if own_loss else trl_jax.SFTTrainer)(str(checkpoint(**SMALL)), args, train_dataset=rows)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
