"""The dialect of vLLM's speculators library: facts and refusals."""

from pathlib import Path

from transformers import Qwen3Config

from dflash_aot.cache.model_config.architecture import (
    AttentionShape,
    Decoder,
    DenseMlp,
    Draft,
    DraftHeads,
    SlidingWindow,
)
from dflash_aot.cache.model_config.config_file import QWEN3_DEFAULTS, ConfigFile
from dflash_aot.cache.model_config.rope import LinearScaling, Rope
from dflash_aot.cache.model_config.speculators_draft import find_ambiguity, read_verifier

PATH = Path("dflash-b16/config.json")
FILE = f"{PATH}: "
INNER = f"{FILE}transformer_layer_config."
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
AMBIGUOUS = "the last layer is ambiguous: the reference reads it after the final norm, servers before it"


def test_defaults_equal_those_of_transformers():
    defaults = Qwen3Config()
    assert {key: getattr(defaults, key) for key in QWEN3_DEFAULTS if key not in ("rope_theta", "sliding_window")} == {
        key: value for key, value in QWEN3_DEFAULTS.items() if key not in ("rope_theta", "sliding_window")
    }
    assert defaults.rope_parameters == {"rope_theta": QWEN3_DEFAULTS["rope_theta"], "rope_type": "default"}
    # Qwen3Config drops the window it was given unless it is to be used.
    assert Qwen3Config(use_sliding_window=True).sliding_window == QWEN3_DEFAULTS["sliding_window"]


def test_missing_keys_get_the_defaults(read_changed_speculators):
    attention = AttentionShape(heads=32, kv_heads=32, head_dim=128, normed=True, biased=False)
    decoder = Decoder(5, 4096, DenseMlp(22016), attention, Rope(1e6, 128), 1e-6, vocab=151936, positions=32768)
    assert read_changed_speculators() == Draft(
        decoder=decoder,
        block=8,
        mask_token=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        target_hidden=4096,
        windows=(None,) * 5,
        dialect="speculators",
        heads=DraftHeads(vocab=32000, k=7),
    )


def test_layer_config_means_the_same_as_in_transformers(read_changed_speculators):
    for diff in [
        {"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "rms_norm_eps": 1e-5},
        {"num_key_value_heads": None, "num_attention_heads": 16},
        {"intermediate_size": 12288, "max_position_embeddings": 40960, "hidden_act": "silu"},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 7e5}},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": None},
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 64},
        {"use_sliding_window": True, "layer_types": SLIDING},
        {"use_sliding_window": False, "max_window_layers": 0},
        {"sliding_window": None, "layer_types": None},
    ]:
        theirs = Qwen3Config(num_hidden_layers=5, **diff)
        draft = read_changed_speculators({"rope_theta": 10000.0, **diff})
        decoder, attention = draft.decoder, draft.decoder.attention
        assert (attention.heads, attention.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
        assert (attention.head_dim, attention.biased) == (theirs.head_dim, theirs.attention_bias)
        assert (decoder.mlp.width, decoder.epsilon) == (theirs.intermediate_size, theirs.rms_norm_eps)
        assert decoder.positions == theirs.max_position_embeddings
        assert decoder.rope.theta == theirs.rope_parameters["rope_theta"]
        assert isinstance(decoder.rope.scaling, LinearScaling) == (theirs.rope_parameters["rope_type"] == "linear")
        window = theirs.sliding_window and SlidingWindow(theirs.sliding_window, causal=True, anchored=True)
        assert draft.windows == tuple(window if kind == "sliding_attention" else None for kind in theirs.layer_types)


def test_null_value_gets_no_default(read_changed_speculators, refusal):
    """Qwen3Config accepts no null for these keys. For switches null is harmless: it means false."""
    for key in sorted(set(QWEN3_DEFAULTS) - {"num_key_value_heads", "sliding_window"}):
        if key in ("attention_bias", "use_sliding_window"):
            assert read_changed_speculators({key: None}) == read_changed_speculators()
        elif key == "max_window_layers":
            message = refusal(read_changed_speculators, {key: None, "use_sliding_window": True})
            assert message.startswith(f"{INNER}{key} is missing")
        else:
            assert refusal(read_changed_speculators, {key: None}).startswith(f"{INNER}{key} is ")


def test_invalid_target_layer_ids_are_refused(read_changed_speculators, refusal):
    for layer_ids, words in [
        ([0, 2], "is [0, 2]: in this file's count the target has layers 1 to 36"),
        ([2, 37], "is [2, 37]: in this file's count the target has layers 1 to 36"),
        ([2, 36], f"is [2, 36]: {AMBIGUOUS}"),
        ([2, 2], "is [2, 2]: expected at least one layer, and none twice"),
        (None, "is missing; expected a list of whole numbers"),
    ]:
        message = refusal(read_changed_speculators, aux_hidden_state_layer_ids=layer_ids)
        assert message == f"{FILE}aux_hidden_state_layer_ids {words}"


def test_draft_vocabulary_is_read(read_changed_speculators):
    for size, vocab, pruned in [(None, 32000, True), (64000, 64000, True), (151936, 151936, False)]:
        draft = read_changed_speculators(draft_vocab_size=size)
        assert (draft.heads.vocab, draft.pruned, draft.decoder.vocab) == (vocab, pruned, 151936)


def test_k_is_that_of_the_first_proposal_method(read_changed_speculators):
    for methods, block, k in [
        (None, None, 7),
        ([{"speculative_tokens": None}], None, 7),
        ([{"speculative_tokens": 3}], None, 3),
        ([{"speculative_tokens": 8}], 8, 7),  # older files say the block's size
        ([{"speculative_tokens": 100}], 16, 15),
        ([{"speculative_tokens": 5}, {"speculative_tokens": 2}], 16, 5),
    ]:
        draft = read_changed_speculators(speculators_config={"proposal_methods": methods}, block_size=block)
        assert draft.heads.k == draft.default_k == k
        assert draft.block == (block or 8)


def test_verifier_is_optional():
    for section, name in [
        ({"verifier": {"name_or_path": "Qwen/Qwen3-8B"}}, "Qwen/Qwen3-8B"),
        ({"verifier": {"name_or_path": ""}}, None),
        ({"verifier": None}, None),
    ]:
        assert read_verifier(ConfigFile(PATH, {"speculators_config": section})) == name


def test_sliding_layers_have_anchored_windows(read_changed_speculators):
    for flag, causal in [(None, True), (False, True), (True, False)]:
        layers = {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 2048}
        windows = read_changed_speculators(layers, sliding_window_non_causal=flag).windows
        window = SlidingWindow(2048, causal, anchored=True)
        assert windows == (window, None, window, None, None)


def test_missing_causality_of_sliding_layers_is_told(published):
    def find(name, **changes):
        return find_ambiguity(ConfigFile(PATH, {**published(name), **changes}))

    told = find("qwen3-tiny-swa/draft_speculators", sliding_window_non_causal=None)
    assert told.startswith(f"{FILE}sliding_window_non_causal is missing. The speculators library reads false")
    assert "vLLM reads true" in told and "write sliding_window_non_causal: true into the file" in told
    for name, changes in [
        ("qwen3-tiny-swa/draft_speculators", {}),
        ("speculators-tiny/draft", {"sliding_window_non_causal": None}),  # no layer slides
        ("dflash2-tiny-speculators/draft_sliding", {"sliding_window_non_causal": None}),  # both read true
        ("Qwen3.5-4B-DFlash", {}),
    ]:
        assert find(name, **changes) is None


def test_model_type_alone_selects_the_dialect(read_changed_speculators):
    alone = read_changed_speculators(speculators_config=None, architectures=None)
    assert alone == read_changed_speculators(speculators_model_type=None)
    assert alone.dialect == "speculators"


def test_draft_may_be_narrower_than_the_target(read_changed_speculators, refusal):
    narrow = read_changed_speculators({"hidden_size": 2048}, target_hidden_size=4096)
    assert (narrow.decoder.hidden, narrow.target_hidden) == (2048, 4096)
    message = refusal(read_changed_speculators, {"hidden_size": 2048})
    assert message.startswith(f"{FILE}target_hidden_size is 2048: the target has 4096")


def test_invalid_draft_is_refused(read_changed_speculators, refusal):
    for changes, words in [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3': only dflash, dflash2, dspark"),
        ({"speculators_config": {"algorithm": "mtp"}}, "speculators_config.algorithm is 'mtp': only dflash, dflash2"),
        ({"speculators_config": []}, "speculators_config is []: expected an object"),
        ({"transformer_layer_config": None}, "transformer_layer_config is missing; expected an object"),
        ({"mask_token_id": 151936}, "mask_token_id is 151936: the target's vocabulary has 151936 tokens"),
        ({"draft_vocab_size": 151937}, "draft_vocab_size is 151937: the target's vocabulary has 151936"),
        ({"block_size": 1}, "block_size is 1: a block holds the anchor and at least one drafted token"),
        ({"target_hidden_size": 2560}, "target_hidden_size is 2560: the target has 4096"),
        ({"speculators_config": {"proposal_methods": ["greedy"]}}, "speculators_config.proposal_methods is"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}},
            "speculators_config.proposal_methods[0].speculative_tokens is 0: expected a positive number",
        ),
    ]:
        assert refusal(read_changed_speculators, **changes).startswith(FILE + words)


def test_invalid_layer_config_is_refused(read_changed_speculators, refusal):
    for layers, words in [
        ({"model_type": "llama"}, "model_type is 'llama': only qwen3 layers are supported"),
        ({"vocab_size": 32001}, "vocab_size is 32001: the target has 151936"),
        ({"layer_types": SLIDING}, f"layer_types is {SLIDING}: use_sliding_window is false"),
        ({"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": None}, "sliding_window is missing"),
        ({"layer_types": SLIDING[:3]}, f"layer_types is {SLIDING[:3]}: expected 5 items, full_attention or"),
        ({"rope_theta": None}, "rope_theta is None: expected a positive number"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_parameters.rope_type is 'su': supported are"),
    ]:
        assert refusal(read_changed_speculators, layers).startswith(INNER + words)
