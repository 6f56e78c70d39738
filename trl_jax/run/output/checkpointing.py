"""Checkpoints of a run: weights and optimizer state bit for bit, and the position in the data."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
from datasets import Dataset
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from trl_jax.data.fingerprint import fingerprint
from trl_jax.engine.checkpoints.async_saver import AsyncSaver, host_copy
from trl_jax.engine.checkpoints.checkpoint import await_checkpoint, save_checkpoint
from trl_jax.engine.checkpoints.lock import RunLock
from trl_jax.engine.checkpoints.progress import Progress, progress_json, write_progress
from trl_jax.engine.checkpoints.resume import ResumePoint
from trl_jax.engine.checkpoints.run_id import record
from trl_jax.engine.devices import host_memory
from trl_jax.engine.devices.processes import barrier, is_first, several
from trl_jax.hub.peft.backend import LoraBackend
from trl_jax.hub.peft.lora_config import PISSA
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.run.arguments.optimizer_choice import LearningRate
from trl_jax.run.data import order_of
from trl_jax.run.hooks import TrainerHooks
from trl_jax.run.output.model_files import write_model
from trl_jax.run.state import RunState

_PER_PROCESS = ("process_id", "local_rank")  # arguments that differ between the processes of a run


class Checkpointer:
    """Writes checkpoints, in a thread while training goes on where nothing depends on them being complete.

    lr_scheduler: the run's schedule, whose state is saved; set at the beginning of train().
    run_id: of the run, in the manifest of each checkpoint; set there, too.
    lock: of output_dir, while train() has it.
    """

    def __init__(self, run: RunState, arguments: str, hooks: TrainerHooks):
        """
        Args:
            arguments: the text of training_args.json.
        """
        self._run, self.arguments, self._hooks = run, arguments, hooks
        self.lock: RunLock | None = None
        self.saver = AsyncSaver()
        self.lr_scheduler: LearningRate | None = None
        self.run_id = ""
        self._fingerprint: str | None = None
        self._frozen: dict[str, int] | None = None

    def save(self, progress: Progress, *, background: bool) -> Path:
        """Write the checkpoint of this step; returns its folder.

        Args:
            background: write in a thread while training goes on, where nothing prevents it.

        Raises:
            FloatingPointError: weights are NaN or infinite.
        """
        run = self._run
        self._check_weights()
        if self.lock is not None:
            self.lock.renew()
        self.saver.settle()  # before the copy, so that no two copies exist at once
        background = background and self._may_write_in_background()
        needed, write = self._least_bytes(), self._writer(progress, background=background)
        if not is_first():  # gathers what the first process writes
            write(Path(run.args.output_dir))
            barrier("checkpoint")
            return await_checkpoint(run.args.output_dir, run.state, self.run_id)
        folder = save_checkpoint(
            run.args.output_dir,
            write,
            run.events,
            facts={"run": self.run_id, "dataset": self.dataset_fingerprint()},
            needed=needed,
            **({"begin": self.saver.begin} if background else {}),
        )
        barrier("checkpoint")
        return folder

    def begin(self, found: ResumePoint | None, new_id: str) -> None:
        """Take the id of the run that is resumed, or the new one."""
        args, resumed = self._run.args, found is not None and found.manifest is not None
        self.run_id = (resumed and found.manifest.get("run")) or new_id
        if is_first() and args.save_strategy != SaveStrategy.NO:
            replaces = args.save_total_limit is not None
            record(Path(args.output_dir), self.run_id, fresh=found is None, replaces=replaces)

    def _may_write_in_background(self) -> bool:
        """Whether no callback or override needs the complete checkpoint, no other process writes a part of it, and the
        host has memory for the copy that is written."""
        run, own = self._run, self._run.overridden.union(self._hooks.set_by_script())
        if own & {"save_model", "_save_checkpoint"} or not run.model.backend.saves_in_background or several():
            return False
        if any(type(c).on_save is not TrainerCallback.on_save for c in run.events.handler.callbacks):
            return False
        spare = host_memory.available()
        return spare is None or self._copied_bytes() < spare / 2

    def _writer(self, progress: Progress, *, background: bool) -> Callable[[Path], None]:
        """The function that writes a checkpoint's folder; with `background`, from a copy of all that the next step
        changes."""
        run = self._run
        trees = {"params": run.model.params}
        if not run.args.save_only_model:
            trees |= {"optimizer": run.progress.optimizer_state, "reference": run.moving_reference}
        trees = host_copy(trees) if background else trees
        rollout = None
        if run.rollout is not None:
            trees["rollout"], rollout = run.rollout.state()
        fill_last = run.shards > 1 if run.progress.fill_last is None else run.progress.fill_last
        facts = {"tokens_seen": run.progress.tokens_seen, "schedule": self.lr_scheduler.state_dict()}
        facts |= {"shards": run.shards, "step_examples": run.step_examples, "fills": fill_last}
        facts |= {"order": order_of(run), "rollout": rollout, "frozen": self.frozen_digests()}
        text, steps = progress_json(progress, facts), list(progress.unreported)

        def write(folder: Path) -> None:
            if background:
                self.write_model(folder, run.model.with_params(trees["params"]))
            else:
                self._hooks.save_model(folder, _internal_call=True)
            if run.args.save_only_model:
                return
            rounded = set(run.model.backend.dtypes.values()) != {"float32"}  # in the model's own files
            saved = {name: tree for name, tree in trees.items() if rounded or name != "params"}
            write_progress(folder, steps, saved, text, writes=is_first())

        return write

    def write_model(self, folder: Path, model: PreTrainedModel) -> None:
        """Write the files of save_model for this model, which may be a copy of the trainer's."""
        write_model(folder, model, self._run.processing_class, self.arguments)

    def _copied_bytes(self) -> int:
        run = self._run
        copied = run.model.params, run.progress.optimizer_state, run.moving_reference
        return sum(leaf.nbytes for leaf in jax.tree.leaves(copied))

    def _least_bytes(self) -> int:
        """Least size of the checkpoint: weights and moments, without small files."""
        run = self._run
        width = 4 if "float32" in run.model.backend.dtypes.values() else 2
        weights = width * run.model.num_parameters(only_trainable=True)
        state = () if run.args.save_only_model else (run.progress.optimizer_state, run.moving_reference)
        return weights + sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    def _check_weights(self) -> None:
        """Raise FloatingPointError for NaN or infinite weights, before they replace a good checkpoint."""
        bad = [path for path, good in jax.device_get(_finite(self._run.model.params)).items() if not good]
        if bad:
            raise FloatingPointError(
                f"Step {self._run.state.global_step}: {', '.join(bad[:8])} hold NaN or infinite values. No checkpoint "
                "was written; what was there is as it was. Lower learning_rate and resume."
            )

    def forget_dataset(self) -> None:
        """Forget the fingerprint: the dataset may have been replaced since the last run."""
        self._fingerprint = None

    def dataset_fingerprint(self) -> str | None:
        """The digest of a table, computed once a run; None for a stream, whose rows are known only as they arrive."""
        run = self._run
        if self._fingerprint is None and isinstance(run.train_dataset, Dataset):
            self._fingerprint = fingerprint(run.train_dataset, run.task.columns)
        return self._fingerprint

    def frozen_digests(self) -> dict[str, int]:
        """Digests of the base model's arrays under an adapter, by path, computed once: they are in no file of the run.

        Those in an adapter's file are left out, and those that are computed when the model is made, by PiSSA or in few
        bits, as their last digits may depend on the machine.
        """
        model = self._run.model
        if self._frozen is None:
            backend, self._frozen = model.backend, {}
            if isinstance(backend, LoraBackend) and backend.config.init_lora_weights != PISSA:
                kept = {path.removesuffix(".codes"): path for path in model.frozen if backend.is_as_in_files(path)}
                arrays = {path: backend.floats(name, model.frozen[name]) for path, name in kept.items()}
                self._frozen = {path: int(_digest(array)) for path, array in arrays.items()}
        return self._frozen

    def digests(self) -> dict[str, int]:
        """Digests of the facts that all processes of a run must share, by name."""
        arguments = {name: value for name, value in json.loads(self.arguments).items() if name not in _PER_PROCESS}
        facts = {
            "arguments": json.dumps(arguments),
            "train_dataset": str(self.dataset_fingerprint()),
            "release": " ".join(map(version, ("jax", "flax", "optax"))),
        }
        return {name: zlib.crc32(text.encode()) for name, text in facts.items()}


@jax.jit
def _digest(array: jax.Array) -> jax.Array:
    """A digest of the numbers of an array, the same for every dtype that has them and however it is divided."""
    bits, place = jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32), jnp.uint32(0)
    for axis, size in enumerate(array.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


@jax.jit
def _finite(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.isfinite(array).all() for path, array in params.items()}
