"""Engines without preload: executables are loaded, called and timed on demand or while the engine is idle."""

import shutil
import threading
from pathlib import Path

import msgspec
import pytest

from dflash_aot.cache.bundle.blob import pack_blob
from dflash_aot.cache.bundle.manifest import encode_manifest, read_manifest, verify_and_rebuild_commands
from dflash_aot.cache.bundle.store import Store
from dflash_aot.cache.errors import BadCheckpoint, EngineFailed
from dflash_aot.runtime import Engine, SamplingParams
from dflash_aot.runtime.engine_parts import WarmUp, load_engine_parts
from tests.runtime.stepper import wait_until


def limit_tokens(tokens: int, **facts: object) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, stop_token_ids=(), **facts)


def count_loader_threads() -> int:
    return sum(thread.name == "dflash-loader" for thread in threading.enumerate())


def test_engine_serves_at_once_and_warms_up_while_idle(bundle, cases):
    with Engine.open(bundle("tiny")) as engine:
        assert [*engine.startup] == ["bundle", "weights"]
        answer = engine.generate(cases["len5"].prompt, limit_tokens(20))
        assert answer.token_ids == cases["len5"].answer[:20]
        wait_until(lambda: engine.stats().loaded == engine.executables)
        wait_until(lambda: all(one.called for one in engine._bundle.executables.list_loaded()))
        wait_until(lambda: not engine._warm_up._untimed)
        assert engine.generate(cases["len5"].prompt, limit_tokens(20)).token_ids == cases["len5"].answer[:20]
        assert (engine.stats().failures, engine.stats().compile_events) == (0, 0)
    assert count_loader_threads() == 0


def test_preload_loads_and_calls_everything_before_open_returns(bundle):
    with Engine.open(bundle("tiny"), preload=True) as engine:
        assert [*engine.startup] == ["bundle", "weights", "first_calls", "timing"]
        assert engine.stats().loaded == engine.stats().executables == engine.executables
        assert all(one.called for one in engine._bundle.executables.list_loaded())
        assert not engine._warm_up._untimed


def test_closed_or_failed_engine_leaves_no_loader_thread(bundle, tied, tmp_path):
    Engine.open(bundle("tiny")).close()
    places = {"target": shutil.copytree(tied.target, tmp_path / "target")}
    weights = next(places["target"].glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(BadCheckpoint):
        Engine.open(bundle("tiny"), **places)
    shutil.copyfile(next(tied.target.glob("*.safetensors")), weights)
    (places["target"] / "generation_config.json").write_text("[]")  # read last
    with pytest.raises(BadCheckpoint, match="generation_config"):
        Engine.open(bundle("tiny"), **places)
    assert count_loader_threads() == 0


@pytest.fixture
def half_executable(bundle, tmp_path) -> Path:
    """A bundle in which the greedy verify executable of K = 3 is cut in half, and all hashes are correct."""
    path = Path(shutil.copytree(bundle("tiny"), tmp_path / "bundle"))
    manifest = read_manifest(path)
    entries = list(manifest.entries)
    at = next(
        at
        for at, entry in enumerate(entries)
        if entry.signature.program == "verify" and entry.signature.bucket["k"] == 3
    )
    whole = Store(path).read_executable(entries[at])
    blob, packed = pack_blob(whole[: len(whole) // 2])
    (path / "executables" / blob.sha256).write_bytes(packed)
    entries[at] = msgspec.structs.replace(entries[at], **msgspec.structs.asdict(blob))
    (path / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, entries=tuple(entries))))
    return path


def test_corrupt_executable_fails_only_the_requests_that_need_it(half_executable, cases):
    case = cases["len5"]
    with Engine.open(half_executable) as engine:
        for _ in range(4):  # more than an engine survives of failed rounds in a row
            with pytest.raises(EngineFailed) as error:
                engine.generate(case.prompt, limit_tokens(20, k=3))
            assert "verify" in str(error.value)
            assert f"Rebuild it: {verify_and_rebuild_commands(half_executable)}" in str(error.value)
        assert engine.generate(case.prompt, limit_tokens(20, k=0)).token_ids == case.answer[:20]
        assert engine.failure is None and engine.stats().failures == 4
        wait_until(lambda: engine.stats().loaded == engine.executables - 1)
        by_other_ks = engine.generate(case.prompt, limit_tokens(20))
        assert by_other_ks.token_ids == case.answer[:20]
        assert engine.stats().compile_events == 0


def test_rounds_are_timed_once_the_loader_has_ended(bundle):
    """While it loads, the other core is busy, and the first shapes that can run would seem the slowest."""
    parts = load_engine_parts(bundle("tiny"), None, None, k="auto", preload=False)
    executables = parts.bundle.executables
    try:
        wait_until(lambda: executables.has_ended)
        warm_up = WarmUp(parts.bundle, parts.state, parts.controller, parts.state.reset)
        executables.has_ended = False
        while warm_up.step():
            pass
        assert all(one.called for one in executables.list_loaded())
        assert warm_up._untimed and not any(map(parts.controller.costs.is_measured, warm_up._untimed))
        executables.has_ended = True
        while warm_up.step():
            pass
        assert not warm_up._untimed
    finally:
        executables.close()


def test_failed_warm_up_call_is_logged_and_state_reset(bundle, caplog):
    parts = load_engine_parts(bundle("tiny"), None, None, k=0, preload=False)
    executables = parts.bundle.executables
    try:
        loaded = [executables[name] for name in executables.order]
        parts.state._arrays["target_k"].delete()  # as a failed call would leave the state
        resets: list[None] = []

        def reset() -> None:
            resets.append(parts.state.reset())

        warm_up = WarmUp(parts.bundle, parts.state, parts.controller, reset)
        steps = 0
        while warm_up.step():
            steps += 1
    finally:
        executables.close()
    (left,) = [one for one in loaded if not one.called]  # the first executable that read the deleted array
    assert "target_k" in left.signature.state and steps == len(loaded)
    assert ["deleted" in record.message for record in caplog.records if record.levelname == "ERROR"] == [True]
    assert not parts.state._arrays["target_k"].is_deleted() and len(resets) == 1
