"""Usage of a response, by hand."""

from dflash_aot.server.response_formats import ChoiceOutput, format_usage


def count_cached(n: int, *choices: tuple[int, int]) -> int:
    """choices: cached tokens of each, and those that were cached when it got its slot; of prompts of 40 tokens."""
    outputs = [ChoiceOutput(cached_tokens=cached, cached_at_start=start) for cached, start in choices]
    return format_usage(40, outputs, n)["prompt_tokens_details"]["cached_tokens"]


def test_cached_tokens_of_a_single_choice_are_its_own():
    assert count_cached(1, (32, 16)) == 32
    assert count_cached(1, (32, 16), (16, 0)) == 48  # of two prompts


def test_choices_of_a_prompt_count_no_cached_tokens_twice():
    assert count_cached(3, (16, 16), (32, 16), (32, 32)) == 16
    assert count_cached(2, (24, 0), (28, 0)) == 0  # each computed a part of the prompt
    assert count_cached(2, (16, 16), (32, 32), (0, 0), (32, 32)) == 16
