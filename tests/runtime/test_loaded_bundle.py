"""A bundle that is damaged, tampered with, or meant for something else is refused before any of it runs."""

import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.experimental import serialize_executable
from safetensors.numpy import load_file, save_file

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import (
    SCHEMA,
    Entry,
    Manifest,
    encode_manifest,
    read_manifest,
    verify_and_rebuild_commands,
)
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BadCheckpoint, CorruptBundle, DflashError, IncompatibleBundle, MissingBundle
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.self_test.client import Canaries, order_canaries

BUILD = "dflash-precompile"


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    """A bundle of its own, to be damaged."""
    return Path(shutil.copytree(bundle("tiny"), tmp_path / "bundle", ignore=shutil.ignore_patterns("entries")))


def blob(copy: Path, program: str = "verify") -> Path:
    entry = next(entry for entry in read_manifest(copy).entries if entry.signature.program == program)
    return copy / "executables" / entry.sha256


def rewrite(copy: Path, change: Callable[[Manifest], Manifest]) -> None:
    """A manifest with a right digest, as somebody with the tools would write it."""
    (copy / "manifest.json").write_bytes(encode_manifest(change(read_manifest(copy))))


def refusal(error: type[DflashError], path: Path, preload: bool = False, **places: str) -> str:
    with pytest.raises(error) as found:
        Engine.open(path, preload=preload, **places).close()
    assert type(found.value) is error
    return str(found.value)


def test_a_copy_serves_from_wherever_it_lies_and_while_it_is_moved(copy, tmp_path, cases):
    """Its times are lost, or of a clock that was ahead."""
    place = copy.rename(tmp_path / "ein Pfad mit Leerzeichen, ünïcödé ☃")
    for path, time in zip(sorted(place.rglob("*")), itertools.cycle((0, 2**33)), strict=False):
        os.utime(path, (time, time))
    with Engine.open(place) as engine:
        place.rename(tmp_path / "elsewhere")
        params = SamplingParams(max_tokens=9, stop_token_ids=())
        assert engine.generate(cases["len5"].prompt, params).token_ids == cases["len5"].answer[:9]


def test_serving_writes_nothing(copy):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    Engine.open(copy).close()
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


# -- missing


@pytest.mark.parametrize("name", ["nothing here", "empty", "file"])
def test_without_a_bundle_the_command_that_builds_it_is_named(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    words = refusal(MissingBundle, tmp_path / name)
    assert BUILD in words and str(tmp_path / name) in words
    assert MissingBundle.exit_code == 2


def test_a_build_that_has_not_finished_is_no_bundle(copy):
    (copy / "manifest.json").unlink()
    assert BUILD in refusal(MissingBundle, copy)


# -- damaged


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def behead(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [cut, halve, behead, empty, flip, lengthen, Path.unlink, replace_by_directory]
PROGRAMS = itertools.cycle(("prefill", "draft", "verify", "kv_write"))


@pytest.mark.parametrize(
    ("damage", "program"), [*zip(DAMAGES, PROGRAMS, strict=False)], ids=lambda one: getattr(one, "__name__", one)
)
def test_a_damaged_executable_is_named(copy, damage, program):
    path = blob(copy, program)
    damage(path)
    words = refusal(CorruptBundle, copy)
    assert path.name in words and program in words and BUILD in words


def test_executables_that_changed_places_are_found(copy):
    one, other = blob(copy, "verify"), blob(copy, "draft")
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    assert BUILD in refusal(CorruptBundle, copy)


@pytest.mark.parametrize("damage", [halve, flip, empty], ids=lambda damage: damage.__name__)
def test_a_damaged_manifest_is_refused(copy, damage):
    damage(copy / "manifest.json")
    words = refusal(CorruptBundle, copy)
    assert "manifest.json" in words and BUILD in words


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f'"schema": {SCHEMA}', '"schema": 99'),
        ('"dtype": "float32"', '"dtype": "bfloat16"'),
        ('"program": "draft"', '"program": "attack"'),
        ('"seconds"', '"secondz"'),
    ],
)
def test_a_manifest_edited_by_hand_is_refused(copy, old, new):
    path = copy / "manifest.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    words = refusal(CorruptBundle, copy)
    assert "manifest.json" in words and BUILD in words


def test_an_executable_outside_the_bundle_cannot_be_named(copy, tmp_path):
    shutil.copy(blob(copy), tmp_path / "outside")
    path = copy / "manifest.json"
    facts = json.loads(path.read_text())
    facts["entries"][0]["sha256"] = "../../outside"
    path.write_text(json.dumps(facts))
    refusal(CorruptBundle, copy)


@pytest.mark.parametrize("program", ["prefill", "draft", "verify", "kv_write"])
def test_a_manifest_that_promises_more_than_it_holds_is_refused(copy, program):
    def drop(manifest: Manifest) -> Manifest:
        at = next(at for at, entry in enumerate(manifest.entries) if entry.signature.program == program)
        return msgspec.structs.replace(manifest, entries=manifest.entries[:at] + manifest.entries[at + 1 :])

    rewrite(copy, drop)
    words = refusal(CorruptBundle, copy)
    assert program in words and BUILD in words


# -- tampered with: all hashes are right. What only loading or calling shows is found where all of that is done first


def plant(copy: Path, content: bytes) -> None:
    """An executable replaced, and the manifest made to fit."""
    blob, packed = pack_blob(content)
    (copy / "executables" / blob.sha256).write_bytes(packed)
    rewrite_entry(copy, "verify", **msgspec.structs.asdict(blob))


def rewrite_entry(copy: Path, program: str, **changes: object) -> None:
    def change(manifest: Manifest) -> Manifest:
        entries = list(manifest.entries)
        at = next(at for at, entry in enumerate(entries) if entry.signature.program == program)
        entries[at] = msgspec.structs.replace(entries[at], **changes)
        return msgspec.structs.replace(manifest, entries=tuple(entries))

    rewrite(copy, change)


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.fixture
def trace(tmp_path) -> Path:
    return tmp_path / "the payload was here"


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_runs_code_is_never_loaded(copy, trace, protocol):
    content = pickle.dumps((Payload(trace), b"looks like an executable"), protocol)
    plant(copy, content)
    assert "was not loaded" in refusal(CorruptBundle, copy, preload=True)
    assert not trace.exists()
    pickle.loads(content)  # it would have worked
    assert trace.exists()


def test_without_its_hash_a_pickle_is_not_even_looked_at(copy, trace):
    blob(copy).write_bytes(pickle.dumps(Payload(trace)))
    assert "promises" in refusal(CorruptBundle, copy)
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"not a pickle", pickle.dumps(None), pickle.dumps((1, 2, 3)), pickle.dumps((b"x" * 99, [], True))],
    ids=["empty", "text", "none", "numbers", "tuple"],
)
def test_what_is_no_executable_is_refused(copy, content):
    plant(copy, content)
    assert "verify" in refusal(CorruptBundle, copy, preload=True)


def test_half_an_executable_is_refused(copy):
    whole = Store(copy).read_executable(entry_of(copy, "verify"))
    plant(copy, whole[: len(whole) // 2])
    assert "verify" in refusal(CorruptBundle, copy, preload=True)


def entry_of(copy: Path, program: str) -> Entry:
    return next(entry for entry in read_manifest(copy).entries if entry.signature.program == program)


def place_of(entry: Entry) -> dict[str, object]:
    """Which file holds it."""
    return {"sha256": entry.sha256, "bytes": entry.bytes, "serialized_bytes": entry.serialized_bytes}


@pytest.mark.parametrize(
    ("program", "stranger"), [("verify", "kv_write"), ("draft", "prefill"), ("kv_write", "verify")]
)
def test_an_executable_of_another_program_is_refused(copy, program, stranger):
    """All hashes are right, but it takes other inputs than its signature says."""
    other = entry_of(copy, stranger)
    rewrite_entry(copy, program, **place_of(other))
    assert program in refusal(CorruptBundle, copy, preload=True)


def test_an_executable_of_another_bucket_is_refused(copy):
    """As many inputs and outputs, but of other shapes."""

    def exchange(manifest: Manifest) -> Manifest:
        one, *_, last = (entry for entry in manifest.entries if entry.signature.program == "kv_write")
        swapped = {
            one.key: msgspec.structs.replace(one, **place_of(last)),
            last.key: msgspec.structs.replace(last, **place_of(one)),
        }
        entries = tuple(swapped.get(entry.key, entry) for entry in manifest.entries)
        return msgspec.structs.replace(manifest, entries=entries)

    rewrite(copy, exchange)
    assert "kv_write" in refusal(CorruptBundle, copy, preload=True)


def compile_other(manifest: Manifest, entry: Entry, compute: Callable[[jax.Array], jax.Array]) -> bytes:
    """An executable that takes and returns what it should; what it returns is full of what `compute` makes."""
    known, signature = manifest.arrays_by_name(), entry.signature
    inputs = [*(known[name] for name in (*signature.weights, *signature.state)), *signature.arguments]
    outputs = [*(known[name] for name in signature.donated), *signature.results]

    def fill(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        number = compute(jnp.float32(arrays[-1].ravel()[0]))
        return tuple(jnp.full(one.shape, number, one.dtype) for one in outputs)

    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in inputs]
    return serialize_executable.serialize(jax.jit(fill, keep_unused=True).lower(*shapes).compile())[0]


def test_an_executable_that_raises_in_its_first_call_is_refused(copy):
    """It factors a matrix with one result too few, which only the call finds out."""

    def fail(number):
        return jax.ffi.ffi_call("lapack_spotrf_ffi", jax.ShapeDtypeStruct((1, 1), "float32"))(number.reshape(1, 1))[
            0, 0
        ]

    entry = entry_of(copy, "verify")
    plant(copy, compile_other(read_manifest(copy), entry, fail))
    words = refusal(CorruptBundle, copy, preload=True)
    assert (
        f"{copy}/executables/{entry_of(copy, 'verify').sha256} ({entry.signature.label}): does not run: INVALID"
        in words
    )
    assert words.endswith(f"Mend it: {verify_and_rebuild_commands(copy)}")


def test_an_executable_that_finds_no_memory_is_not_at_fault(copy):
    """No address is long enough for what this one sorts."""

    def exhaust(number):
        return jnp.sort(jax.lax.iota("float32", 1 << 50) * number)[0]

    plant(copy, compile_other(read_manifest(copy), entry_of(copy, "verify"), exhaust))
    words = refusal(IncompatibleBundle, copy, preload=True)
    assert f"{copy} needs more memory than is free here: RESOURCE_EXHAUSTED: Out of memory" in words
    assert f"dflash-bundle inspect {copy}" in words and BUILD in words
    manifest, entry = read_manifest(copy), entry_of(copy, "verify")
    told = pytest.raises(IncompatibleBundle, match=f"{entry.signature.label} cannot be called here: .*EXHAUSTED")
    with Canaries(order_canaries(copy, manifest)) as canaries, told:
        canaries.try_one(entry)


# -- meant for another environment


CHANGES = {
    "jax": "0.9.9",
    "jaxlib": "0.9.9",
    "libtpu": "0.0.1",
    "platform_version": "another",
    "device_kind": "TPU v5e",
    "topology": "v5e:2x2",
    "coordinates": ("7",),
    "machine": "riscv64",
    "cpu_features": ("avx2048",),
    "xla_flags": "--xla_another",
    "libtpu_init_args": "--xla_tpu_another",
}
ABSENT = {"platform": "tpu", "device_count": 4096}  # there is nothing to compare the rest with


def test_every_field_of_the_environment_is_tried():
    assert {*CHANGES, *ABSENT} == set(Environment.__struct_fields__)


def rebuilt_for(copy: Path, **changes: object) -> str:
    """The refusal of a bundle that says it was built elsewhere; its executables are not looked at."""
    rewrite(
        copy,
        lambda manifest: msgspec.structs.replace(
            manifest, environment=msgspec.structs.replace(manifest.environment, **changes)
        ),
    )
    blob(copy).write_bytes(b"damaged as well, but that is not looked at")
    words = refusal(IncompatibleBundle, copy)
    for part in (BUILD, str(copy), "--target", "--draft", "batch=1 length=32 k=0,3 prefill=16"):
        assert part in words
    assert IncompatibleBundle.exit_code == 4
    return words


@pytest.mark.parametrize("field", CHANGES)
def test_another_environment_is_refused_by_field_with_the_command_that_rebuilds(copy, field):
    here = getattr(read_manifest(copy).environment, field)
    words = rebuilt_for(copy, **{field: CHANGES[field]})
    assert field in words and str(np.ravel(CHANGES[field])[0]) in words
    assert field == "cpu_features" or "".join(here) in words


def test_a_bundle_for_a_tpu_names_it_where_there_is_none(copy):
    tpu = {"platform": "tpu", "device_kind": "TPU v5 lite", "topology": "v5e:2x2", "device_count": 4}
    words = rebuilt_for(copy, **tpu)
    assert "was built for v5e:2x2 (4 x TPU v5 lite), and here: no TPU is attached" in words


def test_a_bundle_for_more_devices_says_how_many_there_are(copy):
    words = rebuilt_for(copy, device_count=4096)
    assert "built for 4096 x cpu" in words and "4096 cpu devices are needed, here are 1" in words


def test_all_fields_that_differ_are_named_at_once(copy):
    def change(manifest: Manifest) -> Manifest:
        environment = msgspec.structs.replace(manifest.environment, jax="0.9.9", xla_flags="--xla_another")
        return msgspec.structs.replace(manifest, environment=environment)

    rewrite(copy, change)
    words = refusal(IncompatibleBundle, copy)
    assert "0.9.9" in words and "--xla_another" in words


def test_a_processor_that_can_do_more_is_fine(copy):
    def change(manifest: Manifest) -> Manifest:
        features = manifest.environment.cpu_features[1:]
        return msgspec.structs.replace(
            manifest, environment=msgspec.structs.replace(manifest.environment, cpu_features=features)
        )

    rewrite(copy, change)
    Engine.open(copy).close()


# -- meant for another checkpoint


@pytest.fixture
def edited(tied, tmp_path) -> Callable[..., dict[str, str]]:
    """Both checkpoints again, facts of one of them changed."""

    def edit(role: str, **facts: object) -> dict[str, str]:
        places = {"target": tmp_path / "target", "draft": tmp_path / "draft"}
        for name, place in places.items():
            shutil.copytree(getattr(tied, name), place, dirs_exist_ok=True)
        path = places[role] / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
        return {name: str(place) for name, place in places.items()}

    return edit


@pytest.mark.parametrize(
    ("role", "key", "value", "field"),
    [
        ("target", "rope_theta", 12345.0, "decoder.rope.theta"),
        ("target", "rms_norm_eps", 1e-5, "decoder.epsilon"),
        ("target", "tie_word_embeddings", False, "tied"),
        ("target", "intermediate_size", 161, "decoder.mlp"),
        ("draft", "rope_theta", 12345.0, "decoder.rope.theta"),
        ("draft", "num_hidden_layers", 3, "decoder.layers"),
        ("draft", "block_size", 4, "block"),
    ],
)
def test_a_checkpoint_of_other_facts_is_refused_fact_by_fact(bundle, edited, role, key, value, field):
    places = edited(role, **{key: value, **({"layer_types": None} if key == "num_hidden_layers" else {})})
    words = refusal(IncompatibleBundle, bundle("tiny"), **places)
    assert places[role] in words and field in words and str(value) in words
    assert BUILD in words and places["target"] in words and places["draft"] in words


def test_a_pair_of_other_depth_is_refused(bundle, edited):
    places = edited("target", num_hidden_layers=7, layer_types=None)
    draft = Path(places["draft"]) / "config.json"
    draft.write_text(json.dumps({**json.loads(draft.read_text()), "num_target_layers": 7}))
    assert "decoder.layers: built for 6, this checkpoint has 7" in refusal(IncompatibleBundle, bundle("tiny"), **places)


def test_a_fine_tune_of_the_same_shapes_is_served_as_what_it_is(bundle, edited, cases):
    places = edited("target")
    path = Path(places["target"]) / "model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(path).items()}, path)
    params = SamplingParams(max_tokens=20, stop_token_ids=())
    with Engine.open(bundle("tiny"), **places) as other, Engine.open(bundle("tiny"), k=0, **places) as plain:
        tuned = other.generate(cases["len5"].prompt, params).token_ids
        assert tuned == plain.generate(cases["len5"].prompt, params).token_ids != cases["len5"].answer[:20]


def test_a_pair_the_wrong_way_round_is_noticed(bundle, tied):
    words = refusal(BadCheckpoint, bundle("tiny"), target=str(tied.draft), draft=str(tied.target))
    assert str(tied.draft) in words and "wrong way round" in words


def test_damaged_weights_are_refused(bundle, edited):
    places = edited("draft")
    cut(Path(places["draft"]) / "model.safetensors")
    assert "not a complete safetensors file" in refusal(BadCheckpoint, bundle("tiny"), **places)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_checkpoint_that_is_not_there_is_named(bundle, role):
    words = refusal(BadCheckpoint, bundle("tiny"), **{role: "/nowhere/at/all"})
    assert role in words and "/nowhere/at/all" in words


def test_a_bundle_whose_checkpoint_has_moved_says_which(copy):
    def move(manifest: Manifest) -> Manifest:
        return msgspec.structs.replace(
            manifest, target=msgspec.structs.replace(manifest.target, reference="/nowhere/at/all")
        )

    rewrite(copy, move)
    words = refusal(BadCheckpoint, copy)
    assert "--target /nowhere/at/all" in words
