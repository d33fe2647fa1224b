"""Lowering: traces a signature's program to portable StableHLO, and lowers StableHLO for a compiler.

The only module that traces programs (`emulation.translation` jits interpreted kernels). Executables are always
compiled from the StableHLO that the bundle keeps, so a later rebuild compiles the same program.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import jax
from jax import export
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from dflash_aot.cache.arrays import MESH_AXIS, ArraySpec
from dflash_aot.cache.devices import ignore_jax_switches, make_sharding
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.signature import Signature

if TYPE_CHECKING:  # a compiler process does not import the models
    from dflash_aot.compile.models.backend import Backend

# Custom calls that later versions of JAX need not understand. Layouts of recurrent states and of the largest values of
# tiles need it; a rebuild is checked by its self-test.
UNSTABLE_CALLS = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
SOURCE_PLACEHOLDER = "program"  # stands for the path of a source file

ProgramFunction = Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]


def input_arrays(signature: Signature, known: Mapping[str, ArraySpec]) -> list[ArraySpec]:
    """The executable's inputs in order: weights, state, arguments. `known` holds weights and state by name."""
    return [*(known[name] for name in (*signature.weights, *signature.state)), *signature.arguments]


def output_arrays(signature: Signature, known: Mapping[str, ArraySpec]) -> list[ArraySpec]:
    """The executable's outputs in order: donated state, results."""
    return [*(known[name] for name in signature.donated), *signature.results]


def jit_program(
    signature: Signature,
    function: ProgramFunction,
    known: Mapping[str, ArraySpec],
    mesh: Mesh | AbstractMesh,
) -> jax.stages.Wrapped:
    """Jits `function` over the signature's inputs in order, with its state donated, on the devices of `mesh`.

    Tracing raises AssertionError if an output's shape or dtype differs from the signature.
    """
    _drop_source_locations()
    inputs = input_arrays(signature, known)
    outputs = output_arrays(signature, known)

    def flat(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        found = function({array.name: leaf for array, leaf in zip(inputs, leaves, strict=True)})
        for array in outputs:
            leaf = found[array.name]
            expected = (array.shard_shape(mesh.size), array.dtype)
            assert (leaf.shape, str(leaf.dtype)) == expected, (
                f"{signature.label}: {array} is {leaf}"
            )
        return tuple(found[array.name] for array in outputs)

    if mesh.size > 1:
        flat = jax.shard_map(
            flat,
            mesh=mesh,
            in_specs=tuple(PartitionSpec(*array.sharding) for array in inputs),
            out_specs=tuple(PartitionSpec(*array.sharding) for array in outputs),
            check_vma=False,  # `TensorParallel` keeps unsplit arrays equal on all devices
        )
    return _jit(flat, signature, inputs)


@ignore_jax_switches()
def export_program(
    signature: Signature,
    function: ProgramFunction,
    known: Mapping[str, ArraySpec],
    backend: "Backend",
    devices: int,
) -> bytes:
    """Traces a program and serializes it as portable StableHLO.

    The bytes are the same on every machine: they hold no paths and no line numbers.

    Args:
        signature: shapes and order of inputs and outputs.
        function: the program.
        known: weights and state by name.
        backend: of the program; no device of its platform is needed.
        devices: number of devices that share the program (see `TensorParallel`).
    """
    mesh = AbstractMesh(
        (devices,),
        (MESH_AXIS,),
        axis_types=(
            AxisType.Auto,
        ),  # in the context of a kernel's mesh, JAX 0.12 would type every array
        abstract_device=backend.device,
    )
    jitted = jit_program(signature, function, known, mesh)
    specs = [
        jax.ShapeDtypeStruct(
            array.shape,
            array.dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*array.sharding)) if devices > 1 else None,
        )
        for array in input_arrays(signature, known)
    ]
    precision = jax.default_matmul_precision(backend.precision)
    # Pallas asks the mesh of the context for the device, which is described and not attached.
    context = use_abstract_mesh(mesh) if backend.device else nullcontext()
    with precision, context:
        exported = export.export(
            jitted, platforms=[backend.platform], disabled_checks=UNSTABLE_CALLS
        )(*specs)
    return bytes(exported.serialize())


def check_program(program: bytes) -> None:
    """Raises BuildFailed, with JAX's reason, if the installed JAX does not read a program of `export_program`."""
    try:
        export.deserialize(
            bytearray(program)
        ).mlir_module()  # its StableHLO has a version of its own
    except (
        Exception
    ) as error:  # of any type: JAX reads the fields of an unknown version without checking it first
        raise BuildFailed(f"{type(error).__name__}: {error}") from error


def lower_program(
    program: bytes,
    signature: Signature,
    known: Mapping[str, ArraySpec],
    devices: Sequence[jax.Device],
) -> jax.stages.Lowered:
    """Lowers StableHLO of `export_program` for devices, which are attached or described.

    Inputs are placed on the devices, so outputs are committed like inputs. (JAX takes a slow path when an argument
    changes between committed and uncommitted.) Raises JAX's error if the program is for another platform, for more
    devices or of an unsupported version.
    """
    _drop_source_locations()
    exported = export.deserialize(bytearray(program))
    inputs = input_arrays(signature, known)

    def call(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return exported.call(*leaves)

    # A serialized executable holds the file and line of the traced function.
    call.__code__ = call.__code__.replace(co_filename=SOURCE_PLACEHOLDER, co_firstlineno=1)
    specs = [
        jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=make_sharding(array.sharding, devices)
        )
        for array in inputs
    ]
    traced = _jit(call, signature, inputs).trace(*specs)
    # Given explicitly, because a described TPU is not the platform on which JAX runs.
    return traced.lower(lowering_platforms=exported.platforms)


def _jit(
    function: Callable[..., tuple[jax.Array, ...]],
    signature: Signature,
    inputs: Sequence[ArraySpec],
) -> jax.stages.Wrapped:
    donated = [index for index, array in enumerate(inputs) if array.name in signature.donated]
    function.__name__ = signature.program
    # keep_unused: the executable's inputs are those of the signature, also if the program ignores some.
    return jax.jit(function, donate_argnums=donated, keep_unused=True)


def _drop_source_locations() -> None:
    """Makes JAX leave files and lines out of what it lowers, for the whole process; operations keep their names.

    JAX has one switch for all threads, and builds lower in several threads, so the switch is never set back.
    """
    jax.config.update("jax_traceback_in_locations_limit", 0)


def check_donation(signature: Signature, donated: Iterable[str]) -> None:
    """Raises BuildFailed unless every donated array is among `donated`, the inputs that XLA overwrites with outputs."""
    if copied := sorted(set(signature.donated) - set(donated)):
        raise BuildFailed(
            f"donation failed: {', '.join(copied)} {'are' if copied[1:] else 'is'} copied instead of written in place"
        )
