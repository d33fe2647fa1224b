"""Writes quantized checkpoints of the published formats, and what their weights are in float32."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

Format = Literal["fp8", "int8", "packed"]
Tensors = dict[str, np.ndarray]
FILE = "model.safetensors"
LINEAR_LAYERS = re.compile(r"(_proj|\.in_proj_\w+|\bfc)$")
WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}


def make_section(form: Format, unquantized: list[str], block: tuple[int, int] = (128, 128)) -> dict[str, Any]:
    """Returns the `quantization_config` of a format."""
    if form == "fp8":
        facts = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
        return facts | ({"modules_to_not_convert": unquantized} if unquantized else {})
    activations = ACTIVATIONS if form == "int8" else None
    return {
        "quant_method": "compressed-tensors",
        "format": {"int8": "int-quantized", "packed": "pack-quantized"}[form],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": activations}},
        "ignore": unquantized,
    }


def store_fp8(name: str, weight: np.ndarray, block: tuple[int, int], dtype: Any = np.float32) -> Tensors:
    """Returns the tensors of a matrix in FP8 with a scale per block."""
    rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    scales = np.empty((rows, columns), np.float32)
    for row, column in np.ndindex(rows, columns):
        part = weight[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
        scales[row, column] = np.abs(part).max() / 448
    scales = scales.astype(dtype)
    values = (weight / spread(scales, block, weight.shape)).astype(ml_dtypes.float8_e4m3fn)
    return {f"{name}.weight": values, f"{name}.weight_scale_inv": scales}


def store_int8(name: str, weight: np.ndarray, dtype: Any = np.float32, flat: bool = False) -> Tensors:
    """Returns the tensors of a matrix in int8 with a scale per row. flat: scales [out] instead of [out, 1]."""
    scales = (np.abs(weight).max(axis=1, keepdims=True) / 127).astype(dtype)
    values = np.clip(np.rint(weight / scales.astype(np.float32)), -128, 127).astype(np.int8)
    return {f"{name}.weight": values, f"{name}.weight_scale": scales[:, 0] if flat else scales}


def pack(name: str, tensors: Tensors) -> Tensors:
    """Returns the tensors of an int8 matrix with four numbers in an int32: 128 is added, the first number is lowest."""
    values = tensors[f"{name}.weight"].astype(np.int64) + 128
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // 4)), np.int64)
    for column in range(columns):
        words[:, column // 4] |= values[:, column] << (8 * (column % 4))
    return {
        f"{name}.weight_packed": words.astype(np.uint32).view(np.int32),
        f"{name}.weight_shape": np.array([rows, columns], np.int64),
        f"{name}.weight_scale": tensors[f"{name}.weight_scale"],
    }


def spread(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """Returns a scale for each number of a matrix, float32."""
    whole = np.repeat(np.repeat(scales.astype(np.float32), block[0], axis=0), block[1], axis=1)
    return whole[: shape[0], : shape[1]]


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A quantized checkpoint on disk, its tensors, and those of a checkpoint in float32 with the same weights."""

    directory: Path
    stored: Tensors
    meant: Tensors


def quantize_checkpoint(
    source: Path, directory: Path, form: Format, unquantized: list[str], block: tuple[int, int] = (16, 24)
) -> QuantizedCheckpoint:
    """Copies a checkpoint, with its projections quantized but for the modules in `unquantized` (full names)."""
    shutil.copytree(source, directory)
    stored: Tensors = {}
    meant: Tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        (directory / file.name).unlink()
        for name, tensor in load_file(file).items():
            module = name.removesuffix(".weight")
            if not LINEAR_LAYERS.search(module) or module in unquantized:
                stored[name] = meant[name] = tensor
            elif form == "fp8":
                new = store_fp8(module, tensor, block)
                scales = spread(new[f"{module}.weight_scale_inv"], block, tensor.shape)
                meant[name] = new[name].astype(np.float32) * scales
                stored |= new
            else:
                new = store_int8(module, tensor, ml_dtypes.bfloat16)
                meant[name] = new[name].astype(np.float32) * new[f"{module}.weight_scale"].astype(np.float32)
                stored |= pack(module, new) if form == "packed" else new
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(stored, directory / FILE)
    set_section(directory, make_section(form, unquantized, block))
    return QuantizedCheckpoint(directory, stored, meant)


def set_section(directory: Path, section: Mapping[str, Any]) -> None:
    """Sets the `quantization_config` of a checkpoint's config."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, "quantization_config": section}))
