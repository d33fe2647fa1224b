"""Names of ways and of what they say, and who says something else."""

import pytest

from dflash_aot.benchmarks.pairs import Pair
from dflash_aot.benchmarks.ways import (
    CHOSEN,
    engine_way,
    find_compilation,
    find_disagreement,
    jit_way,
    make_slug,
    name_tokens,
    torch_ways,
)


@pytest.fixture
def pair(tied) -> Pair:
    return Pair("given", tied.target, tied.draft)


def test_the_same_tokens_have_the_same_name():
    assert name_tokens([1, 23]) == name_tokens([1, 23])
    assert len({name_tokens(one) for one in ([1, 23], [12, 3], [1, 23, 0], [])}) == 4


def sample(way: str, prompt: int, tokens: str, exact: bool = True) -> dict:
    return {"way": way, "exact": exact, "prompt": prompt, "tokens": tokens}


def test_ways_that_agree_are_no_fault():
    assert find_disagreement([sample("a", 0, "x"), sample("a", 1, "y"), sample("b", 1, "y"), sample("b", 0, "x")]) == ""


def test_a_way_with_other_tokens_is_named_with_its_prompts():
    samples = [sample(way, prompt, "xyz"[prompt]) for prompt in range(3) for way in "ab"]
    assert find_disagreement([*samples, sample("c", 2, "x"), sample("c", 1, "y"), sample("c", 0, "z")]) == (
        "c gives other tokens than a for prompts 0, 2"
    )


def test_a_way_with_other_tokens_than_its_own_is_named():
    assert find_disagreement([sample("a", 0, "x"), sample("a", 0, "y")]) == "a gives other tokens than a for prompts 0"


def test_who_rounds_otherwise_may_say_something_else():
    assert find_disagreement([sample("a", 0, "x"), sample("b", 0, "y", exact=False)]) == ""


def test_who_compiled_while_serving_is_named():
    counted = [{"way": "b", "compile_events": 2}, {"way": "a", "compile_events": 0}, {"way": "idle"}]
    assert find_compilation(counted[1:]) == ""
    assert find_compilation(counted) == "b compiled while serving"


def test_ways_have_names_that_figures_can_have(pair, tmp_path):
    ways = [engine_way(tmp_path, pair, k) for k in (0, 15, CHOSEN)]
    ways += [engine_way(tmp_path, pair, 7, "bfloat16"), jit_way(tmp_path, pair, 7, 64), *torch_ways(pair, True)]
    assert [make_slug(way.name) for way in ways] == [
        "engine_k0",
        "engine_k15",
        "engine_k_chosen",
        "engine_bfloat16_k7",
        "jit_k7",
        "torch_float32",
        "torch_bfloat16",
        "torch_float32_prompt_lookup",
        "torch_float32_early_exit",
        "torch_bfloat16_prompt_lookup",
    ]
    assert [way.name for way in ways if not way.exact] == [way.name for way in ways if "bfloat16" in way.name]
    assert [way.k for way in ways[:5]] == [0, 15, None, 7, 7]
