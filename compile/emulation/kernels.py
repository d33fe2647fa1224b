"""Pallas kernels of an optimized program, replaced by their interpreted form.

The compiled kernel is machine code of a compiler below HLO and cannot be run here. Our kernels name themselves and what
they were built with in their metadata, so that the same kernel function is interpreted instead, as plain HLO.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence

import jax

from dflash_aot.compile.analysis.hlo import Buffer, HloModule, Instruction, parse_module
from dflash_aot.compile.emulation.hlo_text import print_program
from dflash_aot.compile.kernels import gated_delta, input_convolution, kv_attention, streamed_mlp

DTYPES = {"f32": "float32", "bf16": "bfloat16", "s32": "int32", "s8": "int8", "pred": "bool"}
METADATA = re.compile(r"\bkernel_metadata=(?=\{)")
# By name: (facts of the metadata, operands) → result or results.
INTERPRETERS: Mapping[str, Callable[..., jax.Array | Sequence[jax.Array]]] = {
    **{kernel.NAME: kernel.interpret_kernel for kernel in (streamed_mlp, input_convolution, kv_attention)},
    gated_delta.MIX: gated_delta.interpret_mix,
    gated_delta.COMMIT: gated_delta.interpret_commit,
}


def interpret_kernel(instruction: Instruction, operands: Sequence[Buffer]) -> HloModule | None:
    """Returns the program of a kernel's interpreted form, with the operands of its custom call.

    None if the kernel is not ours.
    """
    found = METADATA.search(instruction.attributes)
    metadata = json.JSONDecoder().raw_decode(instruction.attributes, found.end())[0] if found else {}
    interpreter = INTERPRETERS.get(metadata.get("kernel", ""))
    if interpreter is None:
        return None
    shapes = [jax.ShapeDtypeStruct(operand.dimensions, DTYPES[operand.dtype]) for operand in operands]
    lowered = jax.jit(lambda *arrays: interpreter(metadata["facts"], arrays)).lower(*shapes)
    return parse_module(print_program(lowered))
