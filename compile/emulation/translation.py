"""Translation of the TPU compiler's optimized HLO into HLO that any backend compiles.

Optimized HLO has what the compiler's passes made of a program: fusions, other layouts, narrowed types, rewritten
gathers and convolutions, asynchronous copies. The translation keeps the arithmetic and drops memory and time:

- layouts, tiles and memory spaces: a `bitcast`, which depends on layouts, becomes transpose, reshape, transpose;
- fusions become calls, asynchronous instructions synchronous;
- roundings to bfloat16 are spelled out, because XLA:CPU may leave them out;
- the compiler's own custom calls are spelled out. Memory without contents is filled with NaN.

What is not listed here is refused by its name.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import export
from jax.extend import mlir

from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.cache.signature import Signature
from dflash_aot.compile.analysis.hlo import Buffer, HloModule, Instruction, Type, parse_module
from dflash_aot.compile.emulation.bitcasts import translate_bitcast
from dflash_aot.compile.emulation.portable_hlo import (
    Line,
    Scope,
    format_tuple,
    print_program,
    refuse,
    to_stablehlo,
)
from dflash_aot.compile.kernels.gated_delta import (
    CommitDeltaBlocks,
    MixDeltaBlock,
    MixDeltaChunk,
)
from dflash_aot.compile.kernels.input_convolution import ConvolveInput
from dflash_aot.compile.kernels.kernel import Kernel
from dflash_aot.compile.kernels.kernel_device import KERNEL_TARGET
from dflash_aot.compile.kernels.kv_attention import AttendKvColumns, AttendKvPages
from dflash_aot.compile.kernels.streamed_layer import (
    StreamDeltaInputs,
    StreamInputs,
    StreamLayer,
    StreamNormedMlp,
    StreamOutput,
    StreamOutputMlp,
)
from dflash_aot.compile.kernels.streamed_mlp import (
    ChooseExperts,
    RouteTokens,
    StreamClampedMlp,
    StreamGeluMlp,
    StreamMlp,
)
from dflash_aot.compile.models.backend import CPU
from dflash_aot.compile.programs.lowering import export_program, input_arrays, output_arrays

# -- Pallas kernels of an optimized program, replaced by their interpreted form
#
# The compiled kernel is machine code of a compiler below HLO and cannot be run here. This project's kernels write their
# names and what they were built with into their metadata. From these the same kernel function is interpreted as plain
# HLO.

DTYPES = {"f32": "float32", "bf16": "bfloat16", "s32": "int32", "s8": "int8", "pred": "bool"}
METADATA = re.compile(r"\bkernel_metadata=(?=\{)")
KERNELS: Mapping[str, type[Kernel]] = {
    kernel.name: kernel
    for kernel in (
        AttendKvColumns,
        AttendKvPages,
        ChooseExperts,
        CommitDeltaBlocks,
        ConvolveInput,
        MixDeltaBlock,
        MixDeltaChunk,
        RouteTokens,
        StreamClampedMlp,
        StreamDeltaInputs,
        StreamGeluMlp,
        StreamInputs,
        StreamLayer,
        StreamMlp,
        StreamNormedMlp,
        StreamOutput,
        StreamOutputMlp,
    )
}


def interpret_kernel(instruction: Instruction, operands: Sequence[Buffer]) -> HloModule | None:
    """Returns the program of a kernel's interpreted form, with the operands of its custom call.

    None if the kernel is not ours.
    """
    found = METADATA.search(instruction.attributes)
    metadata = (
        json.JSONDecoder().raw_decode(instruction.attributes, found.end())[0] if found else {}
    )
    kernel = KERNELS.get(metadata.get("kernel", ""))
    if kernel is None:
        return None
    shapes = [
        jax.ShapeDtypeStruct(operand.dimensions, DTYPES[operand.dtype]) for operand in operands
    ]
    lowered = jax.jit(lambda *arrays: kernel.interpret(metadata["facts"], arrays)).lower(*shapes)
    return parse_module(print_program(lowered))


# -- portable programs: optimized text of a TPU executable becomes a program that `jax.export` reads on any platform

# Of the portable StableHLO. Both supported versions of JAX read it, and it knows all operations of the translation.
STABLEHLO_VERSION = "1.8.0"


def make_portable_program(
    text: str, signature: Signature, known: Mapping[str, ArraySpec], devices: int
) -> bytes:
    """Returns a program for CPUs, as `export_program` does, that computes what optimized HLO computes.

    Args:
        text: optimized HLO; of several devices, the program of each.
        signature: inputs and outputs of the program.
        known: weights and state by name.
        devices: number of devices that share the program.

    Raises BuildFailed if the text has something that cannot be emulated.
    """
    inputs = input_arrays(signature, known)
    outputs = output_arrays(signature, known)
    program = _export_stablehlo(
        to_stablehlo(translate_module(parse_module(text))), inputs, outputs, devices
    )

    def call(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        results = program.call(*(arrays[array.name] for array in inputs))
        return {array.name: result for array, result in zip(outputs, results, strict=True)}

    return export_program(signature, call, known, CPU, devices)


def _export_stablehlo(
    module: bytes, inputs: Sequence[ArraySpec], outputs: Sequence[ArraySpec], devices: int
) -> export.Exported:
    """The program of one device. Its code replaces that of an exported function with the same inputs and outputs."""

    def zeros(*_: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(array.shard_shape(devices), array.dtype) for array in outputs)

    shapes = [jax.ShapeDtypeStruct(array.shard_shape(devices), array.dtype) for array in inputs]
    frame = export.export(jax.jit(zeros, keep_unused=True), platforms=["cpu"])(*shapes)
    portable = mlir.serialize_portable_artifact(module, STABLEHLO_VERSION)
    return dataclasses.replace(frame, mlir_module_serialized=portable)


# -- the translation, instruction by instruction


def _list_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Opcodes that mean the same on every backend. Their bfloat16 results are rounded.
ARITHMETIC = _list_names("""
    abs add all-reduce and atan2 cbrt ceil clamp compare convert convolution cosine count-leading-zeros divide dot erf
    exponential exponential-minus-one floor is-finite log log-plus-one logistic map maximum minimum multiply negate not
    or popcnt power reduce reduce-scatter reduce-window remainder round-nearest-afz round-nearest-even rsqrt
    shift-left shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan tanh xor
""")
# The same, of opcodes that move values.
MOVING = _list_names("""
    after-all all-gather all-to-all bitcast-convert broadcast call collective-permute concatenate conditional constant
    dynamic-slice dynamic-update-slice gather get-tuple-element iota pad parameter partition-id replica-id reshape
    reverse rng-bit-generator scatter select slice sort transpose tuple while
""")
# Started by NAME-start, done by NAME-done.
ASYNCHRONOUS = _list_names("""
    all-gather all-reduce all-to-all call collective-permute copy dynamic-slice reduce-scatter slice
""")
SUMMING = frozenset({"all-reduce", "reduce-scatter"})
# Attributes without a meaning for the results.
DROPPED = _list_names("""
    algorithm_picked api_version async_execution_thread backend_config constrain_layout control-predecessors
    cross_program_prefetch_index custom_call_has_side_effect custom_call_schedule custom_call_target
    frontend_attributes kind metadata operand_layout_constraints output_to_operand_aliasing sharding statistics
""")
WHOLE_AXIS = re.compile(r"mesh\['(\w+)'=(\d+)\] \{'\1'\}")
KERNEL_ENTRY = "interpreted"  # name of the computation that replaces a kernel
IDENTITY_CALLS = frozenset({"AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked"})
UNDEFINED = {"f32": "nan", "bf16": "nan", "f16": "nan", "pred": "true"}
# Values of undefined memory for dtypes without NaN: unlikely numbers, so that a use of them shows.
UNLIKELY_NUMBERS = {
    "s32": str(-(1 << 31) + 7),
    "u32": str((1 << 32) - 7),
    "s8": "-121",
    "u8": "249",
}


Rule = Callable[[Instruction, Scope], Iterator[Line]]


def translate_module(module: HloModule) -> str:
    """Returns the text of a program with the same results. Raises BuildFailed with the name of what is not known."""
    return "\n".join(["HloModule emulated", *_translate_computations(module)]) + "\n"


def _translate_computations(module: HloModule) -> Iterator[str]:
    # XLA:CPU expects a single instruction there.
    sums = {
        one.called("to_apply")
        for one in module.instructions
        if one.opcode.removesuffix("-start") in SUMMING
    }
    for computation in module.computations.values():
        scope = Scope(module, computation, computation.name in sums)
        for instruction in computation.instructions:
            if instruction.opcode == "custom-call" and instruction.target == KERNEL_TARGET:
                yield from _translate_kernel(instruction, scope)
        yield ""
        yield f"{'ENTRY ' if computation is module.entry else ''}%{computation.name} {{"
        yield from _translate_computation(scope)


def _translate_computation(scope: Scope) -> Iterator[str]:
    for instruction in scope.computation.instructions:
        *before, last = (
            [_portable(instruction)] if scope.exact else translate_instruction(instruction, scope)
        )
        yield from (line.format(False) for line in before)
        yield last.format(instruction is scope.computation.root)
    yield "}"


def _translate_kernel(instruction: Instruction, scope: Scope) -> Iterator[str]:
    """The computations of a kernel's interpreted form, with names of their own. Raises BuildFailed."""
    operands = [scope.array(scope.instructions[name]) for name in instruction.operands]
    if (kernel := interpret_kernel(instruction, operands)) is None:
        raise refuse(instruction, "the kernel is not known")
    for computation in kernel.computations.values():
        name = KERNEL_ENTRY if computation is kernel.entry else computation.name
        lines = (f"%{name} {{", *_translate_computation(Scope(kernel, computation)))
        yield ""
        yield from (line.replace("%", f"%{instruction.name}.") for line in lines)


def translate_instruction(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """Yields the lines of one instruction; the last has its name. Raises BuildFailed if it is not known."""
    if rule := RULES.get(instruction.opcode):
        return rule(instruction, scope)
    if instruction.opcode in MOVING:
        return iter([_portable(instruction)])
    if instruction.opcode in ARITHMETIC:
        return _round(_portable(instruction))
    kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
    if kind in ASYNCHRONOUS:
        return (_start if instruction.opcode.endswith("-start") else _finish)(instruction, scope)
    raise refuse(instruction, "its opcode is not known")


def _portable(instruction: Instruction) -> Line:
    operands = instruction.literal or ", ".join(f"%{name}" for name in instruction.operands)
    if instruction.opcode == "parameter":
        operands = str(instruction.number)
    return Line(
        instruction.name, instruction.type, f"{instruction.opcode}({operands}){_keep(instruction)}"
    )


def _keep(instruction: Instruction) -> str:
    """The attributes that the meaning depends on, as text."""
    kept = ((name, value) for name, value in instruction.list_attributes() if name not in DROPPED)
    return "".join(
        f", {name}={_list_devices(value) if name == 'replica_groups' else value}"
        for name, value in kept
    )


def _list_devices(groups: str) -> str:
    """Device groups as a list: JAX 0.12 names the whole axis of a mesh, which StableHLO 1.8 does not know."""
    found = WHOLE_AXIS.fullmatch(groups)
    return "{{" + ",".join(map(str, range(int(found[2])))) + "}}" if found else groups


def _round(line: Line) -> Iterator[Line]:
    """Rounds a bfloat16 result explicitly: XLA:CPU computes in float32 and may leave a rounding out."""
    if not isinstance(line.type, Buffer) or line.type.dtype != "bf16":
        yield line
        return
    wide = Buffer("f32", line.type.dimensions, "")
    yield Line(f"{line.name}.raw", line.type, line.expression)
    yield Line(f"{line.name}.wide", wide, f"convert(%{line.name}.raw)")
    yield Line(
        f"{line.name}.cut",
        wide,
        f"reduce-precision(%{line.name}.wide), exponent_bits=8, mantissa_bits=7",
    )
    yield Line(line.name, line.type, f"convert(%{line.name}.cut)")


def _copy(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    yield Line(instruction.name, instruction.type, f"reshape(%{instruction.operands[0]})")


def _fusion(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    operands = ", ".join(f"%{name}" for name in instruction.operands)
    yield Line(
        instruction.name,
        instruction.type,
        f"call({operands}), to_apply=%{instruction.called('calls')}",
    )


def _start(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """The start of an asynchronous operation, as a constant: only its end reads the result."""
    yield Line(instruction.name, Buffer("s32", (), ""), "constant(0)")


def _finish(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """The whole instruction happens at its end."""
    start = scope.operand(instruction)
    opcode = instruction.opcode.removesuffix("-done")
    if opcode == "copy":
        yield Line(instruction.name, instruction.type, f"reshape(%{start.operands[0]})")
        return
    if opcode in SUMMING:
        yield from _sum_devices(instruction.name, instruction.type, start, scope)
        return
    operands = ", ".join(f"%{name}" for name in start.operands)
    line = Line(instruction.name, instruction.type, f"{opcode}({operands}){_keep(start)}")
    yield from _round(line) if opcode in ARITHMETIC else [line]


def _async_start(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """A call, whose result the end reads."""
    called = scope.module.computations[instruction.called("calls")]
    operands = ", ".join(f"%{name}" for name in instruction.operands)
    yield Line(instruction.name, called.root.type, f"call({operands}), to_apply=%{called.name}")


def _async_done(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    yield from _rename(instruction, instruction.operands[0])


def _rename(instruction: Instruction, source: str) -> Iterator[Line]:
    """The value of another instruction."""
    name = instruction.name
    if isinstance(instruction.type, Buffer):
        yield Line(name, instruction.type, f"reshape(%{source})")
        return
    for number, part in enumerate(instruction.type):
        yield Line(f"{name}.{number}", part, f"get-tuple-element(%{source}), index={number}")
    yield Line(
        name,
        instruction.type,
        format_tuple([f"{name}.{number}" for number in range(len(instruction.type))]),
    )


def _custom_call_start(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """The start of a computation whose operands are given later."""
    if not instruction.called("called_computations").strip("{}%"):
        raise refuse(instruction, f"the custom call {instruction.target!r} is not known")
    yield Line(instruction.name, Buffer("s32", (), ""), "constant(0)")


def _custom_call_update(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    called = scope.operand(instruction).called("called_computations").strip("{}%")
    operands = ", ".join(f"%{name}" for name in instruction.operands[1:])
    result = scope.module.computations[called].root.type
    yield Line(instruction.name, result, f"call({operands}), to_apply=%{called}")


def _barrier(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """An order of events, which does not change a value."""
    if len(instruction.operands) == 1:
        yield from _rename(instruction, instruction.operands[0])
    else:
        yield Line(instruction.name, instruction.type, format_tuple(instruction.operands))


def _reduce(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """The compiler narrows results that are not read, such as the values of an argmax; it computes in the wide type."""
    line = _portable(instruction)
    leaves = _list_arrays(instruction)
    starts = [scope.array(scope.instructions[name]) for name in instruction.operands[len(leaves) :]]
    wide = [_retype(leaf, start.dtype) for start, leaf in zip(starts, leaves, strict=True)]
    if [leaf.dtype for leaf in leaves] == [leaf.dtype for leaf in wide]:
        yield from _round(line)
        return
    name = instruction.name
    if not isinstance(instruction.type, tuple):
        yield from _compute_in(wide[0].dtype, name, instruction.type, line.expression)
        return
    yield Line(f"{name}.reduced", tuple(wide), line.expression)
    for number, (leaf, target) in enumerate(zip(wide, leaves, strict=True)):
        yield Line(
            f"{name}.{number}.wide", leaf, f"get-tuple-element(%{name}.reduced), index={number}"
        )
        yield Line(f"{name}.{number}", target, f"convert(%{name}.{number}.wide)")
    yield Line(
        name, instruction.type, format_tuple([f"{name}.{number}" for number in range(len(wide))])
    )


def _convert_result(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """The compiler lets the result have another dtype than the operand."""
    operand = scope.array(scope.operand(instruction))
    yield from _compute_in(
        operand.dtype, instruction.name, scope.array(instruction), _portable(instruction).expression
    )


def _compute_in(dtype: str, name: str, result: Buffer, expression: str) -> Iterator[Line]:
    """An expression computed in another dtype than its result has, and then rounded to that of the result."""
    yield Line(f"{name}.computed", _retype(result, dtype), expression)
    yield from _round(Line(name, result, f"convert(%{name}.computed)"))


def _list_arrays(instruction: Instruction) -> list[Buffer]:
    """The arrays of a result. Raises BuildFailed for nested tuples."""
    types = instruction.type if isinstance(instruction.type, tuple) else (instruction.type,)
    arrays = [one for one in types if isinstance(one, Buffer)]
    if len(arrays) < len(types):
        raise refuse(instruction, "a tuple where an array is expected")
    return arrays


def _exchange_sum(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """The compiler sums bfloat16 of several devices in float32."""
    yield from _sum_devices(instruction.name, instruction.type, instruction, scope)


def _sum_devices(name: str, result: Type, instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """A collective with a reduction; `name` and `result` are those of the result.

    The TPU compiler joins sums of several arrays into one. Each is a sum of its own here: XLA for CPUs aborts at a
    joined one in a program of several devices.
    """
    if isinstance(result, Buffer):
        (operand,) = instruction.operands
        yield from _sum_array(name, result, operand, instruction, scope)
        return
    names = [f"{name}.{number}" for number in range(len(result))]
    for own, array, operand in zip(names, result, instruction.operands, strict=True):
        if not isinstance(array, Buffer):
            raise refuse(instruction, "it sums nested tuples")
        yield from _sum_array(own, array, operand, instruction, scope)
    yield Line(name, result, format_tuple(names))


def _sum_array(
    name: str, array: Buffer, operand: str, instruction: Instruction, scope: Scope
) -> Iterator[Line]:
    """The sum of one array, in the dtype of the reduction."""
    opcode = instruction.opcode.removesuffix("-start")
    root = scope.module.computations[instruction.called("to_apply")].root.type
    if not isinstance(root, Buffer) or array.dtype == root.dtype:
        yield from _round(Line(name, array, f"{opcode}(%{operand}){_keep(instruction)}"))
        return
    yield Line(
        f"{name}.operand",
        _retype(scope.array(scope.instructions[operand]), root.dtype),
        f"convert(%{operand})",
    )
    yield from _compute_in(
        root.dtype, name, array, f"{opcode}(%{name}.operand){_keep(instruction)}"
    )


def _retype(array: Buffer, dtype: str) -> Buffer:
    return Buffer(dtype, array.dimensions, "")


def _custom_call(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    name = instruction.name
    operands = instruction.operands
    if instruction.target in IDENTITY_CALLS:
        yield from _copy(instruction, scope)
    elif instruction.target == "ConcatBitcast":
        listed = ", ".join(f"%{operand}" for operand in operands)
        yield Line(name, instruction.type, f"concatenate({listed}), dimensions={{0}}")
    elif instruction.target == "PrepareAsyncCallStart":  # for a collective on the SparseCore
        yield Line(name, instruction.type, "constant(0)")
    elif instruction.target == "PrepareAsyncCallDone":
        yield Line(name, instruction.type, "after-all()")
    elif instruction.target == KERNEL_TARGET:
        listed = ", ".join(f"%{operand}" for operand in operands)
        yield Line(name, instruction.type, f"call({listed}), to_apply=%{name}.{KERNEL_ENTRY}")
    elif instruction.target == "TopK":
        yield from _largest(instruction, scope)
    elif instruction.target == "AllocateBuffer":
        yield from _fill(name, scope.array(instruction), instruction)
    else:
        raise refuse(instruction, f"the custom call {instruction.target!r} is not known")


def _largest(instruction: Instruction, scope: Scope) -> Iterator[Line]:
    """The largest values of each row of a matrix, and their places: a stable sort."""
    name = instruction.name
    (operand,) = instruction.operands
    arrays = _list_arrays(instruction)
    rows = scope.array(scope.operand(instruction)).dimensions
    compare = instruction.called("called_computations").strip("{}%")
    whole = tuple(Buffer(array.dtype, rows, "") for array in arrays)
    yield Line(f"{name}.places", whole[1], "iota(), iota_dimension=1")
    sort = (
        f"sort(%{operand}, %{name}.places), dimensions={{1}}, is_stable=true, to_apply=%{compare}"
    )
    yield Line(f"{name}.sorted", whole, sort)
    for number, (part, array) in enumerate(zip(whole, arrays, strict=True)):
        bounds = ", ".join(f"[0:{size}]" for size in array.dimensions)
        yield Line(
            f"{name}.{number}.sorted", part, f"get-tuple-element(%{name}.sorted), index={number}"
        )
        yield Line(f"{name}.{number}", array, f"slice(%{name}.{number}.sorted), slice={{{bounds}}}")
    yield Line(
        name, instruction.type, format_tuple([f"{name}.{number}" for number in range(len(arrays))])
    )


def _fill(name: str, array: Buffer, instruction: Instruction) -> Iterator[Line]:
    """Memory without contents."""
    value = UNDEFINED.get(array.dtype) or UNLIKELY_NUMBERS.get(array.dtype)
    if value is None:
        raise refuse(instruction, f"memory of dtype {array.dtype} is not known")
    yield Line(f"{name}.undefined", Buffer(array.dtype, (), ""), f"constant({value})")
    yield Line(name, array, f"broadcast(%{name}.undefined), dimensions={{}}")


RULES: Mapping[str, Rule] = {
    "bitcast": translate_bitcast,
    "copy": _copy,
    "fusion": _fusion,
    "reduce": _reduce,
    "reduce-precision": _convert_result,
    "negate": _convert_result,
    "all-reduce": _exchange_sum,
    "reduce-scatter": _exchange_sum,
    "custom-call": _custom_call,
    "opt-barrier": _barrier,
    "async-start": _async_start,
    "async-done": _async_done,
    "custom-call-start": _custom_call_start,
    "custom-call-update": _custom_call_update,
    "custom-call-done": _async_done,
}
