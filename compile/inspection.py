"""What the compiler made of a program, read from its own output."""

from collections import Counter
from collections.abc import Sequence

import jax

from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.manifest import Cost, Inspection
from dflash_aot.compile.hlo import Buffer, Module, Type, parse_module
from dflash_aot.compile.large_copies import find_large_copies

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


def read_cost(compiled: jax.stages.Compiled) -> Cost:
    """The compiler's own count."""
    counted = compiled.cost_analysis() or {}
    return Cost(counted.get("flops", 0.0), counted.get("bytes accessed", 0.0))


def inspect(compiled: jax.stages.Compiled, inputs: Sequence[str], outputs: Sequence[str]) -> Inspection:
    """Of the optimized program, whose inputs and outputs are named in order; the same on every platform.

    Raises BuildFailed where the compiler's text cannot be read.
    """
    return inspect_text(compiled.as_text() or "", inputs, outputs)


def inspect_text(text: str, inputs: Sequence[str], outputs: Sequence[str]) -> Inspection:
    """Likewise, of optimized HLO as XLA writes it."""
    module = parse_module(text)
    results = module.entry.root.type
    arguments = _name_layouts(inputs, [one.type for one in module.entry.parameters])
    returned = _name_layouts(outputs, results if isinstance(results, tuple) else (results,))
    if moved := [name for name in arguments.keys() & returned if arguments[name] != returned[name]]:
        raise BuildFailed(f"{', '.join(sorted(moved))}: donated in one layout, returned in another")
    return Inspection(arguments | returned, find_large_copies(module, inputs), count_collectives(module))


def count_collectives(module: Module) -> dict[str, int]:
    """By kind; what is started in one place and done in another counts once."""
    opcodes = (one.opcode for computation in module.computations.values() for one in computation.instructions)
    kinds = Counter(kind for opcode in opcodes if (kind := opcode.removesuffix("-start")) in COLLECTIVES)
    return dict(sorted(kinds.items()))


def _name_layouts(names: Sequence[str], types: Sequence[Type]) -> dict[str, str]:
    layouts = [one.layout for one in types if isinstance(one, Buffer)]
    return dict(zip(names, layouts, strict=True))
