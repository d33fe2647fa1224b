"""What a build left behind of an executable, under its key, in a bundle or a shared store: an entry, as JSON."""

import msgspec

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.signature import Signature

OTHER_PROGRAM = "the record of what was compiled from another program"


def decode_record(content: bytes) -> Entry:
    """Raises ValueError."""
    try:
        return msgspec.json.decode(content, type=Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def find_record(content: bytes, key: str, signature: Signature, program: bytes) -> Entry:
    """Of what was compiled from this program, as far as a record says it. Raises ValueError."""
    entry = decode_record(content)
    if entry.key != key:
        raise ValueError(f"the record of {entry.key}")
    if entry.signature != signature:
        raise ValueError(f"the record of {entry.signature.label}, with another signature than was asked for")
    if entry.program.serialized_bytes != len(program):  # nothing is unpacked to what only a record claims
        raise ValueError(OTHER_PROGRAM)
    return entry
