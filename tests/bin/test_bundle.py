"""dflash-bundle: what it says of a bundle, what it changes about it, and how it ends."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from msgspec import structs

from dflash_aot.bin import bundle as dflash_bundle
from dflash_aot.bin import run as dflash_run
from dflash_aot.cache.bundle.blob import pack
from dflash_aot.cache.bundle.manifest import encode_manifest, mend_command, read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.bundle.verification import list_promises
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.signing.ed25519 import read_public_key

PRECOMPILE = "dflash-precompile --bundle"
INSPECT = """
import sys
{before}
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
    """A bundle of its own, to be damaged: what the manifest refers to, and nothing that earlier builds left over."""
    source, place = bundle("tiny"), tmp_path / "bundle"
    manifest = read_manifest(source)
    paths = [source / "manifest.json", *(promise.path for promise in list_promises(source, manifest))]
    for path in [*paths, *(source / "entries" / f"{entry.key}.json" for entry in manifest.entries)]:
        target = place / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (place / ".lock").touch()
    return place


@pytest.fixture
def manage(command):
    """Sub-command and arguments → what it leaves behind."""
    return lambda *arguments: command(dflash_bundle, *arguments)


@pytest.fixture
def report(manage):
    """The same as JSON, and its exit code."""

    def run(*arguments):
        done = manage(*arguments, "--json")
        return json.loads(done.out), done.code

    return run


def blob(copy, program="verify"):
    entry = next(entry for entry in read_manifest(copy).entries if entry.signature.program == program)
    return Store(copy).path(entry)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def rewrite(copy, **fields):
    """Another environment under a right digest, as somebody with the tools would write it."""
    manifest = read_manifest(copy)
    environment = structs.replace(manifest.environment, **fields)
    (copy / "manifest.json").write_bytes(encode_manifest(structs.replace(manifest, environment=environment)))


def snapshot(directory):
    """Everything that is there, and what it holds."""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(directory.rglob("*"))}


# -- inspect


def test_a_bundle_is_described_from_its_manifest(manage, copy):
    done = manage("inspect", copy)
    manifest = read_manifest(copy)
    assert done.code == 0 and done.err == ""
    assert f"{copy}: schema {manifest.schema}, {len(manifest.entries)} executables" in done.out
    for told in (str(manifest.grid), manifest.dtype, manifest.environment.jaxlib, manifest.target.reference):
        assert told in done.out
    assert "here: nothing known speaks against serving it" in done.out
    assert "signed    no" in done.out


def test_the_description_is_json_for_machines(report, copy):
    told, code = report("inspect", copy)
    manifest = read_manifest(copy)
    assert code == 0
    assert told["executables"] == len(manifest.entries) == sum(one["executables"] for one in told["programs"])
    assert told["bytes"] == sum(path.stat().st_size for path in (copy / "executables").iterdir())
    assert told["program_bytes"] == sum(path.stat().st_size for path in (copy / "programs").iterdir())
    assert told["grid"] == str(manifest.grid) and told["dtype"] == manifest.dtype
    assert told["target"]["facts"]["decoder"]["layers"] == manifest.target.facts.decoder.layers
    assert told["memory_per_device"]["state"] == sum(array.bytes for array in manifest.state)
    assert told["memory_per_device"]["weights"] == sum(recipe.bytes for recipe in manifest.weights)
    assert told["memory_per_device"]["temporaries"] == max(one.memory.temporaries for one in manifest.entries)
    assert told["environment"]["cpu_features"] == list(manifest.environment.cpu_features)
    assert told["signers"] is None
    assert told["verdict"] == {
        "fits": True,
        "differences": [],
        "known_only_when_jax_starts": [],
        "mend": mend_command(copy),
        "rebuild": manifest.rebuild_command(copy),
    }


def test_what_does_not_fit_is_told_field_by_field_with_the_command_that_mends_it(manage, report, copy):
    rewrite(copy, jaxlib="0.9.9", machine="pdp11")
    done = manage("inspect", copy)
    assert done.code == 4
    assert "  jaxlib: built for '0.9.9', here" in done.out and "  machine: built for 'pdp11', here" in done.out
    assert f"Build it for this machine: {mend_command(copy)}" in done.out
    assert f"or, from its checkpoints: {read_manifest(copy).rebuild_command(copy)}" in done.out
    told, code = report("inspect", copy)
    assert code == 4 and [one["field"] for one in told["verdict"]["differences"]] == ["jaxlib", "machine"]


def test_what_only_jax_can_tell_is_left_to_it(manage, copy):
    rewrite(copy, platform="gpu", platform_version="cuda 13", device_kind="NVIDIA H100", cpu_features=())
    done = manage("inspect", copy)
    assert done.code == 0
    later = "platform, platform_version, device_kind, device_count, coordinates"
    assert f"known only when JAX starts: {later}" in done.out


@pytest.mark.parametrize(
    ("before", "loaded"), [("", "[]"), ("import dflash_aot.cache.devices", "['jax', 'jaxlib', 'numpy', 'ml_dtypes']")]
)
def test_it_starts_without_jax_from_anywhere(copy, tmp_path, before, loaded):
    place = tmp_path / "ein Pfad mit Leerzeichen, ünïcödé ☃" / "bundle"
    shutil.copytree(copy, place, copy_function=shutil.copyfile)
    for path in (place, *place.rglob("*")):
        os.utime(path, (0, 0))
    command = [sys.executable, "-c", INSPECT.format(before=before), "inspect", "bundle"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place.parent)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines()[-2:] == ["0", loaded]


@pytest.mark.parametrize("name", ["inspect", "verify", "gc", "sign"])
def test_without_a_bundle_the_command_that_builds_it_is_named_and_nothing_is_made(manage, tmp_path, make_key, name):
    key = ["--key", make_key("ours")[0]] if name == "sign" else []
    done = manage(name, tmp_path / "nowhere", *key)
    assert done.code == 2 and done.out == ""
    assert f"{PRECOMPILE} {tmp_path / 'nowhere'}" in done.err
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["inspect", "verify", "gc", "sign", "diff"])
def test_a_broken_manifest_is_corrupt_for_every_command(manage, copy, make_key, name):
    (copy / "manifest.json").write_bytes((copy / "manifest.json").read_bytes()[:-9])
    more = {"sign": ["--key", make_key("ours")[0]], "diff": [copy]}.get(name, [])
    before = snapshot(copy)
    done = manage(name, copy, *more)
    assert done.code == 3 and done.out == ""
    assert str(copy / "manifest.json") in done.err and PRECOMPILE in done.err
    assert snapshot(copy) == before


def test_a_grid_that_lacks_an_executable_is_corrupt(manage, copy):
    manifest = read_manifest(copy)
    (copy / "manifest.json").write_bytes(encode_manifest(structs.replace(manifest, entries=manifest.entries[1:])))
    for name in ("inspect", "verify"):
        done = manage(name, copy)
        assert done.code == 3 and "has no entry for" in done.err


# -- verify


def test_a_whole_bundle_is_verified_and_nothing_is_written(manage, copy):
    before = snapshot(copy)
    done = manage("verify", copy)
    assert done.code == 0 and "as the manifest promises" in done.out
    assert snapshot(copy) == before


def test_all_that_is_broken_is_told_at_once_and_moved(manage, report, copy):
    first, second = blob(copy, "verify"), blob(copy, "draft")
    whole = first.read_bytes()
    cut(first)
    second.unlink()
    (copy / "notes.txt").write_text("unknown")
    done = manage("verify", copy)
    assert done.code == 3
    assert (
        f"bytes is {len(whole) - 1}, the manifest promises {len(whole)}; now {copy}/set-aside/{first.name}.0"
        in done.out
    )
    assert f"{second} (draft" in done.out and "file is missing" in done.out
    assert f"{copy / 'notes.txt'}: unknown" in done.out
    assert f"Mend it: {mend_command(copy)}" in done.out
    assert (copy / "set-aside" / f"{first.name}.0").read_bytes() == whole[:-1]
    told, code = report("verify", copy)
    assert code == 3
    assert {(flaw["path"], flaw["field"]) for flaw in told["flaws"]} == {(str(first), "file"), (str(second), "file")}


def test_what_is_broken_stays_where_the_user_wants_it(report, copy):
    path = blob(copy)
    cut(path)
    told, code = report("verify", copy, "--noset_aside")
    assert code == 3 and told["set_aside"] == {} and told["not_set_aside"] is None
    assert path.exists() and not (copy / "set-aside").exists()


def test_where_nothing_can_be_moved_that_is_said(manage, copy):
    cut(blob(copy))
    (copy / "set-aside").touch()
    done = manage("verify", copy)
    assert done.code == 3 and "nothing more is set aside" in done.out
    assert blob(copy).exists()


def test_files_that_nobody_promised_are_no_fault(report, copy):
    (copy / "notes.txt").touch()
    told, code = report("verify", "--bundle", copy)
    assert code == 0 and [stray["what"] for stray in told["strays"]] == ["unknown"]


# -- sign, and who asks for signatures


def test_who_signed_is_verified_by_the_public_key_alone(manage, report, copy, make_key):
    private, public = make_key("ours")
    signed, code = report("sign", copy, "--key", private)
    assert code == 0 and signed["key"] == read_public_key(public).id and signed["signers"] == [signed["key"]]
    told, code = report("verify", copy, "--key", public)
    assert code == 0 and told["verified_key"] == signed["key"] and told["strays"] == []
    assert f"signed    by {signed['key']}, says its file" in manage("inspect", copy).out
    moved = shutil.move(copy, copy.with_name("moved"))
    assert manage("verify", moved, "--key", public).code == 0


def test_several_sign_one_after_the_other(report, copy, make_key):
    keys = [make_key(name) for name in ("ours", "theirs")]
    for private, _ in keys:
        told, _ = report("sign", copy, "--key", private)
    assert told["signers"] == [read_public_key(public).id for _, public in keys]
    assert [report("verify", copy, "--key", public)[1] for _, public in keys] == [0, 0]


@pytest.mark.parametrize("case", ["unsigned", "another key", "changed since"])
def test_what_was_not_signed_by_the_key_is_refused_before_it_is_parsed(manage, command, copy, make_key, case):
    private, public = make_key("ours")
    words = {"unsigned": "is not signed", "another key": "not by", "changed since": "since it was signed"}[case]
    if case != "unsigned":
        manage("sign", copy, "--key", private if case == "changed since" else make_key("theirs")[0])
    (copy / "manifest.json").write_bytes(b"not JSON" if case != "another key" else b"not even JSON")
    verified = manage("verify", copy, "--key", public)
    served = command(dflash_run, "--bundle", copy, "--prompt", "x", "--require_signature", public)
    for done in (verified, served):
        assert done.code == 3 and words in done.err and "manifest.sig.json" in done.err and done.out == ""


def test_signatures_of_a_manifest_that_is_gone_are_told_as_such(manage, copy, make_key):
    manage("sign", copy, "--key", make_key("ours")[0])
    rewrite(copy, xla_flags="--xla_other=1")
    assert "signed    not this manifest but another one" in manage("inspect", copy).out


def test_a_broken_bundle_is_not_signed(manage, copy, make_key):
    cut(blob(copy))
    done = manage("sign", copy, "--key", make_key("ours")[0])
    assert done.code == 3 and "nothing is signed" in done.err and f"dflash-bundle verify {copy}" in done.err
    assert not (copy / "manifest.sig.json").exists()


def test_keys_that_are_none_are_bad_input(manage, command, copy, make_key):
    private, public = make_key("ours")
    assert manage("sign", copy).code == 2
    assert manage("sign", copy, "--key", public).code == 2
    assert manage("verify", copy, "--key", private).code == 2
    assert manage("verify", copy, "--key", "").code == 2
    done = command(dflash_run, "--bundle", copy, "--prompt", "x", "--require_signature", "nowhere.pem")
    assert done.code == 2 and "nowhere.pem: No such file" in done.err


# -- diff


def test_a_copy_is_the_same(report, copy, bundle):
    told, code = report("diff", copy, bundle("tiny"))
    assert (code, told["equal"], told["changes"], told["executables"]) == (0, True, [], [])


def test_what_differs_is_told_and_the_code_is_that_of_diff(manage, report, copy, bundle):
    manifest = read_manifest(copy)
    others = structs.replace(manifest, dtype="bfloat16", entries=manifest.entries[:-1])
    (copy / "manifest.json").write_bytes(encode_manifest(others))
    done = manage("diff", "--bundle", bundle("tiny"), copy)
    last = manifest.entries[-1].signature.label
    assert done.code == 1
    assert 'dtype\n  - "float32"\n  + "bfloat16"\n' in done.out
    assert f"- {last}: only in a" in done.out
    told, code = report("diff", bundle("tiny"), copy)
    assert code == 1 and told["changes"] == [{"field": "dtype", "a": "float32", "b": "bfloat16"}]


# -- gc


def test_only_what_has_been_left_over_for_long_is_removed(manage, report, copy):
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


def test_nothing_is_removed_or_signed_while_a_builder_is_at_work(manage, copy, make_key):
    with Store(copy).open_for_building():
        for arguments in (["gc", copy], ["sign", copy, "--key", make_key("ours")[0]]):
            done = manage(*arguments)
            assert done.code == 5 and "another dflash-precompile or dflash-bundle is at work here" in done.err
        assert manage("gc", copy, "--dry_run").code == 0


# -- the command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no such command; there are inspect, verify, diff, sign, gc"),
        (["mend", "x"], "mend: no such command"),
        (["inspect"], "inspect takes one bundle; given: none"),
        (["inspect", "a", "b"], "inspect takes one bundle; given: a b"),
        (["inspect", "a", "--bundle", "b"], "inspect takes one bundle; given: b a"),
        (["diff", "a"], "diff takes two bundles; given: a"),
        (["inspect", "a", "--key", "k"], "--key: inspect has no such flag"),
        (["gc", "a", "--noset_aside"], "--set_aside: gc has no such flag"),
        (["gc", "a", "--keep_hours", "-1"], "keep_hours"),
        (["verify", "a", "--deeper"], "deeper"),
    ],
)
def test_what_a_command_does_not_take_is_refused(manage, arguments, words):
    done = manage(*arguments)
    assert done.code == 2 and words in done.err and done.out == ""


def test_help_names_every_command(manage):
    done = manage("--help")
    assert done.code == 0
    assert all(f"dflash-bundle {name}" in done.out for name in dflash_bundle.COMMANDS)


# -- calling executables


def test_all_executables_are_called_and_compared(manage, report, copy):
    count = len(read_manifest(copy).entries)
    done = manage("verify", copy, "--deep")
    assert done.code == 0 and f"{count} executables called, {count} compute what they did before" in done.out
    told, _ = report("verify", copy, "--deep")
    assert (told["calls"]["called"], told["calls"]["compared"], told["calls"]["faults"]) == (count, count, [])


def test_what_crashes_or_computes_something_else_is_named_moved_and_not_made_again(manage, report, copy):
    """Machine code with instructions that no processor has, all hashes right; and a canary of another program."""
    manifest, store = read_manifest(copy), Store(copy)
    by_program = {entry.signature.program: entry for entry in manifest.entries}
    crashing, wrong = by_program["draft"], by_program["verify"]
    ends, content = pack(store.read(crashing).replace(b"\x55\x48\x89\xe5", b"\x0f\x0b\x0f\x0b"))
    (copy / "executables" / ends.sha256).write_bytes(content)
    first, *rest = wrong.canary.outputs
    canary = structs.replace(wrong.canary, outputs=(structs.replace(first, mean=9.0), *rest))
    changed = {
        crashing.key: structs.replace(crashing, **structs.asdict(ends)),
        wrong.key: structs.replace(wrong, canary=canary),
    }
    entries = tuple(changed.get(entry.key, entry) for entry in manifest.entries)
    store.publish(structs.replace(manifest, entries=entries))
    told, code = report("verify", copy, "--deep")
    assert code == 3
    assert [(one["label"], one["kind"]) for one in told["calls"]["faults"]] == [
        (crashing.signature.label, "crash"),
        (wrong.signature.label, "canary"),
    ]
    assert "SIGILL" in told["calls"]["faults"][0]["words"]
    assert told["calls"]["set_aside"].keys() == {crashing.signature.label, wrong.signature.label}
    assert told["calls"]["mend"] == mend_command(copy)
    with pytest.raises(BuildFailed, match=r"the compiler made again what was set aside \(crash\).*SIGILL"):
        store.add(changed[crashing.key], content, b"")


def test_what_is_not_known_yet_is_recorded_when_asked(manage, report, copy):
    manifest = read_manifest(copy)
    entries = tuple(structs.replace(entry, canary=None) for entry in manifest.entries)
    Store(copy).publish(structs.replace(manifest, entries=entries))
    assert f"what {len(entries)} should compute is not known, --record keeps it" in manage("verify", copy, "--deep").out
    assert f"of {len(entries)} it is kept now" in manage("verify", copy, "--record").out
    assert [one.canary for one in read_manifest(copy).entries] == [one.canary for one in manifest.entries]


def test_on_another_machine_no_executable_is_called_or_moved(manage, copy):
    manifest, store = read_manifest(copy), Store(copy)
    there = structs.replace(manifest.environment, jaxlib="0.9.9")
    entries = tuple(
        structs.replace(entry, key=executable_key(store.read_program(entry), entry.signature, there))
        for entry in manifest.entries
    )
    store.publish(structs.replace(manifest, environment=there, entries=entries))
    before = snapshot(copy)
    done = manage("verify", copy, "--deep")
    assert done.code == 4 and "jaxlib: built for '0.9.9'" in done.err
    assert snapshot(copy) == before
