"""Reads how a checkpoint's weights are quantized, from the `quantization_config` of its `config.json`.

Three formats are supported: FP8 with block scales (`quant_method: "fp8"`), int8 per output channel of the
compressed-tensors library, and MXFP4 as in gpt-oss. Everything else is refused with the key, the value and what is
supported. Only weights matter here: activations stay in the bundle's dtype, also where the checkpoint suggests to
quantize them as well.
"""

import re
from collections.abc import Collection, Iterable
from typing import Any, Literal

import msgspec

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.config_file import TEXT_SECTION, ConfigFile
from dflash_aot.cache.model_config.tensor_names import (
    PATTERN_PREFIX,
    ModulePatterns,
    compile_patterns,
    name_fused,
    nest_name,
)

SECTION = "quantization_config"
OLD_SECTION = "compression_config"
MAX_BLOCK = 1 << 16
MAX_NAMES = 1 << 17  # modules in a list; Qwen3-235B-A22B has 36,000 linear layers
SUPPORTED = (
    "supported are 'fp8' with weight_block_size, 'mxfp4', "
    "and 'compressed-tensors' with symmetric int8 weights per channel"
)
# Methods that users are likely to try, with a name that they know.
UNSUPPORTED_METHODS = {
    "awq": "AWQ",
    "awq_marlin": "AWQ",
    "gptq": "GPTQ",
    "gptq_marlin": "GPTQ",
    "auto-round": "AutoRound",
    "bitsandbytes": "bitsandbytes",
    "mxfp8": "MXFP8",
    "modelopt": "ModelOpt (NVFP4 or FP8 per tensor)",
    "modelopt_fp4": "NVFP4",
    "fbgemm_fp8": "FP8 per row",
    "quark": "Quark",
    "torchao": "torchao",
    "hqq": "HQQ",
}
# Files in which other tools describe a quantized checkpoint whose config.json says nothing of it.
OTHER_FILES = {
    "hf_quant_config.json": "ModelOpt",
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
}
Encoding = Literal["fp8-blocks", "int8-channels", "int8-channels-packed", "mxfp4"]
MXFP4_BLOCK = (1, 32)  # numbers of an output that share an exponent
FORMATS: dict[str, Encoding] = {
    "int-quantized": "int8-channels",
    "naive-quantized": "int8-channels",
    "pack-quantized": "int8-channels-packed",
}
# The weights of bundles that hold the numbers of a checkpoint without rounding.
EXACT_WEIGHTS: dict[Encoding, tuple[str, ...]] = {
    "fp8-blocks": ("float32",),
    "int8-channels": ("float32", "int8"),
    "int8-channels-packed": ("float32", "int8"),
    "mxfp4": ("float32", "bfloat16"),
}
# Formats of compressed-tensors that users are likely to try.
UNSUPPORTED_FORMATS = {
    "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4",
    "mxfp8-quantized": "MXFP8",
    "float-quantized": "FP8 per channel or per tensor",
    "marlin-24": "Marlin with 2:4 sparsity",
    "mixed-precision": "a mixture of formats",
}
# Keys that say how the scales were found, or what nothing depends on.
FP8_NOTES = ("dequantize",)
COMPRESSED_NOTES = ("global_compression_ratio", "version", "run_compressed")
CALIBRATION_NOTES = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


class Quantization(msgspec.Struct, frozen=True):
    """How the linear layers of a checkpoint are stored.

    Attributes:
        encoding: "fp8-blocks" (e4m3fn numbers, a scale per block), "int8-channels" (a scale per
            output channel), "int8-channels-packed" (the same, four numbers in an int32), or "mxfp4"
            (e2m1 numbers, two in a byte, an exponent per block).
        unquantized: the modules that are stored as floats.
        block: rows and columns of a block, None for int8.
    """

    encoding: Encoding
    unquantized: ModulePatterns
    block: tuple[int, int] | None = None

    @property
    def exact(self) -> bool:
        """Whether a bundle with int8 weights holds the stored numbers and scales as they are."""
        return "int8" in EXACT_WEIGHTS[self.encoding]

    def find_quantized(self, modules: Iterable[str]) -> set[str]:
        """Returns the linear layers of a model that the list of unquantized modules does not name."""
        names = {module: {module, nest_name(module), name_fused(module)} for module in modules}
        unquantized = self.unquantized.select(set().union(*names.values()))
        return {module for module, spelled in names.items() if not spelled & unquantized}

    @property
    def title(self) -> str:
        """The format's name for messages."""
        if self.encoding == "mxfp4":
            return "MXFP4"
        if self.block:
            return f"FP8 with a scale per {self.block[0]} x {self.block[1]} block"
        return "int8 with a scale per output channel"


class WeightConversion(msgspec.Struct, frozen=True):
    """What a bundle makes of the linear layers of a quantized checkpoint.

    Attributes:
        stored: how they are stored.
        weights: what they become, "int8" with a scale per output channel, or a float dtype.
        exact: no number is rounded. (Layers that are stored as floats may be.)
        summary: the same, for people.
    """

    stored: Encoding
    weights: str
    exact: bool
    summary: str


def plan_conversion(
    quantization: Quantization, weights: str, dtype: str, unconverted: Collection[str]
) -> WeightConversion:
    """Returns what a bundle whose linear layers are `weights` makes of a checkpoint.

    unconverted: linear layers that have `dtype` in the bundle, also where the others are int8.
    """
    exact = weights in EXACT_WEIGHTS[quantization.encoding]
    action = f"are multiplied out to {weights}"
    if weights == "int8":
        action = "are kept" if quantization.exact else "become int8 with a scale per output channel"
    action += "" if exact else ", rounded"
    if weights == "int8" and (stored := quantization.find_quantized(unconverted)):
        rounded = dtype != "float32"
        exact = exact and not rounded
        names = " and ".join(sorted({module.rpartition(".")[2] for module in stored}))
        action += f"; those of {names} are multiplied out to {dtype}" + ", rounded" * rounded
    summary = f"weights stored as {quantization.title} {action}"
    return WeightConversion(quantization.encoding, weights, exact, summary)


def read_quantization(config: ConfigFile) -> Quantization | None:
    """Returns how the weights are quantized, None if they are not. Raises BadCheckpoint for unsupported formats.

    The section stands at the top, or among the text model's keys.
    """
    places = (
        [config, config.section(TEXT_SECTION)]
        if isinstance(config.values.get(TEXT_SECTION), dict)
        else [config]
    )
    found = [(place, key) for place in places for key in (SECTION, OLD_SECTION) if place.has(key)]
    if len(found) > 1:
        (first, key), (place, other) = found[:2]
        raise place.refusal(
            other, place.values[other], f"there is a {first.prefix}{key} too: which is meant?"
        )
    if not found:
        _refuse_other_files(config)
        return None
    place, key = found[0]
    place.require(key, dict)
    section = place.section(key)
    try:
        return _read_section(section)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{error}; {SUPPORTED}") from error


def _read_section(section: ConfigFile) -> Quantization:
    match method := section.require("quant_method", str):
        case "fp8":
            return _read_fp8(section)
        case "compressed-tensors":
            return _read_compressed(section)
        case "mxfp4":
            return _read_mxfp4(section)
    raise section.refusal(
        "quant_method", method, f"{UNSUPPORTED_METHODS.get(method, 'the method')} is not supported"
    )


def _refuse_other_files(config: ConfigFile) -> None:
    for file, tool in OTHER_FILES.items():
        if (path := config.path.parent / file).exists():
            raise BadCheckpoint(
                f"{path}: this checkpoint is quantized by {tool}, and {config.path.name} has no {SECTION}; {SUPPORTED}"
            )


def _read_fp8(section: ConfigFile) -> Quantization:
    lists = ("modules_to_not_convert", "ignored_layers")
    fixed = {
        "fmt": "e4m3",
        "scale_fmt": "float",
        "expert_dtype": "fp8",
        "activation_scheme": "dynamic",
    }
    # Qwen3.5's configs say that scales are not per tensor. `weight_block_size` says it too.
    empty = ("modules_to_convert", "kv_cache_scheme", "weight_per_tensor", "act_per_tensor")
    _check_keys(section, "quant_method", "weight_block_size", *lists, *fixed, *empty, *FP8_NOTES)
    for key, value in fixed.items():
        _expect(section, key, None, value)
    _expect_nothing(section, *empty)
    if not section.has("weight_block_size"):
        raise section.refusal(
            "weight_block_size", None, "FP8 with a scale per tensor is not supported"
        )
    block = section.optional_integers("weight_block_size") or ()
    if len(block) != 2 or not all(1 <= size <= MAX_BLOCK for size in block):
        raise section.refusal(
            "weight_block_size", list(block), f"expected two numbers of 1 to {MAX_BLOCK}"
        )
    given = [key for key in lists if section.has(key)]
    if len(given) == 2:
        raise section.refusal(
            lists[1], section.values[lists[1]], f"there is {lists[0]} too: which is meant?"
        )
    key = given[0] if given else lists[0]
    return Quantization(
        "fp8-blocks",
        compile_patterns(section, key, _read_names(section, key), parts=True),
        block[:2],
    )


def _read_mxfp4(section: ConfigFile) -> Quantization:
    key = "modules_to_not_convert"
    _check_keys(section, "quant_method", key)
    # "*" stands for the number of a layer.
    names = [
        PATTERN_PREFIX + re.escape(name).replace(r"\*", "[0-9]+")
        for name in _read_names(section, key)
    ]
    return Quantization("mxfp4", compile_patterns(section, key, names, parts=False), MXFP4_BLOCK)


def _read_compressed(section: ConfigFile) -> Quantization:
    """Reads compressed-tensors' `QuantizationConfig` with one group."""
    _refuse_other_formats(section)
    empty = ("kv_cache_scheme", "transform_config")
    _check_keys(
        section,
        *(
            "quant_method",
            "format",
            "config_groups",
            "quantization_status",
            "ignore",
            "sparsity_config",
        ),
        *(*empty, *COMPRESSED_NOTES),
    )
    _expect_nothing(section, *empty)
    _expect(section, "quantization_status", None, "compressed", "frozen")
    _expect(section.section("sparsity_config"), "format", None, "dense")
    groups = section.require("config_groups", dict)
    if len(groups) != 1:
        raise section.refusal("config_groups", groups, "expected one group")
    group = section.section("config_groups").section(next(iter(groups)))
    _check_keys(group, "targets", "weights", "input_activations", "output_activations", "format")
    if group.require("targets", list) != ["Linear"]:
        raise group.refusal("targets", group.values["targets"], "only ['Linear'] is supported")
    _expect_nothing(group, "output_activations")
    _check_weights(group)
    _check_activations(group)
    encoding = FORMATS[_expect(group if group.has("format") else section, "format", *FORMATS)]
    return Quantization(
        encoding, compile_patterns(section, "ignore", _read_names(section, "ignore"), parts=False)
    )


def _refuse_other_formats(section: ConfigFile) -> None:
    """Raises BadCheckpoint for a format that users know by name, before the keys that differ with it are read.

    The format of a group precedes that of the section.
    """
    groups = section.optional("config_groups", dict) or {}
    inner = [
        section.section("config_groups").section(name)
        for name in groups
        if isinstance(groups[name], dict)
    ]
    for place in [group for group in inner if group.has("format")] or [section]:
        form = place.values.get("format")
        if name := UNSUPPORTED_FORMATS.get(form) if isinstance(form, str) else None:
            raise place.refusal("format", form, f"{name} is not supported")


def _check_weights(group: ConfigFile) -> None:
    """Raises BadCheckpoint for anything but int8 per channel without zero points."""
    group.require("weights", dict)
    weights = group.section("weights")
    if weights.values.get("num_bits") == 4 and weights.values.get("type", "int") == "int":
        raise weights.refusal("num_bits", 4, "int4 (W4A16) is not supported")
    empty = ("block_structure",)
    _check_keys(
        weights,
        *("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder"),
        *(*empty, *CALIBRATION_NOTES),
    )
    _expect(weights, "type", "int")
    _expect(weights, "num_bits", 8)
    _expect(weights, "strategy", "channel")
    _expect(weights, "symmetric", None, True)
    _expect(weights, "group_size", None, -1)
    _expect(weights, "dynamic", None, False)
    # These change only how the numbers were found.
    _expect(weights, "actorder", None, False, "weight", "static")
    _expect_nothing(weights, *empty)


def _check_activations(group: ConfigFile) -> None:
    """Raises BadCheckpoint for static activations, whose scales are part of the checkpoint."""
    if not group.has("input_activations"):
        return
    activations = group.section("input_activations")
    empty = ("group_size", "block_structure", "actorder")
    _check_keys(
        activations,
        "num_bits",
        "type",
        "symmetric",
        "strategy",
        "dynamic",
        *empty,
        *CALIBRATION_NOTES,
    )
    _expect(activations, "dynamic", True)
    _expect(activations, "strategy", "token")
    _expect(activations, "type", "int")
    _expect(activations, "num_bits", 8)
    _expect(activations, "symmetric", None, True, False)
    _expect_nothing(activations, *empty)


def _check_keys(section: ConfigFile, *allowed: str) -> None:
    """Raises BadCheckpoint for a key that is set and not in `allowed`."""
    for key in section.values:
        if section.has(key) and key not in allowed:
            raise section.refusal(key, section.values[key], "this key is not supported")


def _expect(section: ConfigFile, key: str, *allowed: Any) -> Any:
    """Returns the value of a key. Raises BadCheckpoint unless it is one of `allowed`; None stands for an absent key."""
    value = section.values.get(key)
    if any(value == one and type(value) is type(one) for one in allowed):
        return value
    names = [repr(one) for one in allowed if one is not None]
    if value is None:
        raise BadCheckpoint(f"{section.where(key)} is missing; supported: {', '.join(names)}")
    raise section.refusal(key, value, f"supported: {', '.join(names)}")


def _expect_nothing(section: ConfigFile, *keys: str) -> None:
    """Raises BadCheckpoint for a key whose value is not null, false or empty."""
    for key in keys:
        if section.values.get(key):
            raise section.refusal(key, section.values[key], "not supported")


def _read_names(section: ConfigFile, key: str) -> list[str]:
    """Returns a list of module names, empty if the key is absent. Raises BadCheckpoint."""
    names = section.optional(key, list) or []
    if len(names) > MAX_NAMES:
        raise section.refusal(key, names, f"expected at most {MAX_NAMES} names")
    for name in names:
        if not isinstance(name, str) or not name:
            raise section.refusal(key, name, "expected names of modules")
    return names
