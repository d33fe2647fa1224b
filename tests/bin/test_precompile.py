"""dflash-precompile: builds, incremental builds, plans, refused command lines."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from msgspec import structs

from dflash_aot.bin import precompile
from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest
from dflash_aot.cache.bundle.verification import find_file_flaws
from dflash_aot.cache.environment import is_tpu_attached

SPECULATORS = Path(__file__).parents[1] / "golden" / "speculators-tiny"
CONFIGS = Path(__file__).parents[1] / "cache" / "configs"
GRID = "batch=1 length=32 k=0,3 prefill=16"
GREEDY = {"prefill": 1, "draft": 1, "verify": 2, "kv_write": 3}
COUNTS = {**GREEDY, "sampled_verify": 2, "admit": 1}
BUILT = "--sampling=greedy"  # as the bundle of these tests was built


@pytest.fixture
def pair(tied) -> list[str]:
    return [f"--target={tied.target}", f"--draft={tied.draft}"]


def test_only_missing_executables_are_compiled(command, pair, copy):
    for path in copy.rglob("*"):
        os.utime(path, (2**33, 2**33))
    build = [*pair, f"--bundle={copy}", f"--buckets={GRID}", BUILT]
    done = command(precompile, *build)
    assert (done.code, done.out) == (0, "")
    assert "nothing to compile: all 7 were there already" in done.err
    assert all(program in done.err for program in GREEDY)
    smallest = min(read_manifest(copy).entries, key=lambda entry: entry.bytes)
    (copy / "executables" / smallest.sha256).unlink()
    done = command(precompile, *build, "--json", "--jobs=1")
    report = json.loads(done.out)
    assert (done.code, report["executables"], report["compiled"], report["reused"]) == (0, 7, 1, 6)
    assert report["dialect"] == "z-lab"
    assert [entry["bucket"] for entry in report["entries"] if entry["compiled"]] == [smallest.signature.bucket]
    assert report["bytes"] == sum(entry["bytes"] for entry in report["entries"])


def test_build_adds_to_the_grid_unless_exact(command, pair, copy):
    """A smaller grid keeps what the bundle serves; sizes and sampling modes that are new are added."""
    smaller = "batch=1 length=32 k=0 prefill=16"
    done = command(precompile, *pair, f"--bundle={copy}", f"--buckets={smaller}", BUILT)
    assert done.code == 0 and "nothing to compile: all 7 were there already" in done.err
    assert f"what the bundle has is kept: the grid is '{GRID}', sampling greedy; --exact drops the rest" in done.err
    assert str(read_manifest(copy).grid) == GRID
    plan = [*pair, f"--bundle={copy}", "--buckets=batch=1 length=16 k=0 prefill=16", "--sampling=sample"]
    planned = json.loads(command(precompile, *plan, "--plan", "--json").out)
    assert planned["grid"] == "batch=1 length=16,32 k=0,3 prefill=16" and planned["sampling"] == ["greedy", "sample"]
    done = command(precompile, *pair, f"--bundle={copy}", f"--buckets={smaller}", BUILT, "--exact")
    assert "3 of 7 executables leave the bundle (1 draft, 1 verify, 1 kv_write)" in done.err
    assert str(read_manifest(copy).grid) == smaller


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (["--dtype=bfloat16"], {"dtype": ("float32", "bfloat16")}),
        (["--weights=int8"], {"weights": ("plain", "int8"), "draft_weights": ("plain", "int8")}),
        (
            ["--dtype=bfloat16", "--draft_weights=int8", "--exact"],
            {"dtype": ("float32", "bfloat16"), "draft_weights": ("plain", "int8")},
        ),
        pytest.param(
            ["--topology=v5e:1x1"],
            {"dtype": ("float32", "bfloat16"), "platform": ("cpu", "tpu"), "topology": ("", "v5e:1x1")},
            marks=pytest.mark.skipif(is_tpu_attached(), reason="a TPU is attached"),
        ),
    ],
)
def test_build_that_would_replace_the_bundle_must_say_so(command, pair, copy, flags, fields):
    build = [*pair, f"--bundle={copy}", f"--buckets={GRID}", BUILT, *flags, "--plan"]
    for refused in (command(precompile, *build), command(precompile, *build[:-1])):
        assert refused.code == 2 and "--replace" in refused.err
        named = re.findall(r"^  (\w+): built for '(.*)', asked for '(.*)'$", refused.err, re.MULTILINE)
        assert {field: (built, asked) for field, built, asked in named} == fields
    done = command(precompile, *build, "--replace")
    changes = ", ".join(f"{field} '{asked}' instead of '{built}'" for field, (built, asked) in fields.items())
    assert done.code == 0 and f"the bundle's 7 executables are replaced: {changes}" in done.err


def test_pair_that_differs_only_in_the_suggested_k_is_the_same(command, pair, copy):
    manifest = read_manifest(copy)
    heads = structs.replace(manifest.draft.facts.heads, k=5)
    draft = structs.replace(manifest.draft, facts=structs.replace(manifest.draft.facts, heads=heads))
    (copy / "manifest.json").write_bytes(encode_manifest(structs.replace(manifest, draft=draft)))
    done = command(precompile, *pair, f"--bundle={copy}", f"--buckets={GRID}", BUILT, "--plan")
    assert done.code == 0 and "all are there already" in done.err


def test_plan_counts_executables_and_builds_nothing(command, pair, tmp_path):
    (tmp_path / "grid.toml").write_text("batch = 1\nlength = [32]\nk = [0, 3]\nprefill = [16]\n")
    arguments = [*pair, f"--bundle={tmp_path / 'bundle'}", "--plan"]
    done = command(precompile, *arguments, f"--buckets={tmp_path / 'grid.toml'}", "--json")
    plan = json.loads(done.out)
    assert (done.code, plan["executables"], plan["programs"], plan["grid"]) == (0, 10, COUNTS, GRID)
    assert plan["weight_bytes"] > 0 and plan["state_bytes"] > 0
    done = command(precompile, *arguments, "--sampling=sample")
    assert (done.code, done.out) == (0, "") and "executables for" in done.err
    sampled = json.loads(command(precompile, *arguments, "--sampling=sample", "--json").out)
    assert sampled["sampling"] == ["sample"]
    assert "sampled_verify" in sampled["programs"] and "verify" not in sampled["programs"]
    assert "k=0,3,7" in sampled["grid"]  # by default, of a block of 8
    assert not (tmp_path / "bundle").exists()


def copy_configs(place: Path, **names: str) -> list[str]:
    """Copies published configs of a pair, and returns the flags that name them."""
    for name in names.values():
        (place / name).mkdir()
        (place / name / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
    return [f"--{role}={place / name}" for role, name in names.items()]


@pytest.mark.parametrize(
    ("flags", "weights", "gigabytes", "summary"),
    [
        ([], "int8", 10.9, "become int8 with a scale per output channel, rounded"),
        (["--weights=bfloat16"], "bfloat16", 18.5, "multiplied out to bfloat16"),
    ],
)
def test_quantized_checkpoint_is_planned_in_int8_by_default(command, tmp_path, flags, weights, gigabytes, summary):
    pair = copy_configs(tmp_path, target="Qwen3-8B-FP8", draft="Qwen3-8B-DFlash-b16")
    grid = "--buckets=batch=1 length=1024 k=0,7 prefill=256"
    done = command(precompile, *pair, "--dtype=bfloat16", grid, "--plan", "--json", *flags)
    plan = json.loads(done.out)
    found = plan["stored_weights"]["target"]
    assert (found["stored"], found["weights"], found["exact"]) == ("fp8-blocks", weights, False)
    assert "draft" not in plan["stored_weights"]
    assert "target: weights stored as FP8 with a scale per 128 x 128 block" in done.err and summary in done.err
    assert round(plan["weight_bytes"] / 1e9, 1) == gigabytes


@pytest.mark.skipif(is_tpu_attached(), reason="a TPU is attached")
def test_platform_tpu_without_a_tpu_needs_a_topology(command):
    done = command(precompile, "--platform=tpu")
    assert (done.code, done.out) == (2, "")
    assert "no TPU is attached. Name the slice with --topology: v4:1x1x1" in done.err


WRONG_COMMAND_LINES = [
    (["--unknown"], "unknown"),
    (["here"], "unexpected 'here'"),
    (["--jobs=0"], "jobs"),
    (["--dtype=float64"], "float64"),
    (["--buckets=batch=1 length=32 k=0"], "prefill missing"),
    (["--buckets=batch=1 length=32 k=0 prefill=8 saved_states=2"], "saved_states=2: the target has no recurrent state"),
    (["--buckets=batch=1 length=32 k=0 prefill=8 mixed=2"], "mixed=2: expected 1 for calls that verify a round and"),
    (["--buckets=batch=1 length=32 k=0 prefill=8 offload=2"], "offload=2: expected 1 for calls that copy kv pages and"),
    (["--platform=cpu", "--weights=bfloat16"], "--weights bfloat16: weights are int8, or have the dtype of the"),
    (["--platform=abacus"], "abacus"),
    (["--sampling=greedy,beam"], "--sampling 'greedy,beam': unknown sampling mode 'beam'"),
    (["--sampling=sample,sample"], "--sampling 'sample,sample' has a sampling mode twice"),
    (["--tensor_parallel=0"], "tensor_parallel"),
    (["--platform=cpu", "--tensor_parallel=4096"], "XLA_FLAGS=--xla_force_host_platform_device_count=4096"),
    (["--platform=cpu", "--topology=v5e:2x2"], "--topology v5e:2x2 is a TPU slice, but --platform is cpu"),
    (["--topology=V5E:2x2"], "did you mean v5e:2x2?"),
    (["--topology=v5e:2x2", "--tensor_parallel=2"], "--tensor_parallel 2: v5e:2x2 has 4 devices"),
    (["--target=/nowhere"], "--target without --draft"),
    (["--draft=/nowhere"], "/nowhere: no such directory"),
    (["--target=/dev/null", "--draft=/nowhere"], "is a file"),
    (["--target=no/such-model", "--draft=/nowhere"], "hf download no/such-model"),
]


def test_wrong_command_line_is_refused_by_name(command):
    for arguments, words in WRONG_COMMAND_LINES:
        done = command(precompile, *arguments)
        assert (done.code, done.out) == (2, "")
        assert words in done.err and done.err.startswith("dflash-precompile: ")


def test_speculative_config_sets_draft_and_k(command, tied, tmp_path):
    where = [f"--target={tied.target}", f"--bundle={tmp_path}", "--plan"]
    asked = {"method": "dflash", "model": str(tied.draft), "num_speculative_tokens": 5}
    done = command(precompile, *where, "--json", f"--speculative_config={json.dumps(asked)}")
    assert (done.code, json.loads(done.out)["grid"].split()[2]) == (0, "k=0,2,5")
    assert "draft in z-lab format: 2 layers, blocks of 8, target_layer_ids 1, 3" in done.err


def test_target_defaults_to_the_one_that_the_draft_names(command, tied, tmp_path, monkeypatch):
    """As speculators stores it; --target takes precedence, and an empty name is ignored."""
    config = json.loads((SPECULATORS / "draft" / "config.json").read_text())
    (tmp_path / "draft").mkdir()

    def plan(name, *arguments):
        config["speculators_config"]["verifier"]["name_or_path"] = name
        (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
        return command(precompile, f"--draft={tmp_path / 'draft'}", "--plan", *arguments)

    monkeypatch.chdir(tied.directory.parent)
    done = plan("qwen3-tiny-tied/target")
    assert done.code == 0 and "its own embedding and head over 160 of 512 tokens" in done.err
    assert plan("/nowhere").code == 2
    assert plan("/nowhere", f"--target={tied.target}").code == 0
    done = plan("")
    assert done.code == 2 and "--draft without --target, and the config of" in done.err


@pytest.mark.parametrize("name", ["file", "/proc/bundle"])
def test_unwritable_bundle_directory_is_refused_before_anything_is_compiled(command, pair, tmp_path, name):
    (tmp_path / "file").write_text("")
    done = command(precompile, *pair, f"--bundle={tmp_path / name}", f"--buckets={GRID}")
    assert done.code == 2 and f"cannot write to {tmp_path / name}" in done.err
    assert "exe/s" not in done.err  # no bar


def test_build_resumes_after_a_full_disk(command, pair, copy, full_disk):
    flags = [*pair, f"--bundle={copy}", f"--buckets={GRID}", BUILT]
    before, entries = (copy / "manifest.json").read_bytes(), read_manifest(copy).entries
    smallest = min(entries, key=lambda entry: entry.bytes)
    (copy / "executables" / smallest.sha256).unlink()
    with full_disk(100):
        done = command(precompile, *flags)
    assert done.code == 5 and f"1 of {len(entries)} executables could not be built, the others are kept" in done.err
    assert re.search(rf"{smallest.signature.label}: OSError: .* File too large: '{copy}/\w+/[0-9a-f]{{64}}'", done.err)
    assert (copy / "manifest.json").read_bytes() == before and list(copy.rglob("*.unfinished")) == []
    assert command(precompile, *flags).code == 0
    assert find_file_flaws(copy, read_manifest(copy)) == []


def test_too_little_disk_space_is_refused(command, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    done = command(precompile, "--bundle", tmp_path, "--buckets", "batch=1 length=64 k=0,7 prefill=32")
    assert done.code == 2
    assert re.search(r"\d+ executables take about [\d.]+ [kM]B on disk, and 1.0 kB are free there", done.err)
    assert list((tmp_path / "executables").iterdir()) == []
