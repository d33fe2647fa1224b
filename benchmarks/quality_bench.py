"""dflash-bench quality: what int8 weights cost in quality: agreement of the next token, KL divergence, and τ.

Both models read the same held-out text. τ is counted over answers that each contender generates greedily. Nothing is
timed, so other programs on the machine do not change the figures.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_aot.benchmarks import contenders, tables
from dflash_aot.benchmarks.estimates import Samples, choose, group_by
from dflash_aot.benchmarks.record import ProgressNote, Record, Sample, setting
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.cache.bundle.weight_recipe import PLAIN, WeightFormats
from dflash_aot.cache.devices import attached_devices
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.model_config.architecture import Target
from dflash_aot.compile.models.attention import attend
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.layers import WeightKind
from dflash_aot.compile.models.parameters import AbstractModel
from dflash_aot.compile.models.recurrent_state import read_layer
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.weights.weight_loader import load_weights

FORMATS = {
    "plain": PLAIN,
    "int8 target": WeightFormats(target="int8"),
    "int8 draft": WeightFormats(draft="int8"),
    "int8": WeightFormats(target="int8", draft="int8"),
}


@dataclass(frozen=True)
class Settings(contenders.PairSettings):
    """Flags of `dflash-bench quality`."""

    buckets: str = setting("batch=1 length=256 k=7 prefill=64", "the grid; τ is that of the largest k")
    data: str = setting(contenders.HELD_OUT, "the texts, see dflash-bench data")
    prompts: int = setting(24, "number of texts", least=1)
    prompt_tokens: int = setting(64, "of a text, the tokens that are the prompt of an answer", least=1)
    text_tokens: int = setting(192, "of a text, the tokens whose successors are compared", least=1)
    max_tokens: int = setting(128, "new tokens per prompt", least=2)


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """A "text" for each text and format of the target, a "rounds" for each prompt and contender.

    Raises BadInput, BadCheckpoint, BuildFailed, GridMiss.
    """
    pair = contenders.choose_pair(settings, scratch)
    bundles = {
        name: contenders.ensure_bundle(pair, settings.buckets, "float32", scratch, note, formats=formats)
        for name, formats in FORMATS.items()
    }
    manifest = read_manifest(bundles["plain"])
    if settings.text_tokens > (most := manifest.target.facts.decoder.positions):
        raise BadInput(f"--text_tokens {settings.text_tokens}: the target has {most} positions")
    texts = contenders.choose_prompts(settings.data, settings.prompts, settings.text_tokens, pair)
    note("logits of the texts")
    plain, int8 = (read_logits(bundles[name], pair, texts) for name in ("plain", "int8 target"))
    for number, (one, other) in enumerate(zip(plain, int8, strict=True)):
        yield {"kind": "text", "text": number, **compare_logits(one, other)}
    for name, bundle in bundles.items():
        note(f"answers: {name}")
        with Engine.open(bundle, target=pair.target, draft=pair.draft, k=manifest.grid.k[-1]) as engine:
            for number, text in enumerate(texts):
                params = SamplingParams(max_tokens=settings.max_tokens)
                result = engine.generate(text[: settings.prompt_tokens], params)
                counts = {"rounds": len(result.accepted), "accepted": sum(result.accepted)}
                yield {"kind": "rounds", "way": name, "prompt": number, **counts}


def read_logits(bundle: Path, pair: contenders.BenchmarkPair, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The target's logits for each text, float32 [T, V], with the weights as the bundle takes them."""
    manifest = read_manifest(bundle)
    target, kind = manifest.target.facts, WeightKind(manifest.dtype, manifest.formats.target)
    recipes = [recipe for recipe in manifest.weights if recipe.checkpoint == "target"]
    weights = load_weights(recipes, {"target": pair.target}, attached_devices(manifest.environment.platform, 1))
    run = make_forward(target, kind)
    return [np.asarray(run(weights, jnp.asarray([text]))[0]) for text in texts]


def make_forward(target: Target, kind: WeightKind) -> jax.stages.Wrapped:
    """A jitted function: weights by name, ids [1, T] → logits [1, T, V] of a whole text, without kv cache."""
    model = AbstractModel(lambda: CausalLM(target, kind))

    def forward(weights: Mapping[str, jax.Array], ids: jax.Array) -> jax.Array:
        bound = model.bind({name.removeprefix("target."): array for name, array in weights.items()})
        return read_text(bound, ids)[0]

    return jax.jit(forward)


def read_text(target: CausalLM, text: jax.Array, layer_ids: Sequence[int] = ()) -> tuple[jax.Array, jax.Array]:
    """The target over a whole text [1, T] without kv cache: logits [1, T, V], and features [1, T, F] of `layer_ids`."""
    positions = jnp.arange(text.shape[1])[None]
    mask = positions[:, None] <= positions[..., None]
    hidden, features, _ = target.forward(
        text,
        positions,
        layer_ids,
        None,
        attend=lambda kv, _, q, k, v: (attend(q, (k, v, mask)), kv),
        mix=lambda kv, _, mixer, x: (read_layer(mixer, x), kv),
    )
    return target.logits(hidden), features


def compare_logits(plain: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Positions, those with the same likeliest token, and the mean KL divergence from plain to other, in nats."""
    first, second = (logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True) for logits in (plain, other))
    divergence = (np.exp(first) * (first - second)).sum(axis=-1)
    same = int((plain.argmax(axis=-1) == other.argmax(axis=-1)).sum())
    return {"positions": len(plain), "same": same, "divergence": float(divergence.mean())}


def find_fault(samples: Sequence[Sample]) -> str:
    """Missing samples."""
    return "" if samples else "nothing was compared"


def make_findings(record: Record) -> tables.Findings:
    """Agreement and divergence of the target, and τ of each contender."""
    texts, rounds = choose(record.samples, kind="text"), choose(record.samples, kind="rounds")
    agreement = sum(one["same"] for one in texts) / sum(one["positions"] for one in texts)
    divergence = float(np.mean([one["divergence"] for one in texts]))
    positions = str(sum(one["positions"] for one in texts))
    logits = tables.Table(
        "logits",
        "The next token, int8 against plain weights",
        ("positions", "same next token", "mean KL, nats"),
        ((positions, f"{agreement:.2%}", f"{divergence:.5f}"),),
    )
    yields = {name: find_yield(chosen) for (name,), chosen in group_by(rounds, "way").items()}
    rows = tuple((name, f"{value:.3f}", f"{value / yields['plain']:.3f}") for name, value in yields.items())
    taus = tables.Table(
        "tau",
        "Tokens per round",
        ("weights", "τ", "of plain"),
        rows,
        "Greedy answers to the same prompts; each contender generates its own text.",
    )
    return tables.Findings((logits, taus))


def find_yield(rounds: Samples) -> float:
    """Tokens per round."""
    count = sum(one["rounds"] for one in rounds)
    return (sum(one["accepted"] for one in rounds) + count) / count
