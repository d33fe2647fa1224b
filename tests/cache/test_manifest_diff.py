"""Differences of manifests, in small examples."""

import pytest
from msgspec import structs

from dflash_aot.bin.bundle_reports import ExecutableChange, compare_manifests
from dflash_aot.cache.bundle_spec import FieldChange
from dflash_aot.cache.grid import parse_grid

KEY, SHA = "0" * 64, "1" * 64


def with_entry(manifest, **changes):
    return structs.replace(manifest, entries=(structs.replace(manifest.entries[0], **changes), *manifest.entries[1:]))


def test_compile_time_and_digest_are_not_compared(manifest):
    assert compare_manifests(manifest, structs.replace(with_entry(manifest, seconds=7.0), digest=SHA)).equal


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: structs.replace(m, dtype="float32"), FieldChange("dtype", "bfloat16", "float32")),
        (
            lambda m: structs.replace(m, grid=parse_grid("batch=1,2 length=32 k=0,3 prefill=16", 16)),
            FieldChange("grid.batch", [1], [1, 2]),
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
def test_single_differing_field_is_reported(manifest, change, expected):
    found = compare_manifests(manifest, change(manifest))
    assert (found.changes, found.executables) == ((expected,), ())


def test_executable_or_array_in_one_manifest_only_is_reported(manifest):
    fewer = structs.replace(manifest, state=manifest.state[:-1], entries=manifest.entries[1:])
    label = manifest.entries[0].signature.label
    for pair, what in (((manifest, fewer), "only in a"), ((fewer, manifest), "only in b")):
        found = compare_manifests(*pair)
        assert found.executables == (ExecutableChange(label, what),)
        (change,) = found.changes
        assert change.field == f"state.{manifest.state[-1].name}" and "absent" in (change.a, change.b)


def test_other_bytes_under_the_same_key_are_reported(manifest):
    found = compare_manifests(manifest, with_entry(manifest, sha256=SHA))
    expected = ExecutableChange(manifest.entries[0].signature.label, "other bytes")
    assert (found.changes, found.executables) == ((), (expected,))


def test_differing_key_is_explained_by_its_parts(manifest):
    entry = manifest.entries[0]
    signature = structs.replace(entry.signature, donated=())
    program = structs.replace(entry.program, sha256=SHA)
    changed = with_entry(manifest, key=KEY, signature=signature, program=program)
    (found,) = compare_manifests(manifest, changed).executables
    assert (found.label, found.what, found.parts) == (entry.signature.label, "another key", ("signature", "program"))
    assert found.changes == (FieldChange("donated", list(entry.signature.donated), []),)


def test_differing_environment_or_compiler_options_explain_a_differing_key(manifest):
    elsewhere = structs.replace(
        with_entry(manifest, key=KEY), environment=structs.replace(manifest.environment, jaxlib="0.10.3")
    )
    (found,) = compare_manifests(manifest, elsewhere).executables
    assert found.parts == ("environment",)
    other = with_entry(manifest, key=KEY, compiler_options={"xla_tpu_scoped_vmem_limit_kib": "65536"})
    (found,) = compare_manifests(manifest, other).executables
    assert found.parts == ("compiler options",)
