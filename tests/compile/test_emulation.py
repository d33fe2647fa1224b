"""Emulation of TPU executables: tiled layouts, translated instructions, and faults that it must find."""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import export

from dflash_aot.bin.emulation_check import compare_outputs, exceeds_rounding
from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.analysis.hlo import Buffer, parse_module
from dflash_aot.compile.emulation.bitcasts import map_bitcast, read_layout
from dflash_aot.compile.emulation.translation import make_portable_program, translate_module
from dflash_aot.compile.programs.lowering import lower_program, output_arrays
from dflash_aot.runtime.executables.executable import Executable
from dflash_aot.runtime.executables.self_test import Output, SelfTestCaller, make_argument, make_state, make_weight
from tests.optimized_programs import NEEDS_COMPILER, EmulatedPair, OptimizedPair, optimize


def layout(dtype, dimensions, text):
    return read_layout(Buffer(dtype, dimensions, text))


def run(text, inputs, outputs):
    """The results of optimized HLO: arrays in, arrays out. `outputs` are (shape, dtype)."""
    results = tuple(ArraySpec(f"out{number}", *output) for number, output in enumerate(outputs))
    arguments = tuple(ArraySpec(f"in{number}", one.shape, str(one.dtype)) for number, one in enumerate(inputs))
    signature = Signature("move", {}, weights=(), state=(), donated=(), arguments=arguments, results=results)
    program = make_portable_program(text, signature, {}, 1)
    return [np.asarray(one) for one in jax.jit(export.deserialize(bytearray(program)).call)(*inputs)]


def test_offsets_follow_the_example_of_the_xla_documentation():
    """F32[3,5] in tiles of 2 x 2: element (2,3) lies at 17."""
    offsets = layout("f32", (3, 5), "{1,0:T(2,2)}").offsets().reshape(3, 5)
    assert offsets[2, 3] == 17
    assert offsets[0].tolist() == [0, 1, 4, 5, 8]
    assert layout("f32", (3, 5), "{1,0:T(2,2)}").padded_size == 24
    assert layout("f32", (2, 3), "{0,1}").order == (1, 0)


def test_bitcast_reads_memory_in_the_other_order():
    for source, result, sources in [
        (("s32", (2,), "{0:T(128)}"), ("s32", (), "{:T(128)}"), [0]),
        (("s32", (1, 1), "{1,0:T(1,128)}"), ("s32", (2,), "{0:T(128)}"), [0, -1]),
        (("f32", (2, 2), "{1,0:T(2,128)}"), ("f32", (4,), "{0:T(256)}"), [0, 1, -1, -1]),
        (("f32", (2, 128), "{1,0:T(2,128)}"), ("f32", (256,), "{0:T(256)}"), range(256)),
    ]:
        assert map_bitcast(layout(*source), layout(*result)).sources.tolist() == list(sources)


def test_bitcast_that_joins_tiles_exchanges_dimensions():
    """Three arrays of one tile each lie in memory as one array of three tiles in a row."""
    values = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    text = """HloModule m
ENTRY %main (a: f32[3,2,2]) -> (f32[2,6]) {
  %a = f32[3,2,2]{2,1,0:T(2,2)} parameter(0)
  %b = f32[2,6]{1,0:T(2,2)} bitcast(%a)
  ROOT %t = (f32[2,6]{1,0:T(2,2)}) tuple(%b)
}
"""
    (found,) = run(text, [values], [((2, 6), "float32")])
    assert found.tolist() == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


COPIES = """HloModule m, is_scheduled=true
%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0:T(128)S(1)} parameter(0)
  ROOT %twice = f32[4]{0:T(128)} add(%p, %p), metadata={op_name="jit(f)/add, twice)"}
}
%maximum (a: f32[], i: s32[], b: f32[], j: s32[]) -> (f32[], s32[]) {
  %a = f32[]{:T(128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %b = f32[]{:T(128)} parameter(2)
  %j = s32[]{:T(128)} parameter(3)
  %greater = pred[]{:T(512)} compare(%a, %b), direction=GE
  %value = f32[]{:T(128)} select(%greater, %a, %b)
  %index = s32[]{:T(128)} select(%greater, %i, %j)
  ROOT %t = (f32[]{:T(128)}, s32[]{:T(128)}) tuple(%value, %index)
}
ENTRY %main (x: f32[4]) -> (f32[4], bf16[], s32[]) {
  %x = f32[4]{0:T(128)} parameter(0), sharding={replicated}
  %start = (f32[4]{0:T(128)S(1)}, f32[4]{0:T(128)}, u32[]{:S(2)}) copy-start(%x)
  %done = f32[4]{0:T(128)S(1)} copy-done(%start)
  %doubled = f32[4]{0:T(128)} fusion(%done), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"9"}
  %places = s32[4]{0:T(128)} iota(), iota_dimension=0
  %low = f32[]{:T(128)} constant(-inf)
  %zero = s32[]{:T(128)} constant(0)
  %best = (bf16[]{:T(256)}, s32[]{:T(128)}) reduce(%doubled, %places, %low, %zero), dimensions={0}, to_apply=%maximum
  %value = bf16[]{:T(256)} get-tuple-element(%best), index=0
  %index = s32[]{:T(128)} get-tuple-element(%best), index=1
  ROOT %r = (f32[4]{0:T(128)}, bf16[]{:T(256)}, s32[]{:T(128)}) tuple(%doubled, %value, %index)
}
"""


def test_copies_fusions_and_narrowed_results_are_spelled_out():
    """The narrowed maximum decides in float32: 2.002 and 2.004 are equal in bfloat16, and the second is larger."""
    values = np.array([1, 1.001, 1.002, 0], np.float32)
    doubled, value, index = run(COPIES, [values], [((4,), "float32"), ((), "bfloat16"), ((), "int32")])
    np.testing.assert_array_equal(doubled, values * 2)
    assert (float(value), int(index)) == (2.0, 2)


def test_memory_without_contents_is_not_a_number():
    text = """HloModule m
ENTRY %main (a: f32[1]) -> (f32[2]) {
  %a = f32[1]{0:T(128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %empty = f32[2]{0:T(128)} custom-call(), custom_call_target="AllocateBuffer"
  %written = f32[2]{0:T(128)} dynamic-update-slice(%empty, %a, %zero)
  ROOT %t = (f32[2]{0:T(128)}) tuple(%written)
}
"""
    (found,) = run(text, [np.array([3], np.float32)], [((2,), "float32")])
    assert found[0] == 3 and np.isnan(found[1])


def test_unknown_instruction_is_refused_by_name():
    for line, message in [
        ('%b = f32[2]{0} custom-call(%a), custom_call_target="Unheard"', "%b, custom-call: the custom call 'Unheard'"),
        ("%b = f32[2]{0} infeed(%a)", "%b, infeed: its opcode is not known"),
        ("%b = s32[2]{0} bitcast(%a)", "%b, bitcast: it reads f32 as s32"),
    ]:
        text = (
            f"HloModule m\nENTRY %main (a: f32[2]) -> f32[2] {{\n  %a = f32[2]{{0}} parameter(0)\n  ROOT {line}\n}}\n"
        )
        with pytest.raises(BuildFailed, match=re.escape(message)):
            translate_module(parse_module(text))


def test_likeliest_tokens_are_compared_without_their_order():
    one, other = np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), np.array([[2, 1, 4, 3], [8, 9, 5, 6]])
    assert compare_outputs(Output("top_tokens", one, None), Output("top_tokens", other, None)).largest == 1


@pytest.mark.parametrize(("chained", "counted"), [(False, 4), (True, 2)])
def test_of_a_chained_block_the_first_difference_counts(chained, counted):
    one, other = np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), np.array([[1, 9, 3, 9], [5, 6, 9, 9]])
    difference = compare_outputs(Output("block", one, None), Output("block", other, None), chained)
    assert (difference.largest, difference.scale) == (counted, 8)


LABEL = "verify batch=1 length=64 k=7"
EVERY_K = ("verify batch=1 length=64 k=0", LABEL)
GRID = "batch=1 length=64 k=0,7 prefill=16"
# Of the tied pair. Whole runs are in test_emulated_golden_runs.py, other generations in tests/bin/test_emulation.py.
PAIRS = {
    "rotary": {"labels": (LABEL,)},
    "every k": {"dtype": "bfloat16", "labels": EVERY_K},
}


class Comparer:
    """Calls emulated programs of a pair, and compares with the programs built for the CPU."""

    def __init__(self, pair: OptimizedPair, folder: Path):
        self._devices, self._dtype = (jax.devices("cpu")[0],), pair.dtype
        self.source, self._plain = EmulatedPair(pair, folder), pair.trace("cpu")
        self.signatures = {one.label: one for one in self.source.signatures if pair.takes(one)}
        self._caller = SelfTestCaller(self.source.known, 512, self._devices)

    def find_wrong(self, label: str, text: str) -> list[str]:
        """Optimized HLO of an executable → the outputs that differ more than rounding explains."""
        found = self._call(self.source.translate(text, self.signatures[label]), label)
        differences = map(compare_outputs, found, self._expect(label))
        return [one.name for one in differences if exceeds_rounding(one, self._dtype)]

    @functools.cache  # noqa: B019  lives as long as its test
    def _expect(self, label: str) -> list[Output]:
        return self._call(self._plain.export(self.signatures[label]), label)

    def _call(self, program: bytes, label: str) -> list[Output]:
        signature = self.signatures[label]
        compiled = lower_program(program, signature, self.source.known, self._devices).compile()
        return self._caller.run(Executable(signature, compiled))


@pytest.fixture(scope="module")
def optimized(tied, tmp_path_factory) -> tuple[dict[str, OptimizedPair], Path]:
    """The pairs of PAIRS by name, and the folder with their optimized programs."""
    folder, models = tmp_path_factory.mktemp("optimized"), (str(tied.target), str(tied.draft))
    pairs = {name: OptimizedPair(name, *models, GRID, **facts) for name, facts in PAIRS.items()}
    optimize(pairs.values(), folder)
    return pairs, folder


@pytest.mark.skipif(bool(NEEDS_COMPILER), reason=NEEDS_COMPILER)
def test_emulation_finds_one_wrong_rotary_frequency(optimized):
    pairs, folder = optimized
    verify = Comparer(pairs["rotary"], folder)
    text = verify.source.read(LABEL)
    changed = re.sub(r"constant\(\{1, 0\.4216", "constant({1, 0.4316", text)
    assert verify.find_wrong(LABEL, text) == [] != verify.find_wrong(LABEL, changed)


@pytest.mark.skipif(bool(NEEDS_COMPILER), reason=NEEDS_COMPILER)
def test_features_are_equal_at_every_k_in_bfloat16(optimized):
    """For another number of rows the compiler fuses other operations; it must not leave out other roundings."""
    pairs, folder = optimized
    source = EmulatedPair(pairs["every k"], folder)
    by_label = {one.label: one for one in source.signatures}
    alone, first = (call_verify(source, by_label[label], by_label[LABEL])["features"][:, 0] for label in EVERY_K)
    assert np.abs(alone.astype(np.float32)).max() > 0.1
    np.testing.assert_array_equal(alone, first)


def call_verify(source: EmulatedPair, signature: Signature, widest: Signature) -> dict[str, np.ndarray]:
    """The outputs of an emulated verify by name. State as in the self-test of `widest`; anchors begin the blocks."""
    state = {name: make_state(source.known[name], widest, 512) for name in signature.state}
    arguments = {one.name: make_argument(one, signature, 512) for one in signature.arguments}
    if "block" in arguments:
        arguments["block"][:, 0] = state["anchors"][: signature.bucket["batch"]]
    device = (jax.devices("cpu")[0],)
    compiled = lower_program(source.export(signature), signature, source.known, device).compile()
    weights = (make_weight(source.known[name]) for name in signature.weights)
    outputs = compiled(*weights, *state.values(), *arguments.values())
    return {
        one.name: np.asarray(array) for one, array in zip(output_arrays(signature, source.known), outputs, strict=True)
    }
