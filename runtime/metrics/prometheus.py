"""What the engine counts, as Prometheus metrics: read at the scrape, never in the engine's loop.

What vLLM counts too has vLLM's name, meaning and label (vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py);
the rest is called `dflash:…`. Samples of counters end in `_total`. All of them: docs/metrics.md.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dflash_aot.runtime.metrics.counters import Counters
from dflash_aot.runtime.metrics.histogram import BUCKET_BOUNDS_SECONDS, Histogram
from dflash_aot.runtime.requests.request import FinishReason

# vLLM's words for ours.
FINISHED_REASONS: Mapping[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
}


@dataclass(frozen=True)
class ScalarMetric:
    """One number. Of which kind, its subclasses say."""

    kind: ClassVar[type[CounterMetricFamily] | type[GaugeMetricFamily]]
    name: str
    meaning: str
    read: Callable[[Counters], float]

    def family(self, counters: Counters, model_name: str) -> Metric:
        family = self.kind(self.name, self.meaning, labels=["model_name"])
        family.add_metric([model_name], self.read(counters))
        return family


class CounterMetric(ScalarMetric):
    """It only grows while the engine lives."""

    kind = CounterMetricFamily


class GaugeMetric(ScalarMetric):
    """How many there are at the moment."""

    kind = GaugeMetricFamily


@dataclass(frozen=True)
class LabelledCounterMetric:
    """A count for each value of its labels."""

    name: str
    meaning: str
    labels: tuple[str, ...]
    read: Callable[[Counters], Mapping[tuple[str, ...], float]]

    def family(self, counters: Counters, model_name: str) -> Metric:
        family = CounterMetricFamily(self.name, self.meaning, labels=["model_name", *self.labels])
        for values, number in self.read(counters).items():
            family.add_metric([model_name, *values], number)
        return family


@dataclass(frozen=True)
class HistogramMetric:
    """Durations in seconds, by size."""

    name: str
    meaning: str
    read: Callable[[Counters], Histogram]

    def family(self, counters: Counters, model_name: str) -> Metric:
        histogram = self.read(counters)
        bounds = map(floatToGoString, (*BUCKET_BOUNDS_SECONDS, math.inf))
        buckets = [*zip(bounds, accumulate(histogram.counts), strict=True)]
        family = HistogramMetricFamily(self.name, self.meaning, labels=["model_name"])
        family.add_metric([model_name], buckets, histogram.total)
        return family


def count_drafts(counters: Counters) -> int:
    """One per row and round with K > 0: every one of them verified a first position."""
    return counters.verified_at[0] if counters.verified_at else 0


def count_accepted_at(counters: Counters) -> dict[tuple[str, ...], float]:
    """By position in the draft, from 0; a position is there from its first draft on."""
    return {(str(position),): accepted for position, accepted in enumerate(counters.accepted_at)}


def count_finished(counters: Counters) -> dict[tuple[str, ...], float]:
    """Reasons that nobody had yet are there too: a rate needs a zero to begin at."""
    return {(word,): counters.finished.get(reason, 0) for reason, word in FINISHED_REASONS.items()}


def count_bucket_rounds(counters: Counters) -> dict[tuple[str, ...], float]:
    return {
        (str(bucket.batch), str(bucket.length), str(bucket.k), str(sampled).lower()): rounds
        for (bucket, sampled), rounds in sorted(counters.bucket_rounds.items())
    }


def count_rows(counters: Counters) -> int:
    return sum(bucket.batch * rounds for (bucket, _), rounds in counters.bucket_rounds.items())


METRICS: tuple[ScalarMetric | LabelledCounterMetric | HistogramMetric, ...] = (
    # -- vLLM's
    CounterMetric("vllm:spec_decode_num_drafts", "Drafts: one per request and round that verified any.", count_drafts),
    CounterMetric("vllm:spec_decode_num_draft_tokens", "Drafted tokens that were verified.", lambda c: c.drafted),
    CounterMetric("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", lambda c: c.accepted),
    LabelledCounterMetric(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were accepted, by position in the draft, from 0.",
        ("position",),
        count_accepted_at,
    ),
    GaugeMetric("vllm:num_requests_running", "Requests in slots.", lambda c: c.running),
    GaugeMetric("vllm:num_requests_waiting", "Requests in line for a slot.", lambda c: c.waiting),
    CounterMetric("vllm:prompt_tokens", "Prompt tokens.", lambda c: c.prompt_tokens),
    CounterMetric("vllm:generation_tokens", "Tokens of answers.", lambda c: c.output_tokens),
    LabelledCounterMetric("vllm:request_success", "Requests that have ended.", ("finished_reason",), count_finished),
    HistogramMetric("vllm:time_to_first_token_seconds", "From submission to the first token.", lambda c: c.first_token),
    HistogramMetric(
        "vllm:request_time_per_output_token_seconds",
        "Mean time between a request's tokens, from the first on.",
        lambda c: c.per_token,
    ),
    HistogramMetric("vllm:request_queue_time_seconds", "From submission to a slot.", lambda c: c.queued),
    HistogramMetric("vllm:e2e_request_latency_seconds", "From submission to the end.", lambda c: c.latency),
    # -- ours
    CounterMetric("dflash:rounds", "Rounds: calls of a verify executable.", lambda c: c.rounds),
    LabelledCounterMetric(
        "dflash:bucket_rounds",
        "Rounds by bucket and whether they sampled.",
        ("batch", "length", "k", "sampled"),
        count_bucket_rounds,
    ),
    CounterMetric("dflash:rows", "Rows that rounds computed: the batch of their buckets.", count_rows),
    CounterMetric("dflash:row_rounds", "Rows of rounds whose verdict a request took.", lambda c: c.row_rounds),
    CounterMetric("dflash:padded_rows", "Rows of rounds that no request had.", lambda c: c.padded_rows),
    CounterMetric("dflash:prefill_chunks", "Prefill chunks.", lambda c: c.prefill_chunks),
    CounterMetric(
        "dflash:padded_prefill_positions",
        "Positions of prefill chunks behind their prompts.",
        lambda c: c.padded_prefill,
    ),
    CounterMetric("dflash:moves", "Moves of a request to another slot.", lambda c: c.moves),
    GaugeMetric("dflash:slots", "Slots: requests that can run at once.", lambda c: c.slots),
    GaugeMetric("dflash:executables", "Executables that serve, loaded or not.", lambda c: c.executables),
    GaugeMetric("dflash:executables_loaded", "Those that are loaded.", lambda c: c.loaded),
    CounterMetric("dflash:refused_requests", "Requests that were not let in line.", lambda c: c.refused),
    CounterMetric("dflash:executable_failures", "Calls of executables that failed.", lambda c: c.failures),
    CounterMetric(
        "dflash:compile_events", "Traces and compiles on the engine's thread: 0 in health.", lambda c: c.compile_events
    ),
    CounterMetric("dflash:host_seconds", "Processor time of the engine's thread.", lambda c: c.host_seconds),
    CounterMetric(
        "dflash:host_wall_seconds",
        "Time in the engine's steps, waits for the device left out.",
        lambda c: c.host_wall_seconds,
    ),
    CounterMetric("dflash:wait_seconds", "Time the engine's thread waited for the device.", lambda c: c.wait_seconds),
)


class StatsCollector(Collector):
    """Turns a snapshot into samples, at every scrape a new one.

    stats: gives it; called in the thread of whoever scrapes, once per scrape, so that the samples of one scrape belong
        together. `Engine.stats` is one.
    model_name: the value of the label of that name, any text.
    """

    def __init__(self, stats: Callable[[], Counters], model_name: str):
        self._stats, self._model_name = stats, model_name

    def collect(self) -> Iterator[Metric]:
        return self._families(self._stats())

    def describe(self) -> Iterator[Metric]:
        """The names, for a registry that holds other collectors too; asks no engine."""
        return self._families(Counters())

    def _families(self, counters: Counters) -> Iterator[Metric]:
        return (metric.family(counters, self._model_name) for metric in METRICS)


def make_registry(stats: Callable[[], Counters], model_name: str) -> CollectorRegistry:
    """A registry of one engine's metrics and nothing else; what it takes: see StatsCollector."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(stats, model_name))
    return registry
