"""What the processes of all ways answer is what the reference says; here without the processes."""

import jax
import jax.numpy as jnp
import pytest

from dflash_aot.benchmarks import peer_engine, peer_jit, peer_parts, peer_torch
from dflash_aot.benchmarks.orders import EngineOrder, JitOrder, PartsOrder, TorchOrder
from dflash_aot.benchmarks.traffic import Arrive, Dissect, Parts, Serve
from dflash_aot.cache.bundle.manifest import read_manifest
from dflash_aot.runtime.executables.executable import DeviceState
from dflash_aot.runtime.executables.lazy_loader import LazyLoader
from dflash_aot.runtime.executables.loaded_bundle import LoadedBundle, bundle_devices

TOKENS = 16
NAMES = ("len5", "len_eq_block")


@pytest.fixture(scope="module")
def places(bundle, tied) -> tuple[str, str, str]:
    return str(bundle("tiny")), str(tied.target), str(tied.draft)


@pytest.fixture(scope="module")
def cases(tied) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what the reference says behind each."""
    chosen = [one for one in tied.facts["prompts"] if one["name"] in NAMES]
    return [(one["prompt_ids"], one["ar_output_ids"][len(one["prompt_ids"]) :][:TOKENS]) for one in chosen]


@pytest.fixture
def question(cases) -> Serve:
    return Serve([[prompt for prompt, _ in cases]], TOKENS)


def check(served, cases) -> None:
    (answers,) = served.answers
    assert [answer.token_ids for answer in answers] == [expected for _, expected in cases]
    for answer in answers:
        assert answer.arrivals[0] > 0 and answer.arrivals == sorted(answer.arrivals)
        assert len(answer.arrivals) == TOKENS and answer.seconds <= served.seconds


@pytest.mark.parametrize("k", [0, 3, "auto"])
def test_the_engine_as_a_peer(places, question, cases, k):
    with peer_engine.open_way(EngineOrder(*places, k)) as handlers:
        check(handlers[Serve](question), cases)
        arrived = handlers[Arrive](Arrive([prompt for prompt, _ in cases], [0.0, 0.0], TOKENS))
        assert [answer.token_ids for answer in arrived.answers] == [expected for _, expected in cases]


def test_the_plain_loop_as_a_peer(places, question, cases):
    with peer_jit.open_way(JitOrder(*places, 3, longest=8)) as handlers:
        served = handlers[Serve](question)
    check(served, cases)
    assert served.work.rounds_by_k == {3: served.work.rounds}


@pytest.mark.parametrize("guesses", [{}, {"lookup_tokens": 4}, {"exit_layer": 2}], ids=str)
def test_pytorch_as_a_peer(places, question, cases, guesses):
    with peer_torch.open_way(TorchOrder(places[1], "float32", **guesses)) as handlers:
        served = handlers[Serve](question)
    check(served, cases)
    distinct = sum(len(set(answer.arrivals)) - 1 for answer in served.answers[0])
    assert served.work.rounds == distinct <= len(cases) * (TOKENS - 1)
    assert guesses or distinct == len(cases) * (TOKENS - 1)


def test_pytorch_in_bfloat16_says_as_much(places, question):
    with peer_torch.open_way(TorchOrder(places[1], "bfloat16")) as handlers:
        assert [len(answer.token_ids) for answer in handlers[Serve](question).answers[0]] == [TOKENS, TOKENS]


@pytest.mark.parametrize(("k", "steps"), [(0, {"verify"}), (3, {"draft", "verify", "kv_write"})])
def test_the_programs_one_by_one(places, cases, k, steps):
    prompt, expected = cases[0]
    with peer_parts.open_way(PartsOrder(*places)) as handlers:
        parts = handlers[Dissect](Dissect(prompt, TOKENS, k))
    assert parts.answer.token_ids == expected
    assert set(parts.seconds) == {"prefill", "read", *steps}
    assert {len(parts.seconds[step]) for step in {"read", *steps}} == {len(parts.answer.accepted)}
    assert all(seconds > 0 for times in parts.seconds.values() for seconds in times)


@pytest.fixture
def manifest(bundle):
    return read_manifest(bundle("tiny"))


@pytest.fixture
def state(manifest) -> DeviceState:
    return DeviceState(manifest.state, bundle_devices(manifest))


def test_a_bundle_without_such_programs_has_no_parts(bundle, manifest, state):
    empty = LoadedBundle(bundle("tiny"), manifest, 3, LazyLoader(lambda name: None, []))
    assert peer_parts.dissect(peer_parts.Loaded(empty, state), Dissect([1], TOKENS, 3)) == Parts(None, {})


def test_a_step_ends_when_its_results_are_there(state):
    """A product that takes a while, of which the state knows nothing."""
    times = peer_parts.StepTimes(state)
    large = jnp.ones((1500, 1500))
    slow = jax.jit(lambda x: x @ x @ x @ x @ x)
    slow(large).block_until_ready()
    results = [slow(large)]
    times.note("product", results)
    assert all(one.is_ready() for one in results)
    assert list(times.seconds) == ["product"]
