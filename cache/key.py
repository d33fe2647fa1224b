"""Cache key of an executable: a hash of everything that the compiler's output depends on.

Not part of the key: paths, host names, the time, weight values.
"""

import hashlib

import msgspec

from dflash_aot.cache.environment import Environment
from dflash_aot.cache.signature import Signature

# By device kind. TPU7x multiplies bfloat16 in tiles of 16 rows, but arguments arrive in tiles of 8: without this
# option every call copied all stacked weights to the other tiling (Qwen3-4B: 3.6 GB). Weights that arrive in tiles of
# 16 may be faster still, but JAX places arrays in that tiling only with an additional program.
COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {"TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"}}


def compiler_options(environment: Environment) -> dict[str, str | bool]:
    """Returns the options that the compiler gets besides the program."""
    return dict(COMPILER_OPTIONS.get(environment.device_kind, {}))


def executable_key(program: bytes, signature: Signature, environment: Environment) -> str:
    """Returns the sha256, in hex, over the sha256 of each part: program, signature, environment, compiler options.

    program: canonical StableHLO, as `jax.export` writes it.
    signature, environment: as JSON, so that a renamed field would change every key.
    """
    digest = hashlib.sha256()
    for part in (
        program,
        msgspec.json.encode(signature),
        msgspec.json.encode(environment),
        msgspec.json.encode(compiler_options(environment)),
    ):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
