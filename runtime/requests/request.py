"""What is asked of the engine and what it answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from dflash_aot.cache.errors import DflashError
from dflash_aot.runtime.requests.logprobs import TokenLogprob
from dflash_aot.runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:  # text is loaded only when used
    from dflash_aot.runtime.text.detokenizer import Detokenizer

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RoundOutcome(NamedTuple):
    """What became of the draft of one round: `accepted` of `k` tokens stand. `drafted`: which, if they are traced."""

    k: int
    accepted: int
    drafted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Delta:
    """What was added at once: the token that the prompt gives, or what one or several rounds gave.

    A round commits the drafted tokens that it accepted and one of the target's own, the last one what is left of that
    before the end. The last delta carries `finish_reason`.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    rounds: tuple[RoundOutcome, ...] = ()


@dataclass(frozen=True)
class Result:
    """A finished request: the fields of an output line, and when things happened (seconds since submission).

    `error` says why where finish_reason is "error", and where a deadline or the engine's end cut it short.
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


def _ignore() -> None:
    """Nobody to tell."""


@dataclass(eq=False)
class Request:
    """One request on its way. The engine's thread alone changes it, but for `cancel`, and tells `emit` of each delta,
    which returns at once and does not raise.

    Times are of the monotonic clock, in seconds; `deadline` too. A lower `priority` is served earlier.
    """

    prompt: list[int]
    params: SamplingParams
    limit: int  # tokens to emit at most, the grid's end included
    stop_ids: frozenset[int]
    text: "Detokenizer | None"
    emit: Callable[[Delta], None]
    submitted: float = field(default_factory=time.monotonic)
    priority: int = 0
    deadline: float | None = None
    on_cancel: Callable[[], None] = _ignore
    token_ids: list[int] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    rounds: list[RoundOutcome] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    cause: DflashError | None = None  # of the error, where it is one of ours
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cancelled: bool = False

    @property
    def accepted(self) -> list[int]:
        """How many drafted tokens stand, per round."""
        return [one.accepted for one in self.rounds]

    @property
    def drafted(self) -> list[list[int]]:
        """Which were drafted, per round; none where they are not traced."""
        return [list(one.drafted) for one in self.rounds] if self.params.trace else []

    def cancel(self) -> None:
        """From any thread, also from a signal handler: the slot is free at the engine's next step."""
        if self.finish_reason is None:
            self.cancelled = True
            self.on_cancel()

    def find_end(self, now: float) -> str | None:
        """Why it is not to go on, "" if its caller left, None while it may."""
        if self.cancelled:
            return ""
        if self.deadline is not None and self.deadline <= now:
            return f"its deadline of {self.deadline - self.submitted:.3g} s has passed"
        return None

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = (), rounds: Sequence[RoundOutcome] = ()
    ) -> Delta:
        """Committed tokens, in order, and the rounds that gave them, if it were any.

        What is behind a stop or the limit is dropped. Returns what is new.
        """
        if self.first_token is None:
            self.first_token = time.monotonic()
        kept: list[int] = []
        reason: FinishReason | None = None
        shown = ""
        for token in tokens:
            kept.append(token)
            if token in self.stop_ids:
                reason = "stop"  # its text is not part of the output
                break
            shown += self.text.push([token]) if self.text else ""
            if self.text and self.text.finished:
                reason = "stop"
            elif len(self.token_ids) + len(kept) >= self.limit:
                reason = "length"
            if reason:
                break
        self.token_ids += kept
        return self._advance(kept, shown, reason, tuple(logprobs[: len(kept)]), _find_used(rounds, len(kept)))

    def end(self, reason: FinishReason, error: str | None = None) -> Delta:
        """Ends it where it stands."""
        self.error = error
        return self._advance([], "", reason)

    def result(self) -> Result:
        assert self.finish_reason is not None and self.finished is not None
        return Result(
            token_ids=self.token_ids,
            text="".join(self.shown) if self.text else None,
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.prompt),
            accepted=self.accepted,
            drafted=self.drafted,
            error=self.error,
            first_token_seconds=None if self.first_token is None else self.first_token - self.submitted,
            seconds=self.finished - self.submitted,
            logprobs=None if self.params.logprobs is None else self.logprobs,
        )

    def _advance(
        self,
        kept: list[int],
        shown: str,
        reason: FinishReason | None,
        logprobs: tuple[TokenLogprob, ...] = (),
        rounds: tuple[RoundOutcome, ...] = (),
    ) -> Delta:
        if reason and self.text and not self.text.finished:
            shown += self.text.flush()
        self.shown.append(shown)
        self.logprobs += logprobs
        self.rounds += rounds
        if reason:
            self.finished, self.finish_reason = time.monotonic(), reason
        return Delta(tuple(kept), shown, reason, self.error, logprobs, rounds)


def _find_used(rounds: Sequence[RoundOutcome], tokens: int) -> tuple[RoundOutcome, ...]:
    """Those that the first `tokens` came from: the device may not have known that the answer had ended."""
    used: list[RoundOutcome] = []
    for one in rounds:
        if tokens <= 0:
            break
        tokens -= one.accepted + 1
        used.append(one)
    return tuple(used)
