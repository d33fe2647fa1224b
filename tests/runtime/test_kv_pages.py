"""KV pages: the pool against a plain model, prefixes that were seen before, preemption; on the toy device."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_aot.cache.grid import Bucket, parse_grid
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.runtime.requests.request import Request
from dflash_aot.runtime.requests.sampling_params import SamplingParams
from dflash_aot.runtime.scheduler import kv_pages
from dflash_aot.runtime.scheduler.kv_pages import KvPages, PagePool, PageTable, PoolFull, extend_key, start_key
from dflash_aot.runtime.scheduler.request_queue import RequestQueue
from dflash_aot.runtime.scheduler.scheduler import Scheduler
from dflash_aot.runtime.speculation.controller import FixedK, RoundMember, SpeculationController
from tests.runtime.toy import SAMPLED, ToyEngine, always

# -- the pool


@dataclass
class PlainPool:
    """The pool as plain lists: pages in use with their users, pages that are kept in the order of their last use."""

    count: int
    users: Counter = field(default_factory=Counter)
    kept: list[int] = field(default_factory=list)
    keys: dict[int, bytes] = field(default_factory=dict)


EVENTS = st.sampled_from(["take", "name", "share", "release"])


@given(st.integers(1, 8), st.lists(st.tuples(EVENTS, st.integers(0, 99))))
def test_random_use_of_the_pool_equals_a_plain_model(count, events):
    pool, plain = PagePool(count), PlainPool(count)
    held: list[int] = []  # once for each user
    for what, number in events:
        free = set(range(1, count + 1)) - {*plain.users.elements(), *plain.kept}
        if what == "take":
            wanted = number % 3
            if wanted > len(free) + len(plain.kept):
                with pytest.raises(PoolFull):
                    pool.take(wanted)
                continue
            taken = pool.take(wanted)
            given_up = plain.kept[: max(0, wanted - len(free))]
            assert set(taken) <= free | set(given_up) and len(set(taken)) == wanted
            plain.kept = plain.kept[len(given_up) :]
            for page in given_up:
                assert pool.find(plain.keys.pop(page)) is None
            held += taken
            plain.users.update(taken)
        elif what == "name" and held:
            page, key = held[number % len(held)], bytes([number % 4])
            pool.set_key(page, key)
            if page not in plain.keys and key not in plain.keys.values():
                plain.keys[page] = key
        elif what == "share" and plain.keys:
            page = sorted(plain.keys)[number % len(plain.keys)]
            assert pool.find(plain.keys[page]) == page
            pool.share(page)
            plain.kept = [one for one in plain.kept if one != page]
            held.append(page)
            plain.users[page] += 1
        elif what == "release" and held:
            page = held.pop(number % len(held))
            pool.release([page])
            plain.users -= Counter([page])
            if not plain.users[page] and page in plain.keys:
                plain.kept.append(page)
        assert pool.used == len(+plain.users)
        assert pool.available == count - pool.used
        assert {page for page in range(1, count + 1) if pool._users[page]} == set(plain.users)


def test_last_pages_of_a_text_are_evicted_first():
    pool = PagePool(3)
    pages = pool.take(3)
    for page in pages:
        pool.set_key(page, bytes([page]))
    pool.release(pages)
    assert [pool.take(1) for _ in range(3)] == [[page] for page in reversed(pages)]
    assert pool.evictions == 3


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8), st.integers(1, 3))
def test_texts_have_equal_keys_only_where_they_are_equal(left, right, page):
    def keys(text, salt=""):
        key, found = start_key(salt), []
        for at in range(0, len(text) - page + 1, page):
            key = extend_key(key, text[at : at + page])
            found.append(key)
        return found

    for index, (one, other) in enumerate(zip(keys(left), keys(right), strict=False), 1):
        assert (one == other) == (left[: index * page] == right[: index * page])
    assert not {*keys(left)} & {*keys(left, "salt")}
    assert len({*keys(left)}) == len(keys(left))  # the place in the text counts too


def test_tokens_and_salts_are_told_apart_at_their_borders():
    assert extend_key(start_key(""), [1, 256]) != extend_key(start_key(""), [257, 0])
    assert extend_key(start_key(""), [1]) != extend_key(start_key(""), [1, 0])
    assert len({start_key(salt) for salt in ("", "a", "b", "ab", "\0", "\ud800")}) == 6


# -- tables


def make_kv(pages: int) -> KvPages:
    return KvPages(parse_grid(f"batch=1 length={4 * pages} k=0 prefill=4 page=4", 8))


def test_table_shares_full_pages_but_the_last_token():
    kv, text = make_kv(20), [*range(8)]
    first = PageTable()
    assert kv.open(first, [*text, 8]) == 0
    kv.index_full_pages(first, [*text, 8], 9)
    assert kv.open(same := PageTable(), text) == 4  # of 8 tokens the last one is computed
    assert same.pages[0] == first.pages[0] and same.pages[1] != first.pages[1]
    assert kv.open(longer := PageTable(), [*text, 9, 9]) == 8
    assert longer.pages[:2] == first.pages[:2] and longer.pages[2] not in first.pages
    assert kv.open(PageTable(), [1, *text]) == 0
    assert kv.open(PageTable(cached=False), [*text, 9]) == 0


def test_table_without_enough_pages_stays_empty_and_holds_none():
    kv = make_kv(3)
    kv.open(first := PageTable(), [*range(9)])
    kv.index_full_pages(first, [*range(9)], 9)
    kv.close(first)
    second = PageTable()
    with pytest.raises(PoolFull):
        kv.open(second, [*range(13)])
    assert (second.pages, kv.pool.available) == ([], 3)
    assert kv.open(second, [*range(9)]) == 8  # they were not given up


# -- on the toy device

SMALL = "batch=1,2,4 length=16,64 k=0,3 prefill=4,16 kv_positions=64"


def serve(buckets: str = SMALL, **options: Any) -> ToyEngine:
    return ToyEngine(buckets, k=3, **options)


def test_second_request_computes_only_what_the_first_did_not():
    engine, text = serve(right=always(2)), [*range(1, 31)]
    first = engine.submit(text, 10)
    engine.run()
    second = engine.submit([*text, *first.output.token_ids, 5], 6)
    engine.run()
    # 40 positions of the first request: all full pages but that of the last token, whose kv was never needed.
    assert (first.progress.cached_tokens, second.progress.cached_tokens) == (0, 36)
    assert engine.counters.prompt_tokens == 30 + 41 - 36
    stats = engine.loop.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.pages_used) == (30 + 41, 36, 0)
    assert second.accepted[:1] == [2]  # the draft's kv is there too


def test_choices_of_one_prompt_compute_it_once():
    """All get a slot in one step. Each computes what no other has begun: pages, and its own last token."""
    engine, text = serve(), [*range(1, 34)]
    choices = [engine.submit(text, 4, temperature=0.5, seed=seed) for seed in range(4)]
    engine.run()
    assert engine.counters.prompt_tokens == 32 + 4
    assert sum(request.progress.cached_tokens for request in choices) == 3 * 32
    assert min(request.progress.cached_at_start for request in choices) == 0
    assert max(request.progress.started for request in choices) < min(request.output.finished for request in choices)


def fail(engine: ToyEngine) -> None:
    engine.bundle.fail("verify")
    engine.submit([3], 4)
    engine.run()


@pytest.mark.parametrize("lose", [fail, lambda engine: engine.loop.reset_state()], ids=["failed", "reset"])
def test_pages_of_a_lost_device_state_are_forgotten(lose):
    engine, text = serve(), [*range(1, 20)]
    engine.submit(text, 4)
    engine.run()
    lose(engine)
    again = engine.submit(text, 4)
    engine.run()
    assert again.progress.cached_tokens == 0


def test_preempted_request_continues_with_the_same_text():
    engine = serve(right=always(1))
    requests = [engine.submit([number] * 9, 40, **(SAMPLED if number % 2 else {})) for number in range(1, 5)]
    engine.run()
    assert requests[0].progress.preemptions == 0 < requests[3].progress.preemptions
    stats = engine.loop.stats()
    assert stats.preemptions == sum(request.progress.preemptions for request in requests)
    assert stats.finished == {"length": 4}
    assert sum(stats.queued.counts) == 4
    assert stats.prompt_tokens == 4 * 9  # those computed again count once


def test_least_important_request_is_set_back_first():
    engine = serve(right=always(1))
    low, high, _ = (engine.submit([1 + priority] * 12, 48, priority=priority) for priority in (2, 0, 1))
    engine.run()
    assert high.progress.preemptions == 0 < low.progress.preemptions


def test_request_starts_only_with_pages_for_its_first_round():
    engine = serve(right=always(1))
    engine.submit([1] * 40, 20)
    engine.submit([2] * 20, 4)  # 5 pages for the text, 5 are available
    engine.run()
    assert engine.loop.stats().preemptions == 0


class CompleteAt:
    """A grammar that completes the answer with other tokens instead of one token."""

    is_complete = False

    def __init__(self, token: int, completion: Sequence[int]):
        self._token, self._completion = token, completion

    def accept(self, token: int, room: int) -> Sequence[int] | None:
        return self._completion if token == self._token else None


def test_completion_gets_no_key_for_kv_of_replaced_tokens():
    grid, queue = parse_grid(SMALL + " page=4", 8), RequestQueue(1)
    scheduler = Scheduler(grid, ("greedy",), 3, queue, FixedK(3))
    request = Request([1, 2, 3, 4], SamplingParams(), 9, frozenset(), None, lambda delta: None)
    request.matcher = CompleteAt(7, [8, 9, 9, 9])  # type: ignore[assignment]
    queue.put(request)
    scheduler.fill_slots()
    (running,) = scheduler.slots
    running.length = 8  # the kv of 1, 2, 3, 4 and 5, 6, 7, 10
    request.take([5, 6, 7, 10, 11])
    assert request.output.token_ids == [5, 6, 8, 9, 9, 9]
    scheduler.note_tokens([running])
    first = extend_key(start_key(None), [1, 2, 3, 4])
    pool = scheduler.kv.pool
    assert (pool.find(first), pool.find(extend_key(first, [5, 6, 8, 9]))) == (running.table.pages[0], None)


def test_trial_of_another_k_sets_no_request_back():
    """At their ends the two hold 44 + 20 positions, all that there are: with K = 3 they would need more."""
    engine = serve(right=always(0), controller=LargestK())
    engine.submit([1] * 40, 4)
    engine.submit([2] * 16, 4)
    engine.run()
    assert {call.bucket.k for call in engine.rounds} == {0, 3} and engine.loop.stats().preemptions == 0


class LargestK(SpeculationController):
    """Always tries the largest K of those offered."""

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        return buckets[-1]


def test_planned_restore_comes_before_a_save_that_evicts_its_state():
    """The device does copies in the order in which they are planned."""
    kv, text = KvPages(parse_grid("batch=2 length=64 k=0 prefill=8 page=8 saved_states=1", 8)), [*range(20)]
    first, second, third = PageTable(), PageTable(), PageTable()
    kv.open(first, text)
    kv.index_full_pages(first, text, 20)
    saved = kv.plan_save(first, text, 20, 0, answers=False)
    assert kv.open(second, [*text, 30]) == 20
    restored = kv.plan_restore(second, 1)
    evicting = kv.plan_save(first, [*text, 40], 21, 0, answers=False)
    assert restored.source == saved.destination == evicting.destination
    assert (restored.source_page, restored.length) == (evicting.destination_page, 20)
    assert kv.open(third, [*text, 30]) == 0 and kv.states.evictions == 1


# -- host memory


def serve_evicting(first: Sequence[int], **options: Any) -> ToyEngine:
    """Serves a prompt, and then others that evict its pages."""
    engine = serve(SMALL + " offload=1", **options)
    for prompt in (first, [50] * 40, [51] * 40):
        engine.submit(prompt, 4)
        engine.run()
    return engine


@pytest.mark.parametrize("host_speed", [1e9, 28.0, 13.0])
def test_evicted_pages_come_back_from_the_host_where_that_is_faster_than_computing(host_speed):
    """The seven pages of 28 positions cost two chunks to compute, and 28 bytes to copy."""
    text = [*range(1, 31)]
    engine = serve_evicting(text, host_bytes=1000, host_speed=host_speed)
    again = engine.submit([*text, 5], 6)
    engine.run()
    pays = host_speed > 14
    stats = engine.loop.stats()
    assert again.progress.cached_tokens == again.progress.cached_at_start == stats.host_hits == 28 * pays
    assert stats.restored_bytes == stats.host_hits <= stats.offloaded_bytes == stats.host_bytes


def test_host_memory_keeps_what_was_used_last():
    text = [*range(1, 31)]
    engine = serve_evicting(text, host_bytes=40)  # ten pages of some twenty that were evicted
    again = engine.submit([*text, 5], 6)
    engine.run()
    stats = engine.loop.stats()
    assert (again.progress.cached_tokens, stats.host_hits) == (0, 0)
    assert stats.host_evictions > 0 and stats.host_bytes == 40


def test_copies_share_turns_with_chunks_and_pages_with_other_requests(monkeypatch):
    """A step copies two pages. The second request takes those that the first has copied; a third is cancelled."""
    monkeypatch.setattr(kv_pages, "TRANSFER_BYTES", 8)
    text = [*range(1, 31)]
    engine = serve_evicting(text, host_bytes=1000)
    running = engine.submit([60] * 3, 30)
    engine.step()
    first, second, third = (engine.submit([*text, last], 4) for last in (5, 6, 7))
    engine.step()
    third.cancel()
    engine.run()
    assert (first.progress.cached_tokens, second.progress.cached_tokens) == (28, 28)
    assert engine.loop.stats().restored_bytes < 2 * 28
    copying = [step for step in engine.steps if any(call.program == "write_page" for call in step)]
    assert len(copying) > 3 and running.output.finish_reason == "length"
    assert all(any(call.program in ("verify", "rounds") for call in step) for step in copying)
