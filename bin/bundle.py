"""dflash-bundle: looks after a bundle, without JAX and, but for verify --deep, without running anything of it.

dflash-bundle inspect BUNDLE                     what it holds, and whether this machine can serve it
dflash-bundle verify BUNDLE [--key PUBLIC.pem] [--noset_aside]     every file against the manifest, and who signed it
dflash-bundle verify BUNDLE --deep [--record]    also calls every executable, in a process of its own
dflash-bundle diff A B                           why one is not the other
dflash-bundle sign BUNDLE --key PRIVATE.pem      vouches for it
dflash-bundle gc BUNDLE [--dry_run] [--keep_hours H]     removes what it has no use for any more

dflash-bundle push BUNDLE URL                    to where others fetch it from; a directory will do, too
dflash-bundle fetch URL [--key PUBLIC.pem]       a verified copy, as dflash-run --bundle URL makes it; says where it is

All with --json. --bundle DIR may stand for the first directory.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import flags

from dflash_aot.bin.bundle_diff import report_diff
from dflash_aot.bin.bundle_gc import report_garbage
from dflash_aot.bin.bundle_inspect import report_inspection
from dflash_aot.bin.bundle_sign import report_signing
from dflash_aot.bin.bundle_transfer import report_fetch, report_push
from dflash_aot.bin.bundle_verify import report_verification
from dflash_aot.bin.command_line import choose_directory, run_with_arguments
from dflash_aot.cache.errors import BadInput

FLAGS = flags.FlagValues()
_BUNDLE = flags.DEFINE_string("bundle", None, "the bundle, as --bundle of the other commands", flag_values=FLAGS)
_KEY = flags.DEFINE_string(
    "key", None, "an Ed25519 key, PEM: the private one signs, the public one verifies", flag_values=FLAGS
)
_SET_ASIDE = flags.DEFINE_bool(
    "set_aside", True, "moves what is broken to set-aside/, so that the next build replaces it", flag_values=FLAGS
)
_DEEP = flags.DEFINE_bool(
    "deep", False, "also call every executable, and compare what it computes with what is kept", flag_values=FLAGS
)
_RECORD = flags.DEFINE_bool(
    "record",
    False,
    "with --deep: keep what executables compute that nothing is known of; the manifest changes, so sign it after that",
    flag_values=FLAGS,
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "removes nothing, says what would be removed", flag_values=FLAGS)
_KEEP_HOURS = flags.DEFINE_float(
    "keep_hours", 24.0, "what changed later than so long ago stays", lower_bound=0, flag_values=FLAGS
)
_JSON = flags.DEFINE_bool("json", False, "the report as JSON", flag_values=FLAGS)
BUNDLES = ("", "one bundle", "two bundles")
COMMON_FLAGS = frozenset({"bundle", "json"})


@dataclass(frozen=True)
class Command:
    """One of the sub-commands: how many bundles it takes, and a URL or not; which flags besides --bundle and --json."""

    bundles: int
    flags: frozenset[str]
    run: Callable[..., int]
    url: bool = False


COMMANDS = {
    "inspect": Command(1, frozenset(), lambda bundle: report_inspection(bundle, _JSON.value)),
    "verify": Command(
        1,
        frozenset({"key", "set_aside", "deep", "record"}),
        lambda bundle: report_verification(
            bundle, _key(), _SET_ASIDE.value, _JSON.value, _DEEP.value or _RECORD.value, _RECORD.value
        ),
    ),
    "diff": Command(2, frozenset(), lambda a, b: report_diff(a, b, _JSON.value)),
    "sign": Command(1, frozenset({"key"}), lambda bundle: report_signing(bundle, _key(), _JSON.value)),
    "gc": Command(
        1,
        frozenset({"dry_run", "keep_hours"}),
        lambda bundle: report_garbage(bundle, _KEEP_HOURS.value, _DRY_RUN.value, _JSON.value),
    ),
    "push": Command(1, frozenset(), lambda bundle, url: report_push(bundle, url, _JSON.value), url=True),
    "fetch": Command(0, frozenset({"key"}), lambda url: report_fetch(url, _key(), _JSON.value), url=True),
}


def main() -> None:
    """The console script."""
    sys.exit(run_with_arguments("dflash-bundle", __doc__, FLAGS, run))


def run(arguments: Sequence[str]) -> int:
    """The sub-command that comes first. Raises BadInput for what it does not take."""
    name = arguments[0] if arguments else ""
    command = COMMANDS.get(name)
    if command is None:
        raise BadInput(f"{name or 'nothing'}: no such command; there are {', '.join(COMMANDS)}, see --help")
    for flag in FLAGS:
        if FLAGS[flag].present and flag not in COMMON_FLAGS | command.flags:
            raise BadInput(f"--{flag}: {name} has no such flag, see --help")
    given = [] if _BUNDLE.value is None else [_BUNDLE.value]
    places = [*given, *arguments[1:]]
    if len(places) != command.bundles + command.url:
        wanted = " and ".join(filter(None, (BUNDLES[command.bundles], "a URL" if command.url else "")))
        raise BadInput(f"{name} takes {wanted}; given: {' '.join(places) or 'none'}")
    bundles, urls = places[: command.bundles], places[command.bundles :]
    remedy = "Fetch the bundle: dflash-bundle fetch URL says where its copy is"
    return command.run(*(choose_directory(bundle, remedy) for bundle in bundles), *urls)


def _key() -> Path | None:
    return None if _KEY.value is None else Path(_KEY.value)


if __name__ == "__main__":
    main()
