"""Ways to decode that are compared: the engine at each K, the plain `jax.jit` loop, PyTorch. Each is a peer."""

import functools
import hashlib
import importlib.util
import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from dflash_aot.benchmarks.benchmark import Note
from dflash_aot.benchmarks.orders import EngineOrder, JitOrder, TorchOrder
from dflash_aot.benchmarks.pairs import Pair, choose_prompts
from dflash_aot.benchmarks.peer import Peer, python_module
from dflash_aot.benchmarks.traffic import Prompt, Serve, Served
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.runtime.weights.checkpoint_pair import read_end_tokens

K = int | Literal["auto"]
CHOSEN: Literal["auto"] = "auto"
LOOKUP_TOKENS = 10  # as in transformers' documentation; of 3, 7 and 10 the one with the fewest passes on held-out texts
EXIT = 0.75  # of the layers guess: of a quarter, a half and so many the best on the embedded pair


@dataclass(frozen=True)
class Way:
    """One of them. order: what its process is told. exact: its tokens must be those of all others that are exact.

    k: of the engine and of the loop; None where none is fixed.
    """

    name: str
    module: str
    order: msgspec.Struct
    exact: bool = True
    k: int | None = None

    def open(self) -> Peer:
        """Raises PeerFailed."""
        return Peer(self.name, python_module(f"dflash_aot.benchmarks.{self.module}"), self.order)


def engine_way(bundle: Path, pair: Pair, k: K, dtype: str = "float32", max_waiting: int | None = None) -> Way:
    """The engine on a bundle of that dtype."""
    order = EngineOrder(str(bundle), str(pair.target), str(pair.draft), k, max_waiting)
    named = "engine" if dtype == "float32" else f"engine, {dtype}"
    fixed = None if k == CHOSEN else k
    return Way(f"{named}, K {'chosen' if fixed is None else f'= {k}'}", "peer_engine", order, dtype == "float32", fixed)


def jit_way(bundle: Path, pair: Pair, k: int, longest: int) -> Way:
    """The plain loop on the same programs."""
    order = JitOrder(str(bundle), str(pair.target), str(pair.draft), k, longest)
    return Way(f"jax.jit loop, K = {k}", "peer_jit", order, k=k)


def torch_ways(pair: Pair, assisted: bool) -> list[Way]:
    """Greedy `generate`, and with `assisted` its ways to guess that need no other weights. Raises BadInput."""
    check_torch()
    target = str(pair.target)
    orders = {"float32": TorchOrder(target, "float32"), "bfloat16": TorchOrder(target, "bfloat16")}
    if assisted:
        layers = read_target(read_config(pair.target)).decoder.layers
        orders["float32, prompt lookup"] = TorchOrder(target, "float32", lookup_tokens=LOOKUP_TOKENS)
        orders["float32, early exit"] = TorchOrder(target, "float32", exit_layer=max(1, int(EXIT * layers)))
        orders["bfloat16, prompt lookup"] = TorchOrder(target, "bfloat16", lookup_tokens=LOOKUP_TOKENS)
    return [Way(f"PyTorch {name}", "peer_torch", one, one.dtype == "float32") for name, one in orders.items()]


def check_torch() -> None:
    """Raises BadInput where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise BadInput("PyTorch is not installed: pip install 'dflash-aot[bench]', or leave it out: --notorch")


def choose_turns(data: str, count: int, width: int, tokens: int, pair: Pair, bundle: Path) -> list[Prompt]:
    """As `choose_prompts`; of a conversation all turns, each behind what the target answers to those before it.

    Raises BadInput, BadCheckpoint, PeerFailed.
    """
    ends = read_end_tokens(pair.target)
    with ExitStack() as stack:

        @functools.cache
        def open_plain() -> Peer:
            return stack.enter_context(engine_way(bundle, pair, 0).open())

        def answer(prompt: Prompt) -> list[int]:
            ((found,),) = open_plain().ask(Serve([[prompt]], tokens), Served).answers
            return [*itertools.takewhile(lambda token: token not in ends, found.token_ids)]

        return choose_prompts(data, count, width, pair, answer)


def open_ways(ways: Sequence[Way], stack: ExitStack, note: Note) -> list[tuple[Way, Peer]]:
    """Each with its process, which ends with the stack. Raises PeerFailed."""
    peers = []
    for way in ways:
        note(f"opening {way.name}")
        peers.append((way, stack.enter_context(way.open())))
    return peers


def name_tokens(token_ids: Sequence[int]) -> str:
    """The same for the same tokens, and short."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]


def find_disagreement(samples: Sequence[Mapping[str, Any]]) -> str:
    """Which ways gave a prompt other tokens than the first way did, "" if none; of samples with `exact`, `tokens`."""
    exact = [one for one in samples if one["exact"]]
    chosen = exact[0]["way"] if exact else ""  # to compare with, whoever began a prompt
    first: dict[int, Mapping[str, Any]] = {}
    wrong: dict[tuple[str, str], set[int]] = {}
    for one in sorted(exact, key=lambda one: one["way"] != chosen):
        reference = first.setdefault(one["prompt"], one)
        if one["tokens"] != reference["tokens"]:
            wrong.setdefault((one["way"], reference["way"]), set()).add(one["prompt"])
    return "; ".join(
        f"{way} gives other tokens than {reference} for prompts {', '.join(map(str, sorted(prompts)))}"
        for (way, reference), prompts in wrong.items()
    )


def find_compilation(samples: Sequence[Mapping[str, Any]]) -> str:
    """Which ways compiled while they served, "" if none; of samples that may have `compile_events`."""
    compiled = sorted({one["way"] for one in samples if one.get("compile_events")})
    return f"{', '.join(compiled)} compiled while serving" if compiled else ""


def make_slug(name: str) -> str:
    """A way's name as a figure's: engine_k7, jit_k7, torch_bfloat16_prompt_lookup."""
    short = name.lower().replace("jax.jit loop", "jit").replace("pytorch", "torch").replace(" = ", "")
    return re.sub(r"[^a-z0-9]+", "_", short).strip("_")
