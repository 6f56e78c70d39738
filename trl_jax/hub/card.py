"""The README.md of a repository: what the model is and how it is called."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import yaml

CARD = "README.md"
_MARK = "<!-- trl_jax wrote this card and will write it anew; remove this line to keep your own. -->"
_TAGS = ("generated_from_trainer", "trl_jax", "reward-trainer")
_LIBRARIES = ("transformers", "datasets", "jax", "flax", "optax")


def write_card(
    folder: Path, *, model_name: str, base_model: str | None, datasets: list[str], tags: list[str], **facts: object
) -> None:
    """Write README.md unless there is one that we did not write.

    Args:
        base_model: a repository's name; None where training began from a folder.
        facts: further metadata of the card, as the Hub calls it (language, license, ...); None is left out.
    """
    path = folder / CARD
    if path.exists() and _MARK not in path.read_text(encoding="utf-8"):
        return
    metadata = {
        "library_name": "transformers",
        "model_name": model_name,
        "base_model": base_model,
        "datasets": datasets or None,
        "tags": list(dict.fromkeys([*_TAGS, *tags])),
        "pipeline_tag": "text-classification",
        **facts,
    }
    kept = {key: value for key, value in metadata.items() if value is not None}
    front = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
    path.write_text(f"---\n{front}---\n\n{_MARK}\n\n{_text(model_name, base_model, datasets)}", encoding="utf-8")


def _text(model_name: str, base_model: str | None, datasets: list[str]) -> str:
    origin = f", trained from [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    data = f" on {', '.join(datasets)}" if datasets else ""
    libraries = "\n".join(f"- {name} {version(name)}" for name in _LIBRARIES)
    return f"""# {model_name}

A reward model{origin}{data} with trl_jax: one score a text, the higher the better.

```python
from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained("{model_name}")
```

Trained with

{libraries}
"""
