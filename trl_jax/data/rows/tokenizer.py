"""Load tokenizers by folder or Hub name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_jax.core.files import strict_json


def load_tokenizer(
    place: str | Path,
    config: Any = None,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    sides: Mapping[str, str] | None = None,
) -> Any:
    """Load the tokenizer of a folder or a repository, without running code of its own unless the user allows it.

    Args:
        config: transformers' config of its model. With `trust_remote_code` the tokenizer's class is found by it;
            AutoTokenizer would otherwise run a config's own code for that.
        trust_remote_code: let the tokenizer's own code run, where `auto_map` in tokenizer_config.json names some.
        revision: of the repository; None is its main branch.
        sides: `padding_side` and `truncation_side`; None keeps its own.

    Raises:
        ValueError: it needs its own code, and `trust_remote_code` is False; or its files are nested too deeply.
    """
    from transformers import AutoTokenizer

    # With None, transformers would ask on the terminal, and read the answer from a pipe if there is one.
    options = {"config": config} if trust_remote_code else {}
    options |= {} if revision is None else {"revision": revision}
    options |= sides or {}
    try:
        found = AutoTokenizer.from_pretrained(place, trust_remote_code=bool(trust_remote_code), **options)
    except RecursionError as error:
        raise ValueError(f"{place}: a JSON file of the tokenizer is nested too deeply. Download it again.") from error
    beside = Path(place) / "chat_template.json"  # of models that see, too: TRL loads their processor, which reads it
    if beside.is_file() and getattr(found, "chat_template", "") is None:  # mistral_common's tokenizers have none
        found.chat_template = strict_json.read(beside)["chat_template"]
    return found
