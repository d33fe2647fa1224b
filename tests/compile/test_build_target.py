"""Build targets: attached devices, and slices that are described to the TPU compiler."""

import os
import re
import subprocess
import sys

import msgspec
import pytest

from dflash_aot.cache.chips import CHIPS, GIB, TOPOLOGIES, parse_topology
from dflash_aot.cache.devices import read_environment
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BadInput
from dflash_aot.compile.pipeline.build_target import COMPILE_ONLY, attach_devices, count_devices

BARRIER = "--xla_tpu_use_enhanced_launch_barrier"  # added by JAX 0.10.2 and 0.12.0.1
DESCRIBE = f"""
import sys
import jax, msgspec
from jax.sharding import SingleDeviceSharding
from dflash_aot.cache.chips import TOPOLOGIES
from dflash_aot.compile.pipeline.build_target import describe_devices

environments, refusals = {{}}, {{}}
for topology in TOPOLOGIES.values():
    described = describe_devices(topology)
    environments[topology.name] = described.environment
    if topology.chips == 1:
        whole = SingleDeviceSharding(described.devices[0])
        too_much = jax.ShapeDtypeStruct(({200 * GIB} // 4096, 1024), "float32", sharding=whole)
        try:
            jax.jit(lambda x: x + 1).trace(too_much).lower(lowering_platforms=("tpu",)).compile()
        except jax.errors.JaxRuntimeError as error:
            refusals[topology.chip.name] = str(error)
sys.stdout.buffer.write(msgspec.json.encode((environments, refusals)))
"""


@pytest.fixture(scope="module")
def described() -> tuple[dict[str, Environment], dict[str, str]]:
    """The environment of every topology, and the compiler's error for a program too large for each chip."""
    environment = {**os.environ, **COMPILE_ONLY, "LIBTPU_INIT_ARGS": "--xla_tpu_enable_latency_hiding_scheduler=true"}
    done = subprocess.run([sys.executable, "-c", DESCRIBE], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=tuple[dict[str, Environment], dict[str, str]])


def test_compiler_describes_every_topology(described):
    for name in TOPOLOGIES:
        environment, topology = described[0][name], parse_topology(name)
        assert (environment.platform, environment.topology, environment.device_count) == ("tpu", name, topology.devices)
        assert (environment.device_kind, environment.hosts) == (topology.chip.device_kind, topology.hosts)
        assert len(set(environment.coordinates)) == topology.devices, name
        corner = ",".join(str(side - 1) for side in (*topology.shape, 1)[:3])
        assert {"0,0,0,0", f"{corner},{topology.chip.devices - 1}"} <= set(environment.coordinates)


def test_available_bytes_are_at_most_the_compilers(described):
    """The report is rounded to 0.01 GiB, and compilers differ by up to 0.016 GiB."""
    for chip in CHIPS:
        reported = re.search(r"exceeds available HBM \(([\d.]+)G\)", described[1][chip.name])
        assert reported, described[1][chip.name]
        assert -0.005 <= float(reported[1]) - chip.available_bytes / GIB <= 0.021, chip.name


def test_described_environment_does_not_hold_the_building_host(described):
    environment = described[0]["v5e:1x1"]
    assert described[0]["v5e:2x2"].coordinates == ("0,0,0,0", "1,0,0,0", "1,1,0,0", "0,1,0,0")  # JAX's ring
    assert environment.libtpu and "TPU v5 lite" in environment.platform_version
    assert (environment.machine, environment.cpu_features) == ("", ())
    assert environment.libtpu_init_args == f"--xla_tpu_enable_latency_hiding_scheduler=true {BARRIER}=true"


def test_attached_devices_are_those_of_this_machine():
    attached = attach_devices("cpu", None, None)
    assert attached.environment == read_environment("cpu")
    assert [str(device.id) for device in attached.devices] == list(attached.environment.coordinates)
    with pytest.raises(BadInput, match="--platform cpu: 4096 cpu devices are needed, .* are attached. XLA_FLAGS=--xla"):
        attach_devices("cpu", None, 4096)


def test_all_devices_of_a_slice_are_used():
    cases = [(None, None, 1), (None, 4, 4), ("v5e:2x2", None, 4), ("v5e:2x2", 4, 4), ("tpu7x:1x1x1", None, 2)]
    for name, tensor_parallel, devices in cases:
        assert count_devices(name and parse_topology(name), tensor_parallel) == devices
