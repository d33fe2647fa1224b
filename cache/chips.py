"""TPU chips and their slices: figures, compiler options, and names of topologies."""

import itertools
import math
import re

import msgspec

from dflash_aot.cache.errors import BadInput

MIB = 2**20
GIB = 2**30


class ChipCompiler(msgspec.Struct, frozen=True):
    """How the compiler is called for a chip.

    Attributes:
        config: name of the chip's configuration, as JAX starts the chip on a TPU host.
        options: of every program.
        model_options: in addition, of the programs that run a whole model.
        other_options: in addition, of the other programs.
    """

    config: str = "default"
    options: dict[str, str] = {}
    model_options: dict[str, str] = {}
    other_options: dict[str, str] = {}


class Chip(msgspec.Struct, frozen=True):
    """A TPU generation; figures are of a whole chip unless noted.

    Attributes:
        name: of the generation, such as v5e.
        device_kind: JAX's name.
        devices: JAX devices per chip.
        cores: TensorCores per chip, which accelerator types such as v5p-8 count.
        hbm_bytes: size of the HBM.
        vmem_bytes: size of a TensorCore's VMEM.
        available_bytes: the part of one device's HBM that the compiler lets programs use.
        bytes_per_second: HBM bandwidth.
        flops_per_second: in bfloat16.
        flops_per_cycle: the same of a cycle, which gives the clock.
        link_bytes_per_second: of a link to a neighbouring chip, in one direction.
        compiler: how the compiler is called.
    """

    name: str
    device_kind: str
    devices: int
    cores: int
    hbm_bytes: int
    vmem_bytes: int
    available_bytes: int
    bytes_per_second: float
    flops_per_second: float
    flops_per_cycle: float
    link_bytes_per_second: float
    compiler: ChipCompiler = ChipCompiler()

    @property
    def cycles_per_second(self) -> float:
        """The clock by which the compiler counts cycles of a device."""
        return self.flops_per_second / self.flops_per_cycle


class Topology(msgspec.Struct, frozen=True):
    """A slice without wraparound links.

    Attributes:
        chip: its generation.
        shape: of the mesh of links between its chips.
    """

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The value of --topology, such as "v5e:2x2"."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """Number of JAX devices."""
        return self.chips * self.chip.devices

    @property
    def host_bounds(self) -> tuple[int, ...]:
        """The sides, in x, y and z, of the chips of one host."""
        single = self.chips <= SINGLE_HOST_CHIPS[len(self.shape)]
        return (*self.shape, 1)[:3] if single else (2, 2, 1)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.chips // math.prod(self.host_bounds)

    @property
    def links(self) -> int:
        """Number of links between chips, counted in each direction."""
        return sum(2 * (side - 1) * self.chips // side for side in self.shape)

    def all_reduce_seconds(self, size: float) -> float:
        """The least time in which all chips get the sum of their arrays of `size` bytes.

        All links together carry each array to another chip, and the sum to all chips but one (Patarasuk and Yuan 2009).
        Latency is left out, and so are exchanges between devices of one chip.
        """
        if self.chips == 1:
            return 0.0
        return 2 * size * (self.chips - 1) / (self.links * self.chip.link_bytes_per_second)


# HBM, its bandwidth and bf16 flops: docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e, /tpu7x (2026). v4's page says
# 1200 GB/s, "TPU v4" (arxiv.org/abs/2304.01433) the same. Pages that say GB mean GiB: /tpu7x says 95 and 32 GiB of v5p
# and v6e, and the compiler counts 16 GiB for v5e. available_bytes, devices and device_kind: read from libtpu 0.0.42.1
# and 0.0.52, the bytes from their out-of-memory reports. The newer one keeps 16, 4 and 8 MiB more of v5p, v6e and tpu7x
# for itself; its figures stand here. v4 and v5p join a chip's two cores to one device, tpu7x does not.
# flops_per_cycle: 2 · 128² for each MXU (v4 and v5p have eight, v5e four), and 2^19 per device of v6e and tpu7x. The
# compiler's estimate of a large product reaches 94 to 97 % of these on v4, v5p and v5e, 87 % on v6e and 85 % on tpu7x.
# link_bytes_per_second: the pages' bandwidth of a chip's links in both directions (300 GB/s in one on v4; 400 v5e, 1200
# v5p, 800 v6e, 1200 tpu7x), over its four or six links.
# vmem_bytes: jax.experimental.pallas.tpu.get_tpu_info.
#
# Compiler options were chosen by the compiler's own estimates of the executables of Qwen3-4B and its draft, see
# docs/performance.md. They are part of an executable's key.
# TPU7x multiplies bfloat16 in tiles of 16 rows, but arguments arrive in tiles of 8: without its option every call
# copied all stacked weights to the other tiling (Qwen3-4B: 3.6 GB). Weights that arrive in tiles of 16 may be faster
# still, but JAX places arrays in that tiling only with an additional program.
TILED = ChipCompiler(options={"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"})
# The VMEM that an operation may use, in KiB. With XLA's default (16 MiB on v5e and v5p, 32 MiB on v6e) a product
# streams its weight in tiles so small that each waits for the memory. v4 and tpu7x keep the default: no other value was
# tried there.
MORE = ChipCompiler(model_options={"xla_tpu_scoped_vmem_limit_kib": "65536"})
# kv_write copied its first weight to VMEM before anything else, which pays where the call before was of the same
# program and left the copy there. Another program runs between two calls. On v5p it takes less time with the copy.
CALLED_IN_TURN = ChipCompiler(
    model_options=MORE.model_options, other_options={"xla_msa_max_cross_program_prefetches": "0"}
)
MEGACORE = ChipCompiler(config="megacore")  # both cores are one device
CHIPS = (
    Chip(
        "v4", "TPU v4", 1, 2, 32 * GIB, 16 * MIB, 31485 * MIB, 1200e9, 275e12, 2**18, 50e9, MEGACORE
    ),
    Chip(
        "v5e",
        "TPU v5 lite",
        1,
        1,
        16 * GIB,
        128 * MIB,
        16126 * MIB,
        819e9,
        197e12,
        2**17,
        50e9,
        CALLED_IN_TURN,
    ),
    Chip(
        "v5p", "TPU v5", 1, 2, 95 * GIB, 64 * MIB, 98025 * MIB, 2765e9, 459e12, 2**18, 100e9, MORE
    ),
    Chip(
        "v6e",
        "TPU v6 lite",
        1,
        1,
        32 * GIB,
        128 * MIB,
        31992 * MIB,
        1638e9,
        918e12,
        2**19,
        100e9,
        CALLED_IN_TURN,
    ),
    Chip(
        "tpu7x",
        "TPU7x",
        2,
        2,
        192 * GIB,
        64 * MIB,
        97012 * MIB,
        7380e9,
        2307e12,
        2**20,
        100e9,
        TILED,
    ),
)
ALIASES = {"v5litepod": "v5e", "v7x": "tpu7x"}
SINGLE_HOST_CHIPS = {
    2: 8,
    3: 4,
}  # the most chips of a host, by the dimensions of its slice; else a host has four
# Slices as docs.cloud.google.com/tpu/docs lists them, and a single chip. Of these, none has wraparound links.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(("v5e", "v6e"), ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8))),
    **dict.fromkeys(("v4", "v5p", "tpu7x"), ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4))),
}
TOPOLOGIES = {
    one.name: one
    for chip in CHIPS
    for one in (Topology(chip, shape) for shape in SHAPES[chip.name])
}
MAX_CHIPS = max(one.chips for one in TOPOLOGIES.values())


def parse_topology(name: str) -> Topology:
    """Returns the slice of a name such as "v5e:2x2". Raises BadInput with all names and the one that may be meant."""
    if known := TOPOLOGIES.get(name):
        return known
    generation, _, size = name.strip().lower().replace("-", ":").partition(":")
    generation = ALIASES.get(generation, generation)
    meant = [
        one.name
        for one in TOPOLOGIES.values()
        if one.chip.name == generation and size in _spellings(one)
    ]
    if meant:
        hint = f"did you mean {meant[0]}?"
    elif generation in SHAPES and math.prod(map(int, re.findall(r"\d{1,9}", size))) > MAX_CHIPS:
        hint = f"slices of more than {MAX_CHIPS} chips are not supported."
    else:
        hint = "no such topology."
    raise BadInput(f"--topology {name}: {hint} Known: {', '.join(TOPOLOGIES)}")


def find_topology(device_kind: str, shape: tuple[int, ...]) -> Topology | None:
    """Returns the slice of such devices with this bounding box, None if there is none. Trailing dimensions may be 1."""
    for one in TOPOLOGIES.values():
        padding = (1,) * (len(shape) - len(one.shape))
        if one.chip.device_kind == device_kind and (*one.shape, *padding) == shape:
            return one
    return None


def find_slice(chip: Chip, devices: int) -> Topology | None:
    """Returns the slice of a generation with so many devices, None if there is none."""
    slices = (one for one in TOPOLOGIES.values() if one.chip == chip and one.devices == devices)
    return next(slices, None)


def find_device_chip(device_kind: str) -> Chip | None:
    """Returns the chip of devices, None if its figures are unknown."""
    return next((chip for chip in CHIPS if chip.device_kind == device_kind), None)


def _spellings(topology: Topology) -> set[str]:
    """Returns other spellings of a size: TensorCores, as in v5p-8; sides in any order, with or without sides of 1."""
    sides = topology.shape
    variants = (sides, (*sides, 1), tuple(side for side in sides if side > 1))
    shapes = {
        "x".join(map(str, order))
        for variant in variants
        for order in itertools.permutations(variant)
    }
    return {str(topology.chips * topology.chip.cores), *shapes}
