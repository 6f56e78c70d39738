"""The command `trl-jax env`: print versions and devices for bug reports."""

from __future__ import annotations

import platform
from importlib import metadata

from trl_jax.core.secrets import CleanParser

REQUIRED = "jax jaxlib flax optax transformers datasets huggingface_hub safetensors numpy".split()
OPTIONAL = {
    "torch": "load torch models and pickled checkpoints",
    "peft": "pass objects of peft",
    "gguf": "load GGUF files",
    "math-verify": "use accuracy_reward",
    "pillow": "train on rows with images",
    "trl": "use trainers that trl_jax lacks, under python -m trl_jax",
    "rich": "use RichProgressCallback",
    "tensorboard": "use report_to='tensorboard'",
    "wandb": "use report_to='wandb'",
    "trackio": "use report_to='trackio'",
}


class Parser(CleanParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple:
        self.parse_args(argv)
        return ()


def make_parser(prog: str | None = None) -> Parser:
    return Parser(prog=prog, description="Print versions and devices, for bug reports.")


def main() -> None:
    print("\n".join(f"- {name}: {value}" for name, value in collect_versions().items()))


def collect_versions() -> dict[str, str]:
    """Name -> value of each line."""
    import jax

    devices = jax.devices()
    versions = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "trl_jax": _version("trl_jax") or "run from source, not installed",
        "devices": f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()})",
    }
    versions |= {name: _version(name) or "not installed" for name in REQUIRED}
    return versions | {name: _version(name) or f"not installed; needed to {use}" for name, use in OPTIONAL.items()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
