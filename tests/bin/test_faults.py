"""Faults as dflash-run reports them: exit code, file, field, both values, and the command that repairs it."""

import json
import shutil
from pathlib import Path

import pytest
from msgspec import structs

from dflash_aot.bin import bundle as dflash_bundle
from dflash_aot.bin import precompile, run
from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import Entry, encode_manifest, read_manifest, verify_and_rebuild_commands
from dflash_aot.cache.bundle.store import Store


@pytest.fixture
def pair(tied, tmp_path) -> dict[str, Path]:
    """Copies of the checkpoints, which a test may change."""
    return {role: Path(shutil.copytree(getattr(tied, role), tmp_path / role)) for role in ("target", "draft")}


@pytest.fixture
def serve(command, copy, pair, tmp_path):
    """Runs one request with the present bundle and checkpoints; keyword arguments replace flags."""
    (tmp_path / "lines").write_text('{"prompt_ids": [3, 1, 4, 1, 5], "max_tokens": 4}\n')

    def run_once(**changes: object):
        # With --k=auto, "accepted" would depend on measured times.
        flags = {"bundle": copy, **pair, "input": tmp_path / "lines", "k": 3, **changes}
        return command(run, *(f"--{name}={value}" for name, value in flags.items()))

    return run_once


def rewrite_entry(copy: Path, entry: Entry, **changes: object) -> None:
    """Changes an entry of the manifest; all digests are right."""
    manifest = read_manifest(copy)
    entries = tuple(structs.replace(one, **changes) if one == entry else one for one in manifest.entries)
    (copy / "manifest.json").write_bytes(encode_manifest(structs.replace(manifest, entries=entries)))


def plant_another_bucket(copy: Path) -> None:
    """Replaces an executable by that of another bucket, with all digests right."""
    entry, *_, other = (entry for entry in read_manifest(copy).entries if entry.signature.program == "kv_write")
    blob, packed = pack_blob(Store(copy).read_executable(other))
    rewrite_entry(copy, entry, **structs.asdict(blob))
    Store(copy).executable_path(blob).write_bytes(packed)


def test_checkpoint_of_another_model_exits_with_4(serve, pair):
    config = pair["target"] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-5}))
    done = serve()
    assert (done.code, done.out) == (4, "")
    assert "decoder.epsilon: built for 1e-06, this checkpoint has 1e-05" in done.err
    assert f"dflash-precompile --bundle DIR --target {pair['target']} --draft {pair['draft']}" in done.err


# -- the commands that the messages name


def test_commands_named_in_messages_repair_the_bundle(command, serve, copy):
    whole = serve()
    shutil.rmtree(copy / "entries")
    plant_another_bucket(copy)
    assert command(precompile, "--rebuild", copy).code == 0
    refused = serve()
    assert refused.code == 3 and refused.err.endswith(f" Rebuild it: {verify_and_rebuild_commands(copy)}\n")
    assert command(dflash_bundle, "verify", copy, "--deep").code == 3
    assert command(precompile, "--rebuild", copy).code == 0
    assert serve() == whole and whole.code == 0
