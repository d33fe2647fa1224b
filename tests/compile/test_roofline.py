"""Roofline bounds of toy models, by hand: elements of 2 bytes and small figures."""

import pytest
from msgspec import structs

from dflash_aot.cache.arrays import ArraySpec
from dflash_aot.cache.chips import Chip, find_device_chip
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
from dflash_aot.cache.weight_recipe import PLAIN, WeightFormats
from dflash_aot.compile.models.backend import TPU
from dflash_aot.compile.models.tensor_parallel import TensorParallel
from dflash_aot.compile.programs.costs import PairCosts, RooflineCost
from dflash_aot.compile.programs.draft import count_draft_cost, count_kv_write_cost
from dflash_aot.compile.programs.programs import Programs, Roofline
from dflash_aot.compile.programs.verify import count_verify_cost
from tests.compile.conftest import read_published

H, V, LAYERS = 8, 100, 2
# Per layer: q and o 8·(4·4) each, k and v 8·(2·4) each, an MLP of 3·8·16.
LAYER = 2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 16
KV = 2 * 2 * 4  # elements of one position in one layer
DECODER = Decoder(LAYERS, H, DenseMlp(16), AttentionShape(4, 2, 4), Rope(1e4, 4), 1e-6, V, 64)
TARGET = Target(DECODER, tied=True)
DRAFT = Draft(structs.replace(DECODER, layers=1), 4, 99, (0, 1), H, (None,))
GRID = Grid(batch=(1, 3), length=(32,), k=(0, 3), prefill=(8,))
CHIP = Chip("toy", "toy", 2, 2, 1000, 0, 500, 2e6, 2e9, 2e6, 1e6)  # per device: 1e6 bytes and 1e9 flops per second


ROOFLINE = Roofline(TARGET, DRAFT, "bfloat16", GRID)


def verify(B, S, K, devices=1, target=TARGET, formats=PLAIN):
    return count_verify_cost(PairCosts(target, DRAFT, "bfloat16", devices, formats), B, S, K, "greedy")


def call_costs(sampling, devices=1):
    """By program, of the last bucket."""
    roofline = Roofline(TARGET, DRAFT, "bfloat16", GRID, devices)
    signatures = Programs(TARGET, DRAFT, "bfloat16", sampling=sampling).list_signatures(GRID)
    return {one.program: roofline.cost(one) for one in signatures}


def test_verify_reads_weights_once_and_kv_per_row():
    B, S, T = 3, 32, 4
    elements = B * T * H + LAYERS * LAYER + B * T * LAYERS * KV + B * S * LAYERS * KV + V * H + B * T * 2 * H
    flops = 2 * B * T * (LAYERS * LAYER + V * H) + 4 * LAYERS * B * T * S * 16
    assert verify(B, S, T - 1) == RooflineCost(2 * elements, flops)


def test_draft_computes_its_whole_block_and_k_logits():
    B, S, K, block = 3, 32, 2, 4
    elements = B * block * H + LAYER + B * S * KV + V * H
    flops = 2 * B * block * LAYER + 4 * B * block * (S + block) * 16 + 2 * B * K * V * H
    assert count_draft_cost(PairCosts(TARGET, DRAFT, "bfloat16"), B, S, K) == RooflineCost(2 * elements, flops)


def test_prefill_has_logits_of_one_token():
    elements = 8 * H + LAYERS * LAYER + (8 + 32) * LAYERS * KV + V * H + 8 * 2 * H
    assert call_costs(["greedy"])["prefill"] == RooflineCost(
        2 * elements, 2 * (8 * LAYERS * LAYER + V * H) + 4 * LAYERS * 8 * 32 * 16
    )


def test_sampled_verify_reads_sampling_state_and_writes_counts():
    greedy, sampled, shared = call_costs(["greedy"]), call_costs(["sample"]), call_costs(["sample"], devices=2)
    before, row = greedy["verify"], V * (4 + 1 + 4)
    assert before == verify(3, 32, 3)
    assert sampled["sampled_verify"] == RooflineCost(before.bytes + 3 * V * (4 + 1 + 4 + 4), before.flops)
    assert sampled["admit"] == RooflineCost(row + row, 0)
    assert shared["admit"] == RooflineCost(row + row / 2, 0)  # every device reads all
    assert sampled["move"] == RooflineCost(2 * row, 0)
    assert greedy["move"] == RooflineCost(0, 0)


def test_two_devices_halve_all_work_except_reading_features():
    whole, half, features = verify(3, 32, 3), verify(3, 32, 3, devices=2), 2 * 3 * 4 * 2 * H
    summed = 3 * 4 * H * (2 + 2 * LAYERS * 4)  # the embedding in bfloat16, two outputs of each layer in float32
    assert half == RooflineCost((whole.bytes - features) / 2 + features, whole.flops / 2, summed)


def test_sums_over_the_chips_of_a_slice_are_part_of_its_bound():
    sixteen, four = (find_device_chip("TPU v5 lite"), 16), (find_device_chip("TPU v5 lite"), 4)
    target, draft = read_published("Qwen3-4B", "Qwen3-4B-DFlash-b16")
    cost = count_verify_cost(PairCosts(target, draft, "bfloat16", 16), 1, 1024, 7, "greedy")
    assert cost.summed == 8 * 2560 * (2 + 72 * 4)
    assert cost.exchange_seconds(*sixteen) == 30 * cost.summed / (48 * 50e9)
    alone = structs.replace(cost, summed=0.0).bound_seconds(*sixteen)
    assert cost.bound_seconds(*sixteen) == alone + cost.exchange_seconds(*sixteen) > 1.1 * alone
    assert cost.bound_seconds(*four) == alone + cost.exchange_seconds(*four)


def test_bound_is_the_longer_of_memory_and_arithmetic_time():
    assert RooflineCost(bytes=3e6, flops=1e9).bound_seconds(CHIP) == 3.0
    assert RooflineCost(bytes=1e6, flops=5e9).bound_seconds(CHIP) == 5.0


def test_round_without_speculation_writes_kv_for_later_drafts():
    bound = ROOFLINE.bound_round(Bucket(1, 32, 0), CHIP)
    assert bound.draft == 0 and bound.round == bound.verify + bound.kv_write
    assert bound.kv_write == count_kv_write_cost(PairCosts(TARGET, DRAFT, "bfloat16"), 1, 1).bound_seconds(CHIP) > 0
    plain = Roofline(TARGET, DRAFT, "bfloat16", structs.replace(GRID, k=(0,)))
    assert plain.bound_round(Bucket(1, 32, 0), CHIP).round == bound.verify
    bound = ROOFLINE.bound_round(Bucket(1, 32, 3), CHIP)
    assert bound.round == bound.draft + bound.verify + bound.kv_write > bound.verify


def test_expected_experts_are_shared_by_tokens():
    experts = MixtureOfExperts(count=4, chosen=2, width=16, normalized=True)
    # Half of the second token's experts are read already.
    assert [experts.expect_distinct(n) for n in (0, 1, 2)] == [0, 2, 3]
    routed = Target(structs.replace(DECODER, mlp=experts), tied=True)
    dense = verify(1, 32, 1)
    found = verify(1, 32, 1, target=routed)
    rows = 4 + 3 * 3 * 16 - 3 * 16  # a router and three experts instead of one MLP
    assert found.bytes - dense.bytes == 2 * LAYERS * H * rows
    assert found.flops - dense.flops == 2 * 2 * LAYERS * H * (4 + 2 * 3 * 16 - 3 * 16)
    saved = [
        plain.bytes - verify(1, 32, 1, target=target, formats=WeightFormats("int8")).bytes
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
        programs = Programs(target, draft, "bfloat16", TensorParallel(devices, TPU), formats=formats)
        grid = Grid((1,), (32,), (1,), (1,))
        sizes = {one.name: ArraySpec(one.name, one.shape, one.dtype, one.sharding) for one in programs.recipes()}
        looked_up = {name for name in sizes if name.endswith("_codebook")}
        looked_up |= {"target.model.embed_tokens.weight"} if "target.lm_head.weight" in sizes else set()
        model = PairCosts(target, draft, "bfloat16", devices, formats)
        costs = {
            "verify": count_verify_cost(model, 1, 0, 0, "greedy"),
            "draft": count_draft_cost(model, 1, 0, 1),
            "kv_write": count_kv_write_cost(model, 1, 1),
        }
        for signature in programs.list_signatures(grid):
            if signature.program in costs:
                taken = sum(sizes[one].shard_bytes(devices) for one in signature.weights if one not in looked_up)
                taken += model.recur(1, 0, passes=3).bytes if signature.program == "verify" else 0  # a hybrid's states
                assert costs[signature.program].bytes == pytest.approx(taken, rel=3e-3)  # and of scales
