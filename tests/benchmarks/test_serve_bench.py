"""The load of a server: who may ask when, what is lost, what makes a record void, and what it says, to check by eye."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.benchmarks import serve_bench
from dflash_aot.benchmarks.findings import Findings
from dflash_aot.benchmarks.pairs import Pair
from dflash_aot.benchmarks.peer import Peer
from dflash_aot.benchmarks.peer_http import listen
from dflash_aot.benchmarks.record import SCHEMA, Record, describe_site
from dflash_aot.benchmarks.serve_callers import come_when_due, read_main_thread_seconds
from dflash_aot.benchmarks.serve_process import open_server
from dflash_aot.benchmarks.serve_traffic import Came, ClientOrder, Come, Heard
from dflash_aot.benchmarks.traffic import Prompt, Work
from dflash_aot.benchmarks.ways import Way, engine_way
from dflash_aot.cache.errors import BadInput, GridMiss, PeerFailed
from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.model_config.checkpoint_location import EMBEDDED, locate_checkpoint

GRID = parse_grid("batch=1,2 length=64 k=0,7 prefill=64", 8)
PROMPTS = [[4], [5], [6], [7]]


# -- callers


@pytest.mark.parametrize("connections", [1, 3, 9])
def test_no_more_ask_at_once_than_there_are_connections(connections):
    under_way, seen, order, full = [], [], [], asyncio.Event()

    async def ask(prompt: Prompt, tokens: int) -> Heard:
        under_way.append(prompt)
        order.append(prompt[0])
        seen.append(len(under_way))
        if len(under_way) == min(connections, 7):
            full.set()
        await asyncio.wait_for(full.wait(), 30)
        under_way.remove(prompt)
        return Heard(200, f"{prompt} {tokens}")

    question = Come([[number] for number in range(7)], [0.0] * 7, connections, 5)
    heard, _ = asyncio.run(come_when_due(ask, question))
    assert [one.text for one in heard] == [f"[{number}] 5" for number in range(7)]
    assert max(seen) == min(connections, 7) and order == [*range(7)]


def test_what_is_heard_is_told_from_when_it_was_due():
    async def ask(prompt: Prompt, tokens: int) -> Heard:
        return Heard(200, "", [prompt[0] + 1000.0, prompt[0] + 2000.0])

    (first, second), seconds = asyncio.run(come_when_due(ask, Come([[0], [0]], [0.0, 0.02], 1, 5)))
    assert first.arrivals[1] - first.arrivals[0] == pytest.approx(1000)
    assert first.arrivals[0] - second.arrivals[0] == pytest.approx(0.02)  # due later, so it has waited less
    assert first.late >= 0 and second.late >= 0 and seconds >= 0.02


WORK = """
import sys, threading, time
def burn():
    began = time.thread_time()
    while time.thread_time() - began < 0.3: pass
thread = threading.Thread(target=burn)
thread.start()
thread.join()
print(flush=True)
sys.stdin.readline()
burn()
print(flush=True)
sys.stdin.readline()
"""


def test_the_first_thread_of_a_process_is_told_from_its_others():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WORK], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin and process.stdout
        process.stdout.readline()
        before = read_main_thread_seconds(process.pid)
        print(file=process.stdin, flush=True)
        process.stdout.readline()
        after = read_main_thread_seconds(process.pid)
        process.stdin.close()
    assert before < 0.25 and after - before == pytest.approx(0.3, abs=0.04)


# -- what comes over HTTP


def make_events(*texts: str, done: bool = True, reason: str | None = "length") -> bytes:
    """Of an answer that has these parts."""
    ends = [None] * (len(texts) - 1) + [reason]
    chunks = [
        msgspec.json.encode({"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": end}]})
        for text, end in zip(texts, ends, strict=True)
    ]
    return b"".join(b"data: " + one + b"\n\n" for one in [*chunks, *[b"[DONE]"] * done])


def hear(*parts: bytes) -> Heard:
    async def send() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return asyncio.run(listen(send()))


@given(st.lists(st.integers(0, 400)))
def test_events_are_whole_however_they_are_cut(cuts):
    events = make_events("a\n", "", "é: b")
    places = sorted({0, len(events), *(cut for cut in cuts if cut < len(events))})
    heard = hear(*(events[begin:end] for begin, end in zip(places, places[1:], strict=False)))
    assert (heard.status, heard.text, len(heard.arrivals), heard.lost) == (200, "a\né: b", 3, "")


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (make_events("a", done=False), "it ended as length, without [DONE]"),
        (make_events("a", reason="stop"), "it ended as stop, with [DONE]"),
        (make_events("a", reason=None) + make_events("b")[:-5], "it ended as length, without [DONE]"),
        (b'data: {"error": {"message": "a fault", "code": null}}\n\ndata: [DONE]\n\n', "a fault"),
        (b"", "it ended as None, without [DONE]"),
    ],
)
def test_what_is_not_whole_is_lost(sent, why):
    heard = hear(sent)
    assert (heard.status, heard.lost) == (0, why)


# -- samples


class Toy:
    """Answers a prompt after so many seconds for each token, in two parts."""

    def __init__(self, text: str = "so", odd: Heard | None = None, **counted: int):
        self.asked: list[Come] = []
        self._text, self._odd, self._counted = text, odd, counted

    def ask(self, question: Come, kind: type) -> Came:
        self.asked.append(question)
        end = 0.001 * question.max_tokens
        heard = [Heard(200, f"{prompt} {self._text}", [0.0005, end]) for prompt in question.prompts]
        heard[-1] = self._odd or heard[-1]
        work = Work(rounds=9, host_seconds=0.01, **self._counted)
        return Came(heard, 0.5 * len(heard), 0.2, None if self._text == "inside" else 0.1, work)


def take(other: Toy) -> list[dict]:
    """All samples of a toy of an engine, and of another one over HTTP."""
    settings = serve_bench.Settings(max_tokens=4, repeats=2, connections=(1, 2))
    names = ("engine", serve_bench.SERVER)
    peers = [(Way(name, "", Work()), toy) for name, toy in zip(names, (Toy(), other), strict=True)]
    quiet = lambda words: None  # noqa: E731
    full = list(serve_bench.serve_full(peers, PROMPTS, settings, quiet))
    rates = serve_bench.choose_rates(full, settings)
    assert rates == {1: 1.4, 2: 1.4}  # 0.7 of 2 in a second
    alone = serve_bench.serve_alone(peers, PROMPTS, settings, quiet)
    return [*full, *alone, *serve_bench.serve_open(peers, PROMPTS, rates, settings, quiet)]


def test_both_ways_take_turns_with_the_same_prompts_at_the_same_times():
    other = Toy()
    samples = take(other)
    assert serve_bench.find_fault(samples) == ""
    assert [one["way"] for one in samples[:4]] == ["engine", "dflash-serve", "dflash-serve", "engine"]
    assert [(one["kind"], one["connections"], one["max_tokens"]) for one in samples[::2]] == [
        *[("full", 1, 4), ("full", 2, 4)] * 2,
        *[("cost", 1, 1), ("cost", 1, 4)] * 2,
        *[("open", 1, 4), ("open", 2, 4)] * 2,
    ]
    for one, same in zip(samples[::2], samples[1::2], strict=True):
        assert (one["prompts"], one["due_us"], one["repeat"]) == (same["prompts"], same["due_us"], same["repeat"])
    first, second = (one for one in samples if one["kind"] == "open" and one["connections"] == 1 and one["repeat"] == 0)
    assert first["due_us"] == sorted(first["due_us"]) and first["due_us"][0] > 0
    assert first["end_us"] == [4000] * 4 and first["first_us"] == [500] * 4 and first["parts"] == [2] * 4
    assert first["texts"] == second["texts"] and len({*first["texts"]}) == 4


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        (Toy("else"), "dflash-serve gives other tokens than engine for prompts (0, 1), (0, 4), (1, 1)"),
        (Toy(odd=Heard(0, lost="it fell")), "dflash-serve lost 1 of 4 answers: it fell"),
        (Toy(odd=Heard(500)), "dflash-serve answered with 500"),
        (Toy(compile_events=1), "dflash-serve compiled while serving"),
    ],
)
def test_what_is_wrong_makes_the_record_void(other, fault):
    assert serve_bench.find_fault(take(other)).startswith(fault)


def test_a_refusal_is_an_answer():
    samples = take(Toy(odd=Heard(503)))
    assert serve_bench.find_fault(samples) == ""
    refused = next(one for one in samples if one["way"] == serve_bench.SERVER)
    assert (refused["statuses"], refused["texts"][-1], refused["end_us"][-1]) == ([200, 200, 200, 503], None, None)


def test_nothing_measured_says_nothing():
    assert serve_bench.find_fault([]) == "no way answered"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"k": 3}, "--k 3 is none of the grid"),
        ({"connections": (1, 64)}, "--connections: 64 share 32 prompts"),
        ({"rate": 0.0}, "--rate 0: prompts per second"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings, words):
    with pytest.raises(BadInput, match=words):
        serve_bench.check_settings(serve_bench.Settings(**settings), GRID, 20)


def test_a_grid_that_is_too_small_is_refused():
    settings = serve_bench.Settings(max_tokens=32)
    assert serve_bench.check_settings(settings, GRID, 25) == 7
    with pytest.raises(GridMiss):
        serve_bench.check_settings(settings, GRID, 26)


# -- what samples say


def make_sample(kind: str, way: str, loop_us: int, **more: object) -> dict:
    """Two answers in five parts, and a refusal."""
    facts = {"kind": kind, "way": way, "connections": 2, "max_tokens": 8, "repeat": 0, "rate": 4.0, "seconds": 0.5}
    became = {"prompts": [0, 1, 2], "statuses": [200, 200, 503], "lost": [], "texts": ["x", "y", None]}
    times = {"late_us": [0, 10_000, 0], "first_us": [10_000, 30_000, None], "end_us": [18_000, 46_000, None]}
    client = 60_000 if way == serve_bench.SERVER else None
    counted = {"parts": [5, 5, None], "loop_us": loop_us, "host_us": 20_000, "client_us": client, "compile_events": 0}
    return facts | became | times | counted | more


def make_cost(way: str, repeat: int, request_us: int, part_us: int) -> Iterator[dict]:
    """Two answers of one part, and two of five."""
    for tokens, parts in ((1, 1), (8, 5)):
        facts = {"max_tokens": tokens, "parts": [parts, parts], "prompts": [0, 1], "repeat": repeat, "connections": 1}
        spent = 2 * (request_us + parts * part_us)
        client = 2 * spent if way == serve_bench.SERVER else None
        yield make_sample("cost", way, spent, **facts, client_us=client, statuses=[200, 200], texts=["x", "y"])


@pytest.fixture(scope="module")
def findings() -> Findings:
    ways = (("engine, K = 7", 10_000, 1), (serve_bench.SERVER, 25_000, 2))
    samples = [
        make_sample(kind, way, loop_us, seconds=0.5 * slow * (1 + repeat), repeat=repeat)
        for way, loop_us, slow in ways
        for kind in ("full", "open")
        for repeat in range(3)
    ]
    for repeat in range(3):
        samples += make_cost("engine, K = 7", repeat, 500 + 100 * repeat, 50)
        samples += make_cost(serve_bench.SERVER, repeat, 1500 + 100 * repeat, 200)
    return serve_bench.describe(Record(SCHEMA, "serve", "", "", "", 1.0, describe_site(0.0), {}, samples, ""))


def read_rows(findings: Findings, name: str) -> list[tuple[str, ...]]:
    (table,) = (one for one in findings.tables if one.name == name)
    return list(table.rows)


def test_throughput_has_a_row_for_each_way(findings):
    server, engine = read_rows(findings, "throughput")
    # 2 answers of 8 tokens in 1, 2 and 3 s; since they were sent: 10 and 20 ms, 18 and 36 ms; work of 6 s in all
    assert server[:5] == ("2", "dflash-serve", "1.00", "8.00", "5.33-16.0")
    assert server[5:11] == ("15.0", "20.0", "20.0", "27.0", "36.0", "36.0")
    assert server[11:] == ("6", "3", "12.5", "1.2%", "1.0%", "3.0%")
    assert engine[:5] == ("2", "engine, K = 7", "2.00", "16.0", "10.7-32.0") and engine[-1] == ""


def test_cost_is_told_by_request_and_by_part(findings):
    server, engine, client = read_rows(findings, "cost")
    assert server[:5] == ("dflash-serve", "event loop", "1.60 (1.50-1.70)", "0.200 (0.200-0.200)", "2.60")
    assert engine[:5] == ("engine, K = 7", "event loop", "0.600 (0.500-0.700)", "0.0500 (0.0500-0.0500)", "0.850")
    assert client[:3] == ("dflash-serve", "client", "3.20 (3.00-3.40)")


def test_arrivals_count_what_was_waited_for_a_connection(findings):
    server, _ = read_rows(findings, "arrivals")
    assert server[:8] == ("2", "4", "dflash-serve", "9", "3", "20.0", "30.0", "30.0")
    assert server[8:] == ("32.0", "46.0", "46.0", "0.00", "10.0")


def test_charts_show_what_the_tables_say(findings):
    charts = {chart.name: chart for chart in findings.charts}
    server, engine = charts["throughput-by-connections"].series
    assert (server.label, server.x, server.y) == ("dflash-serve", (2.0,), (8.0,))
    assert engine.y == (16.0,)
    half, most, *_ = charts["whole-answer-by-connections"].series
    assert (half.label, half.y, most.label, most.y) == ("dflash-serve, p50", (32.0,), "dflash-serve, p99", (46.0,))
    assert "first-part-by-connections" in charts


def test_figures_say_what_http_costs(findings):
    assert findings.figures == pytest.approx(
        {
            "request_ms": 1.6,
            "part_ms": 0.2,
            "request_more_ms": 1.0,
            "part_more_ms": 0.15,
            "over_engine_2_connections": 0.5,
        }
    )


# -- a real server


@pytest.fixture(scope="module")
def peers(bundle: Callable[[str], Path]) -> Iterator[list[Peer]]:
    """The engine inside a process, and the load of a server; three may wait behind one."""
    pair = Pair(EMBEDDED, locate_checkpoint(EMBEDDED, "target"), locate_checkpoint(EMBEDDED, "draft"))
    with ExitStack() as stack:
        server = stack.enter_context(open_server(bundle("one row"), pair, 7, 3, 32))
        ways = [engine_way(bundle("one row"), pair, 7, max_waiting=3), Way(serve_bench.SERVER, "peer_http", server)]
        yield [stack.enter_context(way.open()) for way in ways]


def test_a_server_gives_the_engines_own_texts(peers):
    question = Come([[17, 4, 99], [5] * 30, [7, 8]], [0.0, 0.0, 0.1], 2, 12)
    inside, outside = (peer.ask(question, Came) for peer in peers)
    for came in (inside, outside):
        assert [one.status for one in came.heard] == [200] * 3 and not any(one.lost for one in came.heard)
        assert came.work.rounds and came.work.host_seconds > 0 and came.work.compile_events == 0
        assert all(one.late >= 0 and 0 < one.arrivals[0] <= one.arrivals[-1] for one in came.heard)
    assert [one.text for one in outside.heard] == [one.text for one in inside.heard]
    assert all(one.text for one in outside.heard) and len({one.text for one in outside.heard}) == 3
    assert inside.client_seconds is None and outside.client_seconds


def test_who_finds_the_line_full_is_refused_and_nobody_is_lost(peers):
    question = Come([[5] * 30] * 16, [0.0] * 16, 16, 48)
    for peer in peers:
        heard = peer.ask(question, Came).heard
        assert {one.status for one in heard} == {200, 503} and not any(one.lost for one in heard)
        assert len({one.text for one in heard if one.status == 200}) == 1


def test_a_server_that_is_not_there_loses_everything():
    way = Way("nobody", "peer_http", ClientOrder("http://127.0.0.1:9", 1))
    with way.open() as peer, pytest.raises(PeerFailed, match="nobody ended"):
        peer.ask(Come([[1]], [0.0], 1, 2), Came)


def test_a_server_that_does_not_start_says_why(tmp_path):
    pair = Pair(EMBEDDED, tmp_path, tmp_path)
    server = open_server(tmp_path / "none", pair, 7, 1, 1)
    with pytest.raises(PeerFailed, match="(?s)dflash-serve ended with 2.*no bundle"), server:
        pass
