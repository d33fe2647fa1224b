"""The plain loop: what it answers, when, and what it tells of its steps."""

import jax
import numpy as np
import pytest

from dflash_aot.benchmarks.jit_loop import JitLoop, Jitted
from dflash_aot.cache.bundle.manifest import read_manifest

TOKENS = 24


@pytest.fixture(scope="module")
def source(bundle, untied) -> Jitted:
    return Jitted(read_manifest(bundle("untied")), untied.target, untied.draft)


@pytest.fixture(scope="module")
def loop(source) -> JitLoop:
    """Two rows at K = 15."""
    return JitLoop(source, 2, 15, longest=70, tokens=TOKENS)


@pytest.fixture(scope="module")
def cases(untied) -> dict[str, tuple[list[int], list[int]]]:
    """Prompts of one, two and three chunks, and what the reference says behind each."""
    chosen = [one for one in untied.facts["prompts"] if one["name"] in ("len1", "len30", "len70")]
    return {one["name"]: (one["prompt_ids"], one["ar_output_ids"][len(one["prompt_ids"]) :][:TOKENS]) for one in chosen}


def test_the_plain_loop_says_what_the_reference_says(loop, cases):
    lists = [["len1"], ["len30", "len70", "len1"]]
    served = loop.serve([[cases[name][0] for name in names] for names in lists])
    assert [[one.token_ids for one in row] for row in served.answers] == [
        [cases[name][1] for name in names] for names in lists
    ]
    work = served.work
    assert work.compile_events == 0
    assert work.rows == 2 * work.rounds == work.row_rounds + work.padded_rows
    assert work.rounds_by_k == {15: work.rounds}
    assert work.padded_rows > 0  # the first row has nothing to do while the second one goes on
    for answer in (one for row in served.answers for one in row):
        assert answer.arrivals[0] > 0 and answer.arrivals == sorted(answer.arrivals)
        assert len(answer.arrivals) == TOKENS and answer.seconds <= served.seconds
        assert len(set(answer.arrivals)) == 1 + len(answer.accepted)
        assert sum(answer.accepted) + len(answer.accepted) >= TOKENS - 1


def test_a_row_waits_for_the_prefills_before_it(loop, cases):
    prompt = cases["len30"][0]
    (first,), (second,) = loop.serve([[prompt], [prompt]]).answers
    assert first.token_ids == second.token_ids and first.first_seconds < second.first_seconds


def test_every_step_is_told_with_its_results(source, cases):
    steps: list[tuple[str, list[tuple[int, ...]]]] = []

    def note(step: str, results: list[jax.Array]) -> None:
        steps.append((step, [np.asarray(one).shape for one in results]))

    prompt = cases["len1"][0]
    served = JitLoop(source, 2, 15, 70, TOKENS, note).serve([[prompt], []])
    names = [step for step, _ in steps]
    assert names == ["prefill", *["draft", "verify", "kv_write", "read"] * served.work.rounds]
    assert dict(steps)["draft"] == [(2, 16)]
    assert dict(steps)["verify"][-1] == (2, 32)
