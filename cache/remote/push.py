"""A bundle to where others fetch it from: its blobs first, its manifest last."""

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
from dflash_aot.cache.signing import signatures as signature_files

PUSH_THREADS = 4


class PushReport(msgspec.Struct, frozen=True):
    """Blobs that were sent, with their bytes, and those that were there."""

    url: str
    sent: int
    kept: int
    bytes: int


def push_bundle(bundle: Path, url: str, retry: RetryPolicy = DEFAULT_RETRY) -> PushReport:
    """What is there under its digest, and as long as it should be, is not sent again.

    Raises MissingBundle, CorruptBundle where the bundle is broken, StoreFailed.
    """
    content = read_manifest_bytes(bundle)
    manifest = parse_manifest(bundle, content)
    check_consistent(bundle, manifest)
    promises, signatures = list_expected_files(bundle, manifest), signature_files.read_signature_file(bundle)
    objects = open_object_store(url, retry)
    with ThreadPoolExecutor(PUSH_THREADS, thread_name_prefix="push") as pool:
        try:
            sending = [pool.submit(_send, objects, bundle, promise) for promise in promises]
            sent = [one.result() for one in sending]
        finally:
            pool.shutdown(cancel_futures=True)
    # Whoever sees the new manifest sees its signatures, too.
    if signatures is not None:
        objects.write(signature_files.SIGNATURE_FILE, signatures)
    elif objects.size(signature_files.SIGNATURE_FILE) is not None:
        objects.remove(signature_files.SIGNATURE_FILE)
    objects.write(MANIFEST_FILE, content)
    return PushReport(objects.url, sum(size > 0 for size in sent), sum(size == 0 for size in sent), sum(sent))


def _send(objects: ObjectStore, bundle: Path, promise: ExpectedFile) -> int:
    """How many bytes; none where it was there. It has to be whole here all the same."""
    try:
        content = read_blob_file(promise.blob, promise.path)
    except CorruptBundle as error:
        remedy = f"What mends it says {shlex.join(['dflash-bundle', 'verify', str(bundle)])}"
        raise CorruptBundle(f"{promise.label}: {error}. Nothing is published at {objects.url}. {remedy}") from error
    name = promise.path.relative_to(bundle).as_posix()
    if objects.size(name) == promise.blob.bytes:
        return 0
    objects.write(name, content)
    return len(content)
