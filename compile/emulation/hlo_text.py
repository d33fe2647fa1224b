"""Text of HLO modules with all constants, printed and read.

JAX has no public interface for either: `Compiled.as_text` leaves large constants out, and nothing reads text. Only this
module uses `jaxlib._hlo`.
"""

import jax
from jax.extend import mlir
from jaxlib import _hlo  # type: ignore[attr-defined]  # it has no stub

from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.printable import quote_first_line


def print_optimized_program(compiled: jax.stages.Compiled) -> str:
    """Returns the optimized HLO of an executable. Raises BuildFailed if JAX does not give it."""
    if (executable := compiled.runtime_executable()) is None:
        raise BuildFailed("JAX does not give the optimized program")
    return _print(executable.hlo_modules()[0])


def print_program(lowered: jax.stages.Lowered) -> str:
    """Returns the HLO of a program before optimization. Raises BuildFailed if JAX does not give it."""
    if (program := lowered.compiler_ir("hlo")) is None:
        raise BuildFailed("JAX does not give the program")
    return _print(program.as_hlo_module())


def _print(module: _hlo.HloModule) -> str:
    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    return str(module.to_string(options))


def to_stablehlo(text: str) -> bytes:
    """Returns the StableHLO of HLO text. Raises BuildFailed if XLA does not accept it."""
    try:
        return bytes(mlir.hlo_to_stablehlo(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()))
    except Exception as error:  # of the bindings: its type differs between versions
        raise BuildFailed(f"the emulated program is not accepted: {quote_first_line(str(error))}") from error
