"""Executable checks name the executable, the buffer and the figures of each problem."""

import pytest
from msgspec import structs

from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.cache.bundle.manifest import (
    Blob,
    CallCost,
    Entry,
    ExecutableAnalysis,
    InstructionEstimate,
    LargeCopy,
    MemoryUse,
    ScheduleEstimate,
)
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.sampling_state import SAMPLING_MODES
from dflash_aot.compile.analysis.executable_checks import find_layout_conflicts, find_pool_copies, find_problems
from dflash_aot.compile.programs.programs import Programs

BUCKETS = "batch=1,2 length=16,32 k=0,3 prefill=4"
KV = "{4,3,2,1,0:T(8,128)(2,1)}"


@pytest.fixture(scope="module")
def programs(small_pair):
    return Programs(*small_pair, "float32", sampling=SAMPLING_MODES)


@pytest.fixture(scope="module")
def grid(small_pair):
    return parse_grid(BUCKETS, small_pair[1].block)


@pytest.fixture(scope="module")
def known(programs, grid):
    weight = ArraySpec(
        "target.large", (2**26,), "float32", sharding=("model",)
    )  # so large that 2 % of the total are over the minimum
    return {**programs.arrays_by_name(grid), weight.name: weight}


@pytest.fixture(scope="module")
def entries(programs, grid, known):
    """Entries of good executables by label: all state is written in place, and every buffer has one layout."""
    return {signature.label: make_entry(signature, known) for signature in programs.list_signatures(grid)}


def make_entry(signature, known):
    names = (*signature.weights, *signature.state, *(one.name for one in (*signature.arguments, *signature.results)))
    aliased = sum(known[name].bytes for name in signature.donated)
    return Entry(
        signature=signature,
        key="0" * 64,
        sha256="0" * 64,
        bytes=1,
        serialized_bytes=2,
        program=Blob("0" * 64, 1, 2),
        seconds=1.0,
        memory=MemoryUse(arguments=aliased, outputs=aliased, aliased=aliased, temporaries=0, code=1),
        cost=CallCost(flops=1.0, bytes_accessed=1.0),
        compiler_options={},
        analysis=ExecutableAnalysis(
            layouts=dict.fromkeys(names, KV), copies=(), collectives={}, donated=(), largest="%fusion.1 = f32[8]"
        ),
    )


def with_memory(entry, **sizes):
    return structs.replace(entry, memory=structs.replace(entry.memory, **sizes))


def with_analysis(entry, **found):
    return structs.replace(entry, analysis=structs.replace(entry.analysis, **found))


def with_layout(entry, name, layout):
    return with_analysis(entry, layouts={**entry.analysis.layouts, name: layout})


VERIFY = "verify batch=2 length=32 k=3"


def with_times(entry, estimate, bound):
    longest = InstructionEstimate("fusion.7", "while/body/dot_general", "bf16[16,9728]", 36, estimate / 2)
    schedule = ScheduleEstimate(estimate, 1, 0.0, 0.0, (longest,), (), ())
    return structs.replace(entry, cost=structs.replace(entry.cost, schedule=schedule, bound_seconds=bound))


def test_estimate_far_above_the_bound_is_a_problem(entries, known):
    (problem,) = find_problems(with_times(entries[VERIFY], 40e-3, 10e-3), known, 1, 0)
    assert problem.startswith(f"{VERIFY}: estimated at 40.00 ms, 4.0 times its bound, more than 3; the longest: ")
    assert problem.endswith("%fusion.7 = bf16[16,9728], 20.00 ms (while/body/dot_general)")


def test_good_executables_have_no_problems(entries, known):
    at_the_border, short, rare = (VERIFY, 30e-3, 10e-3), (VERIFY, 2e-3, 0.4e-3), ("move", 40e-3, 10e-3)
    for label, estimate, bound in (at_the_border, short, rare):
        assert find_problems(with_times(entries[label], estimate, bound), known, 1, 0) == []
    assert [line for entry in entries.values() for line in find_problems(entry, known, 1, 0)] == []
    assert find_layout_conflicts(entries.values()) == []


def test_temporaries_over_two_percent_are_a_problem(entries, known):
    for label in ["draft batch=1 length=16 k=3", VERIFY, f"sampled_{VERIFY}", "kv_write rows=2 width=4"]:
        allowed = sum(array.bytes for array in known.values()) // 50
        allowed += 3 * 4 * 2 * 4 * 48 if label.startswith("sampled_verify") else 0
        assert find_problems(with_memory(entries[label], temporaries=allowed), known, 1, 0) == []
        (line,) = find_problems(with_memory(entries[label], temporaries=allowed + 1), known, 1, 0)
        assert line.startswith(f"{label}: ") and "of temporaries are 2.0%" in line
        assert "than 2%; the largest: %fusion.1 = " in line
    for unchecked in ("prefill prefill=4 length=32", "move"):
        assert find_problems(with_memory(entries[unchecked], temporaries=10**9), known, 1, 0) == []


def test_a_copy_names_its_buffer_size_and_operation(entries, known):
    copy = LargeCopy("target_v", "copy.42", "jit(verify)/while", f"bf16[36,8,8,4352,128]{KV}", 2_566_914_048)
    (line,) = find_problems(with_analysis(entries[VERIFY], copies=(copy,)), known, 1, 0)
    assert line == f"{VERIFY}: target_v is copied, 2,566.9 MB: %copy.42 = {copy.shape} (jit(verify)/while)"


def test_only_the_written_part_of_a_page_may_be_copied(entries, known):
    pool = known["target_k"]
    whole = pool.bytes
    part = whole * 4 // (pool.shape[1] * pool.shape[3])
    assert pool.shape[3] > 4
    for size, found, found_on_cpu in [(part, 0, 0), (part + 1, 1, 0), (whole - 1, 1, 0), (whole, 1, 1)]:
        entry = with_analysis(entries[VERIFY], copies=(LargeCopy("target_k", "copy.1", "", "bf16[1]{0}", size),))
        assert len(find_problems(entry, known, 1, 0)) == found
        assert len(find_pool_copies(entry, known, 1)) == found_on_cpu
    reading = with_analysis(
        entries["draft batch=1 length=16 k=3"], copies=(LargeCopy("draft_k", "copy.1", "", "bf16[1]{0}", 1),)
    )
    assert len(find_problems(reading, known, 1, 0)) == 1
    (line,) = find_pool_copies(entry, known, 1)
    assert line.startswith(f"{VERIFY}: target_k is copied, ")


def test_copies_by_moves_and_of_arguments_are_allowed(entries, known):
    for label, buffer in [("move", "target_v"), ("kv_write rows=1 width=4", "features")]:
        copy = LargeCopy(buffer, "copy.1", "", "bf16[1]{0}", 2**30)
        assert find_problems(with_analysis(entries[label], copies=(copy,)), known, 1, 0) == []


def test_more_collectives_than_the_program_needs_are_a_problem(entries, known):
    entry = with_analysis(entries[VERIFY], collectives={"all-gather": 2, "all-reduce": 3})
    assert find_problems(entry, known, 1, collectives=5) == []
    (line,) = find_problems(entry, known, 1, collectives=4)
    assert line == f"{VERIFY}: 5 collectives (2 all-gather, 3 all-reduce), but the program needs 4"


def test_different_layouts_of_weights_or_state_are_a_conflict(entries):
    for name in ["target_v", "target.model.norm.weight"]:
        turned = {**entries, VERIFY: with_layout(entries[VERIFY], name, "{3,4,2,1,0}")}
        (line,) = find_layout_conflicts(turned.values())
        assert line.startswith(f"{name} has different layouts: {KV} in prefill prefill=4 length=16 and ")
        assert line.endswith(f" more; {{3,4,2,1,0}} in {VERIFY}")


def test_other_shapes_may_have_other_layouts(entries):
    narrow = {label: with_layout(entry, "features", "{0,1,2}") for label, entry in entries.items() if " k=0" in label}
    narrow |= {
        label: with_layout(entries[label], "features", "{0,1,2}")
        for label in ("kv_write rows=1 width=1", "kv_write rows=2 width=1")
    }
    assert find_layout_conflicts({**entries, **narrow}.values()) == []
