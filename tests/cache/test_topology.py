"""TPU topologies by name, and messages for unknown names."""

import pytest

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.topology import CHIPS, TOPOLOGIES, find_topology, parse_topology

# Chips, and devices as JAX shows them.
SLICES = {"v5e:1x1": (1, 1), "v5e:2x4": (8, 8), "v4:2x2x1": (4, 4), "v5p:2x2x1": (4, 4), "tpu7x:2x2x1": (4, 8)}
INTENDED = {
    "V5E:2x2": "v5e:2x2",
    " v5e:2x2 ": "v5e:2x2",
    "v5litepod-4": "v5e:2x2",
    "v5e-4": "v5e:2x2",
    "v5e-8": "v5e:2x4",
    "v5e:4x2": "v5e:2x4",
    "v6e:2x2x1": "v6e:2x2",
    "v5p:2x2": "v5p:2x2x1",
    "v5p-8": "v5p:2x2x1",  # accelerator types of these count TensorCores
    "v4-8": "v4:2x2x1",
    "tpu7x-8": "tpu7x:2x2x1",
    "v7x:2x2x1": "tpu7x:2x2x1",
    "v6e": "v6e:1x1",
}
UNKNOWN = ["", "v5e:1x3", "v3:2x2", "h200", "v5e:0x0", "v5p-3", "2x2"]
TOO_LARGE = ["v5e:4x4", "v5litepod-256", "v5p:2x2x4", "tpu7x:4x4x4", f"v6e:{'9' * 5000}x2"]


def test_topology_has_the_published_chips_and_devices():
    for name in SLICES:
        topology = parse_topology(name)
        assert (topology.name, topology.chips, topology.devices) == (name, *SLICES[name])


def test_available_bytes_are_slightly_less_than_the_hbm():
    for chip in CHIPS:
        assert 0.9 * chip.hbm_bytes < chip.available_bytes * chip.devices < 1.01 * chip.hbm_bytes


def test_unknown_name_is_refused_with_the_known_names():
    for name in [*INTENDED, *UNKNOWN, *TOO_LARGE]:
        with pytest.raises(BadInput, match="--topology") as refused:
            parse_topology(name)
        words = str(refused.value)
        assert words.endswith(", ".join(TOPOLOGIES))
        assert ("did you mean" in words, "several hosts" in words) == (name in INTENDED, name in TOO_LARGE)
        assert name not in INTENDED or f"did you mean {INTENDED[name]}?" in words


def test_find_topology_by_device_kind_and_shape():
    assert find_topology("TPU v5 lite", (2, 4, 1)) == parse_topology("v5e:2x4")
    assert find_topology("TPU v5", (2, 2, 1)) == parse_topology("v5p:2x2x1")
    assert find_topology("TPU v5 lite", (4, 4, 1)) is None
    assert find_topology("TPU v3", (2, 2, 1)) is None
