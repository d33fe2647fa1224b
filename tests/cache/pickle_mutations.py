"""Hostile variants of real pickles, and a process that scans and loads them: python -m tests.cache.pickle_mutations

The process reads a bundle's directory, the label of an executable, a seed and "scan" or "load" from its arguments, and
numbers of variants from its input. It prints the number of each variant that passes the scan, or what loading it gives.
"""

import pickletools
import random
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_aot.cache.bundle.manifest import Entry, Manifest, read_manifest
from dflash_aot.cache.bundle.pickle_scan import find_table, scan_pickle
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle

CPU_SECONDS, MEMORY = 2, 200_000_000  # of a variant; of all variants of a process
CODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes if opcode.arg is None]
TEXTS = ["", "os", "system", "numpy", "dtype", "ndarray", "O8", "V999999999", "f4", "exec", "device", "client", "model"]
NUMBERS = [0, 1, 2, 3, 7, 63, 64, 255, 256, 65535, 2**31 - 1]


def mutate(parts: list[bytes], seed: int, number: int) -> bytes:
    """Returns a variant of a pickle: opcodes removed, repeated, moved, added, or with other arguments. Code is kept."""
    chance, variant = random.Random(f"{seed} {number}"), list(parts)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        _mutate_once(variant, chance)
    return b"".join(variant)


def split_opcodes(blob: bytes) -> Iterator[bytes]:
    """Yields each opcode with its argument, without the frames, whose lengths would no longer be right."""
    starts = [(opcode.name, position) for opcode, _, position in pickletools.genops(blob)]
    for (name, start), (_, end) in zip(starts, [*starts[1:], ("", len(blob))], strict=True):
        if name != "FRAME":
            yield blob[start:end]


def _mutate_once(parts: list[bytes], chance: random.Random) -> None:
    at = chance.randrange(1, len(parts))
    match chance.randrange(10):
        case 0:
            del parts[at]
        case 1:
            parts.insert(at, parts[at])
        case 2:
            parts.insert(at, parts.pop(chance.randrange(1, len(parts))))
        case 3:
            length = chance.randrange(1, 30)
            parts[at:at] = parts[(start := chance.randrange(1, len(parts))) : start + length]
        case 4:
            parts.insert(at, _make_part(chance))
        case 5:
            parts[at] = _make_part(chance)
        case 6:
            parts[at] = parts[at][: chance.randrange(len(parts[at]) + 1)]
        case _:  # another argument, for the same kind of opcode
            kinds = [b"K", b"M", b"J", b"h", b"j", b"\x8c", b"N", b"\x88", b"\x89"]
            places = [place for place, part in enumerate(parts) if part[:1] == chance.choice(kinds)]
            if places:
                parts[place] = _change_argument(parts[place := chance.choice(places)], chance)


def _change_argument(part: bytes, chance: random.Random) -> bytes:
    match part[:1]:
        case b"h" | b"j":
            return b"h" + bytes([chance.randrange(256)])
        case b"\x8c":
            return _make_text(chance)
        case b"N" | b"\x88" | b"\x89":
            return chance.choice((b"N", b"\x88", b"\x89"))
    return _make_number(chance)


def _make_part(chance: random.Random) -> bytes:
    makers = [_make_text, _make_number, lambda chance: b"h" + bytes([chance.randrange(256)])]
    return chance.choice(makers)(chance) if chance.random() < 0.5 else chance.choice(CODES)


def _make_text(chance: random.Random) -> bytes:
    text = chance.choice(TEXTS).encode()
    return b"\x8c" + bytes([len(text)]) + text


def _make_number(chance: random.Random) -> bytes:
    number = chance.choice(NUMBERS) * chance.choice((1, 1, -1))
    return b"K" + bytes([number]) if 0 <= number < 256 else b"J" + struct.pack("<i", number)


@contextmanager
def limited_cpu_time() -> Iterator[None]:
    """Ends the process after too much CPU time inside."""
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def limit_memory(spare: int) -> None:
    """Limits the private writable memory of this process to its present size and `spare` bytes.

    Not the address space: parts of it are reserved for threads and could be filled beside the limit.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + spare,) * 2)


def main() -> None:
    bundle, label, seed, action = sys.argv[1:]
    manifest = read_manifest(Path(bundle))
    (entry,) = (entry for entry in manifest.entries if entry.signature.label == label)
    parts = list(split_opcodes(Store(Path(bundle)).read_executable(entry)))
    run = {"scan": scan_variant, "load": load_variant}[action]
    if action == "load":
        load_variant(b"", entry, manifest)  # starts JAX, outside of the limits
    limit_memory(MEMORY)
    for number in map(int, sys.stdin.read().split()):
        variant = mutate(parts, int(seed), number)
        with limited_cpu_time():
            words = run(variant, entry, manifest)
        if words is not None:
            print(number, words, flush=True)


def scan_variant(variant: bytes, entry: Entry, manifest: Manifest) -> str | None:
    try:
        scan_pickle(variant, entry.signature, find_table(manifest.environment.jax))
    except CorruptBundle:
        return None
    return "accepted"


def load_variant(variant: bytes, entry: Entry, manifest: Manifest) -> str:
    from dflash_aot.runtime.executables.executable import load_executable  # noqa: PLC0415  starts JAX
    from dflash_aot.runtime.executables.loaded_bundle import bundle_devices  # noqa: PLC0415

    try:
        load_executable(variant, entry.signature, bundle_devices(manifest), "here")
    except (CorruptBundle, IncompatibleBundle) as error:
        return str(error).splitlines()[0]
    return "loaded"


if __name__ == "__main__":
    main()
