"""dflash-precompile --rebuild, reproducible builds, and builds without self-tests."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from dflash_aot.bin import bundle as dflash_bundle
from dflash_aot.bin import precompile
from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.environment import jaxlib_version, libtpu_version
from dflash_aot.cache.key import executable_key
from dflash_aot.runtime import Engine, SamplingParams

# Another environment, so nothing is found.
OTHER_FLAGS = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_cpu_enable_fast_min_max=false"}
LABELS = 7
EXPORTED = Path(__file__).parent / "exported_programs"
JAXLIB = tuple(map(int, jaxlib_version().split(".")))


def precompile_elsewhere(*flags: object, directory: Path | None = None, **environment: str) -> dict:
    """Runs the command in a process of its own, whose compiler reads the environment; returns its report."""
    line = [sys.executable, "-m", "dflash_aot.bin.precompile", *map(str, flags), "--json"]
    done = subprocess.run(line, env={**os.environ, **environment}, cwd=directory, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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


@pytest.fixture
def rebuild(command):

    def run(bundle: Path, *flags: object) -> dict:
        done = command(precompile, "--rebuild", bundle, *flags, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    return run


def test_rebuild_for_another_environment_compiles_everything_without_checkpoints(copy, tied, tmp_path):
    found = precompile_elsewhere("--rebuild", copy, "--bundle", tmp_path / "new", **OTHER_FLAGS)
    assert (found["compiled"], found["self_tests"]) == (LABELS, LABELS)
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


def test_rebuild_in_the_same_environment_compiles_only_broken_executables(rebuild, command, copy, make_key):
    entry = read_manifest(copy).entries[2]
    broken = copy / "executables" / entry.sha256
    broken.write_bytes(broken.read_bytes()[:-1])
    found = rebuild(copy)
    assert (found["compiled"], found["reused"]) == (1, LABELS - 1)
    assert [one["compiled"] for one in found["entries"]].index(True) == 2
    assert (copy / "quarantine" / f"{entry.sha256}.0").exists()
    assert rebuild(copy)["compiled"] == 0
    private, public = make_key("ours")
    assert command(dflash_bundle, "sign", copy, "--key", private).code == 0
    before = read_manifest(copy)
    Store(copy).write_record(structs.replace(before.entries[2], seconds=1e6))
    assert rebuild(copy, "--require_signature", public)["compiled"] == 0
    assert read_manifest(copy) == before  # and nothing of the unsigned record


def test_rebuild_that_computes_something_else_is_not_published(command, copy, tmp_path):
    manifest = read_manifest(copy)
    *rest, last = manifest.entries
    first, *outputs = last.self_test.outputs
    outputs = (structs.replace(first, mean=3 * first.mean), *outputs)
    rewrite(copy, entries=(*rest, structs.replace(last, self_test=structs.replace(last.self_test, outputs=outputs))))
    done = command(precompile, "--rebuild", copy, "--bundle", tmp_path / "new")
    assert done.code == 5
    assert f"1 of {LABELS} executables failed their self-test. Nothing is published" in done.err
    assert f"{last.signature.label}: draft_k: the mean is" in done.err
    assert not (tmp_path / "new" / "manifest.json").exists()
    (record,) = (tmp_path / "new" / "quarantine").glob("*.json")
    assert json.loads(record.read_text())["kind"] == "self_test"


def test_rebuild_without_a_program_names_the_command_that_needs_checkpoints(command, copy):
    manifest = read_manifest(copy)
    (copy / "programs" / manifest.entries[0].program.sha256).write_bytes(b"")
    (copy / "executables" / manifest.entries[0].sha256).unlink()
    done = command(precompile, "--rebuild", copy)
    assert done.code == 5
    assert "program of prefill prefill=16 length=32): 0 bytes, the manifest says" in done.err
    assert "--target /gone --draft /gone" in done.err


def test_rebuild_refuses_flags_that_describe_another_bundle(command, copy):
    done = command(precompile, "--rebuild", copy, "--dtype", "bfloat16")
    assert done.code == 2 and "--dtype" in done.err and "cannot be given with it" in done.err


def replace_programs(path: Path, jaxlib: str, files: dict[str, str]) -> None:
    """As if this jaxlib had exported the bundle: some executables are gone, and their programs are the given files."""
    manifest, entries = read_manifest(path), []
    for entry in manifest.entries:
        if file := files.get(entry.signature.label):
            content = (EXPORTED / f"jaxlib-{jaxlib}" / file).read_bytes()
            blob, packed = pack_blob(content)
            (path / "programs" / blob.sha256).write_bytes(packed)
            (path / "executables" / entry.sha256).unlink()
            key = executable_key(content, entry.signature, manifest.environment)
            entry = structs.replace(entry, program=blob, key=key)
        entries.append(entry)
    rewrite(path, entries=tuple(entries))


TINY_FILES = {"prefill prefill=16 length=32": "prefill", "verify batch=1 length=32 k=3": "verify"}


@pytest.mark.skipif(JAXLIB <= (0, 10, 2), reason="needs a JAX after 0.10.2")
def test_programs_of_an_older_jax_are_compiled_and_pass_the_self_tests(command, copy):
    replace_programs(copy, "0.10.2", TINY_FILES)
    done = command(precompile, "--rebuild", copy, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["compiled"], found["self_tests"]) == (2, LABELS)


@pytest.mark.skipif(JAXLIB >= (0, 12), reason="needs a JAX before 0.12")
def test_programs_of_a_newer_jax_are_refused_before_anything_is_compiled(command, copy, tmp_path):
    replace_programs(copy, "0.12.0.1", TINY_FILES)
    done = command(precompile, "--rebuild", copy, "--bundle", tmp_path / "new")
    assert done.code == 5 and not (tmp_path / "new").exists()
    assert "does not read the programs (" in done.err and "--target /gone --draft /gone" in done.err


SMALL = ("--platform=cpu", "--sampling=greedy", "--buckets", "batch=1 length=16 k=0 prefill=8")


def test_build_without_self_tests_leaves_them_to_the_next_build(command, smallest, tmp_path):
    """JAX's compilation cache is on, and stays empty: executables from there cannot be serialized again."""
    jax_cache = tmp_path / "cache"
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(jax_cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    flags = ["--target", smallest.target, "--draft", smallest.draft, *SMALL, "--bundle", tmp_path / "bundle"]
    first = precompile_elsewhere(*flags, "--noself_test", **variables)
    assert first["self_tests"] == 0 < first["compiled"]
    assert list(jax_cache.glob("*")) == []
    again = json.loads(command(precompile, *flags, "--json").out)
    assert (again["compiled"], again["self_tests"]) == (0, again["executables"])


@pytest.mark.skipif(not libtpu_version(), reason="needs libtpu")
def test_build_for_a_described_tpu_is_reproducible_in_every_byte(command, smallest, tmp_path):
    elsewhere = {"HOME": str(tmp_path), "USER": "somebody-else", "PYTHONHASHSEED": "31337"}
    flags = ["--draft", smallest.draft, "--topology=v5e:1x1", *SMALL[1:]]
    precompile_elsewhere("--target", smallest.target, *flags, "--bundle", tmp_path / "a b", "--jobs=1")
    relative = ["--target", smallest.target.name, *flags, "--bundle", tmp_path / "again", "--jobs=2"]
    precompile_elsewhere(*relative, directory=smallest.target.parent, **elsewhere)
    done = command(dflash_bundle, "diff", tmp_path / "a b", tmp_path / "again")
    assert done.code == 0, done.out


def test_rebuild_of_an_inconsistent_manifest_is_refused(command, copy, tmp_path):
    manifest = read_manifest(copy)
    rewrite(copy, entries=manifest.entries[1:])
    done = command(precompile, "--rebuild", copy, "--bundle", tmp_path / "new")
    assert done.code == 3 and "has no entry for prefill" in done.err


def test_rebuild_keeps_the_weight_recipes_of_the_bundle(rebuild, bundle, copy, tmp_path):
    """Recipes of an older version of this project belong to the programs that it traced."""
    first, *rest = read_manifest(copy).weights
    renamed = structs.replace(first, placements=(structs.replace(first.placements[0], tensor="of.another.name"),))
    rewrite(copy, weights=(renamed, *rest))
    store = bundle("tiny").parent / "store"  # has its executables
    assert rebuild(copy, "--bundle", tmp_path / "new", "--noself_test", "--store", store)["compiled"] == 0
    assert read_manifest(tmp_path / "new").weights == (renamed, *rest)
