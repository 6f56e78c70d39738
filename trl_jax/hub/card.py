"""The README.md of a repository: a description of the model and how to call it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import yaml

from trl_jax.core.files.whole_file import write_whole
from trl_jax.core.secrets import masked, scrubbed
from trl_jax.hub.heads import HeadName

CARD, CURVE = "README.md", "training_loss.svg"
_MARK = "<!-- trl_jax wrote this card and will write it anew; remove this line to keep your own. -->"
_TAGS = ("generated_from_trainer", "trl_jax")
_LIBRARIES = ("transformers", "datasets", "jax", "flax", "optax")


class _Kind(NamedTuple):
    """The words of a card for models with one of the heads."""

    subject: str
    meaning: str
    loader: str
    pipeline: str


_KINDS: dict[str, _Kind] = {
    "score": _Kind(
        "a reward model", ": one score a text, the higher the better", "ForSequenceClassification",
        "text-classification",
    ),
    "lm": _Kind("a language model", "", "ForCausalLM", "text-generation"),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """The run that a model was trained in.

    Attributes:
        arguments: those that were set, by name.
        metrics: the last value of each.
        losses: (step, loss) of every log.
    """

    arguments: dict[str, object]
    metrics: dict[str, float]
    losses: list[tuple[int, float]]


_ADAPTERS = {
    "LORA": "LoRA", "PROMPT_TUNING": "prompt tuning", "P_TUNING": "P-tuning", "PREFIX_TUNING": "prefix tuning",
}  # fmt: skip



def write_card(
    folder: Path,
    *,
    model_name: str,
    base_model: str | None,
    datasets: list[str],
    tags: list[str],
    run: Run | None = None,
    adapter: str | None = None,
    head: HeadName = "score",
    paper: tuple[str, str] | None = None,
    **facts: object,
) -> None:
    """Write README.md unless there is one that this function did not write.

    Args:
        base_model: a repository's name; None where training began from a folder.
        adapter: PEFT's type of the adapter that the repository holds alone; None of a whole model.
        head: the model's.
        paper: title and arXiv number of the paper that has the method.
        run: the training to describe; None for a model that has not been trained.
        facts: further metadata of the card, as the Hub calls it (language, license, ...); None is left out.
    """
    path = folder / CARD
    own = not path.is_symlink() and path.is_file() and _MARK.encode() in path.read_bytes()  # a card in any encoding
    if os.path.lexists(path) and not own:
        return
    metadata = {
        "library_name": "peft" if adapter else "transformers",
        "model_name": model_name,
        "base_model": base_model,
        "datasets": datasets or None,
        "tags": list(dict.fromkeys([*_TAGS, *tags, *(_adapter_tags(base_model, adapter) if adapter else ())])),
        "pipeline_tag": _KINDS[head].pipeline,
        **facts,
    }
    kept = {key: masked(value, key) for key, value in metadata.items() if value is not None}
    front = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
    text = f"---\n{front}---\n\n{_MARK}\n\n{_text(model_name, base_model, datasets, adapter, head, paper)}"
    text += _run_section(folder, run)
    write_whole(path, scrubbed(text))


def _adapter_tags(base_model: str | None, adapter: str) -> list[str]:
    own = ["lora"] if adapter == "LORA" else []  # PEFT tags no other type
    return [*own, *([f"base_model:adapter:{base_model}"] if base_model else [])]


def _text(
    model_name: str,
    base_model: str | None,
    datasets: list[str],
    adapter: str | None,
    head: HeadName,
    paper: tuple[str, str] | None,
) -> str:
    library, loader = ("peft", "AutoPeftModel") if adapter else ("transformers", "AutoModel")
    kind = _KINDS[head]
    subject = f"An adapter ({_ADAPTERS[adapter]}) that makes {kind.subject}" if adapter else f"A{kind.subject[1:]}"
    options = ", num_labels=1" if adapter and head == "score" else ""
    origin = f", trained from [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    data = f" on {', '.join(datasets)}" if datasets else ""
    method = f"\n\nThe method is that of [{paper[0]}](https://huggingface.co/papers/{paper[1]})." if paper else ""
    libraries = "\n".join(f"- {name} {version(name)}" for name in _LIBRARIES)
    return f"""# {model_name}

{subject}{origin}{data} with trl_jax{kind.meaning}.{method}

```python
from {library} import {loader}{kind.loader}

model = {loader}{kind.loader}.from_pretrained("{model_name}"{options})
```

Trained with

{libraries}
"""


def _run_section(folder: Path, run: Run | None) -> str:
    """The run's arguments, last metrics, and its loss as a picture in the same folder."""
    if run is None:
        return ""
    sections = [_table("Arguments that were set", run.arguments), _table("Last metrics", run.metrics)]
    losses = [(step, loss) for step, loss in run.losses if math.isfinite(loss)]
    if len(losses) > 1:
        write_whole(folder / CURVE, curve(losses))
        sections.insert(0, f"![Training loss]({CURVE})\n")
    return "\n" + "\n".join(section for section in sections if section)


def _table(title: str, rows: dict[str, object]) -> str:
    if not rows:
        return ""
    lines = "\n".join(f"| {name} | {_short(value)} |" for name, value in rows.items())
    return f"{title}\n\n| | |\n| --- | --- |\n{lines}\n"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def curve(losses: list[tuple[int, float]]) -> str:
    """An SVG of a line through (step, loss), at least one, all of them finite."""
    last, low, high = losses[-1][0], min(loss for _, loss in losses), max(loss for _, loss in losses)
    first, height, width = losses[0][0], 160, 480
    points = " ".join(
        f"{(step - first) / max(last - first, 1) * width:.1f},{(high - loss) / ((high - low) or 1) * height:.1f}"
        for step, loss in losses
    )
    size = f'width="{width}" height="{height + 24}" font-family="sans-serif" font-size="12"'
    caption = f'<text y="{height + 18}">loss {losses[0][1]:.4f} to {losses[-1][1]:.4f}, steps {first} to {last}</text>'
    line = f'<polyline points="{points}" fill="none" stroke="#48a" stroke-width="1.5"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{line}{caption}</svg>\n'
