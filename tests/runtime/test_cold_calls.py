"""First calls of executables, which block, on a toy device: which requests wait for them."""

from tests.runtime.toy import SAMPLED, ToyEngine, programs

GRID = "batch=1,2 length=16,64 k=0,3 prefill=4,16"


def test_pending_tokens_precede_a_first_call():
    engine = ToyEngine(GRID, k=3, cold=True)
    request = engine.submit([1], 30)
    assert programs(engine.step()) == ["prefill", "kv_write", "read prefill", "draft", "verify", "kv_write"]
    assert len(engine.deltas[request]) == 1
    assert programs(engine.step())[-1] == "read verify"  # results come one round later
    engine.submit([2] * 9, 30)  # a prefill chunk of another width
    assert programs(engine.step())[:3] == ["read verify", "prefill", "kv_write"]
    engine.run()


def test_first_calls_change_no_tokens():
    for buckets in (GRID, f"{GRID} rounds=4"):
        engine = ToyEngine(buckets, k=3, cold=True)
        for number in range(12):
            engine.submit([number] * (1 + number), 3 * number + 1, **(SAMPLED if number % 3 == 0 else {}))
            engine.step()
        engine.run()
