"""The answer of a request never depends on K, on its bucket, or on other requests."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.stepper import up_to

KS = (0, 3, 7)
SLOTS = 3
NAMES = ("len1", "len_eq_block", "len5", "len30", "len70", "len131", "random12", "len_block_plus1")


request_cuts = st.tuples(st.sampled_from(NAMES), st.integers(0, 39), st.integers(1, 64))


@settings(derandomize=True, max_examples=20)
@given(k=st.sampled_from(KS), cuts=st.lists(request_cuts, min_size=1, max_size=SLOTS + 2))
def test_mixed_requests_match_the_reference(serve, cases, k, cuts):
    together = [(cases[name].later(cut), limit) for name, cut, limit in cuts]
    prompts = [case.prompt for case, _ in together]
    params = [up_to(min(limit, len(case.answer))) for case, limit in together]
    results = serve("tied", k).generate_all(prompts, params)
    expected = [case.answer[: one.max_tokens] for (case, _), one in zip(together, params, strict=True)]
    assert [result.token_ids for result in results] == expected
    for result in results:  # all that was committed: the first token, then what each round accepted and one more
        assert 1 + sum(accepted + 1 for accepted in result.accepted) >= len(result.token_ids)
