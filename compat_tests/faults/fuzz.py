"""Fuzzes file readers with slightly corrupted files: python -m compat_tests.faults.fuzz --cases 50000

Every reader gets valid files with random changes. It may accept a file or raise a readable error, but must not crash,
hang, access files outside its folder, allocate more than the file could hold, or run code.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import compat_tests.conftest  # noqa: F401  (the CPU, one thread, no network)

READABLE = (ValueError, FileNotFoundError)
LONGEST = 4000  # maximum characters of an error
SECONDS, BYTES = 10, 300_000_000  # per case; more is a hang, or an allocation that no such file needs
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "os.rename", "os.remove")
ODD = [None, True, False, 0, -1, 1, 2, 2**31, 2**63, 2**64, 1e308, float("nan"), float("inf"), "", "x", "../x",
       "/etc/passwd", "a\0b", "\ud800", [], {}, [[]], [None], {"": None}, "F32", "I64", "9" * 5000,
       [0] * 100_000, "x" * 100_000, {"x" * 100_000: [[0] * 99] * 99}]  # fmt: skip


class Watcher:
    """An audit hook that records forbidden actions of a reader while `on`."""

    def __init__(self, inside: Path):
        self.inside, self.on, self.faults = str(inside), False, []
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        if event in FORBIDDEN:
            self.faults.append(f"{event} {arguments}")
        if event == "open" and isinstance(arguments[0], str):
            ours = arguments[0].startswith(self.inside)
            known = arguments[0].startswith(("/proc", "/dev", "/sys", sys.prefix, sys.base_prefix))
            if not ours and not known and not arguments[0].endswith((".py", ".pyc", ".so")):
                self.faults.append(f"opened {arguments[0]}")


def changed_bytes(content: bytes, dice: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) + 1)
        kind = dice.randrange(5)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << dice.randrange(8)
        elif kind == 1:
            data[at:at] = dice.randbytes(dice.randint(1, 9))
        elif kind == 2:
            del data[at : at + dice.randint(1, 40)]
        elif kind == 3:
            del data[at:]
        else:
            data[: min(8, len(data))] = dice.randrange(2**64).to_bytes(8, "little")[: min(8, len(data))]
    return bytes(data)


def changed_json(value: Any, dice: random.Random) -> Any:
    """The value with one part replaced, removed or added."""
    if isinstance(value, dict) and value and dice.random() < 0.85:
        key = dice.choice(list(value))
        if dice.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if dice.random() < 0.1:
            return value | {dice.choice(["new", "__metadata__", "format", key + "x"]): dice.choice(ODD)}
        return value | {key: changed_json(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.7:
        at = dice.randrange(len(value))
        return [*value[:at], changed_json(value[at], dice), *value[at + 1 :]]
    return dice.choice(ODD)


def changed(content: bytes, dice: random.Random) -> bytes:
    """Half of the time, JSON and safetensors headers are changed structurally, not byte by byte."""
    if dice.random() < 0.5:
        return changed_bytes(content, dice)
    if content[:4] == b"GGUF":
        return content[:24] + changed_bytes(content[24:400], dice) + content[400:]
    if content[:1] in b"{[":
        return json.dumps(changed_json(json.loads(content), dice)).encode()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(changed_json(json.loads(content[8 : 8 + length]), dice)).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def readers(folder: Path) -> dict[str, tuple[str, Callable[[], Any]]]:
    """reader -> (the file to change, the call)."""
    from trl_jax.hub.config import read_native_config
    from trl_jax.hub.formats import CheckpointFiles
    from trl_jax.hub.gguf import describe
    from trl_jax.hub.peft_adapters import read_tensors
    from trl_jax.training.checkpoint_files import SavedProgress, read_manifest
    from trl_jax.training.resume import check

    plan, shapes = adapter_plan(folder)
    described = {} if find_spec("gguf") is None else {"gguf": ("model.gguf", lambda: describe(folder / "model.gguf"))}
    return described | {
        "safetensors": ("model.safetensors", lambda: CheckpointFiles(folder)),
        "index": ("index/model.safetensors.index.json", lambda: CheckpointFiles(folder / "index")),
        "config": ("config.json", lambda: read_native_config(folder)),
        "manifest": ("manifest.json", lambda: read_manifest(folder)),
        "trainer_state": ("foreign/trainer_state.json", lambda: check(folder / "foreign")),
        "training_state": ("training_state/facts.json", lambda: SavedProgress(folder)),
        "arrays": ("training_state/arrays.safetensors", lambda: SavedProgress(folder)),
        "adapter_config": ("adapter_config.json", lambda: adapter_plan(folder)),
        "adapter_model": ("adapter_model.safetensors", lambda: read_tensors(folder, plan, shapes)),
    }


def adapter_plan(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The adapter of adapter_config.json on the model of config.json, and the shapes of its trainable arrays."""
    from trl_jax.hub.config import read_native_config
    from trl_jax.hub.peft_adapters import make_adapter_plan
    from trl_jax.hub.peft_config import read_adapter_config

    config = read_native_config(folder)
    plan = make_adapter_plan(read_adapter_config(folder), config)
    head = np.empty((1, config.arch.hidden_size), np.float32)
    return plan, plan.shapes | dict.fromkeys(plan.full.layers, head)


def build(folder: Path) -> None:
    """Write files for every reader."""
    from safetensors.numpy import save_file

    from compat_tests.faults.killed_saves import save
    from trl_jax.training.checkpoint_files import LoopProgress, progress_json, write_progress

    save(folder / "made", 4)
    for path in (folder / "made" / "checkpoint-4").iterdir():
        path.rename(folder / path.name)
    shutil.rmtree(folder / "made")
    shutil.rmtree(folder / "training_state")
    steps = [{"loss": np.float32(1), "pairs": np.ones(2, np.float32)} for _ in range(3)]
    arrays = {"mu": np.ones((4, 4), np.float32), "count": np.int32(3)}
    write_progress(folder, steps, {"optimizer": arrays}, progress_json(LoopProgress(), {"tokens_seen": 5}))
    (folder / "index").mkdir()
    save_file({"a": np.ones(3, np.float32)}, folder / "index" / "one.safetensors")
    index = {"metadata": {"total_size": 12}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (folder / "index" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "foreign").mkdir()
    shutil.copy(folder / "trainer_state.json", folder / "foreign")
    (folder / "foreign" / "optimizer.pt").write_bytes(b"")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "max_position_embeddings": 64, "pad_token_id": 0,
        "tie_word_embeddings": False, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    _build_adapter(folder)
    if find_spec("gguf") is not None:
        _build_gguf(folder / "model.gguf")


def _build_adapter(folder: Path) -> None:
    from safetensors.numpy import save_file

    from trl_jax.hub.peft_adapters import expected_shapes
    from trl_jax.hub.peft_config import LoraConfig

    given = LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 1}, use_dora=True,
        exclude_modules=["layers.1.v_proj"], layers_to_transform=[0, 1], layers_pattern="layers",
    )  # fmt: skip
    given.save_pretrained(folder)
    tensors = {name: np.ones(shape, np.float32) for name, shape in expected_shapes(*adapter_plan(folder)).items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def _build_gguf(path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_head_count(2)
    writer.add_rope_freq_base(1e4)
    writer.add_token_list(["a", "b", "c"])
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rows(dice: random.Random) -> None:
    """Prepare rows with one odd cell for one of the trainers."""
    from datasets import IterableDataset

    from compat_tests.tiny import preference_rows, tiny_tokenizer
    from trl_jax.tasks.dpo import DpoTask
    from trl_jax.tasks.kto import KtoTask
    from trl_jax.tasks.reward import RewardTask
    from trl_jax.tasks.sft import SftTask

    kind = dice.choice(["text", "prompt", "chat", "chat_prompt"])
    made = preference_rows(3, kind, margin=dice.random() < 0.3)
    made[dice.randrange(3)] = changed_json(made[0], dice)
    made = [row if isinstance(row, dict) else {"chosen": row} for row in made]
    task = dice.choice([RewardTask(), SftTask(), DpoTask(max_length=64), KtoTask(max_length=64)])
    if isinstance(task, SftTask):
        names = {"prompt": "prompt", "chosen": "completion"} if "prompt" in kind else {"chosen": "messages"}
        names = {"chosen": "text"} if kind == "text" else names
        made = [{names.get(name, name): value for name, value in row.items()} for row in made]
    if isinstance(task, KtoTask) and "prompt" in kind:
        names, label = {"chosen": "completion"}, dice.choice([True, False, 0, None, "x"])
        made = [{names.get(name, name): value for name, value in row.items() if name != "rejected"} for row in made]
        made = [{"label": label, **row} for row in made]
    stream = IterableDataset.from_generator(lambda: iter(made))
    limits = {"max_length": 64, "num_proc": None, "name": "train"}
    _ = list(task.prepare(stream, tiny_tokenizer(chat_template=True), **limits))


def fuzz(cases: int, seed: int) -> dict[str, dict[str, int]]:
    """reader -> how many cases it accepted and refused. AssertionError names the reader, the case and the content."""
    base, dice, told = Path(tempfile.mkdtemp()), random.Random(seed), {}
    build(base)
    watcher = Watcher(base)
    targets = readers(base)
    for name, (file, call) in targets.items():
        call() if name != "index" else None
        good = (base / file).read_bytes()
        told[name] = _run(name, cases // len(targets), dice, watcher, call, base / file, good)
        (base / file).write_bytes(good)
    shutil.rmtree(base)
    return told


def _run(name, cases, dice, watcher, call, path, good) -> dict[str, int]:
    counts = {"taken": 0, "refused": 0}
    for case in range(cases):
        content = changed(good, dice)
        path.write_bytes(content)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.alarm(SECONDS)
        watcher.on = True
        try:
            call()
            counts["taken"] += 1
        except READABLE as error:
            counts["refused"] += 1
            assert 0 < len(str(error)) < LONGEST, (name, case, str(error)[:LONGEST])
        except BaseException as error:
            raise AssertionError(f"{name}, case {case}: {error!r} for {content[:2000]!r}") from error
        finally:
            watcher.on = False
            signal.alarm(0)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert grown < BYTES, f"{name}, case {case}: {grown:,} bytes more for {content[:2000]!r}"
        assert not watcher.faults, f"{name}, case {case}: {watcher.faults} for {content[:2000]!r}"
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    told, dice, counts = fuzz(given.cases, given.seed), random.Random(given.seed), {"taken": 0, "refused": 0}
    for case in range(given.rows):
        try:
            rows(dice)
            counts["taken"] += 1
        except (ValueError, TypeError) as error:
            assert 0 < len(str(error)) < LONGEST, (case, str(error)[:LONGEST])
            counts["refused"] += 1
        except Exception as error:
            # A chat template may raise anything; a note then explains it.
            notes = " ".join(vars(error).get("__notes__", ()))
            assert "chat template" in notes, (case, error)
            counts["refused"] += 1
    print(json.dumps(told | {"rows": counts}))


if __name__ == "__main__":
    main()
