"""The one place that says `jax.jit`: from a signature to portable StableHLO, and from that to a lowered program.

Everything is compiled from StableHLO as the bundle keeps it: what is compiled anew years later is what was compiled.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

import jax
from jax import export
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dflash_aot.cache.devices import make_sharding
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.signature import MESH_AXIS, ArraySpec, Signature

# What JAX does not promise to understand in later versions, and we cannot do without, see `kv._keep_order`. A rebuild
# is held to its canaries.
UNSTABLE_CALLS = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
SOURCE_PLACEHOLDER = "program"  # instead of a source file's path

# Operations keep their names, and lose the files and lines that they come from. For the whole process, which builds:
# JAX has one such switch, and several threads trace.
jax.config.update("jax_traceback_in_locations_limit", 0)

Program = Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]


def input_arrays(signature: Signature, known: Mapping[str, ArraySpec]) -> list[ArraySpec]:
    """All inputs of the executable in order; `known` holds weights and state by name."""
    return [*(known[name] for name in (*signature.weights, *signature.state)), *signature.arguments]


def output_arrays(signature: Signature, known: Mapping[str, ArraySpec]) -> list[ArraySpec]:
    """All outputs of the executable in order."""
    return [*(known[name] for name in signature.donated), *signature.results]


def jit_program(
    signature: Signature, function: Program, known: Mapping[str, ArraySpec], mesh: Mesh | AbstractMesh
) -> jax.stages.Wrapped:
    """`function` over the signature's inputs in order, its state donated, for the devices of `mesh` to share.

    Tracing it raises AssertionError unless its outputs are what the signature promises.
    """
    inputs, outputs = input_arrays(signature, known), output_arrays(signature, known)

    def flat(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        found = function({array.name: leaf for array, leaf in zip(inputs, leaves, strict=True)})
        for array in outputs:
            leaf = found[array.name]
            promised = (array.shard_shape(mesh.size), array.dtype)
            assert (leaf.shape, str(leaf.dtype)) == promised, f"{signature.label}: {array} is {leaf}"
        return tuple(found[array.name] for array in outputs)

    if mesh.size > 1:
        flat = jax.shard_map(
            flat,
            mesh=mesh,
            in_specs=tuple(PartitionSpec(*array.sharding) for array in inputs),
            out_specs=tuple(PartitionSpec(*array.sharding) for array in outputs),
            check_vma=False,  # what is not split is the same everywhere: `TensorParallel` sees to it
        )
    return _jit(flat, signature, inputs)


def export_program(
    signature: Signature, function: Program, known: Mapping[str, ArraySpec], platform: str, devices: int
) -> bytes:
    """A program for the shapes of its signature, on so many devices that share it (see `TensorParallel`), as StableHLO.

    `platform` as JAX calls it; no device of it is needed. The same bytes wherever and whenever it is traced: nothing
    in them tells of the machine, the sources' place or their line numbers.
    """
    mesh = AbstractMesh((devices,), (MESH_AXIS,))
    jitted = jit_program(signature, function, known, mesh)
    specs = [
        jax.ShapeDtypeStruct(
            array.shape,
            array.dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*array.sharding)) if devices > 1 else None,
        )
        for array in input_arrays(signature, known)
    ]
    # By default TPU and GPU round the operands of a float32 product; whoever asks for float32 means it.
    precision = nullcontext() if platform == "cpu" else jax.default_matmul_precision("highest")
    # Named as `lowering_platforms` has them: for CUDA and ROCm JAX has one name when it runs, and two when it lowers.
    name = "cuda" if platform == "gpu" else platform
    with precision:
        exported = export.export(jitted, platforms=[name], disabled_checks=UNSTABLE_CALLS)(*specs)
    return bytes(exported.serialize())


def lower_program(
    program: bytes, signature: Signature, known: Mapping[str, ArraySpec], devices: Sequence[jax.Device]
) -> jax.stages.Lowered:
    """What `export_program` wrote, for these devices, attached or described.

    The placement makes its outputs committed as its inputs are: JAX dispatches a second kind of input anew, slowly.
    Raises what JAX raises for a program of another kind of device, of more devices, or of a version out of its reach.
    """
    exported, inputs = export.deserialize(bytearray(program)), input_arrays(signature, known)

    def call(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return exported.call(*leaves)

    # A serialized executable tells where the function stands that was traced.
    call.__code__ = call.__code__.replace(co_filename=SOURCE_PLACEHOLDER, co_firstlineno=1)
    specs = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=make_sharding(array.sharding, devices))
        for array in inputs
    ]
    traced = _jit(call, signature, inputs).trace(*specs)
    # Named, because a described TPU is not the platform that JAX runs on.
    return traced.lower(lowering_platforms=exported.platforms)


def _jit(
    function: Callable[..., tuple[jax.Array, ...]], signature: Signature, inputs: Sequence[ArraySpec]
) -> jax.stages.Wrapped:
    donated = [index for index, array in enumerate(inputs) if array.name in signature.donated]
    function.__name__ = signature.program
    # keep_unused: the executable's inputs are the signature's, also where a program ignores one.
    return jax.jit(function, donate_argnums=donated, keep_unused=True)


def check_donation(signature: Signature, donated: Iterable[str]) -> None:
    """Donation took: all state is among the inputs in whose place outputs are written. Raises BuildFailed."""
    if copied := sorted(set(signature.donated) - set(donated)):
        raise BuildFailed(
            f"donation did not take: {', '.join(copied)} {'are' if copied[1:] else 'is'} not written in place"
        )
