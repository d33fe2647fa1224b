"""Requests and answers, one JSON object a line."""

import json
import math
import queue
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from dflash_aot.cache.errors import BadInput, DflashError
from dflash_aot.runtime.engine import Engine
from dflash_aot.runtime.requests.request import Result
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.requests.stream import Stream

PARAMS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs"),
    *("stop", "stop_token_ids", "k"),
)
ORDER = ("priority", "deadline")
FIELDS = ("id", "prompt", "prompt_ids", *PARAMS, *ORDER)
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
MOST_DIGITS = 100
AHEAD = 256  # lines read ahead of their answers: more than any batch, less than a large file
_Started = tuple[Any, Stream | Result]


def answer_lines(engine: Engine, lines: Iterable[bytes], defaults: SamplingParams) -> Iterator[tuple[Any, Result]]:
    """(id, result) of every line, in order; served together as slots allow. `defaults` hold where a line is silent.

    A line waits for its place where the engine is full: any number of them is served.
    """
    started: queue.Queue[_Started | BaseException | None] = queue.Queue(AHEAD)

    def read() -> None:
        """In a thread, so that an answer never waits for a line that whoever asks has not written yet."""
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    started.put(_start(engine, line, number, defaults))
            started.put(None)
        except BaseException as error:  # raised where the answers are read
            started.put(error)

    threading.Thread(target=read, name="dflash-lines", daemon=True).start()
    while (one := started.get()) is not None:
        if isinstance(one, BaseException):
            raise one
        yield _finish(*one)


def output_line(identity: Any, result: Result, trace: bool) -> str:
    """An answer as JSON, without a line end; with log-probabilities where they were asked for."""
    fields = {
        "id": identity,
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "accepted": result.accepted,
        "error": result.error,
    }
    if result.logprobs is not None:
        fields["logprobs"] = [asdict(one) for one in result.logprobs]
    if trace:
        fields["drafted"] = result.drafted
    return dump_json(fields)


def dump_json(fields: dict[str, Any]) -> str:
    """Readable where UTF-8 can hold it; a lone surrogate, in an id say, stays escaped as it came."""
    line = json.dumps(fields, ensure_ascii=False)
    return line if _is_utf8(line) else json.dumps(fields)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _start(engine: Engine, line: bytes, number: int, defaults: SamplingParams) -> _Started:
    identity = None
    try:
        fields = _parse(line, number)
        identity = fields.get("id")
        _check_names(fields, number)
        prompt, params = _read_prompt(fields, number), _read_params(fields, defaults)
        order = {name: fields[name] for name in ORDER if fields.get(name) is not None}
        return identity, engine.stream(prompt, params, **order, wait=True)
    except DflashError as error:
        return identity, failed(str(error))


def _finish(identity: Any, started: Stream | Result) -> tuple[Any, Result]:
    if isinstance(started, Result):
        return identity, started
    try:
        return identity, started.result()
    except DflashError as error:
        return identity, failed(str(error))


def failed(error: str) -> Result:
    """The answer to a request that never ran."""
    return Result([], "", "error", 0, [], [], error, None, 0.0)


def _parse(line: bytes, number: int) -> dict[str, Any]:
    try:
        fields = json.loads(
            line,
            parse_constant=_refuse_constant,
            parse_float=_read_float,
            parse_int=_read_int,
            object_pairs_hook=_refuse_twins,
        )
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors alike
        raise BadInput(f"line {number} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadInput(f"line {number} holds a {type(fields).__name__}, not an object")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _read_float(digits: str) -> float:
    """What is too large would come out again as no JSON."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:40]} is too large a number")
    return value


def _read_int(digits: str) -> int:
    """What has more digits than a message can hold (4300) could not even be refused by its value."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too large")
    return int(digits)


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values for one name, one would be ignored."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        (twin, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twin!r} is given twice")
    return fields


def _check_names(fields: dict[str, Any], number: int) -> None:
    """A misspelt field must not be ignored: its default would be used instead, silently."""
    if unknown := sorted(fields.keys() - set(FIELDS)):
        raise BadInput(f"line {number} has unknown fields {', '.join(unknown)}; known are {', '.join(FIELDS)}")


def _read_prompt(fields: dict[str, Any], number: int) -> str | list[int]:
    given = [name for name in ("prompt", "prompt_ids") if fields.get(name) is not None]
    if len(given) != 1:
        raise BadInput(f"line {number} needs one of prompt and prompt_ids, and has {' and '.join(given) or 'neither'}")
    prompt, kind = fields[given[0]], str if given[0] == "prompt" else list
    if not isinstance(prompt, kind):
        raise BadInput(
            f"line {number}: {given[0]} is {prompt!r}: a {'text' if kind is str else 'list of token ids'} is needed"
        )
    return prompt


def _read_params(fields: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    """A field that is null is as good as absent. Values are checked by SamplingParams."""
    given = {name: fields[name] for name in PARAMS if fields.get(name) is not None}
    for name in ("stop", "stop_token_ids"):
        if name in given and not isinstance(given[name], list):
            raise BadInput(f"{name} is {given[name]!r}: a list is needed")
    if "logit_bias" in given:
        given["logit_bias"] = _read_bias(given["logit_bias"])
    return replace(defaults, **given)


def _read_bias(bias: object) -> dict[int, Any]:
    """JSON's names are texts: here they are token ids, written as JSON writes numbers."""
    if not isinstance(bias, dict):
        raise BadInput(f"logit_bias is {bias!r}: an object is needed, of token ids and numbers")
    for name in bias:
        if not TOKEN_ID.fullmatch(name):
            raise BadInput(f'logit_bias names {name!r}: a token id is needed, like "17"')
    return {int(name): value for name, value in bias.items()}
