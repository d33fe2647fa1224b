"""dflash-bench sampling: how many drafted tokens sampling accepts, with a draft that draws and with one that does not.

Both use the same noise for the target, so both generate the same texts. Beside them stands the overlap of the two
distributions, Σ min(target, draft): no draft whose tokens have the draft's distribution is accepted more often. The
likeliest token may be, where the draft is less certain than the target. Requests with top_k, top_p, min_p or
penalties are measured with a draft that keeps to them and with one that does not. The draft program that can draw is
timed beside the one that cannot.

B rows · T positions of a text · K drafted tokens · V vocabulary · F width of the features
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_aot.benchmarks import contenders, tables
from dflash_aot.benchmarks.estimates import choose
from dflash_aot.benchmarks.quality_bench import read_text
from dflash_aot.benchmarks.record import ProgressNote, Record, Sample, setting
from dflash_aot.cache.bundle.weight_recipe import CheckpointRole
from dflash_aot.cache.devices import select_jax_platforms
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.model_config.config_file import read_config
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.target import read_target
from dflash_aot.cache.sampling_state import NEUTRAL_SAMPLING, SAMPLING_COLUMNS
from dflash_aot.cache.signature import Signature, state_arrays
from dflash_aot.compile.models.attention import attend
from dflash_aot.compile.models.causal_lm import CausalLM
from dflash_aot.compile.models.dflash import DFlash
from dflash_aot.compile.models.layers import WeightKind
from dflash_aot.compile.models.parameters import AbstractModel, Model
from dflash_aot.compile.models.sliding_window import block_mask, context_mask
from dflash_aot.compile.programs.programs import Programs
from dflash_aot.compile.programs.sampling import PENALTIES
from dflash_aot.runtime.weights.weight_loader import load_weights

PROMPT = 8  # random tokens before each text
CONTENDERS = {"drawn": True, "likeliest": False}
UNLIMITED = "drawn without limits"
LIMITED_REQUESTS = (
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
)
LIMIT_COLUMNS = ("top_k", "top_p", "min_p")
DRAWING, NOT_DRAWING = "draws", "cannot draw"  # draft programs that are timed
TIMED_CALLS = 40  # of each, in turns
Request = Mapping[str, float]  # sampling parameters


@dataclass(frozen=True)
class Settings(contenders.PairSettings):
    """Flags of `dflash-bench sampling`."""

    temperatures: tuple[float, ...] = setting((0.3, 0.7, 1.0), "temperatures", least=0.01)
    texts: int = setting(32, "texts for each temperature", least=1)
    tokens: int = setting(160, "tokens of a text", least=32)
    limits: bool = setting(True, "requests with limits and penalties too, and the time of the draft program")


class Sampler:
    """The programs of a pair on a CPU, in float32, with all texts in one batch."""

    def __init__(self, settings: Settings, pair: contenders.BenchmarkPair):
        places: dict[CheckpointRole, Path] = {"target": pair.target, "draft": pair.draft}
        target = read_target(read_config(places["target"]))
        self.draft = read_draft(read_config(places["draft"]), target)
        self.rows, self.k, self.tokens = settings.texts, self.draft.block - 1, settings.tokens
        length = -(-(settings.tokens + 2 * self.draft.block) // 16) * 16
        self.limit = length - self.draft.block
        self.bucket = f"batch={self.rows} length={length} k={self.k}"
        self.grid = parse_grid(f"{self.bucket} prefill=16", self.draft.block)
        programs = Programs(target, self.draft, "float32", sampling=("sample",))
        self._greedy = Programs(target, self.draft, "float32", sampling=("greedy",))
        self.vocab, self._known = target.decoder.vocab, state_arrays(programs.pair, self.grid)
        self._signatures = {one.label: one for one in programs.list_signatures(self.grid)}
        self._jitted = {label: jax.jit(programs.function(one)) for label, one in self._signatures.items()}
        self._weights = load_weights(programs.recipes(), places, jax.devices("cpu")[:1])
        self._arrays: dict[str, Any] = {}
        self._target = _bind(AbstractModel(lambda: CausalLM(target, WeightKind("float32"))), "target", self._weights)
        self._draft = _bind(AbstractModel(lambda: DFlash(self.draft, WeightKind("float32"))), "draft", self._weights)

    def run_texts(self, asked: Request, draws: bool, limited: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Generates all texts: tokens [B, T], and (text, first position, accepted tokens) of each round [rounds, 3].

        Unless `limited`, the draft does not know of top_k, top_p, min_p and penalties.
        """
        prompts, penalised = self._start(asked), any(name in PENALTIES for name in asked)
        known = self._arrays["sampling"]
        unlimited = known
        for name in LIMIT_COLUMNS:
            unlimited = unlimited.at[:, SAMPLING_COLUMNS.index(name)].set(NEUTRAL_SAMPLING[name])
        texts = np.zeros((self.rows, self.limit + self.k + 1), np.int32)
        texts[:, :PROMPT], rounds = prompts, []
        while (active := np.asarray(self._arrays["lengths"]) < self.limit - 1).any():
            pages = {"pages": self.grid.separate_tables(range(self.rows))}
            self._arrays["sampling"] = known if limited else unlimited
            self._run(f"draft {self.bucket}", sampled=[draws], penalised=[limited and penalised], **pages)
            self._arrays["sampling"] = known
            verified = self._run(f"sampled_verify {self.bucket}", active=active, **pages)
            self._run(f"kv_write rows={self.rows} width={self.k + 1}", **pages)
            starts, verdict = np.asarray(verified["starts"]), np.asarray(verified["verdict"])
            for row in np.flatnonzero(active):
                accepted = verdict[row, 0]
                chosen = verdict[row, self.k + 1 : self.k + accepted + 2]
                texts[row, starts[row] + 1 : starts[row] + accepted + 2] = chosen
                rounds.append((row, starts[row], accepted))
        return texts, np.array(rounds)

    def list_overlaps(self, texts: np.ndarray, rounds: np.ndarray, temperature: float) -> list[list[float]]:
        """Σ min(target, draft) at each position that a round reached: the accepted ones and the next."""
        models, found = (self._target, self._draft), [[0.0]] * len(rounds)
        for row, text in enumerate(texts):
            likely, features = find_distribution(self._target, text[None], self.draft.target_layer_ids, temperature)
            for index in np.flatnonzero(rounds[:, 0] == row):
                _, start, accepted = rounds[index]
                block, reached = text[start : start + self.k + 1], min(accepted + 1, self.k)
                shared = overlap(models, features, likely[0], block, np.int32(start), np.float32(temperature))
                found[index] = np.asarray(shared)[:reached].tolist()
        return found

    def time_drafts(self) -> Iterator[Sample]:
        """Seconds of each call of the draft program with and without drawing, in turns, after `run_texts`."""
        label = f"draft {self.bucket}"
        (greedy,) = (one for one in self._greedy.list_signatures(self.grid) if one.label == label)
        programs = {
            DRAWING: (self._signatures[label], self._jitted[label]),
            NOT_DRAWING: (greedy, jax.jit(self._greedy.function(greedy))),
        }
        given = {"pages": self.grid.separate_tables(range(self.rows)), "sampled": [True], "penalised": [False]}
        calls = {name: (function, self._collect(one, given)) for name, (one, function) in programs.items()}
        for function, inputs in calls.values():
            jax.block_until_ready(function(inputs))
        for _ in range(TIMED_CALLS):
            for name, (function, inputs) in calls.items():
                began = time.perf_counter()
                jax.block_until_ready(function(inputs))
                yield {"kind": "timing", "way": name, "rows": self.rows, "seconds": time.perf_counter() - began}

    def _start(self, asked: Request) -> np.ndarray:
        """Random prompts [B, PROMPT] in all slots, each with its own seed."""
        self._arrays = {one.name: jnp.zeros(one.shape, one.dtype) for one in self._known}
        columns = {**NEUTRAL_SAMPLING, **asked}
        prompts = np.random.default_rng(0).integers(0, self.vocab, (self.rows, PROMPT))
        for slot, prompt in enumerate(prompts):
            place: dict[str, Any] = {"pages": self.grid.separate_tables([slot]), "starts": [0]}
            tokens = [[*prompt[:-1], *[0] * (16 - PROMPT + 1)]]
            chunk = f"prefill prefill=16 length={self.grid.capacity}"
            self._run(chunk, tokens=tokens, counts=[PROMPT - 1], gives_first=[False], slots=[slot], **place)
            self._run("kv_write rows=1 width=16", **place)
            self._run(
                "admit",
                slots=[slot],
                starts=[PROMPT - 1],
                anchor=[prompt[-1]],
                slot_sampling=[[columns[name] for name in SAMPLING_COLUMNS]],
                slot_seeds=[[0, slot]],
                slot_bias=np.zeros((1, self.vocab)),
                slot_prompted=np.zeros((1, self.vocab)),
                slot_counts=np.zeros((1, self.vocab)),
                slot_tops=[0],
            )
        return prompts

    def _run(self, label: str, **given: Any) -> dict[str, Any]:
        """Calls a program on the state, on `given`, and on the results of earlier programs."""
        found = self._jitted[label](self._collect(self._signatures[label], given))
        self._arrays |= found
        return found

    def _collect(self, signature: Signature, given: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The inputs of a program."""
        inputs = {name: self._weights[name] for name in signature.weights}
        inputs |= {name: self._arrays[name] for name in signature.state}
        for one in signature.arguments:
            inputs[one.name] = jnp.asarray(given.get(one.name, self._arrays.get(one.name)), one.dtype)
        return inputs


def _bind(parameters: AbstractModel[Model], role: str, weights: Mapping[str, jax.Array]) -> Model:
    return parameters.bind({name: weights[f"{role}.{name}"] for name in parameters.shapes()})


@partial(jax.jit, static_argnames=("layer_ids", "temperature"))
def find_distribution(
    target: CausalLM, text: jax.Array, layer_ids: tuple[int, ...], temperature: float
) -> tuple[jax.Array, jax.Array]:
    """The target's distribution behind each token of a text [1, T], [1, T, V], and the features [1, T, F]."""
    logits, features = read_text(target, text, layer_ids)
    return jax.nn.softmax(logits / temperature), features


@jax.jit
def overlap(
    models: tuple[CausalLM, DFlash],
    features: jax.Array,
    likely: jax.Array,
    block: jax.Array,
    start: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    """Σ min(target, draft) at the K positions behind `start`, [K]. The draft's distribution is over its candidates.

    Args:
        models: target and draft.
        features: [1, T, F] of the text; those from `start` on are hidden from the draft.
        likely: the target's distributions, [T, V].
        block: the text's own tokens from `start` on, [K+1]: the draft's candidates are scored after them.
        start: position of the anchor.
        temperature: of both distributions.
    """
    target, draft = models
    facts, K = draft.draft, block.size - 1
    at, past = start + jnp.arange(K + 1)[None], jnp.arange(features.shape[1])[None]
    context: list[tuple[jax.Array, jax.Array]] = draft.write_context(
        features, past, lambda kv, layer, k, v: [*kv, (k, v)], []
    )

    def attend_both(layer: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        window = facts.windows[layer]
        seen = (past < start)[:, None] & context_mask(window, at, past)
        return attend(q, (*context[layer], seen), (k, v, block_mask(window, at)))

    ids = jnp.where(jnp.arange(K + 1) == 0, block[0], facts.mask_token)[None]
    hidden = draft.block_hidden(draft.embed(ids, target), at, attend_both)
    p = jax.lax.dynamic_slice_in_dim(likely, start, K)
    tokens, scores = draft.score_candidates(hidden, block[:1], target, K)
    before = jnp.argmax(tokens[0, :-1] == block[1:K, None], axis=-1)
    before = jnp.concatenate([jnp.full(1, tokens.shape[-1] - 1, before.dtype), before])
    before = jnp.minimum(before, scores.shape[2] - 1)  # without a selector, scores do not depend on it
    q = jax.nn.softmax(scores[0, jnp.arange(K), before] / temperature)
    return jnp.minimum(jnp.take_along_axis(p, tokens[0], axis=-1), q).sum(axis=-1)


def measure(settings: Settings, scratch: Path, note: ProgressNote) -> Iterator[Sample]:
    """A sample for each request and contender: of each round, the accepted tokens and the overlaps.

    Then one for each timed call of the draft program. Raises BadInput, BadCheckpoint.
    """
    select_jax_platforms("cpu")
    sampler = Sampler(settings, contenders.choose_pair(settings, scratch))
    plain: list[Request] = [{"temperature": temperature} for temperature in settings.temperatures]
    for asked in [*plain, *(LIMITED_REQUESTS if settings.limits else ())]:
        texts = {name: sampler.run_texts(asked, draws) for name, draws in CONTENDERS.items()}
        if len(asked) > 1:
            texts[UNLIMITED] = sampler.run_texts(asked, draws=True, limited=False)
        same = all(
            (tokens[:, : sampler.limit] == texts["drawn"][0][:, : sampler.limit]).all() for tokens, _ in texts.values()
        )
        for name, (tokens, rounds) in texts.items():
            accepted = rounds[:, 2].tolist()
            note(f"{describe_request(asked)}, {name}: {len(accepted)} rounds, {np.mean(accepted):.2f} accepted")
            overlapping = name == "drawn" and len(asked) == 1
            overlaps = sampler.list_overlaps(tokens, rounds, asked["temperature"]) if overlapping else []
            facts: Sample = {"kind": "texts", "asked": dict(asked), "way": name, "k": sampler.k, "same": bool(same)}
            yield {**facts, "accepted": accepted, "overlaps": overlaps}
    if settings.limits:
        yield from sampler.time_drafts()


def describe_request(asked: Request) -> str:
    """ "temperature 0.7, top_k 20"."""
    return ", ".join(f"{name} {value:g}" for name, value in asked.items())


def find_fault(samples: Sequence[Sample]) -> str:
    """Texts that depend on how the draft draws."""
    same = all(one["same"] for one in choose(samples, kind="texts"))
    return "" if same else "drawn and greedy drafts gave different texts"


def make_findings(record: Record) -> tables.Findings:
    """A row for each request and contender: tokens per round, acceptance at each position; and the time of drawing."""
    rows: list[tuple[Any, ...]] = []
    for one in choose(record.samples, kind="texts"):
        accepted = np.array(one["accepted"])
        reached = [np.mean(accepted[accepted >= at] > at) if (accepted >= at).any() else None for at in range(one["k"])]
        request = describe_request(one["asked"])
        rows.append((request, one["way"], len(accepted), np.mean(accepted), reached))
        if one["overlaps"]:
            columns = [[each[at] for each in one["overlaps"] if len(each) > at] for at in range(one["k"])]
            rows.append((request, "overlap", "", None, [np.mean(each) if each else None for each in columns]))
    header = ("request", "draft", "rounds", "accepted", *(str(at + 1) for at in range(len(rows[0][-1]))))
    cells = tuple(
        (request, name, str(count), *(map(_show, (mean, *reached)))) for request, name, count, mean, reached in rows
    )
    note = (
        "Accepted: drafted tokens per round. 1, 2, …: acceptance at each position, of the rounds that accepted all "
        "before it. Overlap: Σ min(target, draft) there."
    )
    found = [tables.Table("acceptance", "Sampling", header, cells, note)]
    timed = choose(record.samples, kind="timing")
    if timed:
        found.append(tabulate_times(timed))
    return tables.Findings(tuple(found))


def tabulate_times(timed: Sequence[Mapping[str, Any]]) -> tables.Table:
    """Medians of both draft programs, and the median of the ratios of calls that were measured side by side."""
    drawing, plain = ([one["seconds"] for one in choose(timed, way=name)] for name in (DRAWING, NOT_DRAWING))
    ratio = np.median(np.array(drawing) / plain)
    row = (str(timed[0]["rows"]), *(f"{np.median(one) * 1e3:.3g}" for one in (plain, drawing)), f"{ratio:.2f}")
    header = ("rows", f"{NOT_DRAWING}, ms", f"{DRAWING}, ms", "ratio")
    return tables.Table(
        "drawing", "The draft program", header, (row,), "Medians; the ratio is that of neighbouring calls."
    )


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
