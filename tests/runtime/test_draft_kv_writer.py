"""Deferred writes of draft kv: drafts are the same as where each round writes it, with fewer calls of kv_write."""

import random
from collections.abc import Sequence

import pytest

from dflash_aot.cache.grid import Bucket
from dflash_aot.cache.sampling_state import SamplingMode
from dflash_aot.runtime import dispatcher
from dflash_aot.runtime.speculation.controller import RoundMember, SpeculationController
from tests.runtime.toy import COSTS, SAMPLED, ToyEngine, always, rounds_of


class KByRound(SpeculationController):
    """K of each round in turn, again and again."""

    def __init__(self, ks: Sequence[int]):
        self._ks, self._round = ks, -1

    def choose_bucket(self, buckets: Sequence[Bucket], members: Sequence[RoundMember], mode: SamplingMode) -> Bucket:
        self._round += 1
        wanted = self._ks[self._round % len(self._ks)]
        return next(bucket for bucket in reversed(buckets) if bucket.k <= wanted)


def serve(ks: Sequence[int], lengths: Sequence[int], batch: int = 1) -> ToyEngine:
    grid = f"batch={batch} length=128 k=0,3,7 prefill=16"
    engine = ToyEngine(grid, k=7, controller=KByRound(ks), right=always(2))
    for number, length in enumerate(lengths):
        engine.submit([1, 2, 3 + number], length)
    engine.run()
    return engine


def list_widths(engine: ToyEngine) -> list[int]:
    """Widths of the calls of kv_write behind the prompt."""
    return [call.bucket[1] for call in engine.bundle.log if call.program == "kv_write"][1:]


def test_engine_without_drafts_writes_for_eight_rounds_at_once():
    """Forty tokens: one of the prefill, and 39 rounds. The kv of the last seven is never written."""
    assert list_widths(serve([0], [40])) == [8] * 4


def test_draft_is_preceded_by_writes_of_deferred_rounds():
    """One for all rounds that the host has, one for the newest. Then comes the round with K = 3: 4 positions."""
    for rounds, widths in {1: [1], 2: [1, 1], 4: [4, 1], 6: [8, 1], 9: [8, 1], 10: [8, 1, 1]}.items():
        engine = serve([*[0] * rounds, 3], [rounds + 2])
        assert list_widths(engine)[: len(widths) + 1] == [*widths, 4]


def test_features_of_failed_rounds_are_forgotten():
    """Their pages belong to nobody after a failure: the next request's kv would be overwritten."""
    grid = "batch=1 length=128 k=0,3,7 prefill=16"
    engine = ToyEngine(grid, k=7, controller=KByRound([*[0] * 6, 3]), right=always(2))
    failed = engine.submit([1, 2, 3], 20)
    while len(rounds_of(engine.steps)) < 4:
        engine.step()
    engine.bundle.fail("verify")
    engine.run()
    assert failed.output.finish_reason == "error"
    written = len(list_widths(engine))
    engine.submit([4, 5, 6, 7], 3)
    engine.run()
    assert list_widths(engine)[written] == 16  # its prompt


def test_joined_features_have_a_bounded_size(monkeypatch):
    """With room for five of the toy's features, of three numbers each, four rounds are joined."""
    monkeypatch.setattr(dispatcher, "MAX_JOINED_BYTES", 5 * 3 * 4)  # int32
    assert set(list_widths(serve([0], [40]))) == {4}


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_find_the_kv_of_their_tokens(seed):
    """The toy's draft refuses kv that is not of the request's own tokens, and waits for no features.

    Few pages, of which ended and preempted requests leave some to others while their kv is deferred; prefixes that
    others have; sampled requests whose prompt was computed before, so that a round comes without a prefill. With odd
    seeds, multi-round steps between such rounds.
    """
    rng = random.Random(seed)
    ks = [k for _ in range(40) for k in [*[0] * rng.randrange(25), rng.choice((3, 7))]]
    grid = "batch=1,2,4 length=32,64 k=0,3,7 prefill=4,16 kv_positions=96" + " rounds=4" * (seed % 2)
    engine = ToyEngine(grid, k=7, controller=KByRound(ks), right=lambda text: sum(text) % 8, costs=COSTS)
    requests = []
    while len(requests) < 60 or not engine.loop.is_idle:
        if len(requests) < 60 and rng.random() < 0.3:
            prompt = [*range(rng.randrange(12)), *rng.choices(range(97), k=rng.choice((1, 3, 8)))]
            params = SAMPLED if rng.random() < 0.3 else {}
            if requests and rng.random() < 0.3:
                prompt = requests[-1].prompt
            requests.append(engine.submit(prompt, rng.randint(1, 40), priority=rng.randrange(2), **params))
        if requests and rng.random() < 0.05:
            rng.choice(requests).cancel()
        engine.step()
    for request in requests:
        engine.check(request)
    stats = engine.loop.stats()
    assert stats.failures == 0 < min(stats.preemptions, stats.moves, stats.prefix_hits)
    log = engine.bundle.log
    assert any(call.program == "verify" and call.bucket.k == 0 for call in log)
    assert any(call.program == "rounds" for call in log) == bool(seed % 2)
