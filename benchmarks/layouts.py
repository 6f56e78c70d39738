"""Compare a step's loss and gradients in the packed and shared layouts with the padded one, for all native decoders."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import common


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--families", nargs="*", help="unset, all of them")
    options.add_argument("--dtype", default="float32", help="what layers compute in")
    args = options.parse_args()
    common.prepare(args.cpus)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        from compat_tests.models.test_layouts import CASES

        for family, name in CASES:
            if args.families and family not in args.families:
                continue
            rows.append(measured(Path(folder) / f"{family}-{name}", family, name, args.dtype))
            print(*rows[-1].values(), flush=True)
    common.show(rows)
    worst = {key: max(row[key] for row in rows) for key in list(rows[0])[1:]}
    common.show([{"worst of": len(rows), **worst}])
    common.write_json(args.json, rows)


def measured(folder: Path, family: str, name: str, dtype: str) -> dict:
    """Relative gaps of a variant: of the loss, and of gradients relative to the largest element of each tensor."""
    from compat_tests.models import variants
    from compat_tests.models.test_layouts import PACKED, apart
    from trl_jax.hub.auto import AutoModelForSequenceClassification

    folder.mkdir()
    model = AutoModelForSequenceClassification.from_pretrained(variants.build(folder, family, name))
    row = {"variant": f"{family} {name}"}
    for layout, (loss, gradient) in zip(PACKED, apart(model, dtype=dtype), strict=True):
        row |= {f"{layout} loss": float(loss), f"{layout} gradient": float(gradient)}
    return row


if __name__ == "__main__":
    main()
