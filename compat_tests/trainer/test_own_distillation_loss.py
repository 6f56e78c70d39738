"""User-defined distillation losses: `_compute_loss` and `compute_loss` of subclasses."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset

from compat_tests.effort import only_thorough
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import prompt_rows
from compat_tests.parity.reference import BASE, read_weights
from trl_jax.trainer.distillation_config import DistillationConfig
from trl_jax.trainer.distillation_trainer import DistillationTrainer

CONFIG = {
    "max_steps": 2, "learning_rate": 3e-3, "max_completion_length": 6, "pad_to_multiple_of": None, "beta": 0.3,
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2,
}  # fmt: skip


@pytest.fixture
def trained(checkpoint, tmp_path):
    def run(kind, **config):
        args = DistillationConfig(str(tmp_path / kind.__name__), **BASE | CONFIG | config)
        rows = Dataset.from_list(prompt_rows(8))
        folders = (str(checkpoint(**SMALL, seed=seed)) for seed in (0, 1))
        trainer = kind(*folders, args, rows, Dataset.from_list(prompt_rows(3)))
        trainer.train()
        trainer.save_model()
        return trainer.state.log_history, read_weights(tmp_path / kind.__name__)

    return run


class Own(DistillationTrainer):
    """The configured divergence: half of it summed from per-token values, half of it from super()."""

    def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
        mask = inputs["completion_mask"]
        found = self._get_per_token_divergences(unwrapped_student)
        if num_items_in_batch is None:
            num_items_in_batch = mask.sum()
        # The mean of this over the student's completions estimates the reverse KL.
        ratio = (found.student_logps - found.teacher_logps) * mask
        self._metrics["train" if self.model.training else "eval"]["ratio"].append(ratio.sum() / mask.sum())
        loss, entropy, tokens = super()._compute_loss(unwrapped_student, inputs, num_items_in_batch)
        loss = 0.5 * loss + 0.5 * (found.divergence * mask).sum() / num_items_in_batch
        return loss, 0.5 * entropy + 0.5 * (found.entropy * mask).sum(), tokens


class Half(DistillationTrainer):
    """Half of super()'s loss, without the last two tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mask = inputs["completion_mask"]
        mask = jnp.where(jnp.arange(mask.shape[1]) < 4, mask, 0)
        return 0.5 * super().compute_loss(model, inputs | {"completion_mask": mask}, return_outputs, num_items_in_batch)


class HalfOfOwn(DistillationTrainer):
    """The same loss for beta 0.3, computed from per-token divergences."""

    def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
        mask = jnp.where(jnp.arange(inputs["completion_mask"].shape[1]) < 4, inputs["completion_mask"], 0)
        found = self._get_per_token_divergences(unwrapped_student, beta=0.3)
        loss = 0.5 * (found.divergence * mask).sum() / num_items_in_batch
        return loss, (found.entropy * mask).sum(), mask.sum()


def assert_same(found, wanted):
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    for one, other in zip(found[0], wanted[0], strict=True):
        for name in set(other) & {"loss", "grad_norm", "eval_loss", "entropy", "eval_entropy", "num_tokens"}:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def test_the_divergence_in_jax_numpy_is_the_built_in_one(trained):
    found = trained(Own)
    assert_same(found, trained(DistillationTrainer))
    assert min(abs(log["ratio"]) for log in found[0] if "loss" in log) > 1e-3


@only_thorough
def test_an_evaluation_has_the_same_loss(trained):
    config = {"eval_strategy": "steps", "eval_steps": 2}  # a short last batch
    found = trained(Own, **config)
    assert_same(found, trained(DistillationTrainer, **config))
    assert sum("eval_ratio" in log for log in found[0]) == 1


@only_thorough
def test_super_takes_another_mask(trained):
    halved, written = trained(Half, max_steps=1), trained(HalfOfOwn, max_steps=1)
    assert_same(halved, written)
    assert halved[0][0]["grad_norm"] > 1e-3


def test_what_a_compiled_loss_cannot_do_is_said(checkpoint, tmp_path):
    class Bad(DistillationTrainer):
        def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
            return self.chosen(unwrapped_student, inputs)

    args = DistillationConfig(str(tmp_path), **BASE | CONFIG | {"max_steps": 1})
    trainer = Bad(str(checkpoint(**SMALL)), str(checkpoint(**SMALL)), args, Dataset.from_list(prompt_rows(4)))
    refused = {
        "must be called with the model that the loss receives": lambda self, *_: self._get_per_token_divergences(
            self.model
        ),
        r"in a loss of distillation.* Use self._get_per_token_divergences\(model\)": lambda self, model, inputs: model(
            inputs
        ),
        "got another prompt_ids than the inputs have": lambda self, model, inputs: super(Bad, self)._compute_loss(
            model, inputs | {"prompt_ids": 0}, None
        ),
    }
    for words, chosen in refused.items():
        Bad.chosen = chosen
        with pytest.raises(TypeError, match=words):
            trainer.train()
    with pytest.raises(RuntimeError, match="_compute_loss of Bad can be called within its own _compute_loss only"):
        DistillationTrainer._compute_loss(trainer, None, {}, None)
