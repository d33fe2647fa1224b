"""What is asked of the engine and what it answers."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from dflash_aot.cache.errors import BadInput

if TYPE_CHECKING:  # text is loaded only when used
    from dflash_aot.runtime.text import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    max_tokens: at most so many new tokens; None: until a stop or the last position of the grid.
    temperature: 0 is greedy. Sampling is not built yet and refused by name.
    stop: texts that end the output, left out of it. stop_token_ids: tokens that end it, kept; None means the
    target's own end-of-sequence tokens, and a sequence replaces them, so that () ends at nothing.
    trace: also keep the drafted tokens of every round.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        """Raises BadInput."""
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
            raise BadInput(f"max_tokens is {self.max_tokens!r}: a whole number of at least 1 is needed")
        if (
            isinstance(self.temperature, bool)
            or not isinstance(self.temperature, int | float)
            or not 0 <= self.temperature < 1e4
        ):
            raise BadInput(f"temperature is {self.temperature!r}: a number of at least 0 is needed")
        if self.temperature > 0:
            raise BadInput(
                f"temperature is {self.temperature}: this version has greedy executables only. Leave it out, or give 0"
            )
        if type(self.top_k) is not int or self.top_k < 0:
            raise BadInput(f"top_k is {self.top_k!r}: a whole number of at least 0 is needed, 0 for no limit")
        if isinstance(self.top_p, bool) or not isinstance(self.top_p, int | float) or not 0 < self.top_p <= 1:
            raise BadInput(f"top_p is {self.top_p!r}: a number above 0 and at most 1 is needed")
        if self.seed is not None and type(self.seed) is not int:
            raise BadInput(f"seed is {self.seed!r}: a whole number is needed")
        if not isinstance(self.stop, list | tuple) or any(not isinstance(text, str) or not text for text in self.stop):
            raise BadInput(f"stop is {self.stop!r}: a list of texts is needed, none of them empty")
        ends = () if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(ends, Sequence) or any(type(token) is not int for token in ends):
            raise BadInput(f"stop_token_ids is {self.stop_token_ids!r}: a list of token ids is needed")


@dataclass(frozen=True)
class Delta:
    """What one round added. The last one carries `finish_reason`."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True)
class Result:
    """A finished request: the fields of an output line, and when things happened (seconds since submission)."""

    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    prompt_tokens: int
    accepted: list[int]
    drafted: list[list[int]]
    error: str | None
    first_token_seconds: float | None
    seconds: float


@dataclass(eq=False)
class Request:
    """One request on its way. The engine's thread alone changes it, but for `cancel`."""

    prompt: list[int]
    params: SamplingParams
    limit: int  # tokens to emit at most, the grid's end included
    stop_ids: frozenset[int]
    text: "TextStream | None"
    emit: Callable[[Delta], None]
    submitted: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[list[int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    first_token: float | None = None
    finished: float | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """From any thread: the slot is free at the engine's next step."""
        self.cancelled.set()

    def take(self, tokens: Sequence[int]) -> None:
        """Committed tokens, in order; those behind a stop or the limit are dropped. Emits what is new."""
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
        self._emit(kept, shown, reason)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends it where it stands."""
        self.error = error
        self._emit([], "", reason)

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
        )

    def _emit(self, kept: list[int], shown: str, reason: FinishReason | None) -> None:
        if reason and self.text and not self.text.finished:
            shown += self.text.flush()
        self.shown.append(shown)
        if reason:
            self.finished, self.finish_reason = time.monotonic(), reason
        self.emit(Delta(tuple(kept), shown, reason, self.error))
