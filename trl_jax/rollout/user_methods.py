"""A script's overrides of the methods that generate and score completions, with TRL's arguments and results.

The rollout calls `UserMethods`, which calls the script's method. Its `super()` ends in `default_score`,
`default_generate` or `default_tokenize`, which return NumPy arrays and lists. What the script changes in these is
checked, and applied to the completions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from trl_jax.core.text import brief
from trl_jax.hub.torch_bridge import as_arrays
from trl_jax.rollout.rollout import TRL_LOGPS, EncodedTexts, Experience, Rollout, Written, all_written

USER_METHODS = "_generate_and_score_completions", "_generate", "_tokenize_prompts"


class _Call(NamedTuple):
    """The generation during which the script's methods run: its rollout, and two arguments of `Rollout.make`."""

    rollout: Rollout
    group: int
    mode: str


@dataclass
class UserMethods:
    """A script's overrides of USER_METHODS.

    name: of the trainer's class.
    score, generate, tokenize: the overrides; None for methods that are not overridden.
    grpo_form: whether results have GRPO's form, or RLOO's, which is shorter.
    keeps_extras: whether additional values per completion are kept for a user-defined loss.
    pad_token_id: pads the ids that `super()` returns.
    """

    name: str
    score: Callable[[list[dict[str, Any]]], dict[str, Any]] | None
    generate: Callable[[list], tuple] | None
    tokenize: Callable[[list], tuple] | None
    grpo_form: bool
    keeps_extras: bool
    pad_token_id: int
    _now: _Call | None = None
    _made: dict[str, Any] = field(default_factory=dict)

    # Called by the rollout.

    def scored(self, rollout: Rollout, rows: Sequence[dict[str, Any]], group: int, mode: str) -> Experience:
        self._now = _Call(rollout, group, mode)
        if self.score is None:
            return rollout.scored(rows, group, mode)
        outputs = self.score([dict(row) for row in rows])
        experience, given = self._taken("_generate_and_score_completions")
        return self._changed(experience, given, outputs)

    def written(self, rollout: Rollout, prompts: list, group: int, mode: str) -> Written:
        if self.generate is None:
            return rollout.written(prompts, group, mode)
        outputs = self.generate(prompts)
        made, given = self._taken("_generate")
        if not isinstance(outputs, tuple) or len(outputs) != len(given):
            raise TypeError(
                f"{self.name}._generate returned {brief(outputs)}; expected a tuple of {len(given)}, as TRL's."
            )
        ids = [list(map(int, own)) for own in outputs[0]]
        written = [np.asarray(own, np.int32) for own in outputs[1]]
        if ids != given[0] and made.images is not None:
            raise ValueError(
                f"{self.name}._generate changed the ids of prompts with images. Leave them: images have places in them."
            )
        found = {"prompt_ids": ids, "completion_ids": written, "messages": outputs[3 if self.grpo_form else 2]}
        by_model, logps = all_written(written), None
        if self.grpo_form:
            if outputs[2] is not None:
                by_model = [np.asarray(own, bool) for own in outputs[2]]
            if outputs[4] is not None:
                logps = [np.asarray([np.nan if x is None else x for x in own], np.float32) for own in outputs[4]]
            found |= {"columns": outputs[5], "sampling_logps": logps}
        for number, own in enumerate(written):
            lengths = {len(own), len(by_model[number]), len(own if logps is None else logps[number])}
            if len(own) == 0 or len(lengths) > 1:
                raise ValueError(
                    f"{self.name}._generate returned completion {number} with {len(own)} tokens and a mask or logprobs "
                    f"of {sorted(lengths)}: each needs at least one token, and a number for each."
                )
        return replace(made, by_model=by_model, **found)

    def encoded(self, prompts: list, encode: Callable[[list], EncodedTexts]) -> EncodedTexts:
        if self.tokenize is None:
            return encode(prompts)
        outputs = self.tokenize(prompts)
        given, _ = self._taken("_tokenize_prompts")
        ids = [list(map(int, own)) for own in outputs[0]]
        if len(ids) != len(prompts) or (given.images is not None and ids != given.ids):
            raise ValueError(
                f"{self.name}._tokenize_prompts returned {len(ids)} prompts for {len(prompts)}; expected one list of "
                "ids per prompt, and for prompts with images the ids that super() returned."
            )
        return given._replace(ids=ids)

    # Called by `super()` in the script's methods.

    def default_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        now = self._within("_generate_and_score_completions")
        experience = now.rollout.scored(inputs, now.group, now.mode)
        outputs = self._outputs(experience)
        self._made["_generate_and_score_completions"] = experience, dict(outputs)
        return outputs

    def default_generate(self, prompts: list) -> tuple:
        now = self._within("_generate")
        made = now.rollout.written(prompts, now.group, now.mode)
        texts = made.messages
        if texts is None:
            texts = now.rollout.writer.completions(prompts, made.prompt_ids, made.completion_ids)
        ids, written = ([list(map(int, own)) for own in part] for part in (made.prompt_ids, made.completion_ids))
        outputs = ids, written, texts
        if self.grpo_form:
            has_tool_results = not all(own.all() for own in made.by_model)
            mask = [own.astype(int).tolist() for own in made.by_model] if has_tool_results else None
            logps = None if made.sampling_logps is None else [own.tolist() for own in made.sampling_logps]
            outputs = ids, written, mask, texts, logps, dict(made.columns), None, []
        self._made["_generate"] = made, outputs
        return outputs

    def default_tokenize(self, prompts: list) -> tuple:
        encoded = self._within("_tokenize_prompts").rollout.writer.encoded(prompts)
        self._made["_tokenize_prompts"] = encoded, None
        return [list(own) for own in encoded.ids], None, {}

    def _within(self, name: str) -> _Call:
        if self._now is None:
            raise RuntimeError(f"{name} of {self.name} can only be called as super().{name}(...) from an override.")
        return self._now

    def _taken(self, name: str) -> tuple[Any, Any]:
        """The result of the method's `super()`."""
        if name not in self._made:
            raise RuntimeError(
                f"{self.name}.{name} did not call super().{name}(...), which generates the completions. Call it and "
                "change its result, or pass a rollout_func."
            )
        return self._made.pop(name)

    def _outputs(self, experience: Experience) -> dict[str, Any]:
        """TRL's outputs: prompts are left-padded, and per-token values of completions right-padded."""
        rows = experience.rows
        prompts = padded([row.prompt for row in rows], self.pad_token_id, left=True)
        outputs = {
            "prompt_ids": prompts,
            "prompt_mask": padded([np.ones_like(row.prompt) for row in rows], 0, left=True),
            "completion_ids": padded([row.completion for row in rows], self.pad_token_id),
            "completion_mask": padded([row.completion_mask.astype(np.int32) for row in rows], 0),
            "advantages": np.asarray([row.advantage for row in rows], np.float32),
        }
        if not self.grpo_form:
            old = [np.sum(row.old_logps[row.completion_mask], dtype=np.float32) for row in rows]
            return outputs | {"old_logps": np.asarray(old)}
        outputs["num_items_in_batch"] = np.int32(experience.num_tokens)
        there = {name: [row._asdict()[key] for row in rows] for name, key in TRL_LOGPS.items()}
        return outputs | {name: padded(values, 0.0) for name, values in there.items() if values[0] is not None}

    def _changed(self, experience: Experience, given: dict[str, Any], outputs: Any) -> Experience:
        """The completions with the script's changes to their outputs.

        Raises:
            TypeError: something that cannot be changed here.
        """
        where = f"{self.name}._generate_and_score_completions returned"
        if not isinstance(outputs, Mapping) or given.keys() - outputs.keys():
            missing = sorted(given.keys() - outputs.keys()) if isinstance(outputs, Mapping) else brief(outputs)
            raise TypeError(f"{where} outputs without {missing}; expected all outputs of super(), possibly changed.")
        found = {name: np.asarray(value) for name, value in as_arrays(outputs).items() if value is not None}
        free = {"advantages", "completion_mask", *((*TRL_LOGPS, "num_items_in_batch") if self.grpo_form else ())}
        for name in given.keys() - free:
            if not np.array_equal(found[name], given[name]):
                raise TypeError(f"{where} other {name} than super(). Do not change them: they were generated.")
        mask, shape = found["completion_mask"].astype(bool), given["completion_mask"].shape
        if mask.shape != shape or (mask & ~given["completion_mask"].astype(bool)).any():
            raise TypeError(
                f"{where} a completion_mask with other tokens than super()'s: it may only leave tokens out."
            )
        changes: dict[str, Any] = {"completion_mask": mask, "advantage": self._advantages(found["advantages"], shape)}
        changes |= {TRL_LOGPS[name]: found[name].astype(np.float32) for name in TRL_LOGPS.keys() & given.keys()}
        extras = {name: values for name, values in found.items() if name not in given}
        if found["advantages"].ndim == 2:
            extras["advantages"] = found["advantages"]
        extras = self._checked(extras, shape) if self.keeps_extras else {}
        rows = []
        for number, row in enumerate(experience.rows):
            own = {name: values[number] for name, values in changes.items()}
            own = {
                name: values[: len(row.completion)] if np.ndim(values) else float(values)
                for name, values in own.items()
            }
            of_row = {name: values[number][..., : len(row.completion)] if values.ndim == 2 else values[number]
                      for name, values in extras.items()}  # fmt: skip
            rows.append(row._replace(**own, extras=of_row or None))
        return Experience(rows, float(found["num_items_in_batch"]) if self.grpo_form else None)

    def _advantages(self, values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """The advantages of completions, float32 `[B]`; 0 if the script returned one for each token."""
        if values.shape == shape and self.keeps_extras:
            return np.zeros(shape[0], np.float32)
        if values.shape != shape[:1] or not np.isfinite(values).all():
            raise TypeError(
                f"{self.name}._generate_and_score_completions returned advantages {list(values.shape)}; expected "
                f"[{shape[0]}] finite numbers. Advantages of tokens need a _compute_loss of the script's own, too."
            )
        return values.astype(np.float32)

    def _checked(self, extras: dict[str, np.ndarray], shape: tuple[int, int]) -> dict[str, np.ndarray]:
        for name, values in extras.items():
            if values.shape not in (shape, shape[:1]) or values.dtype == object:
                raise TypeError(
                    f"{self.name}._generate_and_score_completions returned {name}, {list(values.shape)}; expected "
                    f"numbers of completions, [{shape[0]}], or of their tokens, {list(shape)}."
                )
        kinds = {"b": np.bool_, "i": np.int32, "u": np.int32}
        return {name: values.astype(kinds.get(values.dtype.kind, np.float32)) for name, values in extras.items()}


def padded(rows: Sequence[np.ndarray], filler: float, *, left: bool = False) -> np.ndarray:
    """Rows of numbers as an array, padded on one side."""
    longest = max(map(len, rows))
    found = np.full((len(rows), longest), filler, np.asarray(rows[0]).dtype)
    for out, row in zip(found, rows, strict=True):
        out[slice(longest - len(row), None) if left else slice(len(row))] = row
    return found
