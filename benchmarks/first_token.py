"""The bundle's side of startup.py: process start to first token, in a process of its own."""

import json
import sys

from dflash_aot.bin.command import seconds_since_process_start
from dflash_aot.runtime import Engine, SamplingParams


def main(bundle: str, prompt: str) -> None:
    with Engine.open(bundle) as engine:
        stream = iter(engine.stream(prompt, SamplingParams(max_tokens=16)))
        first = next(stream)
        seconds = seconds_since_process_start()
        tokens = [token for delta in (first, *stream) for token in delta.token_ids]
        print(json.dumps({"seconds": seconds, "token_ids": tokens, "phases": engine.startup}))


if __name__ == "__main__":
    main(*sys.argv[1:])
