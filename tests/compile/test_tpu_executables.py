"""Executable checks and memory plans on executables of real shapes, built by the TPU compiler."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

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
WITH_EXPERTS = "v6e:2x2"  # holds Qwen3-30B-A3B, with its layers' experts in another layout than on one device
INT8 = " int8"  # behind the topology: both models have int8 weights
WITH_INT8_EXPERTS = "v6e:1x1" + INT8
# By topology: the executables that are built, and how many collectives each of them has.
BUILDS = {
    "v5e:1x1": (
        (
            "prefill prefill=64 length=1024",
            "draft batch=8 length=1024 k=3",  # outputs of all 128 rows, instead of 24, would take 156 MB
            "sampled_verify batch=8 length=1024 k=15",
            "kv_write rows=8 width=16",
            "rounds batch=1 length=1024 k=15 rounds=4",
            "move",
            "admit",
        ),
        0,
    ),
    "v5p:1x1x1": ((VERIFY,), 0),  # gate and up were copied here, once as one weight
    WITH_EXPERTS: ((VERIFY,), 4),  # two sums of a layer, one of the embedding, and the choice of a token
    "v5e:1x1" + INT8: ((VERIFY,), 0),
    WITH_INT8_EXPERTS: (("verify batch=8 length=1024 k=15",), 0),
    "tpu7x:1x1x1": (("verify batch=1 length=1024 k=0",), 4),  # all weights were copied to another layout here
}

pytestmark = pytest.mark.skipif(not libtpu_version(), reason="needs libtpu")


@dataclass(frozen=True)
class Executables:
    programs: Programs
    grid: Grid
    topology: Topology
    collectives: int
    entries: Sequence[Entry]


@pytest.fixture(params=BUILDS, scope="module")
def built(request, tmp_path_factory) -> Executables:
    topology, grid = TOPOLOGIES[request.param.removesuffix(INT8)], parse_grid(BUCKETS, 16)
    labels, collectives = BUILDS[request.param]
    experts = request.param in (WITH_EXPERTS, WITH_INT8_EXPERTS)
    changes = {"hidden_size": 2048, "num_target_layers": 48} if experts else {}
    pair = read_published("Qwen3-30B-A3B" if experts else "Qwen3-4B", "Qwen3-4B-DFlash-b16", **changes)
    backend = choose_backend("tpu", topology.chip, *pair)
    formats = WeightFormats("int8", "int8") if request.param.endswith(INT8) else PLAIN
    programs = Programs(*pair, "bfloat16", TensorParallel(topology.devices, backend), SAMPLING_MODES, formats)
    bundle = tmp_path_factory.mktemp("bundle")
    source, store = TracedPrograms(programs, grid), Store(bundle)
    source.signatures = [one for one in source.signatures if one.label in labels]
    with store.open_for_building(), WorkerPool(topology, bundle, jobs=min(2, len(labels))) as pool:
        entries = compile_all(source, pool, store).entries
    assert len(entries) == len(labels)
    return Executables(programs, grid, topology, collectives, entries)


def test_executables_have_no_problems_and_the_estimated_memory(built):
    """Estimates: arguments are exact, the sum is within 2 %, or within the global memory of a newer libtpu."""
    known = built.programs.arrays_by_name(built.grid)
    planner = MemoryPlanner(built.programs, built.topology.devices, tiled=True)
    for entry in built.entries:
        expected = built.programs.collectives(entry.signature)
        assert find_problems(entry, known, built.topology.devices, expected) == []
        assert sum(entry.analysis.collectives.values()) == expected == built.collectives
        assert entry.bytes < 0.35 * entry.serialized_bytes
        estimate, found = planner.estimate(entry.signature, known), entry.memory
        assert (estimate.arguments, estimate.aliased) == (found.arguments, found.aliased), entry.signature.label
        close = pytest.approx(count_needed(found), rel=0.02, abs=1.1 * GLOBAL_MEMORY_BYTES)
        assert count_needed(estimate) == close, entry.signature.label
        assert count_needed(estimate) < built.topology.chip.available_bytes
    assert find_layout_conflicts(built.entries) == []


def test_hybrid_is_verified_without_copies(tmp_path):
    topology = TOPOLOGIES["v5e:1x1"]
    target, draft = read_published("Qwen3.5-4B", "Qwen3.5-4B-DFlash")
    tp = TensorParallel(backend=choose_backend("tpu", topology.chip, target, draft))
    programs = Programs(target, draft, "bfloat16", tp)
    source, store = TracedPrograms(programs, parse_grid(BUCKETS, draft.block)), Store(tmp_path)
    source.signatures = [one for one in source.signatures if one.label == "verify batch=8 length=1024 k=15"]
    with store.open_for_building(), WorkerPool(topology, tmp_path, jobs=1) as pool:
        (entry,) = compile_all(source, pool, store).entries
    assert entry.analysis.copies == ()
    assert entry.cost.schedule.seconds < 0.021  # 0.0246 while XLA's operations ran the recurrent layers


def count_needed(memory):
    return memory.arguments + memory.outputs - memory.aliased + memory.temporaries + memory.code
