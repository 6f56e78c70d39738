"""Push a run's folder and checkpoints to the Hub."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers.trainer_utils import HubStrategy, SaveStrategy

from trl_jax.config.base import BaseConfig
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.push import Publisher, Run, Upload, write_card
from trl_jax.mesh.processes import is_first
from trl_jax.training.checkpoint_files import MANIFEST, discard, entries, files_below
from trl_jax.training.events import Events

logger = logging.getLogger(__name__)

_STAGE = ".push"
_NOT_ON_CARD = ("output_dir", "hub_model_id", "run_name", "accelerator_config", "use_cpu", "disable_tqdm", "report_to")
_STEP_ONLY = ("loss", "grad_norm", "learning_rate", "step", "total_flos", "num_input_tokens_seen")
_CLOCK = ("_runtime", "_per_second")
_NOT_PUSHED = ("_*", "checkpoint-*")  # in a run's folder, as in TRL: checkpoints have their own folders on the Hub
_NOT_THE_MODEL = ("training_state", "trainer_state.json", MANIFEST)  # in a checkpoint


class HubPublisher:
    """Pushes as `push_to_hub` and `hub_strategy` say. Methods take the current arguments: a script may change them.

    repo_id: the repository's full name; None before `open`.
    """

    def __init__(self, tags: list[str], paper: tuple[str, str] | None = None):
        """
        Args:
            tags: for the model card.
            paper: title and arXiv number of the method's paper, for the model card.
        """
        self._tags, self._paper, self.repo_id = tags, paper, None
        self._publisher: Publisher | None = None
        self._unpushed: Path | None = None  # the newest checkpoint whose push failed

    def open(self, args: BaseConfig, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository `args.hub_model_id` (default: named after output_dir), unless it exists.

        Raises:
            TypeError, ValueError: the token is malformed.
            PermissionError, ConnectionError: creating it failed. With `hub_strategy="end"`, an unreachable Hub only
            leads to a warning, because it is not needed yet.
        """
        if not is_first():
            return
        self._publisher = Publisher(
            args.hub_model_id or Path(args.output_dir).absolute().name,
            token=args.hub_token if token is None else token,
            private=args.hub_private_repo if private is None else private,
            revision=args.hub_revision,
        )
        try:
            self.repo_id = self._publisher.open()
        except ConnectionError as error:
            if not (args.push_to_hub and args.hub_strategy == HubStrategy.END):
                raise
            logger.warning("%s It is asked again when there is something to push.", error)

    def wait(self) -> None:
        """Wait until no upload is running."""
        self._publisher.wait()

    @property
    def opened(self) -> bool:
        """Whether `open` was called in this process."""
        return self._publisher is not None

    def push(self, folder: Path, message: str, *, blocking: bool, revision: str | None) -> Any:
        """Upload the run's folder without its checkpoints. Returns the commit, or a Future of it if not `blocking`.

        Raises:
            PermissionError, ConnectionError: the last retry failed; everything is still in the folder.
        """
        uploads = [Upload(folder, message, list(files_below(folder, _is_pushed)))]
        if not blocking:
            return self._publisher.push_in_background(
                uploads, revision=revision, done=lambda succeeded: None, daemon=False
            )
        self._publisher.wait()
        commit = self._publisher.push(uploads, revision=revision)
        self.repo_id, self._unpushed = self._publisher.repo_id, None
        return commit

    def write_card(
        self,
        args: BaseConfig,
        model: PreTrainedModel,
        head: str,
        history: list[dict[str, float]],
        *,
        model_name: str | None,
        dataset_name: Any,
        tags: Any,
        metadata: dict[str, Any],
    ) -> None:
        """Write README.md into `args.output_dir`, unless one exists that trl_jax did not write.

        Args:
            head: the model's.
            history: the logs of training.
        """
        folder, began = Path(args.output_dir), model.name_or_path
        write_card(
            folder,
            model_name=model_name or self.repo_id or args.hub_model_id or folder.absolute().name,
            base_model=None if Path(began).exists() else began,
            datasets=_listed(dataset_name),
            tags=[*self._tags, *_listed(tags)],
            run=card_run(args, history),
            adapter=model.peft_config["default"].peft_type if model.frozen else None,
            head=head,
            paper=self._paper,
            **metadata,
        )

    def push_saved(self, args: BaseConfig, events: Events, folder: Path) -> None:
        """Push a checkpoint that was just written, unless hub_strategy excludes it or an upload is running."""
        if is_first() and pushes_checkpoints(args) and (args.hub_always_push or not self._publisher.running):
            self._push_checkpoint(args, events, folder)

    def _push_checkpoint(self, args: BaseConfig, events: Events, folder: Path) -> None:
        events.fire("on_push_begin")
        step, epoch = events.state.global_step, events.state.epoch
        stage = _staged(Path(args.output_dir), folder, step)
        where = f"step {step}" if args.save_strategy == SaveStrategy.STEPS else f"epoch {int(epoch)}"
        message = f"Training in progress, {where}"
        uploads = [_whole(stage / "run", message)]
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            place = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else folder.name
            uploads.append(_whole(stage / "checkpoint", f"{message}, checkpoint", place))

        def done(succeeded):
            shutil.rmtree(stage)
            self._unpushed = None if succeeded else folder

        self._publisher.push_in_background(uploads, done=done)

    def finish(self, args: BaseConfig, events: Events) -> None:
        """Wait for the last upload, retry it if it failed, and log the failures."""
        if self._publisher is None:
            return
        if self._publisher.running:
            logger.warning("Waiting for the upload to %s to end.", self._publisher.repo_id)
        self._publisher.wait()
        if self._unpushed is not None and self._unpushed.exists():
            self._push_checkpoint(args, events, self._unpushed)
            self._publisher.wait()
        self._tell_failures(args.output_dir)

    def tell_unfinished(self, output_dir: str) -> None:
        """Log which uploads did not arrive, and abort a running one instead of waiting for it."""
        if self._publisher is None:
            return
        if self._publisher.running:
            logger.warning(
                "Exiting while %s to %s is running: it was aborted. %s.",
                f'the upload "{self._publisher.uploading}"' if self._publisher.uploading else "an upload",
                self._publisher.repo_id,
                _local(output_dir),
            )
            self._publisher.cut_off()
        self._tell_failures(output_dir)

    def _tell_failures(self, output_dir: str) -> None:
        failures = self._publisher.failures
        if failures:
            state = "The last one did not arrive either" if self._unpushed is not None else "The last one arrived"
            logger.error(
                "%d pushes to %s failed. %s; %s. The first said: %s",
                len(failures),
                self._publisher.repo_id,
                state,
                _local(output_dir),
                failures[0],
            )


def pushes_checkpoints(args: BaseConfig) -> bool:
    """Whether checkpoints are pushed during training."""
    return args.push_to_hub and args.hub_strategy != HubStrategy.END


def _staged(output_dir: Path, folder: Path, step: int) -> Path:
    """Link the files to push into a staging folder, because the checkpoint may be deleted during the upload."""
    stage = output_dir / f"{_STAGE}-{step}"
    discard(stage)
    _copy(folder, stage / "checkpoint", files_below(folder))
    _copy(output_dir, stage / "run", files_below(output_dir, _is_pushed), changes=True)
    _copy(folder, stage / "run", files_below(folder, lambda name: name not in _NOT_THE_MODEL and _is_pushed(name)))
    return stage


def _local(folder: str) -> str:
    return f"{folder} holds everything" if Path(folder).is_dir() else f"{folder} is gone, too"


def card_run(args: BaseConfig, history: list[dict[str, float]]) -> Run | None:
    """The facts about the training for the model card; None before the first log."""
    if not history:
        return None
    defaults = type(args)("unused", use_cpu=args.use_cpu).to_dict()
    changed = {name: value for name, value in args.to_dict().items() if defaults.get(name) != value}
    for name in (*_NOT_ON_CARD, *(name for name in changed if name.endswith("_token"))):
        changed.pop(name, None)
    last: dict[str, float] = {}
    for log in history:
        last |= {name: value for name, value in log.items() if name not in _STEP_ONLY}
    last = {name: value for name, value in last.items() if name == "train_loss" or not name.startswith("train_")}
    losses = [(log["step"], log["loss"]) for log in history if "loss" in log]
    return Run(changed, {name: value for name, value in last.items() if not name.endswith(_CLOCK)}, losses)


def sweep_stages(output_dir: str) -> None:
    """Remove the folders of interrupted uploads."""
    for stage in entries(Path(output_dir), lambda name: name.startswith(f"{_STAGE}-")):
        discard(stage)


def _is_pushed(path: str) -> bool:
    """Whether a file or folder at this path in the run's folder is pushed; hidden names are private at any depth."""
    return not Path(path).name.startswith(".") and not any(fnmatch(path.split("/")[0], p) for p in _NOT_PUSHED)


def _whole(folder: Path, message: str, path_in_repo: str = "") -> Upload:
    return Upload(folder, message, list(files_below(folder)), path_in_repo)


def _copy(source: Path, target: Path, files: Iterable[str], *, changes: bool = False) -> None:
    """Hard-link files of one folder into another. With `changes`, everything except weights is copied, because it may
    still be modified."""
    target.mkdir(parents=True, exist_ok=True)
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if changes and not name.endswith(".safetensors"):
            shutil.copy2(source / name, target / name)
        else:
            _link(source / name, target / name)


def _link(source: Path, target: Path) -> None:
    """Hard-link a file that no longer changes; copy it if the file system has no hard links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])
