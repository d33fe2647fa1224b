"""Roofline bounds of toy models, by hand: elements of 2 bytes and small figures."""

import pytest
from msgspec import structs

from dflash_aot.cache.grid import Bucket, Grid
from dflash_aot.cache.model_config.architecture import (
    AttentionShape,
    Decoder,
    DenseMlp,
    Draft,
    MixtureOfExperts,
    Target,
)
from dflash_aot.cache.model_config.rope import Rope
from dflash_aot.cache.signature import ArraySpec
from dflash_aot.cache.topology import Chip
from dflash_aot.cache.weight_recipe import PLAIN, WeightFormats
from dflash_aot.compile.analysis.roofline import Roofline, RooflineCost
from dflash_aot.compile.programs.programs import STACKED, Programs
from tests.compile.conftest import read_published

H, V, LAYERS = 8, 100, 2
# Per layer: q and o 8·(4·4) each, k and v 8·(2·4) each, an MLP of 3·8·16.
LAYER = 2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 16
KV = 2 * 2 * 4  # elements of one position in one layer
DECODER = Decoder(LAYERS, H, DenseMlp(16), AttentionShape(4, 2, 4), Rope(1e4, 4), 1e-6, V, 64)
TARGET = Target(DECODER, tied=True)
DRAFT = Draft(structs.replace(DECODER, layers=1), 4, 99, (0, 1), H, (None,))
GRID = Grid(batch=(1, 3), length=(32,), k=(0, 3), prefill=(8,))
CHIP = Chip("toy", "toy", 2, 2, 1000, 500, 2e6, 2e9, 1e3)  # per device: 1e6 bytes and 1e9 flops per second


def roofline(devices=1, target=TARGET):
    return Roofline(target, DRAFT, "bfloat16", GRID, devices)


def test_verify_reads_weights_once_and_kv_per_row():
    B, S, T = 3, 32, 4
    elements = B * T * H + LAYERS * LAYER + B * T * LAYERS * KV + B * S * LAYERS * KV + V * H + B * T * 2 * H
    flops = 2 * B * T * (LAYERS * LAYER + V * H) + 4 * LAYERS * B * T * S * 16
    assert roofline().verify(B, S, T - 1) == RooflineCost(2 * elements, flops)


def test_draft_computes_its_whole_block_and_k_logits():
    B, S, K, block = 3, 32, 2, 4
    elements = B * block * H + LAYER + B * S * KV + V * H
    flops = 2 * B * block * LAYER + 4 * B * block * (S + block) * 16 + 2 * B * K * V * H
    assert roofline().draft(B, S, K) == RooflineCost(2 * elements, flops)


def test_prefill_has_logits_of_one_token():
    (prefill,) = (s for s in Programs(TARGET, DRAFT, "bfloat16").list_signatures(GRID) if s.program == "prefill")
    elements = 8 * H + LAYERS * LAYER + (8 + 32) * LAYERS * KV + V * H + 8 * 2 * H
    assert roofline().cost(prefill) == RooflineCost(
        2 * elements, 2 * (8 * LAYERS * LAYER + V * H) + 4 * LAYERS * 8 * 32 * 16
    )


def test_sampled_verify_reads_sampling_state_and_writes_counts():
    greedy, sampled = roofline().verify(3, 32, 3), roofline().sampled_verify(3, 32, 3)
    assert sampled == RooflineCost(greedy.bytes + 3 * V * (4 + 1 + 4 + 4), greedy.flops)
    row = V * (4 + 1 + 4)
    assert roofline().admit() == RooflineCost(row + row, 0)
    assert roofline(2).admit() == RooflineCost(row + row / 2, 0)  # every device reads all
    assert roofline().move(samples=True) == RooflineCost(2 * row, 0)
    assert roofline().move(samples=False) == RooflineCost(0, 0)
    signatures = Programs(TARGET, DRAFT, "bfloat16", sampling=("sample",)).list_signatures(GRID)
    costs = {one.program: roofline().cost(one) for one in signatures}
    assert costs["sampled_verify"] == sampled and costs["admit"] == roofline().admit()


def test_two_devices_halve_all_work_except_reading_features():
    whole, half, features = roofline().verify(3, 32, 3), roofline(2).verify(3, 32, 3), 2 * 3 * 4 * 2 * H
    assert half == RooflineCost((whole.bytes - features) / 2 + features, whole.flops / 2)


def test_bound_is_the_longer_of_memory_and_arithmetic_time():
    assert RooflineCost(bytes=3e6, flops=1e9).bound_seconds(CHIP) == 3.0
    assert RooflineCost(bytes=1e6, flops=5e9).bound_seconds(CHIP) == 5.0


def test_round_without_speculation_writes_kv_for_later_drafts():
    bound = roofline().bound_round(Bucket(1, 32, 0), CHIP)
    assert bound.draft == 0 and bound.round == bound.verify + bound.kv_write
    assert bound.kv_write == roofline().kv_write(1, 1).bound_seconds(CHIP) > 0
    plain = Roofline(TARGET, DRAFT, "bfloat16", structs.replace(GRID, k=(0,)))
    assert plain.bound_round(Bucket(1, 32, 0), CHIP).round == bound.verify
    bound = roofline().bound_round(Bucket(1, 32, 3), CHIP)
    assert bound.round == bound.draft + bound.verify + bound.kv_write > bound.verify


def test_expected_experts_are_shared_by_tokens():
    experts = MixtureOfExperts(count=4, chosen=2, width=16, normalized=True)
    # Half of the second token's experts are read already.
    assert [experts.expect_distinct(n) for n in (0, 1, 2)] == [0, 2, 3]
    routed = Target(structs.replace(DECODER, mlp=experts), tied=True)
    dense = roofline().verify(1, 32, 1)
    found = roofline(target=routed).verify(1, 32, 1)
    rows = 4 + 3 * 3 * 16 - 3 * 16  # a router and three experts instead of one MLP
    assert found.bytes - dense.bytes == 2 * LAYERS * H * rows
    assert found.flops - dense.flops == 2 * 2 * LAYERS * H * (4 + 2 * 3 * 16 - 3 * 16)
    saved = [
        plain.bytes - Roofline(target, DRAFT, "bfloat16", GRID, formats=WeightFormats("int8")).verify(1, 32, 1).bytes
        for target, plain in ((routed, found), (TARGET, dense))
    ]
    assert saved[0] - saved[1] == LAYERS * H * (3 * 3 * 16 - 3 * 16)  # a byte per number, but for the router


def test_every_weight_of_a_program_is_read_once():
    """Published pairs with an empty context: bytes of states and of all weights but norms, embeddings and codes."""
    for name, kind, devices, formats in [
        ("Qwen3-4B", "DFlash-b16", 1, WeightFormats("int8", "int8")),
        ("Qwen3-8B", "DFlash-b16", 2, PLAIN),
        ("Qwen3-8B", "DFlash2-b16", 2, WeightFormats("int8")),
        ("Qwen3.5-4B", "DFlash", 1, PLAIN),
    ]:
        target, draft = read_published(name, f"{name}-{kind}")
        programs = Programs(target, draft, "bfloat16", STACKED, devices=devices, formats=formats)
        grid = Grid((1,), (32,), (1,), (1,))
        sizes = {one.name: ArraySpec(one.name, one.shape, one.dtype, one.sharding) for one in programs.recipes()}
        looked_up = {name for name in sizes if name.endswith("_codebook")}
        looked_up |= {"target.model.embed_tokens.weight"} if "target.lm_head.weight" in sizes else set()
        roofline = Roofline(target, draft, "bfloat16", grid, devices, formats)
        costs = {
            "verify": roofline.verify(1, 0, 0),
            "draft": roofline.draft(1, 0, 1),
            "kv_write": roofline.kv_write(1, 1),
        }
        for signature in programs.list_signatures(grid):
            if signature.program in costs:
                taken = sum(sizes[one].shard_bytes(devices) for one in signature.weights if one not in looked_up)
                taken += roofline.move(False).bytes / 2 * 3 if signature.program == "verify" else 0  # a hybrid's states
                assert costs[signature.program].bytes == pytest.approx(taken, rel=3e-3)  # and of scales
