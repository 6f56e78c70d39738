"""Checkpoints of a run, and going on from one."""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from datasets import Dataset
from transformers.trainer_callback import TrainerCallback, TrainerState

from trl_jax.core.secrets import masked
from trl_jax.data.fingerprint import fingerprint
from trl_jax.data.order import RunLength
from trl_jax.engine import host_memory
from trl_jax.engine.async_saver import AsyncSaver, host_copy
from trl_jax.engine.checkpoint import await_checkpoint, save_checkpoint
from trl_jax.engine.processes import barrier, is_first, several
from trl_jax.engine.progress import Progress, SavedProgress, progress_json, write_progress
from trl_jax.engine.resume import ResumePoint, changed_arguments, restore_callbacks
from trl_jax.run import hf_resume
from trl_jax.run.optimizer_choice import LearningRate
from trl_jax.run.state import ARGUMENTS, Session

logger = logging.getLogger(__name__)

_OWN = ("process_id", "local_rank")  # arguments that each process has its own of


class Keeping(Session):
    """Writes checkpoints, and takes one up again: the weights and moments bit for bit, and the place in the data."""

    def __init__(self, *session: Any):
        super().__init__(*session)
        self._optimizer_state: Any = None  # a second train() goes on with it, as TRL's does
        self._fingerprint: str | None = None
        self._background = AsyncSaver()  # writes checkpoints while training goes on
        self.lr_scheduler: LearningRate | None = None  # from the beginning of train()

    # ---- writing -----------------------------------------------------------------------------------------------

    def _save_checkpoint(self, progress: Progress) -> Path:
        self._check_weights()
        self._background.settle()  # before the copy: two at once would be memory for nothing
        aside, needed = self._saves_aside(), self._least_bytes()
        write = self._writer(progress, aside=aside)
        if not is_first():  # gathers what the first process writes
            write(Path(self.args.output_dir))
            barrier("checkpoint")
            return await_checkpoint(self.args.output_dir, self.state)
        folder = save_checkpoint(
            self.args.output_dir,
            write,
            self._events,
            facts={"dataset": self._dataset_fingerprint()},
            needed=needed,
            **({"begin": self._background.begin} if aside else {}),
        )
        barrier("checkpoint")
        return folder

    def _saves_aside(self) -> bool:
        """Whether writing may go on beside the next steps: nobody looks at the checkpoint before it is whole, no other
        process has a part in it, and there is memory for the copy that is written."""
        if self.overridden & {"save_model", "_save_checkpoint"} or not self.model.backend.saves_aside or several():
            return False
        if any(type(c).on_save is not TrainerCallback.on_save for c in self.callback_handler.callbacks):
            return False
        spare = host_memory.available()
        return spare is None or self._held_bytes() < spare / 2

    def _writer(self, progress: Progress, *, aside: bool) -> Callable[[Path], None]:
        """What fills a checkpoint's folder; `aside`, from a copy of everything that the next step changes."""
        held = {"params": self.model.params}
        if not self.args.save_only_model:
            held["optimizer"] = self._optimizer_state
        held = host_copy(held) if aside else held
        facts = {"tokens_seen": self._tokens_seen, "schedule": self.lr_scheduler.state_dict()}
        fills = self.shards > 1 if self._fills is None else self._fills
        facts |= {"shards": self.shards, "step_pairs": self._step_pairs, "fills": fills}
        text, steps = progress_json(progress, facts), list(progress.unreported)

        def write(folder: Path) -> None:
            if aside:
                self.write_model(folder, self.model.holding(held["params"]))
            else:
                self.save_model(folder, _internal_call=True)
            if self.args.save_only_model:
                return
            rounded = set(self.model.backend.dtypes.values()) != {"float32"}  # by the model's own file
            trees = held if rounded else {"optimizer": held["optimizer"]}
            write_progress(folder, steps, trees, text, writes=is_first())

        return write

    def _held_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.model.params, self._optimizer_state)))

    def _least_bytes(self) -> int:
        """Of weights and moments; small files not counted."""
        width = 4 if "float32" in self.model.backend.dtypes.values() else 2
        weights = width * self.model.num_parameters(only_trainable=True)
        state = 0 if self.args.save_only_model else sum(leaf.nbytes for leaf in jax.tree.leaves(self._optimizer_state))
        return weights + state

    def _check_weights(self) -> None:
        """Raises FloatingPointError rather than let weights that are no numbers take the place of good ones."""
        bad = [path for path, good in jax.device_get(_finite(self.model.params)).items() if not good]
        if bad:
            raise FloatingPointError(
                f"Step {self.state.global_step}: {', '.join(bad[:8])} hold NaN or infinite values. No checkpoint was "
                "written; earlier ones are good. Lower learning_rate and resume."
            )

    def _dataset_fingerprint(self) -> str | None:
        """Of a table, read once a run; a stream's rows are known only as they pass."""
        if self._fingerprint is None and isinstance(self.train_dataset, Dataset):
            self._fingerprint = fingerprint(self.train_dataset)
        return self._fingerprint

    def _digests(self) -> dict[str, int]:
        """Of what the processes of a run must have in common."""
        arguments = {name: value for name, value in json.loads(self._arguments).items() if name not in _OWN}
        facts = {
            "arguments": json.dumps(arguments),
            "train_dataset": str(self._dataset_fingerprint()),
            "release": " ".join(map(version, ("jax", "flax", "optax"))),
        }
        return {name: zlib.crc32(text.encode()) for name, text in facts.items()}

    # ---- going on ----------------------------------------------------------------------------------------------

    def _take_up(self, found: ResumePoint, run: RunLength, tx: Any) -> Progress:
        """Become what the run was when it wrote this checkpoint. Whatever is wrong with it is told before that."""
        folder, args = found.folder, self.args
        saved = SavedProgress(folder) if found.manifest is not None else None
        if found.manifest is not None and not args.ignore_data_skip:
            self._check_dataset(found)
        params = self._weights_of(folder)
        if saved is None:
            state = hf_resume.optimizer_state(folder, tx.init(params), self._weights_of)
            if self.sharding_plan is not None:
                state = self.sharding_plan.placed_state(state, params)
            progress, self._tokens_seen = self._place_of(found.state), hf_resume.tokens_seen(found.state)
        else:
            self._check_step(saved)
            self._fills = saved.facts.get("fills")  # which earlier releases did not write
            like, sharding_plan = jax.eval_shape(tx.init, params), self.sharding_plan
            places = (
                (None, None)
                if sharding_plan is None
                else (sharding_plan.params(params), sharding_plan.state(like, params))
            )
            params = saved.tree("params", params, places[0]) if saved.names("params") else params
            state, progress = saved.tree("optimizer", like, places[1]), saved.progress
            saved.restore_random_state()
            self._tokens_seen = saved.facts["tokens_seen"]
            self.lr_scheduler.load_state_dict(saved.facts.get("schedule", {}))  # which earlier releases did not write
        self.model.params, self._optimizer_state = params, state
        self._tell_changes(folder)
        reached = found.state.global_step >= run.max_steps
        progress.stop_training = reached or (progress.stop_training and found.state.max_steps == run.max_steps)
        if args.ignore_data_skip and not progress.stop_training:
            progress.pairs, progress.rows_digest = 0, None
        progress.micro_batches = math.ceil(progress.pairs / self.micro_batch_pairs)
        self._take_up_state(found)
        logger.warning("Resuming from %s: step %d of %d.", folder, found.state.global_step, run.max_steps)
        return progress

    def _take_up_state(self, found: ResumePoint) -> None:
        state = self._events.state = found.state
        state.is_local_process_zero = state.is_world_process_zero = is_first()
        restore_callbacks(self._events, wholly=self.args.restore_callback_states_from_checkpoint)
        state.train_batch_size = self.train_batch_size
        if state.best_model_checkpoint is not None:  # the run's folder may have moved
            beside = found.folder.parent / Path(state.best_model_checkpoint).name
            state.best_model_checkpoint = str(beside) if beside.is_dir() else None

    def _weights_of(self, folder: Path) -> dict[str, jax.Array]:
        sharding_plan = self.sharding_plan
        params = self.model.backend.load(folder, self.args.seed, None if sharding_plan is None else sharding_plan.place)
        shapes = {path: array.shape for path, array in params.items()}
        if shapes != {path: array.shape for path, array in self.model.params.items()}:
            raise ValueError(
                f"{folder} holds another model than {self.model.name_or_path}: their weights differ in name or shape. "
                "Resume with the model the run began with."
            )
        return params if self.sharding_plan is None else self.sharding_plan.placed(params)

    def _new_optimizer_state(self, tx: Any) -> Any:
        params = self.model.params
        if self.sharding_plan is None:
            return tx.init(params)
        return jax.jit(tx.init, out_shardings=self.sharding_plan.state(jax.eval_shape(tx.init, params), params))(params)

    @property
    def _step_pairs(self) -> int:
        return self.micro_batch_pairs * self.args.gradient_accumulation_steps

    def _check_step(self, saved: SavedProgress) -> None:
        """On another number of devices a step must still have as many pairs: other numbers were another run's."""
        then, args = saved.facts.get("step_pairs", self._step_pairs), self.args
        if saved.facts.get("shards", 1) == self.shards or then == self._step_pairs:
            return
        way = f"Set gradient_accumulation_steps={then // self.micro_batch_pairs}."
        if then % self.micro_batch_pairs:
            way = f"Choose both so that the product is {then}, or a mesh whose data x fsdp divides it."
        raise ValueError(
            f"{saved.folder} was trained in steps of {then} pairs on {saved.facts['shards']} devices; {self.shards} "
            f"devices x per_device_train_batch_size={args.per_device_train_batch_size} x gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps} give {self._step_pairs}. {way}"
        )

    def _check_dataset(self, found: ResumePoint) -> None:
        then, now = found.manifest["dataset"], self._dataset_fingerprint()
        if then != now:
            raise ValueError(
                f"train_dataset is not the one {found.folder} was trained on (fingerprint {now}, then {then}): its "
                "place in the data would mean nothing. Pass the same rows, tokenizer and max_length, or "
                "ignore_data_skip=True to begin the epoch again with these."
            )

    def _tell_changes(self, folder: Path) -> None:
        path = folder / ARGUMENTS
        then = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        changes = changed_arguments(masked(then), json.loads(self._arguments)) if then else []
        if changes:
            logger.warning("Resuming with other arguments than %s was saved with: %s.", folder, "; ".join(changes))

    def _place_of(self, state: TrainerState) -> Progress:
        args = self.args
        steps = len(self.loader(self.train_dataset, training=True)) if isinstance(self.train_dataset, Dataset) else None
        return hf_resume.place(state, steps, args.gradient_accumulation_steps * self.micro_batch_pairs)


@jax.jit
def _finite(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.isfinite(array).all() for path, array in params.items()}
