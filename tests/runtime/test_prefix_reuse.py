"""Engines whose requests start behind prefixes that others have computed: tokens, blocks and acceptance stay."""

import random
from dataclasses import replace

from dflash_aot.runtime import Engine, SamplingParams

SAMPLED = {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.3}


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


def test_random_requests_with_shared_prefixes_get_their_tokens(bundle, tied, count=24):
    """Requests of random prefixes at the same time, every tenth cancelled; then each of them alone."""
    rng, texts = random.Random(1), [prompt["output_ids"] for prompt in tied.facts["prompts"]]
    with Engine.open(bundle("sampled"), max_waiting=count) as engine:
        capacity, requests = engine.manifest.grid.capacity, []
        for _ in range(count):
            text = rng.choice(texts)
            prompt = [*text[: rng.randrange(1, len(text))], *([rng.randrange(200)] if rng.random() < 0.3 else [])]
            sampled = {**SAMPLED, "seed": rng.randrange(9)} if rng.random() < 0.5 else {}
            tokens = rng.randint(1, min(120, capacity - len(prompt)))
            params = SamplingParams(max_tokens=tokens, stop_token_ids=(), k=rng.choice((None, 0, 3, 7)), **sampled)
            requests.append((prompt, params, engine.stream(prompt, params, priority=rng.randrange(2))))
            if rng.random() < 0.1:
                rng.choice(requests)[2].close()
        results = [stream.result() for _, _, stream in requests]
        assert engine.stats().pages_used == 0 and engine.stats().preemptions > 0
        assert sum(result.cached_tokens for result in results) > count
        for (prompt, params, _), result in zip(requests, results, strict=True):
            alone = engine.generate(prompt, replace(params, prefix_caching=False)).token_ids
            assert result.token_ids == alone[: len(result.token_ids)]
            assert result.token_ids == alone or result.finish_reason == "cancelled"
