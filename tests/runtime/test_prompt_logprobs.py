"""Log-probabilities of a prompt's tokens: against transformers on the golden pair, and scheduled on a toy device."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from dflash_aot.cache.errors import GridMiss
from dflash_aot.runtime import SamplingParams
from dflash_aot.runtime.requests.request import TokenLogprob
from tests.runtime.toy import SAMPLED, ToyEngine, programs

TOLERANCE = 1e-5
KINDS = ("greedy", "sample", "prompt_logprobs")


@pytest.fixture(scope="module")
def expected(tied):
    """Token ids → the log-probabilities of the next token behind each, float64 [T, V], by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tied.target, dtype=torch.float32).eval()

    def compute(ids):
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor(ids)[None]).logits[0].double(), dim=-1).numpy()

    return compute


def test_prompt_logprobs_equal_those_of_transformers(serve, tied, expected):
    """Prompts of one chunk, of several, and of two groups of rows with padding. The answers stay what they were."""
    engine = serve("sampled_small", 7)
    for prompt in tied.facts["prompts"][::2]:
        ids = prompt["ar_output_ids"][:150]
        params = SamplingParams(max_tokens=2, logprobs=1, stop_token_ids=())
        result = engine.generate(ids, replace(params, prompt_logprobs=3))
        first, *scores = result.prompt_logprobs
        assert first is None and [score.token_id for score in scores] == ids[1:]
        wanted = expected(ids)[:-1]
        found = [score.logprob for score in scores]
        np.testing.assert_allclose(found, wanted[range(len(ids) - 1), ids[1:]], atol=TOLERANCE)
        largest = -np.sort(-wanted, axis=-1)[:, :3]
        np.testing.assert_allclose([[value for _, value in score.top] for score in scores], largest, atol=TOLERANCE)
        assert result.finish_reason == "length" and len(result.token_ids) == 2
        assert result.token_ids == engine.generate(ids, params).token_ids


def test_stream_has_prompt_logprobs_in_its_first_delta(serve):
    first, *others = serve("sampled_small", 7).stream([5, 6, 7], SamplingParams(prompt_logprobs=0, max_tokens=9))
    assert [score and (score.token_id, score.top) for score in first.prompt_logprobs] == [None, (6, ()), (7, ())]
    assert others and not any(delta.prompt_logprobs for delta in others)


def test_bundle_without_scoring_executables_refuses_with_the_build_command(serve):
    with pytest.raises(GridMiss, match="needs scoring executables: prompt_logprobs.*--sampling greedy,prompt_logprobs"):
        serve("tied", 7).generate([1, 2], SamplingParams(prompt_logprobs=1))


def test_only_chunks_of_requests_that_ask_are_scored():
    engine = ToyEngine(pick=3, sampling=KINDS)
    plain, scored = engine.submit([1] * 20, 2), engine.submit([2] * 20, 2, prompt_logprobs=1)
    sampled = engine.submit([3, 4, 5], 4, prompt_logprobs=0, **SAMPLED)
    engine.run()
    assert {call.heads for call in engine.calls("prefill")} == {(1,)}
    assert {call.heads for call in engine.calls("scored_prefill")} == {(2,), (3,)}
    assert scored.output.prompt_logprobs[1:] == [TokenLogprob(2, -0.5, ((2, -0.5),))] * 19
    assert sampled.output.prompt_logprobs[1:] == [TokenLogprob(4, -1.0), TokenLogprob(5, -1.25)]
    assert plain.result().prompt_logprobs is None


@pytest.mark.parametrize(
    ("kinds", "more"),
    [(KINDS, {}), (KINDS, {"prompt_logprobs": 1, **SAMPLED}), (("sample", "prompt_logprobs"), {"prompt_logprobs": 1})],
)
def test_request_for_no_tokens_ends_after_its_prompt(kinds, more):
    engine = ToyEngine(pick=3, sampling=kinds)
    request = engine.submit([2] * 20, 0, **more)
    engine.submit([3, 4], 5, **SAMPLED)
    engine.run()
    assert (request.output.finish_reason, request.output.token_ids) == ("length", [])
    assert len(request.result().prompt_logprobs or ()) == (20 if "prompt_logprobs" in more else 0)
    assert not any(name == "admit" and 2 in call.heads for call in engine.calls("admit") for name in programs([call]))
