"""Executable checks: finds unexpected temporaries, copies, collectives and layouts in manifest entries."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.signature import ArraySpec, Signature
from dflash_aot.compile.analysis.copy_analysis import LARGE_COPY_BYTES

MAX_TEMPORARIES_SHARE = 0.02  # temporaries of one executable, as a share of weights and state
# Programs whose temporaries are checked.
LEAN_PROGRAMS = frozenset({"draft", "verify", "sampled_verify", "kv_write", "rounds"})
MAX_LOGITS_ARRAYS = 3  # float32 arrays of the size of the logits that a sampled verification may need besides


def find_problems(entry: Entry, known: Mapping[str, ArraySpec], devices: int, collectives: int) -> list[str]:
    """Lists what is wrong with a TPU executable, one line per problem, which names the executable and the buffer.

    Not for CPU executables: XLA copies freely on CPU, and the copies are cheap.

    Args:
        entry: the executable's entry in the manifest.
        known: weights and state by name.
        devices: number of devices that share the executable.
        collectives: the number of collectives that the program needs.
    """
    found = [
        *_check_temporaries(entry, known, devices),
        *_check_copies(entry, known),
        *_check_collectives(entry, collectives),
    ]
    return [f"{entry.signature.label}: {line}" for line in found]


def find_layout_conflicts(entries: Iterable[Entry]) -> list[str]:
    """Lists buffers that several executables use with different layouts, on every platform.

    An executable would refuse a buffer that another one left in a different layout. Weights and state are shared by
    name. Arguments and results of one name and shape are taken to be the same buffer.
    """
    places: dict[tuple[str, tuple[int, ...]], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
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
    held, taken = sum(array.shard_bytes(devices) for array in known.values()), entry.memory.temporaries
    allowed = max(MAX_TEMPORARIES_SHARE * held, LARGE_COPY_BYTES) + MAX_LOGITS_ARRAYS * _logits_bytes(
        entry.signature, known, devices
    )
    if entry.signature.program in LEAN_PROGRAMS and taken > allowed:
        yield (
            f"{_megabytes(taken)} of temporaries are {taken / held:.1%} of weights and state ({_megabytes(held)}), "
            f"more than {MAX_TEMPORARIES_SHARE:.0%}; the largest: {entry.analysis.largest}"
        )


def _logits_bytes(signature: Signature, known: Mapping[str, ArraySpec], devices: int) -> int:
    """Size of the logits of a sampled verification on each device; 0 for other programs."""
    if signature.program != "sampled_verify":
        return 0
    return (
        signature.bucket["batch"]
        * (signature.bucket["k"] + 1)
        * known["bias"].shard_bytes(devices)
        // known["bias"].shape[0]
    )


def _check_copies(entry: Entry, known: Mapping[str, ArraySpec]) -> Iterable[str]:
    """Copies of weights and state. Arguments of a call may be copied, and a move copies on purpose."""
    for copy in entry.analysis.copies:
        if copy.buffer in known and entry.signature.program != "move":
            made = f" ({copy.operation})" if copy.operation else ""
            yield f"{copy.buffer} is copied, {_megabytes(copy.bytes)}: %{copy.instruction} = {copy.shape}{made}"


def _check_collectives(entry: Entry, expected: int) -> Iterable[str]:
    found = entry.analysis.collectives
    if (count := sum(found.values())) > expected:
        kinds = ", ".join(f"{number} {kind}" for kind, number in found.items())
        yield f"{count} collectives ({kinds}), but the program needs {expected}"


def _buffers(signature: Signature) -> Iterable[tuple[str, tuple[int, ...]]]:
    yield from ((name, ()) for name in (*signature.weights, *signature.state))
    yield from ((array.name, array.shape) for array in (*signature.arguments, *signature.results))


def _shorten(labels: list[str]) -> str:
    first, *more = labels
    return f"{first} and {len(more)} more" if more else first


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
