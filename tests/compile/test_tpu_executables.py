"""Executable checks and memory plans on executables of real shapes, built by the TPU compiler."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from jax import export

from dflash_aot.cache.bundle.manifest import Entry
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.chips import TOPOLOGIES, Topology
from dflash_aot.cache.environment import libtpu_version
from dflash_aot.cache.grid import Grid, parse_grid
from dflash_aot.cache.sampling_state import SAMPLING_MODES
from dflash_aot.cache.weight_recipe import PLAIN, WeightFormats
from dflash_aot.compile.analysis.executable_checks import find_layout_conflicts, find_problems
from dflash_aot.compile.analysis.memory_plan import GLOBAL_MEMORY_BYTES, MemoryPlanner
from dflash_aot.compile.models.backend import choose_backend
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.pipeline.compilation_manager import compile_all
from dflash_aot.compile.pipeline.worker_pool import WorkerPool
from dflash_aot.compile.programs.programs import Programs, TracedPrograms
from tests.compile.conftest import read_published

BUCKETS = "batch=1,8 length=1024 k=0,3,15 prefill=64 rounds=4"
VERIFY = "verify batch=1 length=1024 k=15"
VERIFY_EIGHT = "verify batch=8 length=1024 k=15"
QWEN3 = ("Qwen3-4B", "Qwen3-4B-DFlash-b16", {})
EXPERTS = ("Qwen3-30B-A3B", "Qwen3-4B-DFlash-b16", {"hidden_size": 2048, "num_target_layers": 48})
HYBRID = ("Qwen3.5-4B", "Qwen3.5-4B-DFlash", {})
HYBRID_EXPERTS = ("Qwen3.6-35B-A3B", "Qwen3.5-4B-DFlash", {"hidden_size": 2048, "num_target_layers": 40})
INT8 = WeightFormats("int8", "int8")


@dataclass(frozen=True)
class Build:
    """Executables that are built, and what each has: the count of collectives, some kernels, at most these seconds."""

    topology: str
    labels: tuple[str, ...] = (VERIFY,)
    collectives: int = 0
    pair: tuple[str, str, dict[str, int]] = QWEN3  # target, draft, and changes of the draft's config
    formats: WeightFormats = PLAIN
    kernels: tuple[str, ...] = ()
    seconds: float = 1.0


BUILDS = [
    Build(
        "v5e:1x1",
        (
            "prefill prefill=64 length=1024",
            "draft batch=8 length=1024 k=3",  # outputs of all 128 rows, instead of 24, would take 156 MB
            "sampled_verify batch=8 length=1024 k=15",
            "kv_write rows=8 width=16",
            "rounds batch=1 length=1024 k=15 rounds=4",
            "move",
            "admit",
        ),
    ),
    Build("v5p:1x1x1"),  # gate and up were copied here, once as one weight
    # Four collectives: two sums of a layer, one of the embedding, and the choice of a token. On one device the layers'
    # experts have another layout.
    Build("v6e:2x2", collectives=4, pair=EXPERTS, kernels=("route_tokens",)),
    Build("v6e:1x1", (VERIFY_EIGHT,), pair=EXPERTS, formats=INT8),
    Build("v5e:1x1", formats=INT8),
    Build("tpu7x:1x1x1", ("verify batch=1 length=1024 k=0",), 4),  # all weights were copied to another layout here
    Build("v5e:1x1", (VERIFY_EIGHT,), pair=HYBRID, seconds=0.021),  # 0.0246 with recurrent layers of XLA's operations
    # The loop's body has four layers.
    Build("v6e:2x2", collectives=10, pair=HYBRID_EXPERTS, formats=INT8, kernels=("route_tokens", "mix_delta_block")),
]

pytestmark = pytest.mark.skipif(not libtpu_version(), reason="needs libtpu")


@dataclass(frozen=True)
class Executables:
    facts: Build
    programs: Programs
    grid: Grid
    topology: Topology
    entries: Sequence[Entry]
    store: Store


@pytest.fixture(
    params=BUILDS, ids=lambda build: f"{build.pair[0]} {build.formats.target} {build.topology}", scope="module"
)
def built(request, tmp_path_factory) -> Executables:
    facts: Build = request.param
    topology, grid = TOPOLOGIES[facts.topology], parse_grid(BUCKETS, 16)
    pair = read_published(*facts.pair[:2], **facts.pair[2])
    backend = choose_backend("tpu", topology.chip, *pair)
    programs = Programs(*pair, "bfloat16", TensorParallel(topology.devices, backend), SAMPLING_MODES, facts.formats)
    bundle = tmp_path_factory.mktemp("bundle")
    source, store = TracedPrograms(programs, grid), Store(bundle)
    source.signatures = [one for one in source.signatures if one.label in facts.labels]
    with store.open_for_building(), WorkerPool(topology, bundle, jobs=min(2, len(facts.labels))) as pool:
        entries = compile_all(source, pool, store).entries
    assert len(entries) == len(facts.labels)
    return Executables(facts, programs, grid, topology, entries, store)


def test_executables_have_no_problems_and_the_estimated_memory(built):
    """Estimates: arguments are exact, the sum is within 2 %, or within the global memory of a newer libtpu."""
    known = built.programs.arrays_by_name(built.grid)
    planner = MemoryPlanner(built.programs, built.topology.devices, tiled=True)
    for entry in built.entries:
        expected = built.programs.collectives(entry.signature)
        assert find_problems(entry, known, built.topology.devices, expected) == []
        assert sum(entry.analysis.collectives.values()) == expected == built.facts.collectives
        assert entry.analysis.copies == () or built.facts.pair not in (HYBRID, HYBRID_EXPERTS)
        assert entry.cost.schedule.seconds < built.facts.seconds
        program = export.deserialize(bytearray(built.store.read_program(entry))).mlir_module()
        assert all(name in program for name in built.facts.kernels)
        assert entry.bytes < 0.35 * entry.serialized_bytes
        estimate, found = planner.estimate(entry.signature, known), entry.memory
        assert (estimate.arguments, estimate.aliased) == (found.arguments, found.aliased), entry.signature.label
        close = pytest.approx(count_needed(found), rel=0.02, abs=1.1 * GLOBAL_MEMORY_BYTES)
        assert count_needed(estimate) == close, entry.signature.label
        assert count_needed(estimate) < built.topology.chip.available_bytes
    assert find_layout_conflicts(built.entries) == []


def count_needed(memory):
    return memory.arguments + memory.outputs - memory.aliased + memory.temporaries + memory.code
