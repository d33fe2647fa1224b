"""/v1/responses by OpenAI's client; answers are compared with those of the same chat."""

import asyncio
import json
from types import SimpleNamespace

import openai
import pytest

from dflash_aot.runtime.requests.request import Delta
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.server.api_errors import ApiError
from dflash_aot.server.chat_families import QWEN, Channels
from dflash_aot.server.request_parsing import ParsedRequest
from dflash_aot.server.responses import Generation
from dflash_aot.server.responses_api import ResponsesBuilder, format_error_event

MESSAGES = [{"role": "user", "content": "import os"}]
SCHEMA = {"properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}
FORM = {"format": {"type": "json_schema", "name": "visit", "schema": {"type": "object", **SCHEMA}, "strict": True}}
ASKED = {"model": "embedded", "temperature": 0, "max_output_tokens": 8}


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_response_is_the_answer_of_the_chat(client):
    system = {"role": "system", "content": "Write Python."}
    fields = {"model": "embedded", "temperature": 0, "max_tokens": 8}
    chat = client.chat.completions.create(messages=[system, *MESSAGES], **fields)
    response = client.responses.create(input="import os", instructions="Write Python.", **ASKED)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.temperature, response.top_p, response.completed_at) == (0, 1, None)
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)


def test_earlier_output_may_be_given_as_input(client):
    first = client.responses.create(input=MESSAGES, **ASKED)
    conversation = [*MESSAGES, *(item.model_dump(exclude_none=True) for item in first.output), *MESSAGES]
    second = client.responses.create(input=conversation, **ASKED)
    told = [MESSAGES[0], {"role": "assistant", "content": first.output_text}, MESSAGES[0]]
    chat = client.chat.completions.create(model="embedded", messages=told, temperature=0, max_tokens=8)
    assert second.output_text == chat.choices[0].message.content


def test_structured_output_follows_its_schema(client):
    response = client.responses.create(input="Where to?", text=FORM, model="embedded", max_output_tokens=60)
    assert response.status == "completed" and json.loads(response.output_text)["city"] in ("Paris", "Rome")
    assert response.text.format.name == "visit" and response.completed_at >= response.created_at


def test_streamed_events_add_up_to_the_response(client):
    whole = client.responses.create(input="import os", **ASKED)
    events = list(client.responses.create(input="import os", stream=True, **ASKED))
    names = [event.type.removeprefix("response.") for event in events]
    begin, end = ["created", "in_progress", "output_item.added", "content_part.added"], ["output_text.done"]
    end += ["content_part.done", "output_item.done", "incomplete"]
    assert names[:4] == begin and names[-4:] == end and set(names[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-1].response.output_text


def test_item_ends_before_the_next_one_begins(engine):
    async def answer():
        for text, reason in (("<think>hm", None), ("</think>Yes", None), ("!", "length")):
            yield Delta((1,), QWEN.to_surrogates(text), reason)

    async def read(builder):
        return [json.loads(event.split(b"data: ")[1]) async for event in builder.events()]

    request = ParsedRequest(((1,),), 1, SamplingParams(max_tokens=3), channels=Channels(QWEN, {}))
    fields = {"model": SimpleNamespace(name="m", engine=engine), "request_id": "7", "began": 0, "asked": {}}
    generation = Generation(request, [answer()], print)
    events = asyncio.run(read(ResponsesBuilder(state=None, generation=generation, **fields)))
    items = [event["item"] for event in events if "item" in event]
    assert [(item["id"], item["status"]) for item in items[1::2]] == [
        ("rs_7_0", "completed"),
        ("msg_7_1", "incomplete"),
    ]
    response = events[-1]["response"]
    assert response["output"] == items[1::2], "in the order added, done, added, done"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(engine.tokenizer.encode("hm"))


NOT_OFFERED = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_id"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools"),
    ({"background": True}, "background", "background"),
    ({"input": []}, "input", "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input", "input"),
    ({"input": MESSAGES * 1024, "instructions": "a"}, "input", "^[^m]*input: .*at most 1024"),
    ({"input": "x " * 1000}, "input", "maximum context length is 256"),
    ({"extra_body": {"max_tokens": 3}}, "max_tokens", "max_tokens is not a known field"),
    ({"max_output_tokens": 1000}, "max_output_tokens", "and max_output_tokens is 1000"),
    ({"text": {"format": {**FORM["format"], "schema": {"type": "x"}}}}, "text.format", "text.format is refused"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs"),
]


def test_what_is_not_offered_is_refused_by_name(client):
    for fields, param, words in NOT_OFFERED:
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            client.responses.create(**{"input": "import os", **ASKED, **fields})
        assert refused.value.param == param


def test_error_event_has_openais_flat_form():
    event = format_error_event(ApiError(504, "too long", "timeout", "input"), 7)
    name, data = event.decode().rstrip().split("\n")
    fields = {"code": "timeout", "message": "too long", "param": "input"}
    expected = {"type": "error", "sequence_number": 7, **fields, "error": {**fields, "type": "server_error"}}
    assert name == "event: error" and json.loads(data.removeprefix("data: ")) == expected
