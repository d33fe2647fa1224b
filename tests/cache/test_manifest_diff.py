"""Why a bundle is not another one, said in fields that can be checked by eye."""

import pytest
from msgspec import structs

from dflash_aot.cache.bundle.manifest_diff import (
    COMPILER_OPTIONS_DIFFER,
    ExecutableChange,
    FieldChange,
    compare_manifests,
    compare_values,
)
from dflash_aot.cache.grid import parse_grid

KEY, SHA = "0" * 64, "1" * 64


def with_entry(manifest, **changes):
    """The first entry changed."""
    return structs.replace(manifest, entries=(structs.replace(manifest.entries[0], **changes), *manifest.entries[1:]))


@pytest.fixture
def label(manifest):
    return manifest.entries[0].signature.label


def test_a_manifest_is_like_itself(manifest):
    assert compare_manifests(manifest, manifest).equal


def test_how_long_it_took_and_what_it_says_of_itself_makes_no_difference(manifest):
    assert compare_manifests(manifest, structs.replace(with_entry(manifest, seconds=7.0), digest=SHA)).equal


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: structs.replace(m, dtype="float32"), FieldChange("dtype", "bfloat16", "float32")),
        (lambda m: structs.replace(m, sampling=("sample",)), FieldChange("sampling", ["greedy"], ["sample"])),
        (
            lambda m: structs.replace(m, environment=structs.replace(m.environment, jax="0.10.3")),
            FieldChange("environment.jax", "0.10.2", "0.10.3"),
        ),
        (
            lambda m: structs.replace(m, grid=parse_grid("batch=1,2 length=32 k=0,3 prefill=16", 16)),
            FieldChange("grid.batch", [1], [1, 2]),
        ),
        (
            lambda m: structs.replace(m, target=structs.replace(m.target, reference="elsewhere")),
            FieldChange("target.reference", "Qwen/Qwen3-4B", "elsewhere"),
        ),
        (
            lambda m: structs.replace(m, draft=structs.replace(m.draft, facts=structs.replace(m.draft.facts, block=8))),
            FieldChange("draft.facts.block", 16, 8),
        ),
        (
            lambda m: structs.replace(m, weights=(structs.replace(m.weights[0], dtype="float32"),)),
            FieldChange("weights.draft.fc.weight.dtype", "bfloat16", "float32"),
        ),
        (
            lambda m: structs.replace(m, state=(structs.replace(m.state[0], dtype="float32"), *m.state[1:])),
            FieldChange("state.target_k.dtype", "bfloat16", "float32"),
        ),
    ],
)
def test_one_field_that_differs_is_the_one_that_is_told(manifest, change, expected):
    found = compare_manifests(manifest, change(manifest))
    assert (found.changes, found.executables) == ((expected,), ())


def test_what_only_one_of_them_has_is_told_so(manifest):
    fewer = structs.replace(manifest, state=manifest.state[:-1], entries=manifest.entries[1:])
    label = manifest.entries[0].signature.label
    for pair, what in (((manifest, fewer), "only in a"), ((fewer, manifest), "only in b")):
        found = compare_manifests(*pair)
        assert found.executables == (ExecutableChange(label, what),)
        (change,) = found.changes
        assert change.field == f"state.{manifest.state[-1].name}" and "absent" in (change.a, change.b)


def test_other_bytes_under_the_same_key_are_told_so(manifest, label):
    found = compare_manifests(manifest, with_entry(manifest, sha256=SHA))
    assert (found.changes, found.executables) == ((), (ExecutableChange(label, "other bytes"),))


def test_a_key_that_differs_is_explained_by_its_parts(manifest, label):
    entry = manifest.entries[0]
    signature = structs.replace(entry.signature, donated=())
    program = structs.replace(entry.program, sha256=SHA)
    changed = with_entry(manifest, key=KEY, signature=signature, program=program)
    (found,) = compare_manifests(manifest, changed).executables
    assert (found.label, found.what, found.parts) == (label, "another key", ("signature", "program"))
    assert found.changes == (FieldChange("donated", list(entry.signature.donated), []),)


def test_an_environment_that_differs_is_part_of_every_key_that_does(manifest):
    elsewhere = structs.replace(
        with_entry(manifest, key=KEY), environment=structs.replace(manifest.environment, jaxlib="0.10.3")
    )
    (found,) = compare_manifests(manifest, elsewhere).executables
    assert found.parts == ("environment",)


def test_a_key_that_differs_for_no_reason_in_the_manifest_says_where_to_look(manifest):
    (found,) = compare_manifests(manifest, with_entry(manifest, key=KEY)).executables
    assert found.parts == (COMPILER_OPTIONS_DIFFER,)


@pytest.mark.parametrize(
    ("a", "b", "changes"),
    [
        ({"x": {"y": 1}}, {"x": {"y": 2}}, [FieldChange("f.x.y", 1, 2)]),
        ({"x": 1}, {"y": 1}, [FieldChange("f.x", 1, "absent"), FieldChange("f.y", "absent", 1)]),
        ([1, 2], [2, 1], [FieldChange("f", [1, 2], [2, 1])]),
        ([{"name": "x", "v": 1}, {"name": "y"}], [{"name": "y"}, {"name": "x", "v": 2}], [FieldChange("f.x.v", 1, 2)]),
        (None, {"x": 1}, [FieldChange("f", None, {"x": 1})]),
        ([], [], []),
    ],
)
def test_values_are_compared_down_to_what_differs(a, b, changes):
    assert list(compare_values("f", a, b)) == changes
