"""A worker whose answers can be worked out by hand; run as a subprocess, not collected by pytest."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from dflash_aot.benchmarks.messages import Handlers, Serve, Served, ServingWork, TimedAnswer, run_worker


class ToySpec(msgspec.Struct, frozen=True):
    """Faults of the toy."""

    lies: bool = False
    compile_events: int = 0


def say(prompt: list[int], tokens: int) -> list[int]:
    """The toy's answer: each token is one more than the last."""
    return [prompt[-1] + place for place in range(1, tokens + 1)]


@contextmanager
def open_toy(spec: ToySpec) -> Iterator[Handlers]:
    def serve(question: Serve) -> Served:
        print("this is no answer")
        answers = [answer(prompt, question.max_tokens) for prompt in question.prompts]
        rounds = sum(len(one.accepted) for one in answers)
        work = ServingWork(rounds=rounds, rows=rounds, row_rounds=rounds, compile_events=spec.compile_events)
        return Served(answers, 0.5 * question.max_tokens, work)

    def answer(prompt: list[int], tokens: int) -> TimedAnswer:
        found = say(prompt, tokens)
        if spec.lies and prompt[-1] == 5:
            found[-1] = 0
        return TimedAnswer(found, [0.5 * place for place in range(1, tokens + 1)], [0] * (tokens - 1))

    yield {Serve: serve}


if __name__ == "__main__":
    run_worker({ToySpec: open_toy})
