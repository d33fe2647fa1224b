"""Portable programs: optimized text of a TPU executable becomes a program that `jax.export` reads on any platform."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import export
from jax.extend import mlir

from dflash_aot.cache.signature import ArraySpec, Signature
from dflash_aot.compile.analysis.hlo import parse_module
from dflash_aot.compile.emulation.hlo_text import to_stablehlo
from dflash_aot.compile.emulation.translation import translate_module
from dflash_aot.compile.programs.lowering import export_program, input_arrays, output_arrays

# Of the portable StableHLO. Both supported versions of JAX read it, and it knows all operations of the translation.
STABLEHLO_VERSION = "1.8.0"


def make_portable_program(text: str, signature: Signature, known: Mapping[str, ArraySpec], devices: int) -> bytes:
    """Returns a program for CPUs, as `export_program` does, that computes what optimized HLO computes.

    Args:
        text: optimized HLO; of several devices, the program of each.
        signature: inputs and outputs of the program.
        known: weights and state by name.
        devices: number of devices that share the program.

    Raises BuildFailed if the text has something that cannot be emulated.
    """
    inputs, outputs = input_arrays(signature, known), output_arrays(signature, known)
    program = _export_stablehlo(to_stablehlo(translate_module(parse_module(text))), inputs, outputs, devices)

    def call(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        results = program.call(*(arrays[array.name] for array in inputs))
        return {array.name: result for array, result in zip(outputs, results, strict=True)}

    return export_program(signature, call, known, "cpu", devices)


def _export_stablehlo(
    module: bytes, inputs: Sequence[ArraySpec], outputs: Sequence[ArraySpec], devices: int
) -> export.Exported:
    """The program of one device. An exported function of the same inputs and outputs lends everything but the code."""

    def zeros(*_: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(array.shard_shape(devices), array.dtype) for array in outputs)

    shapes = [jax.ShapeDtypeStruct(array.shard_shape(devices), array.dtype) for array in inputs]
    frame = export.export(jax.jit(zeros, keep_unused=True), platforms=["cpu"])(*shapes)
    portable = mlir.serialize_portable_artifact(module, STABLEHLO_VERSION)
    return dataclasses.replace(frame, mlir_module_serialized=portable)
