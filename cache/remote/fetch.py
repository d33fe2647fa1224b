"""A bundle behind a URL, as a whole and verified copy in the user's cache.

fetched/<hash of the URL>/<sha256 of manifest.json>/     a bundle; its manifest is written last
"""

import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from dflash_aot.cache.bundle.atomic_files import list_temporary_files, read_plain, write_atomically
from dflash_aot.cache.bundle.blob import read_blob_file
from dflash_aot.cache.bundle.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, decode_manifest
from dflash_aot.cache.bundle.manifest_checks import find_contradiction
from dflash_aot.cache.bundle.verification import ExpectedFile, list_expected_files
from dflash_aot.cache.errors import BadInput, CorruptBundle, MissingBundle, StoreFailed
from dflash_aot.cache.locations import is_url, user_cache_directory
from dflash_aot.cache.remote.object_store import ObjectStore, open_object_store, read_blob
from dflash_aot.cache.remote.retry import DEFAULT_RETRY, RetryPolicy
from dflash_aot.cache.signing import signatures as signature_files
from dflash_aot.cache.signing.signatures import check_envelope

FETCH_THREADS = 4
FETCH_ATTEMPTS = 3  # what was replaced while it was read is whole the next time
ProgressCallback = Callable[[int, int], None]
logger = logging.getLogger(__name__)


class RemoteBundle(msgspec.Struct, frozen=True):
    """What lies behind a URL just now: the bytes of the manifest, and of its signatures if there are any."""

    manifest: bytes
    signatures: bytes | None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.manifest).hexdigest()


def locate_bundle(place: str | Path, signed_by: Path | None = None) -> Path:
    """A directory as it is; of what lies behind a URL the copy, as `fetch_bundle` makes it."""
    return fetch_bundle(place, signed_by) if isinstance(place, str) and is_url(place) else Path(place)


def fetch_bundle(
    url: str,
    signed_by: Path | None = None,
    on_progress: ProgressCallback | None = None,
    retry: RetryPolicy = DEFAULT_RETRY,
) -> Path:
    """The directory of the copy. The URL is asked each time; what is here already is not downloaded again.

    What the owner of a public key, `signed_by`, did not sign is not even parsed. `observe` is told how many bytes are
    here, of how many, from any thread. Raises MissingBundle, CorruptBundle, StoreFailed; BadInput where the cache
    cannot be written, or for a key that is none.
    """
    objects = open_object_store(url, retry)
    home = user_cache_directory() / "fetched" / hashlib.sha256(objects.url.encode()).hexdigest()[:16]
    offer = _read_offer(objects, home)
    try:
        for _ in range(FETCH_ATTEMPTS):
            try:
                return _complete(objects, home, offer, signed_by, on_progress or _ignore)
            except CorruptBundle:
                before, offer = offer, _read_offer(objects, home)
                if offer == before:
                    raise
    except OSError as error:
        raise BadInput(f"cannot write to {home}: {error.strerror}. XDG_CACHE_HOME says where copies go") from error
    raise CorruptBundle(f"{objects.url}: replaced again and again while it was fetched. Wait until it is pushed")


def _read_offer(objects: ObjectStore, home: Path) -> RemoteBundle:
    """Raises MissingBundle; StoreFailed with the copy that was fetched last, if there is one."""
    try:
        manifest = objects.read(MANIFEST_FILE, MAX_MANIFEST_BYTES)
        signatures = objects.read(signature_files.SIGNATURE_FILE, signature_files.MAX_SIGNATURE_BYTES)
    except StoreFailed as error:
        copies = sorted(home.glob(f"*/{MANIFEST_FILE}"), key=lambda path: path.stat().st_mtime)
        hint = f". What was fetched before may be given instead: --bundle {copies[-1].parent}" if copies else ""
        raise type(error)(f"{error}{hint}") from error
    if manifest is None:
        raise MissingBundle(
            f"{objects.url}/{MANIFEST_FILE} does not exist: there is no bundle here. {_push_command(objects)}"
        )
    return RemoteBundle(manifest, signatures)


def _complete(
    objects: ObjectStore, home: Path, offer: RemoteBundle, signed_by: Path | None, on_progress: ProgressCallback
) -> Path:
    """The whole copy of what is offered. Raises CorruptBundle."""
    copy = home / offer.sha256
    promises = list_expected_files(copy, _check(objects, offer, signed_by))
    # Nothing is written where all of it is there: a cache that is complete may be read-only.
    if not _holds_offer(copy, offer) or _list_missing(promises):
        with _hold_lock(home, objects.url):
            _sweep(copy)
            missing = _list_missing(promises)  # whoever held the lock may have done it
            _download(objects, copy, missing, on_progress)
            if offer.signatures is not None:
                write_atomically(copy / signature_files.SIGNATURE_FILE, offer.signatures)
            write_atomically(copy / MANIFEST_FILE, offer.manifest)
    return copy


def _check(objects: ObjectStore, offer: RemoteBundle, signed_by: Path | None) -> Manifest:
    """From bytes: nothing is written of what is not signed, is no manifest or contradicts itself.

    Raises CorruptBundle; BadInput for a key that is none.
    """
    where = f"{objects.url}/{MANIFEST_FILE}"
    if signed_by is not None:
        remedy = f"Whoever vouches for it: dflash-bundle sign BUNDLE --key PRIVATE.pem. {_push_command(objects)}"
        envelope = f"{objects.url}/{signature_files.SIGNATURE_FILE}"
        check_envelope(offer.signatures, offer.manifest, signed_by, envelope, remedy)
    manifest = decode_manifest(offer.manifest, where, _push_command(objects))
    if flaw := find_contradiction(manifest):
        raise CorruptBundle(f"{where}: {flaw}. {_push_command(objects)}")
    return manifest


def _holds_offer(copy: Path, offer: RemoteBundle) -> bool:
    signed = offer.signatures is None or _holds(copy / signature_files.SIGNATURE_FILE, offer.signatures)
    return signed and _holds(copy / MANIFEST_FILE, offer.manifest)


def _holds(path: Path, content: bytes) -> bool:
    try:
        return read_plain(path) == content
    except OSError:
        return False


def _list_missing(promises: list[ExpectedFile]) -> list[ExpectedFile]:
    """Those whose files are not here, or broken."""
    return [promise for promise in promises if not _is_whole(promise, promise.path)]


def _is_whole(promise: ExpectedFile, path: Path) -> bool:
    try:
        read_blob_file(promise.blob, path)
    except CorruptBundle:
        return False
    return True


def _sweep(copy: Path) -> None:
    """Removes what downloads that were killed had begun to write; only the lock's holder writes here."""
    for directory in (copy, copy / "executables", copy / "programs"):
        directory.mkdir(parents=True, exist_ok=True)
        for temporary in list_temporary_files(directory):
            temporary.unlink()


def _download(objects: ObjectStore, copy: Path, promises: list[ExpectedFile], on_progress: ProgressCallback) -> None:
    """Every file as soon as it is verified: a download that is killed goes on from there."""
    done, total, lock = 0, sum(promise.blob.bytes for promise in promises), threading.Lock()

    def bring(promise: ExpectedFile) -> None:
        nonlocal done
        if not _link(promise, copy):
            write_atomically(promise.path, _read(objects, copy, promise))
        with lock:
            done += promise.blob.bytes
            on_progress(done, total)

    with ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="fetch") as pool:
        try:
            for bringing in [pool.submit(bring, promise) for promise in promises]:
                bringing.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _link(promise: ExpectedFile, copy: Path) -> bool:
    """Takes a file from the copy of an earlier manifest, where it is whole."""
    for other in copy.parent.glob(str(Path("*") / promise.path.relative_to(copy))):
        if other != promise.path and _is_whole(promise, other):
            promise.path.unlink(missing_ok=True)
            try:
                os.link(other, promise.path)
            except OSError:  # not every file system can
                return False
            return True
    return False


def _read(objects: ObjectStore, copy: Path, promise: ExpectedFile) -> bytes:
    """Raises CorruptBundle for what is not as promised twice in a row."""
    name = promise.path.relative_to(copy).as_posix()
    with suppress(CorruptBundle):
        return read_blob(objects, name, promise.blob)[0]
    try:
        return read_blob(objects, name, promise.blob)[0]
    except CorruptBundle as error:
        remedy = f"Remove it there if it is; then push it again. {_push_command(objects)}"
        raise CorruptBundle(f"{promise.label}: {error}. {remedy}") from error


@contextmanager
def _hold_lock(home: Path, url: str) -> Iterator[None]:
    """One download at a time for each URL; whoever comes later waits, and finds it done. Dies with its process."""
    home.mkdir(parents=True, exist_ok=True)
    lock = os.open(home / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("waiting for another process that fetches %s", url)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _push_command(objects: ObjectStore) -> str:
    return f"Whoever has it pushes it: dflash-bundle push BUNDLE {objects.url}"


def _ignore(done: int, total: int) -> None:
    pass
