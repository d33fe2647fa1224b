"""Requests: what a caller asks, the deltas of the answer as a stream, and the finished result."""

import asyncio
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from dflash_aot.cache.errors import DflashError, EngineFailed
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:  # text is loaded only when used
    from dflash_aot.runtime.structured_output.grammar_matcher import GrammarMatcher
    from dflash_aot.runtime.text.detokenizer import Detokenizer

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one chosen token, and the likeliest tokens if they were requested.

    Both are of the target's own distribution: before temperature, penalties, bias and limits.

    Attributes:
        token_id: the chosen token.
        logprob: its log-probability.
        top: (token, log-probability) of the likeliest tokens, the top_logprobs first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RoundOutcome(NamedTuple):
    """The outcome of one round for one request.

    Attributes:
        k: drafted tokens that were verified.
        accepted: how many of them were accepted.
        drafted: the drafted tokens, for requests with `trace` only.
    """

    k: int
    accepted: int
    drafted: tuple[int, ...] = ()


class Delta(msgspec.Struct, frozen=True):
    """What one step added to an answer: the first token, or the tokens of one or several rounds.

    A round commits the accepted draft tokens and one token of the target's own. Of the last round, tokens after the
    end of the answer are dropped.

    Attributes:
        token_ids: the new tokens.
        text: the text that they add.
        finish_reason: set in the last delta only.
        error: why the answer ended early.
        logprobs: of the new tokens, where the request asked for them.
        rounds: the rounds that gave the tokens.
        prompt_logprobs: in the first delta, where the request asked for them; see `Result`.
        cached_tokens: see `Result`.
        cached_at_start: of these, the tokens whose kv was there when the request got its slot.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    rounds: tuple[RoundOutcome, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cached_tokens: int = 0
    cached_at_start: int = 0


@dataclass(frozen=True)
class Result:
    """A finished request: the fields of a JSON line that dflash-run writes.

    Attributes:
        token_ids: the answer, with the stop token.
        text: the answer's text, without the stop token's; None where there is no tokenizer.
        finish_reason: "stop", "length", "cancelled" or "error".
        prompt_tokens: number of tokens of the prompt.
        accepted: drafted tokens accepted, per round, including those that a stop or limit cut off.
        drafted: the drafted tokens per round, for requests with `trace` only.
        error: the reason where finish_reason is "error", or where a deadline or the engine's end
            cut the answer short.
        first_token_seconds: from submission to the first token; None without a token.
        seconds: from submission to the end.
        logprobs: of each token; None where the request did not ask for them.
        prompt_logprobs: of each prompt token, None for the first token; None where the request
            did not ask for them.
        cached_tokens: prompt tokens whose kv was cached.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    prompt_tokens: int
    accepted: list[int]
    drafted: list[list[int]]
    error: str | None
    first_token_seconds: float | None
    seconds: float
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0


def _do_nothing() -> None:
    """No-op."""


@dataclass(eq=False)
class RequestOutput:
    """The answer of a request so far. Only `Request.take` and `Request.end` write it, except `cause`.

    Attributes:
        token_ids: the committed tokens.
        tokens_of_model: how many of them the models chose; a completion of the grammar gave the rest.
        text_parts: the text of each delta.
        logprobs: one per token, where the request asked for them.
        prompt_logprobs: of the prompt's tokens so far, where the request asked for them; see `Result`.
        rounds: the rounds that gave the tokens.
        finish_reason: None while the request runs.
        error: see `Result`.
        cause: the DflashError that ended the request, if any.
        first_token: when the first token was committed, in monotonic seconds; None before.
        finished: when the request ended, in monotonic seconds; None before.
    """

    token_ids: list[int] = field(default_factory=list)
    tokens_of_model: int = 0
    text_parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    rounds: list[RoundOutcome] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    cause: DflashError | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(eq=False)
class RequestProgress:
    """How far the engine is with a request. The queue, the scheduler and the committer write it.

    Attributes:
        cancelled: `Request.cancel` was called.
        on_cancel: called by `Request.cancel`.
        arrival: number of its turn in the queue; later requests have larger numbers. None before the queue has it.
        preemptions: how often it gave its slot back.
        started: when it first got a slot, in monotonic seconds; None before.
        page_keys: keys of the full kv pages of prompt and answer, as far as they have been computed.
        cached_tokens: prompt tokens whose kv was there already.
        cached_at_start: of these, the tokens whose kv was there when the request got its slot.
        computed_end: prompt tokens up to the last token whose kv was computed.
    """

    cancelled: bool = False
    on_cancel: Callable[[], None] = _do_nothing
    arrival: int | None = None
    preemptions: int = 0
    started: float | None = None
    page_keys: list[bytes] = field(default_factory=list)
    cached_tokens: int = 0
    cached_at_start: int = 0
    computed_end: int = 0


# How the error of a request begins whose grammar cannot be followed further: its own fault, not the engine's.
GRAMMAR_FAILURE = "structured_outputs: "


@dataclass(eq=False)
class Request:
    """A request in the engine. Only the engine's thread changes it, except by `cancel`. Times are monotonic seconds.

    Attributes:
        prompt: token ids.
        params: how to choose tokens.
        limit: tokens to commit at most, by request and grid; with 0 the prompt is only computed.
        stop_token_ids: tokens that end the answer.
        detokenizer: None for token ids only.
        emit: takes each delta; returns at once and does not raise.
        submitted: when the caller asked.
        priority: lower is served earlier.
        deadline: when the request ends as "cancelled"; None for never.
        matcher: of the grammar that the answer follows; None without a grammar.
        output: the answer so far.
        progress: how far the engine is.
    """

    prompt: list[int]
    params: SamplingParams
    limit: int
    stop_token_ids: frozenset[int]
    detokenizer: "Detokenizer | None"
    emit: Callable[[Delta], None]
    submitted: float = field(default_factory=time.monotonic)
    priority: int = 0
    deadline: float | None = None
    matcher: "GrammarMatcher | None" = None
    output: RequestOutput = field(default_factory=RequestOutput)
    progress: RequestProgress = field(default_factory=RequestProgress)

    @property
    def needed_mode(self) -> SamplingMode:
        """The simplest verification that can choose this request's tokens, apart from masks."""
        return "greedy" if self.params.is_greedy else "sample"

    @property
    def needs_mask(self) -> bool:
        """Whether only some tokens may come next."""
        return self.matcher is not None or self.tokens_to_stop > 0

    @property
    def tokens_to_stop(self) -> int:
        """How many tokens must come, none of which may end the answer; 0 where no token does."""
        return (
            max(0, self.params.min_tokens - len(self.output.token_ids))
            if self.ending_token_ids
            else 0
        )

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """The tokens that end the answer: those of the request, and those that end its grammar."""
        return self.stop_token_ids | self.matcher.ends if self.matcher else self.stop_token_ids

    @property
    def accepted(self) -> list[int]:
        """Drafted tokens accepted, per round."""
        return [one.accepted for one in self.output.rounds]

    @property
    def drafted(self) -> list[list[int]]:
        """The drafted tokens, per round; empty without `trace`."""
        return [list(one.drafted) for one in self.output.rounds] if self.params.trace else []

    def cancel(self) -> None:
        """Frees the slot at the engine's next step. Any thread may call this, and a signal handler."""
        if self.output.finish_reason is None:
            self.progress.cancelled = True
            self.progress.on_cancel()

    def preempt(self) -> None:
        """Gives the slot back. The request continues later after its answer so far."""
        self.progress.preemptions += 1
        if not self.output.token_ids:
            self.output.prompt_logprobs = [None]

    def note_computed(self, start: int, end: int) -> int:
        """Notes that the kv of these positions is computed. Returns how many of them are new prompt tokens."""
        end = min(end, len(self.prompt))
        new = max(0, end - max(start, self.progress.computed_end))
        self.progress.computed_end = max(self.progress.computed_end, end)
        return new

    def find_end(self, now: float) -> str | None:
        """Why the request ends now: "" where it was cancelled, None while it goes on."""
        if self.progress.cancelled:
            return ""
        if self.deadline is not None and self.deadline <= now:
            return f"its deadline of {self.deadline - self.submitted:.3g} s has passed"
        return None

    def take(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] = (),
        rounds: Sequence[RoundOutcome] = (),
    ) -> Delta:
        """Adds committed tokens, in order, and the rounds that gave them. Drops what comes after a stop or the limit.

        If its grammar needs all tokens that are left to end, the answer is completed by tokens that no round gave.
        """
        if self.limit == 0:
            return self.end("length")
        if self.output.first_token is None:
            self.output.first_token = time.monotonic()
        text = self.detokenizer
        shown = ""
        before = text.tokens_kept if text else 0
        if self.matcher:
            kept, chosen, reason, shown = self._take_by_grammar(self.matcher, tokens)
        else:
            kept, reason = self._take_until_end(tokens)
            chosen = len(kept)  # those of `kept` that rounds gave
        if text:
            if not text.finished:
                # The text of an end token is not part of the answer.
                end = len(kept) - (reason == "stop" and kept[-1] in self.ending_token_ids)
                shown += text.push(kept[text.tokens_kept - before : end])
            if text.finished:
                reason = "stop"
                kept = kept[: text.tokens_kept - before]
                chosen = min(chosen, len(kept))
        self.output.token_ids += kept
        self.output.tokens_of_model += chosen
        used = _find_used_rounds(rounds, max(chosen, 1)) if reason else tuple(rounds)
        return self._add(kept, shown, reason, tuple(logprobs[:chosen]), used)

    def _take_until_end(self, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """The tokens up to a stop token or the limit, and which of them ends the answer."""
        room = self.limit - len(self.output.token_ids)
        kept = [*tokens[:room]]
        if not self.stop_token_ids.isdisjoint(kept):
            end = next(index for index, token in enumerate(kept) if token in self.stop_token_ids)
            return kept[: end + 1], "stop"
        return kept, "length" if len(kept) == room else None

    def _take_by_grammar(
        self, matcher: "GrammarMatcher", tokens: Sequence[int]
    ) -> tuple[list[int], int, FinishReason | None, str]:
        """The tokens up to the end, how many of them rounds gave, what ends the answer, and the text so far."""
        kept: list[int] = []
        text = self.detokenizer
        shown = ""
        room = self.limit - len(self.output.token_ids)
        for token in tokens:
            kept.append(token)
            room -= 1
            if token in self.stop_token_ids:
                return kept, len(kept), "stop", shown
            if (completion := matcher.accept(token, room)) is not None:
                return [*kept[:-1], *completion], len(kept) - 1, "length", shown
            if matcher.is_complete:
                return kept, len(kept), "stop", shown
            if room <= 0:
                return kept, len(kept), "length", shown
            if text and text.can_stop:  # the grammar may not allow the tokens after a stop text
                shown += text.push([token])
                if text.finished:
                    break
        return kept, len(kept), None, shown

    def end(self, reason: FinishReason, error: str | None = None) -> Delta:
        """Ends the request with the tokens that it has."""
        self.output.error = error
        return self._add([], "", reason)

    def result(self) -> Result:
        assert self.output.finish_reason is not None and self.output.finished is not None
        return Result(
            token_ids=self.output.token_ids,
            text="".join(self.output.text_parts) if self.detokenizer else None,
            finish_reason=self.output.finish_reason,
            prompt_tokens=len(self.prompt),
            accepted=self.accepted,
            drafted=self.drafted,
            error=self.output.error,
            first_token_seconds=None
            if self.output.first_token is None
            else self.output.first_token - self.submitted,
            seconds=self.output.finished - self.submitted,
            logprobs=None if self.params.logprobs is None else self.output.logprobs,
            prompt_logprobs=None
            if self.params.prompt_logprobs is None
            else self.output.prompt_logprobs,
            cached_tokens=self.progress.cached_tokens,
        )

    def _add(
        self,
        kept: list[int],
        shown: str,
        reason: FinishReason | None,
        logprobs: tuple[TokenLogprob, ...] = (),
        rounds: tuple[RoundOutcome, ...] = (),
    ) -> Delta:
        if reason and self.detokenizer and not self.detokenizer.finished:
            shown += self.detokenizer.flush()
        is_first = not self.output.text_parts
        self.output.text_parts.append(shown)
        self.output.logprobs += logprobs
        self.output.rounds += rounds
        if reason:
            self.output.finished = time.monotonic()
            self.output.finish_reason = reason
        scores = (
            tuple(self.output.prompt_logprobs)
            if is_first and self.params.prompt_logprobs is not None
            else ()
        )
        cached = self.progress.cached_tokens, self.progress.cached_at_start
        return Delta(
            tuple(kept), shown, reason, self.output.error, logprobs, rounds, scores, *cached
        )


def _find_used_rounds(rounds: Sequence[RoundOutcome], tokens: int) -> tuple[RoundOutcome, ...]:
    """The rounds that gave the first `tokens` tokens: the device may have run more after the answer's end."""
    used: list[RoundOutcome] = []
    for one in rounds:
        if tokens <= 0:
            break
        tokens -= one.accepted + 1
        used.append(one)
    return tuple(used)


class Stream:
    """The deltas of one request, for a thread. Can be iterated once.

    Closing the stream, leaving the iteration early, or dropping the last reference to the stream frees the slot.
    Unread deltas are kept, at most one per token of the request, so a slow reader delays no other request.
    """

    def __init__(self, request: Request, deltas: "queue.SimpleQueue[Delta]", owner: object = None):
        """owner: the engine, which stays open as long as somebody may read the stream."""
        self._owner = owner
        self._request = request
        self._deltas = deltas
        self._ended = False
        self._process = os.getpid()

    def __iter__(self) -> Iterator[Delta]:
        try:
            while not self._ended:
                yield self._next()
        finally:
            self.close()

    def __next__(self) -> Delta:
        """Waits for the next delta. Raises StopIteration after the last delta."""
        if self._ended:
            raise StopIteration
        return self._next()

    def _next(self) -> Delta:
        check_process(self._process)
        try:
            delta = self._deltas.get()
        except BaseException:
            # A signal handler's exception; its traceback keeps this frame alive, and the stream in it.
            self.close()
            raise
        self._ended = delta.finish_reason is not None
        return delta

    def close(self) -> None:
        """Cancels what has not been generated yet."""
        self._request.cancel()

    def __del__(self) -> None:
        self.close()

    def result(self) -> Result:
        """Waits for the end. Raises EngineFailed, caused by the DflashError, if the request ended in an error."""
        while not self._ended:
            self._next()
        return _finish(self._request)


class AsyncStream:
    """The deltas of one request, for one task of the event loop that submitted it. Can be iterated once.

    Unread deltas are kept, at most one per token of the request. Dropping the stream does not free the slot: close it.
    """

    def __init__(self, request: Request, deltas: asyncio.Queue[Delta], owner: object = None):
        """owner: as of `Stream`."""
        self._owner = owner
        self._request = request
        self._deltas = deltas
        self._ended = False

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self._ended = delta.finish_reason is not None
        return delta

    def close(self) -> None:
        """Cancels what has not been generated yet."""
        self._request.cancel()

    async def result(self) -> Result:
        """Waits for the end. Raises EngineFailed, caused by the DflashError, if the request ended in an error."""
        async for _ in self:
            pass
        return _finish(self._request)


def _finish(request: Request) -> Result:
    if request.output.finish_reason == "error":
        raise EngineFailed(request.output.error or "") from request.output.cause
    return request.result()


def check_process(process: int) -> None:
    """Raises EngineFailed in a fork of the process with this id."""
    if os.getpid() != process:
        raise EngineFailed(
            f"the engine was opened in process {process}, and this is its fork {os.getpid()}: threads and "
            "devices do not survive a fork. Open the engine in the process that uses it (multiprocessing: 'spawn' or "
            "'forkserver')"
        )
