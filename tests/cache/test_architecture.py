"""Derived facts of drafts."""

from msgspec import structs

from dflash_aot.cache.model_config.architecture import default_target_layer_ids


def test_default_target_layer_ids_are_spread_evenly():
    for layers, layer_ids in [
        ((36, 5), (1, 9, 17, 25, 33)),
        ((32, 5), (1, 8, 15, 22, 29)),
        ((28, 5), (1, 7, 13, 19, 25)),
        ((6, 2), (1, 3)),
        ((7, 3), (1, 2, 4)),  # 1 + 1.5 rounds to even, as Python does
        ((36, 1), (18,)),
        ((7, 1), (3,)),
    ]:
        assert default_target_layer_ids(*layers) == layer_ids


def test_draft_with_a_smaller_vocabulary_is_pruned(read_changed_draft):
    for vocab, pruned in [(None, False), (151936, False), (32000, True)]:
        assert structs.replace(read_changed_draft(), vocab=vocab).pruned is pruned


def test_default_k_is_suggested_or_the_whole_block(read_changed_draft):
    for k, default_k in [(None, 15), (7, 7), (15, 15)]:
        assert structs.replace(read_changed_draft(), k=k).default_k == default_k
