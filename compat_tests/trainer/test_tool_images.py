"""Images in tool responses and in the return value of an environment's `reset()`: tokens, rewards and losses match
TRL's."""

from __future__ import annotations

import base64
import io
import types

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

import trl_jax
from compat_tests.effort import THOROUGH, usual
from compat_tests.hub.vision.processors import built_processor, config_for
from compat_tests.rollout.stub_server import StubServer
from compat_tests.trainer.vision_models import pictures, tiny_tiled, user
from trl_jax.data.chat_templates import response_template
from trl_jax.data.prompts import encoded_prompts
from trl_jax.hub.vision import vision_families
from trl_jax.hub.vision.processor import VisionProcessor
from trl_jax.training.policy_generator import PolicyGenerator

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
FIRST = [DRAW % 0, "No." + END, DRAW % 1, DRAW % 2]
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


def run(package, qwen, out, monkeypatch, alone=False, config=None, turns=None, steps=2, **options):
    """What reward functions got, and the logs; the first turn of each completion is scripted, later turns are sampled.

    Args:
        turns: a dict that gets the later turns by their texts; with a server in `config` it must already have them.
    """
    pytest.importorskip("torch").set_num_threads(1)
    folder, processor = qwen
    tokenizer, seen, asked = processor.tokenizer, [], []
    tokenizer.response_template = response_template(tokenizer)
    tokenizer.padding_side = "left"
    first = [tokenizer(text)["input_ids"] for text in FIRST]

    def reward(completions, completion_ids, **columns):
        seen.append(([list(map(int, own)) for own in completion_ids], completions))
        return [float(len(own) % 7) for own in completion_ids]

    served = config
    config = {
        "max_steps": steps, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 160,
        "learning_rate": 1e-3, "beta": 0.1, "report_to": "none", "use_cpu": True, "bf16": False, "logging_steps": 1,
        "save_strategy": "no", "max_tool_calling_iterations": 1,
    } | (config or {})  # fmt: skip
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
    if package is trl_jax and served is None:
        complete = PolicyGenerator.complete

        def given(writer, ids, group, *more):
            asked.append(len(ids))
            if len(asked) % 2:
                return [np.asarray(own, np.int32) for own in first]
            found = complete(writer, ids, group, *more)
            if turns is not None:
                turns.update({tuple(text): tokens for text, tokens in zip(ids, found, strict=True)})
            return found

        monkeypatch.setattr(PolicyGenerator, "complete", given)
    elif package is not trl_jax:
        generate = made._generate_single_turn

        def given(ids, *rest, **how):
            asked.append(len(ids))
            return ([list(own) for own in first], None) if len(asked) % 2 else generate(ids, *rest, **how)

        made._generate_single_turn = given
    made.train()
    assert served is not None or asked == [4, 3] * config["max_steps"]
    return seen, [entry for entry in made.state.log_history if "loss" in entry]


@usual("tools")
@pytest.mark.parametrize("options", [{"tools": [draw]}, {"environment_factory": Gallery}], ids=["tools", "reset"])
def test_a_run_is_trls(options, qwen, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    options = options | {"steps": 2 if THOROUGH else 1}  # as below; test_grpo_tools.py takes two steps
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


@pytest.fixture
def serve(qwen, monkeypatch):
    """Starts a stub server that replays first turns, and later turns by their texts."""
    folder, processor = qwen
    stub = StubServer(folder, max_model_len=4096)
    native = types.SimpleNamespace(vision=vision_families()["qwen2_5_vl"], path="config.json")
    config = config_for("qwen2_5_vl", processor)
    encoder = VisionProcessor(native, config, processor.tokenizer, processor.image_processor)

    def started(turns):
        first = [processor.tokenizer(text)["input_ids"] for text in FIRST]
        stub.replay = lambda ids, n: first if n == 4 else [turns[tuple(ids)]]
        stub.image_tokens = lambda url: len(encoder.patches([picture_of(url)])[0].tokens)
        return stub

    yield started
    stub.stop()


def picture_of(url):
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def served_by(stub, out):
    return {
        "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": stub.url, "vllm_weights_dir": str(out),
        "vllm_importance_sampling_correction": False,  # the stub has no log-probabilities of texts with images
    }  # fmt: skip


@usual("reset")
@pytest.mark.parametrize("options", [{"tools": [draw]}, {"environment_factory": Gallery}], ids=["tools", "reset"])
def test_turns_by_a_server_are_those_of_this_process(options, qwen, serve, tmp_path, monkeypatch):
    """Each turn sends all pictures of the conversation so far. One step: each compiles its own shapes."""
    turns, options = {}, options | {"steps": 1}
    seen, logs = run(trl_jax, qwen, tmp_path / "own", monkeypatch, turns=turns, **options)
    stub = serve(turns)
    config = served_by(stub, tmp_path / "weights")
    again, served = run(trl_jax, qwen, tmp_path / "served", monkeypatch, config=config, **options)
    assert again == seen
    for own, wanted in zip(served, logs, strict=True):
        for name in ("loss", "grad_norm", "reward", "kl", "tools/call_frequency", "completions/mean_length"):
            assert own[name] == pytest.approx(wanted[name], abs=1e-5), name
    bodies = [body for path, body in stub.seen if path == "/v1/chat/completions/render"]
    sent = [[picture_of(part["image_url"]["url"]) for part in body["messages"][0]["content"]] for body in bodies]
    start = [] if "tools" in options else [None]  # which picture `reset` returns depends on the row
    drawn = [[np.asarray(own) for own in pictures[len(start) :]] for pictures in sent if len(pictures) > len(start)]
    assert len(drawn) == 3 and all(len(own) == 1 for own in drawn)
    for [own] in drawn:
        assert any(np.array_equal(own, np.asarray(picture)) for picture in PICTURES[:3])
    assert len(sent) == len(drawn) + len(start)


@pytest.mark.parametrize("as_tokenizer", [False, True], ids=["processor", "tokenizer"])
def test_an_adapter_is_merged_because_tools_may_return_images(as_tokenizer, qwen, serve, tmp_path, caplog):
    """A tokenizer as processing_class says that they do not."""
    caplog.set_level("INFO", "trl_jax")
    stub, (folder, processor) = serve({}), qwen
    stub._max_lora_rank = 8
    processor.tokenizer.response_template = response_template(processor.tokenizer)
    config = {"num_generations": 4, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True,
              "bf16": False} | served_by(stub, tmp_path / "weights")  # fmt: skip
    rows = Dataset.from_list([{"prompt": user("What?"), "number": 0}] * 4)
    made = trl_jax.GRPOTrainer(
        folder, lambda completions, **columns: [0.0] * len(completions), trl_jax.GRPOConfig(str(tmp_path), **config),
        rows, processing_class=processor.tokenizer if as_tokenizer else processor, tools=[draw],
        peft_config=trl_jax.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    assert made.parts.rollout_steps.rollout.generator._server._servers.engine.takes_adapters == as_tokenizer
    assert ("get the adapter merged into the model, because tools may return images" in caplog.text) == (
        not as_tokenizer
    )


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
