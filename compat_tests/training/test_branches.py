"""A per-token loss over three branches of a prompt and a reference: every layout gives the numbers of plain jnp in
float64."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from compat_tests.effort import thorough, usual
from compat_tests.training import branches
from trl_jax.data.batch import IGNORED
from trl_jax.data.loader import IndexedExample
from trl_jax.training import data

OURS = {
    "decoder.embed.weight": "model.embed_tokens.weight", "decoder.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}  # fmt: skip


# Windows shorter than the longer prompts; convolutions that start with a prompt's last tokens; recurrences that start
# with a prompt's final state.
FACTS = {
    "llama": {}, "mistral": {"sliding_window": 8}, "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0},
}  # fmt: skip


@pytest.fixture(scope="module", params=[thorough("llama"), "mistral", thorough("lfm2"), thorough("granitemoehybrid")])
def models(checkpoint, request):
    facts = {"model_type": request.param} | FACTS[request.param]
    return [checkpoint(**facts, **branches.MODEL, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def wanted(models):
    rows = branches.rows()
    return branches.exact(*models, rows, [row["weight"] for row in rows])


def of_step(trainer):
    """Loss and gradients of the first step, over all of its passes."""
    run, batch = trainer.parts.setup, next(iter(trainer.loader(trainer.train_dataset, training=True)))

    def loss(params, arrays):
        return trainer.parts.forward.loss(run.frozen | params, arrays, None)[0]

    run_pass = jax.jit(jax.value_and_grad(loss))
    passes = [
        run_pass(run.model.params, jax.tree.map(lambda leaf, p=p: leaf[p], batch.arrays))
        for p in range(len(batch.arrays.tokens))
    ]
    return batch, jax.tree.map(lambda *parts: sum(np.asarray(part, np.float64) for part in parts), *passes)


@usual(
    "llama-padded", "llama-packed", "llama-shared", "mistral-padded", "mistral-packed", "lfm2-padded", "lfm2-packed",
    "lfm2-shared", "granitemoehybrid-shared",
)  # fmt: skip
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_loss_and_gradients_are_those_of_the_formula(layout, models, wanted, tmp_path):
    config = {"batch_layout": layout, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    trainer = branches.trainer(*models, tmp_path, branches.rows(), **config)
    batch, (loss, gradients) = of_step(trainer)
    tokens = sum(len(row["input_ids"]) for row in branches.rows())
    once = tokens - sum(2 * row["prompt"] for row in branches.rows()[:: branches.BRANCHES])
    filled = int(np.sum(batch.arrays.router_token_count > 0))
    assert filled == (once if layout == "shared" else tokens)
    np.testing.assert_allclose(loss, wanted[0], rtol=2e-6)
    for ours, theirs in OURS.items():
        theirs = theirs if theirs in wanted[2] else "model.embedding_norm.weight"  # the name of lfm2's final norm
        np.testing.assert_allclose(gradients[ours], wanted[2][theirs], atol=2e-6, rtol=1e-4, err_msg=ours)


@usual("llama", "mistral")
def test_a_run_lays_out_examples_that_come_from_no_dataset(models, wanted, tmp_path):
    """Like those of a rollout; log-probabilities of a pass are mapped back to the examples."""
    config = {"batch_layout": "shared", "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    trainer = branches.trainer(*models, tmp_path, branches.rows(), **config)
    run, forward = trainer.parts.setup, trainer.parts.forward
    examples = [IndexedExample(run.task.example(row), number) for number, row in enumerate(branches.rows())]
    step = data.training_layout(run).step([examples[:6], examples[6:]], 0)
    run_pass = jax.jit(partial(forward.outputs, dtype="float32"))
    arrays = [jax.tree.map(lambda leaf, p=p: leaf[p], step.arrays) for p in range(2)]
    outputs = [run_pass(run.arrays, own) for own in arrays]
    losses = [float(run.task.loss(*both)[0]) for both in zip(outputs, arrays, strict=True)]
    np.testing.assert_allclose(sum(losses), wanted[0], rtol=2e-6)
    ref_logps = step.values_by_row(np.stack([output["ref_logps"] for output in outputs]))
    assert [len(values) for row in range(12) for values in ref_logps[row]] == [
        sum(label != IGNORED for label in row["labels"]) for row in branches.rows()
    ]


@usual("llama-shared", "mistral-shared")
@pytest.mark.parametrize("layout", [thorough("padded"), "shared"])
def test_a_run_trains_and_evaluates_it(layout, models, wanted, tmp_path):
    config = {"batch_layout": layout, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    trainer = branches.trainer(*models, tmp_path, branches.rows(), per_device_eval_batch_size=5, **config)
    rows = branches.rows()
    weights = [row["weight"] * count / 12 for row, count in zip(rows, [5] * 10 + [2] * 2, strict=True)]
    evaluated = trainer.evaluate()
    loss, kl, _ = branches.exact(*models, rows, weights)
    np.testing.assert_allclose([evaluated["eval_loss"], evaluated["eval_kl"]], [loss, kl], rtol=1e-5)
    trainer.train()
    [log] = [entry for entry in trainer.state.log_history if "loss" in entry]
    norm = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in wanted[2].values()))
    found = [log[name] for name in ("loss", "kl", "grad_norm")]
    np.testing.assert_allclose(found, [*wanted[:2], norm], rtol=1e-5)


def test_a_scripts_own_loss_is_refused(models, tmp_path):
    class Own(branches.BranchesTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return 0.0

    with pytest.raises(TypeError, match="overridden compute_loss would receive logits.*BranchesTask"):
        branches.trainer(*models, tmp_path, branches.rows(), kind=Own)
