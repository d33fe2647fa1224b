"""What an engine leaves behind."""

import gc
import weakref

from dflash_aot.runtime import Engine, SamplingParams


def test_a_closed_engine_takes_its_executables_with_it(bundle):
    """A process that opens one after the other must not hold them all: each maps its code, and the weights."""
    engine = Engine.open(bundle("tiny"))
    engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
    engine.close()
    served = weakref.ref(engine._bundle)
    del engine
    gc.collect()
    assert served() is None
