"""Ed25519 keys, from the PEM files that openssl writes."""

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

MAX_KEY_BYTES = 1 << 16  # bytes of a file that may be a key


@dataclass(frozen=True)
class PublicKey:
    """Says who signed; its `id` is the sha256 of its DER form, SubjectPublicKeyInfo."""

    key: Ed25519PublicKey

    @property
    def id(self) -> str:
        return hashlib.sha256(self.key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()

    def verifies(self, signature: bytes, message: bytes) -> bool:
        try:
            self.key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class PrivateKey:
    """Signs."""

    key: Ed25519PrivateKey

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.key.public_key())

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)


def read_public_key(path: Path) -> PublicKey:
    """Raises BadInput for anything else, a private key included: that one has no business where bundles are read."""
    content = _read(path)
    if b"PRIVATE KEY-----" in content:
        raise BadInput(
            f"{path}: a private key, and the public one is needed: openssl pkey -in {path} -pubout -out public.pem"
        )
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadInput(
            f"{path}: no public key in PEM form. From the private one: openssl pkey -in private.pem -pubout"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise BadInput(f"{path}: a key of another kind, {_name(key)}; {KEY_REMEDY}")
    return PublicKey(key)


def read_private_key(path: Path) -> PrivateKey:
    """Raises BadInput for anything else, an encrypted one included."""
    content = _read(path)
    if b"PUBLIC KEY-----" in content:
        raise BadInput(f"{path}: a public key, and only the private one signs")
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError as error:  # what the library says of a password that is needed
        raise BadInput(
            f"{path}: encrypted. Decrypted on the way, it is never written down: --key <(openssl pkey -in {path})"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{path}: no private key in PEM form; {KEY_REMEDY}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise BadInput(f"{path}: a key of another kind, {_name(key)}; {KEY_REMEDY}")
    return PrivateKey(key)


KEY_REMEDY = "Ed25519 is what signs here. Make one: openssl genpkey -algorithm ed25519 -out private.pem"


def _name(key: object) -> str:
    return type(key).__name__.removesuffix("PublicKey").removesuffix("PrivateKey").lstrip("_")


def _read(path: Path) -> bytes:
    """Links and pipes are fine: a key is mounted or piped in as its owner likes."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    if len(content) > MAX_KEY_BYTES:
        raise BadInput(f"{path}: more than {MAX_KEY_BYTES} bytes, which no key has")
    return content
