"""Manifests: encoding, refusals of damaged and invalid ones, and build commands."""

import json
import shlex
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from dflash_aot.cache.bundle.manifest import (
    SCHEMA,
    DraftModel,
    InstructionEstimate,
    ScheduleEstimate,
    TargetModel,
    UnestimatedWork,
    encode_manifest,
    generic_build_command,
    parse_manifest,
    read_manifest,
)
from dflash_aot.cache.bundle.weight_recipe import WeightFormats
from dflash_aot.cache.errors import CorruptBundle, IncompatibleBundle, MissingBundle


@pytest.fixture
def bundle(tmp_path, manifest):
    """A directory that holds only a manifest."""
    (tmp_path / "manifest.json").write_bytes(encode_manifest(manifest))
    return tmp_path


@pytest.fixture
def edit_manifest(bundle):
    """Returns a function that changes the manifest's JSON without updating its digest."""
    path = bundle / "manifest.json"

    def edit(change):
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
        return bundle

    return edit


def test_manifest_is_read_back_as_written(bundle, manifest):
    found = read_manifest(bundle)
    assert structs.replace(found, digest="") == manifest
    assert encode_manifest(found) == encode_manifest(manifest)


def test_manifest_is_indented_json(bundle):
    lines = (bundle / "manifest.json").read_text().splitlines()
    assert f' "schema": {SCHEMA},' in lines
    assert max(map(len, lines)) < 200


def test_estimate_is_read_back_and_absent_where_there_is_none(tmp_path, manifest):
    """Bundles of before the estimate are read; their entries have no estimate and no ratio."""
    first, *others = manifest.entries
    longest = InstructionEstimate("fusion.1", "while/body/dot_general", "bf16[16,9728]", 36, 2e-3)
    left_out = UnestimatedWork("copy-start", 1, 65536)
    schedule = ScheduleEstimate(3e-3, 4_500_000, 0.0, 1e-4, (longest,), (left_out,), ("%while.1 counts once",))
    cost = structs.replace(first.cost, schedule=schedule, bound_seconds=2e-3)
    changed = structs.replace(manifest, entries=(structs.replace(first, cost=cost), *others))
    content = encode_manifest(changed)
    found = parse_manifest(tmp_path, content)
    assert [entry.cost for entry in found.entries] == [cost, *(entry.cost for entry in others)]
    assert [entry.cost.ratio for entry in found.entries] == [1.5, *[None] * len(others)]
    assert content.count(b'"schedule"') == 1 and b"schedule" not in encode_manifest(manifest)


def test_arrays_by_name_has_state_and_weights(manifest):
    known = manifest.arrays_by_name()
    assert known["lengths"].shape == (1,)
    assert known["draft.fc.weight"].bytes == 2560 * 12800 * 2
    assert len(known) == len(manifest.state) + len(manifest.weights)


def test_missing_bundle_is_refused_with_the_build_command(tmp_path):
    path = tmp_path / "my bundle"
    with pytest.raises(MissingBundle) as missing:
        read_manifest(path)
    assert f"{path}/manifest.json does not exist" in str(missing.value)
    assert f"dflash-precompile --bundle '{path}'" in str(missing.value)
    assert missing.value.exit_code == 2


def test_file_instead_of_a_bundle_directory_is_refused(tmp_path):
    (tmp_path / "bundle").write_text("")
    with pytest.raises(MissingBundle):
        read_manifest(tmp_path / "bundle")


def test_directory_instead_of_a_manifest_is_refused(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(CorruptBundle, match=r"manifest\.json: a directory, where .*Build it again: dflash-precompile"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("size", [1 << 53, (1 << 63) - 1, 1 << 63, -1])
def test_impossible_size_is_refused(bundle, manifest, size):
    entry = structs.replace(manifest.entries[0], serialized_bytes=size)
    (bundle / "manifest.json").write_bytes(encode_manifest(structs.replace(manifest, entries=(entry,))))
    with pytest.raises(CorruptBundle, match=r"Expected `int` .*serialized_bytes|Integer value out of range"):
        read_manifest(bundle)


@pytest.mark.parametrize("kept", [0, 1, 500, -2])
def test_truncated_manifest_is_refused(bundle, kept):
    path = bundle / "manifest.json"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptBundle, match=r"manifest\.json: .*Build it again: dflash-precompile --bundle"):
        read_manifest(bundle)


def test_manifest_that_is_not_utf8_is_refused(bundle):
    path = bundle / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"x86_64", b"x86_6\xff"))
    with pytest.raises(CorruptBundle):
        read_manifest(bundle)


def set_version(content):
    content["environment"]["jaxlib"] = "0.10.3"


def set_target_layer_id(content):
    content["draft"]["facts"]["target_layer_ids"][0] = 2


def set_hash(content):
    content["entries"][3]["sha256"] = "0" * 64


def drop_entry(content):
    content["entries"].pop()


def swap_entries(content):
    content["entries"].reverse()


def drop_digest(content):
    del content["digest"]


@pytest.mark.parametrize("change", [set_version, set_target_layer_id, set_hash, drop_entry, swap_entries, drop_digest])
def test_changed_manifest_is_refused_with_both_digests(edit_manifest, manifest, change):
    with pytest.raises(CorruptBundle, match="digest is [0-9a-f]{64}, its content has|digest is missing") as refused:
        read_manifest(edit_manifest(change))
    assert refused.value.exit_code == 3


def test_other_schema_is_refused_first(tmp_path):
    (tmp_path / "manifest.json").write_text('{"schema": 1, "all": "else differs"}')
    with pytest.raises(CorruptBundle, match=f"schema is 1, this version reads {SCHEMA}. Build it again"):
        read_manifest(tmp_path)


def add_field(content):
    content["comment"] = "hello"


def add_nested_field(content):
    content["grid"]["width"] = [1]


def remove_field(content):
    del content["grid"]["prefill"]


def name_a_path_outside(content):
    content["entries"][0]["sha256"] = "../../../etc/passwd"


def negative_size(content):
    content["entries"][0]["bytes"] = -1


def unknown_sampling(content):
    content["sampling"] = ["beam"]


def unknown_program(content):
    content["entries"][0]["signature"]["program"] = "format_disk"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_field, "unknown field `comment`"),
        (add_nested_field, r"unknown field `width` - at `\$.grid`"),
        (remove_field, r"missing required field `prefill` - at `\$.grid`"),
        (name_a_path_outside, r"matching regex .* - at `\$.entries\[0\].sha256`"),
        (negative_size, r">= 0 - at `\$.entries\[0\].bytes`"),
        (unknown_sampling, r"Invalid enum value 'beam' - at `\$.sampling\[0\]`"),
        (unknown_program, r"Invalid enum value 'format_disk'"),
    ],
)
def test_invalid_field_is_refused_with_its_place(edit_manifest, change, words):
    with pytest.raises(CorruptBundle, match=words):
        read_manifest(edit_manifest(change))


def test_manifest_with_a_valid_digest_cannot_name_files_outside_the_bundle(tmp_path, manifest):
    first, *rest = manifest.entries
    outside = structs.replace(first, sha256="../../secret")
    sealed = encode_manifest(structs.replace(manifest, entries=(outside, *rest)))
    (tmp_path / "manifest.json").write_bytes(sealed)
    with pytest.raises(CorruptBundle, match="sha256"):
        read_manifest(tmp_path)


def test_build_command_is_quoted_for_the_shell(manifest):
    named = structs.replace(
        manifest,
        target=TargetModel("/models/my target", manifest.target.facts),
        draft=DraftModel("/models/it's a draft", manifest.draft.facts),
    )
    assert shlex.split(named.build_command(Path("my bundle"))) == [
        "dflash-precompile",
        *("--bundle", "my bundle"),
        *("--target", "/models/my target", "--draft", "/models/it's a draft"),
        *("--buckets", "batch=1 length=32 k=0,3 prefill=16"),
        *("--dtype", "bfloat16"),
        *("--sampling", "greedy"),
        *("--platform", "cpu"),
    ]


@pytest.mark.parametrize(
    ("devices", "flags"),
    [
        ({"platform": "gpu"}, "--platform cuda"),
        ({"device_count": 4}, "--platform cpu --tensor_parallel 4"),
        ({"platform": "tpu", "topology": "v5e:2x4", "device_count": 8}, "--platform tpu --topology v5e:2x4"),
        ({"platform": "tpu", "topology": "v5e:2x4", "device_count": 2}, "--platform tpu --tensor_parallel 2"),
        ({"platform": "tpu", "topology": "v5e:2x4"}, "--platform tpu"),
        ({"platform": "tpu", "topology": "v5e:1x1"}, "--platform tpu --topology v5e:1x1"),
    ],
)
def test_build_command_selects_the_same_devices(manifest, devices, flags):
    moved = structs.replace(manifest, environment=structs.replace(manifest.environment, **devices))
    assert moved.build_command(Path("b")).endswith(f" {flags}")


def test_build_command_selects_the_same_sampling_modes(manifest):
    both = structs.replace(manifest, sampling=("greedy", "sample"))
    assert " --sampling greedy,sample " in both.build_command(Path("b"))


def test_build_command_names_the_weight_formats_that_are_not_plain(manifest):
    assert "weights" not in manifest.build_command(Path("b"))
    quantized = structs.replace(manifest, weight_formats=WeightFormats(target="int8"))
    assert " --weights int8 --draft_weights bfloat16 " in quantized.build_command(Path("b"))


def test_build_command_of_the_embedded_pair_names_no_checkpoints(manifest):
    embedded = structs.replace(manifest, target=TargetModel("embedded", manifest.target.facts))
    assert "--target" not in embedded.build_command(Path("b"))
    assert generic_build_command(Path("b")).startswith("dflash-precompile --bundle b (with --target")


def test_incompatible_bundle_is_not_a_corrupt_bundle():
    assert IncompatibleBundle.exit_code == 4
    assert not issubclass(IncompatibleBundle, CorruptBundle)


def test_facts_survive_json_exactly(manifest):
    facts = msgspec.json.decode(msgspec.json.encode(manifest.target.facts), type=type(manifest.target.facts))
    assert facts.decoder.rope.inverse_frequencies() == manifest.target.facts.decoder.rope.inverse_frequencies()
