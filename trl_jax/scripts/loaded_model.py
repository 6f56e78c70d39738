"""The model of a command that uses one: found by name, its tokenizer, its weights, and the digests of its files."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_jax.hub.find import Checkpoint
    from trl_jax.hub.generating.settings import Settings
    from trl_jax.hub.pretrained import PreTrainedModel
    from trl_jax.mesh.sharding import ShardingPlan

_NEW_TOKENS = 256  # where neither the user nor the checkpoint says


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how a language model is loaded and computed."""
    parser.add_argument("--dtype", default="auto", help="type to load weights in (default: as they are stored)")
    parser.add_argument(
        "--bf16", action="store_true", help="compute in bfloat16 (default: float32 on a CPU, elsewhere the 16-bit type "
        "that the weights are stored in, if they are)"
    )  # fmt: skip
    parser.add_argument(
        "--mesh_shape", help="devices that write completions, as in data:4, or in fsdp:4,tensor:2, where they divide "
        "the weights, too (default: one device)"
    )  # fmt: skip
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="let a tokenizer's repository run its own code; a model's "
        "code is never run"
    )  # fmt: skip


@dataclass
class LoadedModel:
    """A language model and its tokenizer. Weights are read by `load`, once settings and prompts are known to be
    right."""

    checkpoint: Checkpoint
    tokenizer: Any
    plan: ShardingPlan | None = None
    model: PreTrainedModel | None = None

    @classmethod
    def find(
        cls, name: str, dtype: str, *, trust_remote_code: bool, mesh_shape: str | None = None
    ) -> LoadedModel:
        from trl_jax.data.rows.tokenizer import load_tokenizer
        from trl_jax.engine.devices.compilation import keep_compilations
        from trl_jax.hub.find import find_checkpoint
        from trl_jax.hub.placing import sharding_plan
        from trl_jax.run.model.loading import tokenizer_folder

        keep_compilations()
        plan = sharding_plan(mesh_shape)
        checkpoint = find_checkpoint(name, head="lm", dtype=dtype, trust_remote_code=trust_remote_code)
        folder = tokenizer_folder(checkpoint)
        return cls(checkpoint, load_tokenizer(folder, checkpoint.config, trust_remote_code=trust_remote_code), plan)

    def load(self) -> PreTrainedModel:
        """The model, an adapter merged into its weights."""
        if self.model is None:
            place = self.checkpoint.placement(self.plan)
            self.model = self.checkpoint.load(seed=0, place=place).merge_and_unload()
        return self.model

    def settings(self, fields: dict[str, Any]) -> Settings:
        """The settings of a generation with these fields."""
        from trl_jax.hub.generating.settings import resolve
        from trl_jax.hub.generating.text import ids_of_tokenizer

        model = self.load()
        open_length = model.generation_config.max_length is None and model.generation_config.max_new_tokens is None
        if open_length and not {"max_length", "max_new_tokens"} & fields.keys():
            fields = fields | {"max_new_tokens": _NEW_TOKENS}
        settings, _ = resolve(model, None, ids_of_tokenizer(model, self.tokenizer, fields))
        return settings

    def digests(self) -> dict[str, str]:
        return digests(self.checkpoint)


def digests(checkpoint: Checkpoint) -> dict[str, str]:
    """A digest of each file that the model and its tokenizer are read from."""
    from trl_jax.engine.checkpoints.manifest import digest
    from trl_jax.hub.network.fetch import SMALL

    return {
        f"{name}/{path.name}": digest(path)
        for name, folder in (("MODEL", checkpoint.folder), ("ADAPTER", checkpoint.adapter))
        for pattern in (() if folder is None else (*SMALL, "*.py", "*.safetensors", "pytorch_model*.bin", "*.gguf"))
        for path in folder.glob(pattern)
        if path.is_file()
    }
