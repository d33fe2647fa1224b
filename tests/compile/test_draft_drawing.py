"""The draft program's own drawing: over many seeds its tokens follow the softmax of the draft's scores."""

import numpy as np
import pytest

from dflash_aot.cache.grid import parse_grid
from dflash_aot.cache.sampling_state import NEUTRAL_SAMPLING, SAMPLING_COLUMNS
from tests.compile.conftest import Rig

ROWS, CALLS, K, TEMPERATURE = 8, 500, 3, 2.5
MIN_EXPECTED = 20  # draws of a cell; rarer tokens share a cell
CANDIDATES = 32  # of a DFlash draft


def softmax(scores):
    odds = np.exp(np.float64(scores) - scores.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def list_probabilities(models, prompt):
    """The probabilities of the tokens of the first two drafted positions, [2, V]."""
    features, found = models.features(prompt[:-1]), np.zeros((2, models.target.decoder.vocab))
    if models.draft.selector is None:
        for row, logits in zip(found, models.draft_logits(features, prompt[-1]), strict=False):
            likeliest = np.argsort(-logits)[:CANDIDATES]
            row[likeliest] = softmax(logits[likeliest] / TEMPERATURE)
        return found
    tokens, scores = models.draft_candidates(features, prompt[-1])
    first = softmax(scores[0, -1] / TEMPERATURE)
    found[0, tokens[0]], found[1, tokens[1]] = first, first @ softmax(scores[1] / TEMPERATURE)
    return found


def measure_chi_square(drawn, probabilities):
    """Chi-square over its degrees of freedom, in standard deviations from what is expected."""
    expected, counts = probabilities * len(drawn), np.bincount(drawn, minlength=len(probabilities))
    often = expected >= MIN_EXPECTED
    expected = np.array([*expected[often], max(expected[~often].sum(), 1)])
    counts = np.array([*counts[often], counts[~often].sum()])
    freedom = len(counts) - 1
    assert freedom >= 4
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("key", ["tied", "dflash2"])
def test_draft_program_draws_from_its_own_distribution(runs, load_models, key):
    models = load_models(runs[key].target, runs[key].draft)
    prompt = max((one["prompt_ids"] for one in runs[key].facts["prompts"]), key=len)[:12]
    rig = Rig(models, parse_grid(f"batch={ROWS} length=32 k={K} prefill=16", models.draft.block))
    arrays = rig.empty()
    for slot in range(ROWS):
        arrays = rig.prefill(arrays, slot, prompt[:-1], width=16)
    columns = {**NEUTRAL_SAMPLING, "temperature": TEMPERATURE}
    asked = np.broadcast_to(np.float32([columns[name] for name in SAMPLING_COLUMNS]), (ROWS, len(columns)))
    arrays |= {"anchors": np.full(ROWS, prompt[-1], np.int32), "sampling": asked}
    assert arrays["lengths"].tolist() == [11] * ROWS
    seeds, drawn = np.random.default_rng(2).integers(0, 1 << 31, (CALLS, ROWS, 2), np.int32), []
    for each in seeds:
        block = rig.run(f"draft batch={ROWS} length=32 k={K}", {**arrays, "seeds": each}, sampled=[True])["block"]
        drawn.append(np.asarray(block)[:, 1:3])
    for tokens, probabilities in zip(np.concatenate(drawn).T, list_probabilities(models, prompt), strict=True):
        assert measure_chi_square(tokens, probabilities) < 4
        other = np.where(probabilities > 0, probabilities**1.3, 0)
        assert measure_chi_square(tokens, other / other.sum()) > 8  # the test can tell temperatures apart
