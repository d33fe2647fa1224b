"""Many cancels at once: afterwards every slot, place and token is accounted for. tests/test_soak.py has more kinds."""

import random
import time

from dflash_aot.cache.errors import QueueFull
from dflash_aot.runtime import Engine, SamplingParams, Stream
from tests.runtime.traffic import THREADS, Tally, check_accounts, run_threads

NAMES = ("len1", "len_eq_block", "len5", "len30", "len70", "len131", "random12")


def up_to(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, stop_token_ids=())


def test_many_cancels_leave_nothing_behind(bundle, cases):
    each = 250

    def storm(engine: Engine, rng: random.Random) -> Tally:
        """Submits, and cancels at random moments: in the queue, in prefill, in decode, after the end."""
        tally, open_streams = Tally(), []
        while tally.ends.total() + len(open_streams) < each:
            case = cases[rng.choice(NAMES)]
            try:
                stream = engine.stream(case.prompt, up_to(40), wait=rng.random() < 0.9, priority=rng.randrange(3))
            except QueueFull:
                tally.refused += 1
                continue
            open_streams.append((stream, case))
            while rng.random() < 0.6 and open_streams:
                end(tally, *open_streams.pop(rng.randrange(len(open_streams))), rng)
        rng.shuffle(open_streams)
        for stream, case in open_streams:
            end(tally, stream, case, rng)
        return tally

    def end(tally: Tally, stream: Stream, case, rng: random.Random) -> None:
        time.sleep(rng.choice((0, 0, 0, 0.001)))
        for _, _ in zip(range(rng.choice((0, 0, 0, 1, 3))), stream, strict=False):
            pass
        stream.close()
        result = stream.result()
        tally.note(result)
        if result.token_ids != case.answer[: len(result.token_ids)]:
            tally.wrong.append(result)

    with Engine.open(bundle("tied"), k=7, max_waiting=20) as engine:
        tally = run_threads(lambda rng: storm(engine, rng), seed=1)
        check_accounts(engine, tally)
        assert tally.ends.total() == THREADS * each and tally.ends["cancelled"] > 3 * each
        case = cases["len70"]
        assert engine.generate(case.prompt, up_to(60)).token_ids == case.answer[:60]
