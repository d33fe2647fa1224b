"""Time of one pass of the target against its rows: a verification of K + 1, a chunk of a prompt; beside PyTorch.

And beside the roofline: what the pass takes of memory and arithmetic, at the best that this machine was seen to do in
the same run. All ways are processes of their own that take turns; all kv and all weights are the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from dflash_aot.benchmarks.benchmark import Note, Sample
from dflash_aot.benchmarks.forward import BundleForward, Dtype, Forward, Forwarded, Peaked, Peaks, Program, TorchForward
from dflash_aot.benchmarks.kflat_findings import BUNDLE, TORCH, describe
from dflash_aot.benchmarks.pairs import Pair, choose_pair, ensure_bundle
from dflash_aot.benchmarks.peer import Peer
from dflash_aot.benchmarks.settings import setting
from dflash_aot.benchmarks.ways import Way, check_torch, find_disagreement, name_tokens, open_ways
from dflash_aot.cache.bundle.manifest import Manifest, read_manifest
from dflash_aot.cache.grid import Grid, make_grid
from dflash_aot.cache.locations import EMBEDDED
from dflash_aot.cache.model_config.architecture import Draft
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.compile.analysis.roofline import Roofline

__all__ = ["Settings", "describe", "find_fault", "measure"]
PEAK_CALLS = 3


@dataclass(frozen=True)
class Settings:
    """Which pair, which passes, beside what."""

    pair: str = setting(
        EMBEDDED,
        f"{EMBEDDED}, or random weights in the shapes of qwen3-0.6b or large; qwen3-0.6b-block256 allows k=255",
    )
    target: str | None = setting(None, "a target of your own instead: directory or hub id; needs --draft")
    draft: str | None = setting(None, "its draft")
    length: tuple[int, ...] = setting((256, 1024), "kv positions attended to, the rows themselves included", least=2)
    k: tuple[int, ...] = setting((), "of verifications; default: 0, 1, 3, 7 … as far as the draft's block goes")
    prefill: tuple[int, ...] = setting((64, 128, 256), "of chunks of a prompt", least=1)
    calls: int = setting(3, "of a pass at a time: the first one meets caches that others have used", least=2)
    repeats: int = setting(5, "rounds of turns", least=1)
    torch: bool = setting(True, "beside PyTorch")
    bfloat16: bool = setting(True, "in bfloat16, too")


@dataclass(frozen=True)
class Maker:
    """Whose pass it is."""

    name: str
    dtype: Dtype
    order: BundleForward | TorchForward

    @property
    def way(self) -> Way:
        module = "peer_bundle_forward" if isinstance(self.order, BundleForward) else "peer_torch_forward"
        return Way(f"{self.name}, {self.dtype}", module, self.order)


def measure(settings: Settings, scratch: Path, note: Note) -> Iterator[Sample]:
    """The "work" of each pass, then by repeat a "pass" of each way and its "peaks".

    Raises BadInput, BadCheckpoint, BuildFailed, PeerFailed.
    """
    pair = choose_pair(settings.pair, settings.target, settings.draft, scratch)
    target = read_target(read_config(pair.target))
    grid = choose_grid(settings, read_draft(read_config(pair.draft), target))
    text = np.random.default_rng(7).integers(0, target.decoder.vocab, grid.capacity).tolist()
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16") if settings.bfloat16 else ("float32",)
    bundles = {dtype: ensure_bundle(pair, str(grid), dtype, scratch, note) for dtype in dtypes}
    for bundle in bundles.values():
        yield from list_work(read_manifest(bundle))
    makers = list_makers(pair, bundles, text, settings.torch)
    with ExitStack() as stack:
        opened = open_ways([maker.way for maker in makers], stack, note)
        peers = [(maker, peer) for maker, (_, peer) in zip(makers, opened, strict=True)]
        for _ in take_passes(peers, grid, 1):  # what is done for the first time counts for nobody
            pass
        for repeat in range(settings.repeats):
            note(f"repeat {repeat + 1} of {settings.repeats}")
            for sample in (*take_passes(peers, grid, settings.calls), *take_peaks(peers)):
                yield sample | {"repeat": repeat}


def choose_grid(settings: Settings, draft: Draft) -> Grid:
    """One row, and all that is asked for. Raises BadInput."""
    ks = settings.k or tuple(2**power - 1 for power in range(draft.block.bit_length()))
    axes = {"batch": (1,), "length": settings.length, "k": ks, "prefill": settings.prefill}
    return make_grid(axes, draft.block, "--length, --k and --prefill")


def list_passes(grid: Grid) -> list[tuple[Program, int, int]]:
    """Program, rows and length of each."""
    passes: list[tuple[Program, int, int]] = [("verify", one.k + 1, one.length) for one in grid.buckets()]
    passes += [("prefill", one.prefill, one.length) for one in grid.chunks()]
    return passes


def list_work(manifest: Manifest) -> Iterator[Sample]:
    """Bytes and operations of each pass, by `compile.roofline`."""
    roofline = Roofline(manifest.target.facts, manifest.draft.facts, manifest.dtype, manifest.grid)
    for signature in (entry.signature for entry in manifest.entries):
        if signature.program in get_args(Program):
            work, sizes = roofline.cost(signature), signature.bucket
            rows = sizes["prefill"] if signature.program == "prefill" else sizes["k"] + 1
            place = {"program": signature.program, "rows": rows, "length": sizes["length"]}
            facts = {"bytes": work.bytes, "flops": work.flops}
            yield {"kind": "work", "way": "roofline", "dtype": manifest.dtype, **place, **facts}


def list_makers(pair: Pair, bundles: Mapping[Dtype, Path], text: list[int], torch: bool) -> list[Maker]:
    """Ours, and PyTorch's. Raises BadInput where that is not installed."""
    target, draft = str(pair.target), str(pair.draft)
    makers = [
        Maker(BUNDLE, dtype, BundleForward(str(bundle), target, draft, text)) for dtype, bundle in bundles.items()
    ]
    if torch:
        check_torch()
        makers += [Maker(TORCH, dtype, TorchForward(target, dtype, text)) for dtype in bundles]
    return makers


def take_passes(peers: Sequence[tuple[Maker, Peer]], grid: Grid, calls: int) -> Iterator[Sample]:
    """Every pass, of everybody in turn. first_us: of the first call; us: of those behind it."""
    for number, (program, rows, length) in enumerate(list_passes(grid)):
        for maker, peer in peers:
            found = peer.ask(Forward(program, rows, length, calls), Forwarded)
            first, *later = (round(1e6 * one, 1) for one in found.seconds)
            yield {
                "kind": "pass",
                "way": maker.name,
                "dtype": maker.dtype,
                "program": program,
                "rows": rows,
                "length": length,
                "first_us": first,
                "us": later,
                "prompt": number,
                "exact": maker.dtype == "float32",
                "tokens": name_tokens(found.token_ids),
            }


def take_peaks(peers: Sequence[tuple[Maker, Peer]]) -> Iterator[Sample]:
    """What each could get out of the machine."""
    for maker, peer in peers:
        peaked = peer.ask(Peaks(PEAK_CALLS), Peaked)
        yield {
            "kind": "peaks",
            "way": maker.name,
            "dtype": maker.dtype,
            "bytes_per_second": [round(one) for one in peaked.bytes_per_second],
            "flops_per_second": [round(one) for one in peaked.flops_per_second],
        }


def find_fault(samples: Sequence[Sample]) -> str:
    """Exact ways that choose other tokens."""
    return find_disagreement([one for one in samples if one["kind"] == "pass"])
