"""The pickle scan compared with Python's unpickler: no accepted pickle looks up a name that is not allowed."""

import io
import os
import pickle
import pickletools
import struct
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.pickle_scan import ALLOWED, scan_pickle
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import CorruptBundle

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


def passes(content: bytes) -> bool:
    try:
        scan_pickle(content)
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
def test_accepted_pickle_requests_only_allowed_names(program):
    content = PROTO + b"".join(program) + STOP
    if passes(content):
        assert set(list_requested_names(content)) <= ALLOWED


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_a_whole_pickle(content):
    """No other error is raised. The bytes are not unpickled, because a few bytes can request gigabytes."""
    if passes(content):
        assert content.rindex(STOP) >= 0


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


def test_refusal_names_the_class_and_says_that_nothing_was_loaded():
    with pytest.raises(CorruptBundle, match="^the pickle names posix.system.* was not loaded"):
        scan_pickle(pickle.dumps(os.system, 4))


def test_name_from_the_memo_is_checked_like_a_literal_one():
    assert passes(PROTO + text("jax") + MEMOIZE + text("P") + MEMOIZE + STACK_GLOBAL + STOP)
    assert passes(PROTO + text("P") + MEMOIZE + POP + text("jax") + b"h\x00" + STACK_GLOBAL + STOP)
    assert not passes(PROTO + text("system") + MEMOIZE + POP + text("os") + b"h\x00" + STACK_GLOBAL + STOP)


def test_name_with_a_frame_between_its_texts_is_still_checked():
    """Large pickles are written in frames, and a frame may start there."""

    def framed(module: str, name: str) -> bytes:
        rest = text(name) + STACK_GLOBAL + STOP
        return PROTO + text(module) + FRAME + struct.pack("<Q", len(rest)) + rest

    assert list_requested_names(framed("jax", "P")) == [("jax", "P")]
    assert passes(framed("jax", "P"))
    assert not passes(framed("os", "system"))


class DevicePickler(pickle.Pickler):
    """Writes complex numbers as JAX writes devices, and byte arrays as JAX writes code."""

    def persistent_id(self, value: object) -> object:
        if isinstance(value, complex):
            return "device", int(value.real)
        return ("exec", bytes(value)) if isinstance(value, bytearray) else None


@pytest.mark.parametrize("ids", [[], [0], [0, 1, 2, 3], [3, 0, 0, 3], [7, 255, 256, 65536]])
def test_scan_returns_the_device_ids(ids):
    content = io.BytesIO()
    DevicePickler(content, 4).dump([5, bytearray(9), 6, [complex(one) for one in ids], 9, bytearray(7), (3, 11)])
    assert scan_pickle(content.getvalue()) == set(ids)


def test_executables_of_this_jax_version_pass(bundle):
    asked = set()
    for path in (bundle("tiny"), bundle("bfloat16")):
        for entry in read_manifest(path).entries:
            blob = Store(path).read_executable(entry)
            scan_pickle(blob)
            asked |= set(list_requested_names(blob))
    assert asked and asked <= ALLOWED
