"""Cache key of an executable: a hash of everything that the compiler's output depends on, compiler options included.

Not part of the key: paths, host names, the time, weight values.
"""

import hashlib
from collections.abc import Mapping

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


def choose_compiler_options(environment: Environment, program: ProgramName) -> CompilerOptions:
    """The options with which a program is compiled for the devices of an environment."""
    kind = environment.device_kind
    added = MODEL_OPTIONS if PROGRAMS[program][0].runs_model else OTHER_OPTIONS
    return {**DEVICE_OPTIONS.get(kind, {}), **added.get(kind, {})}


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
