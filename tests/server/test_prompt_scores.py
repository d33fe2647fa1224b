"""Scores of prompts: where tokens begin in the text, and how many scores one answer may have."""

import pytest

from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.server.api_errors import ApiError
from dflash_aot.server.limits import MAX_PROMPT_SCORES
from dflash_aot.server.request_parsing import ParsedRequest, check_scores, find_text_tokens
from dflash_aot.server.token_formatting import TextOffsets


@pytest.mark.parametrize(
    ("parts", "offsets"),
    [
        ([b"ab", b"c", b""], [0, 2, 3]),
        ([b"", b"a", b"b"], [0, 0, 1]),  # a token without text, such as BOS
        (["é".encode()[:1], "é".encode()[1:] + b"x", b"y"], [0, 0, 2]),
        ([b"a", "東".encode()[:1], "東".encode()[1:2], "東".encode()[2:], b"b"], [0, 1, 1, 1, 2]),
        ([b"\xe6", "é".encode(), b"b"], [0, 1, 2]),
        ([b"\xe6", b"a", b"b"], [0, 1, 2]),  # an incomplete character is shown as one U+FFFD
    ],
)
def test_offsets_count_characters_of_the_text(parts, offsets):
    counted = TextOffsets()
    assert [counted.push(part) for part in parts] == offsets


def test_tokens_around_a_text_are_not_written_in_it():
    assert find_text_tokens((1, 7, 8, 2), (7, 8)) == range(1, 3)
    assert find_text_tokens((7, 8), (7, 8)) == range(2) and find_text_tokens((7, 8), (8, 7)) == range(2)


def test_more_scores_than_one_answer_may_have_are_refused():
    params = SamplingParams(prompt_logprobs=20)
    fitting = ParsedRequest(((5,) * (MAX_PROMPT_SCORES // 16 // 21),), 16, params)
    assert check_scores(fitting, "logprobs") is fitting
    with pytest.raises(ApiError, match="4096 prompt tokens x n = 16 .* no more than 262144 are allowed") as refused:
        check_scores(ParsedRequest(((5,) * 4096,), 16, params), "logprobs")
    assert (refused.value.status, refused.value.param) == (400, "logprobs")
