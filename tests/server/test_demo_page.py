"""Demo page in Chromium: what it shows is compared with the engine's result for the same request."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from dflash_aot.runtime import Engine, SamplingParams
from tests.server.chromium import MISSING, find_chromium, launch
from tests.server.conftest import KEY, PATIENCE

PROMPT = "def main():\n    import argparse\n    parser = "
TOKENS, K = 96, 7
VISIBLE_SPACES = str.maketrans({" ": "·", "\n": "⏎"})
CHIPS = "rows => rows.map(row => [...row.querySelectorAll('.chip')].map(chip => [chip.classList[1], chip.textContent]))"
PIECES = "spans => spans.map(span => [span.className, span.textContent])"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip(MISSING)
    expect.set_options(timeout=PATIENCE * 1000)
    with launch(path) as launched:
        yield launched


@pytest.fixture
def visit(browser: Browser, served) -> Callable:
    """Opens a page in a context; `complaints` are the only messages that its console may have."""

    @contextmanager
    def open_page(*complaints: str, url: str = served.url, **options) -> Iterator[Page]:
        messages: list[str] = []
        page = browser.new_page(**options)
        page.set_default_timeout(PATIENCE * 1000)
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(url)
        yield page
        page.close()
        assert len(messages) == len(complaints), messages
        pairs = zip(complaints, messages, strict=True)
        assert all(complaint in message for complaint, message in pairs), messages

    return open_page


def generate(page: Page, prompt: str = PROMPT, tokens: int = TOKENS, k: int | None = K) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("K, drafted per round").select_option("" if k is None else str(k))
    page.get_by_role("button", name="Generate").click()


def expect_end(page: Page, status: str | re.Pattern, error: str | re.Pattern | None = None) -> None:
    """Checks the final status and error, and that Generate is enabled again."""
    expect(page.locator("#status")).to_have_text(status)
    if error is None:
        expect(page.get_by_role("alert")).to_be_hidden()
    else:
        expect(page.get_by_role("alert")).to_have_text(error)
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()


@pytest.fixture(scope="module")
def expected(engine: Engine):
    return engine.generate(PROMPT, SamplingParams(max_tokens=TOKENS, k=K, trace=True))


def test_text_rounds_and_figures_equal_the_engines(visit, engine, expected):
    token_texts = [engine.tokenizer.token_bytes(token).decode() for token in expected.token_ids]
    origins, rows, left = ["own"], [[["own", token_texts[0]]]], token_texts[1:]
    for accepted, drafted in zip(expected.accepted, expected.drafted, strict=True):
        chips = [["accepted", engine.tokenizer.token_bytes(token).decode()] for token in drafted]
        chips[accepted:] = [["rejected", text] for _, text in chips[accepted:]]
        rows.append(chips + [["own", text] for text in left[accepted : accepted + 1]])
        origins += ["accepted"] * accepted + ["own"]
        left = left[accepted + 1 :]
    with visit() as page:
        generate(page)
        expect_end(page, "ended at its token limit")
        assert page.locator("#text").text_content() == PROMPT + expected.text
        pieces = page.locator("#text span").evaluate_all(PIECES)
        assert pieces == [["prompt", PROMPT], *map(list, zip(origins[:TOKENS], token_texts, strict=True))]
        shown = page.locator("#rounds li").evaluate_all(CHIPS)
        assert shown == [[[origin, text.translate(VISIBLE_SPACES)] for origin, text in row] for row in rows]
        assert page.locator("#rounds s").count() == sum(K - accepted for accepted in expected.accepted) > 0
        accepted, rounds = sum(expected.accepted), len(expected.accepted)
        assert page.locator("#tau").text_content() == f"{(accepted + rounds) / rounds:.2f}"
        assert page.locator("#accepted-share").text_content().startswith(f"{accepted} of {K * rounds} accepted")
        assert page.locator("#passes").text_content() == f"{TOKENS - 1} in {rounds} passes of the target"
        assert page.locator("#prompt-tokens").text_content() == f"after {expected.prompt_tokens} prompt tokens"
        assert page.locator("#tokens").text_content() == str(TOKENS)
        verdicts = page.locator("#rounds .verdict").all_text_contents()
        assert verdicts == ["prompt", *(f"{accepted}/{K}" for accepted in expected.accepted)]
        heights = page.locator("#bars .accepted").evaluate_all("bars => bars.map(bar => bar.height.baseVal.value)")
        assert heights == expected.accepted
        for element in ("#token-time", "#first-token"):
            assert re.fullmatch(r"\d+\.\d+ ms", page.locator(element).text_content())


def test_stop_button_ends_the_generation(visit):
    with visit() as page:
        page.evaluate("""() => new MutationObserver(() => document.getElementById("stop").click())
            .observe(document.getElementById("rounds"), { childList: true })""")
        generate(page, tokens=200, k=0)
        expect_end(page, re.compile(r"^stopped after \d+ tokens?$"))
        assert 1 <= page.locator("#rounds li").count() < 200
        page.reload()
        generate(page, tokens=8)
        expect_end(page, "ended at its token limit")


def test_error_of_the_server_is_shown(visit, served):
    body = {"prompt": PROMPT * 40, "max_tokens": TOKENS, "temperature": 0}
    refusal = httpx.post(f"{served.url}/v1/completions", json=body).json()["error"]["message"]
    with visit("400 (Bad Request)") as page:
        generate(page, prompt=body["prompt"])
        expect_end(page, "refused", refusal)
        page.get_by_label("Max tokens").fill("7")
        expect(page.locator("#error")).to_be_hidden()
        generate(page)
        expect_end(page, "ended at its token limit")


def test_api_key_is_requested_and_not_stored(visit, start_server):
    server = start_server(key=KEY).wait_until_ready()
    with visit("401 (Unauthorized)", "401 (Unauthorized)", url=server.url) as page:
        expect(page.locator("#status")).to_have_text("needs an API key")
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.get_by_role("button", name="Generate")).to_be_disabled()
        page.get_by_label("API key").fill("sk-somebody-elses")
        page.get_by_role("button", name="Connect").click()
        expect(page.get_by_role("alert")).to_contain_text("the API key is unknown")
        page.get_by_label("API key").fill(KEY)
        page.get_by_label("API key").press("Enter")
        expect(page.get_by_label("API key")).to_be_hidden()
        generate(page, tokens=8)
        expect_end(page, "ended at its token limit")
        stored = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
        assert KEY not in stored


def test_text_is_not_parsed_as_html(visit):
    with visit() as page:
        generate(page, prompt="<i>prompt</i>", tokens=8)
        expect_end(page, "ended at its token limit")
        assert page.locator("#text").text_content().startswith("<i>prompt</i>")
        assert page.locator("main i").count() == 0


def test_content_security_policy_blocks_inline_scripts_and_other_origins(visit):
    violated = """what => new Promise(resolve => {
        addEventListener("securitypolicyviolation", (event) => resolve(event.violatedDirective), { once: true });
        if (what === "script") {
            document.body.append(Object.assign(document.createElement("script"), { text: "window.ran = true" }));
            if (window.ran) resolve("ran");
        } else {
            const elsewhere = location.origin.replace("127.0.0.1", "localhost");
            fetch(`${elsewhere}/health`, { mode: "no-cors" }).then(() => resolve("loaded"), () => null);
        }
    })"""
    with visit("inline script", "Content Security Policy", "Fetch API cannot load") as page:
        expect_end(page, "ready")
        assert page.evaluate(violated, "script") == "script-src-elem"
        assert page.evaluate(violated, "fetch") == "connect-src"
