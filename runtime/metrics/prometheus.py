"""Prometheus metrics of an engine's counters, read at each scrape and never in the engine's loop.

Metrics that vLLM has too have vLLM's name, meaning and labels (vllm/v1/metrics/loggers.py,
vllm/v1/spec_decode/metrics.py); the others are called `dflash:…`. Samples of counters end in `_total`. docs/metrics.md
lists all metrics.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dflash_aot.runtime.metrics.counters import BUCKET_BOUNDS_SECONDS, Counters, Histogram
from dflash_aot.runtime.requests.request import FinishReason

# vLLM's names of our finish reasons.
FINISHED_REASONS: Mapping[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
}


@dataclass(frozen=True)
class ScalarMetric:
    """A metric with one sample; subclasses choose its type.

    Attributes:
        name: of the metric, without `_total`.
        meaning: the HELP text.
        read: returns the value.
    """

    kind: ClassVar[type[CounterMetricFamily] | type[GaugeMetricFamily]]
    name: str
    meaning: str
    read: Callable[[Counters], float]

    def family(self, counters: Counters, model_name: str) -> Metric:
        family = self.kind(self.name, self.meaning, labels=["model_name"])
        family.add_metric([model_name], self.read(counters))
        return family


class CounterMetric(ScalarMetric):
    """A value that only grows while the engine lives."""

    kind = CounterMetricFamily


class GaugeMetric(ScalarMetric):
    """A value at the moment of the scrape."""

    kind = GaugeMetricFamily


@dataclass(frozen=True)
class LabelledCounterMetric:
    """A counter with one sample for each combination of label values.

    Attributes:
        name: of the metric, without `_total`.
        meaning: the HELP text.
        labels: names of the labels, `model_name` left out.
        read: returns the value by label values.
    """

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
    """A histogram of durations in seconds.

    Attributes:
        name: of the metric.
        meaning: the HELP text.
        read: returns the histogram.
    """

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
    """Drafts: rows of rounds with K > 0, each of which verified the first position."""
    return counters.verified_at[0] if counters.verified_at else 0


def list_by_position(counts: Sequence[int]) -> dict[tuple[str, ...], float]:
    """Counts by position in the draft, from 0; a position appears with its first draft."""
    return {(str(position),): count for position, count in enumerate(counts)}


def count_finished(counters: Counters) -> dict[tuple[str, ...], float]:
    """Ended requests by reason. Reasons without a request are 0: a rate needs a first sample."""
    return {(word,): counters.finished.get(reason, 0) for reason, word in FINISHED_REASONS.items()}


def count_bucket_rounds(counters: Counters) -> dict[tuple[str, ...], float]:
    return {
        (str(bucket.batch), str(bucket.length), str(bucket.k), str(sampled).lower()): rounds
        for (bucket, sampled), rounds in sorted(counters.bucket_rounds.items())
    }


def count_rows(counters: Counters) -> int:
    return sum(bucket.batch * rounds for (bucket, _), rounds in counters.bucket_rounds.items())


METRICS: tuple[ScalarMetric | LabelledCounterMetric | HistogramMetric, ...] = (
    # -- metrics that vLLM has too
    CounterMetric(
        "vllm:spec_decode_num_drafts",
        "Drafts: one per request and round that verified drafted tokens.",
        count_drafts,
    ),
    CounterMetric(
        "vllm:spec_decode_num_draft_tokens",
        "Drafted tokens that were verified.",
        lambda c: c.drafted,
    ),
    CounterMetric(
        "vllm:spec_decode_num_accepted_tokens",
        "Drafted tokens that were accepted.",
        lambda c: c.accepted,
    ),
    LabelledCounterMetric(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were accepted, by position in the draft, from 0.",
        ("position",),
        lambda c: list_by_position(c.accepted_at),
    ),
    GaugeMetric("vllm:num_requests_running", "Requests in slots.", lambda c: c.running),
    GaugeMetric("vllm:num_requests_waiting", "Requests in the queue.", lambda c: c.waiting),
    CounterMetric(
        "vllm:prompt_tokens", "Prompt tokens that were computed.", lambda c: c.prompt_tokens
    ),
    CounterMetric("vllm:generation_tokens", "Generated tokens.", lambda c: c.output_tokens),
    CounterMetric(
        "vllm:prefix_cache_queries",
        "Prompt tokens whose kv was looked up.",
        lambda c: c.prefix_queries,
    ),
    CounterMetric(
        "vllm:prefix_cache_hits",
        "Prompt tokens whose kv was there already.",
        lambda c: c.prefix_hits,
    ),
    CounterMetric(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens whose kv was looked up in host memory.",
        lambda c: c.host_queries,
    ),
    CounterMetric(
        "vllm:external_prefix_cache_hits",
        "Prompt tokens whose kv was copied from host memory.",
        lambda c: c.host_hits,
    ),
    LabelledCounterMetric(
        "vllm:kv_offload_total_bytes",
        "kv copied to host memory and from there.",
        ("transfer_type",),
        lambda c: {("GPU_to_CPU",): c.offloaded_bytes, ("CPU_to_GPU",): c.restored_bytes},
    ),
    CounterMetric(
        "vllm:num_preemptions", "Requests preempted for lack of kv pages.", lambda c: c.preemptions
    ),
    GaugeMetric(
        "vllm:kv_cache_usage_perc",
        "Share of the kv pages in use, 0 to 1.",
        lambda c: c.pages_used / (c.pages or 1),
    ),
    LabelledCounterMetric(
        "vllm:request_success", "Ended requests.", ("finished_reason",), count_finished
    ),
    HistogramMetric(
        "vllm:time_to_first_token_seconds",
        "From submission to the first token.",
        lambda c: c.first_token,
    ),
    HistogramMetric(
        "vllm:request_time_per_output_token_seconds",
        "Mean time between a request's tokens, from the first on.",
        lambda c: c.per_token,
    ),
    HistogramMetric(
        "vllm:request_queue_time_seconds", "From submission to a slot.", lambda c: c.queued
    ),
    HistogramMetric(
        "vllm:e2e_request_latency_seconds", "From submission to the end.", lambda c: c.latency
    ),
    # -- metrics of dflash-aot
    LabelledCounterMetric(
        "dflash:spec_decode_num_draft_tokens_per_pos",
        "Drafted tokens that were verified, by position in the draft, from 0.",
        ("position",),
        lambda c: list_by_position(c.verified_at),
    ),
    CounterMetric(
        "dflash:rounds", "Verification rounds; a multi-round step counts each.", lambda c: c.rounds
    ),
    LabelledCounterMetric(
        "dflash:bucket_rounds",
        "Rounds by bucket and whether they sampled.",
        ("batch", "length", "k", "sampled"),
        count_bucket_rounds,
    ),
    CounterMetric(
        "dflash:rows", "Rows that rounds computed: the batch of their buckets.", count_rows
    ),
    CounterMetric(
        "dflash:row_rounds",
        "Committed rows of rounds: one per request and round.",
        lambda c: c.row_rounds,
    ),
    CounterMetric(
        "dflash:padded_rows", "Rows of rounds that no request used.", lambda c: c.padded_rows
    ),
    CounterMetric("dflash:prefill_chunks", "Prefill chunks.", lambda c: c.prefill_chunks),
    CounterMetric(
        "dflash:mixed_chunks", "Prefill chunks in the call of a round.", lambda c: c.mixed_chunks
    ),
    CounterMetric(
        "dflash:packed_chunks",
        "Prefill chunks in a call with chunks of other prompts.",
        lambda c: c.packed_chunks,
    ),
    CounterMetric(
        "dflash:padded_prefill_positions",
        "Positions of prefill chunks after the end of their prompts.",
        lambda c: c.padded_prefill,
    ),
    GaugeMetric("dflash:kv_pages", "Pages of the kv pools.", lambda c: c.pages),
    CounterMetric(
        "dflash:kv_page_evictions", "kv pages evicted for other requests.", lambda c: c.evictions
    ),
    CounterMetric(
        "dflash:saved_state_evictions",
        "Saved states evicted for others.",
        lambda c: c.state_evictions,
    ),
    GaugeMetric("dflash:kv_offload_bytes", "kv in host memory, in bytes.", lambda c: c.host_bytes),
    CounterMetric(
        "dflash:kv_offload_evictions",
        "Pages and saved states evicted from host memory.",
        lambda c: c.host_evictions,
    ),
    CounterMetric("dflash:moves", "Moves of a request to another slot.", lambda c: c.moves),
    GaugeMetric("dflash:slots", "Slots: requests that can run at once.", lambda c: c.slots),
    GaugeMetric(
        "dflash:executables", "Executables that serve, loaded or not.", lambda c: c.executables
    ),
    GaugeMetric("dflash:executables_loaded", "Executables that are loaded.", lambda c: c.loaded),
    CounterMetric(
        "dflash:refused_requests", "Requests that the full queue refused.", lambda c: c.refused
    ),
    CounterMetric(
        "dflash:executable_failures", "Failed calls of executables.", lambda c: c.failures
    ),
    CounterMetric(
        "dflash:compile_events",
        "Traces and compiles on the engine's thread; 0 unless something is wrong.",
        lambda c: c.compile_events,
    ),
    CounterMetric(
        "dflash:host_seconds", "Processor time of the engine's thread.", lambda c: c.host_seconds
    ),
    CounterMetric(
        "dflash:host_wall_seconds",
        "Time in the engine's steps without waits for the device.",
        lambda c: c.host_wall_seconds,
    ),
    CounterMetric(
        "dflash:wait_seconds",
        "Time that the engine's thread waited for the device.",
        lambda c: c.wait_seconds,
    ),
    CounterMetric(
        "dflash:guard_failures",
        "Ends of a guard, the process for chat templates and grammars, by what it was given.",
        lambda c: c.guard_failures,
    ),
)


class StatsCollector(Collector):
    """Makes the samples of each scrape from a new snapshot of the counters."""

    def __init__(self, stats: Callable[[], Counters], model_name: str):
        """stats: returns a snapshot, as `Engine.stats` does; called once per scrape, in the scraping thread, so that
        the samples of a scrape belong together. model_name: value of the label `model_name`, any text.
        """
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        return self._families(self._stats())

    def describe(self) -> Iterator[Metric]:
        """Returns the metrics' names for a registry with other collectors, without calling `stats`."""
        return self._families(Counters())

    def _families(self, counters: Counters) -> Iterator[Metric]:
        return (metric.family(counters, self._model_name) for metric in METRICS)


def make_registry(stats: Callable[[], Counters], model_name: str) -> CollectorRegistry:
    """Returns a registry of one engine's metrics only; arguments as of `StatsCollector`."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(stats, model_name))
    return registry
