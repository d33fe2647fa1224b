"""What executables are built for: attached devices, or a TPU slice that is only described to the compiler."""

from dataclasses import dataclass
from types import MappingProxyType

import jax
from jax.experimental import topologies

from dflash_aot.cache.devices import attached_devices, make_environment, order_in_mesh, read_environment
from dflash_aot.cache.environment import Environment, libtpu_version
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.topology import Topology

# What a process must have in its environment before it imports JAX, to compile for a TPU that is not there.
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
CHIP_CONFIGS = {"v4": "megacore"}  # as JAX starts the chip on a TPU host: both cores are one device


@dataclass(frozen=True)
class Machine:
    """Devices in the order of their mesh; described ones can be compiled for, and nothing else."""

    devices: tuple[jax.Device, ...]
    environment: Environment


def attach(platform: str, topology: Topology | None, tensor_parallel: int | None) -> Machine:
    """The attached devices; starts JAX. Raises BadInput where they are not what was asked for."""
    count = count_devices(topology, tensor_parallel)
    try:
        machine = Machine(attached_devices(platform, count), read_environment(platform, count))
    except RuntimeError as error:
        raise BadInput(f"--platform {platform}: {error}") from error
    here = machine.environment
    if topology and topology.name != here.topology:
        raise BadInput(
            f"--topology {topology.name}: a TPU is attached, and it is {here.topology or here.device_kind}. Without "
            "--topology it is built for; other slices are built for where no TPU is attached"
        )
    return machine


def describe(topology: Topology) -> Machine:
    """A slice that is not there, for a process that `COMPILE_ONLY` was set for."""
    # Experimental, and the only way to a compiler without its device.
    chips = topologies.get_topology_desc(
        topology.name,
        platform="tpu",
        chip_config_name=CHIP_CONFIGS.get(topology.chip.name, "default"),
        chips_per_host_bounds=(*topology.shape, 1)[:3],
    )
    devices = order_in_mesh(chips.devices)
    return Machine(devices, make_environment(devices, topology.name))


def count_devices(topology: Topology | None, tensor_parallel: int | None) -> int:
    """How many devices share every layer: all of a slice, otherwise one unless said. Raises BadInput."""
    if topology is None:
        return tensor_parallel or 1
    if tensor_parallel not in (None, topology.devices):
        raise BadInput(
            f"--tensor_parallel {tensor_parallel}: {topology.name} has {topology.devices} devices, and all of a slice "
            "are used. Name a slice of that size with --topology"
        )
    return topology.devices


def check_compiler() -> None:
    """Raises BadInput where the TPU compiler is not installed."""
    if not libtpu_version():
        raise BadInput(
            'the TPU compiler is not installed: pip install "dflash-aot[tpu]", '
            'or in a clone: pip install -c constraints.txt ".[tpu]"'
        )
