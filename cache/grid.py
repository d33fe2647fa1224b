"""The grid of buckets: the shapes that are precompiled, and the choice of the bucket for a request."""

import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import msgspec

from dflash_aot.cache.errors import BadInput, GridMiss

AXES = ("batch", "length", "k", "prefill")
# Single numbers, not axes; in the order of the fields of `Grid`.
OPTIONAL_KEYS = ("rounds", "page", "kv_positions", "saved_states", "mixed", "packed", "offload")
DEFAULT_PAGE = 64  # measured on CPU: docs/performance.md, "Pages of kv"
AXIS_MEANINGS = {
    "batch": "rows decoded together, at least 1",
    "length": "kv positions attended to, at least 2",
    "k": "speculative tokens verified per round, at least 0",
    "prefill": "prompt tokens per chunk, at least 1",
    "rounds": "rounds per dispatch, at least 1",
    "page": "kv positions of a page, at least 1",
    "kv_positions": "kv positions that all requests share, at least 2",
    "saved_states": "recurrent states kept for prefixes, at least 1 (without the key: none, or those of the bundle)",
    "mixed": "1 for calls that verify a round and prefill a chunk, 0 for none",
    "packed": "prompts that share the largest chunk, at least 2, or 0 for none",
    "offload": "1 for calls that copy kv pages and saved states to the host and back, 0 for none",
}
MIN_SIZES = {
    "batch": 1,
    "length": 2,
    "k": 0,
    "prefill": 1,
    "rounds": 1,
    "page": 1,
    "kv_positions": 2,
    "saved_states": 1,
    "mixed": 0,
    "packed": 0,
    "offload": 0,
}
MAX_SIZE = 1 << 24  # of any axis: a limit for typing errors
EXAMPLE_BUCKETS = "batch=1,4 length=256,1024 k=0,7,15 prefill=64,256"


class Bucket(msgspec.Struct, frozen=True, order=True):
    """A decode bucket.

    Attributes:
        batch: rows.
        length: kv positions attended to.
        k: drafted tokens verified.
    """

    batch: int
    length: int
    k: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        return (self.batch, self.length, self.k)


class Chunk(msgspec.Struct, frozen=True, order=True):
    """A prefill bucket.

    Attributes:
        prefill: prompt tokens of one slot.
        length: kv positions attended to.
    """

    prefill: int
    length: int

    @property
    def sizes(self) -> tuple[int, int]:
        return (self.prefill, self.length)


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The precompiled sizes: batch, length and k combine to buckets, prefill and length to chunks.

    Attributes:
        batch, length, k, prefill: sizes in ascending order, without repeats.
        rounds: rounds per dispatch of a multi-round step; 1 means that no such step is built.
        page: kv positions of a page.
        kv_positions: kv positions that the requests share; None for the capacity of every slot.
        saved_states: recurrent states of a hybrid target that are kept for prefixes.
        mixed: 1 where one call verifies a round and prefills a chunk of the largest width, else 0.
        packed: how many short prompts may share the largest chunk; 0 where each has its own.
        offload: 1 where calls copy kv pages and saved states to host memory and back, else 0.
    """

    batch: tuple[int, ...]
    length: tuple[int, ...]
    k: tuple[int, ...]
    prefill: tuple[int, ...]
    rounds: int = 1
    page: int = DEFAULT_PAGE
    kv_positions: int | None = None
    saved_states: int = 0
    mixed: int = 0
    packed: int = 0
    offload: int = 0

    @property
    def capacity(self) -> int:
        """Committed kv positions that a request can hold."""
        return self.length[-1]

    def count_pages(self, positions: int) -> int:
        """Pages that hold so many kv positions."""
        return -(-positions // self.page)

    @property
    def row_pages(self) -> int:
        """Pages that hold the capacity: the width of a page table."""
        return self.count_pages(self.capacity)

    @property
    def pool_pages(self) -> int:
        """Pages that the requests share."""
        return (
            self.slots * self.row_pages
            if self.kv_positions is None
            else self.count_pages(self.kv_positions)
        )

    @property
    def slots(self) -> int:
        """Requests that can run at the same time."""
        return self.batch[-1]

    def separate_tables(self, slots: Iterable[int]) -> list[list[int]]:
        """Returns a page table for each of `slots`, with separate pages as far as the pool has enough."""
        pages = range(self.row_pages)
        owners = self.pool_pages // self.row_pages
        return [[1 + slot % owners * self.row_pages + page for page in pages] for slot in slots]

    def buckets(self) -> list[Bucket]:
        """Returns all decode buckets."""
        return [Bucket(b, s, k) for b in self.batch for s in self.length for k in self.k]

    def chunks(self) -> list[Chunk]:
        """Returns all prefill buckets. None is wider than its length: a wide chunk is served by a longer bucket."""
        return [
            Chunk(p, s) for p in self.prefill for s in self.length[bisect_left(self.length, p) :]
        ]

    def list_mixed(self) -> list[tuple[int, int, int, int]]:
        """Returns batch, length, k and chunk width of all calls that verify a round and prefill a chunk."""
        width = self.prefill[-1]
        buckets = self.buckets() if self.mixed else []
        return [(*one.sizes, width) for one in buckets if one.length >= width]

    def fit_mixed(self, bucket: Bucket, length: int = 0) -> tuple[int, int, int, int]:
        """Returns the sizes of the mixed call for a round's bucket and a chunk that needs `length` positions."""
        width = self.prefill[-1]
        fitting = _at_least(self.length, max(bucket.length, length, width))
        return bucket.batch, fitting, bucket.k, width

    @property
    def packed_width(self) -> int:
        """Positions of each prompt in a packed chunk; 0 where there are none."""
        return self.prefill[-1] // self.packed if self.packed else 0

    def list_packed(self) -> list[tuple[int, int, int]]:
        """Returns rows, width and length of all packed chunks."""
        width = self.packed_width
        return [(self.packed, width, length) for length in self.length if 0 < width <= length]

    def fit_packed(self, reach: int) -> tuple[int, int, int]:
        """Returns the sizes of the packed chunk for prompts of which the longest ends at `reach`."""
        width = self.packed_width
        return self.packed, width, _at_least(self.length, max(reach, width))

    def count(self) -> int:
        """Returns the number of buckets and chunks without creating them."""
        chunks = sum(len(self.length) - bisect_left(self.length, p) for p in self.prefill)
        return len(self.batch) * len(self.length) * len(self.k) + chunks

    def fit(self, batch: int, length: int, k: int) -> Bucket:
        """Returns the smallest bucket with at least these sizes. Raises GridMiss."""
        if batch > self.batch[-1] or length > self.length[-1] or k > self.k[-1]:
            raise self.miss(batch, length, k)
        return Bucket(
            _at_least(self.batch, batch), _at_least(self.length, length), _at_least(self.k, k)
        )

    def fit_chunk(self, start: int, left: int) -> Chunk:
        """Returns the chunk for the next of `left` prompt tokens after `start` tokens are written. Raises GridMiss."""
        width = _at_least(self.prefill, min(left, self.prefill[-1]))
        reach = max(start + min(left, width), width)
        if reach > self.capacity:
            raise self.miss(1, start + left, 0)
        return Chunk(width, _at_least(self.length, reach))

    def miss(
        self, batch: int, length: int, k: int, command: Callable[["Grid"], str] | None = None
    ) -> GridMiss:
        """Returns the error for a request outside the grid, with the command that builds a wider grid."""
        return GridMiss(
            f"outside the grid: batch={batch}, length={length}, k={k} is needed, and the grid ends at "
            f"batch={self.batch[-1]}, length={self.length[-1]}, k={self.k[-1]}. "
            f"Precompile a wider grid: {(command or build_grid_command)(self.widened(batch, length, k))}"
        )

    def widened(self, batch: int, length: int, k: int) -> "Grid":
        """Returns this grid with the sizes added that the request needs."""
        wanted = {"batch": batch, "length": length, "k": k}
        axes = {axis: set(getattr(self, axis)) for axis in AXES}
        for axis, least in wanted.items():
            if least > max(axes[axis]):
                axes[axis].add(least)
        wide = {axis: tuple(sorted(sizes)) for axis, sizes in axes.items()}
        positions = self.kv_positions and max(self.kv_positions, wide["length"][-1])
        return msgspec.structs.replace(self, **wide, kv_positions=positions)

    def united(self, built: "Grid", named: Collection[str] = ()) -> "Grid":
        """Returns the grid with the sizes of both. Its kv pool is the pool that this grid names, or the built grid's.

        A built pool is enlarged where it does not hold the longest request; pages are the built grid's, and rounds and
        saved states are the larger numbers. named: the keys that the user named, see `find_named`. Raises BadInput
        where another page, another number of packed prompts, fewer rounds, fewer saved states, no mixed calls or no
        offload are named, where the named pool does not hold the longest request, or where the shortest length does
        not hold the largest block.
        """
        axes = {axis: tuple(sorted({*getattr(self, axis), *getattr(built, axis)})) for axis in AXES}
        for key in ("page", "rounds", "saved_states", "mixed", "packed", "offload"):
            asked = getattr(self, key)
            has = getattr(built, key)
            fixed = key == "page" or (key == "packed" and has > 0)
            if key in named and (asked < has or (fixed and asked > has)):
                raise BadInput(f"{key}={asked} is asked for, and the bundle has {key}={has}")
        capacity = axes["length"][-1]
        if self.kv_positions is not None and self.kv_positions < capacity:
            raise BadInput(
                f"kv_positions={self.kv_positions} is asked for, and the bundle has length={capacity}: such a request "
                "would have no room"
            )
        if axes["k"][-1] + 1 > axes["length"][0]:
            raise BadInput(
                f"with '{self}' added, length={axes['length'][0]} is too short to verify k={axes['k'][-1]} tokens"
            )
        positions = self.kv_positions or (built.kv_positions and max(built.kv_positions, capacity))
        packed = self.packed or built.packed
        if packed and axes["prefill"][-1] % packed:
            raise BadInput(f"with '{self}' added, {_describe_uneven(packed, axes['prefill'][-1])}")
        return Grid(
            **axes,
            rounds=max(self.rounds, built.rounds),
            page=built.page,
            kv_positions=positions,
            saved_states=max(self.saved_states, built.saved_states),
            mixed=max(self.mixed, built.mixed),
            packed=packed,
            offload=max(self.offload, built.offload),
        )

    def __str__(self) -> str:
        """The axes, and the optional keys without their defaults, as `parse_grid` reads them."""
        axes = [f"{axis}={','.join(map(str, getattr(self, axis)))}" for axis in AXES]
        values = [(key, getattr(self, key)) for key in OPTIONAL_KEYS]
        plain = dict(zip(OPTIONAL_KEYS, self.__struct_defaults__, strict=True))
        return " ".join([*axes, *(f"{key}={one}" for key, one in values if one != plain[key])])


def build_grid_command(grid: Grid) -> str:
    """Returns the command for a grid where the bundle is not known."""
    return f"dflash-precompile --buckets '{grid}'"


def _at_least(sizes: tuple[int, ...], least: int) -> int:
    """Returns the smallest of the ascending `sizes` that is at least `least`; the last one has to be."""
    return sizes[bisect_left(sizes, least)]


def _describe_uneven(packed: int, width: int) -> str:
    return f"packed={packed} prompts cannot share prefill={width} evenly"


def make_grid(axes: Mapping[str, Iterable[int]], block: int, source: str) -> Grid:
    """Returns a checked grid for a draft that was trained on blocks of `block` tokens.

    `source` names the grid in messages. K = 0 is always added. Raises BadInput.
    """
    if unknown := [axis for axis in axes if axis not in (*AXES, *OPTIONAL_KEYS)]:
        raise BadInput(
            f"{source}: unknown {', '.join(map(_name_intended, unknown))}; expected {', '.join(AXES)}; "
            f"{', '.join(OPTIONAL_KEYS)}"
        )
    if missing := [axis for axis in AXES if axis not in axes]:
        raise BadInput(
            f"{source}: {', '.join(missing)} missing. All four axes are needed, for example '{EXAMPLE_BUCKETS}'"
        )
    checked = {axis: _check_axis(axis, axes[axis], source) for axis in AXES}
    single = {key: _check_single(key, axes[key], source) for key in OPTIONAL_KEYS if key in axes}
    chosen = {**checked, "k": tuple(sorted({0, *checked["k"]}))}
    grid = Grid(chosen["batch"], chosen["length"], chosen["k"], chosen["prefill"], **single)
    if grid.kv_positions is not None and grid.kv_positions < grid.capacity:
        raise BadInput(
            f"{source}: kv_positions={grid.kv_positions} hold no request of the longest length={grid.capacity}"
        )
    for key, value in (("mixed", grid.mixed), ("offload", grid.offload)):
        if value > 1:
            raise BadInput(f"{source}: {key}={value}: expected {AXIS_MEANINGS[key]}")
    if grid.packed == 1:
        raise BadInput(f"{source}: packed=1: expected {AXIS_MEANINGS['packed']}")
    if grid.packed > grid.slots:
        raise BadInput(
            f"{source}: packed={grid.packed} prompts, but only batch={grid.slots} run at a time"
        )
    if grid.packed and grid.prefill[-1] % grid.packed:
        raise BadInput(f"{source}: {_describe_uneven(grid.packed, grid.prefill[-1])}")
    if grid.k[-1] > block - 1:
        raise BadInput(
            f"{source}: k={grid.k[-1]}, but a block of {block} holds the last token and {block - 1} drafted tokens"
        )
    if grid.k[-1] + 1 > grid.length[0]:
        raise BadInput(
            f"{source}: length={grid.length[0]} is too short to verify k={grid.k[-1]} tokens after the last token"
        )
    if grid.prefill[-1] > grid.capacity:
        raise BadInput(
            f"{source}: prefill={grid.prefill[-1]} is wider than the longest length={grid.capacity}"
        )
    return grid


def _name_intended(axis: str) -> str:
    """An unknown axis, and the axis that may be meant."""
    meant = get_close_matches(axis, (*AXES, *OPTIONAL_KEYS), 1)
    return f"{axis} (did you mean {meant[0]}?)" if meant else axis


def _check_axis(axis: str, sizes: Iterable[int], source: str) -> tuple[int, ...]:
    sizes = list(sizes)
    wrong = [
        size for size in sizes if type(size) is not int or not MIN_SIZES[axis] <= size <= MAX_SIZE
    ]
    if not sizes or wrong:
        found = ", ".join(map(repr, wrong)) or "nothing"
        limit = (
            f" and at most {MAX_SIZE}"
            if any(type(size) is int and size > MAX_SIZE for size in wrong)
            else ""
        )
        raise BadInput(f"{source}: {axis} holds {found}; expected {AXIS_MEANINGS[axis]}{limit}")
    if len(set(sizes)) < len(sizes):
        raise BadInput(f"{source}: {axis} has a size twice: {','.join(map(str, sizes))}")
    return tuple(sorted(sizes))


def _check_single(key: str, sizes: Iterable[int], source: str) -> int:
    checked = _check_axis(key, sizes, source)
    if checked[1:]:
        raise BadInput(
            f"{source}: {key}={','.join(map(str, checked))}: expected a single number, {AXIS_MEANINGS[key]}"
        )
    return checked[0]


def parse_grid(text: str, block: int) -> Grid:
    """Parses `--buckets`: "batch=1,4 length=256 k=0,7 prefill=64", or the path of a .toml with the same keys.

    Raises BadInput.
    """
    if text.endswith(".toml"):
        return make_grid(_read_toml(Path(text)), block, text)
    source = f"--buckets '{text}'"
    axes: dict[str, list[int]] = {}
    for word in text.split():
        found = re.fullmatch(r"([a-z_]+)=(\d{1,18}(?:,\d{1,18})*)", word, re.ASCII)
        if not found:
            raise BadInput(
                f"{source}: cannot read '{word}'. Expected a grid such as '{EXAMPLE_BUCKETS}'"
            )
        axis, sizes = found.groups()
        if axis in axes:
            raise BadInput(f"{source}: {axis} is given twice")
        axes[axis] = [int(size) for size in sizes.split(",")]
    return make_grid(axes, block, source)


def find_named(grid: Grid | str | None) -> frozenset[str]:
    """Returns the keys that a grid names, which `parse_grid` reads; of a Grid those with other values than without."""
    if isinstance(grid, str) and grid.endswith(".toml"):
        return frozenset(_read_toml(Path(grid)))
    return frozenset(word.partition("=")[0] for word in str(grid or "").split())


def _read_toml(path: Path) -> dict[str, list[int]]:
    try:
        axes = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"--buckets {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # TOML and UTF-8 errors alike
        raise BadInput(f"--buckets {path}: not TOML: {error}") from error
    return {axis: sizes if isinstance(sizes, list) else [sizes] for axis, sizes in axes.items()}


def default_grid(
    block: int,
    positions: int,
    k: int,
    ks: Sequence[int] = (),
    reads_own_length: bool = False,
    flat_in_k: bool = False,
    recurrent: bool = False,
) -> Grid:
    """Returns the grid without --buckets: 1 and 4 rows, two lengths, K of 0, `k` and `ks`; without `ks` of `k` / 2.

    reads_own_length: whether attention costs each row its own length, whatever the bucket's; then one length is enough.
    flat_in_k: whether a round takes about as long for every K; then `k` / 2 is left out. The estimates of verify for
    K = 7 and 15, 4 rows: Qwen3-4B 11.6 and 11.4 ms (v5e), 8.4 and 8.5 (v4), 4.1 and 3.9 (v5p), 4.0 and 4.2 (v5e:2x2,
    where it stays); Qwen3-30B-A3B 23.6 and 26.8 (v5p), with one row 13.3 and 18.3. Qwen3-8B 10.5 and 10.4 for K = 0 and
    15 (v6e). One row costs less than 4: 4 to 5 % without the time for their kv.
    recurrent: whether the target has recurrent state. Then two states for each row are saved, about as many as texts of
    the longest length whose kv the pool keeps: a prompt leaves one or two.
    Raises BadInput for models with fewer positions than a block.
    """
    if positions < block:
        raise BadInput(
            f"max_position_embeddings of the pair allows {positions} positions: too few for a block of {block}, "
            f"so there is no default grid. Set --buckets with k below {positions}"
        )
    longest = min(1024, positions)
    return make_grid(
        {
            "batch": [1, 4],
            "length": sorted({longest if reads_own_length else max(block, longest // 4), longest}),
            "k": sorted({0, k, *(ks or ([] if flat_in_k else [k // 2]))}),
            "prefill": sorted({min(64, longest), min(256, longest)}),
            **({"saved_states": [8]} if recurrent else {}),
        },
        block,
        "the default grid",
    )


def check_positions(grid: Grid, positions: Mapping[str, int]) -> None:
    """Raises BadInput for a grid longer than the positions of a model; `positions` is by the name of its config."""
    for config, allowed in positions.items():
        if grid.capacity > allowed:
            raise BadInput(
                f"length={grid.capacity}, but {config} allows {allowed} (max_position_embeddings). If the model was "
                "trained for longer texts, raise max_position_embeddings there; a target is stretched by YaRN "
                "(rope_scaling with factor and original_max_position_embeddings)"
            )
