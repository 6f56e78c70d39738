"""What a run would need of devices that are not there: its step compiled ahead of time, beside arithmetic."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from trl_jax.core.chips import Topology
from trl_jax.core.stream import BLOCK
from trl_jax.engine.ahead import Compiled, compiled, no_compiler
from trl_jax.hub.auto import Checkpoint
from trl_jax.nn.attention import QUERY_BLOCK
from trl_jax.trainer import plan_arithmetic as arithmetic
from trl_jax.trainer import planning
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.trainer.reward_trainer import RewardTrainer

ATTENTION = {
    True: f"plain XLA, {QUERY_BLOCK} queries of a row at a time against the keys before them",
    False: f"plain XLA, {BLOCK} queries of a stream at a time against the blocks of keys that any of them sees",
}


@dataclass(frozen=True)
class Plan:
    """Bytes, FLOPs and seconds are a device's, and a step's.

    lengths: of rows or streams, and how many of the steps looked at have each. places, tokens: means over steps on all
    devices, of what is computed on and of real text. remat: whole layers are computed twice.
    `compiled` is None where there is no compiler, and `why` says so.
    """

    model: str
    parameters: int
    topology: Topology
    mesh: dict[str, int]
    layout: str
    attention: str
    remat: bool | str
    lengths: dict[int, int]
    places: float
    tokens: float
    one: arithmetic.Pass
    memory: arithmetic.Memory
    flops: int
    why: str | None
    compiled: Compiled | None
    bound: arithmetic.Bound | None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Bytes at once: the compiler's word, else arithmetic's."""
        return self.memory.peak if self.compiled is None else self.compiled.peak

    @property
    def fits(self) -> bool | None:
        """None where no one knows: a pretended device has no memory of its own."""
        if self.topology.chip is None:
            return None
        return self.peak <= self.topology.chip.memory if self.compiled is None else self.compiled.fits

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return _plain(vars(self) | {"peak": self.peak, "fits": self.fits})


def _plain(value: Any) -> Any:
    """Dicts, lists and numbers."""
    if isinstance(value, tuple) and type(value) is not tuple:
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def plan(
    checkpoint: Checkpoint,
    args: RewardConfig,
    topology: Topology,
    rows: Dataset | None = None,
    tokenizer: Any = None,
    *,
    compiles: bool = True,
) -> Plan:
    """Plan a run.

    Args:
        checkpoint: what `find_checkpoint` gave; its weights are not looked at.
        rows: the pairs to train on; None means pairs as long as max_length that share nothing.
        tokenizer: of the rows.
        compiles: False leaves it at arithmetic.

    Raises:
        ValueError: what RewardTrainer refuses, or a text has no bound.
    """
    with tempfile.TemporaryDirectory() as folder:
        planned = planning.planned(args, topology, folder)
        trainer = planning.trainer_of(checkpoint.outline(), planned, rows, tokenizer)
        found = planning.batches(trainer)
    for remat in args.remats:
        made = _planned(checkpoint.name, args, topology, trainer, found, remat=remat, compiles=compiles)
        if made.fits is not False:
            break
    return made


def _planned(
    model: str,
    args: RewardConfig,
    topology: Topology,
    trainer: RewardTrainer,
    found: planning.Batches,
    *,
    remat: bool | str,
    compiles: bool,
) -> Plan:
    why, tx = no_compiler(topology) if compiles else "nothing was compiled", trainer._optimizer()
    given = planning.shapes(trainer, tx, found.largest)
    result = None if why is not None else compiled(planning.traced(trainer, tx, given, remat=remat), topology)
    layout = trainer.loader(trainer.train_dataset, training=True).layout
    one, engine = planning.one_pass(trainer, given), trainer.model.engine
    arch, gradients = engine.source.arch, planning.gradients(trainer, given)
    flops = arithmetic.flops(given.params, found.largest, arch, causal=engine.causal, remat=remat)
    return Plan(
        model=model,
        parameters=trainer.model.num_parameters(),
        topology=topology,
        mesh=planning.mesh_of(trainer),
        layout=layout,
        attention=ATTENTION[layout == "padded"],
        remat=remat,
        lengths=found.lengths,
        places=found.places,
        tokens=found.tokens,
        one=one,
        memory=arithmetic.memory(*given, gradients, one, arch, dtype=args.compute_dtype, remat=remat),
        flops=flops // math.prod(planning.mesh_of(trainer).values()),
        why=why,
        compiled=result,
        bound=_bound(topology, result, given),
        settings=_settings(args),
    )


def _bound(topology: Topology, result: Compiled | None, given: planning.Shapes) -> arithmetic.Bound | None:
    if topology.chip is None or result is None or not result.fits:
        return None
    return arithmetic.bound(topology.chip, result, arithmetic.on_device((given.params, given.state)))


def _settings(args: RewardConfig) -> dict[str, Any]:
    names = "per_device_train_batch_size gradient_accumulation_steps max_length gradient_checkpointing".split()
    return {name: vars(args)[name] for name in names} | {"compute": args.compute_dtype}
