"""`trl-jax generate` and `trl-jax chat`: completions of the library and of transformers, resuming, conversations,
errors."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest
from PIL import Image

from compat_tests.effort import only_thorough
from compat_tests.models import causal
from compat_tests.tiny import tiny_tokenizer
from compat_tests.trainer import vision_models
from compat_tests.trainer.vision_models import pictures, tiny_llava, tiny_qwen
from trl_jax.cli.main import main
from trl_jax.hub.auto import AutoModelForCausalLM, AutoModelForImageTextToText
from trl_jax.hub.generation_inputs import encoded_prompt
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.scripts import generate
from trl_jax.scripts.loaded_model import FieldsParser, LoadedModel

TALK = [{"role": "user", "content": "How do I bake the bread?"}]
ROWS = [{"prompt": "Tell me", "id": 1}, {"messages": TALK}, {"prompt": TALK}, {"text": "Why should"}, {"prompt": "a"}]
SAMPLED = ["--do_sample", "--temperature", "2", "--max_new_tokens=9", "--top-k", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = causal.build(tmp_path_factory.mktemp("llama"), "llama", tie=False, num_hidden_layers=1)
    tiny_tokenizer(folder, chat_template=True)
    return str(folder)


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "in.jsonl", ROWS)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_get_the_completions_of_the_library(folder, source, tmp_path):
    out = tmp_path / "out.jsonl"
    assert main(["generate", folder, source, "-o", str(out), "--max_new_tokens", "7", "--batch_size", "2"]) == 0
    prompts = ["Tell me", TALK, TALK, "Why should", "a"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), tiny_tokenizer(chat_template=True)
    expected = model.generate_text(prompts, tokenizer, max_new_tokens=7)
    found = read(out)
    assert [row.pop("completion") for row in found] == expected and len(set(expected)) > 3
    assert found == ROWS


@only_thorough
def test_several_are_drawn_by_seed_and_row(folder, source, tmp_path):
    def run(name, *flags):
        assert main(["generate", folder, source, "-o", str(tmp_path / name), *SAMPLED, *flags]) == 0
        return [row["completion"] for row in read(tmp_path / name)]

    first = run("1", "--num_return_sequences", "2")
    assert first == run("2", "--num_return_sequences", "2", "--batch_size", "2")
    assert first != run("3", "--num_return_sequences", "2", "--seed", "7")
    assert [len(texts) for texts in first] == [2] * 5 and first[1] != first[2]


def test_a_run_that_was_cut_off_goes_on(folder, source, tmp_path, monkeypatch, capsys):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert main(["generate", folder, source, "-o", str(whole), *SAMPLED]) == 0
    inner = generate.Completer.__call__

    def stopped(self, first, take):
        taken = []

        def take_three(*row):
            if len(taken) == 3:
                raise KeyboardInterrupt
            taken.append(take(*row))

        inner(self, first, take_three)

    with monkeypatch.context() as patched:
        patched.setattr(generate.Completer, "__call__", stopped)
        assert main(["generate", folder, source, "-o", str(out), *SAMPLED]) == 130
    assert "3 rows are completed and kept in" in capsys.readouterr().err and not out.exists()
    begun = []
    monkeypatch.setattr(generate.Completer, "__call__", lambda *given: begun.append(given[1]) or inner(*given))
    assert main(["generate", folder, source, "-o", str(out), *SAMPLED, "--seed", "1"]) == 2
    assert "belongs to a run with a different --seed" in capsys.readouterr().err
    assert main(["generate", folder, source, "-o", str(out), *SAMPLED]) == 0
    assert begun == [3] and out.read_bytes() == whole.read_bytes()


def test_lines_of_stdin_go_to_stdout(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me\n\nWhy\n"))
    assert main(["generate", folder, "--max_new_tokens", "3"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["prompt"] for line in printed.out.splitlines()] == ["Tell me", "Why"]
    assert "2/2" in printed.err and "tokens/s" in printed.err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--temprature", "2"], "is neither a flag nor a field of GenerationConfig. Did you mean --temperature?"),
        (["--temperature"], "--temperature has no value."),
        (["--do_sample", "--temperature", "-1"], "`temperature` (=-1.0) has to be a strictly positive float"),
        (["--num_beams", "3"], "num_beams=3 is not in this release of trl_jax: there is no beam search"),
        (["--batch_size", "0"], "--batch_size must be at least 1, got 0."),
    ],
)  # fmt: skip
def test_wrong_flags_are_told_of_in_a_line(folder, source, flags, text, capsys):
    assert main(["generate", folder, source, *flags]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"txt": "a"}, "in.jsonl, line 2 must have the column prompt or messages or text, got txt."),
        ({"prompt": "a", "completion": "b"}, "line 2 already has a column 'completion', where the result would go"),
        ({"prompt": ""}, "line 2 has an empty prompt. Write at least one word, or remove the row."),
        ({"prompt": 3}, "line 2: the prompt must be a string, or messages"),
        ({"messages": []}, "line 2: the prompt must be a string, or messages"),
    ],
)
def test_a_wrong_row_is_named(folder, tmp_path, row, text, capsys):
    assert main(["generate", folder, write(tmp_path / "in.jsonl", [ROWS[0], row])]) == 2
    assert text in capsys.readouterr().err


def test_an_output_without_a_file_and_a_file_that_is_not_there(folder, tmp_path, capsys):
    assert main(["generate", folder, "-o", str(tmp_path / "out")]) == 2
    assert "--output needs a FILE of rows" in capsys.readouterr().err
    assert main(["generate", folder, str(tmp_path / "none")]) == 2
    assert "none: no such file." in capsys.readouterr().err


def test_flags_are_fields():
    parser = FieldsParser()
    parser.add_argument("model")
    parser.add_argument("--seed", type=int)
    argv = "--do_sample m --seed 3 --temperature 1 --eos-token-id [1,2] --stop_strings END --top_p=0.5 --min_p none"
    assert parser.parse_both(argv.split()) == (
        {"model": "m", "seed": 3},
        {
            "do_sample": True,
            "temperature": 1.0,
            "eos_token_id": [1, 2],
            "stop_strings": "END",
            "top_p": 0.5,
            "min_p": None,
        },
    )


def test_a_conversation_about_a_picture(tmp_path, monkeypatch, capsys):
    model, [picture] = tiny_qwen(tmp_path / "qwen"), pictures(1)
    picture.save(tmp_path / "picture.png")
    seen, generate = [], type(AutoModelForImageTextToText.from_pretrained(model)).generate

    def spied(self, inputs, **options):
        seen.append((inputs[0], options["image_grid_thw"].tolist()))
        return generate(self, inputs, **options)

    monkeypatch.setattr(PreTrainedModel, "generate", spied)
    monkeypatch.setattr(sys, "stdin", io.StringIO("bake?\nWhy?\n"))
    flags = ["--image", str(tmp_path / "picture.png"), "--max_new_tokens", "4"]
    assert main(["chat", str(model), *flags]) == 0
    image = AutoModelForImageTextToText.from_pretrained(model).config.image_token_id
    (first, grid), (second, same) = seen
    assert grid == same and first.count(image) == second.count(image) == np.prod(grid) // 4
    assert len(capsys.readouterr().out.splitlines()) >= 2


def greedy(folder, processor, text, images):
    """transformers' eight greedy tokens, as text."""
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    given = processor(images=images, text=text, return_tensors="pt")
    new = model.generate(**given, max_new_tokens=8, do_sample=False)[0, given["input_ids"].shape[1] :]
    return processor.decode(new, skip_special_tokens=True), new.tolist(), given


def test_conversations_without_pictures_are_rendered_as_by_the_processor(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    with monkeypatch.context() as patched:
        patched.setattr(vision_models, "TEMPLATE", vision_models.BY_PARTS)
        folder = str(tiny_llava(tmp_path))
    processor = transformers.AutoProcessor.from_pretrained(folder)
    parts = [TALK[0] | {"content": [{"type": "text", "text": TALK[0]["content"]}]}]
    wanted = processor.apply_chat_template(parts, add_generation_prompt=True, tokenize=True, return_dict=True)
    found = LoadedModel.find(folder, "float32", trust_remote_code=False)
    assert encoded_prompt(TALK[:1], found.prompt_tokenizer()) == wanted["input_ids"][0]
    model, seen = AutoModelForCausalLM.from_pretrained(folder), []
    monkeypatch.setattr(type(model), "generate_batch", lambda self, ids, **_: seen.extend(ids) or {})
    model.generate_text([TALK[:1]], processor.tokenizer)
    assert seen == wanted["input_ids"]


@only_thorough
def test_rows_with_pictures_get_transformers_tokens(tmp_path, monkeypatch, capsys):
    transformers, folder = pytest.importorskip("transformers"), str(tiny_llava(tmp_path / "llava"))
    processor, files = transformers.AutoProcessor.from_pretrained(folder), []
    for number, picture in enumerate(pictures(3)):
        picture.save(tmp_path / f"{number}.png")
        files.append(str(tmp_path / f"{number}.png"))
    talk = [{"role": "user", "content": [{"type": "image", "image": files[2]}, {"type": "text", "text": "bake?"}]}]
    rows = [
        {"prompt": "bake?", "image": files[0]},
        {"prompt": "<image> bread <image> bake the", "images": files[1:]},
        {"messages": talk},
        {"prompt": "gladly"},
        {"prompt": [*TALK, {"role": "assistant", "content": "I"}], "image": files[1]},
    ]
    ask, end = "user: <image>{}</s>\nassistant: ", "user: <image>How do I bake the bread?</s>\nassistant: I"
    texts = [ask.format("bake?"), rows[1]["prompt"], ask.format("bake?"), "gladly", end]
    opened = [[Image.open(files[number]) for number in which] for which in ((0,), (1, 2), (2,), (), (1,))]
    wanted = [greedy(folder, processor, text, own or None) for text, own in zip(texts, opened, strict=True)]
    out, flags = tmp_path / "out.jsonl", ["--max_new_tokens", "8", "--batch_size", "2", "--quiet"]
    assert main(["generate", folder, write(tmp_path / "in.jsonl", rows), "-o", str(out), *flags]) == 0
    assert [row["completion"] for row in read(out)] == [text for text, *_ in wanted]
    assert len({text for text, *_ in wanted}) > 3

    monkeypatch.setattr(sys, "stdin", io.StringIO("bake?\n"))
    assert main(["generate", folder, "--image", files[0], *flags]) == 0
    assert json.loads(capsys.readouterr().out)["completion"] == wanted[0][0]
    wrong = write(tmp_path / "in.jsonl", rows[:1])
    assert main(["generate", folder, wrong, "--image", files[0]]) == 2
    assert "in.jsonl, line 1 has pictures of its own. Leave --image out" in capsys.readouterr().err
    wrong = write(tmp_path / "in.jsonl", [{"prompt": "bake?", "image": str(tmp_path / "none.png")}])
    assert main(["generate", folder, wrong]) == 2
    assert "in.jsonl, line 1: " in capsys.readouterr().err

    model = AutoModelForImageTextToText.from_pretrained(folder)
    ids = [given["input_ids"][0].tolist() for _, _, given in wanted]
    arrays = {
        "pixel_values": np.concatenate(
            [np.asarray(given["pixel_values"]) for *_, given in wanted if "pixel_values" in given]
        )
    }
    for size in (2, 5):
        done = model.generate_batch(ids, max_new_tokens=8, batch_size=size, **arrays)
        assert [one.generated_tokens for one in done.values()] == [new for _, new, _ in wanted]


def test_a_conversation(folder, monkeypatch, capsys, caplog):
    """Each answer sees the conversation so far; it is printed as it is generated."""
    asked = ["Tell me", "Why?", "/undo", "/clear", "Tell me", "/exit", "never"]
    flags = ["--max_new_tokens", "5", "--system", "Be brief", "--seed", "3", "--do_sample"]
    seen, inner = [], type(AutoModelForCausalLM.from_pretrained(folder)).generate

    def spied(self, inputs, **options):
        seen.append(inputs[0])
        return inner(self, inputs, **options)

    monkeypatch.setattr(type(AutoModelForCausalLM.from_pretrained(folder)), "generate", spied)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in asked)))
    assert main(["chat", folder, *flags]) == 0
    tokenizer = tiny_tokenizer(chat_template=True)
    first, second, third = map(tokenizer.decode, seen)
    assert first == third and first.startswith("system: Be brief") and first.endswith("user: Tell me</s>\nassistant:")
    assert second.startswith(first) and second.endswith("user: Why?</s>\nassistant:")
    assert len(capsys.readouterr().out.splitlines()) >= 3 and "seem to have been set" not in caplog.text
