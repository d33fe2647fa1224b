"""dflash-bench quality: figures of made-up logits and rounds."""

import numpy as np
import pytest

from dflash_aot.benchmarks import contenders, quality_bench
from dflash_aot.benchmarks.record import RECORD_SCHEMA, Record


def test_agreement_and_divergence_of_logits_follow_their_definitions():
    plain = np.log(np.array([[0.5, 0.5, 1e-30], [0.25, 0.75, 1e-30]], np.float32))
    other = np.log(np.array([[0.5, 0.5, 1e-30], [0.75, 0.25, 1e-30]], np.float32))
    found = quality_bench.compare_logits(plain + 3, other - 1)  # a constant changes nothing
    assert (found["positions"], found["same"]) == (2, 1)
    assert found["divergence"] == pytest.approx(0.5 * np.log(3) / 2, abs=1e-6)


def test_tables_count_positions_and_tokens_per_round():
    texts = [{"kind": "text", "positions": 100, "same": same, "divergence": kl} for same, kl in ((99, 0.1), (98, 0.3))]
    rounds = [
        {"kind": "rounds", "way": way, "rounds": 10, "accepted": accepted}
        for way, accepted in (("plain", 20), ("plain", 40), ("int8", 30), ("int8", 24))
    ]
    record = Record(RECORD_SCHEMA, "quality", "", "", "", 1.0, {}, {}, [*texts, *rounds], "")
    logits, taus = quality_bench.make_findings(record).tables
    assert logits.rows == (("200", "98.50%", "0.20000"),)
    assert taus.rows == (("plain", "4.000", "1.000"), ("int8", "3.700", "0.925"))


def test_logits_of_a_text_choose_the_golden_answer(bundle, tied):
    """Each token of the greedy answer is the likeliest behind the tokens before it."""
    pair = contenders.BenchmarkPair("tied", tied.target, tied.draft)
    prompt, answer = (tied.facts["prompts"][0][name] for name in ("prompt_ids", "new_token_ids"))
    (logits,) = quality_bench.read_logits(bundle("tiny"), pair, [[*prompt, *answer]])
    assert logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == answer
