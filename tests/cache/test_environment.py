"""Environments: differences between the build machine and this one, field by field."""

import sys
from importlib.metadata import version

import pytest
from msgspec import structs

from dflash_aot.cache.chips import TOPOLOGIES, find_topology, parse_topology
from dflash_aot.cache.environment import (
    Environment,
    EnvironmentDifference,
    compare_with_host,
    find_differences,
    is_tpu_attached,
    name_python,
    read_flags,
    read_host_environment,
)
from dflash_aot.cache.errors import BadInput

PLAIN_FIELDS = [field for field in Environment.__struct_fields__ if field != "cpu_features"]


def test_additional_cpu_features_are_compatible(environment):
    here = structs.replace(environment, cpu_features=("amx_int8", *environment.cpu_features, "vaes"))
    assert find_differences(environment, here) == find_differences(environment, environment) == []


def test_missing_cpu_features_are_incompatible(environment):
    here = structs.replace(environment, jax="0.11", cpu_features=("sse4_2", "vaes"))
    assert find_differences(environment, here) == [
        EnvironmentDifference("jax", environment.jax, "0.11"),
        EnvironmentDifference("cpu_features", "uses avx2 fma", "not on this processor"),
    ]


def test_is_tpu_attached_reads_device_files_and_pci_vendor(tmp_path):
    for number, (files, vendors, attached) in enumerate(
        [
            (["accel0"], [], True),
            (["vfio/0"], ["0x8086", "0x1ae0"], True),
            (["vfio/0"], ["0x8086", "0x10de"], False),  # a passed-through GPU
            (["vfio/vfio"], ["0x1ae0"], False),
            (["accel", "null"], ["0x1ae0"], False),
            ([], [], False),
        ]
    ):
        devices, pci = tmp_path / f"dev{number}", tmp_path / f"pci{number}"
        for file in files:
            (devices / file).parent.mkdir(parents=True, exist_ok=True)
            (devices / file).touch()
        for slot, vendor in enumerate(vendors):
            (pci / str(slot)).mkdir(parents=True)
            (pci / str(slot) / "vendor").write_text(f"{vendor}\n")
        assert is_tpu_attached(devices, pci) == attached, files


def test_flags_in_a_file_are_refused(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", " --xla_a=1 --xla_b ")
    assert read_flags("XLA_FLAGS") == "--xla_a=1 --xla_b"
    monkeypatch.setenv("XLA_FLAGS", "/etc/xla flags")
    with pytest.raises(BadInput, match=r"XLA_FLAGS names the file '/etc/xla' .* XLA_FLAGS=.*< /etc/xla"):
        read_host_environment("cpu")


@pytest.fixture
def here(environment) -> Environment:
    return structs.replace(environment, platform_version="cpu", **structs.asdict(read_host_environment("cpu")))


def test_differing_field_is_found_before_jax_starts(here):
    for field in PLAIN_FIELDS:
        value = getattr(here, field)
        other = {int: 7, str: "other", tuple: ("1",)}[type(value)]
        found, later = compare_with_host(structs.replace(here, **{field: other}))
        if field == "device_count":  # a host can be split into any number of virtual CPU devices
            assert (found, later) == ([], ["device_count", "hosts", "coordinates"])
        elif field == "platform":
            assert "platform_version" in later
        else:
            assert [one.field for one in found] == [field]


def test_accelerator_fields_are_not_compared_before_jax_starts(here):
    on_gpu = structs.replace(here, platform="gpu", cpu_features=(), platform_version="cuda", device_kind="NVIDIA H100")
    found, later = compare_with_host(on_gpu)
    assert found == []
    assert later == ["platform", "platform_version", "device_kind", "device_count", "hosts", "coordinates"]


@pytest.mark.skipif(is_tpu_attached(), reason="a TPU is attached")
def test_tpu_bundle_is_incompatible_without_a_tpu(here):
    slice_ = structs.replace(here, platform="tpu", machine="", cpu_features=(), topology="v5e:2x2", device_count=4)
    found, later = compare_with_host(slice_)
    assert EnvironmentDifference("platform", "tpu", "no TPU is attached") in found
    told = ["platform_version", "device_kind", "topology", "device_count", "hosts", "coordinates"]
    assert later == [*told, "libtpu_init_args"]


def test_python_of_a_jax_version_is_the_one_that_installs_it():
    minor = "3.11" if sys.version_info < (3, 12) else "3.12 or later"
    assert name_python(version("jax")) == f"Python {minor}"


# Chips, devices as JAX shows them, and hosts.
SLICES = {"v5e:1x1": (1, 1, 1), "v5e:2x4": (8, 8, 1), "v6e:4x8": (32, 32, 8), "v4:2x2x1": (4, 4, 1)}
SLICES |= {"v5p:2x2x4": (16, 16, 4), "tpu7x:2x2x1": (4, 8, 1), "tpu7x:2x2x2": (8, 16, 2)}
INTENDED = {
    "V5E:2x2": "v5e:2x2",
    "v5litepod-4": "v5e:2x2",
    "v5e-8": "v5e:2x4",
    "v5litepod-16": "v5e:4x4",
    "v5e:4x2": "v5e:2x4",
    "v5p:2x2": "v5p:2x2x1",
    "v5p-8": "v5p:2x2x1",  # accelerator types of these count TensorCores
    "v4-8": "v4:2x2x1",
    "v7x:2x2x1": "tpu7x:2x2x1",
    "v6e": "v6e:1x1",
}
UNKNOWN = ["", "v5e:1x3", "v3:2x2", "h200", "v5e:0x0", "v5p-3", "2x2"]
TOO_LARGE = ["v5e:8x8", "v5litepod-256", "v5p:4x4x4", "tpu7x:4x4x4", f"v6e:{'9' * 5000}x2"]


def test_topology_has_the_published_chips_and_devices():
    for name in SLICES:
        topology = parse_topology(name)
        assert (topology.name, topology.chips, topology.devices, topology.hosts) == (name, *SLICES[name])


def test_a_sum_takes_each_array_once_over_a_link():
    """v5e:2x2: eight links of 50 GB/s; three arrays of 4 MB there, and their sum back."""
    assert parse_topology("v5e:2x2").all_reduce_seconds(4e6) == 6 * 4e6 / (8 * 50e9)
    assert parse_topology("v5e:4x4").links == 48 and parse_topology("v5p:2x2x4").links == 56
    assert parse_topology("tpu7x:1x1x1").all_reduce_seconds(4e6) == 0


def test_unknown_name_is_refused_with_the_known_names():
    for name in [*INTENDED, *UNKNOWN, *TOO_LARGE]:
        with pytest.raises(BadInput, match="--topology") as refused:
            parse_topology(name)
        words = str(refused.value)
        assert words.endswith(", ".join(TOPOLOGIES))
        assert ("did you mean" in words, "of more than" in words) == (name in INTENDED, name in TOO_LARGE)
        assert name not in INTENDED or f"did you mean {INTENDED[name]}?" in words


def test_find_topology_by_device_kind_and_shape():
    assert find_topology("TPU v5 lite", (2, 4, 1)) == parse_topology("v5e:2x4")
    assert find_topology("TPU v5", (2, 2, 1)) == parse_topology("v5p:2x2x1")
    assert find_topology("TPU v5 lite", (4, 4, 1)) == parse_topology("v5e:4x4")
    assert find_topology("TPU v3", (2, 2, 1)) is None
