"""Names of contenders, hashes of tokens, and which records are void."""

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_aot.benchmarks.contenders import (
    CHOSEN,
    BenchmarkPair,
    engine_contender,
    find_disagreement,
    find_faults,
    hash_tokens,
    jit_contender,
    torch_contenders,
)
from tests.runtime.stepper import wait_until


@pytest.fixture
def pair(tied) -> BenchmarkPair:
    return BenchmarkPair("given", tied.target, tied.draft)


def test_hash_is_equal_for_equal_tokens_only():
    assert hash_tokens([1, 23]) == hash_tokens([1, 23])
    assert len({hash_tokens(one) for one in ([1, 23], [12, 3], [1, 23, 0], [])}) == 4


def sample(name: str, prompt: int, tokens: str, exact: bool = True) -> dict:
    return {"way": name, "exact": exact, "prompt": prompt, "tokens": tokens}


@pytest.mark.parametrize(
    ("samples", "fault"),
    [
        ([sample("a", 0, "x"), sample("a", 1, "y"), sample("b", 1, "y"), sample("b", 0, "x")], ""),
        ([sample("a", 0, "x"), sample("a", 0, "y")], "a gives other tokens than a for prompts 0"),
        ([sample("a", 0, "x"), sample("b", 0, "y", exact=False)], ""),
    ],
    ids=["agree", "with itself", "not exact"],
)
def test_disagreement_is_found_among_exact_contenders(samples, fault):
    assert find_disagreement(samples) == fault


def test_disagreeing_contender_is_named_with_its_prompts():
    samples = [sample(name, prompt, "xyz"[prompt]) for prompt in range(3) for name in "ab"]
    assert find_disagreement([*samples, sample("c", 2, "x"), sample("c", 1, "y"), sample("c", 0, "z")]) == (
        "c gives other tokens than a for prompts 0, 2"
    )


def test_compilation_while_serving_is_a_fault():
    counted = [
        sample("b", 0, "x") | {"compile_events": 2},
        sample("a", 0, "x") | {"compile_events": 0},
        sample("c", 0, "x"),
    ]
    assert find_faults(counted[1:]) == ""
    assert find_faults(counted) == "b compiled while serving"
    assert find_faults([]) == "no contender answered"


def test_contenders_have_names_and_say_whether_they_are_exact(pair, tmp_path):
    found = [engine_contender(tmp_path, pair, k) for k in (0, 15, CHOSEN)]
    found += [engine_contender(tmp_path, pair, 7, "bfloat16"), jit_contender(tmp_path, pair, 7, 64)]
    found += torch_contenders(pair, True)
    assert [one.name for one in found] == [
        "engine, K = 0",
        "engine, K = 15",
        "engine, K chosen",
        "engine, bfloat16, K = 7",
        "jax.jit loop, K = 7",
        "PyTorch float32",
        "PyTorch bfloat16",
        "PyTorch float32, prompt lookup",
        "PyTorch float32, early exit",
        "PyTorch bfloat16, prompt lookup",
    ]
    assert [one.name for one in found if not one.exact] == [one.name for one in found if "bfloat16" in one.name]
    assert [one.k for one in found[:5]] == [0, 15, None, 7, 7]


BUILDING = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from dflash_aot.benchmarks.contenders import end_with_parent

pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent)
print(pool.submit(os.getpid).result(), flush=True)
pool.submit(time.sleep, 1000).result()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="without /proc nothing tells whether a process runs")
def test_process_that_builds_a_bundle_ends_with_a_killed_benchmark():
    with subprocess.Popen([sys.executable, "-c", BUILDING], stdout=subprocess.PIPE, text=True) as benchmark:
        stat = Path(f"/proc/{int(benchmark.stdout.readline())}/stat")
        benchmark.kill()

    def has_ended() -> bool:
        try:
            return stat.read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:  # init has reaped it
            return True

    wait_until(has_ended)
