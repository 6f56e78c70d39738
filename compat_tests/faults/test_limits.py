"""Limits of the machine and of what a repository may do, and faults that are tested with meshes."""

from __future__ import annotations

import jax
import pytest

from compat_tests.faults.broken import trainer as make
from compat_tests.faults.test_faults import refuses
from compat_tests.trainer.trainers import Uncompiled
from trl_jax.training import step

CHAT = [
    {"chosen": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
     "rejected": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]},
]  # fmt: skip


@pytest.mark.parametrize(("checkpointing", "lever"), [(False, "or set gradient_checkpointing=True"), (True, "max_len")])
def test_row40_a_step_that_does_not_fit(checkpointing, lever, checkpoint, tmp_path, monkeypatch):
    def make_step(*given):
        def step(*args):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nat")

        return Uncompiled(step)

    monkeypatch.setattr(step, "make_step", make_step)
    how = {"gradient_checkpointing": checkpointing, "remat_policy": "nothing_saveable"}
    built = make(checkpoint("llama"), tmp_path, max_length=77, **how)
    text = f"Step 1 does not fit into memory. Weights take {4 * built.model.num_parameters() / 1e9:.2f} GB, "
    levers = f"Lower per_device_train_batch_size={built.args.per_device_train_batch_size} (", " or max_length=77"
    with refuses(text, *levers, lever, "XLA says: RESOURCE_EXHAUSTED: Out of memory", error=MemoryError):
        built.train()


def test_row40_other_errors_of_the_device_pass(checkpoint, tmp_path, monkeypatch):
    def make_step(*given):
        def step(*args):
            raise jax.errors.JaxRuntimeError("INTERNAL: broken")

        return Uncompiled(step)

    monkeypatch.setattr(step, "make_step", make_step)
    with refuses("INTERNAL: broken", error=jax.errors.JaxRuntimeError):
        make(checkpoint("llama"), tmp_path, remat_policy="nothing_saveable").train()


def test_row49_one_of_several_processes(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with refuses(
        "WORLD_SIZE=4 is set in the environment, so several processes were started", "once per host, with python."
    ):
        make(checkpoint("llama"), tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    make(checkpoint("llama"), tmp_path)


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% for i in range(10**9) %}{{ i }}{% endfor %}"],
    ids=["reaches out", "never ends"],
)
def test_row51_a_hostile_chat_template(template, checkpoint, tmp_path):
    """transformers renders in Jinja's sandbox; the error names the row."""
    path = tmp_path / "template.jinja"
    path.write_text(template)
    with pytest.raises(Exception, match="unsafe|Range too big") as caught:
        make(checkpoint("llama"), tmp_path, rows=CHAT, chat_template_path=str(path))
    make(checkpoint("llama", tokenizer={"chat_template": True}), tmp_path, rows=CHAT)  # the error is not about rows
    assert "Row 0 of train_dataset: raised by the tokenizer's chat template." in caught.value.__notes__


# Rows 19 (another number of devices), 46 (fewer pairs than devices), 47 (a dead process) and 48 (hosts that differ) are
# tested in compat_tests/mesh.
