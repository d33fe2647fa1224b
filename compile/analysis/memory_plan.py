"""Memory plan: how much device memory a bundle needs, from the compiler's figures or, before a build, an estimate."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from dflash_aot.cache.arrays import (
    ArraySpec,
    PairShapes,
    arrays_by_name,
    count_transfer_bytes,
    state_arrays,
)
from dflash_aot.cache.bundle.manifest import Entry, MemoryUse
from dflash_aot.cache.chips import Chip
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.grid import Bucket, Grid
from dflash_aot.cache.signature import ExecutableId, Signature
from dflash_aot.cache.weight_recipe import ITEM_BYTES
from dflash_aot.compile.kernels.kernel_device import LANES, SUBLANES
from dflash_aot.compile.programs.programs import (
    BODIES,
    Programs,
    count_call_tokens,
    find_figures,
)

LONGEST_TILE = 1024
PROPOSED_LENGTH_STEP = 128  # proposed lengths are multiples
MAX_PROPOSED_BATCH = 1 << 16
# libtpu 0.0.52 counts 1 MiB of "global memory" as code of every executable, libtpu 0.0.42.1 none. Estimates include it.
GLOBAL_MEMORY_BYTES = 2**20
# dimensions from major to minor, and the tile to which the last dimensions are padded
Layout = tuple[tuple[int, ...], tuple[int, ...]]


class MemoryPlan(msgspec.Struct, frozen=True):
    """Bytes of one device while a bundle is served: all executables are loaded, and one runs at a time.

    Attributes:
        weights: of both models.
        state: kv arrays and the other state.
        temporaries: of the executable that needs most in addition to weights and state, including its results; and
            copies on their way to the host, and from it.
        code: of all executables.
    """

    weights: int
    state: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.temporaries + self.code


class GridProposal(msgspec.Struct, frozen=True):
    """The largest grid that fits.

    Attributes:
        batch: the largest batch at the grid's longest length; None if no batch fits.
        length: the longest length at the grid's largest batch; None if no length fits.
        kv_positions: the largest pool of kv pages, in positions, at the grid's largest batch and longest length; None
            if no pool that holds the longest request fits.
    """

    batch: int | None
    length: int | None
    kv_positions: int | None


class CompilerFigures(msgspec.Struct, frozen=True):
    """What the compiler reported for a build.

    Attributes:
        memory: by the executable's label.
        layouts: of weights and state, by name, as XLA writes them.
        seconds: estimated times of the executables for which there is an estimate.
    """

    memory: Mapping[str, MemoryUse] = {}
    layouts: Mapping[str, str] = {}
    seconds: Mapping[ExecutableId, float] = {}


def read_compiler_figures(entries: Iterable[Entry]) -> CompilerFigures:
    """The compiler's figures in the entries of a build."""
    entries = tuple(entries)
    # Not of arguments: an argument may have the name of a state array and another shape.
    layouts = {
        name: entry.analysis.layouts[name]
        for entry in entries
        for name in (*entry.signature.weights, *entry.signature.state)
    }
    return CompilerFigures(
        {entry.signature.label: entry.memory for entry in entries}, layouts, read_estimates(entries)
    )


def read_estimates(entries: Iterable[Entry]) -> dict[ExecutableId, float]:
    """Estimated seconds of the executables for which there is an estimate."""
    times = {entry.signature.executable_id: entry.cost.estimate_seconds for entry in entries}
    return {name: seconds for name, seconds in times.items() if seconds is not None}


class MemoryPlanner:
    """Makes memory plans of a pair for any grid, from the compiler's figures if there are any, else from estimates."""

    def __init__(
        self, programs: Programs, devices: int, tiled: bool, measured: CompilerFigures | None = None
    ):
        """Prepares plans of one pair.

        Args:
            programs: of the pair.
            devices: number of devices that share the pair.
            tiled: whether arrays are padded to tiles, as on TPU.
            measured: the compiler's figures of a build.
        """
        self._programs = programs
        self._devices = devices
        self._tiled = tiled
        self._measured = measured or CompilerFigures()
        self._weights = arrays_by_name((), programs.recipes())
        self._weight_sums: dict[tuple[str, ...], int] = {}

    def plan(self, grid: Grid) -> MemoryPlan:
        """The memory plan of a bundle with this grid."""
        state = {array.name: array for array in state_arrays(self._programs.pair, grid)}
        known = {**state, **self._weights}
        measured = self._measured.memory
        memories = [
            measured.get(one.label) or self.estimate(one, known)
            for one in self._programs.list_signatures(grid)
        ]
        return MemoryPlan(
            weights=self._sum_weights(tuple(self._weights)),
            state=sum(map(self._held_bytes, state.values())),
            temporaries=max(one.temporaries + one.outputs - one.aliased for one in memories)
            + count_transfer_bytes(self._programs.pair, grid) // self._devices,
            code=sum(one.code for one in memories),
        )

    def estimate(self, signature: Signature, known: Mapping[str, ArraySpec]) -> MemoryUse:
        """Estimates the compiler's figures of an executable; `known` holds weights and state by name."""
        aliased = sum(self._held_bytes(known[name]) for name in signature.donated)
        held = self._sum_weights(signature.weights) + sum(
            self._held_bytes(known[name]) for name in signature.state
        )
        return MemoryUse(
            arguments=held + sum(map(self._call_bytes, signature.arguments)),
            outputs=aliased + sum(map(self._call_bytes, signature.results)),
            aliased=aliased,
            temporaries=BODIES[signature.program].estimate_temporaries(
                signature, self._programs.pair, self._devices
            ),
            code=estimate_code(signature, self._programs.pair),
        )

    def propose(self, grid: Grid, available: int, positions: int) -> GridProposal:
        """Returns how far the grid can grow: batch, length or pool of kv pages, each with the others as they are.

        `available` is in bytes; `positions` is the longest length that the models support.
        """
        estimates = MemoryPlanner(self._programs, self._devices, self._tiled)
        # what the compiler's figures add
        beyond = self.plan(grid).total - estimates.plan(grid).total

        def fits(batch: int, length: int) -> bool:
            return estimates.plan(move_corner(grid, batch, length)).total + beyond <= available

        def holds(pages: int) -> bool:
            positions = max(grid.capacity, pages * grid.page)
            return (
                estimates.plan(msgspec.structs.replace(grid, kv_positions=positions)).total + beyond
                <= available
            )

        steps = _find_largest(
            lambda n: fits(grid.slots, n * PROPOSED_LENGTH_STEP), positions // PROPOSED_LENGTH_STEP
        )
        pages = _find_largest(holds, grid.slots * grid.row_pages)
        return GridProposal(
            _find_largest(lambda batch: fits(batch, grid.capacity), MAX_PROPOSED_BATCH),
            steps and steps * PROPOSED_LENGTH_STEP,
            pages and max(grid.capacity, pages * grid.page),
        )

    def _sum_weights(self, names: tuple[str, ...]) -> int:
        """Bytes of these weights on one device. Summed once: all executables of a program have the same."""
        if names not in self._weight_sums:
            self._weight_sums[names] = sum(self._held_bytes(self._weights[name]) for name in names)
        return self._weight_sums[names]

    def _held_bytes(self, array: ArraySpec) -> int:
        """Bytes of weights or state on one device."""
        layout = self._measured.layouts.get(array.name)
        if not layout:
            return self._call_bytes(array)
        return padded_bytes(array.shard_shape(self._devices), array.dtype, *read_layout(layout))

    def _call_bytes(self, array: ArraySpec) -> int:
        """Bytes of an argument or result on one device, in an estimated layout."""
        return _estimate_bytes(array.shard_shape(self._devices), array.dtype, self._tiled)


def check_fits(
    programs: Programs,
    grid: Grid,
    devices: int,
    chip: Chip,
    positions: int,
    measured: CompilerFigures | None = None,
) -> str | None:
    """Checks that a grid fits a TPU chip. Returns None, or a warning if only an estimate exceeds the memory.

    Raises BuildFailed, with figures and with what would fit, if it is certain that the grid does not fit: weights and
    state alone are too large, or the figures are the compiler's. An estimate may be wrong by a few percent, so in that
    case the compiler decides.
    """
    planner = MemoryPlanner(programs, devices, tiled=True, measured=measured)
    available = chip.available_bytes
    plan = planner.plan(grid)
    if plan.total <= available:
        return None
    verdict = (
        f"does not fit {chip.name}, per device: {describe_verdict(plan, available)}. "
        f"{describe_proposal(planner.propose(grid, available, positions), grid)}"
    )
    if measured is None and plan.weights + plan.state <= available:
        return f"by an estimate, {grid} {verdict}. The compiler decides"
    raise BuildFailed(f"{grid} {verdict}")


def describe_verdict(plan: MemoryPlan, available: int) -> str:
    """The parts of a memory plan, their sum, and what is left or missing, as text."""
    left = available - plan.total
    verdict = f"{gigabytes(left)} left" if left >= 0 else f"{gigabytes(-left)} too much"
    parts = {"weights": plan.weights, "state": plan.state}
    parts |= {"temporaries": plan.temporaries, "code": plan.code}
    listed = " + ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
    return f"{listed} = {plan.total / 1e9:.2f} of {gigabytes(available)}, {verdict}"


def describe_proposal(proposal: GridProposal, grid: Grid) -> str:
    """A proposal as text."""
    if proposal == GridProposal(None, None, None):
        return "No grid of this pair fits: use more or larger devices, or a narrower --dtype"
    at_length = f"batch={proposal.batch}" if proposal.batch else "no batch"
    at_batch = f"length={proposal.length}" if proposal.length else "no length"
    pool = f"kv_positions={proposal.kv_positions}" if proposal.kv_positions else "no kv_positions"
    return f"What would fit: {at_length} at length={grid.capacity}, {at_batch} at batch={grid.slots}, {pool} at both"


def cut_grid(grid: Grid, bucket: Bucket) -> Grid:
    """The part of a grid up to one of its buckets."""
    return msgspec.structs.replace(
        grid,
        batch=tuple(size for size in grid.batch if size <= bucket.batch),
        length=tuple(size for size in grid.length if size <= bucket.length),
        k=tuple(size for size in grid.k if size <= bucket.k),
        prefill=_cut_prefill(grid, bucket.length),
        kv_positions=grid.kv_positions
        and max(bucket.length, min(grid.kv_positions, bucket.batch * bucket.length)),
    )


def move_corner(grid: Grid, batch: int, length: int) -> Grid:
    """The grid with another largest batch and another longest length."""
    return msgspec.structs.replace(
        grid,
        batch=(*(size for size in grid.batch if size < batch), batch),
        length=(*(size for size in grid.length if size < length), length),
        prefill=_cut_prefill(grid, length),
        kv_positions=grid.kv_positions and max(grid.kv_positions, length),
    )


def _cut_prefill(grid: Grid, length: int) -> tuple[int, ...]:
    """The chunks of a grid, none wider than the longest length."""
    return tuple(sorted({min(size, length) for size in grid.prefill}))


def choose_layout(shape: tuple[int, ...], dtype: str, tiled: bool) -> Layout:
    """The TPU compiler's layout of an argument: in order, or in another order that pads less.

    The last two dimensions are swapped, or a next to last dimension of one element comes first.
    """
    order = tuple(range(len(shape)))
    if not tiled or not shape:
        return order, ()
    orders = [order, (*order[:-2], *reversed(order[-2:]))]
    if shape[-2:-1] == (1,):
        orders.append((*order[-2:-1], *order[:-2], *order[-1:]))
    layouts = [(one, _choose_tile([shape[axis] for axis in one], dtype)) for one in orders]
    return min(layouts, key=lambda layout: padded_bytes(shape, dtype, *layout))


@functools.lru_cache(maxsize=4096)  # proposals make dozens of plans, with the same arrays in most
def _estimate_bytes(shape: tuple[int, ...], dtype: str, tiled: bool) -> int:
    """Bytes of an array in the estimated layout."""
    return padded_bytes(shape, dtype, *choose_layout(shape, dtype, tiled))


def _choose_tile(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """The tile to which the last dimensions are padded, as `compiled.input_formats` shows it (libtpu 0.0.42).

    The last dimension is padded to 128, the one before it to 8 or a smaller power of two. An array of one dimension is
    padded to 128, 256, 512 or 1024. Narrow dtypes are packed to 4 bytes, and a tile holds whole packs.
    """
    packed = 4 // ITEM_BYTES[dtype]
    if len(shape) == 1:
        return (min(LONGEST_TILE, max(LANES * packed, _power_of_two(shape[0]))),)
    return (min(SUBLANES, max(packed, _power_of_two(shape[-2]))), LANES)


def read_layout(layout: str) -> Layout:
    """Parses XLA's text of a layout: dimensions from minor to major, then tiles, of which the first pads the array."""
    found = re.fullmatch(r"\{([\d,]*)(?::T\(([\d,]+)\).*)?\}", layout)
    assert found, layout
    minor_to_major, tile = found.groups()
    return _read_numbers(minor_to_major)[::-1], _read_numbers(tile)


def _read_numbers(text: str | None) -> tuple[int, ...]:
    """Numbers with commas between them; () for None and for an empty text."""
    return tuple(map(int, text.split(","))) if text else ()


def padded_bytes(
    shape: tuple[int, ...], dtype: str, order: tuple[int, ...], tile: tuple[int, ...]
) -> int:
    """Bytes of an array with its dimensions in `order`, from major to minor, and the last ones padded to `tile`."""
    ordered = [shape[axis] for axis in order]
    whole = len(ordered) - len(tile)
    padded = [-(-size // step) * step for size, step in zip(ordered[whole:], tile, strict=True)]
    return math.prod((*ordered[:whole], *padded)) * ITEM_BYTES[dtype]


def estimate_code(signature: Signature, pair: PairShapes) -> int:
    """Estimates the code size of a TPU executable in bytes, from the number of tokens of a call."""
    fixed, per_token = find_figures(signature).code_bytes
    return GLOBAL_MEMORY_BYTES + fixed + per_token * count_call_tokens(signature, pair)


def gigabytes(count: float) -> str:
    """Bytes as text in GB."""
    return f"{count / 1e9:.2f} GB"


def _power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _find_largest(fits: Callable[[int], bool], limit: int) -> int | None:
    """The largest of 1 … limit that fits, by bisection; None if 1 does not fit."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low or None
