"""DSpark drafts in both packagings, drafts with tables of their own, and Open Spec Config: facts and refusals."""

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import save_file

from dflash_aot.cache.errors import BadCheckpoint
from dflash_aot.cache.model_config.architecture import ConfidenceHead, Draft, DraftHeads, MarkovHead, SlidingWindow
from dflash_aot.cache.model_config.config_file import ConfigFile, read_config
from dflash_aot.cache.model_config.draft import read_draft

DEEPSPEC, RANK_0 = "dspark-tiny/draft", "dspark-tiny/draft_rank0"
SPECULATORS = "dspark-tiny-speculators/draft_pruned_anchor"
TARGET = "dspark-tiny/target"
HEADS = DraftHeads(384, True, markov=MarkovHead(16), confidence=ConfidenceHead(80))
# The keys of the heads as SpecForge writes them.
SPECFORGE = {
    "projector_type": "dspark",
    "mask_token_id": 377,
    "target_layer_ids": [1, 3],
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "confidence_head_alpha": 1.0,
}
LAYERS = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "vocab_size": 384,
}
METHOD = {"method": "dflash", "speculative_tokens": 7, "target_layer_ids": [2, 4], "target_layer_start_idx": 1}
ROWS = {"mask_token_id": 377, "sample_from_anchor": False, "sliding_window_non_causal": False}
OPEN_SPEC_NAMES = {"open_spec_config_version": "0.0.0", "architectures": ["DflashDraftModel"]}
OPEN_SPEC = {**LAYERS, **OPEN_SPEC_NAMES, "speculative_config": {**METHOD, **ROWS}}


@pytest.fixture
def read(read_published_draft):
    return lambda name=DEEPSPEC, **changes: read_published_draft(name, TARGET, **changes)


@pytest.fixture
def read_proposal(published, read):
    """Reads the draft of the speculators library with another number of tokens, None for no method."""

    def read_it(tokens: int | None, **changes: object) -> Draft:
        methods = [] if tokens is None else [{"speculative_tokens": tokens}]
        config = {**published(SPECULATORS)["speculators_config"], "proposal_methods": methods}
        return read(SPECULATORS, speculators_config=config, **changes)

    return read_it


@pytest.fixture
def read_open_spec(read_published_target):
    def read_it(section: dict | None = None, **changes: object) -> Draft:
        config = {**OPEN_SPEC, "speculative_config": {**OPEN_SPEC["speculative_config"], **(section or {})}, **changes}
        return read_draft(ConfigFile(Path("config.json"), config), read_published_target(TARGET))

    return read_it


def test_every_row_of_a_deepspec_draft_predicts_a_token(read):
    draft = read()
    assert draft.heads == HEADS and draft.generation == "DSpark"
    assert (draft.block, draft.max_k, draft.default_k, draft.verified_block) == (7, 7, 7, 8)
    plain = read(RANK_0)
    assert plain.heads == DraftHeads(384, True) and plain.generation == "DFlash"
    assert read(sample_from_anchor=False).max_k == 6


def test_specforge_config_is_read_from_both_levels(read):
    found = read(architectures=["DSparkDraftModel"], dflash_config=SPECFORGE, target_layer_ids=None)
    assert (found.heads.vocab, found.heads.confidence) == (None, HEADS.confidence)
    repeated = {"dspark_block_size": 7, "dspark_target_layer_ids": [1, 3], "n_predict": 7}
    assert read(dflash_config=SPECFORGE, **repeated) == read()


def test_speculators_config_tells_which_rows_predict(read, read_proposal):
    draft = read(SPECULATORS)
    confidence = ConfidenceHead(64 + 24)
    assert draft.heads == DraftHeads(144, True, 8, markov=MarkovHead(24), confidence=confidence)
    assert draft.windows == (SlidingWindow(20, causal=True, anchored=True), None)
    assert read_proposal(8, sample_from_anchor=None) == draft
    assert read_proposal(7, sample_from_anchor=None).max_k == 7


def test_contradicting_rows_are_refused(read_proposal, read, refusal):
    words = "speculative_tokens tells nothing either: with 8 every row"
    assert words in refusal(read_proposal, 5, sample_from_anchor=None)
    assert words in refusal(read_proposal, None, sample_from_anchor=None)
    assert "proposal_methods[0].speculative_tokens is 8: a block drafts" in refusal(
        read_proposal, 8, sample_from_anchor=False
    )
    inner = {**SPECFORGE, "sample_from_anchor": True}
    assert "sample_from_anchor is True but" in refusal(read, dflash_config=inner, sample_from_anchor=False)


def test_invalid_heads_are_refused(read, refusal):
    for name, changes, words in [
        (DEEPSPEC, {"markov_head_type": "gated"}, "markov_head_type is 'gated': this is another Markov head"),
        (DEEPSPEC, {"markov_head_type": "rnn"}, "markov_head_type is 'rnn': this is another Markov head"),
        (DEEPSPEC, {"markov_head_type": None}, "markov_head_type is None: expected 'vanilla'"),
        (DEEPSPEC, {"markov_rank": None}, "markov_rank is missing"),
        (DEEPSPEC, {"markov_rank": -1}, "markov_rank is -1: expected 0 to"),
        (DEEPSPEC, {"markov_rank": 385}, "markov_rank is 385: the vocabulary has 384 tokens"),
        (DEEPSPEC, {"markov_rank": 0}, "confidence_head_with_markov is True: but markov_rank is 0"),
        (DEEPSPEC, {"dflash_config": {"markov_rank": 8}}, "dflash_config.markov_rank is 8 but"),
        (DEEPSPEC, {"dflash_config": {"projector_type": "domino"}}, "projector_type is 'domino': this is Domino"),
        (DEEPSPEC, {"dflash_config": {"projector_type": "dflash"}}, "projector_type is 'dflash': expected dspark"),
        (DEEPSPEC, {"n_predict": 6}, "n_predict is 6: but"),
        (DEEPSPEC, {"dspark_target_layer_ids": [0, 2]}, "dspark_target_layer_ids is [0, 2]: but"),
        (DEEPSPEC, {"target_layer_ids": [-1, 3]}, "target_layer_ids is [-1, 3]: in this file's count"),
        (DEEPSPEC, {"rope_is_neox_style": False}, "rope_is_neox_style is False: this is DFlash with interleaved RoPE"),
        (DEEPSPEC, {"output_multiplier": 2.0}, "output_multiplier is 2.0: unknown"),
        (DEEPSPEC, {"architectures": ["DFlashDraftModel"]}, "this is DSpark under the name of another draft"),
        (SPECULATORS, {"speculators_model_type": "dflash"}, "another key of this config says that it is dspark"),
        (SPECULATORS, {"draft_vocab_size": 385}, "draft_vocab_size is 385: the target's vocabulary has 384"),
    ]:
        assert words in refusal(read, name, **changes)


@pytest.mark.parametrize("speculators", [False, True])
def test_tensors_and_keys_of_the_heads_must_agree(speculators, published, read_published_target, write_config, refusal):
    target, tensor = read_published_target(TARGET), np.zeros((2, 2), np.float32)
    config = published(SPECULATORS if speculators else DEEPSPEC)

    def read_stored(names: tuple[str, ...], **changes: object) -> Draft:
        directory = write_config({**config, **changes})
        save_file(dict.fromkeys(names, tensor), directory / "model.safetensors")
        return read_draft(read_config(directory), target)

    assert "but no confidence_head.* is among" in refusal(read_stored, ("fc.weight",))
    head = "confidence_head.proj.weight"
    assert "but confidence_head.* is among" in refusal(read_stored, (head,), enable_confidence_head=False)
    assert read_stored((head,), enable_confidence_head=None).heads.confidence == read_stored((head,)).heads.confidence
    assert read_stored(("fc.weight",), enable_confidence_head=None).heads.confidence is None
    none = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": None}
    assert "markov_head." in refusal(read_stored, ("markov_head.markov_w1.weight",), **none)


def test_stored_embedding_or_head_is_used(published, read_published_target, write_config, refusal):
    target, tensor = read_published_target("Qwen3-4B"), np.zeros((2, 2), np.float32)

    def read_stored(*names: str, **changes: object) -> int | None:
        directory = write_config({**published("Qwen3-4B-DFlash-b16"), **changes})
        save_file(dict.fromkeys(("fc.weight", *names), tensor), directory / "model.safetensors")
        return read_draft(read_config(directory), target).heads.vocab

    assert read_stored() is None
    assert read_stored("embed_tokens.weight") == read_stored("lm_head.weight", has_lm_head=True) == 151936
    message = refusal(read_stored, has_embed_tokens=True)
    assert message.endswith("has_embed_tokens is True: but no embed_tokens.weight is among the tensors")


def test_open_spec_config_is_read_in_both_schemas(read_open_spec):
    draft = read_open_spec()
    assert (draft.block, draft.default_k, draft.target_layer_ids, draft.mask_token) == (8, 7, (1, 3), 377)
    assert draft.heads == DraftHeads(k=7) and draft.dialect == "open-spec"
    assert read_open_spec({"target_layer_ids": [1, 3], "target_layer_start_idx": 0, "draft_vocab_size": 384}) == draft
    nested = {**METHOD, "dflash_config": ROWS, "speculative_library": "vllm-project/speculators"}
    assert read_open_spec(speculative_config=nested, auto_map={"": ""}) == draft
    anchored = read_open_spec({"sample_from_anchor": True})
    assert (anchored.block, anchored.max_k, anchored.heads.predicts_next) == (7, 7, True)
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20, "use_sliding_window": True}
    for non_causal in (False, True):
        windows = read_open_spec({"sliding_window_non_causal": non_causal}, **sliding).windows
        assert windows == (SlidingWindow(20, causal=not non_causal, anchored=True), None)


def test_open_spec_config_gives_the_draft_of_the_older_format(published, read_published_draft, read_published_target):
    name, target = "speculators-tiny/draft", "qwen3-tiny-tied/target"
    same = {**METHOD, "draft_vocab_size": 160, "verifier": target}
    rows = {**ROWS, "mask_token_id": 511}
    for section in ({**same, **rows}, {**same, "dflash_config": rows}):
        config = {**published(name)["transformer_layer_config"], **OPEN_SPEC_NAMES, "speculative_config": section}
        found = read_draft(ConfigFile(Path("config.json"), config), read_published_target(target))
        assert structs.replace(found, dialect="speculators") == read_published_draft(name, target)


def test_invalid_open_spec_config_is_refused(read_open_spec, refusal):
    place = "config.json: speculative_config."
    for section, changes, words in [
        ({}, {"open_spec_config_version": "0.1.0"}, "open_spec_config_version is '0.1.0': only version 0.0.0"),
        ({}, {"architectures": ["DFlashDraftModel"]}, "architectures is ['DFlashDraftModel']: expected"),
        ({"method": "dspark"}, {}, f"{place}method is 'dspark': only dflash"),
        ({"block_size": 8}, {}, f"{place}block_size is 8: expected method, "),
        ({"verifier": None}, {}, f"{place}verifier is None: this object has no nulls"),
        ({"speculative_tokens": 0}, {}, f"{place}speculative_tokens is 0: expected a positive number"),
        ({"target_layer_start_idx": 2}, {}, f"{place}target_layer_start_idx is 2: expected 0 or 1"),
        ({"target_layer_ids": [2, 2]}, {}, f"{place}target_layer_ids is [2, 2]: expected at least one layer"),
        ({"target_layer_ids": [0, 2]}, {}, f"{place}target_layer_ids is [0, 2]: in this file's count"),
        ({"sample_from_anchor": "false"}, {}, f"{place}sample_from_anchor is 'false': expected true or false"),
        ({"draft_vocab_size": 385}, {}, f"{place}draft_vocab_size is 385: the target's"),
        ({}, {"norm_scale": 2}, "norm_scale is 2: unknown"),
        ({}, {"speculative_config": METHOD}, f"{place}sample_from_anchor is missing"),
        ({}, {"speculative_config": {**METHOD, "dflash_config": {**ROWS, "a": 1}}}, "dflash_config.a is 1: expected"),
    ]:
        assert words in refusal(read_open_spec, section, **changes)


def test_pruned_open_spec_draft_needs_its_head(read_published_target, write_config):
    directory = write_config({**OPEN_SPEC, "speculative_config": {**METHOD, **ROWS, "draft_vocab_size": 160}})
    target = read_published_target(TARGET)
    assert read_draft(read_config(directory), target).heads.vocab == 160
    save_file({"fc.weight": np.zeros((2, 2), np.float32)}, directory / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"draft_vocab_size is 160: but d2t or lm_head.weight is missing"):
        read_draft(read_config(directory), target)
