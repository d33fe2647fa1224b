"""The dialect of z-lab: published drafts, variants of the layout, and refusals."""

from pathlib import Path

from transformers import Qwen3Config

from dflash_aot.cache.model_config.architecture import (
    UNLIMITED_WINDOW,
    AttentionShape,
    Decoder,
    DenseMlp,
    Draft,
    Scaling,
    SlidingWindow,
)
from dflash_aot.cache.model_config.config_file import ConfigFile
from dflash_aot.cache.model_config.draft import read_draft
from dflash_aot.cache.model_config.rope import LinearScaling, Rope
from dflash_aot.cache.model_config.target import read_target

PATH = Path("dflash-b16/config.json")
FILE = f"{PATH}: "
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
NO_DFLASH2 = ": a key of DFlash2, but architectures does not name DFlash2DraftModel"
LAYER_TYPES = "5 items, full_attention or sliding_attention"


def test_published_drafts_of_qwen3_are_read(read_published_draft):
    attention = AttentionShape(heads=32, kv_heads=8, head_dim=128, normed=True, biased=False)
    decoder = Decoder(5, 4096, DenseMlp(12288), attention, Rope(1e6, 128), 1e-6, vocab=151936, positions=40960)
    draft = Draft(decoder, 16, 151669, (1, 9, 17, 25, 33), target_hidden=4096, windows=(None,) * 5, dialect="z-lab")
    assert read_published_draft("Qwen3-8B-DFlash-b16", "Qwen3-8B") == draft


def test_published_draft_of_llama_is_read(read_published_draft):
    for target in ["Llama-3.1-8B", "Llama-3.1-8B-Instruct"]:
        draft = read_published_draft("LLaMA3.1-8B-Instruct-DFlash-UltraChat", target)
        assert (draft.block, draft.default_k, draft.decoder.layers) == (10, 9, 5)
        assert draft.target_layer_ids == (1, 8, 15, 22, 29)
        assert draft.decoder.attention == AttentionShape(heads=32, kv_heads=8, head_dim=128, normed=True)
        assert draft.decoder.mlp == DenseMlp(14336)


def test_transformers_5_goldens_give_the_same_facts(published, rewritten):
    for family, draft in (("qwen3-tiny-tied", "draft"), ("llama-tiny", "draft_llama3rope")):
        names = f"{family}/target", f"{family}/{draft}"
        older, newer = ([ConfigFile(PATH, read(name)) for name in names] for read in (published, rewritten))
        assert newer != older
        target = read_target(older[0])
        assert read_target(newer[0]) == target
        assert read_draft(newer[1], target) == read_draft(older[1], target)


def test_draft_keeps_its_own_rope(read_changed_draft, read_published_draft):
    assert read_changed_draft(rope_theta=10_000).decoder.rope == Rope(10_000.0, 128)
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert read_changed_draft(**scaled).decoder.rope == Rope(1e6, 128, LinearScaling(2.0))
    plain = {"rope_scaling": None}  # its target is scaled
    name = "LLaMA3.1-8B-Instruct-DFlash-UltraChat"
    assert read_published_draft(name, "Llama-3.1-8B", **plain).decoder.rope == Rope(500000.0, 128)


def test_sliding_layers_have_windows(read_changed_draft):
    for inner, changes, causal in [
        ({}, {}, True),
        ({"causal": False}, {}, False),
        ({}, {"is_causal": False}, False),
        ({"causal": True}, {"is_causal": False}, False),
    ]:
        windows = read_changed_draft(inner, layer_types=SLIDING, sliding_window=4096, **changes).windows
        assert windows == (SlidingWindow(4096, causal), None, SlidingWindow(4096, causal), None, None)


def test_use_swa_makes_all_layers_slide(read_changed_draft):
    for inner, changes, window in [
        ({}, {}, SlidingWindow(2048, causal=False)),
        ({"causal": True}, {}, SlidingWindow(2048, causal=True)),
        ({}, {"is_causal": True}, SlidingWindow(2048, causal=True)),
        ({"swa_window_size": 64}, {}, SlidingWindow(64, causal=False)),
        ({"swa_window_size": 64}, {"sliding_window": None, "layer_types": None}, SlidingWindow(64, causal=False)),
    ]:
        draft = read_changed_draft({"use_swa": True, **inner}, **{"sliding_window": 2048, **changes})
        assert draft.windows == (window,) * 5


def test_either_name_of_causal_speaks_of_full_layers_too(read_changed_draft):
    causal = SlidingWindow(UNLIMITED_WINDOW, causal=True)
    assert not causal.slides
    for inner, changes in [({}, {"is_causal": True}), ({"causal": True}, {}), ({"causal": False}, {"is_causal": True})]:
        assert read_changed_draft(inner, **changes).windows == (causal,) * 5
        mixed = read_changed_draft(inner, layer_types=SLIDING, sliding_window=64, **changes).windows
        assert mixed == (SlidingWindow(64, causal=True), causal, SlidingWindow(64, causal=True), causal, causal)
    assert read_changed_draft({"causal": True}, is_causal=False).windows == (None,) * 5


def test_scalars_are_read_in_either_place(read_changed_draft):
    for inner, changes, scaling in [
        ({}, {}, Scaling()),
        ({"output_multiplier": 0.35, "final_logit_softcapping": 10}, {}, Scaling(logits=0.35, cap=10.0)),
        ({}, {"input_embedding_scale": 2.5, "output_multiplier": None}, Scaling(embedding=2.5)),
        ({"final_logit_softcapping": 0}, {}, Scaling()),
    ]:
        assert read_changed_draft(inner, **changes).scaling == scaling


def test_layers_slide_as_in_transformers(published, read_published_target):
    for name in ["Qwen3-8B-DFlash-b16", "Qwen3-8B-DFlash2-b16"]:
        for given in [
            {},
            {"use_sliding_window": True},
            {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": None},
            {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 64},
            {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 5},
            {"use_sliding_window": True, "layer_types": SLIDING},
            {"use_sliding_window": False, "max_window_layers": 0, "sliding_window": 64},
        ]:
            keys = ("use_sliding_window", "max_window_layers", "sliding_window", "layer_types")
            config = {key: value for key, value in published(name).items() if key not in keys}
            draft = read_draft(ConfigFile(PATH, {**config, **given}), read_published_target("Qwen3-8B"))
            theirs = Qwen3Config(num_hidden_layers=5, **given)
            window = theirs.sliding_window and SlidingWindow(theirs.sliding_window, causal="is_causal" not in config)
            assert draft.windows == tuple(
                window if kind == "sliding_attention" else None for kind in theirs.layer_types
            )


def test_invalid_draft_is_refused(read_changed_draft, refusal):
    for inner, changes, words in [
        ({}, {"block_size": None}, "block_size is missing, both at the top and in dflash_config"),
        ({"block_size": 8}, {}, f"block_size is 16 but {FILE}dflash_config.block_size is 8"),
        ({"mask_token_id": None}, {}, "mask_token_id is missing, both at the top and in dflash_config"),
        ({}, {"mask_token_id": 0}, f"dflash_config.mask_token_id is 151669 but {FILE}mask_token_id is 0"),
        ({"target_layer_ids": [1, 2.5]}, {}, "dflash_config.target_layer_ids is [1, 2.5]: expected whole numbers"),
        ({}, {"layer_types": SLIDING}, "sliding_window is missing; expected a whole number"),
        ({}, {"layer_types": SLIDING, "sliding_window": 0}, "sliding_window is 0: expected a positive number"),
        ({"use_swa": True}, {}, "sliding_window is missing; expected a whole number"),
        ({"use_swa": True, "swa_window_size": 0}, {}, "dflash_config.swa_window_size is 0: expected a positive number"),
        ({}, {"layer_types": SLIDING[:4]}, f"layer_types is {SLIDING[:4]}: expected {LAYER_TYPES}"),
        ({}, {"is_causal": 0, "layer_types": SLIDING}, "is_causal is 0: expected true or false"),
        ({"causal": "no"}, {"layer_types": SLIDING, "sliding_window": 1}, "dflash_config.causal is 'no': expected"),
        ({}, {"dflash_config": [1]}, "dflash_config is [1]: expected an object"),
        ({"output_multiplier": 0}, {}, "dflash_config.output_multiplier is 0: expected a positive number"),
        ({"output_multiplier": 2}, {"output_multiplier": 3}, "dflash_config.output_multiplier is 2 but"),
        ({}, {"final_logit_softcapping": float("nan")}, "final_logit_softcapping is nan: expected a number"),
        ({"conv_kernel_size": 2}, {}, f"dflash_config.conv_kernel_size is 2{NO_DFLASH2}"),
    ]:
        assert refusal(read_changed_draft, inner, **changes).startswith(FILE + words)
