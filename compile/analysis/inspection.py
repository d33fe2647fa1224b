"""Inspection of the compiler's output: layouts, copies, collectives, donation cost; the report of missing memory."""

import re
from collections import Counter
from collections.abc import Sequence

import jax
import msgspec

from dflash_aot.cache.bundle.manifest import CallCost, ExecutableAnalysis
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.topology import Chip
from dflash_aot.compile.analysis.executable_checks import find_argument_copies
from dflash_aot.compile.analysis.hlo import Buffer, HloModule, Type, list_buffers, parse_module
from dflash_aot.compile.analysis.schedule import estimate_schedule

# -- out-of-memory report: the compiler's RESOURCE_EXHAUSTED as one sentence with figures

UNIT_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = r"([\d.]+)([KMGT]?)"
# Messages of libtpu 0.0.42: before and after buffer assignment.
NEEDED_PATTERNS = (
    re.compile(
        rf"total memory required for HLO temporaries \({SIZE}\) exceeds available HBM \({SIZE}\)"
    ),
    re.compile(rf"Used {SIZE} of {SIZE} hbm"),
)
EXCESS_PATTERN = re.compile(rf"Exceeded hbm capacity by {SIZE}")
ALLOCATION_PATTERN = re.compile(rf"^ +\d+\. Size: {SIZE}\n((?:     .*\n?)*)", re.MULTILINE)
LISTED_BUFFERS = 3


def explain_out_of_memory(error: BaseException) -> str | None:
    """The memory that was needed and missing, and the largest buffers if the compiler names them.

    None for errors other than RESOURCE_EXHAUSTED.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    found = next((match for pattern in NEEDED_PATTERNS if (match := pattern.search(text))), None)
    if not found:
        return f"needs more device memory than there is: {text.splitlines()[0]}"
    needed = _parse_bytes(*found.groups()[:2])
    available = _parse_bytes(*found.groups()[2:])
    excess = EXCESS_PATTERN.search(text)  # more exact than the difference of rounded figures
    missing = _parse_bytes(*excess.groups()) if excess else needed - available
    sentence = f"needs {_format_bytes(needed)} of device memory, {_format_bytes(missing)} more than there is"
    largest = ", ".join(_list_largest_buffers(text))
    return f"{sentence}; the largest buffers: {largest}" if largest else sentence


def _list_largest_buffers(text: str) -> list[str]:
    """Shapes (or labels) and sizes of the largest buffers, the largest first, each once."""
    found = {}
    for number, unit, details in ALLOCATION_PATTERN.findall(text):
        name = re.search(r"Shape: (\S+?)(?:\{|$)", details, re.MULTILINE) or re.search(
            r"XLA label: (.+)", details
        )
        if name:
            found[name[1]] = _parse_bytes(number, unit)
    ordered = sorted(found.items(), key=lambda one: -one[1])
    return [f"{name} {_format_bytes(size)}" for name, size in ordered[:LISTED_BUFFERS]]


def _parse_bytes(number: str, unit: str) -> float:
    return float(number) * UNIT_BYTES[unit]


def _format_bytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


# -- inspection

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
# Opcodes whose result is no new array.
FORWARDING_OPCODES = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
)


def read_cost(compiled: jax.stages.Compiled, module: HloModule, chip: Chip | None) -> CallCost:
    """The compiler's count of flops and bytes accessed, and for a TPU chip its estimate of the time.

    `module` is the compiled program. Raises BuildFailed if the compiler's text has an unknown form.
    """
    counted = compiled.cost_analysis() or {}
    schedule = estimate_schedule(module, chip) if chip else None
    return CallCost(
        counted.get("flops", 0.0), counted.get("bytes accessed", 0.0), schedule or msgspec.UNSET
    )


def inspect_hlo(text: str, inputs: Sequence[str], outputs: Sequence[str]) -> ExecutableAnalysis:
    """Inspects optimized HLO text. Raises BuildFailed if it cannot be parsed, and as `inspect_module` does."""
    return inspect_module(parse_module(text), inputs, outputs)


def inspect_module(
    module: HloModule, inputs: Sequence[str], outputs: Sequence[str]
) -> ExecutableAnalysis:
    """Inspects a compiled program, on every platform. `inputs` and `outputs` are names in order.

    Raises BuildFailed if a donated array changes its layout.
    """
    results = module.entry.root.type
    arguments = _name_layouts(inputs, [one.type for one in module.entry.parameters])
    returned = _name_layouts(outputs, results if isinstance(results, tuple) else (results,))
    if moved := [name for name in arguments.keys() & returned if arguments[name] != returned[name]]:
        raise BuildFailed(
            f"{', '.join(sorted(moved))}: donated in one layout, but returned in another"
        )
    return ExecutableAnalysis(
        layouts=arguments | returned,
        copies=find_argument_copies(module, inputs),
        collectives=count_collectives(module),
        donated=tuple(name for number, name in enumerate(inputs) if number in module.donated),
        largest=describe_largest_array(module),
    )


def count_collectives(module: HloModule) -> dict[str, int]:
    """Number of collectives by kind. An asynchronous collective counts once.

    An asynchronous collective has an instruction at its start and an instruction at its end. Or libtpu starts it in one
    fusion, advances it in other fusions, and ends it in another fusion; each of these fusions repeats the collective.
    """
    ends = {
        one.called("calls")
        for one in module.instructions
        if one.name.startswith("async-collective-done")
    }
    opcodes = (
        one.opcode
        for computation in module.computations.values()
        if computation.name not in ends
        and not computation.name.startswith("async_collective_fusion")
        for one in computation.instructions
    )
    kinds = Counter(
        kind for opcode in opcodes if (kind := opcode.removesuffix("-start")) in COLLECTIVES
    )
    return dict(sorted(kinds.items()))


def describe_largest_array(module: HloModule) -> str:
    """The instruction with the largest new array, as text; "" if there is none.

    Arrays with the shape of an argument are left out, because they may be written in its place.
    """
    fused = {one.called("calls") for one in module.instructions if one.opcode == "fusion"}
    taken = {one.type.shape for one in module.entry.parameters if isinstance(one.type, Buffer)}
    found = [
        (leaf.bytes, f"%{one.name} = {leaf}" + (f" ({one.operation})" if one.operation else ""))
        for computation in module.computations.values()
        if computation.name not in fused
        for one in computation.instructions
        if one.opcode not in FORWARDING_OPCODES
        for leaf in list_buffers(one.type)
        if leaf.in_main_memory and leaf.shape not in taken
    ]
    return max(found, default=(0, ""))[1]


def _name_layouts(names: Sequence[str], types: Sequence[Type]) -> dict[str, str]:
    layouts = [one.layout for one in types if isinstance(one, Buffer)]
    return dict(zip(names, layouts, strict=True))
