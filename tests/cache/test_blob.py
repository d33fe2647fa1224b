"""Blobs: packing, verification, and limits of size and memory."""

import hashlib
import os
import pickle
import subprocess
import sys
import tracemalloc

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import (
    MAX_BLOB_BYTES,
    MAX_EXPANSION,
    MAX_PROGRAM_EXPANSION,
    SMALL_BLOB_BYTES,
    BrokenBlob,
    decompress_blob,
    find_blob_flaw,
    find_excess,
    pack_blob,
    read_blob_file,
    unpack_blob,
)
from dflash_aot.cache.bundle.manifest import Blob
from dflash_aot.cache.errors import CorruptBundle

UNPACK_WITH_LITTLE_MEMORY = """
import random, resource
from dflash_aot.cache.bundle.blob import find_blob_flaw, pack_blob

blob, content = pack_blob(random.Random(0).randbytes(1 << 26))
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 24),) * 2)
flaw = find_blob_flaw(blob, content)
print(flaw.content, flaw)
"""


def test_unpack_inverts_pack():
    for serialized in [b"", b"x", bytes(range(256)) * 100]:
        blob, content = pack_blob(serialized)
        assert (blob.bytes, blob.serialized_bytes) == (len(content), len(serialized))
        assert unpack_blob(blob, content) == serialized
        assert find_blob_flaw(blob, content) is None


def test_flaw_has_field_and_both_values():
    for change, field, words in [
        (lambda content: content[:-1], "bytes", "bytes, the manifest says"),
        (lambda content: bytes([content[0] ^ 1]) + content[1:], "sha256", "its sha256 is"),
    ]:
        blob, content = pack_blob(b"serialized")
        flaw = find_blob_flaw(blob, change(content))
        assert flaw.field == field and words in str(flaw) and flaw.content
        assert flaw.expected == str(getattr(blob, field)) != flaw.found


def test_size_beyond_the_limit_is_refused_without_unpacking():
    for size in [SMALL_BLOB_BYTES + 1, 1 << 80]:
        _, bomb = pack_blob(bytes(10**7))
        blob = Blob(hashlib.sha256(bomb).hexdigest(), len(bomb), size)
        tracemalloc.start()
        with pytest.raises(
            BrokenBlob, match=rf"unpack to {size} bytes, more than the limit of {SMALL_BLOB_BYTES} for a file of"
        ):
            unpack_blob(blob, bomb)
        assert tracemalloc.get_traced_memory()[1] < 10**6
        tracemalloc.stop()


def test_lack_of_memory_is_no_flaw_of_content():
    command = [sys.executable, "-c", UNPACK_WITH_LITTLE_MEMORY]
    environment = {**os.environ, "LD_PRELOAD": ""}  # jemalloc would keep the memory that packing took
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == f"False unpacks to {1 << 26} bytes, more than the free memory\n"


def test_executable_is_limited_by_its_file_and_its_program(manifest):
    for file, program, limit in [
        (1 << 17, 1 << 20, MAX_EXPANSION << 17),
        (1 << 22, 1 << 10, MAX_PROGRAM_EXPANSION << 10),
        (1 << 27, 1 << 27, MAX_BLOB_BYTES),
        (10, 10, SMALL_BLOB_BYTES),
    ]:
        entry = manifest.entries[0]
        program_blob = structs.replace(entry.program, serialized_bytes=program)
        for size, words in (
            (limit, "Error"),
            (limit + 1, f"should unpack to {limit + 1} bytes, more than the limit of {limit}"),
        ):
            entry = structs.replace(entry, bytes=file, serialized_bytes=size, program=program_blob)
            with pytest.raises(BrokenBlob, match=words):
                decompress_blob(entry, b"no compressed bytes")
            assert bool(find_excess(entry)) == (size > limit)
    assert f"more than the limit of {MAX_BLOB_BYTES}" in find_excess(structs.replace(entry, bytes=MAX_BLOB_BYTES + 1))


def test_pickle_is_checked_for_executables_only(manifest):
    for content in [pickle.dumps(print), b"no pickle"]:
        blob, packed = pack_blob(content)
        flaw = find_blob_flaw(structs.replace(manifest.entries[0], **structs.asdict(blob)), packed)
        assert flaw.field == "pickle" and "pickle" in str(flaw) and flaw.content
        assert unpack_blob(blob, packed) == content


def test_file_beyond_the_limit_is_not_read(tmp_path):
    blob, _ = pack_blob(b"little")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)  # takes no place on the disk
    with pytest.raises(CorruptBundle, match=f"huge: 1099511627776 bytes, where at most {MAX_BLOB_BYTES} are read"):
        read_blob_file(blob, tmp_path / "huge")


def test_content_that_does_not_unpack_is_refused_whatever_its_hash():
    _, packed = pack_blob(b"serialized")
    for content, words in [
        (packed + b"x", "does not unpack to 10 bytes"),
        (packed[:-1], "does not unpack to 10 bytes"),  # its checksum is cut off
        (packed[:-1] + b"?", "incorrect data check"),
        (b"serialized", "unknown compression method|incorrect header check"),
    ]:
        blob = Blob(hashlib.sha256(content).hexdigest(), len(content), len(b"serialized"))
        with pytest.raises(BrokenBlob, match=words):
            unpack_blob(blob, content)
