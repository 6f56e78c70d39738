"""The `Checkpointer` of a run writes its checkpoints: weights and optimizer state bit for bit, and the position in the
data. `checkpoint_files.py` has their folders and formats, and `resume.py` reads them."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from datasets import Dataset
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from trl_jax.config.base import BaseConfig
from trl_jax.core.files import write_whole
from trl_jax.core.secrets import masked
from trl_jax.data.loader import fingerprint
from trl_jax.hub.checkpoint import keep_processor_files, save_processor
from trl_jax.hub.peft_backend import LoraBackend
from trl_jax.hub.peft_config import PISSA
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.processes import barrier, is_first, several
from trl_jax.rollout.steps import RolloutSteps
from trl_jax.training import devices
from trl_jax.training.checkpoint_files import (
    AsyncSaver,
    LoopProgress,
    RunLock,
    await_checkpoint,
    host_copy,
    only_run,
    progress_json,
    record,
    save_checkpoint,
    sweep,
    write_progress,
)
from trl_jax.training.data import image_columns, order_of
from trl_jax.training.state import Hooks, Setup

_PER_PROCESS = ("process_id", "local_rank")  # arguments that differ between the processes of a run


class Checkpointer:
    """Writes checkpoints, in a background thread if nothing depends on them being complete.

    run_id: id of the run, for the manifest of each checkpoint; set at the start of train().
    """

    def __init__(self, setup: Setup, arguments: str, hooks: Hooks, rollout_steps: RolloutSteps | None):
        """
        Args:
            arguments: the text of training_args.json.
            rollout_steps: the source of steps in online training; None if the rows come from a dataset.
        """
        self._setup, self.arguments, self._hooks, self.rollout_steps = setup, arguments, hooks, rollout_steps
        self._lock: RunLock | None = None
        self.saver = AsyncSaver()
        self.run_id = ""
        self._fingerprint: str | None = None
        self._frozen: dict[str, int] | None = None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock output_dir against other runs, and clean up after killed ones."""
        with only_run(self._setup.args.output_dir) as lock:
            self._lock = lock
            sweep(Path(self._setup.args.output_dir))
            try:
                yield
            finally:
                self._lock = None

    def save(self, progress: LoopProgress, *, background: bool) -> Path:
        """Write the checkpoint of this step; returns its folder.

        Args:
            background: write in a thread while training continues, unless something prevents it.

        Raises:
            FloatingPointError: the weights contain NaN or infinite values.
        """
        setup = self._setup
        self._check_weights()
        if self._lock is not None:
            self._lock.renew()
        self.saver.settle()  # before the copy, so that no two copies exist at once
        background = background and self._may_write_in_background()
        needed, write = self._least_bytes(), self._writer(progress, background=background)
        if not is_first():  # takes part in gathering the arrays that the first process writes
            write(Path(setup.args.output_dir))
            barrier("checkpoint")
            return await_checkpoint(setup.args.output_dir, setup.state, self.run_id)
        folder = save_checkpoint(
            setup.args.output_dir,
            write,
            setup.events,
            manifest={"run": self.run_id, "dataset": self.dataset_fingerprint()},
            needed=needed,
            saver=self.saver if background else None,
        )
        barrier("checkpoint")
        return folder

    def begin(self, run_id: str, *, fresh: bool) -> None:
        """Use this id of the run, and record it in output_dir.

        Args:
            fresh: whether the run starts, instead of being resumed.
        """
        args, self.run_id = self._setup.args, run_id
        if is_first() and args.save_strategy != SaveStrategy.NO:
            replaces = args.save_total_limit is not None
            record(Path(args.output_dir), run_id, fresh=fresh, replaces=replaces)

    def _may_write_in_background(self) -> bool:
        """Whether no callback or override needs the complete checkpoint, no other process writes a part of it, and the
        host has enough memory for a copy of the arrays."""
        setup, overridden = self._setup, self._setup.overridden.union(self._hooks.set_by_script())
        if overridden & {"save_model", "_save_checkpoint"} or not setup.model.backend.saves_in_background or several():
            return False
        if any(type(c).on_save is not TrainerCallback.on_save for c in setup.events.handler.callbacks):
            return False
        spare = devices.available_host_memory()
        return spare is None or self._copied_bytes() < spare / 2

    def _writer(self, progress: LoopProgress, *, background: bool) -> Callable[[Path], None]:
        """Return a function that writes a checkpoint's folder. With `background`, it writes from a copy of everything
        that the next step changes."""
        setup = self._setup
        trees = {"params": setup.model.params}
        if not setup.args.save_only_model:
            trees |= {"optimizer": setup.progress.optimizer_state, "reference": setup.moving_reference}
        trees = host_copy(trees) if background else trees
        rollout = None
        if self.rollout_steps is not None:
            trees["rollout"], rollout = self.rollout_steps.state()
        metadata = {
            "tokens_seen": setup.progress.tokens_seen,
            "schedule": setup.progress.schedule.state_dict(),
            "shards": setup.shards,
            "step_examples": setup.step_examples,
            "fills": setup.shards > 1 if setup.progress.fill_last is None else setup.progress.fill_last,
            "order": order_of(setup.args, setup.train_rows, setup.step_examples),
            "rollout": rollout,
            "frozen": self.frozen_digests(),
        }
        text, steps = progress_json(progress, metadata), list(progress.unreported)

        def write(folder: Path) -> None:
            if background:
                self.write_model(folder, setup.model.with_params(trees["params"]))
            else:
                self._hooks.save_model(folder, _internal_call=True)
            if setup.args.save_only_model:
                return
            rounded = set(setup.model.backend.dtypes.values()) != {"float32"}  # when saved in the model's own files
            saved = {name: tree for name, tree in trees.items() if rounded or name != "params"}
            write_progress(folder, steps, saved, text, writes=is_first())

        return write

    def write_model(self, folder: Path, model: PreTrainedModel) -> None:
        """Write the files of save_model for this model, which may be a copy of the trainer's."""
        write_model(folder, model, self._setup.processing_class, self.arguments)

    def _copied_bytes(self) -> int:
        setup = self._setup
        copied = setup.model.params, setup.progress.optimizer_state, setup.moving_reference
        return sum(leaf.nbytes for leaf in jax.tree.leaves(copied))

    def _least_bytes(self) -> int:
        """The minimum size of the checkpoint in bytes: weights and moments, without small files."""
        setup = self._setup
        width = 4 if "float32" in setup.model.backend.dtypes.values() else 2
        weights = width * setup.model.num_parameters(only_trainable=True)
        state = () if setup.args.save_only_model else (setup.progress.optimizer_state, setup.moving_reference)
        return weights + sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    def _check_weights(self) -> None:
        """Raise FloatingPointError for NaN or infinite weights, before they replace a good checkpoint."""
        bad = [path for path, good in jax.device_get(_finite(self._setup.model.params)).items() if not good]
        if bad:
            raise FloatingPointError(
                f"Step {self._setup.state.global_step}: {', '.join(bad[:8])} hold NaN or infinite values. No "
                "checkpoint was written; earlier ones are untouched. Lower learning_rate and resume."
            )

    def forget_dataset(self) -> None:
        """Discard the fingerprint: the dataset may have been replaced since the last run."""
        self._fingerprint = None

    def dataset_fingerprint(self) -> str | None:
        """The fingerprint of a table, computed once per run; None for a stream, whose rows are not known in advance."""
        setup = self._setup
        if self._fingerprint is None and isinstance(setup.train_dataset, Dataset):
            rows = setup.train_dataset
            columns = setup.task.columns if setup.encoder is None else image_columns(rows)
            self._fingerprint = fingerprint(rows, columns)
        return self._fingerprint

    def frozen_digests(self) -> dict[str, int]:
        """Digests of the base model's arrays under an adapter, by path, computed once: the run's files lack them.

        Arrays in the adapter's file are left out, as are those that are computed when the model is created (by PiSSA or
        quantization), because their last digits may depend on the machine.
        """
        model = self._setup.model
        if self._frozen is None:
            backend, self._frozen = model.backend, {}
            if isinstance(backend, LoraBackend) and backend.config.init_lora_weights != PISSA:
                names = {path.removesuffix(".codes"): path for path in model.frozen if backend.is_as_in_files(path)}
                arrays = {path: backend.floats(name, model.frozen[name]) for path, name in names.items()}
                self._frozen = {path: int(_digest(array)) for path, array in arrays.items()}
        return self._frozen

    def digests(self) -> dict[str, int]:
        """Digests of the facts that must be the same in all processes of a run, by name."""
        arguments = {name: value for name, value in json.loads(self.arguments).items() if name not in _PER_PROCESS}
        texts = {
            "arguments": json.dumps(arguments),
            "train_dataset": str(self.dataset_fingerprint()),
            "release": " ".join(map(version, ("jax", "flax", "optax"))),
        }
        return {name: zlib.crc32(text.encode()) for name, text in texts.items()}


@jax.jit
def _digest(array: jax.Array) -> jax.Array:
    """A digest of an array's values as float32; it does not depend on the dtype or the sharding."""
    bits, place = jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32), jnp.uint32(0)
    for axis, size in enumerate(array.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


@jax.jit
def _finite(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.isfinite(array).all() for path, array in params.items()}


# Write the files of save_model: the model, its tokenizer and the arguments of the run.

ARGUMENTS = "training_args.json"


def arguments_text(args: BaseConfig) -> str:
    """The arguments as JSON, with secrets masked and dtypes by name."""
    values = args.to_dict()  # masks every name that ends in _token, but these two are not secrets
    values |= {name: vars(args)[name] for name in ("eos_token", "pad_token") if name in values}
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = {key: str(entry) if "dtype" in key else entry for key, entry in value.items()}
    return json.dumps(masked(values), indent=2, default=str)  # a user-defined to_dict may add secrets


def write_model(folder: Path, model: PreTrainedModel, processing_class: Any, arguments: str) -> None:
    """Write a folder that transformers can load: config, weights, tokenizer, processor files and training_args.json.

    Args:
        model: the trainer's, or a copy of it.
        arguments: the text from `arguments_text`.
    """
    model.save_pretrained(folder)
    if is_first():
        processing_class.save_pretrained(folder)
        if isinstance(model.processor, Path):
            keep_processor_files(model.processor, folder)
        else:
            save_processor(model.processor, folder)
        write_whole(folder / ARGUMENTS, arguments + "\n")
    barrier("save_model")
