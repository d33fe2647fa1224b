"""TPU slices by name: the right ones, and what a wrong one is answered with."""

import pytest

from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.topology import CHIPS, SHAPES, TOPOLOGIES, find_topology, parse_topology

# Sums that anyone can do: the slice, its chips, and as many devices as JAX shows.
SLICES = {"v5e:1x1": (1, 1), "v5e:2x4": (8, 8), "v4:2x2x1": (4, 4), "v5p:2x2x1": (4, 4), "tpu7x:2x2x1": (4, 8)}
MEANT = {
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
FOREIGN = ["", "v5e:1x3", "v3:2x2", "h200", "v5e:0x0", "v5p-3", "2x2"]
TOO_LARGE = ["v5e:4x4", "v5litepod-256", "v5p:2x2x4", "tpu7x:4x4x4", f"v6e:{'9' * 5000}x2"]


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_knows_its_size(name):
    topology = parse_topology(name)
    assert (topology.name, topology.chips, topology.devices) == (name, *SLICES[name])


def test_every_chip_has_a_slice_of_one():
    assert (
        {one.chip.name for one in TOPOLOGIES.values() if one.chips == 1} == {chip.name for chip in CHIPS} == {*SHAPES}
    )
    assert max(one.devices for one in TOPOLOGIES.values()) == 8


def test_programs_get_less_than_there_is_but_not_much():
    for chip in CHIPS:
        assert 0.9 * chip.hbm_bytes < chip.available_bytes * chip.devices < 1.01 * chip.hbm_bytes


@pytest.mark.parametrize("name", [*MEANT, *FOREIGN, *TOO_LARGE], ids=lambda name: name[:20])
def test_a_wrong_name_is_answered_with_the_right_ones(name):
    with pytest.raises(BadInput, match="--topology") as refused:
        parse_topology(name)
    words = str(refused.value)
    assert words.endswith(", ".join(TOPOLOGIES))
    assert ("did you mean" in words, "several hosts" in words) == (name in MEANT, name in TOO_LARGE)
    assert name not in MEANT or f"did you mean {MEANT[name]}?" in words


def test_attached_devices_are_found_by_kind_and_shape():
    assert find_topology("TPU v5 lite", (2, 4, 1)) == parse_topology("v5e:2x4")
    assert find_topology("TPU v5", (2, 2, 1)) == parse_topology("v5p:2x2x1")
    assert find_topology("TPU v5 lite", (4, 4, 1)) is None
    assert find_topology("TPU v3", (2, 2, 1)) is None
