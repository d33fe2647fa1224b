"""Optimized HLO as data, read from the compiler's text: computations of instructions, and what buffers they make.

The text is XLA's own (`HloModule::ToString`, https://openxla.org/xla/operation_semantics), the same on every platform.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dflash_aot.cache.errors import BuildFailed


@dataclass(frozen=True)
class Buffer:
    """One array: `layout` as XLA writes it, `{1,0:T(8,128)S(1)}`: minor to major, tiles, memory space."""

    dtype: str
    dimensions: tuple[int, ...]
    layout: str

    @property
    def bytes(self) -> int:
        """Without the padding of tiles; the width of a dtype is the first number in its name."""
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or [0])[0])
        return (math.prod(self.dimensions) * bits + 7) // 8

    @property
    def in_main_memory(self) -> bool:
        """Other spaces are named: S(1) is a TPU's vector memory."""
        return "S(" not in self.layout

    @property
    def shape(self) -> str:
        """Dtype and dimensions, as XLA writes them."""
        return f"{self.dtype}[{','.join(map(str, self.dimensions))}]"

    def __str__(self) -> str:
        return self.shape + self.layout


Type = Buffer | tuple["Type", ...]


@dataclass(frozen=True)
class Instruction:
    """One line; `attributes` is what stands behind the operands, as text."""

    name: str
    type: Type
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    number: int | None
    """Of a parameter."""

    def called(self, attribute: str) -> str:
        """The computation that an attribute names."""
        return self._attribute(attribute).lstrip("%")

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional, one for each operand behind the first."""
        several = _names(self._attribute("branch_computations"))
        return several or [self.called("true_computation"), self.called("false_computation")]

    @property
    def index(self) -> int:
        """Which element a get-tuple-element takes."""
        return int(self._attribute("index"))

    @property
    def target(self) -> str:
        """What a custom-call calls."""
        return self._attribute("custom_call_target")

    @property
    def operation(self) -> str:
        """Where in the traced program it comes from, "" where the compiler made it."""
        return self._attribute("op_name")

    def _attribute(self, name: str) -> str:
        found = re.search(rf'\b{name}=("[^"]*"|\{{[^}}]*\}}|[^\s,]+)', self.attributes)
        return found[1].strip('"') if found else ""


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction

    @cached_property
    def parameters(self) -> list[Instruction]:
        """In order."""
        return sorted((one for one in self.instructions if one.number is not None), key=lambda one: one.number or 0)


@dataclass(frozen=True)
class HloModule:
    """A program after all of the compiler's passes; `donated` numbers the parameters that outputs are written over."""

    computations: dict[str, Computation]
    entry: Computation
    donated: frozenset[int]

    @property
    def instructions(self) -> Iterator[Instruction]:
        """Of all computations."""
        return (one for computation in self.computations.values() for one in computation.instructions)


def parse_module(text: str) -> HloModule:
    """The whole program. Raises BuildFailed where something is not written as known."""
    computations: dict[str, Computation] = {}
    entry = None
    lines = iter(text.splitlines())
    for line in lines:
        if head := HEAD.match(line):
            computations[head[2]] = _parse_computation(head[2], lines)
            entry = computations[head[2]] if head[1] else entry
    if entry is None:
        raise _unreadable("there is no ENTRY")
    return HloModule(computations, entry, frozenset(map(int, ALIAS.findall(text.partition("\n")[0]))))


ALIAS = re.compile(r"\{\d*\}: \((\d+), \{\}, m\w+-alias\)")  # output: (parameter, …), in the module's first line
HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
OPCODE = re.compile(r" ([\w\-]+)(?=\()")
LEAF = re.compile(r"(\w+)\[([\d,<=]*)\](\{[^}]*\})?$")  # a dynamic dimension is written <=8


def _parse_computation(name: str, lines: Iterator[str]) -> Computation:
    instructions: list[Instruction] = []
    root = None
    for line in lines:
        if line.startswith("}"):
            break
        if (found := LINE.match(line)) is None:
            raise _unreadable(f"another kind of line: {line!r}")
        instructions.append(_parse_instruction(found[2], found[3]))
        root = instructions[-1] if found[1] else root
    if root is None:
        raise _unreadable(f"{name} has no ROOT")
    return Computation(name, tuple(instructions), root)


def _parse_instruction(name: str, text: str) -> Instruction:
    """`TYPE opcode(operands), attributes`."""
    end = _closing(text) if text.startswith("(") else text.find(" ")
    if (opcode := OPCODE.match(text, end)) is None:
        raise _unreadable(f"another kind of line: {text!r}")
    close = opcode.end() + _closing(text[opcode.end() :])
    operands = text[opcode.end() + 1 : close - 1]
    return Instruction(
        name=name,
        type=_parse_type(text[:end]),
        opcode=opcode[1],
        operands=() if opcode[1] == "constant" else tuple(_names(operands)),
        attributes=text[close:],
        number=int(operands) if opcode[1] == "parameter" else None,
    )


def _parse_type(text: str) -> Type:
    if text.startswith("("):
        return tuple(_parse_type(part) for part in _split(text[1:-1]))
    if (found := LEAF.match(text)) is None:
        raise _unreadable(f"another kind of type: {text!r}")
    return Buffer(found[1], tuple(int(size.lstrip("<=")) for size in found[2].split(",") if size), found[3] or "")


def _split(text: str) -> Iterator[str]:
    """At the commas of the outermost level; comments fall away."""
    text = re.sub(r"/\*.*?\*/", "", text)
    depth, begin = 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            yield text[begin:at].strip()
            begin = at + 1
    if rest := text[begin:].strip():
        yield rest


def _closing(text: str) -> int:
    """Behind the parenthesis that closes the first one."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.end()
    raise _unreadable(f"another kind of line: {text!r}")


def _names(text: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", text)


def _unreadable(what: str) -> BuildFailed:
    return BuildFailed(f"the compiler's text of the optimized program cannot be read: {what}")
