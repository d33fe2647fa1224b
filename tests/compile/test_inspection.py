"""Parsing of optimized HLO: copies of arguments, collectives, layouts, and the compiler in use."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import msgspec
import pytest

from dflash_aot.cache.environment import libtpu_version
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.compile.analysis.hlo import parse_module
from dflash_aot.compile.analysis.inspection import explain_out_of_memory, inspect_module, read_cost
from dflash_aot.compile.pipeline.build_target import COMPILE_ONLY

KV = "bf16[4,8,1024,128]{3,2,1,0:T(8,128)(2,1)}"
TURNED = "bf16[4,8,1024,128]{2,3,1,0:T(8,128)(2,1)}"
LAYER = "bf16[1,8,1024,128]{3,2,1,0:T(8,128)(2,1)}"
ROWS = "bf16[1,8,16,128]{3,2,1,0:T(8,128)(2,1)S(1)}"
INDEX = "s32[]{:T(128)}"
KV_BYTES, LAYER_BYTES = 8 * 2**20, 2 * 2**20


def program(body: str, *computations: str) -> str:
    entry = f"ENTRY %main (p.0: bf16[4,8,1024,128], p.1: s32[]) -> (bf16[4,8,1024,128]) {{\n{indent(body)}\n}}"
    return "\n\n".join(["HloModule jit_verify, is_scheduled=true", "FileNames", '1 "a.py"', *computations, entry])


def computation(name: str, body: str) -> str:
    return f"%{name} (p: bf16[4,8,1024,128]) -> (bf16[4,8,1024,128], /*index=1*/s32[]) {{\n{indent(body)}\n}}"


def indent(body: str) -> str:
    return "\n".join(f"  {line}" for line in body.strip().splitlines())


def copies(text: str) -> list[tuple[str, str, int]]:
    copies = inspect_module(parse_module(text), ["kv", "layer"], ["new"]).copies
    return [(one.instruction, one.buffer, one.bytes) for one in copies]


ARGUMENTS = f"""%p.1 = {INDEX} parameter(1)
%p.0 = {KV} parameter(0), metadata={{op_name="xs[0]"}}"""
IN_PLACE = computation(
    "body",
    f"""%carry = ({INDEX}, {KV}, /*index=2*/{KV}) parameter(0)
%at = {INDEX} get-tuple-element(%carry), index=0
%held = {KV} get-tuple-element(%carry), index=1
%other = {KV} get-tuple-element(%carry), index=2
%rows = {ROWS} constant({{...}})
%written = {KV} dynamic-update-slice(%held, %rows, %at, %at, %at, %at)
ROOT %next = ({INDEX}, {KV}, {KV}) tuple(%at, %written, %other)""",
)
CONDITION = computation("condition", f"%c = ({INDEX}, {KV}) parameter(0)\nROOT %t = pred[]{{:T(512)}} constant(true)")
LOOP = 'while(%carried), condition=%condition, body=%body, metadata={op_name="jit(verify)/while"}'


def looped(before: str, after: str) -> str:
    body = f"""{ARGUMENTS}
{before}
%carried = ({INDEX}, {KV}, {KV}) tuple(%p.1, %into, %into)
%loop = ({INDEX}, {KV}, {KV}) {LOOP}
%out = {KV} get-tuple-element(%loop), index=1
{after}"""
    return program(body, IN_PLACE, CONDITION)


def fused(result: str, inner: str, *, of: str = "%p.0, %p.1") -> str:
    parameters = f"%f.0 = {KV} parameter(0)\n%f.1 = {INDEX} parameter(1)\n"
    body = f"{ARGUMENTS}\n%made = {result} fusion({of}), kind=kLoop, calls=%inside\nROOT %r = ({result}) tuple(%made)"
    return program(body, computation("inside", parameters + inner))


def prefetch(space: str) -> str:
    there = KV.replace("}", f"{space}}}")
    return program(
        f"""{ARGUMENTS}
%copy-start = ({there}, {KV}, u32[]{{:S(2)}}) copy-start(%p.0), cross_program_prefetch_index=0
%copy-done = {there} copy-done(%copy-start)
%back = {KV} copy(%copy-done)
ROOT %r = ({KV}) tuple(%back)"""
    )


def slice_layer(space: str) -> str:
    layer = LAYER.replace("}", f"{space}}}")
    return fused(layer, f"ROOT %s = {layer} dynamic-slice(%f.0, %f.1), dynamic_slice_sizes={{1,8,1024,128}}")


MASK = f"%m = pred[4,8,1024,128]{{3,2,1,0}} compare(%f.1, %f.1)\n%n = {KV} broadcast(%f.1)\n"
OTHER_LAYOUT = looped(
    f'%copy.13 = {TURNED} copy(%p.0), backend_config={{"estimated_cycles":"3210970"}}\n'
    f"%into = {TURNED} bitcast(%copy.13)",
    f"%copy.16 = {KV} copy(%out)\nROOT %r = ({KV}) tuple(%copy.16)",
)


def test_copies_of_arguments_are_found():
    for text, found in [
        (looped(f"%into = {KV} bitcast(%p.0)", f"ROOT %r = ({KV}) tuple(%out)"), []),  # a write in place
        (fused(KV, f"ROOT %u = {KV} dynamic-update-slice(%f.0, %f.0, %f.1)"), []),
        (OTHER_LAYOUT, [("copy.13", "kv", KV_BYTES), ("copy.16", "kv", KV_BYTES)]),
        (slice_layer(""), [("made", "kv", LAYER_BYTES)]),
        (slice_layer("S(1)"), [("made", "kv", LAYER_BYTES)]),
        (prefetch("S(1)"), [("back", "kv", KV_BYTES)]),  # only main memory counts
        (prefetch(""), [("copy-start", "kv", KV_BYTES), ("back", "kv", KV_BYTES)]),
        (fused(KV, f"ROOT %g = {KV} gather(%f.0, %f.1), offset_dims={{0}}"), []),
        (fused(KV, f"ROOT %m = {KV} multiply(%f.0, %f.0)"), []),
        (fused(KV, f"ROOT %d = {KV} convolution(%f.0, %f.0), dim_labels=bf_oi->bf"), []),
        (fused(KV, f"%e = {KV} broadcast(%f.1), dimensions={{}}\nROOT %s = {KV} copy(%e)"), []),
        (fused(KV, f"{MASK}ROOT %s = {KV} select(%m, %n, %f.0)"), [("made", "kv", KV_BYTES)]),
    ]:
        assert copies(text) == found


INT8, WIDE = "s8[1024,2048]{1,0:T(8,128)(4,1)}", "bf16[1024,2048]{1,0:T(8,128)(2,1)}"
SCALED = f"""%c = {WIDE} convert(%f.0)
%b = {WIDE} broadcast(%f.1), dimensions={{0}}
%m = {WIDE} multiply(%b, %c)"""


@pytest.mark.parametrize(
    ("inner", "result", "found"),
    [
        (f"ROOT %c = {WIDE} convert(%f.0)", WIDE, [("made", "w", 2 * 2**21)]),
        (f"{SCALED}\nROOT %n = {WIDE} negate(%m)", WIDE, []),
        (SCALED.replace("%m", "ROOT %m"), WIDE, [("made", "w", 2 * 2**21)]),
        (
            f"{SCALED}\n%e = {LAYER} broadcast(%m), dimensions={{1,2}}\nROOT %r = {WIDE} reshape(%e)",
            WIDE,
            [("made", "w", 2 * 2**21)],
        ),
        (f"{SCALED}\nROOT %d = {ROWS} reduce(%m, %m), dimensions={{1}}, to_apply=%add", ROWS, []),
    ],
    ids=["converted", "computed", "scaled", "broadcast and reshaped", "summed"],
)
def test_converted_or_scaled_int8_weight_is_a_copy(inner, result, found):
    parameters = f"%f.0 = {INT8} parameter(0)\n%f.1 = bf16[1024]{{0}} parameter(1)\n"
    body = f"""%p.0 = {INT8} parameter(0)
%p.1 = bf16[1024]{{0}} parameter(1)
%made = {result} fusion(%p.0, %p.1), kind=kLoop, calls=%inside
ROOT %r = ({result}) tuple(%made)"""
    text = program(body, computation("inside", parameters + inner))
    analysis = inspect_module(parse_module(text), ["w", "scale"], ["new"])
    assert [(one.instruction, one.buffer, one.bytes) for one in analysis.copies] == found


def test_asynchronous_slices_and_their_concatenation_are_followed():
    text = program(
        f"""{ARGUMENTS}
%slice-start = (({KV}), {LAYER}, s32[]{{:S(2)}}) slice-start(%p.0), slice={{[0:1], [0:8], [0:1024], [0:128]}}
%slice-done = {LAYER} slice-done(%slice-start)
%joined = {LAYER} custom-call(%slice-done), custom_call_target="ConcatBitcast"
%wide = {LAYER.replace("bf16", "f32")} convert(%joined)
ROOT %r = ({LAYER.replace("bf16", "f32")}) tuple(%wide)"""
    )
    assert copies(text) == [("slice-start", "kv", LAYER_BYTES), ("wide", "kv", 2 * LAYER_BYTES)]


def test_copies_in_branches_calls_and_async_computations_are_found():
    branch = computation("branch", f"%b = {KV} parameter(0)\nROOT %b.copy = {KV} copy(%b)")
    wrapped = computation("wrapped", f"%w = {KV} parameter(0)\nROOT %w.copy = {KV} copy(%w)")
    other = computation("other", f"ROOT %o = {KV} parameter(0)")
    text = program(
        f"""{ARGUMENTS}
%taken = {KV} conditional(%p.1, %p.0, %p.0), branch_computations={{%other, %branch}}
%called = {KV} call(%taken), to_apply=%branch
%either = {KV} conditional(%p.1, %called, %called), true_computation=%other, false_computation=%other
%async-start = (({KV}), {KV}, s32[]) async-start(%either), calls=%wrapped
%async-update = (({KV}), {KV}, s32[]) async-update(%async-start)
%async-done = {KV} async-done(%async-update)
%last = {TURNED} transpose(%async-done), dimensions={{0,1,3,2}}
ROOT %r = ({TURNED}) tuple(%last)""",
        *(branch, wrapped, other),
    )
    assert [name for name, *_ in copies(text)] == ["b.copy", "async-start", "last"]


def test_new_buffer_filled_layer_by_layer_is_a_copy():
    """The form of a scan that slices the kv arrays and stacks the results."""
    filled = IN_PLACE.replace("dynamic-update-slice(%held, %rows,", "dynamic-update-slice(%held, %one,").replace(
        "%rows =", f"%one = {LAYER.replace('}', 'S(1)}')} dynamic-slice(%other, %at)\n  %rows ="
    )
    body = f"""{ARGUMENTS}
%fresh = {KV} custom-call(), custom_call_target="AllocateBuffer"
%carried = ({INDEX}, {KV}, {KV}) tuple(%p.1, %fresh, %p.0)
%loop = ({INDEX}, {KV}, {KV}) {LOOP}
%out = {KV} get-tuple-element(%loop), index=1
ROOT %r = ({KV}) tuple(%out)"""
    assert copies(program(body, filled, CONDITION)) == [("one", "kv", LAYER_BYTES), ("written", "kv", KV_BYTES)]


def test_collectives_are_counted_by_kind_in_all_computations():
    exchange = "replica_groups={{0,1,2,3}}, to_apply=%add, channel_id=1"
    within = computation("inside", f"%a = f32[8]{{0}} parameter(0)\nROOT %s = f32[8]{{0}} all-reduce(%a), {exchange}")
    text = program(
        f"""{ARGUMENTS}
%x = f32[8]{{0}} constant({{1, 2, 3, 4, 5, 6, 7, 8}})
%sum = f32[8]{{0}} all-reduce(%x), {exchange}
%call = f32[8]{{0}} call(%sum), to_apply=%inside
%all-gather-start = (f32[8]{{0}}, f32[32]{{0}}) all-gather-start(%call), dimensions={{0}}, channel_id=2
%all-gather-done = f32[32]{{0}} all-gather-done(%all-gather-start)
ROOT %r = (f32[32]{{0}}) tuple(%all-gather-done)""",
        within,
    )
    found = inspect_module(parse_module(text), ["kv", "layer"], ["new"])
    assert found.collectives == {"all-gather": 1, "all-reduce": 2}


def test_layouts_are_named_by_argument_and_result():
    text = program(f"{ARGUMENTS}\n%t = {TURNED} bitcast(%p.0)\nROOT %r = ({TURNED}) tuple(%t)")
    found = inspect_module(parse_module(text), ["kv", "layer"], ["features"]).layouts
    assert found == {"kv": "{3,2,1,0:T(8,128)(2,1)}", "layer": "{:T(128)}", "features": "{2,3,1,0:T(8,128)(2,1)}"}
    with pytest.raises(BuildFailed, match="kv: donated in one layout, but returned in another"):
        inspect_module(parse_module(text), ["kv", "layer"], ["kv"])


def test_unknown_text_is_refused():
    for text, words in [
        ("", "no ENTRY computation"),
        (program("what is this"), "unknown kind of line: '  what is this'"),
        (program("%p.0 = parameter"), "unknown kind of line: 'parameter'"),
        (program(f"%p.0 = {KV} parameter(0"), "unknown kind of line: "),
        (program(f"%p.0 = {KV} parameter(0)"), "main has no ROOT"),
        (program("ROOT %p.0 = tensor<4xf32> parameter(0)"), "unknown kind of type: 'tensor<4xf32>'"),
    ]:
        with pytest.raises(BuildFailed, match=words):
            inspect_module(parse_module(text), [], [])


def test_text_of_the_compiler_in_use_is_understood():
    def step(weight: jax.Array, kv: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        products = jnp.sin(rows @ weight.T) @ jnp.cos(rows @ weight.T).T
        return jax.lax.dynamic_update_slice(kv, rows, (0, 0)), weight.T, products

    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1024, 512), (1024, 512), (8, 512))]
    compiled = jax.jit(step, donate_argnums=1).trace(*specs).lower().compile()
    found = inspect_module(parse_module(compiled.as_text()), ["weight", "kv", "rows"], ["kv", "turned", "products"])
    assert found.layouts == dict.fromkeys(("weight", "kv", "rows", "turned", "products"), "{1,0}")
    assert found.donated == ("kv",)
    assert "f32[512,1024]" in found.largest
    # XLA:CPU of JAX 0.12 transposes in two steps, which are a copy each.
    assert {(one.buffer, one.bytes) for one in found.copies} == {("weight", 4 * 1024 * 512)}
    assert found.collectives == {}
    cost = read_cost(compiled, parse_module(compiled.as_text()), None)
    assert cost.bytes_accessed > 4 * 1024 * 512
    assert cost.schedule is msgspec.UNSET and cost.ratio is None


# v5e has 16126 MiB. One array is far larger. The others leave no room for the program: 0.1 MB, since libtpu 0.0.52 with
# 1 MiB more, in which case the smallest array is refused too.
PROVOKE = """
import json
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from dflash_aot.cache.chips import TOPOLOGIES
from dflash_aot.compile.pipeline.build_target import describe_devices

place = SingleDeviceSharding(describe_devices(TOPOLOGIES["v5e:1x1"]).devices[0])
messages = []
for count in (20 * 1024 * 16, 16126 * 16 - 1, 16126 * 16 - 17):
    array = jax.ShapeDtypeStruct((count, 16, 1024), jnp.float32, sharding=place)
    program = jax.jit(lambda x: x + 1, donate_argnums=0).trace(array).lower(lowering_platforms=("tpu",))
    try:
        program.compile()
    except RuntimeError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


@pytest.mark.skipif(not libtpu_version(), reason="needs libtpu")
def test_compiler_error_becomes_a_sentence_with_figures():
    environment = {**os.environ, **COMPILE_ONLY}
    done = subprocess.run([sys.executable, "-c", PROVOKE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    early, *_, late = (explain_out_of_memory(RuntimeError(message)) for message in json.loads(done.stdout))
    # 20 GiB against 15.75 GiB, as the compiler rounds them
    assert early == "needs 21.47 GB of device memory, 4.56 GB more than there is"
    # Less than the program's own 100 kB is missing: with 64 kB less, the array would fit.
    assert re.match(r"needs 16.91 GB of device memory, 0.0\d MB more than there is; the largest buffers: ", late)
    assert re.search(r"f32\[25\d+,16,1024\] 16.91 GB", late) and "overlays 0.1" in late


def test_error_without_figures_keeps_its_first_line():
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes.\nMore lines")
    assert explain_out_of_memory(error) == f"needs more device memory than there is: {str(error).splitlines()[0]}"
    assert explain_out_of_memory(RuntimeError("INVALID_ARGUMENT: HBM")) is None
