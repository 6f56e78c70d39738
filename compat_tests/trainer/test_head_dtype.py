"""cast_lm_head_to_fp32: bfloat16 layers under a float32 head, in training steps, other passes and generation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset

from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from trl_jax.generation.decode import prefill
from trl_jax.generation.weights import Weights, matrices_in
from trl_jax.hub import generate
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.models.model import merge
from trl_jax.rollout.rollout import GeneratedCompletions
from trl_jax.trainer.grpo_trainer import GRPOTrainer

PROMPT, ANSWER = np.arange(5, 12), np.arange(20, 31)
CONFIG = {
    "bf16": True, "use_cpu": True, "report_to": "none", "num_generations": 4, "per_device_train_batch_size": 4,
    "max_completion_length": 4,
    "pad_to_multiple_of": None,
}  # fmt: skip


@pytest.fixture
def make(checkpoint, tmp_path):
    def made(cast, **arguments):
        args = GRPOTrainer.config_class(str(tmp_path / "out"), cast_lm_head_to_fp32=cast, **CONFIG)
        rows = Dataset.from_list(prompt_rows(4))
        return GRPOTrainer(str(checkpoint(**SMALL)), length_reward, args, rows, **arguments)

    return made


def in_bfloat16(logits):
    """Whether all values are representable in bfloat16."""
    return bool(np.all(np.asarray(logits) == np.asarray(logits).astype(jnp.bfloat16).astype(np.float32)))


def test_the_head_computes_in_float32_what_layers_in_bfloat16_give(make):
    policy = make(True).model
    model, ids = merge(policy.graph, policy.arrays), jnp.asarray(np.concatenate([PROMPT, ANSWER])[None])
    places = jnp.arange(ids.shape[1])
    given, how = (ids, places[None], places), {"dtype": jnp.bfloat16}
    hidden = np.asarray(model.decoder(*given, **how).astype(jnp.bfloat16), np.float64)
    logits = model(*given, head_dtype=jnp.float32, **how)
    np.testing.assert_allclose(logits, hidden @ np.asarray(policy.arrays["lm_head.weight"], np.float64).T, atol=1e-5)
    assert in_bfloat16(model(*given, **how)) and not in_bfloat16(logits)


def test_a_step_and_its_completions_have_that_head(make):
    exact, coarse = make(True), make(False)
    by_model = [np.ones(len(ANSWER), bool)]
    asked = ("policy", GeneratedCompletions([PROMPT], [ANSWER], by_model), by_model)
    [found], [other] = (one.parts.rollout_steps.rollout.scorer.logps(*asked) for one in (exact, coarse))
    assert 1e-4 < np.abs(found - other).max() < 0.1
    kinds, run = [], generate.run

    def spied(*given, head_dtype, **how):
        kinds.append(head_dtype)
        return run(*given, head_dtype=head_dtype, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "run", spied)
        for one in (exact, coarse):
            one.parts.rollout_steps.rollout.generator.complete([PROMPT.tolist()] * 4, 4)
    assert kinds == ["float32", None]


def test_a_generation_keeps_the_heads_weight(make):
    policy = make(True).model
    arrays = matrices_in(policy.graph, policy.arrays, jnp.dtype("bfloat16"), jnp.dtype("float32"))
    kinds = {path: array.dtype for path, array in arrays.items()}
    assert kinds["lm_head.weight"] == jnp.float32 and jnp.bfloat16 in kinds.values()
    prompt, sizes = PROMPT[None].astype(np.int32), {"group": 1, "capacity": 32, "max_tokens": 64}
    exact, coarse = (
        prefill(
            Weights(policy.graph, arrays, None, jnp.dtype("bfloat16"), jnp.dtype(head_dtype)), prompt,
            np.asarray([len(PROMPT)], np.int32), len(PROMPT), **sizes,
        )[0]
        for head_dtype in ("float32", "bfloat16")
    )  # fmt: skip
    assert in_bfloat16(coarse) and not in_bfloat16(exact)
    np.testing.assert_allclose(exact, coarse, atol=0.1)


def test_an_adapter_of_the_head_is_refused_as_in_trl(make):
    with pytest.raises(ValueError, match="is not supported when the lm_head carries a PEFT adapter"):
        make(True, peft_config=LoraConfig(r=2, target_modules=["lm_head"]))
