"""Cache key of an executable: a hash of everything that the compiler's output depends on, compiler options included.

Not part of the key: paths, host names, the time, weight values.
"""

import hashlib
from collections.abc import Mapping

import msgspec

from dflash_aot.cache.environment import Environment
from dflash_aot.cache.signature import SAMPLED_PROGRAMS, ProgramName, Signature

# -- compiler options: what the compiler gets in addition to a program, by device kind
#
# The options are part of an executable's key, and the manifest names them. They were chosen by the compiler's own
# estimates of the executables of Qwen3-4B and its draft, see docs/performance.md.

CompilerOptions = dict[str, str]

# Of every program, by device kind. TPU7x multiplies bfloat16 in tiles of 16 rows, but arguments arrive in tiles of 8:
# without this option every call copied all stacked weights to the other tiling (Qwen3-4B: 3.6 GB). Weights that arrive
# in tiles of 16 may be faster still, but JAX places arrays in that tiling only with an additional program.
DEVICE_OPTIONS: dict[str, CompilerOptions] = {
    "TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"}
}
# The VMEM that an operation may use, in KiB, in the programs that run a whole model. With XLA's default (16 MiB on v5e
# and v5p, 32 MiB on v6e) a product streams its weight in tiles so small that each waits for the memory. v4 and tpu7x
# keep the default: no other value was tried there.
SCOPED_VMEM_KIB = {"TPU v5 lite": 65536, "TPU v5": 65536, "TPU v6 lite": 65536}
MODEL_PROGRAMS: frozenset[ProgramName] = frozenset(
    {"prefill", "scored_prefill", "draft", "verify", "rounds", *SAMPLED_PROGRAMS}
)


def choose_compiler_options(environment: Environment, program: ProgramName) -> CompilerOptions:
    """The options with which a program is compiled for the devices of an environment."""
    options = dict(DEVICE_OPTIONS.get(environment.device_kind, {}))
    if program in MODEL_PROGRAMS and (limit := SCOPED_VMEM_KIB.get(environment.device_kind)):
        options["xla_tpu_scoped_vmem_limit_kib"] = str(limit)
    return options


# -- the key


def executable_key(
    program: bytes,
    signature: Signature,
    environment: Environment,
    options: Mapping[str, str] | None = None,
) -> str:
    """Returns the sha256, in hex, over the sha256 of each part: program, signature, environment, compiler options.

    program: canonical StableHLO, as `jax.export` writes it.
    signature, environment: as JSON, so that a renamed field would change every key.
    options: compiler options; None: the options that a build would choose.
    """
    if options is None:
        options = choose_compiler_options(environment, signature.program)
    digest = hashlib.sha256()
    for part in (
        program,
        msgspec.json.encode(signature),
        msgspec.json.encode(environment),
        msgspec.json.encode(dict(sorted(options.items()))),
    ):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
