"""JSON lines: reads requests, serves them, and writes results, one JSON object per line."""

import json
import math
import queue
import re
import reprlib
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash_aot.cache.errors import BadInput, DflashError
from dflash_aot.cache.printable import escape_json
from dflash_aot.runtime.engine import Engine
from dflash_aot.runtime.requests.request import Result, Stream
from dflash_aot.runtime.requests.sampling_params import PARAMETERS, TOKEN_ID_PATTERN, SamplingParams

# --trace applies to all lines.
SAMPLING_FIELDS = tuple(name for name in PARAMETERS if name != "trace")
SCHEDULING_FIELDS = ("priority", "deadline")
FIELDS = ("id", "prompt", "prompt_ids", *SAMPLING_FIELDS, *SCHEDULING_FIELDS)
MAX_DIGITS = 100
READ_AHEAD_LINES = 256  # before their answers: more than any batch, less than a large file
_Started = tuple[Any, int, Stream | Result]  # the id, the line's number, and what answers it


@dataclass(frozen=True)
class AnsweredLines:
    """The results that an earlier run has written.

    Attributes:
        ids: of the results, in order.
        failed: how many of them are errors.
        size: bytes up to the end of the last whole line.
    """

    ids: tuple[Any, ...] = ()
    failed: int = 0
    size: int = 0


def read_answered(path: Path) -> AnsweredLines:
    """Reads the whole lines of an output file; a file that does not exist has none. Raises BadInput."""
    ids = []
    failed = size = 0
    try:
        with open(path, "rb") as results:
            for number, line in enumerate(results, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    fields = json.loads(line)
                    ids.append(fields["id"])
                    failed += fields["finish_reason"] == "error"
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise BadInput(f"{path}, line {number}, is no result: {error}") from error
                size += len(line)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    return AnsweredLines(tuple(ids), failed, size)


def answer_lines(
    engine: Engine, lines: Iterable[bytes], defaults: SamplingParams, answered: Sequence[Any] = ()
) -> Iterator[tuple[Any, Result]]:
    """Yields (id, result) of every line, in order; several lines are served at once.

    defaults: the values of fields that a line does not give. While the request queue is full, lines wait: their number
    is not limited.
    answered: the ids of the first lines, which are skipped. Raises BadInput if the lines have other ids.
    """
    started: queue.Queue[_Started | BaseException | None] = queue.Queue(READ_AHEAD_LINES)

    def read() -> None:
        """Submits the lines. Runs in a thread, so that results do not wait for lines that are not written yet."""
        try:
            left = deque(answered)
            for number, line in enumerate(lines, 1):
                if line.strip() and left:
                    _check_answered(line, number, left.popleft())
                elif line.strip():
                    started.put(_start(engine, line, number, defaults))
            if left:
                raise BadInput(
                    f"the output has {len(answered)} results, {len(left)} more than the input has lines"
                )
            started.put(None)
        except BaseException as error:  # raised again where the results are read
            started.put(error)

    threading.Thread(target=read, name="dflash-lines", daemon=True).start()
    while (item := started.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield _finish(*item)


def output_line(identity: Any, result: Result, trace: bool) -> str:
    """A result as JSON without a line end; with log-probabilities if the request asked for them."""
    fields = {
        "id": identity,
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "accepted": result.accepted,
        "error": result.error,
    }
    if result.logprobs is not None:
        fields["logprobs"] = [asdict(chosen) for chosen in result.logprobs]
    if result.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [chosen and asdict(chosen) for chosen in result.prompt_logprobs]
    if trace:
        fields["drafted"] = result.drafted
    return dump_json(fields)


def dump_json(fields: dict[str, Any]) -> str:
    """JSON in UTF-8, with invisible characters and lone surrogates, which UTF-8 cannot encode, as ASCII escapes."""
    return escape_json(json.dumps(fields, ensure_ascii=False))


def _start(engine: Engine, line: bytes, number: int, defaults: SamplingParams) -> _Started:
    identity = None
    try:
        fields = _parse(line)
        identity = fields.get("id")
        _check_names(fields)
        prompt = _read_prompt(fields)
        params = _read_params(fields, defaults)
        scheduling = {
            name: fields[name] for name in SCHEDULING_FIELDS if fields.get(name) is not None
        }
        return identity, number, engine.stream(prompt, params, **scheduling, wait=True)
    except DflashError as error:
        return identity, number, failed(f"line {number}: {error}")


def _check_answered(line: bytes, number: int, identity: Any) -> None:
    """Raises BadInput if the result that was written for a line has another id."""
    try:
        found = _parse(line).get("id")
    except BadInput:
        found = None
    if found != identity:
        raise BadInput(
            f"line {number} of the input has the id {reprlib.repr(found)}, its result has {reprlib.repr(identity)}: "
            "the output was made from another input"
        )


def _finish(identity: Any, number: int, started: Stream | Result) -> tuple[Any, Result]:
    if isinstance(started, Result):
        return identity, started
    try:
        return identity, started.result()
    except DflashError as error:
        return identity, failed(f"line {number}: {error}")


def failed(error: str) -> Result:
    """The result of a request that was refused."""
    return Result([], "", "error", 0, [], [], error, None, 0.0)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(
            line,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_int,
            object_pairs_hook=_refuse_duplicates,
        )
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors alike
        raise BadInput(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadInput(f"a {type(fields).__name__}, not an object")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse_float(digits: str) -> float:
    """Raises ValueError for infinity, which JSON cannot hold in the output line."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _parse_int(digits: str) -> int:
    """Raises ValueError for many digits: Python cannot convert integers of over 4300 digits to text for a message."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too large")
    return int(digits)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a name that is given twice: one of its values would be ignored."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is given twice")
    return fields


def _check_names(fields: dict[str, Any]) -> None:
    """Raises BadInput for unknown fields: for a misspelt field the default would be used silently."""
    if unknown := sorted(fields.keys() - set(FIELDS)):
        raise BadInput(f"unknown fields {', '.join(unknown)}; the fields are {', '.join(FIELDS)}")


def _read_prompt(fields: dict[str, Any]) -> str | list[int]:
    given = [name for name in ("prompt", "prompt_ids") if fields.get(name) is not None]
    if len(given) != 1:
        raise BadInput(
            f"one of prompt and prompt_ids is needed; given: {' and '.join(given) or 'neither'}"
        )
    prompt = fields[given[0]]
    kind = str if given[0] == "prompt" else list
    if not isinstance(prompt, kind):
        raise BadInput(
            f"{given[0]} is {prompt!r}: a {'text' if kind is str else 'list of token ids'} is needed"
        )
    return prompt


def _read_params(fields: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    """The sampling parameters of a line; null is the same as absent. Raises BadInput."""
    given = {name: fields[name] for name in SAMPLING_FIELDS if fields.get(name) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = _read_bias(given["logit_bias"])
    return replace(defaults, **given)


def _read_bias(bias: object) -> dict[int, Any]:
    """The bias by token id; in JSON the ids are texts. Raises BadInput."""
    if not isinstance(bias, dict):
        raise BadInput(f"logit_bias is {bias!r}: an object of token ids and numbers is needed")
    for name in bias:
        if not re.fullmatch(TOKEN_ID_PATTERN, name):
            raise BadInput(f'logit_bias names {name!r}: a token id is needed, like "17"')
    return {int(name): value for name, value in bias.items()}
