"""Engines whose requests start behind prefixes that others have computed: tokens, blocks and acceptance stay."""

from dataclasses import replace

import pytest

from dflash_aot.cache.errors import BadInput
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.executables.executable import DeviceState


def test_text_continues_from_every_page_border_as_without_reuse(serve, tied):
    engine = serve("tied", 7)
    page = engine.manifest.grid.page
    for prompt in tied.facts["prompts"][::6]:
        text = prompt["output_ids"]
        engine.generate(text[:-1], SamplingParams(max_tokens=1))
        for border in reversed(range(page, len(text) - 1, page)):  # the pages of the others stay the last used ones
            params = SamplingParams(max_tokens=min(24, len(text) - border - 1), stop_token_ids=(), trace=True)
            behind = engine.generate(text[: border + 1], params)
            alone = engine.generate(text[: border + 1], replace(params, prefix_caching=False))
            assert (prompt["name"], behind.cached_tokens, alone.cached_tokens) == (prompt["name"], border, 0)
            for seen in ("token_ids", "drafted", "accepted"):
                assert (border, seen, getattr(behind, seen)) == (border, seen, getattr(alone, seen))
            if border >= len(prompt["prompt_ids"]) - 1:
                assert behind.token_ids == text[border + 1 :][:24]


def test_hybrid_continues_from_every_saved_position_as_without_reuse(serve, runs):
    """Saved are ends of prompts: in a page, at its border, and with more than a chunk after it."""
    engine = serve("hybrid", 7)
    for prompt in runs["hybrid"].facts["prompts"][::4]:
        text = prompt["output_ids"]
        for end in {1, 3, 63, 64, 65, 127, 128, len(text) - 30}:
            if not 0 < end < len(text) - 1:
                continue
            salt = f"{prompt['name']} {end}"
            engine.generate(text[:end], SamplingParams(max_tokens=1, cache_salt=salt))
            beyond = text[: min(end + 70, len(text) - 1)]
            params = SamplingParams(max_tokens=24, stop_token_ids=(), trace=True, cache_salt=salt)
            behind = engine.generate(beyond, params)
            alone = engine.generate(beyond, replace(params, prefix_caching=False))
            assert (salt, behind.cached_tokens, alone.cached_tokens) == (salt, end, 0)
            for seen in ("token_ids", "drafted", "accepted"):
                assert (salt, seen, getattr(behind, seen)) == (salt, seen, getattr(alone, seen))


def test_hybrid_continues_from_host_memory_as_without_reuse(bundle, runs, monkeypatch):
    """Two states fit on the device, so that every prompt is evicted before it is continued. Copies count as free."""
    monkeypatch.setattr(DeviceState, "measure_transfers", lambda self, arrays: 1e18)
    prompts = runs["hybrid"].facts["prompts"]
    with Engine.open(bundle("hybrid"), k=7, kv_offloading_size=0.1) as engine:
        for prompt in prompts:
            engine.generate(prompt["prompt_ids"], SamplingParams(max_tokens=1))
        for prompt in prompts:
            given, tokens = prompt["prompt_ids"], prompt["new_token_ids"]
            params = SamplingParams(max_tokens=max(1, len(tokens) - 1), stop_token_ids=(), trace=True)
            behind = engine.generate([*given, tokens[0]], params)
            alone = engine.generate([*given, tokens[0]], replace(params, prefix_caching=False))
            assert (prompt["name"], behind.cached_tokens, alone.cached_tokens) == (prompt["name"], len(given), 0)
            assert behind.token_ids[: len(tokens) - 1] == tokens[1:]
            for seen in ("token_ids", "drafted", "accepted"):
                assert (prompt["name"], getattr(behind, seen)) == (prompt["name"], getattr(alone, seen))
        stats = engine.stats()
        assert stats.host_hits == sum(len(prompt["prompt_ids"]) for prompt in prompts)
        assert (stats.compile_events, stats.failures) == (0, 0)


def test_host_memory_is_refused_by_name(bundle):
    refused = [("tied", 1, {}, "no offload=1"), ("hybrid", -1, {}, "at least 0 GiB")]
    refused += [("hybrid", 1, {"prefix_caching": False}, "without prefix_caching"), ("hybrid", "1", {}, "a number")]
    for pair, size, options, reason in refused:
        with pytest.raises(BadInput, match=rf"kv_offloading_size is {size!r}: .*{reason}"):
            Engine.open(bundle(pair), kv_offloading_size=size, **options)
