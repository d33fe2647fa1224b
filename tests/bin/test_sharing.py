"""Shared stores (--store), and bundles in object stores."""

import json

import pytest

from dflash_aot.bin import bundle as bundle_command
from dflash_aot.bin import precompile, run
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.remote.transfer import push_bundle
from dflash_aot.runtime import Engine, SamplingParams

GRID = "batch=1 length=32 k=0,3 prefill=16"
PROMPT = [5, 6, 7]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def build(command, tied, bucket):
    """Builds into a directory with a bucket as the shared store; returns the report."""

    def build(place, store=None, code=0):
        flags = [f"--target={tied.target}", f"--draft={tied.draft}", f"--bundle={place}", f"--buckets={GRID}"]
        store = f"--store={store or bucket.url}/team"
        done = command(precompile, *flags, "--sampling=greedy", "--platform=cpu", "--noself_test", "--json", store)
        assert done.code == code, done.err
        return json.loads(done.out) if code == 0 else done

    return build


@pytest.fixture
def pushed(copy, bucket):
    push_bundle(copy, bucket.url)
    return bucket


def generate(place, **options):
    with Engine.open(place, **options) as engine:
        return engine.generate(PROMPT, SamplingParams(max_tokens=12)).token_ids


def test_second_machine_finds_all_executables_in_the_store(build, copy, bucket, command, tmp_path):
    first = build(copy)
    assert first["store"] == {
        "url": f"{bucket.url}/team", "writable": True, "hits": 0, "misses": 0, "written": 7, "failures": []
    }  # fmt: skip
    other = tmp_path / "another machine"
    second = build(other)
    assert (second["compiled"], second["reused"], second["store"]["hits"], second["store"]["written"]) == (0, 7, 7, 0)
    assert read_manifest(other).entries == read_manifest(copy).entries
    done = command(bundle_command, "push", other, f"{bucket.url}/served")
    assert (done.code, done.err) == (0, "")
    (tmp_path / "lines").write_text(json.dumps({"prompt_ids": PROMPT, "max_tokens": 12}) + "\n")
    answers = []
    for place in (copy, f"{bucket.url}/served"):
        done = command(run, f"--bundle={place}", f"--input={tmp_path / 'lines'}")
        assert done.code == 0, done.err
        answers.append(json.loads(done.out)["token_ids"])
    assert answers[0] == answers[1] == generate(f"{bucket.url}/served")


def test_unusable_store_is_refused_before_anything_is_built(build, tmp_path):
    for store, words in (
        ("s3://nobodys", "s3://nobodys/team/.writable: The specified bucket does not exist"),
        ("gs://bucket", "the package for gs is not installed: pip install 'dflash-aot[gcs]'"),
        ("nonsense://me:secret@bucket", "dflash-precompile: nonsense://bucket/team: Protocol not known: nonsense"),
    ):
        assert words in build(tmp_path / "bundle", store, code=2).err
        assert not (tmp_path / "bundle").exists()


def test_require_signature_applies_to_a_bundle_at_a_url(command, pushed, copy, make_key):
    private, public = make_key("mine")
    done = command(run, f"--bundle={pushed.url}", "--prompt=a", f"--require_signature={public}")
    assert done.code == 3 and "not signed" in done.err
    assert command(bundle_command, "sign", copy, f"--key={private}").code == 0
    push_bundle(copy, pushed.url)
    assert generate(pushed.url, require_signature=public) == generate(copy)
