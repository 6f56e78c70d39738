"""Peak memory and time of loading a checkpoint with trl_jax and transformers, relative to its size in float32.

A llama with random weights is written first. Each loader runs in its own process and is measured after all imports and
a warm-up load of a tiny model. Two peaks are reported: allocated memory (anonymous, sampled every millisecond), and
resident memory, which includes pages of the mapped file that the kernel may drop.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import common


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--millions", type=int, default=200, help="parameters of the checkpoint")
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="dtypes on disk")
    options.add_argument("--sides", nargs="+", default=list(LOADERS), choices=LOADERS)
    args = options.parse_args()
    common.prepare(args.cpus)
    rows = []
    for dtype in args.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            size, largest = common.in_child(build, Path(folder), args.millions, args.width, dtype)
            for side in args.sides:
                rows.append(row(side, dtype, size, largest, common.in_child(measure, side, folder)))
    common.show(rows)
    common.write_json(args.json, rows)


def build(folder: Path, millions: int, width: int, dtype: str) -> tuple[float, float]:
    """Write the checkpoint. Returns the size in MB, in float32, of all weights and of the largest tensor."""
    from safetensors import safe_open

    vocab_size, a_layer = 32000, 12 * width * width
    layers = max(1, round((millions * 1e6 - vocab_size * width) / a_layer))
    common.build_llama(folder, layers=layers, width=width, vocab_size=vocab_size, dtype=dtype)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    sizes = [4e-6 * shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes]
    return sum(sizes), max(sizes)


def row(side: str, dtype: str, size: float, largest: float, figures: dict[str, float]) -> dict:
    return {
        "loader": side,
        "on disk": dtype,
        "float32 MB": size,
        "largest tensor MB": largest,
        "allocated at most MB": figures["allocated"],
        "of the size": figures["allocated"] / size,
        "copies + tensors": (figures["allocated"] - size) / largest,
        "resident at most MB": figures["resident"],
        "of the size ": figures["resident"] / size,
        "kept MB": figures["kept"],
        "seconds": figures["seconds"],
    }


def measure(side: str, folder: str) -> dict[str, float]:
    """The growth of this process's memory while loading, in MB, and the seconds that it takes."""
    load = LOADERS[side]()
    with tempfile.TemporaryDirectory() as warm:  # lazy imports of the first load are not measured
        common.build_llama(Path(warm), layers=1, width=64, vocab_size=64)
        load(warm)
    resident, allocated = common.memory(), common.memory("RssAnon")
    with Sampler() as sampler:
        start = time.perf_counter()
        model = load(folder)
        seconds = time.perf_counter() - start
    retained = common.memory("RssAnon") - allocated
    del model
    return {
        "allocated": sampler.most - allocated,
        "resident": common.memory() - resident,
        "kept": retained,
        "seconds": seconds,
    }


class Sampler:
    """Samples anonymous memory in a thread; `most` is the maximum in MB."""

    def __enter__(self) -> Sampler:
        self.most, self._stop = common.memory("RssAnon"), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, common.memory("RssAnon"))

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.most = max(self.most, common.memory("RssAnon"))


def _trl_jax() -> Callable[[str], object]:
    import jax

    from trl_jax.hub.auto import AutoModelForSequenceClassification

    def load(folder: str) -> object:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32")
        return jax.block_until_ready(model.params)

    return load


def _on_a_mesh() -> Callable[[str], object]:
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    from trl_jax.hub.auto import find_checkpoint
    from trl_jax.mesh.mesh import ShardingPlan, make_mesh

    sharding_of = ShardingPlan(make_mesh({"fsdp": 4})).sharding_of

    def load(folder: str) -> object:
        return jax.block_until_ready(find_checkpoint(folder, dtype="float32").load(0, None, sharding_of).params)

    return load


def _transformers() -> Callable[[str], object]:
    import torch
    from transformers import AutoModelForSequenceClassification

    return lambda folder: AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)


LOADERS = {"trl_jax": _trl_jax, "trl_jax, fsdp:4": _on_a_mesh, "transformers": _transformers}


if __name__ == "__main__":
    main()
