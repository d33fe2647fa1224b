"""Build target: the attached devices, or a TPU slice that is only described to the compiler."""

from dataclasses import dataclass
from types import MappingProxyType

import jax
from jax.experimental import topologies

from dflash_aot.cache.bundle_spec import Slice
from dflash_aot.cache.chips import TOPOLOGIES, Chip, Topology, find_device_chip, parse_topology
from dflash_aot.cache.devices import (
    attached_devices,
    make_environment,
    order_in_mesh,
    read_environment,
    select_jax_platforms,
)
from dflash_aot.cache.environment import Environment, is_tpu_attached, libtpu_version
from dflash_aot.cache.errors import BadInput

# Environment variables that a process needs before it imports JAX, to compile for a TPU that is not attached.
COMPILE_ONLY = MappingProxyType(
    {
        "JAX_PLATFORMS": "cpu",
        "JAX_FORCE_TPU_INIT": "1",  # JAX adds the flags to LIBTPU_INIT_ARGS that it adds on a TPU host
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",
        "TPU_MIN_LOG_LEVEL": "2",
    }
)


@dataclass(frozen=True)
class TargetDevices:
    """Devices to compile for, attached or described. For a described device programs can be compiled, but not run.

    Attributes:
        devices: in the order of their mesh.
        environment: what executables for them depend on.
    """

    devices: tuple[jax.Device, ...]
    environment: Environment


# A Topology stays a name in this process: worker processes describe it to the compiler, which may crash.
BuildTarget = TargetDevices | Topology


def choose_build_target(
    platform: str | None, topology_name: str | None, tensor_parallel: int | None
) -> BuildTarget:
    """The attached devices, or a described slice where no TPU is attached. Starts JAX. Raises BadInput."""
    topology = parse_topology(topology_name) if topology_name is not None else None
    platform = platform or ("tpu" if topology else None)
    if topology and platform != "tpu":
        raise BadInput(f"--topology {topology.name} is a TPU slice, but --platform is {platform}")
    select_jax_platforms(platform)
    if platform == "tpu" and not is_tpu_attached():
        if topology is None:
            raise BadInput(
                f"--platform tpu: no TPU is attached. Name the slice with --topology: {', '.join(TOPOLOGIES)}"
            )
        count_devices(topology, tensor_parallel)
        return topology
    try:
        platform = platform or jax.default_backend()
    except RuntimeError as error:  # of the user's JAX_PLATFORMS
        raise BadInput(f"no device: {error}") from error
    return attach_devices(platform, topology, tensor_parallel)


def select_slice(where: Slice) -> BuildTarget:
    """The devices that a bundle was built for. Starts JAX. Raises BadInput."""
    flags = where.flags()
    count = None if "topology" in flags else where.devices
    return choose_build_target(flags["platform"], flags.get("topology"), count)


def attach_devices(
    platform: str, topology: Topology | None, tensor_parallel: int | None
) -> TargetDevices:
    """The attached devices. Starts JAX. Raises BadInput where other devices were requested."""
    count = count_devices(topology, tensor_parallel)
    try:
        attached = TargetDevices(
            attached_devices(platform, count), read_environment(platform, count)
        )
    except RuntimeError as error:
        raise BadInput(f"--platform {platform}: {error}") from error
    here = attached.environment
    if topology and topology.name != here.topology:
        raise BadInput(
            f"--topology {topology.name}: the attached TPU is {here.topology or here.device_kind}. Leave --topology "
            "out to build for the attached TPU; build for other slices where no TPU is attached"
        )
    return attached


def describe_devices(topology: Topology) -> TargetDevices:
    """The devices of a slice that is not attached, in a process that was started with `COMPILE_ONLY`."""
    # Experimental, and the only interface to a compiler without its device.
    chips = topologies.get_topology_desc(
        topology.name,
        platform="tpu",
        chip_config_name=topology.chip.compiler.config,
        chips_per_host_bounds=topology.host_bounds,
    )
    devices = order_in_mesh(chips.devices)
    return TargetDevices(devices, make_environment(devices, topology.name))


def count_devices(topology: Topology | None, tensor_parallel: int | None) -> int:
    """The number of devices that share every layer: all of a slice, otherwise 1 by default. Raises BadInput."""
    if topology is None:
        return tensor_parallel or 1
    if tensor_parallel not in (None, topology.devices):
        raise BadInput(
            f"--tensor_parallel {tensor_parallel}: {topology.name} has {topology.devices} devices, and all devices of "
            "a slice are used. Name a slice of that size with --topology"
        )
    return topology.devices


def check_compiler() -> None:
    """Raises BadInput where the TPU compiler is not installed."""
    if not libtpu_version():
        raise BadInput(
            'the TPU compiler is not installed: pip install "dflash-aot[tpu]", '
            'or in a clone: pip install -c constraints.txt ".[tpu]"'
        )


def name_slice(target: BuildTarget) -> Slice:
    """The slice of the target's devices."""
    if isinstance(target, Topology):
        return Slice("tpu", target.name, target.devices)
    return Slice.of(target.environment)


def find_chip(target: BuildTarget) -> Chip | None:
    """The figures of the target's chips; None where they are unknown."""
    if isinstance(target, Topology):
        return target.chip
    return find_device_chip(target.environment.device_kind)
