"""Round times measured when a bundle is opened."""

import numpy as np

from dflash_aot.cache.grid import Bucket
from dflash_aot.runtime.engine_parts import load_engine_parts
from dflash_aot.runtime.speculation.round_timing import bound_times, time_rounds


def test_smaller_shape_takes_no_longer():
    one, more_k, more_rows = Bucket(1, 64, 0), Bucket(1, 64, 7), Bucket(4, 64, 0)
    measured = {(one, False): 5.0, (more_k, False): 3.0, (more_rows, False): 2.0, (one, True): 9.0}
    assert bound_times(measured) == {
        (one, False): 2.0,
        (more_k, False): 3.0,  # more rows are not more tokens
        (more_rows, False): 2.0,
        (one, True): 9.0,  # sampling is more, not less
    }


def test_timing_covers_every_shape_and_leaves_the_state_clean(bundle):
    """As after `Engine.open`: all lengths are zero, though the timed rounds ran at full lengths."""
    opened = load_engine_parts(bundle("tiny"), None, None, "auto")
    times = time_rounds(opened.bundle, opened.state)
    assert set(times) == {(bucket, False) for bucket in opened.bundle.manifest.grid.buckets()}
    assert all(0 < seconds < 60 for seconds in times.values())
    assert times == bound_times(times)
    for array in opened.state.read(("lengths", "anchors")):
        assert not np.asarray(array).any()
