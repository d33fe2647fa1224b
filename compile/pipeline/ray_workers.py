"""Building on a Ray cluster: one task for each executable, whose bytes are verified here."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import msgspec

from dflash_aot.cache.bundle.blob import BrokenBlob, unpack_blob
from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import OTHER_PROGRAM, Store, find_build_record
from dflash_aot.cache.environment import Environment, read_flags, read_host_environment
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.topology import Topology
from dflash_aot.compile.pipeline import ray_worker
from dflash_aot.compile.pipeline.build_target import COMPILE_ONLY, Machine, check_compiler
from dflash_aot.compile.pipeline.executable_builder import Order
from dflash_aot.compile.pipeline.ray_cluster import OWN, Cluster, connect
from dflash_aot.compile.pipeline.worker_process import Answer

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # which executables depend on


class RayWorkers:
    """Up to `jobs` tasks at a time; `environment` is that of the devices they compile for."""

    def __init__(self, cluster: Cluster, environment: Environment, store: Store, jobs: int):
        self.jobs, self.environment = jobs, environment
        self._cluster, self._store = cluster, store
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="ray")

    def start(self, order: Order) -> Future[Entry]:
        return self._pool.submit(self._compile, order)

    def leave(self) -> None:
        """Cancels what is not done, and waits for it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._cluster.cancel()
        self._pool.shutdown()

    def _compile(self, order: Order) -> Entry:
        """Raises BuildFailed with the task's words, or what became of its process."""
        answer, executable, program = self._cluster.call(
            ray_worker.make_for, msgspec.json.encode(self.environment), msgspec.json.encode(order)
        )
        entry = check_made(order, answer, executable, program)
        self._store.add(entry, executable, program)
        return entry


@contextmanager
def open_ray_workers(
    place: Machine | Topology, store: Store, jobs: int | None, address: str
) -> Iterator[tuple[RayWorkers, str]]:
    """The workers, and in words where they are; `jobs` None: one for each processor of the cluster.

    Raises BadInput where there is no cluster or compiler, BuildFailed where its nodes are not like this machine.
    """
    described = isinstance(place, Topology)
    if described:
        check_compiler()
    variables = dict(COMPILE_ONLY) if described else {"JAX_PLATFORMS": "cpu"}
    with connect(address, {**variables, **{name: read_flags(name) for name in FLAGS}}) as cluster:
        environment = _describe(cluster, place) if isinstance(place, Topology) else place.environment
        workers = RayWorkers(cluster, environment, store, jobs or cluster.cpus)
        where = "a Ray of its own on this machine" if address == OWN else f"Ray at {address}"
        try:
            yield workers, f"compiling on {where}: {workers.jobs} at a time"
        finally:
            workers.leave()


def _describe(cluster: Cluster, topology: Topology) -> Environment:
    """As a node sees it, which must be what would be seen here. Raises BuildFailed."""
    found = msgspec.json.decode(cluster.call(ray_worker.describe_slice, topology.name), type=Environment)
    here: Mapping[str, object] = msgspec.structs.asdict(read_host_environment("tpu"))
    ray_worker.check_same(msgspec.structs.replace(found, **here), found, "a node of the cluster")
    return found


def check_made(order: Order, answer: bytes, executable: bytes, program: bytes) -> Entry:
    """What a task handed back, once all of it is what was ordered. Raises BuildFailed."""
    try:
        made = msgspec.json.decode(answer, type=Answer)
        if made.entry is None:
            raise BuildFailed(made.failure)
        entry = find_build_record(msgspec.json.encode(made.entry), order.key, order.signature, order.program)
        unpack_blob(entry, executable)
        if unpack_blob(entry.program, program) != order.program:
            raise BuildFailed(f"a node of the cluster handed back {OTHER_PROGRAM}")
    except (BrokenBlob, ValueError) as flaw:
        raise BuildFailed(f"a node of the cluster handed back what cannot be used: {flaw}") from flaw
    return entry
