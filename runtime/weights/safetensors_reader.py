"""Reads safetensors of a checkpoint directory, and says which slice of a tensor fills which part of a weight."""

import hashlib
import itertools
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.files.checkpoint_files import (
    INDEX_FILE,
    SINGLE_FILE,
    open_weights,
    read_checkpoint_file,
)
from dflash_aot.cache.model_config.architecture import GatedDeltaNet
from dflash_aot.cache.weight_recipe import MaskedMap, Placement, find_section_shape

# -- tensor slices: which part of which checkpoint tensor fills a slice of a weight argument; arithmetic only
#
# A tensor slice is a range (start, stop) for each dimension.

Range = tuple[int, int]
TensorSlice = tuple[Range, ...]


def cover_tensor(shape: Sequence[int]) -> TensorSlice:
    """Returns the slice of a whole tensor."""
    return tuple((0, size) for size in shape)


def slice_shape(part: TensorSlice) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in part)


def shift_slice(part: TensorSlice, origin: Sequence[int]) -> TensorSlice:
    """Returns `part` in coordinates that begin at `origin`."""
    return tuple((start - at, stop - at) for (start, stop), at in zip(part, origin, strict=True))


def to_numpy_slices(part: TensorSlice) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in part)


def split_slice(part: TensorSlice, most: int) -> Iterator[TensorSlice]:
    """Splits along the first dimension that is longer than 1, in order.

    Each piece has at most `most` elements, or the length 1 in this dimension if that is still more.
    """
    shape = slice_shape(part)
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None:
        yield part
        return
    start, stop = part[axis]
    step = max(most // math.prod(shape[axis + 1 :]), 1) if all(shape) else stop - start
    for low in range(start, stop, step):
        yield (*part[:axis], (low, min(low + step, stop)), *part[axis + 1 :])


def intersect_placement(part: TensorSlice, placement: Placement) -> TensorSlice | None:
    """Returns the part of the argument's slice that the placement fills; None for nothing."""
    filled = zip(placement.offset, placement.extent, strict=True)
    common = tuple(
        (max(start, at), min(stop, at + size))
        for (start, stop), (at, size) in zip(part, filled, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def find_stored_slice(placement: Placement, part: TensorSlice) -> TensorSlice:
    """Returns the slice of the stored tensor that holds `part` of the placement's extent.

    The extent is the shape of the stored section with dimensions split (row-major) or added. `part` must correspond to
    a range of each stored dimension; anything else is an error of the caller (AssertionError).
    """
    dimensions = zip(placement.extent, part, strict=True)
    found = tuple(
        _merge_ranges(_take_dimensions(dimensions, size), placement)
        for size in find_section_shape(placement)
    )
    assert all(size == 1 for size, _ in dimensions), (
        f"{placement} reshapes across stored dimensions"
    )
    if placement.rows is msgspec.UNSET:
        return found
    return (*shift_slice(found[:1], (-placement.rows[0],)), *found[1:])


def _take_dimensions(dimensions: Iterator[tuple[int, Range]], size: int) -> list[tuple[int, Range]]:
    """Takes the next dimensions of the extent, as many as make up a stored dimension of `size`."""
    taken = []
    product = 1
    while product < size and (dimension := next(dimensions, None)):
        taken.append(dimension)
        product *= dimension[0]
    assert product == size, (
        f"a stored dimension of {size} is not a product of the extent's dimensions: {taken}"
    )
    return taken


def _merge_ranges(dimensions: Sequence[tuple[int, Range]], placement: Placement) -> Range:
    """Returns the range of a stored dimension, from the ranges of the dimensions that it was split into."""
    start, length = 0, 1
    for size, (low, high) in dimensions:
        assert length == 1 or (low, high) == (0, size), (
            f"{placement}: {dimensions} is not a range when stored"
        )
        start = start * size + low
        length = length * (high - low)
    return start, start + length


# -- safetensors files

FLOATS = ("BF16", "F16", "F32")
INTEGERS = ("I32", "I64")
FP8 = "F8_E4M3"
# NumPy's dtypes for those that are read. FP8 is read as its bits.
DTYPES: Mapping[str, Any] = {
    **{"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, FP8: np.uint8},
    **{"U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64, "BOOL": np.bool_},
}
COMPARED_NUMBERS = 1 << 22  # read at a time to compare two tensors
BLOCK_BYTES = 1 << 20  # read at a time of a tensor of which a part of each row is wanted
# Tensors that hold all experts of a layer, and what they hold of each.
FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
FUSED_SCALES = "_scale_inv"  # after the name of such a tensor: of its FP8 scales
FUSED_BLOCKS, FUSED_EXPONENTS = "_blocks", "_scales"  # the same: of its MXFP4 codes and exponents
# Dimensions of such a tensor in gpt-oss's layout, by the end of its name.
INTERLEAVED_RANKS = {"": 3, FUSED_BLOCKS: 4, FUSED_EXPONENTS: 3}
# Of a tensor's bytes for a fingerprint.
WHOLE_SAMPLE_BYTES = 1 << 16
SAMPLES = 8
SAMPLE_BYTES = 1 << 10
BITS_16 = 2  # bytes of such a float
MATRIX = 2  # dimensions
HEADER_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header


class WeightsFile:
    """A file that stays open until it is no longer used. Threads read it at once, without Python's lock.

    Parts are copied instead of mapped: where a mapped file becomes shorter, because a copy of it is in progress, the
    system ends the process that reads it (SIGBUS).
    """

    def __init__(self, name: str, path: Path):
        """name: of the open file; path: for messages. Raises OSError."""
        self.path = path
        self._descriptor = os.open(name, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._state = self._read_state()

    def read(self, begin: int, size: int) -> np.ndarray:
        """Returns bytes, uint8 [size]. Raises BadCheckpoint if the file ends before, or cannot be read."""
        content = np.empty(size, np.uint8)
        done = 0
        while done < size:
            try:
                count = os.preadv(self._descriptor, [memoryview(content)[done:]], begin + done)
            except OSError as error:
                raise BadCheckpoint(f"{self.path}: {error.strerror}") from error
            if count == 0:
                raise self._refuse_change("became shorter")
            done += count
        return content

    def check_unchanged(self) -> None:
        """Raises BadCheckpoint if the file was written to since it was opened."""
        if self._read_state() != self._state:
            raise self._refuse_change("changed")

    def _read_state(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _refuse_change(self, what: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.path} {what} while it was read. Is a copy or a download of it in progress? Start again when it is "
            "done"
        )


class RowsOfMatrix(NamedTuple):
    """Which rows of a stored matrix make a tensor.

    Attributes:
        shape: of the stored matrix.
        first: the tensor's first row.
        step: from one of its rows to the next.
        transposed: the rows are columns of the stored matrix.
    """

    shape: tuple[int, int]
    first: int
    step: int
    transposed: bool


class GroupsOfRows(NamedTuple):
    """Groups of rows of a stored matrix that make a tensor, one after the other.

    Attributes:
        shape: of the stored matrix.
        groups: start and stop of each.
    """

    shape: tuple[int, ...]
    groups: tuple[Range, ...]


class StoredTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        dtype: by safetensors' name.
        shape: of the tensor.
        begin: where its bytes begin in the file.
        size: how many bytes it has.
        file: the file.
        rows: set if the tensor is a part of the matrix that is stored there.
        whole: the name of the stored tensor, if the tensor is a part of it.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int
    file: WeightsFile
    rows: RowsOfMatrix | GroupsOfRows | None = None
    whole: str | None = None

    def read(self, part: TensorSlice | None) -> np.ndarray:
        """Returns the tensor or a part of it, in its dtype. Raises BadCheckpoint.

        The file is read in whole rows of the first dimension in which the part is longer than 1; a part with a piece of
        each row is put together from blocks of rows.
        """
        dtype = np.dtype(DTYPES[self.dtype])
        part = cover_tensor(self.shape) if part is None else part
        if isinstance(self.rows, RowsOfMatrix):
            return self._read_rows(self.rows, *part)
        if self.rows is not None:
            return self._read_groups(self.rows, *part)
        axis = next((at for at, (start, stop) in enumerate(part) if stop - start != 1), len(part))
        shape = tuple(stop - start for start, stop in part)
        start, stop = part[axis] if axis < len(part) else (0, 1)
        before = sum(part[at][0] * math.prod(self.shape[at + 1 :]) for at in range(axis))
        row = self.shape[axis + 1 :]
        inner = to_numpy_slices(part[axis + 1 :])
        row_bytes = math.prod(row) * dtype.itemsize

        def read_rows(first: int, last: int) -> np.ndarray:
            begin = self.begin + before * dtype.itemsize + first * row_bytes
            content = self.file.read(begin, (last - first) * row_bytes)
            return content.view(dtype).reshape((last - first, *row))[:, *inner]

        if shape[axis + 1 :] == row:
            return read_rows(start, stop).reshape(shape)
        values = np.empty((stop - start, *shape[axis + 1 :]), dtype)
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            values[first - start : last - start] = read_rows(first, last)
        return values.reshape(shape)

    def _read_rows(self, rows: RowsOfMatrix, lines: Range, columns: Range) -> np.ndarray:
        """Returns a part of some rows of a matrix."""
        low, high = (rows.first + rows.step * line for line in lines)
        span = (low, max(low, high - rows.step + 1))
        whole = self._replace(shape=rows.shape, rows=None)
        if rows.transposed:
            return np.ascontiguousarray(whole.read((columns, span))[:, :: rows.step].T)
        return np.ascontiguousarray(whole.read((span, columns))[:: rows.step])

    def _read_groups(self, rows: GroupsOfRows, lines: Range, columns: Range) -> np.ndarray:
        """Returns a part of a tensor of groups of rows."""
        whole = self._replace(shape=rows.shape, rows=None)
        found = [np.empty((0, columns[1] - columns[0]), DTYPES[self.dtype])]
        at = 0
        for start, stop in rows.groups:
            low = max(lines[0] - at, 0)
            high = min(lines[1] - at, stop - start)
            if low < high:
                found.append(whole.read(((start + low, start + high), columns)))
            at += stop - start
        return np.concatenate(found)

    def sample(self) -> bytes:
        """Returns evenly spread parts of a large tensor's bytes, a small tensor's bytes."""
        if self.size <= WHOLE_SAMPLE_BYTES:
            return self.file.read(self.begin, self.size).tobytes()
        step = (self.size - SAMPLE_BYTES) // (SAMPLES - 1)
        parts = (self.file.read(self.begin + at * step, SAMPLE_BYTES) for at in range(SAMPLES))
        return b"".join(part.tobytes() for part in parts)


class CheckpointTensors:
    """The tensors of one checkpoint directory. Only the parts that are read take memory.

    Attributes:
        directory: the checkpoint's directory.
    """

    def __init__(
        self, directory: Path, interleaved: bool = False, delta: GatedDeltaNet | None = None
    ):
        """Raises BadCheckpoint for files that are missing, broken, or differ from their index.

        `interleaved`: experts are stored as gpt-oss's, see `_split_interleaved_experts`.
        `delta`: facts of layers whose projections are stored as in `_split_fused_projections`.
        """
        split = _split_interleaved_experts if interleaved else _split_fused_experts
        self._files: dict[str, Path] = {}
        self._stored: dict[str, StoredTensor] = {}
        self._split: dict[str, StoredTensor] = {}  # tensors of the files that appear as several
        for path, indexed in _list_files(directory):
            try:
                with open_weights(path) as name:
                    stored = _open_file(name, path)
            except FileNotFoundError as error:
                raise BadCheckpoint(f"{path} does not exist, but {INDEX_FILE} names it") from error
            except (SafetensorError, OSError) as error:
                raise BadCheckpoint(
                    f"{path} is not a complete safetensors file: {error}. Download or copy it again"
                ) from error
            whole = stored
            stored = split(whole)
            if delta:
                stored = _split_fused_projections(stored, delta)
            found = set(stored)
            if twice := found & self._files.keys():
                raise BadCheckpoint(
                    f"{path} holds {list_some(twice)}, and so does another shard: which one is meant?"
                )
            if indexed is not None and (missing := indexed - whole.keys()):
                raise BadCheckpoint(
                    f"{path} lacks {list_some(missing)}, which {INDEX_FILE} places there"
                )
            self._stored |= stored
            self._split |= {name: one for name, one in whole.items() if name not in found}
            self._files |= dict.fromkeys(found, path)
        self.directory = directory

    def names(self) -> set[str]:
        return set(self._files)

    def file(self, name: str) -> Path:
        """Returns the file that holds a tensor."""
        return self._files[name]

    def title(self, name: str) -> str:
        """Returns a tensor's name for messages: that of a part names the stored tensor too."""
        whole = self._stored[name].whole
        return f"{name} (a part of {whole})" if whole else name

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def dtype(self, name: str) -> str:
        """Returns the dtype of a tensor by safetensors' name."""
        return self._stored[name].dtype

    def is_equal(self, name: str, other: str) -> bool:
        """Whether two tensors are stored with the same bytes, shape and dtype."""
        one = self._stored.get(name)
        two = self._stored.get(other)
        if one is None or two is None:  # packed under other names
            return False
        if one[:2] != two[:2]:
            return False
        pieces = split_slice(cover_tensor(one.shape), COMPARED_NUMBERS)
        return all(one.read(piece).tobytes() == two.read(piece).tobytes() for piece in pieces)

    def digest(self) -> bytes:
        """Returns a sha256 of names, dtypes, shapes and samples of all tensors, which tells trainings apart.

        Small tensors are hashed whole. It does not depend on the files that the tensors are in.
        """
        found = hashlib.sha256()
        for name, stored in sorted(self._stored.items()):
            found.update(f"{name} {stored.dtype} {stored.shape} ".encode())
            found.update(stored.sample())
        return found.digest()

    def check_unchanged(self) -> None:
        """Raises BadCheckpoint if a file was written to since it was opened."""
        for file in {stored.file for stored in self._stored.values()}:
            file.check_unchanged()

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str],
        part: TensorSlice | None = None,
    ) -> np.ndarray:
        """Returns one tensor, or only `part` of the tensor, in its stored dtype, FP8 as uint8.

        shape, dtypes: what the tensor must have, dtypes in safetensors' names.

        Raises BadCheckpoint for another shape or dtype, and for NaN or infinity among FLOATS.
        """
        values = self._read(name, shape, dtypes, part)
        if dtypes is FLOATS and not _is_finite(values):
            raise self._refuse_values(name)
        return values

    def read_rows(
        self, name: str, shape: tuple[int, ...], part: TensorSlice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns a slice of a matrix of FLOATS [n, m], in its stored dtype, and its rows' largest magnitudes [n].

        Raises BadCheckpoint as `read` does. The magnitudes show NaN and infinity, so that the values are read once.
        """
        rows = self._read(name, shape, FLOATS, part)
        magnitudes = find_magnitudes(rows)
        if not np.isfinite(magnitudes).all():
            raise self._refuse_values(name)
        return rows, magnitudes

    def _read(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str], part: TensorSlice | None
    ) -> np.ndarray:
        """Returns a tensor or a part of it, of any values. Raises BadCheckpoint for another shape or dtype."""
        path = self._files[name]
        stored = self._stored[name]
        if stored.shape != shape:
            raise BadCheckpoint(
                f"{path}: {self.title(name)} is {list(stored.shape)}, but its config.json implies {list(shape)}"
            )
        if stored.dtype not in dtypes:
            raise BadCheckpoint(
                f"{path}: {self.title(name)} is {stored.dtype}, expected one of {', '.join(dtypes)}"
            )
        return stored.read(part)

    def _refuse_values(self, name: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self._files[name]}: {self.title(name)} holds NaN or infinity: the file is damaged or the training "
            "diverged"
        )

    def read_vocabulary_map(self, placement: Placement, mapped: MaskedMap) -> np.ndarray:
        """Returns the offsets [n] of a draft with a reduced vocabulary: row i is the target's token i + offsets[i].

        The n rows must lead to n different tokens, and these must be the tokens that the mask names. Raises
        BadCheckpoint.
        """
        offsets = self.read(placement.tensor, placement.stored, INTEGERS).astype(np.int64)
        mask = self.read(mapped.mask, (mapped.size,), ("BOOL",))
        if flaw := _find_flaw_of_offsets(offsets, mask, mapped.mask):
            hint = ": it holds tokens, expected is each one's distance from its row" * _are_tokens(
                offsets, mask
            )
            raise BadCheckpoint(f"{self._files[placement.tensor]}: {placement.tensor} {flaw}{hint}")
        return offsets


def find_magnitudes(rows: np.ndarray) -> np.ndarray:
    """Returns the largest magnitude of each row, floats [n, m] → float32 [n]; infinite or NaN if a number is.

    Without their sign, the bits of floats are ordered as their magnitudes, and NaN is above infinity.
    """
    if rows.dtype.itemsize != BITS_16 or not rows.size:
        return np.abs(rows).max(axis=1, initial=0).astype(np.float32)
    return (rows.view(np.uint16) & 0x7FFF).max(axis=1).view(rows.dtype).astype(np.float32)


def list_some(names: Iterable[str], most: int = 4) -> str:
    """The first `most` names in order, for a message, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _list_files(directory: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Yields each file of the checkpoint, and the tensors that the index places there (None without an index)."""
    if (content := read_checkpoint_file(directory / INDEX_FILE)) is not None:
        shards: dict[str, set[str]] = {}
        for tensor, file in _decode_index(directory / INDEX_FILE, content).items():
            shards.setdefault(file, set()).add(tensor)
        for file in sorted(shards):
            yield directory / file, shards[file]
    elif (directory / SINGLE_FILE).exists():
        yield directory / SINGLE_FILE, None
    else:
        raise BadCheckpoint(f"{directory} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


def _open_file(name: str, path: Path) -> dict[str, StoredTensor]:
    """Finds the tensors of the file `path`, which is open as `name`.

    Raises SafetensorError and OSError for a file that is not whole, BadCheckpoint for a file that changes meanwhile.
    """
    with safe_open(name, framework="numpy"):
        """The header is checked: its size, each tensor's dtype, shape and place."""
    file = WeightsFile(name, path)
    size = int.from_bytes(file.read(0, HEADER_LENGTH_BYTES).tobytes(), "little")
    try:
        content = file.read(HEADER_LENGTH_BYTES, size).tobytes()
        header = msgspec.json.decode(content, type=dict[str, dict[str, Any]])
        header.pop("__metadata__", None)
        return {
            tensor: StoredTensor(
                facts["dtype"],
                tuple(facts["shape"]),
                HEADER_LENGTH_BYTES + size + facts["data_offsets"][0],
                facts["data_offsets"][1] - facts["data_offsets"][0],
                file,
            )
            for tensor, facts in header.items()
        }
    except (msgspec.DecodeError, ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{path} changed while it was read: {error}") from error


def _split_fused_experts(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors with those that hold all experts of a layer as a tensor for each expert.

    Stored are `experts.gate_up_proj` [E, 2M, H], of each expert its gate's rows and then its up's, and
    `experts.down_proj` [E, H, M]; of FP8 also `experts.gate_up_proj_scale_inv` and `experts.down_proj_scale_inv`, of
    each expert a row of scales for each block of rows.
    """
    found: dict[str, StoredTensor] = {}
    for name, fused in stored.items():
        prefix, _, last = name.rpartition(".experts.")
        kind = FUSED_SCALES if last.endswith(FUSED_SCALES) else ""
        parts = FUSED_EXPERTS.get(last.removesuffix(kind), ())
        if not (prefix and parts and fused.size) or len(fused.shape) != 3:
            found[name] = fused  # an empty tensor could name any number of experts
            continue
        if fused.shape[1] % len(parts):
            found[name] = fused
            continue
        experts, rows, width = fused.shape
        size = fused.size // (experts * len(parts))
        for index in range(experts * len(parts)):
            expert, part = divmod(index, len(parts))
            found[f"{prefix}.experts.{expert}.{parts[part]}.weight{kind}"] = fused._replace(
                shape=(rows // len(parts), width),
                begin=fused.begin + index * size,
                size=size,
                whole=name,
            )
    return found


def _split_interleaved_experts(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """As `_split_fused_experts`, for gpt-oss: rows of gate and up alternate.

    Stored are the transposed matrices `experts.gate_up_proj` [E, H, 2M] and `experts.down_proj` [E, M, H]; or MXFP4's
    codes, `_blocks` [E, rows, columns / 32, 16] bytes, and exponents, `_scales` [E, rows, columns / 32].
    """
    found: dict[str, StoredTensor] = {}
    for name, fused in stored.items():
        prefix, _, last = name.rpartition(".experts.")
        projection, _, kind = last.partition("_proj")
        parts = FUSED_EXPERTS.get(f"{projection}_proj", ())
        if not (prefix and parts and fused.size) or len(fused.shape) != INTERLEAVED_RANKS.get(kind):
            found[name] = fused
            continue
        experts, rows, *rest = fused.shape
        matrix = rows, math.prod(rest)
        outputs, inputs = matrix if kind else matrix[::-1]
        if outputs % len(parts):
            found[name] = fused
            continue
        size = fused.size // experts
        for expert in range(experts):
            for at, part in enumerate(parts):
                found[f"{prefix}.experts.{expert}.{part}.weight{kind}"] = fused._replace(
                    shape=(outputs // len(parts), inputs),
                    begin=fused.begin + expert * size,
                    size=size,
                    rows=RowsOfMatrix(matrix, at, len(parts), transposed=not kind),
                    whole=name,
                )
    return found


def _split_fused_projections(
    stored: Mapping[str, StoredTensor], delta: GatedDeltaNet
) -> dict[str, StoredTensor]:
    """Returns the tensors with Qwen3-Next's projections of a Gated DeltaNet layer split as Qwen3.5 stores them.

    Stored are `in_proj_qkvz` and `in_proj_ba`: for each key head the rows of its query, its key, its values and their
    gates; and of its values' strengths and decays. Scales of blocks of rows are in the same order.
    """
    values = delta.value_heads // delta.key_heads
    wide = values * delta.value_dim
    # Of each fused tensor: the rows of a key head, and which of them make each tensor.
    parts = {
        "in_proj_qkvz": ((delta.key_dim, delta.key_dim, wide, wide), ("qkv", "qkv", "qkv", "z")),
        "in_proj_ba": ((values, values), ("b", "a")),
    }
    found: dict[str, StoredTensor] = {}
    for name, fused in stored.items():
        prefix, _, last = name.rpartition(".linear_attn.")
        module, _, kind = last.partition(".")
        sizes, tensors = parts.get(module, ((), ()))
        total = delta.key_heads * sum(sizes)
        block = total // fused.shape[0] if len(fused.shape) == MATRIX and fused.shape[0] else 0
        if not block or block * fused.shape[0] != total or any(size % block for size in sizes):
            found[name] = fused
            continue
        ends = list(itertools.accumulate((size // block for size in sizes), initial=0))
        for tensor in dict.fromkeys(tensors):
            groups = tuple(
                (head * ends[-1] + ends[at], head * ends[-1] + ends[at + 1])
                for at, part in enumerate(tensors)
                for head in range(delta.key_heads)
                if part == tensor
            )
            found[f"{prefix}.linear_attn.in_proj_{tensor}.{kind}"] = fused._replace(
                shape=(sum(stop - start for start, stop in groups), fused.shape[1]),
                rows=GroupsOfRows(fused.shape, groups),
                whole=name,
            )
    return found


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


def _decode_index(path: Path, content: bytes) -> dict[str, str]:
    """Returns the file name of each tensor. Raises BadCheckpoint, also for a file outside the directory."""
    try:
        files = msgspec.json.decode(content, type=_ShardIndex).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not an index of shards: {error}") from error
    if any(Path(file).name != file for file in files.values()):
        raise BadCheckpoint(
            f"{path}: weight_map names something that is not a file in its directory"
        )
    return files


def _find_flaw_of_offsets(offsets: np.ndarray, mask: np.ndarray, name: str) -> str | None:
    """Says what is wrong with the offsets [n] of a vocabulary map, or None. `mask` [size] is the tensor `name`."""
    size = mask.size
    rows = np.arange(offsets.size)
    if outside := int(((offsets < -rows) | (offsets >= size - rows)).sum()):
        return f"leads {outside} of {offsets.size} rows outside the vocabulary of {size}"
    reached = np.zeros(size, bool)
    reached[rows + offsets] = True
    if reached.sum() != offsets.size:
        return f"leads {offsets.size} rows to only {reached.sum()} different tokens"
    if differing := int((reached != mask).sum()):
        return f"and {name} disagree on {differing} tokens: they come from two different trainings"
    return None


def _are_tokens(offsets: np.ndarray, mask: np.ndarray) -> bool:
    """Whether the values are token ids instead of offsets: then they are exactly the tokens that the mask names."""
    return np.array_equal(np.sort(offsets), np.flatnonzero(mask))


def _is_finite(tensor: np.ndarray) -> bool:
    """Whether no value is NaN or infinite.

    A finite sum proves it in one pass without a temporary mask; a sum that overflows needs a look at each value. Of 16
    bits, the largest magnitude is found in a third of the time.
    """
    if tensor.dtype.itemsize == BITS_16:
        return bool(np.isfinite(find_magnitudes(tensor.reshape(1, -1))).all())
    with np.errstate(all="ignore"):
        total = np.sum(tensor, dtype=np.float32)
    return bool(np.isfinite(total)) or bool(np.isfinite(tensor).all())
