"""`dflash-bundle verify --golden` and --record_golden: wrong answers are found, and rounding is tolerated."""

import json
import os
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file, save_file

from dflash_aot.bin import bundle as bundle_command
from dflash_aot.bin import golden as golden_module
from dflash_aot.bin.golden import GoldenOptions
from dflash_aot.bin.golden_check import check_answers
from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest


@pytest.fixture
def verify(command):
    """A bundle and flags → the finished `dflash-bundle verify`."""

    def run(place: Path, *arguments: str | Path, **given: object):
        return command(bundle_command, "verify", place, *arguments, *(f"--{name}={at}" for name, at in given.items()))

    return run


@pytest.fixture
def golden(bundle, verify, tmp_path) -> Path:
    path = tmp_path / "golden.json"
    done = verify(bundle("tiny"), record_golden=path)
    assert (done.code, done.err) == (0, "") and f"answers are in {path}" in done.out
    return path


@pytest.fixture
def changed(tied, tmp_path):
    """Makes a checkpoint of the tied pair whose weights are multiplied by a factor."""

    def change(role: str, factor: float) -> Path:
        place = Path(shutil.copytree(getattr(tied, role), tmp_path / role))
        tensors = load_file(place / "model.safetensors")
        save_file({name: tensor * factor for name, tensor in tensors.items()}, place / "model.safetensors")
        return place

    return change


def test_sound_bundle_passes_and_is_timed(bundle, verify, golden):
    done = verify(bundle("tiny"), golden=golden)
    assert (done.code, done.err) == (0, "")
    assert "K = 3 against K = 0: 16 of 16 tokens equal" in done.out
    assert "golden, float32 on cpu: 16 of 16 tokens equal" in done.out
    assert "golden, float32 on cpu, K = 3:" in done.out
    lines = [line.split() for line in done.out.splitlines()]
    assert [line[:2] for line in lines if line[:1] == ["32"]] == [["32", "0"], ["32", "3"]]
    assert all(float(number) > 0 for line in lines if line[:1] == ["32"] for number in line[2:])
    report = json.loads(verify(bundle("tiny"), "--json", golden=golden).out)["golden"]
    assert [(one["name"], one["differences"]) for one in report["comparisons"]] == [
        ("golden, float32 on cpu", []),
        ("K = 3 against K = 0", []),
    ]
    assert report["failures"] == [] and report["recorded"] is None and report["golden"] == str(golden)
    assert [(one["length"], one["k"]) for one in report["timings"]] == [(32, 0), (32, 3)]


def test_other_weights_are_found(bundle, verify, golden, changed):
    done = verify(bundle("tiny"), golden=golden, target=changed("target", 1.5))
    assert done.code == 4
    failures = done.out.partition("wrong on this machine")[2]
    assert "golden, float32 on cpu:" in failures and "tokens differ" in failures and "against K = 0" not in failures
    assert "  prompt 0, token " in done.out and ", expected " in done.out


def test_wrong_draft_is_found_although_every_token_is_right(bundle, verify, golden, changed):
    done = verify(bundle("tiny"), golden=golden, draft=changed("draft", -1.0))
    assert done.code == 4
    assert "golden, float32 on cpu: 16 of 16 tokens equal" in done.out
    assert "drafted tokens accepted per round instead of" in done.out and "tokens differ" not in done.out


def test_executable_that_computes_something_else_is_found(bundle, tmp_path):
    """One verification has layers 0 and 1 in the other order. Every hash is right, and no golden is recorded."""
    copy = Path(shutil.copytree(bundle("tied"), tmp_path / "bundle"))
    manifest = read_manifest(copy)
    entries = {entry.signature.label: entry for entry in manifest.entries}
    right = entries["verify batch=1 length=208 k=7"]
    order = {".layers.0.": ".layers.1.", ".layers.1.": ".layers.0."}
    names = [re.sub(r"\.layers\.[01]\.", lambda found: order[found[0]], name) for name in right.signature.weights]
    wrong = msgspec.structs.replace(right, signature=msgspec.structs.replace(right.signature, weights=tuple(names)))
    swapped = tuple(wrong if entry is right else entry for entry in manifest.entries)
    (copy / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, entries=swapped)))
    report = check_answers(copy, read_manifest(copy), GoldenOptions(record=tmp_path / "golden.json"))
    names = {one.name for one in report.comparisons}
    assert names >= {f"K = {k} with up to 3 rows against one" for k in (0, 7)}
    assert report.recorded is None and any(one.startswith("K = 7 against K = 0: ") for one in report.failures)
    assert not (tmp_path / "golden.json").exists()


UNFIT = (
    (lambda run: run.update(accepted={"7": [1]}), "recorded with k=0,7, and the bundle has k=0,3: the draft"),
    (lambda run: run.update(accepted={}), "recorded with k=0, and the bundle has k=0,3: the draft"),
    (lambda run: run.update(prompt_ids=[1] * 26), "takes 33 positions, and the bundle ends at length=32"),
)


def test_golden_that_does_not_fit_the_bundle_is_refused(bundle, verify, golden):
    recorded = golden.read_text()
    for change, words in UNFIT:
        facts = json.loads(recorded)
        for run in facts["runs"]:
            change(run)
        golden.write_text(json.dumps(facts))
        expect_refusal(verify, bundle("tiny"), words, golden=golden)
    for content, words in ((b'{"dtype":"\xff"}', "utf-8"), (b"{", "Input data was truncated")):
        golden.write_bytes(content)
        expect_refusal(verify, bundle("tiny"), words, golden=golden)
    facts = json.loads(recorded)
    facts["target"]["decoder"]["epsilon"] = 1e-5
    golden.write_text(json.dumps(facts))
    expect_refusal(verify, bundle("tiny"), "recorded with another target", golden=golden)


def test_golden_file_that_cannot_be_written_is_refused(bundle, verify, tmp_path):
    expect_refusal(verify, bundle("tiny"), "there is no directory", record_golden=tmp_path / "none" / "golden.json")
    expect_refusal(verify, bundle("tiny"), "cannot be written", record_golden=tmp_path)


def expect_refusal(verify, bundle: Path, words: str, **given: object) -> None:
    """Before the weights are looked for: there are none."""
    done = verify(bundle, target=bundle / "nowhere", **given)
    assert (done.code, done.out) == (2, "") and words in done.err, done.err


def test_checkpoints_without_golden_are_refused(bundle, verify):
    done = verify(bundle("tiny"), target="anywhere")
    assert done.code == 2 and "only with --golden, --record_golden or --execute" in done.err


@pytest.mark.parametrize(("tokens", "allowed"), [(16, 2), (200, 8)])
def test_share_of_tokens_that_rounding_may_change(tokens, allowed):
    """4 %, but at least two tokens; none where both sides compute in the same arithmetic."""

    def judge(wrong: int, exact: bool = False) -> str:
        differences = [golden_module.TokenDifference(0, position, 1, 2) for position in range(wrong)]
        return golden_module.TokenComparison("K = 3", tokens, differences, exact).failure

    assert judge(allowed) == ""
    assert judge(allowed + 1) == f"K = 3: {allowed + 1} of {tokens} tokens differ, more than rounding explains"
    assert judge(1, exact=True) == f"K = 3: 1 of {tokens} tokens differ, in the same arithmetic"


def test_golden_is_not_recorded_over_what_the_check_reads(bundle, verify, golden, tmp_path):
    before, link = golden.read_bytes(), tmp_path / "same.json"
    os.link(golden, link)
    for path in (golden, link):
        expect_refusal(verify, bundle("tiny"), "is the same file as --golden", golden=golden, record_golden=path)
    assert golden.read_bytes() == before
