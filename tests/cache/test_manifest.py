"""Manifests: encoding, refusals of damaged and invalid ones, and build commands."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.manifest import (
    SCHEMA,
    encode_manifest,
    generic_build_command,
    parse_manifest,
    read_manifest,
)
from dflash_aot.cache.bundle_spec import DraftModel, FieldChange, PlannedBundle, Slice, TargetModel
from dflash_aot.cache.errors import BadInput, CorruptBundle
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.model_config.architecture import DraftHeads
from dflash_aot.cache.weight_recipe import WeightFormats
from tests.cache.damage import seal

BAD_NAMES = ["../../outside", "/etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n", ""]


@pytest.fixture
def bundle(tmp_path, manifest):
    (tmp_path / "manifest.json").write_bytes(encode_manifest(manifest))
    return tmp_path


def test_manifest_is_indented_json_that_another_writer_can_write(bundle, manifest, tmp_path):
    lines = (bundle / "manifest.json").read_text().splitlines()
    assert f' "schema": {SCHEMA},' in lines
    assert max(map(len, lines)) < 200
    assert parse_manifest(tmp_path, seal(json.loads("".join(lines)))).entries == manifest.entries


def test_huge_manifest_is_not_read(tmp_path):
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(1 << 40)  # a sparse file
    with pytest.raises(CorruptBundle, match=r"manifest\.json: 1099511627776 bytes, where at most \d+ are read"):
        read_manifest(tmp_path)


def replace(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


DAMAGED = [
    (lambda text: "", "Input data was truncated"),
    (lambda text: text[:-2], "truncated"),
    (lambda text: "not JSON", "invalid"),
    (lambda text: "[]", "Expected `object`"),
    (lambda text: "\ufeff" + text, "malformed"),
    (replace('"seconds": ', '"seconds": NaN, "was": '), "JSON is malformed"),
    (replace('"seconds": ', '"seconds": 1e999, "was": '), "out of range"),
    (replace('"seconds": ', f'"seconds": {"[" * 100_000}, "was": '), "ecursion"),
    (replace('"dtype": ', '"dtype": "float32",\n "dtype": '), "'dtype' is in an object twice"),
    (replace("x86_64", "x86_6\udcff"), "codec can't decode byte"),
    (replace('"machine": "', '"machine": "not '), "digest is .*, its content has"),
    (replace('"target_layer_ids": [', '"target_layer_ids": [0, '), "digest is .*, its content has"),
    (lambda text: re.sub('"digest": ".*"', '"digest": ""', text), "digest is missing"),
    (lambda text: re.sub(',\\s*"digest": ".*"', "", text), "digest is missing"),
    (lambda text: '{"schema": 99, "all": "else differs"}', "schema is 99, .* built by a newer dflash-aot"),
    (lambda text: f'{{"schema": {SCHEMA - 1}}}', f"schema is {SCHEMA - 1}, this version reads {SCHEMA}. Build it"),
    (replace(f'"schema": {SCHEMA}', f'"schema": "{SCHEMA}"'), "Expected `int`"),
]


@pytest.mark.parametrize(("change", "words"), DAMAGED)
def test_damaged_manifest_is_refused_with_the_reason(bundle, change, words):
    path = bundle / "manifest.json"
    path.write_bytes(change(path.read_text()).encode(errors="surrogateescape"))
    with pytest.raises(CorruptBundle, match=rf"manifest\.json: (?s:.*){words}") as refused:
        read_manifest(bundle)
    assert "dflash-precompile --bundle" in str(refused.value) and refused.value.exit_code == 3


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("comment", "hello", "unknown field `comment`"),
        ("grid.width", [1], r"unknown field `width` - at `\$.grid`"),
        ("grid.prefill", None, r"Expected `array`, got `null` - at `\$.grid.prefill`"),
        ("sampling", ["beam"], r"Invalid enum value 'beam' - at `\$.sampling\[0\]`"),
        ("entries.0.signature.program", "format_disk", "Invalid enum value 'format_disk'"),
        *(("entries.0.sha256", name, r"regex .* - at `\$.entries\[0\].sha256`") for name in BAD_NAMES),
        *(("entries.0.bytes", size, r"entries\[0\].bytes|out of range") for size in (-1, 1 << 53, 1 << 63)),
    ],
)
def test_invalid_field_is_refused_with_its_place(tmp_path, manifest, place, value, words):
    facts = json.loads(encode_manifest(manifest))
    *way, last = place.split(".")
    inner = facts
    for step in way:
        inner = inner[int(step) if step.isdigit() else step]
    inner[last] = value
    with pytest.raises(CorruptBundle, match=words):
        parse_manifest(tmp_path, seal(facts))


def test_build_command_is_quoted_for_the_shell(manifest):
    named = structs.replace(
        manifest,
        sampling=("greedy", "sample"),
        target=TargetModel("/models/my target", manifest.target.facts),
        draft=DraftModel("/models/it's a draft", manifest.draft.facts),
    )
    assert shlex.split(named.build_command(Path("my bundle"))) == [
        "dflash-precompile",
        *("--bundle", "my bundle"),
        *("--target", "/models/my target", "--draft", "/models/it's a draft"),
        *("--buckets", "batch=1 length=32 k=0,3 prefill=16"),
        *("--dtype", "bfloat16"),
        *("--sampling", "greedy,sample"),
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


def test_build_command_names_the_weight_formats_that_are_not_plain(manifest):
    assert "weights" not in manifest.build_command(Path("b"))
    quantized = structs.replace(manifest, weight_formats=WeightFormats(target="int8"))
    assert " --weights int8 --draft_weights bfloat16 " in quantized.build_command(Path("b"))


def test_build_command_of_the_embedded_pair_names_no_checkpoints(manifest):
    embedded = structs.replace(manifest, target=TargetModel("embedded", manifest.target.facts))
    assert "--target" not in embedded.build_command(Path("b"))
    assert generic_build_command(Path("b")).startswith("dflash-precompile --bundle b (with --target")


def test_specs_differ_in_what_changes_executables(manifest):
    draft = structs.replace(
        manifest.draft, reference="elsewhere", facts=structs.replace(manifest.draft.facts, heads=DraftHeads(k=5))
    )
    grid = structs.replace(manifest.grid, batch=(1, 2))
    assert manifest.differences(structs.replace(manifest, draft=draft, grid=grid, sampling=("sample",))) == []
    facts = structs.replace(manifest.target.facts, decoder=structs.replace(manifest.target.facts.decoder, layers=3))
    other = PlannedBundle(**manifest.fields(), slice=Slice("tpu", "v5e:2x2", 4))
    other = structs.replace(other, target=TargetModel("", facts), weight_formats=WeightFormats(draft="int8"))
    assert manifest.differences(other) == [
        FieldChange("target.decoder.layers", 36, 3),
        FieldChange("draft_weights", "plain", "int8"),
        FieldChange("platform", "cpu", "tpu"),
        FieldChange("topology", "", "v5e:2x2"),
        FieldChange("devices", 1, 4),
    ]


def test_union_has_grid_and_sampling_of_both(manifest):
    asked = structs.replace(manifest, grid=parse_grid("batch=4 length=64 k=0 prefill=16", 16), sampling=("sample",))
    both = asked.union(manifest)
    assert (str(both.grid), both.sampling) == ("batch=1,4 length=32,64 k=0,3 prefill=16", ("greedy", "sample"))
    with pytest.raises(BadInput, match="length=2 is too short to verify k=3 tokens"):
        structs.replace(asked, grid=parse_grid("batch=1 length=2 k=0 prefill=2", 16)).union(manifest)
