"""Ray pool: compiles executables as tasks of a Ray cluster, each in a fresh process, and verifies what comes back."""

import importlib.util
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any

import msgspec

from dflash_aot.cache.bundle.blob import BrokenBlob, unpack_blob
from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import OTHER_PROGRAM_FLAW, Store, find_build_record
from dflash_aot.cache.chips import Topology, parse_topology
from dflash_aot.cache.environment import (
    Environment,
    is_tpu_attached,
    read_flags,
    read_host_environment,
)
from dflash_aot.cache.errors import MALFORMED, BadInput, BuildFailed
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.compile.pipeline.build_target import (
    COMPILE_ONLY,
    BuildTarget,
    TargetDevices,
    attach_devices,
    check_compiler,
    describe_devices,
)
from dflash_aot.compile.pipeline.executable_builder import (
    CompileJob,
    CompileResult,
    compile_executable,
    explain_failure,
    pinned_compiler_settings,
)

# -- the worker: a process of a Ray cluster, which compiles one executable and returns its bytes
#
# A process compiles only one executable, for the reason given in `worker_process`.

REMEDY = (
    "Nodes that build need the versions and flags of the machine that starts the build, and for CPU executables its "
    "processor"
)


def describe_slice(topology: str) -> bytes:
    """The environment of a TPU slice as the compiler of this node describes it, as JSON."""
    return msgspec.json.encode(describe_devices(parse_topology(topology)).environment)


def compile_on_node(environment: bytes, job: bytes) -> tuple[bytes, bytes, bytes]:
    """A CompileResult as JSON, the packed executable and the packed program; both empty after a failure.

    Args:
        environment: of the devices to compile for, an Environment as JSON.
        job: a CompileJob as JSON.
    """
    wanted = msgspec.json.decode(environment, type=Environment)
    asked = msgspec.json.decode(job, type=CompileJob)
    try:
        with pinned_compiler_settings():
            entry, executable, program, _ = compile_executable(_open_devices(wanted, asked), asked)
    except Exception as error:
        return msgspec.json.encode(CompileResult(None, explain_failure(error))), b"", b""
    return msgspec.json.encode(CompileResult(entry)), executable, program


def _open_devices(wanted: Environment, job: CompileJob) -> TargetDevices:
    """Raises BuildFailed where an executable from this node would not match its key."""
    if wanted.platform == "tpu" and is_tpu_attached():
        raise BuildFailed(
            f"{name_node()} has a TPU: slices can be described only where no TPU is attached"
        )
    topology = parse_topology(wanted.topology) if wanted.platform == "tpu" else None
    devices = (
        describe_devices(topology)
        if topology
        else attach_devices(wanted.platform, None, wanted.device_count)
    )
    check_same(wanted, devices.environment, name_node())
    if executable_key(job.program, job.signature, devices.environment, job.options) != job.key:
        raise BuildFailed(
            f"{name_node()} has another version of dflash-aot, which would build another executable"
        )
    return devices


def check_same(wanted: Environment, found: Environment, node: str) -> None:
    """Raises BuildFailed with every field of the environment that differs, and both values."""
    different = [
        _format_difference(field, getattr(wanted, field), getattr(found, field))
        for field in Environment.__struct_fields__
        if getattr(wanted, field) != getattr(found, field)
    ]
    if different:
        raise BuildFailed(f"{node} would build something else: {'; '.join(different)}. {REMEDY}")


def _format_difference(field: str, wanted: object, found: object) -> str:
    if isinstance(wanted, tuple) and isinstance(
        found, tuple
    ):  # dozens of names, most of them in both
        wanted, found = (
            " ".join(one for one in ours if one not in theirs)
            for ours, theirs in ((wanted, found), (found, wanted))
        )
    return f"{field} {found or 'none'} there, {wanted or 'none'} here"


def name_node() -> str:
    """The node that this process runs on, as Ray's tools list it."""
    import ray  # noqa: PLC0415  see `ray_pool`

    return f"Ray's node {ray.util.get_node_ip_address()}"


# -- the pool

LOCAL_RAY = "local"  # Ray's word for a cluster that is started here and ends with this process
ANY_RAY = "auto"  # Ray's word for the cluster that this machine belongs to
CONNECT_SECONDS = 10
ATTEMPTS = 3  # processes of one call that may crash
OBJECT_STORE_BYTES = 256 << 20  # executables take a few MB
TOKEN = (
    "If the cluster requires a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to its file"
)
LOGS = "Ray's logs are on its node, by default in /tmp/ray/session_latest/logs"
COMPILER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # executables depend on them


class RayPool:
    """Up to `jobs` tasks at a time.

    Attributes:
        jobs: the number of executables compiled at a time.
        environment: that of the devices to compile for.
    """

    def __init__(self, cluster: "Cluster", environment: Environment, store: Store, jobs: int):
        self.jobs = jobs
        self.environment = environment
        self._cluster = cluster
        self._store = store
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="ray")

    @property
    def location(self) -> str:
        """Where executables are compiled, for people."""
        local = self._cluster.address == LOCAL_RAY
        where = "a local Ray cluster" if local else f"Ray at {self._cluster.address}"
        return f"compiling on {where}: {self.jobs} at a time"

    def start(self, job: CompileJob) -> Future[Entry]:
        return self._threads.submit(self._compile, job)

    def close(self) -> None:
        """Cancels unfinished tasks and waits for their end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._cluster.cancel()
        self._threads.shutdown()

    def _compile(self, job: CompileJob) -> Entry:
        """Raises BuildFailed with the task's reason, or with how its process ended."""
        result, executable, program = self._cluster.call(
            compile_on_node, msgspec.json.encode(self.environment), msgspec.json.encode(job)
        )
        entry = check_result(job, result, executable, program)
        self._store.add(entry, executable, program)
        return entry


@contextmanager
def open_ray_pool(
    target: BuildTarget, store: Store, jobs: int | None, address: str
) -> Iterator[RayPool]:
    """The pool on the cluster at `address`; `jobs` None: one for each CPU of the cluster.

    Raises BadInput if there is no cluster or no compiler, BuildFailed if the nodes differ from this machine.
    """
    described = isinstance(target, Topology)
    if described:
        check_compiler()
    variables = dict(COMPILE_ONLY) if described else {"JAX_PLATFORMS": "cpu"}
    with connect(
        address, {**variables, **{name: read_flags(name) for name in COMPILER_FLAGS}}
    ) as cluster:
        environment = (
            _describe_on_node(cluster, target)
            if isinstance(target, Topology)
            else target.environment
        )
        pool = RayPool(cluster, environment, store, jobs or cluster.cpus)
        try:
            yield pool
        finally:
            pool.close()


def _describe_on_node(cluster: "Cluster", topology: Topology) -> Environment:
    """The slice's environment as a node describes it, which this machine must agree with. Raises BuildFailed."""
    found = msgspec.json.decode(cluster.call(describe_slice, topology.name), type=Environment)
    here: Mapping[str, object] = msgspec.structs.asdict(read_host_environment("tpu"))
    check_same(msgspec.structs.replace(found, **here), found, "a node of the cluster")
    return found


def check_result(job: CompileJob, result: bytes, executable: bytes, program: bytes) -> Entry:
    """The entry of a task's result, once all of the result is what the job asked for. Raises BuildFailed."""
    try:
        compiled = msgspec.json.decode(result, type=CompileResult)
        if compiled.entry is None:
            raise BuildFailed(compiled.failure)
        entry = find_build_record(
            msgspec.json.encode(compiled.entry), job.key, job.signature, job.program
        )
        unpack_blob(entry, executable)
        if unpack_blob(entry.program, program) != job.program:
            raise BuildFailed(f"a node of the cluster returned {OTHER_PROGRAM_FLAW}")
    except (BrokenBlob, ValueError, *MALFORMED) as flaw:
        raise BuildFailed(f"a node of the cluster returned an invalid executable: {flaw}") from flaw
    return entry


class Cluster:
    """A connected Ray cluster: calls functions, each in a new process.

    Attributes:
        address: as given to `connect`.
        cpus: CPUs of the cluster.
    """

    def __init__(self, ray: ModuleType, address: str):
        """Raises BadInput for a cluster without CPUs: its tasks would wait for ever."""
        self.address = address
        self.cpus = int(ray.cluster_resources().get("CPU", 0))
        if not self.cpus:
            raise BadInput(
                f"--executor ray: the cluster at {address} has no CPU, and each executable is compiled on one. Add a "
                "node that has some: `ray start --num-cpus N`; where an autoscaler adds nodes, let it keep one. `ray "
                "status` lists them"
            )
        self._ray = ray
        self._lock = threading.Lock()  # guards the following
        self._closed = False
        self._pending: set[Any] = set()

    def call(self, function: Callable[..., Any], *arguments: str | bytes) -> Any:
        """Calls a module-level function on a node and returns its result, text or bytes like the arguments.

        Raises BuildFailed where no process could complete the call, or after `cancel`.
        """
        task = self._ray.remote(max_calls=1, max_retries=ATTEMPTS - 1, num_cpus=1)(function)
        with self._lock:
            if self._closed:
                raise BuildFailed("the build was cancelled")
            reference = task.remote(*arguments)
            self._pending.add(reference)
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise BuildFailed(self._explain(error)) from error
        finally:
            with self._lock:
                self._pending.discard(reference)

    def cancel(self) -> None:
        """Ends the processes of all calls, which raise BuildFailed."""
        with self._lock:
            self._closed, pending = True, list(self._pending)
        for reference in pending:
            self._ray.cancel(reference, force=True)

    def _explain(self, error: Exception) -> str:
        kinds = self._ray.exceptions
        if isinstance(error, kinds.OutOfMemoryError):
            return f"Ray ended the process because its node ran out of memory: use fewer --jobs. {LOGS}"
        if isinstance(error, kinds.WorkerCrashedError | kinds.NodeDiedError):
            return f"{ATTEMPTS} processes crashed in a row: the compiler crashed, or a node ran out of memory. {LOGS}"
        if isinstance(error, kinds.RayTaskError):
            last = str(error.cause).strip().splitlines()[-1:]
            return f"a task could not start on a node: {''.join(last)}. All nodes need the same dflash-aot[ray]"
        return f"{type(error).__name__}: {quote_first_line(str(error))}"


@contextmanager
def connect(address: str, variables: Mapping[str, str]) -> Iterator[Cluster]:
    """Connects to a cluster, or starts a local one; its processes get these environment variables. Raises BadInput.

    Ray's output is dropped: it reports every crashed process, on standard output, which is for reports.
    """
    _check_reachable(address)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        ray = _import_ray(address)
        _start_ray(ray, address, variables)
        try:
            cluster = Cluster(ray, address)
            try:
                yield cluster
            finally:
                cluster.cancel()
        finally:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raises BadInput; Ray itself would try for ten minutes."""
    if address in (LOCAL_RAY, ANY_RAY):
        return
    if "://" in address:
        raise BadInput(
            f"--ray_address {address}: Ray's client is not supported. Run this on a node, with host:port"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise BadInput(
            f"--ray_address {address}: give host:port of the cluster's head, {ANY_RAY} or {LOCAL_RAY}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise BadInput(
            f"--executor ray: no connection to {address}: {error}. Check it with `ray status`"
        ) from error


def _import_ray(address: str) -> ModuleType:
    """Raises BadInput where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise BadInput('Ray is not installed: pip install "dflash-aot[ray]"')
    # Ray's default: without end, and silently
    os.environ.setdefault("RAY_task_oom_retries", str(ATTEMPTS - 1))
    if address == LOCAL_RAY:
        # Ray reads this when it is imported; nothing else keeps all its ports on loopback, because Ray replaces a
        # loopback `_node_ip_address` by that of the network.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    else:
        # of 20, each with a warning on the terminal
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    import ray  # noqa: PLC0415  an extra, which takes a second to load

    return ray


def _start_ray(ray: ModuleType, address: str, variables: Mapping[str, str]) -> None:
    local = (
        {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        if address == LOCAL_RAY
        else {}
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            # JAX's warning; these children start a program at once.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(
                address=address,
                runtime_env={"env_vars": dict(variables)},
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                **local,
            )
    except Exception as error:  # a node that does not start in time is Ray's plain Exception
        reason = quote_first_line(str(error)) or type(error).__name__
        raise BadInput(f"--executor ray: no connection to {address}: {reason}. {TOKEN}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray installs its own handler
