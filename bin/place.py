"""Where executables are built: on attached devices, or for a slice that is only described to the compiler."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import jax

from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.environment import Environment, is_tpu_attached
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.topology import CHIPS, TOPOLOGIES, Chip, Topology, parse_topology
from dflash_aot.compile.pipeline.build_target import Machine, attach, count_devices
from dflash_aot.compile.pipeline.compilation_manager import Site
from dflash_aot.compile.pipeline.ray_workers import open_ray_workers
from dflash_aot.compile.pipeline.threads import Threads
from dflash_aot.compile.pipeline.worker_pool import Workers

ATTACHED_JOBS = 2  # each compilation for an attached device has threads of its own
MOST_WORKERS = 8
Place = Machine | Topology


def choose_place(platform: str | None, topology_name: str | None, tensor_parallel: int | None) -> Place:
    """The attached devices, or the slice to describe to the compiler where no TPU is attached; starts JAX.

    Raises BadInput.
    """
    topology = parse_topology(topology_name) if topology_name is not None else None
    platform = platform or ("tpu" if topology else None)
    if topology and platform != "tpu":
        raise BadInput(f"--topology {topology.name} is a TPU's, but --platform is {platform}")
    select_jax_platforms(platform)
    if platform == "tpu" and not is_tpu_attached():
        if topology is None:
            raise BadInput(f"--platform tpu: none is attached. Say which with --topology: {', '.join(TOPOLOGIES)}")
        count_devices(topology, tensor_parallel)
        return topology
    try:
        platform = platform or jax.default_backend()
    except RuntimeError as error:  # of the user's JAX_PLATFORMS
        raise BadInput(f"no device: {error}") from error
    return attach(platform, topology, tensor_parallel)


def recall_place(built: Environment) -> Place:
    """Devices as a bundle was built for, here or described; starts JAX. Raises BadInput."""
    slice_ = TOPOLOGIES.get(built.topology)
    whole = slice_ is not None and slice_.devices == built.device_count
    platform = "cuda" if built.platform == "gpu" else built.platform
    return choose_place(platform, built.topology if whole else None, None if whole else built.device_count)


def choose_jobs(place: Place, jobs: int | None) -> int:
    """How many executables are compiled at a time; as many as asked for, if that was said.

    A process for a TPU starts on one core and compiles on 1.6: on two cores two at a time took 105 s for what one took
    142 s for (Qwen3-4B, 43 executables).
    """
    if jobs or isinstance(place, Machine):
        return jobs or ATTACHED_JOBS
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def check_cluster(place: Place) -> None:
    """Raises BadInput where only the devices of this process can be compiled for."""
    if isinstance(place, Machine) and place.environment.platform != "cpu":
        raise BadInput(
            f"--executor ray: a {place.environment.device_kind} is attached, and compiling for it takes the device "
            "itself. Build here with --executor local, or where none is attached with --topology or --platform cpu"
        )


def open_site(place: Place, store: Store, jobs: int | None, cluster: str | None) -> AbstractContextManager[Site]:
    """The builders of a place; those of a Ray cluster at this address."""
    if cluster is not None:
        return _open_ray(place, store, jobs, cluster)
    count = choose_jobs(place, jobs)
    return Workers(place, store.bundle, count) if isinstance(place, Topology) else Threads(place, store, count)


@contextmanager
def _open_ray(place: Place, store: Store, jobs: int | None, cluster: str) -> Iterator[Site]:
    with open_ray_workers(place, store, jobs, cluster) as (workers, where):
        print(where, file=sys.stderr)
        yield workers


def find_chip(place: Place) -> Chip | None:
    """The figures of the chips to build for; None where none are known."""
    if isinstance(place, Topology):
        return place.chip
    return next((chip for chip in CHIPS if chip.device_kind == place.environment.device_kind), None)


def describe_place(place: Place) -> tuple[str, int]:
    """Platform and number of devices."""
    if isinstance(place, Topology):
        return "tpu", place.devices
    return place.environment.platform, place.environment.device_count
