"""dflash-bundle: inspects, verifies, signs and copies bundles. Only verify runs executables, if asked to.

dflash-bundle inspect BUNDLE                     show the contents, and whether this machine can serve them
dflash-bundle inspect BUNDLE --executable LABEL  show the operations of a TPU executable that take longest
dflash-bundle verify BUNDLE [--key PUBLIC.pem] [--noquarantine]     check every file, and the signature with --key
dflash-bundle verify BUNDLE --deep [--record]    also call every executable, in a subprocess
dflash-bundle verify BUNDLE --execute            also run the executables of a TPU bundle on this machine's CPU
dflash-bundle verify BUNDLE --golden FILE [--target DIR --draft DIR]     also compare generated answers with FILE
dflash-bundle verify BUNDLE --record_golden FILE     also write generated answers to FILE
dflash-bundle diff A B                           show how two bundles differ
dflash-bundle sign BUNDLE --key PRIVATE.pem      sign the manifest, and with it every file
dflash-bundle gc BUNDLE [--dry_run] [--keep_hours H]     remove files that the manifest does not refer to

dflash-bundle push BUNDLE URL                    copy the bundle to an object store or a directory
dflash-bundle fetch URL [--key PUBLIC.pem]       make a verified local copy, as dflash-run --bundle URL does

Every command takes --json. --bundle DIR can replace the first directory.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import flags

from dflash_aot.bin.bundle_changes import (
    VerificationOptions,
    report_fetch,
    report_garbage,
    report_push,
    report_signing,
    report_verification,
)
from dflash_aot.bin.bundle_reports import report_diff, report_inspection
from dflash_aot.bin.command_line import run_with_arguments
from dflash_aot.bin.golden import GoldenOptions
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.files.locations import choose_directory

FLAGS = flags.FlagValues()
_BUNDLE = flags.DEFINE_string(
    "bundle", None, "the bundle's directory, instead of the first argument", flag_values=FLAGS
)
_KEY = flags.DEFINE_string(
    "key",
    None,
    "PEM file of an Ed25519 key: a private key for sign, a public key to verify",
    flag_values=FLAGS,
)
_QUARANTINE = flags.DEFINE_bool(
    "quarantine",
    True,
    "move broken files to quarantine/, so that the next build replaces them",
    flag_values=FLAGS,
)
_DEEP = flags.DEFINE_bool(
    "deep",
    False,
    "also call every executable and compare its outputs with the recorded ones",
    flag_values=FLAGS,
)
_RECORD = flags.DEFINE_bool(
    "record",
    False,
    "like --deep, and record the outputs of executables that have none recorded; this changes the manifest, so sign "
    "the bundle afterwards",
    flag_values=FLAGS,
)
_EXECUTE = flags.DEFINE_bool(
    "execute",
    False,
    "for a TPU bundle: also compile it again, run the compiler's optimized programs on this machine's CPU, and compare "
    "with the same programs built for the CPU; with --target and --draft, --golden or --record_golden also generate "
    "answers with them",
    flag_values=FLAGS,
)
_EMULATED = flags.DEFINE_string(
    "emulated",
    None,
    "with --execute: keep the emulated bundle in this directory; dflash-run and dflash-serve take it",
    flag_values=FLAGS,
)
_GOLDEN = flags.DEFINE_string(
    "golden",
    None,
    "a file that --record_golden wrote elsewhere: also generate answers on this machine, and compare them",
    flag_values=FLAGS,
)
_RECORD_GOLDEN = flags.DEFINE_string(
    "record_golden",
    None,
    "also generate answers on this machine, and write them to this file",
    flag_values=FLAGS,
)
_TARGET = flags.DEFINE_string(
    "target",
    None,
    "with --golden or --record_golden: the target's checkpoint, instead of the bundle's own",
    flag_values=FLAGS,
)
_DRAFT = flags.DEFINE_string(
    "draft", None, "as --target, for the draft's checkpoint", flag_values=FLAGS
)
_EXECUTABLE = flags.DEFINE_string(
    "executable",
    None,
    "with inspect: show the longest operations of this executable, such as 'verify batch=1 length=1024 k=15'",
    flag_values=FLAGS,
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "remove nothing, show what would be removed", flag_values=FLAGS
)
_KEEP_HOURS = flags.DEFINE_float(
    "keep_hours",
    24.0,
    "keep files that changed less than this many hours ago",
    lower_bound=0,
    flag_values=FLAGS,
)
_JSON = flags.DEFINE_bool("json", False, "print the report as JSON", flag_values=FLAGS)
DIRECTORIES = ("", "one bundle", "two bundles")
COMMON_FLAGS = frozenset({"bundle", "json"})


@dataclass(frozen=True)
class SubCommand:
    """What a sub-command takes and what it calls.

    Attributes:
        bundles: number of bundle directories.
        flags: names of its flags, without --bundle and --json.
        run: called with the directories and the URL; returns the exit code.
        url: whether a URL follows the directories.
    """

    bundles: int
    flags: frozenset[str]
    run: Callable[..., int]
    url: bool = False


COMMANDS = {
    "inspect": SubCommand(
        1,
        frozenset({"executable"}),
        lambda bundle: report_inspection(bundle, _JSON.value, _EXECUTABLE.value),
    ),
    "verify": SubCommand(
        1,
        frozenset(
            {
                "key",
                "quarantine",
                "deep",
                "record",
                "execute",
                "emulated",
                "golden",
                "record_golden",
                "target",
                "draft",
            }
        ),
        lambda bundle: report_verification(bundle, _verification(), _JSON.value),
    ),
    "diff": SubCommand(2, frozenset(), lambda a, b: report_diff(a, b, _JSON.value)),
    "sign": SubCommand(
        1, frozenset({"key"}), lambda bundle: report_signing(bundle, _key(), _JSON.value)
    ),
    "gc": SubCommand(
        1,
        frozenset({"dry_run", "keep_hours"}),
        lambda bundle: report_garbage(bundle, _KEEP_HOURS.value, _DRY_RUN.value, _JSON.value),
    ),
    "push": SubCommand(
        1, frozenset(), lambda bundle, url: report_push(bundle, url, _JSON.value), url=True
    ),
    "fetch": SubCommand(
        0, frozenset({"key"}), lambda url: report_fetch(url, _key(), _JSON.value), url=True
    ),
}


def main() -> None:
    """The console script `dflash-bundle`."""
    sys.exit(run_with_arguments("dflash-bundle", __doc__, FLAGS, run))


def run(arguments: Sequence[str]) -> int:
    """Runs the sub-command named first and returns its exit code. Raises BadInput for arguments it does not take."""
    name = arguments[0] if arguments else ""
    command = COMMANDS.get(name)
    if command is None:
        given = f"{name}: no such command" if name else "no command given"
        raise BadInput(f"{given}; the commands are {', '.join(COMMANDS)}, see --help")
    for flag in FLAGS:
        if FLAGS[flag].present and flag not in COMMON_FLAGS | command.flags:
            raise BadInput(f"--{flag}: {name} has no such flag, see --help")
    positional = [*([] if _BUNDLE.value is None else [_BUNDLE.value]), *arguments[1:]]
    if len(positional) != command.bundles + command.url:
        wanted = " and ".join(
            filter(None, (DIRECTORIES[command.bundles], "a URL" if command.url else ""))
        )
        raise BadInput(f"{name} takes {wanted}; given: {' '.join(positional) or 'none'}")
    bundles = positional[: command.bundles]
    urls = positional[command.bundles :]
    remedy = "Fetch the bundle first: dflash-bundle fetch URL prints the directory of the copy"
    return command.run(*(choose_directory(bundle, remedy) for bundle in bundles), *urls)


def _key() -> Path | None:
    return None if _KEY.value is None else Path(_KEY.value)


def _verification() -> VerificationOptions:
    """The flags of verify. Raises BadInput for flags without the check that they belong to."""
    golden, record = (
        Path(flag.value) if flag.value else None for flag in (_GOLDEN, _RECORD_GOLDEN)
    )
    if (_TARGET.value or _DRAFT.value) and not (golden or record or _EXECUTE.value):
        raise BadInput(
            "--target and --draft: verify reads checkpoints only with --golden, --record_golden or --execute"
        )
    if _EMULATED.value and not _EXECUTE.value:
        raise BadInput("--emulated: verify emulates executables only with --execute")
    if _EXECUTE.value and _RECORD.value:
        raise BadInput(
            "--record: results are recorded on the TPU; emulated executables round otherwise"
        )
    return VerificationOptions(
        key=_key(),
        quarantine=_QUARANTINE.value,
        deep=_DEEP.value or _RECORD.value,
        record=_RECORD.value,
        execute=_EXECUTE.value,
        emulated=Path(_EMULATED.value) if _EMULATED.value else None,
        golden=GoldenOptions(golden, record, _TARGET.value, _DRAFT.value),
    )


if __name__ == "__main__":
    main()
