"""The collectives of a program run in one order on all devices.

XLA:CPU ensures that within a computation only (see `TensorParallel.order_after`), so data must connect a collective
inside a conditional or a loop with all those outside. Without that, processes under jaxlib 0.10.2 ended by SIGSEGV.
"""

from collections.abc import Iterator

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from dflash_aot.cache.arrays import MESH_AXIS
from dflash_aot.cache.grid import parse_grid
from dflash_aot.compile.models.backend import CPU, TPU
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.programs.lowering import input_arrays, jit_program
from dflash_aot.compile.programs.programs import Programs

DEVICES = 2
COLLECTIVES = {"psum", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "psum_scatter", "reduce_scatter"}


@pytest.mark.parametrize("backend", [CPU, TPU], ids=["cpu", "tpu"])
def test_data_connects_nested_collectives_with_all_others(small_pair, backend):
    grid = parse_grid("batch=2 length=32 k=0,3 prefill=16 rounds=4 mixed=1", small_pair[1].block)
    programs = Programs(*small_pair, "float32", TensorParallel(DEVICES, backend), ("greedy", "sample"))
    for signature in programs.list_signatures(grid):
        jaxpr = _trace(programs, signature, programs.arrays_by_name(grid))
        assert _count_collectives(jaxpr) == programs.collectives(signature), signature.label
        assert list(_find_unordered(jaxpr)) == [], signature.label


def test_unordered_collectives_are_found():
    def independent(x, wanted):
        inside = jax.lax.cond(wanted, lambda: jax.lax.psum(x, MESH_AXIS), lambda: x)
        return inside + jax.lax.pmax(x, MESH_AXIS)

    traced = jax.make_jaxpr(independent, axis_env=[(MESH_AXIS, DEVICES)])(1.0, True)
    assert list(_find_unordered(traced.jaxpr)) == ["cond and pmax"]


def _trace(programs, signature, known):
    mesh = AbstractMesh((DEVICES,), (MESH_AXIS,))
    inputs = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, PartitionSpec(*array.sharding)))
        for array in input_arrays(signature, known)
    ]
    return jit_program(signature, programs.function(signature), known, mesh).trace(*inputs).jaxpr.jaxpr


def _count_collectives(jaxpr) -> int:
    """Collectives in the text of the program: one in a loop counts once."""
    inside = (_count_collectives(part) for equation in jaxpr.eqns for part in _nested(equation))
    return sum(equation.primitive.name in COLLECTIVES for equation in jaxpr.eqns) + sum(inside)


def _find_unordered(jaxpr) -> Iterator[str]:
    """Pairs of equations with collectives, at least one of them nested, that no data connects."""
    sources: dict[object, set[int]] = {}  # by variable: the equations with collectives that it depends on
    before: list[int] = []
    for at, equation in enumerate(jaxpr.eqns):
        inputs = [sources.get(one, set()) for one in equation.invars if not hasattr(one, "val")]
        needed = set().union(*inputs)
        if equation.primitive.name in COLLECTIVES or any(map(_count_collectives, _nested(equation))):
            for other in before:
                pair = (jaxpr.eqns[other], equation)
                if other not in needed and any(one.primitive.name not in COLLECTIVES for one in pair):
                    yield " and ".join(one.primitive.name for one in pair)
            before.append(at)
            needed = needed | {at}
        sources.update(dict.fromkeys(equation.outvars, needed))
        for part in _nested(equation):
            yield from _find_unordered(part)


def _nested(equation) -> Iterator:
    """The jaxprs in an equation's parameters: branches, bodies of loops, called functions."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else [value]:
            if hasattr(part, "jaxpr") or hasattr(part, "eqns"):
                yield getattr(part, "jaxpr", part)
