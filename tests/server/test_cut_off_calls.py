"""The finish reason of an answer with tool calls."""

import pytest

from dflash_aot.runtime.requests.request import Delta
from dflash_aot.server.response_formats import ChatFormat
from dflash_aot.server.token_formatting import TokenFormatter
from dflash_aot.server.tool_calls import HERMES, OfferedTools

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(("text", "reason", "told"), [(CALL, "stop", "tool_calls"), (CALL[:40], "length", "length")])
def test_answer_with_calls_that_is_cut_off_says_length(text, reason, told):
    form = ChatFormat(TokenFormatter(), logprobs=False, tools=OfferedTools(HERMES, {"f": {}}))
    chunk = form.format_chunk(0, Delta((1,), text, reason))
    assert (chunk["delta"]["tool_calls"][0]["function"]["name"], chunk["finish_reason"]) == ("f", told)
