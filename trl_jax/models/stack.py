"""Layers stacked into one, and the inputs that a scan along them hands to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trl_jax.core.layer_gather import layer_gather
from trl_jax.nn.attention import cudnn
from trl_jax.nn.attention.key_ranges import SAVED
from trl_jax.nn.attention.striped import Striped
from trl_jax.nn.rope import Rope, rope_angles

_NO_WINDOW = np.iinfo(np.int32).max
_INPUT, _KEEPS = "layer_input", jax.checkpoint_policies
_PRODUCTS = _KEEPS.save_from_both_policies(
    _KEEPS.dots_with_no_batch_dims_saveable,
    _KEEPS.save_from_both_policies(_KEEPS.save_only_these_names(SAVED), cudnn.keeps),
)
# The values of a layer that are kept for the backward pass, by how it is recomputed.
_KEPT = {
    False: _PRODUCTS,
    True: _KEEPS.nothing_saveable,  # but its input
    "offloaded": _KEEPS.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[_INPUT],
        offload_src="device", offload_dst="pinned_host",
    ),
}  # fmt: skip


def stacked(make: Callable[[], nnx.Module], count: int) -> nnx.Module:
    """`count` modules in one: each parameter gets a leading axis L, "layers", for `jax.lax.scan` to walk along."""
    graph, state = nnx.split(make())

    def stack(param: nnx.Param) -> nnx.Param:
        values = jnp.broadcast_to(param[...], (count, *param.shape))
        return param.replace(values, axes=("layers", *param.get_metadata()["axes"]))

    return nnx.merge(graph, nnx.from_flat_state([(path, stack(param)) for path, param in nnx.to_flat_state(state)]))


def in_a_stack(path: str) -> bool:
    """Whether the parameter at this path has a leading axis of layers."""
    return any(name == "layers" or name.startswith("layers_from_") for name in path.split("."))


def checkpointed(layer: Callable, *, remat: bool | str, turns: int) -> Callable:
    """The layer as the body of a scan of so many `turns`: the backward pass recomputes it all (`remat`) or all but its
    matrix products and the results of attention along packed rows. "offloaded": all, from inputs that wait in the
    host's memory. XLA dissolves a loop of one turn, and would find that what is to be recomputed is there (CPUs do)."""

    def body(h: jax.Array, slices: Any) -> tuple[jax.Array, Any]:
        return layer(checkpoint_name(h, _INPUT), slices)

    return jax.checkpoint(body, prevent_cse=turns == 1, policy=_KEPT[remat])


def of_run(inputs: Any, run: Any) -> Any:
    """The part of per-layer inputs, arrays with a leading axis L, that is of a run of layers, a `models.arch.Run`."""
    return jax.tree.map(lambda a: a[run.first : run.first + run.count], inputs)


def last_layer(inputs: Any) -> Any:
    """The last layer's part of arrays with a leading axis L."""
    return jax.tree.map(lambda a: a[-1], inputs)


def whole_layer(state: nnx.State, stack: str) -> nnx.State:
    """A layer's parameters, each gathered where a device holds a part of it; in the turn of the scan that uses them.

    `stack` is the path of the stacked layers in the model.
    """
    gather = layer_gather()
    if gather is None:
        return state
    return jax.tree_util.tree_map_with_path(lambda path, leaf: gather(f"{stack}.{_dotted(path)}", leaf), state)


def _dotted(path: tuple) -> str:
    return ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


def apply(part: Callable[[jax.Array], jax.Array] | None, x: jax.Array) -> jax.Array:
    """`part` of x; x itself without a part."""
    return x if part is None else part(x)


def read(h: jax.Array, reads: jax.Array | None, length: int, striped: Striped | None) -> jax.Array:
    """Hidden states `[N, D]` at the flat places `reads` of rows of `length` tokens; of every token without any."""
    if striped is not None:
        return striped.read(h, *jnp.divmod(reads, length))
    h = h.reshape(-1, h.shape[-1])
    return h if reads is None else h[reads]


def narrowest_window(windows: Sequence[int | None]) -> int | None:
    """Of all layers'; None where each sees everything."""
    return min((window for window in windows if window is not None), default=None)


def rope_inputs(
    ropes: Sequence[Rope | None], positions: jax.Array, channels: int, longest: jax.Array | int
) -> dict[str, jax.Array]:
    """The `cos` and `sin` of `AttentionInputs` for all kinds of rope; none where no layer turns."""
    kinds = list(dict.fromkeys(ropes))
    if all(rope is None for rope in kinds):
        return {}
    return dict(zip(("cos", "sin"), rope_angles(positions, kinds, channels, longest), strict=True))


def rope_numbers(ropes: Sequence[Rope | None]) -> jax.Array | None:
    """The number of each layer's rope among their kinds, int32 `[L]`; None where there is one kind."""
    kinds = list(dict.fromkeys(ropes))
    return jnp.asarray([kinds.index(rope) for rope in ropes], jnp.int32) if len(kinds) > 1 else None


def window_inputs(windows: Sequence[int | None], max_tokens: int | None) -> jax.Array | None:
    """The window of each layer, int32 `[L]`; None where none matters.

    No text has more than `max_tokens`, None where nobody knows: a window as long is none.
    """
    narrowest = narrowest_window(windows)
    if narrowest is None or (max_tokens is not None and narrowest >= max_tokens):
        return None
    return jnp.asarray([window or _NO_WINDOW for window in windows], jnp.int32)
