"""Tiny tokenizers, checkpoints and preference rows, built on the fly: nothing is downloaded, and results are
deterministic.

Importing this module needs neither torch nor transformers: `tiny_model` imports both, `tiny_tokenizer` transformers.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

from compat_tests.models.families import ABSENT, SHAPES

THINGS = (
    "bread soup garden engine river letter window market forest winter coffee music planet bridge story clock"
).split()
VERBS = "bake repair paint carry measure explain clean plant finish choose compare describe".split()
GOOD = (
    "gladly carefully first then warm the gently until it is ready and check every part twice because a "
    "steady hand helps you learn what works so take notes share them and enjoy the result with a friend"
).split()
BAD = (
    "whatever nobody cares just guess or quit this is boring stop asking me who knows maybe never it breaks "
    "anyway throw all of it away and blame someone else"
).split()
ASKS = (
    "How do I {} the {}?",
    "Tell me how to {} a {}.",
    "Why should I {} my {} today?",
    "Can you {} one {}?",
)

CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HEADS = {
    "classifier": "AutoModelForSequenceClassification",
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "pretraining": "AutoModelForPreTraining",
    "base": "AutoModel",
}


def tiny_tokenizer(folder=None, *, pad="<pad>", eos="</s>", bos=None, chat_template=False, vocab_size=512):
    """A byte-level BPE fast tokenizer trained on our word lists; also saved to `folder` if given.

    pad=None: no pad token; pad equal to eos: one token for both; bos: prepended to every text; chat_template: the
    template, or True for CHAT_TEMPLATE.
    """
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    named = {"pad_token": pad, "eos_token": eos, "bos_token": bos}
    named = {key: token for key, token in named.items() if token is not None}
    backend = Tokenizer.from_str(_trained_bpe(vocab_size, tuple(dict.fromkeys(named.values()))))
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE if chat_template is True else chat_template
    if folder is not None:
        tokenizer.save_pretrained(folder)
    return tokenizer


def tiny_model(
    folder,
    model_type: str = "llama",
    *,
    head: str = "classifier",
    dtype: str = "float32",
    shards: bool = False,
    tie: bool = False,
    tokenizer: dict | None = None,
    seed: int = 0,
    **overrides,
) -> Path:
    """Write a checkpoint with its tokenizer and return the folder.

    Every parameter is random, including norms and biases, and large enough to affect the outputs. As in real
    checkpoints, the vocabulary has a few rows that no token uses.

    head: "classifier", "causal", "masked", "pretraining" or "base"; shards: split over several files; tie: tie the head
    of a causal model to the embedding; tokenizer: arguments of `tiny_tokenizer`; overrides: fields of the config, whose
    pad_token_id is the tokenizer's unless overridden.
    """
    import torch
    import transformers

    words = tiny_tokenizer(folder, **(tokenizer or {}))
    facts = SHAPE | SHAPES.get(model_type, {})
    facts |= {"vocab_size": len(words) + 8, "tie_word_embeddings": tie, "initializer_range": 0.1}
    facts |= {
        "pad_token_id": words.pad_token_id,
        "eos_token_id": words.eos_token_id,
        "bos_token_id": words.bos_token_id,
    }
    if head == "classifier":
        facts["num_labels"] = 1
    facts = {key: value for key, value in (facts | overrides).items() if key not in ABSENT.get(model_type, ())}
    config = transformers.AutoConfig.for_model(model_type, **facts)
    model = getattr(transformers, HEADS[head]).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    _randomise(model, generator)
    _randomise_buffers(model, generator)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(folder, max_shard_size="100KB" if shards else "5GB")
    return Path(folder)


def preference_rows(n: int, kind: str = "text", margin: bool = False, seed: int = 0) -> list[dict]:
    """`n` pairs of 4 to about 50 tokens (the chat template adds 15); either side may be the longer one.

    kind: "text" (implicit prompt), "prompt" (explicit prompt), or the same as messages: "chat", "chat_prompt". In three
    of four pairs the words tell chosen from rejected; the others mix them, so that accuracy stays below 1.
    """
    dice = random.Random(f"{seed} {kind} {margin}")
    rows = [_row(dice, kind) for _ in range(n)]
    if margin:
        for row in rows:
            row["margin"] = round(dice.uniform(-0.5, 2.0), 3)
    return rows


def text_rows(n: int, kind: str = "text", seed: int = 0) -> list[dict]:
    """`n` rows for fine-tuning, of 4 to about 50 tokens: the prompts and chosen answers of `preference_rows`.

    kind: "text"; "prompt" (prompt and completion); or the same as messages: "chat", "chat_prompt".
    """
    rows = preference_rows(n, kind, seed=seed)
    names = {"text": "text", "chat": "messages"}
    if kind in names:
        return [{names[kind]: row["chosen"]} for row in rows]
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]


def _row(dice: random.Random, kind: str) -> dict:
    ask = dice.choice(ASKS).format(dice.choice(VERBS), dice.choice(THINGS))
    words = (GOOD, BAD) if dice.random() < 0.75 else (GOOD + BAD, GOOD + BAD)
    chosen, rejected = (" ".join(dice.choices(list_, k=_length(dice))) for list_ in words)
    if kind == "text":
        ask = ask if dice.random() < 0.8 else ""
        return {"chosen": f"{ask} {chosen}".strip(), "rejected": f"{ask} {rejected}".strip()}
    if kind == "prompt":
        return {"prompt": f"{ask} ", "chosen": chosen, "rejected": rejected}
    question = [{"role": "user", "content": ask}]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    if kind == "chat":
        return {"chosen": question + chosen, "rejected": question + rejected}
    if kind == "chat_prompt":
        return {"prompt": question, "chosen": chosen, "rejected": rejected}
    raise ValueError(f"kind={kind!r} is not one of text, prompt, chat, chat_prompt")


def _length(dice: random.Random) -> int:
    """Number of words of an answer: mostly short, some long."""
    return dice.randint(3, 12) if dice.random() < 0.6 else dice.randint(13, 32)


@cache
def _trained_bpe(vocab_size: int, special: tuple[str, ...]) -> str:
    """The tokenizer's JSON. It is trained on our word lists, so that most of their words become one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    common = [f" {word}" for word in GOOD + BAD for _ in range(3)]
    asks = [ask.format(verb, thing) for ask in ASKS for verb in VERBS for thing in THINGS[:4]]
    backend.train_from_iterator(common + asks + [f" {word}" for word in THINGS], trainer)
    return backend.to_str()


def _randomise(model, generator) -> None:
    """Norm weights around 1, biases around 0, matrices that keep the size of what passes through them."""
    import torch

    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.lower() or ".ln_" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(0.7 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def _randomise_buffers(model, generator) -> None:
    """Separate from `_randomise`, whose source code is part of the digest of recordings (parity/golden.py). Factors are
    drawn around 1, other buffers around 0."""
    import torch

    with torch.no_grad():
        for name, buffer in buffers_of(model):
            around = 1.0 if name.endswith("layer_scalar") else 0.0
            buffer.copy_(around + 0.3 * torch.randn(buffer.shape, generator=generator))


def buffers_of(model) -> list[tuple[str, Any]]:
    """Buffers that a torch model computes with but does not train: of routers, activations and layers."""
    ends = ("correction_bias", "expert_bias", "act_fn.beta", "act_fn.eps", "layer_scalar")
    return sorted(((name, b) for name, b in model.named_buffers() if name.endswith(ends)), key=lambda one: one[0])
