"""A run's folder and checkpoints on the Hub."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer_utils import HubStrategy, SaveStrategy

from trl_jax.engine.manifest import MANIFEST
from trl_jax.engine.processes import is_first
from trl_jax.hub.card import Run, write_card
from trl_jax.hub.push import IGNORED, Publisher, Upload
from trl_jax.run.checkpointing import Keeping

logger = logging.getLogger(__name__)

_STAGE = ".push"
_NOT_TOLD = ("output_dir", "hub_model_id", "run_name", "accelerator_config", "use_cpu", "disable_tqdm", "report_to")
_LAST = ("train_loss", "accuracy", "margin", "mean_reward", "num_tokens", "epoch")
_CLOCK = ("_runtime", "_per_second")
_NOT_THE_MODEL = ("training_state/*", "trainer_state.json", MANIFEST)  # of a checkpoint


class Publishing(Keeping):
    """`push_to_hub` and what `hub_strategy` asks for.

    Attributes:
        hub_model_id: the repository's full name, None before it was opened.
    """

    hub_model_id: str | None = None
    _publisher: Publisher | None = None
    _unpushed: Path | None = None  # the newest checkpoint whose push failed

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository `args.hub_model_id`, named after output_dir if None, unless it is there.

        Raises:
            TypeError, ValueError: the token cannot be one.
            PermissionError, ConnectionError: that failed. Under `hub_strategy="end"` a Hub that cannot be reached is
                warned of only: it is not needed yet.
        """
        args = self.args
        if not is_first():
            return
        self._publisher = Publisher(
            args.hub_model_id or Path(args.output_dir).absolute().name,
            token=args.hub_token if token is None else token,
            private=args.hub_private_repo if private is None else private,
            revision=args.hub_revision,
        )
        try:
            self.hub_model_id = self._publisher.open()
        except ConnectionError as error:
            if not (args.push_to_hub and args.hub_strategy == HubStrategy.END):
                raise
            logger.warning("%s It is asked again when there is something to push.", error)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model and its card to `args.output_dir` and upload that, checkpoints left out.

        Args:
            kwargs: for `create_model_card`: model_name, dataset_name, tags and further metadata.

        Returns:
            The commit; where `blocking` is False, a Future of it.

        Raises:
            PermissionError, ConnectionError: not even the last try succeeded; everything is in the folder.
        """
        self._events.fire("on_push_begin")
        if not is_first():  # which alone talks to the Hub
            self.save_model(_internal_call=True)
            return None
        if self._publisher is None or token is not None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        self.create_model_card(**kwargs)
        uploads = [Upload(Path(self.args.output_dir), commit_message or "End of training", ignored=IGNORED)]
        if blocking:
            self._publisher.wait()
            commit = self._publisher.push(uploads, revision=revision)
            self.hub_model_id, self._unpushed = self._publisher.repo_id, None
            return commit
        return self._publisher.push_in_background(uploads, revision=revision, done=lambda succeeded: None, daemon=False)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        **facts: Any,
    ) -> None:
        """Write README.md into `args.output_dir`; one that somebody else wrote is left alone."""
        default = self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        began = self.model.name_or_path
        write_card(
            Path(self.args.output_dir),
            model_name=model_name or default,
            base_model=None if Path(began).exists() else began,
            datasets=_listed(dataset_name),
            tags=_listed(tags),
            run=self._told_run(),
            adapter=bool(self.model.frozen),
            **facts,
        )

    def _told_run(self) -> Run | None:
        """What the card tells of the training; None before it."""
        history = self.state.log_history
        if not history:
            return None
        defaults = type(self.args)("unused", use_cpu=self.args.use_cpu).to_dict()
        told = {name: value for name, value in self.args.to_dict().items() if defaults.get(name) != value}
        for name in (*_NOT_TOLD, *(name for name in told if name.endswith("_token"))):
            told.pop(name, None)
        last: dict[str, float] = {}
        for log in history:
            last |= {name: value for name, value in log.items() if name in _LAST or name.startswith("eval_")}
        losses = [(log["step"], log["loss"]) for log in history if "loss" in log]
        return Run(told, {name: value for name, value in last.items() if not name.endswith(_CLOCK)}, losses)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, progress: Any) -> Path:
        folder = super()._save_checkpoint(progress)
        if is_first() and self._pushes_checkpoints and (self.args.hub_always_push or not self._publisher.running):
            self._push_checkpoint(folder)
        return folder

    def _saves_aside(self) -> bool:
        return not self._pushes_checkpoints and super()._saves_aside()

    @property
    def _pushes_checkpoints(self) -> bool:
        return self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END

    def _push_checkpoint(self, folder: Path) -> None:
        self._events.fire("on_push_begin")
        args, step = self.args, self.state.global_step
        stage = self._staged(folder)
        where = f"step {step}" if args.save_strategy == SaveStrategy.STEPS else f"epoch {int(self.state.epoch)}"
        message = f"Training in progress, {where}"
        uploads = [Upload(stage / "run", message)]
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            place = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else folder.name
            uploads.append(Upload(stage / "checkpoint", f"{message}, checkpoint", place))

        def done(succeeded):
            shutil.rmtree(stage)
            self._unpushed = None if succeeded else folder

        self._publisher.push_in_background(uploads, done=done)

    def _staged(self, folder: Path) -> Path:
        """What is pushed of a checkpoint, under names of its own: it may be removed while that is under way."""
        run = Path(self.args.output_dir)
        stage = run / f"{_STAGE}-{self.state.global_step}"
        shutil.rmtree(stage, ignore_errors=True)
        shutil.copytree(folder, stage / "checkpoint", copy_function=_link)
        ignored = shutil.ignore_patterns(*IGNORED)
        shutil.copytree(run, stage / "run", ignore=ignored, copy_function=_link_weights)
        model = shutil.ignore_patterns(*(pattern.split("/")[0] for pattern in _NOT_THE_MODEL))
        shutil.copytree(folder, stage / "run", ignore=model, copy_function=_link, dirs_exist_ok=True)
        return stage

    def _finish_pushing(self) -> None:
        """Wait for the last upload; try a failed one again, and tell at the end what did not arrive."""
        if self._publisher is None:
            return
        if self._publisher.running:
            logger.warning("Waiting for the upload to %s to end.", self._publisher.repo_id)
        self._publisher.wait()
        if self._unpushed is not None and self._unpushed.exists():
            self._push_checkpoint(self._unpushed)
            self._publisher.wait()
        failures = self._publisher.failures
        if failures:
            state = "The last one did not arrive either" if self._unpushed is not None else "The last one arrived"
            logger.error(
                "%d pushes to %s failed. %s; %s holds everything. The first said: %s",
                len(failures),
                self._publisher.repo_id,
                state,
                self.args.output_dir,
                failures[0],
            )


def sweep_stages(output_dir: str) -> None:
    """Remove what uploads that were cut off left behind."""
    for stage in Path(output_dir).glob(f"{_STAGE}-*"):
        shutil.rmtree(stage)


def _link(source: str, target: str) -> None:
    """A second name for a file that nobody changes any more; a copy where the file system has none."""
    if os.path.exists(target):
        os.unlink(target)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _link_weights(source: str, target: str) -> None:
    """Of a run's own folder: logs and cards are still written to, so they are copied."""
    (_link if source.endswith(".safetensors") else shutil.copy2)(source, target)


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])
