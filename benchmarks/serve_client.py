"""dflash-bench serve: load on a running dflash-serve, by the published client `aiperf`, in its own environment."""

import json
import shutil
import subprocess
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

from dflash_aot.benchmarks.record import ProgressNote, setting
from dflash_aot.cache.errors import BadInput, PeerFailed
from dflash_aot.cache.files.locations import EMBEDDED, locate_checkpoint

SWITCHES = ("--streaming", "--use-legacy-max-tokens", "--use-server-token-count")
REQUESTS_PER_CONNECTION = 4  # at least: with one each, a run is a burst


@dataclass(frozen=True)
class ServeSettings:
    """Flags of `dflash-bench serve`."""

    url: str = setting("http://127.0.0.1:8000", "the running server")
    aiperf: str = setting("aiperf", "the client's command, see docs/benchmarks.md")
    target: str = setting(EMBEDDED, "the target whose tokenizer makes the prompts")
    connections: tuple[int, ...] = setting((1, 2, 4, 8, 16, 32), "at a time, run by run", least=1)
    prompts: int = setting(32, "requests of each run, and at least 4 for each connection", least=1)
    prompt_tokens: int = setting(64, "tokens of each prompt", least=1)
    max_tokens: int = setting(32, "new tokens of each answer", least=1)
    rate: float | None = setting(None, "requests per second at random times; default: no pauses")
    seed: int = setting(1, "of the prompts and the times")


def run_client(settings: ServeSettings, artifacts: str, note: ProgressNote) -> None:
    """One run for each number of connections; the client prints its own tables and writes to `artifacts`.

    Raises BadInput without a client or a server, PeerFailed where the client fails.
    """
    if shutil.which(settings.aiperf) is None:
        install = "python -m venv aiperf && aiperf/bin/pip install aiperf, then --aiperf aiperf/bin/aiperf"
        raise BadInput(
            f"--aiperf {settings.aiperf}: not found. Its pins differ, so it needs its own environment: {install}"
        )
    try:
        with urllib.request.urlopen(f"{settings.url}/v1/models", timeout=10) as response:
            model = json.load(response)["data"][0]["id"]
    except (OSError, HTTPException, LookupError, TypeError, ValueError) as error:
        raise BadInput(f"--url {settings.url}: no model is served there: {error}") from error
    for connections in settings.connections:
        note(f"{connections} connections")
        command = make_command(settings, model, connections, f"{artifacts}/serve-{connections}")
        done = subprocess.run(command)
        if done.returncode:
            raise PeerFailed(
                f"{settings.aiperf} ended with {done.returncode}; its messages are above"
            )


def make_command(settings: ServeSettings, model: str, connections: int, out: str) -> list[str]:
    """The client's command. It sends only fields that dflash-serve accepts, and reads token counts from `usage`."""
    options = {
        "model": model,
        "url": settings.url,
        "endpoint-type": "completions",
        "tokenizer": locate_checkpoint(settings.target, "target"),
        "concurrency": connections,
        "request-count": max(settings.prompts, REQUESTS_PER_CONNECTION * connections),
        "warmup-request-count": connections,
        "prompt-input-tokens-mean": settings.prompt_tokens,
        "prompt-output-tokens-mean": settings.max_tokens,
        "random-seed": settings.seed,
        # Every run sends the same prompts, so their kv must not be there already.
        "extra-inputs": json.dumps({"temperature": 0, "ignore_eos": True, "prefix_caching": False}),
        "artifact-dir": out,
        "ui": "none",
    }
    if settings.rate is not None:
        options |= {"request-rate": f"{settings.rate:g}", "arrival-pattern": "poisson"}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [settings.aiperf, "profile", *SWITCHES, *flags]
