"""dflash-precompile --rebuild, --check_reproducible and self-tests, each in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest
from dflash_aot.cache.environment import jaxlib_version, libtpu_version
from dflash_aot.cache.key import executable_key
from dflash_aot.runtime import Engine, SamplingParams

OTHER_FLAGS = {"XLA_FLAGS": "--xla_cpu_enable_fast_min_max=false"}  # another environment, so nothing is found
LABELS = 7
EXPORTED = Path(__file__).parent / "exported_programs"
JAXLIB = tuple(map(int, jaxlib_version().split(".")))


def precompile(*flags: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash_aot.bin.precompile", *map(str, flags)]
    return subprocess.run(command, env={**os.environ, **environment}, text=True, capture_output=True)


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    """A bundle without its checkpoints and build records."""
    path = Path(shutil.copytree(bundle("tiny"), tmp_path / "bundle", ignore=shutil.ignore_patterns("entries")))
    manifest = read_manifest(path)
    gone = {role: structs.replace(getattr(manifest, role), reference="/gone") for role in ("target", "draft")}
    rewrite(path, **gone)
    return path


def rewrite(path: Path, **changes: object) -> None:
    (path / "manifest.json").write_bytes(encode_manifest(structs.replace(read_manifest(path), **changes)))


def report(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_rebuild_for_another_environment_compiles_everything_without_checkpoints(copy, tied, tmp_path):
    found = report(precompile("--rebuild", copy, "--bundle", tmp_path / "new", "--json", **OTHER_FLAGS))
    assert (found["compiled"], found["canaries"]) == (LABELS, LABELS)
    old, new = read_manifest(copy), read_manifest(tmp_path / "new")
    assert new.environment.xla_flags == OTHER_FLAGS["XLA_FLAGS"]
    for one, other in zip(old.entries, new.entries, strict=True):
        assert (one.program, one.self_test) == (other.program, other.self_test) and one.key != other.key
    rewrite(tmp_path / "new", environment=old.environment)  # this process, with other flags, serves it
    asked = [3, 1, 4, 1, 5], SamplingParams(max_tokens=9, stop_token_ids=())
    answers = []
    for bundle in (copy, tmp_path / "new"):
        with Engine.open(bundle, tied.target, tied.draft) as engine:
            answers.append(engine.generate(*asked).token_ids)
    assert answers[0] == answers[1]


def test_rebuild_in_the_same_environment_compiles_only_broken_executables(copy):
    entry = read_manifest(copy).entries[2]
    broken = copy / "executables" / entry.sha256
    broken.write_bytes(broken.read_bytes()[:-1])
    found = report(precompile("--rebuild", copy, "--json"))
    assert (found["compiled"], found["reused"]) == (1, LABELS - 1)
    assert [one["compiled"] for one in found["entries"]].index(True) == 2
    assert (copy / "set-aside" / f"{entry.sha256}.0").exists()
    assert report(precompile("--rebuild", copy, "--json"))["compiled"] == 0


def test_rebuild_that_computes_something_else_is_not_published(copy, tmp_path):
    """As if the compiler made a mistake: the recorded outputs are changed."""
    manifest = read_manifest(copy)
    *rest, last = manifest.entries
    first, *outputs = last.self_test.outputs
    outputs = (structs.replace(first, mean=3 * first.mean), *outputs)
    rewrite(copy, entries=(*rest, structs.replace(last, self_test=structs.replace(last.self_test, outputs=outputs))))
    done = precompile("--rebuild", copy, "--bundle", tmp_path / "new", **OTHER_FLAGS)
    assert done.returncode == 5
    assert f"1 of {LABELS} executables failed their self-test. Nothing is published" in done.stderr
    assert f"{last.signature.label}: draft_k: the mean is" in done.stderr
    assert not (tmp_path / "new" / "manifest.json").exists()
    (record,) = (tmp_path / "new" / "set-aside").glob("*.json")
    assert json.loads(record.read_text())["kind"] == "canary"


def test_rebuild_without_a_program_names_the_command_that_needs_checkpoints(copy):
    manifest = read_manifest(copy)
    (copy / "programs" / manifest.entries[0].program.sha256).write_bytes(b"")
    (copy / "executables" / manifest.entries[0].sha256).unlink()
    done = precompile("--rebuild", copy)
    assert done.returncode == 5
    assert "program of prefill prefill=16 length=32): 0 bytes, the manifest says" in done.stderr
    assert "--target /gone --draft /gone" in done.stderr


@pytest.mark.parametrize(
    "flags", [["--dtype", "bfloat16"], ["--target", "x", "--draft", "y"], ["--check_reproducible"]]
)
def test_rebuild_refuses_flags_that_describe_another_bundle(copy, flags):
    done = precompile("--rebuild", copy, *flags)
    assert done.returncode == 2
    assert f"{flags[0]}" in done.stderr and "cannot be given with it" in done.stderr


def replace_programs(path: Path, exporter: str, files: dict[str, str]) -> None:
    """As if this jaxlib had exported the bundle: some executables are gone, and their programs are the given files."""
    manifest, entries = read_manifest(path), []
    for entry in manifest.entries:
        if file := files.get(entry.signature.label):
            content = (EXPORTED / f"jaxlib-{exporter}" / file).read_bytes()
            blob, packed = pack_blob(content)
            (path / "programs" / blob.sha256).write_bytes(packed)
            (path / "executables" / entry.sha256).unlink()
            key = executable_key(content, entry.signature, manifest.environment)
            entry = structs.replace(entry, program=blob, key=key)
        entries.append(entry)
    rewrite(path, entries=tuple(entries), exporter=exporter)


TINY_FILES = {"prefill prefill=16 length=32": "prefill", "verify batch=1 length=32 k=3": "verify"}


@pytest.mark.skipif(JAXLIB <= (0, 10, 2), reason="needs a JAX after 0.10.2")
def test_programs_of_an_older_jax_are_compiled_and_pass_the_self_tests(copy):
    replace_programs(copy, "0.10.2", TINY_FILES)
    done = precompile("--rebuild", copy, "--json")
    found = report(done)
    assert (found["compiled"], found["canaries"]) == (2, LABELS)
    assert "exported by JAX 0.10.2: this and newer versions that were released by 2026-12-14" in done.stderr
    assert read_manifest(copy).exporter == "0.10.2"


@pytest.mark.skipif(JAXLIB >= (0, 12), reason="needs a JAX before 0.12")
def test_programs_of_a_newer_jax_are_refused_before_anything_is_compiled(copy, tmp_path):
    replace_programs(copy, "0.12.0.1", TINY_FILES)
    done = precompile("--rebuild", copy, "--bundle", tmp_path / "new")
    assert done.returncode == 5 and not (tmp_path / "new").exists()
    assert "They were exported by JAX 0.12.0.1, which is newer: rebuild with that version, or later" in done.stderr
    assert "--target /gone --draft /gone" in done.stderr


@pytest.mark.skipif(JAXLIB < (0, 11, 1), reason="older versions read it")
def test_expired_programs_are_refused_with_the_command_that_exports_them_anew(copy, tmp_path):
    replace_programs(copy, "0.7.2", {"prefill prefill=16 length=32": "add_one"})
    done = precompile("--rebuild", copy, "--bundle", tmp_path / "new")
    assert done.returncode == 5 and not (tmp_path / "new").exists()
    assert "does not read the programs (ValueError: Exported being deserialized seems to be older" in done.stderr
    assert "They were exported by JAX 0.7.2" in done.stderr and "--target /gone --draft /gone" in done.stderr


def test_rebuild_without_a_bundle_is_refused(tmp_path):
    done = precompile("--rebuild", tmp_path / "nothing")
    assert done.returncode == 2 and "there is no bundle here" in done.stderr


def test_self_tests_can_be_left_out_and_are_run_by_the_next_build(tied, tmp_path):
    pair = ("--target", tied.target, "--draft", tied.draft, "--platform=cpu", "--sampling=greedy", "--json")
    flags = (*pair, "--buckets", "batch=1 length=16 k=0 prefill=8", "--bundle", tmp_path)
    assert report(precompile(*flags, "--nocanaries"))["canaries"] == 0
    again = report(precompile(*flags))
    assert (again["compiled"], again["canaries"]) == (0, again["executables"])


def test_cpu_build_is_reproducible_in_keys_and_programs(tied, tmp_path, monkeypatch):
    monkeypatch.chdir(tied.target.parent)
    pair = ("--target", tied.target.name, "--draft", tied.draft, "--platform=cpu", "--sampling=greedy")
    flags = (*pair, "--buckets", "batch=1 length=16 k=0 prefill=8", "--bundle", tmp_path, "--check_reproducible")
    found = report(precompile(*flags, "--json"))
    count = found["executables"]
    same = found["reproducible"]
    assert (same["same_keys"], same["same_programs"], same["executables"]) == (count, count, count)


@pytest.mark.skipif(not libtpu_version(), reason="needs libtpu")
def test_tpu_build_is_reproducible_in_every_byte(tied, tmp_path):
    pair = ("--target", tied.target, "--draft", tied.draft, "--topology=v5e:1x1", "--sampling=greedy")
    flags = (
        *pair,
        "--buckets",
        "batch=1 length=16 k=0 prefill=8",
        "--bundle",
        tmp_path / "a b",
        "--check_reproducible",
    )
    found = report(precompile(*flags, "--json"))
    assert found["reproducible"]["same_bytes"] == found["executables"] == found["reproducible"]["same_keys"]
    again = report(precompile("--rebuild", tmp_path / "a b", "--bundle", tmp_path / "new", "--json"))
    assert again["compiled"] == found["executables"]
    old, new = read_manifest(tmp_path / "a b"), read_manifest(tmp_path / "new")
    assert [entry.sha256 for entry in new.entries] == [entry.sha256 for entry in old.entries]


def test_rebuild_of_an_inconsistent_manifest_is_refused(copy, tmp_path):
    manifest = read_manifest(copy)
    rewrite(copy, entries=manifest.entries[1:])
    done = precompile("--rebuild", copy, "--bundle", tmp_path / "new")
    assert done.returncode == 3 and "has no entry for prefill" in done.stderr
    facts = structs.replace(manifest.target.facts, decoder=structs.replace(manifest.target.facts.decoder, layers=0))
    rewrite(copy, target=structs.replace(manifest.target, facts=facts), entries=manifest.entries)
    done = precompile("--rebuild", copy, "--bundle", tmp_path / "new")
    assert done.returncode == 3 and "Traceback" not in done.stderr


def test_rebuild_keeps_the_weight_recipes_of_the_bundle(copy, tmp_path):
    """Recipes of an older version of this project belong to the programs that it traced."""
    first, *rest = read_manifest(copy).weights
    renamed = structs.replace(first, placements=(structs.replace(first.placements[0], tensor="of.another.name"),))
    rewrite(copy, weights=(renamed, *rest))
    report(precompile("--rebuild", copy, "--bundle", tmp_path / "new", "--json", "--nocanaries", **OTHER_FLAGS))
    assert read_manifest(tmp_path / "new").weights == (renamed, *rest)


def test_rebuild_with_require_signature_refuses_an_unsigned_bundle(copy, make_key):
    done = precompile("--rebuild", copy, "--require_signature", make_key("somebody")[1])
    assert done.returncode == 3 and "manifest.sig.json" in done.stderr


def test_jax_compilation_cache_is_neither_read_nor_written(tied, tmp_path):
    """Executables from there cannot be serialized again, and nobody has verified them."""
    pair = ("--target", tied.target, "--draft", tied.draft, "--platform=cpu", "--sampling=greedy", "--nocanaries")
    flags = (*pair, "--buckets", "batch=1 length=16 k=0 prefill=8")
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    for place in ("one", "other"):
        done = precompile(*flags, "--bundle", tmp_path / place, **cache)
        assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("cache/*")) == []
