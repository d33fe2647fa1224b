"""Cache key of an executable: a hash of everything that the compiler's output depends on, compiler options included.

Not part of the key: paths, host names, the time, weight values.
"""

import hashlib
from collections.abc import Collection, Mapping

import msgspec

from dflash_aot.cache.chips import CHIPS
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.signature import PROGRAMS, ProgramName, Signature

# -- compiler options: what the compiler gets in addition to a program

CompilerOptions = dict[str, str]
# Of every program, by device kind; in addition, of the programs that run a whole model; and of the others.
DEVICE_OPTIONS = {chip.device_kind: chip.compiler.options for chip in CHIPS}
MODEL_OPTIONS = {chip.device_kind: chip.compiler.model_options for chip in CHIPS}
OTHER_OPTIONS = {chip.device_kind: chip.compiler.other_options for chip in CHIPS}
# A CPU may reorder the sums of programs with such weights: otherwise it multiplies a row and a weight number by number,
# in 16 times the time. Infinities, NaN, divisions and functions stay exact.
REORDERED = {"bfloat16", "int8"}
REORDER_SUMS = {
    "xla_cpu_enable_fast_math": "True",
    "xla_cpu_fast_math_honor_division": "True",
    "xla_cpu_fast_math_honor_functions": "True",
    "xla_cpu_fast_math_honor_infs": "True",
    "xla_cpu_fast_math_honor_nans": "True",
}


def choose_compiler_options(
    environment: Environment, program: ProgramName, dtypes: Collection[str] = ()
) -> CompilerOptions:
    """The options with which a program is compiled for the devices of an environment.

    dtypes: of its weights, where their products may be summed in any order.
    """
    kind = environment.device_kind
    sums = {} if kind != "cpu" or REORDERED.isdisjoint(dtypes) else REORDER_SUMS
    added = MODEL_OPTIONS if PROGRAMS[program][0].runs_model else OTHER_OPTIONS
    return {**DEVICE_OPTIONS.get(kind, {}), **added.get(kind, {}), **sums}


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
    options: compiler options; None: those of a build that keeps the order of sums.
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
