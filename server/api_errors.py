"""What went wrong, in OpenAI's form and our words: what a caller can mend is said, what is inside stays inside."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dflash_aot.cache.errors import BadCheckpoint, BadInput, EngineFailed, QueueFull

logger = logging.getLogger(__name__)
LONGEST = 1000  # characters: a client's own words may come back, and not all of them
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
RETRY_SECONDS = 1
OBJECT = "Input should be an object"
WORDS = {"model_type": OBJECT, "model_attributes_type": OBJECT, "dict_type": OBJECT}  # pydantic speaks of classes


@dataclass(eq=False)  # not frozen: Python writes into exceptions
class Problem(Exception):
    """An answer that is an error. `param` names the field at fault; `retry`: it may go well a little later."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry: bool = False

    @property
    def body(self) -> bytes:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = None if self.param is None else _clean(self.param)
        fields = {"message": _clean(self.message), "type": kind, "param": param, "code": self.code}
        return msgspec.json.encode({"error": fields})

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {"content-type": "application/json"}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 504:
            headers["x-should-retry"] = "false"  # OpenAI's client would ask three times for what takes too long
        if self.retry:
            headers["retry-after"] = str(RETRY_SECONDS)
        return headers


def report_error(error: Exception, request_id: str) -> Problem:
    """What a caller is told: all of an error in what was asked; of others, which the log gets, only where to look."""
    match error:
        case Problem():
            return error
        case QueueFull():
            return Problem(503, "too many requests are waiting. Try again a little later", "overloaded", retry=True)
        case BadInput() if not isinstance(error, BadCheckpoint):  # which names files
            return Problem(400, str(error), "invalid_value")
    logger.error("%s failed: %s: %s", request_id, type(error).__name__, error)
    logger.debug("%s", request_id, exc_info=error)
    return inside(request_id, "engine_failed" if isinstance(error, EngineFailed) else "internal_error")


def shutting_down() -> Problem:
    return Problem(503, "the server is shutting down. Ask another one, or later", "draining", retry=True)


def inside(request_id: str, code: str) -> Problem:
    """Nothing that a caller has to do with."""
    return Problem(500, f"the server failed at this request; its log says why, under {request_id}", code)


def describe_flaws(flaws: Sequence[Mapping[str, Any]]) -> Problem:
    """The first of what pydantic found wrong with a body."""
    flaw = flaws[0]
    path = [str(part) for part in flaw["loc"] if part not in ("body", "[key]")]
    param = ".".join(path) or None
    if flaw["type"] == "json_invalid":
        return Problem(400, "the body is no JSON", "invalid_json")
    if flaw["type"] == "extra_forbidden":
        return Problem(400, f"{param} is not known here: leave it out", "unknown_parameter", param)
    more = f" ({len(flaws) - 1} more)" if len(flaws) > 1 else ""
    words = WORDS.get(flaw["type"], flaw["msg"])
    return Problem(400, f"{param or 'the body'}: {words}{more}", "invalid_value", param)


def _clean(text: str) -> str:
    """What JSON can hold, and not too much of it."""
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return shown.encode(errors="backslashreplace").decode()
