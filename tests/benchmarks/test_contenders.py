"""Names of contenders, hashes of tokens, and which records are void."""

from dflash_aot.benchmarks.contenders import (
    CHOSEN,
    BenchmarkPair,
    engine_contender,
    find_faults,
    jit_contender,
    torch_contenders,
)


def sample(name: str, prompt: int, tokens: str, exact: bool = True) -> dict:
    return {"way": name, "exact": exact, "prompt": prompt, "tokens": tokens}


AGREED = [sample(name, prompt, "xyz"[prompt]) for prompt in range(3) for name in "ab"]


def test_disagreement_and_compilation_are_faults():
    for samples, fault in (
        (AGREED, ""),
        ([sample("a", 0, "x"), sample("a", 0, "y")], "a gives other tokens than a for prompts 0"),
        ([*AGREED, sample("b", 0, "y", exact=False)], ""),
        (
            [*AGREED, sample("c", 2, "x"), sample("c", 1, "y"), sample("c", 0, "z")],
            "c gives other tokens than a for prompts 0, 2",
        ),
        ([sample("a", 0, "x") | {"compile_events": 0}], ""),
        ([sample("b", 0, "x") | {"compile_events": 2}], "b compiled while serving"),
        ([], "no contender answered"),
    ):
        assert find_faults(samples) == fault


def test_contenders_have_names_and_say_whether_they_are_exact(tied, tmp_path):
    pair = BenchmarkPair(tied.target, tied.draft)
    found = [engine_contender(tmp_path, pair, k) for k in (0, CHOSEN)]
    found += [engine_contender(tmp_path, pair, 7, "bfloat16"), jit_contender(tmp_path, pair, 7, 64)]
    found += torch_contenders(pair, True)
    assert [(one.name, one.exact) for one in found] == [
        ("engine, K = 0", True),
        ("engine, K chosen", True),
        ("engine, bfloat16, K = 7", False),
        ("jax.jit loop, K = 7", True),
        ("PyTorch float32", True),
        ("PyTorch bfloat16", False),
        ("PyTorch float32, prompt lookup", True),
        ("PyTorch float32, early exit", True),
        ("PyTorch bfloat16, prompt lookup", False),
    ]
    assert [one.k for one in found[:4]] == [0, None, 7, 7]
