"""Refused requests: the error names the field, what exists and the remedy, and affects no other request."""

import pytest

from dflash_aot.cache.errors import BadCheckpoint, BadInput, GridMiss
from dflash_aot.runtime import Engine, SamplingParams
from tests.runtime.stepper import hold

CAPACITY = 208
VOCABULARY = 512
BAD_PROMPTS = (
    ([], BadInput, "prompt is empty"),
    ("", BadCheckpoint, "tokenizer.json"),  # the bundle's target has no tokenizer
    ("hello", BadCheckpoint, "tokenizer.json"),
    ([1, VOCABULARY], BadInput, "512.*0 to 511"),
    ([1, -1, 2], BadInput, "-1.*0 to 511"),
    ([2**80], BadInput, "0 to 511"),
    ([1.0], BadInput, "1.0.*0 to 511"),
    ([True], BadInput, "True.*0 to 511"),
    (None, BadInput, "None: a text or a list of token ids"),
    (b"ab", BadInput, "b'ab': a text or a list of token ids"),
    (["1"], BadInput, "'1'.*0 to 511"),
    ([1] * (CAPACITY + 1), GridMiss, "length=209.*grid ends at.*length=208.*dflash-precompile .*--buckets"),
    ([1] * 100_000, GridMiss, "100000 positions; the target's config.json allows 40960"),
)
BAD_PARAMS = (
    ({"stop_token_ids": [VOCABULARY]}, BadInput, "stop_token_ids.*512.*0 to 511"),
    ({"stop_token_ids": [3, -1]}, BadInput, "stop_token_ids.*-1.*0 to 511"),
    ({"stop": ["x"]}, BadInput, "tokenizer.json.*stop_token_ids"),
    ({"max_tokens": CAPACITY + 1}, GridMiss, "length=209.*dflash-precompile .*--buckets"),
    ({"k": 7}, BadInput, "k is 7, but the engine was opened for K up to 0: .*k='auto'"),
)


def test_bad_parameters_are_refused_by_name(serve):
    for params, error, words in BAD_PARAMS:
        with pytest.raises(error, match=words):
            serve("tied", 0).generate([1], SamplingParams(**params))


def test_too_long_prompt_names_a_wider_grid(serve):
    with pytest.raises(GridMiss) as refusal:
        serve("tied", 7).generate([1] * 300, SamplingParams(max_tokens=10))
    axes = dict(axis.split("=") for axis in str(refusal.value).partition("--buckets '")[2].split("'")[0].split())
    assert max(map(int, axes["length"].split(","))) >= 309
    assert axes["k"] == "0,7" and axes["batch"] == "1,3"
    longest = serve("tied", 7).generate([1] * CAPACITY, SamplingParams(max_tokens=1, stop_token_ids=()))
    assert longest.finish_reason == "length"  # the last token needs no position


def test_bad_prompts_are_refused_beside_a_running_request(serve, cases):
    engine, case = serve("tied", 0), cases["len131"]
    running = engine.stream(case.prompt, SamplingParams(max_tokens=48, stop_token_ids=()))
    deltas = iter(running)
    tokens = list(next(deltas).token_ids)
    for prompt, error, words in BAD_PROMPTS:
        for ask in (engine.generate, engine.stream):
            with pytest.raises(error, match=words):
                ask(prompt)
    tokens += [token for delta in deltas for token in delta.token_ids]
    assert tokens == case.answer


def test_one_bad_prompt_of_several_starts_none(serve, cases):
    engine = serve("tied", 7)
    before = engine.stats().prefill_chunks
    with pytest.raises(BadInput, match="empty"):
        engine.generate_all([cases["len1"].prompt, [], cases["len5"].prompt])
    for prompts in ("abc", iter([[1]])):
        with pytest.raises(BadInput, match="a list of prompts is needed"):
            engine.generate_all(prompts)
    assert engine.generate_all([]) == []
    with pytest.raises(BadInput, match="2 prompts, but 1 "):
        engine.generate_all([[1], [2]], [SamplingParams()])
    with pytest.raises(BadInput, match="SamplingParams are needed"):
        engine.generate_all([[1]], [{"max_tokens": 3}])
    assert engine.generate([1], SamplingParams(max_tokens=1)).finish_reason == "length"
    assert engine.stats().prefill_chunks == before + 1


def test_later_changes_of_the_caller_have_no_effect(serve, cases):
    """A bias is checked at submission and used when a slot is free."""
    engine, case, bias = serve("sampled", 7), cases["len70"], {5: 1.0}
    with hold(engine):
        later = engine.stream([1], SamplingParams(max_tokens=4, logit_bias=bias))
        bias[10**6] = 1.0
    other = engine.generate(case.prompt, SamplingParams(max_tokens=len(case.answer), stop_token_ids=()))
    assert (other.token_ids, len(later.result().token_ids)) == (case.answer, 4)


@pytest.mark.parametrize(
    ("k", "error", "words"),
    [
        (2, GridMiss, r"k=2.*grid has k=0,3.*dflash-precompile.*k=0,2,3"),
        (8, GridMiss, r"k=8.*More than k=7 cannot be added"),
        (-1, BadInput, r"-1.*'auto', one of 0, 3.*, or ranges \(\(first, last, K\), \.\.\.\)"),
        (True, BadInput, "True"),
        ("many", BadInput, "many"),
        (None, BadInput, "None"),
        ([(1, 1, 2), (2, 2, 3), (3, 3, 1)], GridMiss, r"k=1,2.*grid has k=0,3.*dflash-precompile.*k=0,1,2,3"),
        ([(1, 1, 3), (3, 3, 0)], BadInput, "no K for 2 to 2 requests in the round"),
    ],
)
def test_k_outside_the_grid_is_refused(bundle, k, error, words):
    with pytest.raises(error, match=words):
        Engine.open(bundle("tiny"), k=k)


def test_k_by_batch_size_gives_the_same_tokens(bundle, cases):
    """Alone with K = 7, together without drafts."""
    names = ["len5", "len30", "len70"]
    with Engine.open(bundle("tied"), k=((1, 1, 7), (2, 8, 0))) as engine:
        params = SamplingParams(max_tokens=30, stop_token_ids=())
        alone = engine.generate(cases["len5"].prompt, params)
        together = engine.generate_all([cases[name].prompt for name in names], params)
        ks = {bucket.k for bucket, _ in engine.stats().bucket_rounds}
    assert [one.token_ids for one in (alone, *together)] == [cases[name].answer[:30] for name in ("len5", *names)]
    assert ks == {0, 7} and len(alone.accepted) < 30
