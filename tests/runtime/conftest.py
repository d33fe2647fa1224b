"""Engines on the golden pairs, and cases whose answers the reference implementation has given."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_aot.runtime import Engine


@dataclass(frozen=True)
class Case:
    """A prompt and the reference's plain greedy continuation of it, a token at a time."""

    prompt: list[int]
    answer: list[int]

    def later(self, tokens: int) -> "Case":
        """Greedy decoding has no memory but the text: a prompt that holds the answer's start gets the rest."""
        return Case(self.prompt + self.answer[:tokens], self.answer[tokens:])


@pytest.fixture(scope="session")
def serve(bundle: Callable[[str], Path], runs: dict) -> Iterator[Callable[..., Engine]]:
    """The engine of a set with a K, shared by all tests, which never saw a trace or a compile in the end."""
    with ExitStack() as stack:

        @functools.cache
        def engine(name: str, k: int) -> Engine:
            pair = {"target": runs[name].target, "draft": runs[name].draft} if name in runs else {}
            opened = stack.enter_context(Engine.open(bundle(name), k=k, **pair))
            stack.callback(lambda: _check(opened))
            return opened

        yield engine


def _check(engine: Engine) -> None:
    assert engine.stats().compile_events == 0


@pytest.fixture(scope="session")
def cases(tied) -> dict[str, Case]:
    """The tied set's prompts by name."""
    return {
        prompt["name"]: Case(prompt["prompt_ids"], prompt["ar_output_ids"][len(prompt["prompt_ids"]) :])
        for prompt in tied.facts["prompts"]
    }
