"""Ed25519 keys for signing, read from the PEM files that openssl writes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from dflash_aot.cache.errors import BadInput

MAX_KEY_BYTES = 1 << 16


@dataclass(frozen=True)
class PublicKey:
    """A public key, which verifies signatures."""

    key: Ed25519PublicKey

    @property
    def id(self) -> str:
        """sha256 of the DER form (SubjectPublicKeyInfo), in hex."""
        return hashlib.sha256(
            self.key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        ).hexdigest()

    def verifies(self, signature: bytes, message: bytes) -> bool:
        try:
            self.key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class PrivateKey:
    """A private key, which signs."""

    key: Ed25519PrivateKey

    @property
    def public(self) -> PublicKey:
        """The public half."""
        return PublicKey(self.key.public_key())

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)


def read_public_key(path: Path) -> PublicKey:
    """Reads a public key. Raises BadInput for anything else; a private key does not belong where bundles are read."""
    content = _read(path)
    if b"PRIVATE KEY-----" in content:
        raise BadInput(
            f"{path}: a private key, but the public one is needed: openssl pkey -in {path} -pubout -out public.pem"
        )
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadInput(
            f"{path}: not a public key in PEM form. Make it from the private one: openssl pkey -in private.pem -pubout"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise BadInput(f"{path}: a key of another kind, {_name_kind(key)}; {KEY_REMEDY}")
    return PublicKey(key)


def read_private_key(path: Path) -> PrivateKey:
    """Reads a private key. Raises BadInput for anything else, also for an encrypted key."""
    content = _read(path)
    if b"PUBLIC KEY-----" in content:
        raise BadInput(f"{path}: a public key, but signing needs the private one")
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError as error:  # the library's error for a missing password
        raise BadInput(
            f"{path}: the key is encrypted. Decrypt it without writing it to disk: --key <(openssl pkey -in {path})"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{path}: not a private key in PEM form; {KEY_REMEDY}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise BadInput(f"{path}: a key of another kind, {_name_kind(key)}; {KEY_REMEDY}")
    return PrivateKey(key)


KEY_REMEDY = (
    "an Ed25519 key is needed. Make one: openssl genpkey -algorithm ed25519 -out private.pem"
)


def _name_kind(key: object) -> str:
    return type(key).__name__.removesuffix("PublicKey").removesuffix("PrivateKey").lstrip("_")


def _read(path: Path) -> bytes:
    """Reads a file; links and pipes are allowed, because keys are often mounted or piped."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    if len(content) > MAX_KEY_BYTES:
        raise BadInput(f"{path}: more than {MAX_KEY_BYTES} bytes, too large for a key")
    return content
