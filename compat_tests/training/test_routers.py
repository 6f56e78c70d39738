"""The load-balancing loss of MoE models: which losses it is added to, and which models have none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from transformers import JambaConfig, LlamaConfig, PhimoeConfig

import trl_jax
from compat_tests.effort import THOROUGH, only_thorough
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows
from trl_jax.training.forward import balance_experts

CONFIG = {"max_length": 64, "gradient_accumulation_steps": 2, "router_aux_loss_coef": 0.5}


def model_of(config, *, has_routers):
    config.architectures = ["SomeForCausalLM"]
    backend = SimpleNamespace(traits=SimpleNamespace(has_routers=has_routers), name="exported")
    return SimpleNamespace(config=config, backend=backend)


@pytest.mark.parametrize(("coefficient", "counts"), [(None, 0.001), (0.3, 0.3), (0.0, 0.0)])
def test_the_coefficient_is_the_arguments_or_the_models(coefficient, counts):
    model = model_of(PhimoeConfig(router_aux_loss_coef=0.001, output_router_logits=True), has_routers=True)
    config = model.config
    assert balance_experts(model, coefficient) == counts
    assert (config.router_aux_loss_coef, config.output_router_logits) == (0.001, True)
    assert balance_experts(model, coefficient, in_config=True) == counts  # only SFT, as in TRL
    assert counts == config.router_aux_loss_coef == counts
    assert config.output_router_logits == bool(counts)


def test_models_without_routers():
    dense = model_of(LlamaConfig(), has_routers=False)
    assert not balance_experts(dense, None) and not balance_experts(dense, 0.0)
    with pytest.raises(ValueError, match="`router_aux_loss_coef` is set to 0.1 but SomeForCausalLM is not a Mixture"):
        balance_experts(dense, 0.1)
    foreign = model_of(JambaConfig(router_aux_loss_coef=0.001), has_routers=False)
    with pytest.raises(ValueError, match="router_aux_loss_coef=0.001 of SomeForCausalLM: .* exported backend"):
        balance_experts(foreign, None)
    assert not balance_experts(foreign, 0.0)


@pytest.fixture(scope="module")
def losses(checkpoint, tmp_path_factory):
    """Losses and auxiliary losses of a run, with an evaluation at the end."""

    def run(cls=trl_jax.SFTTrainer, config=None, **arguments):
        args = trl_jax.SFTConfig(str(tmp_path_factory.mktemp("out")), **BASE | CONFIG | (config or {}))
        model = str(checkpoint("mixtral", head="causal", num_hidden_layers=1, hidden_size=32))
        sizes = (10 if THOROUGH else 12, 4)  # a short last micro-batch needs another program
        rows = [Dataset.from_list(text_rows(n, "prompt", seed=n)) for n in sizes]
        trainer = cls(model, args, train_dataset=rows[0], eval_dataset=rows[1], **arguments)
        trainer.train()
        trainer.evaluate()
        return [
            [log[key] for log in trainer.state.log_history for key in keys if key in log]
            for keys in (("loss", "eval_loss"), ("aux_loss", "eval_aux_loss"))
        ]

    return run


@pytest.fixture(scope="module")
def default(losses):
    return losses()


class Own(trl_jax.SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)


@only_thorough
def test_a_loss_behind_super_has_it(losses, default):
    assert [len(values) for values in default] == [3, 3]
    np.testing.assert_allclose(losses(Own), default, rtol=1e-5)


@only_thorough
def test_an_evaluation_with_whole_logits_has_it(losses, default):
    np.testing.assert_allclose(losses(compute_metrics=lambda found: {}), default, rtol=1e-5)


def test_a_script_s_whole_loss_adds_it_itself(losses, default, caplog):
    """As in TRL, where `compute_loss_func` gets the model's outputs. The loss is half the auxiliary loss, summed over
    two micro-batches."""

    def loss(outputs, labels, num_items_in_batch=None):
        return 0.5 * outputs.aux_loss

    found, aux = losses(compute_loss_func=loss)
    assert "compute_loss_func is the whole loss, as in TRL" in caplog.text
    np.testing.assert_allclose(aux[0], default[1][0], rtol=1e-5)
    np.testing.assert_allclose(found[0], aux[0], rtol=1e-5)  # summed over two micro-batches without averaging
    np.testing.assert_allclose(found[-1], aux[-1] / 2, rtol=1e-5)


@only_thorough
def test_label_smoothing_keeps_it(losses, default):
    """TRL 1.16 logs it but does not train on it."""
    with_it, without = (losses(config={"label_smoothing_factor": 0.1, "router_aux_loss_coef": c}) for c in (0.5, 1e-9))
    np.testing.assert_allclose(with_it[0][0] - without[0][0], 0.5 * with_it[1][0], rtol=1e-4)
