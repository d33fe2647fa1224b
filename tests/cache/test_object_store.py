"""Object stores in directories and behind URLs: whole objects, limits, errors, retries."""

import errno
import os
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import fsspec
import pytest

from dflash_aot.cache.errors import BadInput, CorruptBundle, StoreFailed, StoreRefused
from dflash_aot.cache.remote.object_store import (
    DirectoryStore,
    FsspecStore,
    RetryPolicy,
    is_full,
    is_refusal,
    is_transient,
    open_object_store,
)
from tests.object_server import cut, refuse, silence

HASTY = RetryPolicy(attempts=3, seconds=20, pause=0)


@pytest.fixture
def objects(bucket):
    return open_object_store(bucket.url, HASTY)


@pytest.fixture(params=["directory", "file", "memory", "s3", "unknown"])
def place(request, tmp_path, bucket):
    name = "a place, für alle"
    match request.param:
        case "directory":
            return open_object_store(str(tmp_path / name))
        case "file":
            return open_object_store(f"file://{tmp_path}/{name}")
        case "memory":
            return open_object_store(f"memory://{tmp_path.name}/{name}")
        case "s3":
            return open_object_store(f"{bucket.url}/{name}/")
        case _:  # whatever cannot put a whole file
            return FsspecStore(fsspec.filesystem("file"), f"{tmp_path}/{name}", name, HASTY)


def test_written_object_is_read_back(place):
    assert place.read("folder/name", 5) is None
    assert place.size("folder/name") is None
    place.write("folder/name", b"12345")
    assert place.read("folder/name", 5) == b"12345"
    assert place.size("folder/name") == 5
    place.write("folder/name", b"other")
    assert place.read("folder/name", 100) == b"other"
    place.write("folder/name", b"")
    assert (place.read("folder/name", 5), place.size("folder/name")) == (b"", 0)
    place.remove("folder/name")
    assert place.read("folder/name", 5) is None
    place.remove("folder/name")
    place.write("name", bytes(1000))
    with pytest.raises(CorruptBundle, match=r"name: .*(more than the limit of 999 bytes|at most 999)"):
        place.read("name", 999)


def test_transfer_is_limited(bucket, objects):
    bucket.put("name", bytes(1000))
    sent = []

    def listen(forward):
        answer = forward()
        sent.append(len(answer.body))
        return answer

    bucket.server.fail("GET", "name", listen)
    with pytest.raises(CorruptBundle, match="more than the limit of 9 bytes"):
        objects.read("name", 9)
    assert sent == [10]


def test_reader_sees_whole_objects_and_no_temporaries_remain(tmp_path):
    unknown = FsspecStore(fsspec.filesystem("file"), str(tmp_path), "here", HASTY)
    for objects in (DirectoryStore(tmp_path), open_object_store(f"file://{tmp_path}"), unknown):
        objects.write("name", b"first")
        with open(tmp_path / "name", "rb") as reader:
            objects.write("name", b"other")
            assert reader.read() == b"first"
        assert os.listdir(tmp_path) == ["name"]


def test_failed_write_leaves_no_temporaries(tmp_path):
    (tmp_path / "name").mkdir()
    for objects in (DirectoryStore(tmp_path), FsspecStore(fsspec.filesystem("file"), str(tmp_path), "here", HASTY)):
        (tmp_path / "name" / "inside").write_bytes(b"")
        with pytest.raises(StoreFailed):
            objects.write("name/inside/file", b"12345")
    assert [path.name for path in tmp_path.rglob("*")] == ["name", "inside"]


def test_transient_failures_are_retried(bucket, objects):
    bucket.put("name", bytes(1000))
    for count, fault in enumerate((refuse(500, "InternalError"), refuse(503, "SlowDown"), cut), 1):
        bucket.server.fail("GET", "name", fault)
        assert objects.read("name", 1000) == bytes(1000)
        assert len(bucket.asked("GET")) == 2 * count
    bucket.server.fail("PUT", "name", refuse(500, "InternalError"))
    objects.write("name", b"12345")
    assert bucket.get("name") == b"12345"


def test_permanent_failure_ends_after_all_attempts(bucket, objects):
    bucket.server.fail("GET", "name", *[refuse(500, "InternalError")] * 10)
    with pytest.raises(StoreFailed, match=rf"{bucket.url}/name: told to say InternalError \(3 attempts\)"):
        objects.read("name", 1000)
    assert len(bucket.asked("GET")) == 3


def test_silent_server_times_out(bucket):
    bucket.server.fail("GET", "name", *[silence(bucket.server)] * 2)
    objects = open_object_store(bucket.url, RetryPolicy(attempts=2, seconds=0.2, pause=0))
    with pytest.raises(StoreFailed, match="name: no answer in time"):
        objects.read("name", 10)


def test_refused_request_is_not_retried(bucket, objects):
    fault = refuse(403, "InvalidAccessKeyId")
    bucket.server.fail("GET", "name", fault)
    with pytest.raises(StoreRefused, match=f"{bucket.url}/name: not allowed: told to say"):
        objects.read("name", 10)
    bucket.server.fail("PUT", "name", fault)
    with pytest.raises(StoreRefused, match=f"{bucket.url}/name: not allowed: told to say"):
        objects.write("name", b"")
    assert len(bucket.asked("GET")) == len(bucket.asked("PUT")) == 1


def test_write_to_a_directory_without_permission_raises(monkeypatch, tmp_path):
    def refuse_to(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse_to)  # root may write anywhere
    with pytest.raises(StoreRefused, match="name: Read-only file system"):
        DirectoryStore(tmp_path).write("name", b"")


def test_unknown_or_unreachable_url_is_refused():
    for url, words in [
        ("nonsense://place", "nonsense://place: Protocol not known: nonsense"),
        ("gs://bucket", r"the package for gs is not installed: pip install 'dflash-aot\[gcs\]'"),
        ("sftp://host/place", "the package for sftp is not installed: .*paramiko"),
        ("sftp://me:secret@host/place", "^sftp://host/place: the package"),
    ]:
        with pytest.raises(StoreFailed, match=words):
            open_object_store(url)


class EndlessHandler(BaseHTTPRequestHandler):
    TOTAL, PART = 1 << 25, bytes(1 << 16)
    sent = 0

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        with suppress(ConnectionError):
            while EndlessHandler.sent < self.TOTAL:
                self.wfile.write(self.PART)
                EndlessHandler.sent += len(self.PART)

    def log_message(self, *_):
        pass


def test_endless_response_is_closed():
    with HTTPServer(("127.0.0.1", 0), EndlessHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        with pytest.raises(CorruptBundle, match="name: more than the limit of 9 bytes"):
            open_object_store(f"http://127.0.0.1:{server.server_port}", HASTY).read("name", 9)
        with pytest.raises(StoreFailed, match="name: the server does not tell how large it is"):
            open_object_store(f"http://127.0.0.1:{server.server_port}", HASTY).size("name")
        server.shutdown()
        thread.join()
    assert 0 < EndlessHandler.sent < EndlessHandler.TOTAL


def test_url_with_a_query_is_refused():
    for url in ["https://host/place?sig=secret", "s3://bucket/place?versionId=secret"]:
        with pytest.raises(BadInput, match="place: the URL has a query") as refused:
            open_object_store(url)
        assert "secret" not in str(refused.value)


class GcsError(Exception):
    def __init__(self, code):
        super().__init__(f"no, {code}")
        self.code = code


def test_errors_are_classified():
    for error, transient, refusal in [
        (TimeoutError(), True, False),
        (OSError(errno.EIO, "a disk"), True, False),
        (OSError("Forbidden: place\nnot yours"), False, True),
        (PermissionError("not yours"), False, True),
        (FileNotFoundError(), False, False),
        (OSError(errno.ENOSPC, "full"), False, False),
        (ValueError("no such bucket name"), False, False),
        (GcsError(503), True, False),
        (GcsError(400), False, False),
        (GcsError(403), False, True),
        (RuntimeError("who knows"), True, False),
    ]:
        assert (is_transient(error), is_refusal(error)) == (transient, refusal)
    assert [is_full(one) for one in (OSError(errno.EDQUOT, ""), GcsError(507), GcsError(503))] == [True, True, False]
