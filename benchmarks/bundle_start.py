"""One start from a bundle, see `start`: the phases that the engine tells of, then a request."""

from pathlib import Path

from dflash_aot.benchmarks.laps import Laps
from dflash_aot.benchmarks.start import Order, Start
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.runtime import Engine, SamplingParams


def start_bundle(order: Order, laps: Laps) -> Start:
    """Raises what opening a bundle raises."""
    select_jax_platforms(read_manifest(Path(order.bundle)).environment.platform)
    with Engine.open(order.bundle, order.target, order.draft, preload=order.scope == "grid") as engine:
        laps.split("rest of opening", engine.startup)
        deltas = iter(engine.stream(order.prompt_ids, SamplingParams(max_tokens=order.tokens, stop_token_ids=())))
        tokens = [*next(deltas).token_ids]
        laps.end("first token")
        first = laps.total
        tokens += [token for delta in deltas for token in delta.token_ids]
        last, loaded = laps.total, engine.stats().loaded
        return Start(laps.seconds, first, last, tokens, loaded)
