"""Who may ask: API keys, of which only hashes are kept."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflash_aot.cache.errors import BadInput

SCHEME = "bearer "
ANYBODY = 0  # the caller where no keys are asked for; keys are counted from 1


@dataclass(frozen=True)
class Keys:
    """The sha256 of each key. Without any, everybody may ask."""

    digests: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.digests)

    def identify(self, authorization: str | None) -> int | None:
        """Whose key an Authorization header holds, counted from 1; None for nobody's. Takes as long for any."""
        if not self.digests:
            return ANYBODY
        given = authorization or ""
        digest = _digest(given[len(SCHEME) :] if given[: len(SCHEME)].lower() == SCHEME else "")
        found = [hmac.compare_digest(digest, one) for one in self.digests]
        return found.index(True) + 1 if any(found) else None


def make_keys(keys: Iterable[str], source: str) -> Keys:
    """`source` names where they come from in messages, which never show a key. Raises BadInput."""
    listed = list(keys)
    for key in listed:
        _check(key, source)
    if len(set(listed)) != len(listed):
        raise BadInput(f"{source}: a key stands there twice")
    return Keys(tuple(map(_digest, listed)))


def read_keys(path: Path) -> list[str]:
    """One a line; empty lines and those that begin with # are none. Raises BadInput."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BadInput(f"the file of API keys, {path}, cannot be read: {reason}") from error
    keys = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#"}
    if not keys:
        raise BadInput(f"{path} holds no API key: one a line is needed")
    for number, key in keys.items():
        _check(key, f"{path}, line {number}")
    return [*keys.values()]


def _check(key: str, source: str) -> None:
    """Raises BadInput for what no client can send."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput(f"{source}: the key is empty or holds what no header can (blanks, other than ASCII)")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
