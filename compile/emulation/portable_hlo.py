"""Portable HLO: the text of HLO modules, lines of a translated program, and the computation that is translated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
from jax.extend import mlir
from jaxlib import _hlo  # type: ignore[attr-defined]  # it has no stub

from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.printable import quote_first_line
from dflash_aot.compile.analysis.hlo import Buffer, Computation, HloModule, Instruction, Type

# -- text of HLO modules with all constants, printed and read
#
# JAX has no public interface for either: `Compiled.as_text` leaves large constants out, and nothing reads text. Only
# this file uses `jaxlib._hlo`.


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
        return bytes(
            mlir.hlo_to_stablehlo(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
        )
    except Exception as error:  # of the bindings: its type differs between versions
        raise BuildFailed(
            f"the emulated program is not accepted: {quote_first_line(str(error))}"
        ) from error


# -- lines of a translated program


@dataclass(frozen=True)
class Line:
    """One instruction of the translated program: `expression` is its text without name and type."""

    name: str
    type: Type
    expression: str

    def format(self, root: bool) -> str:
        return (
            f"  {'ROOT ' if root else ''}%{self.name} = {format_type(self.type)} {self.expression}"
        )


@dataclass(frozen=True)
class Scope:
    """A computation that is translated, in its module.

    Attributes:
        module: the whole program.
        computation: the computation.
        exact: whether its instructions stay as they are.
    """

    module: HloModule
    computation: Computation
    exact: bool = False

    @cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        return {one.name: one for one in self.computation.instructions}

    def operand(self, instruction: Instruction, number: int = 0) -> Instruction:
        return self.instructions[instruction.operands[number]]

    def array(self, instruction: Instruction) -> Buffer:
        """The type of an instruction whose result is one array. Raises BuildFailed."""
        if not isinstance(instruction.type, Buffer):
            raise refuse(instruction, "a tuple where an array is expected")
        return instruction.type


def refuse(instruction: Instruction, reason: str) -> BuildFailed:
    return BuildFailed(
        f"%{instruction.name}, {instruction.opcode}: {reason}. The program cannot be emulated"
    )


def format_type(type_: Type) -> str:
    """A type without layouts, as HLO writes it."""
    return (
        type_.shape if isinstance(type_, Buffer) else "(" + ", ".join(map(format_type, type_)) + ")"
    )


def format_tuple(names: Sequence[str]) -> str:
    return "tuple(" + ", ".join(f"%{name}" for name in names) + ")"
