"""Pushes a bundle to an object store: its blobs first, its manifest last."""

import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.blob import read_blob_file
from dflash_aot.cache.bundle.manifest import MANIFEST_FILE, parse_manifest, read_manifest_bytes
from dflash_aot.cache.bundle.manifest_checks import check_consistent
from dflash_aot.cache.bundle.verification import ExpectedFile, list_expected_files
from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.remote.object_store import ObjectStore, open_object_store
from dflash_aot.cache.remote.retry import DEFAULT_RETRY, RetryPolicy
from dflash_aot.cache.signing.manifest_signature import SIGNATURE_FILE, read_signature_file

PUSH_THREADS = 4


class PushReport(msgspec.Struct, frozen=True):
    """What a push transferred.

    url: the destination, without secrets.
    sent: blobs that were sent.
    kept: blobs that were there already.
    bytes: size of the sent blobs.
    """

    url: str
    sent: int
    kept: int
    bytes: int


def push_bundle(bundle: Path, url: str, retry: RetryPolicy = DEFAULT_RETRY) -> PushReport:
    """Pushes a bundle; does not send blobs that are there already with the right size.

    Raises MissingBundle, CorruptBundle for a corrupt bundle, StoreFailed.
    """
    content = read_manifest_bytes(bundle)
    manifest = parse_manifest(bundle, content)
    check_consistent(bundle, manifest)
    expected_files, signatures = list_expected_files(bundle, manifest), read_signature_file(bundle)
    objects = open_object_store(url, retry)
    with ThreadPoolExecutor(PUSH_THREADS, thread_name_prefix="push") as pool:
        try:
            sending = [pool.submit(_send, objects, bundle, expected) for expected in expected_files]
            sent = [one.result() for one in sending]
        finally:
            pool.shutdown(cancel_futures=True)
    # Before the manifest, so that a client that sees the new manifest also sees its signatures.
    if signatures is not None:
        objects.write(SIGNATURE_FILE, signatures)
    elif objects.size(SIGNATURE_FILE) is not None:
        objects.remove(SIGNATURE_FILE)
    objects.write(MANIFEST_FILE, content)
    return PushReport(objects.url, sum(size > 0 for size in sent), sum(size == 0 for size in sent), sum(sent))


def _send(objects: ObjectStore, bundle: Path, expected: ExpectedFile) -> int:
    """Sends a file unless it is there; returns the bytes sent. The local file is verified in any case."""
    try:
        content = read_blob_file(expected.blob, expected.path)
    except CorruptBundle as error:
        remedy = f"For the command that rebuilds it: {shlex.join(['dflash-bundle', 'verify', str(bundle)])}"
        raise CorruptBundle(f"{expected.label}: {error}. Nothing is published at {objects.url}. {remedy}") from error
    name = expected.path.relative_to(bundle).as_posix()
    if objects.size(name) == expected.blob.bytes:
        return 0
    objects.write(name, content)
    return len(content)
