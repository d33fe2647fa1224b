"""The pickle scan: against Python's unpickler, hostile pickles one by one, and mutations of real ones."""

import io
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_aot.cache.bundle.manifest import Entry, read_manifest
from dflash_aot.cache.bundle.pickle_machine import PickleMachine, PickleSize
from dflash_aot.cache.bundle.pickle_scan import find_table, list_versions, scan_pickle
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle
from dflash_aot.cache.signature import Signature
from tests.executable_stand_in import make_stand_in

PROTO, STOP, FRAME = b"\x80\x04", b".", b"\x95"
STACK_GLOBAL, MEMOIZE, POP, DUP, MARK, TUPLE, EMPTY = b"\x93", b"\x94", b"0", b"2", b"(", b"t", b")"
NAMES = ["jax", "P", "os", "system", "numpy", "dtype", "builtins", "exec", "jax._src.core", "ShapedArray"]


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


class RecordingUnpickler(pickle.Unpickler):
    """Records every class that a pickle requests, and returns harmless objects instead."""

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))
        self.asked: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> object:
        self.asked.append((module, name))
        return tuple

    def persistent_load(self, identity: object) -> object:
        return identity


def list_requested_names(content: bytes) -> list[tuple[str, str]]:
    unpickler = RecordingUnpickler(content)
    with suppress(Exception):  # a pickle that breaks off has asked for what it has asked for
        unpickler.load()
    return unpickler.asked


SIGNATURE = Signature("move", {}, (), ("a", "b"), ("a", "b"), (), ())
ROOMY = PickleSize(10**6, 10**6, 10**6)


def follow(content: bytes) -> list[str] | None:
    """Returns the names and calls of a pickle, None if it is refused."""
    calls: list[str] = []
    try:
        PickleMachine(lambda call, _: calls.append(call), ROOMY).follow(content)
    except CorruptBundle:
        return None
    return calls


def passes(content: bytes) -> bool:
    try:
        for version in list_versions():
            scan_pickle(content, SIGNATURE, find_table(version))
    except CorruptBundle:
        return False
    return True


opcodes = st.one_of(
    st.sampled_from(NAMES).map(text),
    st.sampled_from(NAMES).map(lambda name: b"X" + struct.pack("<I", len(name)) + name.encode()),
    st.sampled_from(NAMES).map(lambda name: b"V" + name.encode() + b"\n"),
    st.sampled_from([("os", "system"), ("jax", "P")]).map(
        lambda name: b"c%s\n%s\n" % tuple(part.encode() for part in name)
    ),
    st.integers(0, 5).map(lambda at: b"h" + bytes([at])),  # BINGET
    st.integers(0, 5).map(lambda at: b"q" + bytes([at])),  # BINPUT
    st.integers(0, 5).map(lambda at: b"p%d\n" % at),  # PUT
    st.integers(0, 5).map(lambda at: b"g%d\n" % at),  # GET
    st.integers(0, 5).map(lambda at: b"j" + struct.pack("<I", at)),  # LONG_BINGET
    st.sampled_from(
        [MEMOIZE, POP, DUP, MARK, TUPLE, EMPTY, b"1", b"N", b"R", b"\x81", b"b", b"Q", b"]", b"a", b"e", b"}", b"s"]
    ),
)
programs = st.lists(st.one_of(opcodes, st.just(STACK_GLOBAL)), max_size=14)


@settings(max_examples=600, deadline=None)
@given(programs)
@example([text("os"), MEMOIZE, text("system"), MEMOIZE, POP, POP, b"h\x00", b"h\x01", STACK_GLOBAL])
@example([text("jax"), MEMOIZE, text("P"), b"q\x00", POP, POP, text("os"), text("system"), STACK_GLOBAL])
@example([text("os"), text("system"), text("jax"), text("P"), POP, POP, STACK_GLOBAL])
@example([text("jax"), text("os"), b"p0\n", POP, b"N", b"q\x00", b"h\x00", text("P"), STACK_GLOBAL])
@example([text("os"), MEMOIZE, text("system"), STACK_GLOBAL, b"h\x00", b"\x86"])
def test_unpickler_requests_only_names_that_the_machine_reports(program):
    content = PROTO + b"".join(program) + STOP
    calls = follow(content)
    if calls is not None:
        assert {f"STACK_GLOBAL {module}.{name}" for module, name in list_requested_names(content)} <= set(calls)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_raise_no_other_error(content):
    assert not passes(content)


class Harmful:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "value",
    [Harmful(), [1, {"deep": (Harmful(),)}], os.system, pickle.loads, getattr, slice],
    ids=["object", "deep inside", "os.system", "pickle.loads", "getattr", "slice"],
)
def test_foreign_name_is_refused_at_every_protocol(protocol, value):
    content = pickle.dumps(value, protocol)
    assert not passes(content)
    assert not passes(pickletools.optimize(content))


def test_refusal_names_the_class():
    with pytest.raises(CorruptBundle, match="^the pickle names posix.system, which executables do not need"):
        scan_pickle(pickle.dumps(os.system, 4), SIGNATURE, find_table("0.10.2"))


def name(module: str, name: str) -> bytes:
    return text(module) + text(name) + STACK_GLOBAL


FLOAT = name("numpy", "dtype") + text("f4") + b"\x89\x88\x87R"
OBJECTS = (
    name("numpy", "dtype")
    + text("O8")
    + b"\x89\x88\x87R(K\x03"
    + text("|")
    + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
)
ARRAY = name("numpy._core.multiarray", "_reconstruct") + name("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"
HOSTILE = {
    "dtype with a field beyond its size": (
        FLOAT
        + b"(K\x03"
        + text("<")
        + b"N"
        + text("a")
        + b"\x85}"
        + text("a")
        + FLOAT
        + b"M\x00\x10\x86sK\x04K\x01K\x00tb",
        "BUILD numpy.dtype, which JAX .* never writes with such arguments",
    ),
    "number with the flags of an object": (
        FLOAT + b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb",
        "BUILD numpy.dtype, which JAX .* never writes with such arguments",
    ),
    "dtype of any size": (
        name("numpy", "dtype") + text("V999999999") + b"\x89\x88\x87R",
        "REDUCE numpy.dtype, which JAX .* never writes with such arguments",
    ),
    "dict with a deep key": (
        b"}" + EMPTY + MEMOIZE + b"".join(b"h%c\x86" % at + MEMOIZE for at in range(45)) + b"Ns",
        "a dict with a key that is not text",
    ),
    "array of 3 GB": (
        ARRAY + b"(K\x01J" + struct.pack("<i", 4 * 10**8) + b"\x85" + OBJECTS + b"\x89]tb",
        r"an array of shape \(400000000,\) with 0 items",
    ),
    "memo index of 100 million": (b"Np100000000\n", "uses PUT, which JAX never writes"),
    "long memo index": (b"Nr\x00\xe1\xf5\x05", "uses LONG_BINPUT, which JAX never writes"),
    "state of a class": (name("jax", "P") + b"}b", "changes a value that cannot be changed"),
    "state set twice": (FLOAT + MEMOIZE + b"h\x00}b", "changes a value that cannot be changed"),
    "list in itself": (b"]" + MEMOIZE + b"(h\x00e", "changes a value that cannot be changed"),
    "call of a result": (FLOAT + b")R", "uses REDUCE on something other than a class or function"),
    "call of a class that takes no arguments": (
        name("jax._src.layout", "Layout") + b"K\x01\x85\x81",
        "NEWOBJ jax._src.layout.Layout, .* never writes with such arguments",
    ),
    "function of JAX that executables do not call": (
        name("jax", "P") + b")R",
        "REDUCE jax.P, which JAX .* never writes for",
    ),
    "other persistent id": (
        text("file") + text("/etc/passwd") + b"\x86Q",
        "BINPERSID file, which JAX .* never writes for",
    ),
    "number of 2040 bits": (
        name("jax._src.core", "ShapedArray") + b"\x8a\xff" + b"\x7f" * 255 + b"\x85\x85}\x92",
        "with such arguments",
    ),
    "100,000 tuples in each other": (EMPTY + b"\x85" * 10**5, "more than 2[0-9]{3} opcodes"),
    "32 million memo entries": (b"N" + MEMOIZE * (1 << 25), "more than [0-9]{3} memo entries"),
    "long list": (b"](" + b"N" * 1000 + b"e", "a collection of more than [0-9]{2} items"),
    "mark without values": (b"t", "uses a mark that it does not set"),
    "memo entry of nothing": (b"N(" + MEMOIZE, "uses values that it does not have"),
    "values left behind": (b"NN", "leaves values behind"),
    "end before the end": (b"N.", "ends after 4 of 5 bytes"),
    "result that is not an executable": (b"N", "result, which JAX .* never writes with such arguments"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickle_is_refused_without_memory(case):
    content, words = HOSTILE[case]
    content, tables = PROTO + content + STOP, list(map(find_table, list_versions()))
    tracemalloc.start()
    for table in tables:
        with pytest.raises(CorruptBundle, match=words):
            scan_pickle(content, SIGNATURE, table)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 10**6


def test_allowed_name_with_a_frame_between_its_texts_is_reported():
    """Large pickles are written in frames, and a frame may start there."""
    rest = text("system") + STACK_GLOBAL + STOP
    content = PROTO + text("os") + FRAME + struct.pack("<Q", len(rest)) + rest
    assert follow(content) == ["STACK_GLOBAL os.system"] and list_requested_names(content) == [("os", "system")]


def test_stand_in_passes_and_any_other_end_does_not():
    assert passes(make_stand_in(bytes(1000)))
    assert not passes(make_stand_in(bytes(1000)) + b".")


def test_version_without_a_table_is_refused_with_those_that_have_one():
    with pytest.raises(
        IncompatibleBundle, match=r"JAX 0\.9\.0 is installed, but .* with JAX 0\.10\.2 or 0\.12\.0\.1 only"
    ):
        find_table("0.9.0")


@pytest.fixture(scope="module")
def executable(bundle) -> tuple[str, Entry, bytes]:
    """A real executable: the directory of its bundle, its entry, its pickle."""
    path = bundle("tiny")
    entry = min(read_manifest(path).entries, key=lambda entry: entry.serialized_bytes)
    return str(path), entry, Store(path).read_executable(entry)


def test_scan_returns_the_device_ids(executable, bundle):
    path, entry, blob = executable
    table = find_table(read_manifest(bundle("tiny")).environment.jax)
    assert scan_pickle(blob, entry.signature, table) == {0}
    device = text("device") + MEMOIZE + b"K\x00"
    assert blob.count(device) == 1
    assert scan_pickle(blob.replace(device, device[:-1] + b"\x07"), entry.signature, table) == {0, 7}


def test_executables_of_this_jax_version_pass(bundle):
    for path in (bundle("tiny"), bundle("bfloat16")):
        manifest = read_manifest(path)
        for entry in manifest.entries:
            table = find_table(manifest.environment.jax)
            assert scan_pickle(Store(path).read_executable(entry), entry.signature, table) == {0}


def run_mutations(executable, action: str, numbers: list[int]) -> list[str]:
    """Scans or loads these mutations in a process; returns its lines."""
    path, entry, _ = executable
    command = [sys.executable, "-m", "tests.cache.pickle_mutations", path, entry.signature.label, "17", action]
    given = " ".join(map(str, numbers))
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, f"after {done.stdout.splitlines()[-1:]}: {done.stderr}"
    return done.stdout.splitlines()


@pytest.mark.slow
def test_5000_mutations_are_refused_or_load_without_a_crash(executable):
    """Each within 2 s of CPU time, all within 200 MB; the process ends at more, or at another error."""
    accepted = [int(line.split()[0]) for line in run_mutations(executable, "scan", list(range(5000)))]
    assert 100 < len(accepted) < 1000
    assert len(run_mutations(executable, "load", accepted)) == len(accepted)
