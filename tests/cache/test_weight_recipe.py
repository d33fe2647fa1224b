"""Weight recipes: tensors fill every element of their argument exactly once."""

import pytest

from dflash_aot.cache.bundle.weight_recipe import MAX_COMPARED, Placement, WeightRecipe, find_recipe_flaw


def recipe(shape, *places) -> WeightRecipe:
    """A recipe with a tensor for each (offset, extent), named t0, t1, …"""
    placements = tuple(
        Placement(f"t{number}", stored=extent, offset=offset, extent=extent)
        for number, (offset, extent) in enumerate(places)
    )
    return WeightRecipe("w", "target", shape, "float32", placements)


PINWHEEL = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]


@pytest.mark.parametrize(
    ("shape", "places"),
    [
        ((4, 2), [((row, 0), (1, 2)) for row in range(4)]),
        ((2, 2, 3), [((a, b, 0), (1, 1, 3)) for a in range(2) for b in range(2)]),
        ((3, 3), PINWHEEL),  # no axis splits it
    ],
)
def test_tensors_that_fill_each_element_once_are_valid(shape, places):
    assert find_recipe_flaw(recipe(shape, *places)) is None


@pytest.mark.parametrize(
    ("shape", "places", "flaw"),
    [
        ((4, 2), [((row, 0), (1, 2)) for row in range(3)], "fill 6 of 8 elements"),
        ((4, 2), [((row, 0), (1, 2)) for row in (0, 1, 1, 3)], "t1 and t2 fill the same elements"),
        ((3, 3), [*PINWHEEL[:4], ((0, 0), (1, 1))], "t0 and t4 fill the same elements"),
        ((2, 2), [((0, 0), (2, 1)), ((0, 0), (1, 2))], "t0 and t1 fill the same elements"),
        ((4, 2), [((row, 0), (1, 2)) for row in (0, 1, 2, 4)], "t3 is outside"),
    ],
)
def test_gaps_and_overlaps_are_found_although_the_count_is_right(shape, places, flaw):
    assert flaw in find_recipe_flaw(recipe(shape, *places))


def test_thousands_of_stacked_experts_are_checked_at_once_and_many_tangled_tensors_refused():
    layers, experts = 48, 128
    stacked = [((layer, expert, 0), (1, 1, 2)) for layer in range(layers) for expert in range(experts)]
    assert find_recipe_flaw(recipe((layers, experts, 2), *stacked)) is None
    tangled = [((0, 0), (1, 1))] * (MAX_COMPARED + 1)
    assert "are not split along any axis" in find_recipe_flaw(recipe((1, MAX_COMPARED + 1), *tangled))
