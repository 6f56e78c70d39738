"""Find the checkpoint to resume from, check it, and restore a run from it: one of ours, or of transformers' Trainer."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import ExportableState, TrainerState

from trl_jax.config.base import BaseConfig
from trl_jax.core.secrets import masked
from trl_jax.core.text import brief, listed
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data.loader import RunLength
from trl_jax.hub.peft_backend import LoraBackend
from trl_jax.hub.peft_config import CONFIG as ADAPTER
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch_state import OPTIMIZER, random_state, write_adamw_moments
from trl_jax.mesh.mesh import ShardingPlan
from trl_jax.mesh.processes import is_first
from trl_jax.rollout.steps import RolloutSteps
from trl_jax.training.checkpoint_files import (
    FACTS,
    MANIFEST,
    STATE_FILE,
    TENSORS,
    BrokenCheckpoint,
    LoopProgress,
    SavedProgress,
    checkpoint_of,
    checkpoints,
    libraries,
    recorded,
    run_of,
    verify,
)
from trl_jax.training.checkpointer import ARGUMENTS, Checkpointer
from trl_jax.training.data import order_of, training_loader
from trl_jax.training.events import Events
from trl_jax.training.optimizers import decays, with_adam_moments
from trl_jax.training.reference import PREFIX, ReferenceModel
from trl_jax.training.state import Setup

logger = logging.getLogger(__name__)

# Resume from a checkpoint: all errors are raised before anything in the run changes.

_FACTS = {"order": dict, "schedule": dict, "tokens_seen": int, "shards": int, "step_examples": int, "fills": bool}


def resume(setup: Setup, checkpointer: Checkpointer, point: ResumePoint, length: RunLength, tx: Any) -> LoopProgress:
    """Restore the run to the state in which this checkpoint was written; returns its progress.

    Raises:
        ValueError: the checkpoint belongs to another model, dataset, batch size or release.
    """
    folder, args, step = point.folder, setup.args, point.state.global_step
    saved = None if point.manifest is None or point.model_only else SavedProgress(folder)
    finished = step >= length.max_steps
    _check_run(setup, checkpointer, point, saved, finished=finished)
    params = weights_of(setup.model, folder, args.seed, setup.sharding_plan)
    if saved is None:
        optimizer_state, progress = _without_progress(setup, checkpointer.rollout_steps, point, params, tx)
        if point.model_only:
            setup.progress.schedule.begin_at(step)
    else:
        params, optimizer_state, progress = _with_progress(setup, checkpointer, saved, params, tx, step, length)
    _resume_tables(setup.model, setup.reference, folder)
    setup.model.params, setup.progress.optimizer_state = params, optimizer_state
    log_changes(folder, checkpointer.arguments)
    if point.manifest is not None:
        _log_libraries(folder, point.manifest["libraries"])
    progress.micro_batches = math.ceil(progress.examples / setup.micro_batch_examples)
    # As in TRL, a run that a callback stopped continues, unless it was interrupted before it could end.
    stopped, same_length = progress.stop_training, point.state.max_steps == length.max_steps
    progress.stop_training = finished or (stopped and progress.evaluation_due and same_length)
    if stopped and not progress.stop_training and progress.micro_batches < length.micro_batches_per_epoch:
        progress.epoch_over = False  # the epoch was cut short
    if args.restarts_epoch and not progress.stop_training:
        _restart_epoch(progress, length, checkpointer.rollout_steps)
    restore_callbacks = args.restore_callback_states_from_checkpoint
    _restore_state(setup.events, point, setup.train_batch_size, wholly=restore_callbacks)
    logger.warning("Resuming from %s: step %d of %d.", folder, step, length.max_steps)
    return progress


def _check_run(
    setup: Setup, checkpointer: Checkpointer, point: ResumePoint, saved: SavedProgress | None, *, finished: bool
) -> None:
    """Raise ValueError if a checkpoint is damaged, or of a run with other rows, frozen weights or order.

    Args:
        saved: its progress; None if it has none.
        finished: whether no step is left.
    """
    args = setup.args
    if point.manifest is not None and not args.restarts_epoch:
        _check_dataset(point, checkpointer.dataset_fingerprint())
    if saved is None:
        return
    _check_facts(saved)
    counts_rows = not (setup.online or args.restarts_epoch)
    _check_place(saved, setup.train_rows, point.state.global_step, counts_rows=counts_rows)
    _check_frozen(saved, checkpointer.frozen_digests())
    if not (finished or args.restarts_epoch):
        _check_order(saved, order_of(args, setup.train_rows, setup.step_examples))


def weights_of(model: PreTrainedModel, folder: Path, seed: int, plan: ShardingPlan | None) -> dict[str, jax.Array]:
    """The weights of a checkpoint of this model, placed on its devices.

    Raises:
        ValueError: they belong to another model.
    """
    params = model.backend.load(folder, seed, None if plan is None else plan.sharding_of)
    shapes = {path: array.shape for path, array in params.items()}
    if shapes != {path: array.shape for path, array in model.params.items()}:
        raise ValueError(
            f"{folder} holds another model than {model.name_or_path}: their weights differ in name or shape. "
            "Resume with the model the run began with."
        )
    return params if plan is None else plan.placed(params)


def _restart_epoch(progress: LoopProgress, length: RunLength, rollout: RolloutSteps | None) -> None:
    """Restart the current epoch from its first row, unless all of its rows have been used."""
    if progress.micro_batches >= length.micro_batches_per_epoch:
        return
    progress.examples, progress.micro_batches, progress.rows_digest = 0, 0, None
    if rollout is not None:
        rollout.begin_epoch_again(progress.epoch)


def _without_progress(
    setup: Setup, rollout_steps: RolloutSteps | None, point: ResumePoint, params: dict, tx: Any
) -> tuple[Any, LoopProgress]:
    """The optimizer state and the progress for a checkpoint that has no `SavedProgress`: one of transformers' Trainer,
    or one with only the model. The optimizer has AdamW's moments from the former, and begins again with the latter."""
    optimizer_state = tx.init(params)
    if point.model_only:
        logger.warning(
            "%s holds only the model (save_only_model=True): the step and the place in the data continue, while the "
            "optimizer, its learning-rate schedule and the random numbers%s begin again, as in TRL.",
            point.folder,
            ", and the reference that follows the policy" if setup.moving_reference else "",
        )
    else:

        def load(folder: Path) -> dict[str, jax.Array]:
            return weights_of(setup.model, folder, setup.args.seed, setup.sharding_plan)

        optimizer_state = with_saved_moments(point.folder, optimizer_state, setup.model, load)
    if setup.sharding_plan is not None:
        optimizer_state = setup.sharding_plan.placed_state(optimizer_state, params)
    setup.progress.tokens_seen = tokens_seen(point.state)
    if rollout_steps is None:
        steps = len(training_loader(setup, setup.train_rows)) if isinstance(setup.train_rows, Dataset) else None
        return optimizer_state, _progress_at(point.state, steps, setup.step_examples)
    progress = _rollout_progress_at(point.state, rollout_steps, setup.step_examples)
    if not point.model_only:
        _restore_streams(point.folder, rollout_steps.streams)
    _restore_entropy_bonus(point.folder, rollout_steps)
    return optimizer_state, progress


def _with_progress(
    setup: Setup,
    checkpointer: Checkpointer,
    saved: SavedProgress,
    params: dict,
    tx: Any,
    step: int,
    length: RunLength,
) -> tuple[dict, Any, LoopProgress]:
    """The parameters, the optimizer state and the progress in `saved`. Also restores the rollouts, a reference that
    follows the policy, the random state and the schedule."""
    _check_step(saved, setup.args, shards=setup.shards, micro_batch=setup.micro_batch_examples)
    like, plan = jax.eval_shape(tx.init, params), setup.sharding_plan
    places = None if plan is None else plan.state(like, params)
    if saved.names("params"):
        params = saved.tree("params", params, None if plan is None else plan.params(params))
    optimizer_state = saved.tree("optimizer", like, places)
    if (rollout_steps := checkpointer.rollout_steps) is not None:
        arrays = {name: saved.tensors.get_tensor(f"rollout/{name}") for name in saved.names("rollout")}
        moved = rollout_steps.restore(arrays, saved.facts["rollout"], saved.progress.unreported)
        if moved:
            saved.progress.examples = rollout_steps.micro_batches_done * setup.micro_batch_examples
        if moved or saved.facts["step_examples"] != setup.step_examples:
            _check_steps_left(saved, setup.args, rollout_steps, setup.train_dataset, step, length)
    if setup.reference is not None:
        _resume_reference(setup.reference, setup.sharding_plan, saved)
    setup.progress.fill_last, setup.progress.tokens_seen = saved.facts["fills"], saved.facts["tokens_seen"]
    saved.restore_random_state()
    setup.progress.schedule.load_state_dict(saved.facts["schedule"])
    return params, optimizer_state, saved.progress


def _resume_reference(reference: ReferenceModel, plan: ShardingPlan | None, saved: SavedProgress) -> None:
    """Restore the arrays of a reference that followed the policy."""
    if saved.names("reference"):
        places = None if plan is None else plan.params(reference.arrays)
        reference.arrays = saved.tree("reference", reference.arrays, places)


def _resume_tables(model: PreTrainedModel, reference: ReferenceModel | None, folder: Path) -> None:
    """Restore the embeddings of a resized vocabulary: a script that resizes it again may get other random rows."""
    backend = model.backend
    if not isinstance(backend, LoraBackend):
        return
    model.frozen = model.frozen | backend.restore_tables(folder, model.frozen)
    if reference is not None and reference.backend is backend.base:  # it has its own copies of tables that are trained
        arrays = {path.removeprefix(PREFIX): array for path, array in reference.arrays.items()}
        for path in backend.tables.keys() & arrays.keys():
            arrays |= backend.base.replaced(arrays, path, backend.tables[path])
        reference.arrays = {PREFIX + path: array for path, array in arrays.items()}


def _restore_state(events: Events, point: ResumePoint, train_batch_size: int, *, wholly: bool) -> None:
    state = events.state = point.state
    state.is_local_process_zero = state.is_world_process_zero = is_first()
    restore_callbacks(events, wholly=wholly)
    state.train_batch_size = train_batch_size
    if state.best_model_checkpoint is not None:  # the run's folder may have moved
        run_id = None if point.manifest is None else point.manifest.get("run", "")
        best = checkpoint_of(run_id, point.folder.parent, Path(state.best_model_checkpoint).name)
        state.best_model_checkpoint = None if best is None else str(best)


def _check_step(saved: SavedProgress, args: BaseConfig, *, shards: int, micro_batch: int) -> None:
    """Raise ValueError if another number of devices would change the number of examples in a step.

    Args:
        micro_batch: examples in a micro-batch, over all devices.
    """
    old, now = saved.facts["step_examples"], micro_batch * args.gradient_accumulation_steps
    if saved.facts["shards"] == shards or old == now:
        return
    way = f"Set gradient_accumulation_steps={old // micro_batch}."
    if old % micro_batch:
        way = f"Choose both so that the product is {old}, or a mesh whose data x fsdp divides it."
    raise ValueError(
        f"{saved.folder} was trained in steps of {old} examples on {saved.facts['shards']} devices; {shards} "
        f"devices x per_device_train_batch_size={args.per_device_train_batch_size} x gradient_accumulation_steps="
        f"{args.gradient_accumulation_steps} give {now}. {way}"
    )


def _check_steps_left(
    saved: SavedProgress, args: BaseConfig, source: RolloutSteps, dataset: Dataset, step: int, length: RunLength
) -> None:
    """Raise ValueError if a run of whole epochs, with other sizes than before, would end with prompts left over."""
    progress = saved.progress
    if args.max_steps > 0 or args.restarts_epoch or progress.stop_epoch or source.cycle.wraps:
        return
    cycle, rows = source.cycle, len(dataset)
    left = (rows - source.sampler.num_done) // cycle.prompts * cycle.repeats - source.num_micro_batches % cycle.repeats
    left = 0 if progress.epoch_over else math.ceil(left / cycle.accumulation)
    reached = (progress.epoch + 1) * len(source) - left
    if step > reached and reached < length.max_steps:
        raise ValueError(
            f"{saved.folder} is at step {step}. In this run's sizes, {args.num_train_epochs:g} epochs are "
            f"{length.max_steps} steps, and the prompts so far {reached}: the run would end with prompts left. Pass "
            f"max_steps={step + length.max_steps - reached}, or num_generations, num_iterations, steps_per_generation "
            "and the batch size that it began with."
        )


def _check_dataset(point: ResumePoint, now: str | None) -> None:
    old = point.manifest["dataset"]
    if old != now:
        raise ValueError(
            f"train_dataset is not the one {point.folder} was trained on (fingerprint {now}, was {old}), so the saved "
            "data position does not apply. Pass the same rows, tokenizer and max_length, or "
            "ignore_data_skip=True to restart the epoch with these rows."
        )


def _check_facts(saved: SavedProgress) -> None:
    """Raise BrokenCheckpoint if a fact does not have the type that `Checkpointer` writes."""
    for name, kind in _FACTS.items():
        if type(saved.facts.get(name)) is not kind:
            raise BrokenCheckpoint(
                f"{saved.folder / FACTS}: {name} must be of type {kind.__name__}, got {brief(saved.facts.get(name))}. "
                "Resume from another checkpoint."
            )


def _check_place(saved: SavedProgress, rows: Dataset | IterableDataset, step: int, *, counts_rows: bool) -> None:
    """Raise BrokenCheckpoint for a position that no run of this many steps on these rows can have reached.

    Args:
        counts_rows: whether the position counts rows of this dataset.
    """
    progress, path = saved.progress, saved.folder / FACTS
    if progress.epoch > step:
        raise BrokenCheckpoint(f"{path}: epoch is {progress.epoch}, which a run of {step} steps has not reached.")
    most = len(rows) + saved.facts["step_examples"] if isinstance(rows, Dataset) else progress.examples
    if counts_rows and progress.examples > most:  # the last step of an epoch may be padded with examples
        raise BrokenCheckpoint(f"{path}: examples is {progress.examples}, and train_dataset has {len(rows)} rows.")


def _check_frozen(saved: SavedProgress, now: dict[str, int]) -> None:
    """Raise ValueError if the base model under an adapter has changed."""
    old = saved.facts.get("frozen", {})  # older checkpoints lack it
    changed = sorted(path for path in old.keys() & now if old[path] != now[path])
    if changed:
        raise ValueError(
            f"{saved.folder} was trained with other frozen weights than this model has: {listed(changed, 4)}. An "
            "adapter only fits the weights that it was trained with. Pass the model that the run started from; if the "
            "script modified it in memory, save it with save_pretrained() first."
        )


def _check_order(saved: SavedProgress, now: dict[str, Any]) -> None:
    """Raise ValueError if the rest of an epoch would be in another order than its beginning."""
    before, progress = saved.facts["order"], saved.progress
    if before == now or progress.epoch_over or not progress.examples:
        return
    old, new = (", ".join(f"{name}={brief(value)}" for name, value in order.items()) for order in (before, now))
    raise ValueError(
        f"{saved.folder} was saved in the middle of an epoch whose row order came from {old}. With {new}, this run "
        "has another order, which would repeat some rows and skip others. Pass the same values (data_seed=None uses "
        "seed), or ignore_data_skip=True to restart the epoch in the new order."
    )


def _log_libraries(folder: Path, old: dict[str, str]) -> None:
    now = libraries()
    changes = [f"{name}: {old.get(name)} -> {now[name]}" for name in now if old.get(name) != now[name]]
    if changes:
        logger.warning(
            "Resuming with other library versions than %s was saved with: %s. The last digits may differ from an "
            "uninterrupted run.",
            folder,
            "; ".join(changes),
        )


def log_changes(folder: Path, arguments: str) -> None:
    path = folder / ARGUMENTS
    saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    changes = changed_arguments(masked(saved), json.loads(arguments)) if saved else []
    if changes:
        logger.warning("Resuming with other arguments than %s was saved with: %s.", folder, "; ".join(changes))


# Find the checkpoint from which a run resumes, and restore callbacks.


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from. `manifest` is None if another program wrote it, such as TRL."""

    folder: Path
    state: TrainerState
    manifest: dict[str, Any] | None

    @property
    def run_id(self) -> str | None:
        """The id of the run that wrote it; None if unknown."""
        return None if self.manifest is None else self.manifest.get("run")

    @property
    def model_only(self) -> bool:
        """Whether `save_only_model` left out the optimizer, its schedule and the random numbers."""
        if self.manifest is None:
            return not (self.folder / OPTIMIZER).is_file()
        return not any(name in self.manifest["files"] for name in (FACTS, TENSORS))


def find(resume_from_checkpoint: str | Path | bool, output_dir: str) -> ResumePoint:
    """Find the checkpoint at a path or, for True, the newest complete one of the run that used `output_dir` last.

    If this package wrote none there, True also accepts a checkpoint of transformers' Trainer.

    Raises:
        ValueError: there is none, it is unknown which of several runs is meant, or the one at the path is incomplete;
            the message names the damaged file, and another checkpoint that is complete.
    """
    if resume_from_checkpoint is True:
        return _newest(Path(output_dir))
    folder = Path(resume_from_checkpoint)
    if not folder.is_dir():
        raise ValueError(
            f"resume_from_checkpoint={str(resume_from_checkpoint)!r} is not a folder. Pass a checkpoint's, or True for "
            "the newest in output_dir."
        )
    is_named = folder.absolute() in checkpoints(folder.absolute().parent)
    if not is_named and not any((folder / name).exists() for name in (MANIFEST, STATE_FILE)):
        raise ValueError(
            f"Can't find a valid checkpoint at {resume_from_checkpoint}: resume_from_checkpoint is a folder with "
            f"neither {MANIFEST} nor {STATE_FILE}. Pass a folder checkpoint-<step>, or True for the newest in "
            "output_dir. To start from the weights of a saved model, pass its folder as model."
        )
    try:
        return check(folder)
    except BrokenCheckpoint as error:
        raise BrokenCheckpoint(f"{error} {_another(folder)}") from error


def check(folder: Path) -> ResumePoint:
    """Verify every byte of a checkpoint; without a manifest, check that it can be read at all.

    Raises:
        BrokenCheckpoint: the checkpoint is incomplete or damaged.
    """
    manifest = verify(folder) if (folder / MANIFEST).exists() or not _is_transformers(folder) else None
    path = folder / STATE_FILE
    try:
        state = TrainerState.load_from_json(str(path))
        _check_numbers(state, manifest)
        return ResumePoint(folder, state, manifest)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {str(error)[:500]}.") from error


def _check_numbers(state: TrainerState, manifest: dict[str, Any] | None) -> None:
    """Raise ValueError for a state that no run can have written."""
    step, epoch = state.global_step, state.epoch
    if type(step) is not int or step < 0 or not isinstance(state.log_history, list):
        raise ValueError(f"global_step must be a whole number of at least 0, got {brief(step)}, and log_history a list")
    if manifest is not None and step != manifest["step"]:
        raise ValueError(f"global_step is {step}, but {MANIFEST} says {manifest['step']}")
    most = max(state.num_train_epochs, step) + 1
    if epoch is not None and not 0 <= epoch <= most:
        raise ValueError(f"epoch must be from 0 to {most} after {step} steps, got {brief(epoch)}")


def _is_transformers(folder: Path) -> bool:
    """Whether transformers' Trainer may have written this folder: it pickles the optimizer and the arguments."""
    pickles = [folder / OPTIMIZER, folder / "training_args.bin"]
    return (folder / STATE_FILE).is_file() and any(path.is_file() for path in pickles)


def _newest(run_dir: Path) -> ResumePoint:
    runs = {path: run_of(path) for path in reversed(checkpoints(run_dir))}
    current = _wanted_run(run_dir, runs)
    faults, others = [], [path.name for path, run in runs.items() if run not in (current, None)]
    for candidate in [path for path, run in runs.items() if run in (current, None)]:
        try:
            point = check(candidate)
        except BrokenCheckpoint as error:
            faults.append(str(error))
            logger.warning("%s is passed over: %s", candidate, error)
        else:
            if point.manifest is not None or current is None:
                return point
            others.append(candidate.name)
    why = " ".join(faults) or ("" if others else "There is no checkpoint-<step> in it.")
    if others:
        belong = "belongs" if len(others) == 1 else "belong"
        whose = f"{', '.join(others)} {belong} to another run than the latest one here."
        why = f"{why} {whose} To resume from one of another run, pass its path.".lstrip()
    raise ValueError(
        f"No valid checkpoint found in output directory ({run_dir}). {why} To train from the start, "
        "leave resume_from_checkpoint out."
    )


def _wanted_run(run_dir: Path, runs: dict[Path, str | None]) -> str | None:
    """The run that used the folder last, by its record; without a record, the only run in it."""
    current, run_ids = recorded(run_dir), {run for run in runs.values() if run is not None}
    if current is None and len(run_ids) > 1:
        listed = ", ".join(f"{path.name} (run {run[:8]})" for path, run in runs.items() if run is not None)
        raise ValueError(
            f"output_dir={str(run_dir)!r} holds checkpoints of {len(run_ids)} runs: {listed}. It is unclear "
            "which one to resume: pass the path of one as resume_from_checkpoint."
        )
    return current if current is not None else next(iter(run_ids), None)


def _another(folder: Path) -> str:
    """A sentence that names the newest complete checkpoint next to a broken one, of the same run if it is known."""
    run = run_of(folder)
    for candidate in reversed(checkpoints(folder.absolute().parent)):
        if candidate != folder.absolute() and (run is None or run_of(candidate) == run):
            try:
                return f"{check(candidate).folder} is complete: resume from that one."
            except BrokenCheckpoint:
                continue
    return "There is no other complete checkpoint."


def restore_callbacks(events: Events, *, wholly: bool) -> None:
    """Restore counters of callbacks from `events.state`, such as the number of evaluations without an improvement.

    Their settings stay those of the current script, unless `wholly`.
    """
    left = {
        name: list(states) if isinstance(states, list) else [states]
        for name, states in events.state.stateful_callbacks.items()
    }
    for callback in events.handler.callbacks:
        name = type(callback).__name__
        if isinstance(callback, ExportableState) and left.get(name):
            saved = left[name].pop(0)
            for attribute, value in ((saved["args"] if wholly else {}) | saved["attributes"]).items():
                if value != masked(vars(callback).get(attribute), attribute):  # otherwise unchanged, or a masked secret
                    setattr(callback, attribute, value)
    missing = [name for name, states in left.items() if states and name != type(events.control).__name__]
    if missing:
        logger.warning("The checkpoint has the state of callbacks that this run lacks: %s.", listed(missing))


def changed_arguments(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """ "name: old -> new" for every argument that has changed."""
    names = sorted((then.keys() | now.keys()) - {"resume_from_checkpoint"})
    changed = [name for name in names if then.get(name) != now.get(name)]
    return [f"{name}: {brief(then.get(name), 200)} -> {brief(now.get(name), 200)}" for name in changed]


# Resume from the files that transformers' Trainer writes into a checkpoint.

_ENTROPY = "entropy_ctrl_state.json"  # of TRL's GRPOTrainer with use_adaptive_entropy


def with_saved_moments(
    folder: Path, fresh: Any, model: PreTrainedModel, load: Callable[[Path], dict[str, jax.Array]]
) -> Any:
    """`fresh` with AdamW's moments from optimizer.pt. Unchanged, with a warning, if torch is not installed to read
    them, or peft for those of an adapter.

    Args:
        model: the trained model.
        load: reads weights from a folder.
    """
    logger.warning("%s has no manifest, so its files cannot be verified.", folder)
    for name in ("torch", "peft") if (folder / ADAPTER).is_file() else ("torch",):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # the stub of `python -m trl_jax` has no file
            logger.warning("Reading %s requires %s, which is not installed: AdamW's moments restart from zero.",
                           folder / OPTIMIZER, name)  # fmt: skip
            return fresh
    with tempfile.TemporaryDirectory() as aside:
        count = write_adamw_moments(folder, Path(aside), model.config, model.backend.head, decays)
        return with_adam_moments(fresh, count, *(load(Path(aside, part)) for part in ("mu", "nu")))


def _progress_at(state: TrainerState, steps_per_epoch: int | None, step_examples: int) -> LoopProgress:
    """The progress of a run of transformers, from its number of steps.

    Args:
        steps_per_epoch: None for a stream, which is then read from its start.
    """
    epoch, step = 0, state.global_step
    if steps_per_epoch:
        epoch, step = divmod(state.global_step, steps_per_epoch)
    epoch_over = step == 0 and epoch > 0
    if epoch_over:
        epoch -= 1
    loss_sum = _loss_sum(state.log_history)
    return LoopProgress(epoch=epoch, epoch_over=epoch_over, examples=step * step_examples, loss_sum=loss_sum)


def _rollout_progress_at(state: TrainerState, steps: RolloutSteps, step_examples: int) -> LoopProgress:
    """Like `_progress_at`, for online training, where transformers saves no completions; also moves `steps` there."""
    steps_of_epoch = steps.pass_over(state.global_step)
    return LoopProgress(
        epoch=steps.epoch,
        epoch_over=not steps.sampler.has_next,
        examples=steps_of_epoch * step_examples,
        loss_sum=_loss_sum(state.log_history),
    )


def _restore_streams(folder: Path, streams: Sequence[TorchGenerator]) -> None:
    """Restore the random stream of each rank from torch's files, if torch is installed to read them."""
    has_torch = importlib.util.find_spec("torch") is not None
    for rank, stream in enumerate(streams):
        state = random_state(folder, rank, len(streams)) if has_torch else None
        if state is None:
            logger.warning(
                "%s: the state of torch's random numbers was not read: completions are sampled with new ones.", folder
            )
        else:
            stream.restore(state)


def _restore_entropy_bonus(folder: Path, steps: RolloutSteps) -> None:
    """Restore the coefficient of an adaptive entropy bonus, if it was saved."""
    path = folder / _ENTROPY
    if steps.bonus is not None and path.is_file():
        saved = json.loads(path.read_text(encoding="utf-8"))
        steps.bonus.coef, steps.bonus.entropy = float(saved["entropy_coef"]), float(saved["last_world_entropy"])


def tokens_seen(state: TrainerState) -> int:
    """The number of tokens in the logs; 0 without any."""
    return int(max((log["num_tokens"] for log in state.log_history if "num_tokens" in log), default=0))


def _loss_sum(logs: list[dict[str, float]]) -> float:
    """The sum of the losses of all logged steps; each log has the mean since the previous one."""
    total, before = 0.0, 0
    for log in logs:
        if "loss" in log:
            total, before = total + log["loss"] * (log["step"] - before), log["step"]
    return total
