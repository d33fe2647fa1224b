"""An engine embedded in a script: one prompt, several prompts at once, streaming, statistics.

dflash-precompile                                  # once: builds the bundle of the embedded pair
python examples/embed_script.py [--bundle DIR]
"""

import argparse
from pathlib import Path

from dflash_aot.cache.files.locations import user_cache_directory
from dflash_aot.runtime import Engine, SamplingParams

PROMPTS = ["import os", "class Queue:", "def main():"]


def main(bundle: Path) -> None:
    with Engine.open(bundle) as engine:
        result = engine.generate("import os", SamplingParams(max_tokens=24))
        print(f"one: {result.text!r}, {result.finish_reason}, {1000 * result.seconds:.0f} ms")

        # Up to the largest batch of the grid runs at once; other prompts wait in the queue.
        for prompt, result in zip(
            PROMPTS, engine.generate_all(PROMPTS, SamplingParams(max_tokens=12)), strict=True
        ):
            print(f"all: {prompt!r} → {result.text!r}")

        print("stream: ", end="")
        for delta in engine.stream("class Queue:", SamplingParams(max_tokens=48)):
            print(delta.text, end="", flush=True)
            if "\n" in delta.text:
                break  # leaving the loop cancels the request and frees its slot

        stats = engine.stats()
        print(
            f"\nstats: {stats.output_tokens} tokens in {stats.row_rounds} rounds and {stats.prefill_chunks} prefills"
        )
        print(
            f"stats: {stats.accepted} of {stats.drafted} drafted tokens accepted, {stats.compile_events} compilations"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=user_cache_directory() / "embedded")
    main(parser.parse_args().bundle)
