"""Command stream: what the leader of several hosts does with its devices, recorded for the followers to repeat.

Every host array, every call of an executable and every change of the state passes `MirroredState`, which records them
in order, before the leader makes them. A follower repeats each command with its own executables and its own shards. It
has no scheduler and decides nothing, so hosts cannot launch different calls.
"""

import math
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
import msgspec
import numpy as np

from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.cache.errors import MALFORMED, HostFailed
from dflash_aot.cache.signature import ExecutableId
from dflash_aot.cache.weight_recipe import ITEM_BYTES
from dflash_aot.runtime.executables.executable import DeviceState, join_features
from dflash_aot.runtime.executables.loaded_bundle import LazyLoader

# -- frames: a length of four bytes, then MessagePack

MAX_FRAME_BYTES = 256 << 20  # masks of 8 rows of 16 tokens have 2.5 MB
HEADER = struct.Struct("<I")
Message = TypeVar("Message")
# Where each row of an array is one number, as in masks that forbid nothing, only this number is sent.
# Smaller arrays are sent as they are: to search a page table of 8 kB takes 230 µs.
SPARSE_BYTES = 1 << 16
MIRRORED_DTYPES = frozenset({*ITEM_BYTES, "uint32"})


def send_message(link: socket.socket, message: object) -> int:
    """Sends a frame; returns its bytes. Raises OSError."""
    content = msgspec.msgpack.encode(message)
    link.sendall(HEADER.pack(len(content)) + content)
    return HEADER.size + len(content)


def receive_message(
    link: socket.socket,
    kind: type[Message],
    limit: int = MAX_FRAME_BYTES,
    seconds: float | None = None,
) -> Message:
    """Waits for a frame of at most `limit` bytes, for `seconds` at most. Raises HostFailed for anything else."""
    deadline = None if seconds is None else time.monotonic() + seconds
    (size,) = HEADER.unpack(_receive_exactly(link, HEADER.size, deadline))
    if size > limit:
        raise HostFailed(f"a host sent a frame of {size} bytes, and at most {limit} are accepted")
    content = _receive_exactly(link, size, deadline)
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except MALFORMED as error:
        raise HostFailed(f"a host sent an invalid frame: {error}") from error


def _receive_exactly(link: socket.socket, size: int, deadline: float | None) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        if deadline is not None:  # of all bytes, however slowly they come
            link.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            read = link.recv_into(view)
        except TimeoutError as error:
            raise HostFailed("a host has said nothing for too long") from error
        except OSError as error:
            raise HostFailed(f"the connection to a host broke: {error}") from error
        if not read:
            raise HostFailed("another host closed its connection")
        view = view[read:]
    return content


# -- commands


class Put(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A host array [.., n] is copied to the devices, and gets a number.

    Attributes:
        number: of the array.
        dtype, shape: of the array.
        rows: None: `data` is the array. Else `data` is the first number of each row [n], then these rows whole; each of
            the other rows is one number.
        data: bytes, in C order.
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[int, ...] | None
    data: bytes


class Zeros(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An array of zeros is allocated, and gets a number."""

    number: int
    array: ArraySpec


class Call(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An executable is called with numbered arrays; its results get the numbers from `first` on."""

    executable: ExecutableId
    arguments: tuple[int, ...]
    first: int


class Free(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The leader has freed these arrays."""

    numbers: tuple[int, ...]


class Replace(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Arrays of the state are replaced by numbered arrays."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]


class Reset(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All arrays of the state are replaced by zeros."""


class Close(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The leader ends in order, and its state has this digest; nothing follows."""

    digest: str


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Features that all hosts have are joined, see `DeviceState.join`, and get a number."""

    number: int
    arrays: tuple[int, ...]
    width: int


Command = Put | Join | Zeros | Call | Free | Replace | Reset | Close


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Commands in their order. Frames are numbered from 0."""

    number: int
    commands: tuple[Command, ...]

    @property
    def is_last(self) -> bool:
        """Whether the leader ends with this frame."""
        return any(isinstance(command, Close) for command in self.commands)


ALIVE_FRAME = Frame(-1, ())  # a heartbeat of the leader's process


def pack_array(number: int, array: np.ndarray) -> Put:
    """The command that copies a host array to the devices. Rows of one number take the space of this number."""
    name = array.dtype.name
    if array.nbytes < SPARSE_BYTES:
        return Put(number, name, array.shape, None, array.tobytes())
    bits = np.ascontiguousarray(array).view(f"u{array.itemsize}")  # in which 0.0 is not -0.0
    rows = bits.reshape(-1, array.shape[-1])
    fills = np.ascontiguousarray(rows[:, 0])
    uneven = np.flatnonzero(fills != rows[:, -1])  # most rows that differ within, at once
    even = np.setdiff1d(np.arange(len(rows)), uneven, assume_unique=True)
    more = even[(rows[even] != fills[even, None]).any(axis=1)]
    whole = np.sort(np.concatenate([uneven, more]))
    if len(whole) == len(rows):
        return Put(number, name, array.shape, None, array.tobytes())
    data = fills.tobytes() + rows[whole].tobytes()
    return Put(number, name, array.shape, tuple(whole.tolist()), data)


def unpack_array(put: Put) -> np.ndarray:
    """The array of a command. Raises HostFailed where the command fits no array."""
    if put.dtype not in MIRRORED_DTYPES or any(size < 0 for size in put.shape):
        raise HostFailed(f"the leader sent an array of dtype {put.dtype}, shape {put.shape}")
    dtype = np.dtype(put.dtype)
    if math.prod(put.shape) * dtype.itemsize > MAX_FRAME_BYTES:
        raise HostFailed(f"the leader sent an array of shape {put.shape}, which is too large")
    try:
        values = np.frombuffer(put.data, dtype)
        if put.rows is None:
            return values.reshape(put.shape)
        width = put.shape[-1]
        count = math.prod(put.shape[:-1])
        array = np.repeat(values[:count, None], width, axis=1)
        array[list(put.rows)] = values[count:].reshape(-1, width)
        return array.reshape(put.shape)
    except (ValueError, IndexError) as error:
        raise HostFailed(f"the leader sent an array that cannot be decoded: {error}") from error


# -- the leader's end


class CommandStream:
    """Numbers every array that a later command may name, and sends each call with the commands before it.

    One thread uses it: the order of launches must be the same on all hosts. Another may call `send_alive`.

    Attributes:
        frames: how many were sent.
        bytes: how many were sent to each follower.
        seconds: processor time that packing and sending took.
        digest: of the leader's state, asked for at the end.
    """

    def __init__(self, links: Sequence[socket.socket]):
        self._links = links
        self._sending = threading.RLock()  # garbage collection may close within
        self._last_sent = time.monotonic()
        self._is_closed = False
        self._pending: list[Command] = []
        self._numbers: dict[int, tuple[int, weakref.ref[jax.Array]]] = {}  # by id
        self._freed: deque[int] = deque()  # filled by any thread that collects garbage
        self._next = 0
        self.frames = 0
        self.bytes = 0
        self.seconds = 0.0
        self.digest: Callable[[], str] = str

    def put(self, made: jax.Array, array: np.ndarray) -> None:
        began = time.thread_time()
        self._pending.append(pack_array(self._name(made), array))
        self.seconds += time.thread_time() - began

    def join(self, made: jax.Array, arrays: Sequence[jax.Array], width: int) -> None:
        self._pending.append(Join(self._name(made), self._find_numbers(arrays), width))

    def zeros(self, made: jax.Array, array: ArraySpec) -> None:
        self._pending.append(Zeros(self._name(made), array))

    def call(self, executable: ExecutableId, arguments: Sequence[jax.Array]) -> None:
        """Sends the call, before the leader makes it. Raises HostFailed."""
        began = time.thread_time()
        if self._freed:
            count = len(self._freed)
            self._pending.append(Free(tuple(self._freed.popleft() for _ in range(count))))
        self._pending.append(Call(executable, self._find_numbers(arguments), self._next))
        self._flush()
        self.seconds += time.thread_time() - began

    def name_results(self, results: Iterable[jax.Array]) -> None:
        """Numbers the results of the last call."""
        for result in results:
            self._name(result)

    def replace(self, names: Sequence[str], arrays: Sequence[jax.Array]) -> None:
        self._pending.append(Replace(tuple(names), self._find_numbers(arrays)))

    def reset(self) -> None:
        self._pending.append(Reset())

    def close(self) -> None:
        """Tells the followers to end. Raises HostFailed."""
        self._pending.append(Close(self.digest()))
        self.digest = str  # the state is needed no longer
        self._flush()

    def send_alive(self, seconds: float) -> None:
        """Tells the followers that this process is alive, if they heard nothing for `seconds`. Raises HostFailed."""
        if time.monotonic() - self._last_sent < seconds or not self._sending.acquire(
            blocking=False
        ):
            return
        try:
            if not self._is_closed:
                self._send(ALIVE_FRAME)
        finally:
            self._sending.release()

    def _name(self, array: jax.Array) -> int:
        number = self._next
        key = id(array)
        self._next += 1

        def forget(_: object) -> None:
            if self._numbers.get(key, (None,))[0] == number:
                del self._numbers[key]
            self._freed.append(number)

        self._numbers[key] = number, weakref.ref(array, forget)
        return number

    def _find_numbers(self, arrays: Sequence[jax.Array]) -> tuple[int, ...]:
        return tuple([self._numbers[id(array)][0] for array in arrays])

    def _flush(self) -> None:
        frame = Frame(self.frames, tuple(self._pending))
        self._pending.clear()
        self.frames += 1
        with self._sending:
            self._is_closed = frame.is_last
            self.bytes += self._send(frame)

    def _send(self, frame: Frame) -> int:
        content = msgspec.msgpack.encode(frame)
        framed = HEADER.pack(len(content)) + content
        self._last_sent = time.monotonic()
        for link in self._links:
            try:
                link.sendall(framed)
            except OSError as error:
                raise HostFailed(f"a host takes no more commands: {error}") from error
        return len(framed)


class MirroredState(DeviceState):
    """The state of the leader's devices. Followers repeat whatever happens to it."""

    recovers = False

    def __init__(
        self, arrays: Sequence[ArraySpec], devices: Sequence[jax.Device], stream: CommandStream
    ):
        super().__init__(arrays, devices)
        self._stream = stream
        stream.digest = self.digest

    def reset(self) -> None:
        self._stream.reset()
        super().reset()

    def to_device(self, array: np.ndarray) -> jax.Array:
        made = super().to_device(array)
        self._stream.put(made, array)
        return made

    def join(self, features: Sequence[jax.Array], width: int) -> jax.Array:
        made = super().to_device(join_features(features, width))
        self._stream.join(made, features, width)
        return made

    def zeros(self, array: ArraySpec) -> jax.Array:
        made = super().zeros(array)
        self._stream.zeros(made, array)
        return made

    def replace(self, names: Sequence[str], outputs: Sequence[jax.Array]) -> None:
        self._stream.replace(names, outputs)
        super().replace(names, outputs)

    def begin_call(self, executable: ExecutableId, arguments: Sequence[jax.Array]) -> None:
        self._stream.call(executable, arguments)

    def end_call(self, donated: Sequence[str], outputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        super().replace(donated, outputs)
        results = outputs[len(donated) :]
        self._stream.name_results(results)
        return results


# -- a follower's end


class CommandPlayer:
    """Repeats the leader's commands with the executables and the state of this host.

    Attributes:
        frames: how many were played.
    """

    def __init__(self, executables: LazyLoader, state: DeviceState):
        self._executables = executables
        self._state = state
        self._arrays: dict[int, jax.Array] = {}
        self.frames = 0

    def play(self, frame: Frame) -> bool:
        """Returns False where the leader ends. Raises HostFailed for a wrong frame, and whatever a call raises."""
        if frame.number != self.frames:
            raise HostFailed(f"frame {self.frames} of the leader is missing, {frame.number} came")
        self.frames += 1
        try:
            for command in frame.commands:
                self._do(command)
        except KeyError as error:
            raise HostFailed(f"the leader named {error}, which this host does not have") from error
        return not frame.is_last

    def _do(self, command: Command) -> None:
        arrays = self._arrays
        match command:
            case Call(executable, arguments, first):
                called = self._executables[executable]
                names = (one.name for one in called.signature.arguments)
                given = (arrays[number] for number in arguments)
                results = called(self._state, **dict(zip(names, given, strict=False)))
                arrays.update(enumerate(results.values(), first))
            case Put(number):
                arrays[number] = self._state.to_device(unpack_array(command))
            case Join(number, parts, width):
                arrays[number] = self._state.join([arrays[part] for part in parts], width)
            case Free(numbers):
                for number in numbers:
                    del arrays[number]
            case Zeros(number, array):
                arrays[number] = self._state.zeros(array)
            case Replace(names, numbers):
                self._state.replace(names, [arrays[number] for number in numbers])
            case Reset():
                self._state.reset()
            case Close(digest):
                if digest != self._state.digest():
                    raise HostFailed(
                        "at the end the state of this host is not the leader's: its answers may have been wrong"
                    )
