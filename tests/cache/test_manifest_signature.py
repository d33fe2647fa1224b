"""Signing of manifests: verification, refusals, several signers, and the format of other tools."""

import base64
import hashlib
import json

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from msgspec import structs
from securesystemslib.dsse import Envelope as OtherEnvelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from dflash_aot.cache.bundle.ed25519 import read_private_key, read_public_key
from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest
from dflash_aot.cache.bundle.manifest_signature import (
    MAX_SIGNATURE_BYTES,
    PAYLOAD_TYPE,
    PREDICATE_TYPE,
    SIGNATURE_FILE,
    STATEMENT_TYPE,
    check_signature,
    sign_manifest,
)
from dflash_aot.cache.errors import CorruptBundle

MANIFEST = b'{"a": "manifest"}'
OTHER = b'{"a": "manifest" }'


@pytest.fixture
def keys(make_key):
    return make_key("ours")


@pytest.fixture
def signed(tmp_path, keys):
    sign_manifest(tmp_path, MANIFEST, read_private_key(keys[0]))
    return tmp_path


def refusal(bundle, public, manifest=MANIFEST) -> str:
    with pytest.raises(CorruptBundle) as refused:
        check_signature(bundle, manifest, public)
    assert refused.value.exit_code == 3
    assert str(bundle / SIGNATURE_FILE) in str(refused.value)
    return str(refused.value)


def read(bundle) -> dict:
    return json.loads((bundle / SIGNATURE_FILE).read_bytes())


def write(bundle, envelope) -> None:
    (bundle / SIGNATURE_FILE).write_text(json.dumps(envelope))


def sign_statement(bundle, private, statement, kind=PAYLOAD_TYPE) -> None:
    payload = statement if isinstance(statement, bytes) else json.dumps(statement).encode()
    envelope = OtherEnvelope(payload, kind, {})
    key = load_pem_private_key(private.read_bytes(), None)
    public = SSlibKey.from_crypto(key.public_key(), keyid=read_private_key(private).public.id)
    envelope.sign(CryptoSigner(key, public))
    write(bundle, envelope.to_dict())


def statement(**changes) -> dict:
    subject = [{"name": "manifest.json", "digest": {"sha256": hashlib.sha256(MANIFEST).hexdigest()}}]
    return {"_type": STATEMENT_TYPE, "subject": subject, "predicateType": PREDICATE_TYPE, **changes}


@pytest.mark.parametrize("before", [None, b"not JSON", b"{}"])
def test_signing_replaces_signatures_of_other_manifests(signed, make_key, before):
    private, public = make_key("theirs")
    if before is not None:
        (signed / SIGNATURE_FILE).write_bytes(before)
    sign_manifest(signed, OTHER, read_private_key(private))
    check_signature(signed, OTHER, public)
    assert len(read(signed)["signatures"]) == 1


@pytest.mark.parametrize("field", ["payloadType", "signatures.0.sig", "signatures.0.keyid"])
def test_changed_envelope_is_refused(signed, keys, field):
    envelope = read(signed)
    *way, last = field.split(".")
    place = envelope
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[last] = {"A": "B"}.get(place[last][0], "A") + place[last][1:]
    write(signed, envelope)
    refusal(signed, keys[1])


def test_changed_payload_bit_is_refused(signed, keys):
    envelope = read(signed)
    payload = base64.b64decode(envelope["payload"])
    for place in range(len(payload)):
        changed = bytearray(payload)
        changed[place] ^= 1
        write(signed, {**envelope, "payload": base64.b64encode(changed).decode()})
        assert "does not verify" in refusal(signed, keys[1])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `payload`"),
        (b"\xff\xfe", ""),
        (b"[" * 50_000, ""),
        (b'{"payload": "%", "payloadType": "", "signatures": []}', "base64"),
        (b'{"payload": "", "payloadType": "", "signatures": [{"sig": 1}]}', "Expected `bytes`"),
        (b" " * (MAX_SIGNATURE_BYTES + 1), f"at most {MAX_SIGNATURE_BYTES} are read"),
    ],
)
def test_invalid_envelope_is_refused(tmp_path, keys, content, words):
    (tmp_path / SIGNATURE_FILE).write_bytes(content)
    assert words in refusal(tmp_path, keys[1])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (statement(_type="https://in-toto.io/Statement/v0.1"), "not about a bundle's manifest.json"),
        (statement(predicateType="https://slsa.dev/provenance/v1"), "not about a bundle's manifest.json"),
        (statement(subject=[{"name": "other.json", "digest": {}}]), "not about a bundle's manifest.json"),
        (statement(subject=[{"name": "manifest.json", "digest": {"sha512": "00"}}]), "was rebuilt"),
        (
            statement(subject=[*statement()["subject"], {"name": "manifest.json", "digest": {"sha256": "00"}}]),
            "rebuilt",
        ),
        (b"not JSON", "not a statement"),
    ],
)
def test_other_signed_statement_is_refused(tmp_path, keys, content, words):
    sign_statement(tmp_path, keys[0], content)
    assert words in refusal(tmp_path, keys[1])
    sign_statement(tmp_path, keys[0], statement(), kind="text/plain")
    assert "payloadType is 'text/plain'" in refusal(tmp_path, keys[1])


def test_envelope_of_securesystemslib_passes(tmp_path, keys):
    sign_statement(tmp_path, keys[0], statement(predicate={"more": 1}))
    write(tmp_path, {**read(tmp_path), "unknown": "ignored"})
    check_signature(tmp_path, MANIFEST, keys[1])


def test_signature_without_a_key_id_is_tried(signed, keys, make_key):
    """By two keys: one of the signatures that may be of a key is enough."""
    private, public = make_key("theirs")
    sign_manifest(signed, MANIFEST, read_private_key(private))
    envelope = read(signed)
    for one in envelope["signatures"]:
        del one["keyid"]
    write(signed, envelope)
    for key in (keys[1], public):
        check_signature(signed, MANIFEST, key)
    assert "does not verify" in refusal(signed, make_key("third")[1])


def test_securesystemslib_verifies_our_envelope(signed, keys, make_key):
    envelope = OtherEnvelope.from_dict(read(signed))
    assert json.loads(envelope.payload) == statement()

    def key(path):
        return SSlibKey.from_crypto(load_pem_public_key(path.read_bytes()), keyid=read_public_key(keys[1]).id)

    assert envelope.verify([key(keys[1])], threshold=1)
    with pytest.raises(VerificationError):
        envelope.verify([key(make_key("theirs")[1])], threshold=1)


def test_publishing_the_same_manifest_keeps_signatures(store, manifest, keys):
    sign_manifest(store.bundle, encode_manifest(manifest), read_private_key(keys[0]))
    store.publish(manifest)
    assert structs.replace(read_manifest(store.bundle, keys[1]), digest="") == manifest
