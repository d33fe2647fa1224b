"""Engines whose requests start behind prefixes that others have computed: tokens, blocks and acceptance stay."""

from dataclasses import replace

from dflash_aot.runtime import SamplingParams


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
