"""Teach a tiny vision-language model to read digits and name colors in pictures that this script draws. Nothing is
downloaded.

    python examples/vision.py [--output_dir out] [--epochs 30] [--seed 42]

The model has the architecture of Qwen2.5-VL and starts from random weights. The digits are white, with random positions
and sizes, on colored backgrounds. It is tested on new pictures. Needs Pillow: pip install ".[vision]".
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import tiny_model
from capitals import read_options
from datasets import Dataset
from PIL import Image, ImageDraw
from plot import Curve, write_svg
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trl_jax import AutoModelForImageTextToText, SFTConfig, SFTTrainer

SIDE, PATCH = 32, 4  # pixels; a picture has 8 x 8 patches and 4 x 4 image tokens
COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (225, 200, 30)}
QUESTIONS = {"color": "Which color is the ground?", "digit": "Which digit is it?"}
SEGMENTS = {  # the lit segments of each digit: top, upper left, upper right, middle, lower left, lower right, bottom
    "0": "1110111", "1": "0010010", "2": "1011101", "3": "1011011", "4": "0111010",
    "5": "1101011", "6": "1101111", "7": "1010010", "8": "1111111", "9": "1111011",
}  # fmt: skip
IMAGE_TOKENS = START, IMAGE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}{START}{IMAGE}{END}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{% endfor %}{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def main() -> None:
    options = read_options("Teach a tiny vision-language model to read digits.", epochs=30)
    out, generator = Path(options.output_dir), np.random.default_rng(options.seed)
    train, test = rows(generator, 600), rows(generator, 100)
    trainer = make_trainer(str(build(out / "start", options.seed)), out, train, test, options)
    began = time.perf_counter()
    trainer.train()
    print(f"Trained on {len(train)} questions in {time.perf_counter() - began:.0f} seconds.\n")
    trainer.save_model(str(out / "final"))

    right = score(out / "final", test)
    for name, answers in right.items():
        print(f"On {len(answers)} new pictures, {np.mean(answers):.0%} of answers to {QUESTIONS[name]!r} are right.")
    history = [entry for entry in trainer.state.log_history if "eval_mean_token_accuracy" in entry]
    points = [(entry["step"], entry["eval_mean_token_accuracy"]) for entry in history]
    curve = write_svg(out / "curve.svg", [Curve("token accuracy of answers about new pictures", points, 0.0, 1.0)])
    print(f"The model is in {out / 'final'}, its curve in {curve}, and a picture in {out / 'picture.png'}.")
    test[0]["image"].resize((8 * SIDE, 8 * SIDE), Image.Resampling.NEAREST).save(out / "picture.png")


def rows(generator: np.random.Generator, count: int) -> Dataset:
    """Questions about pictures, half of them about the background color."""
    examples = []
    for number in range(count):
        digit, color = str(generator.integers(10)), str(generator.choice(list(COLORS)))
        about = ("color", "digit")[number % 2]
        examples.append({
            "prompt": [{"role": "user", "content": QUESTIONS[about]}],
            "completion": [{"role": "assistant", "content": {"color": color, "digit": digit}[about]}],
            "image": draw(generator, digit, COLORS[color]), "about": about,
        })  # fmt: skip
    return Dataset.from_list(examples)


def draw(generator: np.random.Generator, digit: str, color: tuple[int, ...]) -> Image.Image:
    """A white seven-segment digit on a background of this color."""
    picture = Image.new("RGB", (SIDE, SIDE), tuple(int(part + generator.integers(-15, 16)) for part in color))
    width, height = int(generator.integers(14, 17)), int(generator.integers(22, 26))
    left, top = int(generator.integers(6, 10)), int(generator.integers(2, 5))
    right, middle, bottom = left + width, top + height // 2, top + height
    lines = [
        (left, top, right, top), (left, top, left, middle), (right, top, right, middle), (left, middle, right, middle),
        (left, middle, left, bottom), (right, middle, right, bottom), (left, bottom, right, bottom),
    ]  # fmt: skip
    for line, lit in zip(lines, SEGMENTS[digit], strict=True):
        if lit == "1":
            ImageDraw.Draw(picture).line(line, (255, 255, 255), width=4)
    return picture


def build(folder: Path, seed: int) -> Path:
    """Write a Qwen2.5-VL with random weights, a tokenizer and an image processor."""
    words = [*QUESTIONS.values(), *COLORS, *SEGMENTS]
    tokenizer = tiny_model.train_tokenizer(words, 320)
    tokenizer.add_special_tokens({"additional_special_tokens": [tiny_model.USER, tiny_model.ASSISTANT, *IMAGE_TOKENS]})
    tokenizer.chat_template = CHAT_TEMPLATE
    start, image, _ = tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS))
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 4, "patch_size": PATCH, "window_size": 16,
        "out_hidden_size": 64, "fullatt_block_indexes": [1], "temporal_patch_size": 1,
    }  # fmt: skip
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        vision_config=vision, text_config=text, image_token_id=image, vision_start_token_id=start,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    AutoModelForImageTextToText.from_config(config, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, temporal_patch_size=1, size=size)
    processor.save_pretrained(folder)
    return folder


def make_trainer(model: str, out: Path, train: Dataset, test: Dataset, options) -> SFTTrainer:
    args = SFTConfig(
        output_dir=str(out),
        num_train_epochs=options.epochs,
        seed=options.seed,
        per_device_train_batch_size=20,
        learning_rate=3e-3,
        warmup_steps=20,
        max_length=None,
        logging_steps=20,
        eval_strategy="epoch",
        eval_on_start=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,  # remove these two lines to use a GPU or a TPU
        bf16=False,
    )
    return SFTTrainer(model=model, args=args, train_dataset=train, eval_dataset=test)


def score(folder: Path, test: Dataset) -> dict[str, list[bool]]:
    """Whether each answer is right, grouped by what the question is about."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    images = processor(images=list(test["image"]), return_tensors="np")
    holder = START + IMAGE * int(images["image_grid_thw"][0].prod() // 4) + END
    texts = [f"{tiny_model.USER}{holder}{prompt[0]['content']}{tiny_model.EOS}<assistant>" for prompt in test["prompt"]]
    ids = tokenizer(texts, padding=True, return_tensors="np", add_special_tokens=False)
    outputs = model.generate(**ids, **images, max_new_tokens=6, do_sample=False)
    answers = tokenizer.batch_decode(outputs[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    expected = [completion[0]["content"] for completion in test["completion"]]
    right: dict[str, list[bool]] = {name: [] for name in QUESTIONS}
    for about, answer, correct in zip(test["about"], answers, expected, strict=True):
        right[about].append(answer.strip() == correct)
    return right


if __name__ == "__main__":
    main()
