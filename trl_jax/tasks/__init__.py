"""Training objectives, and everything needed to write another one.

Derive from `PairTask` (chosen and rejected completions), `TextTask` (single texts), `OnlineTask` (rollouts), or from
`Task` itself, and train it with `trl_jax.ReferenceTrainer`, `BaseTrainer` or `OnlineTrainer`. The rest of the package
does not depend on which task runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_jax.core.trainers import lazy_getattr, places

if TYPE_CHECKING:  # what type checkers and editors see
    from trl_jax.core.outputs import TokenOutputs
    from trl_jax.data.batch import Batch, Columns, Context, Example, Extras, LossBatch, of_examples
    from trl_jax.data.tokenize import prepare_texts
    from trl_jax.losses.supervised import at_reads, of_texts, real_examples, summed
    from trl_jax.tasks.language import Answers, PairTask, TextTask
    from trl_jax.tasks.policy import CompletionTokens, OnlineTask
    from trl_jax.tasks.task import ScoreTask, Task, TokenTask, joined, mean_metrics, weighted_loss

_WHERE = places(
    "trl_jax",
    {
        "core.outputs": "TokenOutputs",
        "data.batch": "Batch Columns Context Example Extras LossBatch of_examples",
        "data.tokenize": "prepare_texts",
        "losses.supervised": "at_reads of_texts real_examples summed",
        "tasks.language": "Answers PairTask TextTask",
        "tasks.policy": "CompletionTokens OnlineTask",
        "tasks.task": "ScoreTask Task TokenTask joined mean_metrics weighted_loss",
    },
)
__all__ = sorted(_WHERE)
__getattr__ = lazy_getattr(__name__, _WHERE)
