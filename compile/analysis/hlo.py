"""Parser of optimized HLO text: modules, computations, instructions and the buffers that they make.

The text is XLA's own (`HloModule::ToString`, https://openxla.org/xla/operation_semantics), the same on every platform.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dflash_aot.cache.errors import BuildFailed


@dataclass(frozen=True)
class Buffer:
    """One array.

    Attributes:
        dtype: as XLA writes it, such as bf16.
        dimensions: sizes.
        layout: as XLA writes it, `{1,0:T(8,128)S(1)}`: dimensions from minor to major, tiles, memory space.
    """

    dtype: str
    dimensions: tuple[int, ...]
    layout: str

    @property
    def bytes(self) -> int:
        """Size without the padding of tiles."""
        # The width of a dtype is the first number in its name.
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or [0])[0])
        return (math.prod(self.dimensions) * bits + 7) // 8

    @property
    def in_main_memory(self) -> bool:
        """Whether the buffer is in the device's main memory. Other memory spaces are named: S(1) is a TPU's VMEM."""
        return "S(" not in self.layout

    @property
    def shape(self) -> str:
        """Dtype and dimensions as XLA writes them, such as bf16[8,128]."""
        return f"{self.dtype}[{','.join(map(str, self.dimensions))}]"

    def __str__(self) -> str:
        return self.shape + self.layout


Type = Buffer | tuple["Type", ...]


def list_buffers(type_: Type) -> Iterator[Buffer]:
    """The arrays of a type, in order, however deep they are nested."""
    if isinstance(type_, Buffer):
        yield type_
    else:
        for part in type_:
            yield from list_buffers(part)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: without the leading %.
        type: of the result.
        opcode: such as fusion or copy.
        operands: names of instructions.
        attributes: the text after the operands.
        number: which parameter of its computation the instruction is; None for other instructions.
        literal: the text of a constant's value, without its type.
    """

    name: str
    type: Type
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    number: int | None
    literal: str = ""

    def called(self, attribute: str) -> str:
        """Name of the computation in an attribute."""
        return self._attribute(attribute).lstrip("%")

    @property
    def branches(self) -> list[str]:
        """Names of the computations of a conditional, one for each operand after the first."""
        several = _names(self._attribute("branch_computations"))
        return several or [self.called("true_computation"), self.called("false_computation")]

    @property
    def index(self) -> int:
        """Which element a get-tuple-element takes."""
        return int(self._attribute("index"))

    @property
    def direction(self) -> str:
        """How a compare compares, such as LT."""
        return self._attribute("direction")

    @property
    def target(self) -> str:
        """The target of a custom-call."""
        return self._attribute("custom_call_target")

    @property
    def operation(self) -> str:
        """The operation of the traced program from which it comes; "" if the compiler made it."""
        return self._attribute("op_name")

    @property
    def backend_config(self) -> dict[str, Any]:
        """What the compiler's backend noted for the instruction; {} if nothing. Raises BuildFailed if it is no JSON."""
        if (found := re.search(r"\bbackend_config=(?=\{)", self.attributes)) is None:
            return {}
        try:
            return json.JSONDecoder().raw_decode(self.attributes, found.end())[0]
        except json.JSONDecodeError as error:
            raise _unreadable(f"backend_config of {self.name}: {error}") from error

    def list_attributes(self) -> list[tuple[str, str]]:
        """All attributes: name and text of the value."""
        parts = (part.partition("=") for part in _split(self.attributes.lstrip(", ")))
        return [(name, value) for name, _, value in parts]

    def _attribute(self, name: str) -> str:
        found = re.search(rf'\b{name}=("[^"]*"|\{{[^}}]*\}}|[^\s,]+)', self.attributes)
        return found[1].strip('"') if found else ""


@dataclass(frozen=True)
class Computation:
    """A computation.

    Attributes:
        name: without the leading %.
        instructions: in the order in which they run.
        root: the instruction whose result is the result of the computation.
    """

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction

    @cached_property
    def parameters(self) -> list[Instruction]:
        """The parameter instructions in order."""
        return sorted(
            (one for one in self.instructions if one.number is not None),
            key=lambda one: one.number or 0,
        )


@dataclass(frozen=True)
class HloModule:
    """A program after all passes of the compiler.

    Attributes:
        computations: by name.
        entry: the computation that runs first.
        donated: numbers of the parameters that outputs overwrite.
    """

    computations: dict[str, Computation]
    entry: Computation
    donated: frozenset[int]

    @property
    def instructions(self) -> Iterator[Instruction]:
        """The instructions of all computations."""
        return (
            one for computation in self.computations.values() for one in computation.instructions
        )


def parse_module(text: str) -> HloModule:
    """Parses a whole program. Raises BuildFailed if the text has an unknown form."""
    computations: dict[str, Computation] = {}
    entry = None
    lines = _join_lines(text.splitlines())
    for line in lines:
        if (head := HEAD.match(line)) and ") -> " in line and line.endswith("{"):
            computations[head[2]] = _parse_computation(head[2], lines)
            entry = computations[head[2]] if head[1] else entry
    if entry is None:
        raise _unreadable("no ENTRY computation")
    return HloModule(
        computations, entry, frozenset(map(int, ALIAS.findall(text.partition("\n")[0])))
    )


# output: (parameter, …), in the module's first line
ALIAS = re.compile(r"\{\d*\}: \((\d+), \{\}, m\w+-alias\)")
HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(")  # of a computation: NAME (PARAMETERS) -> TYPE {
LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
OPCODE = re.compile(r" ([\w\-]+)(?=\()")
# or a quoted text, in which no comma counts
DELIMITER = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
COMMENT = re.compile(r"/\*.*?(?:\*/|$)")
LEAF = re.compile(r"(\w+)\[([\d,<=]*)\](\{[^}]*\})?$")  # a dynamic dimension is written <=8


def _join_lines(lines: list[str]) -> Iterator[str]:
    """The lines, each instruction on one: XLA prints the metadata of a kernel, which is JSON, on several."""
    parts: list[str] = []
    for line in lines:
        parts.append(line)
        if not line.endswith("kernel_metadata={") and (len(parts) == 1 or line.startswith("}")):
            yield "".join(parts)
            parts = []
    if parts:
        yield "".join(parts)


def _parse_computation(name: str, lines: Iterator[str]) -> Computation:
    instructions: list[Instruction] = []
    root = None
    for line in lines:
        if line.startswith("}"):
            break
        if (found := LINE.match(line)) is None:
            raise _unreadable(f"unknown kind of line: {line!r}")
        instructions.append(_parse_instruction(found[2], found[3]))
        root = instructions[-1] if found[1] else root
    if root is None:
        raise _unreadable(f"{name} has no ROOT")
    return Computation(name, tuple(instructions), root)


def _parse_instruction(name: str, text: str) -> Instruction:
    """Parses `TYPE opcode(operands), attributes`."""
    end = _closing(text) if text.startswith("(") else text.find(" ")
    if (opcode := OPCODE.match(text, end)) is None:
        raise _unreadable(f"unknown kind of line: {text!r}")
    close = opcode.end() + _closing(text[opcode.end() :])
    operands = text[opcode.end() + 1 : close - 1]
    return Instruction(
        name=name,
        type=_parse_type(text[:end]),
        opcode=opcode[1],
        operands=() if opcode[1] == "constant" else tuple(_names(operands)),
        attributes=text[close:],
        number=int(operands) if opcode[1] == "parameter" else None,
        literal=operands if opcode[1] == "constant" else "",
    )


def _parse_type(text: str) -> Type:
    if text.startswith("("):
        return tuple(_parse_type(part) for part in _split(text[1:-1]))
    if (found := LEAF.match(text)) is None:
        raise _unreadable(f"unknown kind of type: {text!r}")
    return Buffer(
        found[1],
        tuple(int(size.lstrip("<=")) for size in found[2].split(",") if size),
        found[3] or "",
    )


def _split(text: str) -> Iterator[str]:
    """Splits text at the commas of the outermost level, and drops comments."""
    text = COMMENT.sub("", text)
    depth, begin = 0, 0
    for found in DELIMITER.finditer(text):
        letter = found[0]
        at = found.start()
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            yield text[begin:at].strip()
            begin = at + 1
    if rest := text[begin:].strip():
        yield rest


def _closing(text: str) -> int:
    """Index after the parenthesis that closes the first one."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.end()
    raise _unreadable(f"unknown kind of line: {text!r}")


def _names(text: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", text)


def _unreadable(what: str) -> BuildFailed:
    return BuildFailed(f"the compiler's text of the optimized program cannot be read: {what}")
