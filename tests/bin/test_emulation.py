"""`dflash-bundle verify --execute`: executables of a TPU bundle are run as the TPU compiler optimized them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jax import export

from dflash_aot.bin import bundle as bundle_command
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.key import REORDER_SUMS
from dflash_aot.compile import precompile
from dflash_aot.compile.pipeline.emulated_build import check_destination
from tests.conftest import leave_out_k0
from tests.optimized_programs import NEEDS_COMPILER

GRID = "batch=1 length=32 k=0,3 prefill=16"
KERNELS = ("commit_delta_blocks", "convolve_input", "mix_delta_block", "mix_delta_chunk", "stream_delta_inputs")

needs_compiler = pytest.mark.skipif(bool(NEEDS_COMPILER), reason=NEEDS_COMPILER)


def verify(*arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which starts JAX with as many CPU devices as the bundle has."""
    command = [sys.executable, "-m", "dflash_aot.bin.bundle", "verify", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def read_stablehlo(bundle: Path) -> str:
    """The programs of the executables of models."""
    names = ("draft", "prefill", "verify", "sampled_verify")
    programs = [Store(bundle).read_program(e) for e in read_manifest(bundle).entries if e.signature.program in names]
    return "".join(export.deserialize(bytearray(one)).mlir_module() for one in programs)


@needs_compiler
@pytest.mark.parametrize(
    ("topology", "mode", "pair", "weights", "kernels", "absent"),
    [
        ("tpu7x:1x1x1", "greedy", "hybrid of wide heads", "int8", (*KERNELS, "stream_mlp"), "stream_layer"),
        ("v5p:1x1x1", "sample", "wide heads", None, ("attend_kv_pages", "stream_inputs"), "stream_mlp"),
    ],
)
def test_executables_compute_what_their_programs_say(topology, mode, pair, weights, kernels, absent, make_up, tmp_path):
    bundle = tmp_path / "bundle"
    built = {"topology": topology, "dtype": "float32", "weights": weights, "sampling": [mode]}
    with leave_out_k0():
        precompile(*make_up(pair).places.values(), bundle, grid=GRID, **built)
    done = verify(bundle, "--execute", "--json", f"--emulated={tmp_path / 'kept'}")
    assert done.returncode == 0, done.stderr
    kept = read_manifest(tmp_path / "kept")
    assert not any(entry.compiler_options.keys() & REORDER_SUMS.keys() for entry in kept.entries)  # sums as on the TPU
    program = read_stablehlo(bundle)
    assert all(name in program for name in kernels) and absent not in program
    emulation = json.loads(done.stdout)["emulation"]
    programs = {one["label"].split()[0] for one in emulation["executables"]}
    assert programs - {"admit"} == {"prefill", "draft", "verify" if mode == "greedy" else "sampled_verify", "kv_write"}
    assert (emulation["failures"], emulation["golden"]) == ([], None)


@needs_compiler
def test_answers_equal_those_of_the_cpus_programs(make_up, tmp_path, command, monkeypatch):
    bundle, kept, places = tmp_path / "bundle", tmp_path / "emulated", make_up("wide hybrid").places
    precompile(*places.values(), bundle, grid=GRID, topology="v6e:1x1", dtype="float32", sampling=["greedy"])
    pair = [f"--{role}={place}" for role, place in places.items()]
    done = verify(bundle, "--execute", f"--emulated={kept}", *pair)
    assert done.returncode == 0, done.stderr
    kernels = ("attend_kv_pages", "mix_delta_chunk", "stream_delta_inputs", "stream_layer", "stream_output_mlp")
    program = read_stablehlo(bundle)
    assert all(name in program for name in kernels) and "stream_mlp" not in program  # of two cores
    assert "7 of 7 emulated executables compute what the program says" in done.stdout
    assert "golden, float32 on cpu: 16 of 16 tokens equal" in done.stdout
    assert command(bundle_command, "verify", kept, "--golden", tmp_path / "none.json", *pair).code == 2
    check_destination(kept, read_manifest(bundle))  # may be built again
    before = (bundle / "manifest.json").read_bytes()
    own = command(bundle_command, "verify", bundle, "--execute", f"--emulated={bundle}")
    assert own.code == 2 and "that is no emulation of this one, and would be replaced" in own.err
    assert (bundle / "manifest.json").read_bytes() == before
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=32768")
    other = command(bundle_command, "verify", bundle, "--execute")
    assert other.code == 4 and "libtpu_init_args: built with" in other.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--execute"], "only executables for TPUs can be emulated"),
        (["--emulated=DIR"], "--emulated: verify emulates executables only with --execute"),
        (["--execute", "--record"], "--record: results are recorded on the TPU"),
    ],
)
def test_flags_that_do_not_fit_are_refused(bundle, command, flags, message):
    done = command(bundle_command, "verify", bundle("tiny"), *flags)
    assert done.code == 2 and message in done.err
