"""Process start to first token: the bundle, cold `jax.jit`, and `jax.jit` with its persistent cache warm.

    python benchmarks/startup.py [--buckets "batch=1 length=256 k=0,7 prefill=64"] [--repeats 3]

The same programs, weights, loop and prompt in all three, every program of the grid ready before the first token,
each start in a new process, interleaved. Prints medians and ratios; the tokens must agree.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"


def start(script: str, *arguments: str) -> dict:
    command = [sys.executable, str(HERE / script), *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", default="batch=1 length=256 k=0,7 prefill=64")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bundle, cache = f"{scratch}/bundle", f"{scratch}/cache"
        build = [sys.executable, "-m", "dflash_aot.bin.precompile", "--bundle", bundle, "--buckets", options.buckets]
        subprocess.run([*build, "--json"], check=True, capture_output=True)
        start("jit_engine.py", bundle, PROMPT, cache)  # fills the persistent cache
        ways = {
            "bundle": lambda: start("first_token.py", bundle, PROMPT),
            "jax.jit, persistent cache warm": lambda: start("jit_engine.py", bundle, PROMPT, cache),
            "jax.jit, cold": lambda: start("jit_engine.py", bundle, PROMPT, ""),
        }
        samples: dict[str, list[dict]] = {way: [] for way in ways}
        for _ in range(options.repeats):
            for way, run in ways.items():
                samples[way].append(run())
    answers = {tuple(sample["token_ids"]) for runs in samples.values() for sample in runs}
    if len(answers) != 1:
        sys.exit(f"void: the ways do not agree on the tokens: {answers}")
    medians = {way: statistics.median(sample["seconds"] for sample in runs) for way, runs in samples.items()}
    print(f"grid: {options.buckets}; median of {options.repeats}, seconds from process start to first token")
    for way, seconds in medians.items():
        print(f"{way:<32} {seconds:6.2f} s   {seconds / medians['bundle']:5.1f} x the bundle's")
    print("phases of the bundle's last start:", samples["bundle"][-1]["phases"])


if __name__ == "__main__":
    main()
