"""Quantized checkpoints: reads FP8, int8 with channel scales and MXFP4 as float32, or int8 as it is.

A quantized matrix is several tensors, such as `q_proj.weight` and `q_proj.weight_scale_inv`. They appear as one tensor,
named as in a checkpoint that is not quantized.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.files.checkpoint_files import CONFIG_FILE
from dflash_aot.cache.model_config.architecture import GatedDeltaNet
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.quantization import Quantization, read_quantization
from dflash_aot.cache.model_config.target import FUSED_HYBRID, read_target
from dflash_aot.cache.model_config.tensor_names import (
    WEIGHT,
    is_ignored,
    is_linear_layer,
    names_any,
)
from dflash_aot.cache.weight_recipe import CheckpointRole, Placement, WeightRecipe
from dflash_aot.runtime.weights.safetensors_reader import (
    FLOATS,
    FP8,
    FUSED_BLOCKS,
    FUSED_EXPERTS,
    FUSED_EXPONENTS,
    FUSED_SCALES,
    INTEGERS,
    CheckpointTensors,
    StoredTensor,
    TensorSlice,
    cover_tensor,
    find_magnitudes,
    find_stored_slice,
    shift_slice,
    slice_shape,
    to_numpy_slices,
)

# -- int8 weights: quantized while they are read, with a float32 scale for each row, symmetric, rounded half to even
#
# A row is an output channel. Its scale is the largest magnitude over 127, so a row's integers depend on the row alone.
# A checkpoint that is quantized like this keeps its own integers and scales.

LARGEST = np.float32(127)
# A smaller scale would be subnormal, which devices may flush to zero: such a row becomes zeros.
SMALLEST_SCALE = np.finfo(np.float32).tiny


def find_scales(magnitudes: np.ndarray) -> np.ndarray:
    """Returns the scales of rows by their largest magnitudes: finite float32 [n] → float32 [n]. Zeros have scale 0."""
    scales = magnitudes / LARGEST
    return np.where(scales < SMALLEST_SCALE, np.float32(0), scales)


def quantize_rows(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the integers nearest to rows over scales, ties to even: float32 [n, m], float32 [n] → int8 [n, m].

    `rows` may be a part of the columns, and is overwritten. A row whose scale is 0 becomes zeros.
    """
    np.divide(rows, np.where(scales > 0, scales, np.float32(np.inf))[:, None], out=rows)
    return np.rint(rows, out=rows).astype(np.int8)


class Int8Weight:
    """The integers of a weight, read slice by slice, and the scales of all rows.

    Attributes:
        scales: float32 [*out]; those of rows that are not read yet are undefined.
    """

    def __init__(self, recipe: WeightRecipe, tensors: CheckpointTensors, scales: np.ndarray):
        """`recipe` is that of the integers, `scales` an array for their scales."""
        self._tensors = tensors
        self.scales = scales
        # A scale belongs to a whole row: if devices split the rows, scales are found before any integer.
        self.splits_rows = any(recipe.sharding[-1:])

    def find_scales(self, placement: Placement, piece: TensorSlice) -> None:
        """Sets the scales of a piece of whole rows, in coordinates of the argument. Raises BadCheckpoint."""
        if not self._is_quantized(placement):
            self._set_scales(piece, find_scales(self._read_rows(placement, piece)[1]))

    def read(self, placement: Placement, piece: TensorSlice) -> np.ndarray:
        """Returns the integers of a piece of the argument, and sets the scales of its rows. Raises BadCheckpoint."""
        if self._is_quantized(placement):
            return self._read_quantized(placement, piece)
        rows, magnitudes = self._read_rows(placement, piece)
        if not self.splits_rows:
            self._set_scales(piece, find_scales(magnitudes))
        scales = self.scales[to_numpy_slices(piece[:-1])].reshape(-1)
        return quantize_rows(rows.astype(np.float32), scales).reshape(slice_shape(piece))

    def _is_quantized(self, placement: Placement) -> bool:
        return isinstance(self._tensors, QuantizedTensors) and self._tensors.reads_integers(
            placement.tensor
        )

    def _read_quantized(self, placement: Placement, piece: TensorSlice) -> np.ndarray:
        assert isinstance(self._tensors, QuantizedTensors)
        stored = find_stored_slice(placement, shift_slice(piece, placement.offset))
        self._set_scales(
            piece, self._tensors.read_scales(placement.tensor, placement.stored, stored[0])
        )
        integers = self._tensors.read_integers(placement.tensor, placement.stored, stored)
        return integers.reshape(slice_shape(piece))

    def _read_rows(self, placement: Placement, piece: TensorSlice) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows of a piece as floats [n, m], and their largest magnitudes [n]."""
        stored = find_stored_slice(placement, shift_slice(piece, placement.offset))
        return self._tensors.read_rows(placement.tensor, placement.stored, stored)

    def _set_scales(self, piece: TensorSlice, scales: np.ndarray) -> None:
        rows = piece[:-1]
        self.scales[to_numpy_slices(rows)] = scales.reshape(slice_shape(rows))


# -- quantized checkpoints

PACKED = ".weight_packed"
PACKED_SHAPE = ".weight_shape"
SCALES = {
    "fp8-blocks": ".weight_scale_inv",
    "int8-channels": ".weight_scale",
    "int8-channels-packed": ".weight_scale",
    "mxfp4": ".weight_scales",
}
VALUES = {"fp8-blocks": FP8, "int8-channels": "I8", "int8-channels-packed": "I32", "mxfp4": "U8"}
# The end of the name of the tensor with the numbers, where it is not WEIGHT.
NUMBERS = {"int8-channels-packed": PACKED, "mxfp4": ".weight_blocks"}
E2M1_NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E8M0_BIAS = 127
E8M0_NAN = 255
FP8_NUMBERS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
FP8_MAX = 448.0
NUMBERS_PER_WORD = 4  # of packed int8


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [out, in] of a quantized checkpoint.

    Attributes:
        values: name of the tensor with the numbers.
        scales: name of the tensor with the scales.
        shape: out and in.
        scale_shape: of the stored scales.
        block: outputs and inputs that share a scale.
    """

    values: str
    scales: str
    shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    block: tuple[int, int]


def open_checkpoint(
    directory: Path, role: CheckpointRole, interleaved: bool = False
) -> CheckpointTensors:
    """Opens the tensors of a checkpoint directory, quantized or not; `interleaved`: see `WeightRecipe`.

    Raises BadCheckpoint.
    """
    quantization = delta = None
    if (directory / CONFIG_FILE).exists():
        config = read_config(directory)
        quantization = read_quantization(config)
        if FUSED_HYBRID in (config.optional("architectures", list) or ()):
            delta = read_target(config).recurrent
    if quantization is None:
        return CheckpointTensors(directory, interleaved, delta)
    return QuantizedTensors(directory, quantization, role, interleaved, delta)


class QuantizedTensors(CheckpointTensors):
    """The tensors of a quantized checkpoint directory. Those of ignored modules appear as they are stored."""

    def __init__(
        self,
        directory: Path,
        quantization: Quantization,
        role: CheckpointRole,
        interleaved: bool = False,
        delta: GatedDeltaNet | None = None,
    ):
        """Raises BadCheckpoint as `CheckpointTensors`, and for tensors that contradict each other or the config."""
        super().__init__(directory, interleaved, delta)
        self._quantization = quantization
        self._role = role
        self._check_experts(interleaved)
        self._matrices: dict[str, QuantizedMatrix] = dict(self._find_matrices())
        self._hidden = {matrix.scales for matrix in self._matrices.values()}
        self._hidden |= {matrix.values for matrix in self._matrices.values()}
        if quantization.encoding == "int8-channels-packed":
            self._hidden |= {
                matrix.values.removesuffix(PACKED) + PACKED_SHAPE
                for matrix in self._matrices.values()
            }

    def names(self) -> set[str]:
        """Names of all tensors; a quantized matrix has the name of its weight."""
        return (super().names() - self._hidden) | self._matrices.keys()

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str],
        part: TensorSlice | None = None,
    ) -> np.ndarray:
        """Returns a tensor as `CheckpointTensors.read` does, a quantized matrix in float32.

        Raises BadCheckpoint, also for NaN among the numbers, and for scales that are negative, not finite, or zero
        where numbers are not.
        """
        if name not in self._matrices:
            return super().read(name, shape, dtypes, part)
        matrix = self._check_shape(name, shape)
        part = cover_tensor(shape) if part is None else part
        integers = self._read_numbers(matrix, part)
        numbers = (
            _decode_fp8(integers) if integers.dtype == np.uint8 else integers.astype(np.float32)
        )
        return self._scale(matrix, numbers, part)

    def read_rows(
        self, name: str, shape: tuple[int, ...], part: TensorSlice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows and magnitudes as `CheckpointTensors.read_rows` does, those of a quantized matrix in float32."""
        if name not in self._matrices:
            return super().read_rows(name, shape, part)
        rows = self.read(name, shape, FLOATS, part)
        return rows, find_magnitudes(rows)

    def reads_integers(self, name: str) -> bool:
        """Whether a tensor is int8 with a scale per output channel, which `read_integers` and `read_scales` return."""
        return name in self._matrices and self._quantization.exact

    def read_integers(self, name: str, shape: tuple[int, ...], part: TensorSlice) -> np.ndarray:
        """Returns the int8 numbers of a slice [out, in]. Raises BadCheckpoint."""
        matrix = self._check_shape(name, shape)
        return self._read_numbers(matrix, part)

    def read_scales(self, name: str, shape: tuple[int, ...], rows: tuple[int, int]) -> np.ndarray:
        """Returns the float32 scales of a range of output channels of an int8 matrix. Raises BadCheckpoint."""
        matrix = self._check_shape(name, shape)
        scales = self._read_scales(matrix, (rows, (0, 1)))[:, 0]
        if not scales.all():
            whole = (rows, (0, shape[1]))
            self._check_zeros(matrix, scales[:, None], self._read_numbers(matrix, whole), whole)
        return scales

    def _find_matrices(self) -> Iterator[tuple[str, QuantizedMatrix]]:
        """Yields the quantized matrices. Raises BadCheckpoint."""
        names = super().names()
        quantization = self._quantization
        suffix = NUMBERS.get(quantization.encoding, WEIGHT)
        endings = {WEIGHT, suffix, SCALES[quantization.encoding]}
        modules = {
            name.removesuffix(ending)
            for name in names
            for ending in endings
            if name.endswith(ending)
        }
        unquantized = self._select_unquantized(modules)
        for module in sorted(module for module in modules if not is_ignored(module, self._role)):
            values = module + suffix
            scales = module + SCALES[quantization.encoding]
            is_quantized = scales in names or (suffix != WEIGHT and values in names)
            if module in unquantized and is_quantized:
                found = scales if scales in names else values
                raise BadCheckpoint(
                    f"{self.file(found)}: {found} is there, but {quantization.unquantized.key} says that {module} is "
                    "not quantized"
                )
            if module not in unquantized and not is_quantized and is_linear_layer(module):
                self._refuse_plain(module, values, scales)
            if is_quantized:
                yield module + WEIGHT, self._describe(values, scales)

    def _select_unquantized(self, modules: set[str]) -> frozenset[str]:
        """Returns the modules that the config's list names. Raises BadCheckpoint if it names none of the model."""
        listed = self._quantization.unquantized
        stored = {module: self._name_stored(module) for module in modules}
        if not names_any(listed, {*modules, *stored.values()}, self._role):
            raise BadCheckpoint(f"{listed.key} names no module of this checkpoint")
        chosen = listed.select({*modules, *stored.values()})
        return frozenset(module for module in modules if chosen & {module, stored[module]})

    def _name_stored(self, module: str) -> str:
        """The name of the module that the config's list may name instead: that of a tensor with several modules."""
        found = self._stored.get(module + WEIGHT)
        return (found and found.whole or module).removesuffix(WEIGHT)

    def _refuse_plain(self, module: str, values: str, scales: str) -> None:
        """Raises BadCheckpoint: a layer that should be quantized has no scales."""
        expected = VALUES[self._quantization.encoding]
        if values in self._files:
            found = self.dtype(values)
            scales = self._name_scales(values, scales)
            if found == expected:
                raise BadCheckpoint(
                    f"{self.file(values)}: {self.title(values)} is {found}, but {scales} is missing"
                )
            raise BadCheckpoint(
                f"{self.file(values)}: {self.title(values)} is {found}, but by {self._quantization.unquantized.key} "
                f"{module} is quantized: expected {expected} and {scales}"
            )
        plain = module + WEIGHT
        raise BadCheckpoint(
            f"{self.file(plain)}: {plain} is {self.dtype(plain)}, but by {self._quantization.unquantized.key} {module} "
            f"is quantized: expected {values} ({expected}) and {scales}"
        )

    def _name_scales(self, values: str, scales: str) -> str:
        """The name of the tensor whose scales are missing."""
        whole = self._stored[values].whole
        if whole is None or whole.endswith(WEIGHT):
            return scales
        return whole + SCALES[self._quantization.encoding].removeprefix(WEIGHT)

    def _check_experts(self, interleaved: bool) -> None:
        """Raises BadCheckpoint for a tensor of all experts of a layer in an unsupported form, or with other scales."""
        for name, experts in self._split.items():
            if is_ignored(name, self._role):
                continue
            if name.endswith(FUSED_BLOCKS):
                scales = name.removesuffix(FUSED_BLOCKS) + FUSED_EXPONENTS
                expected = experts.shape[:-1]
            elif name.rpartition(".")[2] in FUSED_EXPERTS and experts.dtype not in FLOATS:
                scales = name + FUSED_SCALES
                expected = self._find_scale_shape(name, experts, interleaved)
            else:
                continue
            found = self._split.get(scales) or self._stored.get(scales)
            if found and found.shape != expected:
                raise BadCheckpoint(
                    f"{found.file.path}: {scales} is {list(found.shape)}, but {name} is {list(experts.shape)}: "
                    f"expected {list(expected)}. Download or convert the checkpoint again"
                )

    def _find_scale_shape(
        self, name: str, experts: StoredTensor, interleaved: bool
    ) -> tuple[int, ...]:
        """Returns the shape of the scales of a tensor of all experts. Raises BadCheckpoint for unsupported tensors."""
        block = self._quantization.block
        place = f"{experts.file.path}: {name}"
        if interleaved or block is None or experts.dtype != FP8:
            form = "MXFP4 in gpt-oss's layout" if interleaved else "FP8 with a scale per block"
            raise BadCheckpoint(
                f"{place} is {experts.dtype}: experts in one tensor are supported in {form} and as floats. Take a "
                "checkpoint with such experts"
            )
        count, rows, columns = experts.shape
        outputs = rows // len(FUSED_EXPERTS[name.rpartition(".")[2]])
        if outputs != rows and outputs % block[0]:
            raise BadCheckpoint(
                f"{place} has blocks of {block[0]} rows, and the gate of an expert has {outputs} rows: a block with "
                "rows of gate and up is not supported"
            )
        return count, -(-rows // block[0]), -(-columns // block[1])

    def _describe(self, values: str, scales: str) -> QuantizedMatrix:
        """Finds a matrix by its tensors. Raises BadCheckpoint if a tensor is missing or has another shape or dtype."""
        quantization = self._quantization
        for name, other in ((values, scales), (scales, values)):
            if name not in self._files:
                raise BadCheckpoint(
                    f"{self.file(other)}: {self.title(other)} is there, but {name} is missing"
                )
        if (found := self.dtype(values)) != (expected := VALUES[quantization.encoding]):
            raise BadCheckpoint(
                f"{self.file(values)}: {values} is {found}, but has {scales}: expected {expected}"
            )
        allowed_types = ("U8",) if quantization.encoding == "mxfp4" else FLOATS
        if (found := self.dtype(scales)) not in allowed_types:
            raise BadCheckpoint(
                f"{self.file(scales)}: {scales} is {found}, expected one of {', '.join(allowed_types)}"
            )
        stored = self.shape(values)
        if len(stored) != 2:
            raise BadCheckpoint(
                f"{self.file(values)}: {values} is {list(stored)}, expected a matrix"
            )
        shape = self._read_packed_shape(values, stored) if values.endswith(PACKED) else stored
        if quantization.encoding == "mxfp4":
            shape = (stored[0], 2 * stored[1])
        block = quantization.block or (1, shape[1])
        grid = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
        allowed = [grid] if quantization.block else [grid, grid[:1]]
        if (found_shape := self.shape(scales)) not in allowed:
            raise BadCheckpoint(
                f"{self.file(scales)}: {scales} is {list(found_shape)}, but {values} is {list(stored)}: expected "
                f"{' or '.join(str(list(one)) for one in allowed)}"
            )
        return QuantizedMatrix(values, scales, shape, found_shape, block)

    def _read_packed_shape(self, values: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a packed matrix: 4 numbers in an int32, and the last may be filled up."""
        name = values.removesuffix(PACKED) + PACKED_SHAPE
        if name not in self._files:
            raise BadCheckpoint(f"{self.file(values)}: {values} is there, but {name} is missing")
        shape = tuple(int(size) for size in super().read(name, (2,), INTEGERS))
        if shape[0] != stored[0] or -(-shape[1] // NUMBERS_PER_WORD) != stored[1]:
            raise BadCheckpoint(
                f"{self.file(name)}: {name} is {list(shape)}, but {values} is {list(stored)}"
            )
        return shape

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> QuantizedMatrix:
        matrix = self._matrices[name]
        if matrix.shape != shape:
            raise BadCheckpoint(
                f"{self.file(matrix.values)}: {name} is {list(matrix.shape)}, but its config.json implies {list(shape)}"
            )
        return matrix

    def _read_numbers(self, matrix: QuantizedMatrix, part: TensorSlice) -> np.ndarray:
        """Returns the stored numbers of a slice: uint8 with FP8's bits, int8, or MXFP4's as float32.

        Raises BadCheckpoint for NaN.
        """
        if self._quantization.encoding == "int8-channels-packed":
            rows, (start, stop) = part
            words = (start // NUMBERS_PER_WORD, -(-stop // NUMBERS_PER_WORD))
            packed = super().read(matrix.values, self.shape(matrix.values), ("I32",), (rows, words))
            octets = np.ascontiguousarray(packed, "<i4").view(np.uint8)[
                :, start % NUMBERS_PER_WORD :
            ][:, : stop - start]
            return (octets ^ 0x80).view(np.int8)  # stored with 128 added
        if self._quantization.encoding == "mxfp4":
            octets = super().read(
                matrix.values,
                self.shape(matrix.values),
                ("U8",),
                (part[0], (part[1][0] // 2, -(-part[1][1] // 2))),
            )
            return _decode_e2m1(octets)[:, part[1][0] % 2 :][:, : part[1][1] - part[1][0]]
        if self._quantization.encoding == "int8-channels":
            return super().read(matrix.values, matrix.shape, ("I8",), part)
        octets = super().read(matrix.values, matrix.shape, (FP8,), part)
        if np.any((octets & 0x7F) == 0x7F):
            raise BadCheckpoint(
                f"{self.file(matrix.values)}: {matrix.values} holds NaN: the file is damaged"
            )
        return octets

    def _read_scales(self, matrix: QuantizedMatrix, part: TensorSlice) -> np.ndarray:
        """Returns a slice [blocks of outputs, blocks of inputs] of the scales, float32.

        Raises BadCheckpoint for scales that are negative, infinite or NaN, and for products that float32 cannot hold.
        """
        rows_and_columns = part[: len(matrix.scale_shape)]
        if self._quantization.encoding == "mxfp4":
            octets = super().read(matrix.scales, matrix.scale_shape, ("U8",), rows_and_columns)
            exponents = octets.astype(np.int32) - E8M0_BIAS
            valid = octets != E8M0_NAN
            stored = np.where(valid, np.ldexp(np.float32(1), np.where(valid, exponents, 0)), np.nan)
        else:
            stored = super().read(matrix.scales, matrix.scale_shape, FLOATS, rows_and_columns)
        scales = (
            stored.astype(np.float32).reshape(-1, 1)
            if stored.ndim == 1
            else stored.astype(np.float32)
        )
        wrong = ~((scales >= 0) & (scales <= np.finfo(np.float32).max / FP8_MAX))
        if wrong.any():
            row, column = (int(at) for at in np.argwhere(wrong)[0])
            place = [part[0][0] + row, part[1][0] + column][: len(matrix.scale_shape)]
            raise BadCheckpoint(
                f"{self.file(matrix.scales)}: {matrix.scales}{place} is {scales[row, column]:g}, expected a finite "
                "scale of at least 0 whose products fit float32"
            )
        return scales

    def _scale(self, matrix: QuantizedMatrix, numbers: np.ndarray, part: TensorSlice) -> np.ndarray:
        """Multiplies the numbers of a slice by their scales, in place."""
        blocks = tuple(
            (low // size, -(-high // size))
            for (low, high), size in zip(part, matrix.block, strict=True)
        )
        scales = self._read_scales(matrix, blocks)
        if not scales.all():
            self._check_zeros(matrix, scales, numbers, part)
        first, _ = blocks[0]
        low, high = part[0]
        inputs = _block_of(part[1], matrix.block[1])
        for index, row in enumerate(scales):
            start = (first + index) * matrix.block[0]
            stop = (first + index + 1) * matrix.block[0]
            numbers[max(start, low) - low : min(stop, high) - low] *= row[inputs]
        return numbers

    def _check_zeros(
        self, matrix: QuantizedMatrix, scales: np.ndarray, numbers: np.ndarray, part: TensorSlice
    ) -> None:
        """Raises BadCheckpoint for numbers that are not zero and whose scale is. A block of zeros may have that."""
        grid = np.ix_(_block_of(part[0], matrix.block[0]), _block_of(part[1], matrix.block[1]))
        lost = (scales[grid] == 0) & (numbers != 0)
        if lost.any():
            row, column = (int(at) for at in np.argwhere(lost)[0])
            raise BadCheckpoint(
                f"{self.file(matrix.scales)}: {matrix.scales} is 0 where {matrix.values}"
                f"[{part[0][0] + row}, {part[1][0] + column}] is not"
            )


def _decode_e2m1(octets: np.ndarray) -> np.ndarray:
    """Returns MXFP4's numbers before their scales: uint8 [n, m] → float32 [n, 2m], of each byte the low half first."""
    codes = np.stack([octets & 0x0F, octets >> 4], axis=-1).reshape(len(octets), -1)
    return np.where(codes & 0x08, -1, 1).astype(np.float32) * E2M1_NUMBERS[codes & 0x07]


def _decode_fp8(octets: np.ndarray) -> np.ndarray:
    """Returns the numbers of FP8's bits: uint8 [n, m] → float32 [n, m]. Two are looked up at a time."""
    if octets.shape[1] % 2:
        return np.take(FP8_NUMBERS, octets)
    return np.take(_list_fp8_pairs(), octets.view(np.uint16)).view(np.float32)


@functools.cache
def _list_fp8_pairs() -> np.ndarray:
    """Two float32 numbers for each pair of octets, as one element each [65536]."""
    octets = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    return np.take(FP8_NUMBERS, octets).view(np.uint64)


def _block_of(side: tuple[int, int], size: int) -> np.ndarray:
    """Returns the block of each index of a range, counted from the range's first block."""
    start, stop = side
    return np.arange(start, stop) // size - start // size
