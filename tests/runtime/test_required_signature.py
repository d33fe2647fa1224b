"""Required signatures: an engine opens only bundles that the given key has signed."""

import shutil
from pathlib import Path

import pytest

from dflash_aot.cache.bundle.ed25519 import read_private_key
from dflash_aot.cache.bundle.manifest import read_manifest_bytes
from dflash_aot.cache.bundle.manifest_signature import sign_manifest
from dflash_aot.cache.errors import BadInput, CorruptBundle
from dflash_aot.runtime import Engine, SamplingParams


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    """A copy of a bundle, to be signed."""
    return Path(shutil.copytree(bundle("tiny"), tmp_path / "bundle", ignore=shutil.ignore_patterns("entries")))


def test_bundle_signed_by_the_key_is_served(copy, make_key, cases):
    private, public = make_key("ours")
    sign_manifest(copy, read_manifest_bytes(copy), read_private_key(private))
    with Engine.open(copy, require_signature=str(public)) as engine:
        params = SamplingParams(max_tokens=9, stop_token_ids=())
        assert engine.generate(cases["len5"].prompt, params).token_ids == cases["len5"].answer[:9]


@pytest.mark.parametrize("signer", [None, "theirs"])
def test_bundle_without_this_signature_is_not_parsed(copy, make_key, signer):
    _, public = make_key("ours")
    (copy / "manifest.json").write_bytes(b"not JSON")
    if signer:
        sign_manifest(copy, b"not JSON", read_private_key(make_key(signer)[0]))
    with pytest.raises(CorruptBundle, match="not by" if signer else "is not signed"):
        Engine.open(copy, require_signature=public)


def test_invalid_key_raises(copy, make_key):
    for given in ("", copy / "nowhere.pem", make_key("ours")[0]):
        with pytest.raises(BadInput):
            Engine.open(copy, require_signature=given)
