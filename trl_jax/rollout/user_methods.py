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
from trl_jax.rollout.rollout import TRL_LOGPS, EncodedTexts, Experience, GeneratedCompletions, Rollout, all_by_model

USER_METHODS = "_generate_and_score_completions", "_generate", "_tokenize_prompts"


class _Call(NamedTuple):
    """The generation during which the script's methods run: arguments of `Rollout.generate_and_score`."""

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
    _call: _Call | None = None
    _super_results: dict[str, Any] = field(default_factory=dict)

    # Called by the rollout.

    def generate_and_score(self, rollout: Rollout, rows: Sequence[dict[str, Any]], group: int, mode: str) -> Experience:
        self._call = _Call(rollout, group, mode)
        if self.score is None:
            return rollout.default_generate_and_score(rows, group, mode)
        outputs = self.score([dict(row) for row in rows])
        experience, super_outputs = self._super_result("_generate_and_score_completions")
        return self._apply_changes(experience, super_outputs, outputs)

    def generate_completions(self, rollout: Rollout, prompts: list, group: int, mode: str) -> GeneratedCompletions:
        if self.generate is None:
            return rollout.default_generate(prompts, group, mode)
        outputs = self.generate(prompts)
        completions, super_outputs = self._super_result("_generate")
        if not isinstance(outputs, tuple) or len(outputs) != len(super_outputs):
            raise TypeError(
                f"{self.name}._generate returned {brief(outputs)}; expected a tuple of {len(super_outputs)}, as TRL's."
            )
        prompt_ids = [list(map(int, ids)) for ids in outputs[0]]
        completion_ids = [np.asarray(ids, np.int32) for ids in outputs[1]]
        if prompt_ids != super_outputs[0] and completions.images is not None:
            raise ValueError(
                f"{self.name}._generate changed the ids of prompts with images. Leave them: images have places in them."
            )
        messages = outputs[3 if self.grpo_form else 2]
        changes = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "messages": messages}
        by_model, logps = all_by_model(completion_ids), None
        if self.grpo_form:
            if outputs[2] is not None:
                by_model = [np.asarray(mask, bool) for mask in outputs[2]]
            if outputs[4] is not None:
                logps = [np.asarray([np.nan if x is None else x for x in row], np.float32) for row in outputs[4]]
            changes |= {"columns": outputs[5], "sampling_logps": logps}
        for index, ids in enumerate(completion_ids):
            lengths = {len(ids), len(by_model[index]), len(ids if logps is None else logps[index])}
            if len(ids) == 0 or len(lengths) > 1:
                raise ValueError(
                    f"{self.name}._generate returned completion {index} with {len(ids)} tokens and a mask or logprobs "
                    f"of {sorted(lengths)}: each needs at least one token, and a number for each."
                )
        return replace(completions, by_model=by_model, **changes)

    def tokenize_prompts(self, prompts: list, encode: Callable[[list], EncodedTexts]) -> EncodedTexts:
        if self.tokenize is None:
            return encode(prompts)
        outputs = self.tokenize(prompts)
        encoded, _ = self._super_result("_tokenize_prompts")
        ids = [list(map(int, prompt_ids)) for prompt_ids in outputs[0]]
        if len(ids) != len(prompts) or (encoded.images is not None and ids != encoded.ids):
            raise ValueError(
                f"{self.name}._tokenize_prompts returned {len(ids)} prompts for {len(prompts)}; expected one list of "
                "ids per prompt, and for prompts with images the ids that super() returned."
            )
        return encoded._replace(ids=ids)

    # Called by `super()` in the script's methods.

    def default_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        call = self._require_call("_generate_and_score_completions")
        experience = call.rollout.default_generate_and_score(inputs, call.group, call.mode)
        outputs = self._outputs(experience)
        self._super_results["_generate_and_score_completions"] = experience, dict(outputs)
        return outputs

    def default_generate(self, prompts: list) -> tuple:
        call = self._require_call("_generate")
        completions = call.rollout.default_generate(prompts, call.group, call.mode)
        texts = completions.messages
        if texts is None:
            texts = call.rollout.generator.completion_texts(prompts, completions.prompt_ids, completions.completion_ids)
        prompt_ids = [list(map(int, ids)) for ids in completions.prompt_ids]
        completion_ids = [list(map(int, ids)) for ids in completions.completion_ids]
        outputs = prompt_ids, completion_ids, texts
        if self.grpo_form:
            by_model, logps = completions.by_model, completions.sampling_logps
            masks = None if all(mask.all() for mask in by_model) else [mask.astype(int).tolist() for mask in by_model]
            logps = None if logps is None else [row.tolist() for row in logps]
            outputs = prompt_ids, completion_ids, masks, texts, logps, dict(completions.columns), None, []
        self._super_results["_generate"] = completions, outputs
        return outputs

    def default_tokenize(self, prompts: list) -> tuple:
        encoded = self._require_call("_tokenize_prompts").rollout.generator.encode(prompts)
        self._super_results["_tokenize_prompts"] = encoded, None
        return [list(ids) for ids in encoded.ids], None, {}

    def _require_call(self, name: str) -> _Call:
        if self._call is None:
            raise RuntimeError(f"{name} of {self.name} can only be called as super().{name}(...) from an override.")
        return self._call

    def _super_result(self, name: str) -> tuple[Any, Any]:
        """What the method's `super()` returned."""
        if name not in self._super_results:
            raise RuntimeError(
                f"{self.name}.{name} did not call super().{name}(...), which generates the completions. Call it and "
                "change its result, or pass a rollout_func."
            )
        return self._super_results.pop(name)

    def _outputs(self, experience: Experience) -> dict[str, Any]:
        """TRL's outputs: prompts are left-padded, and per-token values of completions right-padded."""
        rows = experience.rows
        prompts = pad_rows([row.prompt for row in rows], self.pad_token_id, left=True)
        outputs = {
            "prompt_ids": prompts,
            "prompt_mask": pad_rows([np.ones_like(row.prompt) for row in rows], 0, left=True),
            "completion_ids": pad_rows([row.completion for row in rows], self.pad_token_id),
            "completion_mask": pad_rows([row.completion_mask.astype(np.int32) for row in rows], 0),
            "advantages": np.asarray([row.advantage for row in rows], np.float32),
        }
        if not self.grpo_form:
            old = [np.sum(row.old_logps[row.completion_mask], dtype=np.float32) for row in rows]
            return outputs | {"old_logps": np.asarray(old)}
        outputs["num_items_in_batch"] = np.int32(experience.num_tokens)
        logps = {name: [row._asdict()[key] for row in rows] for name, key in TRL_LOGPS.items()}
        return outputs | {name: pad_rows(values, 0.0) for name, values in logps.items() if values[0] is not None}

    def _apply_changes(self, experience: Experience, super_outputs: dict[str, Any], outputs: Any) -> Experience:
        """Apply the script's changes of the outputs to the completions.

        Raises:
            TypeError: something that cannot be changed here.
        """
        where = f"{self.name}._generate_and_score_completions returned"
        if not isinstance(outputs, Mapping) or super_outputs.keys() - outputs.keys():
            missing = sorted(super_outputs.keys() - outputs.keys()) if isinstance(outputs, Mapping) else brief(outputs)
            raise TypeError(f"{where} outputs without {missing}; expected all outputs of super(), possibly changed.")
        arrays = {name: np.asarray(value) for name, value in as_arrays(outputs).items() if value is not None}
        advantages = arrays["advantages"]
        changeable = {"advantages", "completion_mask", *((*TRL_LOGPS, "num_items_in_batch") if self.grpo_form else ())}
        for name in super_outputs.keys() - changeable:
            if not np.array_equal(arrays[name], super_outputs[name]):
                raise TypeError(f"{where} other {name} than super(). Do not change them: they were generated.")
        mask, shape = arrays["completion_mask"].astype(bool), super_outputs["completion_mask"].shape
        if mask.shape != shape or (mask & ~super_outputs["completion_mask"].astype(bool)).any():
            raise TypeError(
                f"{where} a completion_mask with other tokens than super()'s: it may only leave tokens out."
            )
        if self.grpo_form and "tool_mask" in arrays:  # TRL's GRPO leaves a token out of the loss if either mask is 0
            if arrays["tool_mask"].shape != shape:
                raise TypeError(f"{where} a tool_mask {list(arrays['tool_mask'].shape)}; expected {list(shape)}.")
            mask = mask & (arrays["tool_mask"] > 0)
        changes: dict[str, Any] = {"completion_mask": mask, "advantage": self._advantages(advantages, shape)}
        logps_names = TRL_LOGPS.keys() & super_outputs.keys()
        changes |= {TRL_LOGPS[name]: arrays[name].astype(np.float32) for name in logps_names}
        extras = {name: values for name, values in arrays.items() if name not in super_outputs}
        if advantages.ndim == 2:
            extras["advantages"] = advantages
        extras = self._checked_extras(extras, shape) if self.keeps_extras else {}
        rows = []
        for index, row in enumerate(experience.rows):
            length = len(row.completion)
            row_changes = {
                name: values[index][:length] if values.ndim > 1 else float(values[index])
                for name, values in changes.items()
            }
            row_extras = {
                name: values[index][:length] if values.ndim == 2 else values[index] for name, values in extras.items()
            }
            rows.append(row._replace(**row_changes, extras=row_extras or None))
        return Experience(rows, float(arrays["num_items_in_batch"]) if self.grpo_form else None)

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

    def _checked_extras(self, extras: dict[str, np.ndarray], shape: tuple[int, int]) -> dict[str, np.ndarray]:
        for name, values in extras.items():
            if values.shape not in (shape, shape[:1]) or values.dtype == object:
                raise TypeError(
                    f"{self.name}._generate_and_score_completions returned {name}, {list(values.shape)}; expected "
                    f"numbers of completions, [{shape[0]}], or of their tokens, {list(shape)}."
                )
        kinds = {"b": np.bool_, "i": np.int32, "u": np.int32}
        return {name: values.astype(kinds.get(values.dtype.kind, np.float32)) for name, values in extras.items()}


def pad_rows(rows: Sequence[np.ndarray], pad_value: float, *, left: bool = False) -> np.ndarray:
    """Rows of numbers as an array, padded on one side."""
    longest = max(map(len, rows))
    array = np.full((len(rows), longest), pad_value, np.asarray(rows[0]).dtype)
    for target, row in zip(array, rows, strict=True):
        target[slice(longest - len(row), None) if left else slice(len(row))] = row
    return array
