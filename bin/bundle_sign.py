"""`dflash-bundle sign`: vouches for a bundle with an Ed25519 key."""

import json
import shlex
from pathlib import Path

from dflash_aot.cache.bundle.manifest import parse_manifest, read_content
from dflash_aot.cache.bundle.manifest_checks import check_consistent
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import find_flaws
from dflash_aot.cache.errors import BadInput, CorruptBundle
from dflash_aot.cache.signing import signatures


def report_signing(bundle: Path, key: Path | None, as_json: bool) -> int:
    """On standard output."""
    if key is None:
        raise BadInput(
            "sign: --key PRIVATE.pem is needed. Make one: openssl genpkey -algorithm ed25519 -out private.pem"
        )
    signer, signers = sign_bundle(bundle, key)
    path = bundle / signatures.FILE
    if as_json:
        print(json.dumps({"bundle": str(bundle), "file": str(path), "key": signer, "signers": signers}))
    else:
        print(f"signed by {signer}: {path}, {len(signers)} signature{'s' * (len(signers) > 1)}")
    return 0


def sign_bundle(bundle: Path, key: Path) -> tuple[str, list[str]]:
    """What every file shows to be whole, and nothing else, is signed. The key's id, and those of all signers.

    Raises MissingBundle, CorruptBundle, BadInput, BuildFailed where a builder is at work.
    """
    # Only signing needs it, and the other commands start without it.
    from dflash_aot.cache.signing.ed25519 import read_private_key  # noqa: PLC0415

    signer = read_private_key(key)
    read_content(bundle)  # what is no bundle is not locked
    with Store(bundle).hold_lock():
        content = read_content(bundle)
        manifest = parse_manifest(bundle, content)
        check_consistent(bundle, manifest)
        if flaws := find_flaws(bundle, manifest):
            raise CorruptBundle(
                f"{bundle}: {len(flaws)} files are not what the manifest promises, {flaws[0].path} for one: nothing is "
                f"signed. dflash-bundle verify {shlex.quote(str(bundle))} lists them"
            )
        envelope = signatures.sign(bundle, content, signer)
    return signer.public.id, [one.keyid for one in envelope.signatures]
