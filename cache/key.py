"""What an executable is found by: everything that what the compiler makes depends on, and nothing else."""

import hashlib

import msgspec

from dflash_aot.cache.environment import Environment
from dflash_aot.cache.signature import Signature

# TPU7x multiplies bfloat16 in tiles of 16 rows, and arguments come in tiles of 8: it laid all stacked weights anew in
# every call (Qwen3-4B: 3.6 GB). Weights given in its own tiles may be faster still, but JAX puts none there without a
# program of its own.
COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {"TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"}}


def compiler_options(environment: Environment) -> dict[str, str | bool]:
    """What the compiler is told beside the program; part of the key."""
    return dict(COMPILER_OPTIONS.get(environment.device_kind, {}))


def executable_key(program: bytes, signature: Signature, environment: Environment) -> str:
    """sha256 over the sha256 of each: program (as `jax.export` writes it), signature, environment, options."""
    digest = hashlib.sha256()
    for part in (
        program,
        msgspec.json.encode(signature),
        msgspec.json.encode(environment),
        msgspec.json.encode(compiler_options(environment)),
    ):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
