"""Portable programs: from the optimized text of a TPU executable to a program that `jax.export` reads on any platform.

JAX has no public interface for the text of a module with its constants, nor for reading it back: `jaxlib._hlo` is used
here and nowhere else. JAX's own tests read modules so.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import export
from jax.extend import mlir
from jaxlib import _hlo  # type: ignore[attr-defined]  # it has no stub

from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.cache.signature import ArraySpec, Signature
from dflash_aot.compile.analysis.hlo import parse_module
from dflash_aot.compile.emulation.translation import translate_module
from dflash_aot.compile.programs.lowering import export_program, input_arrays, output_arrays

# Of the portable StableHLO. Both supported versions of JAX read it, and it knows all operations of the translation.
STABLEHLO_VERSION = "1.8.0"


def print_optimized_program(compiled: jax.stages.Compiled) -> str:
    """Returns the optimized HLO of an executable, with large constants, which `Compiled.as_text` leaves out.

    Raises BuildFailed if JAX does not give it.
    """
    if (executable := compiled.runtime_executable()) is None:
        raise BuildFailed("JAX does not give the optimized program")
    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    return str(executable.hlo_modules()[0].to_string(options))


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
    program = _export_stablehlo(_to_stablehlo(translate_module(parse_module(text))), inputs, outputs, devices)

    def call(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        results = program.call(*(arrays[array.name] for array in inputs))
        return {array.name: result for array, result in zip(outputs, results, strict=True)}

    return export_program(signature, call, known, "cpu", devices)


def _to_stablehlo(text: str) -> bytes:
    """Parses HLO text. Raises BuildFailed if XLA does not accept it."""
    try:
        return bytes(mlir.hlo_to_stablehlo(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()))
    except Exception as error:  # of the bindings: its type differs between versions
        raise BuildFailed(f"the emulated program is not accepted: {quote_first_line(str(error))}") from error


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
