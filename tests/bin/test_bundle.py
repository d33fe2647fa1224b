"""The dflash-bundle command: reports, changes to a bundle, refusals and exit codes."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from msgspec import convert, structs

from dflash_aot.bin import bundle as dflash_bundle
from dflash_aot.bin import run as dflash_run
from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.ed25519 import read_public_key
from dflash_aot.cache.bundle.manifest import ScheduleEstimate, encode_manifest, read_manifest, rebuild_command
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import list_expected_files
from dflash_aot.cache.environment import jaxlib_version
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.files.directory_lock import LOCK_FILE

PRECOMPILE = "dflash-precompile --bundle"
INSPECT = """
import sys
import dflash_aot.bin.bundle
try:
    dflash_aot.bin.bundle.main()
except SystemExit as left:
    print(left.code)
slow = ("jax", "jaxlib", "flax", "transformers", "numpy", "ml_dtypes", "safetensors", "tokenizers", "cryptography")
print([name for name in slow if name in sys.modules])
"""


@pytest.fixture
def copy(bundle, tmp_path):
    """A bundle that a test may damage: the files that the manifest refers to, without leftovers of earlier builds."""
    source, destination = bundle("tiny"), tmp_path / "bundle"
    manifest = read_manifest(source)
    paths = [source / "manifest.json", *(promise.path for promise in list_expected_files(source, manifest))]
    for path in [*paths, *(source / "entries" / f"{entry.key}.json" for entry in manifest.entries)]:
        target = destination / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (destination / ".lock").touch()
    return destination


@pytest.fixture
def manage(command):
    return lambda *arguments: command(dflash_bundle, *arguments)


@pytest.fixture
def report(manage):

    def run(*arguments):
        done = manage(*arguments, "--json")
        return json.loads(done.out), done.code

    return run


def blob(copy, program="verify"):
    entry = next(entry for entry in read_manifest(copy).entries if entry.signature.program == program)
    return Store(copy).executable_path(entry)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def rewrite(copy, **fields):
    """Changes the environment in the manifest and recomputes the digest."""
    manifest = read_manifest(copy)
    environment = structs.replace(manifest.environment, **fields)
    (copy / "manifest.json").write_bytes(encode_manifest(structs.replace(manifest, environment=environment)))


def snapshot(directory):
    """Content of every file; None for directories, and for the lock, which names its last holder."""
    return {
        path: path.read_bytes() if path.is_file() and path.name != LOCK_FILE else None
        for path in sorted(directory.rglob("*"))
    }


# -- inspect


def test_inspect_shows_what_the_manifest_says(manage, report, copy):
    done = manage("inspect", copy)
    manifest = read_manifest(copy)
    assert done.code == 0 and done.err == ""
    told, code = report("inspect", copy)
    assert code == 0 and told["executables"] == len(manifest.entries) == sum(
        one["executables"] for one in told["programs"]
    )
    assert told["bytes"] == sum(path.stat().st_size for path in (copy / "executables").iterdir())
    assert told["memory_per_device"]["weights"] == sum(recipe.bytes for recipe in manifest.weights)
    ends = "502 (config.json, generation_config.json)"
    assert told["end_tokens"] == ends and f"ends at   {ends}\n" in done.out
    assert told["signers"] is None and told["compatibility"]["fits"]
    assert f"{copy}: schema {manifest.schema}, {len(manifest.entries)} executables" in done.out
    for value in (str(manifest.grid), manifest.dtype, manifest.environment.jaxlib, manifest.target.reference):
        assert value in done.out
    assert "this machine: compatible, as far as can be checked without starting JAX" in done.out
    assert "signed    no" in done.out


def test_inspect_shows_estimated_times_and_the_longest_operations_of_one_executable(manage, report, estimated):
    entry, *_ = read_manifest(estimated).entries
    label = entry.signature.label
    table = manage("inspect", estimated).out
    assert re.search(rf"^{label} +3\.000 +1\.500 +2\.00$", table, re.MULTILINE)
    times = {"executable": label, "estimate_seconds": 3e-3, "bound_seconds": 1.5e-3, "ratio": 2.0}
    one = manage("inspect", estimated, f"--executable={label}")
    assert one.code == 0
    for words in ("fusion.7", "0.750", "while/body/dot_general", "left out: all-reduce, 4 runs, 2.000 MB"):
        assert words in one.out
    assert "waiting for main memory: 0.100 ms\n" in one.out and "%while.1 counts once" in one.out
    told, code = report("inspect", estimated, f"--executable={label}")
    assert code == 0 and convert(told.pop("schedule"), ScheduleEstimate) == entry.cost.schedule
    assert told == {"bundle": str(estimated), **times}


def test_inspect_names_each_incompatible_field_and_the_rebuild_commands(manage, report, copy):
    rewrite(copy, jaxlib="0.9.9", machine="pdp11")
    done = manage("inspect", copy)
    assert done.code == 4
    assert "  jaxlib: built for '0.9.9', here" in done.out and "  machine: built for 'pdp11', here" in done.out
    assert "with JAX" in done.out and "jaxlib==0.9.9\n" in done.out
    assert f"Or compile its programs again for this machine: {rebuild_command(copy)}\n" in done.out
    assert f"or build it from its checkpoints: {read_manifest(copy).build_command(copy)}\n" in done.out
    told, code = report("inspect", copy)
    assert code == 4 and [one["field"] for one in told["compatibility"]["differences"]] == ["jaxlib", "machine"]
    rewrite(copy, jaxlib=jaxlib_version())
    first, _ = report("inspect", copy)[0]["compatibility"]["remedies"]
    assert first == f"Compile its programs again for this machine: {rebuild_command(copy)}"


def test_inspect_of_a_tpu_bundle_on_a_laptop_advises_no_rebuild(manage, report, copy):
    tpu = {"platform": "tpu", "device_kind": "TPU v5 lite", "topology": "v5e:1x1"}
    rewrite(copy, **tpu, jax="0.10.99", libtpu="0.0.1", machine="", cpu_features=())
    done = manage("inspect", copy)
    assert done.code == 4 and "--rebuild" not in done.out
    assert "It was built with Python 3.11's JAX 0.10.99; here is Python 3." in done.out
    assert "Serve it on v5e:1x1 (1 x TPU v5 lite)" in done.out and f"verify {copy} --execute" in done.out
    told, _ = report("inspect", copy)
    assert told["compatibility"]["rebuild_from_programs"] is None


def test_inspect_of_a_moved_bundle_does_not_import_jax(copy, tmp_path):
    directory = tmp_path / "ein Pfad mit Leerzeichen, ünïcödé ☃" / "bundle"
    shutil.copytree(copy, directory, copy_function=shutil.copyfile)
    for path in (directory, *directory.rglob("*")):
        os.utime(path, (0, 0))
    command = [sys.executable, "-c", INSPECT, "inspect", "bundle"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory.parent)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines()[-2:] == ["0", "[]"]


def test_missing_bundle_is_refused_with_the_build_command(manage, tmp_path):
    for name in ("inspect", "verify", "gc"):
        done = manage(name, tmp_path / "nowhere")
        assert done.code == 2 and done.out == ""
        assert f"{PRECOMPILE} {tmp_path / 'nowhere'}" in done.err
        assert not (tmp_path / "nowhere").exists()


def test_corrupt_manifest_is_refused_by_every_command(manage, copy, make_key):
    (copy / "manifest.json").write_bytes((copy / "manifest.json").read_bytes()[:-9])
    before = snapshot(copy)
    for name in ("inspect", "verify", "gc", "sign", "diff"):
        more = {"sign": ["--key", make_key("ours")[0]], "diff": [copy]}.get(name, [])
        done = manage(name, copy, *more)
        assert done.code == 3 and done.out == ""
        assert str(copy / "manifest.json") in done.err and PRECOMPILE in done.err
        assert snapshot(copy) == before


# -- verify


def test_verify_reports_and_quarantines_all_broken_files(manage, report, copy):
    first, second = blob(copy, "verify"), blob(copy, "draft")
    whole = first.read_bytes()
    cut(first)
    second.unlink()
    (copy / "notes.txt").write_text("unknown")
    done = manage("verify", copy)
    assert done.code == 3
    assert (
        f"bytes is {len(whole) - 1}, the manifest says {len(whole)}; moved to {copy}/quarantine/{first.name}.0"
        in done.out
    )
    assert f"{second} (draft" in done.out and "file is missing" in done.out
    assert f"{copy / 'notes.txt'}: unknown" in done.out
    assert f"Rebuild: {rebuild_command(copy)}" in done.out
    assert (copy / "quarantine" / f"{first.name}.0").read_bytes() == whole[:-1]
    told, code = report("verify", copy)
    assert code == 3
    assert {(flaw["path"], flaw["field"]) for flaw in told["flaws"]} == {(str(first), "file"), (str(second), "file")}


def test_verify_noquarantine_leaves_broken_files_in_place(report, copy):
    path = blob(copy)
    cut(path)
    told, code = report("verify", copy, "--noquarantine")
    assert code == 3 and told["quarantined"] == {} and told["not_quarantined"] is None
    assert path.exists() and not (copy / "quarantine").exists()


# -- sign, and verification of signatures


def test_signature_is_verified_by_the_public_key(manage, report, copy, make_key):
    private, public = make_key("ours")
    signed, code = report("sign", copy, "--key", private)
    assert code == 0 and signed["key"] == read_public_key(public).id and signed["signers"] == [signed["key"]]
    told, code = report("verify", copy, "--key", public)
    assert code == 0 and told["verified_key"] == signed["key"] and told["strays"] == []
    assert f"signed    by {signed['key']}, not verified" in manage("inspect", copy).out
    moved = shutil.move(copy, copy.with_name("moved"))
    assert manage("verify", moved, "--key", public).code == 0


@pytest.mark.parametrize("case", ["unsigned", "another key", "changed since"])
def test_manifest_without_a_valid_signature_is_refused_before_parsing(manage, command, copy, make_key, case):
    private, public = make_key("ours")
    words = {"unsigned": "is not signed", "another key": "not by", "changed since": "changed after it was signed"}[case]
    if case != "unsigned":
        manage("sign", copy, "--key", private if case == "changed since" else make_key("theirs")[0])
    (copy / "manifest.json").write_bytes(b"not JSON" if case != "another key" else b"not even JSON")
    verified = manage("verify", copy, "--key", public)
    served = command(dflash_run, "--bundle", copy, "--prompt", "x", "--require_signature", public)
    for done in (verified, served):
        assert done.code == 3 and words in done.err and "manifest.sig.json" in done.err and done.out == ""


def test_inspect_says_that_a_signature_is_of_another_manifest(manage, copy, make_key):
    manage("sign", copy, "--key", make_key("ours")[0])
    rewrite(copy, xla_flags="--xla_other=1")
    assert "but for another manifest: the bundle was rebuilt or changed since" in manage("inspect", copy).out


def test_sign_refuses_a_bundle_with_a_broken_file(manage, copy, make_key):
    cut(blob(copy))
    done = manage("sign", copy, "--key", make_key("ours")[0])
    assert done.code == 3 and "nothing is signed" in done.err and f"dflash-bundle verify {copy}" in done.err
    assert not (copy / "manifest.sig.json").exists()


def test_wrong_or_missing_key_is_bad_input(manage, command, copy, make_key):
    assert manage("sign", copy).code == 2
    assert manage("sign", copy, "--key", make_key("ours")[1]).code == 2
    done = command(dflash_run, "--bundle", copy, "--prompt", "x", "--require_signature", "nowhere.pem")
    assert done.code == 2 and "nowhere.pem: No such file" in done.err


# -- diff


def test_diff_names_what_differs_and_exits_with_1(manage, report, copy, bundle):
    manifest = read_manifest(copy)
    others = structs.replace(manifest, dtype="bfloat16", entries=manifest.entries[:-1])
    (copy / "manifest.json").write_bytes(encode_manifest(others))
    done = manage("diff", "--bundle", bundle("tiny"), copy)
    last = manifest.entries[-1].signature.label
    assert done.code == 1
    assert 'dtype\n  - "float32"\n  + "bfloat16"\n' in done.out
    assert f"- {last}: only in a" in done.out
    told, code = report("diff", bundle("tiny"), copy)
    assert report("diff", copy, copy)[1] == 0
    assert code == 1 and told["changes"] == [{"field": "dtype", "a": "float32", "b": "bfloat16"}]


# -- gc


def test_gc_removes_only_old_unreferenced_files(manage, report, copy):
    left = copy / "executables" / ("0" * 64)
    left.write_bytes(b"12345")
    future = left.stat().st_mtime + 10**6
    os.utime(left, (future, future))
    (copy / "notes.txt").touch()
    before = snapshot(copy)
    for arguments in ([], ["--dry_run", "--keep_hours", "0"]):
        told, code = report("gc", copy, *arguments)
        assert code == 0 and snapshot(copy) == before
    assert (told["dry_run"], told["bytes"], [one["path"] for one in told["removed"]]) == (True, 5, [str(left)])
    done = manage("gc", copy, "--keep_hours", "0")
    assert done.code == 0 and "1 file, 5 B removed" in done.out
    del before[left]
    assert snapshot(copy) == before


def test_gc_and_sign_are_refused_during_a_build(manage, copy, make_key):
    with Store(copy).open_for_building():
        for arguments in (["gc", copy], ["sign", copy, "--key", make_key("ours")[0]]):
            done = manage(*arguments)
            assert done.code == 5 and "another dflash-precompile or dflash-bundle is at work here" in done.err
        assert manage("gc", copy, "--dry_run").code == 0


# -- the command line


def test_wrong_arguments_are_refused(manage):
    for arguments, words in (
        ([], "no command given; the commands are inspect, verify, diff, sign, gc"),
        (["repair", "x"], "repair: no such command"),
        (["inspect"], "inspect takes one bundle; given: none"),
        (["inspect", "a", "b"], "inspect takes one bundle; given: a b"),
        (["inspect", "a", "--bundle", "b"], "inspect takes one bundle; given: b a"),
        (["diff", "a"], "diff takes two bundles; given: a"),
        (["inspect", "a", "--key", "k"], "--key: inspect has no such flag"),
        (["gc", "a", "--noquarantine"], "--quarantine: gc has no such flag"),
        (["gc", "a", "--keep_hours", "-1"], "keep_hours"),
        (["verify", "a", "--deeper"], "deeper"),
        (["push", "bundle"], "push takes one bundle and a URL; given: bundle"),
        (["push", "nowhere", "s3://a"], "nowhere/manifest.json does not exist"),
        (["fetch"], "fetch takes a URL; given: none"),
        (["fetch", "s3://a", "--dry_run"], "--dry_run: fetch has no such flag"),
        (["inspect", "s3://a/b"], "s3://a/b is a URL, and a directory is needed here. Fetch the bundle"),
    ):
        done = manage(*arguments)
        assert done.code == 2 and words in done.err and done.out == ""


# -- verify --deep


def test_verify_deep_quarantines_executables_that_crash_or_compute_wrong_values(report, copy):
    manifest, store = read_manifest(copy), Store(copy)
    by_program = {entry.signature.program: entry for entry in manifest.entries}
    crashing, wrong = by_program["draft"], by_program["verify"]
    blob_facts, content = pack_blob(store.read_executable(crashing).replace(b"\x55\x48\x89\xe5", b"\x0f\x0b\x0f\x0b"))
    (copy / "executables" / blob_facts.sha256).write_bytes(content)
    first, *rest = wrong.self_test.outputs
    self_test = structs.replace(wrong.self_test, outputs=(structs.replace(first, mean=9.0), *rest))
    changed = {
        crashing.key: structs.replace(crashing, **structs.asdict(blob_facts)),
        wrong.key: structs.replace(wrong, self_test=self_test),
    }
    entries = tuple(changed.get(entry.key, entry) for entry in manifest.entries)
    store.publish(structs.replace(manifest, entries=entries))
    told, code = report("verify", copy, "--deep")
    assert code == 3
    assert [(one["label"], one["kind"]) for one in told["calls"]["faults"]] == [
        (crashing.signature.label, "crash"),
        (wrong.signature.label, "self_test"),
    ]
    assert "SIGILL" in told["calls"]["faults"][0]["reason"]
    assert told["calls"]["quarantined"].keys() == {crashing.signature.label, wrong.signature.label}
    assert told["calls"]["rebuild"] == rebuild_command(copy)
    with pytest.raises(BuildFailed, match=r"an executable that was quarantined here \(crash\).*SIGILL"):
        store.add(changed[crashing.key], content, b"")


def test_verify_deep_quarantines_nothing_where_every_executable_fails(manage, report, copy):
    """A fault that all executables share is the machine's: a device, a driver, a variable of the environment."""
    manifest, store = read_manifest(copy), Store(copy)
    wrong = [structs.replace(entry.self_test.outputs[0], changed=1, dtype="int8") for entry in manifest.entries]
    entries = [
        structs.replace(entry, self_test=structs.replace(entry.self_test, outputs=(output,)))
        for entry, output in zip(manifest.entries, wrong, strict=True)
    ]
    store.publish(structs.replace(manifest, entries=tuple(entries)))
    told, code = report("verify", copy, "--deep")
    assert (code, len(told["calls"]["faults"]), told["calls"]["quarantined"]) == (4, len(entries), {})
    assert "every executable failed, so that the cause is probably this machine" in told["calls"]["not_quarantined"]
    assert "nothing was moved: every executable failed" in manage("verify", copy, "--deep").out
    assert not (copy / "quarantine").exists()


def test_verify_record_adds_what_verify_deep_compares_with(manage, report, copy):
    manifest = read_manifest(copy)
    entries, count = tuple(structs.replace(entry, self_test=None) for entry in manifest.entries), len(manifest.entries)
    Store(copy).publish(structs.replace(manifest, entries=entries))
    unknown = f"{count} executables called, 0 compute what they did before; {count} have no recorded outputs to compare"
    assert f"{unknown}, --record records them" in manage("verify", copy, "--deep").out
    assert f"the outputs of {count} are recorded now" in manage("verify", copy, "--record").out
    assert [entry.self_test for entry in read_manifest(copy).entries] == [entry.self_test for entry in manifest.entries]
    calls = report("verify", copy, "--deep")[0]["calls"]
    assert (calls["called"], calls["compared"], calls["faults"]) == (count, count, [])
