"""Portable HLO: lines of a translated program, and the computation that is translated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dflash_aot.cache.errors import BuildFailed
from dflash_aot.compile.analysis.hlo import Buffer, Computation, HloModule, Instruction, Type


@dataclass(frozen=True)
class Line:
    """One instruction of the translated program: `expression` is its text without name and type."""

    name: str
    type: Type
    expression: str

    def format(self, root: bool) -> str:
        return f"  {'ROOT ' if root else ''}%{self.name} = {format_type(self.type)} {self.expression}"


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
    return BuildFailed(f"%{instruction.name}, {instruction.opcode}: {reason}. The program cannot be emulated")


def format_type(type_: Type) -> str:
    """A type without layouts, as HLO writes it."""
    return type_.shape if isinstance(type_, Buffer) else "(" + ", ".join(map(format_type, type_)) + ")"


def format_tuple(names: Sequence[str]) -> str:
    return "tuple(" + ", ".join(f"%{name}" for name in names) + ")"
