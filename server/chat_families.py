"""Families of chat templates: how their models write tool calls, and how they mark thinking.

Three families write calls as text: Hermes (Qwen2.5, Qwen3: JSON between `<tool_call>` and `</tool_call>`), Qwen XML
(Qwen3-Coder, Qwen3.5: `<function=NAME><parameter=KEY>` there), and Llama 3.1 (the answer is the JSON). Gemma 4 and
gpt-oss (Harmony) delimit calls by tokens, and these and Qwen's thinking models delimit thinking so: an answer has
channels then, and the tokens between them are markers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from dflash_aot.cache.errors import BadInput


@dataclass(frozen=True)
class ToolFamily:
    """How the models of a family write calls.

    Attributes:
        begin, end: around each call.
        arguments: the key of its arguments in JSON; None for calls in XML.
        separator: between forced calls; None where one call is forced.
    """

    begin: str
    end: str
    arguments: str | None
    separator: str | None


HERMES = ToolFamily("<tool_call>\n", "\n</tool_call>", "arguments", "\n")
QWEN_XML = ToolFamily("<tool_call>\n", "\n</tool_call>", None, "\n")
LLAMA = ToolFamily("", "", "parameters", None)
IN_CHANNELS = ToolFamily("", "", None, None)  # between markers: see `ChannelFamily.calls`
FIRST_SURROGATE = 0xD800  # no text that is decoded from bytes has surrogates
SURROGATE = re.compile("([\ud800-\udfff])")


@dataclass(frozen=True)
class ChannelCalls:
    """How the models of a family write calls between markers.

    Attributes:
        head: the text before the arguments, with `{name}` for the function.
        end: the marker after the arguments, where another call may follow; "" where a call ends the answer.
        quote: the marker around texts in the arguments; "" for arguments in JSON.
    """

    head: str
    end: str = ""
    quote: str = ""


@dataclass(frozen=True)
class ChannelFamily:
    """How the models of a family delimit the channels of an answer by tokens, the markers.

    Tokens decide: the same letters, written by other tokens, are text. In the texts that parsers read, a lone surrogate
    stands for each marker.

    Attributes:
        markers: the tokens as they are spelled.
        begin, end: around thinking. Harmony's end includes the start of the next message.
        closing: ends thinking in a prompt whose template has begun it, where the answer is not to think.
        call: the marker that begins a call, and ends thinking that has no end.
        label: a text after `begin` that is not part of the thinking.
        calls: how calls are written; None for calls without markers.
        final: the start of an answer without thinking.
        turn: the start of the assistant's message in a prompt, before `begin` or `final`.
        efforts: the values of `reasoning_effort`, which the chat template reads.
        thinks_first: whether thinking can only be the first part of an answer. Markers elsewhere are text, because
            texts may have these tokens.
        always_thinks: whether the models think without being asked to.
    """

    markers: tuple[str, ...]
    begin: str
    end: str
    closing: str
    call: str = ""
    label: str = ""
    calls: ChannelCalls | None = None
    final: str = ""
    turn: str = ""
    efforts: tuple[str, ...] = ()
    thinks_first: bool = False
    always_thinks: bool = False

    def to_surrogates(self, text: str) -> str:
        """A text with a surrogate for each marker that is spelled in it."""
        for number, marker in enumerate(self.markers):
            text = text.replace(marker, chr(FIRST_SURROGATE + number))
        return text

    def spell(self, surrogate: str) -> str:
        """The marker that a surrogate stands for."""
        return self.markers[ord(surrogate) - FIRST_SURROGATE]

    def find_opening(self, prompt: str) -> str:
        """The part of the answer that the prompt already contains, with surrogates.

        It is the start of thinking or of Harmony's final message; "" where the prompt contains neither.
        """
        for head in (self.begin + self.label, self.final):
            if head and prompt.rstrip().endswith((self.turn + head).rstrip()):
                return self.to_surrogates(head)
        return ""

    def leave_out_thinking(self, prompt: str, begins_text: bool) -> tuple[str, str]:
        """What to add to the prompt of an answer without thinking, and the answer's opening then, with surrogates.

        begins_text: whether the answer is a text, and not a call.
        """
        opening = self.find_opening(prompt)
        final = self.final if begins_text else ""
        if final and opening == self.to_surrogates(final):
            return "", opening
        added = (self.closing if opening else "") + final
        return added, self.to_surrogates(self.begin + self.end if self.thinks_first else final)

    def fit_history(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages of a chat in the form that the family's chat template reads."""
        return messages


class HarmonyFamily(ChannelFamily):
    """gpt-oss. Its chat template reads thinking as `thinking`, one call of a message, and a result after its call."""

    def fit_history(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Each call has a message of its own, with its results after it."""
        fitted: list[Mapping[str, Any]] = []
        waiting = [*messages]
        while waiting:
            message = _name_thinking(waiting.pop(0))
            calls = message.get("tool_calls", ())
            if len(calls) < 2:
                fitted.append(message)
                continue
            results = [*takewhile(lambda one: one["role"] == "tool", waiting)]
            del waiting[: len(results)]
            for call, its_results in zip(calls, _pair_results(calls, results), strict=True):
                fitted += [{**message, "tool_calls": [call]}, *its_results]
                message = {"role": message["role"], "content": ""}
        return fitted


def _name_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its thinking as gpt-oss's template reads it."""
    fields = dict(message)
    thinking = fields.pop("reasoning_content", None)
    if thinking and fields.get("tool_calls") and fields["content"]:
        # The template writes either as thinking, and refuses both.
        thinking = f"{thinking}\n{fields['content']}"
        fields["content"] = ""
    return {**fields, "thinking": thinking} if thinking else fields


def _pair_results(
    calls: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> list[list[Mapping[str, Any]]]:
    """The results of each call: by the call's id, otherwise of the first call without a result, or of the last."""
    found: list[list[Mapping[str, Any]]] = [[] for _ in calls]
    ids = [call["id"] for call in calls]
    unnamed = []
    for result in results:
        named = [at for at, name in enumerate(ids) if name == result.get("tool_call_id")]
        if named:
            at = next((one for one in named if not found[one]), named[-1])
            found[at].append(result)
        else:
            unnamed.append(result)
    for result in unnamed:
        free = (at for at, its_results in enumerate(found) if not its_results)
        found[next(free, len(calls) - 1)].append(result)
    return found


HARMONY = HarmonyFamily(
    (
        *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
    begin="<|channel|>analysis<|message|>",
    end="<|end|><|start|>assistant",
    closing="<|end|><|start|>assistant",
    calls=ChannelCalls("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"),
    final="<|channel|>final<|message|>",
    turn="<|start|>assistant",
    efforts=("low", "medium", "high"),
    always_thinks=True,
)
GEMMA = ChannelFamily(
    ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    begin="<|channel>",
    end="<channel|>",
    call="<|tool_call>",
    closing="<channel|>",
    label="thought\n",
    calls=ChannelCalls("<|tool_call>call:{name}", end="<tool_call|>", quote='<|"|>'),
)
QWEN = ChannelFamily(
    ("<think>", "</think>", "<tool_call>"),
    begin="<think>",
    end="</think>",
    call="<tool_call>",
    closing="\n</think>\n\n",
    thinks_first=True,
)
# By a marker that the family's templates have.
CHANNEL_FAMILIES = {"<|channel|>": HARMONY, "<|channel>": GEMMA, "<think>": QWEN}


@dataclass(frozen=True)
class Channels:
    """The markers of a family in a tokenizer. tokens: their ids, by their spelling."""

    family: ChannelFamily
    tokens: Mapping[str, int]

    @property
    def surrogates(self) -> Mapping[int, str]:
        """Token id → the surrogate that stands for the marker."""
        return {token_id: self.family.to_surrogates(one) for one, token_id in self.tokens.items()}


def find_channels(template: str, added_tokens: Mapping[int, str]) -> Channels | None:
    """The channels of a chat template; None if it has none. added_tokens: of the tokenizer, spelling by id.

    Raises BadInput where the template writes channels that the tokenizer has no tokens for.
    """
    found = next((one for marker, one in CHANNEL_FAMILIES.items() if marker in template), None)
    if found is None:
        return None
    ids = {content: token_id for token_id, content in added_tokens.items()}
    missing = [marker for marker in found.markers if marker not in ids]
    if missing == [QWEN.call]:  # the model writes calls as text
        missing = []
    if missing and found is QWEN:  # a template may mention what its tokenizer writes as text
        return None
    if missing:
        raise BadInput(
            f"the chat template writes channels, and the tokenizer has no token {', '.join(missing)}"
        )
    return Channels(found, {marker: ids[marker] for marker in found.markers if marker in ids})


@dataclass(frozen=True)
class OfferedTools:
    """The tools that an answer may call.

    Attributes:
        family: how it writes calls.
        functions: name → JSON schema of the arguments.
        parallel: whether it may have several calls.
    """

    family: ToolFamily
    functions: Mapping[str, Any]
    parallel: bool = True


def find_tool_family(template: str) -> ToolFamily | None:
    """The family of a chat template, by how it writes calls; None for no tools or another form of calls."""
    if not re.search(r"\btools\b", template):
        return None
    if any(marker in template for marker, one in CHANNEL_FAMILIES.items() if one.calls):
        return IN_CHANNELS
    plain = template.replace('\\"', '"')
    calls = " ".join(re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", plain, re.DOTALL))
    if "<function=" in calls:
        return QWEN_XML
    if "<tool_call>" in plain:
        is_json = '"name"' in calls or '"arguments"' in calls
        return HERMES if is_json or not re.search(r"<\w+[=>]", calls) else None
    return LLAMA if '"parameters"' in plain else None
