"""Signing of bundles: `manifest.sig.json` holds signatures over the sha256 of `manifest.json`.

The file is a DSSE envelope (github.com/secure-systems-lab/dsse) around an in-toto statement (in-toto.io/Statement/v1),
which other tools read too. The manifest holds the sha256 of every other file, so that signing it signs the bundle.
"""

import hashlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dflash_aot.cache.errors import MALFORMED, CorruptBundle
from dflash_aot.cache.files.atomic_files import read_plain, write_atomically

if TYPE_CHECKING:
    from dflash_aot.cache.bundle.ed25519 import PrivateKey, PublicKey

SIGNATURE_FILE = "manifest.sig.json"
SIGNED_FILE = "manifest.json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:dflash-aot:bundle:v1"  # the key may sign statements of other types too
MAX_SIGNATURE_BYTES = 1 << 16


class KeySignature(msgspec.Struct, frozen=True):
    """A signature.

    Attributes:
        sig: the signature itself.
        keyid: id of the signer's key, "" if not given.
    """

    sig: bytes
    keyid: str = ""


class Envelope(msgspec.Struct, frozen=True, rename="camel"):
    """A DSSE envelope. Unknown fields are ignored, as the standard requires.

    Attributes:
        payload: the signed bytes.
        payload_type: their media type.
        signatures: over payload and type.
    """

    payload: bytes
    payload_type: str
    signatures: tuple[KeySignature, ...]

    @property
    def encoding(self) -> bytes:
        """The bytes that are signed: the pre-authentication encoding (PAE) of payload and type."""
        kind = self.payload_type.encode()
        return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(self.payload), self.payload)


class Subject(msgspec.Struct, frozen=True):
    """A file of a statement: its `name`, and its `digest` by algorithm."""

    name: str
    digest: dict[str, str]


class Statement(
    msgspec.Struct, frozen=True, rename={"type": "_type", "predicate_type": "predicateType"}
):
    """An in-toto statement.

    Attributes:
        type: version of the statement format.
        subject: the files.
        predicate_type: the meaning of the statement.
    """

    type: str
    subject: tuple[Subject, ...]
    predicate_type: str


def sign_manifest(bundle: Path, manifest: bytes, key: "PrivateKey") -> Envelope:
    """Adds a signature over these bytes of the manifest, and removes signatures over other bytes."""
    payload = msgspec.json.encode(_make_statement(manifest))
    envelope = Envelope(payload, PAYLOAD_TYPE, ())
    try:
        found = read_envelope(bundle)
    except CorruptBundle:
        found = None
    others = found.signatures if found and found.encoding == envelope.encoding else ()
    mine = KeySignature(key.sign(envelope.encoding), key.public.id)
    kept = (one for one in others if one.keyid != mine.keyid)
    signed = msgspec.structs.replace(envelope, signatures=(*kept, mine))
    write_atomically(
        bundle / SIGNATURE_FILE, msgspec.json.format(msgspec.json.encode(signed), indent=1) + b"\n"
    )
    return signed


def check_signature(bundle: Path, manifest: bytes, public_key: Path) -> "PublicKey":
    """Checks that the owner of the key signed these bytes of the manifest; returns the key.

    One valid signature of several is enough. Raises BadInput for an invalid key, CorruptBundle for everything else.
    """
    return check_envelope(
        read_signature_file(bundle),
        manifest,
        public_key,
        str(bundle / SIGNATURE_FILE),
        _sign_command(bundle),
    )


def check_envelope(
    content: bytes | None, manifest: bytes, public_key: Path, where: str, remedy: str
) -> "PublicKey":
    """As `check_signature`, for the content of a signature file; None if there is no such file."""
    # The cryptography library takes 0.2 s: imported only to check signatures.
    from dflash_aot.cache.bundle.ed25519 import read_public_key  # noqa: PLC0415

    key = read_public_key(public_key)
    if content is None:
        raise CorruptBundle(f"{where} does not exist: the bundle is not signed. {remedy}")
    envelope = _decode(content, where, remedy)
    if envelope.payload_type != PAYLOAD_TYPE:
        raise CorruptBundle(
            f"{where}: payloadType is {envelope.payload_type!r}, a bundle's is {PAYLOAD_TYPE!r}"
        )
    mine = [one for one in envelope.signatures if one.keyid in ("", key.id)]
    if not mine:
        signers = ", ".join(one.keyid for one in envelope.signatures) or "no key"
        raise CorruptBundle(
            f"{where}: signed by {signers}, not by {key.id}, the key of {public_key}"
        )
    if not any(key.verifies(one.sig, envelope.encoding) for one in mine):
        raise CorruptBundle(
            f"{where}: the signature does not verify with {key.id}, the key of {public_key}: envelope or signature "
            f"changed after signing. {remedy}"
        )
    _check_statement(envelope, manifest, where, remedy)
    return key


class Signers(msgspec.Struct, frozen=True):
    """The signers that a signature file names; nothing is verified.

    Attributes:
        keys: ids of their keys.
        current: whether they signed these bytes of the manifest, not older ones.
    """

    keys: tuple[str, ...]
    current: bool


def list_signers(bundle: Path, manifest: bytes) -> Signers | None:
    """Returns the signers of a bundle without verifying, None if there are none. Raises CorruptBundle."""
    if (envelope := read_envelope(bundle)) is None:
        return None
    return Signers(
        tuple(one.keyid for one in envelope.signatures), covers_manifest(envelope, manifest)
    )


def covers_manifest(envelope: Envelope, manifest: bytes) -> bool:
    """Whether a statement is about these bytes of the manifest; verifies no signature."""
    try:
        return _digests(envelope) == {hashlib.sha256(manifest).hexdigest()}
    except MALFORMED:
        return False


def remove_outdated(bundle: Path, manifest: bytes) -> None:
    """Removes the signature file if it is not about these bytes of the manifest, because every check would fail."""
    try:
        envelope = read_envelope(bundle)
    except CorruptBundle:
        envelope = None
    if envelope is None or not covers_manifest(envelope, manifest):
        (bundle / SIGNATURE_FILE).unlink(missing_ok=True)


def read_envelope(bundle: Path) -> Envelope | None:
    """Returns the envelope of a bundle without verifying, None if there is none. Raises CorruptBundle."""
    content = read_signature_file(bundle)
    return (
        None
        if content is None
        else _decode(content, str(bundle / SIGNATURE_FILE), _sign_command(bundle))
    )


def read_signature_file(bundle: Path) -> bytes | None:
    """Returns the content of the signature file, None if there is no file. Raises CorruptBundle."""
    path = bundle / SIGNATURE_FILE
    try:
        return read_plain(path, MAX_SIGNATURE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptBundle(f"{path}: {error.strerror}. {_sign_command(bundle)}") from error


def _decode(content: bytes, where: str, remedy: str) -> Envelope:
    try:
        return msgspec.json.decode(content, type=Envelope)
    except MALFORMED as error:
        raise CorruptBundle(f"{where}: {error}. {remedy}") from error


def _make_statement(manifest: bytes) -> Statement:
    subject = Subject(SIGNED_FILE, {"sha256": hashlib.sha256(manifest).hexdigest()})
    return Statement(STATEMENT_TYPE, (subject,), PREDICATE_TYPE)


def _check_statement(envelope: Envelope, manifest: bytes, where: str, remedy: str) -> None:
    found = hashlib.sha256(manifest).hexdigest()
    try:
        signed = _digests(envelope)
    except MALFORMED as error:
        raise CorruptBundle(
            f"{where}: the signature verifies, but its payload is not a statement: {error}"
        ) from error
    if not signed:
        raise CorruptBundle(
            f"{where}: the signature verifies, but its statement is not about a bundle's {SIGNED_FILE}"
        )
    if signed != {found}:
        raise CorruptBundle(
            f"{where}: the signature verifies for a {SIGNED_FILE} whose sha256 is {', '.join(sorted(signed))}; the "
            f"one here has {found}: it was rebuilt or changed after it was signed. {remedy}"
        )


def _digests(envelope: Envelope) -> set[str]:
    """Returns the sha256 of the manifest in the statement, an empty set if the statement is about something else."""
    statement = msgspec.json.decode(envelope.payload, type=Statement)
    if (statement.type, statement.predicate_type) != (STATEMENT_TYPE, PREDICATE_TYPE):
        return set()
    return {
        subject.digest.get("sha256", "")
        for subject in statement.subject
        if subject.name == SIGNED_FILE
    }


def _sign_command(bundle: Path) -> str:
    command = shlex.join(["dflash-bundle", "sign", str(bundle), "--key"])
    return f"Sign it: {command} PRIVATE.pem"
