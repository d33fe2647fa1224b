"""Round times measured when a bundle is opened."""

import numpy as np
import pytest
from msgspec import structs

from dflash_aot.cache.bundle.manifest import ScheduleEstimate, read_manifest
from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.engine_parts import load_engine_parts
from dflash_aot.runtime.speculation.round_timing import RoundTimer, bound_times, estimate_rounds


def test_smaller_shape_takes_no_longer():
    one, more_k, more_rows = Bucket(1, 64, 0), Bucket(1, 64, 7), Bucket(4, 64, 0)
    measured = {(one, "greedy"): 5.0, (more_k, "greedy"): 3.0, (more_rows, "greedy"): 2.0, (one, "sample"): 9.0}
    assert bound_times(measured) == {
        (one, "greedy"): 2.0,
        (more_k, "greedy"): 3.0,  # more rows are not more tokens
        (more_rows, "greedy"): 2.0,
        (one, "sample"): 9.0,  # sampling is more, not less
    }


def test_estimates_are_the_compilers_where_each_executable_has_one(bundle):
    """The first executable has 1 s, the second one 2 s, and so on. K = 0 puts the draft's kv off."""
    manifest = read_manifest(bundle("tiny"))
    entries = [
        structs.replace(entry, cost=structs.replace(entry.cost, schedule=ScheduleEstimate(number, 0, 0, 0, (), (), ())))
        for number, entry in enumerate(manifest.entries, 1)
    ]
    seconds = {one.signature.label: one.cost.schedule.seconds for one in entries}
    batch, length = manifest.grid.batch[0], manifest.grid.length[0]
    shape = (Bucket(batch, length, 0), "greedy")
    verify = f"verify batch={batch} length={length} k=0"
    estimated = structs.replace(manifest, entries=tuple(entries))
    assert estimate_rounds(estimated, manifest.grid.k[-1])[shape] == seconds[verify]
    assert estimate_rounds(estimated, 0)[shape] == seconds[verify]
    partly = structs.replace(manifest, entries=(*entries[:-1], manifest.entries[-1]))
    assert estimate_rounds(partly, 0) == estimate_rounds(manifest, 0)  # from bytes and operations, as on other devices


def test_estimates_count_every_chosen_expert(bundle):
    """The compiler counts one expert of a layer. One token chooses 3 of 8 experts, eight tokens 7.81 on average."""
    manifest = read_manifest(bundle("gpt_oss"))
    facts = manifest.target.facts
    single = structs.replace(facts.decoder, mlp=structs.replace(facts.decoder.mlp, count=1, chosen=1))
    target = structs.replace(manifest.target, facts=structs.replace(facts, decoder=single))
    counted, found = estimate_rounds(structs.replace(manifest, target=target), 7), estimate_rounds(manifest, 7)
    left_out = [found[shape] - counted[shape] for shape in sorted(found)]  # at K = 0 and 7
    np.testing.assert_allclose(left_out[1] / left_out[0], 6.8137 / 2 * (4 + 2 * 8 / 8) / (4 + 2 / 8), rtol=1e-4)


@pytest.mark.parametrize(("pair", "bucket"), [("tied", Bucket(3, 208, 7)), ("hybrid", Bucket(1, 288, 7))])
def test_timed_rounds_write_kv_to_page_zero_only(bundle, pair, bucket):
    opened = load_engine_parts(bundle(pair), None, None, "auto", preload=False)
    pools = ("target_k", "target_v", "draft_k", "draft_v")
    try:
        before = [np.ones_like(array) for array in opened.state.read(pools)]
        opened.state.replace(pools, [*map(opened.state.to_device, before)])
        RoundTimer(opened.bundle, opened.state).time(bucket, "greedy")
        for name, array in zip(pools, map(np.asarray, opened.state.read(pools)), strict=True):
            assert (array[:, 1:] == 1).all(), name
            assert (array[:, 0] != 1).any(), name  # something was written
    finally:
        opened.bundle.executables.close()
