"""Compare runs on this machine's accelerator with the same runs on its CPU, which match TRL.

In each case a small model is trained for some steps, in float32 and bfloat16 and in each layout. Reports the largest
differences of logged numbers and final weights.
"""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path
from typing import Any

from benchmarks import common

CASES = {
    "Reward": {},
    "SFT": {"max_length": 64},
    "SFT packed": {"max_length": 64, "packing": True},
    "DPO": {"max_length": 64},
    "KTO": {"max_length": 64},
    "SFT LoRA": {"max_length": 64},
}
LAYOUTS = ("padded", "packed", "shared")


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    options.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--model_type", default="llama")
    args = options.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in args.cases:
            for kind in ("float32", "bfloat16"):
                rows += _apart(case, kind, args, Path(scratch))
                common.show(rows)
    common.write_json(args.json, {"options": vars(args), "rows": rows})


def _apart(case: str, kind: str, args: Any, scratch: Path) -> list[dict[str, Any]]:
    """Compare the accelerator's run in each layout with the CPU's run in the first layout."""
    from compat_tests import tiny

    trainer, head = case.split()[0], "classifier" if case == "Reward" else "causal"
    folder = scratch / head
    if not folder.exists():
        tiny.tiny_model(folder, args.model_type, head=head, num_hidden_layers=2)
    base = _run(trainer, case, folder, scratch, args.steps, kind, LAYOUTS[0], use_cpu=True)
    rows = []
    for layout in args.layouts:
        name = {"case": case, "kind": kind, "layout": layout}
        try:
            run = _run(trainer, case, folder, scratch, args.steps, kind, layout, use_cpu=False)
            rows.append(name | _gaps(run, base))
        except Exception as error:
            traceback.print_exc()
            unknown = dict.fromkeys(("loss", "grad_norm", "weights"), float("nan"))
            rows.append(name | unknown | {"failed": f"{type(error).__name__}: {error}"[:200]})
    return rows


def _run(trainer, case, folder, scratch, steps, kind, layout, *, use_cpu):
    from compat_tests import tiny
    from compat_tests.parity import kto_cases, reference

    rows = {
        "Reward": lambda: tiny.preference_rows(60),
        "SFT": lambda: tiny.text_rows(60, kind="prompt"),
        "DPO": lambda: tiny.preference_rows(60, kind="prompt"),
        "KTO": lambda: kto_cases.kto_rows(60),
    }[trainer]()
    more = {}
    if "LoRA" in case:
        import trl_jax

        more["peft_config"] = trl_jax.get_peft_config(trl_jax.ModelConfig(use_peft=True, lora_r=4))
    config = CASES[case] | {"use_cpu": use_cpu, "bf16": kind == "bfloat16", "max_steps": steps, "batch_layout": layout}
    out = Path(tempfile.mkdtemp(dir=scratch))
    return reference.run_ours(folder, rows, out, trainer=trainer, pad_to_multiple_of=None, **config, **more)


def _gaps(run, base) -> dict[str, Any]:
    from compat_tests.parity import marks

    worst = marks.worst(run.logs, base.logs)
    weights = max(float(abs(run.weights[name] - array).max()) for name, array in base.weights.items())
    return {"loss": worst["loss"], "grad_norm": worst["grad_norm"], "weights": weights, "failed": ""}


if __name__ == "__main__":
    main()
