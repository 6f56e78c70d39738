"""The policy of a run as it writes completions."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from trl_jax.core.printable import brief
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data.rows import prompts as rows
from trl_jax.hub.generating.complete import complete
from trl_jax.rollout.coroutines import raised_by
from trl_jax.rollout.rollout_func import written_by
from trl_jax.rollout.written import Ids, Written, all_written
from trl_jax.run.progress_line import GenerationProgress, ProgressLine
from trl_jax.run.rollouts.parts import RolloutParts
from trl_jax.run.rollouts.ranks import local_copy
from trl_jax.run.state import RunState


class PolicyWriter:
    """Completes prompts with the run's model as it is; the random numbers are those of `stream`. A `rollout_func` of
    the script's does it in its place.

    Args:
        alone: whether this process completes prompts of its own, on one device, and not those of all with the others.
    """

    def __init__(self, run: RunState, parts: RolloutParts, stream: TorchGenerator, line: ProgressLine, alone: bool):
        self._run, self._sampling, self._stream, self._line = run, parts.sampling, stream, line
        self._alone = alone
        self._rollout_func = parts.rollout_func

    def write(self, prompts: list, group: int) -> Written:
        if self._rollout_func is not None:
            with raised_by("rollout_func", prompts):
                return written_by(self._rollout_func, prompts)
        tools = self._sampling.tools
        if tools is not None and not rows.is_messages(prompts[0]):
            raise ValueError(
                f"tools= answer in messages, and a prompt is the text {brief(prompts[0])}. Make prompts of messages, "
                'as in [{"role": "user", "content": "..."}].'
            )
        ids = self.prompt_ids(prompts)
        alike = all(own == ids[place - place % group] for place, own in enumerate(ids))  # not of every environment
        completions = self.complete(ids, group if alike else 1)
        if tools is not None:
            return tools.completed(ids, completions, partial(self.complete, group=1))
        return Written(ids, completions, all_written(completions))

    def prompt_ids(self, prompts: list) -> list[list[int]]:
        sampling = self._sampling
        own = None if sampling.tools is None else sampling.tools.of_each
        if own is None:
            return self._rendered(prompts, sampling.template_options)
        tools = [list(functions.values()) or None for functions in own]
        each = zip(prompts, tools, strict=True)
        return [self._rendered([prompt], sampling.template_options | {"tools": some})[0] for prompt, some in each]

    def _rendered(self, prompts: list, template_options: dict[str, Any]) -> list[list[int]]:
        options = {"template_options": template_options, "max_prompt_length": self._sampling.max_prompt_length}
        return rows.prompt_ids(prompts, self._run.processing_class, **options)

    def complete(self, prompt_ids: Ids, group: int) -> list[np.ndarray]:
        run, options = self._run, self._sampling.options
        how = {"group": group, "stream": self._stream, "dtype": run.args.compute_dtype, "logps": False}
        how["head_dtype"] = "float32" if run.args.cast_lm_head_to_fp32 else None
        how["progress"] = GenerationProgress(self._line, len(prompt_ids))
        with run.on_device():
            model = local_copy(run.model, jax.numpy.asarray) if self._alone else run.model
            out = complete(model, prompt_ids[::group], options, **how)
        return [tokens[:length] for tokens, length in zip(out.tokens, out.lengths, strict=True)]

    def decoded(self, ids: Ids) -> list[str]:
        return self._run.processing_class.batch_decode(ids, skip_special_tokens=True)

    def completions(self, prompts: list, prompt_ids: Ids, completion_ids: Ids) -> list:
        known = prompt_ids if self._sampling.parses_messages else None
        return rows.completion_texts(prompts, completion_ids, self._run.processing_class, known)
