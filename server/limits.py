"""API keys, limits of the HTTP server, and limits per key: choices in progress, unfinished bodies, long texts."""

import asyncio
import hashlib
import hmac
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dflash_aot.cache.errors import BadInput
from dflash_aot.server.api_errors import ApiError

# -- API keys: reads them from a file or the environment, keeps their hashes, identifies the key of a request

SCHEME = "bearer "
WITHOUT_KEY = 0  # the key number of all requests of a server without keys; keys are counted from 1


@dataclass(frozen=True)
class ApiKeys:
    """The accepted keys; without any, every request is accepted."""

    digests: tuple[bytes, ...] = ()  # sha256 of each key
    salts_prefixes: bool = True  # whether only requests of the same key share kv

    def __bool__(self) -> bool:
        return bool(self.digests)

    def identify(self, authorization: str | None) -> int | None:
        """The number of the key in an Authorization header; None for an unknown key. Compares in constant time."""
        if not self.digests:
            return WITHOUT_KEY
        given = authorization or ""
        given_digest = _digest(
            given[len(SCHEME) :] if given[: len(SCHEME)].lower() == SCHEME else ""
        )
        matches = [hmac.compare_digest(given_digest, digest) for digest in self.digests]
        return matches.index(True) + 1 if any(matches) else None

    def salt_prefix(self, key: int, salt: str | None) -> str | None:
        """The `cache_salt` of a request of a key that gives `salt`: no two keys have the same."""
        if not self.digests or not self.salts_prefixes:
            return salt
        return f"key {key}" if salt is None else f"key {key}, {salt}"


def make_keys(keys: Iterable[str], source: str, salts_prefixes: bool = True) -> ApiKeys:
    """The hashes of `keys`. Messages name `source` and never show a key. Raises BadInput."""
    listed = list(keys)
    for key in listed:
        _check(key, source)
    if len(set(listed)) != len(listed):
        raise BadInput(f"{source}: a key is given twice")
    return ApiKeys(tuple(map(_digest, listed)), salts_prefixes)


def read_keys(path: Path) -> list[str]:
    """The keys of a file, one per line, without empty lines and lines that begin with #. Raises BadInput."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BadInput(f"the file of API keys, {path}, cannot be read: {reason}") from error
    keys = {
        number: line.strip()
        for number, line in enumerate(lines, 1)
        if line.strip() and line.lstrip()[0] != "#"
    }
    if not keys:
        raise BadInput(f"{path} holds no API key: write one per line")
    for number, key in keys.items():
        _check(key, f"{path}, line {number}")
    return [*keys.values()]


def _check(key: str, source: str) -> None:
    """Raises BadInput for a key that cannot be sent in a header."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput(
            f"{source}: the key is empty or cannot be sent in a header (blanks, non-ASCII characters)"
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


# -- limits

T = TypeVar("T")
MAX_CHOICES = 16  # of one request: prompts times n
MAX_STOPS = 16
MAX_PROMPT_SCORES = 1 << 18  # log-probabilities of prompts in one answer
PARSING_THREADS = 2
NO_LIMIT = sys.maxsize  # of choices per key: only the request queue limits them
UNFINISHED_BODIES = 16  # of the largest size, that a key may have on their way


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server. Times are in seconds."""

    body_bytes: int = 1 << 20  # of one request
    choices_per_key: int = 64  # running or waiting; without keys: of all requests
    request_seconds: float = 600.0  # from arrival to the last token
    drain_seconds: float = 30.0  # for open requests after SIGTERM
    head_seconds: float = 10.0  # for a client to send the head of a request
    body_seconds: float = 20.0  # for a client to send the body
    write_seconds: float = 30.0  # for a client to read, once the buffers in between are full
    # Open connections: with the backlog, well below 1,024 open files, the usual limit of a process.
    connections: int = 512


def default_choices(keys: ApiKeys) -> int:
    """How many choices a key may have in progress: with several keys so few that none fills the request queue."""
    return ServerLimits.choices_per_key if len(keys.digests) > 1 else NO_LIMIT


class KeyLimits:
    """Counts what each key has in progress, and runs the tokenization of each key one call at a time.

    Used by the thread of one event loop only.
    """

    def __init__(self, limits: ServerLimits):
        self._max_choices = limits.choices_per_key
        self._max_unfinished_bytes = UNFINISHED_BODIES * limits.body_bytes
        self._in_progress: Counter[int] = Counter()
        # Bytes of bodies that have not arrived completely.
        self._unfinished_bytes: Counter[int] = Counter()
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        # Not the loop's default executor, which other tasks wait for.
        self._executor = ThreadPoolExecutor(PARSING_THREADS, thread_name_prefix="request-parsing")

    @contextmanager
    def admit(self, key: int, choices: int) -> Iterator[None]:
        """Counts the choices of one request while they are in progress. Raises ApiError if they are too many."""
        if choices > self._max_choices:
            raise ApiError(
                400,
                f"{choices} choices are requested; the limit of {_name_owner(key, 'one API key')} is "
                f"{self._max_choices} (--max_per_key)",
                "invalid_value",
                "n",
            )
        if self._in_progress[key] + choices > self._max_choices:
            raise ApiError(
                429,
                f"{self._in_progress[key]} choices of {_name_owner(key)} are in progress and {choices} more are "
                f"requested; the limit is {self._max_choices} (--max_per_key). Wait for responses first",
                "too_many_requests",
                retry=True,
            )
        self._in_progress[key] += choices
        try:
            yield
        finally:
            self._in_progress[key] -= choices

    @contextmanager
    def receive_body(self, key: int) -> Iterator[Callable[[int], None]]:
        """Yields a function to call with the size of each part of a body that is kept.

        The function raises ApiError if the unfinished bodies of the key would hold too much memory.
        """
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            if self._unfinished_bytes[key] + size > self._max_unfinished_bytes:
                raise ApiError(
                    429,
                    f"unfinished bodies of {_name_owner(key)} hold {self._max_unfinished_bytes} bytes, the limit. "
                    "Complete them first",
                    "too_many_requests",
                    retry=True,
                )
            held += size
            self._unfinished_bytes[key] += size

        try:
            yield hold
        finally:
            self._unfinished_bytes[key] -= held

    async def run_in_turn(self, key: int, work: Callable[[], T]) -> T:
        """Runs `work` in a thread, because parsing and tokenizing long texts takes time. Raises what `work` raises.

        Calls of a key run one at a time, so that they do not delay other keys. After a cancelled call the next call of
        the key still waits for the thread.
        """
        turn = self._turns[key]
        loop = asyncio.get_running_loop()
        await turn.acquire()
        try:
            working = self._executor.submit(work)
        except BaseException:  # no thread can be started
            turn.release()
            raise

        def release(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(turn.release)

        # Called in the thread, or at once if the work is cancelled before it began.
        working.add_done_callback(release)
        return await asyncio.wrap_future(working)


def _name_owner(key: int, with_keys: str = "this API key") -> str:
    """Whose requests are counted together, for messages."""
    return "all clients" if key == WITHOUT_KEY else with_keys
