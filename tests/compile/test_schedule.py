"""Schedule estimates of hand-written programs, whose times are worked out by hand, and of the TPU compiler's own."""

import json
import os
import subprocess
import sys

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.manifest import UnestimatedWork
from dflash_aot.cache.chips import TOPOLOGIES, Chip
from dflash_aot.cache.environment import libtpu_version
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.compile.analysis.hlo import parse_module
from dflash_aot.compile.analysis.schedule import estimate_schedule
from dflash_aot.compile.pipeline.build_target import COMPILE_ONLY

# Two devices; each has 1e3 bytes and 1e6 flops per second, and 100 cycles per second.
CHIP = Chip("toy", "toy", 2, 2, 1000, 0, 500, 2e3, 2e6, 2e4, 1e3)
FAST_MEMORY = structs.replace(CHIP, bytes_per_second=2e9)
STATE = "(s32[], s32[], f32[256])"
SINGLE_CHIPS = ("v4:1x1x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1")


def cycles(count: int) -> str:
    return f'backend_config={{"flag_configs":[],"window_config":{{"estimated_cycles":"{count}","is_mask":false}}}}'


def computation(name: str, parameters: str, *lines: str, entry: bool = False) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"{'ENTRY ' * entry}%{name} ({parameters}) -> f32[256] {{\n{body}\n}}"


def estimate(entry: str, *computations: str, chip: Chip = FAST_MEMORY):
    lines = ("%x = f32[256]{0} parameter(0)", *entry.strip().splitlines())
    main = computation("main", "x: f32[256]", *lines, entry=True)
    return estimate_schedule(parse_module("\n\n".join(("HloModule toy", *computations, main))), chip)


FUSED = computation("fused", "p: f32[256]", "ROOT %p = f32[256]{0} parameter(0)")


def loop_computations(limit: str, step: int = 2, direction: str = "LT") -> tuple[str, ...]:
    """A condition as `counter < limit`, where `limit` is a line that defines %limit, and a body with one fusion."""
    condition = computation(
        "condition",
        f"state: {STATE}",
        f"%state = {STATE} parameter(0)",
        "%counter = s32[] get-tuple-element(%state), index=0",
        limit,
        f"ROOT %goes_on = pred[] compare(%counter, %limit), direction={direction}",
    )
    body = computation(
        "body",
        f"state: {STATE}",
        f"%state.1 = {STATE} parameter(0)",
        "%counter.1 = s32[] get-tuple-element(%state.1), index=0",
        "%bound.1 = s32[] get-tuple-element(%state.1), index=1",
        "%array.1 = f32[256]{0} get-tuple-element(%state.1), index=2",
        f"%step = s32[] constant({step})",
        "%next = s32[] add(%counter.1, %step)",
        f"%work = f32[256]{{0}} fusion(%array.1), kind=kLoop, calls=%fused, "
        f'metadata={{op_name="while/body/mul"}}, {cycles(50)}',
        f"ROOT %new = {STATE} tuple(%next, %bound.1, %work)",
    )
    return FUSED, condition, body


def loop(bound: str, start: int = 3) -> str:
    return f"""%start = s32[] constant({start})
{bound}
%initial = {STATE} tuple(%start, %bound, %x)
%loop = {STATE} while(%initial), condition=%condition, body=%body
ROOT %result = f32[256]{{0}} get-tuple-element(%loop), index=2"""


CONSTANT_LIMIT = "%limit = s32[] constant(12)"
LIMIT_IN_STATE = "%limit = s32[] get-tuple-element(%state), index=1"
CONSTANT_BOUND = "%bound = s32[] constant(12)"


def test_loop_counts_as_often_as_it_runs():
    """From 3 in steps of 2 while below 12: 5 iterations of 50 cycles at 100 cycles per second."""
    for limit, bound in [(CONSTANT_LIMIT, "%bound = s32[] parameter(1)"), (LIMIT_IN_STATE, CONSTANT_BOUND)]:
        found = estimate(loop(bound), *loop_computations(limit))
        assert (found.cycles, found.seconds, found.notes) == (250, 2.5, ())
        (work,) = found.largest
        assert (work.instruction, work.operation, work.shape) == ("work", "while/body/mul", "f32[256]")
        assert (work.runs, work.seconds) == (5, 2.5)


def test_loop_bounded_at_run_time_counts_once_or_as_the_compiler_knows():
    entry = loop('%bound = s32[] custom-call(%x), custom_call_target="Sensor"')
    found = estimate(entry, *loop_computations(LIMIT_IN_STATE))
    assert found.cycles == 50
    assert found.notes == ("%loop counts once: its trip count is known at run time only",)
    entry = entry.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    found = estimate(entry, *loop_computations(LIMIT_IN_STATE))
    assert (found.cycles, found.notes) == (350, ())


def test_conditional_counts_its_longest_branch_and_calls_whole():
    branches = [
        computation(
            name,
            "p: f32[256]",
            f"%p.{name} = f32[256]{{0}} parameter(0)",
            f"ROOT %work.{name} = f32[256]{{0}} fusion(%p.{name}), kind=kLoop, calls=%fused, {cycles(count)}",
        )
        for name, count in (("cheap", 10), ("dear", 70))
    ]
    entry = """%which = s32[] constant(0)
%chosen = f32[256]{0} conditional(%which, %x, %x), branch_computations={%cheap, %dear}
ROOT %called = f32[256]{0} call(%chosen), to_apply=%cheap"""
    found = estimate(entry, FUSED, *branches)
    assert found.cycles == 70 + 10
    assert [one.instruction for one in found.largest] == ["work.dear", "work.cheap"]
    assert found.notes == ("%chosen counts as the dearest of its 2 branches",)


KERNEL = 'custom_call_target="tpu_custom_call", metadata={op_name="attend"}'


def test_kernel_takes_the_time_of_its_own_cost_estimate():
    config = '{{"custom_call_config":{{"body":"e30=","cost_estimate":{{"flops":"{}","bytes_accessed":"2000"}}}}}}'
    for flops, seconds in ((1000, 2.0), (3_000_000, 3.0)):
        found = estimate(
            f"ROOT %kernel = f32[256]{{0}} custom-call(%x), {KERNEL}, backend_config={config.format(flops)}", chip=CHIP
        )
        assert (found.seconds, found.kernel_seconds, found.cycles) == (seconds, seconds, 0)
        assert found.notes[0].startswith("%kernel is a Pallas kernel: its time follows from its cost estimate (0.0 MB")


def test_kernel_without_estimate_moves_operands_and_results():
    """1024 bytes are read from main memory and 1024 written to it; 4096 more are in VMEM."""
    found = estimate(
        f"""%near = f32[1024]{{0:S(1)}} fusion(%x), kind=kLoop, calls=%fused, {cycles(200)}
ROOT %kernel = f32[256]{{0}} custom-call(%x, %near), {KERNEL}, backend_config={{"custom_call_config":{{"body":""}}}}""",
        FUSED,
        chip=CHIP,
    )
    assert found.kernel_seconds == pytest.approx(2.048)
    assert found.seconds == pytest.approx(2 + 2.048)
    assert "the size of its operands and results" in found.notes[0] and "(attend)" in found.notes[0]


def test_asynchronous_copies_take_the_time_that_memory_is_idle():
    """Two copies of 1.024 s each beside 1.5 s of work that itself reads for 1.024 s: they progress for 0.476 s."""
    started = "copy-start(%x)"
    found = estimate(
        f"""%first = (f32[256]{{0:S(1)}}, f32[256]{{0}}, u32[]) {started}
%second = (f32[256]{{0:S(1)}}, f32[256]{{0}}, u32[]) {started}
%work = f32[256]{{0:S(1)}} fusion(%x), kind=kLoop, calls=%fused, {cycles(150)}
%one = f32[256]{{0:S(1)}} copy-done(%first)
ROOT %two = f32[256]{{0:S(1)}} copy-done(%second)""",
        FUSED,
        chip=CHIP,
    )
    assert found.waiting_seconds == pytest.approx(2 * 1.024 - 0.476)
    assert found.seconds == pytest.approx(3 * 1.024)
    assert found.left_out == (UnestimatedWork("copy-start", 2, 2048),)


def test_no_instruction_is_shorter_than_its_bytes():
    """A fusion reads 40 bytes of a stack of 1024, updates 24 in place, and writes 1024 more to main memory."""
    fused = computation(
        "update",
        "a: f32[256], b: f32[256], c: s32[]",
        "%a = f32[256]{0} parameter(0)",
        "%b = f32[256]{0} parameter(1)",
        "%c = s32[] parameter(2)",
        "%flat = f32[256]{0} bitcast(%a)",
        "%moved = bf16[256]{0} fusion(%flat), kind=kLoop, calls=%relaid",
        "%part = bf16[10]{0} dynamic-slice(%moved, %c), dynamic_slice_sizes={10}",
        "%new = f32[6]{0} slice(%part), slice={[0:6]}",
        "%written = f32[256]{0} dynamic-update-slice(%b, %new, %c)",
        "%whole = f32[256]{0} broadcast(%new)",
        "ROOT %both = (f32[256]{0}, f32[256]{0}) tuple(%written, %whole)",
    )
    entry = f"""%at = s32[]{{:S(6)}} parameter(1)
%work = (f32[256]{{0}}, f32[256]{{0}}) fusion(%x, %x, %at), kind=kLoop, calls=%update, {cycles(50)}
ROOT %one = f32[256]{{0}} get-tuple-element(%work), index=0"""
    lines = "%q = f32[256]{0} parameter(0)", "ROOT %r = bf16[256]{0} convert(%q)"
    found = estimate(entry, computation("relaid", "q: f32[256]", *lines), fused, chip=CHIP)
    assert found.seconds == pytest.approx((40 + 24 + 1024) / 1e3)
    assert (found.cycles, found.waiting_seconds) == (50, pytest.approx(found.seconds - 0.5))


def test_instructions_without_estimate_are_listed_by_bytes():
    found = estimate(
        f"""%work = f32[256]{{0}} fusion(%x), kind=kLoop, calls=%fused, {cycles(1)}
%small = s32[] constant(4)
%index = s32[] add(%small, %small)
%update = f32[300]{{0}} fusion(%x), kind=kLoop, calls=%fused
%kv = f32[9000]{{0}} dynamic-update-slice(%kv.0, %update, %index)
ROOT %sum = f32[400]{{0}} all-reduce(%kv), to_apply=%fused""".replace("%kv.0", "%x"),
        FUSED,
    )
    listed = [(one.opcode, one.runs, one.bytes) for one in found.left_out]
    assert listed == [("all-reduce", 1, 1600), ("fusion", 1, 1200), ("dynamic-update-slice", 1, 1200)]


def test_unreadable_config_is_refused():
    with pytest.raises(BuildFailed, match="backend_config of copy"):
        estimate("ROOT %copy = f32[256]{0} copy(%x), backend_config={1}")


def test_trip_counts_follow_start_step_and_limit():
    for start, step, limit, direction, trips in [
        (0, 1, 36, "LT", 36),
        (0, 1, 36, "LE", 37),
        (36, -1, 0, "GT", 36),
        (36, -2, 0, "GE", 19),
        (0, 4, 36, "NE", 9),
        (0, 5, 36, "NE", None),  # it never ends
        (0, -1, 36, "LT", None),
        (0, 0, 36, "LT", None),
    ]:
        parts = loop_computations(f"%limit = s32[] constant({limit})", step, direction)
        found = estimate(loop(CONSTANT_BOUND, start), *parts)
        assert (found.cycles, bool(found.notes)) == (50 * (trips or 1), trips is None)


TPU_PROGRAMS = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import SingleDeviceSharding
from dflash_aot.cache.chips import TOPOLOGIES
from dflash_aot.compile.pipeline.build_target import describe_devices

def compile(name, function, *shapes):
    sharding = SingleDeviceSharding(describe_devices(TOPOLOGIES[name]).devices[0])
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    return jax.jit(function).trace(*specs).lower(lowering_platforms=("tpu",)).compile().as_text()

def double(x, y):
    y[...] = x[...] * 2

def doubled(x):
    cost = pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=81900000)
    kernel = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=cost)
    return jax.lax.fori_loop(0, 3, lambda _, x: kernel(x), x)

n = int(sys.argv[1])
products = {name: compile(name, jnp.dot, (n, n), (n, n)) for name in sys.argv[2:]}
print(json.dumps({**products, "kernel": compile("v5e:1x1", doubled, (256, 256))}))
"""


@pytest.fixture(scope="module")
def compiled():
    """Optimized HLO of a product of 4096 by 4096 on each generation, and of a Pallas kernel in a loop of three."""
    command = [sys.executable, "-c", TPU_PROGRAMS, "4096", *SINGLE_CHIPS]
    done = subprocess.run(command, env={**os.environ, **COMPILE_ONLY}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.skipif(not libtpu_version(), reason="needs libtpu")
def test_large_product_is_estimated_near_the_peak(compiled):
    """The clock of each generation: 1.03 to 1.21 times the time at peak flops (libtpu 0.0.42.1)."""
    for topology in SINGLE_CHIPS:
        chip = TOPOLOGIES[topology].chip
        found = estimate_schedule(parse_module(compiled[topology]), chip)
        bound = 2 * 4096**3 / (chip.flops_per_second / chip.devices)
        assert 1.0 < found.cycles / chip.cycles_per_second / bound < 1.25


@pytest.mark.skipif(not libtpu_version(), reason="needs libtpu")
def test_cost_estimate_of_a_pallas_kernel_is_read(compiled):
    found = estimate_schedule(parse_module(compiled["kernel"]), TOPOLOGIES["v5e:1x1"].chip)
    assert found.kernel_seconds == pytest.approx(3 * 81.9e6 / 819e9)
    assert any("cost estimate (81.9 MB" in note for note in found.notes)
