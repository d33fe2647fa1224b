"""Weight recipes: tensors fill every element of their argument exactly once."""

from msgspec import structs

from dflash_aot.cache.weight_recipe import (
    MAX_COMPARED,
    Placement,
    WeightRecipe,
    find_pairing_flaw,
    find_recipe_flaw,
    make_scale_recipe,
)


def recipe(shape, *places) -> WeightRecipe:
    placements = tuple(
        Placement(f"t{number}", stored=extent, offset=offset, extent=extent)
        for number, (offset, extent) in enumerate(places)
    )
    return WeightRecipe("w", "target", shape, "float32", placements)


PINWHEEL = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]


def test_tensors_that_fill_each_element_once_are_valid():
    for shape, places in [
        ((4, 2), [((row, 0), (1, 2)) for row in range(4)]),
        ((2, 2, 3), [((a, b, 0), (1, 1, 3)) for a in range(2) for b in range(2)]),
        ((3, 3), PINWHEEL),  # no axis splits it
    ]:
        assert find_recipe_flaw(recipe(shape, *places)) is None


def test_gaps_and_overlaps_are_found():
    for shape, places, flaw in [
        ((4, 2), [((row, 0), (1, 2)) for row in range(3)], "fill 6 of 8 elements"),
        ((4, 2), [((row, 0), (1, 2)) for row in (0, 1, 1, 3)], "t1 and t2 fill the same elements"),
        ((3, 3), [*PINWHEEL[:4], ((0, 0), (1, 1))], "t0 and t4 fill the same elements"),
        ((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2))], "t0 and t1 fill the same elements"),
        ((4, 2), [((row, 0), (1, 2)) for row in (0, 1, 2, 4)], "t3 is outside"),
    ]:
        assert flaw in find_recipe_flaw(recipe(shape, *places))


def test_many_stacked_tensors_are_valid_and_tangled_ones_refused():
    layers, experts = 48, 128
    stacked = [((layer, expert, 0), (1, 1, 2)) for layer in range(layers) for expert in range(experts)]
    assert find_recipe_flaw(recipe((layers, experts, 2), *stacked)) is None
    tangled = [((0, 0), (1, 1))] * (MAX_COMPARED + 1)
    assert "are not split along any axis" in find_recipe_flaw(recipe((1, MAX_COMPARED + 1), *tangled))


def sections(*ranges) -> WeightRecipe:
    offsets = [sum(stop - start for start, stop in ranges[:at]) for at in range(len(ranges))]
    places = (
        Placement("t", (4, 2), (offset, 0), (stop - start, 2), rows=(start, stop))
        for offset, (start, stop) in zip(offsets, ranges, strict=True)
    )
    return WeightRecipe("w", "target", (sum(stop - start for start, stop in ranges), 2), "float32", tuple(places))


def test_sections_must_hold_each_row_equally_often():
    for ranges in [[(0, 1), (1, 4)], [(2, 4), (0, 2)], [(0, 4)], [(0, 2), (0, 2), (2, 4), (2, 4)]]:
        assert find_recipe_flaw(sections(*ranges)) is None
    for ranges in [[(0, 2)], [(0, 2), (1, 4)], [(0, 2), (3, 4)], [(0, 5)], [(-1, 3), (3, 4)], [(0, 2), (0, 2), (2, 4)]]:
        assert "do not hold each of 4 rows equally often" in find_recipe_flaw(sections(*ranges))


VALUES = WeightRecipe(
    "w",
    "target",
    (2, 2, 3, 5),
    "int8",
    tuple(Placement(f"t{part}", (6, 5), (0, part, 0, 0), (2, 1, 3, 5)) for part in (0, 1)),
    (None, None, None, "model"),
    encoding="int8_values",
)
SCALES = make_scale_recipe(VALUES)


def test_scales_have_a_number_for_each_row():
    assert (SCALES.name, SCALES.shape, SCALES.dtype, SCALES.sharding) == ("w_scale", (2, 2, 3), "float32", ())
    assert [find_recipe_flaw(one) for one in (VALUES, SCALES)] == [None, None]
    assert find_pairing_flaw([SCALES, VALUES]) is None


def test_quantized_weight_without_its_scales_is_invalid():
    for recipes, flaw in [
        ([VALUES], "w is int8 without scales that fit"),
        ([SCALES], "w_scale has scales of no weight"),
        ([VALUES, structs.replace(SCALES, checkpoint="draft")], "w is int8 without scales that fit"),
        ([VALUES, structs.replace(SCALES, placements=SCALES.placements[::-1])], "w is int8 without scales that fit"),
        ([structs.replace(VALUES, dtype="float32"), SCALES], "w is int8 without scales that fit"),
        ([structs.replace(SCALES, name="w")], "w has scales of no weight"),
    ]:
        assert find_pairing_flaw(recipes) == flaw
