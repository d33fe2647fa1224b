"""Sampled and greedy requests together, on a toy device that knows what each slot asked for."""

from dflash_aot.runtime.requests.request import TokenLogprob
from tests.runtime.toy import SAMPLED, VOCAB, ToyEngine, always, continue_alone, programs


def test_sampled_and_greedy_requests_share_a_round():
    engine = ToyEngine(pick=3, right=always(3))
    engine.submit([1, 2, 3], 12)
    engine.step()
    assert programs(engine.steps[0]) == ["prefill", "kv_write", "draft", "verify", "kv_write"]
    sampled = engine.submit([4, 5, 6], 9, **SAMPLED)
    engine.step()
    assert programs(engine.steps[1])[2:6] == ["admit", "admit", "draft", "sampled_verify"]
    assert [(call.slots, call.anchor) for call in engine.calls("admit")] == [((0,), -1), ((1,), 6)]
    engine.run()
    assert len(engine.calls("admit")) == 2
    assert sampled.output.token_ids != continue_alone(sampled.prompt, 9)


def test_sampling_state_does_not_reach_the_next_request():
    """One slot: greedy requests follow sampled ones, and the rounds of both bundles sample."""
    for sampling in (("greedy", "sample"), ("sample",)):
        engine = ToyEngine("batch=1 length=64 k=0,3 prefill=4", k=3, sampling=sampling, right=always(2))
        asked = ({"logit_bias": {9: 50.0}}, {}, SAMPLED, {}, {"repetition_penalty": 2.0}, {"logprobs": 1}, SAMPLED)
        requests = [engine.submit([number, 2], 8, **one) for number, one in enumerate(asked)]
        engine.run()
        assert requests[0].output.token_ids == [9] * 8


def describe(token: int, count: int) -> TokenLogprob:
    """The toy's log-probabilities: -token / 4; the likeliest tokens are the token itself and those above it."""
    tops = [(token + above) % VOCAB for above in range(count)]
    return TokenLogprob(token, -token / 4, tuple((top, -top / 4) for top in tops))


def test_log_probabilities_belong_to_each_request():
    engine = ToyEngine(pick=3, right=always(2))
    counts = {1: 0, 2: 3, 3: None, 4: 20}
    requests = {first: engine.submit([first], 9, logprobs=count) for first, count in counts.items()}
    requests[5] = engine.submit([5], 7, logprobs=1, stop_token_ids=[continue_alone([5], 5)[-1]])
    engine.run()
    for first, count in {**counts, 5: 1}.items():
        request = requests[first]
        expected = [] if count is None else [describe(token, count) for token in request.output.token_ids]
        assert request.output.logprobs == expected
