"""A thousand random bodies, made from what the server publishes: it answers each as it says that it does."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from dflash_aot.server.limits import MAX_CHOICES
from tests.server.conftest import Server
from tests.server.raw_client import read_sample, wait_until_idle

SEEDLESS = {"derandomize": True, "database": None, "suppress_health_check": [*HealthCheck]}
SOUND, BROKEN = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.fixture(scope="module")
def watched(bundle: Callable[[str], Path]) -> Iterator[Server]:
    """One that must be as it was when all is over."""
    server = Server.start(bundle("served"), "--preload").wait_until_ready()
    yield server
    wait_until_idle(server)
    assert read_sample(server, "dflash:compile_events_total") == 0
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ready"}
    assert server.stop() == 0
    said = "".join(server.lines)
    assert "failed" not in said and "Traceback" not in said


def shorten(body: dict[str, Any]) -> dict[str, Any]:
    """The same without what takes long; nothing wrong in it becomes right."""
    sound = {"max_tokens": 1 << 31, "max_completion_tokens": 1 << 31, "n": MAX_CHOICES + 1}
    short = {
        field: min(value, 2) if type(value) is int and 1 <= value < limit else value
        for field, limit in sound.items()
        if (value := body.get(field)) is not None
    }
    added = {} if {"max_tokens", "max_completion_tokens"} & body.keys() else {"max_tokens": 2}
    return {**body, **short, **added}


def write_whole_numbers(value: Any) -> Any:
    """As such: 7.0 is one to JSON Schema only."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [write_whole_numbers(one) for one in value]
        case dict():
            return {name: write_whole_numbers(one) for name, one in value.items()}
    return value


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("mode", "count"), [(SOUND, 200), (BROKEN, 300)])
def test_every_answer_to_a_random_body_is_as_published(watched, path, mode, count):
    operation = schemathesis.openapi.from_url(f"{watched.url}/openapi.json")[path]["POST"]
    statuses = Counter()

    @settings(max_examples=count, **SEEDLESS)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        if isinstance(case.body, dict):
            case.body = shorten(write_whole_numbers(case.body))
        answer = case.call()
        statuses[answer.status_code] += 1
        # All checks but one: what the target's vocabulary, its name and the grid rule out, a schema does not say.
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])

    ask()
    assert sum(statuses.values()) >= count
    assert statuses.keys() <= {200, 400, 404}
    assert statuses[200] > count / 4 if mode is SOUND else not statuses[200], statuses
