"""Blobs with more bytes than their compressed content."""

import hashlib

import pytest

from dflash_aot.cache.bundle.blob import BrokenBlob, pack_blob, unpack_blob
from dflash_aot.cache.bundle.manifest import Blob


def test_bytes_behind_the_compressed_content_are_refused():
    _, packed = pack_blob(b"serialized")
    longer = packed + b"x"
    blob = Blob(hashlib.sha256(longer).hexdigest(), len(longer), len(b"serialized"))
    with pytest.raises(BrokenBlob, match="does not unpack to 10 bytes"):
        unpack_blob(blob, longer)
