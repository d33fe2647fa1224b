"""Ed25519 keys: reading, signing, and refusals."""

import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from dflash_aot.cache.bundle.ed25519 import MAX_KEY_BYTES, read_private_key, read_public_key
from dflash_aot.cache.errors import BadInput


def refusal(read, path) -> str:
    with pytest.raises(BadInput) as refused:
        read(path)
    assert refused.value.exit_code == 2
    return str(refused.value)


def write(path, key):
    private, public = path / "private.pem", path / "public.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_public_key_verifies_signatures_of_the_private_key(make_key):
    private, public = (
        read(path) for read, path in zip((read_private_key, read_public_key), make_key("a"), strict=True)
    )
    signature = private.sign(b"text")
    assert public.verifies(signature, b"text")
    assert not public.verifies(signature, b"another text")
    assert not public.verifies(signature[:-1], b"text")
    assert private.public.id == public.id
    _, path = make_key("a")  # the id is the sha256 of the DER form
    der = load_pem_public_key(path.read_bytes()).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert read_public_key(path).id == hashlib.sha256(der).hexdigest()


def test_wrong_half_and_encrypted_key_are_refused(make_key):
    private, public = make_key("a")
    assert f"openssl pkey -in {private} -pubout" in refusal(read_public_key, private)
    assert "signing needs the private one" in refusal(read_private_key, public)
    key = load_pem_private_key(private.read_bytes(), None)
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    assert "encrypted" in refusal(read_private_key, private)


def test_other_kinds_of_keys_are_named(tmp_path):
    other_kinds = {"RSA": rsa.generate_private_key(65537, 2048), "EC": ec.generate_private_key(ec.SECP256R1())}
    for kind, key in other_kinds.items():
        private, public = write(tmp_path, key)
        assert f"another kind, {kind};" in refusal(read_public_key, public)
        assert f"another kind, {kind};" in refusal(read_private_key, private)


def test_invalid_key_is_refused(tmp_path):
    for content in [
        b"",
        b"ssh-ed25519 AAAA",
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        b"\xff\x00",
    ]:
        path = tmp_path / "key.pem"
        path.write_bytes(content)
        assert "not a public key in PEM form" in refusal(read_public_key, path)
        if b"PUBLIC" not in content:
            assert "not a private key in PEM form" in refusal(read_private_key, path)


def test_missing_or_oversized_file_is_refused(tmp_path):
    for read in [read_public_key, read_private_key]:
        assert "No such file" in refusal(read, tmp_path / "nowhere.pem")
        assert "directory" in refusal(read, tmp_path)
        (tmp_path / "huge.pem").write_bytes(bytes(MAX_KEY_BYTES + 1))
        assert f"more than {MAX_KEY_BYTES} bytes" in refusal(read, tmp_path / "huge.pem")
