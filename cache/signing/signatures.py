"""Who stands behind a bundle: `manifest.sig.json`, signatures over the sha256 of `manifest.json`.

A DSSE envelope (github.com/secure-systems-lab/dsse) around an in-toto statement (in-toto.io/Statement/v1), so that
other tools read it too. The manifest holds the sha256 of every other file: with it, the whole bundle is signed.
"""

import hashlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dflash_aot.cache.bundle.atomic_files import read_plain, write_atomically
from dflash_aot.cache.errors import CorruptBundle

if TYPE_CHECKING:
    from dflash_aot.cache.signing.ed25519 import PrivateKey, PublicKey

SIGNATURE_FILE = "manifest.sig.json"
SIGNED_FILE = "manifest.json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:dflash-aot:bundle:v1"  # what else the key signs says nothing of a bundle
MAX_SIGNATURE_BYTES = 1 << 16
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class KeySignature(msgspec.Struct, frozen=True):
    """One signer's; `keyid` says which key to try."""

    sig: bytes
    keyid: str = ""


class Envelope(msgspec.Struct, frozen=True, rename="camel"):
    """Bytes, what they are, and signatures over both. Unknown fields are ignored, as the standard asks."""

    payload: bytes
    payload_type: str
    signatures: tuple[KeySignature, ...]

    @property
    def encoding(self) -> bytes:
        """What is signed: the standard's PAE."""
        kind = self.payload_type.encode()
        return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(self.payload), self.payload)


class Subject(msgspec.Struct, frozen=True):
    """A file and its digests by algorithm."""

    name: str
    digest: dict[str, str]


class Statement(msgspec.Struct, frozen=True, rename={"type": "_type", "predicate_type": "predicateType"}):
    """What is said of which files."""

    type: str
    subject: tuple[Subject, ...]
    predicate_type: str


def sign_manifest(bundle: Path, manifest: bytes, key: "PrivateKey") -> Envelope:
    """Adds a signature over these bytes of the manifest, or replaces all where they are not over these bytes."""
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
    write_atomically(bundle / SIGNATURE_FILE, msgspec.json.format(msgspec.json.encode(signed), indent=1) + b"\n")
    return signed


def check_signature(bundle: Path, manifest: bytes, public_key: Path) -> "PublicKey":
    """Whether the key's owner signed these bytes of the manifest; one signature of several is enough.

    Raises BadInput for a key that is none, CorruptBundle for everything else.
    """
    return check_envelope(
        read_signature_file(bundle), manifest, public_key, str(bundle / SIGNATURE_FILE), _sign_command(bundle)
    )


def check_envelope(content: bytes | None, manifest: bytes, public_key: Path, where: str, remedy: str) -> "PublicKey":
    """The same for signatures that lay elsewhere; None where there were none."""
    # Only those who ask for signatures wait for the library.
    from dflash_aot.cache.signing.ed25519 import read_public_key  # noqa: PLC0415

    key = read_public_key(public_key)
    if content is None:
        raise CorruptBundle(f"{where} does not exist: the bundle is not signed. {remedy}")
    envelope = _decode(content, where, remedy)
    if envelope.payload_type != PAYLOAD_TYPE:
        raise CorruptBundle(f"{where}: payloadType is {envelope.payload_type!r}, a bundle's is {PAYLOAD_TYPE!r}")
    mine = [one for one in envelope.signatures if one.keyid in ("", key.id)]
    if not mine:
        signers = ", ".join(one.keyid for one in envelope.signatures) or "nobody"
        raise CorruptBundle(f"{where}: signed by {signers}, not by {key.id}, the key of {public_key}")
    if not any(key.verifies(one.sig, envelope.encoding) for one in mine):
        raise CorruptBundle(
            f"{where}: its signature does not verify with {key.id}, the key of {public_key}: envelope or signature "
            f"is not what was signed. {remedy}"
        )
    _check_statement(envelope, manifest, where, remedy)
    return key


class Signers(msgspec.Struct, frozen=True):
    """Who says that they signed, by key, nothing verified; `current`: these bytes of the manifest, not older ones."""

    keys: tuple[str, ...]
    current: bool


def list_signers(bundle: Path, manifest: bytes) -> Signers | None:
    """None where there is no signature. Raises CorruptBundle for one that cannot be read."""
    if (envelope := read_envelope(bundle)) is None:
        return None
    return Signers(tuple(one.keyid for one in envelope.signatures), covers_manifest(envelope, manifest))


def covers_manifest(envelope: Envelope, manifest: bytes) -> bool:
    """Whether it speaks of these bytes of the manifest; who says so is not asked."""
    try:
        return _digests(envelope) == {hashlib.sha256(manifest).hexdigest()}
    except MALFORMED:
        return False


def remove_outdated(bundle: Path, manifest: bytes) -> None:
    """For whoever has published these bytes: signatures over others would only be refused."""
    try:
        envelope = read_envelope(bundle)
    except CorruptBundle:
        envelope = None
    if envelope is None or not covers_manifest(envelope, manifest):
        (bundle / SIGNATURE_FILE).unlink(missing_ok=True)


def read_envelope(bundle: Path) -> Envelope | None:
    """As it lies there, nothing verified; None where there is none. Raises CorruptBundle."""
    content = read_signature_file(bundle)
    return None if content is None else _decode(content, str(bundle / SIGNATURE_FILE), _sign_command(bundle))


def read_signature_file(bundle: Path) -> bytes | None:
    """The file of an envelope, which may be none; None where there is no file. Raises CorruptBundle."""
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
        raise CorruptBundle(f"{where}: the signature verifies, but what was signed is no statement: {error}") from error
    if not signed:
        raise CorruptBundle(
            f"{where}: the signature verifies, but what was signed is not about a bundle's {SIGNED_FILE}"
        )
    if signed != {found}:
        raise CorruptBundle(
            f"{where}: the signature verifies, for a {SIGNED_FILE} whose sha256 is {', '.join(sorted(signed))}; the "
            f"one here has {found}: it was rebuilt or changed after it was signed. {remedy}"
        )


def _digests(envelope: Envelope) -> set[str]:
    """The sha256 of the manifest that is spoken of; none where the statement is about something else."""
    statement = msgspec.json.decode(envelope.payload, type=Statement)
    if (statement.type, statement.predicate_type) != (STATEMENT_TYPE, PREDICATE_TYPE):
        return set()
    return {subject.digest.get("sha256", "") for subject in statement.subject if subject.name == SIGNED_FILE}


def _sign_command(bundle: Path) -> str:
    command = shlex.join(["dflash-bundle", "sign", str(bundle), "--key"])
    return f"Whoever vouches for it: {command} PRIVATE.pem"
