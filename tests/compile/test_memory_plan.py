"""Memory plans, by hand. test_tpu_executables.py compares them with the TPU compiler's own figures."""

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.manifest import Blob, CallCost, Entry, ExecutableAnalysis, MemoryUse
from dflash_aot.cache.chips import Chip
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.model_config.architecture import AttentionShape, Decoder, DenseMlp, Draft, Target
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.compile.analysis.memory_plan import (
    CompilerFigures,
    MemoryPlanner,
    check_fits,
    choose_layout,
    padded_bytes,
    read_compiler_figures,
    read_layout,
)
from dflash_aot.compile.models.backend import TPU
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.programs.programs import Programs

DECODER = Decoder(2, 128, DenseMlp(256), AttentionShape(2, 2, 128), Rope(1e4, 128), 1e-6, 512, 4096)
TARGET = Target(DECODER, tied=True)
DRAFT = Draft(structs.replace(DECODER, layers=1), 4, 99, (0, 1), 128, (None,))
GRID = Grid(batch=(1, 4), length=(256, 1024), k=(0, 3), prefill=(64,))


@pytest.fixture(scope="module")
def programs():
    return Programs(TARGET, DRAFT, "bfloat16", TensorParallel(backend=TPU))


def test_arrays_are_padded_to_tiles():
    for shape, dtype, padded in [
        ((36, 2560), "bfloat16", 40 * 2560 * 2),
        ((5, 2560, 8, 4, 128), "bfloat16", 5 * 2560 * 8 * 4 * 128 * 2),  # four rows per tile
        ((2, 4, 8, 1280, 64), "bfloat16", 2 * 4 * 8 * 1280 * 64 * 2),  # positions last: nothing is padded
        ((1, 100), "bfloat16", 2 * 128 * 2),
        ((1, 16), "int32", 128 * 4),
        ((30, 1, 2048), "bfloat16", 32 * 2048 * 2),  # in tiles of eight of the first dimension
        ((3,), "int32", 128 * 4),
        ((3,), "bool", 512),
        ((2560,), "bfloat16", 3072 * 2),
    ]:
        assert padded_bytes(shape, dtype, *choose_layout(shape, dtype, tiled=True)) == padded
        assert choose_layout(shape, dtype, tiled=False) == (tuple(range(len(shape))), ())


def test_read_layout_gives_order_and_tile():
    assert read_layout("{0,1:T(8,128)(2,1)}") == ((1, 0), (8, 128))
    assert padded_bytes((100, 9), "bfloat16", *read_layout("{0,1:T(8,128)(2,1)}")) == 16 * 128 * 2
    assert read_layout("{2,1,0}") == ((0, 1, 2), ()) and read_layout("{}") == ((), ())


def test_plan_sums_weights_state_largest_temporaries_and_all_code(programs):
    found = MemoryPlanner(programs, 1, tiled=False).plan(GRID)
    layer = 4 * 128 * 256 + 3 * 128 * 256 + 2 * 128 + 2 * 128  # four projections, an MLP, norms of layer and heads
    assert found.weights == 2 * (512 * 128 + 3 * layer + 2 * 128 + 256 * 128 + 128)
    assert found.state == 2 * 2 * 3 * 2 * (4 * 1024 + 64) * 128 + 2 * 4 * 4
    labels = [signature.label for signature in programs.list_signatures(GRID)]
    memory = {label: MemoryUse(0, 30, 10, 1000 + place, 7) for place, label in enumerate(labels)}
    measured = MemoryPlanner(programs, 1, tiled=False, measured=CompilerFigures(memory)).plan(GRID)
    assert measured == structs.replace(found, temporaries=1000 + len(labels) - 1 + 20, code=7 * len(labels))


def test_compiler_figures_hold_layouts_of_weights_and_state_only():
    """The argument `counts` of a prefill is one number, the state `counts` is a table."""
    programs = Programs(TARGET, DRAFT, "bfloat16", TensorParallel(backend=TPU), ("sample",))
    layouts = {"counts": "{1,0:T(8,128)}", "lengths": "{0:T(128)}"}
    admit = programs.list_signatures(GRID)[-1]
    inspection = ExecutableAnalysis(
        layouts=dict.fromkeys(admit.state, "{0}") | layouts, copies=(), collectives={}, donated=(), largest=""
    )
    blob, memory = Blob("0" * 64, 1, 1), MemoryUse(0, 0, 0, 0, 0)
    entry = Entry(*structs.astuple(blob), admit, "0" * 64, blob, 1.0, memory, CallCost(0.0, 0.0), {}, inspection)
    measured = read_compiler_figures([entry])
    assert measured.layouts["counts"] == layouts["counts"] and measured.memory.keys() == {"admit"}
    known = programs.arrays_by_name(GRID)
    prefill = programs.list_signatures(GRID)[0]
    counts = CompilerFigures({}, {name: layouts[name] for name in layouts})
    assert MemoryPlanner(programs, 1, tiled=True, measured=counts).estimate(prefill, known).arguments > 0


def test_propose_returns_the_largest_grid_that_fits(programs):
    planner = MemoryPlanner(programs, 1, tiled=True)
    available = planner.plan(structs.replace(GRID, batch=(1, 3))).total
    proposal = planner.propose(GRID, available, 4096)
    assert proposal.batch == 3 and proposal.length % 128 == 0
    assert planner.plan(structs.replace(GRID, length=(256, proposal.length))).total <= available
    assert planner.plan(structs.replace(GRID, length=(256, proposal.length + 128))).total > available
    assert planner.propose(GRID, 1 << 50, 4096).length == 4096


def test_propose_returns_the_largest_kv_pool_that_fits(programs):
    planner, wide = MemoryPlanner(programs, 1, tiled=True), structs.replace(GRID, batch=(1, 32), length=(256, 4096))
    available = planner.plan(structs.replace(wide, kv_positions=3 * 4096)).total
    assert planner.propose(wide, available, 4096).kv_positions == 3 * 4096
    assert planner.propose(wide, available - 1, 4096).kv_positions == 3 * 4096 - wide.page
    assert planner.propose(wide, 1 << 50, 4096).kv_positions == 32 * 4096
    assert planner.propose(wide, planner.plan(wide).weights, 4096).kv_positions is None


def check(programs, available, measured=None):
    chip = Chip("toy", "toy", 1, 1, 2 * available, 0, available, 1.0, 1.0, 1.0, 1.0)
    return check_fits(programs, GRID, 1, chip, 4096, measured)


def test_check_fits_refuses_too_much_weights_and_state(programs):
    found = MemoryPlanner(programs, 1, tiled=True).plan(GRID)
    certain = found.weights + found.state
    message = r"does not fit toy, per device: weights .* GB too much\. No grid of this pair fits"
    with pytest.raises(BuildFailed, match=message):
        check(programs, certain - 1)
    assert "does not fit toy" in check(programs, certain) and "The compiler decides" in check(programs, certain)
    assert "The compiler decides" in check(programs, found.total - 1)
    assert check(programs, found.total) is None


def test_check_fits_trusts_the_compilers_figures_after_a_build(programs):
    labels = [signature.label for signature in programs.list_signatures(GRID)]
    measured = CompilerFigures({label: MemoryUse(0, 0, 0, 5000, 7) for label in labels})
    planner = MemoryPlanner(programs, 1, tiled=True, measured=measured)
    total = planner.plan(GRID).total
    assert total < MemoryPlanner(programs, 1, tiled=True).plan(GRID).total
    assert check(programs, total, measured) is None
    with pytest.raises(BuildFailed, match=r"does not fit toy.*What would fit: batch=3 at length=1024, length="):
        check(programs, total - 1, measured)
    assert planner.propose(GRID, total, 4096).batch == 4  # the grid itself fits
