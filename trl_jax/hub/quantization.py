"""Quantize frozen weights while they are read, in bitsandbytes' formats."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from trl_jax.config.rules import read_bools
from trl_jax.hub.config import NativeConfig
from trl_jax.hub.heads import HeadName
from trl_jax.hub.modules import Module, modules_of
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.hub.peft_targets import fully_trained, is_lm_head, token_tables, with_peft_head
from trl_jax.nn.linear import DYNAMIC, QUANTIZED_BLOCK, SCALES, TABLES, Format

_MATRICES = ("linear", "conv1d", "embedding", "router")


@dataclass
class BitsAndBytesConfig:
    """The relevant fields and defaults of transformers' config, without torch: frozen weights in 4 or 8 bits.

    Computation uses the dtype of the run, so `bnb_4bit_compute_dtype` and `bnb_4bit_quant_storage` have no effect. Nor
    do llm_int8_threshold and related fields, because only weights are quantized in 8 bits.
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
        read_bools(self)
        if self.load_in_4bit == self.load_in_8bit:
            both = self.load_in_4bit
            raise ValueError(
                f"BitsAndBytesConfig: load_in_4bit and load_in_8bit are both {both}. Set exactly one of them, or pass "
                "no quantization_config."
            )
        if self.load_in_4bit and self.bnb_4bit_quant_type not in TABLES:
            raise ValueError(
                f"BitsAndBytesConfig: bnb_4bit_quant_type must be {' or '.join(TABLES)}, got "
                f"{self.bnb_4bit_quant_type!r}."
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields; transformers calls this to serialize `model_init_kwargs`."""
        return asdict(self)

    def form(self, shape: tuple[int, int]) -> Format:
        if self.load_in_8bit:
            return Format("int8", shape)
        return Format(self.bnb_4bit_quant_type, shape, self.bnb_4bit_use_double_quant)


def as_quantization(config: Any) -> BitsAndBytesConfig | None:
    """Convert a config of our class, of transformers' or a dict to our class. Returns None for transformers'
    `Mxfp4Config` with `dequantize=True`, because MXFP4 checkpoints are always dequantized.

    Raises:
        TypeError: the config is for another kind of quantization.
        ValueError: `Mxfp4Config` without `dequantize`.
    """
    if isinstance(config, BitsAndBytesConfig):
        return config
    if type(config).__name__ == "Mxfp4Config":
        if not config.dequantize:
            raise ValueError("quantization_config=Mxfp4Config(dequantize=False): training requires dequantize=True.")
        return None
    if not isinstance(config, dict) and type(config).__name__ != "BitsAndBytesConfig":
        raise TypeError(
            "quantization_config must be a BitsAndBytesConfig of trl_jax or transformers with load_in_4bit or "
            f"load_in_8bit, or an Mxfp4Config with dequantize, got a {type(config).__qualname__}."
        )
    values = config if isinstance(config, dict) else config.to_dict()
    names = {field.name for field in fields(BitsAndBytesConfig)}
    return BitsAndBytesConfig(**{key: value for key, value in values.items() if key in names})


def formats(quantization: BitsAndBytesConfig, lora: LoraConfig | None, config: NativeConfig) -> dict[str, Format]:
    """Path of a weight -> its quantized format.

    These are all linear layers except for the head, layers that the config skips, and layers that are missing in the
    checkpoint or trained along with an adapter. Experts, which share a parameter, are not quantized.
    """
    modules = modules_of(config)
    drawn = {draw.tensor.rpartition(".")[0] for draw in config.draws()}
    whole = drawn if lora is None else _trained_names(lora, modules, config.head.kind) | drawn
    skipped = tuple(quantization.llm_int8_skip_modules or ())
    weights = {}
    for module in modules:
        plain = module.kind in ("linear", "conv1d") and not is_lm_head(module)
        if plain and module.name not in whole and not _skips(skipped, module):
            weights |= {f"{path}.weight": (module, rows) for path, rows in module.parts}
    return {path: quantization.form(_shape(module, rows)) for path, (module, rows) in weights.items()}


def halves(lora: LoraConfig | None, config: NativeConfig) -> frozenset[str]:
    """Paths of the matrices and embeddings that `lora` does not train (all if it is None). If the checkpoint has 16-bit
    weights, they may be stored as raw bits."""
    modules = modules_of(config)
    trained = set() if lora is None else _trained_names(lora, modules, config.head.kind)
    frozen = [module for module in modules if module.kind in _MATRICES and module.name not in trained]
    paths = {f"{path}.weight" for module in frozen for path, _ in module.parts}
    return frozenset(paths | {path for module in modules for inner in module.inside for path, _ in inner.parts})


def _trained_names(lora: LoraConfig, modules: list[Module], kind: HeadName) -> set[str]:
    """The modules whose own weights are trained, fully or in some rows."""
    lora, _ = with_peft_head(lora, modules, kind)
    tables = {module.name for module, _ in token_tables(lora, modules)}
    return tables | {module.name for _, module, _ in fully_trained(lora, modules)}


def _skips(skipped: tuple[str, ...], module: Module) -> bool:
    return any(module.name == name or module.name.endswith(f".{name}") for name in skipped)


def _shape(module: Module, rows: Any) -> tuple[int, int]:
    if rows is None:
        return module.outputs, module.inputs
    return len(rows.rows(np.empty((module.outputs, 1)))), module.inputs


def quantized(values: np.ndarray, form: Format) -> dict[str, np.ndarray]:
    """The arrays for one matrix (out, in), rounded as in bitsandbytes."""
    values = np.asarray(values, np.float32)
    if form.kind == "int8":
        scales = np.abs(values).max(axis=1)
        codes = np.rint(values * (127 / np.maximum(scales, np.float32(1e-38)))[:, None])
        return {"codes": codes.astype(np.int8), "scales": scales}
    table = TABLES[form.kind]
    order = np.argsort(table, kind="stable")
    nearest, scales = _blockwise(values.reshape(-1), table[order], QUANTIZED_BLOCK)
    codes = order.astype(np.uint8)[nearest]
    codes = np.pad(codes, (0, codes.size % 2))
    arrays = {"codes": codes[::2] << 4 | codes[1::2], "scales": scales}
    if form.nested:
        offset = scales.mean(dtype=np.float32)
        arrays["scales"], arrays["scale_scales"] = _blockwise(scales - offset, DYNAMIC, SCALES)
        arrays["offset"] = offset
    return {name: np.asarray(value, form.leaves()[name][1]) for name, value in arrays.items()}


def _blockwise(values: np.ndarray, table: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide each number by the maximum of its block, and return the indices of the nearest entries of the sorted
    `table`, and the maxima."""
    padded = np.pad(values, (0, -values.size % block)).reshape(-1, block)
    largest = np.abs(padded).max(axis=1)
    scaled = padded * (np.float32(1) / np.maximum(largest, np.float32(1e-38)))[:, None]
    between = (table[:-1] + table[1:]) / np.float32(2)
    codes = np.searchsorted(between, np.clip(scaled, -1, 1).reshape(-1)[: values.size]).astype(np.uint8)
    return codes, largest
