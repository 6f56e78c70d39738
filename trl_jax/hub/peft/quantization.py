"""Quantising the frozen weights of a model while they are read: which, and how, in bitsandbytes' formats."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from trl_jax.hub.peft.lora_config import LoraConfig
from trl_jax.hub.peft.modules import Module, modules_of
from trl_jax.hub.peft.targets import saved_whole, with_head
from trl_jax.nn.quantized import BLOCK, DYNAMIC, SCALES, TABLES, Format


@dataclass
class BitsAndBytesConfig:
    """transformers' fields and defaults that matter, without torch: weights of a frozen model in 4 or 8 bits.

    What is computed with is the run's own dtype, so `bnb_4bit_compute_dtype` and `bnb_4bit_quant_storage` say nothing;
    nor do llm_int8_threshold and its kin, for in 8 bits weights alone are quantised here.
    """

    load_in_8bit: bool = False
    load_in_4bit: bool = False
    llm_int8_threshold: float = 6.0
    llm_int8_skip_modules: list[str] | None = None
    llm_int8_enable_fp32_cpu_offload: bool = False
    llm_int8_has_fp16_weight: bool = False
    bnb_4bit_compute_dtype: Any = None
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: Any = None

    def __post_init__(self):
        if self.load_in_4bit == self.load_in_8bit:
            both = self.load_in_4bit
            raise ValueError(
                f"BitsAndBytesConfig: load_in_4bit and load_in_8bit are both {both}: say one of them, or pass no "
                "quantization_config."
            )
        if self.load_in_4bit and self.bnb_4bit_quant_type not in TABLES:
            raise ValueError(
                f"BitsAndBytesConfig: bnb_4bit_quant_type={self.bnb_4bit_quant_type!r}, wanted {' or '.join(TABLES)}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Its fields; transformers writes a configuration in `model_init_kwargs` so."""
        return asdict(self)

    def form(self, shape: tuple[int, int]) -> Format:
        if self.load_in_8bit:
            return Format("int8", shape)
        return Format(self.bnb_4bit_quant_type, shape, self.bnb_4bit_use_double_quant)


def as_quantization(given: Any) -> BitsAndBytesConfig:
    """Ours with the values of ours, of transformers', or of a dict of them.

    Raises:
        TypeError: it is of another kind of quantisation.
    """
    if isinstance(given, BitsAndBytesConfig):
        return given
    if not isinstance(given, dict) and type(given).__name__ != "BitsAndBytesConfig":
        raise TypeError(
            f"quantization_config is a {type(given).__qualname__}: wanted a BitsAndBytesConfig of trl_jax or "
            "transformers, with load_in_4bit or load_in_8bit."
        )
    values = given if isinstance(given, dict) else given.to_dict()
    known = {field.name for field in fields(BitsAndBytesConfig)}
    return BitsAndBytesConfig(**{key: value for key, value in values.items() if key in known})


def formats(config: BitsAndBytesConfig, lora: LoraConfig, family: Any, arch: Any) -> dict[str, Format]:
    """Path of a weight -> how it is held: all linear maps but the head, what trains whole, and what is skipped.

    Experts, which lie in one parameter for all, stay as they are.
    """
    modules = modules_of(family, arch)
    whole = {module.name for _, module, _ in saved_whole(with_head(lora, modules)[0], modules)}
    whole |= {draw.tensor.rpartition(".")[0] for draw in family.drawn(arch)}
    skipped = tuple(config.llm_int8_skip_modules or ())
    found = {}
    for module in modules:
        if module.kind in ("linear", "conv1d") and module.name not in whole and not _skips(skipped, module):
            found |= {f"{path}.weight": (module, part) for path, part in module.parts}
    return {path: config.form(_shape(module, part)) for path, (module, part) in found.items()}


def halves(lora: LoraConfig, family: Any, arch: Any) -> frozenset[str]:
    """Paths of matrices and tables that do not train: they may be held as bits where the checkpoint has sixteen."""
    modules = modules_of(family, arch)
    whole = {module.name for _, module, _ in saved_whole(with_head(lora, modules)[0], modules)}
    held = [module for module in modules if module.kind in ("linear", "conv1d", "embedding", "router")]
    found = {f"{path}.weight" for module in held if module.name not in whole for path, _ in module.parts}
    return frozenset(found | {path for module in modules for one in module.inside for path, _ in one.parts})


def _skips(skipped: tuple[str, ...], module: Module) -> bool:
    return any(module.name == name or module.name.endswith(f".{name}") for name in skipped)


def _shape(module: Module, part: Any) -> tuple[int, int]:
    if part is None:
        return module.outputs, module.inputs
    return part.rows(np.empty((module.outputs, 0))).shape[0], module.inputs


def quantized(values: np.ndarray, form: Format) -> dict[str, np.ndarray]:
    """The arrays of one matrix (out, in), as bitsandbytes rounds it."""
    values = np.asarray(values, np.float32)
    if form.kind == "int8":
        most = np.abs(values).max(axis=1)
        codes = np.rint(values * (127 / np.maximum(most, np.float32(1e-38)))[:, None])
        return {"codes": codes.astype(np.int8), "scales": most}
    table = TABLES[form.kind]
    order = np.argsort(table, kind="stable")
    nearest, scales = _blockwise(values.reshape(-1), table[order], BLOCK)
    codes = order.astype(np.uint8)[nearest]
    codes = np.pad(codes, (0, codes.size % 2))
    found = {"codes": codes[::2] << 4 | codes[1::2], "scales": scales}
    if form.nested:
        offset = scales.mean(dtype=np.float32)
        found["scales"], found["scale_scales"] = _blockwise(scales - offset, DYNAMIC, SCALES)
        found["offset"] = offset
    return {name: np.asarray(value, form.leaves()[name][1]) for name, value in found.items()}


def _blockwise(values: np.ndarray, table: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The nearest entry of a sorted table to each number over the largest of its block, and those."""
    padded = np.pad(values, (0, -values.size % block)).reshape(-1, block)
    most = np.abs(padded).max(axis=1)
    scaled = padded * (np.float32(1) / np.maximum(most, np.float32(1e-38)))[:, None]
    between = (table[:-1] + table[1:]) / np.float32(2)
    codes = np.searchsorted(between, np.clip(scaled, -1, 1).reshape(-1)[: values.size]).astype(np.uint8)
    return codes, most
