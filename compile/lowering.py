"""The one place that says `jax.jit`: from a signature to a lowered program, a compiled one, and bytes."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

import jax
import msgspec
from jax.sharding import PartitionSpec

from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.mesh import make_mesh, place
from dflash_aot.cache.signature import Array, Signature

# TPU7x multiplies bfloat16 in tiles of 16 rows, and arguments come in tiles of 8: it laid all stacked weights anew in
# every call (Qwen3-4B: 3.6 GB). Weights given in its own tiles may be faster still, but JAX puts none there without a
# program of its own.
COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {"TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"}}

Program = Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]


def input_arrays(signature: Signature, known: Mapping[str, Array]) -> list[Array]:
    """All inputs of the executable in order; `known` holds weights and state by name."""
    return [*(known[name] for name in (*signature.weights, *signature.state)), *signature.arguments]


def output_arrays(signature: Signature, known: Mapping[str, Array]) -> list[Array]:
    """All outputs of the executable in order."""
    return [*(known[name] for name in signature.donated), *signature.results]


def jit_program(
    signature: Signature, function: Program, known: Mapping[str, Array], devices: Sequence[jax.Device]
) -> jax.stages.Wrapped:
    """`function` over the signature's inputs in order, its state donated.

    Tracing it raises AssertionError unless its outputs are what the signature promises.
    """
    inputs, outputs = input_arrays(signature, known), output_arrays(signature, known)
    count = len(devices)

    def flat(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        found = function({array.name: leaf for array, leaf in zip(inputs, leaves, strict=True)})
        for array in outputs:
            leaf = found[array.name]
            promised = (array.shard_shape(count), array.dtype)
            assert (leaf.shape, str(leaf.dtype)) == promised, f"{signature.label}: {array} is {leaf}"
        return tuple(found[array.name] for array in outputs)

    if count > 1:
        flat = jax.shard_map(
            flat,
            mesh=make_mesh(devices),
            in_specs=tuple(PartitionSpec(*array.sharding) for array in inputs),
            out_specs=tuple(PartitionSpec(*array.sharding) for array in outputs),
            check_vma=False,  # what is not split is the same everywhere: `Shards` sees to it
        )
    flat.__name__ = signature.program
    donated = [index for index, array in enumerate(inputs) if array.name in signature.donated]
    # keep_unused: the executable's inputs are the signature's, also where a program ignores one.
    return jax.jit(flat, donate_argnums=donated, keep_unused=True)


def lower(
    signature: Signature, function: Program, known: Mapping[str, Array], devices: Sequence[jax.Device]
) -> jax.stages.Lowered:
    """Traces a program for the shapes of its signature, on `devices` that share it (see `Shards`).

    The placement makes its outputs committed as its inputs are: JAX dispatches a second kind of input anew, slowly.
    """
    specs = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place(array.sharding, devices))
        for array in input_arrays(signature, known)
    ]
    platform = devices[0].platform
    # By default TPU and GPU round the operands of a float32 product; whoever asks for float32 means it.
    precision = nullcontext() if platform == "cpu" else jax.default_matmul_precision("highest")
    with precision:
        traced = jit_program(signature, function, known, devices).trace(*specs)
    # Named, because a described TPU is not the platform that JAX runs on.
    return traced.lower(lowering_platforms=(platform,))


def compiler_options(environment: Environment) -> dict[str, str | bool]:
    """What the compiler is told beside the program; part of the key."""
    return dict(COMPILER_OPTIONS.get(environment.device_kind, {}))


def executable_key(lowered: jax.stages.Lowered, signature: Signature, environment: Environment) -> str:
    """sha256 over the canonical StableHLO (no source locations), the signature, the environment and the options."""
    digest = hashlib.sha256()
    for part in (
        lowered.as_text().encode(),
        msgspec.json.encode(signature),
        msgspec.json.encode(environment),
        msgspec.json.encode(compiler_options(environment)),
    ):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def check_donation(signature: Signature, donated: Iterable[str]) -> None:
    """Donation took: all state is among the inputs in whose place outputs are written. Raises BuildFailed."""
    if copied := sorted(set(signature.donated) - set(donated)):
        raise BuildFailed(
            f"donation did not take: {', '.join(copied)} {'are' if copied[1:] else 'is'} not written in place"
        )
