"""`dflash-bundle verify`: every file of a bundle against its manifest, all findings at once; nothing is loaded."""

from pathlib import Path

import msgspec

from dflash_aot.bin.bundle_calls import Calls, call_executables, format_calls
from dflash_aot.bin.bundle_signature import describe_signers
from dflash_aot.bin.command_line import format_bytes
from dflash_aot.cache.bundle.manifest import Manifest, mend_command, parse_manifest, read_content
from dflash_aot.cache.bundle.manifest_checks import check_consistent
from dflash_aot.cache.bundle.verification import (
    Flaw,
    Stray,
    find_flaws,
    find_strays,
    list_promises,
    set_flaws_aside,
)
from dflash_aot.cache.errors import CorruptBundle
from dflash_aot.cache.signing.signatures import Signers, check_signature, list_signers


class Verification(msgspec.Struct, frozen=True):
    """The report. `verified_key` is None where no key was given; `set_aside` says where broken files are now.

    `not_set_aside` says why some were left where they lie, if any were.
    """

    bundle: str
    files: int
    bytes: int
    flaws: tuple[Flaw, ...]
    strays: tuple[Stray, ...]
    signers: Signers | None
    verified_key: str | None
    set_aside: dict[str, str]
    not_set_aside: str | None
    mend: str
    calls: Calls | None = None


def report_verification(
    bundle: Path, key: Path | None, move: bool, as_json: bool, deep: bool = False, record: bool = False
) -> int:
    """On standard output; 0 if all is as promised, else the code of a corrupt bundle."""
    verification = verify_bundle(bundle, key, move, deep, record)
    print(msgspec.json.encode(verification, enc_hook=str).decode() if as_json else format_verification(verification))
    broken = verification.flaws or (verification.calls and verification.calls.faults)
    return CorruptBundle.exit_code if broken else 0


def verify_bundle(bundle: Path, key: Path | None, move: bool, deep: bool = False, record: bool = False) -> Verification:
    """The signature first, if there is a key: what does not pass is not even parsed. `move`: sets aside what is broken.

    `deep`: executables are called where their files are sound; `record`: what they compute is kept where nothing was.
    Raises MissingBundle, CorruptBundle, BadInput, and what `call_executables` does.
    """
    content = read_content(bundle)
    signer = check_signature(bundle, content, key) if key is not None else None
    manifest = parse_manifest(bundle, content)
    check_consistent(bundle, manifest)
    promises, flaws = list_promises(bundle, manifest), find_flaws(bundle, manifest)
    moved, left = set_flaws_aside(bundle, manifest, flaws) if move else ({}, None)
    return Verification(
        bundle=str(bundle),
        files=len(promises),
        bytes=sum(promise.blob.bytes for promise in promises),
        flaws=tuple(flaws),
        strays=tuple(find_strays(bundle, manifest)),
        signers=list_signers(bundle, content),
        verified_key=signer.id if signer else None,
        set_aside={str(path): str(place) for path, place in moved.items()},
        not_set_aside=left,
        mend=_choose_command(bundle, manifest, flaws),
        calls=call_executables(bundle, manifest, move, record) if deep and not flaws else None,
    )


def _choose_command(bundle: Path, manifest: Manifest, flaws: list[Flaw]) -> str:
    """Without a program nothing can be compiled but from the checkpoints."""
    programs = {promise.path for promise in list_promises(bundle, manifest) if not promise.pickled}
    lost = any(flaw.path in programs for flaw in flaws)
    return manifest.rebuild_command(bundle) if lost else mend_command(bundle)


def format_verification(one: Verification) -> str:
    """For people."""
    lines = [
        f"{flaw.path} ({flaw.label}): {flaw.field} is {flaw.found}, the manifest promises {flaw.promised}"
        + (f"; now {one.set_aside[str(flaw.path)]}" if str(flaw.path) in one.set_aside else "")
        for flaw in one.flaws
    ]
    lines += [f"{stray.path}: {stray.what}, {format_bytes(stray.bytes)}; nothing reads it" for stray in one.strays]
    if one.not_set_aside:
        lines.append(f"nothing more is set aside: {one.not_set_aside}")
    signed = f"by {one.verified_key}, verified" if one.verified_key else describe_signers(one.signers)
    lines.append(f"signed: {signed}")
    if one.flaws:
        broken = f"{len(one.flaws)} of {one.files} files are not what the manifest promises"
        return "\n".join([*lines, f"{broken}. Mend it: {one.mend}"])
    lines.append(f"{one.files} files, {format_bytes(one.bytes)}: as the manifest promises")
    if one.calls:
        lines.append(format_calls(one.calls))
    return "\n".join(lines)
