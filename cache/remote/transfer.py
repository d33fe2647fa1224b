"""Pushes a bundle to a URL, and fetches a bundle from a URL into the user's cache directory, verified and whole.

fetched/<hash of the URL>/<sha256 of manifest.json>/     the copy, a bundle; its manifest is written last
"""

import hashlib
import logging
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.blob import read_blob_file
from dflash_aot.cache.bundle.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    Manifest,
    decode_manifest,
    parse_manifest,
    read_manifest_bytes,
)
from dflash_aot.cache.bundle.manifest_signature import (
    MAX_SIGNATURE_BYTES,
    SIGNATURE_FILE,
    check_envelope,
    read_signature_file,
)
from dflash_aot.cache.bundle.verification import (
    ExpectedFile,
    check_consistent,
    find_contradiction,
    list_expected_files,
)
from dflash_aot.cache.errors import BadInput, CorruptBundle, MissingBundle, StoreFailed
from dflash_aot.cache.files.atomic_files import list_temporary_files, read_plain, write_atomically
from dflash_aot.cache.files.directory_lock import LockHeld, hold_directory_lock
from dflash_aot.cache.files.locations import FETCHED_DIRECTORY, is_url, user_cache_directory
from dflash_aot.cache.remote.object_store import (
    DEFAULT_RETRY,
    ObjectStore,
    RetryPolicy,
    open_object_store,
    read_blob,
)

logger = logging.getLogger(__name__)

# -- push: blobs first, the manifest last

PUSH_THREADS = 4
PUBLISH_ATTEMPTS = 3


class RemoteBundle(msgspec.Struct, frozen=True):
    """The bundle that is at a URL at the moment.

    Attributes:
        manifest: bytes of `manifest.json`.
        signatures: bytes of the signature file, None if the bundle is not signed.
    """

    manifest: bytes
    signatures: bytes | None

    @property
    def sha256(self) -> str:
        """sha256 of the manifest, in hex."""
        return hashlib.sha256(self.manifest).hexdigest()


class PushReport(msgspec.Struct, frozen=True):
    """What a push transferred.

    Attributes:
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
    expected_files = list_expected_files(bundle, manifest)
    signatures = read_signature_file(bundle)
    objects = open_object_store(url, retry)
    with ThreadPoolExecutor(PUSH_THREADS, thread_name_prefix="push") as pool:
        try:
            sending = [pool.submit(_send, objects, bundle, expected) for expected in expected_files]
            sent = [one.result() for one in sending]
        finally:
            pool.shutdown(cancel_futures=True)
    _publish(objects, RemoteBundle(content, signatures))
    return PushReport(
        objects.url, sum(size > 0 for size in sent), sum(size == 0 for size in sent), sum(sent)
    )


def _publish(objects: ObjectStore, bundle: RemoteBundle) -> None:
    """Writes signatures and manifest, and again while another push mixes its own with them. Raises StoreFailed."""
    for _ in range(PUBLISH_ATTEMPTS):
        # Before the manifest, so that a client that sees the new manifest also sees its signatures.
        if bundle.signatures is not None:
            objects.write(SIGNATURE_FILE, bundle.signatures)
        elif objects.size(SIGNATURE_FILE) is not None:
            objects.remove(SIGNATURE_FILE)
        objects.write(MANIFEST_FILE, bundle.manifest)
        found = objects.read(MANIFEST_FILE, MAX_MANIFEST_BYTES)
        if found != bundle.manifest:
            break  # the other push was later, and checks its own signatures
        if objects.read(SIGNATURE_FILE, MAX_SIGNATURE_BYTES) == bundle.signatures:
            return
    raise StoreFailed(
        f"{objects.url}: another push writes there at the same time. Wait until it is done, then push again"
    )


def _send(objects: ObjectStore, bundle: Path, expected: ExpectedFile) -> int:
    """Sends a file unless it is there; returns the bytes sent. The local file is verified in any case."""
    try:
        content = read_blob_file(expected.blob, expected.path)
    except CorruptBundle as error:
        remedy = f"For the command that rebuilds it: {shlex.join(['dflash-bundle', 'verify', str(bundle)])}"
        raise CorruptBundle(
            f"{expected.label}: {error}. Nothing is published at {objects.url}. {remedy}"
        ) from error
    name = expected.path.relative_to(bundle).as_posix()
    if objects.size(name) == expected.blob.bytes:
        return 0
    objects.write(name, content)
    return len(content)


# -- fetch

FETCH_THREADS = 4
FETCH_ATTEMPTS = 3  # of a bundle that is replaced while it is fetched
LOCK_SECONDS = 1800.0  # for another process that fetches the same bundle: a few GB over a slow line
ProgressCallback = Callable[[int, int], None]  # bytes done, bytes in all


def locate_bundle(place: str | Path, signed_by: Path | None = None) -> Path:
    """Returns the directory of a bundle; fetches the bundle first if `place` is a URL. Raises as `fetch_bundle`."""
    return (
        fetch_bundle(place, signed_by) if isinstance(place, str) and is_url(place) else Path(place)
    )


def fetch_bundle(
    url: str,
    signed_by: Path | None = None,
    on_progress: ProgressCallback | None = None,
    retry: RetryPolicy = DEFAULT_RETRY,
) -> Path:
    """Fetches a bundle and returns the directory of the copy. Files that the cache has already are not downloaded.

    signed_by: a public key; a manifest that its owner did not sign is not parsed.
    on_progress: called from any thread.

    Raises MissingBundle, CorruptBundle, StoreFailed; BadInput if the cache cannot be written, or for an invalid key.
    """
    objects = open_object_store(url, retry)
    url_hash = hashlib.sha256(objects.url.encode()).hexdigest()[:16]
    home = user_cache_directory() / FETCHED_DIRECTORY / url_hash
    remote = _read_remote(objects, home)
    try:
        for _ in range(FETCH_ATTEMPTS):
            try:
                return _complete_copy(
                    objects, home, remote, signed_by, on_progress or _ignore_progress
                )
            except CorruptBundle:
                before = remote
                remote = _read_remote(objects, home)
                if remote == before:
                    raise
    except OSError as error:
        raise BadInput(
            f"cannot write to {home}: {error.strerror}. XDG_CACHE_HOME sets another cache directory"
        ) from error
    raise CorruptBundle(
        f"{objects.url}: replaced repeatedly while it was fetched. Wait until the push is done"
    )


def _read_remote(objects: ObjectStore, home: Path) -> RemoteBundle:
    """Reads manifest and signatures. Raises MissingBundle; StoreFailed, which names the last fetched copy if any."""
    try:
        manifest = objects.read(MANIFEST_FILE, MAX_MANIFEST_BYTES)
        signatures = objects.read(SIGNATURE_FILE, MAX_SIGNATURE_BYTES)
    except StoreFailed as error:
        copies = sorted(home.glob(f"*/{MANIFEST_FILE}"), key=lambda path: path.stat().st_mtime)
        hint = (
            f". The copy that was fetched last can be used instead: --bundle {copies[-1].parent}"
            if copies
            else ""
        )
        raise type(error)(f"{error}{hint}") from error
    if manifest is None:
        raise MissingBundle(
            f"{objects.url}/{MANIFEST_FILE} does not exist: there is no bundle here. {_push_remedy(objects)}"
        )
    return RemoteBundle(manifest, signatures)


def _complete_copy(
    objects: ObjectStore,
    home: Path,
    remote: RemoteBundle,
    signed_by: Path | None,
    on_progress: ProgressCallback,
) -> Path:
    """Returns the directory of the verified copy after downloading what it lacks. Raises CorruptBundle."""
    copy = home / remote.sha256
    expected_files = list_expected_files(copy, _check_remote(objects, remote, signed_by))
    # A complete copy is not written to: it may be in a read-only cache.
    if not _has_manifest_of(copy, remote) or _list_missing(expected_files):
        with _hold_lock(home, objects.url):
            _prepare_directories(copy)
            # Another process may have fetched some while this one waited.
            missing = _list_missing(expected_files)
            _download(objects, copy, missing, on_progress)
            if remote.signatures is not None:
                write_atomically(copy / SIGNATURE_FILE, remote.signatures)
            write_atomically(copy / MANIFEST_FILE, remote.manifest)
    return copy


def _check_remote(objects: ObjectStore, remote: RemoteBundle, signed_by: Path | None) -> Manifest:
    """Checks signature, manifest and its consistency before anything is written.

    Raises CorruptBundle; BadInput for an invalid key.
    """
    where = f"{objects.url}/{MANIFEST_FILE}"
    if signed_by is not None:
        remedy = f"Sign it: dflash-bundle sign BUNDLE --key PRIVATE.pem. {_push_remedy(objects)}"
        envelope = f"{objects.url}/{SIGNATURE_FILE}"
        check_envelope(remote.signatures, remote.manifest, signed_by, envelope, remedy)
    manifest = decode_manifest(remote.manifest, where, _push_remedy(objects))
    if flaw := find_contradiction(manifest):
        raise CorruptBundle(f"{where}: {flaw}. {_push_remedy(objects)}")
    return manifest


def _has_manifest_of(copy: Path, remote: RemoteBundle) -> bool:
    signed = remote.signatures is None or _has_content(copy / SIGNATURE_FILE, remote.signatures)
    return signed and _has_content(copy / MANIFEST_FILE, remote.manifest)


def _has_content(path: Path, content: bytes) -> bool:
    try:
        return read_plain(path, len(content)) == content
    except OSError:
        return False


def _list_missing(expected_files: list[ExpectedFile]) -> list[ExpectedFile]:
    """Returns the files that are missing or corrupt."""
    return [expected for expected in expected_files if not _is_whole(expected, expected.path)]


def _is_whole(expected: ExpectedFile, path: Path) -> bool:
    try:
        read_blob_file(expected.blob, path)
    except CorruptBundle:
        return False
    return True


def _prepare_directories(copy: Path) -> None:
    """Creates the directories and removes temporary files of killed downloads; needs the lock."""
    for directory in (copy, copy / "executables", copy / "programs"):
        directory.mkdir(parents=True, exist_ok=True)
        for temporary in list_temporary_files(directory):
            temporary.unlink()


def _download(
    objects: ObjectStore, copy: Path, files: list[ExpectedFile], on_progress: ProgressCallback
) -> None:
    """Downloads files; each is written as soon as it is verified, so that a killed download continues from there."""
    done = 0
    total = sum(expected.blob.bytes for expected in files)
    lock = threading.Lock()

    def bring(expected: ExpectedFile) -> None:
        nonlocal done
        if not _link(expected, copy):
            write_atomically(expected.path, _read(objects, copy, expected))
        with lock:
            done += expected.blob.bytes
            on_progress(done, total)

    with ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch") as pool:
        try:
            for bringing in [pool.submit(bring, expected) for expected in files]:
                bringing.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _link(expected: ExpectedFile, copy: Path) -> bool:
    """Links a file from the copy of an earlier manifest, if it is whole there; returns whether it did."""
    for other in copy.parent.glob(str(Path("*") / expected.path.relative_to(copy))):
        if other != expected.path and _is_whole(expected, other):
            expected.path.unlink(missing_ok=True)
            try:
                os.link(other, expected.path)
            except OSError:  # not every file system supports links
                return False
            return True
    return False


def _read(objects: ObjectStore, copy: Path, expected: ExpectedFile) -> bytes:
    """Reads a blob. Raises CorruptBundle if it is corrupt at two attempts."""
    name = expected.path.relative_to(copy).as_posix()
    with suppress(CorruptBundle):
        return read_blob(objects, name, expected.blob)[0]
    try:
        return read_blob(objects, name, expected.blob)[0]
    except CorruptBundle as error:
        remedy = f"Remove the object if it exists, and push again. {_push_remedy(objects)}"
        raise CorruptBundle(f"{expected.label}: {error}. {remedy}") from error


@contextmanager
def _hold_lock(home: Path, url: str) -> Iterator[None]:
    """Holds the lock of a URL, so that one process downloads and the others wait. Raises BadInput, OSError."""
    home.mkdir(parents=True, exist_ok=True)

    def report(holder: str) -> None:
        logger.warning(
            "waiting up to %.0f s for %s, which is fetching %s", LOCK_SECONDS, holder, url
        )

    with ExitStack() as held:
        try:
            held.enter_context(hold_directory_lock(home, LOCK_SECONDS, report))
        except LockHeld as error:
            raise BadInput(
                f"{error.holder} has been fetching {url} for more than {LOCK_SECONDS:.0f} s. End it, or set another "
                "cache directory with XDG_CACHE_HOME"
            ) from error
        yield


def _push_remedy(objects: ObjectStore) -> str:
    return f"Push it: dflash-bundle push BUNDLE {objects.url}"


def _ignore_progress(done: int, total: int) -> None:
    pass
