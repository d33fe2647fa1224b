"""Reports of dflash-precompile: the plan, its estimates of memory and time for a TPU, and the report of a build."""

import json
from pathlib import Path

import pytest

from dflash_aot.bin import precompile
from dflash_aot.bin.precompile_report import TerminalObserver
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.chips import CHIPS
from dflash_aot.cache.environment import libtpu_version
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Bucket, Grid, parse_grid
from dflash_aot.compile.pipeline.compilation_manager import Progress
from dflash_aot.compile.pipeline.deployment import ReplacedSize, check_tau, find_replaced
from dflash_aot.compile.pipeline.precompile import find_padding_waste

CONFIGS = Path(__file__).parents[1] / "cache" / "configs"
GRID = "batch=1,8 length=1024,4096 k=0,7,15 prefill=256"
SMALL_GRID = "batch=1 length=32 k=0,3 prefill=16"
needs_libtpu = pytest.mark.skipif(not libtpu_version(), reason="needs libtpu")


@pytest.fixture
def plan_tpu(command, tmp_path):
    """Runs dflash-precompile for the configs of a published pair and a TPU slice."""

    def plan(name, topology, grid, *arguments):
        for one in (name, f"{name}-DFlash-b16"):
            (tmp_path / one).mkdir()
            (tmp_path / one / "config.json").write_bytes((CONFIGS / f"{one}.json").read_bytes())
        pair = [f"--target={tmp_path / name}", f"--draft={tmp_path / name}-DFlash-b16"]
        where = [f"--topology={topology}", f"--bundle={tmp_path / 'bundle'}", f"--buckets={grid}"]
        done = command(precompile, *pair, *where, "--jobs=2", *arguments)
        assert not (tmp_path / "bundle").exists()
        return done

    return plan


@needs_libtpu
def test_plan_for_a_tpu_has_memory_and_least_round_times(plan_tpu):
    plan = json.loads(plan_tpu("Qwen3-4B", "v5e:1x1", GRID, "--plan", "--json", "--tau=9").out)
    hbm, buckets = plan["hbm_bytes"], plan["buckets"]
    assert hbm["fits"] and hbm["total"] == hbm["weights"] + hbm["state"] + hbm["temporaries"] + hbm["code"]
    assert plan["replaced"] == [{"axis": "length", "size": 1024, "larger": 4096}]  # K only by estimates, of a bundle
    assert plan["fits_up_to"]["batch"] >= 8 and plan["fits_up_to"]["length"] >= 4096
    assert [(one["batch"], one["length"], one["k"]) for one in buckets[:4]] == [
        *((1, 1024, k) for k in (0, 7, 15)),
        (1, 4096, 0),
    ]
    assert buckets[-1]["hbm_bytes"] == hbm["total"]  # a grid that ends at its last bucket is all of it
    plain, seven, fifteen = buckets[:3]
    assert plain["bound_seconds_per_token"] == plain["bound_seconds"]["round"] > 8e9 / 819e9  # 8 GB of weights
    assert seven["bound_seconds_per_token"] is None  # nine of eight tokens
    assert fifteen["bound_seconds_per_token"] == fifteen["bound_seconds"]["round"] / 9
    assert 120 < plan["expected_seconds"] < 600 and 5e6 < plan["expected_bytes"] < 60e6


@needs_libtpu
def test_plan_proposes_a_grid_that_fits(plan_tpu):
    done = plan_tpu("Qwen3-4B", "v5e:1x1", GRID.replace("8", "16"), "--plan")
    assert (done.code, done.out) == (5, "")
    assert "does not fit v5e: weights 9.12 + " in done.err
    assert "What would fit: batch=10 at length=4096, length=" in done.err
    assert f"libtpu {libtpu_version()}, which Python 3." in done.err
    assert max(map(len, done.err.splitlines())) <= 120


@needs_libtpu
def test_build_that_cannot_fit_is_refused_before_it_compiles(plan_tpu):
    done = plan_tpu("Qwen3-8B", "v5e:1x1", GRID)
    assert done.code == 5
    assert "does not fit v5e, per device: weights 18.48 + " in done.err and "No grid of this pair fits" in done.err


def test_progress_off_a_terminal_is_a_few_lines(capsys):
    observer = TerminalObserver()
    observer.on_phase("compile", 23)
    for done in range(24):
        observer.on_executable(Progress(done=done, total=23, label="draft"))
    observer.on_phase_end("compile")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" executables")[0] for line in lines] == [
        f"compile: {done} of 23" for done in (6, 12, 18, 23)
    ]


def test_padding_waste_is_worst_for_one_more_than_a_size():
    assert find_padding_waste([1024, 4096]) == pytest.approx(1 - 1025 / 4096)
    assert find_padding_waste([1, 4, 8]) == 0.5  # 2 in 4, or 5 in 8
    assert find_padding_waste([1, 2, 3]) == find_padding_waste([64]) == 0


def test_impossible_tau_is_refused():
    grid = Grid((1,), (32,), (0, 3), (16,))
    for tau, chip, words in (
        (0.5, CHIPS[0], "between 1 and 4"),
        (4.1, CHIPS[0], "--tau 4.1"),
        (float("nan"), CHIPS[0], "nan"),
        (2, None, "TPU"),
    ):
        with pytest.raises(BadInput, match=words):
            check_tau(tau, grid, chip)
    check_tau(1, grid, CHIPS[0])
    check_tau(4, grid, CHIPS[0])


def test_sizes_that_save_nothing_are_named():
    grid = parse_grid("batch=1,2 length=64,128 k=0,3,7 prefill=16", 8)
    seconds = {bucket: bucket.batch * (1.0 if bucket.k == 3 else 1.02) for bucket in grid.buckets()}
    length, k = ReplacedSize("length", 64, 128), ReplacedSize("k", 3, 7)
    assert list(find_replaced(grid, seconds, None)) == [k]
    assert list(find_replaced(grid, seconds, dict.fromkeys(seconds, 0.0))) == [length, k]
    of_rows = {bucket: float(bucket.batch) for bucket in seconds}  # nothing else takes time
    assert list(find_replaced(grid, seconds, of_rows)) == [length, ReplacedSize("batch", 1, 2), k]
    assert list(find_replaced(grid, {**seconds, Bucket(2, 64, 3): None}, None)) == []


def test_report_has_calculated_work_and_the_compilers_count(command, tied, copy):
    pair = [f"--target={tied.target}", f"--draft={tied.draft}"]
    where = [*pair, f"--bundle={copy}", f"--buckets={SMALL_GRID}", "--sampling=greedy"]
    for entry in json.loads(command(precompile, *where, "--json").out)["entries"]:
        assert entry["bound_seconds"] is None  # a CPU's peaks are unknown
        if entry["program"] in ("draft", "verify", "prefill"):
            # On a CPU layers are unrolled, so the compiler counts all of them, and at least the necessary work.
            assert entry["work"]["flops"] == pytest.approx(entry["compiler"]["flops"], rel=0.35)
            assert 0 < entry["work"]["bytes"] < entry["compiler"]["bytes"]
    done = command(precompile, *where)
    table = done.err[done.err.index("program ") :].splitlines()[:-1]  # after the progress bar
    assert "XLA GFLOP" in table[0] and len(table) == 1 + 7 + 2 and max(map(len, table)) <= 120


def plan_again(command, tied, bundle, *arguments):
    """Plans the bundle's own grid for a v5e."""
    pair = [f"--target={tied.target}", f"--draft={tied.draft}", f"--bundle={bundle}", f"--buckets={SMALL_GRID}"]
    where = ["--topology=v5e:1x1", "--dtype=float32", "--sampling=greedy", "--plan", "--tau=2"]
    return command(precompile, *pair, *where, *arguments)


@needs_libtpu
def test_plan_uses_the_estimates_of_a_bundle_that_is_there(command, tied, estimated):
    seconds = {one.signature.executable_id: one.cost.schedule.seconds for one in read_manifest(estimated).entries}
    plain, speculative = json.loads(plan_again(command, tied, estimated, "--json").out)["buckets"]
    written = seconds["kv_write", (1, 1)]
    assert plain["estimate_seconds"] == pytest.approx(seconds["verify", (1, 32, 0)] + written)
    assert plain["bound_seconds"]["kv_write"] > 0
    drafted = [("verify", (1, 32, 3)), ("draft", (1, 32, 3)), ("kv_write", (1, 4))]
    assert speculative["estimate_seconds"] == pytest.approx(sum(seconds[name] for name in drafted))
    assert speculative["estimate_seconds_per_token"] == pytest.approx(speculative["estimate_seconds"] / 2)
    text = plan_again(command, tied, estimated).err
    assert "estimate ms  ms/token, τ=2" in text and f"{speculative['estimate_seconds'] * 500:.2f}" in text
    other = plan_again(command, tied, estimated, "--json", "--dtype=bfloat16", "--replace")
    assert {one["estimate_seconds"] for one in json.loads(other.out)["buckets"]} == {None}
