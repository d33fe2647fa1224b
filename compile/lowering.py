"""The one place that says `jax.jit`: from a signature to a lowered program, a compiled one, and bytes."""

import hashlib
from collections.abc import Callable, Mapping

import jax
import msgspec
from jax.sharding import SingleDeviceSharding

from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.signature import Array, Signature

Program = Callable[[Mapping[str, jax.Array]], dict[str, jax.Array]]


def input_arrays(signature: Signature, known: Mapping[str, Array]) -> list[Array]:
    """All inputs of the executable in order; `known` holds weights and state by name."""
    return [*(known[name] for name in (*signature.weights, *signature.state)), *signature.arguments]


def output_arrays(signature: Signature, known: Mapping[str, Array]) -> list[Array]:
    """All outputs of the executable in order."""
    return [*(known[name] for name in signature.donated), *signature.results]


def jit_program(signature: Signature, function: Program, known: Mapping[str, Array]) -> jax.stages.Wrapped:
    """`function` over the signature's inputs in order, its state donated.

    Tracing it raises AssertionError unless its outputs are what the signature promises.
    """
    inputs, outputs = input_arrays(signature, known), output_arrays(signature, known)

    def flat(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        found = function({array.name: leaf for array, leaf in zip(inputs, leaves, strict=True)})
        for array in outputs:
            leaf = found[array.name]
            assert (leaf.shape, str(leaf.dtype)) == (array.shape, array.dtype), f"{signature.label}: {array} is {leaf}"
        return tuple(found[array.name] for array in outputs)

    flat.__name__ = signature.program
    donated = [index for index, array in enumerate(inputs) if array.name in signature.donated]
    # keep_unused: the executable's inputs are the signature's, also where a program ignores one.
    return jax.jit(flat, donate_argnums=donated, keep_unused=True)


def lower(
    signature: Signature, function: Program, known: Mapping[str, Array], device: jax.Device
) -> jax.stages.Lowered:
    """Traces a program for the shapes of its signature, placed on `device`.

    The placement makes its outputs committed as its inputs are: JAX dispatches a second kind of input anew, slowly.
    """
    place = SingleDeviceSharding(device)
    specs = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place) for array in input_arrays(signature, known)]
    return jit_program(signature, function, known).lower(*specs)


def executable_key(lowered: jax.stages.Lowered, signature: Signature, environment: Environment) -> str:
    """sha256 over the canonical StableHLO (no source locations), the signature and the environment."""
    digest = hashlib.sha256()
    for part in (
        lowered.as_text().encode(),
        msgspec.json.encode(signature),
        msgspec.json.encode(environment),
    ):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def check_donation(signature: Signature, known: Mapping[str, Array], aliased_bytes: int) -> None:
    """Donation took: the executable writes all its state in place. Raises BuildFailed."""
    state_bytes = sum(known[name].bytes for name in signature.donated)
    if aliased_bytes < state_bytes:
        raise BuildFailed(
            f"donation did not take: {aliased_bytes:,} bytes are written in place, its state has {state_bytes:,}"
        )
