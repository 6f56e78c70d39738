"""What is determined about a torch model without exporting it: which parameters train, and whether training mode
differs."""

from __future__ import annotations

import numpy as np
import pytest

from compat_tests.effort import only_thorough, thorough, usual
from compat_tests.exported import configs

torch = pytest.importorskip("torch")

from trl_jax.exported import program  # noqa: E402
from trl_jax.exported.program import TorchModel, fake_pass  # noqa: E402


def load(folder) -> TorchModel:
    return TorchModel(folder, dtype="float32", seed=0)


# luke has an entity embedding that texts do not use; axk2 selects keys with an indexer that has no gradient.
@pytest.mark.parametrize("model_type", ["luke", "gpt_oss", thorough("axk2"), thorough("jamba")])
def test_parameters_without_gradient_are_those_of_torch(model_type, tmp_path):
    folder = configs.build(tmp_path, model_type)
    theirs = configs.reference(folder)
    configs.scores(theirs, *configs.rows()).sum().backward()
    wanted = {name for name, parameter in theirs.named_parameters() if parameter.grad is None}
    found = fake_pass(load(folder)._module, 2, 16, training=False, head="score")
    assert set(dict(theirs.named_parameters())) - found.differentiable == wanted
    assert bool(wanted) == (model_type in ("luke", "axk2"))


@only_thorough
def test_an_exported_program_tells_where_a_pass_without_numbers_fails(tmp_path, monkeypatch):
    folder = configs.build(tmp_path, "luke")
    told, passed = load(folder), load(folder)
    assert passed.undecayed and not passed._programs  # nothing was exported for this
    monkeypatch.setattr(program, "fake_pass", lambda *args, **kwargs: None)
    assert told.undecayed == passed.undecayed and told._programs


class Branch(torch.nn.Module):
    """Branches on a value, or has a constant that depends on the mode."""

    def __init__(self, asks: bool):
        super().__init__()
        self.weight, self.asks = torch.nn.Parameter(torch.ones(3)), asks

    def _can_set_experts_implementation(self):
        return False

    def forward(self, input_ids, attention_mask):
        ids = input_ids.float().mean()
        if self.asks and ids > 1:
            return self
        self.logits = ids * torch.from_numpy(np.arange(3.0) + self.training) * self.weight
        return self


def test_a_pass_that_asks_for_a_number_is_none():
    assert fake_pass(Branch(asks=True), 2, 16, training=False, head="score") is None


def test_constants_are_part_of_what_is_computed_and_the_module_stays_as_it_is():
    module = Branch(asks=False)
    once, again, other = (fake_pass(module, 2, 16, training, "score") for training in (False, False, True))
    assert once == again and once.differentiable == other.differentiable == {"weight"}
    assert once.operations != other.operations
    assert not hasattr(module, "logits") and module.training


# With dropout there are two programs: covered by test_computing by default.
@usual("True-0.0")
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("first", [True, False])
def test_training_and_evaluation_have_one_program_where_nothing_is_dropped(rate, first, tmp_path):
    model = load(configs.build(tmp_path, "bloom", n_layer=1, hidden_dropout=rate, attention_dropout=rate))
    one, other = (model.program(4, 24, dtype="float32", training=training) for training in (first, not first))
    assert (one is other) == (rate == 0.0)
    assert len(model._programs) == (1 if rate == 0.0 else 2)
