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
