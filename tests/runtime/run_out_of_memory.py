"""A process that serves requests while its limit leaves less and less memory: run_out_of_memory.py BUNDLE.

Prints a line of JSON: "much", "little" and "none" (memory that is left: see `ask_under_limit`), "opening" (the error of
`Engine.open` without memory).
"""

import json
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dflash_aot.cache.errors import DflashError
from dflash_aot.runtime import Engine, Result, SamplingParams
from dflash_aot.runtime.executables.executable import estimate_step_bytes
from dflash_aot.runtime.requests.request import Stream
from tests.runtime.stepper import finish, wait_until

SAMPLED = {"temperature": 0.8, "seed": 3, "logprobs": 20, "logit_bias": {5: 1.0}}
ASKED = [
    ([100 + number] * length, SamplingParams(max_tokens=24, stop_token_ids=(), **fields))
    for number, length in enumerate((5, 70))
    for fields in ({}, SAMPLED)
]


@contextmanager
def limit_memory(spare: int) -> Iterator[None]:
    """Limits the address space of this process to its present size and `spare` bytes, which may be negative."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/status") as status:
        kilobytes = next(line.split()[1] for line in status if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (1024 * int(kilobytes) + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def name_end(stream: Stream, expected: Result) -> str:
    """ "right", "wrong", or the class of the error with which a request ended."""
    try:
        return "right" if finish(stream.result).token_ids == expected.token_ids else "wrong"
    except DflashError as error:
        assert "memory" in str(error), error
        return type(error).__name__


def ask_under_limit(engine: Engine, expected: Sequence[Result], spare: int, *, until_it_ends: bool) -> dict:
    """Asks twice for everything: half of the requests run when the limit is lowered, the others come afterwards.

    until_it_ends: whether memory stays short until the engine ends; otherwise until the first error.

    Returns "ends" (counts of how requests ended), "after" (the same of requests asked without the limit), "failure" (of
    the engine), "finished" and "compiles" (of its counters).
    """
    streams = [engine.stream(*asked) for asked in ASKED]
    streams[0]._deltas.get()
    with limit_memory(spare):
        streams += [engine.stream(*asked) for asked in ASKED]
        wait_until(lambda: engine.stats().running == 0 or bool(engine.stats().failures))
        if until_it_ends:
            wait_until(lambda: engine.failure is not None)
    ends = Counter(map(name_end, streams, [*expected, *expected]))
    after: Counter[str] = Counter()
    for asked, result in zip(ASKED, expected, strict=True):
        try:
            after[name_end(engine.stream(*asked), result)] += 1
        except DflashError as error:
            after[type(error).__name__] += 1
    stats = engine.stats()
    return {
        "ends": ends,
        "after": after,
        "failure": engine.failure,
        "finished": stats.finished,
        "compiles": stats.compile_events,
    }


def main(bundle: str) -> None:
    report: dict[str, object] = {}
    with Engine.open(bundle, k=7, preload=True) as engine:
        expected = engine.generate_all([prompt for prompt, _ in ASKED], [params for _, params in ASKED])
        step_bytes = estimate_step_bytes(engine.manifest)
        for name, spare in {"much": 2 * step_bytes, "little": step_bytes // 2}.items():
            report[name] = ask_under_limit(engine, expected, spare, until_it_ends=False)
        report["none"] = ask_under_limit(engine, expected, 0, until_it_ends=True)
    try:
        with limit_memory(step_bytes // 2):
            Engine.open(bundle, k=7)
    except DflashError as error:
        report["opening"] = f"{type(error).__name__}: {error}"
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
