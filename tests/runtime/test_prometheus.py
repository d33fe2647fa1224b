"""Prometheus metrics of made-up counters, as a scrape returns them."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.metrics.counters import BUCKET_BOUNDS_SECONDS, Counters
from dflash_aot.runtime.metrics.prometheus import FINISHED_REASONS, METRICS, make_registry
from dflash_aot.runtime.requests.request import FinishReason

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
NAME = re.compile(r"(vllm|dflash):[a-z][a-z0-9_]*")
LABEL = re.compile(r"[a-z][a-z0-9_]*")
TIMINGS = {
    "vllm:time_to_first_token_seconds": "first_token",
    "vllm:request_time_per_output_token_seconds": "per_token",
    "vllm:request_queue_time_seconds": "queued",
    "vllm:e2e_request_latency_seconds": "latency",
}


PLAIN = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "output_tokens",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "dflash:kv_page_evictions_total": "evictions",
    "dflash:kv_pages": "pages",
    "dflash:rounds_total": "rounds",
    "dflash:padded_rows_total": "padded_rows",
    "dflash:prefill_chunks_total": "prefill_chunks",
    "dflash:mixed_chunks_total": "mixed_chunks",
    "dflash:packed_chunks_total": "packed_chunks",
    "dflash:padded_prefill_positions_total": "padded_prefill",
    "dflash:moves_total": "moves",
    "dflash:slots": "slots",
    "dflash:executables": "executables",
    "dflash:executables_loaded": "loaded",
    "dflash:refused_requests_total": "refused",
    "dflash:executable_failures_total": "failures",
    "dflash:compile_events_total": "compile_events",
    "dflash:host_seconds_total": "host_seconds",
    "dflash:host_wall_seconds_total": "host_wall_seconds",
    "dflash:wait_seconds_total": "wait_seconds",
    "dflash:guard_failures_total": "guard_failures",
    "dflash:saved_state_evictions_total": "state_evictions",
    "vllm:external_prefix_cache_queries_total": "host_queries",
    "vllm:external_prefix_cache_hits_total": "host_hits",
    "dflash:kv_offload_bytes": "host_bytes",
    "dflash:kv_offload_evictions_total": "host_evictions",
}
COUNTED = {
    "vllm:spec_decode_num_drafts_total": 3,  # the row with k = 0 had no draft
    "vllm:spec_decode_num_draft_tokens_total": 13,
    "vllm:spec_decode_num_accepted_tokens_total": 7,
    "vllm:kv_cache_usage_perc": 0.25,
    "dflash:rows_total": 4 * 28 + 1 * 29,
    "dflash:row_rounds_total": 4,
}
VALUES: dict[str, Any] = {
    field: number + 0.5 * field.endswith("seconds")  # different in each
    for number, field in enumerate(PLAIN.values(), 100)
}


def make_counters() -> Counters:
    """Returns counters with a different value in each field, so that no two can be confused."""
    counters = Counters(
        **VALUES,
        pages_used=VALUES["pages"] // 4,
        offloaded_bytes=22,
        restored_bytes=23,
        finished={"stop": 24, "length": 25, "cancelled": 26, "error": 27},
        bucket_rounds={(Bucket(4, 256, 7), True): 28, (Bucket(1, 64, 0), False): 29},
    )
    for k, accepted in ((3, 2), (3, 0), (7, 5), (0, 0)):
        counters.note_rows(k, [accepted])
    for place, name in enumerate(TIMINGS.values()):
        for seconds in (0.0005, 0.3, 0.4, 1000.0 + place):
            getattr(counters, name).observe(seconds)
    return counters


BOUNDS = [*map(str, BUCKET_BOUNDS_SECONDS), "+Inf"]


def key(name: str, **labels: str):
    return name, frozenset(labels.items())


def expected(model_name: str = "pair"):
    """All samples of `make_counters`, by name and labels."""
    samples = {key(name): value for name, value in COUNTED.items()}
    samples |= {key(name): VALUES[field] for name, field in PLAIN.items()}
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    samples |= {key(per_position, position=str(at)): value for at, value in enumerate([2, 2, 1, 1, 1, 0, 0])}
    verified = "dflash:spec_decode_num_draft_tokens_per_pos_total"
    samples |= {key(verified, position=str(at)): value for at, value in enumerate([3, 3, 3, 1, 1, 1, 1])}
    copied = "vllm:kv_offload_total_bytes_total"
    samples |= {key(copied, transfer_type=way): value for way, value in (("GPU_to_CPU", 22), ("CPU_to_GPU", 23))}
    reasons = {"stop": 24, "length": 25, "abort": 26, "error": 27}
    samples |= {key("vllm:request_success_total", finished_reason=word): value for word, value in reasons.items()}
    samples[key("dflash:bucket_rounds_total", batch="4", length="256", k="7", sampled="true")] = 28
    samples[key("dflash:bucket_rounds_total", batch="1", length="64", k="0", sampled="false")] = 29
    for place, name in enumerate(TIMINGS):
        # 0.0005 is a bound; 0.3 and 0.4 are above 0.25 and at most 0.5; 1000 is above all.
        cumulative = [1 if bound < 0.5 else 3 for bound in BUCKET_BOUNDS_SECONDS] + [4]
        samples |= {key(f"{name}_bucket", le=le): count for le, count in zip(BOUNDS, cumulative, strict=True)}
        samples[key(f"{name}_count")] = 4
        samples[key(f"{name}_sum")] = 0.0005 + 0.3 + 0.4 + 1000.0 + place
    return {(name, labels | {("model_name", model_name)}): value for (name, labels), value in samples.items()}


def scrape(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def parse(text: str):
    """Returns all samples of a scrape, by name and labels, and checks that none is repeated."""
    samples: dict = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = (sample.name, frozenset(sample.labels.items()))
            assert name not in samples, f"{name} twice"
            samples[name] = sample.value
    return samples


def value(samples, name: str, **labels: str) -> float:
    return samples[name, frozenset({**labels, "model_name": "pair"}.items())]


def test_scrape_has_every_expected_sample():
    assert parse(scrape(make_registry(make_counters, "pair"))) == pytest.approx(expected())


def test_types_help_and_names():
    families = [*text_string_to_metric_families(scrape(make_registry(make_counters, "pair")))]
    assert [family.name for family in families] == [metric.name for metric in METRICS]
    assert len({family.documentation for family in families}) == len(METRICS)
    for family in families:
        assert NAME.fullmatch(family.name) and not family.name.endswith("_total")
        assert family.documentation.endswith(".")
        assert all(LABEL.fullmatch(label) for sample in family.samples for label in sample.labels)
    ours = {"dflash:slots", "dflash:executables", "dflash:executables_loaded", "dflash:kv_pages"}
    ours.add("dflash:kv_offload_bytes")
    gauges = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", *ours}
    types = {family.name: family.type for family in families}
    assert {name for name, kind in types.items() if kind == "gauge"} == gauges
    assert {name for name, kind in types.items() if kind == "histogram"} == set(TIMINGS)
    assert set(types.values()) == {"counter", "gauge", "histogram"}


def test_unused_engine_has_zeros():
    samples = parse(scrape(make_registry(Counters, "pair")))
    assert set(samples.values()) == {0}
    assert {name for name, _ in samples} == {
        name for name, _ in expected() if not name.endswith(("_per_pos_total", "bucket_rounds_total"))
    }


def test_every_finish_reason_has_its_own_label():
    assert set(FINISHED_REASONS) == set(get_args(FinishReason))
    assert len(set(FINISHED_REASONS.values())) == len(FINISHED_REASONS)


def test_document_lists_each_metric_once():
    listed = re.findall(r"^- `([a-z]+:\w+)`", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(sample_name(metric.name) for metric in METRICS)


def sample_name(name: str) -> str:
    """Returns the name of a metric's samples: counters end in _total."""
    return f"{name}_total" if f"{name}_total" in {name for name, _ in expected()} else name


def test_queries_in_the_document_use_existing_names():
    queries = "\n".join(re.findall(r"^```promql\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL))
    asked = {name.group() for name in NAME.finditer(queries)}
    assert asked and asked <= {name for name, _ in expected()}


def test_metrics_of_an_engine_are_what_its_results_say(bundle, cases):
    params = SamplingParams(max_tokens=9, stop_token_ids=())
    with Engine.open(bundle("tiny")) as engine:
        results = [engine.generate(cases["len1"].later(cut).prompt, params) for cut in range(4)]
        engine.close()  # the engine's thread has ended: nothing is counted any more
        samples = parse(scrape(make_registry(engine.stats, "pair")))
        assert {name for name, _ in samples} == {name for name, _ in parse(scrape(engine.metrics()))}
    accepted = [count for result in results for count in result.accepted]
    expected = {
        "vllm:spec_decode_num_accepted_tokens_total": sum(accepted),
        "vllm:spec_decode_num_draft_tokens_total": engine.stats().drafted,
        "dflash:row_rounds_total": len(accepted),
        "vllm:generation_tokens_total": 36,
        "vllm:prompt_tokens_total": sum(result.prompt_tokens for result in results),
        **{f"{name}_count": 4 for name in TIMINGS},
    }
    assert {name: value(samples, name) for name in expected} == expected and min(expected.values()) > 0
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 4
    whole = sum(result.seconds for result in results)
    assert value(samples, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(whole)
