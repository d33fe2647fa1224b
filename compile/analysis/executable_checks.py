"""What is wrong with an executable, in words: found in what its entry says of it, before it ever runs."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.signature import ArraySpec, Signature
from dflash_aot.compile.analysis.copy_analysis import LARGE_COPY_BYTES

MAX_TEMPORARIES_SHARE = 0.02  # of weights and kv: what one executable may need beside them
LEAN_PROGRAMS = frozenset({"draft", "verify", "sampled_verify", "kv_write", "rounds"})
MAX_LOGITS_ARRAYS = 3  # arrays of the size of its logits, float32, that a sampled verification may need besides


def find_problems(entry: Entry, known: Mapping[str, ArraySpec], devices: int, collectives: int) -> list[str]:
    """For TPU executables only: on CPU XLA copies freely, and it costs little.

    `known` holds weights and state by name, `collectives` is what the program itself lets `devices` exchange. Every
    line names the executable and the buffer.
    """
    found = [
        *_check_temporaries(entry, known, devices),
        *_check_copies(entry, known),
        *_check_collectives(entry, collectives),
    ]
    return [f"{entry.signature.label}: {line}" for line in found]


def find_layout_conflicts(entries: Iterable[Entry]) -> list[str]:
    """Buffers that executables share or pass on to each other, and that do not lie the same in all of them.

    On every platform: such an executable would be refused what the one before it has left. Weights and state are
    shared by name; of arguments and results those of one name and shape are taken to be the same.
    """
    places: dict[tuple[str, tuple[int, ...]], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        for key in _buffers(entry.signature):
            places[key][entry.analysis.layouts[key[0]]].append(entry.signature.label)
    return [
        f"{name} lies differently: {'; '.join(f'{layout} in {_count(labels)}' for layout, labels in found.items())}"
        for (name, _), found in places.items()
        if len(found) > 1
    ]


def _check_temporaries(entry: Entry, known: Mapping[str, ArraySpec], devices: int) -> Iterable[str]:
    held, taken = sum(array.shard_bytes(devices) for array in known.values()), entry.memory.temporaries
    allowed = max(MAX_TEMPORARIES_SHARE * held, LARGE_COPY_BYTES) + MAX_LOGITS_ARRAYS * _logits_bytes(
        entry.signature, known, devices
    )
    if entry.signature.program in LEAN_PROGRAMS and taken > allowed:
        yield (
            f"{_megabytes(taken)} of temporaries are {taken / held:.1%} of weights and kv, {_megabytes(held)}, "
            f"more than {MAX_TEMPORARIES_SHARE:.0%}: {entry.analysis.largest}"
        )


def _logits_bytes(signature: Signature, known: Mapping[str, ArraySpec], devices: int) -> int:
    """Of what a sampled verification chooses from, on each device; 0 for other programs."""
    if signature.program != "sampled_verify":
        return 0
    return (
        signature.bucket["batch"]
        * (signature.bucket["k"] + 1)
        * known["bias"].shard_bytes(devices)
        // known["bias"].shape[0]
    )


def _check_copies(entry: Entry, known: Mapping[str, ArraySpec]) -> Iterable[str]:
    """Of weights and state; what a call brings with it may be laid out anew. A move is there to copy."""
    for copy in entry.analysis.copies:
        if copy.buffer in known and entry.signature.program != "move":
            made = f" ({copy.operation})" if copy.operation else ""
            yield f"{copy.buffer} is copied, {_megabytes(copy.bytes)}: %{copy.instruction} = {copy.shape}{made}"


def _check_collectives(entry: Entry, expected: int) -> Iterable[str]:
    found = entry.analysis.collectives
    if (count := sum(found.values())) > expected:
        kinds = ", ".join(f"{number} {kind}" for kind, number in found.items())
        yield f"{count} collectives ({kinds}), the program has {expected}"


def _buffers(signature: Signature) -> Iterable[tuple[str, tuple[int, ...]]]:
    yield from ((name, ()) for name in (*signature.weights, *signature.state))
    yield from ((array.name, array.shape) for array in (*signature.arguments, *signature.results))


def _count(labels: list[str]) -> str:
    first, *more = labels
    return f"{first} and {len(more)} more" if more else first


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
