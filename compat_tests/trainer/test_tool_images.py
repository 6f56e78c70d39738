"""Images in tool responses and in the return value of an environment's `reset()`: tokens, rewards and losses match
TRL's."""

from __future__ import annotations

import types

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import usual
from compat_tests.hub.vision.processors import built_processor, config_for
from compat_tests.trainer.vision_models import pictures, tiny_tiled, user
from trl_jax.data.chat_templates import response_template
from trl_jax.data.prompts import encoded_prompts
from trl_jax.hub.vision import vision_families
from trl_jax.hub.vision.processor import VisionProcessor
from trl_jax.training.rollout import PolicyWriter

END = "<|im_end|></s>"
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for part in m.content or [] %}"
    "{%- if part.type == 'image' %}{{- '<image>' }}{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    '{%- for call in m.tool_calls or [] %}{{- \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \''
    " + call.function.arguments | tojson + '}</tool_call>' }}{%- endfor %}{{- '<|im_end|></s>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
DRAW = '<tool_call>{"name": "draw", "arguments": {"number": %d}}</tool_call>' + END
FIRST = [DRAW % 0, "No." + END, DRAW % 1, DRAW % 0]
PICTURES = pictures(6)


def draw(number: int) -> list:
    """Draw a picture.

    Args:
        number: which one.
    """
    return [{"type": "image", "image": PICTURES[number]}, {"type": "text", "text": f"Picture {number}."}]


class Gallery:
    """Shows a picture at the start, and others when asked."""

    def reset(self, number, **row):
        return [{"type": "image", "image": PICTURES[number]}, {"type": "text", "text": "Another?"}]

    def draw(self, number: int) -> list:
        """Draw a picture.

        Args:
            number: which one.
        """
        return draw(number)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("qwen")
        yield str(folder), tiny_tiled(folder, "qwen2_5_vl", patch, template=TEMPLATE)


def run(package, qwen, out, monkeypatch, alone=False, **options):
    """What reward functions got, and the logs; the first turn of each completion is scripted, later turns are
    sampled."""
    pytest.importorskip("torch").set_num_threads(1)
    folder, processor = qwen
    tokenizer, seen, turns = processor.tokenizer, [], []
    tokenizer.response_template = response_template(tokenizer)
    tokenizer.padding_side = "left"
    first = [tokenizer(text)["input_ids"] for text in FIRST]

    def reward(completions, completion_ids, **columns):
        seen.append(([list(map(int, own)) for own in completion_ids], completions))
        return [float(len(own) % 7) for own in completion_ids]

    config = {
        "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 160,
        "learning_rate": 1e-3, "beta": 0.1, "report_to": "none", "use_cpu": True, "bf16": False, "logging_steps": 1,
        "save_strategy": "no", "max_tool_calling_iterations": 1,
    }  # fmt: skip
    if package is not trl_jax:
        config["gradient_checkpointing"] = False
    rows = Dataset.from_list([{"prompt": user(f"What is {i}?"), "number": i} for i in range(4)])
    made = package.GRPOTrainer(
        folder,
        reward,
        package.GRPOConfig(str(out), **config),
        rows,
        processing_class=tokenizer if alone else processor,
        **options,
    )
    if package is trl_jax:
        complete = PolicyWriter.complete

        def given(writer, ids, group, images=None):
            turns.append(len(ids))
            written = [np.asarray(own, np.int32) for own in first]
            return written if len(turns) % 2 else complete(writer, ids, group, images)

        monkeypatch.setattr(PolicyWriter, "complete", given)
    else:
        generate = made._generate_single_turn

        def given(ids, *rest, **how):
            turns.append(len(ids))
            return ([list(own) for own in first], None) if len(turns) % 2 else generate(ids, *rest, **how)

        made._generate_single_turn = given
    made.train()
    assert turns == [4, 3] * 2
    return seen, [entry for entry in made.state.log_history if "loss" in entry]


@usual("tools")
@pytest.mark.parametrize("options", [{"tools": [draw]}, {"environment_factory": Gallery}], ids=["tools", "reset"])
def test_a_run_is_trls(options, qwen, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    theirs, their_logs = run(trl, qwen, tmp_path / "trl", monkeypatch, **options)
    ours, our_logs = run(trl_jax, qwen, tmp_path / "ours", monkeypatch, **options)
    image = qwen[1].tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for (own_ids, own_messages), (their_ids, their_messages) in zip(ours, theirs, strict=True):
        assert own_ids == their_ids
        assert [ids.count(image) > 0 for ids in own_ids] == [True, False, True, True]
        assert own_messages[0][1] == their_messages[0][1]  # the tool's answer, with its picture
    for own, their in zip(our_logs, their_logs, strict=True):
        for name in their.keys() - {"epoch", "step_time"}:
            assert own[name] == pytest.approx(their[name], rel=2e-4, abs=1e-5 if name == "loss" else 2e-4), name


def test_a_tokenizer_alone_sees_no_images(qwen, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="The answer of the tool 'draw': .* rows with images are not supported"):
        run(trl_jax, qwen, tmp_path, monkeypatch, alone=True, tools=[draw])


def test_a_prompt_of_text_alone_is_cut(monkeypatch):
    processor = built_processor("qwen2_5_vl", monkeypatch, chat_template=TEMPLATE)
    tokenizer = processor.tokenizer
    tokenizer.chat_template = TEMPLATE
    native = types.SimpleNamespace(vision=vision_families()["qwen2_5_vl"], path="config.json")
    encoder = VisionProcessor(native, config_for("qwen2_5_vl", processor), tokenizer, processor.image_processor)
    [whole], _ = encoded_prompts([user("What is it?")], encoder)
    [cut], [images] = encoded_prompts([user("What is it?")], encoder, max_prompt_length=5)
    assert cut == whole[-5:] and len(images.features) == len(images.positions) == 5 and not images.images
