"""The reward functions of TRL's `trl.rewards`: pure Python, no model."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = [
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]


def contents(completions: Sequence[Any], function: str) -> list[str]:
    """The text of each completion, which is a list of one message. Raises TypeError, naming `function`, for strings."""
    if any(isinstance(completion, str) for completion in completions):
        raise TypeError(
            f"{function} needs conversational completions, but these are plain strings, because the prompts are. Make "
            "each prompt a list of messages, such as [{'role': 'user', 'content': prompt}]."
        )
    return [messages[0]["content"] for messages in completions]


# Accuracy of answers

Messages = list[dict[str, str]]
_SECONDS_TO_PARSE, _SECONDS_TO_VERIFY = 10, 5


class _Verdict(NamedTuple):
    """The reward (None if the solution cannot be parsed), and the parsed solution and answer as text."""

    reward: float | None
    gold: str
    answer: str


def accuracy_reward(
    completions: list[Messages],
    solution: list[str],
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""1.0 if a completion's answer equals its solution, 0.0 if not, None if the solution cannot be parsed.

    The answer must be delimited LaTeX, such as `\boxed{\frac{1}{3}}` or `$x = 2$`; a box takes precedence.

    Args:
        completions: each a list of one message.
        solution: the text of each solution.
        log_extra: passed by the trainer; called with the columns solution, gold_parsed and answer_parsed.

    Raises:
        ImportError: math_verify is not installed.
    """
    grade = _make_grader("accuracy_reward")
    answers = contents(completions, "accuracy_reward")
    verdicts = [grade(answer, gold) for answer, gold in zip(answers, solution, strict=True)]
    return _log_verdicts(verdicts, solution, log_extra)


def reasoning_accuracy_reward(
    completions: list[Messages],
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """`accuracy_reward` of the text after the reasoning; 0.0 if the reasoning does not end.

    Args:
        reasoning_delimiters: strings that end the reasoning; the first one in the list that a completion contains is
            used, at its last occurrence. None means ["</think>"].
    """
    grade = _make_grader("reasoning_accuracy_reward")
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    unfinished = _Verdict(0.0, "[incomplete reasoning]", "[incomplete reasoning]")

    def grade_answer(content: str, gold: str) -> _Verdict:
        delimiter = next((delimiter for delimiter in delimiters if delimiter in content), None)
        return unfinished if delimiter is None else grade(content.rpartition(delimiter)[2], gold)

    answers = contents(completions, "reasoning_accuracy_reward")
    verdicts = [grade_answer(answer, gold) for answer, gold in zip(answers, solution, strict=True)]
    return _log_verdicts(verdicts, solution, log_extra)


@dataclass(frozen=True)
class CosineScaledReward:
    r"""`accuracy_reward` scaled by completion length: correct answers score higher if they are shorter, wrong answers
    if they are longer.

    $$ v_{long} + (v_{short} - v_{long}) \frac{1 + \cos(\pi\, length / max\_len)}{2} $$

    Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning", appendix C.1 (arXiv:2502.03373).
    """

    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float
    __name__ = "cosine_scaled_reward"

    def __call__(
        self, completions: list[Messages], solution: list[str], completion_ids: list[list[int]], **kwargs: Any
    ) -> list[float | None]:
        accurate = accuracy_reward(completions, solution)
        return [None if right is None else self._scale(bool(right), len(ids))
                for right, ids in zip(accurate, completion_ids, strict=True)]  # fmt: skip

    def _scale(self, right: bool, length: int) -> float:
        long, short = (
            (self.min_value_correct, self.max_value_correct) if right else (self.max_value_wrong, self.min_value_wrong)
        )
        cosine = math.cos(min(length / self.max_len, 1.0) * math.pi)  # the cosine would rise again beyond pi
        return float(long + 0.5 * (short - long) * (1.0 + cosine))


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> CosineScaledReward:
    """Create a reward function that takes completions, solutions and token ids.

    Args:
        max_len: number of tokens at which the scaling saturates.
        min_value_wrong, max_value_wrong: rewards of the shortest and the longest wrong answer.
        min_value_correct, max_value_correct: rewards of the longest and the shortest correct answer.
    """
    return CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


def _log_verdicts(
    verdicts: Sequence[_Verdict], solution: Sequence[str], log_extra: Callable[[str, list], None] | None
) -> list[float | None]:
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [verdict.gold for verdict in verdicts])
        log_extra("answer_parsed", [verdict.answer for verdict in verdicts])
    return [verdict.reward for verdict in verdicts]


def _make_grader(function: str) -> Callable[[str, str], _Verdict]:
    """A function (completion text, solution text) -> verdict. `function` names the reward function in errors."""
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ImportError(
            f"Please install the `math_verify` package to use {function}: pip install math-verify"
        ) from error
    timed = threading.current_thread() is threading.main_thread()  # math_verify implements timeouts with signals
    if not timed:
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)  # else each call warns that timeouts are disabled
    parse_timeout, verify_timeout = (_SECONDS_TO_PARSE, _SECONDS_TO_VERIFY) if timed else (None, None)
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )

    def grade(content: str, solution: str) -> _Verdict:
        gold = parse(solution, parsing_timeout=parse_timeout)
        if not gold:
            return _Verdict(None, "[unparseable]", "[skipped]")
        options = {"extraction_config": [latex], "extraction_mode": "first_match", "parsing_timeout": parse_timeout}
        answer = parse(content, **options)
        reward = float(verify(gold, answer, timeout_seconds=verify_timeout))
        return _Verdict(reward, str(gold), str(answer) if answer else "[unparseable]")

    return grade


# Format of a completion

_THINKS = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def think_format_reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """1.0 if a completion (a list of one message) starts with exactly one <think>...</think> block, else 0.0."""
    return [float(_THINKS.match(text) is not None) for text in contents(completions, "think_format_reward")]


# Length and repetitiveness of a completion


@dataclass(frozen=True)
class RepetitionPenalty:
    """`max_penalty` times the fraction of repeated n-grams of token ids.

    Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning", appendix C.2 (arXiv:2502.03373).
    """

    ngram_size: int
    max_penalty: float
    __name__ = "repetition_penalty_reward"

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: list[int]) -> float:
        ngrams = [tuple(ids[i : i + self.ngram_size]) for i in range(len(ids) - self.ngram_size + 1)]
        repeated = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0
        return repeated * self.max_penalty if repeated else 0.0


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RepetitionPenalty:
    """Create a reward function of token ids; `max_penalty` must be at most 0."""
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty} is above 0, which would reward repetition. Pass 0 or less.")
    return RepetitionPenalty(ngram_size, max_penalty)


@dataclass(frozen=True)
class SoftOverlongPunishment:
    """0 up to `max_completion_len - soft_punish_cache` tokens, then linear down to -1 at `max_completion_len`.

    DAPO, arXiv:2503.14476, equation 13.
    """

    max_completion_len: int
    soft_punish_cache: int
    __name__ = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [self._punishment(len(ids)) for ids in completion_ids]

    def _punishment(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        return (free - length) / self.soft_punish_cache if length <= self.max_completion_len else -1.0


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> SoftOverlongPunishment:
    """Create a reward function of token ids."""
    return SoftOverlongPunishment(max_completion_len, soft_punish_cache)
