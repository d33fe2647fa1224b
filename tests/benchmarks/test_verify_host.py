"""benchmarks/verify_host.py, which cannot be tried on its TPU here: what is wrong is found, and rounding forgiven."""

import json
import os
import shutil
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dflash_aot.benchmarks import agreement, verify_host
from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest
from dflash_aot.cache.errors import BadInput


@pytest.fixture
def verify(monkeypatch, capsys):
    """Flags → exit code, standard output, standard error."""

    def run(**flags: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["verify_host.py", *(f"--{flag}={value}" for flag, value in flags.items())])
        capsys.readouterr()
        code = verify_host.main()
        written = capsys.readouterr()
        return code, written.out, written.err

    return run


@pytest.fixture
def golden(bundle, verify, tmp_path) -> Path:
    """What the tiny bundle computes."""
    path = tmp_path / "golden.json"
    code, out, err = verify(bundle=bundle("tiny"), record=path)
    assert (code, err) == (0, "") and str(path) in out
    return path


@pytest.fixture
def changed(tied, tmp_path):
    """A checkpoint of the tied pair whose weights somebody has changed."""

    def change(role: str, factor: float) -> Path:
        place = Path(shutil.copytree(getattr(tied, role), tmp_path / role))
        tensors = load_file(place / "model.safetensors")
        save_file({name: tensor * factor for name, tensor in tensors.items()}, place / "model.safetensors")
        return place

    return change


def test_a_sound_bundle_is_found_sound_and_measured(bundle, verify, golden):
    code, out, err = verify(bundle=bundle("tiny"), golden=golden)
    assert (code, err) == (0, "")
    assert "K = 3 against K = 0: 16 of 16 tokens equal" in out
    assert "golden, float32 on cpu: 16 of 16 tokens equal" in out
    assert "golden, float32 on cpu, K = 3:" in out
    lines = [line.split() for line in out.splitlines()]
    assert [(line[:2]) for line in lines if line[:1] == ["32"]] == [["32", "0"], ["32", "3"]]
    assert all(float(number) > 0 for line in lines if line[:1] == ["32"] for number in line[2:])


def test_other_weights_are_found(bundle, verify, golden, changed):
    code, _, err = verify(bundle=bundle("tiny"), golden=golden, target=changed("target", 1.5))
    assert code == 1
    assert "golden, float32 on cpu:" in err and "tokens differ" in err and "against K = 0" not in err


def test_a_draft_that_guesses_wrong_is_found_though_every_token_is_right(bundle, verify, golden, changed):
    code, out, err = verify(bundle=bundle("tiny"), golden=golden, draft=changed("draft", -1.0))
    assert code == 1
    assert "golden, float32 on cpu: 16 of 16 tokens equal" in out
    assert "drafted tokens accepted per round instead of" in err and "tokens differ" not in err


def test_an_executable_that_computes_something_else_is_found(bundle, verify, tmp_path):
    """Verification at length 208 sees no more than 64 positions; every hash is right, and nothing is recorded."""
    copy = Path(shutil.copytree(bundle("tied"), tmp_path / "bundle"))
    manifest = read_manifest(copy)
    entries = {entry.signature.label: entry for entry in manifest.entries}
    short = entries["verify batch=1 length=64 k=3"]
    long = entries["verify batch=1 length=208 k=3"]
    wrong = msgspec.structs.replace(short, signature=long.signature)
    swapped = tuple(wrong if entry is long else entry for entry in manifest.entries)
    (copy / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, entries=swapped)))
    code, out, err = verify(bundle=copy, record=tmp_path / "golden.json")
    assert code == 1, err
    assert "K = 3 against K = 0" in err and "K = 7 against K = 0" not in err
    assert "K = 7 against K = 0: 64 of 64 tokens equal" in out
    assert not (tmp_path / "golden.json").exists()


@pytest.mark.parametrize("content", ["", "{}", "[]"])
def test_what_is_no_golden_is_refused(bundle, verify, tmp_path, content):
    (tmp_path / "golden.json").write_text(content)
    code, _, err = verify(bundle=bundle("tiny"), golden=tmp_path / "golden.json")
    assert code == 2 and str(tmp_path / "golden.json") in err


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.update(runs=[]),
        lambda facts: facts["runs"][0]["accepted"].pop("3"),
        lambda facts: facts["runs"][1]["accepted"].update({"3": []}),
        lambda facts: facts["runs"][1].update(token_ids=[]),
    ],
    ids=["no runs", "different Ks", "no rounds", "no tokens"],
)
def test_a_golden_that_lacks_something_is_refused(golden, change):
    facts = json.loads(golden.read_text())
    change(facts)
    golden.write_text(json.dumps(facts))
    with pytest.raises(BadInput, match="golden.json: "):
        agreement.read_golden(golden)


def test_a_golden_of_another_pair_is_refused(bundle, verify, golden):
    facts = json.loads(golden.read_text())
    facts["target"]["decoder"]["epsilon"] = 1e-5
    golden.write_text(json.dumps(facts))
    refuse_at_once(verify, bundle("tiny"), "recorded with another target", golden=golden)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: run.update(accepted={"7": [1]}), "recorded with k=0,7, and the bundle has k=0,3: nothing to"),
        (lambda run: run.update(accepted={}), "recorded with k=0, and the bundle has k=0,3: nothing to"),
        (lambda run: run.update(prompt_ids=[1] * 26), "takes 33 positions, and the bundle ends at length=32"),
    ],
    ids=["other Ks", "no Ks", "longer"],
)
def test_a_golden_that_does_not_fit_the_bundle_is_refused(bundle, verify, golden, change, words):
    facts = json.loads(golden.read_text())
    for run in facts["runs"]:
        change(run)
    golden.write_text(json.dumps(facts))
    refuse_at_once(verify, bundle("tiny"), words, golden=golden)


def test_a_golden_that_just_fits_is_compared(bundle, verify, golden):
    facts = json.loads(golden.read_text())
    assert len(facts["runs"][0]["token_ids"]) == 8
    facts["runs"][0]["prompt_ids"] = [1] * 25
    golden.write_text(json.dumps(facts))
    code, out, err = verify(bundle=bundle("tiny"), golden=golden)
    assert code == 1 and "golden, float32 on cpu, K = 3:" in out and "tokens differ" in err  # of another prompt


def test_a_record_that_cannot_be_written_is_refused(bundle, verify, tmp_path):
    refuse_at_once(verify, bundle("tiny"), "there is no directory", record=tmp_path / "none" / "golden.json")
    refuse_at_once(verify, bundle("tiny"), "no file can be written", record=tmp_path)


def refuse_at_once(verify, bundle, words: str, **flags: object) -> None:
    """Before the weights are looked for: there are none."""
    code, out, err = verify(bundle=bundle, target=bundle / "nowhere", **flags)
    assert (code, out) == (2, "") and words in err, err


def test_what_was_found_is_told_though_the_rest_fails(bundle, verify, golden, changed, monkeypatch):
    def run_out(host, prompts):
        raise BadInput("no more")

    monkeypatch.setattr(verify_host, "measure", run_out)
    code, _, err = verify(bundle=bundle("tiny"), golden=golden, target=changed("target", 1.5))
    first, *_, last = err.splitlines()
    assert (code, last) == (2, "verify_host: no more") and "tokens differ" in first


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="a disk that is full, on Linux")
def test_a_full_disk_is_told_in_words(bundle, verify):
    code, _, err = verify(bundle=bundle("tiny"), record="/dev/full")
    assert (code, err) == (2, "verify_host: --record /dev/full: No space left on device\n")


# -- what a difference is


tokens = st.integers(0, 3)


@given(st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=3), st.lists(tokens, min_size=1, max_size=12))))
def test_every_token_is_compared_behind_the_expected_text(runs):
    """A decoder that any text leads somewhere: its choice behind each prefix, one at a time."""

    def choose(text: list[int]) -> int:
        return sum((place + 1) * token for place, token in enumerate(text)) % 4

    def decode(asked):
        answers = []
        for prompt, count in asked:
            text = list(prompt)
            for _ in range(count):
                text.append(choose(text))
            answers.append(text[len(prompt) :])
        return answers

    expected = {
        (number, place, answer[place], choose(prompt + answer[:place]))
        for number, (prompt, answer) in enumerate(runs)
        for place in range(len(answer))
        if choose(prompt + answer[:place]) != answer[place]
    }
    found = [(one.prompt, one.position, one.expected, one.found) for one in agreement.compare(runs, decode)]
    assert set(found) == expected and len(found) == len(expected)


@pytest.mark.parametrize(
    ("wrong", "exact", "sound"), [(0, True, True), (1, True, False), (9, False, True), (11, False, False)]
)
def test_rounding_is_forgiven_where_there_is_any(capsys, wrong, exact, sound):
    verdict = agreement.Verdict()
    differences = [agreement.Difference(0, place, 1, 2) for place in range(wrong)]
    verdict.note_tokens("this", 100, differences, exact)
    assert (verdict.failures == []) == sound
    assert f"{100 - wrong} of 100" in capsys.readouterr().out
