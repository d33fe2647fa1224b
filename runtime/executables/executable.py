"""One loaded executable, the state that executables take and return, the compile guard, and host memory."""

import ctypes
import hashlib
import mmap
import resource
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
from jax.experimental import serialize_executable

from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.cache.bundle.manifest import Manifest
from dflash_aot.cache.bundle.pickle_scan import scan_pickle
from dflash_aot.cache.devices import ignore_jax_switches, make_sharding
from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle
from dflash_aot.cache.printable import format_bytes
from dflash_aot.cache.signature import COPY, ExecutableId, Signature

# -- host memory and memory mappings that the limits of this process leave
#
# Both are checked before calls that need them: XLA and LLVM are built without exceptions, so where an allocation fails
# in one of their threads, the process ends.

LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
# Bytes: for the threads of the runtime, and to end requests and report the failure.
RESERVE = 8 << 20
ROUNDS_IN_FLIGHT = 2
MAPPINGS_LIMIT = Path("/proc/sys/vm/max_map_count")
KERNEL = b"\x7fELF"  # begins an object file: XLA:CPU serializes each kernel as one
MAPPINGS_PER_KERNEL = 3  # code, constants and data of an object file are mapped separately
RESERVED_MAPPINGS = 2000  # for threads (two each) and large arrays
LOADING_FACTOR = 8  # memory for loading an executable over its serialized size; 1 to 4 was observed
POLL_SECONDS = 0.02


def estimate_step_bytes(manifest: Manifest) -> int:
    """Host memory that a step of the engine may allocate: on a CPU what the rounds in flight need, and the reserve."""
    if manifest.environment.platform != "cpu":
        return RESERVE
    calls = (entry.memory for entry in manifest.entries)
    largest = max(call.temporaries + call.outputs - call.aliased for call in calls)
    return RESERVE + ROUNDS_IN_FLIGHT * largest


def estimate_loading_bytes(serialized: int) -> int:
    """Host memory that loading an executable of `serialized` bytes may take."""
    return RESERVE + LOADING_FACTOR * serialized


def has_memory_limit() -> bool:
    """Whether the memory of this process is limited."""
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in LIMITS)


def has_host_memory(size: int) -> bool:
    """Whether the limits of this process leave `size` bytes. True without a limit: the kernel then ends processes."""
    if not has_memory_limit():
        return True
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True


def require_host_memory(size: int, seconds: float = 0.0) -> None:
    """Waits up to `seconds` until the limits of this process leave `size` bytes. Raises MemoryError."""
    deadline = time.monotonic() + seconds
    while not has_host_memory(size):
        if time.monotonic() >= deadline:
            waited = f" after {seconds:g} s" if seconds else ""
            raise MemoryError(
                f"the limit of this process leaves less than {format_bytes(size)} of memory{waited}"
            )
        time.sleep(POLL_SECONDS)


def return_memory() -> None:
    """Returns freed memory to the system, where the C library keeps it (glibc)."""
    with suppress(AttributeError, OSError):  # another library
        ctypes.CDLL(None).malloc_trim(0)


def require_mappings(serialized: bytes) -> None:
    """Checks that this process may map the kernels of a serialized executable for a CPU. Raises MemoryError.

    Linux lets a process have 65,530 mappings unless told otherwise. Where they end, LLVM crashes.
    """
    if not MAPPINGS_LIMIT.exists():  # another system than Linux
        return
    limit = int(MAPPINGS_LIMIT.read_text())
    mapped = Path("/proc/self/maps").read_bytes().count(b"\n")
    needed = MAPPINGS_PER_KERNEL * serialized.count(KERNEL)
    if mapped + needed + RESERVED_MAPPINGS > limit:
        raise MemoryError(
            f"this process has {mapped} of the {limit} memory mappings that Linux allows it, {RESERVED_MAPPINGS} are "
            f"kept in reserve, and {needed} more are needed. Raise the limit: sysctl --write "
            f"vm.max_map_count={4 * limit}"
        )


# -- compile guard: forbids JAX tracing on the engine's thread while it serves, and counts compile events there

# The prefix of JAX's monitoring events of tracing, lowering and compiling.
COMPILE_EVENTS = "/jax/core/compile/"


class CompileGuard:
    """Forbids tracing on one thread and counts trace, lowering and compile events there. Other threads may trace.

    Attributes:
        events: how many such events happened on the guarded thread.
    """

    def __init__(self) -> None:
        self.events = 0
        self._thread: int | None = None

    @contextmanager
    def forbid_tracing(self) -> Iterator[None]:
        """Guards the calling thread until the context ends: tracing raises, and compile events are counted."""
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._count_event)
        try:
            with ignore_jax_switches(), jax.no_tracing(True):
                yield
        finally:
            jax.monitoring.unregister_event_duration_listener(self._count_event)

    def _count_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(COMPILE_EVENTS) and threading.get_ident() == self._thread:
            self.events += 1


# -- executables and the state that they take and return


class Executable:
    """A compiled program of one bucket, ready to be called. JAX checks its inputs against the compiled inputs.

    Attributes:
        signature: the names, shapes and dtypes of its inputs and outputs.
        called: whether a call has completed.
    """

    def __init__(
        self, signature: Signature, compiled: jax.stages.Compiled, where: str = "", remedy: str = ""
    ):
        """where, remedy: for messages, the executable's file and the command that replaces the file."""
        self.signature = signature
        self.called = False
        self._compiled = compiled
        self._where = where or signature.label
        self._remedy = remedy
        self._arguments = tuple(array.name for array in signature.arguments)
        self._results = tuple(array.name for array in signature.results)
        self._known: Mapping[str, jax.Array] = {}
        self._weights: tuple[jax.Array, ...] = ()

    def bind(self, weights: Mapping[str, jax.Array]) -> None:
        """Sets the mapping in which weights are looked up by name at the first call."""
        self._known = weights
        self.called = False

    def __call__(self, state: "StateArrays", /, **arguments: jax.Array) -> dict[str, jax.Array]:
        """Enqueues one call, replaces the donated arrays of `state`, and returns the results by name.

        The first call blocks until it is done: it shows whether the executable matches its signature. Raises
        CorruptBundle if it does not, TypeError for other arguments than those of its signature.
        """
        ordered = self._order(arguments)
        inputs = state.read(self.signature.state)
        state.begin_call(self.signature.executable_id, ordered)
        if self.called:
            outputs = self._compiled(*self._weights, *inputs, *ordered)
        else:
            outputs = self._call_first(inputs, ordered)
        results = state.end_call(self.signature.donated, outputs)
        return dict(zip(self._results, results, strict=True))

    def _order(self, arguments: Mapping[str, jax.Array]) -> list[jax.Array]:
        """The arguments in the order of the signature."""
        if len(arguments) == len(self._arguments):
            with suppress(KeyError):
                return [arguments[name] for name in self._arguments]
        raise TypeError(
            f"{self.signature.label} takes the arguments {', '.join(self._arguments)}, "
            f"not {', '.join(arguments)}"
        )

    def _call_first(
        self, inputs: Sequence[jax.Array], arguments: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        """Looks up the weights, once because they never change, and waits for the outputs. Raises CorruptBundle."""
        self._weights = tuple(self._known[name] for name in self.signature.weights)
        try:
            outputs = jax.block_until_ready(self._compiled(*self._weights, *inputs, *arguments))
        except (TypeError, ValueError) as error:
            # JAX's errors for inputs of other shapes or dtypes.
            raise self._corrupt(f"does not accept the inputs of its signature: {error}") from error
        except jax.errors.JaxRuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise self._corrupt(f"does not run: {error}") from error
        self.called = True
        return outputs

    def _corrupt(self, flaw: str) -> CorruptBundle:
        return CorruptBundle(f"{self._where}: {flaw}{self._remedy}")


class StateArrays:
    """Arrays by name: a call reads some, and replaces those that are donated to it."""

    def read(self, names: Sequence[str]) -> list[jax.Array]:
        raise NotImplementedError

    def replace(self, names: Sequence[str], outputs: Sequence[jax.Array]) -> None:
        raise NotImplementedError

    def begin_call(self, executable: ExecutableId, arguments: Sequence[jax.Array]) -> None:
        """Called before an executable is."""

    def end_call(self, donated: Sequence[str], outputs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Replaces the donated arrays by the first outputs of a call, and returns the others, its results."""
        self.replace(donated, outputs)
        return outputs[len(donated) :]


class DeviceState(StateArrays):
    """All per-slot arrays on the devices. A call consumes donated arrays: only those of the latest call are valid.

    Attributes:
        recovers: whether serving may go on with an empty state after a failed call.
    """

    recovers = True

    def __init__(self, arrays: Sequence[ArraySpec], devices: Sequence[jax.Device]):
        """Allocates all arrays, filled with zeros."""
        self._devices = devices
        here = jax.process_index()
        self._own = [device for device in devices if device.process_index == here]
        self._everywhere = make_sharding((), devices)
        self._declared = tuple(arrays)
        self._arrays: dict[str, jax.Array] = {}
        self._allocate()

    def reset(self) -> None:
        """Replaces all arrays by zeros, after a failed call that may have consumed its donated inputs.

        If memory is short, the next `read` allocates the zeros.
        """
        self._arrays.clear()  # first, so that old and new arrays are never in memory at the same time
        try:
            self._allocate()
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not is_out_of_memory(error):
                raise

    def release(self) -> None:
        """Frees the memory of all arrays; they cannot be read any more."""
        for array in self._arrays.values():
            array.delete()
        self._arrays.clear()
        self._declared = ()

    def to_device(self, array: np.ndarray) -> jax.Array:
        """Copies a small host array, an argument of a call, to every device."""
        if len(self._devices) == 1:  # a tenth faster than to a sharding of one device
            return jax.device_put(array, self._devices[0])
        # Half the time of `device_put`, which over several hosts would trace a collective.
        return jax.make_array_from_callback(array.shape, self._everywhere, lambda _: array)

    def place(self, name: str, array: np.ndarray | jax.Array) -> jax.Array:
        """Copies a page, or a state, to the devices, unless it is still there; `name` is that of its copy."""
        if isinstance(array, jax.Array):
            return array
        if len(self._devices) == 1:
            return jax.device_put(array, self._devices[0])
        (axes,) = (one.sharding for one in self._declared if one.name + COPY == name)
        sharding = make_sharding(axes, self._devices)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def measure_transfers(self, arrays: Sequence[ArraySpec]) -> float:
        """Bytes per second of copies of such arrays to the devices: the best of three tries."""
        # Not zeros: they would all be one page of memory.
        copies = {one.name: np.ones(one.shape, one.dtype) for one in arrays}
        times = []
        for _ in range(3):
            began = time.perf_counter()
            jax.block_until_ready([self.place(*one) for one in copies.items()])
            times.append(time.perf_counter() - began)
        return sum(one.bytes for one in arrays) / min(times)

    def join(self, features: Sequence[jax.Array], width: int) -> jax.Array:
        """`join_features` on every device. Waits for the features."""
        return self.to_device(join_features(features, width))

    def zeros(self, array: ArraySpec) -> jax.Array:
        """Returns zeros of the declared shape and sharding, allocated shard by shard."""
        return self._make_zeros(array)

    def _make_zeros(self, array: ArraySpec) -> jax.Array:
        shape = array.shard_shape(len(self._devices))
        shards = [jax.device_put(np.zeros(shape, array.dtype), device) for device in self._own]
        return jax.make_array_from_single_device_arrays(
            array.shape, make_sharding(array.sharding, self._devices), shards
        )

    def read(self, names: Sequence[str]) -> list[jax.Array]:
        arrays = self._arrays
        if not arrays:
            self._allocate()
        return [arrays[name] for name in names]

    def _allocate(self) -> None:
        """All arrays or, where an error is raised, none."""
        self._arrays.update({array.name: self._make_zeros(array) for array in self._declared})

    def replace(self, names: Sequence[str], outputs: Sequence[jax.Array]) -> None:
        self._arrays.update(zip(names, outputs, strict=False))

    def wait(self) -> None:
        """Blocks until all enqueued calls are done."""
        jax.block_until_ready(self._arrays)

    def digest(self) -> str:
        """sha256 of the integer arrays that every device has whole, such as lengths: equal on all hosts. Waits."""
        hashed = hashlib.sha256()
        for array in self.read([one.name for one in self._declared]):
            if array.sharding.is_fully_replicated and np.issubdtype(array.dtype, np.integer):
                hashed.update(np.asarray(array).tobytes())
        return hashed.hexdigest()


def join_features(features: Sequence[jax.Array], width: int) -> np.ndarray:
    """Features [B, 1, F] of consecutive positions → [B, width, F], with zeros after them."""
    rows, _, size = features[0].shape
    joined = np.zeros((rows, width, size), features[0].dtype)
    for index, one in enumerate(features):
        joined[:, index] = np.asarray(one)[:, 0]
    return joined


def load_executable(
    blob: bytes, signature: Signature, devices: Sequence[jax.Device], where: str, remedy: str = ""
) -> Executable:
    """Deserializes a verified blob into an executable on `devices`, in their order.

    where, remedy: for messages, see `Executable`.

    Raises CorruptBundle if the blob is not an executable of the signature, IncompatibleBundle if it was compiled for
    other devices, and passes out-of-memory errors through.
    """
    try:
        built = scan_pickle(blob, signature)
    except CorruptBundle as error:
        raise CorruptBundle(f"{where}: {error}. It was not loaded{remedy}") from error
    _check_devices(built, devices, where, remedy)
    inputs = len(signature.weights) + len(signature.state) + len(signature.arguments)
    outputs = len(signature.donated) + len(signature.results)
    flat_in = jax.tree.structure(((0,) * inputs, {}))
    flat_out = jax.tree.structure((0,) * outputs)
    require_host_memory(estimate_loading_bytes(len(blob)))
    if devices[0].platform == "cpu":
        require_mappings(blob)
    try:
        compiled = serialize_executable.deserialize_and_load(
            blob, flat_in, flat_out, devices[0].client, devices
        )
    except Exception as error:  # a corrupt blob can make the library or the compiler raise anything
        if is_out_of_memory(error):
            raise
        raise CorruptBundle(
            f"{where}: does not load: {type(error).__name__}: {error}{remedy}"
        ) from error
    return Executable(signature, compiled, where, remedy)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error reports a lack of memory, which is no fault of an executable.

    XLA:CPU reports what a thread of a running call could not allocate as INTERNAL, "Out of memory allocating N bytes".
    """
    return isinstance(error, MemoryError) or any(
        one in str(error) for one in ("RESOURCE_EXHAUSTED", "Out of memory")
    )


def _check_devices(
    built: frozenset[int], devices: Sequence[jax.Device], where: str, remedy: str
) -> None:
    """Checks the ids of the devices in a blob: loading it for another number of devices would abort the process.

    Raises CorruptBundle, IncompatibleBundle.
    """
    here = [device.id for device in devices]
    if len(built) != len(here):
        counts = f"compiled for {len(built)} devices, but the manifest says {len(here)}. It was not loaded"
        raise CorruptBundle(f"{where}: {counts}{remedy}")
    if built != set(here):
        raise IncompatibleBundle(
            f"{where}: compiled for the devices {sorted(built)}, but the devices here are {here}"
        )
