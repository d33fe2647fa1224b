"""Response formats: choices, chunks and usage of completions and chat completions, as OpenAI's interface has them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar, Protocol

from dflash_aot.runtime.requests.request import Delta, TokenLogprob
from dflash_aot.server.request_parsing import ParsedRequest
from dflash_aot.server.token_formatting import TextOffsets, TokenFormatter
from dflash_aot.server.tool_parsers import AnswerParser, Part, format_parts, gather_parts

JsonFields = Mapping[str, Any]


@dataclass
class ChoiceOutput:
    """What one choice has generated so far. accepted_counts: rounds with drafts by their accepted tokens."""

    deltas: list[Delta] = field(default_factory=list)
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_counts: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    cached_at_start: int = 0

    def add(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.tokens += len(delta.token_ids)
        self.cached_tokens = delta.cached_tokens
        self.cached_at_start = delta.cached_at_start
        self.rounds += len(delta.rounds)
        self.drafted += sum(outcome.k for outcome in delta.rounds)
        self.accepted += sum(outcome.accepted for outcome in delta.rounds)
        for outcome in delta.rounds:
            if outcome.k:
                missing = outcome.k + 1 - len(self.accepted_counts)
                self.accepted_counts += [0] * missing
                self.accepted_counts[outcome.accepted] += 1

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [logprob for delta in self.deltas for logprob in delta.logprobs]

    def count_scores(self) -> int:
        """Log-probabilities of tokens, including the likeliest tokens in their places."""
        scores = (*self.logprobs, *self.prompt_logprobs)
        return sum(1 + len(score.top) for score in scores if score)

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob | None]:
        return self.deltas[0].prompt_logprobs if self.deltas else ()

    @property
    def finish_reason(self) -> str | None:
        return self.deltas[-1].finish_reason if self.deltas else None


class ResponseFormat(Protocol):
    """Formats the responses of one route. An object holds the state of one response."""

    tokens: TokenFormatter
    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    def format_first_chunk(self, index: int) -> JsonFields | None:
        """A chunk of a choice before anything is generated; None if the format has none."""

    def format_chunk(self, index: int, delta: Delta) -> JsonFields: ...

    def format_choice(self, index: int, choice: ChoiceOutput) -> JsonFields: ...


@dataclass
class CompletionFormat:
    """The format of /v1/completions."""

    tokens: TokenFormatter
    request: ParsedRequest
    logprobs: bool
    prompt_logprobs: bool = False  # vLLM's field
    offsets: dict[int, TextOffsets] = field(default_factory=dict)  # by index of the choice
    id_prefix: ClassVar[str] = "cmpl"
    object_name: ClassVar[str] = "text_completion"
    chunk_object_name: ClassVar[str] = "text_completion"

    def format_first_chunk(self, index: int) -> JsonFields | None:
        """The echoed prompt. None where nothing is echoed, or the prompt comes later with its log-probabilities."""
        if not self.request.echoes or self.logprobs:
            return None
        return {
            "index": index,
            "text": self._find_echo(index),
            "logprobs": None,
            "finish_reason": None,
        }

    def format_chunk(self, index: int, delta: Delta) -> JsonFields:
        echo = self._find_echo(index) if delta.prompt_logprobs else None
        return self._format(
            index, echo, delta.text, delta.prompt_logprobs, delta.logprobs, delta.finish_reason
        )

    def format_choice(self, index: int, choice: ChoiceOutput) -> JsonFields:
        echo = self._find_echo(index)
        scores = choice.prompt_logprobs
        more = (
            {"prompt_logprobs": self.tokens.format_prompt_logprobs(scores)}
            if self.prompt_logprobs
            else {}
        )
        return {
            **self._format(index, echo, choice.text, scores, choice.logprobs, choice.finish_reason),
            **more,
        }

    def _find_echo(self, index: int) -> str | None:
        return self.request.echoes[self.request.find_prompt(index)] if self.request.echoes else None

    def _format(
        self,
        index: int,
        echo: str | None,
        text: str,
        scores: Sequence[TokenLogprob | None],
        logprobs: Sequence[TokenLogprob],
        reason: str | None,
    ) -> JsonFields:
        """echo: the prompt, where the answer begins with it. scores: of its tokens."""
        formatted = None
        if self.logprobs:
            counted = self.offsets.setdefault(index, TextOffsets())
            to_bytes = self.tokens.to_bytes
            at = self.request.find_prompt(index)
            prompt = () if echo is None else self.request.prompts[at]
            text_places = self.request.echoed_tokens[at] if prompt else range(0)
            texts = [
                to_bytes(token) if place in text_places else b""
                for place, token in enumerate(prompt)
            ]
            texts += [self.tokens.to_shown_bytes(chosen.token_id) for chosen in logprobs]
            ids = [*prompt, *(chosen.token_id for chosen in logprobs)]
            scored = [*(scores if prompt else ()), *logprobs]
            formatted = self.tokens.format_completion_logprobs(
                scored, ids, [*map(counted.push, texts)]
            )
        return {
            "index": index,
            "text": (echo or "") + text,
            "logprobs": formatted,
            "finish_reason": reason,
        }


@dataclass
class ChatFormat:
    """The format of /v1/chat/completions."""

    tokens: TokenFormatter
    logprobs: bool
    # Of one choice; None for answers that are all text.
    make_parser: Callable[[], AnswerParser | None] = lambda: None
    prompt_logprobs: bool = False  # vLLM's field
    parsers: dict[int, AnswerParser | None] = field(default_factory=dict)  # by index of the choice
    id_prefix: ClassVar[str] = "chatcmpl"
    object_name: ClassVar[str] = "chat.completion"
    chunk_object_name: ClassVar[str] = "chat.completion.chunk"

    def format_first_chunk(self, index: int) -> JsonFields | None:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def format_chunk(self, index: int, delta: Delta) -> JsonFields:
        formatted = self.tokens.format_chat_logprobs(delta.logprobs) if self.logprobs else None
        content: JsonFields = {"content": delta.text}
        reason: str | None = delta.finish_reason
        if parser := self._find_parser(index):
            parts, reason = read_parts(parser, delta.text, reason)
            content = format_parts(parts)
        elif not delta.text and reason is not None:
            content = {}
        return {
            "index": index,
            "delta": content,
            "logprobs": formatted,
            "finish_reason": reason,
        }

    def format_choice(self, index: int, choice: ChoiceOutput) -> JsonFields:
        message: JsonFields = {"content": choice.text}
        scores = choice.prompt_logprobs
        reason = choice.finish_reason
        if parser := self._find_parser(index):
            parts, reason = read_parts(parser, choice.text, reason)
            message = gather_parts(parts)
        return {
            "index": index,
            "message": {"role": "assistant", "refusal": None, "annotations": [], **message},
            "logprobs": self.tokens.format_chat_logprobs(choice.logprobs)
            if self.logprobs
            else None,
            "finish_reason": reason,
            **(
                {"prompt_logprobs": self.tokens.format_prompt_logprobs(scores)}
                if self.prompt_logprobs
                else {}
            ),
        }

    def _find_parser(self, index: int) -> AnswerParser | None:
        if index not in self.parsers:
            self.parsers[index] = self.make_parser()
        return self.parsers[index]


def read_parts(
    parser: AnswerParser, text: str, reason: str | None
) -> tuple[Sequence[Part], str | None]:
    """Reads the next text of an answer. reason: the finish reason, None before the answer's end.

    Returns the parts that the text completes, at the end with what was held back, and the finish reason: "tool_calls"
    for an answer with calls.
    """
    parts = parser.push(text) + (parser.flush(reason != "stop") if reason else [])
    return parts, "tool_calls" if reason == "stop" and parser.calls else reason


def format_usage(prompt_tokens: int, choices: Sequence[ChoiceOutput], n: int = 1) -> JsonFields:
    """`usage` of a response with `n` choices of each prompt: OpenAI's counts, and those of speculation.

    Cached tokens are the prompt tokens that no choice computed: their kv was there when the first choice of the prompt
    got its slot. tau is committed tokens per round. acceptance_histogram, as vLLM's per-request metrics have it: how
    many rounds with drafts accepted 0, 1, 2 … drafted tokens.
    """
    cached = sum(choice.cached_tokens for choice in choices)
    if n > 1:
        prompts = (choices[start : start + n] for start in range(0, len(choices), n))
        cached = sum(min(choice.cached_at_start for choice in same) for same in prompts)
    tokens = sum(choice.tokens for choice in choices)
    rounds = sum(choice.rounds for choice in choices)
    drafted = sum(choice.drafted for choice in choices)
    accepted = sum(choice.accepted for choice in choices)
    counts = zip_longest(*[choice.accepted_counts for choice in choices], fillvalue=0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "speculative": {
            "rounds": rounds,
            "drafted": drafted,
            "accepted": accepted,
            "tau": 1 + accepted / rounds if rounds else None,
            "acceptance_histogram": [*map(sum, counts)],
        },
    }
