"""API keys: reads them from a file or the environment, keeps their hashes, identifies the key of a request."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash_aot.cache.errors import BadInput

SCHEME = "bearer "
WITHOUT_KEY = 0  # the key number of all requests of a server without keys; keys are counted from 1


@dataclass(frozen=True)
class ApiKeys:
    """The accepted keys; without any, every request is accepted."""

    digests: tuple[bytes, ...] = ()  # sha256 of each key

    def __bool__(self) -> bool:
        return bool(self.digests)

    def identify(self, authorization: str | None) -> int | None:
        """The number of the key in an Authorization header; None for an unknown key. Compares in constant time."""
        if not self.digests:
            return WITHOUT_KEY
        given = authorization or ""
        given_digest = _digest(given[len(SCHEME) :] if given[: len(SCHEME)].lower() == SCHEME else "")
        matches = [hmac.compare_digest(given_digest, digest) for digest in self.digests]
        return matches.index(True) + 1 if any(matches) else None


def make_keys(keys: Iterable[str], source: str) -> ApiKeys:
    """The hashes of `keys`. Messages name `source` and never show a key. Raises BadInput."""
    listed = list(keys)
    for key in listed:
        _check(key, source)
    if len(set(listed)) != len(listed):
        raise BadInput(f"{source}: a key is given twice")
    return ApiKeys(tuple(map(_digest, listed)))


def read_keys(path: Path) -> list[str]:
    """The keys of a file, one per line, without empty lines and lines that begin with #. Raises BadInput."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BadInput(f"the file of API keys, {path}, cannot be read: {reason}") from error
    keys = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#"}
    if not keys:
        raise BadInput(f"{path} holds no API key: write one per line")
    for number, key in keys.items():
        _check(key, f"{path}, line {number}")
    return [*keys.values()]


def _check(key: str, source: str) -> None:
    """Raises BadInput for a key that cannot be sent in a header."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput(f"{source}: the key is empty or cannot be sent in a header (blanks, non-ASCII characters)")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
