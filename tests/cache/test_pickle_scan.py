"""The pickle scan: against Python's unpickler, hostile pickles one by one, and real executables."""

import io
import pickle
import struct
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.pickle_scan import CLASSES, scan_pickle
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.signature import Signature

PROTO, STOP, FRAME = b"\x80\x04", b".", b"\x95"
STACK_GLOBAL, MEMOIZE, POP, MARK, EMPTY, GET_0 = b"\x93", b"\x94", b"0", b"(", b")", b"h\x00"
SIGNATURE = Signature("move", {}, (), ("a", "b"), ("a", "b"), (), ())


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


class RecordingUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))
        self.requested: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> object:
        self.requested.append((module, name))
        return tuple

    def persistent_load(self, identity: object) -> object:
        return identity


def list_requested_names(content: bytes) -> list[tuple[str, str]]:
    unpickler = RecordingUnpickler(content)
    with suppress(Exception):  # a pickle that breaks off has requested names before
        unpickler.load()
    return unpickler.requested


def passes(content: bytes) -> bool:
    try:
        scan_pickle(content, SIGNATURE)
    except CorruptBundle:
        return False
    return True


texts = st.sampled_from(["jax", "P", "os", "system"])
opcodes = st.one_of(
    texts.map(text),
    texts.map(lambda name: b"X" + struct.pack("<I", len(name)) + name.encode()),
    st.integers(0, 5).map(lambda index: b"h" + bytes([index])),  # BINGET
    st.integers(0, 5).map(lambda index: b"j" + struct.pack("<I", index)),  # LONG_BINGET
    st.sampled_from([MEMOIZE, MARK, b"t", EMPTY, b"\x85", b"\x86", b"N", b"R", b"\x81", b"b", b"Q", b"]", b"a", b"e"]),
    st.sampled_from(
        [POP, b"2", b"1", b"q\x00", b"p0\n", b"g0\n", b"cos\nsystem\n", b"Vos\n"]
    ),  # JAX never writes these
)
programs = st.lists(st.one_of(opcodes, st.just(STACK_GLOBAL)), max_size=14)


@settings(max_examples=400, deadline=None)
@given(programs)
@example([text("os"), MEMOIZE, text("system"), MEMOIZE, POP, POP, GET_0, b"h\x01", STACK_GLOBAL])
@example([text("os"), text("system"), text("jax"), text("P"), POP, POP, STACK_GLOBAL])
@example([text("jax"), text("os"), b"p0\n", POP, b"N", b"q\x00", GET_0, text("P"), STACK_GLOBAL])
@example([text("os"), MEMOIZE, text("system"), text("jax"), text("P"), b"\x86", STACK_GLOBAL])
@example([text("jax"), EMPTY, MEMOIZE, text("P"), STACK_GLOBAL])
@example([text("jax"), MEMOIZE, text("P"), MEMOIZE, STACK_GLOBAL, GET_0, b"h\x01", STACK_GLOBAL])
def test_pickle_that_passes_requests_only_listed_classes(program):
    content = PROTO + b"".join(program) + STOP
    if passes(content):
        assert all(name in CLASSES[module] for module, name in list_requested_names(content))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_raise_no_other_error(content):
    assert passes(PROTO + content) in (True, False)  # anything but BadPickle would end the test


REFUSED = {
    "foreign class": (text("os") + text("system") + STACK_GLOBAL, "names os.system, which executables do not need"),
    "class of a listed module": (text("jax") + text("jit") + STACK_GLOBAL, "names jax.jit, which executables do not"),
    "attribute of a listed class": (text("jax") + text("P.mro") + STACK_GLOBAL, "names jax.P.mro, which executables"),
    "text below a mark": (text("jax") + MARK + text("P") + STACK_GLOBAL, "something other than the two texts before"),
    "memo entry of no text": (EMPTY + MEMOIZE + text("jax") + GET_0 + STACK_GLOBAL, "something other than the two"),
    "GLOBAL": (b"cjax\nP\n", "uses GLOBAL, which JAX never writes"),
    "INST": (b"(ijax\nP\n", "uses INST, which JAX never writes"),
    "OBJ": (MARK + text("jax") + text("P") + STACK_GLOBAL + b"o", "uses OBJ, which JAX never writes"),
    "EXT1": (b"\x82\x01", "uses EXT1, which JAX never writes"),
    "LONG_BINPUT": (b"Nr\x00\xe1\xf5\x05", "uses LONG_BINPUT, which JAX never writes"),
    "POP": (b"N0", "uses POP, which JAX never writes"),
    "PERSID": (b"Pexec\n", "uses PERSID, which JAX never writes"),
    "persistent id that is a text": (text("client") + b"Q", "has a persistent id that JAX never writes"),
    "other persistent id": (text("file") + text("/etc/passwd") + b"\x86Q", "the persistent id file, or values"),
    "device without a number": (text("device") + text("0") + b"\x86Q", "the persistent id device, or values with it"),
    "32 million opcodes": (b"N" * (1 << 25), "more than 2160 opcodes"),
    "32 million memo entries": (b"N" + MEMOIZE * (1 << 25), "more than 544 memo entries"),
    "tuples in each other": (EMPTY + b"\x85" * 10**5, "more than 320 collections"),
    "bytes after the end": (b"N.", "ends after 4 of 5 bytes"),
    "text that is cut off": (b"X\xff\xff\xff\x7f", "not a pickle: expected 2147483647 bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_pickle_is_refused_without_memory(case):
    content, words = REFUSED[case]
    content = PROTO + content + STOP
    tracemalloc.start()
    with pytest.raises(CorruptBundle, match=words):
        scan_pickle(content, SIGNATURE)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 10**6


def test_class_with_a_frame_between_its_texts_is_found():
    rest = text("system") + STACK_GLOBAL + STOP
    with pytest.raises(CorruptBundle, match="names os.system"):
        scan_pickle(PROTO + text("os") + FRAME + struct.pack("<Q", len(rest)) + rest, SIGNATURE)


def test_executables_of_this_jax_version_pass_with_their_device_ids(bundle):
    path = bundle("tiny")
    for entry in read_manifest(path).entries:
        blob = Store(path).read_executable(entry)
        assert scan_pickle(blob, entry.signature) == {0}
    device = text("device") + MEMOIZE + b"K\x00"
    assert blob.count(device) == 1
    assert scan_pickle(blob.replace(device, device[:-1] + b"\x07"), entry.signature) == {0, 7}
