"""Which layout a run uses, what it logs about it, and that results do not depend on it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import THOROUGH, only_thorough, thorough
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.parity.marks import timeless
from compat_tests.parity.reference import BASE
from compat_tests.trainer.trainers import FACTS, make, stream, table
from trl_jax.core.outputs import NO_VIRTUAL_TOKENS, VirtualTokens
from trl_jax.hub.backend import Traits
from trl_jax.nn.attention.packed import attend_by_text
from trl_jax.training import layout as layout_choice

COLUMNS = ("chosen_ids", "rejected_ids")


def backend(virtual=NO_VIRTUAL_TOKENS, **traits):
    facts = {"takes_packed": True, "causal": True} | traits
    return SimpleNamespace(
        traits=Traits(vocab_size=9, max_positions=None, embeddings=frozenset(), **facts), virtual=virtual
    )


CAUSAL, DROPS, DRAWS = backend(), backend(drops_out=True), backend(draws_experts=True)
ENCODER, WHOLE = backend(causal=False), backend(takes_packed=False, causal=False)
WINDOWED, BEHIND_SIX = backend(window=512), backend(VirtualTokens(99, 6), window=512)
WINDOWS = SMALL | {"model_type": "mistral", "sliding_window": 8}


def asked(layout="auto", device="cpu", **more):
    facts = {"disable_dropout": True, "seed": 1, "data_seed": None, "train_sampling_strategy": "random"}
    facts |= {"neftune_noise_alpha": None, "max_length": 1024}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return SimpleNamespace(batch_layout=layout, device=SimpleNamespace(type=device), **(facts | sizes | more))


@pytest.mark.parametrize(
    ("args", "backend", "layout", "reason"),
    [
        (asked(), CAUSAL, "shared", ""),
        (asked("packed"), CAUSAL, "packed", ""),
        (asked("padded"), CAUSAL, "padded", ""),
        (asked(), ENCODER, "packed", ""),
        (asked("shared"), ENCODER, "packed", "attention is bidirectional"),
        (asked(), WHOLE, "padded", "does not support several texts in one row"),
        (asked("shared"), WHOLE, "padded", "does not support several texts in one row"),
        (asked(disable_dropout=False), CAUSAL, "shared", ""),
        (asked(disable_dropout=False), DROPS, "padded", "does not support dropout"),
        (asked(neftune_noise_alpha=5.0), CAUSAL, "padded", "neftune_noise_alpha"),
        (asked(), DROPS, "shared", ""),
        (asked(device="cuda"), CAUSAL, "shared", ""),
        (asked(device="cuda"), ENCODER, "packed", ""),
        (asked(device="tpu"), CAUSAL, "shared", ""),
        (asked(device="tpu"), WINDOWED, "packed", "does not support windows with shared prompts"),
        (asked("shared", device="tpu"), WINDOWED, "shared", ""),
        (asked(device="tpu", max_length=512), WINDOWED, "shared", ""),
        (asked(device="tpu", max_length=507), BEHIND_SIX, "packed", "does not support windows with shared prompts"),
        (asked(device="tpu", max_length=506), BEHIND_SIX, "shared", ""),
        (asked(device="tpu", max_length=None), WINDOWED, "packed", "does not support windows with shared prompts"),
        (asked(), WINDOWED, "shared", ""),
        (asked("shared", device="cuda"), CAUSAL, "shared", ""),
        (asked(), DRAWS, "packed", ""),
        (asked("packed"), DRAWS, "packed", ""),
        (asked("padded"), DRAWS, "padded", ""),
        (asked("shared"), DRAWS, "packed", "sample experts for each text"),
    ],
)
def test_what_is_exact_and_why_not(args, backend, layout, reason):
    found, why = layout_choice.exact_layout(args, backend)
    assert found == layout and (reason in why if reason else why == "")


@pytest.mark.parametrize(
    ("args", "backend", "said"),
    [
        (asked(), WHOLE, None),
        (asked("padded"), WHOLE, None),
        (asked("shared"), CAUSAL, None),
        (asked("packed"), ENCODER, None),
        (asked("shared"), DRAWS, "so rows are packed: this model's routers sample experts for each text"),
        (asked("shared"), WHOLE, "so rows are padded: this model does not support several texts in one row"),
        (asked("shared"), ENCODER, "so rows are packed: this model's attention is bidirectional"),
    ],
)
def test_only_what_was_asked_for_and_cannot_be_had_is_warned_of(args, backend, said, caplog):
    layout_choice.check_layout(args, backend)
    assert len(caplog.records) == (said is not None)
    if said:
        assert caplog.text.count(f"batch_layout='shared' is not exact here, {said}") == 1


def ids(shared, *own):
    rows = [{"chosen_ids": [1] * (shared + a), "rejected_ids": [1] * shared + [2] * b} for a, b in own]
    return Dataset.from_list(rows)


def test_the_line_at_the_start(caplog):
    data = ids(900, *[(100, 150)] * 8)
    with caplog.at_level(logging.INFO, "trl_jax"):
        plan = layout_choice.plan(asked(), CAUSAL, data, COLUMNS, parameters=10**6, batch_size=2, steps=2)
    # Four pairs in two packed rows of 2 x (900 + 100 + 150) tokens, against 2 micro-batches of 4 rows of 1,050.
    assert plan.buckets.lengths == (2304,)
    text = "Layout shared: 4.6k of 8.4k padded tokens a step (45% less), for 8.2k tokens of text; packed rows of 2,304 "
    assert caplog.messages == [text + "tokens."]


def test_the_line_of_short_texts_says_why_nothing_is_saved(caplog):
    with caplog.at_level(logging.INFO, "trl_jax"):
        layout_choice.plan(asked(), CAUSAL, ids(2, (3, 4)), COLUMNS, parameters=1, batch_size=1, steps=1)
    assert caplog.messages == [
        "Layout shared: 128 tokens a step, for 11 tokens of text; packed rows of 64 tokens. Their length is rounded "
        "up, so steps with so little text gain nothing over padding."
    ]


def test_the_line_of_a_padded_run_and_of_a_stream(caplog):
    with caplog.at_level(logging.INFO, "trl_jax"):
        assert (
            layout_choice.plan(asked(), WHOLE, ids(1, (1, 1)), COLUMNS, parameters=1, batch_size=2, steps=1).layout
            == "padded"
        )
        assert (
            layout_choice.plan(asked(), CAUSAL, stream(4), COLUMNS, parameters=1, batch_size=2, steps=1).layout
            == "shared"
        )
    assert caplog.messages == [
        "Layout padded: this model does not support several texts in one row.",
        "Layout shared: how much it saves on a stream of rows is not known beforehand.",
    ]


def test_a_layout_that_is_not_is_refused():
    with pytest.raises(ValueError, match="batch_layout='ragged' is not in this release of trl_jax; supported: auto,"):
        trl_jax.RewardConfig("out", batch_layout="ragged")


def test_a_run_gives_the_same_numbers_in_every_layout(checkpoint, tmp_path, monkeypatch):
    """With margins, centering, ragged accumulation, predict(), and an evaluation set that the batch size does not
    divide. The last layout computes attention per text, as on GPUs."""
    config = {
        "gradient_accumulation_steps": 3, "center_rewards_coefficient": 0.1, "eval_strategy": "epoch", "bf16": False,
        "learning_rate": 1e-3,
    }  # fmt: skip
    found = {}
    # `packed` is covered by parity/test_sft_curve.py.
    layouts = ("packed", "shared", "rows") if THOROUGH else ("shared", "rows")
    for layout in ("padded", *layouts):
        if layout == "rows":
            monkeypatch.setattr(layout_choice, "by_rows", lambda args, **_: True)
        data, test = table(26, margin=True), table(7, seed=1, margin=True)
        said = config | {"batch_layout": layout.replace("rows", "shared")}
        how = {"train": data, "eval_dataset": test, "config": said}
        trainer = make(trl_jax, checkpoint(**FACTS), tmp_path / layout, **how)
        trainer.train()
        found[layout] = [timeless(entry) for entry in trainer.state.log_history], trainer.predict(test).predictions
        [step, *_] = trainer.get_train_dataloader().steps
        assert (step.arrays.packed is not None and step.arrays.packed.texts is not None) == (layout == "rows")
    logs, scores = found["padded"]
    for layout in layouts:
        for mine, other in zip(found[layout][0], logs, strict=True):
            assert list(mine) == list(other)
            assert all(abs(mine[key] - other[key]) <= 2e-5 for key in other), (layout, mine, other)
        np.testing.assert_allclose(found[layout][1], scores, atol=2e-5)


def test_texts_that_are_divided_over_gpus_are_padded_unless_asked_otherwise():
    found, why = layout_choice.exact_layout(asked(device="cuda"), CAUSAL, striped=True)
    assert (
        found == "padded" and "no GPU kernel for packed rows split over devices; batch_layout='shared' uses XLA" in why
    )
    assert layout_choice.exact_layout(asked("shared", device="cuda"), CAUSAL, striped=True)[0] == "shared"


def test_completions_of_a_prompt_are_read_by_text_on_tpus():
    tpu = asked(device="tpu", max_length=None)
    for backend in (CAUSAL, WINDOWED):
        plan = layout_choice.unplanned(tpu, backend, striped=False, branches=True)
        assert plan.layout == "shared" and plan.views is not None
    assert layout_choice.unplanned(tpu, CAUSAL, striped=False).views is None
    assert layout_choice.unplanned(tpu, CAUSAL, striped=True, branches=True).views is None
    assert layout_choice.unplanned(asked(), CAUSAL, striped=False, branches=True).views is None


@only_thorough
@pytest.mark.parametrize("model", [thorough(SMALL), WINDOWS])
def test_completions_give_the_same_numbers_by_text(model, checkpoint, tmp_path, monkeypatch):
    """Keys ordered by text, as on TPUs, with and without a sliding window, with a reference."""
    found, calls = {}, []

    def by_text(*qkv, **options):
        calls.append(len(qkv))
        return attend_by_text(*qkv, **options)

    monkeypatch.setattr("trl_jax.nn.attention.attention.attend_by_text", by_text)
    for how in ("along", "by text"):
        assert not calls
        if how == "by text":
            monkeypatch.setattr(layout_choice, "by_rows", lambda args, **_: True)
            monkeypatch.setattr("trl_jax.nn.attention.attention.platform", lambda: "tpu")
        config = {
            "max_steps": 3, "learning_rate": 3e-3, "num_generations": 4, "max_completion_length": 12, "beta": 0.1,
            "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "pad_to_multiple_of": None,
        }  # fmt: skip
        args = trl_jax.GRPOConfig(str(tmp_path / how), **BASE | config)
        rows = Dataset.from_list(prompt_rows(16, "text"))
        trainer = trl_jax.GRPOTrainer(str(checkpoint(**model)), length_reward, args, rows)
        trainer.train()
        found[how] = [timeless(entry) for entry in trainer.state.log_history]
    assert calls
    for mine, other in zip(*found.values(), strict=True):
        assert list(mine) == list(other)
        assert all(abs(mine[key] - other[key]) <= 2e-5 for key in other), (mine, other)


def test_rows_of_texts_are_for_gpus_and_have_one_length():
    data = ids(900, *[(100, 150)] * 8)
    how = {"parameters": 10**6, "batch_size": 2, "steps": 2}
    plan = layout_choice.plan(asked(device="cuda"), CAUSAL, data, COLUMNS, **how)
    assert plan.layout == "shared" and plan.views.shapes == ((2304, 1088),)
    assert layout_choice.line(plan).endswith("packed rows of 2,304 tokens, rows of 1,088.")
    assert layout_choice.plan(asked(), CAUSAL, data, COLUMNS, **how).views is None
    assert layout_choice.plan(asked("shared", device="cuda"), CAUSAL, data, COLUMNS, striped=True, **how).views is None
    assert layout_choice.plan(asked(device="cuda"), CAUSAL, stream(4), COLUMNS, **how).views.shapes == ()
    assert layout_choice.unplanned(asked(), CAUSAL, striped=False).views is None


def gradients(trainer, batch):
    import jax

    def loss(params):
        return trainer.loss(trainer.parts.setup.frozen | params, batch, None)[0]

    return jax.jit(jax.grad(loss))(trainer.model.params)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_gradients_beside_a_reference_are_the_same_in_every_layout(kind, checkpoint, tmp_path):
    import jax

    found, model = {}, str(checkpoint(**SMALL))
    for layout in ("padded", "shared"):
        config = {"bf16": False, "batch_layout": layout, "max_steps": 1, "per_device_train_batch_size": 4}
        args = getattr(trl_jax, f"{kind}Config")(str(tmp_path), **(BASE | config))
        rows = Dataset.from_list(rows_of(kind, 4))
        reference = str(checkpoint(**SMALL, seed=5))  # another model; otherwise DPO's loss would not depend on it
        trainer = getattr(trl_jax, f"{kind}Trainer")(model, reference, args, train_dataset=rows)
        [step, *_] = trainer.get_train_dataloader().steps
        assert (step.arrays.packed is None) == (layout == "padded")
        one = jax.tree.map(lambda leaf: leaf[0], step.arrays)
        found[layout] = gradients(trainer, one)
    for path, wanted in found["padded"].items():
        assert float(np.abs(wanted).max()) > 0
        np.testing.assert_allclose(found["shared"][path], wanted, atol=2e-6, err_msg=path)
