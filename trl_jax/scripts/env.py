"""The command `trl-jax env`: prints versions and devices for reports of errors."""

from __future__ import annotations

import platform
from importlib import metadata

from trl_jax.core.secrets import CleanParser

REQUIRED = "jax jaxlib flax optax transformers datasets huggingface_hub safetensors numpy".split()
OPTIONAL = {
    "torch": "take torch models and pickled checkpoints",
    "peft": "take peft's objects",
    "gguf": "start from llama.cpp's files",
    "math-verify": "reward right formulas",
    "trl": "run a script's other trainers under python -m trl_jax",
    "rich": "draw RichProgressCallback",
    "tensorboard": "serve report_to='tensorboard'",
    "wandb": "serve report_to='wandb'",
    "trackio": "serve report_to='trackio'",
}


class Parser(CleanParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple:
        self.parse_args(argv)
        return ()


def make_parser(prog: str | None = None) -> Parser:
    return Parser(prog=prog, description="Print the versions and devices that a report of an error should name.")


def main() -> None:
    print("\n".join(f"- {name}: {value}" for name, value in facts().items()))


def facts() -> dict[str, str]:
    """Name -> text of each line."""
    import jax

    devices = jax.devices()
    shown = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "trl_jax": _version("trl_jax") or "run from its source, not installed",
        "devices": f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()})",
    }
    shown |= {name: _version(name) or "not installed" for name in REQUIRED}
    return shown | {name: _version(name) or f"not installed; it would {what}" for name, what in OPTIONAL.items()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
