"""Facts of a pair that follow from other facts."""

import pytest
from msgspec import structs

from dflash_aot.cache.model_config.architecture import default_target_layer_ids


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        ((36, 5), (1, 9, 17, 25, 33)),
        ((32, 5), (1, 8, 15, 22, 29)),
        ((28, 5), (1, 7, 13, 19, 25)),
        ((6, 2), (1, 3)),
        ((7, 3), (1, 2, 4)),  # 1 + 1.5 rounds to even, as Python does
        ((36, 1), (18,)),
        ((7, 1), (3,)),
    ],
)
def test_taps_that_are_not_named_are_spread_evenly(layers, taps):
    assert default_target_layer_ids(*layers) == taps


@pytest.mark.parametrize(("vocab", "pruned"), [(None, False), (151936, False), (32000, True)])
def test_a_draft_is_pruned_where_its_own_head_knows_fewer_tokens(read_changed_draft, vocab, pruned):
    assert structs.replace(read_changed_draft(), vocab=vocab).pruned is pruned


@pytest.mark.parametrize(("k", "verified"), [(None, 15), (7, 7), (15, 15)])
def test_a_draft_verifies_its_whole_block_unless_its_makers_say_less(read_changed_draft, k, verified):
    assert structs.replace(read_changed_draft(), k=k).default_k == verified
