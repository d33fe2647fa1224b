"""Cache key of an executable: a hash of everything that the compiler's output depends on.

Not part of the key: paths, host names, the time, weight values.
"""

import hashlib
from collections.abc import Mapping

import msgspec

from dflash_aot.cache.compiler_options import choose_compiler_options
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.signature import Signature


def executable_key(
    program: bytes, signature: Signature, environment: Environment, options: Mapping[str, str] | None = None
) -> str:
    """Returns the sha256, in hex, over the sha256 of each part: program, signature, environment, compiler options.

    program: canonical StableHLO, as `jax.export` writes it.
    signature, environment: as JSON, so that a renamed field would change every key.
    options: of the compiler; None for those that a build would choose.
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
