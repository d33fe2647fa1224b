"""Blobs: packing, verification, and limits of size and memory."""

import hashlib
import pickle
import subprocess
import sys
import tracemalloc

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import (
    MAX_BLOB_BYTES,
    BrokenBlob,
    find_blob_flaw,
    pack_blob,
    read_blob_file,
    unpack_blob,
)
from dflash_aot.cache.bundle.manifest import Blob
from dflash_aot.cache.errors import CorruptBundle

UNPACK_WITH_LITTLE_MEMORY = """
import resource
from dflash_aot.cache.bundle.blob import find_blob_flaw, pack_blob

blob, content = pack_blob(bytes(1 << 27))
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 25),) * 2)
flaw = find_blob_flaw(blob, content)
print(flaw.content, flaw)
"""


class Calls:
    """A pickle that calls a function when it is loaded."""

    def __reduce__(self):
        return print, ("called",)


@pytest.mark.parametrize("serialized", [b"", b"x", bytes(range(256)) * 100])
def test_unpack_inverts_pack(serialized):
    blob, content = pack_blob(serialized)
    assert (blob.bytes, blob.serialized_bytes) == (len(content), len(serialized))
    assert unpack_blob(blob, content) == serialized
    assert find_blob_flaw(blob, content) is None


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (lambda content: content[:-1], "bytes", "bytes, the manifest says"),
        (lambda content: bytes([content[0] ^ 1]) + content[1:], "sha256", "its sha256 is"),
    ],
)
def test_flaw_has_field_and_both_values(change, field, words):
    blob, content = pack_blob(b"serialized")
    flaw = find_blob_flaw(blob, change(content))
    assert flaw.field == field and words in str(flaw) and flaw.content
    assert flaw.expected == str(getattr(blob, field)) != flaw.found


@pytest.mark.parametrize("size", [MAX_BLOB_BYTES + 1, (1 << 63) - 1, 1 << 63, 1 << 80])
def test_size_beyond_the_limit_is_refused_without_unpacking(size):
    _, bomb = pack_blob(bytes(10**7))
    blob = Blob(hashlib.sha256(bomb).hexdigest(), len(bomb), size)
    tracemalloc.start()
    with pytest.raises(BrokenBlob, match=rf"unpack to {size} bytes, more than the limit of {MAX_BLOB_BYTES}"):
        unpack_blob(blob, bomb)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_lack_of_memory_is_not_a_flaw_of_the_content():
    done = subprocess.run([sys.executable, "-c", UNPACK_WITH_LITTLE_MEMORY], capture_output=True, text=True, check=True)
    assert done.stdout == f"False unpacks to {1 << 27} bytes, more than the free memory\n"


@pytest.mark.parametrize("content", [pickle.dumps(Calls()), b"no pickle"])
def test_pickle_is_checked_for_executables_only(manifest, content):
    blob, packed = pack_blob(content)
    flaw = find_blob_flaw(structs.replace(manifest.entries[0], **structs.asdict(blob)), packed)
    assert flaw.field == "pickle" and "pickle" in str(flaw) and flaw.content
    assert unpack_blob(blob, packed) == content


def test_file_beyond_the_limit_is_not_read(tmp_path):
    blob, _ = pack_blob(b"little")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)  # takes no place on the disk
    with pytest.raises(CorruptBundle, match="huge: 1099511627776 bytes, where at most 1073741824 are read"):
        read_blob_file(blob, tmp_path / "huge")
