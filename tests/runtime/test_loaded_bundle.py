"""Loading a bundle: damaged, tampered and incompatible bundles raise before any of their code runs."""

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
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import (
    Entry,
    Manifest,
    encode_manifest,
    read_manifest,
    verify_and_rebuild_commands,
)
from dflash_aot.cache.environment import Environment
from dflash_aot.cache.errors import BadCheckpoint, CorruptBundle, DflashError, IncompatibleBundle
from dflash_aot.runtime import Engine, SamplingParams

BUILD = "dflash-precompile"


@pytest.fixture
def copy(bundle, tmp_path) -> Path:
    """A copy of a bundle, to be damaged."""
    return Path(shutil.copytree(bundle("tiny"), tmp_path / "bundle", ignore=shutil.ignore_patterns("entries")))


def find_blob(copy: Path, program: str = "verify") -> Path:
    entry = next(entry for entry in read_manifest(copy).entries if entry.signature.program == program)
    return copy / "executables" / entry.sha256


def rewrite(copy: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Rewrites the manifest with a correct digest."""
    (copy / "manifest.json").write_bytes(encode_manifest(change(read_manifest(copy))))


def open_error(error: type[DflashError], path: Path, preload: bool = False, **places: str) -> str:
    with pytest.raises(error) as found:
        Engine.open(path, preload=preload, **places).close()
    assert type(found.value) is error
    return str(found.value)


def test_bundle_is_served_from_any_path_and_moved(copy, tmp_path, cases):
    """File times do not matter."""
    place = copy.rename(tmp_path / "ein Pfad mit Leerzeichen, ünïcödé ☃")
    for path, time in zip(sorted(place.rglob("*")), itertools.cycle((0, 2**33)), strict=False):
        os.utime(path, (time, time))
    with Engine.open(place) as engine:
        place.rename(tmp_path / "elsewhere")
        params = SamplingParams(max_tokens=9, stop_token_ids=())
        assert engine.generate(cases["len5"].prompt, params).token_ids == cases["len5"].answer[:9]


# -- damaged


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(("damage", "program"), [(cut, "prefill"), (Path.unlink, "verify")])
def test_damaged_executable_is_named(copy, damage, program):
    path = find_blob(copy, program)
    damage(path)
    words = open_error(CorruptBundle, copy)
    assert path.name in words and program in words and BUILD in words


# -- tampered with, with correct hashes: found when executables are loaded or called, so with preload


def plant(copy: Path, content: bytes) -> None:
    """Replaces an executable, and updates its hash in the manifest."""
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
    """Makes a directory when it is unpickled."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def test_pickle_that_runs_code_is_not_loaded(copy, tmp_path):
    trace = tmp_path / "the payload was here"
    content = pickle.dumps((Payload(trace), b"looks like an executable"))
    plant(copy, content)
    assert "was not loaded" in open_error(CorruptBundle, copy, preload=True)
    assert not trace.exists()
    pickle.loads(content)  # the payload works
    assert trace.exists()


def find_entry(copy: Path, program: str) -> Entry:
    return next(entry for entry in read_manifest(copy).entries if entry.signature.program == program)


def test_executable_of_another_program_or_bucket_raises(copy):
    """Of another bucket: the numbers of inputs and outputs are the same, but the shapes differ."""
    one, *_, last = (entry for entry in read_manifest(copy).entries if entry.signature.program == "kv_write")
    content = (copy / "manifest.json").read_bytes()
    for program, other in (("kv_write", last), ("verify", one)):
        (copy / "manifest.json").write_bytes(content)
        rewrite_entry(copy, program, **{name: getattr(other, name) for name in ("sha256", "bytes", "serialized_bytes")})
        assert program in open_error(CorruptBundle, copy, preload=True)


def test_executable_that_raises_in_its_first_call_is_corrupt(copy):
    """The executable calls LAPACK with one result too few, which only the call finds out."""
    manifest, entry = read_manifest(copy), find_entry(copy, "verify")
    known, signature = manifest.arrays_by_name(), entry.signature
    inputs = [*(known[name] for name in (*signature.weights, *signature.state)), *signature.arguments]
    outputs = [*(known[name] for name in signature.donated), *signature.results]

    def fail(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        call = jax.ffi.ffi_call("lapack_spotrf_ffi", jax.ShapeDtypeStruct((1, 1), "float32"))
        number = call(jnp.float32(arrays[-1].ravel()[0]).reshape(1, 1))[0, 0]
        return tuple(jnp.full(one.shape, number, one.dtype) for one in outputs)

    device = SingleDeviceSharding(jax.devices("cpu")[0])
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=device) for one in inputs]
    plant(copy, serialize_executable.serialize(jax.jit(fail, keep_unused=True).lower(*shapes).compile())[0])
    words = open_error(CorruptBundle, copy, preload=True)
    file = f"{copy}/executables/{find_entry(copy, 'verify').sha256}"
    assert f"{file} ({entry.signature.label}): does not run: INVALID" in words
    assert words.endswith(f"Rebuild it: {verify_and_rebuild_commands(copy)}")


# -- meant for another environment


CHANGES = {
    "jax": "0.9.9",
    "jaxlib": "0.9.9",
    "libtpu": "0.0.1",
    "platform_version": "another",
    "device_kind": "TPU v5e",
    "topology": "v5e:2x2",
    "hosts": 2,
    "coordinates": ("7",),
    "machine": "riscv64",
    "cpu_features": ("avx2048",),
    "xla_flags": "--xla_another",
    "libtpu_init_args": "--xla_tpu_another",
}
ABSENT = {"platform": "tpu", "device_count": 4096}  # without such devices, the other fields cannot be compared


def set_environment(copy: Path, **changes: object) -> None:
    def change(manifest: Manifest) -> Manifest:
        environment = msgspec.structs.replace(manifest.environment, **changes)
        return msgspec.structs.replace(manifest, environment=environment)

    rewrite(copy, change)


def environment_error(copy: Path, **changes: object) -> str:
    """Returns the error of a bundle that was built for another environment; its executables are not looked at."""
    set_environment(copy, **changes)
    find_blob(copy).write_bytes(b"damaged as well")
    words = open_error(IncompatibleBundle, copy)
    for part in (BUILD, str(copy), "--target", "--draft", "batch=1 length=32 k=0,3 prefill=16"):
        assert part in words
    return words


def test_other_environment_raises_with_field_and_rebuild_command(copy):
    assert {*CHANGES, *ABSENT} == set(Environment.__struct_fields__)
    content = (copy / "manifest.json").read_bytes()
    for field, changed in CHANGES.items():
        (copy / "manifest.json").write_bytes(content)
        here = getattr(read_manifest(copy).environment, field)
        words = environment_error(copy, **{field: changed})
        assert field in words and str(np.ravel(changed)[0]) in words
        assert field == "cpu_features" or "".join(map(str, np.ravel(here))) in words
    assert IncompatibleBundle.exit_code == 4


def test_bundle_for_a_tpu_raises_without_a_tpu(copy):
    tpu = {"platform": "tpu", "device_kind": "TPU v5 lite", "topology": "v5e:2x2", "device_count": 4}
    words = environment_error(copy, **tpu)
    assert "was built for v5e:2x2 (4 x TPU v5 lite), but here no TPU is attached" in words


# -- meant for another checkpoint


@pytest.fixture
def edited(tied, tmp_path) -> Callable[..., dict[str, str]]:
    """Copies both checkpoints, and changes facts in the config of one."""

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
        ("target", "tie_word_embeddings", False, "tied"),
        ("draft", "num_hidden_layers", 3, "decoder.layers"),
        ("draft", "block_size", 4, "block"),
    ],
)
def test_checkpoint_with_other_facts_raises_with_each_fact(bundle, edited, role, key, value, field):
    places = edited(role, **{key: value, **({"layer_types": None} if key == "num_hidden_layers" else {})})
    words = open_error(IncompatibleBundle, bundle("tiny"), **places)
    assert places[role] in words and field in words and str(value) in words
    assert BUILD in words and places["target"] in words and places["draft"] in words


def test_fine_tune_is_served_with_its_own_weights(bundle, edited, cases):
    places = edited("target")
    path = Path(places["target"]) / "model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(path).items()}, path)
    params = SamplingParams(max_tokens=20, stop_token_ids=())
    with Engine.open(bundle("tiny"), **places) as other, Engine.open(bundle("tiny"), k=0, **places) as plain:
        tuned = other.generate(cases["len5"].prompt, params).token_ids
        assert tuned == plain.generate(cases["len5"].prompt, params).token_ids != cases["len5"].answer[:20]


def test_missing_or_swapped_checkpoints_are_named(bundle, tied):
    words = open_error(BadCheckpoint, bundle("tiny"), target=str(tied.draft), draft=str(tied.target))
    assert str(tied.draft) in words and "swapped" in words
    for role in ("target", "draft"):
        words = open_error(BadCheckpoint, bundle("tiny"), **{role: "/nowhere/at/all"})
        assert role in words and "/nowhere/at/all" in words
