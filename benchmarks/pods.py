"""Run `trl-jax plan` for published model shapes on TPU slices, without having TPUs.

python -m benchmarks.pods                       # needs jax[tpu]; 2 to 4 minutes per row on two cores
python -m benchmarks.pods --rows 0 2 --length 2048
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIGS = {
    "Qwen3-0.6B": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-06,
        "tie_word_embeddings": True, "attention_bias": False,
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip
ROWS = (  # model, topology, mesh, pairs per chip
    ("Qwen3-0.6B", "v6e:1x1", "data:1", 8),
    ("Qwen3-0.6B", "v6e:2x2", "fsdp:4", 8),
    ("Qwen3-0.6B", "v6e:2x4", "fsdp:8", 8),
    ("Llama-3.1-8B", "v5e:4x4", "fsdp:16", 1),
    ("Llama-3.1-8B", "v6e:2x4", "fsdp:8", 2),
    ("Llama-3.1-8B", "v6e:2x4", "fsdp:4,tensor:2", 2),
    ("Qwen3-0.6B", "v6e:2x2", "fsdp:2,tensor:2", 8),
)
GIB = 2**30


def planned(model: str, topology: str, mesh: str, pairs: int, length: int, layout: str) -> dict:
    """The plan that the command writes, run in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[model]))
        flags = {
            "model_name_or_path": folder, "topology": topology, "mesh_shape": mesh, "max_length": length,
            "per_device_train_batch_size": pairs, "json": f"{folder}/plan.json", "suggestions": False,
            "remat_policy": "nothing_saveable", "batch_layout": layout,
        }  # fmt: skip
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        subprocess.run([sys.executable, "-m", "trl_jax.cli.main", "plan", *words], check=True, stdout=sys.stderr)
        plan = json.loads(Path(f"{folder}/plan.json").read_text())
        print(json.dumps(plan), file=sys.stderr)
        return plan


def row(model: str, topology: str, mesh: str, pairs: int, plan: dict) -> str:
    compiled = plan["compiled"]
    cost, bound = compiled["cost"] or {"collectives": [], "flops": 0}, plan["bound"] or {}
    sent = sum(collective["sent"] for collective in cost["collectives"])
    cells = [
        model, topology, mesh, f"{pairs} x {plan['one']['length']:,}",
        f"{(plan['memory']['parameters'] + plan['memory']['moments']) / GIB:.2f} GiB",
        f"{compiled['peak'] / GIB:.2f} GiB", "yes" if plan["fits"] else "no", f"{sent / GIB:.2f} GiB",
        f"{cost['flops'] / 1e12:.1f}", f"{1000 * max(bound.values(), default=0):.0f} ms",
        f"{compiled['seconds']:.0f} s",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)))
    parser.add_argument("--length", type=int, default=1024, help="tokens of each text")
    parser.add_argument("--layout", default="padded", help="batch_layout; 'auto' takes streams, which compile longer")
    options = parser.parse_args()
    print("| model | chips | mesh | pairs x tokens a chip | given | peak | fits | sent | TFLOP | at least | compiled |")
    for number in options.rows:
        print(row(*ROWS[number], planned(*ROWS[number], options.length, options.layout)), flush=True)


if __name__ == "__main__":
    main()
