"""Resume from a checkpoint: all errors are raised before anything of the run changes."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import jax
from datasets import Dataset
from transformers.trainer_callback import TrainerState

from trl_jax.core.printable import brief, listed
from trl_jax.core.secrets import masked
from trl_jax.data.order import RunLength
from trl_jax.engine.checkpoints.manifest import BrokenCheckpoint, libraries
from trl_jax.engine.checkpoints.progress import FACTS, Progress, SavedProgress
from trl_jax.engine.checkpoints.resume import ResumePoint, changed_arguments, restore_callbacks
from trl_jax.engine.checkpoints.run_id import checkpoint_of
from trl_jax.engine.devices.processes import is_first
from trl_jax.hub.peft.backend import LoraBackend
from trl_jax.run.data import loader, order_of
from trl_jax.run.model.reference import PREFIX
from trl_jax.run.output import hf_resume
from trl_jax.run.output.checkpointing import Checkpointer
from trl_jax.run.output.model_files import ARGUMENTS
from trl_jax.run.state import RunState

_FACTS = {"order": dict, "schedule": dict, "tokens_seen": int, "shards": int, "step_examples": int, "fills": bool}

logger = logging.getLogger(__name__)


def resume(run: RunState, checkpointer: Checkpointer, point: ResumePoint, length: RunLength, tx: Any) -> Progress:
    """Restore the run to the state in which it wrote this checkpoint; returns its progress.

    Raises:
        ValueError: the checkpoint is of another model, dataset, batch or release.
    """
    folder, args = point.folder, run.args
    saved = None if point.manifest is None or point.model_only else SavedProgress(folder)
    if point.manifest is not None and not args.ignore_data_skip:
        _check_dataset(point, checkpointer.dataset_fingerprint())
    if saved is not None:
        _check_facts(saved)
    reached = point.state.global_step >= length.max_steps
    if saved is not None:
        _check_place(run, saved, point.state.global_step)
        _check_frozen(saved, checkpointer.frozen_digests())
        if not (reached or args.ignore_data_skip):
            _check_order(run, saved)
    params = weights_of(run, folder)
    if saved is None:
        params, state, progress = _of_transformers(run, point, params, tx)
        if point.model_only:
            checkpointer.lr_scheduler.begin_at(point.state.global_step)
    else:
        params, state, progress = _of_ours(run, checkpointer, saved, params, tx, point.state.global_step, length)
    _resume_tables(run, folder)
    run.model.params, run.progress.optimizer_state = params, state
    log_changes(folder, checkpointer.arguments)
    if point.manifest is not None:
        _log_libraries(folder, point.manifest["libraries"])
    progress.stop_training = reached or (progress.stop_training and point.state.max_steps == length.max_steps)
    progress.micro_batches = math.ceil(progress.examples / run.micro_batch_examples)
    if args.ignore_data_skip and not progress.stop_training:
        _begin_epoch_again(run, progress, length)
    _restore_state(run, point)
    logger.warning("Resuming from %s: step %d of %d.", folder, point.state.global_step, length.max_steps)
    return progress


def weights_of(run: RunState, folder: Path) -> dict[str, jax.Array]:
    """The weights of a checkpoint, placed on the devices of the run's.

    Raises:
        ValueError: they are of another model.
    """
    model, plan = run.model, run.sharding_plan
    params = model.backend.load(folder, run.args.seed, None if plan is None else plan.place)
    shapes = {path: array.shape for path, array in params.items()}
    if shapes != {path: array.shape for path, array in model.params.items()}:
        raise ValueError(
            f"{folder} holds another model than {model.name_or_path}: their weights differ in name or shape. "
            "Resume with the model the run began with."
        )
    return params if plan is None else plan.placed(params)


def _begin_epoch_again(run: RunState, progress: Progress, length: RunLength) -> None:
    """Skip no rows of the epoch that is under way; one of which none are left is over."""
    if progress.micro_batches >= length.micro_batches_per_epoch:
        return
    progress.examples, progress.micro_batches, progress.rows_digest = 0, 0, None
    if run.rollout is not None:
        run.rollout.begin_epoch_again(progress.epoch)


def _of_transformers(run: RunState, point: ResumePoint, params: dict, tx: Any) -> tuple[dict, Any, Progress]:
    state = tx.init(params)
    if point.model_only:
        logger.warning(
            "%s holds the model alone (save_only_model=True): the step and the place in the data go on, while the "
            "optimizer, its learning-rate schedule and the random numbers%s begin again, as in TRL.",
            point.folder,
            ", and the reference that follows the policy" if run.moving_reference else "",
        )
    else:
        state = hf_resume.optimizer_state(point.folder, state, run.model, lambda folder: weights_of(run, folder))
    if run.sharding_plan is not None:
        state = run.sharding_plan.placed_state(state, params)
    run.progress.tokens_seen = hf_resume.tokens_seen(point.state)
    if run.rollout is not None:
        place = hf_resume.rollout_place(
            point.folder, point.state, run.rollout, run.step_examples, model_only=point.model_only
        )
        return params, state, place
    return params, state, _place_of(run, point.state)


def _of_ours(
    run: RunState,
    checkpointer: Checkpointer,
    saved: SavedProgress,
    params: dict,
    tx: Any,
    step: int,
    length: RunLength,
) -> tuple[dict, Any, Progress]:
    _check_step(run, saved)
    like, plan = jax.eval_shape(tx.init, params), run.sharding_plan
    places = (None, None) if plan is None else (plan.params(params), plan.state(like, params))
    params = saved.tree("params", params, places[0]) if saved.names("params") else params
    state = saved.tree("optimizer", like, places[1])
    if run.rollout is not None:
        arrays = {name: saved.tensors.get_tensor(f"rollout/{name}") for name in saved.names("rollout")}
        moved = run.rollout.restore(arrays, saved.facts["rollout"])
        if moved:
            saved.progress.examples = run.rollout.micro_batches_done * run.micro_batch_examples
        if moved or saved.facts["step_examples"] != run.step_examples:
            _check_steps_left(run, saved, step, length)
    _resume_reference(run, saved)
    run.progress.fill_last, run.progress.tokens_seen = saved.facts["fills"], saved.facts["tokens_seen"]
    saved.restore_random_state()
    checkpointer.lr_scheduler.load_state_dict(saved.facts["schedule"])
    return params, state, saved.progress


def _resume_reference(run: RunState, saved: SavedProgress) -> None:
    """Let a reference that followed the policy go on from where it was."""
    if run.reference is None or not saved.names("reference"):
        return
    arrays, plan = run.reference.arrays, run.sharding_plan
    places = None if plan is None else plan.params(arrays)
    run.reference.arrays = saved.tree("reference", arrays, places)


def _resume_tables(run: RunState, folder: Path) -> None:
    """Take the tables of a resized vocabulary as they were: a script that resizes it again may draw other rows."""
    backend, reference = run.model.backend, run.reference
    if not isinstance(backend, LoraBackend):
        return
    run.model.frozen = run.model.frozen | backend.restore_tables(folder, run.model.frozen)
    if reference is not None and reference.backend is backend.base:  # with its own copies of tables that train
        own = {path.removeprefix(PREFIX): array for path, array in reference.arrays.items()}
        changed = {path: backend.base.replaced(own, path, backend.tables[path]) for path in backend.tables.keys() & own}
        reference.arrays = reference.arrays | {PREFIX + path: arrays[path] for path, arrays in changed.items()}


def _restore_state(run: RunState, point: ResumePoint) -> None:
    state = run.events.state = point.state
    state.is_local_process_zero = state.is_world_process_zero = is_first()
    restore_callbacks(run.events, wholly=run.args.restore_callback_states_from_checkpoint)
    state.train_batch_size = run.train_batch_size
    if state.best_model_checkpoint is not None:  # the run's folder may have moved
        run_id = None if point.manifest is None else point.manifest.get("run", "")
        best = checkpoint_of(run_id, point.folder.parent, Path(state.best_model_checkpoint).name)
        state.best_model_checkpoint = None if best is None else str(best)


def _check_step(run: RunState, saved: SavedProgress) -> None:
    """Raise ValueError where other devices would change the number of examples in a step."""
    then, args = saved.facts["step_examples"], run.args
    if saved.facts["shards"] == run.shards or then == run.step_examples:
        return
    way = f"Set gradient_accumulation_steps={then // run.micro_batch_examples}."
    if then % run.micro_batch_examples:
        way = f"Choose both so that the product is {then}, or a mesh whose data x fsdp divides it."
    raise ValueError(
        f"{saved.folder} was trained in steps of {then} examples on {saved.facts['shards']} devices; {run.shards} "
        f"devices x per_device_train_batch_size={args.per_device_train_batch_size} x gradient_accumulation_steps="
        f"{args.gradient_accumulation_steps} give {run.step_examples}. {way}"
    )


def _check_steps_left(run: RunState, saved: SavedProgress, step: int, length: RunLength) -> None:
    """Raise ValueError where a run of whole epochs, in other sizes than before, would end with prompts left."""
    args, progress, source = run.args, saved.progress, run.rollout
    if args.max_steps > 0 or args.ignore_data_skip or progress.stop_epoch:
        return
    cycle, rows = source.cycle, len(run.train_dataset)
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
    then = point.manifest["dataset"]
    if then != now:
        raise ValueError(
            f"train_dataset is not the one {point.folder} was trained on (fingerprint {now}, then {then}): its "
            "place in the data would mean nothing. Pass the same rows, tokenizer and max_length, or "
            "ignore_data_skip=True to begin the epoch again with these."
        )


def _check_facts(saved: SavedProgress) -> None:
    """Raises BrokenCheckpoint for a fact of another kind than `Checkpointer` writes."""
    for name, kind in _FACTS.items():
        if type(saved.facts.get(name)) is not kind:
            raise BrokenCheckpoint(
                f"{saved.folder / FACTS}: {name} is {brief(saved.facts.get(name))}, wanted a {kind.__name__}. Resume "
                "from another checkpoint."
            )


def _check_place(run: RunState, saved: SavedProgress, step: int) -> None:
    """Raises BrokenCheckpoint for a place that no run of so many steps on so many rows can have reached."""
    progress, path, rows = saved.progress, saved.folder / FACTS, run.train_dataset
    if progress.epoch > step:
        raise BrokenCheckpoint(f"{path}: epoch is {progress.epoch}, which a run of {step} steps has not reached.")
    most = len(rows) + saved.facts["step_examples"] if isinstance(rows, Dataset) else progress.examples
    known = run.rollout is None and not run.args.ignore_data_skip
    if known and progress.examples > most:  # the last step of an epoch may be filled up
        raise BrokenCheckpoint(f"{path}: examples is {progress.examples}, and train_dataset has {len(rows)} rows.")


def _check_frozen(saved: SavedProgress, now: dict[str, int]) -> None:
    """Raise ValueError where the base model under an adapter is another one."""
    then = saved.facts.get("frozen", {})  # which earlier checkpoints lack
    changed = sorted(path for path in then.keys() & now if then[path] != now[path])
    if changed:
        raise ValueError(
            f"{saved.folder} was trained on other frozen weights than this model has: {listed(changed, 4)}. An adapter "
            "belongs to the weights that it was trained on. Pass the model that the run began with; one that a script "
            "has changed is in no file until save_pretrained() writes it."
        )


def _check_order(run: RunState, saved: SavedProgress) -> None:
    """Raises ValueError where the rest of an epoch would be that of another order."""
    then, now, progress = saved.facts["order"], order_of(run), saved.progress
    if then == now or progress.epoch_over or not progress.examples:
        return
    told, found = (", ".join(f"{name}={brief(value)}" for name, value in order.items()) for order in (then, now))
    raise ValueError(
        f"{saved.folder} is in the middle of an epoch whose rows came in the order of {told}. This run's {found} make "
        "another order, in which some rows would come twice and others never. Pass the same (data_seed is that of "
        "seed where it is None), or ignore_data_skip=True to begin the epoch anew in the new order."
    )


def _log_libraries(folder: Path, then: dict[str, str]) -> None:
    now = libraries()
    changes = [f"{name}: {then.get(name)} -> {now[name]}" for name in now if then.get(name) != now[name]]
    if changes:
        logger.warning(
            "Resuming with other versions than %s was written with: %s. The numbers may differ in their last digits "
            "from those of a run that was not broken.",
            folder,
            "; ".join(changes),
        )


def log_changes(folder: Path, arguments: str) -> None:
    path = folder / ARGUMENTS
    then = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    changes = changed_arguments(masked(then), json.loads(arguments)) if then else []
    if changes:
        logger.warning("Resuming with other arguments than %s was saved with: %s.", folder, "; ".join(changes))


def _place_of(run: RunState, state: TrainerState) -> Progress:
    steps = len(loader(run, run.train_dataset, training=True)) if isinstance(run.train_dataset, Dataset) else None
    return hf_resume.place(state, steps, run.step_examples)
