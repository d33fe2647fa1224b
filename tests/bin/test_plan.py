"""dflash-precompile --plan: what it expects of a build, and what it says of memory and time for a TPU."""

import json
from pathlib import Path

import pytest

from dflash_aot.bin import precompile
from dflash_aot.bin.bucket_table import check_tau
from dflash_aot.bin.command_line import default_bundle
from dflash_aot.bin.plan import worst_waste
from dflash_aot.cache.environment import libtpu_version
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.grid import Grid
from dflash_aot.cache.topology import CHIPS

CONFIGS = Path(__file__).parents[1] / "cache" / "configs"
GRID = "batch=1,8 length=1024,4096 k=0,7,15 prefill=256"
needs_libtpu = pytest.mark.skipif(not libtpu_version(), reason="needs libtpu")


@pytest.fixture
def plan_tpu(command, tmp_path):
    """Of a published pair for a slice of v5e; returns what the command left."""

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
def test_a_plan_tells_what_fits_and_what_a_round_takes_at_least(plan_tpu):
    plan = json.loads(plan_tpu("Qwen3-4B", "v5e:1x1", GRID, "--plan", "--json", "--tau=9").out)
    hbm, buckets = plan["hbm_bytes"], plan["buckets"]
    assert hbm["fits"] and hbm["total"] == hbm["weights"] + hbm["state"] + hbm["temporaries"] + hbm["code"]
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
    assert 20 < plan["expected_seconds"] < 600 and 5e6 < plan["expected_bytes"] < 60e6


def test_a_bundle_for_a_slice_that_is_not_here_does_not_take_the_place_of_the_one_that_is_served(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    here, there = default_bundle("a/T", "a/D"), default_bundle("a/T", "a/D", "v5e:2x2")
    assert (here, there) == (Path("/cache/dflash-aot/a-T--a-D"), Path("/cache/dflash-aot/v5e-2x2/a-T--a-D"))


@needs_libtpu
def test_a_plan_of_too_much_says_so_and_a_build_of_it_is_not_begun(plan_tpu):
    done = plan_tpu("Qwen3-4B", "v5e:1x1", GRID.replace("8", "16"), "--plan")
    assert (done.code, done.out) == (0, "")
    assert (
        "does not fit v5e: weights 9.12 + " in done.err
        and "What would fit: batch=10 at length=4096, length=" in done.err
    )
    assert max(map(len, done.err.splitlines())) <= 120


@needs_libtpu
def test_a_build_of_too_much_is_not_begun(plan_tpu):
    done = plan_tpu("Qwen3-8B", "v5e:1x1", GRID)
    assert done.code == 5
    assert "does not fit v5e, per device: weights 18.48 + " in done.err and "No grid of this pair fits" in done.err


def test_where_the_chips_figures_are_unknown_there_is_no_verdict(command, tied):
    arguments = [f"--target={tied.target}", f"--draft={tied.draft}", "--plan", "--platform=cpu"]
    plan = json.loads(command(precompile, *arguments, "--json").out)
    assert plan["expected_seconds"] > 0 and "hbm_bytes" not in plan and "buckets" not in plan
    done = command(precompile, *arguments)
    assert "an estimate: " in done.err and "fit" not in done.err


def test_the_worst_waste_is_that_of_one_more_than_a_size():
    assert worst_waste([1024, 4096]) == pytest.approx(1 - 1025 / 4096)
    assert worst_waste([1, 4, 8]) == 0.5  # 2 in 4, or 5 in 8
    assert worst_waste([1, 2, 3]) == worst_waste([64]) == 0


@pytest.mark.parametrize(
    ("tau", "chip", "words"),
    [
        (0.5, CHIPS[0], "between 1 and 4"),
        (4.1, CHIPS[0], "--tau 4.1"),
        (float("nan"), CHIPS[0], "nan"),
        (2, None, "TPU"),
    ],
)
def test_a_tau_that_cannot_be_is_refused(tau, chip, words):
    grid = Grid((1,), (32,), (0, 3), (16,))
    with pytest.raises(BadInput, match=words):
        check_tau(tau, grid, chip)
    check_tau(1, grid, CHIPS[0])
    check_tau(4, grid, CHIPS[0])
