"""Which samples make a record void."""

from dflash_aot.benchmarks.contenders import find_faults, list_answers


def sample(name: str, prompt: int, tokens: str) -> dict:
    return {"way": name, "prompt": prompt, "tokens": tokens}


AGREED = [sample(name, prompt, "xyz"[prompt]) for prompt in range(3) for name in "ab"]


def test_disagreement_and_compilation_are_faults():
    for samples, fault in (
        (AGREED, ""),
        ([sample("a", 0, "x"), sample("a", 0, "y")], "a gives other tokens than a for prompts 0"),
        (
            [*AGREED, sample("c", 2, "x"), sample("c", 1, "y"), sample("c", 0, "z")],
            "c gives other tokens than a for prompts 0, 2",
        ),
        ([sample("a", 0, "x") | {"compile_events": 0}], ""),
        ([sample("b", 0, "x") | {"compile_events": 2}], "b compiled while serving"),
        ([], "no contender answered"),
    ):
        assert find_faults(list_answers(samples), samples) == fault
