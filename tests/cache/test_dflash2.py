"""DFlash2 drafts in both dialects: facts, defaults, and refusals of keys and values."""

from pathlib import Path

import pytest
from transformers import Qwen3Config
from transformers.modeling_rope_utils import RopeParameters

from dflash_aot.cache.model_config.architecture import (
    BlockConvolution,
    CandidateSelector,
    Draft,
    Scaling,
    SlidingWindow,
)
from dflash_aot.cache.model_config.config_file import ConfigFile
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.draft_keys import EQUALS, LAYER_KEYS, NEUTRAL_KEYS, NO_OPS, OTHER_NAMES
from dflash_aot.cache.model_config.rope import ROPE_KEYS

NAME = "Qwen3-8B-DFlash2-b16"
FILE = "dflash-b16/config.json: "
INNER = f"{FILE}dflash_config."
UNKNOWN = "unknown in a draft's config, where it may change the computation"


@pytest.fixture
def read_changed(published, read_published_draft):
    def read(inner: dict | None = None, **changes: object) -> Draft:
        section = {**published(NAME)["dflash_config"], **(inner or {})}
        return read_published_draft(NAME, "Qwen3-8B", **{"dflash_config": section, **changes})

    return read


@pytest.fixture
def read_changed_golden(published, read_published_draft):
    """Reads the golden DFlash2 draft of the speculators library with changes; `layers` are changes of its layers."""

    def read(layers: dict | None = None, **changes: object) -> Draft:
        name = "dflash2-tiny-speculators/draft_sliding"
        section = {**published(name)["transformer_layer_config"], **(layers or {})}
        return read_published_draft(name, "dflash2-tiny/target", **{"transformer_layer_config": section, **changes})

    return read


def test_config_for_qwen3_is_read(read_changed):
    draft = read_changed()
    assert draft.convolution == BlockConvolution(kernel=2, group=16)
    assert draft.heads.selector == CandidateSelector(rank=256, candidates=16)
    assert draft.windows == (SlidingWindow(2048, causal=False),) * 5
    assert (draft.generation, draft.block, draft.default_k, draft.heads.vocab) == ("DFlash2", 16, 15, None)


def test_published_draft_of_muse_glimmer_is_read(published, read_published_target):
    """For a supported target with the sizes of Muse-Glimmer."""
    sizes = {"hidden_size": 6656, "num_hidden_layers": 52, "vocab_size": 202048, "num_attention_heads": 64}
    config = ConfigFile(Path("config.json"), published("Muse-Glimmer-DFlash2-b16"))
    draft = read_draft(config, read_published_target("Llama-3.1-8B", **sizes))
    assert draft.scaling == Scaling(logits=26**-0.5, cap=20.0)
    assert draft.target_layer_ids == (1, 13, 25, 37, 49)
    assert (draft.decoder.hidden, draft.decoder.vocab, draft.mask_token) == (6656, 202048, 201818)


def test_speculators_defaults(read_changed_golden):
    absent = dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"))
    draft = read_changed_golden(**absent, sliding_window_non_causal=None)
    assert draft.convolution == BlockConvolution(2, 16) and draft.heads.selector == CandidateSelector(256, 16)
    assert draft.windows == (SlidingWindow(12, causal=False, anchored=True), None)
    assert read_changed_golden(sliding_window_non_causal=False).windows[0].causal


def test_each_name_of_the_speculators_library_selects_dflash2(read_changed_golden):
    for changes in [
        {"speculators_model_type": None},
        {"architectures": None},
        {"architectures": None, "speculators_config": None},
    ]:
        assert read_changed_golden(**changes).generation == "DFlash2"


def test_every_key_of_a_rotary_embedding_is_accepted(read_changed):
    assert set(RopeParameters.__annotations__) - ROPE_KEYS <= {"short_factor", "long_factor", "mrope_section"}
    assert read_changed(rope_parameters=dict.fromkeys(ROPE_KEYS) | {"rope_theta": 1e6}) == read_changed()


def test_every_key_that_transformers_writes_is_accepted():
    written = {key for key in Qwen3Config().to_dict() if not key.startswith("_")}
    lists = (NEUTRAL_KEYS, LAYER_KEYS, NO_OPS.keys(), EQUALS.keys(), OTHER_NAMES.keys())
    assert written <= NEUTRAL_KEYS | LAYER_KEYS
    assert len(set().union(*lists)) == sum(map(len, lists))  # one meaning for each key


def test_other_names_of_dflash2_are_read(read_changed):
    for name in ("DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"):
        assert read_changed(architectures=[name]) == read_changed()


def test_defaults_of_other_programs_are_accepted(read_changed):
    given = {"attention_mode": "gqa", "use_swa": False, "projector_type": "dflash2"}
    assert read_changed(given, has_own_embed_tokens=False, has_own_lm_head=False) == read_changed()


def test_invalid_zlab_config_is_refused(read_changed, refusal):
    for inner, changes, words in [
        ({"selector_rank": 16385}, {}, f"{INNER}selector_rank is 16385: expected at most 16384"),
        ({"selector_top_k": 0}, {}, f"{INNER}selector_top_k is 0: expected a positive number"),
        ({"selector_top_k": 151937}, {}, f"{INNER}selector_top_k is 151937: the vocabulary has 151936 tokens"),
        ({"selector_top_k": 129}, {}, f"{INNER}selector_top_k is 129: at most 128 are supported"),
        ({"conv_kernel_size": 17}, {}, f"{INNER}conv_kernel_size is 17: longer than the block of 16 tokens"),
        ({"conv_group_size": 24}, {}, f"{INNER}conv_group_size is 24: does not divide the hidden width of 4096"),
        ({"selector_rank": 256}, {"selector_rank": 16}, f"{INNER}selector_rank is 256 but {FILE}selector_rank is 16"),
        ({"output_multiplier": -0.5}, {}, f"{INNER}output_multiplier is -0.5: expected a positive number"),
        ({"final_logit_softcapping": float("inf")}, {}, f"{INNER}final_logit_softcapping is inf: expected a number"),
        ({"selector_temperature": 2.0}, {}, f"{INNER}selector_temperature is 2.0: {UNKNOWN}"),
        ({}, {"use_sliding_window": False}, f"{FILE}use_sliding_window is False: but layer_types has"),
        ({"mask_token_id": None}, {}, f"{FILE}mask_token_id is missing"),
        ({"projector_type": "domino"}, {}, f"{INNER}projector_type is 'domino': this is Domino"),
    ]:
        assert refusal(read_changed, inner, **changes).startswith(words)


def test_invalid_speculators_config_is_refused(read_changed_golden, refusal):
    for layers, changes, words in [
        ({}, {"selector_top_k": 513}, "selector_top_k is 513: the vocabulary has 512 tokens"),
        ({}, {"conv_kernel_size": 9}, "conv_kernel_size is 9: longer than the block of 8 tokens"),
        ({}, {"draft_vocab_size": 256}, "draft_vocab_size is 256: DFlash2 needs the whole vocabulary of 512 tokens"),
        ({}, {"draft_vocab_size": None}, "draft_vocab_size is 32000: the target's vocabulary has 512"),
        ({}, {"sample_from_anchor": True}, "sample_from_anchor is True: this is a draft that samples its anchor"),
        ({}, {"output_multiplier": 2.0}, f"output_multiplier is 2.0: {UNKNOWN}"),
        ({}, {"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash': another key of this config"),
        ({}, {"speculators_config": {"algorithm": "dflash"}}, "speculators_config.algorithm is 'dflash': another key"),
    ]:
        assert refusal(read_changed_golden, layers, **changes).startswith(FILE + words)
