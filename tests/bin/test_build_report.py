"""What is said after a build."""

import json

import pytest

from dflash_aot.bin import precompile
from dflash_aot.bin.bucket_table import Deployment
from dflash_aot.bin.build_report import report_build
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.topology import TOPOLOGIES
from dflash_aot.compile.pipeline.compilation_manager import Report
from dflash_aot.compile.programs.programs import Programs

GRID = "batch=1 length=32 k=0,3 prefill=16"


def test_work_stands_beside_the_compilers_own_count(command, tied, copy):
    pair = [f"--target={tied.target}", f"--draft={tied.draft}"]
    where = [*pair, f"--bundle={copy}", f"--buckets={GRID}", "--sampling=greedy,sample"]
    for entry in json.loads(command(precompile, *where, "--json").out)["entries"]:
        assert entry["bound_seconds"] is None  # of a CPU no peaks are known
        if entry["program"] in ("draft", "verify", "sampled_verify", "prefill"):
            # Layers are unrolled here, so the compiler counts all of them, and no less than what has to be done.
            assert entry["work"]["flops"] == pytest.approx(entry["compiler"]["flops"], rel=0.35)
            assert 0 < entry["work"]["bytes"] < entry["compiler"]["bytes"]
    done = command(precompile, *where)
    table = done.err[done.err.index("program ") :].splitlines()[:-1]  # behind the progress bar
    assert "its GFLOP" in table[0] and len(table) == 1 + 10 + 2 and max(map(len, table)) <= 120


def test_a_chip_with_figures_gets_its_table_from_the_compilers_figures(copy, capsys):
    manifest, chip = read_manifest(copy), TOPOLOGIES["v5e:1x1"].chip
    target, draft = manifest.target.facts, manifest.draft.facts
    programs = Programs(target, draft, "float32", sampling=manifest.sampling)
    deployment = Deployment(target, draft, programs, manifest.grid, "float32", "tpu", 1, chip)
    report = Report(manifest.entries, frozenset(), 1.0)
    report_build(deployment, report, copy, 2.0, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["hbm_bytes"]["code"] == sum(entry.memory.code for entry in manifest.entries)
    assert said["hbm_bytes"]["temporaries"] == max(
        entry.memory.temporaries + entry.memory.outputs - entry.memory.aliased for entry in manifest.entries
    )
    plain, speculative = said["buckets"]
    assert speculative["bound_seconds_per_token"] == speculative["bound_seconds"]["round"] / 2
    bounds = {entry["program"]: entry["bound_seconds"] for entry in said["entries"] if entry["bucket"].get("k") != 0}
    assert speculative["bound_seconds"]["verify"] == bounds["verify"]
    report_build(deployment, report, copy, 2.0, as_json=False)
    table = capsys.readouterr().err
    assert "ms/token, τ=2" in table and "fits v5e" in table
