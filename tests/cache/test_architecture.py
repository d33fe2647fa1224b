"""What a `config.json` says about a model, and every way in which it is refused."""

import pytest

from dflash_aot.cache.architecture import Attention, Decoder, Draft, Rope, Target, Window, default_taps
from dflash_aot.cache.errors import BadCheckpoint

TARGET, DRAFT = "qwen3-4b/config.json: ", "dflash-b16/config.json: "
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
LAYER_TYPES = "5 of full_attention or sliding_attention"
OTHER_TARGET = ": this draft was trained for another one"


def decoder(layers):
    return Decoder(
        layers=layers,
        hidden=2560,
        mlp=9728,
        attention=Attention(heads=32, kv_heads=8, head_dim=128),
        rope=Rope(1e6, 128),
        epsilon=1e-6,
        vocab=151936,
        positions=40960,
    )


def refusal(read, *args, **changes):
    with pytest.raises(BadCheckpoint) as refused:
        read(*args, **changes)
    return str(refused.value)


def test_qwen3_4b_is_read_as_published(read_changed_target):
    assert read_changed_target() == Target(decoder(36), tied=True)


def test_its_draft_is_read_as_published(read_changed_draft):
    assert read_changed_draft() == Draft(
        decoder=decoder(5),
        block=16,
        mask_token=151669,
        taps=(1, 9, 17, 25, 33),
        target_hidden=2560,
        windows=(None,) * 5,
    )


def test_newer_layouts_say_the_same(read_changed_target, read_changed_draft):
    rope = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}
    assert read_changed_target(**rope) == read_changed_target()
    assert read_changed_draft({"block_size": 16}, block_size=None, **rope) == read_changed_draft()
    assert read_changed_draft({"mask_token_id": None}, mask_token_id=151669) == read_changed_draft()


def test_rope_parameters_come_before_rope_theta(read_changed_target):
    assert read_changed_target(rope_parameters={"rope_theta": 500.0}).decoder.rope.theta == 500.0


def test_a_draft_keeps_its_own_rope(read_changed_draft):
    assert read_changed_draft(rope_theta=10_000).decoder.rope == Rope(10_000.0, 128)


def test_the_model_type_chooses_nothing(read_changed_draft):
    assert read_changed_draft(model_type="gpt_oss") == read_changed_draft()


def test_rotary_frequencies_fall_from_one():
    assert Rope(10_000.0, 4).inverse_frequencies() == (1.0, pytest.approx(0.01))


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        ((36, 5), (1, 9, 17, 25, 33)),
        ((28, 5), (1, 7, 13, 19, 25)),
        ((6, 2), (1, 3)),
        ((7, 3), (1, 2, 4)),  # 1 + 1.5 rounds to even, as Python does
        ((36, 1), (18,)),
        ((7, 1), (3,)),
    ],
)
def test_taps_that_are_not_named_are_spread_evenly(layers, taps):
    assert default_taps(*layers) == taps


def test_a_draft_without_taps_takes_the_default(read_changed_draft):
    assert read_changed_draft({"target_layer_ids": None}).taps == (1, 9, 17, 25, 33)


@pytest.mark.parametrize(
    ("inner", "changes", "causal"),
    [
        ({}, {}, True),
        ({"causal": True}, {"is_causal": True}, True),
        ({"causal": False}, {}, False),
        ({}, {"is_causal": False}, False),
    ],
)
def test_sliding_layers_have_windows(read_changed_draft, inner, changes, causal):
    windows = read_changed_draft(inner, layer_types=SLIDING, sliding_window=4096, **changes).windows
    assert windows == (Window(4096, causal), None, Window(4096, causal), None, None)


def test_a_window_without_sliding_layers_is_not_used(read_changed_draft):
    assert read_changed_draft(sliding_window=4096).windows == (None,) * 5
    assert read_changed_draft(sliding_window=4096, layer_types=None).windows == (None,) * 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Llama"]}, "architectures is ['Llama']; as a target this runs Qwen3ForCausalLM."),
        ({"architectures": None}, "architectures is missing; expected a list"),
        ({"use_sliding_window": True}, "use_sliding_window is True: sliding-window targets are not supported"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is missing; expected true or false"),
        ({"attention_bias": True}, "attention_bias is True: projections with a bias are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': 'silu' is what these layers compute"),
        ({"head_dim": None}, "head_dim is missing; expected a whole number"),
        ({"head_dim": 127}, "head_dim is 127: rotation needs an even width"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 32: not a multiple of 5 kv heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0: expected a positive number"),
        ({"hidden_size": "2560"}, "hidden_size is '2560': expected a whole number"),
        ({"vocab_size": -1}, "vocab_size is -1: expected a positive number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0: expected a positive number"),
        ({"rope_theta": None}, "rope_theta is None: expected a positive number"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling is {'rope_type': 'yarn', 'factor': 4.0}: scaled rotary embeddings are not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "rope_parameters.rope_type is 'llama3': scaled rotary embeddings are not supported",
        ),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta is 0: expected a positive number"),
    ],
)
def test_a_target_is_refused_with_file_key_and_what_was_found(read_changed_target, changes, words):
    assert refusal(read_changed_target, **changes) == TARGET + words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DFlash2"]}, "architectures is ['DFlash2']; as a draft this runs DFlashDraftModel."),
        ({"hidden_size": 4096}, f"hidden_size is 4096: the target has 2560{OTHER_TARGET}"),
        ({"vocab_size": 32000}, f"vocab_size is 32000: the target has 151936{OTHER_TARGET}"),
        ({"num_target_layers": 28}, f"num_target_layers is 28: the target has 36{OTHER_TARGET}"),
        ({"block_size": 1}, "block_size is 1: a block is the anchor and at least one drafted token"),
        ({"block_size": None}, "block_size stands neither at the top nor in dflash_config"),
        ({"attention_bias": True}, "attention_bias is True: projections with a bias are not supported"),
        ({"layer_types": SLIDING}, "sliding_window is missing; expected a whole number"),
        ({"layer_types": SLIDING[:4]}, f"layer_types is {SLIDING[:4]}: expected {LAYER_TYPES}"),
        ({"layer_types": ["chunked"] * 5}, f"layer_types is {['chunked'] * 5}: expected {LAYER_TYPES}"),
    ],
)
def test_a_draft_is_refused_with_file_key_and_what_was_found(read_changed_draft, changes, words):
    assert refusal(read_changed_draft, **changes) == DRAFT + words


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ({"target_layer_ids": [1, 36]}, "target_layer_ids is [1, 36]: the target has layers 0 to 35"),
        ({"target_layer_ids": [-1]}, "target_layer_ids is [-1]: the target has layers 0 to 35"),
        ({"target_layer_ids": [3, 35]}, "target_layer_ids is [3, 35]: a tap on the last layer is ambiguous"),
        ({"target_layer_ids": [3, 3]}, "target_layer_ids is [3, 3]: at least one tap, each once"),
        ({"target_layer_ids": []}, "target_layer_ids is []: at least one tap, each once"),
        ({"target_layer_ids": [1, 2.5]}, "dflash_config.target_layer_ids is [1, 2.5]: expected whole numbers"),
        ({"mask_token_id": 151936}, "mask_token_id is 151936: the target's vocabulary has 151936 tokens"),
        ({"mask_token_id": -1}, "mask_token_id is -1: the target's vocabulary has 151936 tokens"),
        ({"mask_token_id": None}, "mask_token_id stands neither at the top nor in dflash_config"),
        ({"mask_token_id": True}, "dflash_config.mask_token_id is True: expected a whole number"),
        ({"causal": "no"}, "dflash_config.causal is 'no': expected true or false"),
    ],
)
def test_a_draft_config_is_refused_likewise(read_changed_draft, inner, words):
    message = refusal(read_changed_draft, inner, layer_types=SLIDING, sliding_window=4096)
    assert message.startswith(DRAFT) and words in message


def test_a_refused_fact_is_named_where_it_stands(read_changed_draft):
    inner = {"mask_token_id": -1}
    assert refusal(read_changed_draft, inner).startswith(DRAFT + "dflash_config.mask_token_id is -1")
    outer = refusal(read_changed_draft, {"mask_token_id": None}, mask_token_id=-1)
    assert outer.startswith(DRAFT + "mask_token_id is -1")


def test_a_block_size_that_contradicts_itself_is_refused_with_both_places(read_changed_draft):
    words = "block_size is 16 but dflash-b16/config.json: dflash_config.block_size is 8"
    assert refusal(read_changed_draft, {"block_size": 8}) == DRAFT + words


def test_a_pair_the_wrong_way_round_is_recognised(read_changed_target, read_changed_draft):
    hint = "are --target and --draft the wrong way round?"
    as_target = refusal(read_changed_target, architectures=["DFlashDraftModel"])
    as_draft = refusal(read_changed_draft, architectures=["Qwen3ForCausalLM"])
    assert as_target.endswith(f"This is a draft: {hint}")
    assert as_draft.endswith(f"This is a target: {hint}")
