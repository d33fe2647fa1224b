"""OpenAI's official client against a server; responses are compared with those of the engine."""

import re
from collections.abc import Iterator

import openai
import pytest

from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.text.chat_template import render_chat
from tests.server.conftest import PATIENCE

PROMPT = "def main():\n    import argparse\n    parser = "
MESSAGES = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "import os"}]
TOKENS = 24
GREEDY = {"model": "embedded", "prompt": PROMPT, "temperature": 0}
ECHOED = {"model": "embedded", "temperature": 0, "echo": True}
CHAT = {"model": "embedded", "messages": MESSAGES, "temperature": 0}


@pytest.fixture(scope="module")
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(engine: Engine):
    return engine.generate(PROMPT, SamplingParams(max_tokens=TOKENS))


def generate_chat(engine: Engine, params: SamplingParams):
    prompt = engine.tokenizer.encode(render_chat(engine.target, MESSAGES), add_special_tokens=False)
    return engine.generate(prompt, params)


def test_completion_equals_the_engines_result(client, engine, expected):
    for prompt in (PROMPT, engine.tokenizer.encode(PROMPT)):
        response = client.completions.create(**{**GREEDY, "prompt": prompt}, max_tokens=TOKENS)
        (choice,) = response.choices
        assert (choice.text, choice.finish_reason, choice.logprobs) == (expected.text, "length", None)
    assert response.usage.prompt_tokens == expected.prompt_tokens
    assert response.usage.completion_tokens == TOKENS
    assert response.usage.total_tokens == expected.prompt_tokens + TOKENS
    assert response.id.startswith("cmpl-") and response.system_fingerprint.startswith("fp_")


def test_usage_reports_speculation(client, engine):
    params = SamplingParams(max_tokens=TOKENS, k=7)
    expected = engine.generate(PROMPT, params)
    response = client.completions.create(**GREEDY, max_tokens=TOKENS, extra_body={"k": 7})
    rounds, accepted = len(expected.accepted), sum(expected.accepted)
    speculative = response.usage.speculative
    assert speculative.pop("acceptance_histogram") == [expected.accepted.count(count) for count in range(8)]
    assert speculative == {"rounds": rounds, "drafted": 7 * rounds, "accepted": accepted, "tau": 1 + accepted / rounds}
    details = response.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == accepted > 0
    assert details.rejected_prediction_tokens == 7 * rounds - accepted


def test_chunks_of_a_completion_add_up_to_its_text(client, expected):
    options = {"include_usage": True}
    chunks = list(client.completions.create(**GREEDY, max_tokens=TOKENS, stream=True, stream_options=options))
    *parts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in parts) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * (len(parts) - 1) + ["length"]
    assert len(parts) > 1 and len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in parts)
    assert last.choices == [] and last.usage.completion_tokens == TOKENS
    plain = client.completions.create(**GREEDY, max_tokens=4, stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in plain)


def test_continuous_usage_counts_tokens_up_to_each_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.completions.create(**GREEDY, max_tokens=TOKENS, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < TOKENS and counts[-2:] == [TOKENS, TOKENS]


def test_chat_is_rendered_by_the_targets_template(client, engine):
    expected = generate_chat(engine, SamplingParams(max_tokens=TOKENS))
    response = client.chat.completions.create(**CHAT, max_completion_tokens=TOKENS)
    (choice,) = response.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason
    assert response.usage.prompt_tokens == expected.prompt_tokens
    assert response.id.startswith("chatcmpl-")
    chunks = list(client.chat.completions.create(**CHAT, max_tokens=TOKENS, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert reasons == [expected.finish_reason]


def test_choices_have_consecutive_seeds(client, engine):
    drawn = {"max_tokens": 8, "temperature": 0.9, "top_p": 0.95}
    fields = {"model": "embedded", "prompt": PROMPT, "n": 3, "seed": 5, **drawn}
    response = client.completions.create(**fields)
    each = [engine.generate(PROMPT, SamplingParams(seed=seed, **drawn)).text for seed in (5, 6, 7)]
    assert [(choice.index, choice.text) for choice in response.choices] == list(enumerate(each))
    assert len(set(each)) > 1
    assert response.usage.prompt_tokens == len(engine.tokenizer.encode(PROMPT))
    texts = [""] * 3
    for chunk in client.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == each


def test_choices_of_several_prompts_are_ordered_by_prompt(client, engine):
    prompts = ["import os", "class "]
    response = client.completions.create(model="embedded", prompt=prompts, max_tokens=6, n=2, temperature=0)
    each = [engine.generate(prompt, SamplingParams(max_tokens=6)).text for prompt in prompts]
    assert [choice.text for choice in response.choices] == [each[0], each[0], each[1], each[1]]


def test_completion_logprobs_equal_the_engines(client, engine):
    expected = engine.generate(PROMPT, SamplingParams(max_tokens=6, logprobs=2))
    (choice,) = client.completions.create(**GREEDY, max_tokens=6, logprobs=2).choices
    logprobs = choice.logprobs
    assert logprobs.token_logprobs == pytest.approx([chosen.logprob for chosen in expected.logprobs], abs=1e-5)
    assert "".join(logprobs.tokens) == choice.text == expected.text
    assert [choice.text[offset:][:1] for offset in logprobs.text_offset] == [token[:1] for token in logprobs.tokens]
    for token, tops in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert len(tops) == 2 and max(tops, key=tops.get) == token  # greedy decoding chooses the likeliest token


def test_echo_gives_the_logprobs_of_the_prompt(client, engine):
    ids = engine.tokenizer.encode(PROMPT)
    expected = engine.generate(PROMPT, SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=2))
    for prompt in (PROMPT, ids):
        (choice,) = client.completions.create(**ECHOED, prompt=prompt, max_tokens=4, logprobs=2).choices
        assert choice.text == PROMPT + expected.text == "".join(choice.logprobs.tokens)
        scores = [*expected.prompt_logprobs[1:], *expected.logprobs]
        assert choice.logprobs.token_logprobs[0] is choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx([score.logprob for score in scores], abs=1e-5)
        offsets = choice.logprobs.text_offset
        assert [choice.text[offset:][:1] for offset in offsets] == [token[:1] for token in choice.logprobs.tokens]


def test_echo_without_new_tokens_scores_the_prompt_only(client, engine):
    prompts = [engine.tokenizer.encode(PROMPT), [5]]
    response = client.completions.create(**ECHOED, prompt=prompts, max_tokens=0, logprobs=0)
    first, second = response.choices
    assert (first.text, first.finish_reason, response.usage.completion_tokens) == (PROMPT, "length", 0)
    expected = engine.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0)).prompt_logprobs
    assert first.logprobs.token_logprobs[1:] == pytest.approx([score.logprob for score in expected[1:]], abs=1e-5)
    assert second.logprobs.token_logprobs == [None] and len(second.logprobs.tokens) == 1


def test_streamed_echo_adds_up_to_the_whole(client):
    fields = {**ECHOED, "prompt": PROMPT, "max_tokens": 6, "n": 2, "logprobs": 1}
    choices = client.completions.create(**fields).choices
    chunks = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
    for choice in choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in own) == choice.text
        offsets = [offset for chunk in own for offset in chunk.logprobs.text_offset]
        assert offsets == choice.logprobs.text_offset


def test_prompt_logprobs_have_the_form_of_vllm(client, engine):
    expected = engine.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=1)).prompt_logprobs
    body = {"extra_body": {"prompt_logprobs": 1}, "model": "embedded", "max_tokens": 1, "temperature": 0}
    found = client.completions.create(**body, prompt=PROMPT).choices[0].prompt_logprobs
    assert found[0] is None and len(found) == len(expected)
    for score, given in zip(expected[1:], found[1:], strict=True):
        assert given[str(score.token_id)]["logprob"] == pytest.approx(score.logprob, abs=1e-5)
        assert given.keys() == {str(score.token_id), *(str(token) for token, _ in score.top)}
    chat = client.chat.completions.create(**body, messages=MESSAGES).choices[0].prompt_logprobs
    assert chat[0] is None and all(next(iter(score.values()))["decoded_token"] for score in chat[1:])
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs are not streamed"):
        client.completions.create(**body, prompt=PROMPT, stream=True)


def test_chat_logprobs_equal_the_engines(client, engine):
    expected = generate_chat(engine, SamplingParams(max_tokens=6, logprobs=3))
    response = client.chat.completions.create(**CHAT, max_tokens=6, logprobs=True, top_logprobs=3)
    content = response.choices[0].logprobs.content
    assert [token.logprob for token in content] == pytest.approx(
        [chosen.logprob for chosen in expected.logprobs], abs=1e-5
    )
    assert b"".join(bytes(token.bytes) for token in content).decode() == expected.text
    assert all(len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token for token in content)


def test_sampling_fields_reach_the_engine(client, engine):
    drawn = {"max_tokens": 12, "seed": 3, "temperature": 3.0, "top_p": 0.8, "presence_penalty": 0.5}
    drawn |= {"frequency_penalty": 0.25}
    extra = {"top_k": 10, "min_p": 0.2, "repetition_penalty": 1.3, "k": 7}
    bias = {17: 5, 5: -100}
    fields = {"model": "embedded", "prompt": PROMPT, **drawn, "logit_bias": {str(token): bias[token] for token in bias}}
    text = client.completions.create(**fields, extra_body={**extra, "stop_token_ids": []}).choices[0].text
    params = SamplingParams(**drawn, **extra, logit_bias=bias, stop_token_ids=())
    assert text == engine.generate(PROMPT, params).text


def test_trace_has_every_round(client, engine):
    expected = engine.generate(PROMPT, SamplingParams(max_tokens=TOKENS, k=7, trace=True))
    fields = {**GREEDY, "max_tokens": TOKENS}
    whole = client.completions.create(**fields, extra_body={"trace": True, "k": 7}).choices[0]
    streamed = client.completions.create(**fields, stream=True, extra_body={"trace": True, "k": 7})
    in_chunks = [outcome for chunk in streamed for outcome in chunk.choices[0].dflash["rounds"]]
    for rounds in (whole.dflash["rounds"], in_chunks):
        first, *others = rounds
        assert first["prefill"] and first["committed"][0]["id"] == expected.token_ids[0]
        assert [[token["id"] for token in outcome["drafted"]] for outcome in others] == expected.drafted
        assert [outcome["accepted"] for outcome in others] == expected.accepted
        committed = [token for outcome in rounds for token in outcome["committed"]]
        assert [token["id"] for token in committed] == expected.token_ids
        assert "".join(token["text"] for token in committed) == expected.text


def test_model_is_listed_and_retrieved(client):
    (model,) = client.models.list().data
    assert model == client.models.retrieve("embedded")
    assert (model.id, model.max_model_len, model.dflash["k"]) == ("embedded", 256, [0, 7])


def test_hints_that_change_no_text_are_accepted(client):
    plain = {**CHAT, "max_tokens": 6}
    hints = {"reasoning_effort": "low", "verbosity": "low", "store": True, "metadata": {"a": "b"}}
    prediction = {"prediction": {"type": "content", "content": "import sys"}}
    said = client.chat.completions.create(**plain, **hints, **prediction).choices[0].message.content
    assert said == client.chat.completions.create(**plain).choices[0].message.content


def test_text_is_tokenized_and_back(served, engine):
    with served.client() as client:
        answer = client.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
        assert answer["tokens"] == engine.tokenizer.encode(PROMPT) and answer["count"] == len(answer["tokens"])
        assert ("".join(answer["token_strs"]), answer["max_model_len"]) == (PROMPT, 256)
        assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": PROMPT}
        chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
        text = render_chat(engine.target, MESSAGES)
        assert client.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {"prompt": text}
        assert re.fullmatch(r"\d+\.\d+\.\d+\S*", client.get("/version").json()["version"])
        for path, body, words in (
            ("/tokenize", {}, "one of prompt and messages"),
            ("/tokenize", {"prompt": "x " * 400_000}, "maximum context length"),
            ("/detokenize", {"tokens": [1024]}, "token 1024: the target's tokens are 0 to 1023"),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 400 and words in refused.json()["error"]["message"]
