"""Executable checks: finds unexpected temporaries, copies, collectives, layouts and times of executables."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from dflash_aot.cache.arrays import KV_POOLS, RING_STATE, ArraySpec
from dflash_aot.cache.bundle.manifest import Entry, LargeCopy
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.analysis.inspection import LARGE_COPY_BYTES
from dflash_aot.compile.programs.programs import BODIES, find_figures

POOLS = (*KV_POOLS, *RING_STATE)
MAX_TEMPORARIES_SHARE = 0.02  # temporaries of one executable, as a share of weights and state
# Estimated time over bound. A bare product with a large weight reaches 1.2 (v6e), 1.4 (v5e) and 1.6 (v5p).
MAX_RATIO = 3.0
# the fixed cost of instructions, 1 µs each, dominates executables with a smaller bound
MIN_RATED_SECONDS = 0.5e-3


def find_problems(
    entry: Entry, known: Mapping[str, ArraySpec], devices: int, collectives: int
) -> list[str]:
    """Lists what is wrong with a TPU executable, one line per problem, which names the executable and the buffer.

    Not for CPU and GPU executables: XLA copies freely there, and small copies are cheap. See `find_pool_copies`.

    Args:
        entry: the executable's entry in the manifest.
        known: weights and state by name.
        devices: number of devices that share the executable.
        collectives: the number of collectives that the program needs.
    """
    found = [
        *_check_temporaries(entry, known, devices),
        *_check_copies(entry, known, devices),
        *_check_collectives(entry, collectives),
        *_check_ratio(entry),
    ]
    return [f"{entry.signature.label}: {line}" for line in found]


def find_pool_copies(entry: Entry, known: Mapping[str, ArraySpec], devices: int) -> list[str]:
    """Lists copies of whole kv pools, which are expensive on every platform; arguments and lines as `find_problems`."""
    return [
        f"{entry.signature.label}: {_describe_copy(copy)}"
        for copy in entry.analysis.copies
        if copy.buffer in POOLS and copy.bytes >= known[copy.buffer].shard_bytes(devices)
    ]


def find_layout_conflicts(entries: Iterable[Entry]) -> list[str]:
    """Lists buffers that several executables use with different layouts, on every platform.

    An executable would refuse a buffer that another one left in a different layout. Weights and state are shared by
    name. Arguments and results of one name and shape are taken to be the same buffer.
    """
    places: dict[tuple[str, tuple[int, ...]], dict[str, list[str]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for entry in entries:
        for key in _buffers(entry.signature):
            places[key][entry.analysis.layouts[key[0]]].append(entry.signature.label)
    return [
        f"{name} has different layouts: "
        + "; ".join(f"{layout} in {_shorten(labels)}" for layout, labels in layouts.items())
        for (name, _), layouts in places.items()
        if len(layouts) > 1
    ]


def _check_temporaries(entry: Entry, known: Mapping[str, ArraySpec], devices: int) -> Iterable[str]:
    held = sum(array.shard_bytes(devices) for array in known.values())
    taken = entry.memory.temporaries
    allowed = max(MAX_TEMPORARIES_SHARE * held, LARGE_COPY_BYTES)
    if count := find_figures(entry.signature).logits_arrays:
        allowed += count * _logits_bytes(entry.signature, known, devices)
    if BODIES[entry.signature.program].checks_temporaries and taken > allowed:
        yield (
            f"{_megabytes(taken)} of temporaries are {taken / held:.1%} of weights and state ({_megabytes(held)}), "
            f"more than {MAX_TEMPORARIES_SHARE:.0%}; the largest: {entry.analysis.largest}"
        )


def _logits_bytes(signature: Signature, known: Mapping[str, ArraySpec], devices: int) -> int:
    """Size of the logits of a sampled verification on each device."""
    return (
        signature.bucket["batch"]
        * (signature.bucket["k"] + 1)
        * known["bias"].shard_bytes(devices)
        // known["bias"].shape[0]
    )


def _check_copies(entry: Entry, known: Mapping[str, ArraySpec], devices: int) -> Iterable[str]:
    """Copies of weights and state. Arguments of a call may be copied, and some programs copy on purpose.

    A write to a kv pool reads as many positions of a page as it writes, at most a page, of all layers, changes them and
    writes them back.
    """
    for copy in entry.analysis.copies:
        if copy.buffer not in known or BODIES[entry.signature.program].copies_state:
            continue
        written = (
            _count_written_bytes(entry.signature, known[copy.buffer], devices)
            if copy.buffer in POOLS
            else 0
        )
        if copy.bytes > written:
            yield _describe_copy(copy)


def _count_written_bytes(signature: Signature, pool: ArraySpec, devices: int) -> int:
    """The part of a page of a kv pool that one write of a call changes, in all layers; 0 if the call writes none."""
    if pool.name not in signature.donated:
        return 0
    _, pages, _, page, _ = pool.shape
    sizes = signature.bucket
    positions = max(
        sizes.get("prefill", 0),
        sizes.get("width", 0),
        sizes.get("k", -1) + 1,
        sizes.get("rounds", 0),
    )
    return pool.shard_bytes(devices) * min(page, positions) // (pages * page)


def _describe_copy(copy: LargeCopy) -> str:
    made = f" ({copy.operation})" if copy.operation else ""
    return f"{copy.buffer} is copied, {_megabytes(copy.bytes)}: %{copy.instruction} = {copy.shape}{made}"


def _check_collectives(entry: Entry, expected: int) -> Iterable[str]:
    found = entry.analysis.collectives
    if (count := sum(found.values())) > expected:
        kinds = ", ".join(f"{number} {kind}" for kind, number in found.items())
        yield f"{count} collectives ({kinds}), but the program needs {expected}"


def _check_ratio(entry: Entry) -> Iterable[str]:
    cost = entry.cost
    ratio = entry.cost.ratio
    if cost.schedule is msgspec.UNSET or cost.bound_seconds is msgspec.UNSET or ratio is None:
        return
    if (
        find_figures(entry.signature).rated
        and cost.bound_seconds >= MIN_RATED_SECONDS
        and ratio > MAX_RATIO
    ):
        longest = cost.schedule.largest[0]
        milliseconds = f"{longest.seconds * 1e3:.2f} ms"
        whole = f"{ratio * cost.bound_seconds * 1e3:.2f} ms"
        yield (
            f"estimated at {whole}, {ratio:.1f} times its bound, more than {MAX_RATIO:g}; "
            f"the longest: %{longest.instruction} = {longest.shape}, {milliseconds} ({longest.operation})"
        )


def _buffers(signature: Signature) -> Iterable[tuple[str, tuple[int, ...]]]:
    yield from ((name, ()) for name in (*signature.weights, *signature.state))
    yield from ((array.name, array.shape) for array in (*signature.arguments, *signature.results))


def _shorten(labels: list[str]) -> str:
    first, *more = labels
    return f"{first} and {len(more)} more" if more else first


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
