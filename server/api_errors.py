"""API errors in OpenAI's form: what clients are told about failures, without internal details."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec

from dflash_aot.cache.errors import BadCheckpoint, BadInput, EngineFailed, QueueFull
from dflash_aot.cache.printable import escape_line

logger = logging.getLogger(__name__)
MAX_MESSAGE_CHARACTERS = 1000  # messages quote the request, which may be long
MAX_FIELD_CHARACTERS = 64  # of an unknown field that is compared with the known ones
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
RETRY_SECONDS = 1
# Not failures of a request: they end the process, a task or a generator. All other exceptions get an error response,
# also those that are no `Exception`, such as a panic in the Rust code of tokenizers.
NOT_ANSWERED = (KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit)
NOT_AN_OBJECT = "Input should be an object"
MESSAGES = {  # instead of pydantic's, which name Python classes
    "model_type": NOT_AN_OBJECT,
    "model_attributes_type": NOT_AN_OBJECT,
    "dict_type": NOT_AN_OBJECT,
    "none_required": "this server accepts null only: leave it out",
}


@dataclass(eq=False)  # not frozen: Python writes into exceptions
class ApiError(Exception):
    """An error response."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None  # the field at fault
    retry: bool = False  # whether the same request may succeed a little later

    @property
    def body(self) -> bytes:
        error_type = ERROR_TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        param = None if self.param is None else escape_line(self.param, MAX_MESSAGE_CHARACTERS)
        message = escape_line(self.message, MAX_MESSAGE_CHARACTERS)
        fields = {"message": message, "type": error_type, "param": param, "code": self.code}
        return msgspec.json.encode({"error": fields})

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {"content-type": "application/json"}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 504:
            # OpenAI's client would repeat a request that takes too long.
            headers["x-should-retry"] = "false"
        if self.retry:
            headers["retry-after"] = str(RETRY_SECONDS)
        return headers


def to_api_error(error: BaseException, request_id: str) -> ApiError:
    """The response to an exception. Only client errors are quoted; others go to the log under the request's id."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(
                503,
                "too many requests are waiting (--max_waiting). Try again later",
                "overloaded",
                retry=True,
            )
        case BadInput() if not isinstance(error, BadCheckpoint):  # it names files
            return ApiError(400, str(error), "invalid_value")
    logger.error("%s failed: %s: %s", request_id, type(error).__name__, error)
    logger.debug("%s", request_id, exc_info=error)
    return internal_error(
        request_id, "engine_failed" if isinstance(error, EngineFailed) else "internal_error"
    )


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "the server is shutting down. Try again later, or another server",
        "draining",
        retry=True,
    )


def timed_out(limit: float) -> ApiError:
    return ApiError(504, f"the request took longer than the limit of {limit:g} s", "timeout")


def internal_error(request_id: str, code: str) -> ApiError:
    return ApiError(
        500, f"the server failed at this request. The cause is in its log, under {request_id}", code
    )


def invalid_json() -> ApiError:
    return ApiError(400, "the body is not JSON", "invalid_json")


def from_validation_errors(
    errors: Sequence[Mapping[str, Any]], known_fields: Collection[str] = ()
) -> ApiError:
    """The first of pydantic's errors. known_fields: of the body; one of them may be meant by an unknown field."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "[key]")]
    param = ".".join(path) or None
    if first["type"] == "json_invalid":
        return invalid_json()
    if first["type"] == "extra_forbidden":
        short = path[0] if len(path) == 1 and len(path[0]) <= MAX_FIELD_CHARACTERS else ""
        meant = get_close_matches(short, known_fields, 1)
        remedy = f"did you mean {meant[0]}?" if meant else "leave it out"
        return ApiError(400, f"{param} is not a known field: {remedy}", "unknown_parameter", param)
    more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
    message = MESSAGES.get(first["type"], first["msg"])
    return ApiError(400, f"{param or 'the body'}: {message}{more}", "invalid_value", param)
