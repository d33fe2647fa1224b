"""Compiled grammars of all API keys: checked by the guard first, then compiled here, and kept by their bytes."""

import hashlib
import json
import math
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime.bounded_worker import (
    GRAMMAR_GUARD,
    GUARD_STACK,
    SPARE_STACK,
    CallExceeded,
    CallFailed,
    CallLimits,
    Leaving,
    run_with_stack,
)
from dflash_aot.runtime.structured_output.grammar import (
    FIELD,
    CheckedGrammar,
    GrammarCompiler,
    read_structured_outputs,
)
from dflash_aot.runtime.structured_output.grammar_matcher import GrammarMatcher
from dflash_aot.runtime.text.tokenizer import Tokenizer

NO_OWNER = 0  # of requests that name none
KEPT_BYTES = 128 << 20  # of all grammars together
LEAST_BYTES = 1 << 16  # that a grammar is counted with
REFUSED_SECONDS = 60.0  # in which the same grammar is refused without another try
CHECK_LIMITS = CallLimits(
    seconds=1.0, memory=1 << 28, reply_letters=1 << 24, wall_seconds=4.0, stack=GUARD_STACK
)
# For a tokenizer of several hundred thousand tokens.
OPEN_LIMITS = CallLimits(seconds=60.0, memory=1 << 32)


class GrammarCache:
    """The grammars of one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Collection[int]):
        """Arguments and errors as of `GrammarCompiler`."""
        self._compiler = GrammarCompiler(tokenizer, vocab, ends)
        self._given = {"tokenizer": tokenizer.to_json(), "vocab": vocab, "ends": [*ends]}
        self._name = uuid.uuid4().hex
        self._is_prepared = False
        self._lock = threading.Lock()
        # by owner and digest
        self._kept: OrderedDict[tuple[int, str], _Kept] = OrderedDict()
        self._bytes: Counter[int] = Counter()  # by owner

    def prepare(self) -> None:
        """Starts the guard and gives it the tokenizer. Raises BadInput."""
        try:
            GRAMMAR_GUARD.call("open_grammars", {"name": self._name, **self._given}, OPEN_LIMITS)
        except CallFailed as error:
            raise BadInput(f"{FIELD}: grammars cannot be checked: {error}") from error
        self._is_prepared = True

    def compile(
        self, asked: Mapping[str, Any], owner: int = NO_OWNER, leaving: Leaving | None = None
    ) -> GrammarMatcher:
        """The matcher of a new request. Raises BadInput for what is malformed, or beyond a limit.

        owner: whose grammar it is; those of one owner never push out all of another's. leaving: ends the work.
        """
        kind, _ = read_structured_outputs(asked)
        try:
            text = json.dumps(asked)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"{FIELD}.{kind} is not JSON: {error}") from error
        name = (owner, hashlib.sha256(text.encode()).hexdigest())
        if (kept := self._find(name)) is None:
            kept = self._compile(asked, kind, leaving)
            self._keep(name, kept)
        if isinstance(kept.outcome, str):
            raise BadInput(kept.outcome)
        return kept.outcome.copy()

    def _compile(self, asked: Mapping[str, Any], kind: str, leaving: Leaving | None) -> "_Kept":
        """Raises BadInput for what another try may pass."""
        checked = self._check(asked, kind, leaving)
        if isinstance(checked, str):
            return _Kept(checked, LEAST_BYTES, time.monotonic() + REFUSED_SECONDS)
        matcher = run_with_stack(SPARE_STACK, lambda: self._compiler.open(checked))
        return _Kept(matcher, max(checked.size, LEAST_BYTES), math.inf)

    def _check(
        self, asked: Mapping[str, Any], kind: str, leaving: Leaving | None
    ) -> CheckedGrammar | str:
        """The grammar, or why it is refused. Raises BadInput where the check was not completed."""
        call = {"name": self._name, "asked": asked}
        if not self._is_prepared:
            self.prepare()
        try:
            found = GRAMMAR_GUARD.call("check_grammar", call, CHECK_LIMITS, leaving)
            if found is None:  # the guard was started anew
                self.prepare()
                found = GRAMMAR_GUARD.call("check_grammar", call, CHECK_LIMITS, leaving)
        except CallExceeded as error:
            return f"{FIELD}.{kind} is refused: {error}"
        except CallFailed as error:
            raise BadInput(f"{FIELD}.{kind} is refused: {error}") from error
        return found["refusal"] if "refusal" in found else CheckedGrammar(**found)

    def _find(self, name: tuple[int, str]) -> "_Kept | None":
        with self._lock:
            kept = self._kept.get(name)
            if kept is None or kept.until < time.monotonic():
                return None
            self._kept.move_to_end(name)
            return kept

    def _keep(self, name: tuple[int, str], kept: "_Kept") -> None:
        """Forgets grammars of the owner with the most bytes, the least recently used first."""
        with self._lock:
            self._forget(name)
            self._kept[name] = kept
            self._bytes[name[0]] += kept.size
            while self._bytes.total() > KEPT_BYTES:
                ((largest, _),) = self._bytes.most_common(1)
                self._forget(next(one for one in self._kept if one[0] == largest))

    def _forget(self, name: tuple[int, str]) -> None:
        if kept := self._kept.pop(name, None):
            self._bytes[name[0]] -= kept.size


@dataclass(frozen=True)
class _Kept:
    """What came of a grammar.

    Attributes:
        outcome: its matcher, or why it is refused.
        size: bytes.
        until: monotonic seconds, after which it is compiled again: a busy machine may be why it took long.
    """

    outcome: GrammarMatcher | str
    size: int
    until: float
